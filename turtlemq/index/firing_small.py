"""Small handoffs: the steps of `firing` with lists instead of arrays. 3 µs a document, where arrays cost 150 µs for any count.

At a thousand ticks a second nearly every handoff has only a few messages. `firing.due` decides with either class, by the same
rules; `small_batches.HANDOFF` is the largest handoff that is handled here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from itertools import accumulate

import numpy as np

from turtlemq import small_batches
from turtlemq.index.parts import Cursor, Part
from turtlemq.index.segments import Segments
from turtlemq.model import I64, ORDINAL_BITS, Damage
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.table import Damaged

_PEEK = 8  # keys read first: mostly not even one more is due
_ORDINAL = (1 << ORDINAL_BITS) - 1
_NOTHING = (0, -1, 0, b"")  # stands for a cancelled or damaged document


def small_keys(cursors: Sequence[Cursor], limit: int) -> list[tuple[int, int, int]] | None:
    """All due keys of all cursors as (due time, number of the cursor, ordinal), sorted. None if there are too many."""
    due: list[tuple[int, int, int]] = []
    for i, cursor in enumerate(cursors):
        keys = cursor.following(_PEEK)
        if len(keys) == _PEEK and keys[-1] < limit:
            keys = cursor.following(small_batches.HANDOFF + 1)
        del keys[bisect_left(keys, limit) :]
        if len(due) + len(keys) > small_batches.HANDOFF:
            return None
        due += [(key >> ORDINAL_BITS, i, key & _ORDINAL) for key in keys]
    if len(cursors) > 1:
        due.sort()
    return due


class SmallBatch:
    """The keys of one handoff and, after `read`, their documents. All lists are in merge order. `firing.LargeBatch` has the same
    methods with arrays."""

    def __init__(self, cursors: Sequence[Cursor], keys: list[tuple[int, int, int]]) -> None:
        self.cursors = cursors
        self.source = [source for _, source, _ in keys]
        self.due_ms = [due for due, _, _ in keys]
        self.ordinals = [ordinal for _, _, ordinal in keys]
        self.spans: list[tuple[int, int] | None] = []  # None: cancelled
        for _, source, ordinal in keys:
            part = cursors[source].part
            self.spans.append(part.span_of(ordinal) if part.ended is None or part.alive_one(ordinal) else None)
        self.count = len(keys)
        self.documents: list[tuple[int, int, int, bytes]] = []  # due, seq, flags, bytes
        self.seq: list[int] = []

    def cut_to(self, bytes_max: int) -> bool:
        """Keep the first `bytes_max` bytes, but one document at least. True if anything was cut off."""
        total = 0
        for i, span in enumerate(self.spans):
            if span is not None:
                total += span[1] - span[0]
                if total > bytes_max:
                    cut, self.count = max(1, i) < self.count, max(1, i)
                    return cut
        return False

    def read(self, segments: Segments) -> None:
        """Read the documents that are not cancelled, and check each against its key."""
        self.documents = [_NOTHING] * self.count
        by_cursor: list[dict[int, tuple[int, int]]] = [{} for _ in self.cursors]
        for i, source, span in zip(range(self.count), self.source, self.spans, strict=False):
            if span is not None:
                by_cursor[source][i] = span
        for cursor, spans in zip(self.cursors, by_cursor, strict=True):
            if spans:
                self._read(segments, cursor.part, spans)
        self.seq = [document[1] for document in self.documents]

    def _read(self, segments: Segments, part: Part, spans: dict[int, tuple[int, int]]) -> None:
        """Read and check the documents of one cursor: row → byte range."""
        misdated, misplaced, before = False, False, _NOTHING
        for i, document in zip(spans, log.read_small(segments.door, part.path, list(spans.values())), strict=True):
            if document is not None:
                self.documents[i] = document
                misdated |= document[0] != self.due_ms[i]
                misplaced |= document <= before or not part.first_seq <= document[1] <= part.last_seq  # by due, then seq
                before = document
            else:
                start, end = spans[i]
                segments.damage(Damage(part.path.name, start, end - start, "checksum does not match"))
        if misdated:
            raise Damaged(f"{part.path.name}: its index names other due times than its documents.", part=part)
        if misplaced:
            good = [i for i in spans if self.documents[i] is not _NOTHING]
            for number in segments.strays(part, [(self.ordinals[i], f.decode(self.documents[i][3])) for i in good]):
                self.documents[good[number]] = _NOTHING

    def first_of(self, seqs: Set[int]) -> int:
        """The row of the first of these documents, or `count`."""
        return next((i for i, seq in enumerate(self.seq) if seq in seqs), self.count)

    def intact(self, stop: int) -> list[int]:
        """Rows before `stop` of documents that are neither cancelled nor damaged."""
        return [i for i, seq in enumerate(self.seq[:stop]) if seq >= 0]

    def _in_order(self, keep: list[int]) -> list[int]:
        """Sort copies made by compaction to where their originals were among equal due times."""
        order = {i: f.decode(self.documents[i][3]).order for i in keep if self.documents[i][2] & f.MOVED}
        return sorted(keep, key=lambda i: (self.due_ms[i], order.get(i, self.seq[i]))) if order else keep

    def join(self, keep: list[int]) -> tuple[bytes, I64, I64, I64, int, None]:
        """The kept documents back to back, their starts, due times and seqs, and the flags that any of them has. The last value,
        hashes of ids, is always None."""
        keep = self._in_order(keep)
        pieces = [self.documents[i][3] for i in keep]
        starts = [0, *accumulate(map(len, pieces))][: len(keep)]
        columns = np.array([starts, [self.due_ms[i] for i in keep], [self.seq[i] for i in keep]], np.int64)  # cheaper than three
        flags = 0
        for i in keep:
            flags |= self.documents[i][2]
        return b"".join(pieces), columns[0], columns[1], columns[2], flags, None

    def moves(self, stop: int) -> list[tuple[Cursor, int, int]]:
        """For each cursor its position after the first `stop` keys, and the number of sleepers among them."""
        keys, sleepers = [0] * len(self.cursors), [0] * len(self.cursors)
        for source, span in zip(self.source[:stop], self.spans[:stop], strict=True):
            keys[source] += 1
            sleepers[source] += span is not None
        return [(cursor, cursor.pos + keys[i], sleepers[i]) for i, cursor in enumerate(self.cursors)]
