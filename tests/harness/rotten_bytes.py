"""Bytes that rot on the disks of copies, for tests of comparison and healing."""

from __future__ import annotations

import os
from pathlib import Path

FAST = 1e12  # bytes a second


def rot(file: Path, position: int) -> None:
    """Change one byte, as a disk might: time and length stay."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0] ^ 1
        opened.seek(position)
        opened.write(bytes([byte]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def segment_of(data: Path, topic: str = "t") -> Path:
    """The only delay segment of a topic."""
    (found,) = (data / "topic" / topic).glob("delay_*.bson")
    return found
