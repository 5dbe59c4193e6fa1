"""How much comes due when, from the tables alone: no document is read but those few that decide what was handed off or ended.

The engine's own code does it, on the pinned files: its parts and cursors, its marks, its tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pyspark_turtlemq.parts import LogSnapshot, Part
from turtlemq.index import parts as index
from turtlemq.index.parts import Cursor, TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import I64, U64, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment.table import FANOUT
from turtlemq.storage.door import Door

_NONE: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ForecastSplit:
    """All parts of a topic's log of sleepers. `bytes` are those of the keys."""

    topic: str
    parts: list[Part]
    progress: Progress
    bucket_ms: int
    bytes: int


class _Shelf(Segments):
    """A shelf that writes nothing."""

    def damage(self, damage: Damage) -> None:
        self.counters.damage.append(damage)


def forecast_split(topic: str, log: LogSnapshot, bucket_ms: int) -> ForecastSplit:
    """What a task needs to know."""
    return ForecastSplit(topic, log.parts, log.progress, bucket_ms, 8 * sum(part.cover.documents for part in log.parts))


def count(piece: ForecastSplit) -> tuple[I64, I64]:
    """Due times of the buckets that are not empty, and how many sleepers each has."""
    door = Door()
    shelf = _Shelf(door, Path(), piece.topic, piece.progress)
    for part in piece.parts:
        shelf.parts.append(TablePart(Path(part.file.path).parent, part.open(), part.file.name, part.sealed))
    shelf.parts.sort(key=lambda one: one.first_seq)
    for opened in shelf.parts:
        assert isinstance(opened, TablePart)
        shelf.set_cursors(opened)
    shelf.apply_ends(shelf.parts)
    found = [_counted(opened, cursor, piece.bucket_ms) for opened in shelf.parts for cursor in opened.cursors]
    door.shut()
    buckets = np.concatenate([_NONE, *(numbers for numbers, _ in found)])
    counts = np.concatenate([_NONE, *(some for _, some in found)])
    together, which = np.unique(buckets, return_inverse=True)
    sums = np.zeros(len(together), np.int64)
    np.add.at(sums, which, counts)
    return together[sums > 0] * piece.bucket_ms, sums[sums > 0]


def _counted(part: index.Part, cursor: Cursor, bucket_ms: int) -> tuple[I64, I64]:
    """Numbers of buckets, and how many sleepers of a cursor each has. Keys are sorted: only where buckets begin must be found."""
    keys, pos, end = cursor.keys, cursor.pos, len(cursor.keys)
    if pos == end:
        return _NONE, _NONE
    low, high = (int(f.key_dues(keys.slice(at, at + 1))[0]) // bucket_ms for at in (pos, end - 1))
    if part.ended is None and (high - low) * FANOUT < end - pos:  # most leaves hold no edge of a bucket: they are not read
        numbers = np.arange(low, high + 1)
        return numbers, np.diff(np.maximum(keys.ranks(_edges(numbers, bucket_ms)), pos), append=end)
    some = keys.slice(pos, end)
    if part.ended is not None:
        some = some[part.alive(f.key_ordinals(some))]
    numbers = np.arange(low, high + 1) if high - low < len(some) else np.unique(f.key_dues(some) // bucket_ms)
    return numbers, np.diff(np.searchsorted(some, _edges(numbers, bucket_ms)), append=len(some))


def _edges(numbers: I64, bucket_ms: int) -> U64:
    return f.packed_keys(numbers * bucket_ms, np.zeros(1, np.int64))


def read(piece: ForecastSplit, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
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
