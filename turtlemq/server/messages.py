"""What producers send, as the columns of a batch: JSON, NDJSON or BSON in, each checked with the index of the first bad item.

A JSON body is stored as the very text that came, so it comes back as the same value; bytes are stored as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import bson
import msgspec
from bson.codec_options import CodecOptions, DatetimeConversion
from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.errors import InvalidFireAt, InvalidId, InvalidMessage, TooLarge, TurtleError
from turtlemq.model import BATCH_MESSAGES_MAX, TTR_MS_MAX, Batch, Priority
from turtlemq.segment import format as f
from turtlemq.server.errors import ExceedsMaxDelay, InvalidBson, InvalidJson
from turtlemq.server.http import check_text, index_in, whole_or

JSON, NDJSON, BSON = "application/json", "application/x-ndjson", "application/bson"
TYPES = (JSON, NDJSON, BSON, "")
DELAY_S_MAX = 200 * 365 * 86_400
PRIORITIES = {"normal": Priority.NORMAL, "high": Priority.HIGH, "low": Priority.LOW}
_RAW: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a message that JSON and BSON share."""

    id: str | None = None
    delay: float | None = None
    due_ms: int | None = None
    ttr: float | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    expires_ms: int | None = None
    headers: dict[str, str] | None = None


class JsonMessage(Common, forbid_unknown_fields=True, kw_only=True):
    """A message in JSON."""

    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None


class Envelope(JsonMessage, forbid_unknown_fields=True, kw_only=True):
    """A JSON request: a message, or many under one name."""

    messages: list[JsonMessage] | UnsetType = UNSET


class BsonMessage(Common, forbid_unknown_fields=True, kw_only=True):
    """A message in BSON. Its body is a binary, or a value that JSON has as well."""

    body: Any = UNSET


@dataclass(frozen=True, slots=True)
class Rules:
    """What the server says about due times."""

    reject_past: bool = False
    max_delay_ms: int = 0  # 0: no limit of its own


_envelope = msgspec.json.Decoder(Envelope)
_message = msgspec.json.Decoder(JsonMessage)
M = TypeVar("M", bound=Common)


def decode_batch(data: bytes, kind: str, now_ms: int, rules: Rules) -> Batch:
    """A request body as a batch."""
    if kind == BSON:
        return _batch(*_from_bson(data), now_ms, rules)
    check_text(data)
    return _batch(*_bodies(_from_lines(data) if kind == NDJSON else _from_json(data)), now_ms, rules)


# JSON


def _from_json(data: bytes) -> list[JsonMessage]:
    try:
        found = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise _refused(whole_or(data, wrong)) from None
    if found.messages is UNSET:
        return [found]
    if found != Envelope(messages=found.messages):
        raise InvalidMessage('beside "messages" there are no other fields; those of a message go into it')
    return found.messages


