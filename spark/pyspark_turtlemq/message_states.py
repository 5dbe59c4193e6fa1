"""Kind `messages`: the whole life of each message, joined from all logs of its topic. One row for each group that has to do with
it, one without a group for what no group has seen yet.

States are those of `GET /v1/topics/{topic}/messages/{id}`, decided in the same order: cancelled; reserved; asleep for another
try; waiting or not fetched yet: ready; among the dead; settled: history. All messages of a topic are decided at once, as arrays
over ready offsets; a topic is one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import bson
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import documents, journals
from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.pins import TopicFiles
from pyspark_turtlemq.predicates import Predicates
from turtlemq.broker import checkpoint as c
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan

_UTC = pa.timestamp("us", "UTC")
_NONE = journals.ABSENT
_STATES = pa.array(["ready", "reserve", "sleep", "dead", "history", "cancelled"])
READY, RESERVE, SLEEP, DEAD, HISTORY, CANCELLED = range(6)
_LEVELS = ["normal", "high", "low"]
_BASE = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "group", "state", "priority")),
        *((name, pa.int64()) for name in ("created_ms", "due_ms", "seq", "ttr_ms")),
        ("body_bytes", pa.int32()),
    ]
)
_READY = _BASE.append(pa.field("offset", pa.int64())).append(pa.field("ready_ms", pa.int64()))
_LETTER = pa.schema(
    [(n, pa.string()) for n in ("id", "group", "state", "error")] + [(n, pa.int64()) for n in ("offset", "dropped_ms")]
)


@dataclass(frozen=True, slots=True)
class MessagesSplit:
    """A topic whose logs are to be joined."""

    pinned: TopicFiles
    clean: dict[str, object] | None
    bytes: int


@dataclass(slots=True)
class GroupLife:
    """What one group did, by ready offset less the first one that is retained."""

    settled: I64
    reserved: I64
    attempt: I64
    outcome: list[str] = field(default_factory=list)  # names for `outcomes`
    outcomes: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    errors: dict[int, str] = field(default_factory=dict)
    gone: list[dict[str, Any]] = field(default_factory=list)  # settled, and their documents removed by retention


def read(piece: MessagesSplit, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All rows of a topic."""
    opener = TopicLogs(piece.pinned, piece.clean)
    try:
        yield from Joiner(opener).rows(schema)
    finally:
        opener.close()


def replay(opener: TopicLogs) -> tuple[c.Checkpoint, set[int]]:
    """Where every group stands: the checkpoint, and the events behind it. Also all offsets that were cancelled."""
    pinned = opener.files
    saved = c.Checkpoint()
    if pinned.offset is not None:
        try:
            saved = c.decode(f.decode_checked(bytes(pinned.offset.map()))[0])
        except (KeyError, TypeError, ValueError):
            saved = c.Checkpoint()
    for kind, begin in (("reserve", saved.reserve), ("history", saved.history)):
        for base, at, document, fields in _events(opener, kind):
            if (base, at) >= begin:
                _apply(saved, document, fields)
    return saved, set(saved.cancelled)


def _events(opener: TopicLogs, kind: str) -> Iterator[tuple[int, int, f.Document, dict[str, Any]]]:
    bases = {file.path: base for base, file in opener.files.segments(kind)}
    for file, start, end in opener.journal(kind):
        view = file.map()
        found = scan(view, start, end, sealed=True)
        for at, length in zip(found.positions.tolist(), found.lengths.tolist(), strict=True):
            document = f.decode(view[at : at + length])
            yield bases[file.path], at, document, bson.decode(document.body)


