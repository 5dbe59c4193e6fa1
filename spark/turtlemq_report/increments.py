"""Incremental reads: for each topic, the ready log and the journals behind the positions where the last run ended.

Planned on the driver from one snapshot, read by tasks with the readers of the data source. A log only grows at its end and loses
whole files at its beginning, so a position stays valid. A topic that was deleted and created again is recognised by the document
right before the position: it is read from its beginning, and its earlier results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pyspark_turtlemq.documents import DocumentSplit
from pyspark_turtlemq.journals import JournalSplit
from pyspark_turtlemq.options import Options, schema_ddl
from pyspark_turtlemq.parts import EndedDocuments, LogSnapshot, TopicLogs
from pyspark_turtlemq.plan import share_splits
from pyspark_turtlemq.snapshot_files import File
from pyspark_turtlemq.splits import Split
from pyspark_turtlemq.table_repair import PartTable
from turtlemq.model import Progress
from turtlemq.segment import table as t

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = {
    "ready": "topic group state ready_ms due_ms created_ms error damage".split(),
    "reserve": "topic number event group at_ms epoch consumer offset attempt error damage".split(),
    "history": "topic event outcome group at_ms offset ready_ms reserved_ms attempt error damage".split(),
}
_SPLIT_BYTES = 16 << 20  # of a journal


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """The end of the last read of a log. Field names are those of STATE.json."""

    base: int = -1  # of the segment; -1: nothing was read yet
    position: int = 0  # byte behind the last document
    number: int = 0  # of the next row
    last: int = 0  # byte at which the last document begins
    mark: int = 0  # checksum of the last document


@dataclass(slots=True)
class Increment:
    """The splits that one run reads, by log, and the positions where it ends, by topic and log."""

    positions: dict[str, dict[str, ReadPosition]] = field(default_factory=dict)
    splits: dict[str, list[Split]] = field(default_factory=lambda: {"ready": [], "reserve": [], "history": []})
    recreated: list[str] = field(default_factory=list)  # topics that were deleted and created again
    missed: list[str] = field(default_factory=list)  # rows that retention removed before a run read them
    damage: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(split.bytes for splits in self.splits.values() for split in splits)

    def as_json(self) -> dict[str, Any]:
        """The positions, for STATE.json."""
        return {topic: {log: asdict(at) for log, at in logs.items()} for topic, logs in self.positions.items()}


def read_positions(saved: dict[str, Any]) -> dict[str, dict[str, ReadPosition]]:
    """The inverse of `Increment.as_json`.

    >>> read_positions({"t": {"ready": {"base": 0, "position": 9, "number": 1, "last": 0, "mark": 5}}})["t"]["ready"].number
    1
    """
    return {topic: {log: ReadPosition(**at) for log, at in logs.items()} for topic, logs in saved.items()}


def plan_increment(topics: dict[str, TopicLogs], known: dict[str, dict[str, ReadPosition]]) -> Increment:
    """New rows of these topics, behind the known positions; all rows of a topic that was created again."""
    increment = Increment()
    for topic, logs in topics.items():
        ready = logs.ready_log()
        increment.damage += [f"{topic}/{damage.file}: {damage.reason} at position {damage.position}" for damage in ready.damage]
        positions = known.get(topic, {})
        if any(_recreated(logs, ready, log, at) for log, at in positions.items()):
            increment.recreated.append(topic)
            positions = {}
        increment.positions[topic] = {"ready": _add_ready(increment, logs, ready, positions.get("ready", ReadPosition()))}
        for log in ("reserve", "history"):
            increment.positions[topic][log] = _add_journal(increment, logs, log, positions.get(log, ReadPosition()))
    return increment


def _recreated(logs: TopicLogs, ready: LogSnapshot, log: str, at: ReadPosition) -> bool:
    """True if this log is not the one that the position belongs to."""
    if at.base < 0:
        return False
    if log == "ready" and ready.end < at.number:
        return True
    file = dict(logs.files.segments(log)).get(at.base)
    if file is None:
        return not logs.files.segments(log)  # retention never removes the newest segment
    return file.size < at.position or _checksum(file, at.last) != at.mark


def _checksum(file: File, at: int) -> int:
    """The stored checksum of the document that begins at this byte."""
    return int.from_bytes(file.map()[at + 9 : at + 13], "little")


def _add_ready(into: Increment, logs: TopicLogs, log: LogSnapshot, begin: ReadPosition) -> ReadPosition:
    """Add the messages of the ready log from `begin` on. Returns the position behind them."""
    oldest = min((part.cover.first_seq for part in log.parts), default=log.end)
    if begin.base >= 0 and begin.number < oldest:
        into.missed.append(f"{logs.files.topic}: {oldest - begin.number} messages of the ready log")
    end = begin
    for part in log.parts:
        cover = part.cover
        first = max(0, begin.number - cover.first_seq)
        if first < cover.documents:
            start, last = PartTable(part).use(partial(_starts, (first, cover.documents - 1)))
            size = cover.end - start
            into.splits["ready"].append(DocumentSplit(part, first, cover.documents, size, EndedDocuments(), Progress()))
            end = ReadPosition(cover.base, cover.end, cover.first_seq + cover.documents, last, _checksum(part.file, last))
    return end


def _starts(ordinals: tuple[int, int], table: t.Table) -> tuple[int, int]:
    """The bytes at which two documents begin."""
    first, last = (table.span_of(ordinal)[0] for ordinal in ordinals)
    return first, last


def _add_journal(into: Increment, logs: TopicLogs, log: str, begin: ReadPosition) -> ReadPosition:
    """Add the events of a journal from `begin` on; earlier bytes are not scanned. Returns the position behind them."""
    topic, end = logs.files.topic, begin
    for base, file, start, events in logs.journal_scans(log, since=(begin.base, begin.position)):
        if end is begin and begin.base >= 0 and int(events.seq[0]) > begin.number:
            into.missed.append(f"{topic}: {_lost_events(log, int(events.seq[0]) - begin.number)}")
        ends = (events.positions + events.lengths).tolist()
        into.splits[log] += _journal_splits(topic, log, file, start, events.end, ends)
        last = int(events.positions[-1])
        end = ReadPosition(base, events.end, int(events.seq[-1]) + 1, last, _checksum(file, last))
    return end


def _lost_events(log: str, count: int) -> str:
    """Events that retention removed, in words. Retention itself writes checkpoints into the journal of leases and removes them in
    a later run: these have numbers, too, but nothing of them is missing.

    >>> _lost_events("history", 3), _lost_events("reserve", 1)
    ('3 events of its history', 'up to 1 events of its reserve, checkpoints among them')
    """
    return f"up to {count} events of its {log}, checkpoints among them" if log == "reserve" else f"{count} events of its {log}"


def _journal_splits(topic: str, log: str, file: File, start: int, end: int, event_ends: list[int]) -> Iterator[JournalSplit]:
    for at in event_ends:
        if at - start >= _SPLIT_BYTES and at < end:
            yield JournalSplit(topic, log, file, start, at)
            start = at
    if start < end:
        yield JournalSplit(topic, log, file, start, end)


def frame(spark: SparkSession, splits: Sequence[Split], options: Options, tasks: int) -> DataFrame:
    """The rows of these splits, read by at most so many tasks."""
    partitions = share_splits(splits, tasks) if splits else []
    if not partitions:
        return spark.createDataFrame([], schema_ddl(options))
    numbers = spark.range(0, len(partitions), 1, len(partitions))
    return numbers.mapInArrow(_reader(partitions, options), schema_ddl(options))


def _reader(partitions: list[list[Split]], options: Options) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for tasks: numbers of partitions in, their rows out."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark_turtlemq.predicates import Predicates
        from pyspark_turtlemq.splits import read_splits
        from pyspark_turtlemq.table import arrow_schema_of

        for batch in batches:
            for number in np.asarray(batch.column(0)).tolist():
                yield from read_splits(partitions[number], options, Predicates(), arrow_schema_of(options))

    return read
