"""The optional fields of a message, as one table: everything a message may have beside id, due time, ttr, priority and body.

Each field of `OptionalFields` carries its row: its element in a stored document, its type, its flag, and whether consumers get
it. All code that stores, copies or shows messages walks this table (`FIELDS`) or copies with `optional_of`, so a new field is
declared here, once as a value and once as a column, and reaches put, reschedule, compaction, retries, dead letters, requeue,
HTTP and Spark; docs/ARCHITECTURE.md has the recipe, tests/test_message_fields.py the proof.

Fields that every document has (id, due time, seq, ttr, flags, body) and those that only the engine writes (of, was, arrived,
order, meta) do not live here but in `segment.format`. Pure, and without numpy: the client reads it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Kind(Enum):
    """The type of a field, by the type of its BSON element. Scans of format version 1 accept no others."""

    TIME = 0x09  # epoch milliseconds
    NUMBER = 0x12  # a whole number of 64 bits
    TEXTS = 0x03  # texts by name


@dataclass(frozen=True, slots=True)
class OptionalField:
    """One row of the table."""

    name: str  # in `Message` and `Batch`, and over HTTP in JSON and BSON
    element: str  # the name of its element in a document, up to 7 bytes; also its column in Spark
    kind: Kind
    flag: int  # set in the flags of documents that have it
    type: Any  # of a value; None: the message does not have it
    for_consumers: bool  # whether a fetch and a dead letter show it


def _row(element: str, kind: Kind, flag: int, *, for_consumers: bool = False) -> dict[str, Any]:
    return {"element": element, "kind": kind, "flag": flag, "for_consumers": for_consumers}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalFields:
    """The optional fields of one message. None: the message does not have it. In the order of their elements in a document."""

    # Not delivered by then, it is dead
    expires_ms: int | None = field(default=None, metadata=_row("expires", Kind.TIME, 1 << 8, for_consumers=True))
    headers: dict[str, str] | None = field(default=None, metadata=_row("headers", Kind.TEXTS, 1 << 9, for_consumers=True))


@dataclass(slots=True, kw_only=True)
class OptionalColumns:
    """The optional fields of many messages: a column each. None: no message has it; None in a column: that message has not."""

    expires_ms: Sequence[int | None] | NDArray[np.int64] | None = None
    headers: Sequence[dict[str, str] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFields(OptionalFields):
    """The optional fields of a stored message: as given, but without headers there is an empty table of them."""

    headers: dict[str, str] = field(default_factory=dict)


def _rows() -> tuple[OptionalField, ...]:
    types = get_type_hints(OptionalFields)
    return tuple(OptionalField(name=one.name, type=types[one.name], **one.metadata) for one in fields(OptionalFields))


FIELDS = _rows()
NAMES = tuple(row.name for row in FIELDS)
FLAGS = {row.name: row.flag for row in FIELDS}


def flags_of(names: Iterable[str]) -> int:
    """The flags of a document that has these optional fields."""
    flags = 0
    for name in names:
        flags |= FLAGS[name]
    return flags


def optional_of(message: OptionalFields) -> dict[str, Any]:
    """The optional fields that a message has, by name.

    >>> optional_of(OptionalFields(expires_ms=0, headers={}))
    {'expires_ms': 0}
    """
    return {name: value for name in NAMES if (value := getattr(message, name)) is not None and value != {}}
