"""All parts, in the order in which they run, and running some cases of one."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.trust.model import Figures, Part

_MODULES = ("simulation", "powercuts", "kills", "damage", "refusals", "clocks", "load", "hostile", "drill", "planted")


def all_parts() -> list[Part]:
    """Each module of this folder that is named above has one, called PART."""
    return [importlib.import_module(f"tests.trust.{name}").PART for name in _MODULES]


def chunk(name: str, first: int, last: int) -> Figures:
    """Some cases of a part, in this process and a folder of their own."""
    part = next(part for part in all_parts() if part.name == name)
    with scratch() as folder:
        return part.run(range(first, last), folder)


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, in memory if there is such a place: what is tried here needs no disk."""
    ram = Path("/dev/shm")
    where = ram if ram.is_dir() and os.access(ram, os.W_OK) and shutil.disk_usage(ram).free > 1 << 30 else None
    folder = Path(tempfile.mkdtemp(prefix="turtlemq-trust-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
