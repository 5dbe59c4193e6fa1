"""Ballast and reserve: files that keep disk space, so that consumers can go on, and room can be made, when the disk is full.

Producers are refused on a full disk. Consumers must go on, because their work frees space in the end; but leases and acks are
journaled, which needs space, too. The first journal that finds none throws the ballast overboard (the file is removed) and tries
again. The ballast is loaded again when there is space; until then the space that it held is for consumers alone.

When that space is used up, too, the disk must still be freed from inside: shorter retention, deleted dead letters and checkpoints
before a removal of files all write a little. The reserve is for such work alone (`freeing`), and is filled up again right after
it, and with every space that becomes free. Only the removal of a topic writes nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from turtlemq.errors import DiskFull, Exhausted
from turtlemq.storage import names
from turtlemq.storage.door import Door

T = TypeVar("T")
BYTES = 4 << 20  # leases and acknowledgements of about 40,000 messages in batches
RESERVE_BYTES = 1 << 20  # a checkpoint of 40,000 leases, or the removal of 5,000 dead letters
_PIECE = 1 << 20
_RESERVE_PIECE = 64 << 10
_LOAD_AT = 2  # it is loaded again when there is space for so many of it


class Ballast:
    """The ballast and the reserve of one data folder."""

    def __init__(self, door: Door, root: Path) -> None:
        self._door, self._path, self._reserve_path = door, root / names.BALLAST, root / names.RESERVE
        self.aboard = False  # the file exists
        self._thrown = False  # its space is for consumers alone
        self._reserve: int | None = None  # bytes that the reserve holds; None: not looked yet
        self._too_little = 0  # free bytes when filling the reserve failed: it is tried again with more

    def load(self) -> None:
        """Create the files if there is space for them. They are not synced: they only have to occupy blocks."""
        if not self._door.keeps_room:
            return
        self._fill_reserve()
        if self.aboard:
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
            for at in range(0, BYTES, _PIECE):
                self._door.write(fd, self._path, at, [self._door.random_bytes(_PIECE)])  # some file systems keep no zeros
        finally:
            self._door.close(fd)

    def _fill_reserve(self) -> None:
        """Fill the reserve up as far as there is space."""
        if self._reserve is None:
            self._reserve = self._door.size(self._reserve_path) if self._door.exists(self._reserve_path) else 0
        if self._reserve >= RESERVE_BYTES:
            return
        free = self._door.free_bytes(self._path.parent)
        if free < _RESERVE_PIECE or free <= self._too_little:
            return
        try:
            fd = self._door.open_write(self._reserve_path) if self._reserve else self._door.create(self._reserve_path)
            try:
                while self._reserve < RESERVE_BYTES:
                    piece = self._door.random_bytes(min(_RESERVE_PIECE, RESERVE_BYTES - self._reserve))
                    self._reserve += self._door.write(fd, self._reserve_path, self._reserve, [piece])
            finally:
                self._door.close(fd)
            self._too_little = 0
        except (Exhausted, OSError):
            self._too_little = free

    def throw(self) -> bool:
        """Remove the ballast, so that a journal can be written. Returns False if it was removed before."""
        if not self.aboard:
            return False
        self._door.remove(self._path)
        self.aboard, self._thrown = False, True
        return True

    def release(self) -> bool:
        """Remove the ballast, or else the reserve, for work that makes room. Returns False if both were removed before."""
        if self.throw():
            return True
        if not self._reserve:
            return False
        self._door.remove(self._reserve_path)
        self._reserve = 0
        return True

    def freeing(self, work: Callable[[], T]) -> T:
        """Do work that makes room. If it finds none for itself, ballast and reserve give theirs, and it is done again.

        Requires: `DiskFull` from the work means that it can be repeated."""
        try:
            while True:
                try:
                    return work()
                except DiskFull:
                    if not self.release():
                        raise
        finally:
            self.load()

    def refuse_producers(self) -> None:
        """Raise `DiskFull` while the space is for consumers alone."""
        if self._thrown:
            self.load()
            if self._thrown:
                raise DiskFull

    def spare(self, most: int) -> int:
        """The number of bytes, up to `most`, that handoffs may write: the space of the ballast is left to consumers."""
        return min(most, max(0, self._door.free_bytes(self._path.parent) - BYTES)) if self._thrown else most
