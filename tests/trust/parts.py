"""All parts, in the order in which they run, and running some cases of one: `python -m tests.trust.parts PART FIRST LAST`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.server_process import ROOT, environment
from tests.trust.model import Broken, Figures, Part

_MODULES = (
    "simulation",
    "failover",
    "membership",
    "cluster",
    "machines",
    "standing",
    "moments",
    "powercuts",
    "kills",
    "damage",
    "refusals",
    "clocks",
    "load",
    "hostile",
    "interface",
    "limits",
    "drill",
    "planted",
)


def all_parts() -> list[Part]:
    """Each module of this folder that is named above has one, called PART."""
    return [_part(name) for name in _MODULES]


def _part(name: str) -> Part:
    part: Part = importlib.import_module(f"tests.trust.{name}").PART
    return part


def chunk(name: str, first: int, last: int) -> Figures:
    """Some cases of a part, in this process and a folder of their own."""
    with scratch() as folder:
        return _part(name).run(range(first, last), folder)


def apart(name: str, first: int, last: int) -> Figures:
    """Cases of a part in a process of their own: parts count memory and open thousands of sockets; a crash is to end no other."""
    command = [sys.executable, "-m", "tests.trust.parts", name, str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise Broken(done.stderr[-4000:].strip() or f"it ended with {done.returncode}")
    return Figures(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, in memory if there is such a place: these cases need no disk."""
    ram = Path("/dev/shm")
    where = ram if ram.is_dir() and os.access(ram, os.W_OK) and shutil.disk_usage(ram).free > 1 << 30 else None
    folder = Path(tempfile.mkdtemp(prefix="turtlemq-trust-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(chunk(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
