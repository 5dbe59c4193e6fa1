"""Ballast: a file that holds some room on the disk, so that consumers can go on when it is full.

Producers are refused on a full disk. What consumers do must be written down, too, and it is what frees room in the end: the first
journal that finds none has the ballast thrown overboard and tries again. It comes back when there is room; until then what it
held is for consumers alone.
"""

from __future__ import annotations

from pathlib import Path

from turtlemq.errors import DiskFull
from turtlemq.storage.door import Door

FILE = "BALLAST"
BYTES = 4 << 20  # leases and acknowledgements of about 40,000 messages in batches
_PIECE = bytes(1 << 20)
_ROOM = 2  # it comes back when there is room for so many of it


class Ballast:
    """The ballast of one data folder."""

    def __init__(self, door: Door, root: Path) -> None:
        self._door, self._path = door, root / FILE
        self.aboard = False
        self._thrown = False

    def load(self) -> None:
        """Take it aboard if there is room. Not made durable: it only has to be there."""
        if self.aboard or not self._door.keeps_room:
            return
        if self._door.exists(self._path) and self._door.size(self._path) == BYTES:
            self.aboard = True
            return
        if self._door.free_bytes(self._path.parent) < _ROOM * BYTES:
            self._thrown = True  # by whom is no matter, it may have been before a restart: what room there is is for consumers
            return
        try:
            self._fill()
            self.aboard, self._thrown = True, False
        except (DiskFull, OSError):
            self._door.remove(self._path)

    def _fill(self) -> None:
        fd = self._door.create(self._path)
        try:
            for at in range(0, BYTES, len(_PIECE)):
                self._door.write(fd, self._path, at, [_PIECE])
        finally:
            self._door.close(fd)

    def throw(self) -> bool:
        """Give its room to somebody who needs it. False: it is gone already."""
        if not self.aboard:
            return False
        self._door.remove(self._path)
        self.aboard, self._thrown = False, True
        return True

    def refuse_producers(self) -> None:
        """Raise while the room that it held is needed by consumers."""
        if self._thrown:
            self.load()
            if self._thrown:
                raise DiskFull

    def spare(self, most: int) -> int:
        """How many bytes, `most` at most, what comes due may take: none of the room that consumers need for what they have."""
        return min(most, max(0, self._door.free_bytes(self._path.parent) - BYTES)) if self._thrown else most