def _from_lines(data: bytes) -> list[JsonMessage]:
    try:
        return _message.decode_lines(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    out: list[JsonMessage] = []  # again, a line at a time: which one is it?
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            out.append(_message.decode(line))
        except (msgspec.DecodeError, RecursionError) as wrong:
            raise _refused(whole_or(line, wrong), len(out)) from None
    return out


def _refused(wrong: Exception, index: int | None = None) -> TurtleError:
    """Which error it is, by the field that msgspec names."""
    where = {"index": index} if index is not None else index_in(str(wrong))
    said = f"message {where['index']}: {wrong}" if where else str(wrong)
    if not isinstance(wrong, msgspec.ValidationError):
        return InvalidJson(said, **where)
    field = str(wrong).rpartition(".")[2].rstrip("`") if " - at " in str(wrong) else ""
    kinds: dict[str, type[TurtleError]] = {"delay": InvalidFireAt, "due_ms": InvalidFireAt, "id": InvalidId}
    return kinds.get(field, InvalidMessage)(said, **where)


def _bodies(messages: Sequence[JsonMessage]) -> tuple[Sequence[JsonMessage], list[bytes], list[int]]:
    bodies: list[bytes] = []
    flags: list[int] = []
    for i, message in enumerate(messages):
        if not isinstance(message.body, UnsetType):
            if message.body_base64 is not None:
                raise InvalidMessage(f"message {i}: it has body or body_base64, not both", index=i)
            bodies.append(bytes(message.body))
            flags.append(f.JSON)
        elif message.body_base64 is not None:
            bodies.append(message.body_base64)
            flags.append(0)
        else:
            raise InvalidMessage(f'message {i}: it has no "body" (any JSON value) and no "body_base64" (bytes)', index=i)
    return messages, bodies, flags


# BSON


def _from_bson(data: bytes) -> tuple[Sequence[BsonMessage], list[bytes], list[int]]:
    try:
        documents = bson.decode_all(data, _RAW)
    except (bson.errors.InvalidBSON, bson.errors.InvalidDocument, ValueError, OverflowError, RecursionError) as wrong:
        raise _first_bad_document(data, wrong) from None
    try:
        messages = msgspec.convert(documents, list[BsonMessage])
    except (msgspec.ValidationError, RecursionError) as wrong:
        raise _refused(wrong) from None
    bodies: list[bytes] = []
    flags: list[int] = []
    for i, message in enumerate(messages):
        if message.body is UNSET:
            raise InvalidMessage(f'message {i}: it has no "body"', index=i)
        plain = isinstance(message.body, bytes)
        bodies.append(bytes(message.body) if plain else _as_json(message.body, i))
        flags.append(0 if plain else f.JSON)
    return messages, bodies, flags


def _first_bad_document(data: bytes, wrong: Exception) -> InvalidBson:
    """Walk the documents up to the one that is none."""
    at = index = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little", signed=True)
        try:
            bson.decode(data[at : at + length], _RAW) if 5 <= length <= len(data) - at else bson.decode(b"")
        except (bson.errors.BSONError, ValueError, OverflowError, RecursionError) as error:
            return InvalidBson(f"document {index} at byte {at} is no BSON: {error}", index=index)
        at, index = at + length, index + 1
    return InvalidBson(f"the body is no BSON: {wrong}")


def _as_json(value: Any, i: int) -> bytes:
    def refuse(inner: Any) -> Any:
        raise TypeError(f"{type(inner).__name__} has no JSON form; send such a body as a binary")

    try:
        return json.dumps(value, default=refuse, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as wrong:
        raise InvalidMessage(f"message {i}: {wrong}", index=i) from None


# Columns


def _batch(messages: Sequence[Common], bodies: list[bytes], flags: list[int], now_ms: int, rules: Rules) -> Batch:
    if len(messages) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"a batch holds at most {BATCH_MESSAGES_MAX:,} messages, this one {len(messages):,}")
    ids = [m.id for m in messages]
    ttr = [m.ttr for m in messages]
    expires = [m.expires_ms for m in messages]
    headers = [m.headers for m in messages]
    if any(m.priority != "normal" for m in messages):
        flags = [flag | PRIORITIES[m.priority] for flag, m in zip(flags, messages, strict=True)]
    return Batch(
        bodies=bodies,
        due_ms=_due_times(messages, now_ms, rules),
        ids=_or_none(ids),
        ttr_ms=None if _or_none(ttr) is None else [_ttr_ms(value, i) for i, value in enumerate(ttr)],
        flags=flags,
        expires_ms=_or_none(expires),
        headers=_or_none(headers),
    )


def _or_none(column: list[Any]) -> list[Any] | None:
    """A column, or None if there is nothing in it."""
    return None if column.count(None) == len(column) else column


def _due_times(messages: Sequence[Common], now_ms: int, rules: Rules) -> list[int]:
    out = [due_time(m.delay, m.due_ms, now_ms, i) for i, m in enumerate(messages)]
    if out and rules.max_delay_ms and max(out) - now_ms > rules.max_delay_ms:
        i = next(i for i, due in enumerate(out) if due - now_ms > rules.max_delay_ms)
        raise ExceedsMaxDelay(f"message {i}: it may sleep for at most {rules.max_delay_ms / 86_400_000:g} days here", index=i)
    if out and rules.reject_past and min(out) < now_ms:
        i = next(i for i, due in enumerate(out) if due < now_ms)
        raise InvalidFireAt(f"message {i}: it was due {now_ms - out[i]} ms ago, and this server refuses the past", index=i)
    return out


def due_time(delay_s: float | None, due_ms: int | None, now_ms: int, i: int | None = None) -> int:
    """When a message is due that says when, or in how long, or neither: now."""
    if due_ms is None:
        if delay_s is None:
            return now_ms
        if 0 <= delay_s <= DELAY_S_MAX:
            return now_ms + round(delay_s * 1000)
        said = "delay is a number of seconds, 0 or more"
    elif delay_s is None:
        return due_ms
    else:
        said = "it has delay or due_ms, not both"
    if i is None:
        raise InvalidFireAt(said)
    raise InvalidFireAt(f"message {i}: {said}", index=i)


def _ttr_ms(ttr_s: float | None, i: int) -> int:
    if ttr_s is None:
        return 0
    if not 0 < ttr_s <= TTR_MS_MAX / 1000:
        raise InvalidMessage(f"message {i}: ttr is a number of seconds above 0, up to {TTR_MS_MAX // 1000:,}", index=i)
    return max(1, round(ttr_s * 1000))