def _apply(saved: c.Checkpoint, document: f.Document, fields: dict[str, Any]) -> None:
    """As `turtlemq.broker.replay` does, for what a row tells."""
    event, name = fields["event"], document.id
    if event == "forget":
        saved.groups.pop(name, None)
    elif event == "group":
        mark = saved.groups.setdefault(name, c.GroupMark())
        mark.epoch, start = int(fields["epoch"]), int(fields["offset"])
        mark.cursors, mark.open, mark.moves = [start] * 3, {}, [*mark.moves, (int(fields["since"]), start)]
    elif event == "cancel":
        saved.cancelled |= set(journals.packed_column(fields, "offsets").tolist())
    known = saved.groups.get(name)
    if known is None or "epoch" not in fields or known.epoch != int(fields["epoch"]) or "offsets" not in fields:
        return
    offsets = journals.packed_column(fields, "offsets").tolist()
    if event == "lease":
        known.cursors = [int(cursor) for cursor in fields["cursors"]]
        rows = zip(offsets, *(journals.packed_column(fields, n).tolist() for n in ("seqs", "attempts", "until")), strict=True)
        for offset, seq, attempt, until in rows:
            known.open[offset] = c.OpenMessage(seq, attempt, until, document.due_ms, fields["consumer"])
    elif event == "retry":
        rows = zip(
            offsets,
            journals.packed_column(fields, "attempts").tolist(),
            journals.packed_column(fields, "when").tolist(),
            strict=True,
        )
        for offset, attempt, when in rows:
            known.open[offset] = c.OpenMessage(0, attempt, when, is_retry=True, error=fields["error"])
    elif event in ("moved", "settle"):
        for offset in offsets:
            known.open.pop(offset, None)


