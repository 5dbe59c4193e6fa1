"""Firing: due messages as checked raw documents in order, and moving the cursors once the receiver has stored them.

One mark separates handed off messages from sleepers (docs/decisions/0002), so a handoff must be a prefix of all sleepers in order
of (due, seq). The next keys of all cursors are merged, cut to size and read; the mark is the last document taken. Cursors cover
ranges of seqs that do not overlap, so a stable sort by due time of keys in cursor order is exact. Small handoffs use lists:
`firing_small`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from turtlemq.index.firing_small import SmallBatch, small_keys
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Cursor, KeyListCursor, Part
from turtlemq.index.segments import Segments
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS, SEQ_MAX, U64, Due, Mark, Mask
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather
from turtlemq.segment.ids import hash_seqs
from turtlemq.segment.table import Damaged


def due(segments: Segments, held_back: Set[int], now_ms: int, count_max: int, bytes_max: int) -> Due | None:
    """Due messages that were not handed off, or None. Firing stops before seqs in `held_back`, whose end is being committed."""
    now_ms = min(now_ms, DUE_MS_MAX)
    cursors = segments.due_cursors(now_ms)
    if not cursors:
        return None
    taken, more = _take(cursors, now_ms, count_max)
    more |= taken.cut_to(bytes_max)
    taken.read(segments)
    stop = taken.first_of(held_back) if held_back else taken.count
    intact: Any = taken.intact(stop)
    if stop < taken.count or more:
        more = True
        stop = int(intact[-1]) + 1 if len(intact) else (0 if stop < taken.count else stop)
    if not stop:
        return None
    progress = segments.progress
    if not more:
        progress = progress.add(Mark(segments.memtable.last_seq, now_ms, SEQ_MAX))
    elif len(intact):
        last = intact[-1]
        progress = progress.add(Mark(segments.memtable.last_seq, int(taken.due_ms[last]), int(taken.seq[last])))
    raw, starts, dues, seqs, flags, hashes = taken.join(intact)
    return Due(raw, starts, dues, seqs, progress, more, flags, taken.moves(stop), hashes)


def advance(segments: Segments, handed: Due) -> None:
    """Move the cursors behind a handoff. The receiver has stored it already, so this never fails."""
    segments.progress = handed.progress
    segments.counters.handed_off += len(handed)
    if not all(cursor.alive for cursor, _, _ in handed.moves):  # runs were merged, flushed or sealed since `due`
        segments.cursors_stale = True
        try:
            segments.set_all_cursors()
        except (Damaged, OSError):  # the next `due` tries again first
            pass
        return
    moved: list[Cursor] = []
    for cursor, pos, passed in handed.moves:
        if pos == cursor.pos:
            continue
        cursor.part.live -= passed
        try:
            cursor.move(pos)
        except Damaged:  # its old head is early enough: the next `due` meets the damage again and repairs it
            pass
        if not isinstance(cursor, KeyListCursor):
            moved.append(cursor)
    segments.push(moved)


def _take(cursors: list[Cursor], now_ms: int, count_max: int) -> tuple[LargeBatch | SmallBatch, bool]:
    """The first due keys of all cursors, merged, and whether more are due."""
    small = small_keys(cursors, (now_ms + 1) << ORDINAL_BITS)
    if small is not None:
        return SmallBatch(cursors, small[:count_max]), len(small) > count_max
    keys, source, more = _merge(cursors, now_ms, count_max)
    return LargeBatch(cursors, keys, source), more


def _merge(cursors: list[Cursor], now_ms: int, count_max: int) -> tuple[U64, I64, bool]:
    """The first due keys of all cursors, merged, the number of each key's cursor, and whether more are due."""
    limit = (now_ms + 1) << ORDINAL_BITS
    slices = [_first(cursor, limit, 2 * count_max // len(cursors) + 64) for cursor in cursors]
    cut_at = [int(s[-1]) >> ORDINAL_BITS for s, c in zip(slices, cursors, strict=True) if _goes_on(c, len(s), limit)]
    if cut_at and len(cursors) > 1:  # the merge is complete only before the first due time at which a slice was cut
        edge = np.uint64(min(cut_at) << ORDINAL_BITS)
        slices = [s[: int(np.searchsorted(s, edge))] for s in slices]
        if not any(map(len, slices)):  # one due time fills a whole slice
            slices = [_first(cursor, limit, count_max + 1) for cursor in cursors]
    if len(slices) == 1:
        keys, source = slices[0], np.zeros(len(slices[0]), np.int64)
    else:
        keys = np.concatenate(slices)
        source = np.repeat(np.arange(len(slices)), [len(s) for s in slices])
        order = np.argsort(keys >> np.uint64(ORDINAL_BITS), kind="stable")
        keys, source = keys[order], source[order]
    return keys[:count_max], source[:count_max], bool(cut_at) or len(keys) > count_max


def _first(cursor: Cursor, limit: int, count_max: int) -> U64:
    """The next due keys of a cursor, at most `count_max`."""
    keys = cursor.keys.slice(cursor.pos, min(cursor.pos + count_max, len(cursor.keys)))
    return keys[: int(np.searchsorted(keys, np.uint64(limit)))]


def _goes_on(cursor: Cursor, taken: int, limit: int) -> bool:
    """Is the key behind the first `taken` keys of a cursor due as well?"""
    following = cursor.keys.slice(cursor.pos + taken, min(cursor.pos + taken + 1, len(cursor.keys)))
    return taken > 0 and len(following) > 0 and int(following[0]) < limit


class LargeBatch:
    """The keys of one handoff and, after `read`, their documents. All arrays are in merge order. `SmallBatch` has the same
    methods with lists."""

    def __init__(self, cursors: list[Cursor], keys: U64, source: I64) -> None:
        self.cursors, self.source = cursors, source
        self.count = len(keys)
        self.due_ms = f.key_dues(keys)
        self.ordinals = f.key_ordinals(keys)
        self.alive: Mask = np.ones(self.count, np.bool_)
        self.start = np.zeros(self.count, np.int64)
        self.end = np.zeros(self.count, np.int64)
        for part, rows in self._by_cursor():
            self.alive[rows] = part.alive(self.ordinals[rows])
            self.start[rows], self.end[rows] = part.spans_of(self.ordinals[rows])
        self.seq = np.full(self.count, -1, np.int64)  # -1: cancelled or damaged
        self.flags = np.zeros(self.count, np.uint32)
        self.at = np.zeros(self.count, np.int64)  # where the document begins in `buffer`
        self.length = np.zeros(self.count, np.int64)
        self.buffer: bytes | bytearray = b""

    def _by_cursor(self) -> list[tuple[Part, I64]]:
        if len(self.cursors) == 1:
            return [(self.cursors[0].part, np.arange(self.count))]
        by_cursor = [(cursor.part, np.flatnonzero(self.source == i)) for i, cursor in enumerate(self.cursors)]
        return [(part, rows) for part, rows in by_cursor if len(rows)]

    def cut_to(self, bytes_max: int) -> bool:
        """Keep the first `bytes_max` bytes, but one document at least. True if anything was cut off."""
        total = np.cumsum(np.where(self.alive, self.end - self.start, 0))
        count = max(1, int(np.searchsorted(total, bytes_max, side="right")))
        cut = count < self.count
        self.count = min(count, self.count)
        for name in ("source", "due_ms", "ordinals", "alive", "start", "end", "seq", "flags", "at", "length"):
            setattr(self, name, getattr(self, name)[: self.count])
        return cut

    def read(self, segments: Segments) -> None:
        """Read the documents that are not cancelled, and check each against its key."""
        buffers: list[bytes | bytearray] = []
        size = 0
        for part, rows in self._by_cursor():
            alive = rows[self.alive[rows]]
            read = part.read(segments.door, self.ordinals[alive])
            segments.report(part, read, self.ordinals[alive])
            good = alive[read.good]
            heads = read.heads[read.good]
            if (heads["due"] != self.due_ms[good]).any():
                raise Damaged(f"{part.path.name}: its index names other due times than its documents.", part=part)
            if not part.in_place(self.ordinals[good], heads["due"], heads["seq"]):
                spans = zip(read.starts[read.good].tolist(), heads["len"].tolist(), strict=True)
                documents = (f.decode(memoryview(read.buffer)[at : at + length]) for at, length in spans)
                strays = list(segments.strays(part, zip(self.ordinals[good].tolist(), documents, strict=True)))
                read.good[np.flatnonzero(read.good)[strays]] = False
                good, heads = alive[read.good], read.heads[read.good]
            self.seq[good], self.flags[good], self.length[good] = heads["seq"], heads["flags"], heads["len"]
            self.at[good] = read.starts[read.good] + size
            buffers.append(read.buffer)
            size += len(read.buffer)
        self.buffer = buffers[0] if len(buffers) == 1 else b"".join(buffers)

    def first_of(self, seqs: Set[int]) -> int:
        """The row of the first of these documents, or `count`."""
        hits = np.flatnonzero(np.isin(self.seq, list(seqs)))
        return int(hits[0]) if len(hits) else self.count

    def intact(self, stop: int) -> I64:
        """Rows before `stop` of documents that are neither cancelled nor damaged."""
        return np.flatnonzero(self.seq[:stop] >= 0)

    def _in_order(self, keep: I64) -> I64:
        """Sort copies made by compaction to where their originals were among equal due times."""
        moved = keep[(self.flags[keep] & f.MOVED) != 0]
        if not len(moved):
            return keep
        order = self.seq.copy()
        view = memoryview(self.buffer)
        for i in moved.tolist():
            order[i] = f.decode(view[int(self.at[i]) : int(self.at[i] + self.length[i])]).order
        return keep[np.lexsort((order[keep], self.due_ms[keep]))]

    def join(self, keep: I64) -> tuple[bytes, I64, I64, I64, int, U64 | None]:
        """The kept documents back to back, their starts, due times and seqs, the flags that any of them has, and the hashes of
        their ids if cheap to get."""
        keep = self._in_order(keep)
        flags = int(np.bitwise_or.reduce(self.flags[keep]))
        return *self._joined(keep), self.due_ms[keep], self.seq[keep], flags, self._hashes(keep)

    def _hashes(self, keep: I64) -> U64 | None:
        """Hashes of the ids, None unless all documents are in the memtable: tables do not have hashes by ordinal."""
        hashes, seed = np.empty(self.count, np.uint64), 0
        for part, rows in self._by_cursor():
            if not isinstance(part, Memtable):
                return None
            hashes[rows], seed = part.hashes[self.ordinals[rows]], part.seed
        hashes = hashes[keep]
        given = np.flatnonzero(hashes == 0)
        hashes[given] = hash_seqs(self.seq[keep[given]], seed)
        return hashes

    def _joined(self, keep: I64) -> tuple[bytes, I64]:
        at, length = self.at[keep], self.length[keep]
        ends = np.cumsum(length)
        starts = ends - length
        if len(keep) and (at - at[0] == starts).all():
            first = int(at[0])
            whole = first == 0 and int(ends[-1]) == len(self.buffer)
            return bytes(self.buffer if whole else memoryview(self.buffer)[first : first + int(ends[-1])]), starts
        return bytes(gather(self.buffer, at, length)), starts

    def moves(self, stop: int) -> list[tuple[Cursor, int, int]]:
        """For each cursor its position after the first `stop` keys, and the number of sleepers among them."""
        moves = []
        for i, cursor in enumerate(self.cursors):
            own = self.source[:stop] == i
            moves.append((cursor, cursor.pos + int(own.sum()), int(self.alive[:stop][own].sum())))
        return moves
