"""Opening the ready log: take its tables, scan the documents that they do not cover, and cut behind the last whole batch.

`ready_readonly` reads and decides; this module writes. After a clean shutdown nothing is torn: `CleanEnd` holds the end of the
log, its number of documents and its progress, so bad bytes are damage then, also those of the last batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turtlemq.broker.ready_batches import KIND
from turtlemq.broker.ready_log import ReadyLog, Segment
from turtlemq.broker.ready_readonly import (
    FIRST_BYTES,
    CleanEnd,
    ReadSegment,
    check_clean_end,
    first_offset,
    read_segment,
)
from turtlemq.broker.ready_tail import Tail
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.readonly import data_start, open_segment, segment_bases
from turtlemq.storage import names


def clean_end(ready: ReadyLog) -> CleanEnd:
    """The end of an open log, for the clean-shutdown mark."""
    last = ready.segments[-1] if ready.segments else None
    base, end = (0, 0) if last is None else (last.base, last.size)
    return CleanEnd(base, end, ready.next_offset, ready.progress)


def open_ready(ready: ReadyLog, clean: CleanEnd | None) -> None:
    """Open all segments, cut behind the last whole batch, and take up or build the tables."""
    bases = _remove_leftovers(ready)
    if clean is not None:
        last_size = (bases[-1], _size(ready, bases[-1])) if bases else None
        clean, damage = check_clean_end(clean, last_size, data_start(KIND, ready.topic, clean.base))
        ready.damage += [] if damage is None else [damage]
        if clean is not None and damage is not None:
            # the log has lost its end: fill up with zeros, which are damage, so that each offset has a position again
            log.make_durable(ready.door, _path(ready, clean.base), _size(ready, clean.base), clean.end)
    ready.damage += log.missing_files(KIND, {base: _size(ready, base) for base in bases})
    for i, base in enumerate(bases):
        last = base == bases[-1]
        end = None if clean is None else clean.next_offset
        _open_segment(ready, base, end if last else _first_offset_of(ready, bases[i + 1]), last)
    while len(ready.segments) > 1 and ready.segments[-1].size == ready.segments[-1].data_start and clean is None:
        _drop_empty_last(ready)
    ready.durable_progress, ready.durable_offset = ready.progress, ready.next_offset
    if clean is not None and (ready.damage or ready.progress != clean.progress):
        # The head with the progress may be damaged: say it again. A BARRIER behind bad bytes, so that no crash makes them torn.
        ready.accept(b"", np.empty(0, np.int64), clean.progress, ready.tail.last_ready_ms)
        ready.durable_offset = -1  # the batch has no message, and is to be synced all the same
        ready.sync()


def _remove_leftovers(ready: ReadyLog) -> list[int]:
    """Remove unfinished files, tables without a segment, and empty last segments. Returns the bases of the segments in order."""
    door = ready.door
    files = {name: names.parse(name) for name in door.names(ready.folder)}
    bases = segment_bases(files.values(), KIND)
    for name, file in files.items():
        if file is not None and file.kind == KIND and (file.suffix or (file.what != "bson" and file.base not in bases)):
            door.remove(ready.folder / name)
    while bases and _size(ready, bases[-1]) <= data_start(KIND, ready.topic, bases[-1]):
        door.remove(_path(ready, bases.pop()))
    return bases


def _path(ready: ReadyLog, base: int) -> Path:
    return ready.folder / names.segment(KIND, base)


def _size(ready: ReadyLog, base: int) -> int:
    return ready.door.size(_path(ready, base))


def _first_offset_of(ready: ReadyLog, base: int) -> int | None:
    """The offset with which a segment begins; None if its first document and its first table are lost."""
    head = ready.door.read(_path(ready, base), data_start(KIND, ready.topic, base), FIRST_BYTES)

    def open_first() -> t.Table | None:
        try:
            return t.open_table(ready.door, ready.folder / names.table(KIND, base, 0))
        except t.Damaged:
            return None

    return first_offset(head, open_first)


def _drop_empty_last(ready: ReadyLog) -> None:
    """Remove a last segment without a whole batch, and open the one before as the last: it holds the progress."""
    ready.door.remove(ready.segments.pop().path)
    before = ready.segments.pop()
    ready.next_offset = before.first_offset
    _open_segment(ready, before.base, None, True)


def _open_segment(ready: ReadyLog, base: int, total: int | None, last: bool) -> None:
    """Add a segment to the log. `total`: the offset behind its last document, if known."""
    path = _path(ready, base)
    file = open_segment(ready.door, path, KIND, ready.topic, base, _size(ready, base), last=False)
    assert file is not None, "empty last segments are removed before"
    next_offset = ready.next_offset if ready.segments or not base else None  # the first segment of a topic begins with offset 0

    def open_run(number: int) -> t.Table | None:
        return _open_table(ready, ready.folder / names.table(KIND, base, number))

    read = read_segment(file, ready.door.map(path), open_run, next_offset=next_offset, total=total, last=last, seed=ready.seed)
    for table in read.unused:
        ready.door.remove(table.path)
    ready.damage += read.damage
    ready.next_offset = read.next_offset
    ready.progress = read.batches.progress or ready.progress
    segment = Segment(base, path, read.first_offset, file.size, file.data_start, read.tables, file.header is None)
    ready.segments.append(segment)
    if last:
        log.make_durable(ready.door, path, file.size, read.batches.end)  # from now on it is relied on
        segment.size = read.batches.end
        ready.tail = _tail(read, ready.tail.last_ready_ms, ready.seed)
    elif len(read.batches.positions):
        segment.tables.append(ready.write_table(read.cover(), read.batches.rows))


def _open_table(ready: ReadyLog, path: Path) -> t.Table | None:
    """The table in a file; None if there is none. A damaged one is removed, and one of an old version, without owners."""
    try:
        table = t.open_table(ready.door, path)
        if table is None or table.owners() is not None:
            return table
    except t.Damaged:
        pass
    ready.door.remove(path)
    return None


def _tail(read: ReadSegment, last_ready_ms: int, seed: int) -> Tail:
    """The documents behind the tables, in memory."""
    tail = Tail(read.position, 0, last_ready_ms, seed)
    tail.extend(read.batches.rows)
    tail.end = read.batches.end
    return tail
