"""What goes over the wire, without any wire: messages to bytes and back, requests, answers. Pure.

A batch whose bodies are all bytes goes as BSON documents made with `struct` (0.5 µs a message, the library takes ten times that);
any other goes as JSON, where bytes are base64. Fetched messages come as JSON, which msgspec decodes straight into `Message`
(0.6 µs), or as BSON (1 µs, and less work for the server).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from struct import Struct as Layout
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Raw, Struct

from turtlemq.client.errors import BadAnswer, InvalidFireAt, InvalidId, InvalidMessage, Refused, refused

JSON, BSON = "application/json", "application/bson"
BUDGET = "X-Turtlemq-Budget-Ms"
PRIORITIES = ("high", "normal", "low")
ID_BYTES_MAX = 200
ENTRY_BYTES = 120  # what a message takes beside its body and headers, about
Priority = Literal["high", "normal", "low"]
T = TypeVar("T")
_EPOCH = datetime.fromtimestamp(0, UTC)
to_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Request:
    """Something to ask a server. `wait_s`: it may think about the answer for so long, on purpose."""

    method: str
    path: str
    body: bytes | None = None
    kind: str = JSON
    accept: str = JSON
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Names of headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


def path(*parts: str, **query: Any) -> str:
    """A path below /v1/topics. What is None is left out of the query.

    >>> path("orders", "messages", "a b", limit=3, cursor=None)
    '/v1/topics/orders/messages/a%20b?limit=3'
    """
    given = {name: value for name, value in query.items() if value is not None}
    base = "/".join(["/v1/topics", *(quote(part, safe="") for part in parts)])
    return f"{base}?{urlencode(given)}" if given else base


def error_of(answer: Answer) -> Refused | BadAnswer:
    """The error that an answer beyond 299 stands for."""
    try:
        said = dict(msgspec.json.decode(answer.body)["error"])
        code, message = str(said.pop("code")), str(said.pop("message"))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        text = answer.body[:200].decode(errors="replace")
        if answer.status not in (429, 502, 503):  # a proxy in between may say these in its own words
            return BadAnswer(f"HTTP {answer.status}: {text}")
        code, message, said = "RATE_LIMITED" if answer.status == 429 else "UNAVAILABLE", f"HTTP {answer.status}: {text}", {}
    after = answer.headers.get("retry-after", "")
    if "retry_after_ms" not in said and after.isdigit():
        said["retry_after_ms"] = int(after) * 1000
    return refused(answer.status, code, message, **said)


# Out


@dataclass(slots=True)
class Out:
    """A message on its way to the server. Made by `outgoing`, which checks it.

    `delay` counts from `put_s` on; what passes until it is sent is taken off, so that lingering and retries do not add to it.
    """

    id: str
    body: bytes  # as it is, or the text of a JSON value
    is_json: bool = False
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: Priority | None = None
    expires_ms: int | None = None
    headers: dict[str, str] | None = None
    put_s: float = 0.0

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.body) + ENTRY_BYTES + (sum(len(k) + len(v) for k, v in self.headers.items()) if self.headers else 0)


def outgoing(
    body: Any,
    id_: str,
    *,
    delay: float | None = None,
    due: int | datetime | None = None,
    ttr: float | None = None,
    priority: Priority | None = None,
    expires: int | datetime | None = None,
    headers: Mapping[str, str] | None = None,
    put_s: float = 0.0,
) -> Out:
    """A message, checked here, where whoever is wrong can still be told.

    >>> outgoing({"close": 17}, "order-17", delay=1800).body
    b'{"close":17}'
    >>> outgoing(b"", "a b", delay=-1)
    Traceback (most recent call last):
    turtlemq.client.errors.InvalidFireAt: delay is a number of seconds, 0 or more, and there is delay or due, not both
    """
    _check_id(id_)
    delay, ttr = seconds(delay), seconds(ttr)
    if delay is not None and (due is not None or not 0 <= delay < 1e10):
        raise InvalidFireAt("delay is a number of seconds, 0 or more, and there is delay or due, not both")
    if ttr is not None and not 0 < ttr < 1e9:
        raise InvalidMessage("ttr is a number of seconds above 0")
    if priority is not None and priority not in PRIORITIES:
        raise InvalidMessage(f"priority is high, normal or low, not {priority!r}")
    named = {_header(name, value): _text_itself(value) for name, value in headers.items()} if headers else None
    if isinstance(body, bytes | bytearray | memoryview):
        text, is_json = bytes(body), False
    else:
        try:
            text, is_json = to_json(body), True
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise InvalidMessage(f"a body is bytes or a JSON value: {wrong}") from None
    level: Any = None if priority is None else _text_itself(priority)
    return Out(_text_itself(id_), text, is_json, delay, to_ms(due), ttr, level, to_ms(expires), named, put_s)


def seconds(given: Any) -> float | None:
    """Seconds as a float, which every encoder knows, whatever type of number they are; NaN, which no limit lets through, if none.

    >>> seconds(Decimal("1.5")), seconds(Decimal("NaN")), seconds("5"), seconds(None)
    (1.5, nan, nan, None)
    """
    if given is None or type(given) is float:
        return given
    try:
        return float(given) if hasattr(given, "__float__") else float("nan")
    except (ArithmeticError, TypeError, ValueError):
        return float("nan")


def _text_itself(given: str) -> str:
    """The text of a subclass, too: an encoder may know no subclasses."""
    return given if type(given) is str else str.__str__(given)


def to_ms(when: Any) -> int | None:
    """A time as epoch milliseconds; part of one counts as a whole, so that nothing is early.

    >>> to_ms(datetime.fromisoformat("2030-01-01T00:00:00.000001Z"))
    1893456000001
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise InvalidFireAt("a datetime needs its time zone: datetime.now(UTC) + timedelta(days=3)")
        since = when - _EPOCH
        return -(-(since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds) // 1000)
    if when is not None and (not isinstance(when, int) or not 0 <= when < 1 << 62):
        raise InvalidFireAt(f"a time is a datetime, or a whole number of epoch milliseconds, not {when!r:.80}")
    return None if when is None else int(when)


def _header(name: Any, value: Any) -> str:
    """The name of a header, if both are good."""
    if not isinstance(name, str) or not isinstance(value, str) or not name or "\0" in name:
        raise InvalidMessage("headers are text by name, without NUL in a name")
    try:
        (name + value).encode()
    except UnicodeEncodeError:
        raise InvalidMessage("a header is not valid text") from None
    return _text_itself(name)


def _check_id(id_: Any) -> None:
    if not isinstance(id_, str) or not id_ or id_[0] == "-" or "/" in id_ or not id_.isprintable():
        raise InvalidId(f"{id_!r:.220}: an id is 1 to 200 bytes of printable text that does not start with '-' and holds no '/'")
    if len(id_) > ID_BYTES_MAX // 4 and len(id_.encode()) > ID_BYTES_MAX:
        raise InvalidId(f"an id has at most {ID_BYTES_MAX} bytes, this one {len(id_.encode())}")


def produce(topic: str, batch: Sequence[Out], now_s: float) -> Request:
    """The request that stores a batch."""
    if any(out.is_json for out in batch):
        return Request("POST", path(topic, "messages"), _as_json(batch, now_s), JSON)
    return Request("POST", path(topic, "messages"), as_bson(batch, now_s), BSON)


class _JsonOut(Struct, omit_defaults=True):
    id: str
    body: Raw | None = None
    body_base64: bytes | None = None
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: str | None = None
    expires_ms: int | None = None
    headers: dict[str, str] | None = None


def _as_json(batch: Sequence[Out], now_s: float) -> bytes:
    out = [
        _JsonOut(
            m.id,
            Raw(m.body) if m.is_json else None,
            None if m.is_json else m.body,
            None if m.delay is None else max(0.0, m.delay - (now_s - m.put_s)),
            m.due_ms,
            m.ttr,
            m.priority,
            m.expires_ms,
            m.headers,
        )
        for m in batch
    ]
    return to_json({"messages": out})


# One document: length, id, what else is there, body, 0. `_HEAD` and `_BODY` are BSON's element heads with the lengths left open.
_HEAD = Layout("<i4si").pack
_BODY = Layout("<6siB").pack
_F64 = Layout("<d").pack
_I64 = Layout("<q").pack
_I32 = Layout("<i").pack
_FIXED = 4 + 8 + 1 + 11 + 1


def as_bson(batch: Sequence[Out], now_s: float) -> bytes:
    """A batch of bytes bodies as BSON documents.

    >>> as_bson([outgoing(b"x", "a")], 0.0)
    b'\\x1b\\x00\\x00\\x00\\x02id\\x00\\x02\\x00\\x00\\x00a\\x00\\x05body\\x00\\x01\\x00\\x00\\x00\\x00x\\x00'
    """
    out: list[bytes] = []
    add = out.append
    for m in batch:
        id_, body = m.id.encode(), m.body
        more = _fields(m, now_s)
        add(_HEAD(_FIXED + len(id_) + len(more) + len(body), b"\x02id\0", len(id_) + 1))
        add(id_)
        add(b"\0" + more)
        add(_BODY(b"\x05body\0", len(body), 0))
        add(body)
        add(b"\0")
    return b"".join(out)


def _fields(m: Out, now_s: float) -> bytes:
    """The elements of what a message says beside id and body."""
    out = b""
    if m.delay is not None:
        out = b"\x01delay\0" + _F64(max(0.0, m.delay - (now_s - m.put_s)))
    elif m.due_ms is not None:
        out = b"\x12due_ms\0" + _I64(m.due_ms)
    if m.ttr is not None:
        out += b"\x01ttr\0" + _F64(m.ttr)
    if m.priority is not None:
        out += b"\x02priority\0" + _text(m.priority)
    if m.expires_ms is not None:
        out += b"\x12expires_ms\0" + _I64(m.expires_ms)
    if m.headers:
        inner = b"".join([b"\x02" + name.encode() + b"\0" + _text(value) for name, value in m.headers.items()])
        out += b"\x03headers\0" + _I32(len(inner) + 5) + inner + b"\0"
    return out


def _text(value: str) -> bytes:
    data = value.encode()
    return _I32(len(data) + 1) + data + b"\0"


# In


def from_json(text: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    """What JSON says. Numbers that msgspec has no type for must not make all else unreadable: they are read the slow way.

    >>> from_json("[1, 1e999]", msgspec.json.Decoder(list))
    [1, Decimal('1E+999')]
    """
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as wrong:
        import json  # not at the top: hardly anybody needs it

        try:
            found = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_no_number)
            return msgspec.convert(found, decoder.type)
        except (ValueError, RecursionError):
            raise wrong from None


def _number(text: str) -> int | float | Decimal:
    """A number: an int or a float if it can be one, else a Decimal (1e999, or more digits than Python makes an int of)."""
    try:
        found = int(text) if text.lstrip("-").isdigit() else float(text)
        return found if abs(found) < float("inf") else Decimal(text)
    except ValueError:
        return Decimal(text)
    except InvalidOperation:  # its exponent alone has 19 digits
        return float(text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class Message(Struct, kw_only=True):
    """A message that was fetched. `attempt` is 1 the first time it is delivered."""

    id: str
    headers: dict[str, str] = {}
    due_ms: int = 0
    created_ms: int = 0
    ready_ms: int = 0
    attempt: int = 1
    priority: str = "normal"
    lease_until_ms: int = 0
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    topic: str = ""
    group: str = ""

    @property
    def body(self) -> Any:
        """Bytes as bytes, a JSON value as what it stands for."""
        return self.value if self.data is None else self.data


class _Fetched(Struct):
    messages: list[Message]


_fetched = msgspec.json.Decoder(_Fetched)
_value: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def parse_fetched(answer: Answer) -> list[Message]:
    """The messages of a fetch, in whichever form they came."""
    if answer.headers.get("content-type", "").startswith(BSON):
        return from_bson(answer.body)
    try:
        return from_json(answer.body, _fetched).messages
    except msgspec.DecodeError as wrong:
        raise BadAnswer(f"a fetch was answered with something else: {wrong}") from None


# A fetched document as the server lays it out: five numbers, no headers, priority, id, and a binary.
_NAMES = (b"\x12due_ms\0", b"\x12created_ms\0", b"\x12ready_ms\0", b"\x12lease_until_ms\0", b"\x10attempt\0")
_MARKS = b"\x03headers\0\x05\0\0\0\0\x02priority\0"
_names = Layout("<4x8s8x12s8x10s8x16s8x9s").unpack_from
_head = Layout("<i8xq12xq10xq16xq9xi24si").unpack_from
_HEAD_BYTES = 4 + 16 + 20 + 18 + 24 + 13 + 24 + 4
_id = Layout("<4si").unpack_from
_tail = Layout("<6siB").unpack_from


def from_bson(data: bytes) -> list[Message]:
    """Fetched BSON documents. From the first on that is laid out otherwise, or whose body is not bytes: by the library (2 µs)."""
    out: list[Message] = []
    at, end = 0, len(data)
    try:
        if at < end and _names(data) != _NAMES:  # once: one answer has one order
            return _slow(data)
        while at < end:
            length, due, created, ready, lease, attempt, marks, priority_bytes = _head(data, at)
            here = at + _HEAD_BYTES + priority_bytes
            name, id_bytes = _id(data, here)
            start = here + 8 + id_bytes
            named, size, kind = _tail(data, start)
            odd = length < 5 or marks != _MARKS or name != b"\x02id\0" or named != b"\x05body\0" or kind
            if odd or start + size + 12 != at + length:
                return out + _slow(data[at:])
            out.append(
                Message(
                    id=data[here + 8 : start - 1].decode(),
                    due_ms=due,
                    created_ms=created,
                    ready_ms=ready,
                    attempt=attempt,
                    priority=data[at + _HEAD_BYTES : here - 1].decode(),
                    lease_until_ms=lease,
                    data=data[start + 11 : start + 11 + size],
                )
            )
            at += length
    except struct.error:
        return out + _slow(data[at:])
    return out


def _slow(data: bytes) -> list[Message]:
    import bson  # not at the top: only few need it, and it takes its time

    try:
        return [_message(found) for found in bson.decode_all(data)]
    except (bson.errors.BSONError, msgspec.DecodeError, TypeError) as wrong:
        raise BadAnswer(f"a fetch was answered with BSON that holds no messages: {wrong}") from None


def _message(found: dict[str, Any]) -> Message:
    if "body_json" in found:  # a JSON value that BSON cannot hold
        found["body"] = from_json(found["body_json"], _value)
    known = {name: found[name] for name in _NAMED if name in found}
    body = found.get("body")
    return Message(**known, data=body) if isinstance(body, bytes) else Message(**known, value=body)


_NAMED = ("id", "headers", "due_ms", "created_ms", "ready_ms", "lease_until_ms", "attempt", "priority")
