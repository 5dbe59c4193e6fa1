"""The scan: find all documents in the bytes of a segment, and classify everything else as torn or damaged. Pure.

Used by recovery, `check`, `inspect` and Spark. Rules:
- A document counts if its length fits, its field types and names are right, and its checksum matches.
- Documents are found by following lengths, not by searching, for a body may contain documents. A broken document has its end
  twice: in its length, and in its id and body. If neither can be trusted, the next document is searched for, past whole bodies.
- *Torn*: bad bytes written since the last sync, as after a power cut. They are cut off, back to the last whole batch.
- *Damaged*: bad bytes with a BARRIER document behind them, so they were synced once. They are reported; everything else is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from turtlemq import small_batches
from turtlemq.model import I64, U32, Mask
from turtlemq.segment import format as f

_LENGTH = Struct("<i").unpack_from
_CHUNK = 1 << 16  # documents decoded at once: 4 MB of prefixes
_CHUNK_MIN = 64  # documents decoded at once after a hole: more would be wasted if another hole follows
_SIGHT = re.compile(re.escape(f.MARK) + b"|" + re.escape(f.BODY))  # bytes that every document has
_SEQ_ANY = -1


class Verdict(StrEnum):
    """The worst finding of a scan."""

    END = "end"
    TORN = "torn"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of bytes that is not a document."""

    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Columns of all intact documents in file order, and the holes between them."""

    positions: I64
    lengths: I64
    due_ms: I64
    seq: I64
    ttr_ms: U32
    flags: U32
    id_bytes: I64
    end: int  # behind the last whole batch: an unsealed file is cut here
    size: int
    damaged: tuple[Hole, ...]  # holes before `end`

    @property
    def verdict(self) -> Verdict:
        if self.damaged:
            return Verdict.CORRUPT
        return Verdict.END if self.end == self.size else Verdict.TORN

    def __len__(self) -> int:
        return len(self.positions)


def scan(
    buffer: bytes | memoryview,
    start: int,
    size: int,
    *,
    sealed: bool = False,
    rising: bool | None = None,
    hint: I64 | None = None,
    after: int = -1,
) -> Scan:
    """Scan `buffer[start:size]`.

    `sealed`: the file was complete when it got its name, so nothing in it can be torn. `rising`: seqs rise through the file,
    which helps to recognize false documents; the default is `not sealed`. Then a seq that repeats, or is not above `after` (the
    last seq before `start`), marks a copy from a misplaced write: damage. `hint`: probable starts of documents; lengths are still
    checked, at a tenth of the cost.

    0.5 µs a document, nearly all of it checksums and following lengths. A hole whose end must be searched costs up to 0.1 s."""
    view = memoryview(buffer)[:size]
    rising = not sealed if rising is None else rising
    parts, holes, barrier = _read(view, start, size, rising, hint)
    pos, length, due, seq, ttr, flags, idlen = (np.concatenate(column) for column in zip(*parts, strict=True))
    if rising and len(copies := _copies(seq, after)):
        reason = "a copy of a document that stands before it"
        holes += [Hole(at, size_, reason) for at, size_ in zip(pos[copies].tolist(), length[copies].tolist(), strict=True)]
        holes.sort(key=lambda hole: hole.position)
        pos, length, due, seq, ttr, flags, idlen = (np.delete(c, copies) for c in (pos, length, due, seq, ttr, flags, idlen))
    end = size if sealed else _cut(size, max(start, barrier), holes, pos, length, flags)
    kept: Any = pos < end
    if kept.all():
        kept = slice(None)  # the usual case, without copying columns
    return Scan(
        positions=pos[kept],
        lengths=length[kept],
        due_ms=due[kept],
        seq=seq[kept],
        ttr_ms=ttr[kept],
        flags=flags[kept],
        id_bytes=idlen[kept] - 1,
        end=end,
        size=size,
        damaged=tuple(hole for hole in holes if hole.position < end),
    )


def _copies(seq: I64, after: int) -> I64:
    """Indexes of seqs that repeat an earlier one, or are not above `after`."""
    if not len(seq) or (seq[0] > after and (seq[1:] > seq[:-1]).all()):
        return np.empty(0, np.int64)
    first = np.zeros(len(seq), np.bool_)
    first[np.unique(seq, return_index=True)[1]] = True
    return np.flatnonzero(~first | (seq <= after))


def _cut(size: int, start: int, holes: list[Hole], pos: I64, length: I64, flags: U32) -> int:
    """Where an unsealed file must be cut: behind the last whole batch. Bytes before `start` are known to be synced."""
    barriers = pos[(flags & f.BARRIER) != 0]
    synced = max(int(barriers[-1]), start) if len(barriers) else start
    end = min((hole.position for hole in holes if hole.position >= synced), default=size)
    tail = np.flatnonzero((pos >= synced) & (pos < end))
    whole = tail[(flags[tail] & f.CONTINUES) == 0]
    if len(whole):
        return min(end, int(pos[whole[-1]] + length[whole[-1]]))
    return synced if len(tail) else end


# Following lengths


def _read(
    view: memoryview, start: int, size: int, rising: bool, hint: I64 | None
) -> tuple[list[tuple[Any, ...]], list[Hole], int]:
    """Columns of the intact documents, chunk by chunk, the holes between them, and the position of the last broken document that
    still shows the BARRIER flag where one may be."""
    parts, holes = [_columns(np.empty(0, np.int64), np.empty(0, f.PREFIX))], []
    last_seq, chunk, barrier = _SEQ_ANY, _CHUNK, 0
    while start < size:
        positions, stop = _follow(view, start, size, chunk, hint) or _walk(view, start, size, chunk)
        heads, good = _check_documents(view, positions)
        broken = positions[~good].tolist()
        if stop < size and len(positions) < chunk:
            broken.append(stop)
        start, chunk = stop, min(chunk * 4, _CHUNK)
        for at in broken:
            i = int(np.searchsorted(positions, at))
            known = heads["seq"][:i][good[:i]]
            floor = int(known[-1]) if len(known) else last_seq
            end, reason = _end_of_broken(view, at, size, floor if rising else _SEQ_ANY)
            holes.append(Hole(at, end - at, reason))
            barrier = at if 0 < i < len(positions) and good[i - 1] and _begins_a_sync(heads[i - 1 : i + 1]) else barrier
            if i == len(positions) or end != at + int(heads["len"][i]):  # later positions followed a wrong length
                good[i:] = False
                start, chunk = end, _CHUNK_MIN
                break
        parts.append(_columns(positions[good], heads[good]))
        last_seq = int(parts[-1][3][-1]) if good.any() else last_seq
    return parts, holes, barrier


def _begins_a_sync(heads: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Given two adjacent documents: does the first end a batch, and do the names and flags of the second, broken one say BARRIER?
    Then a hole before it is damage, even if the barrier itself is torn: zeros or old bytes would not look like this."""
    ends, begins = heads["flags"].tolist()
    return not ends & f.CONTINUES and bool(begins & f.BARRIER) and bool(f.well_formed(heads)[1])


