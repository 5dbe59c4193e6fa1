"""Batches of the ready log: the HANDOFF document at the head of each, and reading batches back from a scan. Pure.

Offsets are dense, so a damaged document keeps its offset: between two heads there are as many documents as the difference of
their offsets, and those that the scan does not find get the position of the damage. Reading such a position reports the damage.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np
from bson.int64 import Int64

from turtlemq.broker.ready_tail import Rows, document_hashes, levels_of, restricted_documents
from turtlemq.model import I64, U8, U64, Mark, Progress
from turtlemq.segment import format as f
from turtlemq.segment.scan import Scan

KIND = "ready"  # of the log's files
_ID = b"handoff"  # the id of every head


@dataclass(slots=True)
class Batches:
    """The complete batches of a part of a ready segment, their documents as columns."""

    first_offset: int
    end: int  # position behind the last batch
    positions: I64
    ready_ms: I64
    hashes: U64  # of the ids
    restricted: I64  # rows that not every group sees
    owners: U64  # of these rows, see `Rows`
    levels: U8  # priorities
    progress: Progress | None  # in the last batch; None: there is no batch

    @property
    def rows(self) -> Rows:
        return Rows(self.positions, self.ready_ms, self.hashes, self.restricted, self.owners, self.levels)


def encode_head(offset: int, ready_ms: int, count: int, size: int, progress: Progress, synced: bool) -> bytes:
    """The HANDOFF document of a batch. `synced`: everything before it is durable."""
    marks = [[Int64(m.seq_max), Int64(m.due_ms), Int64(m.seq)] for m in progress.marks]
    body = bson.encode({"count": count, "bytes": size, "marks": marks})
    flags = f.HANDOFF | (f.BARRIER if synced else 0)
    return bytes(f.encode([_ID], [body], [ready_ms], offset, 0, [flags])[0])


def _decode_head(view: memoryview, scanned: Scan, i: int) -> tuple[int, int, Progress]:
    """Number and bytes of the documents of a batch, and the progress of the Index."""
    at = int(scanned.positions[i])
    fields: dict[str, Any] = bson.decode(f.decode(view[at : at + int(scanned.lengths[i])]).body)
    return int(fields["count"]), int(fields["bytes"]), Progress(tuple(Mark(*map(int, mark)) for mark in fields["marks"]))


def read_batches(
    view: memoryview, scanned: Scan, start: int, next_offset: int | None, upto: tuple[int, int] | None = None, *, seed: int = 0
) -> Batches:
    """The batches of a segment from byte `start` on, up to the first incomplete one; a batch that a later sync covers was
    complete once, and counts with its damage.

    `next_offset`: of the first document, if known. `upto`: position and offset behind the last document, if known. `seed`: of the
    hashes."""
    heads = _heads(scanned, start, next_offset, upto)
    synced = max((k for k, i in enumerate(heads) if scanned.flags[i] & f.BARRIER), default=0)
    nothing, none = np.empty(0, np.int64), np.empty(0, np.uint64)
    out = Batches(next_offset or 0, start, nothing, nothing, none, nothing, none, np.empty(0, np.uint8), None)
    positions, times = [out.positions], [out.ready_ms]
    if heads and next_offset is not None and scanned.seq[heads[0]] > next_offset:  # the head of the first batch is damaged
        total, stop = int(scanned.seq[heads[0]]) - next_offset, int(scanned.positions[heads[0]])
        positions.append(_positions(view, scanned, start, stop, total, headless=True))
        times.append(np.full(total, int(scanned.due_ms[heads[0]])))
    if not heads and next_offset is not None and upto is not None:  # every head is damaged
        total, out.end = max(upto[1] - next_offset, 0), upto[0]
        positions.append(_positions(view, scanned, start, upto[0], total, headless=True))
        times.append(np.zeros(total, np.int64))
    for k, i in enumerate(heads):
        count, size, progress = _decode_head(view, scanned, i)
        first = int(scanned.positions[i] + scanned.lengths[i])
        last = k + 1 == len(heads)
        stop = first + size if last else int(scanned.positions[heads[k + 1]])
        total = count if last else int(scanned.seq[heads[k + 1]] - scanned.seq[i])
        if last and upto is not None:
            stop, total = upto[0], max(upto[1] - int(scanned.seq[i]), 0)
        unproven = upto is None and k >= synced
        gap = unproven and stop != first + size  # the next batch is torn; this one is complete, and may be durable
        if gap:
            stop, total = first + size, count
        if unproven and len(_between(scanned, first, stop)) != count:
            break  # torn: the Index still has its messages
        if k == 0 and next_offset is None:
            out.first_offset = int(scanned.seq[i])
        positions.append(_positions(view, scanned, first, stop, total))
        times.append(np.full(total, int(scanned.due_ms[i])))
        out.end, out.progress = stop, progress
        if gap:
            break
    out.positions, out.ready_ms = np.concatenate(positions), np.concatenate(times)
    _describe(view, scanned, out, seed)
    return out


def _heads(scanned: Scan, start: int, next_offset: int | None, upto: tuple[int, int] | None) -> list[int]:
    """The HANDOFF documents among the scanned ones. None if bytes before the first were never synced: they are a torn batch, and
    the Index still has its messages and all later ones."""
    every = np.flatnonzero(scanned.flags & f.HANDOFF)
    heads = _in_order(every if next_offset is None else every[scanned.seq[every] >= next_offset], scanned.seq)
    proven = upto is not None or any(scanned.flags[i] & f.BARRIER for i in heads)
    return heads if proven or not heads or scanned.positions[heads[0]] <= start else []


def _in_order(heads: I64, seq: I64) -> list[int]:
    """The longest chain of heads whose offsets do not fall. A head with another offset stands where it does not belong, for
    example in a page that was exchanged with another. 1 µs each, and no work if all are in order."""
    offsets = seq[heads]
    if (np.diff(offsets) >= 0).all():
        return list(heads.tolist())
    lowest: list[int] = []  # by length of a chain: the lowest offset at which one ends,
    ends: list[int] = []  # and the head with that offset
    before: list[int] = []  # the head before each in its chain; -1: none
    for i, offset in enumerate(offsets.tolist()):
        k = bisect_right(lowest, offset)
        before.append(ends[k - 1] if k else -1)
        lowest[k : k + 1], ends[k : k + 1] = [offset], [i]
    chain, i = [], ends[-1]
    while i >= 0:
        chain.append(i)
        i = before[i]
    return list(heads[chain[::-1]].tolist())


def _between(scanned: Scan, first: int, stop: int) -> I64:
    """Positions of the scanned documents in [first, stop)."""
    low, high = np.searchsorted(scanned.positions, (first, stop)).tolist()
    inside: I64 = scanned.positions[low:high]
    return inside


def _positions(view: memoryview, scanned: Scan, first: int, stop: int, total: int, headless: bool = False) -> I64:
    """Positions for `total` documents in [first, stop): those scanned, and holes for the missing ones.

    If there are more holes than missing documents, some of the holes are damaged heads, told by the id that is left of them; with
    `headless` the first hole is one. If more documents were scanned than there were, the superfluous ones stand behind the first
    hole: a document before it, or far behind it, keeps its place."""
    inside = _between(scanned, first, stop)
    missing = total - len(inside)
    holes = [hole.position for hole in scanned.damaged if first <= hole.position < stop]
    if missing <= 0:
        at = int(np.searchsorted(inside, holes[0])) if holes else total
        return np.delete(inside, slice(at, at - missing))[:total]
    holes = holes or [max(stop - 1, 0)]
    if len(holes) > missing:
        heads = [at for at in holes if view[at + f.PREFIX_BYTES : at + f.PREFIX_BYTES + len(_ID)] == _ID] or holes[:headless]
        holes = [at for at in holes if at not in heads[: len(holes) - missing]]
    spread = (holes * missing)[:missing]
    return np.sort(np.append(inside, np.array(spread, np.int64)))


def _describe(view: memoryview, scanned: Scan, batches: Batches, seed: int) -> None:
    """Fill in the hashes of the ids, the restricted documents and the priorities. A damaged document has hash 0, counts as not
    restricted, and has normal priority."""
    good = _scanned_rows(scanned, batches.positions)
    batches.hashes = np.zeros(len(batches.positions), np.uint64)
    starts = batches.positions[good]
    prefixes = f.prefixes(view, starts)
    batches.hashes[good] = document_hashes(view, starts, prefixes, seed)
    restricted, batches.owners = restricted_documents(view, starts, prefixes, seed)
    batches.restricted = good[restricted]
    batches.levels = np.zeros(len(batches.positions), np.uint8)
    batches.levels[good] = levels_of(prefixes)


def _scanned_rows(scanned: Scan, positions: I64) -> I64:
    """Which of these positions are those of undamaged documents."""
    if not len(scanned):
        return np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(scanned.positions, positions), len(scanned) - 1)
    return np.flatnonzero(scanned.positions[at] == positions)
