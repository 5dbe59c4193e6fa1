"""Kind `messages`: the life of each message, joined from all logs of its topic.

One row for each group that has to do with a message, and one without a group for a message that no group has to do with. States
are those of `GET /v1/topics/{topic}/messages/{id}`, because the same table decides them (`turtlemq.standing`), here for all
messages and one group at once. A topic is one task.

Not here: the facts behind a state (`message_facts`), and the position of groups (`group_marks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import attempts_column, journals
from pyspark_turtlemq.group_marks import Event, events
from pyspark_turtlemq.message_facts import Noted, TopicFacts
from pyspark_turtlemq.ordinals import ROWS
from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.snapshot_files import TopicFiles
from turtlemq import standing
from turtlemq.attempts import Attempt, Attempts
from turtlemq.broker import events as kinds
from turtlemq.broker.checkpoint import GroupMark
from turtlemq.model import I64, Mask

_UTC = pa.timestamp("us", "UTC")
_NONE = journals.ABSENT
_SHOWN = pa.array([standing.shown(name) for name in standing.STANDINGS])
_OVER = np.array([standing.shown(name) in ("history", "dead") for name in standing.STANDINGS])
_SLEEP, _DEAD = standing.STANDINGS.index("sleep"), standing.STANDINGS.index("dead")
_NEVER_HAD = standing.STANDINGS.index(standing.NEVER_HAD)
_PACKED = {
    "due_ms": "due",
    "ready_ms": "ready",
    "reserved_ms": "reserved",
    "attempt": "attempts",
    "offset": "offsets",
    "seq": "seqs",
}


@dataclass(frozen=True, slots=True)
class MessagesSplit:
    """A topic whose logs are to be joined."""

    files: TopicFiles
    bytes: int
    as_of: int | None = None  # a moment in the past; None: now


class Deliveries:
    """The last delivery of each message to one group, by row of the message: how it ended, or that it has not."""

    def __init__(self, count: int) -> None:
        self.settled, self.reserved, self.attempt = (np.full(count, _NONE, np.int64) for _ in range(3))
        self.outcomes: I64 = np.full(count, -1, np.int64)  # index into `names`, -1: not settled
        self.names: list[str] = []
        self.errors: dict[int, str] = {}
        self.consumers: dict[int, str] = {}
        self.attempts: dict[int, list[Attempts]] | None = None  # as settlements tell, then all others; None: not asked for
        self.gone: dict[str, dict[str, Any]] = {}  # by id: messages of which nothing but the settlement is left

    def settle(self, event: Event, rows: I64, born: int) -> None:
        """Note a settlement; `rows`: of its messages, -1 if only the event is left of one. `born`: the epoch in which the group
        was made; attempts of an older one of that name are not its own."""
        name, fields = str(event.fields["outcome"]), event.fields
        if name not in self.names:
            self.names.append(name)
        known, at = np.flatnonzero(rows >= 0), rows[rows >= 0]
        for array, packed in ((self.reserved, "reserved"), (self.attempt, "attempts")):
            array[at] = journals.packed_column(fields, packed)[known]
        self.settled[at], self.outcomes[at] = event.at_ms, self.names.index(name)
        if fields["error"]:
            self.errors |= dict.fromkeys(at.tolist(), str(fields["error"]))
        if self.attempts is not None and int(fields["epoch"]) >= born:
            told = attempts_column.settled(fields, event.at_ms, known)
            self.attempts |= {row: [own] for row, own in zip(at.tolist(), told, strict=True)}
        if len(known) < len(rows):
            self._note_gone(event, np.flatnonzero(rows < 0))

    def _note_gone(self, event: Event, which: I64) -> None:
        ids = kinds.split_ids(event.fields["ids"])
        columns = {name: journals.packed_column(event.fields, packed) for name, packed in _PACKED.items()}
        common = {"settled_ms": event.at_ms, "outcome": event.fields["outcome"], "error": event.fields["error"] or None}
        told = [] if self.attempts is None else attempts_column.settled(event.fields, event.at_ms, which)
        for n, i in enumerate(which.tolist()):
            self.gone[ids[i]] = {"id": ids[i], **common, **{name: int(values[i]) for name, values in columns.items()}}
            if told:
                self.gone[ids[i]][attempts_column.NAME] = [one.fields() for one in told[n]] or None

    def hold(self, mark: GroupMark, facts: TopicFacts) -> None:
        """Add the deliveries that a group has not settled: leases, and those that wait for another attempt."""
        rows = facts.rows_at(np.fromiter(mark.open, np.int64, len(mark.open)))
        for row, entry in zip(rows.tolist(), mark.open.values(), strict=True):
            if row < 0:
                continue
            self.outcomes[row], self.attempt[row], self.errors[row] = -1, entry.attempt - entry.is_retry, entry.error
            if not entry.is_retry:
                self.consumers[row], self.reserved[row] = entry.consumer, entry.reserved_ms
            if self.attempts is not None:
                running = Attempt(entry.attempt, entry.consumer, entry.reserved_ms, None, None, "", None)
                self.attempts.setdefault(row, []).append((*entry.attempts, *(() if entry.is_retry else (running,))))

    def note(self, noted: Noted, codes: Any) -> None:
        """Add attempts that notes tell: of due retries, and of a sleeping retry or a dead letter if that decides the state."""
        if self.attempts is None:
            return
        for kind, own in enumerate(noted):
            for row, told in own.items():
                if kind == 0 or codes[row] == (_SLEEP, _DEAD)[kind - 1]:
                    self.attempts.setdefault(row, [])[1:1] = told

    def columns(self, rows: I64, over: Mask) -> dict[str, pa.Array]:
        """The columns of rows; an outcome is shown where the message is `over` for the group."""
        outcomes = self.outcomes[rows]
        names = pa.array(self.names or ["acked"])
        return {
            "outcome": names.take(pa.array(outcomes, mask=(outcomes < 0) | ~over)),
            "reserved_ms": _masked(self.reserved[rows]),
            "settled_ms": _masked(np.where(over, self.settled[rows], _NONE)),
            "attempt": _masked(self.attempt[rows]).cast(pa.int32()),
            "error": _texts(self.errors, rows),
            "consumer": _texts(self.consumers, rows),
            **self._attempts(rows),
        }

    def _attempts(self, rows: I64) -> dict[str, pa.Array]:
        if self.attempts is None:
            return {}
        own = {row: attempts_column.joined(self.attempts[row]) for row in rows.tolist() if row in self.attempts}
        return {attempts_column.NAME: attempts_column.of_rows(own, rows.tolist())}


def read(split: MessagesSplit, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All rows of a topic."""
    logs = TopicLogs(split.files)
    try:
        yield from Joiner(logs, attempts_column.NAME in schema.names, split.as_of).rows(schema)
    finally:
        logs.close()