def _follow(view: memoryview, pos: int, size: int, count: int, hint: I64 | None) -> tuple[I64, int] | None:
    """Check the positions of a hint against the lengths, as arrays: 0.05 µs a document instead of 0.4. None if they disagree."""
    if hint is None:
        return None
    first = int(np.searchsorted(hint, pos))
    positions = hint[first : first + count]
    if len(positions) < 2 or positions[0] != pos or int(positions[-1]) + f.DOCUMENT_BYTES_MIN > size:
        return None
    lengths = f.lengths(view, positions)
    ends = positions + lengths
    fitting = (lengths >= f.DOCUMENT_BYTES_MIN) & (lengths <= f.DOCUMENT_BYTES_MAX) & (ends <= size)
    whole = len(positions) == count or int(ends[-1]) == size
    if not whole or not fitting.all() or (ends[:-1] != positions[1:]).any():
        return None
    return positions, int(ends[-1])


def _walk(view: memoryview, pos: int, size: int, count: int) -> tuple[I64, int]:
    """Follow up to `count` lengths from `pos`. Returns the positions on the way, and the one behind the last."""
    even, pos = _walk_evenly(view, pos, size, count)
    positions: list[int] = []
    # Half of the time of a restart is spent in this loop.
    add, unpack, least, most = positions.append, _LENGTH, f.DOCUMENT_BYTES_MIN, f.DOCUMENT_BYTES_MAX
    for _ in range(count - len(even)):
        if pos + least > size:
            break
        (length,) = unpack(view, pos)
        if length < least or length > most or pos + length > size:
            break
        add(pos)
        pos += length
    return np.concatenate((even, np.array(positions, dtype=np.int64))), pos


