"""The meaning of a body, decoded once more, slowly and by the contract alone: JSON by the standard library, BSON as its
specification tells it.

Every body that the server takes, this takes too, and understands the same.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

FIELDS = {"body", "id", "delay", "due", "due_ms", "ttr", "priority", "expires_ms", "headers"}
_WIDTHS = {0x06: 0, 0x07: 12, 0x09: 8, 0x11: 8, 0x13: 16, 0x7F: 0, 0xFF: 0}  # types that JSON does not have, of one width


class Refused(Exception):
    """This is no batch of messages."""


class Meant(NamedTuple):
    """A message. Its body is bytes, or a value of JSON in a list."""

    body: bytes | list[Any]
    id: str | None
    due_ms: int
    ttr_ms: int
    priority: str
    expires_ms: int | None
    headers: dict[str, str] | None


class Strange:
    """A value that JSON does not have."""


def decode(data: bytes, kind: str, now_ms: int) -> list[Meant]:
    """All messages of a body."""
    try:
        if kind == "application/bson":
            return [_meant(_without_strange(fields), now_ms) for fields in _documents(data)]
        text = data.decode("utf-8")
        if kind == "application/x-ndjson":
            return [_meant(_json(line), now_ms) for line in text.split("\n") if line.strip()]
        whole = _json(text)
        many = whole["messages"] if isinstance(whole, dict) and whole.keys() == {"messages"} else [whole]
        return [_meant(fields, now_ms) for fields in many]
    except (ValueError, TypeError, KeyError, IndexError, struct.error, OverflowError, RecursionError) as error:
        raise Refused(str(error)) from error


# Messages


def _meant(fields: dict[str, Any], now_ms: int) -> Meant:
    _demand(isinstance(fields, dict), "a message is an object")
    packed = fields.pop("body_base64", None)
    _demand(fields.keys() <= FIELDS, "an unknown field")
    _demand(("body" in fields) != (packed is not None), "a body, and one only")
    said = {name: fields[name] for name in fields if fields[name] is not None}
    id_, delay, due, ttr = said.get("id"), _seconds(said.get("delay")), said.get("due_ms"), said.get("ttr")
    _demand(len(said.keys() & {"delay", "due", "due_ms"}) < 2, "one due time")
    _demand(id_ is None or isinstance(id_, str), "id")
    _demand(delay is None or (_number(delay) and delay >= 0), "delay")
    _demand(ttr is None or (_number(ttr) and ttr > 0), "ttr")
    _demand(all(said.get(name) is None or _whole(said[name]) for name in ("due_ms", "expires_ms")), "a time")
    _demand(due is None or not 0 <= due < 10**11, "seconds as milliseconds")
    if "due" in said:
        due = math.ceil(
            (datetime.fromisoformat(said["due"].upper()) - datetime.fromtimestamp(0, UTC)) / timedelta(milliseconds=1)
        )
    headers = said.get("headers")
    _demand(headers is None or all(isinstance(text, str) for text in headers.values()), "headers")
    _demand(fields.get("priority", "normal") in ("high", "normal", "low"), "priority")
    return Meant(
        body=_body(fields["body"]) if packed is None else base64.b64decode(packed, validate=True),
        id=id_,
        due_ms=now_ms + round(delay * 1000) if delay is not None else now_ms if due is None else due,
        ttr_ms=0 if ttr is None else max(1, round(ttr * 1000)),
        priority=fields.get("priority", "normal"),
        expires_ms=said.get("expires_ms"),
        headers=headers,
    )


def _seconds(delay: Any) -> Any:
    """A delay in seconds, if it is a text such as 15m; any other value as it is."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
    text = re.fullmatch("([0-9.]+)([a-z]+)", delay) if isinstance(delay, str) else None
    return delay if text is None else float(text[1]) * units[text[2]]


def _demand(fact: bool, what: str) -> None:
    if not fact:
        raise Refused(what)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _body(value: Any) -> bytes | list[Any]:
    return value if isinstance(value, bytes) else [value]


def _without_strange(fields: dict[str, Any]) -> dict[str, Any]:
    """BSON has values that JSON has not, and that no body has. (A number that is too big for any type, like 1e999, is JSON.)"""
    if not isinstance(fields.get("body"), bytes):
        json.dumps(fields.get("body"), allow_nan=False)
    return fields


# Languages


def _json(text: str) -> Any:
    def none(name: str) -> Any:
        raise Refused(f"{name} is no JSON")

    return json.loads(text, parse_constant=none)


def _documents(data: bytes) -> list[dict[str, Any]]:
    found, at = [], 0
    while at < len(data):
        fields, at = _document(data, at)
        found.append(fields)
    return found


def _document(data: bytes, at: int) -> tuple[dict[str, Any], int]:
    end = at + struct.unpack_from("<i", data, at)[0]
    _demand(at + 5 <= end <= len(data) and data[end - 1] == 0, "the length of a document")
    fields: dict[str, Any] = {}
    at += 4
    while at < end - 1:
        stop = data.index(b"\0", at + 1, end)
        name = data[at + 1 : stop].decode("utf-8")
        fields[name], at = _value(data[at], data, stop + 1, end - 1)
    _demand(at == end - 1, "the end of a document")
    return fields, end


def _value(kind: int, data: bytes, at: int, end: int) -> tuple[Any, int]:
    if kind in (0x01, 0x10, 0x12):
        form = {0x01: "<d", 0x10: "<i", 0x12: "<q"}[kind]
        stop = at + struct.calcsize(form)
        _demand(stop <= end, "a number is cut")
        return struct.unpack_from(form, data, at)[0], stop
    if kind == 0x0A:
        return None, at
    if kind == 0x08:
        _demand(at < end and data[at] < 2, "true or false")
        return data[at] == 1, at + 1
    if kind in (0x03, 0x04):
        fields, stop = _document(data[:end], at)
        return (list(fields.values()) if kind == 0x04 else fields), stop
    if kind in (0x02, 0x0D, 0x0E):
        stop = at + 4 + struct.unpack_from("<i", data, at)[0]
        _demand(at + 4 < stop <= end and data[stop - 1] == 0, "the length of a text")
        text = data[at + 4 : stop - 1].decode("utf-8")
        return (text if kind == 0x02 else Strange()), stop
    if kind == 0x05:
        length, subtype = struct.unpack_from("<iB", data, at)
        stop = at + 5 + length
        _demand(length >= 0 and stop <= end, "the length of a binary")
        return data[at + (9 if subtype == 2 else 5) : stop], stop
    return Strange(), _strange(kind, data, at, end)


def _strange(kind: int, data: bytes, at: int, end: int) -> int:
    if kind == 0x0B:  # two texts without lengths
        return data.index(b"\0", data.index(b"\0", at, end) + 1, end) + 1
    if kind in (0x0C, 0x0F):  # a text and twelve bytes; a length, a text and a document
        more = int(struct.unpack_from("<i", data, at)[0])
        return at + 4 + more + 12 if kind == 0x0C else at + more
    _demand(kind in _WIDTHS, "there is no such type")
    return at + _WIDTHS[kind]


def same(meant: Meant, body: bytes, is_json: bool) -> bool:
    """Is this the body that was meant?"""
    if not is_json:
        return meant.body == body
    return isinstance(meant.body, list) and repr(json.loads(body)) == repr(meant.body[0])
