"""A hash map from id hashes to ordinals, with open addressing in one numpy array. For documents without a table on disk. Pure.

The hashes stay in a column of the caller, by ordinal; the map has only the ordinals. At most 40 B an entry, 16 B in a full
memtable; 0.08 µs an entry in a batch, 0.01 µs with the kernel, 1 µs for a single one.
"""

from __future__ import annotations

import numpy as np

from turtlemq import small_batches
from turtlemq.model import I64, U32, U64
from turtlemq.segment import kernel

_ROOM = 2.5  # slots for each entry at least: most probes end at the first slot. 2²⁰ are enough for a full memtable and one batch
_SLOTS = 64  # at first; always a power of two
_GROWTH = 4


class IdMap:
    """The newest ordinal of each hash. A hash of 0 is not entered.

    >>> column, known = np.array([7, 9, 7, 0], np.uint64), IdMap()
    >>> known.add(column, 0, 4)
    >>> known.find_many(column, np.array([9, 8, 7], np.uint64)).tolist()
    [1, -1, 2]
    """

    def __init__(self) -> None:
        self._slots: U32 = np.zeros(_SLOTS, np.uint32)  # ordinal + 1; 0: free
        self._count = 0
        self.older: dict[int, list[int]] = {}  # ordinals of a hash that came again: a later version, or another id

    def __len__(self) -> int:
        return self._count

    def add(self, column: U64, first: int, last: int) -> None:
        """Enter the ordinals [first, last), newer than all before."""
        self._count += last - first
        if self._count * _ROOM > len(self._slots):
            size = len(self._slots)
            while size < self._count * _ROOM:
                size *= _GROWTH
            old = np.sort(self._slots[self._slots > 0])
            self._slots = np.zeros(size, np.uint32)
            self._enter(column, old, column[old.astype(np.int64) - 1])
        if last - first < (small_batches.ID_MAP if kernel.compiled is None else small_batches.KERNEL):
            for ordinal in range(first, last):
                self._enter_one(column, int(column[ordinal]), ordinal + 1)
        else:
            self._enter(column, np.arange(first + 1, last + 1, dtype=np.uint32), column[first:last])

    def _enter(self, column: U64, entries: U32, hashes: U64) -> None:
        if kernel.compiled is not None and (again := kernel.compiled.enter(self._slots, column, entries)) is not None:
            for hash_, there, ordinal in again:
                self.older.setdefault(hash_, []).extend((there, ordinal))
            return
        slots, mask = self._slots, len(self._slots) - 1
        if not hashes.all():
            entries, hashes = entries[hashes != 0], hashes[hashes != 0]
        at = (hashes & np.uint64(mask)).view(np.int64)
        while len(entries) >= small_batches.ID_MAP:
            free = np.flatnonzero(slots[at] == 0)
            slots[at[free]] = entries[free]
            there = slots[at]
            rest = np.flatnonzero(there != entries)  # the slot is taken by another entry
            at, hashes, entries = at[rest], hashes[rest], entries[rest]
            same = column[there[rest].astype(np.int64) - 1] == hashes
            if same.any():
                for hash_, a, b in zip(hashes[same].tolist(), there[rest][same].tolist(), entries[same].tolist(), strict=True):
                    self.older.setdefault(hash_, []).extend((a - 1, b - 1))
                np.maximum.at(slots, at[same], entries[same])
                at, hashes, entries = at[~same], hashes[~same], entries[~same]
            at = (at + 1) & mask
        for hash_, entry in zip(hashes.tolist(), entries.tolist(), strict=True):
            self._enter_one(column, hash_, entry)

    def _enter_one(self, column: U64, hash_: int, entry: int) -> None:
        if hash_:
            at = self._slot(column, hash_)
            if there := int(self._slots[at]):
                self.older.setdefault(hash_, []).extend((there - 1, entry - 1))
            self._slots[at] = max(int(self._slots[at]), entry)

    def _slot(self, column: U64, hash_: int) -> int:
        """The slot of a hash, or the free slot where it would go."""
        slots, mask = self._slots, len(self._slots) - 1
        at = hash_ & mask
        while (there := int(slots[at])) and int(column[there - 1]) != hash_:
            at = (at + 1) & mask
        return at

    def find(self, column: U64, hash_: int) -> int | None:
        """The newest ordinal with this hash, or None."""
        there = int(self._slots[self._slot(column, hash_)])
        return there - 1 if there else None

    def find_many(self, column: U64, hashes: U64) -> I64:
        """For each hash its newest ordinal, or -1."""
        if kernel.compiled is not None and (raw := kernel.compiled.find(self._slots, column, hashes)) is not None:
            return np.frombuffer(raw, np.int64)
        slots, mask = self._slots, len(self._slots) - 1
        newest = np.full(len(hashes), -1, np.int64)
        at = (hashes & np.uint64(mask)).view(np.int64)
        there = slots[at]
        open_ = np.flatnonzero(there)
        at, there, hashes = at[open_], there[open_], hashes[open_]
        while len(open_) >= small_batches.ID_MAP:
            ordinals = there.astype(np.int64) - 1
            same = column[ordinals] == hashes
            newest[open_[same]] = ordinals[same]
            at = (at + 1) & mask
            there = slots[at]
            on = np.flatnonzero((there != 0) & ~same)
            open_, at, there, hashes = open_[on], at[on], there[on], hashes[on]
        for i, hash_ in zip(open_.tolist(), hashes.tolist(), strict=True):
            newest[i] = int(slots[self._slot(column, hash_)]) - 1
        return newest