def _walk_evenly(view: memoryview, pos: int, size: int, count: int) -> tuple[I64, int]:
    """Follow lengths as long as all are equal: 0.01 µs a document. Gives up at once if the next few are not."""
    length = _LENGTH(view, pos)[0] if size - pos >= f.DOCUMENT_BYTES_MIN and count > small_batches.EVEN_WALK else 0
    if f.DOCUMENT_BYTES_MIN <= length <= f.DOCUMENT_BYTES_MAX:
        lengths = np.ndarray((min(count, (size - pos) // length),), "<i4", view, pos, (length,))
        if (lengths[: small_batches.EVEN_WALK] == length).all():
            other = np.flatnonzero(lengths != length)
            even = int(other[0]) if len(other) else len(lengths)
            return np.arange(pos, pos + even * length, length), pos + even * length
    return np.empty(0, np.int64), pos


def _check_documents(view: memoryview, positions: I64) -> tuple[np.ndarray[Any, np.dtype[Any]], Mask]:
    """The prefixes at these positions, and which of them belong to intact documents."""
    heads = f.prefixes(view, positions)
    good = f.well_formed(heads)
    good[good] = f.checksums_match(view, positions[good], heads[good])
    return heads, good


def _columns(pos: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> tuple[I64, I64, I64, I64, U32, U32, I64]:
    lengths, ids = heads["len"].astype(np.int64), heads["idlen"].astype(np.int64)
    return pos, lengths, heads["due"].copy(), heads["seq"].copy(), heads["ttr"].copy(), heads["flags"].copy(), ids


# Broken documents


def _end_of_broken(view: memoryview, pos: int, size: int, floor: int) -> tuple[int, str]:
    """The probable end of the broken document at `pos`, and the reason why it is broken.

    Trusted are: an end from id and body that the checksum confirms; a length that id and body confirm, or that leads to an intact
    document or to the end of the file. If all point behind the end of the file, the end of the document was never written."""
    if size - pos < f.DOCUMENT_BYTES_MIN:
        return size, "the file ends inside a document"
    length, inner = _LENGTH(view, pos)[0], _inner_end(view, pos, size)
    plausible = f.DOCUMENT_BYTES_MIN <= length <= f.DOCUMENT_BYTES_MAX
    reason = "checksum does not match" if plausible else f"{length} is no document's length"
    if inner is not None and inner <= size and _checksum_matches(view, pos, inner):
        return inner, "the first bytes of a document are damaged"
    claimed = pos + length
    if plausible and claimed <= size and (claimed in (inner, size) or _document_at(view, claimed, size) is not None):
        return claimed, reason
    named = bool(f.well_formed(f.prefixes(view, np.array([pos])))[0])
    if plausible and named and claimed > size and inner is not None and inner > size:
        return size, "the file ends inside a document"
    return _search_document(view, pos, size, floor), reason


def _inner_end(view: memoryview, pos: int, size: int) -> int | None:
    """Where a document ends by its id, optional elements and body, perhaps behind `size`. None if they make no sense."""
    id_bytes: int = _LENGTH(view, pos + f.AT_IDLEN)[0]
    if not 1 <= id_bytes <= f.STORED_ID_BYTES_MAX + 1:
        return None
    at = pos + f.PREFIX_BYTES + id_bytes
    while at + f.BODY_HEAD_BYTES <= size:
        name_bytes = bytes(view[at + 1 : at + 1 + f.NAME_BYTES_MAX]).find(0)
        kind, at = view[at], at + 2 + name_bytes
        if name_bytes < 1 or kind not in f.VARIABLE_TYPES:
            return None
        if at + 4 > size:
            break
        length: int = 8 if kind in f.EIGHT_BYTES else _LENGTH(view, at)[0]
        if length < 0:
            return None
        if kind == f.BODY[0]:
            return at + 4 + 1 + length + 1
        at += max(length, 5)
    return size + 1 if at - pos <= f.DOCUMENT_BYTES_MAX else None


def _document_at(view: memoryview, pos: int, size: int) -> tuple[int, int] | None:
    """Length and seq of the document at `pos`. None if there is no intact one."""
    positions, _ = _walk(view, pos, size, 1)
    heads, good = _check_documents(view, positions)
    return (int(heads["len"][0]), int(heads["seq"][0])) if good.any() else None


def _search_document(view: memoryview, pos: int, size: int, floor: int) -> int:
    """The next position behind `pos` where a document certainly begins, or `size`.

    A body on the way is skipped as a whole if a document may begin behind it, for it may contain false documents. A document
    whose seq is not above `floor` is a false one."""
    at = pos + 1
    while (sight := _SIGHT.search(view, at, size)) is not None:
        at = sight.start()
        if view[at] == f.BODY[0]:
            length = _LENGTH(view, at + len(f.BODY))[0] if at + f.BODY_HEAD_BYTES <= size else -1
            behind = at + f.BODY_HEAD_BYTES + length + 1
            if length >= 0 and behind == size:
                return size
            at = behind if length >= 0 and view[behind + 4 : behind + 4 + len(f.MARK)] == f.MARK else at + 1
        elif at - 4 > pos and (document := _document_at(view, at - 4, size)) is not None:
            candidate, (length, seq) = at - 4, document
            at = _end_of_surrounding(view, candidate, size) if seq > floor else candidate + length
            if at == candidate:
                return candidate
        else:
            at += 1
    return size


def _end_of_surrounding(view: memoryview, pos: int, size: int) -> int:
    """The end of the document whose body contains the documents from `pos` on, or `pos` if they are in no body.

    Documents that fill a body are followed by the NUL that ends the surrounding document, and then by the next one or the end."""
    end = pos
    while end < size and end - pos <= f.DOCUMENT_BYTES_MAX:
        positions, stop = _walk(view, end, size, _CHUNK_MIN if end == pos else _CHUNK)
        _, good = _check_documents(view, positions)
        end = stop if good.all() else int(positions[np.argmin(good)])
        if not good.all() or not len(good):
            break
    filled = end < size and view[end] == 0 and (end + 1 == size or _document_at(view, end + 1, size) is not None)
    return end + 1 if filled else pos


def _checksum_matches(buffer: memoryview, start: int, end: int) -> bool:
    """Do these bytes have the checksum of one document? Its length field is ignored."""
    expected = int.from_bytes(buffer[start + f.AT_CRC : start + f.CHECKED_FROM], "little")
    return bool(crc32(buffer[start + f.CHECKED_FROM : end]) == expected)
