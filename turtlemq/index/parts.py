"""Parts: documents of one segment that share one index, and cursors over their sorted keys.

A sealed segment is one part. A growing one is a list of runs (tables on disk) with the memtable at its end. In a part, a document
is known by its ordinal; its key is the due time and the ordinal, packed in one number. A cursor is a position in the sorted keys:
everything before it was handed off. Not here: firing, writing, and files other than reads of documents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from turtlemq import small_batches
from turtlemq.model import I64, ORDINAL_BITS, U8, U64, Mask
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.bloom import BloomFilter
from turtlemq.segment.ids import hash_id
from turtlemq.segment.table import Damaged, Table
from turtlemq.storage.door import Door


class Bits:
    """Ended bits: one bit an ordinal, set if the document was cancelled, replaced or moved. 0.125 B a document, only for parts
    with at least one."""

    def __init__(self, size: int, data: U8 | None = None) -> None:
        self.data: U8 = np.zeros((size + 7) // 8, dtype=np.uint8) if data is None else data

    def set(self, i: int) -> bool:
        """Set bit `i`. False if it was set before."""
        if i >> 3 >= len(self.data):
            self.data = np.append(self.data, np.zeros(max(i >> 3, len(self.data)) + 1, np.uint8))
        mask = 1 << (i & 7)
        before = int(self.data[i >> 3])
        self.data[i >> 3] = before | mask
        return not before & mask

    def test_one(self, i: int) -> bool:
        return i >> 3 < len(self.data) and bool(int(self.data[i >> 3]) >> (i & 7) & 1)

    def test(self, ordinals: I64) -> Mask:
        inside = np.minimum(ordinals >> 3, len(self.data) - 1)
        bits: Mask = ((self.data[inside] >> (ordinals & 7).astype(np.uint8)) & 1).astype(np.bool_)
        return bits & (ordinals >> 3 < len(self.data))

    def counts_before(self, ranks: I64) -> I64:
        """How many bits are set below each rank. O(bytes), for any number of ranks."""
        words = np.append(self.data, np.zeros(16 - len(self.data) % 8, np.uint8)).view(np.uint64)
        before = np.append(0, np.cumsum(np.bitwise_count(words), dtype=np.int64))
        word = np.minimum(ranks >> 6, len(words) - 1)
        partial = words[word] & ((np.uint64(1) << (ranks & 63).astype(np.uint64)) - np.uint64(1))
        counts: I64 = before[word] + np.bitwise_count(partial)
        return counts


class Keys(Protocol):
    """Sorted packed keys, in a table or in memory. `rank`: how many keys are smaller."""

    def __len__(self) -> int: ...
    def slice(self, first: int, last: int) -> U64: ...
    def rank(self, key: int) -> int: ...
    def ranks(self, keys: U64) -> I64: ...


class KeyArray:
    """Sorted keys in an array."""

    def __init__(self, keys: U64) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, first: int, last: int) -> U64:
        return self.keys[first:last]

    def rank(self, key: int) -> int:
        return int(np.searchsorted(self.keys, np.uint64(key)))

    def ranks(self, keys: U64) -> I64:
        return np.searchsorted(self.keys, keys)


class Cursor:
    """A position in the sorted keys of a part: everything before `pos` was handed off."""

    __slots__ = ("alive", "head", "keys", "late", "order", "part", "pos")

    def __init__(self, part: Part, keys: Keys, order: int, pos: int = 0, late: bool = False) -> None:
        self.part = part
        self.keys = keys
        self.order = order  # seq of its oldest document: decides among equal due times
        self.late = late  # its keys are before `pos` of the part's other cursor, but still sleep
        self.alive = True  # False: replaced by another cursor
        self.head: int | None = None  # due time of the next key
        self.move(pos)

    def move(self, pos: int) -> None:
        self.pos = pos
        self.head = int(self.keys.slice(pos, pos + 1)[0]) >> ORDINAL_BITS if pos < len(self.keys) else None

    def following(self, count: int) -> list[int]:
        """The next keys as plain numbers, for small handoffs."""
        keys: list[int] = self.keys.slice(self.pos, min(self.pos + count, len(self.keys))).tolist()
        return keys


class KeyList:
    """Sorted keys in a list."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, first: int, last: int) -> U64:
        return np.array(self.keys[first:last], np.uint64)

    def rank(self, key: int) -> int:
        return bisect_left(self.keys, key)

    def ranks(self, keys: U64) -> I64:
        return np.searchsorted(self.slice(0, len(self.keys)), keys)


