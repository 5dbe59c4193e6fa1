"""Ordinals by the hashes of their ids: an open hash table made of arrays, for documents that have no table on disk yet. Pure.

The hashes themselves stay in a column of the caller's, by ordinal; here stands only which ordinal is in which slot. 16 B an entry
at most, a fifth of what a dict takes; 0.1 µs an entry in a batch, 1 µs for a single one.
"""

from __future__ import annotations

import numpy as np

from turtlemq.model import I64, U32, U64

_ROOM = 2  # slots for each entry at least: most chains have one link
_SLOTS = 64  # at first; a power of two
_GROWTH = 4
_FEW = 24  # below this many, loops beat arrays


class Hashes:
    """Where each hash was seen last. A hash of 0 is not entered.

    >>> column, known = np.array([7, 9, 7, 0], np.uint64), Hashes()
    >>> known.add(column, 0, 4)
    >>> known.find_many(column, np.array([9, 8, 7], np.uint64)).tolist()
    [1, -1, 2]
    """

    def __init__(self) -> None:
        self._slots: U32 = np.zeros(_SLOTS, np.uint32)  # ordinal + 1; 0: free
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, column: U64, first: int, last: int) -> None:
        """Enter the ordinals [first, last), newer than all before."""
        self._count += last - first
        if self._count * _ROOM > len(self._slots):
            size = len(self._slots)
            while size < self._count * _ROOM:
                size *= _GROWTH
            old = np.sort(self._slots[self._slots > 0]).astype(np.int64) - 1
            self._slots = np.zeros(size, np.uint32)
            self._enter(column, old)
        if last - first < _FEW:
            for ordinal in range(first, last):
                self._enter_one(column, ordinal)
        else:
            self._enter(column, np.arange(first, last))

    def _enter(self, column: U64, ordinals: I64) -> None:
        slots, mask = self._slots, len(self._slots) - 1
        hashes, entries = column[ordinals], ordinals + 1
        if not hashes.all():
            entries, hashes = entries[hashes != 0], hashes[hashes != 0]
        at = (hashes & np.uint64(mask)).view(np.int64)
        while len(entries):
            free = slots[at] == 0
            slots[at[free]] = entries[free]
            there = slots[at]
            rest = np.flatnonzero(there != entries)  # somebody was there first
            at, hashes, entries, there = at[rest], hashes[rest], entries[rest], there[rest]
            same = column[there.astype(np.int64) - 1] == hashes
            if same.any():
                np.maximum.at(slots, at[same], entries[same].astype(np.uint32))
                at, hashes, entries = at[~same], hashes[~same], entries[~same]
            at = (at + 1) & mask

    def _enter_one(self, column: U64, ordinal: int) -> None:
        hash_ = int(column[ordinal])
        if hash_:
            self._slots[self._slot(column, hash_)] = ordinal + 1

    def _slot(self, column: U64, hash_: int) -> int:
        """Where a hash stands, or would."""
        slots, mask = self._slots, len(self._slots) - 1
        at = hash_ & mask
        while (there := int(slots[at])) and int(column[there - 1]) != hash_:
            at = (at + 1) & mask
        return at

    def find(self, column: U64, hash_: int) -> int | None:
        """The newest ordinal with this hash."""
        there = int(self._slots[self._slot(column, hash_)])
        return there - 1 if there else None

    def find_many(self, column: U64, hashes: U64) -> I64:
        """For each hash its newest ordinal, or -1."""
        slots, mask = self._slots, len(self._slots) - 1
        found = np.full(len(hashes), -1, np.int64)
        at = (hashes & np.uint64(mask)).view(np.int64)
        open_ = np.flatnonzero(slots[at])
        at = at[open_]
        while len(open_):
            there = slots[at].astype(np.int64) - 1
            same = column[there] == hashes[open_]
            found[open_[same]] = there[same]
            at = (at + 1) & mask
            on = np.flatnonzero((slots[at] != 0) & ~same)
            open_, at = open_[on], at[on]
        return found
