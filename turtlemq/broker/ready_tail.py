"""The tail of the ready log: positions, ready times and id hashes of the last documents, until they get a table of their own."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from turtlemq.model import I64, U64
from turtlemq.segment import format as f
from turtlemq.segment.id_map import IdMap
from turtlemq.segment.ids import hash_ids, hash_seqs

_PENDING_BYTES_MAX = 64 << 10  # of batches that are entered together: a small one alone costs 50 µs, in company 1 µs
_PENDING_MAX = 256
_ROWS_MIN = 64  # documents at first, then four times as many: every topic has one of these, and there may be thousands


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents as columns, by ordinal; and which of them are special: not every group sees them."""

    starts: I64
    ready_ms: I64
    hashes: U64
    restricted: I64  # their ordinals, rising
    owners: U64  # for each, the hash of the name of the group whose retry it is; 0: nobody's, a notice


class Tail:
    """Columns by ordinal. 24 B a document, and 16 more for finding ids once somebody has looked for one."""

    def __init__(self, start: int, count: int, last_ready_ms: int = 0) -> None:
        self.start = self.end = start  # bytes of the segment that it covers
        self.count = count
        self.last_ready_ms = last_ready_ms
        self._entered = count  # documents that are in the columns
        self._pending: list[tuple[int, int, bytes, I64, U64 | None]] = []  # batches that are not, as `add` got them
        self._pending_bytes = 0
        self.starts: I64 = np.empty(_ROWS_MIN, np.int64)
        self.ready_ms: I64 = np.empty(_ROWS_MIN, np.int64)
        self.hashes: U64 = np.empty(_ROWS_MIN, np.uint64)
        self.restricted, self.owners = array("q"), array("Q")  # see `Rows`
        self._ids = IdMap()
        self._hashed = 0  # documents whose ids are entered there

    def add(self, at: int, ready_ms: int, raw: bytes, starts: I64, hashes: U64 | None = None) -> None:
        """Documents of one batch: where in the file their bytes begin, these, and the hashes of their ids where they are known.
        They are entered when somebody asks, or when there are enough of them."""
        if len(raw) > _PENDING_BYTES_MAX:
            self.enter_pending()
        self._pending.append((at, ready_ms, raw, starts, hashes))
        self._pending_bytes += len(raw)
        self.count += len(starts)
        if len(starts):
            self.last_ready_ms = ready_ms
        if self._pending_bytes > _PENDING_BYTES_MAX or len(self._pending) >= _PENDING_MAX:
            self.enter_pending()

    def enter_pending(self) -> None:
        """See `add`."""
        late, self._pending, self._pending_bytes = self._pending, [], 0
        if not late:
            return
        counts = [len(starts) for _, _, _, starts, _ in late]
        positions = np.concatenate([starts + at for at, _, _, starts, _ in late])
        _, _, raw, starts, hashes = late[0]
        if len(late) > 1:
            sizes = [len(some) for _, _, some, _, _ in late]
            raw, hashes = b"".join([some for _, _, some, _, _ in late]), None
            starts = np.concatenate([some for _, _, _, some, _ in late]) + np.repeat(np.cumsum(sizes) - sizes, counts)
        ready_ms = np.repeat(np.array([ready_ms for _, ready_ms, _, _, _ in late], np.int64), counts)
        heads = f.prefixes(raw, starts)
        special, owners = restricted_documents(raw, starts, heads)
        if hashes is None:
            hashes = document_hashes(raw, starts, heads)
        self._put(Rows(positions, ready_ms, hashes, special, owners))

    def extend(self, rows: Rows) -> None:
        """More documents, in order."""
        self.enter_pending()
        self._put(rows)
        self.count = self._entered
        if len(rows.ready_ms):
            self.last_ready_ms = int(rows.ready_ms[-1])

    def _put(self, rows: Rows) -> None:
        first = self._entered
        self.restricted.frombytes((rows.restricted + first).astype(np.int64).tobytes())
        self.owners.frombytes(rows.owners.astype(np.uint64).tobytes())
        last = first + len(rows.starts)
        if last > len(self.starts):
            size = max(last, 4 * len(self.starts))
            for name in ("starts", "ready_ms", "hashes"):
                old = getattr(self, name)
                new = np.empty(size, old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
        self.starts[first:last], self.ready_ms[first:last] = rows.starts, rows.ready_ms
        self.hashes[first:last] = rows.hashes
        self._entered = last

    def rows(self, first: int, last: int) -> Rows:
        """Documents [first, last)."""
        self.enter_pending()
        low, high = bisect_left(self.restricted, first), bisect_left(self.restricted, last)
        special, owners = np.array(self.restricted[low:high], np.int64) - first, np.array(self.owners[low:high], np.uint64)
        return Rows(self.starts[first:last], self.ready_ms[first:last], self.hashes[first:last], special, owners)

    def without_first(self, count: int, start: int) -> Tail:
        """What is left behind the first `count` documents."""
        rest = Tail(start, 0, self.last_ready_ms)
        rest.extend(self.rows(count, self.count))
        rest.end = self.end
        return rest

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        """Where documents begin, and where each ends at the latest."""
        self.enter_pending()
        ends = self.starts[np.minimum(ordinals + 1, self.count - 1)]
        return self.starts[ordinals], np.where(ordinals + 1 < self.count, ends, self.end)

    def spans_small(self, first: int, last: int) -> tuple[list[tuple[int, int]], list[int]]:
        """`places` and `times` of [first, last), without arrays."""
        if last >= self._entered:
            self.enter_pending()
        starts = self.starts[first:last].tolist()
        end = self.end if last == self.count else int(self.starts[last])
        return list(zip(starts, [*starts[1:], end], strict=True)), self.ready_ms[first:last].tolist()

    def ready_times(self, ordinals: I64) -> I64:
        """When documents became ready."""
        self.enter_pending()
        return self.ready_ms[ordinals]

    def rank(self, ready_ms: int) -> int:
        """How many became ready before a time."""
        self.enter_pending()
        return int(np.searchsorted(self.ready_ms[: self.count], ready_ms))

    def find_many(self, hashes: U64) -> list[tuple[int, int]]:
        """(index, ordinal) of candidates; the newest of each id."""
        self.enter_pending()
        if self._hashed < self.count:
            self._ids.add(self.hashes, self._hashed, self.count)
            self._hashed = self.count
        found = self._ids.find_many(self.hashes, hashes)
        hits = np.flatnonzero(found >= 0)
        return list(zip(hits.tolist(), found[hits].tolist(), strict=True))


def document_hashes(raw: bytes | memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> U64:
    """Hashes of the ids of documents in `raw`. 20 ns for a server-given id, 100 ns for another."""
    hashes = hash_seqs(heads["seq"])
    own = np.flatnonzero((heads["flags"] & f.SERVER_ID) == 0)
    if len(own):
        hashes[own] = hash_ids(raw, starts[own] + f.PREFIX_BYTES, heads["idlen"][own] - 1)
    return hashes


def owner_hash(name: bytes) -> int:
    """Who a retry belongs to, as a number that is never 0."""
    return xxhash.xxh3_64_intdigest(name) or 1


def restricted_documents(raw: bytes | memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> tuple[I64, U64]:
    """Which of the documents in `raw` not every group sees: retries, and notices of cancelled sleepers; and whose they are."""
    special = np.flatnonzero(heads["flags"] & (f.META | f.NOTICE))
    owners = np.zeros(len(special), np.uint64)
    for k, i in enumerate(special.tolist()):
        if not heads["flags"][i] & f.NOTICE:
            at = int(starts[i]) + f.PREFIX_BYTES
            owners[k] = owner_hash(bytes(raw[at : at + int(heads["idlen"][i]) - 1]).partition(b"/")[0])
    return special, owners