class KeyListCursor(Cursor):
    """The cursor over a memtable's list of single keys. Keys that were handed off are removed from the list, so it is always at
    the front. It is on no heap, and a new key replaces it (`alive` is False then)."""

    __slots__ = ()
    keys: KeyList

    def move(self, pos: int) -> None:
        keys = self.keys.keys
        del keys[:pos]
        self.pos = 0
        self.head = keys[0] >> ORDINAL_BITS if keys else None

    def following(self, count: int) -> list[int]:
        return self.keys.keys[:count]


class IdQuery:
    """Hashes of ids to look up in one part after the other: an array, or a list `few` of distinct ones if there are few."""

    __slots__ = ("few", "hashes")

    def __init__(self, hashes: U64) -> None:
        self.hashes = hashes
        self.few = list(dict.fromkeys(hashes.tolist())) if len(hashes) < small_batches.DOCUMENTS else None

    @classmethod
    def these(cls, few: list[int]) -> IdQuery:
        """A small query, without the array, which takes a microsecond to make."""
        query = cls.__new__(cls)
        query.few = few
        return query

    def through(self, filter_: BloomFilter) -> IdQuery:
        """The hashes of this query that pass a Bloom filter."""
        if self.few is not None:
            return IdQuery.these([hash_ for hash_ in self.few if filter_.may_hold_one(hash_)])
        return IdQuery(self.hashes[filter_.may_hold(self.hashes)])

    def __len__(self) -> int:
        return len(self.hashes if self.few is None else self.few)


class Part:
    """Documents of one segment that share one index: a table (`TablePart`) or the memtable."""

    path: Path  # of the segment
    base: int
    first: int  # number of its first document among all of the segment
    cursors: list[Cursor]
    live: int  # sleepers that are neither handed off nor ended
    ended: Bits | None = None
    gone = False  # replaced by another part, or dropped with its segment
    filter: BloomFilter | None = None  # over the ids of its table and of others, all hashed with its seed
    seed: int  # of the hashes by which its ids are found
    dirty = False  # `ended` has changed since it was written to disk

    first_seq: int
    last_seq: int
    ended_by: int  # ends up to this seq are in `ended`, or left out of the keys

    @property
    def documents(self) -> int:
        """How many documents it has, ended ones included."""
        raise NotImplementedError

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        """Byte ranges of documents in the segment: starts and ends."""
        raise NotImplementedError

    def find(self, hash_: int) -> Sequence[int]:
        """Ordinals of documents whose id has this hash, newest first unless sealed. Candidates: the id must be compared."""
        raise NotImplementedError

    def find_many(self, query: IdQuery) -> list[int]:
        """Ordinals of documents whose id has one of these hashes, each once. Candidates: ids must be compared."""
        raise NotImplementedError

    def find_groups(self, shared: U64) -> list[int]:
        """Ordinals of candidates for documents of one group alone, of any group: their hashes agree with one of `shared` under
        ID_MASK. Requires: a part with a seed."""
        raise NotImplementedError

    def locate(self, door: Door, due_ms: int, seq: int) -> int | None:
        """The ordinal of the document with this due time and seq."""
        raise NotImplementedError

    def locate_many(self, door: Door, dues: I64, seqs: I64) -> I64:
        """Ordinals of the documents with these due times and seqs, in any order. Those that it does not have are left out."""
        ordinals = [self.locate(door, due, seq) for due, seq in zip(dues.tolist(), seqs.tolist(), strict=True)]
        return np.array([ordinal for ordinal in ordinals if ordinal is not None], np.int64)

    def seq_of(self, door: Door, ordinal: int) -> int | None:
        """The seq of a document. None if it is damaged."""
        raise NotImplementedError

    def holds(self, ordinal: int, document: f.Document) -> bool:
        """Was this document written for this ordinal? False: a misplaced write put it there."""
        raise NotImplementedError

    def in_place(self, ordinals: I64, dues: I64, seqs: I64) -> bool:
        """Can intact documents with these due times and seqs, in key order, all be at their own place? If not, `holds` decides
        for each."""
        raise NotImplementedError

    def ending_ordinals(self) -> I64:
        """Ordinals of the documents that end others."""
        raise NotImplementedError

    @property
    def ending_count(self) -> int:
        """How many documents end others."""
        raise NotImplementedError

    def mark_ended(self, ordinal: int) -> bool:
        """End a document. False if it was ended before."""
        if self.ended is None:
            self.ended = Bits(self.documents)
        self.dirty = True
        changed = self.ended.set(ordinal)
        self.live -= changed
        return changed

    def span_of(self, ordinal: int) -> tuple[int, int]:
        """Byte range of one document in the segment."""
        raise NotImplementedError

    def alive_one(self, ordinal: int) -> bool:
        return self.ended is None or not self.ended.test_one(ordinal)

    def alive(self, ordinals: I64) -> Mask:
        return np.ones(len(ordinals), np.bool_) if self.ended is None else ~self.ended.test(ordinals)

    def count_live(self) -> int:
        """The number of sleepers, counted from the keys behind the cursors."""
        total = 0
        for cursor in self.cursors:
            if self.ended is None:  # without reading a key: opening must not read all of them
                total += len(cursor.keys) - cursor.pos
            else:
                total += int(self.alive(f.key_ordinals(cursor.keys.slice(cursor.pos, len(cursor.keys)))).sum())
        return total

    def read(self, door: Door, ordinals: I64) -> log.Documents:
        starts, ends = self.spans_of(ordinals)
        return log.read_documents(door, self.path, starts, ends)


