"""The memtable: an in-memory index over the end of the active segment, until it is flushed to disk as a run.

Columns by ordinal; sorted runs of keys that merge in tiers; a sorted list for keys that come one by one; a hash table over
producers' own ids. 40 B a document, and 20 B more for an own id, for at most `run_messages` documents.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turtlemq import small_batches
from turtlemq.index.parts import Cursor, IdQuery, KeyArray, KeyList, KeyListCursor, Part
from turtlemq.model import I64, ORDINAL_BITS, U32, U64, Mask
from turtlemq.segment import format as f
from turtlemq.segment.id_map import IdMap
from turtlemq.segment.ids import ID_MASK
from turtlemq.storage.door import Door

_MERGED_MAX = 1 << 15  # keys of a run that is not merged again: publishing would wait for it
_ROOM = 64  # documents at first, then four times as many: each topic has two memtables, and there may be thousands of topics


class Memtable(Part):
    """Documents `first`, `first` + 1, … of the active segment, from byte `start` on."""

    def __init__(self, path: Path, base: int, first: int, start: int, next_seq: int, seed: int) -> None:
        self.path, self.base, self.first, self.start, self.seed = path, base, first, start, seed
        self.count = 0
        self.first_seq, self.last_seq, self.ended_by = next_seq, next_seq - 1, next_seq - 1  # all its ends are newer
        self.cursors: list[Cursor] = []
        self.single_keys: list[int] = []  # sorted; newer than the keys of `cursors`
        self._list_cursor: KeyListCursor | None = None  # over `single_keys` as it is now
        self.ids = IdMap()  # of producers' own ids, over `hashes`
        self.live = 0
        self._ending: list[int] = []  # ordinals of documents that end others
        self._of_groups = array("Q")  # ordinals of documents of one group alone
        self._sorted_groups: tuple[U64, I64] = np.empty(0, np.uint64), np.empty(0, np.int64)  # see `_sort_groups`
        self._room = _ROOM
        self.seq: I64 = np.empty(_ROOM, np.int64)
        self.due: I64 = np.empty(_ROOM, np.int64)
        self.flags: U32 = np.empty(_ROOM, np.uint32)
        self.hashes: U64 = np.empty(_ROOM, np.uint64)  # of own ids; 0 for others
        self.starts: I64 = np.full(_ROOM + 1, start, np.int64)  # document i lies in [starts[i], starts[i + 1])

    @property
    def documents(self) -> int:
        return self.count

    @property
    def end(self) -> int:
        return int(self.starts[self.count])

    def add(
        self,
        seqs: Sequence[int] | I64,
        dues: Sequence[int] | I64,
        starts: Sequence[int] | I64,
        end: int,
        flags: Sequence[int] | U32,
        hashes: Sequence[int] | U64 | None,
    ) -> list[Cursor]:
        """Add documents in file order. Returns the new cursors. A hash of 0 stands for a server-given id."""
        n, first = len(seqs), self.count
        last = first + n
        if last > self._room:
            self._reserve(last)
        if n == 1:  # assigning a slice of one costs ten times as much as an item
            self.seq[first], self.due[first], self.flags[first], self.starts[first] = seqs[0], dues[0], flags[0], starts[0]
        else:
            self.seq[first:last], self.due[first:last], self.flags[first:last] = seqs, dues, flags
            self.starts[first:last] = starts
        self.starts[last] = end
        if not first:
            self.first_seq = int(seqs[0])
        self.count, self.last_seq = last, int(seqs[-1])
        self.hashes[first:last] = 0 if hashes is None else hashes
        if hashes is not None:
            self.ids.add(self.hashes, first, last)
        if n < small_batches.DOCUMENTS:
            return self._add_small(first, dues, flags)
        marked = self.flags[first:last]
        self._ending += (first + np.flatnonzero(marked & f.ENDS)).tolist()
        self._of_groups.extend((first + np.flatnonzero(marked & f.META)).tolist())
        sleepers = np.flatnonzero((marked & f.TOMBSTONE) == 0)
        keys = np.sort(f.packed_keys(self.due[first + sleepers], first + sleepers))
        self.live += len(keys)
        return [c for c in (*self.spill(), *self._push(keys, int(self.seq[first]))) if c.alive]

    def _add_small(self, first: int, dues: Sequence[int] | I64, flags: Sequence[int] | U32) -> list[Cursor]:
        keys = self.single_keys
        self._end_list_cursor()
        for ordinal, (due, flag) in enumerate(zip(dues, flags, strict=True), first):
            if flag & f.ENDS:
                self._ending.append(ordinal)
            if flag & f.META:
                self._of_groups.append(ordinal)
            if not flag & f.TOMBSTONE:
                insort(keys, int(due) << ORDINAL_BITS | ordinal)
                self.live += 1
        return self.spill() if len(keys) >= small_batches.SINGLE_KEYS else []

    def _reserve(self, size: int) -> None:
        size = self._room = max(size, 4 * self._room)
        for name in ("seq", "due", "flags", "hashes", "starts"):
            old = getattr(self, name)
            new = np.empty(size + (name == "starts"), old.dtype)
            new[: self.count + (name == "starts")] = old[: self.count + (name == "starts")]
            setattr(self, name, new)

    def spill(self) -> list[Cursor]:
        """Turn the single keys into a run. Returns its cursor, or nothing."""
        if not self.single_keys:
            return []
        keys = np.array(self.single_keys, dtype=np.uint64)
        self._end_list_cursor()
        self.single_keys = []
        return self._push(keys, int(self.seq[int(f.key_ordinals(keys).min())]))

    def list_cursor(self) -> Cursor:
        """A cursor over the single keys. It sorts behind all others."""
        if self._list_cursor is None:
            self._list_cursor = KeyListCursor(self, KeyList(self.single_keys), self.last_seq)
        return self._list_cursor

    def _end_list_cursor(self) -> None:
        if self._list_cursor is not None:
            self._list_cursor.alive = False
            self._list_cursor = None

    def _push(self, keys: U64, order: int) -> list[Cursor]:
        """Append a run of keys. Runs of similar size are merged, up to a size that takes a millisecond, so there are few; their
        ordinals rise from run to run."""
        if not len(keys):
            return []
        while self.cursors:
            last = self.cursors[-1]
            rest = last.keys.slice(last.pos, len(last.keys))
            if len(rest) > 2 * len(keys) or len(rest) >= _MERGED_MAX:
                break
            if len(rest):
                keys = np.concatenate((rest, keys))
                keys.sort(kind="stable")  # timsort merges the two sorted ranges
                order = last.order
            last.alive = False
            self.cursors.pop()
        self.cursors.append(Cursor(self, KeyArray(keys), order))
        return [self.cursors[-1]]

    def restart(self, handed: Mask) -> None:
        """Rebuild the keys after recovery, without those of handed off documents. `handed`: by ordinal."""
        self._end_list_cursor()
        self.single_keys = []
        for cursor in self.cursors:
            cursor.alive = False
        self.cursors.clear()
        asleep = np.flatnonzero(~handed & ((self.flags[: self.count] & f.TOMBSTONE) == 0))
        self._push(np.sort(f.packed_keys(self.due[asleep], asleep)), self.first_seq)

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        return self.starts[ordinals], self.starts[ordinals + 1]

    def span_of(self, ordinal: int) -> tuple[int, int]:
        return int(self.starts[ordinal]), int(self.starts[ordinal + 1])

    def find(self, hash_: int) -> Sequence[int]:
        ordinal = self.ids.find(self.hashes, hash_)
        if ordinal is None or hash_ not in self.ids.older:
            return () if ordinal is None else (ordinal,)
        self.ids.older[hash_] = older = [other for other in self.ids.older[hash_] if self.alive_one(other)]
        return sorted({ordinal, *older}, reverse=True)  # newest first

    def find_many(self, query: IdQuery) -> list[int]:
        if query.few is not None:
            return [ordinal for hash_ in query.few for ordinal in self.find(hash_)]
        newest = self.ids.find_many(self.hashes, query.hashes)
        found: set[int] = {*newest[newest >= 0].tolist()}
        if found and self.ids.older:
            again = [hash_ for hash_ in self.hashes[list(found)].tolist() if hash_ in self.ids.older]
            found.update(ordinal for hash_ in again for ordinal in self.find(hash_))
        return list(found)

    def find_groups(self, shared: U64) -> list[int]:
        if not len(shared) or not len(self._of_groups):
            return []
        hashes, ordinals = self._sort_groups()
        shared = np.unique(shared)
        spans = zip(np.searchsorted(hashes, shared).tolist(), np.searchsorted(hashes, shared, "right").tolist(), strict=True)
        return [ordinal for first, last in spans if first < last for ordinal in ordinals[first:last].tolist()]

    def _sort_groups(self) -> tuple[U64, I64]:
        """The documents of one group alone, sorted by the bits of their hashes that all groups share. Made anew when
        there are more."""
        if len(self._sorted_groups[1]) < len(self._of_groups):
            ordinals = np.array(self._of_groups, np.int64)
            hashes = self.hashes[ordinals] & ID_MASK
            order = np.argsort(hashes)
            self._sorted_groups = hashes[order], ordinals[order]
        return self._sorted_groups

    def find_seq(self, seq: int) -> int | None:
        """The ordinal of the document with this seq. O(log n)."""
        i = int(np.searchsorted(self.seq[: self.count], seq))
        return i if i < self.count and self.seq[i] == seq else None

    def locate(self, door: Door, due_ms: int, seq: int) -> int | None:
        return self.find_seq(seq)

    def locate_many(self, door: Door, dues: I64, seqs: I64) -> I64:
        at = np.searchsorted(self.seq[: self.count], seqs)
        at = at[at < self.count]
        return at[np.isin(self.seq[at], seqs)]

    def seq_of(self, door: Door, ordinal: int) -> int | None:
        return int(self.seq[ordinal])

    def holds(self, ordinal: int, document: f.Document) -> bool:
        return bool(self.seq[ordinal] == document.seq)

    def in_place(self, ordinals: I64, dues: I64, seqs: I64) -> bool:
        return bool((self.seq[ordinals] == seqs).all())

    def ending_ordinals(self) -> I64:
        return np.array(self._ending, dtype=np.int64)

    @property
    def ending_count(self) -> int:
        return len(self._ending)

    def count_live(self) -> int:
        single_keys = np.array(self.single_keys, dtype=np.uint64)
        return super().count_live() + int(self.alive(f.key_ordinals(single_keys)).sum())
