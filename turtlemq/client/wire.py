"""HTTP requests and answers as values, and the JSON in them. Pure.

Messages to put are encoded in `outgoing`, fetched ones decoded in `fetched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from turtlemq.client.errors import BadAnswer, InvalidArgument, InvalidFireAt, Refused, refused

JSON, BSON = "application/json", "application/bson"
BUDGET_HEADER = "X-Turtlemq-Budget-Ms"
T = TypeVar("T")
Seconds = float | timedelta
Time = int | datetime  # an int in epoch milliseconds
_EPOCH = datetime.fromtimestamp(0, UTC)
_INFINITE = float("inf")


def _plain_value(value: Any) -> Any:
    """A value that msgspec can encode, for one that it cannot: a pydantic model, or a text of a subclass of str."""
    if isinstance(value, str):
        return str.__str__(value)
    if callable(getattr(type(value), "model_dump", None)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form; dicts, lists, dataclasses and pydantic models have one")


to_json = msgspec.json.Encoder(enc_hook=_plain_value).encode


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a server. `wait_s`: the time for which the server may hold the answer back, in a long poll. `ids`: of the
    messages that it is about. `at_once`: the body of a fetch that does not wait."""

    method: str
    path: str
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    wait_s: float = 0.0
    ids: Sequence[str] = field(default=(), repr=False)
    at_once: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server. The names of the headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


def path(*parts: str, **query: Any) -> str:
    """A path below /v1/topics with its query; arguments that are None are left out.

    >>> path("orders", "messages", "a b", limit=3, cursor=None)
    '/v1/topics/orders/messages/a%20b?limit=3'
    """
    given = without_none(**query)
    base = "/".join(["/v1/topics", *(quote(part, safe="") for part in parts)])
    return f"{base}?{urlencode(given)}" if given else base


def error_of(answer: Answer) -> Refused | BadAnswer:
    """The error of an answer with a status of 300 or more."""
    try:
        details = dict(msgspec.json.decode(answer.body)["error"])
        code, message = str(details.pop("code")), str(details.pop("message"))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        text = answer.body[:200].decode(errors="replace")
        if answer.status not in (429, 502, 503):  # a proxy may send these with a body of its own
            return BadAnswer(f"HTTP {answer.status}: {text}")
        code, message, details = "RATE_LIMITED" if answer.status == 429 else "UNAVAILABLE", f"HTTP {answer.status}: {text}", {}
    retry_after = answer.headers.get("retry-after", "")
    if "retry_after_ms" not in details and retry_after.isdigit():
        details["retry_after_ms"] = int(retry_after) * 1000
    return refused(answer.status, code, message, **details)


def json_request(target: str, value: Any, method: str = "POST") -> Request:
    return Request(method, target, to_json(value))


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# Arguments


def as_seconds(given: Any) -> float | None:
    """A number of any type, or a timedelta, as a float, which all encoders accept. NaN, which every range check refuses, if it
    is neither.

    >>> as_seconds(Decimal("1.5")), as_seconds(timedelta(minutes=5)), as_seconds("5"), as_seconds(None)
    (1.5, 300.0, nan, None)
    """
    if given is None or type(given) is float:
        return given
    if isinstance(given, timedelta):
        return given.total_seconds()
    try:
        return float(given) if hasattr(given, "__float__") else float("nan")
    except (ArithmeticError, TypeError, ValueError):
        return float("nan")


def seconds_of(name: str, given: Seconds | None) -> float | None:
    """A number of seconds for a request. One that is no finite number is refused here: JSON would write it as null."""
    seconds = as_seconds(given)
    if seconds is not None and not -_INFINITE < seconds < _INFINITE:
        raise InvalidArgument(f"{name} is a number of seconds or a timedelta, not {given!r:.80}")
    return seconds


def to_ms(when: Any) -> int | None:
    """A time as epoch milliseconds, rounded up, so that no message is early.

    >>> to_ms(datetime.fromisoformat("2030-01-01T00:00:00.000001Z"))
    1893456000001
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise InvalidFireAt("a datetime needs its time zone: datetime.now(UTC) + timedelta(days=3)")
        age = when - _EPOCH
        return -(-(age.days * 86_400_000_000 + age.seconds * 1_000_000 + age.microseconds) // 1000)
    if when is not None and (not isinstance(when, int) or not 0 <= when < 1 << 62):
        hint = "; a timedelta is a delay" if isinstance(when, timedelta) else ""
        raise InvalidFireAt(f"a time is a datetime, or a whole number of epoch milliseconds, not {when!r:.80}{hint}")
    return None if when is None else int(when)


def list_of_ids(given: Iterable[str]) -> list[str]:
    """Ids as a list. A text is refused: its letters would be taken for ids.

    >>> list_of_ids("order")
    Traceback (most recent call last):
    turtlemq.client.errors.InvalidArgument: ids are a list, not one text: ['order']
    """
    if isinstance(given, str | bytes):
        raise InvalidArgument(f"ids are a list, not one text: [{given!r:.80}]")
    return list(given)


# JSON answers


def decode_json(text: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode JSON. Numbers beyond the types of msgspec are decoded the slow way, so that they do not spoil the whole answer.

    >>> decode_json("[1, 1e999]", msgspec.json.Decoder(list))
    [1, Decimal('1E+999')]
    """
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as wrong:
        import json  # not at the top: rarely needed

        try:
            value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse_constant)
            return msgspec.convert(value, decoder.type)
        except (ValueError, RecursionError):
            raise wrong from None


def _number(text: str) -> int | float | Decimal:
    """An int or a float if possible, else a Decimal (1e999, or more digits than Python converts to an int)."""
    try:
        number = int(text) if text.lstrip("-").isdigit() else float(text)
        return number if abs(number) < float("inf") else Decimal(text)
    except ValueError:
        return Decimal(text)
    except InvalidOperation:  # the exponent has 19 digits or more
        return float(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parser_of(kind: type[T]) -> Callable[[Answer], T]:
    """A parser of JSON answers of one type."""
    decoder = msgspec.json.Decoder(kind)

    def parse(answer: Answer) -> T:
        try:
            return decode_json(answer.body, decoder)
        except msgspec.DecodeError as wrong:
            raise BadAnswer(f"no {kind.__name__} in the answer: {wrong}") from None

    return parse
