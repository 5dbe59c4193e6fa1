"""Arrivals: the documents of the delay log in the order in which they were written, from a position on.

Only segments that still grow, or wait for their seal, have them in that order: a seal sorts a segment by due time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from turtlemq.index.segments import Segments
from turtlemq.model import SEQ_COUNTER_BITS
from turtlemq.segment.forward import File, documents_from, first_from, lacks


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
