"""The writer: documents are staged, a group of them is committed with one write and one fdatasync, and only then published.

What is published is durable: nothing can be found, handed off or counted that a power cut could still take back. A failed
commit drops the whole group and leaves file and memory as they were.

Thread contract: `Group.run` touches nothing but the file and may run on a committer thread; all else belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path

import numpy as np

from turtlemq.door import Door
from turtlemq.errors import DiskFull, Stopped
from turtlemq.index import build
from turtlemq.index.memtable import Memtable
from turtlemq.index.mend import mending, retire
from turtlemq.index.parts import Part
from turtlemq.index.shelf import KIND, Segment, Shelf
from turtlemq.model import I64, SEQ_COUNTER_BITS, U8, U32, Settings
from turtlemq.segment import format as f
from turtlemq.segment import log, names

_BARE_BYTES = len(f.encode([b""], [b""], [0], 0, 0, [0])[0])  # a document without id and body
_POSITION_MAX = (1 << 32) - 1  # tables keep positions in 32 bits


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
    kills: Sequence[tuple[int, int]] = ()
    seen: Sequence[tuple[Part, int]] = ()  # where what they end was found
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
    ids: set[bytes] = field(default_factory=set)  # own ids in it
    error: BaseException | None = None  # why nothing of it was stored

    def run(self, sync: bool = True) -> None:
        """Write and sync. Raises DiskFull with the file as it was; any other error means that nobody knows."""
        try:
            self.door.write(self.fd, self.path, self.offset, self.buffers)
        except DiskFull:  # what was cut off again must not come back with a power cut
            self.door.sync(self.fd, self.path)
            raise
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
        self._flying: Group | None = None  # taken, neither published nor dropped yet
        self._end = shelf.active.size  # where the next document goes
        self._documents = shelf.active.documents  # of the active segment, staged ones included
        self._unsynced = False
        self._flush_at = settings.run_messages

    def next_seq(self, now_ms: int) -> int:
        """A hybrid logical clock: wall time above, a counter below, and never a number twice."""
        return max(self.last_seq + 1, now_ms << SEQ_COUNTER_BITS)

    def stage(self, columns: Columns, first_seq: int) -> Group:
        """Encode documents and hold them for the next commit. Returns the group that they are in, which tells if it fails.

        Where the segment is full, what was staged before is committed here and now, and a new segment begun."""
        self.refuse_if_stopped()
        self._roll_if_full(len(columns.bodies), _size(columns))
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
        if columns.kills:
            self.staged_kills.update(seq for seq, _ in columns.kills)
        return group

    def refuse_if_stopped(self) -> None:
        """Nothing may be written once a write has failed and nobody knows what it left."""
        if self.stopped is not None:
            raise Stopped(f"{Stopped.__doc__} The cause was: {self.stopped}")

    def stop(self, error: BaseException) -> BaseException:
        """No more writes until the topic is opened again. Returns what the caller shall hear."""
        if isinstance(error, Stopped):
            return error
        self.stopped = self.stopped or error
        return Stopped(f"{Stopped.__doc__} The cause was: {error}")

    def _open_group(self) -> Group:
        if self._group is None:
            if self._fd < 0:
                self._fd = self.door.open_write(self.shelf.active.path)
            self._group = Group(self.door, self._fd, self.shelf.active.path, self._end)
        return self._group

    def take(self) -> Group | None:
        """The staged group, to be run and then published or dropped. One at a time."""
        assert self._flying is None, "publish or drop the group before this one"
        self._flying, self._group = self._group, None
        return self._flying

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
        heard = error if isinstance(error, DiskFull) else self.stop(error)
        for group in (self._flying, self._group):
            if group is not None:
                group.error = heard
        self._flying = self._group = None
        self._end, self._documents = self.shelf.active.size, self.shelf.active.documents
        self.staged_ids.clear()
        self.staged_kills.clear()
        return heard

    def publish(self, group: Group) -> None:
        """Let committed documents be found, fired and counted."""
        shelf = self.shelf
        self._flying = None
        try:
            for batch in group.batches:
                self._publish(batch)
        except OSError as error:  # it is durable, but what it ends cannot be looked up: opening again will work it in
            raise self.stop(error) from error
        if group.ids:
            self.staged_ids -= group.ids
        if shelf.memtable.count >= self._flush_at:
            self._flush_if_room()

    def _publish(self, batch: _Batch) -> None:
        shelf, columns = self.shelf, batch.columns
        fresh = shelf.memtable.add(batch.seqs, columns.due_ms, batch.starts, batch.end, columns.flags, columns.hashes)
        if fresh:
            shelf.push(fresh)
        shelf.active.size = batch.end
        if columns.purpose == "appended":
            shelf.counters.appended += len(batch.seqs)
        else:
            shelf.counters.add(columns.purpose, len(batch.seqs))
        for (seq, due_ms), seen in zip_longest(columns.kills, columns.seen):
            mending(shelf, partial(shelf.kill, seq, due_ms, seen))
            self.staged_kills.discard(seq)
            shelf.killer_seq = int(batch.seqs[-1])

    # Runs and rolls

    def _flush_if_room(self) -> None:
        """A full disk only delays the flush: the documents are durable already."""
        try:
            self.flush()
        except (DiskFull, OSError):
            self._flush_at = self.shelf.memtable.count + self.settings.run_messages // 4

    def sync(self) -> None:
        """Make durable what was committed without a sync."""
        if self._unsynced:
            try:
                self.door.sync(self._fd, self.shelf.active.path)
            except OSError as error:
                raise self.stop(error) from error
            self._unsynced = False

    def flush(self) -> None:
        """The memtable becomes a run on disk, and a new one begins behind it. On failure all is as it was."""
        memtable = self.shelf.memtable
        if not memtable.count:
            return
        self.sync()  # an index must never speak of documents that a power cut could take back
        build.write_dead(self.shelf, self.shelf.parts)
        part = build.flush(self.shelf, memtable)
        self.shelf.place(part, memtable.seq)
        part.live = part.count_live()
        segment = self.shelf.active
        following = Memtable(segment.path, segment.base, part.first + part.documents, segment.size, part.last_seq + 1)
        segment.parts = [*(p for p in segment.parts if p is not memtable), part, following]
        retire(memtable)
        self._flush_at = self.settings.run_messages
        self.shelf.arrange()

    def _roll_if_full(self, count: int, size: int) -> None:
        active = self.shelf.active
        bytes_max = min(self.settings.segment_bytes, _POSITION_MAX)
        full = self._end + size > bytes_max or self._documents + count > self.settings.segment_messages
        if full and self._end > active.data_start:
            self.commit()
            self.roll()

    def roll(self) -> None:
        """Close the active segment and begin the next. Everything staged must be committed."""
        assert (self._flying, self._group) == (None, None), "commit what is staged before the segment is closed"
        self.refuse_if_stopped()
        try:
            self._roll()
        except OSError as error:  # a file may be there of which we know nothing
            raise self.stop(error) from error

    def _roll(self) -> None:
        old = self.shelf.active
        self.flush()
        build.write_dead(self.shelf, self.shelf.parts, all_of_them=True)
        base = old.base + old.size
        path = self.shelf.folder / names.segment(KIND, base)
        header = f.FileHeader(KIND, self.shelf.topic, base, killed_seq=self.last_seq)
        fd = log.create(self.door, path, header)
        self.shut()
        self._fd = fd
        start = len(f.encode_header(header))
        fresh = Segment(base, path, 0, False, start, start, self.last_seq)
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


def _size(columns: Columns) -> int:
    """How many bytes documents will take."""
    ids, extras = columns.ids, columns.extras or ()
    named = ids.size if isinstance(ids, np.ndarray) else sum(map(len, ids))
    return _BARE_BYTES * len(columns.bodies) + sum(map(len, columns.bodies)) + named + sum(map(len, extras))


def _starts(lengths: I64 | list[int], first: int) -> I64 | list[int]:
    """Where documents of these lengths begin, the first one at `first`."""
    if isinstance(lengths, list):
        if len(lengths) == 1:
            return [first]
        return list(accumulate(lengths[:-1], initial=first))
    starts: I64 = lengths.cumsum() - lengths + first
    return starts
