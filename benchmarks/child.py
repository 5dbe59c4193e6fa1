"""Processes in which things are measured: fresh, so that memory and caches are their own, and always ended with SIGKILL.

`call(function, ...)` starts `python -m benchmarks.child module:function` with the arguments as JSON, and returns what the
function returns, as JSON again. So every state on disk that a benchmark meets was left by a process that really was killed.
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
    """A measuring process ended without a result. What it printed stands above."""


def call(function: Callable[..., Any], *, progress: Progress | None = None, **arguments: Any) -> Any:
    """Run a function of a module in a process of its own; `progress` hears shares from 0 to 1."""
    target = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "benchmarks.child", target, json.dumps(arguments)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            said = json.loads(line)
            if "result" in said:
                return said["result"]
            if progress is not None:
                progress(said["progress"])
        raise ChildFailed(f"{target} ended with status {child.wait()}")
    finally:
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    """The child and what it has started: seals run in a process of theirs."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def environment() -> dict[str, str]:
    """Ours for a server under test, but for what would change TurtleMQ; and an installed program has its bytecode."""
    unwanted = ("TURTLEMQ_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


_said_at = 0.0


def say(share: float) -> None:
    """Tell the parent how far the work is, a few times a second."""
    global _said_at
    now = time.monotonic()
    if now - _said_at > 0.2:
        _said_at = now
        print(json.dumps({"progress": share}), flush=True)


def main(target: str, arguments: str) -> None:
    """Run one function, tell its result and wait for the end, with everything still open."""
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(json.dumps({"result": result}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # `say` must be that of the module which the benchmarks import, not of this copy called __main__.
    importlib.import_module("benchmarks.child").main(*sys.argv[1:])
