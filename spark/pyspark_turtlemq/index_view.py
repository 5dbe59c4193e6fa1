"""A read-only view of a topic's index: the engine's own parts, cursors and tombstones, over the files of a snapshot.

Forecasts and disk usage count live sleepers with it, from the tables alone. Documents are read
only to set cursors (handoffs) and to find the targets of tombstones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pyspark_turtlemq.part import Part
from pyspark_turtlemq.table_repair import sound_parts
from turtlemq.index.parts import TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import Damage, Progress
from turtlemq.segment.table import Damaged
from turtlemq.storage.door import Door

R = TypeVar("R")


class ReadOnlySegments(Segments):
    """Segments that note damage in memory; the engine's would also copy the damaged bytes to a file."""

    def damage(self, damage: Damage) -> None:
        self.counters.damage.append(damage)


def with_parts(topic: str, parts: Sequence[Part], progress: Progress, action: Callable[[list[TablePart]], R]) -> R:
    """The result of `action` for the engine's parts of these, in the same order, with cursors and ended bits set. If it meets a
    damaged table, it is run again with a new one."""
    try:
        return _with_parts(topic, parts, progress, action)
    except Damaged:
        return _with_parts(topic, sound_parts(parts), progress, action)


def _with_parts(topic: str, parts: Sequence[Part], progress: Progress, action: Callable[[list[TablePart]], R]) -> R:
    door = Door()
    try:
        segments = ReadOnlySegments(door, Path(), topic, progress)
        tables = [TablePart(Path(part.file.path).parent, part.open(), part.file.name, part.sealed) for part in parts]
        segments.parts = sorted(tables, key=lambda table: table.first_seq)
        for table in tables:
            segments.set_cursors(table)
        segments.apply_ends(segments.parts)
        return action(tables)
    finally:
        door.shut()
