"""The tail of the ready log: positions, ready times, id hashes and priorities of its last documents, in memory until they get a
table.

Small batches are only noted, and entered into the columns together: alone a batch costs 50 µs, among others 1 µs. Restricted
documents are those that not every group sees: see `visibility`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from turtlemq.model import I64, U8, U64, Mask, Priority
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.id_map import IdMap
from turtlemq.segment.ids import ID_MASK, hash_ids, hash_seqs

_PENDING_BYTES_MAX = 64 << 10  # of batches that are entered together
_PENDING_MAX = 256  # of these batches
_ROWS_MIN = 64  # capacity at first, then four times as much: there may be thousands of topics, each with a tail


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents as columns, by ordinal."""

    starts: I64
    ready_ms: I64
    hashes: U64  # of the ids, with the seed of the log
    restricted: I64  # ordinals of restricted documents, rising
    owners: U64  # for each of these, the hash of the name of the group whose retry it is; 0 for a notice
    levels: U8  # priorities


class Tail:
    """Documents of the active segment that have no table yet. 25 B each, and 16 B more after the first search for an id."""

    def __init__(self, start: int, count: int, last_ready_ms: int = 0, seed: int = 0) -> None:
        self.start = self.end = start  # positions in the segment
        self.seed = seed  # of all hashes
        self.count = count
        self.last_ready_ms = last_ready_ms
        self._entered = count  # documents that are in the columns
        self._pending: list[tuple[int, int, bytes, I64, U64 | None]] = []  # batches that are not entered, as `add` got them
        self._pending_bytes = 0
        self.starts: I64 = np.empty(_ROWS_MIN, np.int64)
        self.ready_ms: I64 = np.empty(_ROWS_MIN, np.int64)
        self.hashes: U64 = np.empty(_ROWS_MIN, np.uint64)
        self.levels: U8 = np.empty(_ROWS_MIN, np.uint8)
        self.restricted, self.owners = array("q"), array("Q")  # see `Rows`
        self._ids = IdMap()
        self._hashed = 0  # documents whose ids are in `_ids`

    def add(self, at: int, ready_ms: int, raw: bytes, starts: I64, hashes: U64 | None = None) -> None:
        """Add the documents of one batch. `at`: position of `raw` in the file; `hashes`: of the ids, if the caller has them. They
        are entered by the next read, or when there are enough of them."""
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
        """Enter the pending batches into the columns."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending:
            return
        counts = [len(starts) for _, _, _, starts, _ in pending]
        positions = np.concatenate([starts + at for at, _, _, starts, _ in pending])
        _, _, raw, starts, hashes = pending[0]
        if len(pending) > 1:
            sizes = [len(raw) for _, _, raw, _, _ in pending]
            raw, hashes = b"".join([raw for _, _, raw, _, _ in pending]), None
            starts = np.concatenate([starts for _, _, _, starts, _ in pending]) + np.repeat(np.cumsum(sizes) - sizes, counts)
        ready_ms = np.repeat(np.array([ready_ms for _, ready_ms, _, _, _ in pending], np.int64), counts)
        heads = f.prefixes(raw, starts)
        restricted, owners = restricted_documents(raw, starts, heads, self.seed)
        if hashes is None:
            hashes = document_hashes(raw, starts, heads, self.seed)
        self._put(Rows(positions, ready_ms, hashes, restricted, owners, levels_of(heads)))

    def extend(self, rows: Rows) -> None:
        """Add documents that were read back from the file."""
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
            for name in ("starts", "ready_ms", "hashes", "levels"):
                old = getattr(self, name)
                new = np.empty(size, old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
        self.starts[first:last], self.ready_ms[first:last] = rows.starts, rows.ready_ms
        self.hashes[first:last], self.levels[first:last] = rows.hashes, rows.levels
        self._entered = last

    def rows(self, first: int, last: int) -> Rows:
        """The documents with ordinals in [first, last)."""
        self.enter_pending()
        low, high = bisect_left(self.restricted, first), bisect_left(self.restricted, last)
        restricted, owners = np.array(self.restricted[low:high], np.int64) - first, np.array(self.owners[low:high], np.uint64)
        columns = self.starts[first:last], self.ready_ms[first:last], self.hashes[first:last]
        return Rows(*columns, restricted, owners, self.levels[first:last])

    def levels_between(self, first: int, last: int) -> U8:
        """Priorities of the documents with ordinals in [first, last)."""
        self.enter_pending()
        return self.levels[first:last]

    def without_first(self, count: int, start: int) -> Tail:
        """A tail of the documents behind the first `count`, which begins at position `start`."""
        rest = Tail(start, 0, self.last_ready_ms, self.seed)
        rest.extend(self.rows(count, self.count))
        rest.end = self.end
        return rest

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        """Positions where documents begin, and where each ends at the latest."""
        self.enter_pending()
        ends = self.starts[np.minimum(ordinals + 1, self.count - 1)]
        return self.starts[ordinals], np.where(ordinals + 1 < self.count, ends, self.end)

    def spans_small(self, first: int, last: int) -> tuple[list[tuple[int, int]], list[int]]:
        """`spans_of` and `ready_times` of [first, last), without arrays."""
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
        """How many documents became ready before a time."""
        self.enter_pending()
        return int(np.searchsorted(self.ready_ms[: self.count], ready_ms))

    def may_hold(self, hashes: U64) -> Mask:
        """Which of these hashes are those of a document's id."""
        self.enter_pending()
        if self._hashed < self.count:
            self._ids.add(self.hashes, self._hashed, self.count)
            self._hashed = self.count
        return self._ids.find_many(self.hashes, hashes) >= 0

    def find(self, hash_: int) -> list[int]:
        """Ordinals of all documents whose id has this hash, newest first. Requires: `may_hold` was called since the last `add`.
        Candidates: the id must be compared."""
        newest = self._ids.find(self.hashes, hash_)
        return [] if newest is None else sorted({newest, *self._ids.older.get(hash_, ())}, reverse=True)

    def find_groups(self, shared: U64) -> list[int]:
        """Ordinals of the documents of one group alone whose hashes agree with one of these under ID_MASK. Requires: a tail with
        a seed. Candidates: the id must be compared."""
        self.enter_pending()
        ordinals = np.array(self.restricted, np.int64)
        hits: list[int] = ordinals[np.isin(self.hashes[ordinals] & ID_MASK, shared)].tolist()
        return hits


