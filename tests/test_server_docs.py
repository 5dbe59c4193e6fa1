"""Every command of README.md, docs/HTTP.md and docs/CLI.md runs, in order, against a fresh server; the Python does as well."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.serving import PROGRAM, ROOT, environment, running
from turtlemq.cli.verbs import app

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_HERE = ("make ", "turtlemq serve ")  # the one is about this repository, the other is what runs already


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(text) if found == language]


def commands(text: str) -> list[str]:
    """Lines of all shell blocks."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if not line.startswith(_NOT_HERE)]


def tools(folder: Path) -> Path:
    """A folder with our `turtlemq`, and a `curl` that fails where the server refuses."""
    folder.mkdir()
    curl = shutil.which("curl")
    scripts = {
        "turtlemq": f'exec {PROGRAM[0]} {PROGRAM[1]} "{PROGRAM[2]}" "$@"',
        "curl": f'exec {curl} --silent --show-error --fail-with-body "$@"',
    }
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def shell(line: str, folder: Path, url: str) -> str:
    """Run one line as the docs say it, only the port is another. Returns what it printed."""
    line = line.replace("http://127.0.0.1:8878", url)
    if line.startswith("turtlemq ") and not set("<>|$") & set(line):  # as a process of its own it would take much longer
        with contextlib.chdir(folder):
            found = CliRunner().invoke(app, shlex.split(line)[1:], env={"TURTLEMQ_URL": url, "COLUMNS": "200"})
        assert found.exit_code == 0, (line, found.output, found.exception)
        return found.stdout
    env = environment(TURTLEMQ_URL=url)
    env["PATH"] = f"{folder.parent / 'tools'}:{env['PATH']}"
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, (line, done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here; to run this: apt-get install curl")
    tools(tmp_path / "tools")
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def served(place: Path, lines: list[str]) -> dict[str, str]:
    """What each line printed."""
    with running(place / "data") as server:
        return {line: shell(line, place, server.url) for line in lines}


@pytest.mark.slow
def test_the_readme_runs(place: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    lines = commands(text)
    assert len(lines) >= 8
    out = served(place, lines)
    assert '"close": 17' in next(printed for line, printed in out.items() if "/fetch" in line)
    assert "order-18" in out["turtlemq fetch orders --wait 10"]


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = blocks((ROOT / "README.md").read_text("utf-8"), "python")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_http_md_runs(place: Path) -> None:
    lines = commands((ROOT / "docs/HTTP.md").read_text("utf-8"))
    assert len(lines) > 30
    out = served(place, lines)
    assert '"requeued":1' in next(printed for line, printed in out.items() if "/dead/requeue" in line)
    assert '"success":true' in next(printed for line, printed in out.items() if "finish" in line)


@pytest.mark.slow
def test_cli_md_runs(place: Path) -> None:
    online, _, rest = (ROOT / "docs/CLI.md").read_text("utf-8").partition("## On files")
    lines = commands(online)
    assert len(lines) > 10
    out = served(place, lines)
    assert out["turtlemq cancel orders a"] == "1 cancelled\n"
    for line in commands(rest):
        shell(line, place, "http://127.0.0.1:9")


def test_http_md_names_every_route() -> None:
    from turtlemq.server.app import routes

    text = (ROOT / "docs/HTTP.md").read_text("utf-8")
    for route in routes():
        last = route.path.replace("/v1/topics/{topic}", "…").replace("…/groups/{group}", "…").replace("/{id}", "")
        assert last.removeprefix("…") in text, route.path


def test_the_configuration_in_cli_md_is_the_default(tmp_path: Path) -> None:
    from turtlemq.model import Settings
    from turtlemq.server.config import Config, load

    (text,) = blocks((ROOT / "docs/CLI.md").read_text("utf-8"), "toml")
    (tmp_path / "t.toml").write_text(text)
    found, plain = load({}, {}, tmp_path / "t.toml"), Config()
    assert found.topic_defaults() == plain.topic_defaults() == Settings()
    names = set(Config.__struct_fields__) - {"defaults", "max_delivery_retries", "retry_delay_ms"}
    assert {name: getattr(found, name) for name in names} == {name: getattr(plain, name) for name in names}
