"""Messages while they are read: the fields that JSON and BSON share, and the columns in which both hand them on.

Columns come in parts: slices of a big batch, documents of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
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
from turtlemq.server.incoming.decode import index_in
from turtlemq.server.optional_fields import with_fields

F64 = npt.NDArray[np.float64]
PRIORITIES = {"normal": Priority.NORMAL, "high": Priority.HIGH, "low": Priority.LOW}

_OPTIONAL = {name: attrgetter(name) for name in NAMES}


@with_fields(FIELDS, None)
class CommonFields(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The fields of a message that JSON and BSON share."""

    id: str | None = None
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: Literal["high", "normal", "low"] = "normal"


@dataclass(slots=True)
class Columns(OptionalColumns):
    """Messages as they were sent. A column is None where no message has the field; in a list, None stands for those without.
    Only where every message has it may it be an array."""

    bodies: list[bytes]
    flags: list[int] | int  # JSON and priority; one number where all have the same
    ids: list[str | None] | None = None
    delay: list[float | None] | F64 | None = None
    due_ms: list[int | None] | I64 | None = None
    ttr: list[float | None] | F64 | None = None

    def __len__(self) -> int:
        return len(self.bodies)


def columns_of(messages: Sequence[CommonFields], bodies: list[bytes], flags: list[int] | int) -> Columns:
    """The columns of typed messages. 0.1 µs each."""
    if [m.priority for m in messages].count("normal") < len(messages):
        flags = [flag | PRIORITIES[m.priority] for flag, m in zip(_listed(flags, len(messages)), messages, strict=True)]
    return Columns(
        bodies,
        flags,
        _or_none([m.id for m in messages]),
        or_array([m.delay for m in messages], np.float64),
        or_array([m.due_ms for m in messages], np.int64),
        _or_none([m.ttr for m in messages]),
        **{name: _or_none(list(map(value_of, messages))) for name, value_of in _OPTIONAL.items()},
    )


def _or_none(column: list[Any]) -> list[Any] | None:
    """A column, or None if there is nothing in it."""
    return None if column.count(None) == len(column) else column


def or_array(column: list[Any], kind: type[np.generic]) -> Any:
    """A column; an array, if it is long and has something everywhere."""
    if len(column) >= small_batches.DOCUMENTS and None not in column:
        try:
            return np.array(column, kind)
        except OverflowError:  # a number beyond all times
            return column
    return _or_none(column)


def extend(columns: Columns, more: Columns) -> None:
    """Put more messages behind those that are there."""
    counts = len(columns), len(more)
    for field in fields(Columns):
        ours, theirs = getattr(columns, field.name), getattr(more, field.name)
        if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
            setattr(columns, field.name, np.concatenate((ours, theirs)))
        elif isinstance(ours, int) and ours == theirs:
            continue
        elif ours is not None or theirs is not None:
            longer = _listed(ours, counts[0])
            longer += _listed(theirs, counts[1])
            setattr(columns, field.name, longer)


def _listed(column: Any, count: int) -> list[Any]:
    if column is None or isinstance(column, int):
        return [column] * count
    found: list[Any] = column.tolist() if isinstance(column, np.ndarray) else column
    return found


def in_order(columns: Columns, places: I64) -> Columns:
    """The message at k goes to places[k]."""
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
    """Which error it is, by the field that msgspec names. `index` beats the one that it names."""
    where = {"index": index} if index is not None else index_in(str(wrong))
    said = f"message {where['index']}: {wrong}" if where else str(wrong)
    if not isinstance(wrong, msgspec.ValidationError):
        return InvalidJson(said, **where)
    field = str(wrong).rpartition(".")[2].rstrip("`") if " - at " in str(wrong) else ""
    kinds: dict[str, type[TurtleError]] = {"delay": InvalidFireAt, "due_ms": InvalidFireAt, "id": InvalidId}
    return kinds.get(field, InvalidMessage)(said, **where)
