"""What consumers and people get: fetched messages, straight from the documents of the ready log, and views of single ones."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Struct_
from typing import Any

import bson
import msgspec
from bson.int64 import Int64
from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.broker import delivery
from turtlemq.broker.broker import Reserved
from turtlemq.broker.delivery import Piece
from turtlemq.dead import DeadLetter
from turtlemq.model import I64, SEQ_COUNTER_BITS, Found
from turtlemq.segment import format as f
from turtlemq.views import MessageView

PRIORITY_NAMES = {0: "normal", 1: "high", 2: "low", 3: "normal"}
_NO_HEADERS: dict[str, str] = {}


class Delivered(Struct):
    """A message as a consumer gets it."""

    id: str
    body: Raw | UnsetType
    body_base64: bytes | UnsetType
    headers: dict[str, str]
    due_ms: int
    created_ms: int
    ready_ms: int
    attempt: int
    priority: str
    lease_until_ms: int


def delivered(out: Reserved) -> list[Delivered]:
    """The messages of a fetch. 1 µs each; 10 µs where one has headers or was tried before and slept since."""
    return [message for piece, until in zip(out.pieces, out.until_ms, strict=True) for message in _of_piece(piece, until)]


def _of_piece(piece: Piece, until: I64) -> Iterator[Delivered]:
    held, buffer = piece.held, piece.read.buffer
    heads = piece.read.heads[piece.which]
    starts = piece.read.starts[piece.which]
    columns = (
        held.ids,
        piece.which.tolist(),
        (starts + f.PREFIX_BYTES + heads["idlen"]).tolist(),
        (starts + heads["len"] - 1).tolist(),
        heads["flags"].tolist(),
        held.due_ms.tolist(),
        held.seqs.tolist(),
        held.ready_ms.tolist(),
        held.attempts.tolist(),
        until.tolist(),
    )
    for id_, i, at, end, flags, due, seq, ready, attempt, lease in zip(*columns, strict=True):
        if buffer[at : at + len(f.BODY)] == f.BODY:  # nothing between id and body
            body, headers, created = bytes(buffer[at + f.BODY_HEAD_BYTES : end]), _NO_HEADERS, seq >> SEQ_COUNTER_BITS
        else:
            document = delivery.document(piece.read, i)
            body, headers, created = document.body, document.headers, document.created_ms
        is_json = flags & f.JSON
        yield Delivered(
            id_,
            Raw(body) if is_json else UNSET,
            UNSET if is_json else body,
            headers,
            due,
            created,
            ready,
            attempt,
            PRIORITY_NAMES[flags & f.PRIORITY],
            lease,
        )


# A delivered message in BSON, field by field. One with headers, or a body that is no bytes and no text, is made by the library.
_NUMBERS = Struct_("<8sq12sq10sq16sq9si")
_NAMES = (b"\x12due_ms\0", b"\x12created_ms\0", b"\x12ready_ms\0", b"\x12lease_until_ms\0", b"\x10attempt\0")
_ID, _NOTHING = b"\x02id\0", b"\x03headers\0\x05\0\0\0\0"
_PRIORITY = {
    name: b"\x02priority\0" + (len(name) + 1).to_bytes(4, "little") + name.encode() + b"\0" for name in ("normal", "high", "low")
}
_LENGTH, _BINARY, _TEXT = Struct_("<i").pack, Struct_("<6siB").pack, Struct_("<6si").pack


def as_bson(messages: list[Delivered]) -> bytes:
    """The same as BSON documents, one behind the other. Bytes are binaries; a JSON body is the value that it stands for."""
    return b"".join([_bson_of(message) for message in messages])


def _bson_of(message: Delivered) -> bytes:
    if isinstance(message.body, UnsetType):
        assert not isinstance(message.body_base64, UnsetType)
        value: Any = message.body_base64
    else:
        try:
            value = msgspec.json.decode(message.body)
        except (msgspec.DecodeError, RecursionError):  # a number beyond all floats
            return _slow_bson(message, {"body_json": bytes(message.body).decode()})
    if message.headers or not isinstance(value, bytes | str):
        return _slow_bson(message, {"body": value})
    if isinstance(value, bytes):
        body = _BINARY(b"\x05body\0", len(value), 0) + value
    else:
        text = value.encode()
        body = _TEXT(b"\x02body\0", len(text) + 1) + text + b"\0"
    id_ = message.id.encode()
    due, created, ready, lease, attempt = _NAMES
    times = (due, message.due_ms, created, message.created_ms, ready, message.ready_ms, lease, message.lease_until_ms)
    numbers = _NUMBERS.pack(*times, attempt, message.attempt)
    rest = b"".join((_ID, _LENGTH(len(id_) + 1), id_, b"\0", _NOTHING, numbers, _PRIORITY[message.priority], body, b"\0"))
    return _LENGTH(len(rest) + 4) + rest


def _slow_bson(message: Delivered, body: dict[str, Any]) -> bytes:
    fields: dict[str, Any] = {
        "id": message.id,
        "headers": message.headers,
        "due_ms": Int64(message.due_ms),
        "created_ms": Int64(message.created_ms),
        "ready_ms": Int64(message.ready_ms),
        "lease_until_ms": Int64(message.lease_until_ms),
        "attempt": message.attempt,
        "priority": message.priority,
    }
    try:
        return bson.encode({**fields, **body})
    except (bson.errors.BSONError, OverflowError, ValueError, RecursionError):  # a number or a name that BSON does not have
        assert not isinstance(message.body, UnsetType)
        return bson.encode({**fields, "body_json": bytes(message.body).decode()})


# Looking


def body_fields(body: bytes, is_json: bool) -> dict[str, Any]:
    """A stored body as the contract shows it."""
    return {"body": Raw(body)} if is_json else {"body_base64": body}


def view(message: MessageView) -> dict[str, Any]:
    """Everything about one message."""
    return {
        "id": message.id,
        "state": message.state,
        "due_ms": message.due_ms,
        "created_ms": message.created_ms,
        "attempt": message.attempt,
        **body_fields(message.body, message.json),
        "headers": message.headers,
        "ttr": message.ttr_ms / 1000 if message.ttr_ms else None,
        "priority": PRIORITY_NAMES[message.priority],
        "expires_ms": message.expires_ms,
        "groups": message.groups,
        "timeline": message.timeline,
    }


def sleeper(message: Found) -> dict[str, Any]:
    """One line of a listing. A message that sleeps before another attempt of one group says which."""
    group, _, id_ = message.id.rpartition("/")
    return {
        "id": id_,
        "state": message.state.value,
        "due_ms": message.due_ms,
        "created_ms": message.created_ms,
        **body_fields(message.body, bool(message.flags & f.JSON)),
        "headers": message.headers,
        "priority": PRIORITY_NAMES[message.flags & f.PRIORITY],
        "expires_ms": message.expires_ms,
        **({"group": group} if group else {}),
    }


def letter(dead: DeadLetter) -> dict[str, Any]:
    """A dead letter."""
    return {
        "id": dead.id,
        "group": dead.group,
        **body_fields(dead.body, dead.json),
        "headers": dead.headers,
        "due_ms": dead.due_ms,
        "created_ms": dead.created_ms,
        "dropped_ms": dead.dropped_ms,
        "attempts": dead.attempts,
        "error": dead.error,
    }
