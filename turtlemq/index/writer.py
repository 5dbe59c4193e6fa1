"""The writer: documents are staged, a group of them is committed with one write and one fdatasync, and only then published.

What is published is durable: nothing can be found, handed off or counted that a power cut could still take back. A failed
commit drops the whole group and leaves file and memory as they were.

Thread contract: `Group.run` touches nothing but the file and may run on a committer's thread; all else belongs to one thread.
A committer takes a group, gives it a way to `wait` for the run, and calls `land` when it is over. Whoever else must write
meanwhile commits as ever: that waits for the group under way, and lands it, first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path

import numpy as np

from turtlemq import small_batches
from turtlemq.errors import DiskFull, Stopped
from turtlemq.index import build
from turtlemq.index.columns import Columns
from turtlemq.index.memtable import Memtable
from turtlemq.index.repair import repairing, retire
from turtlemq.index.segments import KIND, Segment, Segments
from turtlemq.model import I64, SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.table import Damaged
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Job, Worker

_BARE_BYTES = len(f.encode([b""], [b""], [0], 0, 0, [0])[0])  # a document without id and body
_POSITION_MAX = (1 << 32) - 1  # tables keep positions in 32 bits


@dataclass(slots=True)
class _Batch:
    seqs: range | I64
    columns: Columns
    starts: I64 | list[int]
    end: int


@dataclass(slots=True)
class CommitGroup:
    """Everything that one commit writes."""

    door: Door
    fd: int
    path: Path
    offset: int
    buffers: list[bytes | bytearray | memoryview] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)
    ids: list[list[bytes]] = field(default_factory=list)  # own ids in it, by batch
    error: BaseException | None = None  # why nothing of it was stored
    failure: BaseException | None = None  # what the run met
    wait: Callable[[], object] | None = None  # blocks until the run is over, where it runs elsewhere
    then: list[Callable[[], None]] = field(default_factory=list)  # called when it is published, or dropped with an `error`

    def run(self, sync: bool = True) -> None:
        """Write and sync. A failure is kept for `land`: DiskFull leaves the file as it was; any other means that nobody knows."""
        try:
            self._write(sync)
        except BaseException as error:  # noqa: BLE001 - it may be another thread's; `land` raises it where it is heard
            self.failure = error

    def finish(self, error: BaseException | None) -> None:
        """Tell those who wait for it. Nothing that it holds may hold it: its bytes must not have to wait for a collection."""
        self.error, self.wait = error, None
        then, self.then = self.then, []
        for call in then:
            call()

    def _write(self, sync: bool) -> None:
        try:
            self.door.write(self.fd, self.path, self.offset, self.buffers)
        except DiskFull:  # what was cut off again must not come back with a power cut
            self.door.sync(self.fd, self.path)
            raise
        if sync:
            self.door.sync(self.fd, self.path)


class Writer:
    """The one writer of a topic's delay log."""

    def __init__(self, segments: Segments, settings: Settings, last_seq: int) -> None:
        self.segments, self.settings, self.door = segments, settings, segments.door
        self.last_seq = last_seq
        self.flusher: Worker = Inline()
        self.frozen: list[Memtable] = []  # full, and not on disk yet
        self.staged_ids: set[bytes] = set()
        self.staged_ends: set[int] = set()
        self.stopped: BaseException | None = None
        self._fd = -1
        self._group: CommitGroup | None = None
        self._flying: CommitGroup | None = None  # taken, neither published nor dropped yet
        self._end = segments.active.size  # where the next document goes
        self._documents = segments.active.documents  # of the active segment, staged ones included
        self._unsynced = False
        self._flush_at = settings.run_messages
        self._flush: tuple[build.FlushJob, Job] | None = None  # under way

    def next_seq(self, now_ms: int) -> int:
        """A hybrid logical clock: wall time above, a counter below, and never a number twice."""
        return max(self.last_seq + 1, now_ms << SEQ_COUNTER_BITS)

    def stage(self, columns: Columns, first_seq: int) -> CommitGroup:
        """Encode documents and hold them for the next commit. Returns the group that they are in, which tells if it fails.

        Where the segment is full, what was staged before is committed here and now, and a new segment begun."""
        self.refuse_if_stopped()
        self._roll_if_full(len(columns.bodies), _size(columns))
        group = self._open_group()
        if not group.batches and not self._unsynced:
            columns.flags[0] |= f.BARRIER
        count = len(columns.bodies)
        seqs = range(first_seq, first_seq + count) if count < small_batches.DOCUMENTS else np.arange(first_seq, first_seq + count)
        data, lengths = f.encode(
            columns.ids, columns.bodies, columns.due_ms, first_seq, columns.ttr_ms, columns.flags, columns.extras
        )
        starts = _starts(lengths, self._end)
        group.buffers.append(data)
        self._end += len(data)
        self._documents += count
        self.last_seq = first_seq + count - 1
        group.batches.append(_Batch(seqs, columns, starts, self._end))
        if columns.ends:
            self.staged_ends.update(seq for seq, _ in columns.ends)
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

    def _open_group(self) -> CommitGroup:
        if self._group is None:
            if self._fd < 0:
                self._fd = self.door.open_write(self.segments.active.path)
            self._group = CommitGroup(self.door, self._fd, self.segments.active.path, self._end)
        return self._group

    @property
    def pending(self) -> CommitGroup | None:
        """The last group that is not durable yet: when it has landed, so has everything that was staged up to now."""
        return self._group or self._flying

    def take(self) -> CommitGroup | None:
        """The staged group, to be run and then landed. One at a time: none while another is under way."""
        if self._flying is not None or self._group is None:
            return None
        self._flying, self._group = self._group, None
        return self._flying

    def commit(self, sync: bool = True) -> None:
        """Make everything staged durable and visible. One write, one fdatasync. Raises if that failed for what is staged here, or
        for what was under way before, which takes with it what was staged behind it."""
        if self._flying is not None:
            self.land(self._flying)
        group = self.take()
        if group is not None:
            group.run(sync)
            self.land(group, sync)

    def land(self, group: CommitGroup, synced: bool = True) -> None:
        """A taken group has run, or is waited for: publish it, or drop it and raise what its callers shall hear."""
        if group is not self._flying:
            return
        if group.wait is not None:
            group.wait()
        if group.failure is not None:
            raise self._drop(group.failure) from group.failure
        self._unsynced = not synced
        self._publish_group(group)

    def _drop(self, error: BaseException) -> BaseException:
        """Forget everything staged after a failed commit. Returns what the callers shall hear."""
        heard = error if isinstance(error, DiskFull) else self.stop(error)
        dropped = [group for group in (self._flying, self._group) if group is not None]
        self._flying = self._group = None
        self._end, self._documents = self.segments.active.size, self.segments.active.documents
        self.staged_ids.clear()
        self.staged_ends.clear()
        for group in dropped:
            group.finish(heard)
        return heard

    def _publish_group(self, group: CommitGroup) -> None:
        """Let committed documents be found, fired and counted."""
        segments = self.segments
        self._flying = None
        try:
            for batch in group.batches:
                self._publish(batch)
        except OSError as error:  # it is durable, but what it ends cannot be looked up: opening again will work it in
            heard = self._drop(error)  # nothing more is written behind it; whoever waits for a later group hears why
            group.finish(heard)
            raise heard from error
        if self._group is None:
            self.staged_ids.clear()
        else:
            self.staged_ids.difference_update(*group.ids)
        group.finish(None)
        if segments.memtable.count >= self._flush_at or (self._flush is not None and self._flush[1].done()):
            self._flush_if_room()

    def _publish(self, batch: _Batch) -> None:
        segments, columns = self.segments, batch.columns
        fresh = segments.memtable.add(batch.seqs, columns.due_ms, batch.starts, batch.end, columns.flags, columns.hashes)
        if fresh:
            segments.push(fresh)
        segments.active.size = batch.end
        if columns.purpose == "appended":
            segments.counters.appended += len(batch.seqs)
        else:
            segments.counters.add(columns.purpose, len(batch.seqs))
        for (seq, due_ms), seen in zip_longest(columns.ends, columns.seen):
            repairing(segments, partial(segments.end_document, seq, due_ms, seen))
            self.staged_ends.discard(seq)
            segments.last_ending_seq = int(batch.seqs[-1])

    # Runs and rolls

    def _flush_if_room(self) -> None:
        """A full disk only delays the flush: the documents are durable already."""
        try:
            if self.segments.memtable.count >= self._flush_at:
                self._freeze()
            self.finish_flush()
            self._flush_at = self.settings.run_messages
        except (DiskFull, OSError, Damaged):
            self._flush_at = self.segments.memtable.count + self.settings.run_messages // 4

    def sync(self) -> None:
        """Make durable what was committed without a sync."""
        if self._unsynced:
            try:
                self.door.sync(self._fd, self.segments.active.path)
            except OSError as error:
                raise self.stop(error) from error
            self._unsynced = False

    def flush(self) -> None:
        """The memtable becomes a run on disk, and a new one begins behind it. Where that fails it serves on from memory."""
        self._freeze()
        self.finish_flush(wait=True)

    def _freeze(self) -> None:
        """The memtable changes no more but for what is ended in it; a new one begins behind it."""
        memtable, segment = self.segments.memtable, self.segments.active
        if not memtable.count:
            return
        self.sync()  # an index must never speak of documents that a power cut could take back
        memtable.spill()
        number = memtable.first + memtable.count
        segment.parts = [*segment.parts, Memtable(segment.path, segment.base, number, segment.size, memtable.last_seq + 1)]
        self.frozen.append(memtable)
        self.segments.arrange()

    def finish_flush(self, wait: bool = False) -> None:
        """Have tables written for memtables that are frozen, by `flusher`, one at a time; put those that are written in their
        place. Raises if one could not be written: it serves on from memory, and is tried again."""
        while self.frozen:
            if self._flush is None:
                job = build.flush_job(self.segments, self.frozen[0])
                self._flush = job, self.flusher.submit(build.write_run, self.door.fresh(), job)
            if not (wait or self._flush[1].done()):
                return
            (job, writing), self._flush = self._flush, None
            writing.result()
            frozen = self.frozen[0]
            part = build.open_run(self.segments, frozen, job)
            segment = self.segments.by_base[frozen.base]
            segment.parts = [part if p is frozen else p for p in segment.parts]
            del self.frozen[0]
            retire(frozen)
            self.segments.arrange()
            build.write_ended_bits(self.segments, self.segments.parts)

    def _roll_if_full(self, count: int, size: int) -> None:
        active = self.segments.active
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
        old = self.segments.active
        self._freeze()
        build.write_ended_bits(self.segments, self.segments.parts, all_of_them=True)
        base = old.base + old.size
        path = self.segments.folder / names.segment(KIND, base)
        header = f.FileHeader(KIND, self.segments.topic, base, killed_seq=self.last_seq)
        fd = log.create(self.door, path, header)
        self.shut()
        self._fd = fd
        start = len(f.encode_header(header))
        fresh = Segment(base, path, 0, False, start, start, self.last_seq)
        fresh.parts.append(Memtable(path, base, 0, start, self.last_seq + 1))
        old.parts = [part for part in old.parts if part.documents]
        self.segments.by_base[base] = fresh
        self.segments.arrange()
        self._end, self._documents = start, 0
        self._flush_if_room()

    def rest(self) -> None:
        """Hold no file open while there is nothing to write."""
        if self._group is None and self._flying is None and not self._unsynced:
            self.shut()

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