class TablePart(Part):
    """A sealed segment or a flushed run: everything but the ended bits is in a mapped table."""

    def __init__(self, folder: Path, table: Table, segment_name: str, sealed: bool) -> None:
        self.path = folder / segment_name
        self.table = table
        self.sealed = sealed
        cover = table.cover
        self.base, self.first, self.ended_by, self.seed = cover.base, cover.first, cover.killed_seq, table.seed
        self.first_seq, self.last_seq = cover.first_seq, cover.last_seq
        self.cursors = [Cursor(self, table, self.first_seq)] if len(table) else []
        self.live = len(table)

    @property
    def documents(self) -> int:
        return self.table.cover.documents

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        try:
            return self.table.spans_of(ordinals)
        except IndexError:  # a block has changed on disk after it was verified
            raise Damaged(f"{self.table.path.name}: a key names no document. {Damaged.__doc__}", table=self.table) from None

    def span_of(self, ordinal: int) -> tuple[int, int]:
        try:
            return self.table.span_of(ordinal)
        except IndexError:
            raise Damaged(f"{self.table.path.name}: a key names no document. {Damaged.__doc__}", table=self.table) from None

    def find(self, hash_: int) -> Sequence[int]:
        return self.table.find(hash_)

    def find_many(self, query: IdQuery) -> list[int]:
        find, hashes = self.table.find, query.few
        if hashes is None:
            hashes = np.unique(query.hashes[self.table.may_hold(query.hashes)]).tolist()
        return [ordinal for hash_ in hashes for ordinal in find(hash_)]

    def find_groups(self, shared: U64) -> list[int]:
        return self.table.find_groups(shared)

    def count_live(self) -> int:
        if not (self.sealed and self.ended is not None and len(self.cursors) == 1):
            return super().count_live()
        pos, end = self.cursors[0].pos, len(self.table)
        low, high = self.ended.counts_before(np.array([pos, end])).tolist()
        return int(end - pos - (high - low))

    def locate(self, door: Door, due_ms: int, seq: int) -> int | None:
        """The ordinal of the document with this due time and seq. Relies on keys of equal due times being in seq order."""
        first, last = self.table.rank(due_ms << ORDINAL_BITS), self.table.rank((due_ms + 1) << ORDINAL_BITS)
        if last - first > small_batches.TIES:
            behind = bisect_seq(door, self, self.table, first, last, seq)
            first, last = max(first, behind - 1), behind
        ordinals = f.key_ordinals(self.table.slice(first, last))
        hits = np.flatnonzero(log.read_prefixes(door, self.path, self.spans_of(ordinals)[0])["seq"] == seq)
        return int(ordinals[hits[0]]) if len(hits) else None

    def locate_many(self, door: Door, dues: I64, seqs: I64) -> I64:
        """Ordinals of the documents with these due times and seqs. Those that share a due time are found by one binary search for
        all of them: a batch of reads a step. A damaged document may mislead it, so misses are searched again one by one."""
        low = dues.astype(np.uint64) << np.uint64(ORDINAL_BITS)
        first, last = self.table.ranks(low), self.table.ranks(low + np.uint64(1 << ORDINAL_BITS))
        held = last > first
        first, last, dues, seqs = first[held], last[held], dues[held], seqs[held]
        tied = last - first > 1
        while len(rows := np.flatnonzero(last - first > 1)):
            middle = (first[rows] + last[rows]) >> 1
            behind = self._read_seqs(door, middle) > seqs[rows]
            last[rows[behind]], first[rows[~behind]] = middle[behind], middle[~behind]
        known = self._read_seqs(door, first) == seqs
        missed = tied & ~known
        return np.concatenate(
            (f.key_ordinals(self.table.keys_at(first[known])), super().locate_many(door, dues[missed], seqs[missed]))
        )

    def _read_seqs(self, door: Door, ranks: I64) -> I64:
        """Seqs of the documents whose keys have these ranks, not verified. Each document is read once, in order of position."""
        ranks, rows = np.unique(ranks, return_inverse=True)
        ordinals = f.key_ordinals(self.table.keys_at(ranks))
        seqs: I64 = log.read_prefixes(door, self.path, self.spans_of(ordinals)[0])["seq"][rows]
        return seqs

    def seq_of(self, door: Door, ordinal: int) -> int | None:
        read = self.read(door, np.array([ordinal]))
        return int(read.heads["seq"][0]) if read.good[0] else None

    def holds(self, ordinal: int, document: f.Document) -> bool:
        return self.first_seq <= document.seq <= self.last_seq and self.table.holds(hash_id(document.id, self.seed), ordinal)

    def in_place(self, ordinals: I64, dues: I64, seqs: I64) -> bool:
        if not len(seqs):
            return True
        rising = (seqs[1:] > seqs[:-1]) | (dues[1:] > dues[:-1])
        return bool(rising.all() and self.first_seq <= seqs.min() and seqs.max() <= self.last_seq)

    def ending_ordinals(self) -> I64:
        return self.table.ending_ordinals()

    @cached_property
    def ending_count(self) -> int:
        return len(self.table.ending_ordinals())


def rank_behind(door: Door, part: Part, keys: Keys, due_ms: int, seq: int) -> int:
    """The rank in `keys` of the first key behind (due_ms, seq)."""
    first, last = keys.rank(due_ms << ORDINAL_BITS), keys.rank((due_ms + 1) << ORDINAL_BITS)
    return last if seq >= part.last_seq else bisect_seq(door, part, keys, first, last, seq)


def bisect_seq(door: Door, part: Part, keys: Keys, first: int, last: int, seq: int) -> int:
    """The rank of the first document behind `seq` among the ranks [first, last), which have one due time. A binary search, one
    pread a step; instead of a damaged document the next intact one is read."""
    while first < last:
        middle = probe = (first + last) >> 1
        read_seq = None
        while probe < last and (read_seq := part.seq_of(door, int(f.key_ordinals(keys.slice(probe, probe + 1))[0]))) is None:
            probe += 1
        if read_seq is None or read_seq > seq:
            last = middle
        else:
            first = probe + 1
    return first
