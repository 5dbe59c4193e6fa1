"""What producers send, as the columns of a batch: JSON, NDJSON or BSON in, each checked with the index of the first bad item.

A JSON body is stored as the very text that came, so it comes back as the same value; bytes are stored as they are.
A big batch is read in slices, so that others get their turn; nothing of it counts before all of it was read.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from turtlemq.errors import InvalidFireAt, InvalidMessage, TooLarge
from turtlemq.model import BATCH_MESSAGES_MAX, I64, TTR_MS_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.server import bson_in
from turtlemq.server.columns import PRIORITIES, Columns, Common, extend, of_messages, refused
from turtlemq.server.errors import ExceedsMaxDelay
from turtlemq.server.http import check_text, whole_or

JSON, NDJSON, BSON = "application/json", "application/x-ndjson", "application/bson"
TYPES = (JSON, NDJSON, BSON, "")
DELAY_S_MAX = 200 * 365 * 86_400
SLICE_MESSAGES = 2_000  # read at once: 1 ms at most, if they are small
_SLICED_BYTES = 256 << 10  # shorter JSON is read as a whole
_SLICE_BYTES_MIN, _SLICE_BYTES_MAX = 16 << 10, 1 << 20
_CUTS_MAX = 4  # places that are tried for a cut
_OPENING, _CLOSING = re.compile(rb'\s*\{\s*"messages"\s*:\s*\[\s*'), re.compile(rb"\]\s*\}\s*\Z")


class JsonMessage(Common, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A message in JSON."""

    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None


class Envelope(JsonMessage, forbid_unknown_fields=True, kw_only=True):
    """A JSON request: a message, or many under one name."""

    messages: list[JsonMessage] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Rules:
    """What the server says about due times."""

    reject_past: bool = False
    max_delay_ms: int = 0  # 0: no limit of its own


_envelope = msgspec.json.Decoder(Envelope)
_message = msgspec.json.Decoder(JsonMessage)
_messages = msgspec.json.Decoder(list[JsonMessage])


def decode_batch(data: bytes, kind: str, now_ms: int, rules: Rules) -> Batch:
    """A request body as a batch."""
    steps = decode_slices(data, kind, now_ms, rules)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: Batch = done.value
            return batch


def decode_slices(data: bytes, kind: str, now_ms: int, rules: Rules) -> Generator[None, None, Batch]:
    """The same in steps of a millisecond or so, for a caller that has other things to do in between. It returns the batch."""
    if kind in (JSON, "") and (alone := _alone(data)) is not None:
        return _batch_of_one(alone, now_ms, rules)
    columns: Columns | None = None
    for part in _bson(data) if kind == BSON else _json(data, kind == NDJSON):
        if columns is None:
            columns = part
        else:
            extend(columns, part)
            yield
        if len(columns) > BATCH_MESSAGES_MAX:
            raise TooLarge(f"a batch holds at most {BATCH_MESSAGES_MAX:,} messages, this one has more")
    return _batch(Columns([], []) if columns is None else columns, now_ms, rules)


def _bson(data: bytes) -> Iterator[Columns]:
    bounds = bson_in.documents(data)
    for first in range(0, max(1, len(bounds) - 1), SLICE_MESSAGES):
        yield bson_in.columns(data, bounds[first : first + SLICE_MESSAGES + 1], first)


# JSON


def _json(data: bytes, lines: bool) -> Iterator[Columns]:
    done = 0
    for messages in _in_slices(data, lines):
        yield of_messages(messages, *_bodies(messages, done))
        done += len(messages)


def _in_slices(data: bytes, lines: bool) -> Iterator[list[JsonMessage]]:
    done = 0
    if len(data) > _SLICED_BYTES:
        for some in _slices(data, lines):
            if some is None:
                break
            yield some
            done += len(some)
        else:
            return
    if not data.isascii():
        check_text(data)
    yield (_from_lines(data) if lines else _from_json(data))[done:]


