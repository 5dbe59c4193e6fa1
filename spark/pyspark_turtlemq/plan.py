"""The plan of a read: pins a snapshot once, opens its logs, and cuts the matching documents into partitions of equal size."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pyspark_turtlemq import pins
from pyspark_turtlemq.documents import DocumentSplit
from pyspark_turtlemq.forecast import forecast_split
from pyspark_turtlemq.journals import JournalSplit
from pyspark_turtlemq.kinds import KINDS
from pyspark_turtlemq.message_states import MessagesSplit
from pyspark_turtlemq.options import Options
from pyspark_turtlemq.ordinals import due_ranks
from pyspark_turtlemq.part import Part
from pyspark_turtlemq.parts import EndedDocuments, LogSnapshot, TopicLogs
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.shard_layout import ShardLayout
from pyspark_turtlemq.snapshot_files import INNER
from pyspark_turtlemq.splits import Split
from pyspark_turtlemq.table_repair import PartTable
from turtlemq.errors import Corrupt
from turtlemq.model import DUE_MS_MAX, ORDINAL_BITS
from turtlemq.segment import table as t

_SPLIT_BYTES_MIN = 16 << 20  # a task for less costs more than it saves


@dataclass(slots=True)
class Plan:
    """Splits for each partition, and the snapshot that they read."""

    partitions: list[list[Split]]
    bytes: int = 0
    documents: int = 0
    damage: list[str] = field(default_factory=list)
    snapshot: pins.Snapshot | None = None  # only if it was taken for this plan

    def release(self) -> None:
        """Release the snapshot. A plan that other processes read leaves that to `pin_owners.remove_stale`."""
        if self.snapshot is not None:
            self.snapshot.release()


def make_plan(options: Options, predicates: Predicates) -> Plan:
    """Pin the logs of the kind, open them, and cut them into splits of about total / partitions bytes."""
    layout = ShardLayout.of(options.path)
    layout.check()
    topics = layout.names_of(topic for topic in options.topics() if predicates.allows("topic", topic))
    if predicates.matches_nothing:
        return Plan([])
    if options.snapshot:
        snapshot = pins.load_snapshot(options.path, options.snapshot)
    else:
        snapshot = pins.take_snapshot(options.path, topics, KINDS[options.kind].logs, pin=options.pin)
    splits: list[Split] = []
    plan = Plan([], snapshot=None if options.snapshot else snapshot)
    for topic in topics:
        if topic in snapshot.topics:
            logs = TopicLogs(snapshot.topics[topic])
            try:
                splits += _topic_splits(logs, options, predicates, plan)
            finally:
                logs.close()
    _report_damage(plan, options)
    plan.bytes = sum(split.bytes for split in splits)
    plan.documents = sum(split.last - split.first for split in splits if isinstance(split, DocumentSplit))
    plan.partitions = share_splits(splits, options.partitions or len(os.sched_getaffinity(0)))
    return plan


def _report_damage(plan: Plan, options: Options) -> None:
    if not plan.damage:
        return
    if options.mode == "FAILFAST":
        raise Corrupt(f"{plan.damage[0]}. Restore the file from a backup, or read with mode PERMISSIVE.")
    print(f"turtlemq: {len(plan.damage)} damaged stretches, the first: {plan.damage[0]}", file=sys.stderr)


def _topic_splits(logs: TopicLogs, options: Options, predicates: Predicates, plan: Plan) -> Sequence[Split]:
    topic = logs.files.topic
    if options.kind == "messages":
        size = sum(file.size for files in logs.files.files.values() for file in files.values())
        return [MessagesSplit(logs.files, size, options.as_of)]
    if options.kind in ("reserve", "history"):
        return [JournalSplit(topic, options.kind, *file_range) for file_range in logs.journal(options.kind)]
    if options.kind == "ready":
        log = logs.ready_log()
    else:
        log = logs.delay_log(options.kind if options.kind in INNER else "delay")
        if options.kind not in INNER:
            log.progress = logs.ready_log().progress
    if options.kind == "forecast":
        return [forecast_split(topic, log, options.bucket_ms)] if log.parts else []
    plan.damage += [f"{topic}/{d.file}: {d.length} bytes at position {d.position}: {d.reason}" for d in log.damage]
    splits = (PartTable(part).use(partial(_document_split, part, log, predicates)) for part in log.parts)
    return [split for split in splits if split is not None]


def _document_split(part: Part, log: LogSnapshot, predicates: Predicates, table: t.Table) -> DocumentSplit | None:
    """The documents of a part that can match: a contiguous range in a sealed segment and in the ready log, else the whole part
    at the cost of the matching documents. None if no document can match."""
    first, last = 0, part.cover.documents
    if part.log == "ready":
        first, last = _ready_range(part, table, predicates)
    elif (ranks := due_ranks(part, table, predicates)) is not None:
        if part.sealed:
            first, last = ranks
        else:
            return _sparse_split(part, table, log, ranks[1] - ranks[0] + last - len(table))
    return _range_split(part, table, log, first, last) if first < last else None


def _sparse_split(part: Part, table: t.Table, log: LogSnapshot, count: int) -> DocumentSplit | None:
    """A whole part of which only `count` documents are read."""
    whole = _range_split(part, table, log, 0, part.cover.documents)
    return replace(whole, bytes=max(1, whole.bytes * count // part.cover.documents)) if count else None


def _ready_range(part: Part, table: t.Table, predicates: Predicates) -> tuple[int, int]:
    """Documents [first, last) in the ranges of offset and ready time, both of which rise."""
    begin = part.cover.first_seq
    low, high = predicates.range("offset")
    first, last = max(0, low - begin), min(part.cover.documents, high - begin + 1)
    low, high = predicates.range("ready")
    if low > 0:
        first = max(first, table.rank(low << ORDINAL_BITS))
    if high < DUE_MS_MAX:
        last = min(last, table.rank((max(high, 0) + 1) << ORDINAL_BITS))
    return first, last


def _range_split(part: Part, table: t.Table, log: LogSnapshot, first: int, last: int) -> DocumentSplit:
    """Documents [first, last) of a part, with only the ended documents among them."""
    size = table.span_of(last - 1)[1] - table.span_of(first)[0]
    dues = (0, DUE_MS_MAX)
    if part.sealed and len(log.ended.seqs):
        top = min(last, len(table)) - 1
        ends = [int(table.slice(rank, rank + 1)[0]) >> ORDINAL_BITS for rank in (first, top)] if top >= first else [0, -1]
        dues = (ends[0], ends[1])
    ended = EndedDocuments() if part.log == "ready" else log.ended.within(part.cover.first_seq, part.cover.last_seq, dues)
    return DocumentSplit(part, first, last, size, ended, log.progress)


# Partitions


def share_splits(splits: Sequence[Split], count: int) -> list[list[Split]]:
    """Deal out splits in order to at most `count` partitions of about the same size; document splits are cut where needed."""
    total = sum(split.bytes for split in splits)
    count = max(1, min(count, total // _SPLIT_BYTES_MIN + 1))
    limit = max(1, -(-total // count))
    partitions: list[list[Split]] = [[]]
    room = limit
    for split in splits:
        rest: Split | None = split
        while rest is not None:
            if room <= 0 and len(partitions) < count:
                partitions.append([])
                room = limit
            head, rest = _cut(rest, room) if len(partitions) < count else (rest, None)
            partitions[-1].append(head)
            room -= head.bytes
    return [partition for partition in partitions if partition]


def _cut(split: Split, room: int) -> tuple[Split, Split | None]:
    """Cut a document split at about `room` bytes, after one document at least. Other splits stay whole."""
    if split.bytes <= room + _SPLIT_BYTES_MIN // 4 or not isinstance(split, DocumentSplit):
        return split, None
    return PartTable(split.part).use(partial(_cut_documents, split, room))


def _cut_documents(split: DocumentSplit, room: int, table: t.Table) -> tuple[DocumentSplit, DocumentSplit | None]:
    begin, end = table.span_of(split.first)[0], table.span_of(split.last - 1)[1]
    scale = split.bytes / (end - begin)  # below 1 if not all documents are read
    low, high = split.first + 1, split.last
    while low < high:
        middle = (low + high) // 2
        if (table.span_of(middle - 1)[1] - begin) * scale < room:
            low = middle + 1
        else:
            high = middle
    if low >= split.last:
        return split, None
    size = max(1, int((table.span_of(low)[0] - begin) * scale))
    return replace(split, last=low, bytes=size), replace(split, first=low, bytes=max(1, split.bytes - size))
