"""The byte layout of documents and file headers, version 1: constants, encoding and decoding. Pure.

The specification is docs/FORMAT.md. A document is standard BSON whose fixed-size fields come first, always in the same order, so
that numpy reads any of them in thousands of documents at known offsets. Each offset below is computed from the one before.

To change the format: raise VERSION, keep reading every older one, add golden files for the new one, and update docs/FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import bson
import numpy as np
from bson.int64 import Int64
from zlib_ng.zlib_ng import crc32

from turtlemq import model, small_batches
from turtlemq.errors import Corrupt, NewerFormat, NotOurs, TooLarge
from turtlemq.message_fields import FIELDS, FLAGS, Kind, StoredFields, flags_of
from turtlemq.model import I64, ORDINAL_BITS, SEQ_COUNTER_BITS, U8, U32, U64, Mask
from turtlemq.segment import kernel
from turtlemq.segment.buffers import Buffer, checksums, values, windows

VERSION = 1

# One document: length, then named fields of fixed size, then the variable ones.
_CRC, _DUE, _SEQ, _OPT, _ID, _BODY = b"\x10crc\0", b"\x09due\0", b"\x12seq\0", b"\x12opt\0", b"\x02id\0", b"\x05body\0"
AT_LEN = 0
AT_CRC = AT_LEN + 4 + len(_CRC)
AT_DUE = AT_CRC + 4 + len(_DUE)
AT_SEQ = AT_DUE + 8 + len(_SEQ)
AT_TTR = AT_SEQ + 8 + len(_OPT)  # opt is one int64: time to run in its low half,
AT_FLAGS = AT_TTR + 4  # flags in its high half
AT_IDLEN = AT_FLAGS + 4 + len(_ID)
PREFIX_BYTES = AT_IDLEN + 4  # the id's bytes begin here
CHECKED_FROM = AT_CRC + 4  # the checksum covers everything behind itself
DOCUMENT_BYTES_MIN = PREFIX_BYTES + 2 + 1  # an id of one byte, its NUL, the document's NUL
DOCUMENT_BYTES_MAX = 16 * 1024 * 1024

# Flags.
PRIORITY = 0b11
JSON = 1 << 2
CONTINUES = 1 << 3  # the batch goes on with the next document
BARRIER = 1 << 4  # everything before this document was synced before it was written
TOMBSTONE = 1 << 5  # no message: it only ends the one named by `of` and `was`
REPLACES = 1 << 6  # ends an older version of itself, named by `of` and `was`; with TOMBSTONE: the newer version is gone
SERVER_ID = 1 << 7  # the id is server_id(seq)
EXPIRES = FLAGS["expires_ms"]  # has the field `expires`
HEADERS = FLAGS["headers"]  # has the field `headers`
MOVED = 1 << 10  # a later copy of the same message, made by compaction; has the field `order`
HANDOFF = 1 << 11  # no message: the head of a batch in the ready log
META = 1 << 12  # has the field `meta`: the Broker's notes on a sleeping retry or a dead letter
NOTICE = 1 << 13  # no message: the ready log's note that a sleeper was cancelled
SUPERSEDES = 1 << 14  # with REPLACES: the older message of this id had come due; everything of it outside the delay log ends
ENDS = TOMBSTONE | REPLACES
USER_FLAGS = PRIORITY | JSON
OPTIONAL = flags_of(FLAGS)

_NAMES = ["len", "crc", "due", "seq", "ttr", "flags", "idlen"]
_FORMATS = ["<i4", "<u4", "<i8", "<i8", "<u4", "<u4", "<i4"]
_OFFSETS = [AT_LEN, AT_CRC, AT_DUE, AT_SEQ, AT_TTR, AT_FLAGS, AT_IDLEN]
PREFIX = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": _OFFSETS, "itemsize": PREFIX_BYTES})
_HEAD = Struct("<i5sI")
_TAIL = Struct("<5sq5sq5sII4si")
_MIDDLE = Struct("<7siB")  # the id's NUL, the body's type and name, its length, its binary subtype
_END_OF_ID = b"\0" + _BODY
_BLANK = _HEAD.pack(0, _CRC, 0) + _TAIL.pack(_DUE, 0, _SEQ, 0, _OPT, 0, 0, _ID, 0)
_TEMPLATE = np.frombuffer(_BLANK, np.uint8)
_TEMPLATE_MIDDLE = np.frombuffer(_MIDDLE.pack(_END_OF_ID, 0, 0), np.uint8)
_MIDDLE_ROW = np.dtype({"names": ["len"], "formats": ["<i4"], "offsets": [len(_END_OF_ID)], "itemsize": _MIDDLE.size})
_FIELDS = ((AT_CRC, _CRC), (AT_DUE, _DUE), (AT_SEQ, _SEQ), (AT_TTR, _OPT), (AT_IDLEN, _ID))
_CONSTANT_BITS = np.zeros(PREFIX_BYTES, np.uint8)  # bytes that are the same in every document: types and names of the fields
for _at, _name in _FIELDS:
    _CONSTANT_BITS[_at - len(_name) : _at] = 0xFF
PREFIX_WORDS, PREFIX_WORD_BITS = _TEMPLATE.view("<u4"), _CONSTANT_BITS.view("<u4")  # a prefix as words, and its constant bits
_WHOLE = Struct("<i5sI5sq5sq5sII4si")  # `_HEAD` and `_TAIL`
MARK = _CRC  # at byte 4 of every document
BODY = _BODY  # before the length of the body, which is the last element
BODY_HEAD_BYTES = len(BODY) + 4 + 1  # type, name, length and subtype
EIGHT_BYTES = (0x09, 0x12)  # BSON types of optional fields: a time, a number
VARIABLE_TYPES = (*EIGHT_BYTES, 0x03, BODY[0])  # and those that carry their length: headers, meta, body
NAME_BYTES_MAX = 8  # of an optional field, with its NUL
STORED_ID_BYTES_MAX = 2 * model.ID_BYTES_MAX + 1  # sleeping retries and dead letters have ids like group/id


def encode(
    ids: Sequence[bytes] | U8,
    bodies: Sequence[bytes],
    due_ms: Sequence[int] | I64,
    first_seq: int,
    ttr_ms: Sequence[int] | int,
    flags: Sequence[int] | U32,
    extras: Sequence[bytes] | None = None,
) -> tuple[bytes | bytearray | memoryview, I64 | list[int]]:
    """Encode documents back to back. Returns the bytes and the length of each. `ids` may be a matrix, one id a row; `extras` are
    encoded optional elements (`extra_elements`).

    0.3 µs a document of 100 B in a batch of equal lengths, half of it the checksum; 0.6 µs of any lengths; 0.8 µs in a small
    batch or with extras; 0.05 µs with the kernel."""
    if kernel.compiled is not None and len(bodies) >= small_batches.KERNEL:
        made = kernel.encode(ids, bodies, due_ms, first_seq, ttr_ms, flags, extras, DOCUMENT_BYTES_MAX)
        if made is not None:
            return made
    if extras is not None or len(bodies) < small_batches.DOCUMENTS:
        return _encode_small(ids, bodies, due_ms, range(first_seq, first_seq + len(bodies)), ttr_ms, flags, extras)
    count = len(bodies)
    id_bytes = np.full(count, ids.shape[1]) if isinstance(ids, np.ndarray) else np.fromiter(map(len, ids), np.int64, count)
    body_bytes = np.fromiter(map(len, bodies), np.int64, count)
    lengths = id_bytes + body_bytes + (PREFIX_BYTES + _MIDDLE.size + 1)
    _check_length(int(lengths.max()))
    named = isinstance(ids, np.ndarray) or bool((id_bytes == id_bytes[0]).all())  # ids of one length: part of the rows
    even = named and bool((body_bytes == body_bytes[0]).all())  # bodies, too: each document is one row
    id_width, body_width = int(id_bytes[0]) * named, (int(body_bytes[0]) + 1) * even
    rows = np.empty((count, PREFIX_BYTES + id_width + _MIDDLE.size + body_width), np.uint8)
    rows[:, :PREFIX_BYTES] = _TEMPLATE
    heads = rows[:, :PREFIX_BYTES].view(PREFIX)[:, 0]
    heads["len"], heads["due"], heads["seq"] = lengths, due_ms, np.arange(first_seq, first_seq + count)
    heads["ttr"], heads["flags"], heads["idlen"] = ttr_ms, flags, id_bytes + 1
    at = PREFIX_BYTES + id_width
    if named:
        rows[:, PREFIX_BYTES:at] = ids if isinstance(ids, np.ndarray) else _matrix(ids, id_width)
    middles = rows[:, at : at + _MIDDLE.size]
    middles[:] = _TEMPLATE_MIDDLE
    middles.view(_MIDDLE_ROW)[:, 0]["len"] = body_bytes
    if even:
        rows[:, at + _MIDDLE.size : -1] = _matrix(bodies, body_width - 1)
        rows[:, -1] = 0
        data: memoryview | bytearray = rows.reshape(-1).data
    else:
        data = bytearray().join(_pieces(rows, None if named else ids, bodies))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    values(data, "<u4")[starts + AT_CRC] = checksums(memoryview(data), starts + CHECKED_FROM, ends)
    return data, lengths


def encode_notices(ids: Sequence[bytes], due_ms: Sequence[int], seqs: Sequence[int]) -> tuple[bytes, list[int]]:
    """Encode notices of cancelled sleepers back to back. `seqs`: of the messages. Returns the bytes and the length of each."""
    count = len(ids)
    return _encode_small(ids, [b""] * count, due_ms, seqs, 0, [NOTICE] * count, None)


def lengths_of(ids: Sequence[bytes] | U8, bodies: Sequence[bytes], extras: Sequence[bytes] | None) -> I64:
    """The length of each document that `encode` makes of these columns."""
    if kernel.compiled is not None and (raw := kernel.compiled.document_lengths(ids, bodies, extras)) is not None:
        known: I64 = np.frombuffer(raw, np.int64)
        _check_length(int(known.max()))
        return known
    count = len(bodies)
    lengths = np.fromiter(map(len, bodies), np.int64, count) + (PREFIX_BYTES + _MIDDLE.size + 1)
    lengths += ids.shape[1] if isinstance(ids, np.ndarray) else np.fromiter(map(len, ids), np.int64, count)
    if extras is not None:
        lengths += np.fromiter(map(len, extras), np.int64, count)
    _check_length(int(lengths.max()))
    return lengths


def _matrix(texts: Sequence[bytes], width: int) -> U8:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), width)


def _pieces(rows: U8, ids: Any, bodies: Sequence[bytes]) -> list[bytes]:
    """The pieces of all documents in order. Of each: the row before the body (with `ids`: split around the id), body, NUL."""
    columns: tuple[Sequence[bytes], ...] = (_cut(rows), bodies)
    if ids is not None:
        columns = (_cut(rows[:, :PREFIX_BYTES].copy()), ids, _cut(rows[:, PREFIX_BYTES:].copy()), bodies)
    pieces: list[bytes] = [b"\0"] * ((len(columns) + 1) * len(rows))
    for i, column in enumerate(columns):
        pieces[i :: len(columns) + 1] = column
    return pieces


def _check_length(longest: int) -> None:
    """Refuse a document that is too long: it could be written, but no scan would accept it."""
    if longest > DOCUMENT_BYTES_MAX:
        raise TooLarge(f"a message has at most {DOCUMENT_BYTES_MAX:,} bytes with all its fields, this one {longest:,}")


def _cut(matrix: U8) -> list[bytes]:
    data, width = matrix.tobytes(), matrix.shape[1]
    return [data[i : i + width] for i in range(0, len(data), width)]


def _encode_small(
    ids: Sequence[bytes] | U8,
    bodies: Sequence[bytes],
    due_ms: Sequence[int] | I64,
    seqs: Sequence[int],
    ttr_ms: Sequence[int] | int,
    flags: Sequence[int] | U32,
    extras: Sequence[bytes] | None,
) -> tuple[bytes, list[int]]:
    """`encode` for small batches and for documents with extras: a loop instead of arrays, which cost 30 µs for any count."""
    out: list[bytes] = []
    lengths: list[int] = []
    for i, (id_, body, due, seq, flag) in enumerate(zip(ids, bodies, due_ms, seqs, flags, strict=True)):
        ttr = ttr_ms if isinstance(ttr_ms, int) else ttr_ms[i]
        prefix = _TAIL.pack(_DUE, due, _SEQ, seq, _OPT, ttr, flag, _ID, len(id_) + 1)
        middle = _MIDDLE.pack(_END_OF_ID, len(body), 0)
        if extras is not None:
            middle = b"\0" + extras[i] + middle[1:]
        rest = b"".join((prefix, id_, middle, body, b"\0"))
        lengths.append(len(rest) + CHECKED_FROM)
        _check_length(lengths[-1])
        out += (_HEAD.pack(lengths[-1], _CRC, crc32(rest)), rest)
    return b"".join(out), lengths


# The optional elements between id and body in the order in which they are written, with their BSON types.
ELEMENTS = dict.fromkeys(("of", "was", "arrived", "order"), 18) | {row.element: row.kind.value for row in FIELDS} | {"meta": 0x03}
_TO_ELEMENT = {Kind.TIME: bson.datetime_ms.DatetimeMS, Kind.NUMBER: Int64, Kind.TEXTS: dict}
_ENDED, _ARRIVED, _ORDER = Struct("<4sq5sq"), Struct("<9sq"), Struct("<7sq")


def extra_elements(
    of: tuple[int, int] | None = None, arrived: int | None = None, order: int | None = None, meta: Any = None, **optional: Any
) -> bytes:
    """The elements between id and body, encoded. `optional`: the optional fields of the message by name.

    `of`: (seq, due time) of the document that this one ends. `arrived`: the seq of the first version of the message, if this is a
    later one. `order`: the seq that decides among equal due times, if compaction made this copy."""
    numbers = b"" if of is None else _ENDED.pack(b"\x12of\0", of[0], b"\x12was\0", of[1])
    if arrived is not None:
        numbers += _ARRIVED.pack(b"\x12arrived\0", arrived)
    if order is not None:
        numbers += _ORDER.pack(b"\x12order\0", order)
    fields: dict[str, Any] = {}
    for row in FIELDS if optional else ():
        if (value := optional.get(row.name)) is not None and value != {}:
            fields[row.element] = _TO_ELEMENT[row.kind](value)
    if meta:
        fields["meta"] = meta
    return numbers + bson.encode(fields)[4:-1] if fields else numbers


@dataclass(frozen=True, slots=True)
class Document(StoredFields):
    """A decoded document. 10 µs: not for hot paths."""

    length: int
    due_ms: int
    seq: int
    ttr_ms: int
    flags: int
    id: str
    of: tuple[int, int] | None
    arrived: int
    order: int
    meta: dict[str, Any]
    body: bytes

    @property
    def created_ms(self) -> int:
        """When the message first arrived: the wall-clock part of its first seq."""
        return self.arrived >> SEQ_COUNTER_BITS


_RAW: bson.CodecOptions[dict[str, Any]] = bson.CodecOptions(datetime_conversion=bson.codec_options.DatetimeConversion.DATETIME_MS)


def decode(raw: bytes | memoryview) -> Document:
    """Decode a document. Requires: its checksum was verified."""
    fields: dict[str, Any] = bson.decode(bytes(raw), codec_options=_RAW)
    opt = int(fields["opt"]) & 0xFFFFFFFFFFFFFFFF
    return Document(
        length=len(raw),
        due_ms=int(fields["due"]),
        seq=int(fields["seq"]),
        ttr_ms=opt & 0xFFFFFFFF,
        flags=opt >> 32,
        id=fields["id"],
        of=(int(fields["of"]), int(fields["was"])) if "of" in fields else None,
        arrived=int(fields.get("arrived", fields["seq"])),
        order=int(fields.get("order", fields["seq"])),
        meta=fields.get("meta", {}),
        body=bytes(fields.get("body", b"")),
        **{row.name: _FROM_ELEMENT[row.kind](fields[row.element]) for row in FIELDS if row.element in fields},
    )


def _plain(fields: dict[str, Any] | bson.DBRef) -> dict[str, Any]:
    """A subdocument as it was stored. PyMongo turns one with the names `$ref` and `$id` into a DBRef; this undoes that."""
    return dict(fields.as_doc()) if isinstance(fields, bson.DBRef) else fields


_FROM_ELEMENT: dict[Kind, Callable[[Any], Any]] = {Kind.TIME: int, Kind.NUMBER: int, Kind.TEXTS: _plain}


def lengths(buffer: Buffer, starts: I64) -> I64:
    """The length fields of the documents at `starts`, unchecked. 5 ns a document."""
    stated: I64 = values(buffer, "<i4")[starts].astype(np.int64)
    return stated


def prefixes(buffer: Buffer, starts: I64) -> np.ndarray[Any, np.dtype[Any]]:
    """Copies of the fixed prefixes of the documents at `starts`, as a structured array. 20 ns a document."""
    if not len(starts):
        return np.empty(0, dtype=PREFIX)
    return windows(buffer, PREFIX_BYTES)[starts].view(PREFIX)


def well_formed(heads: np.ndarray[Any, np.dtype[Any]]) -> Mask:
    """Which prefixes have the right field types and names, and an id that fits into the document."""
    odd = (heads.view("<u4").reshape(len(heads), len(PREFIX_WORDS)) ^ PREFIX_WORDS) & PREFIX_WORD_BITS
    fits: Mask = (heads["idlen"] >= 1) & (heads["idlen"] <= heads["len"] - PREFIX_BYTES - 1)
    return fits & ~odd.any(axis=1) if odd.any() else fits


def read_one(data: bytes, at: int, end: int) -> tuple[int, int, int, bytes] | None:
    """(due, seq, flags, bytes) of the document at `at`, which ends at or before `end`. None if it is not as written. 1 µs."""
    if end < at + DOCUMENT_BYTES_MIN:
        return None
    length, crc_, crc, due_, due, seq_, seq, opt_, _, flags, id_, id_bytes = _WHOLE.unpack_from(data, at)
    fits = DOCUMENT_BYTES_MIN <= length <= end - at and 1 <= id_bytes <= length - PREFIX_BYTES - 1
    named = (crc_, due_, seq_, opt_, id_) == (_CRC, _DUE, _SEQ, _OPT, _ID)
    good = fits and named and crc32(memoryview(data)[at + CHECKED_FROM : at + length]) == crc
    return (due, seq, flags, data[at : at + length]) if good else None


_ENDS = np.dtype([("of_name", "V4"), ("of", "<i8"), ("was_name", "V5"), ("was", "<i8")])  # the first elements behind the id


def ended_seqs(buffer: Buffer, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> tuple[I64, I64]:
    """Seqs and due times of the documents that these end. Requires: each has `of` and `was`, which directly follow the id. 0.05
    µs each."""
    at = starts + PREFIX_BYTES + heads["idlen"]
    rows = windows(buffer, _ENDS.itemsize)[at].view(_ENDS)
    return rows["of"].copy(), rows["was"].copy()


def checksums_match(buffer: memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> Mask:
    """Which documents have the bytes that were written. 0.2 µs a document."""
    sums = checksums(buffer, starts + CHECKED_FROM, starts + heads["len"])
    same: Mask = np.array(sums, dtype=np.uint32) == heads["crc"]
    return same


# Documents that are not hot are encoded by the bson library. Their last field is the checksum of the document without that field.
_LAST_CRC = b"\x12crc\0"
_LAST_BYTES = len(_LAST_CRC) + 8 + 1


def encode_checked(fields: dict[str, Any]) -> bytes:
    """A document with its checksum as the last field."""
    return bytes(bson.encode({**fields, "crc": Int64(crc32(bson.encode(fields)))}))


def decode_checked(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """The fields of a document by `encode_checked` at the start of `data`, and its length. Any other bytes: ValueError."""
    length = int.from_bytes(data[:4], "little", signed=True)
    at = length - _LAST_BYTES
    if at < 4 or length > len(data):
        raise ValueError("it is cut short")
    check = crc32((at + 1).to_bytes(4, "little") + bytes(data[4:at]) + b"\0")
    if data[at:length] != _LAST_CRC + check.to_bytes(8, "little") + b"\0":
        raise ValueError("its checksum does not match")
    fields: dict[str, Any] = bson.decode(bytes(data[:length]))
    del fields["crc"]
    return fields, length


# The header: the first document of a file identifies the file.
MAGIC = b"\x10turtlemq\0"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a segment, with the field names of the disk. A sealed segment was rewritten in due order; only its header
    has `documents` and `bytes`."""

    kind: str
    topic: str
    base: int
    generation: int = 0  # rises with each rewrite
    sealed: bool = False
    documents: int = 0
    bytes: int = 0  # behind the header
    killed_seq: int = 0  # ends up to this seq are applied to the segment; `ended_by` everywhere in the code


