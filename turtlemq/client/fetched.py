"""Fetched messages: `Message`, decoded from JSON or BSON. Pure.

msgspec decodes JSON straight into `Message` (0.6 µs). BSON takes 1 µs with `struct`, and less work of the server.
"""

from __future__ import annotations

import struct
from struct import Struct as Layout
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from turtlemq.client.errors import BadAnswer, BodyMismatch
from turtlemq.client.time_limit import NO_LIMIT
from turtlemq.client.wire import BSON, Answer, decode_json

T = TypeVar("T")
LEASE_HEADER = "x-turtlemq-lease"


class Handled(Protocol):
    """A message in the hands of a consumer: `consumer_state.InHand`."""

    def budget_s(self) -> float: ...

    @property
    def is_called_off(self) -> bool: ...


class Message(Struct, kw_only=True):
    """A fetched message. `attempt` is 1 at its first delivery; `expires_ms` said when that had to be at the latest."""

    id: str
    headers: dict[str, str] = {}
    due_ms: int = 0
    created_ms: int = 0
    ready_ms: int = 0
    attempt: int = 1
    priority: str = "normal"
    lease_until_ms: int = 0
    expires_ms: int | None = None
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    topic: str = ""
    group: str = ""
    lease: str = ""  # the name of the fetch's lease, for `ack` and `extend`; empty: no lease, or an older server

    hand: Any = msgspec.field(name="_hand", default=None)  # a `Handled`, once a consumer gives it to its handler

    def budget(self) -> float:
        """For handlers: the seconds until the message expires or its lease ends, whichever is first; infinite without either.
        A consumer extends the lease of a message whose handler runs."""
        handled: Handled | None = self.hand
        return NO_LIMIT if handled is None else handled.budget_s()

    @property
    def cancelled(self) -> bool:
        """For handlers: whether to give up. The lease is lost, so that another consumer may have the message, or the consumer
        stops and waits no longer."""
        handled: Handled | None = self.hand
        return handled is not None and handled.is_called_off

    @property
    def body(self) -> Any:
        """The body: bytes, or the decoded JSON value."""
        return self.value if self.data is None else self.data

    def as_type(self, kind: type[T]) -> T:
        """The body as a dataclass, msgspec Struct, TypedDict, pydantic model or any type that msgspec converts to. A body of
        bytes is taken for JSON text. Raises `BodyMismatch` if it does not fit.

        >>> Message(id="order-17", value={"close": 17}).as_type(dict[str, int])
        {'close': 17}
        """
        try:
            if hasattr(kind, "model_validate"):
                model: T = self._as_model(kind)
                return model
            if self.data is None or kind is bytes:
                return msgspec.convert(self.body, kind)
            return msgspec.json.decode(self.data, type=kind)
        except (ValueError, RecursionError) as wrong:  # errors of msgspec and pydantic are ValueErrors
            name = getattr(kind, "__name__", str(kind))
            raise BodyMismatch(f"the body of message {self.id!r} is no {name}: {wrong}") from None

    def _as_model(self, kind: Any) -> Any:
        return kind.model_validate(self.value) if self.data is None else kind.model_validate_json(self.data)


class _Fetched(Struct):
    messages: list[Message]
    lease: str = ""


_fetched = msgspec.json.Decoder(_Fetched)
_value: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def parse_fetched(answer: Answer) -> list[Message]:
    """The messages of a fetch, from JSON or BSON, with their lease."""
    if answer.headers.get("content-type", "").startswith(BSON):
        messages, lease = messages_from_bson(answer.body), answer.headers.get(LEASE_HEADER, "")
    else:
        try:
            out = decode_json(answer.body, _fetched)
        except msgspec.DecodeError as wrong:
            raise BadAnswer(f"a fetch was answered with something else: {wrong}") from None
        messages, lease = out.messages, out.lease
    for message in messages if lease else ():
        message.lease = lease
    return messages


# The usual layout of a fetched document: five numbers, empty headers, priority, id, and a binary body.
_NAMES = (b"\x12due_ms\0", b"\x12created_ms\0", b"\x12ready_ms\0", b"\x12lease_until_ms\0", b"\x10attempt\0")
_MARKS = b"\x03headers\0\x05\0\0\0\0\x02priority\0"
_names = Layout("<4x8s8x12s8x10s8x16s8x9s").unpack_from
_head = Layout("<i8xq12xq10xq16xq9xi24si").unpack_from
_HEAD_BYTES = 4 + 16 + 20 + 18 + 24 + 13 + 24 + 4
_id = Layout("<4si").unpack_from
_tail = Layout("<6siB").unpack_from


def messages_from_bson(data: bytes) -> list[Message]:
    """Decode fetched BSON. From the first document with another layout or a body that is not bytes, by the library (2 µs)."""
    out: list[Message] = []
    at, end = 0, len(data)
    try:
        if at < end and _names(data) != _NAMES:  # checked once: all documents of an answer have one order
            return _messages_from_any_bson(data)
        while at < end:
            length, due, created, ready, lease, attempt, marks, priority_bytes = _head(data, at)
            here = at + _HEAD_BYTES + priority_bytes
            name, id_bytes = _id(data, here)
            start = here + 8 + id_bytes
            body_name, size, kind = _tail(data, start)
            unusual = length < 5 or marks != _MARKS or name != b"\x02id\0" or body_name != b"\x05body\0" or kind
            if unusual or start + size + 12 != at + length:
                return out + _messages_from_any_bson(data[at:])
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
        return out + _messages_from_any_bson(data[at:])
    return out


def _messages_from_any_bson(data: bytes) -> list[Message]:
    try:
        import bson  # not at the top: rarely needed, and slow to load
    except ModuleNotFoundError as missing:
        raise ImportError("this answer needs the bson of pymongo: pip install 'turtlemq-client[bson]'") from missing
    try:
        return [_message_from_document(document) for document in bson.decode_all(data)]
    except (bson.errors.BSONError, msgspec.DecodeError, TypeError) as wrong:
        raise BadAnswer(f"a fetch was answered with BSON that holds no messages: {wrong}") from None


def _message_from_document(document: dict[str, Any]) -> Message:
    if "body_json" in document:  # a JSON value that BSON cannot hold
        document["body"] = decode_json(document["body_json"], _value)
    known = {name: document[name] for name in _DOCUMENT_FIELDS if name in document}
    body = document.get("body")
    return Message(**known, data=body) if isinstance(body, bytes) else Message(**known, value=body)


_DOCUMENT_FIELDS = ("id", "headers", "due_ms", "created_ms", "ready_ms", "lease_until_ms", "expires_ms", "attempt", "priority")
