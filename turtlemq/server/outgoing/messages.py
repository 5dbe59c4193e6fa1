"""Messages as answers show them: fetched ones, made from documents of the ready log, views, lines of listings, dead letters.

`fetch` encodes large answers to fetches with arrays; its result must be that of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import bson
import msgspec
from bson.int64 import Int64
from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.attempts import Attempt, of_notes
from turtlemq.broker.delivery import Piece
from turtlemq.broker.results import Reserved
from turtlemq.message_fields import NAMES
from turtlemq.model import I64, SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.segment.buffers import Buffer
from turtlemq.server.optional_fields import FOR_CONSUMERS, with_fields
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.past import PastView

PRIORITY_NAMES = {0: "normal", 1: "high", 2: "low", 3: "normal"}
_NO_HEADERS: dict[str, str] = {}


@with_fields(FOR_CONSUMERS, UNSET)
class Delivered(Struct, gc=False):
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


def budget_ms(message: Delivered, end_ms: int, now: int) -> int:
    """The time that a consumer has: until `end_ms`, or until the message expires if that is sooner; 0: it is over."""
    expires_ms: int | UnsetType = getattr(message, "expires_ms", UNSET)
    return max(0, (end_ms if isinstance(expires_ms, UnsetType) else min(end_ms, expires_ms)) - now)


_MORE = tuple(row.name for row in FOR_CONSUMERS if row.name != "headers")  # optional fields that only few messages have


def delivered(out: Reserved) -> list[Delivered]:
    """The messages of a fetch. 1 µs each; 10 µs for one with headers, an expiry, or that was a sleeping retry."""
    return [message for piece, until in zip(out.pieces, out.until_ms, strict=True) for message in of_piece(piece, until)]


def of_piece(piece: Piece, until: I64) -> Iterator[Delivered]:
    """The messages of one read of the ready log."""
    held, buffer = piece.messages, piece.read.buffer
    columns = (
        held.ids,
        piece.which.tolist(),
        piece.read.starts[piece.which].tolist(),
        piece.read.heads[piece.which].tolist(),
        held.due_ms.tolist(),
        held.seqs.tolist(),
        held.ready_ms.tolist(),
        held.attempts.tolist(),
        until.tolist(),
    )
    for id_, i, start, head, due, seq, ready, attempt, lease in zip(*columns, strict=True):
        length, _, _, _, _, flags, id_bytes = head
        at, end = start + f.PREFIX_BYTES + id_bytes, start + length - 1
        if buffer[at : at + len(f.BODY)] == f.BODY:  # nothing between id and body
            document = None
            view = memoryview(buffer)[at + f.BODY_HEAD_BYTES : end]
            body: Buffer = view
            headers, created = _NO_HEADERS, seq >> SEQ_COUNTER_BITS
        else:
            document = piece.read.decode(i)
            body, headers, created = document.body, document.headers, document.created_ms
        is_json = flags & f.JSON
        message = Delivered(
            id_,
            Raw(body) if is_json else UNSET,
            UNSET if is_json else bytes(body),
            headers,
            due,
            created,
            ready,
            attempt,
            PRIORITY_NAMES[flags & f.PRIORITY],
            lease,
        )
        for name in _MORE if document is not None else ():
            if (value := getattr(document, name)) is not None:
                setattr(message, name, value)
        yield message


# BSON


def as_bson(messages: list[Delivered]) -> bytes:
    """Messages as BSON documents, one behind the other. A JSON body becomes its value, any other a binary."""
    return b"".join([_bson_of(message) for message in messages])


def _bson_of(message: Delivered) -> bytes:
    fields: dict[str, Any] = {
        "due_ms": Int64(message.due_ms),
        "created_ms": Int64(message.created_ms),
        "ready_ms": Int64(message.ready_ms),
        "lease_until_ms": Int64(message.lease_until_ms),
        "attempt": message.attempt,
        "headers": message.headers,
        "priority": message.priority,
        "id": message.id,
        **{name: value for name in _MORE if (value := getattr(message, name)) is not UNSET},
    }
    if isinstance(message.body, UnsetType):
        return bson.encode({**fields, "body": message.body_base64})
    rest = bson.encode(fields)[4:-1] + bson_body(bytes(message.body)) + b"\0"
    return (len(rest) + 4).to_bytes(4, "little") + rest


def bson_body(text: bytes) -> bytes:
    """A JSON body as BSON element `body`; a value that BSON cannot express becomes the text `body_json`.

    >>> bson_body(b'"x"'), bson_body(b"1e999")
    (b'\\x02body\\x00\\x02\\x00\\x00\\x00x\\x00', b'\\x02body_json\\x00\\x06\\x00\\x00\\x001e999\\x00')
    """
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            string = value.encode()
            return b"\x02body\0" + (len(string) + 1).to_bytes(4, "little") + string + b"\0"
        return bson.encode({"body": value})[4:-1]
    except (msgspec.DecodeError, bson.errors.BSONError, OverflowError, ValueError, RecursionError):
        return bson.encode({"body_json": text.decode()})[4:-1]


# Views


def body_fields(body: bytes | None, is_json: bool) -> dict[str, Any]:
    """The field of a stored body; none if it is unknown."""
    if body is None:
        return {}
    return {"body": Raw(body)} if is_json else {"body_base64": body}


def _created(message: MessageView) -> dict[str, int]:
    """The time of creation; none if it is unknown: a notice of an older version has only the id of a cancelled sleeper."""
    return {"created_ms": message.created_ms} if message.created_ms else {}


def view(message: MessageView) -> dict[str, Any]:
    """The fields of one message, with its groups and its timeline."""
    return {
        "id": message.id,
        "state": message.state,
        "due_ms": message.due_ms,
        **_created(message),
        "attempt": message.attempt,
        **body_fields(message.body, message.json),
        **{name: getattr(message.optional, name) for name in NAMES},
        "ttr": message.ttr_ms / 1000 if message.ttr_ms else None,
        "priority": PRIORITY_NAMES[message.priority],
        "groups": message.groups,
        "attempts": [attempt_fields(name, one) for name, one in message.attempts],
        "timeline": message.timeline,
    }


def past_view(found: PastView) -> dict[str, Any]:
    """The fields of a message as it was."""
    more = {"at_ms": found.at_ms, "known_from_ms": found.known_from_ms, "due_known": found.due_known}
    return view(found.view) | more


def attempt_fields(group: str, one: Attempt) -> dict[str, Any]:
    """The fields of an attempt."""
    return {"group": group, **one.fields()}


def hide_errors(message: MessageView) -> None:
    """Leave out what consumers said of a message: answers of endpoints are not for producers."""
    message.groups = {name: fields | ({"error": ""} if "error" in fields else {}) for name, fields in message.groups.items()}
    message.attempts = [(name, attempt.without_error()) for name, attempt in message.attempts]
    message.timeline = [replace(moment, detail="") if moment.group else moment for moment in message.timeline]


def listed(message: MessageView) -> dict[str, Any]:
    """The fields of a line of a listing. A sleeping retry, or a message that is dead, names its group."""
    return {
        "id": message.id,
        "state": message.state,
        "due_ms": message.due_ms,
        **_created(message),
        **body_fields(message.body, message.json),
        **{name: getattr(message.optional, name) for name in NAMES},
        "priority": PRIORITY_NAMES[message.priority],
        **({"group": next(iter(message.groups))} if message.groups else {}),
    }


def letter_fields(dead: DeadLetter) -> dict[str, Any]:
    """The fields of a dead letter."""
    return {
        "id": dead.id,
        "group": dead.group,
        **body_fields(dead.body, dead.json),
        **{row.name: getattr(dead.document, row.name) for row in FOR_CONSUMERS},
        "due_ms": dead.due_ms,
        "created_ms": dead.created_ms,
        "dropped_ms": dead.dropped_ms,
        "attempts": dead.attempts,
        "error": dead.error,
        "last_attempts": [attempt_fields(dead.group, one) for one in of_notes(dead.document.meta)],
    }
