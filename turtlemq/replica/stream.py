"""The stream: records of every change that a leader makes, numbered and chained, the newest of them kept in a ring. Pure.

Thread contract: `lock` is held by the caller of `add`, and while the change itself is made, so that the order of records is the
order of changes. Reading needs the lock as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from turtlemq.replica.records import DATA_BYTES_MAX, HEAD_BYTES, Head, Kind, seal, sum_of

RING_BYTES = 64 << 20
_TRIM = 4_096  # forgotten entries at the beginning of the list before it is cut


class Entry(NamedTuple):
    """A record in the ring: its chain, and its bytes."""

    chain: int
    head: bytes
    path: bytes
    data: bytes

    @property
    def size(self) -> int:
        return HEAD_BYTES + len(self.path) + len(self.data)


@dataclass(frozen=True, slots=True)
class Ferried:
    """A file that another process wrote and that standbys got apart from the stream."""

    size: int
    sum: int


def _nothing() -> None:
    return


class Stream:
    """Records of one epoch, after those of earlier ones. `lsn` and `chain` are those of the newest record."""

    def __init__(
        self,
        epoch: int,
        lsn: int = 0,
        chain: int = 0,
        *,
        ring_bytes: int = RING_BYTES,
        lock: AbstractContextManager[object] | None = None,
        wake: Callable[[], None] = _nothing,
    ) -> None:
        self.epoch, self.lsn, self.chain = epoch, lsn, chain
        self.lock = lock or nullcontext()
        self.shipped: dict[int, int] = dict.fromkeys(Kind, 0)  # bytes by kind
        self.ferried: dict[str, Ferried] = {}  # by path, until they get their names
        self._ring_bytes, self._wake = ring_bytes, wake
        self._entries: list[Entry] = []
        self._skip = 0  # entries of the list that are forgotten
        self._bytes = 0
        self._before = chain  # the chain of the record before the ring's first

    @property
    def first(self) -> int:
        """The LSN of the first record in the ring; of the next one if the ring is empty."""
        return self.lsn - (len(self._entries) - self._skip) + 1

    def add(self, kind: Kind, path: str, offset: int = 0, data: bytes = b"", total: int | None = None) -> int:
        """A change was made. Returns the LSN of its record. `total`: the checksum, if the caller has made it without the lock."""
        encoded = path.encode()
        total = sum_of(path, data) if total is None else total
        head, self.chain = seal(Head(kind, self.epoch, self.lsn + 1, offset, len(encoded), len(data), total), self.chain)
        self.lsn += 1
        entry = Entry(self.chain, head, encoded, data)
        self._entries.append(entry)
        self._bytes += entry.size
        self.shipped[kind] += entry.size
        while self._bytes > self._ring_bytes:
            self._forget_first()
        self._wake()
        return self.lsn

    def _forget_first(self) -> None:
        gone = self._entries[self._skip]
        self._bytes -= gone.size
        self._before = gone.chain
        self._skip += 1
        if self._skip >= _TRIM and 2 * self._skip >= len(self._entries):
            del self._entries[: self._skip]
            self._skip = 0

    def resumes(self, lsn: int, chain: int) -> bool:
        """Can a copy that has applied everything up to this record get the rest from the ring?"""
        return self.first - 1 <= lsn <= self.lsn and self._chain_at(lsn) == chain

    def _chain_at(self, lsn: int) -> int:
        at = lsn - self.first
        return self._before if at < 0 else self._entries[self._skip + at].chain

    def after(self, lsn: int) -> Iterator[Entry] | None:
        """The records behind this one, as far as they were made; None if the ring has lost some of them."""
        at = lsn + 1 - self.first
        return None if at < 0 else islice(self._entries, self._skip + at, None)


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a long write that are one record each, with their distance from its beginning."""
    if len(data) <= DATA_BYTES_MAX:
        yield 0, data
        return
    for at in range(0, len(data), DATA_BYTES_MAX):
        yield at, data[at : at + DATA_BYTES_MAX]
