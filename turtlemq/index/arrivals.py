"""Arrivals: the documents of the delay log in the order in which they were written, from a position on.

Only segments that still grow, or wait for their seal, have them in that order: a seal sorts a segment by due time. Versions of
one message are found in all segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from turtlemq.index.memtable import Memtable
from turtlemq.index.segments import Segments
from turtlemq.model import SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.segment.forward import File, documents_from, first_from, lacks
from turtlemq.segment.ids import hash_any


class Arrivals:
    """The documents of one Index as they came, published ones only."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    @property
    def end(self) -> int:
        """The position behind the last document."""
        active = self._segments.active
        return active.base + active.size

    def documents(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Documents from a position on, each with the position behind it."""
        return documents_from(self._files(), position)

    def versions(self, id_: str) -> list[f.Document]:
        """Every document with this id that a file still holds, ended and handed-off ones included, tombstones not; oldest first.
        A seal has removed those that had ended by then."""
        found = list[f.Document]()
        for part in self._segments.parts:
            hash_ = hash_any([id_.encode()], part.seed)[0]
            known = np.flatnonzero(part.hashes[: part.count] == hash_) if isinstance(part, Memtable) else part.find(int(hash_))
            documents = self._segments.read_many(part, np.sort(np.asarray(known, np.int64)))
            found += [one for one in documents if one is not None and one.id == id_ and not one.flags & f.TOMBSTONE]
        return sorted(found, key=lambda one: one.seq)

    def lacks(self, position: int) -> bool:
        """Whether documents behind this position are in no segment that is read here."""
        return lacks(self._files(), position)

    def position_at(self, at_ms: int) -> int:
        """A position before all documents that arrived at a time or later, close to the first of them."""
        seq, parts = at_ms << SEQ_COUNTER_BITS, self._segments.by_base
        for base, start, end, open_ in self._files():
            if max((part.last_seq for part in parts[base].parts), default=0) >= seq:
                return base + first_from(open_(), start, end, lambda found: found.seq < seq)
        return self.end

    def _files(self) -> list[File]:
        growing = [segment for segment in self._segments.by_base.values() if not segment.sealed]
        return [File(one.base, one.data_start, one.size, partial(self._segments.door.map, one.path)) for one in growing]
