"""The writer of the delay log: group commit, memtable flush, and the roll to a new segment.

Documents are staged, a commit group of them is written with one write and one fdatasync, and only then published. Published means
durable: a document that a power cut could still take back cannot be found, handed off or counted. A failed commit drops the whole
group and leaves file and memory as they were.

Thread contract: `CommitGroup.run` touches only the file and may run on another thread; everything else belongs to one thread. A
committer takes a group, sets its `wait` (blocks until the run is over), runs it, and then calls `land`. A direct `commit` in
between first waits for the group under way and lands it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import cast

import numpy as np

from turtlemq import small_batches
from turtlemq.errors import DiskFull, Exhausted, Stopped
from turtlemq.index import build
from turtlemq.index.columns import UNHASHED, Columns
from turtlemq.index.memtable import Memtable
from turtlemq.index.repair import repairing, retire
from turtlemq.index.segments import KIND, Segment, Segments
from turtlemq.index.staged_ids import StagedIds
from turtlemq.logical_clock import next_number
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.buffers import Buffer
from turtlemq.segment.ids import hash_any
from turtlemq.segment.table import Damaged
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Job, Worker

_BARE_BYTES = len(f.encode([b""], [b""], [0], 0, 0, [0])[0])  # of a document without id and body
_LARGE_BYTES = 4 << 20  # of a batch that the commit encodes, however few its documents are
_LARGE = 10_000  # documents of a batch that the commit encodes: up to 150 ms, on its thread instead of the event loop
_POSITION_MAX = (1 << 32) - 1  # tables keep positions in 32 bits


@dataclass(slots=True)
class _Batch:
    """Staged documents, and where they will lie in the segment."""

    seqs: range | I64
    columns: Columns
    starts: I64 | list[int]
    end: int


@dataclass(slots=True)
class CommitGroup:
    """All staged documents that one commit writes."""

    door: Door
    fd: int
    path: Path
    offset: int
    buffers: list[Buffer | Callable[[], Buffer]] = field(default_factory=list)  # a large batch is encoded by `run`
    batches: list[_Batch] = field(default_factory=list)
    ids: list[Collection[bytes]] = field(default_factory=list)  # producers' own ids, by batch
    bytes: int = 0  # written by `run`
    error: BaseException | None = None  # why nothing of it was stored, for its callers
    failure: BaseException | None = None  # the error of the run, as it came
    wait: Callable[[], object] | None = None  # blocks until the run is over, if it runs on another thread
    then: list[Callable[[], None]] = field(default_factory=list)  # called when it is published, or dropped with `error` set

    def run(self, sync: bool = True) -> None:
        """Write and sync. A failure is kept for `land`. After DiskFull the file is as it was; after any other error its state is
        unknown."""
        try:
            self._write(sync)
        except BaseException as error:  # noqa: BLE001 - this may be another thread; `land` raises it where a caller waits
            self.failure = error

    def finish(self, error: BaseException | None) -> None:
        """Call the callbacks. References to them are cleared, so that no cycle keeps the group's bytes until a garbage
        collection."""
        self.error, self.wait = error, None
        then, self.then = self.then, []
        for call in then:
            call()

    def _write(self, sync: bool) -> None:
        buffers = [buffer() if callable(buffer) else buffer for buffer in self.buffers]
        self.bytes = sum(map(len, buffers))
        try:
            self.door.write(self.fd, self.path, self.offset, buffers)
        except DiskFull:  # the truncation must be durable, or a power cut could bring the bytes back
            self.door.sync(self.fd, self.path)
            raise
        if sync:
            self.door.sync(self.fd, self.path)


class Writer(log.OpenLog):
    """The only writer of an Index's delay log."""

    def __init__(self, segments: Segments, settings: Settings, last_seq: int) -> None:
        self.segments, self.settings, self.door = segments, settings, segments.door
        self.last_seq = last_seq
        self.flusher: Worker = Inline()
        self.frozen: list[Memtable] = []  # full memtables whose tables are not written yet
        self.staged_ids = StagedIds()
        self.watchers: list[StagedIds] = []  # see `Index.watch_ids`
        self.staged_ends: set[int] = set()
        self._group: CommitGroup | None = None
        self._flying: CommitGroup | None = None  # taken, but not landed
        self._end = segments.active.size  # where the next document goes
        self._documents = segments.active.documents  # of the active segment, staged ones included
        self._unsynced = False
        self._flush_at = settings.run_messages
        self._flush: tuple[build.FlushJob, Job] | None = None  # under way

    def next_seq(self, now_ms: int) -> int:
        """The next number of a hybrid logical clock: wall time in the high bits, a counter below, never a number twice."""
        return next_number(self.last_seq, now_ms)

    def stage(self, columns: Columns, first_seq: int) -> CommitGroup:
        """Encode documents and hold them for the next commit. Returns their commit group.

        If the segment is full, earlier documents are committed now, and a new segment begins."""
        self.refuse_if_stopped()
        if columns.hashes is UNHASHED:
            columns.hashes = hash_any(cast("Sequence[bytes]", columns.ids), self.segments.seed)
        count = len(columns.bodies)
        size = _size(columns) if count < _LARGE else 0
        is_large = count >= _LARGE or size >= _LARGE_BYTES
        lengths: I64 | list[int] = f.lengths_of(columns.ids, columns.bodies, columns.extras) if is_large else []
        self._roll_if_full(count, int(np.sum(lengths)) if is_large else size)
        group = self._open_group()
        if not group.batches and not self._unsynced:
            columns.flags[0] |= f.BARRIER
        seqs = range(first_seq, first_seq + count) if count < small_batches.DOCUMENTS else np.arange(first_seq, first_seq + count)
        encode = partial(
            f.encode, columns.ids, columns.bodies, columns.due_ms, first_seq, columns.ttr_ms, columns.flags, columns.extras
        )
        if is_large:
            group.buffers.append(lambda: encode()[0])
        else:
            data, lengths = encode()
            group.buffers.append(data)
        starts = _starts(lengths, self._end)
        self._end += sum(lengths) if isinstance(lengths, list) else int(lengths.sum())
        self._documents += count
        self.last_seq = first_seq + count - 1
        group.batches.append(_Batch(seqs, columns, starts, self._end))
        if columns.ends:
            self.staged_ends.update(seq for seq, _ in columns.ends)
        return group

    def reserve_ids(self, group: CommitGroup, own: Collection[bytes]) -> None:
        """Producers' own ids count as held as soon as they are staged. A frozen set is not copied."""
        group.ids.append(own)
        self.staged_ids.add(own)
        for seen in self.watchers:
            seen.add(own)

    def stop(self, error: BaseException) -> Stopped:
        """Accept no more writes until the topic is opened again. Returns the error to raise."""
        return error if isinstance(error, Stopped) else super().stop(error)

    def _open_group(self) -> CommitGroup:
        if self._group is None:
            if self._fd < 0:
                self._keep(self.door.open_write(self.segments.active.path))
            self._group = CommitGroup(self.door, self._fd, self.segments.active.path, self._end)
        return self._group

    @property
    def pending(self) -> CommitGroup | None:
        """The newest commit group that has not landed. When it lands, everything staged up to now is durable."""
        return self._group or self._flying

    @property
    def is_writing_much(self) -> bool:
        """Whether a large batch is staged or being committed. A commit of more documents would have to wait for it."""
        groups = (self._flying, self._group)
        return any(callable(buffer) for group in groups if group is not None for buffer in group.buffers)

    def take(self) -> CommitGroup | None:
        """The staged group, to be run and then landed. None while another one is under way, or if nothing is staged."""
        if self._flying is not None or self._group is None:
            return None
        self._flying, self._group = self._group, None
        return self._flying

    def commit(self, sync: bool = True) -> None:
        """Make everything staged durable and visible: one write, one fdatasync. Raises if that fails, or if the group under way
        failed, which drops the documents staged behind it, too."""
        if self._flying is not None:
            self.land(self._flying)
        group = self.take()
        if group is not None:
            group.run(sync)
            self.land(group, sync)

    def land(self, group: CommitGroup, synced: bool = True) -> None:
        """Wait for the run of a taken group, then publish it; after a failed run, drop it and raise the error for its callers."""
        if group is not self._flying:
            return
        if group.wait is not None:
            group.wait()
        if group.failure is not None:
            raise self._drop(group.failure) from group.failure
        self._unsynced = not synced
        self._publish_group(group)

    def _drop(self, error: BaseException) -> BaseException:
        """Forget everything staged after a failed commit. Returns the error for the callers."""
        heard = error if isinstance(error, Exhausted) else self.stop(error)
        dropped = [group for group in (self._flying, self._group) if group is not None]
        self._flying = self._group = None
        self._end, self._documents = self.segments.active.size, self.segments.active.documents
        self.staged_ids.clear()
        self.staged_ends.clear()
        for group in dropped:
            group.finish(heard)
        return heard

    def _publish_group(self, group: CommitGroup) -> None:
        """Make committed documents visible: to lookups, firing and counters."""
        segments = self.segments
        self._flying = None
        try:
            for batch in group.batches:
                self._publish(batch)
        except (OSError, Exhausted) as error:  # the group is durable, but a document that it ends cannot be read: opening ends it
            heard = self._drop(self.stop(error))  # nothing may be written behind it; later groups get the same error
            group.finish(heard)
            raise heard from error
        if self._group is None:
            self.staged_ids.clear()
        else:
            self.staged_ids.remove(group.ids)
        group.finish(None)
        if segments.memtable.count >= self._flush_at or (self._flush is not None and self._flush[1].done()):
            self._flush_if_room()

    def _publish(self, batch: _Batch) -> None:
        segments, columns = self.segments, batch.columns
        new_cursors = segments.memtable.add(batch.seqs, columns.due_ms, batch.starts, batch.end, columns.flags, columns.hashes)
        if new_cursors:
            segments.push(new_cursors)
        segments.active.size = batch.end
        if columns.purpose == "appended":
            segments.counters.appended += len(batch.seqs)
        elif isinstance(columns.purpose, str):
            segments.counters.add(columns.purpose, len(batch.seqs))
        else:
            for name, count in columns.purpose.items():
                segments.counters.add(name, count)
        if columns.ends:
            repairing(segments, partial(segments.end_documents, columns.ends, columns.seen))
            self.staged_ends.difference_update([seq for seq, _ in columns.ends])
            segments.last_ending_seq = int(batch.seqs[-1])
        if columns.handed_off:
            repairing(segments, partial(segments.end_handed_off, columns.handed_off))
            segments.last_ending_seq = int(batch.seqs[-1])

    # Flush and roll

    def _flush_if_room(self) -> None:
        """Flush the memtable if it is full. A full disk only delays this: the documents are durable already."""
        try:
            if self.segments.memtable.count >= self._flush_at:
                self._freeze()
            self.finish_flush()
            self._flush_at = self.settings.run_messages
        except (Exhausted, OSError, Damaged):
            self._flush_at = self.segments.memtable.count + self.settings.run_messages // 4

    def sync(self) -> None:
        """Make commits without a sync durable."""
        if self._unsynced:
            try:
                self.door.sync(self._fd, self.segments.active.path)
            except OSError as error:
                raise self.stop(error) from error
            self._unsynced = False

    def flush(self) -> None:
        """Write the memtable to disk as a run and begin a new one. Raises if that fails; the old one then serves from memory."""
        self._freeze()
        self.finish_flush(wait=True)

    def _freeze(self) -> None:
        """Begin a new memtable. In the old one, which waits for its table, only ended bits change from now on."""
        memtable, segment = self.segments.memtable, self.segments.active
        if not memtable.count:
            return
        self.sync()  # a table must not refer to documents that a power cut could take back
        memtable.spill()
        number = memtable.first + memtable.count
        new = Memtable(segment.path, segment.base, number, segment.size, memtable.last_seq + 1, self.segments.seed)
        segment.parts = [*segment.parts, new]
        self.frozen.append(memtable)
        self.segments.arrange()

    def finish_flush(self, wait: bool = False) -> None:
        """Let `flusher` write the tables of frozen memtables, one at a time, and replace each memtable whose table is done. With
        `wait`, until all are done. Raises if one cannot be written: its memtable serves on, and is tried again."""
        while self.frozen:
            if self._flush is None:
                job = build.flush_job(self.segments, self.frozen[0])
                self._flush = job, self.flusher.submit(build.write_run, self.door.beside(), job)
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
        """Close the active segment and begin the next one. Requires: nothing is staged."""
        assert (self._flying, self._group) == (None, None), "commit before the segment is closed"
        self.refuse_if_stopped()
        try:
            self._roll()
        except OSError as error:  # an unknown file may exist now
            raise self.stop(error) from error

    def _roll(self) -> None:
        old = self.segments.active
        self._freeze()
        build.write_ended_bits(self.segments, self.segments.parts, every=True)
        base = old.base + old.size
        path = self.segments.folder / names.segment(KIND, base)
        header = f.FileHeader(KIND, self.segments.topic, base, killed_seq=self.last_seq)
        fd = log.create(self.door, path, header)
        self.close()
        start = len(f.encode_header(header))
        new = Segment(base, path, 0, False, start, start, self.last_seq)
        new.parts.append(Memtable(path, base, 0, start, self.last_seq + 1, self.segments.seed))
        old.parts = [part for part in old.parts if part.documents]
        self.segments.by_base[base] = new
        self.segments.arrange()
        self._end, self._documents = start, 0
        self._keep(fd)
        self._flush_if_room()

    def rest(self) -> bool:
        """Close the file if nothing is staged or unsynced. The next write opens it again. Returns whether it is closed."""
        if self._group is None and self._flying is None and not self._unsynced:
            self.close()
        return self._fd < 0


def _size(columns: Columns) -> int:
    """How many bytes these documents will take."""
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
