"""Facts about all messages of a topic as columns, from files alone, for the decisions of `turtlemq.standing`.

A message is a row of `messages`: its document in the ready log; or, where retention has removed that, the retry or dead letter
that is left of it. The facts of a group are one integer for each row. The engine looks the same facts up for single ids
(`broker.facts`, `topic.facts`); here array operations gather them for all rows, and a group costs a few passes over these.

Not here: messages that sleep for the first time or were cancelled then, and the columns of a row (`message_states`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import as_of as as_of_tables
from pyspark_turtlemq import attempts_column, documents, group_marks
from pyspark_turtlemq.group_marks import UNKNOWN_SEQ, ReadySeqs
from pyspark_turtlemq.parts import LogSnapshot, TopicLogs
from pyspark_turtlemq.predicates import Predicates
from turtlemq import standing
from turtlemq.attempts import Attempts
from turtlemq.broker.checkpoint import GroupMark
from turtlemq.model import I64, Mask

_LEVELS = pa.array(["normal", "high", "low"])  # by number, in the order of a group's cursors
_DOCUMENT = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "group", "state", "priority")),
        *((name, pa.int64()) for name in ("created_ms", "due_ms", "seq", "ttr_ms")),
        ("body_bytes", pa.int32()),
    ]
)
_RETRY = pa.schema([*_DOCUMENT, *((name, pa.int64()) for name in ("message_due", "left_offset", "epoch", "order"))])
_READY = pa.schema([*_RETRY, ("offset", pa.int64()), ("ready_ms", pa.int64())])
_ATTEMPTS = pa.field(attempts_column.NAME, attempts_column.ARROW_TYPE)
Noted = tuple[dict[int, list[Attempts]], dict[int, list[Attempts]], dict[int, list[Attempts]]]
_MESSAGE = pa.schema([*_DOCUMENT, ("offset", pa.int64()), ("ready_ms", pa.int64())])


@dataclass(frozen=True, slots=True)
class Owned:
    """Retries or dead letters of one group, as columns: the rows of the messages that they are about, offsets and priorities."""

    rows: I64
    offsets: I64
    levels: I64


class TopicFacts:
    """The messages of one topic, and facts about them. `with_attempts`: also their attempts, as retries and letters tell them.
    `as_of`: a moment in the past."""

    def __init__(self, logs: TopicLogs, *, with_attempts: bool = False, as_of: int | None = None) -> None:
        log, more = logs.ready_log(), [_ATTEMPTS] if with_attempts else []
        slept = [] if as_of is None else [("slept_ms", pa.int64())]
        every = ready = _table(log, pa.schema([*_READY, *slept, *more]))
        self.first = min((part.cover.first_seq for part in log.parts), default=0)
        self.end = max(log.end, self.first)
        if as_of is not None:
            as_of_tables.check_known(logs, as_of)
            ready = as_of_tables.ready_then(every, as_of)
            self.end = max(self.first, 1 + max(_ints(ready["offset"]).tolist(), default=-1))
        self.marks = group_marks.replay(logs, self._ready_seqs(ready), as_of)
        owned, notice = pc.is_valid(ready["group"]), pc.equal(ready["state"], "notice")
        self.notices = ready.filter(notice)
        delay = logs.delay_log("delay")
        delay.progress = log.progress
        sleepers = _table(delay, pa.schema([*_RETRY, *slept, *more]))
        self.first_sleep = sleepers.filter(pc.is_null(sleepers["group"]))
        dropped = [] if as_of is None else [("dropped_ms", pa.int64())]
        letters = _table(logs.delay_log("dead"), pa.schema([*_DOCUMENT, *dropped, *more]))
        if as_of is None:
            letters = letters.filter(pc.equal(letters["state"], "dead"))
        else:
            sleepers, letters = (
                as_of_tables.sleepers_then(sleepers, every, as_of),
                as_of_tables.letters_then(letters, logs, as_of),
            )
            self.first_sleep = sleepers.filter(pc.is_null(sleepers["group"]))
        retries = self._valid(ready.filter(owned))
        retries = retries.filter(pa.array(~self._is_cancelled(_ints(retries["offset"]))))
        asleep = self._valid(sleepers.filter(pc.equal(sleepers["state"], "sleep")))
        self.messages = self._messages(ready.filter(pc.invert(pc.or_(owned, notice))), asleep, retries, letters)
        self._ids = _chunk(self.messages["id"])
        self._newest_first = self._ids.take(pa.array(np.arange(len(self._ids))[::-1]))
        self.offsets = _ints(self.messages["offset"], self.first - 1)  # a removed document lay there at the latest
        self._levels = _levels(self.messages)
        self._cancelled = self._is_cancelled(self.offsets)
        self._row_of_offset = self._rows_by_offset(ready.filter(owned))
        left = np.flatnonzero(self.offsets < self.first)
        self.left_over = dict(zip(self._ids.take(pa.array(left)).to_pylist(), left.tolist(), strict=True))  # id → row
        self.noted = self._noted(self._valid(ready.filter(owned)), asleep, letters) if with_attempts else {}
        self._retries, self._asleep, self._letters = map(self._by_group, (retries, asleep, letters))
        self._left = {} if as_of is None else as_of_tables.left_then(logs, as_of)

    def _ready_seqs(self, ready: pa.Table) -> ReadySeqs:
        seqs = np.full(self.end - self.first, UNKNOWN_SEQ, np.int64)
        seqs[_ints(ready["offset"]) - self.first] = _ints(ready["seq"])
        return ReadySeqs(self.first, seqs)

    def _is_cancelled(self, offsets: I64) -> Mask:
        return np.isin(offsets, np.fromiter(self.marks.cancelled, np.int64, len(self.marks.cancelled)))

    def _valid(self, retries: pa.Table) -> pa.Table:
        """Retries of groups that exist, without those that a move of the group has made void."""
        valid = np.zeros(retries.num_rows, np.bool_)
        for name, which in _split(retries).items():
            if (mark := self.marks.groups.get(name)) is not None:
                epoch, order, left = (_ints(retries[column])[which] for column in ("epoch", "order", "left_offset"))
                valid[which] = ~standing.are_void(mark.born, mark.moves, epoch, order, left)
        return retries.filter(pa.array(valid))

    def _messages(self, present: pa.Table, asleep: pa.Table, retries: pa.Table, letters: pa.Table) -> pa.Table:
        """Documents of the ready log, then one retry or dead letter of each message that it does not hold any more."""
        left = [_as_messages(table) for table in (asleep, retries, letters)]
        candidates = pa.concat_tables(left)
        known = pa.concat_arrays([_chunk(present["id"]), _chunk(self.notices["id"])])
        candidates = candidates.filter(pc.invert(pc.is_in(candidates["id"], known)))
        ids = _chunk(candidates["id"])
        return pa.concat_tables([present.select(_MESSAGE.names), candidates.take(pc.index_in(ids.unique(), ids))])

    def rows_of(self, ids: pa.ChunkedArray | pa.Array) -> I64:
        """The rows of messages with these ids, -1 for those that are not among them. An id that was used again is that of the
        newest message: retries and dead letters of earlier ones have ended."""
        if not len(ids):
            return np.empty(0, np.int64)
        found = _ints(pc.index_in(ids, self._newest_first), -1)
        return np.where(found < 0, -1, len(self._ids) - 1 - found)

    def rows_at(self, offsets: I64) -> I64:
        """The rows of the messages at these ready offsets, -1 where there is none."""
        at = offsets - self.first
        inside = np.flatnonzero((at >= 0) & (at < len(self._row_of_offset)))
        rows = np.full(len(offsets), -1, np.int64)
        rows[inside] = self._row_of_offset[at[inside]]
        return rows

    def _rows_by_offset(self, retries: pa.Table) -> I64:
        """The row of the message at each ready offset less the first; -1 for notices, and for retries of which nothing is left. A
        retry comes after its message: one before it belongs to an earlier message of the same id."""
        found = np.full(self.end - self.first, -1, np.int64)
        offsets, rows = _ints(retries["offset"]), self.rows_of(retries["id"])
        known = np.flatnonzero(rows >= 0)
        later = known[self.offsets[rows[known]] < offsets[known]]
        found[offsets[later] - self.first] = rows[later]
        present = np.flatnonzero(self.offsets >= self.first)
        found[self.offsets[present] - self.first] = present
        return found

    def _by_group(self, table: pa.Table) -> dict[str, Owned]:
        rows, levels = self.rows_of(table["id"]), _levels(table)
        offsets = _ints(table["offset"]) if "offset" in table.column_names else np.full(table.num_rows, -1, np.int64)
        owned = {name: which[rows[which] >= 0] for name, which in _split(table).items()}
        return {name: Owned(rows[which], offsets[which], levels[which]) for name, which in owned.items()}

    def _noted(self, *tables: pa.Table) -> dict[str, Noted]:
        """Attempts in the notes of due retries, sleeping retries and dead letters, by group: for each of the three by row."""
        found: dict[str, Noted] = {}
        due, *_ = tables
        places = [self.rows_at(_ints(due["offset"])), *(self.rows_of(table["id"]) for table in tables[1:])]
        for kind, (table, rows) in enumerate(zip(tables, places, strict=True)):
            told = attempts_column.decoded(table[attempts_column.NAME])
            for group, row, own in zip(table["group"].to_pylist(), rows.tolist(), told, strict=True):
                if row >= 0 and own:
                    found.setdefault(group, ({}, {}, {}))[kind].setdefault(row, []).append(own)
        return found

    @property
    def groups(self) -> Collection[str]:
        """The groups that exist, and those that are gone but have dead letters."""
        return {*self.marks.groups, *self._letters}

    def facts(self, name: str) -> I64:
        """The facts of every message and one group, as bits of `standing`. A group that is gone has dead letters only."""
        facts = np.where(self._cancelled, standing.CANCELLED, 0)
        mark = self.marks.groups.get(name, GroupMark(moves=[(0, self.end)], cursors=[self.end] * len(_LEVELS)))
        cursors = np.array(mark.cursors)
        facts[(self.offsets >= cursors[self._levels]) & (self.offsets >= self.first)] |= standing.UNFETCHED
        facts[self.offsets < standing.first_had(mark.moves)] |= standing.PREDATES
        if (retries := self._retries.get(name)) is not None:
            facts[retries.rows[retries.offsets >= cursors[retries.levels]]] |= standing.UNFETCHED
        for owned, fact in ((self._asleep, standing.ASLEEP), (self._letters, standing.LETTER)):
            if name in owned:
                facts[owned[name].rows] |= fact
        if left := self._left.get(name):
            facts[self._without_retry(name, np.array(sorted(left), np.int64))] |= standing.ASLEEP
        for waits, fact in ((False, standing.LEASED), (True, standing.WAITING)):
            offsets = np.array([offset for offset, entry in mark.open.items() if entry.is_retry == waits], np.int64)
            rows = self.rows_at(offsets)
            facts[rows[rows >= 0]] |= fact
        return facts

    def _without_retry(self, name: str, left: I64) -> I64:
        """The rows of messages that have left these offsets, and of which no later retry is in the ready log."""
        rows, newest = self.rows_at(left), np.full(len(self.offsets), -1, np.int64)
        if (retries := self._retries.get(name)) is not None:
            np.maximum.at(newest, retries.rows, retries.offsets)
        known = np.flatnonzero(rows >= 0)
        gone: I64 = rows[known[newest[rows[known]] <= left[known]]]
        return gone

    def unclaimed(self) -> I64:
        """The facts of every message for the first group to come, where there is none."""
        present = np.where(self.offsets >= self.first, standing.UNCLAIMED, standing.PREDATES)
        return np.where(self._cancelled, standing.CANCELLED, present)


def _table(log: LogSnapshot, schema: pa.Schema) -> pa.Table:
    """All documents of a log."""
    spec = documents.ReadSpec(tuple(schema.names), Predicates())
    splits = [documents.DocumentSplit(part, 0, part.cover.documents, 0, log.ended, log.progress) for part in log.parts]
    return pa.Table.from_batches([batch for split in splits for batch in documents.read(split, spec, schema)], schema)


def _as_messages(table: pa.Table) -> pa.Table:
    """Retries and dead letters as rows of `messages`: with the due time that the producer asked for, outside of the ready log."""
    nulls = pa.nulls(table.num_rows, pa.int64())
    columns = {name: table[name] for name in _DOCUMENT.names} | {"offset": nulls, "ready_ms": nulls}
    if "message_due" in table.column_names:
        columns["due_ms"] = table["message_due"]
    return pa.table(columns, schema=_MESSAGE)


def _split(table: pa.Table) -> dict[str, I64]:
    """Indexes of rows by the group that they belong to."""
    encoded = _chunk(table["group"]).dictionary_encode()
    codes = _ints(encoded.indices, -1)
    return {name: np.flatnonzero(codes == code) for code, name in enumerate(encoded.dictionary.to_pylist())}


def _levels(table: pa.Table) -> I64:
    return _ints(pc.index_in(table["priority"], _LEVELS), 0)


def _chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _ints(column: pa.ChunkedArray | pa.Array, null: int = 0) -> I64:
    """A column of integers as an array of its own, with a number in the place of nulls."""
    values: I64 = pc.fill_null(_chunk(column), null).to_numpy(zero_copy_only=False).astype(np.int64)
    return values
