"""How much comes due when, from the tables alone: no document is read but those few that decide what was handed off or ended.

The engine's own code does it, on the pinned files: its parts and cursors, its marks, its tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pyspark_turtlemq.parts import Log, Part
from turtlemq.door import Door
from turtlemq.index.parts import TablePart
from turtlemq.index.shelf import Shelf
from turtlemq.model import I64, Damage, Progress
from turtlemq.segment import format as f


@dataclass(frozen=True, slots=True)
class Tables:
    """All parts of a topic's log of sleepers. `bytes` are those of the keys."""

    topic: str
    parts: list[Part]
    progress: Progress
    bucket_ms: int
    bytes: int


class _Shelf(Shelf):
    """A shelf that writes nothing."""

    def damage(self, damage: Damage) -> None:
        self.counters.damage.append(damage)


def tables(topic: str, log: Log, bucket_ms: int) -> Tables:
    """What a task needs to know."""
    return Tables(topic, log.parts, log.progress, bucket_ms, 8 * sum(part.cover.documents for part in log.parts))


def count(piece: Tables) -> tuple[I64, I64]:
    """Due times of the buckets that are not empty, and how many sleepers each has."""
    found: dict[int, int] = {}
    door = Door()
    shelf = _Shelf(door, Path(), piece.topic)
    shelf.progress = piece.progress
    for part in piece.parts:
        shelf.parts.append(TablePart(Path(part.file.path).parent, part.open(), part.file.name, part.sealed))
    shelf.parts.sort(key=lambda one: one.first_seq)
    for opened in shelf.parts:
        assert isinstance(opened, TablePart)
        shelf.place(opened)
    shelf.apply_kills(shelf.parts)
    for opened in shelf.parts:
        for cursor in opened.cursors:
            keys = cursor.keys.slice(cursor.pos, len(cursor.keys))
            if opened.dead is not None:
                keys = keys[opened.alive(f.key_ordinals(keys))]
            dues = f.key_dues(keys)
            dues -= dues % piece.bucket_ms
            firsts = np.flatnonzero(np.append(True, dues[1:] != dues[:-1])) if len(dues) else np.empty(0, np.int64)
            for due, number in zip(dues[firsts].tolist(), np.diff(np.append(firsts, len(dues))).tolist(), strict=True):
                found[due] = found.get(due, 0) + number
    door.shut()
    due = np.array(sorted(found), np.int64)
    return due, np.array([found[at] for at in due.tolist()], np.int64)


def read(piece: Tables, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows of a topic: one for each bucket."""
    due, counts = count(piece)
    columns = {
        "topic": pa.repeat(pa.scalar(piece.topic), len(due)),
        "due": pa.array(due * 1000).view(pa.timestamp("us", "UTC")),
        "due_ms": pa.array(due),
        "messages": pa.array(counts),
    }
    if len(due):
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