def document_hashes(raw: bytes | memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]], seed: int) -> U64:
    """Hashes of the ids of documents in `raw`. 20 ns for an id that the server gave, 100 ns for another."""
    hashes = hash_seqs(heads["seq"], seed)
    own = np.flatnonzero((heads["flags"] & f.SERVER_ID) == 0)
    if len(own):
        hashes[own] = hash_ids(raw, starts[own] + f.PREFIX_BYTES, heads["idlen"][own] - 1, seed)
    return hashes


def levels_of(heads: np.ndarray[Any, np.dtype[Any]]) -> U8:
    """The priorities of documents. A number that is none counts as the last one."""
    levels: U8 = np.minimum(heads["flags"] & f.PRIORITY, max(Priority)).astype(np.uint8)
    return levels


def owner_hash(name: bytes, seed: int) -> int:
    """The hash of a group's name, for `Rows.owners`; never 0."""
    return xxhash.xxh3_64_intdigest(name, seed) or 1


def restricted_documents(
    raw: bytes | memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]], seed: int
) -> tuple[I64, U64]:
    """The restricted documents in `raw` (retries, and notices of cancelled sleepers), as ordinals and owners."""
    restricted = np.flatnonzero(heads["flags"] & (f.META | f.NOTICE))
    owners = np.zeros(len(restricted), np.uint64)
    for k, i in enumerate(restricted.tolist()):
        if not heads["flags"][i] & f.NOTICE:
            at = int(starts[i]) + f.PREFIX_BYTES
            owners[k] = owner_hash(bytes(raw[at : at + int(heads["idlen"][i]) - 1]).partition(b"/")[0], seed)
    return restricted, owners


def encode_table(cover: t.Cover, rows: Rows, seed: int, has_levels: bool = True) -> list[bytes]:
    """The bytes of a table. Its keys are ready times. `has_levels`: older versions wrote no priorities."""
    ordinals = np.arange(cover.documents)
    keys, positions = f.packed_keys(rows.ready_ms, ordinals), np.append(rows.starts, cover.end)
    levels = {"levels": rows.levels if rows.levels.any() else rows.levels[:0]} if has_levels else {}
    return t.build(cover, keys, positions, rows.hashes, ordinals, rows.restricted, seed=seed, owners=rows.owners, **levels)
