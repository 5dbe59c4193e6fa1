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
    """JSON is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not UTF-8 text (byte {error.start})") from None


def decode(data: bytes, kind: type[T], error: type[TurtleError] = InvalidArgument) -> T:
    """The typed value in a JSON body; an empty body is an empty object. What does not fit raises `error`, with its index."""
    check_text(data)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as met:
        wrong = whole_or(data, met)
        if not isinstance(wrong, msgspec.ValidationError):
            raise InvalidJson(str(wrong)) from None
        raise error(str(wrong), **index_in(str(wrong))) from None


def whole_or(data: bytes, wrong: Exception) -> Exception:
    """`wrong`, said of JSON that does not fit; but if it is not even JSON, what is wrong with that."""
    try:
        msgspec.json.decode(data or b"{}", type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as broken:
        return broken
    return wrong


def index_in(message: str) -> dict[str, int]:
    """Which item a message of msgspec is about.

    >>> index_in("Expected `str`, got `int` - at `$.messages[3].id`")
    {'index': 3}
    """
    found = _INDEX.search(message.rpartition(" - at ")[2])
    return {"index": int(found[1])} if found else {}
