"""The writer: documents are staged, a group of them is committed with one write and one fdatasync, and only then published.

What is published is durable: nothing can be found, handed off or counted that a power cut could still take back. A failed
commit drops the whole group and leaves file and memory as they were.

Thread contract: `Group.run` touches nothing but the file and may run on a committer thread; all else belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from turtlemq.door import Door
from turtlemq.errors import DiskFull, Stopped
from turtlemq.index import build
from turtlemq.index.memtable import Memtable
from turtlemq.index.shelf import KIND, Segment, Shelf
from turtlemq.model import I64, ORDINAL_BITS, U8, U32, Settings
from turtlemq.segment import format as f
from turtlemq.segment import log, names


@dataclass(slots=True)
class Columns:
    """Documents about to be written, as columns. `kills`: (seq, due) of what they end."""

    ids: Sequence[bytes] | U8
    bodies: Sequence[bytes]
    due_ms: Sequence[int] | I64
    ttr_ms: Sequence[int] | int
    flags: list[int] | U32
    extras: Sequence[bytes] | None
    hashes: Sequence[int] | None  # 0 for a server-given id; None when all are
    kills: list[tuple[int, int]] = field(default_factory=list)
    purpose: str = "appended"  # which counter they add to


@dataclass(slots=True)
class _Batch:
    seqs: range | I64
    columns: Columns
    starts: I64 | list[int]
    end: int


@dataclass(slots=True)
class Group:
    """Everything that one commit writes."""

    door: Door
    fd: int
    path: Path
    offset: int
    buffers: list[bytes | bytearray] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)

    def run(self, sync: bool = True) -> None:
        """Write and sync. Raises DiskFull with the file as it was; any other error means that nobody knows."""
        self.door.write(self.fd, self.path, self.offset, self.buffers)
        if sync:
            self.door.sync(self.fd, self.path)


class Writer:
    """The one writer of a topic's delay log."""

    def __init__(self, shelf: Shelf, settings: Settings, last_seq: int) -> None:
        self.shelf, self.settings, self.door = shelf, settings, shelf.door
        self.last_seq = last_seq
        self.staged_ids: set[bytes] = set()
        self.staged_kills: set[int] = set()
        self.stopped: BaseException | None = None
        self._fd = -1
        self._group: Group | None = None
        self._end = shelf.active.size  # where the next document goes
        self._documents = shelf.active.documents  # of the active segment, staged ones included
        self._unsynced = False
        self._flush_at = settings.run_messages

    def next_seq(self, now_ms: int) -> int:
        """A hybrid logical clock: wall time above, a counter below, and never a number twice."""
        return max(self.last_seq + 1, now_ms << ORDINAL_BITS)

    def stage(self, columns: Columns, first_seq: int) -> None:
        """Encode documents and hold them for the next commit."""
        if self.stopped is not None:
            raise Stopped(f"{Stopped.__doc__} The cause was: {self.stopped}")
        self._roll_if_full(len(columns.bodies), sum(map(len, columns.bodies)))
        group = self._open_group()
        if not group.batches and not self._unsynced:
            columns.flags[0] |= f.BARRIER
        count = len(columns.bodies)
        seqs = range(first_seq, first_seq + count) if count < f.FEW else np.arange(first_seq, first_seq + count)
        data, lengths = f.encode(
            columns.ids, columns.bodies, columns.due_ms, first_seq, columns.ttr_ms, columns.flags, columns.extras
        )
        starts = _starts(lengths, self._end)
        group.buffers.append(data)
        self._end += len(data)
        self._documents += count
        self.last_seq = first_seq + count - 1
        group.batches.append(_Batch(seqs, columns, starts, self._end))
        self.staged_kills.update(seq for seq, _ in columns.kills)

    def _open_group(self) -> Group:
        if self._group is None:
            if self._fd < 0:
                self._fd = self.door.open_write(self.shelf.active.path)
            self._group = Group(self.door, self._fd, self.shelf.active.path, self._end)
        return self._group

    def take(self) -> Group | None:
        """The staged group, to be run and then published or dropped."""
        group, self._group = self._group, None
        return group

    def commit(self, sync: bool = True) -> None:
        """Make everything staged durable and visible. One write, one fdatasync."""
        group = self.take()
        if group is None:
            return
        try:
            group.run(sync)
        except BaseException as error:
            raise self.drop(error) from error
        self._unsynced = not sync
        self.publish(group)

    def drop(self, error: BaseException) -> BaseException:
        """Forget everything staged after a failed commit. Returns what the callers shall hear."""
        self._group = None
        self._end, self._documents = self.shelf.active.size, self.shelf.active.documents
        self.staged_ids.clear()
        self.staged_kills.clear()
        if isinstance(error, DiskFull):
            return error
        self.stopped = error
        return Stopped(f"{Stopped.__doc__} The cause was: {error}")

    def publish(self, group: Group) -> None:
        """Let committed documents be found, fired and counted."""
        shelf = self.shelf
        for batch in group.batches:
            columns = batch.columns
            shelf.push(shelf.memtable.add(batch.seqs, columns.due_ms, batch.starts, batch.end, columns.flags, columns.hashes))
            shelf.active.size = batch.end
            shelf.counters.add(columns.purpose, len(batch.seqs))
            for seq, due_ms in columns.kills:
                shelf.kill(seq, due_ms)
                self.staged_kills.discard(seq)
        if self._group is None:
            self.staged_ids.clear()
        if shelf.memtable.count >= self._flush_at:
            self._flush_if_room()

    # Runs and rolls

    def _flush_if_room(self) -> None:
        """A full disk only delays the flush: the documents are durable already."""
        try:
            self.flush()
        except (DiskFull, OSError):
            self._flush_at = self.shelf.memtable.count + self.settings.run_messages // 4

    def flush(self) -> None:
        """The memtable becomes a run on disk, and a new one begins behind it."""
        memtable = self.shelf.memtable
        if not memtable.count:
            return
        if self._unsynced:  # an index must never speak of documents that a power cut could take back
            self.door.sync(self._fd, memtable.path)
            self._unsynced = False
        build.write_dead(self.shelf, self.shelf.parts)
        part = build.flush(self.shelf, memtable)
        segment = self.shelf.active
        segment.parts = [p for p in segment.parts if p is not memtable]
        following = Memtable(segment.path, segment.base, part.first + part.documents, segment.size, part.last_seq + 1)
        segment.parts += [part, following]
        self.shelf.place(part, memtable.seq)
        self._flush_at = self.settings.run_messages
        part.live = part.count_live()
        self.shelf.arrange()

    def _roll_if_full(self, count: int, size: int) -> None:
        active = self.shelf.active
        full = self._end + size > self.settings.segment_bytes or self._documents + count > self.settings.segment_messages
        if full and self._end > active.data_start:
            self.commit()
            self.roll()

    def roll(self) -> None:
        """Close the active segment and begin the next. Everything staged must be committed."""
        old = self.shelf.active
        self.flush()
        base = old.base + old.size
        path = self.shelf.folder / names.segment(KIND, base)
        header = f.FileHeader(KIND, self.shelf.topic, base)
        fd = log.create(self.door, path, header)
        self.shut()
        self._fd = fd
        start = len(f.encode_header(header))
        fresh = Segment(base, path, 0, False, start, start)
        fresh.parts.append(Memtable(path, base, 0, start, self.last_seq + 1))
        old.parts = [part for part in old.parts if not isinstance(part, Memtable)]
        self.shelf.segments[base] = fresh
        self.shelf.arrange()
        self._end, self._documents = start, 0

    def shut(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            self.door.close(self._fd)
            self._fd = -1


def _starts(lengths: I64 | list[int], first: int) -> I64 | list[int]:
    """Where documents of these lengths begin, the first one at `first`."""
    if isinstance(lengths, list):
        return list(accumulate(lengths[:-1], initial=first))
    starts: I64 = lengths.cumsum() - lengths + first
    return starts
