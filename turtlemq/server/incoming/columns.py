"""Decoded messages: the fields that JSON and BSON share, and the columns into which both are decoded.

Columns are built in parts (slices of a large batch, documents of one layout) and joined with `extend` and `in_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from turtlemq import small_batches
from turtlemq.errors import InvalidFireAt, InvalidId, InvalidMessage, TurtleError
from turtlemq.message_fields import FIELDS, NAMES, OptionalColumns
from turtlemq.model import I64, Priority
from turtlemq.server.errors import InvalidJson
from turtlemq.server.incoming.decode import field_in, index_in, reworded
from turtlemq.server.incoming.times import DELAY_TEXT, DUE_TEXT, SPREAD_TEXT, Delay, Due, Spread
from turtlemq.server.optional_fields import with_fields

F64 = npt.NDArray[np.float64]
PRIORITIES = {"normal": Priority.NORMAL, "high": Priority.HIGH, "low": Priority.LOW}

_TEXTS = {
    "delay": DELAY_TEXT,
    "due": DUE_TEXT,
    "spread": SPREAD_TEXT,
    "due_ms": "due_ms is a time in epoch milliseconds, a whole number",
}
_OPTIONAL = {name: attrgetter(name) for name in NAMES}


@with_fields(FIELDS, None)
class CommonFields(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The fields of a message that JSON and BSON share."""

    id: str | None = None
    delay: Delay | None = None
    due_ms: int | None = None
    due: Due | None = None
    ttr: float | None = None
    spread: Spread | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    if_exists: Literal["keep", "replace", "reschedule", "error"] | None = None


@dataclass(slots=True)
class Columns(OptionalColumns):
    """Messages as they were sent. A column is None if no message has the field; in a list, None stands for a message without it.
    A column is an array only if every message has the field."""

    bodies: list[bytes]
    flags: list[int] | int  # JSON and priority; one number if all have the same
    ids: list[str | None] | None = None
    delay: list[float | str | None] | F64 | None = None
    due_ms: list[int | None] | I64 | None = None
    ttr: list[float | None] | F64 | None = None
    due: list[datetime | None] | None = None
    spread: list[float | None] | None = None
    if_exists: list[str | None] | None = None

    def __len__(self) -> int:
        return len(self.bodies)


def columns_of(messages: Sequence[CommonFields], bodies: list[bytes], flags: list[int] | int) -> Columns:
    """The columns of typed messages. 0.1 µs each."""
    if [m.priority for m in messages].count("normal") < len(messages):
        flags = [flag | PRIORITIES[m.priority] for flag, m in zip(_as_list(flags, len(messages)), messages, strict=True)]
    return Columns(
        bodies,
        flags,
        _or_none([m.id for m in messages]),
        or_array([m.delay for m in messages], np.float64),
        or_array([m.due_ms for m in messages], np.int64),
        _or_none([m.ttr for m in messages]),
        _or_none([m.due for m in messages]),
        _or_none([m.spread for m in messages]),
        _or_none([m.if_exists for m in messages]),
        **{name: _or_none(list(map(value_of, messages))) for name, value_of in _OPTIONAL.items()},
    )


def _or_none(column: list[Any]) -> list[Any] | None:
    """A column, or None if it is empty."""
    return None if column.count(None) == len(column) else column


def or_array(column: list[Any], kind: type[np.generic]) -> Any:
    """A column: an array if it is long and complete, None if it is empty."""
    if len(column) >= small_batches.DOCUMENTS and None not in column:
        try:
            return np.array(column, kind)
        except (OverflowError, ValueError):  # a number larger than any time, or a delay as text
            return column
    return _or_none(column)


def extend(columns: Columns, more: Columns) -> None:
    """Append messages to columns, in place."""
    counts = len(columns), len(more)
    for field in fields(Columns):
        old, new = getattr(columns, field.name), getattr(more, field.name)
        if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
            setattr(columns, field.name, np.concatenate((old, new)))
        elif isinstance(old, int) and old == new:
            continue
        elif old is not None or new is not None:
            joined = _as_list(old, counts[0])
            joined += _as_list(new, counts[1])
            setattr(columns, field.name, joined)


def _as_list(column: Any, count: int) -> list[Any]:
    if column is None or isinstance(column, int):
        return [column] * count
    values: list[Any] = column.tolist() if isinstance(column, np.ndarray) else column
    return values


def in_order(columns: Columns, places: I64) -> Columns:
    """Columns with the message at k moved to places[k]."""
    back = np.argsort(places)
    order = back.tolist()

    def moved(column: Any) -> Any:
        if column is None or isinstance(column, int):
            return column
        if isinstance(column, np.ndarray):
            return column[back]
        return [column[i] for i in order]

    return Columns(**{field.name: moved(getattr(columns, field.name)) for field in fields(Columns)})


def refusal(wrong: Exception, index: int | None = None) -> TurtleError:
    """The error for a message that msgspec refused, by the field in msgspec's text. `index` overrides the index in that text."""
    where = {"index": index} if index is not None else index_in(str(wrong))
    field = field_in(str(wrong))
    problem = _TEXTS.get(field) or reworded(str(wrong), CommonFields)
    text = f"message {where['index']}: {problem}" if where else problem
    if not isinstance(wrong, msgspec.ValidationError):
        return InvalidJson(text, **where)
    kinds: dict[str, type[TurtleError]] = {"delay": InvalidFireAt, "due_ms": InvalidFireAt, "due": InvalidFireAt, "id": InvalidId}
    return kinds.get(field, InvalidMessage)(text, **where)
