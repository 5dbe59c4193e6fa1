"""Journals as Arrow columns: one row for each message of an event. Arrays that are packed in an event stay arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np
import pyarrow as pa

from pyspark_turtlemq.documents import ROWS, ReadSpec
from pyspark_turtlemq.pins import File
from turtlemq.errors import Corrupt
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan

ABSENT = -(1 << 62)
TIMES = ("at", "until", "due", "ready", "reserved")


@dataclass(frozen=True, slots=True)
class JournalSplit:
    """Events in [start, end) of a journal's file, from one whole event to another."""

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
    """Rows of one event: columns of numbers, and texts, one for all of them or one each."""

    count: int
    numbers: dict[str, I64 | int]
    texts: dict[str, str | list[str] | None]


def read(piece: JournalSplit, how: ReadSpec, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a stretch."""
    view = piece.file.map()
    found = scan(view, piece.start, piece.end, sealed=True)
    if found.damaged and how.mode == "FAILFAST":
        hole = found.damaged[0]
        raise Corrupt(
            f"{piece.topic}/{piece.file.name}: {hole.reason} at position {hole.position}. Restore it, or use PERMISSIVE."
        )
    if found.damaged:
        print(f"turtlemq: {piece.topic}/{piece.file.name}: {len(found.damaged)} damaged events were left out", file=sys.stderr)
    low, high = how.predicates.range("at")
    kept = np.flatnonzero((found.due_ms >= low) & (found.due_ms <= high))
    waiting: list[EventRows] = []
    for at, length in zip(found.positions[kept].tolist(), found.lengths[kept].tolist(), strict=True):
        waiting += rows_of(f.decode(view[at : at + length]), piece.kind)
        if sum(rows.count for rows in waiting) >= ROWS:
            yield _batch(piece, waiting, schema)
            waiting = []
    if waiting:
        yield _batch(piece, waiting, schema)
    if found.damaged and "damage" in schema.names and how.mode == "PERMISSIVE":
        told = {"topic": [piece.topic] * len(found.damaged), "damage": [str(hole.reason) for hole in found.damaged]}
        nulls = [pa.array(told[c.name], c.type) if c.name in told else pa.nulls(len(found.damaged), c.type) for c in schema]
        yield pa.RecordBatch.from_arrays(nulls, schema=schema)


def rows_of(document: f.Document, kind: str) -> list[EventRows]:
    """What an event says of messages. A `state` event is a checkpoint, and says nothing new."""
    fields: dict[str, Any] = bson.decode(document.body)
    event = str(fields["event"])
    if event == "state":
        return []
    found = _settled(fields, event) if kind == "history" else [_taken(fields, event)]
    for rows in found:
        rows.numbers |= {"number": document.seq, "at": document.due_ms, "epoch": int(fields.get("epoch", ABSENT))}
        rows.texts.setdefault("group", document.id or None)
        rows.texts["event"] = event
    return found


def packed_column(fields: dict[str, Any], name: str) -> I64:
    """A packed column."""
    return np.frombuffer(fields[name], "<i8").astype(np.int64)


def _taken(fields: dict[str, Any], event: str) -> EventRows:
    """lease, extend, retry, moved: one row each; group, forget: one."""
    if "offsets" not in fields:
        return EventRows(1, {"offset": int(fields.get("offset", ABSENT))}, {})
    numbers: dict[str, I64 | int] = {"offset": packed_column(fields, "offsets")}
    for name, packed in (("seq", "seqs"), ("attempt", "attempts"), ("until", "when" if event == "retry" else "until")):
        if packed in fields:
            numbers[name] = packed_column(fields, packed) if isinstance(fields[packed], bytes) else int(fields[packed])
    count = len(fields["offsets"]) // 8
    return EventRows(count, numbers, {"consumer": fields.get("consumer"), "error": fields.get("error") or None})


def _settled(fields: dict[str, Any], event: str) -> list[EventRows]:
    if event == "settle":
        packed = {
            "offset": "offsets",
            "seq": "seqs",
            "due": "due",
            "ready": "ready",
            "reserved": "reserved",
            "attempt": "attempts",
        }
        numbers: dict[str, I64 | int] = {name: packed_column(fields, source) for name, source in packed.items()}
        texts = {"outcome": str(fields["outcome"]), "id": _ids(fields["ids"]), "error": fields["error"] or None}
        return [EventRows(len(fields["offsets"]) // 8, numbers, texts)]
    if event == "cancel":
        offsets = {"offset": packed_column(fields, "offsets"), "seq": packed_column(fields, "seqs")}
        found = [EventRows(len(offsets["offset"]), dict(offsets), {"outcome": "cancelled"})]
        naps = {name: _ids(ids) for name, ids in fields["naps"].items()}
        return found + [EventRows(len(ids), {}, {"outcome": "cancelled", "group": name, "id": ids}) for name, ids in naps.items()]
    ids = _ids(fields["ids"])
    became = packed_column(fields, "became")
    outcome = ["requeued" if seq else "deleted" for seq in became.tolist()] if event == "undead" else "kept"
    return [EventRows(len(ids), {"seq": packed_column(fields, "letters")}, {"outcome": outcome, "id": ids})]


def _ids(packed: bytes) -> list[str]:
    return packed.decode().split("\0")


def _batch(piece: JournalSplit, waiting: list[EventRows], schema: pa.Schema) -> pa.RecordBatch:
    total = sum(rows.count for rows in waiting)
    arrays = []
    for one in schema:
        base = one.name.removesuffix("_ms")
        if one.name == "topic":
            arrays.append(pa.repeat(pa.scalar(piece.topic), total))
        elif pa.types.is_string(one.type):
            arrays.append(_texts(waiting, one.name))
        else:
            values = np.concatenate([_fill(rows, base if base in TIMES else one.name) for rows in waiting])
            absent = values == ABSENT
            mask = absent if absent.any() else None
            if pa.types.is_timestamp(one.type):
                arrays.append(pa.array(np.where(absent, 0, values) * 1000, mask=mask).view(one.type))
            else:
                arrays.append(pa.array(np.where(absent, 0, values), mask=mask).cast(one.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fill(rows: EventRows, name: str) -> I64:
    value = rows.numbers.get(name, ABSENT)
    return np.full(rows.count, value, np.int64) if isinstance(value, int) else value


def _texts(waiting: list[EventRows], name: str) -> pa.Array:
    pieces = []
    for rows in waiting:
        value = rows.texts.get(name)
        if isinstance(value, list):
            pieces.append(pa.array(value, pa.string()))
        else:
            pieces.append(pa.repeat(pa.scalar(value, pa.string()), rows.count))
    return pa.concat_arrays(pieces)
