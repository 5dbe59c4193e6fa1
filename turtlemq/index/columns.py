"""Conversions at the edge of the Index: messages and tombstones to columns for the writer, stored documents to messages.

Nothing is looked up or written here. The bytes of a document are made by `segment.format`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from turtlemq import small_batches
from turtlemq.index.parts import Part
from turtlemq.message_fields import NAMES, flags_of, optional_of
from turtlemq.model import I64, U8, U32, U64, Batch, CheckedBatch, Message, State, StoredMessage
from turtlemq.segment import format as f

UNHASHED: Sequence[int] = ()  # as `Columns.hashes`: the writer hashes all ids


class Ended(Protocol):
    """The fields of a document that its tombstone needs."""

    @property
    def id(self) -> str: ...
    @property
    def due_ms(self) -> int: ...
    @property
    def seq(self) -> int: ...


class CancelledSleeper(NamedTuple):
    """A sleeper that is about to end, as its notice in the ready log tells it."""

    id: str
    due_ms: int
    first_seq: int  # under which it first came


@dataclass(slots=True)
class Columns:
    """Documents about to be written, as columns of equal length."""

    ids: Sequence[bytes] | U8
    bodies: Sequence[bytes]
    due_ms: Sequence[int] | I64
    ttr_ms: Sequence[int] | int
    flags: list[int] | U32
    extras: Sequence[bytes] | None  # optional fields as BSON elements
    hashes: Sequence[int] | U64 | None  # of own ids, or UNHASHED; 0 for a server-given one; None: no id is to be found
    ends: Sequence[tuple[int, int]] = ()  # (seq, due) of the documents that these end
    seen: Sequence[tuple[Part, int]] = ()  # part and ordinal of the documents in `ends`, where a lookup found them
    handed_off: Sequence[tuple[int, int]] = ()  # (seq, due) of documents that these end, and that do not sleep any more
    purpose: str | Mapping[str, int] = "appended"  # the counter that they add to, or counts for several


def stored_message(document: f.Document, state: State) -> StoredMessage:
    """A document as callers see it. A sleeping retry is stored under group/id and shown with its own id and group."""
    group, _, id_ = document.id.rpartition("/") if document.flags & f.META else ("", "", document.id)
    return StoredMessage(
        id=id_,
        state=state,
        due_ms=document.due_ms,
        created_ms=document.created_ms,
        seq=document.seq,
        ttr_ms=document.ttr_ms,
        flags=document.flags & f.USER_FLAGS,
        body=document.body,
        group=group,
        **optional_of(document),
    )


def tombstones(ended: Sequence[Ended]) -> Columns:
    """Documents that end these documents."""
    flags = [f.TOMBSTONE | f.CONTINUES] * len(ended)
    flags[-1] &= ~f.CONTINUES
    return Columns(
        ids=[document.id.encode() for document in ended],
        bodies=[b""] * len(ended),
        due_ms=[document.due_ms for document in ended],
        ttr_ms=[0] * len(ended),
        flags=flags,
        extras=[f.extra_elements((document.seq, document.due_ms)) for document in ended],
        hashes=None,
        purpose="cancelled",
        ends=[(document.seq, document.due_ms) for document in ended],
    )


def as_batch(messages: Sequence[Message]) -> Batch:
    """Messages as columns."""
    return Batch(
        bodies=[m.body for m in messages],
        due_ms=[m.due_ms for m in messages],
        ids=[m.id for m in messages],
        ttr_ms=[m.ttr_ms for m in messages],
        flags=[m.priority | f.JSON * m.json for m in messages],
        **{name: [getattr(m, name) for m in messages] for name in NAMES},
    )


def batch_columns(batch: Batch, ids: Any, hashes: list[int] | U64 | None, indexes: Sequence[int] | None = None) -> Columns:
    """A validated batch as columns: the messages at these indexes, or all. Large batches become arrays, small ones lists.

    `ids` and `hashes` are those of the whole batch; a hash of 0 stands for a server-given id, None for all of them."""
    indexes = range(len(batch.bodies)) if indexes is None else indexes
    count = len(indexes)
    columns: list[Any] = [ids, batch.bodies, batch.due_ms, batch.ttr_ms, hashes]
    if count < len(batch.bodies):
        columns = [None if column is None else [column[i] for i in indexes] for column in columns]
    every, given = f.CONTINUES | (f.SERVER_ID if hashes is None else 0), batch.flags
    if isinstance(given, int):
        every, given = every | given, None
    elif given is not None and count < len(batch.bodies):
        given = [given[i] for i in indexes]
    if count < small_batches.DOCUMENTS:
        flags: Any = [every] * count if given is None else [flag | every for flag in given]
    else:
        flags = np.full(count, every, np.uint32) if given is None else np.array(given, np.uint32) | np.uint32(every)
    if isinstance(hashes, list) and 0 in hashes:
        flags = [flag if hashes[i] else flag | f.SERVER_ID for flag, i in zip(flags, indexes, strict=True)]
    extras, elements = None, batch.elements if isinstance(batch, CheckedBatch) else optional_elements(batch, indexes)
    if elements is not None:
        if isinstance(batch, CheckedBatch) and count < len(batch.bodies):
            elements = [elements[0][i] for i in indexes], [elements[1][i] for i in indexes]
        flags = [flag | more for flag, more in zip(flags, elements[0], strict=True)]
        extras = elements[1]
    if count >= small_batches.DOCUMENTS:
        flags = np.asarray(flags, np.uint32)
    flags[-1] ^= f.CONTINUES
    ids, bodies, due_ms, ttr_ms, hashes = columns
    return Columns(ids, bodies, due_ms, 0 if ttr_ms is None else ttr_ms, flags, extras, hashes)


def optional_elements(batch: Batch, indexes: Sequence[int]) -> tuple[list[int], list[bytes]] | None:
    """Flags and encoded elements of the optional fields of these messages. None if no message of the batch has any."""
    optional = {}
    for name in NAMES:
        if (column := getattr(batch, name)) is not None and _has_values(column):
            optional[name] = column
    if not optional:
        return None
    rows = [_row(optional, i) for i in indexes]
    return [flags_of(row) for row in rows], [f.extra_elements(**row) for row in rows]


def _has_values(column: Sequence[object]) -> bool:
    return any(item is not None for item in column)


def _row(columns: dict[str, Sequence[Any]], i: int) -> dict[str, Any]:
    """The optional fields that one message has, by name."""
    return {name: value for name, column in columns.items() if (value := column[i]) is not None and value != {}}


def number_column(values: list[int]) -> list[int] | I64:
    """Numbers as an array. Values that do not fit stay a list, for `check_batch` to report them."""
    if set(map(type, values)) != {int}:
        return values
    try:
        column = np.array(values)
    except OverflowError:
        return values
    return column if column.dtype == np.int64 else values


def may_repeat(raw: list[bytes], hashes: U64) -> bool:
    """May two of these ids be equal? For many, equal hashes decide: sorting them costs a fifth of a set of the ids."""
    if len(raw) < small_batches.DOCUMENTS:
        return len(set(raw)) < len(raw)
    ordered = np.sort(hashes)
    return bool((ordered[1:] == ordered[:-1]).any())
