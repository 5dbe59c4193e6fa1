"""The plan of a read: which files at which lengths, and which slices of them each task takes. Made once, at one moment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace

from pyspark_turtlemq import forecast, journals, message_states, pins
from pyspark_turtlemq.documents import DocumentSplit, due_ranks
from pyspark_turtlemq.options import Options
from pyspark_turtlemq.parts import EndedDocuments, LogSnapshot, Part, TopicLogs
from pyspark_turtlemq.predicates import Predicates
from turtlemq.backup import check_format
from turtlemq.errors import Corrupt
from turtlemq.model import DUE_MS_MAX, ORDINAL_BITS
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.storage import names
from turtlemq.storage.door import Door

Split = DocumentSplit | journals.JournalSplit | forecast.ForecastSplit | message_states.MessagesSplit
_LEAST = 16 << 20  # bytes: what a task costs is not worth less


@dataclass(slots=True)
class Plan:
    """Pieces for each task, and the moment that they belong to."""

    partitions: list[list[Split]]
    snapshot: str = ""
    bytes: int = 0
    documents: int = 0
    damaged: list[str] = field(default_factory=list)
    pins: pins.Snapshot | None = None  # where they were taken for this plan alone

    def release(self) -> None:
        """Let go of the files. Whoever reads a plan elsewhere leaves that to `pins.remove_stale`."""
        if self.pins is not None:
            self.pins.release()


def read_clean_marks(options: Options) -> dict[str, dict[str, object]]:
    """What a proper stop said of each topic: then nothing is torn. Read first of all: a server removes it when it starts."""
    try:
        data = (options.path / names.CLEAN).read_bytes()
        return dict(f.decode_checked(data)[0]["topics"])
    except (OSError, ValueError, KeyError):
        return {}


def make_plan(options: Options, wanted: Predicates) -> Plan:
    """Pin what is needed, open it, and cut it into slices of about total / tasks bytes."""
    check_format(Door(), options.path)
    topics = [topic for topic in options.topics() if wanted.allows("topic", topic)]
    if wanted.matches_nothing:
        return Plan([])
    marks = read_clean_marks(options)
    if options.snapshot:
        pinned = pins.load_snapshot(options.path, options.snapshot)
    else:
        pinned = pins.take_snapshot(options.path, topics, pins.NEEDED[options.kind], pin=options.pin)
    pieces: list[Split] = []
    plan = Plan([], pinned.name, pins=None if options.snapshot else pinned)
    for topic in topics:
        if topic in pinned.topics:
            opener = TopicLogs(pinned.topics[topic], marks.get(topic))
            try:
                pieces += _pieces(opener, options, wanted, plan)
            finally:
                opener.close()
    _report(plan, options)
    plan.bytes = sum(piece.bytes for piece in pieces)
    plan.documents = sum(piece.last - piece.first for piece in pieces if isinstance(piece, DocumentSplit))
    plan.partitions = share_splits(pieces, options.partitions or len(os.sched_getaffinity(0)))
    return plan


def _report(plan: Plan, options: Options) -> None:
    if not plan.damaged:
        return
    if options.mode == "FAILFAST":
        raise Corrupt(f"{plan.damaged[0]}. Restore the file from a backup, or read with mode PERMISSIVE.")
    print(f"turtlemq: {len(plan.damaged)} damaged stretches, the first: {plan.damaged[0]}", file=sys.stderr)


def _pieces(opener: TopicLogs, options: Options, wanted: Predicates, plan: Plan) -> list[Split]:
    topic = opener.files.topic
    if options.kind == "messages":
        size = sum(file.size for files in opener.files.files.values() for file in files.values())
        return [message_states.MessagesSplit(opener.files, opener.clean_mark, size)]
    if options.kind in ("reserve", "history"):
        return [journals.JournalSplit(topic, options.kind, *found) for found in opener.journal(options.kind)]
    if options.kind == "ready":
        log = opener.ready_log()
    else:
        log = opener.delay_log("dead" if options.kind == "dead" else "delay")
        if options.kind != "dead":
            log.progress = opener.ready_log().progress
    if options.kind == "forecast":
        return [forecast.forecast_split(topic, log, options.bucket_ms)] if log.parts else []
    plan.damaged += [f"{d.topic}/{d.file}: {d.length} bytes at position {d.position}: {d.reason}" for d in log.damage]
    return [piece for part in log.parts if (piece := _slice(part, log, wanted)) is not None]


def _slice(part: Part, log: LogSnapshot, wanted: Predicates) -> DocumentSplit | None:
    """The documents of a part that can be wanted: in a sealed segment and in the ready log they lie together."""
    first, last = 0, part.cover.documents
    table = part.open()
    if part.log == "ready":
        first, last = _ready_range(part, table, wanted)
    elif (ranks := due_ranks(part, table, wanted)) is not None:
        if part.sealed:
            first, last = ranks
        else:
            return _sparse(part, table, log, ranks[1] - ranks[0] + last - len(table))
    return _cut(part, table, log, first, last) if first < last else None


def _sparse(part: Part, table: t.Table, log: LogSnapshot, count: int) -> DocumentSplit | None:
    """So many documents, here and there: it costs what they have."""
    whole = _cut(part, table, log, 0, part.cover.documents)
    return replace(whole, bytes=max(1, whole.bytes * count // part.cover.documents)) if count else None


def _ready_range(part: Part, table: t.Table, wanted: Predicates) -> tuple[int, int]:
    """Offsets and ready times both rise."""
    begin = part.cover.first_seq
    low, high = wanted.range("offset")
    first, last = max(0, low - begin), min(part.cover.documents, high - begin + 1)
    low, high = wanted.range("ready")
    if low > 0:
        first = max(first, table.rank(low << ORDINAL_BITS))
    if high < DUE_MS_MAX:
        last = min(last, table.rank((max(high, 0) + 1) << ORDINAL_BITS))
    return first, last


def _cut(part: Part, table: t.Table, log: LogSnapshot, first: int, last: int) -> DocumentSplit:
    size = table.span_of(last - 1)[1] - table.span_of(first)[0]
    dues = (0, DUE_MS_MAX)
    if part.sealed and len(log.ended.seqs):
        top = min(last, len(table)) - 1
        ends = [int(table.slice(rank, rank + 1)[0]) >> ORDINAL_BITS for rank in (first, top)] if top >= first else [0, -1]
        dues = (ends[0], ends[1])
    ended = log.ended.within(part.cover.first_seq, part.cover.last_seq, dues) if part.log != "ready" else EndedDocuments()
    return DocumentSplit(part, first, last, size, ended, log.progress)


# Tasks


def share_splits(pieces: list[Split], tasks: int) -> list[list[Split]]:
    """Pieces in order, for so many tasks of like size."""
    total = sum(piece.bytes for piece in pieces)
    tasks = max(1, min(tasks, total // _LEAST + 1))
    limit = max(1, -(-total // tasks))
    found: list[list[Split]] = [[]]
    room = limit
    for piece in pieces:
        rest: Split | None = piece
        while rest is not None:
            if room <= 0 and len(found) < tasks:
                found.append([])
                room = limit
            now, rest = _split(rest, room) if len(found) < tasks else (rest, None)
            found[-1].append(now)
            room -= now.bytes
    return [task for task in found if task]


def _split(piece: Split, room: int) -> tuple[Split, Split | None]:
    """As much of a slice of documents as fits, one at least. Stretches of journals stay whole."""
    if piece.bytes <= room + _LEAST // 4 or not isinstance(piece, DocumentSplit):
        return piece, None
    table = piece.part.open()
    begin, end = table.span_of(piece.first)[0], table.span_of(piece.last - 1)[1]
    scale = piece.bytes / (end - begin)  # below 1 where not all of them are wanted
    low, high = piece.first + 1, piece.last
    while low < high:
        middle = (low + high) // 2
        if (table.span_of(middle - 1)[1] - begin) * scale < room:
            low = middle + 1
        else:
            high = middle
    if low >= piece.last:
        return piece, None
    size = max(1, int((table.span_of(low)[0] - begin) * scale))
    return replace(piece, last=low, bytes=size), replace(piece, first=low, bytes=max(1, piece.bytes - size))
