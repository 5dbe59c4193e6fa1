"""Decoding JSON into a type, with errors that say whether it is no JSON or does not fit, and which item is wrong. Pure."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server.errors import InvalidJson

T = TypeVar("T")

_INDEX = re.compile(r"\[(\d+)\]")


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
        raise error(str(wrong), **index_in(str(wrong))) from None


def syntax_error_or(data: bytes, mismatch: Exception) -> Exception:
    """The error of data that is no JSON; `mismatch` if it is JSON, and only its type does not fit."""
    try:
        msgspec.json.decode(data or b"{}", type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as broken:
        return broken
    return mismatch


def index_in(message: str) -> dict[str, int]:
    """The index of the item that an error message of msgspec is about, if there is one.

    >>> index_in("Expected `str`, got `int` - at `$.messages[3].id`")
    {'index': 3}
    """
    index = _INDEX.search(message.rpartition(" - at ")[2])
    return {"index": int(index[1])} if index else {}
