"""Measuring processes: each measurement runs in a fresh process with its own memory and caches, ended by SIGKILL.

`call(function, ...)` starts `python -m benchmarks.child module:function` with the arguments as JSON and returns its result, as
JSON too. So all data on disk that a benchmark opens was left by a killed process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Progress = Callable[[float], None]


class ChildFailed(Exception):
    """A measuring process ended without a result. Its output stands above."""


def call(function: Callable[..., Any], *, progress: Progress | None = None, **arguments: Any) -> Any:
    """Run a module-level function in its own process; `progress` is called with shares from 0 to 1."""
    target = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "benchmarks.child", target, json.dumps(arguments)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            if "result" in message:
                return message["result"]
            if progress is not None:
                progress(message["progress"])
        raise ChildFailed(f"{target} ended with status {child.wait()}")
    finally:
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and its own children: seals run in a worker process."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def environment() -> dict[str, str]:
    """The environment of a server under test: ours, without settings of TurtleMQ, and with cached bytecode."""
    unwanted = ("TURTLEMQ_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


_reported_at = 0.0


def report_progress(share: float) -> None:
    """Send the finished share of the work to the parent process, at most five times a second."""
    global _reported_at
    now = time.monotonic()
    if now - _reported_at > 0.2:
        _reported_at = now
        print(json.dumps({"progress": share}), flush=True)


def main(target: str, arguments: str) -> None:
    """Run one function, print its result and wait for the SIGKILL, with all files still open."""
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(json.dumps({"result": result}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # not main() of this module: benchmarks import `benchmarks.child`, and its `report_progress` has the state
    importlib.import_module("benchmarks.child").main(*sys.argv[1:])
