"""Links to the leader's files for a copy under way, below SYNC/REPLICA, and the walk over the shared files of a folder.

A step links whole units while the lock of the stream is held: no change of a shared file is under way then, so links and lengths
are exactly the state behind the stream's newest record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from turtlemq.replica.shared_files import is_shared
from turtlemq.replica.stream import Stream
from turtlemq.storage import names
from turtlemq.storage.door import Door

LINKS = "REPLICA"  # folder in SYNC
FILES_AT_ONCE = 256  # links in one step, 20 µs each; a unit with more is one step all the same


@dataclass(slots=True)
class Pins:
    """The files of a data folder: each unit as it was at an LSN of its own, not before `lsn`."""

    folder: Path
    lsn: int = 0
    chain: int = 0
    units: dict[str, int] = field(default_factory=dict)
    files: list[tuple[str, int]] = field(default_factory=list)  # path and length; the link is named by the place in this list
    folders: list[str] = field(default_factory=list)

    def link(self, number: int) -> Path:
        return self.folder / str(number)


def pin(door: Door, root: Path, stream: Stream, pins: Pins) -> Iterator[None]:
    """Link all shared files, some units for each step of this generator."""
    door.make_folder(pins.folder, durable=False)
    left: deque[str] | None = None
    while left is None or left:
        with stream.lock:
            if left is None:
                pins.lsn, pins.chain = stream.lsn, stream.chain
                left = deque(units(door, root))
            pin_some(door, root, left, stream.lsn, pins)
        yield


def pin_some(door: Door, root: Path, left: deque[str], lsn: int, pins: Pins) -> None:
    """Link the files of the next units. Requires: no change of a shared file is under way; `lsn` is that of the last one."""
    before = len(pins.files)
    while left and len(pins.files) - before < FILES_AT_ONCE:
        pin_unit(door, root, left.popleft(), lsn, pins)


def pin_unit(door: Door, root: Path, unit: str, lsn: int, pins: Pins) -> None:
    """Link the files of one unit. Requires: as `pin_some`."""
    pins.units[unit] = lsn
    for path in walk(door, root, unit):
        if door.is_folder(root / path):
            pins.folders.append(path)
            continue
        link = pins.link(len(pins.files))
        try:
            door.link(root / path, link)
        except FileNotFoundError:  # another process writes and removes unfinished files
            if not path.endswith(names.TMP):
                raise
            continue
        pins.files.append((path, door.size(link)))


def units(door: Door, root: Path) -> list[str]:
    """The units of a data folder: files beside the topics, and the folder of each topic."""
    topics = (f"{names.TOPICS}/{name}" for name in door.names(root / names.TOPICS))
    return ["", *(path for path in topics if is_shared(path))]


def walk(door: Door, root: Path, unit: str) -> Iterator[str]:
    """Paths of the shared files and folders of a unit; a folder comes before its files."""
    if not unit:
        yield from (name for name in door.names(root) if is_shared(name))
    elif door.is_folder(root / unit):
        yield unit
        for name in door.names(root / unit):
            path = f"{unit}/{name}"
            if is_shared(path):
                yield path
                if name in names.INNER and door.is_folder(root / path):
                    yield from (f"{path}/{inner}" for inner in door.names(root / path) if is_shared(f"{path}/{inner}"))


def unpin(door: Door, pins: Pins) -> None:
    """Remove the links of one copy, so that the space of removed files is freed."""
    door.remove_folder(pins.folder)


def unpin_all(door: Door, root: Path) -> None:
    """Remove links that a crash has left. Requires: no copy is under way."""
    folder = root / names.SYNC / LINKS
    if door.exists(folder):
        door.remove_folder(folder)
