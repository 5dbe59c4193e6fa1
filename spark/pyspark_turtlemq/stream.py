"""Streams: new rows of the ready log or of the history journal, each once, over restarts and rolls of either side.

An offset is a place in a log, for each topic: the segment's base, the byte behind the last whole batch, the number of the next
row. What is offered is durable: the log is synced before its end is told, so nothing that was read can be taken back.
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

from pyspark_turtlemq import documents, journals, pins
from pyspark_turtlemq.options import Options
from pyspark_turtlemq.partition import Partition, arrow_schema
from pyspark_turtlemq.parts import EndedDocuments, Part
from pyspark_turtlemq.plan import share_splits
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.table import rows
from turtlemq.broker.ready_batches import read_batches
from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.model import Progress
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan
from turtlemq.storage import names

LogPosition = tuple[int, int, int]  # base, byte, number of the next row


class DataLoss(TurtleError):
    """Rows that this stream has not read yet are gone."""


@dataclass(frozen=True, slots=True)
class ReadySplit:
    """Whole batches of the ready log: bytes [start, end) of a segment, rows [first, last)."""

    topic: str
    file: pins.File
    start: int
    end: int
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    def slice(self) -> documents.DocumentSplit:
        """As the batch reader takes it, with a table made here."""
        view = self.file.map()
        found = scan(view, self.start, self.end, sealed=True)
        batches = read_batches(view, found, self.start, self.first, (self.end, self.last))
        known = names.parse(self.file.name)
        count = len(batches.positions)
        cover = t.Cover(known.base if known else 0, 0, 0, count, self.start, self.end, self.first, self.first + count - 1, 0)
        keys, none = f.packed_keys(batches.ready_ms, np.arange(count)), np.empty(0, np.int64)
        data = b"".join(t.build(cover, keys, np.append(batches.positions, self.end), none.astype(np.uint64), none, none))
        part = Part(self.topic, "ready", self.file, False, data, cover)
        return documents.DocumentSplit(part, 0, count, self.bytes, EndedDocuments(), Progress())


class LogTail:
    """The ends of whole batches in one topic's log, as far as it was looked at. Each byte is scanned once."""

    def __init__(self, folder: Path, topic: str, kind: str) -> None:
        self.folder, self.topic, self.kind = folder, topic, kind
        self.known: list[LogPosition] = []

    def _segments(self) -> list[int]:
        try:
            found = [names.parse(name) for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return []
        return sorted(one.base for one in found if one and one.kind == self.kind and one.what == "bson" and not one.suffix)

    def _file(self, base: int) -> pins.File:
        path = self.folder / names.segment(self.kind, base)
        return pins.File(str(path), path.stat().st_size)

    def _start(self, base: int) -> int:
        return len(f.encode_header(f.FileHeader(self.kind, self.topic, base)))

    def earliest(self) -> LogPosition | None:
        """Where what is retained begins; None: there is nothing yet."""
        for base in self._segments():
            return base, self._start(base), self.first(base)
        return None

    def boundaries(self, begin: LogPosition, fail: bool) -> list[LogPosition]:
        """Ends of batches behind `begin`, in order."""
        if not self.known or self.known[0] > begin or begin not in self.known:
            self.known = [begin]
        self.known = self.known[self.known.index(begin) :]
        bases = self._segments()
        self._check(begin, bases, fail)
        at = self.known[-1]
        for i, base in enumerate(bases):
            if base < at[0]:
                continue
            position = at[1] if base == at[0] else self._start(base)
            number = at[2]
            self._look(base, position, number, last=i + 1 == len(bases))
            at = self.known[-1]
        return self.known[1:]

    def _check(self, begin: LogPosition, bases: list[int], fail: bool) -> None:
        """Is everything from `begin` on still there?"""
        gone = begin[0] not in bases and begin[1] > 0
        there = begin[0] in bases
        short = there and self._file(begin[0]).size < begin[1]
        rolled = not there and bool(bases) and begin[2] >= 0 and self.first(bases[0]) == begin[2]
        if (gone and not rolled and bases) or short:
            what = "was removed by retention" if gone else "is shorter than what was read of it: the topic was made anew"
            text = f"topic {self.topic!r}: {names.segment(self.kind, begin[0])} {what}"
            if fail:
                raise DataLoss(
                    f"{text}, and rows from number {begin[2]} on are lost. To go on with what is there: failOnDataLoss=false"
                )
            if short:
                self.known = [(begin[0], self._start(begin[0]), self.first(begin[0]))]

    def first(self, base: int) -> int:
        """The number of the first row of a segment, -1 if that cannot be told."""
        head = bytes(self._file(base).map()[self._start(base) :][: f.PREFIX_BYTES])
        if len(head) < f.PREFIX_BYTES:
            return -1
        found = f.prefixes(head, np.zeros(1, np.int64))
        sure = f.well_formed(found)[0] and (self.kind != "ready" or found["flags"][0] & f.HANDOFF)
        return int(found["seq"][0]) if sure else -1

    def _look(self, base: int, position: int, number: int, last: bool) -> None:
        file = self._file(base)
        if position >= file.size:
            return
        if last:
            file.sync()
        view = file.map()
        if self.kind == "ready":
            found = scan(view, position, file.size, sealed=True)
            batches = read_batches(view, found, position, number if number >= 0 else None)
            heads = np.flatnonzero((found.flags & f.HANDOFF) != 0)
            heads = heads[found.positions[heads] < batches.end]
            ends = found.positions[heads[1:]].tolist()
            self.known += [(base, at, seq) for at, seq in zip(ends, found.seq[heads[1:]].tolist(), strict=True)]
            if len(heads):
                self.known.append((base, batches.end, batches.first_offset + len(batches.positions)))
        else:
            found = scan(view, position, file.size, sealed=not last)
            ends, seqs = (found.positions + found.lengths).tolist(), found.seq.tolist()
            self.known += [(base, end, seq + 1) for end, seq in zip(ends, seqs, strict=True)]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("turtlemq")`, of kind `ready` or `history`."""

    def __init__(self, told: Options, schema: StructType) -> None:
        if told.kind not in ("ready", "history"):
            raise InvalidArgument(f"a stream is of kind ready or history, not {told.kind!r}: only these grow at their end")
        self.options, self.schema = told, schema
        self.tails: dict[str, LogTail] = {}
        self.target: dict[str, LogPosition] | None = None
        self.pinned: list[pins.Snapshot] = []

    def __getstate__(self) -> dict[str, Any]:
        """Tasks need nothing of what the driver knows."""
        return {**self.__dict__, "followers": {}, "pinned": [], "target": None}

    def _tail(self, topic: str) -> LogTail:
        folder = self.options.path / names.TOPICS / topic
        return self.tails.setdefault(topic, LogTail(folder, topic, self.options.kind))

    def _topics(self) -> list[str]:
        try:
            return self.options.topics()
        except InvalidArgument:
            return []  # it may come yet

    # Offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        found: dict[str, LogPosition] = {}
        for topic in self._topics():
            follower = self._tail(topic)
            begin = follower.earliest()
            if begin is not None:
                ends = follower.boundaries(begin, False) if self.options.starting == "latest" else []
                found[topic] = ends[-1] if ends else begin
        return _told(found)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self.options.rows_max:
            return ReadMaxRows(self.options.rows_max)
        return ReadMaxBytes(self.options.bytes_max) if self.options.bytes_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self.target = {}
        for topic in self._topics():
            follower = self._tail(topic)
            begin = follower.earliest()
            if begin is not None:
                self.target[topic] = (follower.boundaries(begin, False) or [begin])[-1]

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Ends of whole batches, so far as the limit goes; one batch at least where there is one."""
        places = _read(start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        out, taken = dict(places), False
        for topic in sorted({*self._topics(), *places}):
            follower = self._tail(topic)
            begin = places.get(topic) or follower.earliest()
            if begin is None or (self.target is not None and topic not in self.target):
                continue
            ends = follower.boundaries(begin, self.options.fail_on_data_loss)
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
                out[topic] = at
        return _told(out)

    # Rows

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = _read(start), _read(end)
        changed = [topic for topic, place in ends.items() if begins.get(topic) != place]
        if not changed:
            return [Partition([])]
        pinned = pins.take_snapshot(self.options.path, changed, (self.options.kind,), pin=self.options.pin)
        self.pinned.append(pinned)
        pieces: list[Any] = []
        for topic in changed:
            begin = begins.get(topic) or self._tail(topic).earliest() or (0, 0, -1)
            pieces += self._pieces(pinned.topics[topic], begin, ends[topic])
        return [Partition(task) for task in share_splits(pieces, self.options.partitions or len(os.sched_getaffinity(0)))]

    def _pieces(self, pinned: pins.TopicFiles, begin: LogPosition, end: LogPosition) -> Iterator[Any]:
        """Stretches of the log between two places, cut where tables end or batches that are known."""
        follower = self._tail(pinned.topic)
        files = dict(pinned.segments(self.options.kind))
        if end[0] not in files:
            raise DataLoss(
                f"topic {pinned.topic!r}: {names.segment(self.options.kind, end[0])} was removed by retention meanwhile"
            )
        for base, file in files.items():
            if not begin[0] <= base <= end[0]:
                continue
            low = begin[1] if base == begin[0] else follower._start(base)
            high = end[1] if base == end[0] else file.size
            if self.options.kind == "history":
                yield from [journals.JournalSplit(pinned.topic, "history", file, low, high)] if low < high else []
                continue
            later = [other for other in files if other > base]
            first = begin[2] if base == begin[0] and begin[2] >= 0 else follower.first(base)
            last = end[2] if base == end[0] else follower.first(min(later))
            cuts = [(at, number) for other, at, number in follower.known if other == base and low < at < high]
            yield from self._runs(pinned.topic, file, [(low, first), *cuts, (high, last)])

    def _runs(self, topic: str, file: pins.File, cuts: list[tuple[int, int]]) -> Iterator[ReadySplit]:
        """Batches that lie together, some megabytes at a time."""
        at = cuts[0]
        for i, cut in enumerate(cuts[1:], 1):
            if i + 1 == len(cuts) or cut[0] - at[0] >= _RUN_BYTES:
                if at[0] < cut[0] and at[1] < cut[1]:
                    yield ReadySplit(topic, file, *_pair(at, cut))
                at = cut

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        for piece in partition.splits:
            pieces = [piece.slice()] if isinstance(piece, ReadySplit) else [piece]
            yield from rows(pieces, self.options, Predicates(), arrow_schema(self.schema))

    def commit(self, end: dict[str, Any]) -> None:
        """Everything up to there was read."""
        for pinned in self.pinned[:-1]:
            pinned.release()
        self.pinned = self.pinned[-1:]

    def stop(self) -> None:
        for pinned in self.pinned:
            pinned.release()
        self.pinned = []


_RUN_BYTES = 8 << 20


def _pair(low: tuple[int, int], high: tuple[int, int]) -> tuple[int, int, int, int]:
    """
    >>> _pair((1, 10), (2, 20))
    (1, 2, 10, 20)
    """
    return low[0], high[0], low[1], high[1]


def _told(places: dict[str, LogPosition]) -> dict[str, Any]:
    return {topic: {"base": base, "position": at, "number": number} for topic, (base, at, number) in sorted(places.items())}


def _read(offset: dict[str, Any]) -> dict[str, LogPosition]:
    return {topic: (int(at["base"]), int(at["position"]), int(at["number"])) for topic, at in (offset or {}).items()}
