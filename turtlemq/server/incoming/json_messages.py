"""Decoding of JSON messages: a single message, many under the name `messages`, or one a line (NDJSON).

Messages of one producer usually have the same few fields, and a type with exactly these decodes twice as fast. So the shape of
messages that begin with a certain field is cached. Messages of another shape are decoded by the general type, which is also the
only one that reports errors: a shape either decodes everything or nothing.

A large body is decoded in slices, so that other requests run in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from turtlemq.errors import InvalidMessage
from turtlemq.segment import format as f
from turtlemq.server.incoming.columns import Columns, CommonFields, columns_of, or_array, refusal
from turtlemq.server.incoming.decode import check_text, syntax_error_or

SLICE_MESSAGES = 2_000  # decoded at once: at most 1 ms, if they are small
_SLICED_BYTES = 256 << 10  # shorter JSON is decoded as a whole
_SLICE_BYTES_MIN, _SLICE_BYTES_MAX = 16 << 10, 1 << 20
_CUTS_MAX = 4  # positions that are tried for the end of a slice
_OPENING, _CLOSING = re.compile(rb'\s*\{\s*"messages"\s*:\s*\[\s*'), re.compile(rb"\]\s*\}\s*\Z")
_FIRST_NAME = re.compile(rb'[\s\[]*\{\s*"(\w{1,16})"')


class JsonMessage(CommonFields, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A message in JSON."""

    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None


class Envelope(JsonMessage, forbid_unknown_fields=True, kw_only=True):
    """A JSON request: the fields of a single message, or many messages under `messages`."""

    messages: list[JsonMessage] | UnsetType = UNSET


_envelope = msgspec.json.Decoder(Envelope)
_message = msgspec.json.Decoder(JsonMessage)
_messages = msgspec.json.Decoder(list[JsonMessage])


