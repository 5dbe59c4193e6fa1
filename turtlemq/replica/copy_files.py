"""Files of a copy under way: one is extended in place, or made anew beside the old one and renamed.

A file whose old bytes change is made anew: readers and backups may hold the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from turtlemq.errors import TurtleError
from turtlemq.replica.manifest import PIECE_BYTES, Action, FilePlan, is_unfinished
from turtlemq.storage import names
from turtlemq.storage.door import Door

STAGED = "COPY"  # folder in SYNC
TAILS_BYTES_MAX = 64 << 20
_CHUNK_BYTES = 4 << 20
Mend = Callable[[Door, Path, Path, int], None]


class Changed(TurtleError):
    """A file of the leader has changed since its checksums were made: the files are compared again."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: {Changed.__doc__}")
        self.path = path


class Tails:
    """Bytes of logs that the leader does not have, kept in `folder`, up to `left` bytes. None: they are not kept."""

    def __init__(self, door: Door, folder: Path | None, left: int = TAILS_BYTES_MAX) -> None:
        self._door, self.folder, self._left = door, folder, left
        self.bytes = 0  # that were kept

    def keep(self, file: Path, path: str, offset: int) -> None:
        """Keep the bytes of a file from `offset` on, under the file's path and this offset."""
        known = names.parse(file.name)
        if self.folder is None or known is None or known.what != "bson" or known.suffix:
            return
        length = min(self._door.size(file) - offset, self._left)
        if length <= 0:
            return
        self._door.make_folder(self.folder)
        target = self.folder / f"{path.replace('/', '%')}.{offset}"
        fd = self._door.create(target)
        try:
            copy(self._door, file, fd, target, offset, offset + length, -offset)
            self._door.sync(fd, target)
        finally:
            self._door.close(fd)
        self._door.sync_folder(self.folder)
        self._left -= length
        self.bytes += length


class FileWriter:
    """Writes the pulled parts of one file, in order."""

    def __init__(self, door: Door, root: Path, plan: FilePlan, tails: Tails, mend: Mend | None = None) -> None:
        """`mend` gets the old file and the new one, before this takes its place."""
        self._door, self._plan, self._tails, self._mend = door, plan, tails, mend
        self._path, self._staged = root / plan.wanted.path, root / names.SYNC / STAGED
        self._is_staged = plan.action is Action.ANEW
        self._sum = xxhash.xxh3_64()
        last = plan.pulled[-1]
        self._end = min((last + 1) * PIECE_BYTES, plan.wanted.size)
        self._fd = self._stage() if self._is_staged else door.open_write(self._path)
        if self._is_staged and plan.own_size:
            tails.keep(self._path, plan.wanted.path, plan.pulled[0] * PIECE_BYTES)
            for piece in set(range(len(plan.wanted.sums))) - set(plan.pulled):
                start = piece * PIECE_BYTES
                copy(door, self._path, self._fd, self._staged, start, min(start + PIECE_BYTES, plan.wanted.size))

    def write(self, at: int, length: int, data: bytes) -> bool:
        """Write a part. Returns True when the file is whole, and is closed. Raises `Changed` if its bytes are not those that the
        manifest told of."""
        own = self._plan.own_size
        if not self._is_staged and at < own and self._door.read(self._path, at, min(length, own - at)) != data[: own - at]:
            self._make_anew(at)
        self._door.write(self._fd, self._target, at, [data])
        self._sum.update(data)
        if at + length == self._end or (at + length) % PIECE_BYTES == 0:
            self._check(at // PIECE_BYTES)
        if at + length < self._end:
            return False
        self._door.truncate(self._fd, self._target, self._plan.wanted.size)
        if self._is_staged and own and self._mend is not None:
            self._mend(self._door, self._path, self._staged, self._fd)
        self.close()
        if self._is_staged:
            self._door.rename(self._staged, self._path)
        return True

    def close(self) -> None:
        """Close the file, if it is open. An error may have come right behind an earlier close."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._door.close(fd)

    @property
    def _target(self) -> Path:
        return self._staged if self._is_staged else self._path

    def _check(self, piece: int) -> None:
        total, self._sum = self._sum.intdigest(), xxhash.xxh3_64()
        if total != self._plan.wanted.sums[piece] and not is_unfinished(self._plan.wanted.path):
            raise Changed(self._plan.wanted.path)

    def _make_anew(self, at: int) -> None:
        """The end of the own file differs: go on in a new one."""
        self._tails.keep(self._path, self._plan.wanted.path, at)
        self.close()
        self._fd, self._is_staged = self._stage(), True
        copy(self._door, self._path, self._fd, self._staged, 0, at)

    def _stage(self) -> int:
        self._door.make_folder(self._staged.parent, durable=False)
        return self._door.create(self._staged)


def copy(door: Door, source: Path, fd: int, target: Path, start: int, end: int, shift: int = 0) -> None:
    """Copy bytes of a file into another one, `shift` bytes behind."""
    for at in range(start, end, _CHUNK_BYTES):
        door.write(fd, target, at + shift, [door.read(source, at, min(_CHUNK_BYTES, end - at))])


def cut(door: Door, path: Path, size: int) -> None:
    """Cut a file."""
    fd = door.open_write(path)
    try:
        door.truncate(fd, path, size)
    finally:
        door.close(fd)


def remove_caches(door: Door, root: Path) -> None:
    """Remove caches of this machine alone: they tell of files that may be others now."""
    for topic in door.names(root / names.TOPICS):
        for folder in (root / names.TOPICS / topic, *(root / names.TOPICS / topic / inner for inner in names.INNER)):
            for name in door.names(folder):
                known = names.parse(name)
                if known is not None and known.what == "filter":
                    door.remove(folder / name)
