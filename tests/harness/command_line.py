"""The command line in tests: in this process, and as a program on a terminal of a given width."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
from typing import Any

from typer.testing import CliRunner

from tests.harness.server_process import PROGRAM, environment
from turtlemq.cli.verbs import command_line


class Line:
    """The command line in this process, which is quicker than a new one."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, *args: str, code: int = 0, given: str | None = None) -> str:
        found = CliRunner().invoke(
            command_line(*args[:1]), list(args), input=given, env={"TURTLEMQ_URL": self._url, "COLUMNS": "200"}
        )
        assert found.exit_code == code, (args, found.exit_code, found.output, found.exception)
        return found.output

    def json(self, *args: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*args, "--json", code=code).splitlines()]


def on_a_terminal(*args: str, columns: int = 200, **env: str) -> str:
    """Output for humans."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = environment(TERM="xterm-256color", **{"COLUMNS": str(columns), **env})
    with subprocess.Popen([*PROGRAM, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # the other end is closed
            pass
        process.wait()
    os.close(ours)
    return seen.decode()