class Shape:
    """Decoders of messages with a body and exactly these fields."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        kinds: dict[str, Any] = {"id": str, "delay": float, "due_ms": int, "body": Raw}
        fields = [(name, kinds[name]) for name in (*names, "body")]
        message = msgspec.defstruct("Shaped", fields, forbid_unknown_fields=True, gc=False)
        envelope = msgspec.defstruct("Envelope", [("messages", list[message])], forbid_unknown_fields=True)  # type: ignore[valid-type]
        self._envelope = msgspec.json.Decoder(envelope)
        self._messages: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[message])  # type: ignore[valid-type]
        self._message: msgspec.json.Decoder[Any] = msgspec.json.Decoder(message)

    def read(self, data: bytes, lines: bool, sliced: bool) -> list[Any]:
        """The messages of a request or of a slice. Raises if they do not have this shape."""
        if lines:
            return _one_a_line(self._message, data)
        return self._messages.decode(data) if sliced else self._envelope.decode(data).messages  # type: ignore[attr-defined]

    def columns(self, messages: Sequence[Any]) -> Columns:
        """The columns of messages of this shape. 0.15 µs each."""
        columns = Columns(list(map(bytes, [m.body for m in messages])), f.JSON)
        for name in self.names:
            if name == "id":
                columns.ids = [m.id for m in messages]
            elif name == "delay":
                columns.delay = or_array([m.delay for m in messages], np.float64)
            else:
                columns.due_ms = or_array([m.due_ms for m in messages], np.int64)
        return columns


_TIMES: tuple[tuple[str, ...], ...] = ((), ("delay",), ("due_ms",))
_SHAPES = {names: Shape(names) for when in _TIMES for names in (when, ("id", *when))}
_shapes_seen: dict[bytes, Shape] = {}  # by the first field of a message


def columns(data: bytes, lines: bool) -> Iterator[Columns]:
    """The messages of a request, in slices. `lines`: it is NDJSON."""
    done = 0
    if len(data) > _SLICED_BYTES:
        for part in _slices(data, lines):
            if part is None:
                break
            yield part
            done += len(part)
        else:
            return
    if not data.isascii():
        check_text(data)
    yield _read(data, lines, done)


def listed(data: bytes) -> Columns:
    """The messages of a JSON list, which is part of a request. Raises what msgspec raises if one is invalid."""
    return _read(data, lines=False, done=0, sliced=True)


def _read(data: bytes, lines: bool, done: int, sliced: bool = False) -> Columns:
    """The messages of a request without the first `done`, or those of a slice behind so many. A slice that does not consist of
    whole messages raises `DecodeError`."""
    opening = None if lines or sliced else _OPENING.match(data)
    first = _FIRST_NAME.match(data, opening.end() if opening else 0)
    shape = None if first is None else _shapes_seen.get(first[1])
    if shape is not None and (sliced or not done):
        try:
            if shaped := shape.read(data, lines, sliced):
                return shape.columns(shaped)
        except (msgspec.DecodeError, RecursionError):
            pass
    if sliced:
        messages = _one_a_line(_message, data) if lines else _messages.decode(data)
    else:
        messages = (_from_lines(data) if lines else _from_json(data))[done:]
    if first and messages:
        _remember(first[1], messages[0])
    return columns_of(messages, *bodies(messages, done))


def _remember(first: bytes, message: JsonMessage) -> None:
    """Cache the shape of a message under its first field. There are few such fields."""
    names = tuple(name for name in ("id", "delay", "due_ms") if getattr(message, name) is not None)
    shaped = JsonMessage(id=message.id, delay=message.delay, due_ms=message.due_ms, body=message.body)
    if isinstance(message.delay, str):  # shapes have numbers
        return
    if names in _SHAPES and message.body is not UNSET and message == shaped and first.decode() in (*names, "body"):
        _shapes_seen[first] = _SHAPES[names]


def _slices(data: bytes, lines: bool) -> Iterator[Columns | None]:
    """The messages of a request in slices; ends with None if no further slice can be cut or a message is invalid.

    The end of a slice is a guess. But a slice that decodes as whole messages consists of whole messages, and so does the rest."""
    if lines:
        at, end, cut = 0, len(data), re.compile(rb"(\n)")
    else:
        opening, closing = _OPENING.match(data), _CLOSING.search(data, max(0, len(data) - 64))
        if opening is None or closing is None:
            yield None
            return
        at, end = opening.end(), closing.start()
        cut = re.compile(rb"(\})\s*,\s*(?=" + re.escape(data[at : at + 6]) + b")")  # messages begin alike
    size, done = _SLICE_BYTES_MIN, 0
    while at < end:
        part, next_at = _cut_off(data, at, end, size, cut, lines, done)
        yield part or None
        if not part:
            return
        done += len(part)
        size = min(max(_SLICE_BYTES_MIN, (next_at - at) // len(part) * SLICE_MESSAGES), _SLICE_BYTES_MAX)
        at = next_at


def _cut_off(
    data: bytes, at: int, end: int, size: int, cut: re.Pattern[bytes], lines: bool, done: int
) -> tuple[Columns | None, int]:
    """A slice of about `size` bytes from `at` on, or None, and the position of the next slice."""
    next_at = at + size
    for _ in range(_CUTS_MAX):
        hit = cut.search(data, next_at, end)
        stop, next_at = (end, end) if hit is None else (hit.end(1), hit.end())
        text = data[at:stop] if lines else b"".join((b"[", memoryview(data)[at:stop], b"]"))
        try:
            if not text.isascii():
                text.decode()
            return _read(text, lines, done, sliced=True), next_at
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if hit is None:
                break
    return None, at


def single_message(data: bytes) -> Envelope | None:
    """The message of a request that has a single one. None if it has several, or is invalid."""
    if len(data) > _SLICED_BYTES or not data.isascii() or _OPENING.match(data):
        return None
    try:
        found = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if found.messages is UNSET else None


def _from_json(data: bytes) -> list[JsonMessage]:
    try:
        found = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise refusal(syntax_error_or(data, wrong)) from None
    if found.messages is UNSET:
        return [found]
    if found != Envelope(messages=found.messages, if_exists=found.if_exists):
        raise InvalidMessage('beside "messages" there is only "if_exists"; the fields of a message go into it')
    for message in found.messages if found.if_exists is not None else ():
        message.if_exists = message.if_exists or found.if_exists
    return found.messages


def _one_a_line(decoder: msgspec.json.Decoder[Any], data: bytes) -> list[Any]:
    """Messages, one on each line that is not blank. The decoder alone would also accept two on one line."""
    messages = decoder.decode_lines(data)
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines != len(messages) and sum(not line.isspace() for line in data.split(b"\n") if line) != len(messages):
        raise msgspec.DecodeError("there is one message a line")
    return messages


def _from_lines(data: bytes) -> list[JsonMessage]:
    try:
        return _one_a_line(_message, data)
    except (msgspec.DecodeError, RecursionError):
        pass
    out: list[JsonMessage] = []  # again, a line at a time, to report the bad one
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            out.append(_message.decode(line))
        except (msgspec.DecodeError, RecursionError) as wrong:
            raise refusal(syntax_error_or(line, wrong), len(out)) from None
    return out


def bodies(messages: Sequence[JsonMessage], first: int) -> tuple[list[bytes], list[int] | int]:
    """Bodies and their flags; `first` is the index of the first message. 0.1 µs each if all are JSON values."""
    values, binaries = [m.body for m in messages], [m.body_base64 for m in messages]
    if values.count(UNSET) == 0 and binaries.count(None) == len(messages):
        return list(map(bytes, values)), f.JSON  # type: ignore[arg-type]
    out: list[bytes] = []
    flags: list[int] = []
    for i, (value, binary) in enumerate(zip(values, binaries, strict=True), first):
        if not isinstance(value, UnsetType):
            if binary is not None:
                raise InvalidMessage(f"message {i}: it has body or body_base64, not both", index=i)
            out.append(bytes(value))
            flags.append(f.JSON)
        elif binary is not None:
            out.append(binary)
            flags.append(0)
        else:
            raise InvalidMessage(f'message {i}: it has no "body" (any JSON value) and no "body_base64" (bytes)', index=i)
    return out, flags
