"""Pages of documentation as programs: their blocks in order, run against a real server as a reader would.

A fence names its language. `sh` and `console` and `python` are run; a `console` block also shows its output, with `…` for
anything, and a line of only `…` for any lines. The server that a page talks to runs until a comment says `docs: stop the server`.
A block that no test can run says so behind its language: "```sh skip: why". Other languages are data, and must be well formed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from tests.harness.server_process import PROGRAM, ROOT, Server, environment, running
from turtlemq.cli.verbs import command_line

URL = "http://127.0.0.1:8878"
RUN = ("sh", "console", "python")
DATA = ("json", "toml", "yaml", "ini", "dockerfile", "mermaid", "text", "promql", "ndjson")
STOP = "<!-- docs: stop the server -->"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_SIMPLE = re.compile(r"turtlemq [^<>|$&;`*]*")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its first line in the page, its language, why it is not run ("" if it is), its text."""

    line: int
    language: str
    skip: str
    text: str


def pages() -> list[Path]:
    """README and everything in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """All blocks of a page."""
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        skip = rest.strip().removeprefix("skip:").strip() if rest.strip().startswith("skip:") else ""
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append(Block(text.count("\n", 0, match.start()) + 1, language, skip, body))
    return found


def malformed(block: Block) -> str | None:
    """The errors of a block that holds data."""
    try:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
    except ValueError as error:
        return str(error)
    return None


def commands(block: Block) -> Iterator[tuple[str, list[str] | None]]:
    """The command to run, and the expected lines of output, where they are shown."""
    text = block.text.replace("\\\n", " ")
    if block.language == "sh" and ("<<" in text or re.search(r"^(for|while|if|trap) ", text, re.MULTILINE)):
        yield text, None
    elif block.language == "sh":
        yield from ((line, None) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    else:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, shown


def matches(shown: list[str], printed: str) -> bool:
    """Does the printed text match this?

    >>> matches(["a … c", "…", "z"], "a b c\\nwhatever\\nmore\\nz\\n"), matches(["a"], "b\\n"), matches([], "")
    (True, False, True)
    """
    pattern = ""
    for line in shown:
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += ".*".join(re.escape(piece) for piece in line.rstrip().split("…")) + r"[^\S\n]*\n"
    return re.fullmatch(pattern, printed if printed.endswith("\n") or not printed else f"{printed}\n") is not None


class Reader:
    """A shell session that runs the commands of a page, in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self.folder, self._tools = place / "here", place / "tools"
        self.folder.mkdir()
        self._tools.mkdir()
        scripts = {
            "turtlemq": f'exec {PROGRAM[0]} {PROGRAM[1]} "{PROGRAM[2]}" "$@"',
            "curl": f'exec {shutil.which("curl")} --silent --show-error --fail-with-body "$@"',
            "python": f'exec {sys.executable} "$@"',
        }
        for name, line in scripts.items():
            (self._tools / name).write_text(f"#!/bin/sh\n{line}\n")
            (self._tools / name).chmod(0o755)

    def read(self, page: Path) -> int:
        """Run a whole page. Returns how many commands there were."""
        text = page.read_text("utf-8")
        online, _, offline = text.partition(STOP)
        found = [block for block in blocks(online) if block.language in RUN and not block.skip]
        count = 0
        if found:
            with running(self.folder / "data") as server:
                count += self._run(page, found, server)
        later = [block for block in blocks(offline) if block.language in RUN and not block.skip]
        return count + self._run(page, later, None)

    def _run(self, page: Path, found: list[Block], server: Server | None) -> int:
        count, url = 0, server.url if server is not None else "http://127.0.0.1:9"
        for block in found:
            where = f"{page.name}:{block.line}"
            if block.language == "python":
                self._python(block.text.replace(URL, url), url, where)
                count += 1
                continue
            for command, shown in commands(block):
                printed = self._shell(command.replace(URL, url), url, where)
                assert shown is None or matches(shown, printed), (where, command, "\n".join(shown), printed)
                count += 1
        return count

    def _python(self, program: str, url: str, where: str) -> None:
        env = environment(TURTLEMQ_URL=url)
        done = subprocess.run(
            [sys.executable, "-"], input=program, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (where, done.stdout, done.stderr)

    def _shell(self, command: str, url: str, where: str) -> str:
        """Run it as the page says it. Returns its output."""
        if _SIMPLE.fullmatch(command):  # as a process of its own it would take much longer
            with contextlib.chdir(self.folder):
                found = CliRunner().invoke(command_line(), shlex.split(command)[1:], env={"TURTLEMQ_URL": url, "COLUMNS": "200"})
            assert found.exit_code == 0, (where, command, found.output, found.exception)
            return found.stdout
        env = environment(TURTLEMQ_URL=url)
        env["PATH"] = f"{self._tools}:{env['PATH']}"
        done = subprocess.run(["sh", "-e", "-c", command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (where, command, done.returncode, done.stdout, done.stderr)
        return done.stdout
