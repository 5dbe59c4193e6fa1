"""Pictures: the files of some units of a data folder as they are at one LSN, and the checksums of their bytes on the disk.

A picture is made of hard links, between two records. Its files are read afterwards, on a thread, at a limited pace. Nothing here
relies on checksums that were noted earlier, nor on the page cache: the disk itself is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import xxhash

from turtlemq.replica.differences import counts
from turtlemq.replica.manifest import PIECE_BYTES, FileState
from turtlemq.replica.pace import Pace
from turtlemq.replica.pins import Pins, pin_unit, unpin
from turtlemq.storage import names
from turtlemq.storage.door import Door

PICTURES = "VERIFY"  # folder in SYNC
_numbers = count()


def take(door: Door, root: Path, units: Iterable[str], lsn: int) -> Pins:
    """Link the files of these units. Requires: no change of a shared file is under way; `lsn` is that of the last one."""
    pins = empty(door, root, lsn)
    for unit in units:
        pin_unit(door, root, unit, lsn, pins)
    return pins


def empty(door: Door, root: Path, lsn: int) -> Pins:
    """A picture without files."""
    pins = Pins(root / names.SYNC / PICTURES / str(next(_numbers)), lsn)
    door.make_folder(pins.folder, durable=False)
    return pins


def clear(door: Door, root: Path) -> None:
    """Remove pictures that a crash has left. Requires: none is in use."""
    folder = root / names.SYNC / PICTURES
    if door.exists(folder):
        door.remove_folder(folder)


def sums_of(pins: Pins, bytes_per_s: float, read: Callable[[int], None] = lambda _: None) -> list[FileState]:
    """Read the files of a picture, remove it, and return their checksums. `read` is told how many bytes were read. Not on the
    event loop."""
    door, pace = Door(), Pace(bytes_per_s)
    try:
        return [
            FileState(path, size, _sums(door, pins.link(number), size, pace, read))
            for number, (path, size) in enumerate(pins.files)
            if counts(path)
        ]
    finally:
        door.shut()
        unpin(door, pins)


def _sums(door: Door, file: Path, size: int, pace: Pace, read: Callable[[int], None]) -> list[int]:
    """A file that became shorter since it was linked has fewer bytes in its last piece: its checksum will tell."""
    door.drop_cached(file)
    sums = []
    for at in range(0, size, PIECE_BYTES):
        length = min(PIECE_BYTES, size - at)
        time.sleep(pace.wait_s(length, time.monotonic()))
        sums.append(xxhash.xxh3_64_intdigest(door.read(file, at, length)))
        read(length)
    return sums
