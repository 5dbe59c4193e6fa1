"""Messages in JSON: a message, many under the name `messages`, or one a line.

Messages of one producer have the same few fields. Whoever knows which can read them twice as fast, so the shape of messages
that begin with a certain field is remembered; what does not have that shape after all is read as any message is, by types that
also know what is wrong with it. So the shapes only see what is good, and one place refuses.

A big body is read in slices, so that others get their turn; nothing of it counts before all of it was read.
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

SLICE_MESSAGES = 2_000  # read at once: 1 ms at most, if they are small
_SLICED_BYTES = 256 << 10  # shorter JSON is read as a whole
_SLICE_BYTES_MIN, _SLICE_BYTES_MAX = 16 << 10, 1 << 20
_CUTS_MAX = 4  # places that are tried for a cut
_OPENING, _CLOSING = re.compile(rb'\s*\{\s*"messages"\s*:\s*\[\s*'), re.compile(rb"\]\s*\}\s*\Z")
_FIRST_NAME = re.compile(rb'[\s\[]*\{\s*"(\w{1,16})"')


class JsonMessage(CommonFields, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A message in JSON."""

    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None


class Envelope(JsonMessage, forbid_unknown_fields=True, kw_only=True):
    """A JSON request: a message, or many under one name."""

    messages: list[JsonMessage] | UnsetType = UNSET


_envelope = msgspec.json.Decoder(Envelope)
_message = msgspec.json.Decoder(JsonMessage)
_messages = msgspec.json.Decoder(list[JsonMessage])


class Shape:
    """Messages that have a body and these fields, all of them and no others."""

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
        """The messages of a request, or of a slice of one; raises if they are not of this shape."""
        if lines:
            return _one_a_line(self._message, data)
        return self._messages.decode(data) if sliced else self._envelope.decode(data).messages  # type: ignore[attr-defined]

    def columns(self, messages: Sequence[Any]) -> Columns:
        """Their columns. 0.15 µs each."""
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
_known: dict[bytes, Shape] = {}  # by the first field of a message


def columns(data: bytes, lines: bool) -> Iterator[Columns]:
    """The messages of a request, in parts."""
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
    yield _read(data, lines, done)


def _read(data: bytes, lines: bool, done: int, sliced: bool = False) -> Columns:
    """A request, of which `done` messages are known already, or a slice behind so many: whoever cut it is told if it is none."""
    opening = None if lines or sliced else _OPENING.match(data)
    first = _FIRST_NAME.match(data, opening.end() if opening else 0)
    shape = None if first is None else _known.get(first[1])
    if shape is not None and (sliced or not done):
        try:
            if found := shape.read(data, lines, sliced):
                return shape.columns(found)
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
    """Messages that begin with this field, of which there are not many, have the shape of this one."""
    names = tuple(name for name in ("id", "delay", "due_ms") if getattr(message, name) is not None)
    shaped = JsonMessage(id=message.id, delay=message.delay, due_ms=message.due_ms, body=message.body)
    if names in _SHAPES and message.body is not UNSET and message == shaped and first.decode() in (*names, "body"):
        _known[first] = _SHAPES[names]


def _slices(data: bytes, lines: bool) -> Iterator[Columns | None]:
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
    size, done = _SLICE_BYTES_MIN, 0
    while at < end:
        found, next_at = _cut_off(data, at, end, size, cut, lines, done)
        yield found or None
        if not found:
            return
        done += len(found)
        size = min(max(_SLICE_BYTES_MIN, (next_at - at) // len(found) * SLICE_MESSAGES), _SLICE_BYTES_MAX)
        at = next_at


def _cut_off(
    data: bytes, at: int, end: int, size: int, cut: re.Pattern[bytes], lines: bool, done: int
) -> tuple[Columns | None, int]:
    """Messages of about so many bytes behind those that are done, or None, and where the next one begins."""
    next_at = at + size
    for _ in range(_CUTS_MAX):
        place = cut.search(data, next_at, end)
        stop, next_at = (end, end) if place is None else (place.end(1), place.end())
        some = data[at:stop] if lines else b"".join((b"[", memoryview(data)[at:stop], b"]"))
        try:
            if not some.isascii():
                some.decode()
            return _read(some, lines, done, sliced=True), next_at
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if place is None:
                break
    return None, at


def single_message(data: bytes) -> Envelope | None:
    """The one message that is all of a request; None: it is not so, or something is wrong with it."""
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
    if found != Envelope(messages=found.messages):
        raise InvalidMessage('beside "messages" there are no other fields; those of a message go into it')
    return found.messages


def _one_a_line(decoder: msgspec.json.Decoder[Any], data: bytes) -> list[Any]:
    """Messages, one on each line that is not blank: the decoder alone would also take two on one."""
    found = decoder.decode_lines(data)
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines != len(found) and sum(not line.isspace() for line in data.split(b"\n") if line) != len(found):
        raise msgspec.DecodeError("there is one message a line")
    return found


def _from_lines(data: bytes) -> list[JsonMessage]:
    try:
        return _one_a_line(_message, data)
    except (msgspec.DecodeError, RecursionError):
        pass
    out: list[JsonMessage] = []  # again, a line at a time: which one is it?
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            out.append(_message.decode(line))
        except (msgspec.DecodeError, RecursionError) as wrong:
            raise refusal(syntax_error_or(line, wrong), len(out)) from None
    return out


def bodies(messages: Sequence[JsonMessage], first: int) -> tuple[list[bytes], list[int] | int]:
    """Bodies and their flags. 0.1 µs each where all are of one kind."""
    raws, coded = [m.body for m in messages], [m.body_base64 for m in messages]
    values, plain = len(raws) - raws.count(UNSET), len(coded) - coded.count(None)
    if values == len(messages) and not plain:
        return list(map(bytes, raws)), f.JSON  # type: ignore[arg-type]
    found: list[bytes] = []
    flags: list[int] = []
    for i, (raw, code) in enumerate(zip(raws, coded, strict=True), first):
        if not isinstance(raw, UnsetType):
            if code is not None:
                raise InvalidMessage(f"message {i}: it has body or body_base64, not both", index=i)
            found.append(bytes(raw))
            flags.append(f.JSON)
        elif code is not None:
            found.append(code)
            flags.append(0)
        else:
            raise InvalidMessage(f'message {i}: it has no "body" (any JSON value) and no "body_base64" (bytes)', index=i)
    return found, flags
