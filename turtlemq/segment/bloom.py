"""A Bloom filter over ids, built from sorted hashes. Pure. `index.filters` decides over which tables one is built.

Blocked: the upper 32 bits of a hash choose a word of 64 bits, four groups of five bits choose the bits in it. So a lookup reads
one word, and sorted hashes fill the words in order. Tables know only the upper 42 bits of a hash, so only these are used.
"""

from __future__ import annotations

import numpy as np

from turtlemq.model import I64, U64
from turtlemq.segment.ids import GROUP_BITS

_BITS = 16  # per id
# For each of the four bits: the position of its five bits in the hash, and the half of the word that they choose from. They lie
# above the ordinal and, up to 67 million ids, below the bits that choose the word.
_PROBES = ((22, 0), (27, 0), (32, 32), (37, 32))
_PROBES_OF_ID = tuple((shift, low) for shift, low in _PROBES if shift >= GROUP_BITS)


class BloomFilter:
    """A Bloom filter with one word and four bits an id. 0.5 % of unknown ids pass."""

    def __init__(self, data: memoryview) -> None:
        self._words: U64 = np.frombuffer(data, "<u8")
        self._items = data.cast("Q")  # for single words: an item costs a third of one of an array

    def may_hold(self, hashes: U64) -> I64:
        """Indexes of the hashes whose ids may be held."""
        mask = _mask(hashes, _PROBES)
        return np.flatnonzero(self._words[_word(hashes, len(self._words))] & mask == mask)

    def may_hold_groups(self, shared: U64) -> I64:
        """Indexes of the hashes such that one that agrees in all but its low GROUP_BITS may be held. 5 % of others pass."""
        mask = _mask(shared, _PROBES_OF_ID)
        return np.flatnonzero(self._words[_word(shared, len(self._words))] & mask == mask)

    def may_hold_one(self, hash_: int) -> bool:
        """May the id with this hash be held? False is certain."""
        word = self._items[(hash_ >> 32) * len(self._items) >> 32]
        return all(word >> (hash_ >> shift & 31) + low & 1 for shift, low in _PROBES)


def words_for(ids: int) -> int:
    """How many words a filter over this many ids has."""
    return max(1, ids * _BITS // 64)


def first_hash(word: int, words: int) -> int:
    """The smallest hash that belongs to word `word`, or to one behind it, in a filter of `words` words."""
    return -(-(word << 32) // words) << 32


def enter(hashes: U64, into: U64, first: int, words: int) -> None:
    """Set the bits of sorted hashes in `into`, the words from `first` on of a filter of `words` words. 20 ns each."""
    if len(hashes):
        at = _word(hashes, words) - first
        starts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
        into[at[starts]] |= np.bitwise_or.reduceat(_mask(hashes, _PROBES), starts)


def _word(hashes: U64, words: int) -> I64:
    """The word of each hash, in a filter of `words` words. Larger hashes belong to later words."""
    return (((hashes >> np.uint64(32)) * np.uint64(words)) >> np.uint64(32)).astype(np.int64)


def _mask(hashes: U64, probes: tuple[tuple[int, int], ...]) -> U64:
    mask = np.zeros(len(hashes), np.uint64)
    for shift, low in probes:
        mask |= np.uint64(1 << low) << (hashes >> np.uint64(shift) & np.uint64(31))
    return mask
