"""Structured streaming: new rows of the ready log or of the history, each exactly once, over restarts and segment rolls.

A stream offset holds, for each topic, a position in its log: the base of a segment, the byte behind the last whole batch, and
the number of the next row. The log is synced before its end becomes an offset, so no row that was read can be lost by a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pyspark_turtlemq import pins
from pyspark_turtlemq.documents import DocumentSplit
from pyspark_turtlemq.journals import JournalSplit
from pyspark_turtlemq.kinds import KINDS
from pyspark_turtlemq.options import Options
from pyspark_turtlemq.part import Part, ready_table
from pyspark_turtlemq.partition import Partition, arrow_schema
from pyspark_turtlemq.parts import EndedDocuments
from pyspark_turtlemq.plan import share_splits
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.shard_layout import ShardLayout, topic_of
from pyspark_turtlemq.snapshot_files import File, TopicFiles
from pyspark_turtlemq.splits import read_splits
from turtlemq.broker.ready_batches import read_batches
from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.model import Progress
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.readonly import data_start, segment_bases
from turtlemq.segment.scan import scan
from turtlemq.storage import names

LogPosition = tuple[int, int, int]  # base of a segment, byte in it, number of the next row (-1: not known)
_SPLIT_BYTES = 8 << 20


class DataLoss(TurtleError):
    """Rows that this stream has not read yet are gone."""


@dataclass(frozen=True, slots=True)
class ReadySplit:
    """Whole batches of the ready log: bytes [start, end) of a segment, rows [first, last)."""

    topic: str
    file: File
    start: int
    end: int
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    def document_split(self) -> DocumentSplit:
        """These documents as a split of the batch reader, with a table that is made here."""
        view = self.file.map()
        scanned = scan(view, self.start, self.end, sealed=True)
        batches = read_batches(view, scanned, self.start, self.first, (self.end, self.last))
        name = names.parse(self.file.name)
        count = len(batches.positions)
        cover = t.Cover(name.base if name else 0, 0, 0, count, self.start, self.end, self.first, self.first + count - 1, 0)
        table = ready_table(cover, batches.positions, batches.ready_ms)
        part = Part(self.topic, "ready", self.file, False, table, cover)
        return DocumentSplit(part, 0, count, self.bytes, EndedDocuments(), Progress())


class LogTail:
    """The ends of whole batches in one topic's log, known up to some position. Each byte is scanned once."""

    def __init__(self, folder: Path, topic: str, kind: str) -> None:
        self.folder, self.topic, self.kind = folder, topic, kind
        self.known: list[LogPosition] = []

    def _bases(self) -> list[int]:
        try:
            return segment_bases(map(names.parse, os.listdir(self.folder)), self.kind)
        except FileNotFoundError:
            return []

    def _file(self, base: int) -> File:
        path = self.folder / names.segment(self.kind, base)
        return File(str(path), path.stat().st_size)

    def data_start(self, base: int) -> int:
        """The byte at which the documents of a segment begin."""
        return data_start(self.kind, self.topic, base)

    def earliest(self) -> LogPosition | None:
        """The beginning of the oldest segment; None if there is none yet."""
        for base in self._bases():
            return base, self.data_start(base), self.first_row(base)
        return None

    def boundaries(self, begin: LogPosition, fail: bool) -> list[LogPosition]:
        """The ends of all batches behind `begin`, in order. Raises `DataLoss` if rows behind it are gone and `fail` is set."""
        if not self.known or self.known[0] > begin or begin not in self.known:
            self.known = [begin]
        self.known = self.known[self.known.index(begin) :]
        bases = self._bases()
        self._check_loss(begin, bases, fail)
        at = self.known[-1]
        for i, base in enumerate(bases):
            if base < at[0]:
                continue
            position = at[1] if base == at[0] else self.data_start(base)
            self._scan(base, position, at[2], last=i + 1 == len(bases))
            at = self.known[-1]
        return self.known[1:]

    def _check_loss(self, begin: LogPosition, bases: list[int], fail: bool) -> None:
        """Detect rows behind `begin` that retention removed, and a topic that was deleted and created again."""
        gone = begin[0] not in bases and begin[1] > 0
        exists = begin[0] in bases
        short = exists and self._file(begin[0]).size < begin[1]
        rolled = not exists and bool(bases) and begin[2] >= 0 and self.first_row(bases[0]) == begin[2]
        if (gone and not rolled and bases) or short:
            reason = "was removed by retention" if gone else "is shorter than what was read of it: the topic was made anew"
            text = f"topic {self.topic!r}: {names.segment(self.kind, begin[0])} {reason}"
            if fail:
                raise DataLoss(
                    f"{text}, and rows from number {begin[2]} on are lost. To go on with what is there: failOnDataLoss=false"
                )
            if short:
                self.known = [(begin[0], self.data_start(begin[0]), self.first_row(begin[0]))]

    def first_row(self, base: int) -> int:
        """The number of the first row of a segment; -1 if its first document is missing or damaged."""
        head = bytes(self._file(base).map()[self.data_start(base) :][: f.PREFIX_BYTES])
        if len(head) < f.PREFIX_BYTES:
            return -1
        prefix = f.prefixes(head, np.zeros(1, np.int64))
        valid = f.well_formed(prefix)[0] and (self.kind != "ready" or prefix["flags"][0] & f.HANDOFF)
        return int(prefix["seq"][0]) if valid else -1

    def _scan(self, base: int, position: int, number: int, last: bool) -> None:
        """Add the ends of the batches (`ready`) or events (`history`) of a segment from `position` on to `known`."""
        file = self._file(base)
        if position >= file.size:
            return
        if last:
            file.sync()
        view = file.map()
        if self.kind == "ready":
            scanned = scan(view, position, file.size, sealed=True)
            batches = read_batches(view, scanned, position, number if number >= 0 else None)
            heads = np.flatnonzero((scanned.flags & f.HANDOFF) != 0)
            heads = heads[scanned.positions[heads] < batches.end]
            ends = scanned.positions[heads[1:]].tolist()
            self.known += [(base, at, seq) for at, seq in zip(ends, scanned.seq[heads[1:]].tolist(), strict=True)]
            if len(heads):
                self.known.append((base, batches.end, batches.first_offset + len(batches.positions)))
        else:
            scanned = scan(view, position, file.size, sealed=not last)
            ends, seqs = (scanned.positions + scanned.lengths).tolist(), scanned.seq.tolist()
            self.known += [(base, end, seq + 1) for end, seq in zip(ends, seqs, strict=True)]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("turtlemq")`, of kind `ready` or `history`."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if not KINDS[options.kind].streams:
            kinds = " or ".join(name for name, kind in KINDS.items() if kind.streams)
            raise InvalidArgument(f"a stream is of kind {kinds}, not {options.kind!r}: only these grow at their end")
        self.options, self.schema = options, schema
        self.tails: dict[str, LogTail] = {}
        self.target: dict[str, LogPosition] | None = None  # where trigger(availableNow) stops
        self.snapshots: list[pins.Snapshot] = []

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get the options and the schema; the rest belongs to the driver."""
        return {**self.__dict__, "tails": {}, "snapshots": [], "target": None}

    def _tail(self, topic: str) -> LogTail:
        folder = ShardLayout.of(self.options.path).topic_folder(topic)
        return self.tails.setdefault(topic, LogTail(folder, topic_of(topic), self.options.kind))

    def _topics(self) -> list[str]:
        """The topics, by the names of their folders."""
        try:
            return ShardLayout.of(self.options.path).names_of(self.options.topics())
        except InvalidArgument:
            return []  # a topic may be created later

    # Offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        latest = self.options.starting == "latest"
        return _to_json(self._ends() if latest else self._begins())

    def _begins(self) -> dict[str, LogPosition]:
        """The earliest position of each topic that has a log."""
        earliest = {topic: self._tail(topic).earliest() for topic in self._topics()}
        return {topic: begin for topic, begin in earliest.items() if begin is not None}

    def _ends(self) -> dict[str, LogPosition]:
        """The latest position of each topic that has a log."""
        return {topic: (self._tail(topic).boundaries(begin, False) or [begin])[-1] for topic, begin in self._begins().items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self.options.rows_max:
            return ReadMaxRows(self.options.rows_max)
        return ReadMaxBytes(self.options.bytes_max) if self.options.bytes_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self.target = self._ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next micro-batch: whole batches up to the limit, but at least one if there is one."""
        begins = _from_json(start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        latest, taken = dict(begins), False
        for topic in sorted({*self._topics(), *begins}):
            tail = self._tail(topic)
            begin = begins.get(topic) or tail.earliest()
            if begin is None or (self.target is not None and topic not in self.target):
                continue
            ends = tail.boundaries(begin, self.options.fail_on_data_loss)
            if self.target is not None:
                ends = [end for end in ends if end[:2] <= self.target[topic][:2]]
            at = begin
            for end in ends:
                cost_rows, cost_bytes = end[2] - max(at[2], 0), end[1] - (at[1] if end[0] == at[0] else 0)
                full = (rows is not None and cost_rows > rows) or (size is not None and cost_bytes > size)
                if full and taken:
                    break
                rows, size = None if rows is None else rows - cost_rows, None if size is None else size - cost_bytes
                at, taken = end, True
            if at != begin:
                latest[topic] = at
        return _to_json(latest)

    # Rows

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = _from_json(start), _from_json(end)
        changed = [topic for topic, position in ends.items() if begins.get(topic) != position]
        if not changed:
            return [Partition([])]
        snapshot = pins.take_snapshot(self.options.path, changed, (self.options.kind,), pin=self.options.pin)
        self.snapshots.append(snapshot)
        splits: list[Any] = []
        for topic in changed:
            begin = begins.get(topic) or self._tail(topic).earliest() or (0, 0, -1)
            splits += self._splits(self._tail(topic), snapshot.topics[topic], begin, ends[topic])
        shared = share_splits(splits, self.options.partitions or len(os.sched_getaffinity(0)))
        return [Partition(partition) for partition in shared]

    def _splits(
        self, tail: LogTail, files: TopicFiles, begin: LogPosition, end: LogPosition
    ) -> Iterator[ReadySplit | JournalSplit]:
        """The log between two positions: segment by segment, the ready log also cut at known ends of batches."""
        segments = dict(files.segments(self.options.kind))
        if end[0] not in segments:
            raise DataLoss(
                f"topic {files.topic!r}: {names.segment(self.options.kind, end[0])} was removed by retention meanwhile"
            )
        for base, file in segments.items():
            if not begin[0] <= base <= end[0]:
                continue
            low = begin[1] if base == begin[0] else tail.data_start(base)
            high = end[1] if base == end[0] else file.size
            if self.options.kind == "history":
                yield from [JournalSplit(files.topic, "history", file, low, high)] if low < high else []
                continue
            later = [other for other in segments if other > base]
            first = begin[2] if base == begin[0] and begin[2] >= 0 else tail.first_row(base)
            last = end[2] if base == end[0] else tail.first_row(min(later))
            cuts = [(at, number) for other, at, number in tail.known if other == base and low < at < high]
            yield from _ready_splits(files.topic, file, [(low, first), *cuts, (high, last)])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        for split in partition.splits:
            document_split = split.document_split() if isinstance(split, ReadySplit) else split
            yield from read_splits([document_split], self.options, Predicates(), arrow_schema(self.schema))

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has processed the stream up to `end`: release all snapshots but the newest, which may still be read."""
        for snapshot in self.snapshots[:-1]:
            snapshot.release()
        self.snapshots = self.snapshots[-1:]

    def stop(self) -> None:
        for snapshot in self.snapshots:
            snapshot.release()
        self.snapshots = []


def _ready_splits(topic: str, file: File, cuts: list[tuple[int, int]]) -> Iterator[ReadySplit]:
    """Splits of at least `_SPLIT_BYTES` between cuts, which are (byte, row) at ends of batches; the last one may be smaller."""
    start, first = cuts[0]
    for i, (end, last) in enumerate(cuts[1:], 1):
        if i + 1 == len(cuts) or end - start >= _SPLIT_BYTES:
            if start < end and first < last:
                yield ReadySplit(topic, file, start, end, first, last)
            start, first = end, last


def _to_json(positions: dict[str, LogPosition]) -> dict[str, Any]:
    return {topic: {"base": base, "position": at, "number": number} for topic, (base, at, number) in sorted(positions.items())}


def _from_json(offset: dict[str, Any]) -> dict[str, LogPosition]:
    return {topic: (int(at["base"]), int(at["position"]), int(at["number"])) for topic, at in (offset or {}).items()}
