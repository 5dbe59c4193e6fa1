"""Ballast: a file that reserves disk space, so that consumers can go on when the disk is full.

Producers are refused on a full disk. Consumers must go on, because their work frees space in the end; but leases and acks are
journaled, which needs space, too. The first journal that finds none throws the ballast overboard (the file is removed) and tries
again. The ballast is loaded again when there is space; until then the space that it held is for consumers alone.
"""

from __future__ import annotations

from pathlib import Path

from turtlemq.errors import DiskFull, Exhausted
from turtlemq.storage.door import Door

FILE = "BALLAST"
BYTES = 4 << 20  # leases and acknowledgements of about 40,000 messages in batches
_PIECE = bytes(1 << 20)
_LOAD_AT = 2  # it is loaded again when there is space for so many of it


class Ballast:
    """The ballast of one data folder."""

    def __init__(self, door: Door, root: Path) -> None:
        self._door, self._path = door, root / FILE
        self.aboard = False  # the file exists
        self._thrown = False  # its space is for consumers alone

    def load(self) -> None:
        """Create the file if there is space for it. It is not synced: it only has to occupy blocks."""
        if self.aboard or not self._door.keeps_room:
            return
        if self._door.exists(self._path) and self._door.size(self._path) == BYTES:
            self.aboard = True
            return
        if self._door.free_bytes(self._path.parent) < _LOAD_AT * BYTES:
            self._thrown = True  # perhaps by the process before this one: the remaining space is for consumers
            return
        try:
            self._fill()
            self.aboard, self._thrown = True, False
        except (Exhausted, OSError):
            self._door.remove(self._path)

    def _fill(self) -> None:
        fd = self._door.create(self._path)
        try:
            for at in range(0, BYTES, len(_PIECE)):
                self._door.write(fd, self._path, at, [_PIECE])
        finally:
            self._door.close(fd)

    def throw(self) -> bool:
        """Remove the file, so that a journal can be written. Returns False if it was removed before."""
        if not self.aboard:
            return False
        self._door.remove(self._path)
        self.aboard, self._thrown = False, True
        return True

    def refuse_producers(self) -> None:
        """Raise `DiskFull` while the space is for consumers alone."""
        if self._thrown:
            self.load()
            if self._thrown:
                raise DiskFull

    def spare(self, most: int) -> int:
        """The number of bytes, up to `most`, that handoffs may write: the space of the ballast is left to consumers."""
        return min(most, max(0, self._door.free_bytes(self._path.parent) - BYTES)) if self._thrown else most
