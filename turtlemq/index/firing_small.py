"""A few due documents, without arrays: at a thousand ticks a second nearly every one has some single messages, and a numpy call
costs as much for one as for a thousand. `firing.due` works with these lists or with arrays alike; what it decides is the same.
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

_PEEK = 8
_ORDINAL = (1 << ORDINAL_BITS) - 1
_NOTHING = (0, -1, 0, b"")  # in the place of a document that is cancelled or damaged


def small_keys(cursors: Sequence[Cursor], limit: int) -> list[tuple[int, int, int]] | None:
    """All due keys of all cursors as (due, number of the cursor, ordinal), in order. None: there are more than a few."""
    found: list[tuple[int, int, int]] = []
    for i, cursor in enumerate(cursors):
        keys = cursor.following(_PEEK)
        if len(keys) == _PEEK and keys[-1] < limit:
            keys = cursor.following(small_batches.HANDOFF + 1)
        del keys[bisect_left(keys, limit) :]
        if len(found) + len(keys) > small_batches.HANDOFF:
            return None
        found += [(key >> ORDINAL_BITS, i, key & _ORDINAL) for key in keys]
    if len(cursors) > 1:
        found.sort()
    return found


class SmallBatch:
    """The keys of one firing and, once read, their documents. Lists run in merge order. See `firing._Taken`."""

    def __init__(self, cursors: Sequence[Cursor], keys: list[tuple[int, int, int]]) -> None:
        self.cursors = cursors
        self.source = [source for _, source, _ in keys]
        self.due_ms = [due for due, _, _ in keys]
        self.ordinals = [ordinal for _, _, ordinal in keys]
        self.places: list[tuple[int, int] | None] = []  # None: cancelled
        for _, source, ordinal in keys:
            part = cursors[source].part
            self.places.append(part.span_of(ordinal) if part.ended is None or part.alive_one(ordinal) else None)
        self.count = len(keys)
        self.documents: list[tuple[int, int, int, bytes]] = []  # due, seq, flags, bytes
        self.seq: list[int] = []

    def cut_to(self, bytes_max: int) -> bool:
        """Take no more than this many bytes, but one document at least. True if something was left."""
        total = 0
        for i, place in enumerate(self.places):
            if place is not None:
                total += place[1] - place[0]
                if total > bytes_max:
                    cut, self.count = max(1, i) < self.count, max(1, i)
                    return cut
        return False

    def read(self, segments: Segments) -> None:
        """Read the documents that are not cancelled, and check that each is what the index says."""
        self.documents = [_NOTHING] * self.count
        wanted: list[dict[int, tuple[int, int]]] = [{} for _ in self.cursors]
        for i, source, place in zip(range(self.count), self.source, self.places, strict=False):
            if place is not None:
                wanted[source][i] = place
        for cursor, places in zip(self.cursors, wanted, strict=True):
            if places:
                self._read(segments, cursor.part, places)
        self.seq = [document[1] for document in self.documents]

    def _read(self, segments: Segments, part: Part, places: dict[int, tuple[int, int]]) -> None:
        """Those of one cursor."""
        odd, stray, before = False, False, _NOTHING
        for i, document in zip(places, log.read_small(segments.door, part.path, list(places.values())), strict=True):
            if document is not None:
                self.documents[i] = document
                odd |= document[0] != self.due_ms[i]
                stray |= document <= before or not part.first_seq <= document[1] <= part.last_seq  # by due, then seq
                before = document
            else:
                start, end = places[i]
                segments.damage(Damage(part.path.name, start, end - start, "checksum does not match"))
        if odd:
            raise Damaged(f"{part.path.name}: its index names other due times than its documents.", part=part)
        if stray:
            good = [i for i in places if self.documents[i] is not _NOTHING]
            for number in segments.strays(part, [(self.ordinals[i], f.decode(self.documents[i][3])) for i in good]):
                self.documents[good[number]] = _NOTHING

    def first_of(self, seqs: Set[int]) -> int:
        """Where the first of these documents stands."""
        return next((i for i, seq in enumerate(self.seq) if seq in seqs), self.count)

    def known(self, stop: int) -> list[int]:
        """Those before `stop` that are neither cancelled nor damaged."""
        return [i for i, seq in enumerate(self.seq[:stop]) if seq >= 0]

    def _in_order(self, keep: list[int]) -> list[int]:
        """Copies that compaction made stand where their originals stood among equal due times."""
        order = {i: f.decode(self.documents[i][3]).order for i in keep if self.documents[i][2] & f.MOVED}
        return sorted(keep, key=lambda i: (self.due_ms[i], order.get(i, self.seq[i]))) if order else keep

    def join(self, keep: list[int]) -> tuple[bytes, I64, I64, I64, None]:
        """The kept documents back to back, where each begins, their due times and seqs. Their hashes are not looked for."""
        keep = self._in_order(keep)
        pieces = [self.documents[i][3] for i in keep]
        starts = [0, *accumulate(map(len, pieces))][: len(keep)]
        dues, seqs = [self.due_ms[i] for i in keep], [self.seq[i] for i in keep]
        return b"".join(pieces), np.array(starts, np.int64), np.array(dues, np.int64), np.array(seqs, np.int64), None

    def moves(self, stop: int) -> list[tuple[Cursor, int, int]]:
        """For each cursor: where it stands after the first `stop` keys, and how many sleepers that passes."""
        keys, sleepers = [0] * len(self.cursors), [0] * len(self.cursors)
        for source, place in zip(self.source[:stop], self.places[:stop], strict=True):
            keys[source] += 1
            sleepers[source] += place is not None
        return [(cursor, cursor.pos + keys[i], sleepers[i]) for i, cursor in enumerate(self.cursors)]
