"""Fields of imported messages: ids that are the same in every run, bodies as they would be put, due times. Pure."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import Any, Literal

import msgspec

BodyKind = Literal["auto", "bytes", "text", "json"]
ScoreUnit = Literal["auto", "s", "ms"]
_PLAIN_ID = re.compile(r"[A-Za-z0-9_][\w.:@+-]*", re.ASCII)
_ID_CHARS_MAX = 200
_SECONDS_BELOW = 1e11  # a number of epoch seconds is smaller until the year 5138, one of milliseconds is larger since 1973


class Unusable(Exception):
    """A source that cannot be read, or a record that is no message. The text says why."""


def message_id(prefix: str, given: str | bytes) -> str:
    """The id of a message, from its id or its content in the source: as it stands if it is short and plain, else its SHA-256.

    >>> message_id("bullmq-", "17"), message_id("", b'{"close": 17}')
    ('bullmq-17', '036afa0f086b6c032075fef1cd98ade2')
    """
    text = given.decode(errors="replace") if isinstance(given, bytes) else given
    if _PLAIN_ID.fullmatch(text) and len(prefix) + len(text) <= _ID_CHARS_MAX:
        return prefix + text
    return prefix + hashlib.sha256(given if isinstance(given, bytes) else given.encode(errors="surrogatepass")).hexdigest()[:32]


def body_of(data: bytes, kind: BodyKind = "auto") -> Any:
    """The body of a message. auto: the JSON value, digit by digit, if it is one; else text; else bytes.

    >>> bytes(body_of(b"[0.10]")), body_of(b"close 17"), body_of(bytes([255]))
    (b'[0.10]', 'close 17', b'\\xff')
    >>> body_of(b"close 17", "json")
    Traceback (most recent call last):
    turtlemq.importing.fields.Unusable: a body is no JSON: close 17
    """
    if kind == "bytes":
        return data
    if kind in ("auto", "json"):
        try:
            msgspec.json.decode(data)
            return msgspec.Raw(data)
        except (msgspec.DecodeError, RecursionError):
            if kind == "json":
                raise Unusable(f"a body is no JSON: {data[:60].decode(errors='replace')}") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        if kind == "text":
            raise Unusable("a body is no UTF-8 text") from None
        return data


def due_of_number(number: float, unit: ScoreUnit = "auto") -> int:
    """Epoch milliseconds of a number that is a time. auto: seconds if it is below 1e11.

    >>> due_of_number(1893456000.5), due_of_number(1893456000500), due_of_number(5, "ms"), due_of_number(-3)
    (1893456000500, 1893456000500, 5, 0)
    """
    seconds = unit == "s" or (unit == "auto" and abs(number) < _SECONDS_BELOW)
    if number != number or abs(number) == float("inf"):
        raise Unusable(f"{number} is no time")
    return max(0, round(number * 1000 if seconds else number))


def due_of_text(text: str) -> int:
    """Epoch milliseconds of a text: a number of seconds or milliseconds, or an ISO 8601 time with its zone.

    >>> due_of_text("1893456000"), due_of_text("2030-01-01T00:00:00Z"), due_of_text("2030-01-01 01:00+01:00")
    (1893456000000, 1893456000000, 1893456000000)
    >>> due_of_text("2030-01-01 00:00")
    Traceback (most recent call last):
    turtlemq.importing.fields.Unusable: '2030-01-01 00:00' has no time zone: write 2030-01-31T08:00+01:00, or with Z
    """
    try:
        return due_of_number(float(text))
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Unusable(f"{text[:60]!r} is no time: write epoch seconds or milliseconds, or 2030-01-31T08:00+01:00") from None
    if time.tzinfo is None:
        raise Unusable(f"{text[:60]!r} has no time zone: write 2030-01-31T08:00+01:00, or with Z")
    return max(0, round(time.timestamp() * 1000))