def _slices(data: bytes, lines: bool) -> Iterator[list[JsonMessage] | None]:
    """Messages by the thousand; None where that does not go on, because no cut was found or something is wrong.

    A cut is a guess. But what was cut off can only be read as whole messages if it is whole messages: then so is the rest."""
    if lines:
        at, end, cut = 0, len(data), re.compile(rb"(\n)")
    else:
        opening, closing = _OPENING.match(data), _CLOSING.search(data, max(0, len(data) - 64))
        if opening is None or closing is None:
            yield None
            return
        at, end = opening.end(), closing.start()
        cut = re.compile(rb"(\})\s*,\s*(?=" + re.escape(data[at : at + 6]) + b")")  # messages begin alike
    size = _SLICE_BYTES_MIN
    while at < end:
        found, next_at = _cut_off(data, at, end, size, cut, lines)
        yield found or None
        if not found:
            return
        size = min(max(_SLICE_BYTES_MIN, (next_at - at) // len(found) * SLICE_MESSAGES), _SLICE_BYTES_MAX)
        at = next_at


def _cut_off(data: bytes, at: int, end: int, size: int, cut: re.Pattern[bytes], lines: bool) -> tuple[list[JsonMessage], int]:
    """Messages of about so many bytes, or none, and where the next one begins."""
    next_at = at + size
    for _ in range(_CUTS_MAX):
        place = cut.search(data, next_at, end)
        stop, next_at = (end, end) if place is None else (place.end(1), place.end())
        some = data[at:stop] if lines else b"[%b]" % data[at:stop]
        try:
            if not some.isascii():
                some.decode()
            return (_message.decode_lines(some) if lines else _messages.decode(some)), next_at
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if place is None:
                break
    return [], at


def _alone(data: bytes) -> Envelope | None:
    """The one message that is all of a request; None: it is not so, or something is wrong with it."""
    if len(data) > _SLICED_BYTES or not data.isascii() or _OPENING.match(data):
        return None
    try:
        found = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if found.messages is UNSET else None


def _batch_of_one(message: JsonMessage, now_ms: int, rules: Rules) -> Batch:
    """The same without columns: 9 µs instead of 16."""
    bodies, flags = _bodies([message], 0)
    flag = flags[0] | PRIORITIES[message.priority]
    due = [due_time(message.delay, message.due_ms, now_ms, 0)]
    _check_dues(due, now_ms, rules)
    return Batch(
        bodies=bodies,
        due_ms=due,
        ids=None if message.id is None else [message.id],
        ttr_ms=None if message.ttr is None else [_ttr_ms(message.ttr, 0)],
        flags=[flag] if flag else None,
        expires_ms=None if message.expires_ms is None else [message.expires_ms],
        headers=None if message.headers is None else [message.headers],
    )


def _from_json(data: bytes) -> list[JsonMessage]:
    try:
        found = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise refused(whole_or(data, wrong)) from None
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
            raise refused(whole_or(line, wrong), len(out)) from None
    return out


def _bodies(messages: Sequence[JsonMessage], first: int) -> tuple[list[bytes], list[int]]:
    """Bodies and their flags. 0.1 µs each where all are of one kind."""
    raws, coded = [m.body for m in messages], [m.body_base64 for m in messages]
    values, plain = len(raws) - raws.count(UNSET), len(coded) - coded.count(None)
    if values == len(messages) and not plain:
        return list(map(bytes, raws)), [f.JSON] * values  # type: ignore[arg-type]
    bodies: list[bytes] = []
    flags: list[int] = []
    for i, (raw, code) in enumerate(zip(raws, coded, strict=True), first):
        if not isinstance(raw, UnsetType):
            if code is not None:
                raise InvalidMessage(f"message {i}: it has body or body_base64, not both", index=i)
            bodies.append(bytes(raw))
            flags.append(f.JSON)
        elif code is not None:
            bodies.append(code)
            flags.append(0)
        else:
            raise InvalidMessage(f'message {i}: it has no "body" (any JSON value) and no "body_base64" (bytes)', index=i)
    return bodies, flags


# Columns


def _batch(columns: Columns, now_ms: int, rules: Rules) -> Batch:
    expires = columns.expires_ms
    return Batch(
        bodies=columns.bodies,
        due_ms=_due_times(columns, now_ms, rules),
        ids=columns.ids,
        ttr_ms=None if columns.ttr is None else _ttr_column(columns.ttr),
        flags=columns.flags if any(columns.flags) else None,
        expires_ms=expires.tolist() if isinstance(expires, np.ndarray) else expires,
        headers=columns.headers,
    )


def _due_times(columns: Columns, now_ms: int, rules: Rules) -> list[int] | I64:
    """When each is due. 0.05 µs where all say it in one way, 0.3 µs otherwise."""
    due: Any = _due_array(columns, now_ms) if len(columns) >= f.FEW else None
    if due is None:
        nothing = [None] * len(columns)
        delays, times = nothing if columns.delay is None else columns.delay, nothing if columns.due_ms is None else columns.due_ms
        due = [due_time(delay, at, now_ms, i) for i, (delay, at) in enumerate(zip(delays, times, strict=True))]
    if not len(due):
        return []
    _check_dues(due, now_ms, rules)
    return due  # type: ignore[no-any-return]


def _check_dues(due: Any, now_ms: int, rules: Rules) -> None:
    """What the rules say about due times, of which there is one at least."""
    if not rules.max_delay_ms and not rules.reject_past:
        return
    first, last = (due.min(), due.max()) if isinstance(due, np.ndarray) else (min(due), max(due))
    if rules.max_delay_ms and last - now_ms > rules.max_delay_ms:
        i = next(i for i, at in enumerate(due) if at - now_ms > rules.max_delay_ms)
        raise ExceedsMaxDelay(f"message {i}: it may sleep for at most {rules.max_delay_ms / 1000:,.15g} s here", index=i)
    if rules.reject_past and first < now_ms:
        i = next(i for i, at in enumerate(due) if at < now_ms)
        raise InvalidFireAt(f"message {i}: it was due {now_ms - due[i]} ms ago, and this server refuses the past", index=i)


def _due_array(columns: Columns, now_ms: int) -> I64 | None:
    """Due times, if all messages say it in one way and rightly."""
    delay, due_ms = columns.delay, columns.due_ms
    if delay is None:
        try:
            return np.full(len(columns), now_ms) if due_ms is None else np.asarray(due_ms, np.int64)
        except (TypeError, OverflowError):  # some say nothing, or no time that there ever is
            return None
    seconds = np.asarray(delay, np.float64)  # None is no number, and no number is in any range
    if due_ms is not None or not ((seconds >= 0) & (seconds <= DELAY_S_MAX)).all():
        return None
    return now_ms + np.rint(seconds * 1000).astype(np.int64)


def check_due(due_ms: int, now_ms: int, rules: Rules) -> None:
    """The rules for one message alone."""
    if rules.max_delay_ms and due_ms - now_ms > rules.max_delay_ms:
        raise ExceedsMaxDelay(f"a message may sleep for at most {rules.max_delay_ms / 1000:,.15g} s here")
    if rules.reject_past and due_ms < now_ms:
        raise InvalidFireAt(f"that was {now_ms - due_ms} ms ago, and this server refuses the past")


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


def _ttr_column(seconds: Any) -> list[int]:
    return [_ttr_ms(value, i) for i, value in enumerate(seconds if isinstance(seconds, list) else seconds.tolist())]


def _ttr_ms(ttr_s: float | None, i: int) -> int:
    if ttr_s is None:
        return 0
    if not 0 < ttr_s <= TTR_MS_MAX / 1000:
        raise InvalidMessage(f"message {i}: ttr is a number of seconds above 0, up to {TTR_MS_MAX // 1000:,}", index=i)
    return max(1, round(ttr_s * 1000))
