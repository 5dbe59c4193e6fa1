"""Opening the ready log: take up its tables, scan what they do not cover, and cut what is behind the last whole batch.

After a proper stop nothing is torn: `Clean` says where the log ended, how many documents it had and what was handed off, so bad
bytes are damage then, also those of the last batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.broker.ready_batches import Batches, read_batches
from turtlemq.broker.ready_log import KIND, ReadyLog, Segment
from turtlemq.broker.ready_tail import Tail
from turtlemq.model import Damage, Mark, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.scan import Scan, scan
from turtlemq.storage import names


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """Where the ready log ended at a proper stop."""

    base: int
    end: int
    next_offset: int
    progress: Progress

    @staticmethod
    def read(fields: dict[str, Any]) -> CleanEnd:
        """What `of` wrote."""
        base, end, offset = (int(number) for number in fields["at"])
        return CleanEnd(base, end, offset, Progress(tuple(Mark(*map(int, mark)) for mark in fields["marks"])))

    @staticmethod
    def of(ready: ReadyLog) -> dict[str, Any]:
        """What the clean-shutdown mark says of the ready log."""
        last = ready.segments[-1] if ready.segments else None
        at = (0, 0, ready.next_offset) if last is None else (last.base, last.size, ready.next_offset)
        marks = [[Int64(m.seq_max), Int64(m.due_ms), Int64(m.seq)] for m in ready.progress.marks]
        return {"at": [Int64(number) for number in at], "marks": marks}


def open_ready(ready: ReadyLog, clean: CleanEnd | None) -> None:
    """Find the last whole batch, cut what is behind it, and take up or make the tables."""
    bases = _remove_leftovers(ready)
    if clean is not None and ((bases[-1], _size(ready, bases[-1])) if bases else (0, 0)) != (clean.base, clean.end):
        if clean.end > _header_bytes(ready, clean.base):  # a file with nothing in it is tidied away
            reason = "the log ended here at the last proper stop, and does no longer"
            ready.damage.append(Damage(names.segment(KIND, clean.base), clean.end, 0, reason))
        if not bases or bases[-1] != clean.base or _size(ready, clean.base) > clean.end:  # else the rest of its last batch counts
            clean = None
        else:
            _pad(ready, clean)
    for i, base in enumerate(bases):
        last = base == bases[-1]
        _open_segment(ready, base, _first_offset_of(ready, bases[i + 1]) if not last else None, clean if last else None, last)
    while len(ready.segments) > 1 and not ready.segments[-1].tables and not ready.tail.count and clean is None:
        _drop_empty_last(ready)
    ready.durable_progress, ready.durable_offset = ready.progress, ready.next_offset
    if clean is not None and ready.progress != clean.progress:  # the head that said so is damaged: say it again
        ready.durable_offset = -1  # it has no message, and is to be synced all the same
        ready.accept(b"", np.empty(0, np.int64), clean.progress, ready.tail.last_ready_ms)
        ready.sync()


def _pad(ready: ReadyLog, clean: CleanEnd) -> None:
    """What was cut off is damage like any other: everything has its place again, and what is left is whole to its last byte."""
    path = _path(ready, clean.base)
    fd = ready.door.open_write(path)
    try:
        ready.door.truncate(fd, path, clean.end)
        ready.door.sync(fd, path)
    finally:
        ready.door.close(fd)


def _remove_leftovers(ready: ReadyLog) -> list[int]:
    """Remove unfinished work, tables without a segment, and last files with nothing in them. Returns the segments' bases."""
    door = ready.door
    files = {name: names.parse(name) for name in door.names(ready.folder)}
    mine = {name: file for name, file in files.items() if file is not None and file.kind == KIND}
    bases = sorted(file.base for file in mine.values() if file.what == "bson" and not file.suffix)
    for name, file in mine.items():
        if file.suffix or (file.what != "bson" and file.base not in bases):
            door.remove(ready.folder / name)
    while bases and _size(ready, bases[-1]) <= _header_bytes(ready, bases[-1]):
        door.remove(_path(ready, bases.pop()))
    return bases


def _path(ready: ReadyLog, base: int) -> Path:
    return ready.folder / names.segment(KIND, base)


def _size(ready: ReadyLog, base: int) -> int:
    return ready.door.size(_path(ready, base))


def _header_bytes(ready: ReadyLog, base: int) -> int:
    return len(f.encode_header(f.FileHeader(KIND, ready.topic, base)))


