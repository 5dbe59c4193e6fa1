"""Firing: what is due, as checked raw documents in order, and moving the cursors once it is safe elsewhere.

One mark tells what was handed off (docs/decisions/0002), so what is taken must be a prefix of everything that sleeps, in order of
(due, seq). Each cursor gives its next keys; they are merged, cut to size and read; the mark is the last document taken.
Cursors hold ranges of seqs that do not overlap, so a stable sort by due time of keys in cursor order is exact.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from turtlemq.index.firing_small import SmallBatch, small_keys
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Cursor, Part, SinglesCursor
from turtlemq.index.segments import Segments
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS, SEQ_MAX, U64, Due, Mark, Mask
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_seqs
from turtlemq.segment.table import Damaged


def due(segments: Segments, held_back: Set[int], now_ms: int, count_max: int, bytes_max: int) -> Due | None:
    """See `Index.due`. `held_back`: seqs whose cancellation is being committed; firing stops before them."""
    now_ms = min(now_ms, DUE_MS_MAX)
    cursors = segments.due_cursors(now_ms)
    if not cursors:
        return None
    taken, more = _take(cursors, now_ms, count_max)
    more |= taken.cut_to(bytes_max)
    taken.read(segments)
    stop = taken.first_of(held_back) if held_back else taken.count
    known: Any = taken.known(stop)
    if stop < taken.count or more:
        more = True
        stop = int(known[-1]) + 1 if len(known) else (0 if stop < taken.count else stop)
    if not stop:
        return None
    progress = segments.progress
    if not more:
        progress = progress.add(Mark(segments.memtable.last_seq, now_ms, SEQ_MAX))
    elif len(known):
        last = known[-1]
        progress = progress.add(Mark(segments.memtable.last_seq, int(taken.due_ms[last]), int(taken.seq[last])))
    raw, starts, dues, seqs, hashes = taken.join(known)
    return Due(raw, starts, dues, seqs, progress, more, taken.moves(stop), hashes)


def advance(segments: Segments, handed: Due) -> None:
    """Move the cursors behind what was handed off. It is stored elsewhere already, so this never fails."""
    segments.progress = handed.progress
    segments.counters.handed_off += len(handed)
    if not all(cursor.alive for cursor, _, _ in handed.moves):  # runs were merged, flushed or sealed since `due`
        segments.cursors_stale = True
        try:
            segments.set_all_cursors()
        except (Damaged, OSError):  # the next `due` tries again before it takes anything
            pass
        return
    moved: list[Cursor] = []
    for cursor, pos, passed in handed.moves:
        if pos == cursor.pos:
            continue
        cursor.part.live -= passed
        try:
            cursor.move(pos)
        except Damaged:  # its old head is early enough: the next `due` meets the damage again and has it mended
            pass
        if not isinstance(cursor, SinglesCursor):
            moved.append(cursor)
    segments.push(moved)


def _take(cursors: list[Cursor], now_ms: int, count_max: int) -> tuple[_Taken | SmallBatch, bool]:
    """The first keys of all cursors together, and whether there are more that are due."""
    few = small_keys(cursors, (now_ms + 1) << ORDINAL_BITS)
    if few is not None:
        return SmallBatch(cursors, few[:count_max]), len(few) > count_max
    keys, source, more = _merge(cursors, now_ms, count_max)
    return _Taken(cursors, keys, source), more


def _merge(cursors: list[Cursor], now_ms: int, count_max: int) -> tuple[U64, I64, bool]:
    """The first keys of all cursors together, which cursor each is from, and whether there are more that are due."""
    limit = (now_ms + 1) << ORDINAL_BITS
    slices = [_first(cursor, limit, 2 * count_max // len(cursors) + 64) for cursor in cursors]
    behind = [int(s[-1]) >> ORDINAL_BITS for s, c in zip(slices, cursors, strict=True) if _goes_on(c, len(s), limit)]
    if behind and len(cursors) > 1:  # only what is due before that is complete
        edge = np.uint64(min(behind) << ORDINAL_BITS)
        slices = [s[: int(np.searchsorted(s, edge))] for s in slices]
        if not any(map(len, slices)):  # one instant fills a whole slice
            slices = [_first(cursor, limit, count_max + 1) for cursor in cursors]
    if len(slices) == 1:
        keys, source = slices[0], np.zeros(len(slices[0]), np.int64)
    else:
        keys = np.concatenate(slices)
        source = np.repeat(np.arange(len(slices)), [len(s) for s in slices])
        order = np.argsort(keys >> np.uint64(ORDINAL_BITS), kind="stable")
        keys, source = keys[order], source[order]
    return keys[:count_max], source[:count_max], bool(behind) or len(keys) > count_max


def _first(cursor: Cursor, limit: int, most: int) -> U64:
    """The next due keys of a cursor."""
    keys = cursor.keys.slice(cursor.pos, min(cursor.pos + most, len(cursor.keys)))
    return keys[: int(np.searchsorted(keys, np.uint64(limit)))]


def _goes_on(cursor: Cursor, taken: int, limit: int) -> bool:
    """Is the key behind the first `taken` ones due as well?"""
    following = cursor.keys.slice(cursor.pos + taken, min(cursor.pos + taken + 1, len(cursor.keys)))
    return taken > 0 and len(following) > 0 and int(following[0]) < limit


class _Taken:
    """The keys of one firing and, once read, their documents. Arrays run in merge order."""

    def __init__(self, cursors: list[Cursor], keys: U64, source: I64) -> None:
        self.cursors, self.source = cursors, source
        self.count = len(keys)
        self.due_ms = f.key_dues(keys)
        self.ordinals = f.key_ordinals(keys)
        self.alive: Mask = np.ones(self.count, np.bool_)
        self.start = np.zeros(self.count, np.int64)
        self.end = np.zeros(self.count, np.int64)
        for part, mine in self._by_cursor():
            self.alive[mine] = part.alive(self.ordinals[mine])
            self.start[mine], self.end[mine] = part.spans_of(self.ordinals[mine])
        self.seq = np.full(self.count, -1, np.int64)  # -1: cancelled or damaged
        self.flags = np.zeros(self.count, np.uint32)
        self.at = np.zeros(self.count, np.int64)  # where the document begins in the joined buffers
        self.length = np.zeros(self.count, np.int64)
        self.buffer: bytes | bytearray = b""

    def _by_cursor(self) -> list[tuple[Part, I64]]:
        if len(self.cursors) == 1:
            return [(self.cursors[0].part, np.arange(self.count))]
        found = [(cursor.part, np.flatnonzero(self.source == i)) for i, cursor in enumerate(self.cursors)]
        return [(part, mine) for part, mine in found if len(mine)]

    def cut_to(self, bytes_max: int) -> bool:
        """Take no more than this many bytes, but one document at least. True if something was left."""
        total = np.cumsum(np.where(self.alive, self.end - self.start, 0))
        count = max(1, int(np.searchsorted(total, bytes_max, side="right")))
        cut = count < self.count
        self.count = min(count, self.count)
        for name in ("source", "due_ms", "ordinals", "alive", "start", "end", "seq", "flags", "at", "length"):
            setattr(self, name, getattr(self, name)[: self.count])
        return cut

    def read(self, segments: Segments) -> None:
        """Read the documents that are not cancelled, and check that each is what the index says."""
        buffers: list[bytes | bytearray] = []
        size = 0
        for part, mine in self._by_cursor():
            wanted = mine[self.alive[mine]]
            read = part.read(segments.door, self.ordinals[wanted])
            segments.report(part, read, self.ordinals[wanted])
            good = wanted[read.good]
            heads = read.heads[read.good]
            if (heads["due"] != self.due_ms[good]).any():
                raise Damaged(f"{part.path.name}: its index names other due times than its documents.", part=part)
            if not part.in_place(self.ordinals[good], heads["due"], heads["seq"]):
                places = zip(read.starts[read.good].tolist(), heads["len"].tolist(), strict=True)
                found = (f.decode(memoryview(read.buffer)[at : at + length]) for at, length in places)
                stray = list(segments.strays(part, zip(self.ordinals[good].tolist(), found, strict=True)))
                read.good[np.flatnonzero(read.good)[stray]] = False
                good, heads = wanted[read.good], read.heads[read.good]
            self.seq[good], self.flags[good], self.length[good] = heads["seq"], heads["flags"], heads["len"]
            self.at[good] = read.starts[read.good] + size
            buffers.append(read.buffer)
            size += len(read.buffer)
        self.buffer = buffers[0] if len(buffers) == 1 else b"".join(buffers)

    def first_of(self, seqs: Set[int]) -> int:
        """Where the first of these documents stands."""
        hits = np.flatnonzero(np.isin(self.seq, list(seqs)))
        return int(hits[0]) if len(hits) else self.count

    def known(self, stop: int) -> I64:
        """Those before `stop` that are neither cancelled nor damaged."""
        return np.flatnonzero(self.seq[:stop] >= 0)

    def _in_order(self, keep: I64) -> I64:
        """Copies that compaction made stand where their originals stood among equal due times."""
        moved = keep[(self.flags[keep] & f.MOVED) != 0]
        if not len(moved):
            return keep
        order = self.seq.copy()
        view = memoryview(self.buffer)
        for i in moved.tolist():
            order[i] = f.decode(view[int(self.at[i]) : int(self.at[i] + self.length[i])]).order
        return keep[np.lexsort((order[keep], self.due_ms[keep]))]

    def join(self, keep: I64) -> tuple[bytes, I64, I64, I64, U64 | None]:
        """The kept documents back to back, where each begins, their due times and seqs, and the hashes of their ids."""
        keep = self._in_order(keep)
        return *self._joined(keep), self.due_ms[keep], self.seq[keep], self._hashes(keep)

    def _hashes(self, keep: I64) -> U64 | None:
        """A memtable has those of own ids, and those of others follow from their seqs. Tables do not have them by ordinal."""
        found = np.empty(self.count, np.uint64)
        for part, mine in self._by_cursor():
            if not isinstance(part, Memtable):
                return None
            found[mine] = part.hashes[self.ordinals[mine]]
        found = found[keep]
        given = np.flatnonzero(found == 0)
        found[given] = hash_seqs(self.seq[keep[given]])
        return found

    def _joined(self, keep: I64) -> tuple[bytes, I64]:
        at, length = self.at[keep], self.length[keep]
        ends = np.cumsum(length)
        starts = ends - length
        if len(keep) and (at - at[0] == starts).all():
            first = int(at[0])
            whole = first == 0 and int(ends[-1]) == len(self.buffer)
            return bytes(self.buffer if whole else memoryview(self.buffer)[first : first + int(ends[-1])]), starts
        return bytes(f.gather(self.buffer, at, length)), starts

    def moves(self, stop: int) -> list[tuple[Cursor, int, int]]:
        """For each cursor: where it stands after the first `stop` keys, and how many sleepers that passes."""
        found = []
        for i, cursor in enumerate(self.cursors):
            mine = self.source[:stop] == i
            found.append((cursor, cursor.pos + int(mine.sum()), int(self.alive[:stop][mine].sum())))
        return found
