"""Decoding JSON into a type, with errors that say whether it is no JSON or does not fit, and which item is wrong. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server.errors import InvalidJson

T = TypeVar("T")

_INDEX = re.compile(r"\[(\d+)\]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNKNOWN = re.compile(r"unknown field `(.*)`")


def check_text(data: bytes) -> None:
    """Raise `InvalidJson` unless the text is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not UTF-8 text (byte {error.start})") from None


def decode(data: bytes, kind: type[T], error: type[TurtleError] = InvalidArgument) -> T:
    """The value in a JSON body; an empty body is an empty object. Raises `error` with the item's index if it does not fit."""
    check_text(data)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as mismatch:
        wrong = syntax_error_or(data, mismatch)
        if not isinstance(wrong, msgspec.ValidationError):
            raise InvalidJson(str(wrong)) from None
        raise error(reworded(str(wrong), kind), **index_in(str(wrong))) from None


def syntax_error_or(data: bytes, mismatch: Exception) -> Exception:
    """The error of data that is no JSON; `mismatch` if it is JSON, and only its type does not fit."""
    try:
        msgspec.json.decode(data or b"{}", type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as broken:
        return broken
    return mismatch


def field_in(message: str) -> str:
    """The name of the field that an error message of msgspec is about.

    >>> field_in("Expected `str`, got `int` - at `$.messages[3].id`"), field_in("Expected `object`, got `int`")
    ('id', '')
    """
    names = _NAME.findall(message.partition(" - at ")[2])
    return str(names[-1]) if names else ""


def reworded(message: str, kind: Any) -> str:
    """An error message of msgspec that begins with the name of the option, and tells the allowed values, or a near name.

    >>> from turtlemq.server.incoming.columns import CommonFields
    >>> reworded("Invalid enum value 'urgent' - at `$.priority`", CommonFields)
    "priority: Invalid enum value 'urgent'; allowed are 'high', 'normal', 'low'"
    >>> reworded("Object contains unknown field `dely`", CommonFields)
    'Object contains unknown field `dely`; did you mean `delay`?'
    """
    problem, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    inner = _inner(kind, _NAME.findall(path))
    if unknown := _UNKNOWN.search(problem):
        near = get_close_matches(unknown[1], getattr(inner, "__struct_fields__", ()), 1)
        problem += f"; did you mean `{near[0]}`?" if near else ""
    elif problem.startswith("Invalid enum value") and (values := _values(inner)):
        problem += f"; allowed are {', '.join(map(repr, values))}"
    return f"{path}: {problem}" if path else problem


def _inner(kind: Any, names: Sequence[str]) -> Any:
    """The type of the field that these names lead to; of a type with the field itself, if it does not have all of them."""
    for name in names:
        found = [choice for choice in (kind, *get_args(kind)) if name in getattr(choice, "__struct_fields__", ())]
        if found:
            kind = get_type_hints(found[0])[name]
    structs = [choice for choice in get_args(kind) if hasattr(choice, "__struct_fields__")]
    return structs[0] if structs else kind


def _values(kind: Any) -> tuple[Any, ...]:
    """The values of a literal type, also of one that may be missing."""
    choices = kind, *get_args(kind)
    return next((get_args(choice) for choice in choices if get_origin(choice) is Literal), ())


def index_in(message: str) -> dict[str, int]:
    """The index of the item that an error message of msgspec is about, if there is one.

    >>> index_in("Expected `str`, got `int` - at `$.messages[3].id`")
    {'index': 3}
    """
    index = _INDEX.search(message.rpartition(" - at ")[2])
    return {"index": int(index[1])} if index else {}