def _first_offset_of(ready: ReadyLog, base: int) -> int | None:
    """With which offset a segment begins, as far as its first document or its first table tells."""
    path, start = _path(ready, base), _header_bytes(ready, base)
    head = ready.door.read(path, start, 4096)
    found = scan(head, 0, len(head), sealed=True)
    if len(found) and found.positions[0] == 0 and found.flags[0] & f.HANDOFF:
        return int(found.seq[0])
    try:
        table = t.open_table(ready.door, ready.folder / names.table(KIND, base, 0))
    except t.Damaged:
        table = None
    return None if table is None else table.cover.first_seq


def _drop_empty_last(ready: ReadyLog) -> None:
    """The last segment holds no whole batch: what was handed off last stands in the one before."""
    ready.door.remove(ready.segments.pop().path)
    before = ready.segments.pop()
    ready.next_offset = before.first_offset
    _open_segment(ready, before.base, None, None, True)


def _open_segment(ready: ReadyLog, base: int, following: int | None, clean: CleanEnd | None, last: bool) -> None:
    """`following`: the offset with which the next segment begins, where that is known."""
    segment = _read_header(ready, base)
    position = _open_tables(ready, segment)
    expected = ready.next_offset if ready.segments or not base else None  # the first file ever begins with offset 0
    if segment.tables:
        expected = segment.tables[0].cover.first_seq + segment.tabled
    total = clean.next_offset if clean is not None else following
    upto = None if total is None else (segment.size, total)
    found, batches = _scan(ready, segment, position, expected, upto)
    known = position  # tables speak only of what was synced
    while last and not len(batches.positions) and segment.tables:  # what was handed off last stands in the last table
        gone = segment.tables.pop()
        ready.door.remove(gone.path)
        position = gone.cover.start
        found, batches = _scan(ready, segment, position, gone.cover.first_seq, upto)
    if last and batches.end < known:
        ready.damage.append(
            Damage(segment.path.name, batches.end, known - batches.end, "no document is left of what a table knew")
        )
    segment.first_offset = segment.tables[0].cover.first_seq if segment.tables else batches.first_offset
    offset = segment.first_offset + segment.tabled
    ready.next_offset = offset + len(batches.positions)
    ready.progress = batches.progress or ready.progress
    ready.damage += [d for d in log.damage_of(segment.path, found) if d.position < batches.end]
    ready.segments.append(segment)
    if last:
        _cut(ready, segment, batches.end)
        ready.tail = Tail(position, 0, ready.tail.last_ready_ms)
        ready.tail.extend(batches.rows)
        ready.tail.end = batches.end
    elif len(batches.positions):
        count = len(batches.positions)
        cover = t.Cover(base, 0, segment.tabled, count, position, batches.end, offset, offset + count - 1, 0)
        segment.tables.append(ready.write_table(cover, batches.rows))


def _read_header(ready: ReadyLog, base: int) -> Segment:
    """Documents begin at the same place in any case, also where the header is damaged; nothing more is written to such a file."""
    path, size = _path(ready, base), _size(ready, base)
    header, start = log.try_header(ready.door, path, KIND, ready.topic, base)
    if header is None:
        ready.damage.append(Damage(path.name, 0, start, "its header is damaged"))
    return Segment(base, path, ready.next_offset, size, start, header_damaged=header is None)


def _scan(
    ready: ReadyLog, segment: Segment, position: int, expected: int | None, upto: tuple[int, int] | None
) -> tuple[Scan, Batches]:
    view = ready.door.map(segment.path)
    found = scan(view, position, segment.size, sealed=True)
    return found, read_batches(view, found, position, expected, upto)


def _open_tables(ready: ReadyLog, segment: Segment) -> int:
    """Tables that follow each other from the first document on. Returns the byte position behind them."""
    position = segment.data_start
    while True:
        path = ready.folder / names.table(KIND, segment.base, segment.tabled)
        try:
            table = t.open_table(ready.door, path)
            if table is not None and table.owners() is None:
                raise t.Damaged(f"{path.name}: it does not say which documents are special")
        except t.Damaged:
            table = None
            ready.door.remove(path)
        if table is None:
            return position
        cover = table.cover
        if (cover.base, cover.first, cover.start) != (segment.base, segment.tabled, position) or cover.end > segment.size:
            ready.door.remove(path)
            return position
        segment.tables.append(table)
        position = cover.end


def _cut(ready: ReadyLog, segment: Segment, end: int) -> None:
    """Cut what is behind the last whole batch, and make the rest durable: from here on it is relied on."""
    fd = ready.door.open_write(segment.path)
    try:
        if end < segment.size:
            ready.door.truncate(fd, segment.path, end)
        ready.door.sync(fd, segment.path)
    finally:
        ready.door.close(fd)
    segment.size = end