class Joiner:
    """Joins the logs of one topic."""

    def __init__(self, logs: TopicLogs, with_attempts: bool = False, as_of: int | None = None) -> None:
        self.logs, self.topic = logs, logs.files.topic
        self.facts = TopicFacts(logs, with_attempts=with_attempts, as_of=as_of)
        self.with_attempts, self._as_of = with_attempts, as_of

    def rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows, group by group."""
        yield from self._first_sleep(schema)
        deliveries, count = self._deliveries(), self.facts.messages.num_rows
        claimed = np.zeros(count, np.bool_)
        for name in sorted({*self.facts.groups, *deliveries}):
            codes = standing.decide_all(self.facts.facts(name))
            of_group = deliveries.get(name) or self._no_deliveries()
            of_group.note(self.facts.noted.get(name, ({}, {}, {})), codes)
            yield from self._of_group(name, codes, of_group, schema)
            if name in self.facts.marks.groups:
                claimed |= codes != _NEVER_HAD
        codes = standing.decide_all(self.facts.unclaimed())
        if self.facts.marks.groups:
            codes = np.full(count, _NEVER_HAD, np.int8)
        rows = np.flatnonzero(~claimed & (self.facts.offsets >= self.facts.first))
        if len(rows):
            yield from self._emit(schema, self._known(rows) | {"state": _SHOWN.take(pa.array(codes[rows]))}, len(rows))

    def _known(self, rows: I64) -> dict[str, Any]:
        """Columns from the documents of messages."""
        table = self.facts.messages.take(pa.array(rows))
        return {name: table[name] for name in table.column_names if name not in ("group", "state")}

    def _first_sleep(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Messages that sleep for the first time, and those that were cancelled then."""
        table, notices = self.facts.first_sleep, self.facts.notices
        table = table.filter(pc.is_in(table["state"], pa.array(["sleep", "cancelled"])))
        if table.num_rows:
            noted_ms = notices["ready_ms"].combine_chunks().take(pc.index_in(table["id"], notices["id"]))
            settled = pc.if_else(pc.equal(table["state"], "cancelled"), noted_ms, None)
            names = [name for name in table.column_names if name != "group"]
            yield from self._emit(schema, {name: table[name] for name in names} | {"settled_ms": settled}, table.num_rows)
        alone = notices.filter(pc.invert(pc.is_in(notices["id"], table["id"])))
        if alone.num_rows:
            columns = {"id": alone["id"], "state": pa.repeat("cancelled", alone.num_rows), "settled_ms": alone["ready_ms"]}
            known = pc.greater(alone["seq"], 0)  # older versions did not note it
            columns |= {name: pc.if_else(known, alone[name], None) for name in ("seq", "created_ms", "due_ms")}
            yield from self._emit(schema, columns, alone.num_rows)

    def _no_deliveries(self) -> Deliveries:
        made = Deliveries(self.facts.messages.num_rows)
        made.attempts = {} if self.with_attempts else None
        return made

    def _deliveries(self) -> dict[str, Deliveries]:
        """The last delivery of each message, by group: from the history, and from leases and retries."""
        found: dict[str, Deliveries] = {}
        facts, marks = self.facts, self.facts.marks.groups
        for event in events(self.logs, "history"):
            if event.fields["event"] != kinds.SETTLE or (self._as_of is not None and event.at_ms > self._as_of):
                continue
            rows = facts.rows_at(journals.packed_column(event.fields, "offsets"))
            missing = np.flatnonzero(rows < 0) if facts.left_over else rows[:0]
            if len(missing):  # perhaps a retry or a dead letter is left
                ids = kinds.split_ids(event.fields["ids"])
                rows[missing] = [facts.left_over.get(ids[i], -1) for i in missing.tolist()]
            found.setdefault(event.group, self._no_deliveries()).settle(
                event, rows, marks[event.group].born if event.group in marks else 0
            )
        for name, mark in marks.items():
            if mark.open:
                found.setdefault(name, self._no_deliveries()).hold(mark, facts)
        return found

    def _of_group(self, name: str, codes: Any, deliveries: Deliveries, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        rows = np.flatnonzero((codes != _NEVER_HAD) | (deliveries.outcomes >= 0))
        if len(rows):
            columns = self._known(rows) | deliveries.columns(rows, _OVER[codes[rows]])
            state = {"group": pa.repeat(name, len(rows)), "state": _SHOWN.take(pa.array(codes[rows]))}
            yield from self._emit(schema, columns | state, len(rows))
        if deliveries.gone:
            gone = pa.Table.from_pylist(list(deliveries.gone.values()))
            columns = {column: gone[column] for column in gone.column_names}
            state = {"group": pa.repeat(name, len(gone)), "state": pa.repeat("history", len(gone))}
            yield from self._emit(schema, columns | state, len(gone))

    def _emit(self, schema: pa.Schema, columns: dict[str, Any], count: int) -> Iterator[pa.RecordBatch]:
        """Columns in the order of the schema. Differences of times are made here."""
        columns = {"topic": pa.repeat(self.topic, count), **columns}
        for name, high, low in (
            ("late_ms", "ready_ms", "due_ms"),
            ("wait_ms", "reserved_ms", "ready_ms"),
            ("work_ms", "settled_ms", "reserved_ms"),
        ):
            if high in columns and low in columns:
                columns[name] = pc.subtract(columns[high], columns[low])
        arrays = []
        for column in schema:
            if pa.types.is_timestamp(column.type) and f"{column.name}_ms" in columns:
                arrays.append(pc.multiply(_one(columns[f"{column.name}_ms"]), 1000).cast(pa.int64()).view(_UTC))
            elif column.name in columns:
                arrays.append(_one(columns[column.name]).cast(column.type))
            else:
                arrays.append(pa.nulls(count, column.type))
        yield from pa.Table.from_arrays(arrays, schema=schema).to_batches(max_chunksize=ROWS)


def _one(values: Any) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _masked(values: I64) -> pa.Array:
    return pa.array(values, mask=values == _NONE)


def _texts(texts: dict[int, str], rows: I64) -> pa.Array:
    """Texts by row; empty ones are null."""
    if not texts:
        return pa.nulls(len(rows), pa.string())
    return pa.array([texts.get(row) or None for row in rows.tolist()], pa.string())
