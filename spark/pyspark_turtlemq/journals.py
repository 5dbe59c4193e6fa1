"""Journals (`reserve`, `history`) as Arrow columns: one row for each message of an event.

An event holds packed arrays, one element a message; they are never unpacked into Python objects. Formats: docs/FORMAT.md.
Not here: the meaning of events for the state of a message (`message_states`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np
import pyarrow as pa

from pyspark_turtlemq.documents import ReadSpec
from pyspark_turtlemq.kinds import DAMAGE, TIMES
from pyspark_turtlemq.ordinals import ROWS
from pyspark_turtlemq.snapshot_files import File
from turtlemq.broker import events as kinds
from turtlemq.errors import Corrupt
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan

ABSENT = -(1 << 62)  # in number columns: null


@dataclass(frozen=True, slots=True)
class JournalSplit:
    """Whole events in bytes [start, end) of a journal's file."""

    topic: str
    kind: str
    file: File
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class EventRows:
    """Rows of one event, by column: a value for all rows, or one for each."""

    count: int
    numbers: dict[str, I64 | int]
    texts: dict[str, str | list[str] | None]


def read(split: JournalSplit, spec: ReadSpec, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a split whose events match the range of `at`."""
    view = split.file.map()
    events = scan(view, split.start, split.end, sealed=True)
    if events.damaged and spec.mode == "FAILFAST":
        hole = events.damaged[0]
        raise Corrupt(
            f"{split.topic}/{split.file.name}: {hole.reason} at position {hole.position}. Restore it, or use PERMISSIVE."
        )
    if events.damaged:
        print(f"turtlemq: {split.topic}/{split.file.name}: {len(events.damaged)} damaged events were left out", file=sys.stderr)
    low, high = spec.predicates.range("at")
    kept = np.flatnonzero((events.due_ms >= low) & (events.due_ms <= high))
    pending: list[EventRows] = []
    for at, length in zip(events.positions[kept].tolist(), events.lengths[kept].tolist(), strict=True):
        pending += rows_of(f.decode(view[at : at + length]), split.kind)
        if sum(rows.count for rows in pending) >= ROWS:
            yield _batch(split, pending, schema)
            pending = []
    if pending:
        yield _batch(split, pending, schema)
    if events.damaged and DAMAGE in schema.names and spec.mode == "PERMISSIVE":
        count = len(events.damaged)
        known = {"topic": [split.topic] * count, DAMAGE: [str(hole.reason) for hole in events.damaged]}
        arrays = [pa.array(known[c.name], c.type) if c.name in known else pa.nulls(count, c.type) for c in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def rows_of(document: f.Document, kind: str) -> list[EventRows]:
    """The rows of an event; none for `state`, which only repeats a checkpoint."""
    fields: dict[str, Any] = bson.decode(document.body)
    event = str(fields["event"])
    if event in (kinds.STATE, kinds.STATE_PART):
        return []
    all_rows = _history_rows(fields, event) if kind == "history" else [_reserve_rows(fields, event)]
    for rows in all_rows:
        rows.numbers |= {"number": document.seq, "at": document.due_ms, "epoch": int(fields.get("epoch", ABSENT))}
        rows.texts.setdefault("group", document.id or None)
        rows.texts["event"] = event
    return all_rows


def packed_column(fields: dict[str, Any], name: str) -> I64:
    """A packed array of an event: 64-bit integers, one for each message."""
    return kinds.unpack(fields[name])


def _reserve_rows(fields: dict[str, Any], event: str) -> EventRows:
    """lease, extend, retry, moved: a row for each message; group, forget: one row."""
    if "offsets" not in fields:
        return EventRows(1, {"offset": int(fields.get("offset", ABSENT))}, {})
    numbers: dict[str, I64 | int] = {"offset": packed_column(fields, "offsets")}
    for name, packed in (("seq", "seqs"), ("attempt", "attempts"), ("until", "when" if event == kinds.RETRY else "until")):
        if packed in fields:
            numbers[name] = packed_column(fields, packed) if isinstance(fields[packed], bytes) else int(fields[packed])
    count = len(fields["offsets"]) // 8
    return EventRows(count, numbers, {"consumer": fields.get("consumer"), "error": fields.get("error") or None})


def _history_rows(fields: dict[str, Any], event: str) -> list[EventRows]:
    """settle, cancel (with the sleeping retries of each group), undead, redead: a row for each message."""
    if event == kinds.SETTLE:
        packed = {
            "offset": "offsets",
            "seq": "seqs",
            "due": "due",
            "ready": "ready",
            "reserved": "reserved",
            "attempt": "attempts",
        }
        numbers: dict[str, I64 | int] = {name: packed_column(fields, source) for name, source in packed.items()}
        texts = {"outcome": str(fields["outcome"]), "id": kinds.split_ids(fields["ids"]), "error": fields["error"] or None}
        return [EventRows(len(fields["offsets"]) // 8, numbers, texts)]
    if event == kinds.CANCEL:
        offsets = {"offset": packed_column(fields, "offsets"), "seq": packed_column(fields, "seqs")}
        cancelled = [EventRows(len(offsets["offset"]), dict(offsets), {"outcome": "cancelled"})]
        for group, packed_ids in fields["naps"].items():
            ids = kinds.split_ids(packed_ids)
            cancelled.append(EventRows(len(ids), {}, {"outcome": "cancelled", "group": group, "id": ids}))
        return cancelled
    ids = kinds.split_ids(fields["ids"])
    became = packed_column(fields, "became")
    outcome = ["requeued" if seq else "deleted" for seq in became.tolist()] if event == kinds.REMOVE_DEAD else "kept"
    return [EventRows(len(ids), {"seq": packed_column(fields, "letters")}, {"outcome": outcome, "id": ids})]


def _batch(split: JournalSplit, events: list[EventRows], schema: pa.Schema) -> pa.RecordBatch:
    total = sum(rows.count for rows in events)
    arrays = []
    for column in schema:
        base = column.name.removesuffix("_ms")
        if column.name == "topic":
            arrays.append(pa.repeat(pa.scalar(split.topic), total))
        elif pa.types.is_string(column.type):
            arrays.append(_texts(events, column.name))
        else:
            values = np.concatenate([_numbers(rows, base if base in TIMES else column.name) for rows in events])
            absent = values == ABSENT
            mask = absent if absent.any() else None
            if pa.types.is_timestamp(column.type):
                arrays.append(pa.array(np.where(absent, 0, values) * 1000, mask=mask).view(column.type))
            else:
                arrays.append(pa.array(np.where(absent, 0, values), mask=mask).cast(column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _numbers(rows: EventRows, name: str) -> I64:
    value = rows.numbers.get(name, ABSENT)
    return np.full(rows.count, value, np.int64) if isinstance(value, int) else value


def _texts(events: list[EventRows], name: str) -> pa.Array:
    arrays = []
    for rows in events:
        value = rows.texts.get(name)
        if isinstance(value, list):
            arrays.append(pa.array(value, pa.string()))
        else:
            arrays.append(pa.repeat(pa.scalar(value, pa.string()), rows.count))
    return pa.concat_arrays(arrays)
