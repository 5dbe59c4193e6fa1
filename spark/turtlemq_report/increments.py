"""What is new since the last run: for each topic, the stretches of the ready log and of the journals behind the places where
that run ended. Planned on the driver from one snapshot, read by tasks with the readers of the data source.

Logs only grow at their end and lose whole files at their beginning, so a place stays a place. A topic that was deleted and made
anew is found out by what stands right before the place: then it is read from its beginning, and what was known of it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pyspark_turtlemq import plan as plans
from pyspark_turtlemq.documents import DocumentSplit
from pyspark_turtlemq.journals import JournalSplit
from pyspark_turtlemq.options import Options, schema_ddl
from pyspark_turtlemq.parts import EndedDocuments, LogSnapshot, TopicLogs
from pyspark_turtlemq.pins import File
from turtlemq.model import Progress
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = {
    "ready": "topic group state ready_ms due_ms created_ms error damage".split(),
    "reserve": "topic number event group at_ms epoch consumer offset attempt error damage".split(),
    "history": "topic event outcome group at_ms offset ready_ms reserved_ms attempt error damage".split(),
}
_CUT_BYTES = 16 << 20  # of a journal's new bytes, for one task


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """Where a log was read up to. `number` is that of the next row; `last` is where the document before it begins, and `mark` the
    checksum that it carries."""

    base: int = -1
    position: int = 0
    number: int = 0
    last: int = 0
    mark: int = 0


@dataclass(slots=True)
class Increment:
    """What one run reads of all topics, and the places where it ends."""

    positions: dict[str, dict[str, ReadPosition]] = field(default_factory=dict)
    splits: dict[str, list[Any]] = field(default_factory=lambda: {"ready": [], "reserve": [], "history": []})
    recreated: list[str] = field(default_factory=list)  # topics that were made anew
    missed: list[str] = field(default_factory=list)  # what retention removed before anybody read it
    damage: list[str] = field(default_factory=list)  # what opening the logs found

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for pieces in self.splits.values() for piece in pieces)

    def as_json(self) -> dict[str, Any]:
        return {topic: {log: asdict(place) for log, place in logs.items()} for topic, logs in self.positions.items()}


def read_positions(told: dict[str, Any]) -> dict[str, dict[str, ReadPosition]]:
    """The inverse of `Increment.as_json`.

    >>> read_positions({"t": {"ready": {"base": 0, "position": 9, "number": 1, "last": 0, "mark": 5}}})["t"]["ready"].number
    1
    """
    return {topic: {log: ReadPosition(**place) for log, place in logs.items()} for topic, logs in told.items()}


def plan_increment(openers: dict[str, TopicLogs], known: dict[str, dict[str, ReadPosition]]) -> Increment:
    """What is new in these topics. All of a topic that was made anew is."""
    found = Increment()
    for topic, opener in openers.items():
        ready = opener.ready_log()
        found.damage += [f"{topic}/{one.file}: {one.reason} at position {one.position}" for one in ready.damage]
        places = known.get(topic, {})
        if any(_anew(opener, ready, log, place) for log, place in places.items()):
            found.recreated.append(topic)
            places = {}
        found.positions[topic] = {"ready": _ready(found, opener, ready, places.get("ready", ReadPosition()))}
        for log in ("reserve", "history"):
            found.positions[topic][log] = _journal(found, opener, log, places.get(log, ReadPosition()))
    return found


def _anew(opener: TopicLogs, ready: LogSnapshot, log: str, place: ReadPosition) -> bool:
    """Is this not the log that the place belongs to?"""
    if place.base < 0:
        return False
    if log == "ready" and ready.end < place.number:
        return True
    file = dict(opener.files.segments(log)).get(place.base)
    if file is None:
        return not opener.files.segments(log)  # retention leaves the newest
    return file.size < place.position or _mark(file, place.last) != place.mark


def _mark(file: File, at: int) -> int:
    """The checksum that the document there carries."""
    return int.from_bytes(file.map()[at + 9 : at + 13], "little")


def _ready(into: Increment, opener: TopicLogs, log: LogSnapshot, place: ReadPosition) -> ReadPosition:
    """New messages of the ready log, by their offsets."""
    first_kept = min((part.cover.first_seq for part in log.parts), default=log.end)
    if place.base >= 0 and place.number < first_kept:
        into.missed.append(f"{opener.files.topic}: {first_kept - place.number} messages of the ready log")
    last: ReadPosition = place
    for part in log.parts:
        first = max(0, place.number - part.cover.first_seq)
        if first < part.cover.documents:
            table = part.open()
            start = table.span_of(first)[0]
            into.splits["ready"].append(
                DocumentSplit(part, first, part.cover.documents, part.cover.end - start, EndedDocuments(), Progress())
            )
            at = table.span_of(part.cover.documents - 1)[0]
            number = part.cover.first_seq + part.cover.documents
            last = ReadPosition(part.cover.base, part.cover.end, number, at, _mark(part.file, at))
    return last


def _journal(into: Increment, opener: TopicLogs, log: str, place: ReadPosition) -> ReadPosition:
    """New events of a journal, by bytes; only these are looked at."""
    segments = opener.files.segments(log)
    topic, last = opener.files.topic, place
    for i, (base, file) in enumerate(segments):
        start = len(f.encode_header(f.FileHeader(log, topic, base)))
        if base < place.base or file.size <= start:
            continue
        if base == place.base:
            start = place.position
        grows = i + 1 == len(segments)
        if grows:
            file.sync()
        if start >= file.size:
            continue
        broker = opener.clean_mark.get("broker")
        whole = not grows or (isinstance(broker, dict) and tuple(map(int, broker[log])) == (base, file.size))
        found = scan(file.map(), start, file.size, sealed=whole)
        if not len(found):
            continue
        if last is place and place.base >= 0 and int(found.seq[0]) > place.number:
            into.missed.append(f"{topic}: {int(found.seq[0]) - place.number} events of its {log}")
        into.splits[log] += _cut(topic, log, file, start, found.end, (found.positions + found.lengths).tolist())
        at = int(found.positions[-1])
        last = ReadPosition(base, found.end, int(found.seq[-1]) + 1, at, _mark(file, at))
    return last


def _cut(topic: str, log: str, file: File, start: int, end: int, ends: list[int]) -> Iterator[JournalSplit]:
    for at in ends:
        if at - start >= _CUT_BYTES and at < end:
            yield JournalSplit(topic, log, file, start, at)
            start = at
    if start < end:
        yield JournalSplit(topic, log, file, start, end)


def frame(spark: SparkSession, pieces: list[Any], told: Options, tasks: int) -> DataFrame:
    """The rows of these pieces: read by so many tasks, with the readers of the data source."""
    shared = plans.share_splits(pieces, tasks) if pieces else []
    if not shared:
        return spark.createDataFrame([], schema_ddl(told))
    return spark.range(0, len(shared), 1, len(shared)).mapInArrow(_reader(shared, told), schema_ddl(told))


def _reader(shared: list[list[Any]], told: Options) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark_turtlemq.predicates import Predicates
        from pyspark_turtlemq.table import rows, schema_of

        for batch in batches:
            for number in np.asarray(batch.column(0)).tolist():
                yield from rows(shared[number], told, Predicates(), schema_of(told))

    return read
