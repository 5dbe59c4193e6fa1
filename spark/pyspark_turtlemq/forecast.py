"""Kind `forecast`: the number of sleepers by due time, from the keys of the tables. Bodies and prefixes are not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pyspark_turtlemq.index_view import with_parts
from pyspark_turtlemq.part import Part
from pyspark_turtlemq.parts import LogSnapshot
from turtlemq.index.parts import Cursor, TablePart
from turtlemq.model import I64, U64, Progress
from turtlemq.segment import format as f
from turtlemq.segment.table import FANOUT

_EMPTY: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ForecastSplit:
    """All parts of a topic's delay log. `bytes` are those of the keys."""

    topic: str
    parts: list[Part]
    progress: Progress
    bucket_ms: int
    bytes: int


def forecast_split(topic: str, log: LogSnapshot, bucket_ms: int) -> ForecastSplit:
    return ForecastSplit(topic, log.parts, log.progress, bucket_ms, 8 * sum(part.cover.documents for part in log.parts))


def count_buckets(split: ForecastSplit) -> tuple[I64, I64]:
    """Due times at which non-empty buckets begin, sorted, and the number of sleepers in each."""

    def count(tables: list[TablePart]) -> list[tuple[I64, I64]]:
        return [_count_cursor(table, cursor, split.bucket_ms) for table in tables for cursor in table.cursors]

    counted = with_parts(split.topic, split.parts, split.progress, count)
    buckets = np.concatenate([_EMPTY, *(numbers for numbers, _ in counted)])
    counts = np.concatenate([_EMPTY, *(sleepers for _, sleepers in counted)])
    numbers, which = np.unique(buckets, return_inverse=True)
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, which, counts)
    return numbers[sums > 0] * split.bucket_ms, sums[sums > 0]


def _count_cursor(part: TablePart, cursor: Cursor, bucket_ms: int) -> tuple[I64, I64]:
    """Bucket numbers, and the sleepers of a cursor in each. Keys are sorted, so only the edges of buckets are searched."""
    keys, pos, end = cursor.keys, cursor.pos, len(cursor.keys)
    if pos == end:
        return _EMPTY, _EMPTY
    low, high = (int(f.key_dues(keys.slice(at, at + 1))[0]) // bucket_ms for at in (pos, end - 1))
    if part.ended is None and (high - low) * FANOUT < end - pos:  # most leaves hold no edge of a bucket: they are not read
        numbers = np.arange(low, high + 1)
        return numbers, np.diff(np.maximum(keys.ranks(_edges(numbers, bucket_ms)), pos), append=end)
    sleepers = keys.slice(pos, end)
    if part.ended is not None:
        sleepers = sleepers[part.alive(f.key_ordinals(sleepers))]
    numbers = np.arange(low, high + 1) if high - low < len(sleepers) else np.unique(f.key_dues(sleepers) // bucket_ms)
    return numbers, np.diff(np.searchsorted(sleepers, _edges(numbers, bucket_ms)), append=len(sleepers))


def _edges(numbers: I64, bucket_ms: int) -> U64:
    return f.packed_keys(numbers * bucket_ms, np.zeros(1, np.int64))


def read(split: ForecastSplit, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a topic: one for each bucket that is not empty."""
    due, counts = count_buckets(split)
    columns = {
        "topic": pa.repeat(pa.scalar(split.topic), len(due)),
        "due": pa.array(due * 1000).view(pa.timestamp("us", "UTC")),
        "due_ms": pa.array(due),
        "messages": pa.array(counts),
    }
    if len(due):
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
