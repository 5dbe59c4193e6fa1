"""The stream: records of every change that a leader makes, numbered and chained, the newest of them kept in a ring. Pure.

Thread contract: `lock` is held by the caller of `add`, and while the change itself is made, so that the order of records is the
order of changes. `after` and `bytes_behind` need no lock: a record is in the ring before `lsn` counts it, and is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from turtlemq.replica.records import DATA_BYTES_MAX, HEAD_BYTES, Head, Kind, Record, seal, sum_of

RING_BYTES = 64 << 20


class Entry(NamedTuple):
    """A record in the ring: its chain, its bytes, and how many bytes the stream had before it."""

    chain: int
    head: bytes
    path: bytes
    data: bytes
    before: int

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
        self.wake = wake  # called after each record, by the thread that made it
        self.shipped: dict[int, int] = dict.fromkeys(Kind, 0)  # bytes by kind
        self.ferried: dict[str, Ferried] = {}  # by path, until they get their names
        self.bytes = 0  # of all records since this object was made
        self.first = lsn + 1  # the LSN of the first record in the ring; of the next one if the ring is empty
        self.ring_bytes = ring_bytes
        self._entries: dict[int, Entry] = {}  # the ring, by LSN
        self._held = 0  # bytes in the ring
        self._before = chain  # the chain of the record before the ring's first

    def add(self, kind: Kind, path: str, offset: int = 0, data: bytes = b"", total: int | None = None) -> int:
        """A change was made. Returns the LSN of its record. `total`: the checksum, if the caller has made it without the lock."""
        encoded = path.encode()
        total = sum_of(path, data) if total is None else total
        head = Head(kind, self.epoch, self.lsn + 1, offset, len(encoded), len(data), total)
        self.shipped[kind] += self._keep(head, encoded, data)
        self.wake()
        return self.lsn

    def repeat(self, record: Record) -> None:
        """A standby has applied a record of its leader: it is kept, for others that this copy may have to serve."""
        self.epoch = record.head.epoch
        self._keep(record.head, record.path.encode(), record.data)

    def _keep(self, head: Head, path: bytes, data: bytes) -> int:
        """Put a record into the ring, and forget the oldest ones. Returns its size."""
        sealed, self.chain = seal(head, self.chain)
        entry = Entry(self.chain, sealed, path, data, self.bytes)
        self._entries[head.lsn] = entry
        self.bytes += entry.size
        self._held += entry.size
        self.lsn = head.lsn
        while self._held > self.ring_bytes:
            gone = self._entries.pop(self.first)
            self._held -= gone.size
            self._before = gone.chain
            self.first += 1
        return entry.size

    def resumes(self, lsn: int, chain: int) -> bool:
        """Can a copy that has applied everything up to this record get the rest from the ring? Requires: the lock is held."""
        return self.first - 1 <= lsn <= self.lsn and self._chain_at(lsn) == chain

    def _chain_at(self, lsn: int) -> int:
        return self._before if lsn < self.first else self._entries[lsn].chain

    def after(self, lsn: int, bytes_max: int | None = None) -> list[Entry] | None:
        """The records behind this one, as far as they were made; None if the ring has lost some of them. With `bytes_max`, no
        further ones once they have so many bytes."""
        found: list[Entry] = []
        size = 0
        for number in range(lsn + 1, self.lsn + 1):
            entry = self._entries.get(number)
            if entry is None:
                return None
            found.append(entry)
            size += entry.size
            if bytes_max is not None and size >= bytes_max:
                break
        return found

    def newest(self, bytes_max: int) -> tuple[int, list[Entry]]:
        """The newest records of the ring, with no more than so many bytes, and the chain of the record before them."""
        lsn, size = self.lsn, 0
        while lsn >= self.first and (size := size + self._entries[lsn].size) <= bytes_max:
            lsn -= 1
        return self._chain_at(lsn), [self._entries[number] for number in range(lsn + 1, self.lsn + 1)]

    def refill(self, records: Iterable[Record]) -> None:
        """Put records into the ring of a stream that has just begun before them. They are of earlier epochs, or of this one."""
        epoch = self.epoch
        for record in records:
            self.repeat(record)
        self.epoch = epoch

    def bytes_behind(self, lsn: int) -> int:
        """Bytes of the records behind this one; if the ring has lost some of them, of all records since this object was made."""
        if lsn >= self.lsn:
            return 0
        entry = self._entries.get(lsn + 1)
        return self.bytes if entry is None else self.bytes - entry.before


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a long write that are one record each, with their distance from its beginning."""
    if len(data) <= DATA_BYTES_MAX:
        yield 0, data
        return
    for at in range(0, len(data), DATA_BYTES_MAX):
        yield at, data[at : at + DATA_BYTES_MAX]
