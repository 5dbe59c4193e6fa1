"""Checksums of the pieces of files, kept in the file REPLICA.sums for files that do not change any more.

A file with the same inode, time of change and length has the same content. A file that was changed in the last seconds is not
noted: another change could have the same time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import xxhash

from turtlemq.replica.manifest import PIECE_BYTES
from turtlemq.storage import names
from turtlemq.storage.door import Door

SETTLED_NS = 2_000_000_000  # a file that was not changed for so long has a time of change that tells
Noted = dict[str, tuple[int, int, int, list[int]]]  # by path: inode, time of change, length, checksums


class Sums:
    """Checksums of the files of one data folder. Thread contract: one thread at a time, with a Door of its own."""

    def __init__(self, door: Door, root: Path, suspect: Collection[str] = ()) -> None:
        """`suspect`: files whose bytes may have changed without any trace."""
        self._door, self._file = door, root / names.REPLICA_SUMS
        self._noted: Noted = {}
        self._new: Noted = {}
        try:
            self._noted = msgspec.json.decode(door.read_all(self._file), type=Noted)
        except (FileNotFoundError, msgspec.DecodeError):
            pass  # it is a cache
        for path in suspect:
            self.forget(path)

    def forget(self, path: str) -> None:
        """The bytes of a file have changed without any trace: read it again."""
        self._noted.pop(path, None)

    def of(self, path: str, file: Path, length: int, now_ns: int) -> list[int]:
        """Checksums of the first `length` bytes of a file, which is `path` in the data folder and may have another name now."""
        inode, changed_ns = self._door.identity(file)
        noted = self._noted.get(path)
        if noted is not None and noted[:3] == (inode, changed_ns, length):
            self._new[path] = noted
            return noted[3]
        sums = [
            xxhash.xxh3_64_intdigest(self._door.read(file, at, min(PIECE_BYTES, length - at)))
            for at in range(0, length, PIECE_BYTES)
        ]
        if length == self._door.size(file) and now_ns - changed_ns > SETTLED_NS:
            self._new[path] = (inode, changed_ns, length, sums)
        return sums

    def save(self) -> None:
        """Keep the checksums of the files that were asked for since the last call."""
        if self._new != self._noted:
            self._door.replace(self._file, msgspec.json.encode(self._new), durable=False)
        self._noted, self._new = self._new, {}
