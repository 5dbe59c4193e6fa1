"""Decoding of BSON messages: documents one behind the other.

Documents of one producer have the same layout: the same fields of the same types in the same order. Arrays decode all documents
with the layout of the first one at once; the rest is tried with the next layout, and the remainder is decoded by the bson
library. Only the library's path reports errors: arrays skip every document that does not fit exactly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from struct import Struct, error
from typing import Any

import bson
import msgspec
import numpy as np
from bson.codec_options import CodecOptions, DatetimeConversion, TypeDecoder, TypeRegistry
from msgspec import UNSET

from turtlemq import small_batches
from turtlemq.errors import InvalidMessage, TooLarge
from turtlemq.message_fields import FIELDS, Kind
from turtlemq.model import BATCH_MESSAGES_MAX, I64, Mask
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather, values, windows
from turtlemq.server.errors import InvalidBson
from turtlemq.server.incoming.columns import PRIORITIES, Columns, CommonFields, columns_of, extend, in_order, refusal

LAYOUTS_MAX = 8  # tried in one slice; each costs 60 µs
_BYTES_MIN = 5  # of a document
_INT32 = Struct("<i").unpack_from

_DOUBLE, _TEXT, _BINARY, _NULL, _INT, _LONG = 0x01, 0x02, 0x05, 0x0A, 0x10, 0x12
_FIXED_BYTES = {_DOUBLE: 8, _TEXT: 4, _BINARY: 5, _NULL: 0, _INT: 4, _LONG: 8}  # a value, or the length before it
_NUMBERS = {_DOUBLE: "<f8", _INT: "<i4", _LONG: "<i8"}
_SECONDS, _TIME = (_DOUBLE, _INT, _LONG, _NULL), (_INT, _LONG, _NULL)
_TYPES = {  # types that arrays can decode; the library decodes others
    b"id": (_TEXT, _NULL),
    b"delay": _SECONDS,
    b"due_ms": _TIME,
    b"ttr": _SECONDS,
    b"priority": (_TEXT,),
    b"body": (_BINARY, _TEXT),
} | {row.name.encode(): (_NULL,) if row.kind is Kind.TEXTS else _TIME for row in FIELDS}
Layout = list[tuple[str, int, bytes]]  # name, type, and both as they stand in a document


class JavaScript:
    """JavaScript code, which the library decodes as a text. As an own type it is refused: JSON has none."""


class _Code(TypeDecoder):
    bson_type = bson.Code

    def transform_bson(self, value: Any) -> JavaScript:
        return JavaScript()


_RAW: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, type_registry=TypeRegistry([_Code()])
)


class BsonMessage(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """A message in BSON. Its body is a binary, or a value that JSON has as well."""

    body: Any = UNSET


def documents(data: bytes) -> I64:
    """The position of each document, and the end of the last one. 0.08 µs each, less if all have the same length."""
    length = _INT32(data)[0] if len(data) >= _BYTES_MIN else 0
    if length >= _BYTES_MIN and len(data) % length == 0 and len(data) // length <= BATCH_MESSAGES_MAX:
        lengths = np.ndarray((len(data) // length,), "<i4", data, strides=(length,))
        if not np.count_nonzero(lengths != length):
            return np.arange(0, len(data) + 1, length)
    at, end, bounds = 0, len(data), [0]
    try:
        for _ in range(BATCH_MESSAGES_MAX + 1):
            if at >= end:
                break
            (length,) = _INT32(data, at)
            if length < _BYTES_MIN:
                break
            at += length
            bounds.append(at)
    except error:  # fewer bytes than a length has
        at = -1
    if len(bounds) > BATCH_MESSAGES_MAX + 1:
        raise TooLarge(f"a batch holds at most {BATCH_MESSAGES_MAX:,} messages, this one has more")
    if at != end:
        raise _first_bad_document(data)
    return np.array(bounds)


def columns(data: bytes, bounds: I64, first: int = 0, layouts: int = LAYOUTS_MAX) -> Columns:
    """The documents between these bounds; `first` is the index of the first one. 0.2 µs each with one layout and bodies of few
    lengths, 0.35 µs with bodies of many lengths, 1 µs by the library, 3 µs if a body is a document."""
    starts, ends = bounds[:-1], bounds[1:] - 1
    rest = np.arange(len(starts))
    places: list[I64] = []
    parts: list[Columns] = []
    for _ in range(layouts):
        if len(rest) < small_batches.BSON_LAYOUT:
            break
        layout = _layout(data, int(starts[rest[0]]), int(ends[rest[0]]))
        decoded = None if layout is None else _read(data, starts[rest], ends[rest], layout)
        if decoded is None:
            rest = np.roll(rest, len(rest) // 3 + 1)  # that document is for the library; try the layout of another one
            continue
        which, part = decoded
        if len(which) == len(starts):
            return part
        places.append(rest[which])
        parts.append(part)
        rest = np.delete(rest, which)
    if len(rest) or not parts:
        rest.sort()
        places.append(rest)
        parts.append(_by_library(data, bounds, rest.tolist(), first))
    for part in parts[1:]:
        extend(parts[0], part)
    return parts[0] if len(parts) == 1 else in_order(parts[0], np.concatenate(places))


# By arrays


def _layout(data: bytes, at: int, end: int) -> Layout | None:
    """The layout of the document in [at, end]. None if arrays cannot decode it. Values are not checked here but by `_Walk`."""
    layout: Layout = []
    at += 4
    while at < end:
        stop = data.find(b"\0", at, at + 16) + 1
        kind, name = data[at], data[at + 1 : max(at + 1, stop - 1)]
        if kind not in _TYPES.get(name, ()) or any(name.decode() == known for known, _, _ in layout):
            return None
        layout.append((name.decode(), kind, data[at:stop]))
        size = int.from_bytes(data[stop : stop + 4], "little") if kind in (_TEXT, _BINARY) else 0
        at = stop + _FIXED_BYTES[kind] + size
    return layout if any(name == "body" for name, _, _ in layout) else None


class _Walk:
    """A walk through many documents at once, element by element, that drops every document that does not fit the layout.

    An element that is too long for its document leads beyond the end of the document, never back; `end` drops it."""

    def __init__(self, data: bytes, starts: I64, ends: I64) -> None:
        self.data, self.ends, self.at = data, ends, starts + 4
        self.kept = np.arange(len(starts))
        self.spans: list[tuple[I64, I64]] = []  # [begin, end) of the values of each element so far
        self.before = b""  # bytes required before the next element: the NUL of a text

    def only(self, good: Mask, *more: I64) -> tuple[I64, ...]:
        """Drop all documents but the good ones. Returns the columns `more` without the dropped."""
        if np.count_nonzero(good) == len(good):
            return more
        self.ends, self.at, self.kept = self.ends[good], self.at[good], self.kept[good]
        self.spans = [(begin[good], end[good]) for begin, end in self.spans]
        return tuple(column[good] for column in more)

    def element(self, kind: int, mark: bytes) -> None:
        """Walk over the next element, which must have this type and name."""
        self.expect(self.before + mark)
        at = self.at
        begin = at + _FIXED_BYTES[kind]
        if kind == _TEXT:  # unsigned: a size that is too small becomes a huge one
            sizes = (values(self.data, "<u4")[at] - np.uint32(1)).astype(np.int64)
        elif kind == _BINARY:  # three bytes of the name, the size, the subtype: any but 0 makes the number huge
            sizes = (values(self.data, "<u8")[at - 3] >> np.uint64(24)).astype(np.int64)
        else:
            self.spans.append((at, begin))
            self.at, self.before = begin, b""
            return
        end = begin + sizes
        begin, end = self.only(end <= self.ends, begin, end)
        self.spans.append((begin, end))
        self.at, self.before = end, b"\0" if kind == _TEXT else b""

    def expect(self, mark: bytes) -> None:
        """Walk over these bytes; documents without them are dropped."""
        there = windows(self.data, len(mark))[self.at].tobytes()
        if there != mark * len(self.at):
            rows = np.frombuffer(there, np.uint8).reshape(len(self.at), len(mark))
            self.only((rows == np.frombuffer(mark, np.uint8)).all(axis=1))
        self.at = self.at + len(mark)

    def end(self) -> None:
        """Drop documents that do not end here."""
        self.expect(self.before + b"\0")
        self.only(self.at == self.ends + 1)


def _read(data: bytes, starts: I64, ends: I64, layout: Layout) -> tuple[I64, Columns] | None:
    """Indexes and columns of the valid documents with this layout. None if there are none, or the library must decode them."""
    walk = _Walk(data, starts, ends)
    try:
        for _, kind, mark in layout:
            walk.element(kind, mark)
        walk.end()
        if not len(walk.kept):
            return None
        values = {name: _values(data, name, kind, *span) for (name, kind, _), span in zip(layout, walk.spans, strict=True)}
        priorities = values.pop("priority", None)
        levels = None if priorities is None else [int(PRIORITIES[name]) for name in priorities]
    except (
        IndexError,
        UnicodeDecodeError,
        KeyError,
    ):  # beyond the end of the data, no UTF-8, no priority: the library reports it
        return None
    kind = next(kind for name, kind, _ in layout if name == "body")
    every = f.JSON if kind == _TEXT else 0
    flags = every if levels is None else [every | level for level in levels]
    values["ids"] = values.pop("id", None)
    return walk.kept, Columns(bodies=values.pop("body"), flags=flags, **values)


def _values(data: bytes, name: str, kind: int, begin: I64, end: I64) -> Any:
    """The column of a field, from the spans of its values."""
    if kind == _NULL:
        return None
    if kind == _TEXT:
        texts = _texts(data, begin, end)
        return [encode_basestring(text).encode() for text in texts] if name == "body" else texts
    if kind == _BINARY:
        return _pieces(data, begin, end)
    return values(data, _NUMBERS[kind])[begin].astype(np.float64 if name in ("delay", "ttr") else np.int64)


def _pieces(data: bytes, begin: I64, end: I64) -> list[bytes]:
    """The bytes of these spans. 40 ns each if all have the same length, else 90 ns."""
    sizes = end - begin
    if sizes[0] and not np.count_nonzero(sizes != sizes[0]):
        pieces: list[bytes] = windows(data, int(sizes[0]))[begin].tolist()
        return pieces
    return [data[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


def _texts(data: bytes, begin: I64, end: I64) -> list[str]:
    """The texts of these spans. A NUL follows each, so all are decoded at once, unless a text contains one."""
    texts = gather(data, begin, end + 1 - begin).decode()[:-1].split("\0")
    return texts if len(texts) == len(begin) else [data[a:b].decode() for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


# By the library


def _by_library(data: bytes, bounds: I64, which: Sequence[int], first: int) -> Columns:
    """The documents at the indexes `which`, one by one. Raises for the first invalid one."""
    parts = [data[bounds[i] : bounds[i + 1]] for i in which]
    try:
        decoded = bson.decode_all(b"".join(parts), _RAW)
    except (bson.errors.BSONError, ValueError, OverflowError, RecursionError):
        raise _first_bad_document(data) from None
    try:
        messages = msgspec.convert(decoded, list[BsonMessage])
    except (msgspec.ValidationError, RecursionError):
        raise _first_bad_message(decoded, [first + i for i in which]) from None
    bodies: list[bytes] = []
    flags: list[int] = []
    for i, message in zip(which, messages, strict=True):
        if message.body is UNSET:
            raise InvalidMessage(f'message {first + i}: it has no "body"', index=first + i)
        binary = isinstance(message.body, bytes)
        bodies.append(bytes(message.body) if binary else _as_json(message.body, first + i))
        flags.append(0 if binary else f.JSON)
    return columns_of(messages, bodies, flags)


def _first_bad_document(data: bytes) -> InvalidBson:
    """The error for the first document that is not valid BSON."""
    at = index = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little", signed=True)
        try:
            bson.decode(data[at : at + length], _RAW) if _BYTES_MIN <= length <= len(data) - at else bson.decode(b"")
        except (bson.errors.BSONError, ValueError, OverflowError, RecursionError) as wrong:
            return InvalidBson(f"document {index} at byte {at} is no BSON: {wrong}", index=index)
        at, index = at + length, index + 1
    return InvalidBson("the body is no BSON")


def _first_bad_message(decoded: Sequence[dict[str, Any]], indexes: Sequence[int]) -> Exception:
    for fields, index in zip(decoded, indexes, strict=True):
        try:
            msgspec.convert(fields, BsonMessage)
        except (msgspec.ValidationError, RecursionError) as wrong:
            return refusal(wrong, index)
    return InvalidMessage("a message is not as it should be")


def _as_json(value: Any, i: int) -> bytes:
    def refuse(inner: Any) -> Any:
        raise TypeError(f"{type(inner).__name__} has no JSON form; send such a body as a binary")

    try:
        return json.dumps(value, default=refuse, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as wrong:
        raise InvalidMessage(f"message {i}: {wrong}", index=i) from None