def encode_header(header: FileHeader) -> bytes:
    """The header as bytes. Their number does not depend on the values of numbers."""
    fields: dict[str, Any] = {
        "turtlemq": VERSION,
        "kind": header.kind,
        "topic": header.topic,
        "base": Int64(header.base),
        "generation": Int64(header.generation),
        "sealed": header.sealed,
        "documents": Int64(header.documents),
        "bytes": Int64(header.bytes),
        "killed_seq": Int64(header.killed_seq),
    }
    return encode_checked(fields)


def decode_header(data: bytes | memoryview, file: str) -> tuple[FileHeader, int]:
    """The header, and where documents begin. Raises NotOurs, NewerFormat or Corrupt, with `file` in the message."""
    if data[4 : 4 + len(MAGIC)] != MAGIC:
        raise NotOurs(f"{file}: {NotOurs.__doc__}")
    try:
        fields, length = decode_checked(data[:4096])
        version = fields["turtlemq"]
        if version < 1:
            raise ValueError("version")
        if version > VERSION:  # every version keeps the first field, the last one, and how they are checked
            raise NewerFormat(f"{file}: format {version}, this program reads up to {VERSION}. {NewerFormat.__doc__}")
        numbers = {name: int(fields[name]) for name in ("base", "generation", "documents", "bytes", "killed_seq")}
        return FileHeader(kind=fields["kind"], topic=fields["topic"], sealed=fields["sealed"], **numbers), length
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{file}: its header is damaged ({error}). Restore the file from a backup.") from error


def packed_keys(due_ms: I64, ordinals: U32 | I64) -> U64:
    """Keys due_ms << 22 | ordinal: numbers that sort by due time, then by arrival."""
    keys: U64 = (due_ms.astype(np.uint64) << np.uint64(ORDINAL_BITS)) | ordinals.astype(np.uint64)
    return keys


def key_ordinals(keys: U64) -> I64:
    """The ordinals in packed keys."""
    return (keys & np.uint64((1 << ORDINAL_BITS) - 1)).astype(np.int64)


def key_dues(keys: U64) -> I64:
    """The due times in packed keys."""
    return (keys >> np.uint64(ORDINAL_BITS)).astype(np.int64)
