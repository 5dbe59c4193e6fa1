"""The scan: bytes in, documents out, with a verdict on everything that is not a document. Pure; recovery, `check`, `inspect`
and Spark all use it.

Rules:
- A document counts when its length fits, its field names stand where they must, and its checksum matches.
- Documents are found by walking lengths, never by searching: a body may hold documents. Only after a broken length is a next
  start searched, and taken only if walking on from there reaches the end of the file.
- *Torn*: bad bytes in what was written since the last sync, as after a power cut. Cut, back to the last whole batch.
- *Damaged*: bad bytes with a BARRIER document behind them, so they had been synced once. Reported, the rest is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct

import numpy as np

from turtlemq.model import I64, U32, Mask
from turtlemq.segment import format as f

_LENGTH = Struct("<i").unpack_from
_CHUNK = 1 << 16  # documents decoded at once: 4 MB of prefixes


class Verdict(StrEnum):
    """The worst that a scan met."""

    END = "end"
    TORN = "torn"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes that are no document."""

    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Columns of all good documents in file order, and what else is there."""

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


def scan(buffer: bytes | memoryview, start: int, size: int, *, sealed: bool = False) -> Scan:
    """All documents of `buffer[start:size]`. `sealed`: a whole file that was renamed into place, so nothing in it can be torn.

    0.5 µs a document, nearly all of it checksums and the walk."""
    view = memoryview(buffer)[:size]
    positions, holes = _structure(view, start, size)
    columns = [_columns(view, part) for part in _chunks(positions)]
    pos, length, due, seq, ttr, flags, idlen, good = (np.concatenate(c) for c in zip(*columns, strict=True))
    for i in np.flatnonzero(~good).tolist():
        holes.append(Hole(int(pos[i]), int(length[i]), "checksum does not match"))
    holes.sort(key=lambda hole: hole.position)
    end, kept = (size, good) if sealed else _cut(size, start, holes, pos, length, flags, good)
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


def _cut(size: int, start: int, holes: list[Hole], pos: I64, length: I64, flags: U32, good: Mask) -> tuple[int, Mask]:
    """Where an unsealed file ends, and which documents stand before that."""
    barriers = pos[good & ((flags & f.BARRIER) != 0)]
    synced = int(barriers[-1]) if len(barriers) else start
    end = min((hole.position for hole in holes if hole.position >= synced), default=size)
    kept = good & (pos < end)
    tail = np.flatnonzero(kept & (pos >= synced))
    whole = tail[(flags[tail] & f.CONTINUES) == 0]
    if len(whole):
        end = min(end, int(pos[whole[-1]] + length[whole[-1]]))
    elif len(tail):
        end = synced
    return end, kept & (pos < end)


def _chunks(positions: I64) -> Iterator[I64]:
    for i in range(0, max(len(positions), 1), _CHUNK):
        yield positions[i : i + _CHUNK]


def _columns(view: memoryview, pos: I64) -> tuple[I64, I64, I64, I64, U32, U32, I64, Mask]:
    heads = f.prefixes(view, pos)
    good = f.checksums_match(view, pos, heads)
    return (
        pos,
        heads["len"].astype(np.int64),
        heads["due"].copy(),
        heads["seq"].copy(),
        heads["ttr"].copy(),
        heads["flags"].copy(),
        heads["idlen"].astype(np.int64),
        good,
    )


def _structure(view: memoryview, start: int, size: int) -> tuple[I64, list[Hole]]:
    """Positions of everything shaped like a document, and the stretches that are not."""
    found: list[I64] = []
    holes: list[Hole] = []
    while start < size:
        positions, stop = _walk(view, start, size)
        found.append(positions)
        if stop == size:
            break
        start = _resync(view, stop, size)
        holes.append(Hole(stop, start - stop, _why(view, stop, size)))
    return (np.concatenate(found) if found else np.empty(0, np.int64)), holes


def _walk(view: memoryview, start: int, size: int) -> tuple[I64, int]:
    """Follow lengths from `start`; stop at the first thing that is not shaped like a document."""
    parts: list[I64] = []
    pos = start
    while pos < size:
        positions: list[int] = []
        while len(positions) < _CHUNK and pos + f.DOCUMENT_BYTES_MIN <= size:
            length = _LENGTH(view, pos)[0]
            if not f.DOCUMENT_BYTES_MIN <= length <= f.DOCUMENT_BYTES_MAX or pos + length > size:
                break
            positions.append(pos)
            pos += length
        part = np.array(positions, dtype=np.int64)
        shaped = _shaped(view, part)
        parts.append(part[:shaped])
        if shaped < len(part):
            return np.concatenate(parts), int(part[shaped])
        if len(part) < _CHUNK:
            break
    return np.concatenate(parts), pos


def _shaped(view: memoryview, positions: I64) -> int:
    """How many documents from the first on are well formed."""
    if not len(positions):
        return 0
    heads = f.prefixes(view, positions)
    ends = positions + heads["len"] - 1
    ok = f.well_formed(heads) & (np.frombuffer(view, np.uint8)[ends] == 0)
    return len(ok) if ok.all() else int(np.argmin(ok))


def _resync(view: memoryview, broken: int, size: int) -> int:
    """The first document behind `broken` from which lengths lead to the end of the file (or to a torn last document)."""
    data = bytes(view[broken:size])
    at = data.find(f.MARK, 5)
    while at >= 0:
        candidate = broken + at - 4
        _, stop = _walk(view, candidate, size)
        if stop == size or (stop > candidate and _torn(view, stop, size)):
            return candidate
        at = data.find(f.MARK, at + 1)
    return size


def _torn(view: memoryview, pos: int, size: int) -> bool:
    """Is `view[pos:size]` the beginning of a document whose end was never written?"""
    rest = size - pos
    if rest < 4:
        return True
    length = _LENGTH(view, pos)[0]
    named = bytes(view[pos + 4 : pos + 4 + len(f.MARK)])
    return f.DOCUMENT_BYTES_MIN <= length <= f.DOCUMENT_BYTES_MAX and length > rest and f.MARK.startswith(named)


def _why(view: memoryview, pos: int, size: int) -> str:
    if size - pos < f.DOCUMENT_BYTES_MIN:
        return "the file ends inside a document"
    length = _LENGTH(view, pos)[0]
    if not f.DOCUMENT_BYTES_MIN <= length <= f.DOCUMENT_BYTES_MAX:
        return f"{length} is no document's length"
    return "the file ends inside a document" if pos + length > size else "the field names of a document are damaged"
