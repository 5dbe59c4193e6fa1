"""The process that examines files for a replica: it reads them slowly from the disk, and checks them by their own checksums.

One request a line on standard input, as JSON: path, whether it is whole, bytes a second. One answer a line on standard output:
a list of damage (position, length, reason), or an error. The process has the lowest priority, and ends with its input.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from turtlemq.replica.pace import Pace
from turtlemq.segment.file_check import damage_in
from turtlemq.storage.door import Door

_CHUNK_BYTES = 1 << 20
NICE = 19


class Request(msgspec.Struct, frozen=True):
    """A file to be examined."""

    path: str
    whole: bool
    bytes_per_s: float


class Answer(msgspec.Struct, frozen=True):
    """The damage of a file, as position, length and reason; or the reason why it could not be read."""

    bytes: int = 0
    damage: list[tuple[int, int, str]] = []
    error: str = ""
    gone: bool = False


def examine(request: Request) -> Answer:
    """Read a file at a pace, then check it while it is in the page cache."""
    door, path = Door(), Path(request.path)
    try:
        size = _read(door, path, Pace(request.bytes_per_s))
        found = damage_in(door, path, whole=request.whole)
    except FileNotFoundError:
        return Answer(gone=True)
    except OSError as error:  # the disk itself says that bytes are lost
        return Answer(damage=[(0, 0, f"it cannot be read: {error.strerror or error}")])
    finally:
        door.shut()
    return Answer(size, [(hole.position, hole.length, hole.reason) for hole in found])


def _read(door: Door, path: Path, pace: Pace) -> int:
    door.drop_cached(path)
    size = door.size(path)
    for at in range(0, size, _CHUNK_BYTES):
        time.sleep(pace.wait_s(_CHUNK_BYTES, time.monotonic()))
        door.read(path, at, _CHUNK_BYTES)
    return size


def main() -> None:
    """Answer until the input ends, or the replica process that reads the answers."""
    os.nice(NICE)
    try:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(examine(msgspec.json.decode(line, type=Request))) + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends


if __name__ == "__main__":
    main()
