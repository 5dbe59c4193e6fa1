"""Priorities, sizes and ready times of the documents of the ready log, from its tables and its tail alone: no document is read.

The next messages of one priority are found by a search over a column of one byte for each document, at 0.1 ns to 1 ns each.
The table of an older version has no such column: it is built again from its segment, once, when a search comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from turtlemq.broker.priorities import LEVELS
from turtlemq.broker.ready_log import ReadyLog, repairing, table_times
from turtlemq.model import I64, U8, Mask
from turtlemq.segment import table as t

_STEP_MIN, _STEP_MAX = 1_024, 65_536  # documents that are compared at once: few at first, as most searches end there
_NONE: I64 = np.empty(0, np.int64)


@repairing
def find_level(ready: ReadyLog, level: int, first: int, last: int, count: int) -> I64:
    """The first `count` offsets in [first, last) whose documents have this priority; fewer if there are no more."""
    found: list[I64] = []
    for at, levels in _columns(ready, level, first, last):
        rows = np.flatnonzero(levels == level)[:count]
        if len(rows):
            found.append(rows + at)
            count -= len(rows)
            if not count:
                break
    return found[0] if len(found) == 1 else np.concatenate(found) if found else _NONE


def _columns(ready: ReadyLog, level: int, first: int, last: int) -> Iterator[tuple[int, U8]]:
    """The priorities of [first, last) in pieces: the offset with which each begins, and the piece. Tables without any document of
    the wanted priority are left out."""
    step = _STEP_MIN
    for segment in ready.segments:
        begin = segment.first_offset
        for table in segment.tables:
            end = begin + table.cover.documents
            at, stop = max(first, begin), min(last, end)
            if at < stop and level not in _present(table):
                at = stop
            while at < stop:
                yield at, table.levels(at - begin, min(at + step, stop) - begin)
                at, step = at + step, min(8 * step, _STEP_MAX)
            begin = end
    begin = ready.next_offset - ready.tail.count
    at, stop = max(first, begin), min(last, ready.next_offset)
    while at < stop:
        yield at, ready.tail.levels_between(at - begin, min(at + step, stop) - begin)
        at, step = at + step, min(8 * step, _STEP_MAX)


def _present(table: t.Table) -> frozenset[int]:
    """The priorities that documents of a table have: 50 µs, once."""
    if table.levels_present is None:
        levels = table.levels(0, table.cover.documents)
        table.levels_present = frozenset(level for level in LEVELS if (levels == level).any())
    return table.levels_present


@repairing
def levels_at(ready: ReadyLog, offsets: I64) -> I64:
    """The priorities of the documents at these rising offsets."""
    parts: list[U8] = []
    for _, table, ordinals in ready.split(offsets):
        first, last = int(ordinals[0]), int(ordinals[-1]) + 1
        column = ready.tail.levels_between(first, last) if table is None else table.levels(first, last)
        parts.append(column[ordinals - first])
    return np.concatenate(parts).astype(np.int64) if parts else _NONE


@repairing
def sizes_at(ready: ReadyLog, offsets: I64) -> I64:
    """The bytes of the documents at these rising offsets, each with the bytes up to the next one, if any."""
    spans = [
        ready.tail.spans_of(ordinals) if table is None else table.spans_of(ordinals)
        for _, table, ordinals in ready.split(offsets)
    ]
    return np.concatenate([ends - starts for starts, ends in spans]) if spans else _NONE


@repairing
def ready_time(ready: ReadyLog, offset: int) -> int:
    """When the document at an offset became ready."""
    ((_, table, ordinals),) = ready.split(np.array([offset]))
    return int((ready.tail.ready_times(ordinals) if table is None else table_times(table, ordinals))[0])


def are_unpassed(ready: ReadyLog, offsets: I64, cursors: Sequence[int]) -> Mask:
    """Which of these rising offsets the cursors of a group, one for each priority, have not passed."""
    at = np.array(cursors, np.int64)
    unpassed: Mask = offsets >= at.max()
    unsure = np.flatnonzero(~unpassed & (offsets >= at.min()))
    if len(unsure):
        unpassed[unsure] = offsets[unsure] >= at[levels_at(ready, offsets[unsure])]
    return unpassed
