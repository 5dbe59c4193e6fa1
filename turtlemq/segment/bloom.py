"""A filter over the ids of many tables, made of what tables know of ids: the upper 42 bits of their hashes, sorted. Pure."""

from __future__ import annotations

import numpy as np

from turtlemq.model import I64, U64

_BITS = 16  # of room an id
# Where in a hash each bit is told, by five bits, and from which one of the word they count: above the ordinal, and, up to 67
# million ids, below what tells the word.
_PROBES = ((22, 0), (27, 0), (32, 32), (37, 32))


class BloomFilter:
    """Which ids may be there: a Bloom filter, one word an id, four bits set in it. 0.5 % of strangers pass."""

    def __init__(self, data: memoryview) -> None:
        self._words: U64 = np.frombuffer(data, "<u8")
        self._items = data.cast("Q")  # single words: an item of it costs a third of an array's

    def may_hold(self, hashes: U64) -> I64:
        """Indexes of those that may be there."""
        mask = _mask(hashes)
        return np.flatnonzero(self._words[_word(hashes, len(self._words))] & mask == mask)

    def may_hold_one(self, hash_: int) -> bool:
        word = self._items[(hash_ >> 32) * len(self._items) >> 32]
        return all(word >> (hash_ >> shift & 31) + low & 1 for shift, low in _PROBES)


def words_for(ids: int) -> int:
    """How many words a filter over so many ids has."""
    return max(1, ids * _BITS // 64)


def first_hash(word: int, words: int) -> int:
    """The first hash that belongs to this one of so many words, or to one behind it."""
    return -(-(word << 32) // words) << 32


def enter(hashes: U64, into: U64, first: int, words: int) -> None:
    """Set the bits of sorted hashes in `into`, which is a filter of so many words from word `first` on. 20 ns each."""
    if len(hashes):
        at = _word(hashes, words) - first
        starts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
        into[at[starts]] |= np.bitwise_or.reduceat(_mask(hashes), starts)


def _word(hashes: U64, words: int) -> I64:
    """Which of so many words each hash belongs to: rising as they do."""
    return (((hashes >> np.uint64(32)) * np.uint64(words)) >> np.uint64(32)).astype(np.int64)


def _mask(hashes: U64) -> U64:
    mask = np.zeros(len(hashes), np.uint64)
    for shift, low in _PROBES:
        mask |= np.uint64(1 << low) << (hashes >> np.uint64(shift) & np.uint64(31))
    return mask
