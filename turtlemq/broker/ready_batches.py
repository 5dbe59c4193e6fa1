"""Batches of the ready log: the HANDOFF document at the head of each, and reading batches back from a scan. Pure.

Offsets are dense, so a damaged document still has one: between two HANDOFF documents there are as many documents as their offsets
say, and those that the scan did not find are placed where the damage is. Reading them reports it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np
from bson.int64 import Int64

from turtlemq.broker.ready_tail import Rows, document_hashes, restricted_documents
from turtlemq.model import I64, U64, Mark, Progress
from turtlemq.segment import format as f
from turtlemq.segment.scan import Scan

KIND = "ready"  # of the log's files
_ID = b"handoff"  # of every head


@dataclass(slots=True)
class Batches:
    """The whole batches of a stretch of a ready segment."""

    first_offset: int
    end: int  # byte position behind the last
    positions: I64  # of the documents
    ready_ms: I64
    hashes: U64
    restricted: I64  # which of them not every group sees
    owners: U64
    progress: Progress | None  # of the last; None: there is no batch

    @property
    def rows(self) -> Rows:
        return Rows(self.positions, self.ready_ms, self.hashes, self.restricted, self.owners)


def encode_head(offset: int, ready_ms: int, count: int, size: int, progress: Progress, synced: bool) -> bytes:
    """The HANDOFF document of a batch. `synced`: everything before it was."""
    marks = [[Int64(m.seq_max), Int64(m.due_ms), Int64(m.seq)] for m in progress.marks]
    body = bson.encode({"count": count, "bytes": size, "marks": marks})
    flags = f.HANDOFF | (f.BARRIER if synced else 0)
    return bytes(f.encode([_ID], [body], [ready_ms], offset, 0, [flags])[0])


def _decode_head(view: memoryview, found: Scan, i: int) -> tuple[int, int, Progress]:
    at = int(found.positions[i])
    fields: dict[str, Any] = bson.decode(f.decode(view[at : at + int(found.lengths[i])]).body)
    return int(fields["count"]), int(fields["bytes"]), Progress(tuple(Mark(*map(int, mark)) for mark in fields["marks"]))


def read_batches(
    view: memoryview, found: Scan, start: int, next_offset: int | None, upto: tuple[int, int] | None = None
) -> Batches:
    """Batches from byte `start` on. The first one that is not whole ends it, unless a later sync proves it was whole once.

    `next_offset`: of the first document, where that is known. `upto`: where they end, as byte and offset, where that is."""
    every = np.flatnonzero(found.flags & f.HANDOFF)
    heads = _in_order(every if next_offset is None else every[found.seq[every] >= next_offset], found.seq)
    barriers = [k for k, i in enumerate(heads) if found.flags[i] & f.BARRIER]
    synced = max(barriers, default=0)
    if heads and not barriers and upto is None and found.positions[heads[0]] > start:
        heads = []  # what stood before the first one was never synced, and is torn: the Index still has it, and what followed
    nothing, none = np.empty(0, np.int64), np.empty(0, np.uint64)
    out = Batches(next_offset or 0, start, nothing, nothing, none, nothing, none, None)
    positions, times = [out.positions], [out.ready_ms]
    if heads and next_offset is not None and found.seq[heads[0]] > next_offset:  # the first head itself is damaged
        total, stop = int(found.seq[heads[0]]) - next_offset, int(found.positions[heads[0]])
        positions.append(_positions(view, found, _between(found, start, stop), total, start, stop, headless=True))
        times.append(np.full(total, int(found.due_ms[heads[0]])))
    if not heads and next_offset is not None and upto is not None:  # every head is damaged
        total, out.end = max(upto[1] - next_offset, 0), upto[0]
        positions.append(_positions(view, found, _between(found, start, upto[0]), total, start, upto[0], headless=True))
        times.append(np.zeros(total, np.int64))
    for k, i in enumerate(heads):
        count, size, progress = _decode_head(view, found, i)
        first = int(found.positions[i] + found.lengths[i])
        last = k + 1 == len(heads)
        stop = first + size if last else int(found.positions[heads[k + 1]])
        total = count if last else int(found.seq[heads[k + 1]] - found.seq[i])
        if last and upto is not None:
            stop, total = upto[0], max(upto[1] - int(found.seq[i]), 0)
        unproven = upto is None and k >= synced
        gap = unproven and stop != first + size  # what stood behind it is torn; it is not, and may be durable
        if gap:
            stop, total = first + size, count
        mine = _between(found, first, stop)
        if unproven and len(mine) != count:
            break  # torn: the Index still has these
        if k == 0 and next_offset is None:
            out.first_offset = int(found.seq[i])
        positions.append(_positions(view, found, mine, total, first, stop))
        times.append(np.full(total, int(found.due_ms[i])))
        out.end, out.progress = stop, progress
        if gap:
            break
    out.positions, out.ready_ms = np.concatenate(positions), np.concatenate(times)
    good = _good_rows(found, out.positions)
    out.hashes = np.zeros(len(out.positions), np.uint64)
    starts = out.positions[good]
    prefixes = f.prefixes(view, starts)
    out.hashes[good] = document_hashes(view, starts, prefixes)
    special, out.owners = restricted_documents(view, starts, prefixes)
    out.restricted = good[special]
    return out


def _in_order(heads: I64, seq: I64) -> list[int]:
    """The heads without those whose offset does not fit between the others': they stand where they do not belong, like pages that
    were exchanged. What is left is the longest chain that does not fall. 1 µs each, and nothing where all fit."""
    offsets = seq[heads]
    if (np.diff(offsets) >= 0).all():
        return list(heads.tolist())
    lowest: list[int] = []  # by length of a chain: the lowest offset at which one ends,
    ends: list[int] = []  # and which head that is
    before: list[int] = []  # the one before each in its chain; -1: none
    for i, offset in enumerate(offsets.tolist()):
        k = bisect_right(lowest, offset)
        before.append(ends[k - 1] if k else -1)
        lowest[k : k + 1], ends[k : k + 1] = [offset], [i]
    chain, i = [], ends[-1]
    while i >= 0:
        chain.append(i)
        i = before[i]
    return list(heads[chain[::-1]].tolist())


def _between(found: Scan, first: int, stop: int) -> I64:
    low, high = np.searchsorted(found.positions, (first, stop)).tolist()
    inside: I64 = found.positions[low:high]
    return inside


def _positions(view: memoryview, found: Scan, mine: I64, total: int, first: int, stop: int, headless: bool = False) -> I64:
    """Positions for `total` documents: those found, and where the damage is for the rest. Of more holes than that some are heads,
    by what is left of them; with `headless` the first is one in any case. Where more documents are found than there were, those
    that do not belong there stand behind a hole: what is before the first one and far behind keeps its place."""
    missing = total - len(mine)
    holes = [hole.position for hole in found.damaged if first <= hole.position < stop]
    if missing <= 0:
        at = int(np.searchsorted(mine, holes[0])) if holes else total
        return np.delete(mine, slice(at, at - missing))[:total]
    holes = holes or [max(stop - 1, 0)]
    if len(holes) > missing:
        heads = [at for at in holes if view[at + f.PREFIX_BYTES : at + f.PREFIX_BYTES + len(_ID)] == _ID] or holes[:headless]
        holes = [at for at in holes if at not in heads[: len(holes) - missing]]
    spread = (holes * missing)[:missing]
    return np.sort(np.append(mine, np.array(spread, np.int64)))


def _good_rows(found: Scan, positions: I64) -> I64:
    """Which of these positions are those of good documents."""
    if not len(found):
        return np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(found.positions, positions), len(found) - 1)
    return np.flatnonzero(found.positions[at] == positions)
