"""A read-only view of a topic's index: the engine's own parts, cursors and tombstones, over the files of a snapshot.

Forecasts and disk usage count live sleepers with it, from the tables alone. Documents are read
only to set cursors (handoffs) and to find the targets of tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark_turtlemq.parts import Part
from turtlemq.index.parts import TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import Damage, Progress
from turtlemq.storage.door import Door


class ReadOnlySegments(Segments):
    """Segments that note damage in memory; the engine's would also copy the damaged bytes to a file."""

    def damage(self, damage: Damage) -> None:
        self.counters.damage.append(damage)


@contextmanager
def opened_parts(topic: str, parts: Sequence[Part], progress: Progress) -> Iterator[list[TablePart]]:
    """The engine's parts for these, in the same order, with cursors and ended bits set."""
    door = Door()
    try:
        segments = ReadOnlySegments(door, Path(), topic, progress)
        tables = [TablePart(Path(part.file.path).parent, part.open(), part.file.name, part.sealed) for part in parts]
        segments.parts = sorted(tables, key=lambda table: table.first_seq)
        for table in tables:
            segments.set_cursors(table)
        segments.apply_ends(segments.parts)
        yield tables
    finally:
        door.shut()
