"""The optional fields of messages in the types of requests and answers, taken from the table in `turtlemq.message_fields`.

A type may spell a field itself, at its own place in the OpenAPI document; the rows of the table that it does not spell are
added behind its own fields, so that no type can miss one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec import Struct, UnsetType, defstruct

from turtlemq.message_fields import FIELDS, OptionalField

FOR_CONSUMERS = tuple(row for row in FIELDS if row.for_consumers)
Kind = TypeVar("Kind", bound=Struct)


def with_fields(rows: Iterable[OptionalField], absent: Any) -> Callable[[type[Kind]], type[Kind]]:
    """A decorator of types of messages. `absent` stands for a field that a message does not have: None, or UNSET: left out."""

    def add(kind: type[Kind]) -> type[Kind]:
        missing = [row for row in rows if row.name not in kind.__struct_fields__]
        if not missing:
            return kind
        fields = [(row.name, row.type if absent is None else row.type | UnsetType, absent) for row in missing]
        namespace = {"__doc__": kind.__doc__}
        return defstruct(kind.__name__, fields, bases=(kind,), namespace=namespace, module=kind.__module__, kw_only=True)  # type: ignore[return-value]

    return add