class Joiner:
    """Joins the logs of one topic."""

    def __init__(self, opener: TopicLogs) -> None:
        self.opener, self.topic = opener, opener.files.topic
        ready = opener.ready_log()
        table = self._table(ready, _READY)
        own = pc.is_valid(table["group"])
        notice = pc.equal(table["state"], "notice")
        self.notices = table.filter(notice)
        self.retries = table.filter(own)
        self.first = min((part.cover.first_seq for part in ready.parts), default=0)
        self.end = max(ready.end, self.first)
        self.base = table.filter(pc.invert(pc.or_(own, notice)))
        self.offsets: I64 = self.base["offset"].to_numpy()
        sleepers = opener.delay_log("delay")
        sleepers.progress = ready.progress
        asleep = self._table(sleepers, _BASE)
        self.asleep = asleep.filter(pc.is_in(asleep["state"], pa.array(["sleep", "cancelled"])))
        self.letters = self._table(opener.delay_log("dead"), _LETTER)
        self.letters = self.letters.filter(pc.equal(self.letters["state"], "dead"))
        self.saved, self.cancelled = replay(opener)
        self.origin = self._origins()

    def _table(self, log: Any, schema: pa.Schema) -> pa.Table:
        how = documents.ReadSpec(tuple(schema.names), Predicates())
        found = []
        for part in log.parts:
            piece = documents.DocumentSplit(part, 0, part.cover.documents, 0, log.ended, log.progress)
            found += list(documents.read(piece, how, schema))
        return pa.Table.from_batches(found, schema)

    def _origins(self) -> dict[int, int]:
        """Of a retry in the ready log: the offset of the message itself, where that is retained."""
        places = pc.index_in(self.retries["id"], self.base["id"]).to_pylist()
        rows = zip(self.retries["offset"].to_pylist(), places, strict=True)
        return {offset: int(self.offsets[place]) for offset, place in rows if place is not None}

    # Rows

    def rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All of them."""
        yield from self._sleeping(schema)
        lives = self._settlements()
        for name in sorted({*self.saved.groups, *lives}):
            life = lives.get(name) or self._life()
            yield from self._of_group(name, life, schema)
        if not self.saved.groups and not lives and self.base.num_rows:
            codes = np.where(np.isin(self.offsets, list(self.cancelled)), CANCELLED, READY)
            yield from self._emit(schema, self._known(self.base) | {"state": _STATES.take(pa.array(codes))}, self.base.num_rows)

    def _known(self, table: pa.Table) -> dict[str, Any]:
        """Columns that the document tells."""
        names = [name for name in table.column_names if name not in ("group", "state")]
        return {name: table[name].combine_chunks() if table.num_rows else table[name] for name in names}

    def _sleeping(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """What sleeps for the first time, and what was cancelled then."""
        first = self.asleep.filter(pc.is_null(self.asleep["group"]))
        places = pc.index_in(first["id"], self.notices["id"]) if first.num_rows else pa.array([], pa.int32())
        when = self.notices["ready_ms"].combine_chunks().take(places) if first.num_rows else pa.array([], pa.int64())
        settled = pc.if_else(pc.equal(first["state"], "cancelled"), when, None)
        if first.num_rows:
            yield from self._emit(schema, self._known(first) | {"state": first["state"], "settled_ms": settled}, first.num_rows)
        lost = self.notices.filter(pc.invert(pc.is_in(self.notices["id"], first["id"])))
        if lost.num_rows:
            told = {"id": lost["id"], "state": pa.repeat("cancelled", lost.num_rows), "settled_ms": lost["ready_ms"]}
            yield from self._emit(schema, told, lost.num_rows)

    def _life(self) -> GroupLife:
        count = self.end - self.first
        settled, reserved, attempt = (np.full(count, _NONE, np.int64) for _ in range(3))
        return GroupLife(settled, reserved, attempt, outcomes=np.full(count, -1, np.int64))

    def _settlements(self) -> dict[str, GroupLife]:
        """Everything that the history tells, by group."""
        found: dict[str, GroupLife] = {}
        for _, _, document, fields in _events(self.opener, "history"):
            if fields["event"] != "settle":
                continue
            life = found.setdefault(document.id, self._life())
            if fields["outcome"] not in life.outcome:
                life.outcome.append(fields["outcome"])
            offsets = journals.packed_column(fields, "offsets")
            base = np.array([self.origin.get(offset, offset) for offset in offsets.tolist()]) if self.origin else offsets
            inside = base >= self.first
            at = base[inside] - self.first
            for array, name in ((life.reserved, "reserved"), (life.attempt, "attempts")):
                array[at] = journals.packed_column(fields, name)[inside]
            life.settled[at], life.outcomes[at] = document.due_ms, life.outcome.index(fields["outcome"])
            if fields["error"]:
                life.errors |= dict.fromkeys(at.tolist(), str(fields["error"]))
            if not inside.all():
                life.gone += self._gone(document, fields, np.flatnonzero(~inside))
        return found

    def _gone(self, document: f.Document, fields: dict[str, Any], which: I64) -> list[dict[str, Any]]:
        """Rows from the history alone."""
        ids = fields["ids"].decode().split("\0")
        packed = {
            "due_ms": "due",
            "ready_ms": "ready",
            "reserved_ms": "reserved",
            "attempt": "attempts",
            "offset": "offsets",
            "seq": "seqs",
        }
        columns = {name: journals.packed_column(fields, source) for name, source in packed.items()}
        told = {"settled_ms": document.due_ms, "outcome": fields["outcome"], "error": fields["error"] or None}
        return [{"id": ids[i], **told, **{name: int(values[i]) for name, values in columns.items()}} for i in which.tolist()]

    def _of_group(self, name: str, life: GroupLife, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        mark = self.saved.groups.get(name, c.GroupMark(cursors=[self.end] * 3))
        at = self.offsets - self.first
        outcomes = life.outcomes[at]
        levels = pc.index_in(self.base["priority"], pa.array(_LEVELS)).to_numpy() if len(at) else at
        codes = np.where(self.offsets >= np.array(mark.cursors)[levels] if len(at) else at > 0, READY, HISTORY)
        letters = self.letters.filter(pc.equal(self.letters["group"], name))
        codes[self._places(letters["id"])] = DEAD
        consumers: dict[int, str] = {}
        reserved, attempt, errors = (
            life.reserved[at],
            life.attempt[at],
            {i: life.errors[k] for i, k in enumerate(at.tolist()) if k in life.errors},
        )
        row = {offset: i for i, offset in enumerate(self.offsets.tolist())} if mark.open else {}
        for offset, entry in mark.open.items():
            i = row.get(self.origin.get(offset, offset))
            if i is None:
                continue
            codes[i] = READY if entry.is_retry else RESERVE
            outcomes[i], attempt[i] = -1, entry.attempt - (1 if entry.is_retry else 0)
            errors[i] = entry.error
            if not entry.is_retry:
                consumers[i], reserved[i] = entry.consumer, entry.reserved_ms
        again = self.retries.filter(pc.equal(self.retries["group"], name))
        for offset, level in zip(again["offset"].to_pylist(), again["priority"].to_pylist(), strict=True):
            if offset >= mark.cursors[_LEVELS.index(level)] and offset in self.origin and offset not in self.cancelled:
                codes[int(np.searchsorted(self.offsets, self.origin[offset]))] = READY
        naps = self.asleep.filter(pc.and_(pc.equal(self.asleep["group"], name), pc.equal(self.asleep["state"], "sleep")))
        codes[self._places(naps["id"])] = SLEEP
        codes[np.isin(self.offsets, list(self.cancelled))] = CANCELLED
        start = mark.moves[-1][1] if mark.moves else self.first
        mine = np.flatnonzero((self.offsets >= start) | (outcomes >= 0))
        over = np.isin(codes, (HISTORY, DEAD))
        names = pa.array(life.outcome or ["acked"])
        told = {
            "group": pa.repeat(name, len(mine)),
            "state": _STATES.take(pa.array(codes[mine])),
            "outcome": names.take(pa.array(outcomes[mine], mask=(outcomes < 0)[mine] | ~over[mine])),
            "reserved_ms": _masked(reserved[mine]),
            "settled_ms": _masked(np.where(over, life.settled[at], _NONE)[mine]),
            "attempt": _masked(attempt[mine]).cast(pa.int32()),
            "error": pa.array([errors.get(i) or None for i in mine.tolist()] if errors else [None] * len(mine), pa.string()),
            "consumer": pa.array([consumers.get(i) for i in mine.tolist()] if consumers else [None] * len(mine), pa.string()),
        }
        if len(mine):
            yield from self._emit(schema, self._known(self.base.take(pa.array(mine))) | told, len(mine))
        if life.gone:
            gone = pa.Table.from_pylist(life.gone)
            dead = pc.is_in(gone["id"], letters["id"].combine_chunks() if letters.num_rows else pa.array([], pa.string()))
            state = pc.if_else(dead, "dead", "history")
            rest = {n: gone[n] for n in gone.column_names}
            yield from self._emit(schema, rest | {"group": pa.repeat(name, len(gone)), "state": state}, len(gone))

    def _places(self, ids: pa.ChunkedArray) -> I64:
        """Rows of the base documents with these ids."""
        if not len(ids) or not self.base.num_rows:
            return np.empty(0, np.int64)
        found = pc.index_in(ids, self.base["id"].combine_chunks()).drop_null()
        places: I64 = found.to_numpy().astype(np.int64)
        return places

    def _emit(self, schema: pa.Schema, told: dict[str, Any], count: int) -> Iterator[pa.RecordBatch]:
        """Columns in the order of the schema; sums of times are made here."""
        told = {"topic": pa.repeat(self.topic, count), **told}
        for name, high, low in (
            ("late_ms", "ready_ms", "due_ms"),
            ("wait_ms", "reserved_ms", "ready_ms"),
            ("work_ms", "settled_ms", "reserved_ms"),
        ):
            if high in told and low in told:
                told[name] = pc.subtract(told[high], told[low])
        arrays = []
        for one in schema:
            if pa.types.is_timestamp(one.type) and f"{one.name}_ms" in told:
                arrays.append(pc.multiply(_one(told[f"{one.name}_ms"]), 1000).cast(pa.int64()).view(_UTC))
            elif one.name in told:
                arrays.append(_one(told[one.name]).cast(one.type))
            else:
                arrays.append(pa.nulls(count, one.type))
        table = pa.Table.from_arrays(arrays, schema=schema)
        yield from table.to_batches(max_chunksize=documents.ROWS)


def _one(values: Any) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _masked(values: I64) -> pa.Array:
    return pa.array(values, mask=values == _NONE)
