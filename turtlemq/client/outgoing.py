"""Messages to put: checked when they are put, encoded when they are sent. Pure.

A batch whose bodies are all bytes is encoded as BSON with `struct` (0.5 µs a message; the bson library takes ten times as long),
any other batch as JSON, with bytes in base64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct as Layout
from typing import Any, Literal, TypedDict

from msgspec import Raw, Struct

from turtlemq.client.errors import InvalidFireAt, InvalidId, InvalidMessage
from turtlemq.client.wire import BSON, JSON, Request, Seconds, Time, as_seconds, path, to_json, to_ms

PRIORITIES = ("high", "normal", "low")
MODES = ("keep", "replace", "reschedule", "error")
MODES_COUNT = 1_000  # messages in one request, if one of them has a mode: the server takes no more
ID_BYTES_MAX = 200
MESSAGE_OVERHEAD_BYTES = 120  # estimate for a message without body and headers
Priority = Literal["high", "normal", "low"]
IfExists = Literal["keep", "replace", "reschedule", "error"]


class MessageFields(TypedDict, total=False):
    """The fields of a message beside body and id: the keywords of every `put`, and fields of `NewMessage`."""

    delay: Seconds | None  # from now; or
    due: Time | None  # the time itself: an aware datetime, or epoch milliseconds
    ttr: Seconds | None  # that a consumer may take
    priority: Priority | None
    expires: Time | None  # not delivered by then, it is dead
    headers: Mapping[str, str] | None
    spread: Seconds | None  # due between then and so many seconds later, the same id always at the same place
    if_exists: IfExists | None  # if the topic knows the id: keep that message, replace it, reschedule it, or raise `Conflict`


@dataclass(slots=True)
class OutgoingMessage:
    """A message to put, as `outgoing_message` makes it.

    `delay` counts from `put_s`: the time until the request is subtracted, so that linger and retries do not add to it.
    """

    id: str
    body: bytes  # the body itself, or the text of a JSON value
    is_json: bool = False
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: Priority | None = None
    expires_ms: int | None = None
    headers: dict[str, str] | None = None
    if_exists: IfExists | None = None
    spread: float | None = None
    put_s: float = 0.0

    @property
    def size(self) -> int:
        """Estimated bytes in a request."""
        return (
            len(self.body)
            + MESSAGE_OVERHEAD_BYTES
            + (sum(len(k) + len(v) for k, v in self.headers.items()) if self.headers else 0)
        )


def outgoing_message(
    body: Any,
    id_: str,
    *,
    delay: Seconds | None = None,
    due: Time | None = None,
    ttr: Seconds | None = None,
    priority: Priority | None = None,
    expires: Time | None = None,
    headers: Mapping[str, str] | None = None,
    spread: Seconds | None = None,
    if_exists: IfExists | None = None,
    put_s: float = 0.0,
) -> OutgoingMessage:
    """Check and encode a message at the time of the put, so that the caller gets the error.

    >>> outgoing_message({"close": 17}, "order-17", delay=1800).body
    b'{"close":17}'
    >>> outgoing_message(b"", "a b", delay=-1)
    Traceback (most recent call last):
    turtlemq.client.errors.InvalidFireAt: delay is seconds or a timedelta, 0 or more, and there is delay or due, not both
    """
    _check_id(id_)
    delay_s, ttr_s, spread_s = as_seconds(delay), as_seconds(ttr), as_seconds(spread)
    if delay_s is not None and (due is not None or not 0 <= delay_s < 1e10):
        raise InvalidFireAt("delay is seconds or a timedelta, 0 or more, and there is delay or due, not both")
    if ttr_s is not None and not 0 < ttr_s < 1e9:
        raise InvalidMessage("ttr is a number of seconds or a timedelta, above 0")
    if spread_s is not None and not 0 <= spread_s < 1e9:
        raise InvalidMessage("spread is a number of seconds or a timedelta, 0 or more")
    if priority is not None and priority not in PRIORITIES:
        raise InvalidMessage(f"priority is high, normal or low, not {priority!r}")
    if if_exists is not None:
        check_mode(if_exists)
    checked_headers = {_header(name, value): _plain_str(value) for name, value in headers.items()} if headers else None
    if isinstance(body, bytes | bytearray | memoryview):
        text, is_json = bytes(body), False
    else:
        try:
            text, is_json = to_json(body), True
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise InvalidMessage(f"a body is bytes or a JSON value: {wrong}") from None
    level: Any = None if priority is None else _plain_str(priority)
    mode: Any = None if if_exists is None else _plain_str(if_exists)
    times = (delay_s, to_ms(due), ttr_s)
    return OutgoingMessage(_plain_str(id_), text, is_json, *times, level, to_ms(expires), checked_headers, mode, spread_s, put_s)


def check_mode(if_exists: Any) -> None:
    """Raise `InvalidMessage` unless this is a mode of `if_exists`."""
    if if_exists not in MODES:
        raise InvalidMessage(f"if_exists is one of {', '.join(MODES)}, not {if_exists!r}")


def _plain_str(given: str) -> str:
    """A str, also from an instance of a subclass, which the encoder may not accept."""
    return given if type(given) is str else str.__str__(given)


def _header(name: Any, value: Any) -> str:
    """The name of a header, if name and value are valid."""
    if not isinstance(name, str) or not isinstance(value, str) or not name or "\0" in name:
        raise InvalidMessage("headers are text by name, without NUL in a name")
    try:
        (name + value).encode()
    except UnicodeEncodeError:
        raise InvalidMessage("a header is not valid text") from None
    return _plain_str(name)


def _check_id(id_: Any) -> None:
    if not isinstance(id_, str) or not id_ or id_[0] == "-" or "/" in id_ or not id_.isprintable():
        raise InvalidId(f"{id_!r:.220}: an id is 1 to 200 bytes of printable text that does not start with '-' and holds no '/'")
    if len(id_) > ID_BYTES_MAX // 4 and len(id_.encode()) > ID_BYTES_MAX:
        raise InvalidId(f"an id has at most {ID_BYTES_MAX} bytes, this one {len(id_.encode())}")


def produce_request(topic: str, batch: Sequence[OutgoingMessage], now_s: float, *, of_one_place: bool = False) -> Request:
    """The request that stores a batch, with delays as of `now_s`. `of_one_place`: all lie in the partition of the first."""
    ids = [batch[0].id] if of_one_place or len(batch) == 1 else ()
    if any(out.is_json for out in batch):
        return Request("POST", path(topic, "messages"), _batch_to_json(batch, now_s), JSON, ids=ids)
    return Request("POST", path(topic, "messages"), batch_to_bson(batch, now_s), BSON, ids=ids)


class _JsonMessage(Struct, omit_defaults=True):
    id: str
    body: Raw | None = None
    body_base64: bytes | None = None
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: str | None = None
    expires_ms: int | None = None
    headers: dict[str, str] | None = None
    if_exists: str | None = None
    spread: float | None = None


def _batch_to_json(batch: Sequence[OutgoingMessage], now_s: float) -> bytes:
    return to_json({"messages": json_messages(batch, now_s)})


def json_messages(batch: Sequence[OutgoingMessage], now_s: float) -> list[Any]:
    """Messages as JSON values, with delays as of `now_s`."""
    return [
        _JsonMessage(
            m.id,
            Raw(m.body) if m.is_json else None,
            None if m.is_json else m.body,
            None if m.delay is None else max(0.0, m.delay - (now_s - m.put_s)),
            m.due_ms,
            m.ttr,
            m.priority,
            m.expires_ms,
            m.headers,
            m.if_exists,
            m.spread,
        )
        for m in batch
    ]


# One document: length, id, other fields, body, 0. `_HEAD` and `_BODY` pack the heads of BSON elements with their lengths.
_HEAD = Layout("<i4si").pack
_BODY = Layout("<6siB").pack
_F64 = Layout("<d").pack
_I64 = Layout("<q").pack
_I32 = Layout("<i").pack
_FIXED = 4 + 8 + 1 + 11 + 1


def batch_to_bson(batch: Sequence[OutgoingMessage], now_s: float) -> bytes:
    """A batch of bytes bodies as BSON documents.

    >>> batch_to_bson([outgoing_message(b"x", "a")], 0.0)
    b'\\x1b\\x00\\x00\\x00\\x02id\\x00\\x02\\x00\\x00\\x00a\\x00\\x05body\\x00\\x01\\x00\\x00\\x00\\x00x\\x00'
    """
    out: list[bytes] = []
    add = out.append
    for m in batch:
        id_, body = m.id.encode(), m.body
        fields = _bson_fields(m, now_s)
        add(_HEAD(_FIXED + len(id_) + len(fields) + len(body), b"\x02id\0", len(id_) + 1))
        add(id_)
        add(b"\0" + fields)
        add(_BODY(b"\x05body\0", len(body), 0))
        add(body)
        add(b"\0")
    return b"".join(out)


def _bson_fields(m: OutgoingMessage, now_s: float) -> bytes:
    """The BSON elements of a message other than id and body."""
    out = b""
    if m.delay is not None:
        out = b"\x01delay\0" + _F64(max(0.0, m.delay - (now_s - m.put_s)))
    elif m.due_ms is not None:
        out = b"\x12due_ms\0" + _I64(m.due_ms)
    if m.ttr is not None:
        out += b"\x01ttr\0" + _F64(m.ttr)
    if m.spread is not None:
        out += b"\x01spread\0" + _F64(m.spread)
    if m.priority is not None:
        out += b"\x02priority\0" + _bson_string(m.priority)
    if m.expires_ms is not None:
        out += b"\x12expires_ms\0" + _I64(m.expires_ms)
    if m.headers:
        inner = b"".join([b"\x02" + name.encode() + b"\0" + _bson_string(value) for name, value in m.headers.items()])
        out += b"\x03headers\0" + _I32(len(inner) + 5) + inner + b"\0"
    if m.if_exists is not None:
        out += b"\x02if_exists\0" + _bson_string(m.if_exists)
    return out


def _bson_string(value: str) -> bytes:
    data = value.encode()
    return _I32(len(data) + 1) + data + b"\0"
