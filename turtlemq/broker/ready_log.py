"""The ready log: an append-only log of due messages, in `ready_*.bson`. Documents are stored as they slept, byte for byte.

Each handoff is one batch: a HANDOFF document with the number of documents, their first ready offset and the progress of the
Index, then the documents. A batch counts only if it is complete. The progress in the last complete batch is the truth about the
handoff, and the Index continues from there, so a crash neither repeats nor loses a message. The Index keeps handed-off messages
until the log is synced, which happens with each checkpoint.

A ready offset is the number of a document since the topic began. Runs of documents get a table (`segment.table`) whose keys are
ready times, so only the last run is held in memory (`ready_tail`).

Not here: the batches on disk (`ready_batches`), opening after a crash (`ready_recover`), which group sees a document
(`visibility`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.ready_batches import KIND, encode_head, read_batches
from turtlemq.broker.ready_cache import RecentDocuments
from turtlemq.broker.ready_lookup import PAIRS_MAX, READ_BYTES, GroupLookup, Lookup, RetryAt
from turtlemq.broker.ready_tail import Rows, Tail, encode_table, owner_hash
from turtlemq.errors import DiskFull, Exhausted, TurtleError
from turtlemq.model import I64, ORDINAL_BITS, SEGMENT_MESSAGES_MAX, U64, Damage, Mask, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

P = ParamSpec("P")
R = TypeVar("R")


def repairing(method: Callable[Concatenate[ReadyLog, P], R]) -> Callable[Concatenate[ReadyLog, P], R]:
    """Decorator for methods that only read: if a table is damaged, build it again from its segment and restart the method."""

    @wraps(method)
    def with_repair(self: ReadyLog, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(sum(len(segment.tables) for segment in self.segments)):
            try:
                return method(self, *args, **kwargs)
            except t.Damaged as error:
                self.repair(error)
        return method(self, *args, **kwargs)

    return with_repair


@dataclass(slots=True)
class Segment:
    """One file of the log. Its tables cover its documents from the first on; in the active segment the tail covers the rest."""

    base: int
    path: Path
    first_offset: int
    size: int
    data_start: int
    tables: list[t.Table] = field(default_factory=list)
    header_damaged: bool = False  # its documents are served, but none are added

    @property
    def tabled(self) -> int:
        """How many documents the tables cover."""
        return sum(table.cover.documents for table in self.tables)


class ReadyLog(log.OpenLog):
    """The ready log of one topic. Opened by `ready_recover.open_ready`."""

    kind = KIND

    def __init__(self, door: Door, folder: Path, topic: str, settings: Settings, seed: int = 0) -> None:
        self.door, self.folder, self.topic, self.settings = door, folder, topic, settings
        self.seed = seed  # for the hashes of ids in the tail and in new tables; tables of older versions have another
        self.progress = self.durable_progress = Progress()  # of the Index, in the last batch and in the last durable batch
        self.segments: list[Segment] = []
        self.next_offset = self.durable_offset = 0
        self.damage: list[Damage] = []
        self.tail = Tail(0, 0, seed=seed)
        self.recent = RecentDocuments()
        self._last_batch = (0, 0)  # documents of the tail before the last batch, and the position of its head

    # Writing

    def accept(self, raw: bytes, starts: I64, progress: Progress, now_ms: int, hashes: U64 | None = None) -> int:
        """Append a batch of documents. Returns the offset of the first. Durable after `sync`. Raises `DiskFull`, and changes
        nothing then. `hashes`: of the ids, if the caller has them."""
        self.refuse_if_stopped()
        segment = self._segment_for(len(raw), len(starts))
        ready_ms = max(now_ms, self.tail.last_ready_ms)
        synced = self.durable_offset == self.next_offset
        head = encode_head(self.next_offset, ready_ms, len(starts), len(raw), progress, synced)
        try:
            self.door.write(self._fd, segment.path, segment.size, [head, raw])
        except DiskFull:
            raise
        except OSError as error:
            raise self.stop(error) from error
        first = self.next_offset
        self._last_batch = (self.tail.count, segment.size)
        self.tail.add(segment.size + len(head), ready_ms, raw, starts, hashes)
        if 0 < len(starts) < small_batches.DOCUMENTS:
            self.recent.add(first, ready_ms, raw, starts.tolist())
        segment.size += len(head) + len(raw)
        self.tail.end = segment.size
        self.next_offset += len(starts)
        self.progress = progress
        if self._last_batch[0] >= self.settings.run_messages:
            self._flush_if_room(*self._last_batch)
        return first

    def _segment_for(self, size: int, count: int) -> Segment:
        """The active segment; a new one if the batch does not fit."""
        active = self.segments[-1] if self.segments else None
        if active is not None:
            documents = active.tabled + self.tail.count
            fits = active.size + size <= self.settings.segment_bytes and documents + count <= SEGMENT_MESSAGES_MAX
            if (fits or not documents) and not active.header_damaged:
                if self._fd < 0:
                    self._keep(self.door.open_write(active.path))
                return active
        return self._roll(active)

    def _roll(self, old: Segment | None) -> Segment:
        base = 0 if old is None else old.base + old.size
        if old is not None:
            self.sync()
            self._flush(self.tail.count, old.size)
        header = f.FileHeader(KIND, self.topic, base)
        path = self.folder / names.segment(KIND, base)
        fd = log.create(self.door, path, header)
        self.close()
        start = len(f.encode_header(header))
        self.segments.append(Segment(base, path, self.next_offset, start, start))
        self.tail = Tail(start, 0, self.tail.last_ready_ms, self.seed)
        self._last_batch = (0, start)
        self._keep(fd)
        return self.segments[-1]

    def _flush_if_room(self, count: int, end: int) -> None:
        try:
            self._flush(count, end)
        except (TurtleError, OSError):
            return  # the batch is written; the tail grows until there is room

    def _flush(self, count: int, end: int) -> None:
        """Write a table of the first `count` documents of the tail, which end at byte `end`. While the segment is active,
        the last batch must not be among them: recovery reads the progress of the Index from documents without a table."""
        if not count:
            return
        if self.durable_offset < self.next_offset:
            self.sync()  # a table must not name documents that a power cut could take
        segment = self.segments[-1]
        first = segment.tabled
        offset = segment.first_offset + first
        cover = t.Cover(segment.base, 0, first, count, self.tail.start, end, offset, offset + count - 1, 0)
        segment.tables.append(self.write_table(cover, self.tail.rows(0, count)))
        self.tail = self.tail.without_first(count, end)
        self._last_batch = (0, end)

    def write_table(self, cover: t.Cover, rows: Rows) -> t.Table:
        """Write a table of documents. If the disk is full, or no file can be opened, the table is served from memory."""
        data = b"".join(encode_table(cover, rows, self.seed))
        path = self.folder / names.table(KIND, cover.base, cover.first)
        try:
            self.door.replace(path, data, durable=False)
            opened = t.open_table(self.door, path)
        except Exhausted:
            return t.parse_table(path, memoryview(data))
        assert opened is not None, "just written"
        return opened

    def sync(self) -> None:
        """Make every batch so far durable; then the Index may drop those documents. After a failed sync the log accepts no more
        batches."""
        self.refuse_if_stopped()
        if self._fd >= 0 and self.durable_offset < self.next_offset:
            try:
                self.door.sync(self._fd, self.segments[-1].path)
            except OSError as error:
                raise self.stop(error) from error
        self.durable_progress, self.durable_offset = self.progress, self.next_offset
        self._empty_caches()

    def _empty_caches(self) -> None:
        """Free the memory that only speeds up fetches right after a handoff."""
        self.tail.enter_pending()
        self.recent.clear()

    def sync_target(self) -> tuple[int, Path] | None:
        """A new descriptor and the path of the active file, for a sync on another thread; None if every batch is durable. Not a
        duplicate: of two duplicates the kernel reports a failed write to one only."""
        behind = self._fd >= 0 and self.durable_offset < self.next_offset
        return (self.door.open_write(self.segments[-1].path), self.segments[-1].path) if behind else None

    def note_synced(self, progress: Progress, offset: int) -> None:
        """Every batch up to this offset, with this progress of the Index, was synced through `sync_target`."""
        if offset >= self.durable_offset:
            self.durable_progress, self.durable_offset = progress, offset
        self._empty_caches()
        if self.durable_offset == self.next_offset:
            self.close()  # ten thousand idle topics must not hold forty thousand files open

    # Reading

    @property
    def first_offset(self) -> int:
        """Offset of the oldest document that is retained."""
        return self.segments[0].first_offset if self.segments else self.next_offset

    @repairing
    def read(self, offsets: I64, bytes_max: int | None = None, seqs: I64 | None = None) -> tuple[log.Documents, I64]:
        """Documents at these offsets, and their ready times. Required: the offsets rise and are in the log. Returns no more than
        `bytes_max`, but at least one document; `good` tells which are undamaged. `seqs`: of the wanted documents; another one
        in the place of such a document is damage."""
        buffers: list[bytes | bytearray] = []
        starts, heads, good, times = [], [], [], []
        size = count = 0
        for segment, table, ordinals in self.split(offsets):
            begin, end = self.tail.spans_of(ordinals) if table is None else table.spans_of(ordinals)
            full = False
            if bytes_max is not None:
                fits = max(not size, int(np.searchsorted(np.cumsum(end - begin), bytes_max - size, side="right")))
                full = fits < len(ordinals)  # the next part may have documents that fit, but none is passed over
                begin, end, ordinals = begin[:fits], end[:fits], ordinals[:fits]
                if not fits:
                    break
            read = log.read_documents(self.door, segment.path, begin, end)
            fits_here = (read.heads["flags"] & f.HANDOFF) == 0  # a head has no offset: the log is damaged
            if seqs is not None:
                fits_here &= read.heads["seq"] == seqs[count : count + len(ordinals)]
            self._report_damage(segment, read, fits_here, begin, end)
            np.logical_and(read.good, fits_here, out=read.good)
            buffers.append(read.buffer)
            starts.append(read.starts + size)
            heads.append(read.heads)
            good.append(read.good)
            times.append(self.tail.ready_times(ordinals) if table is None else table_times(table, ordinals))
            size, count = size + len(read.buffer), count + len(ordinals)
            if full:
                break
        if len(buffers) == 1:
            return log.Documents(buffers[0], starts[0], heads[0], good[0]), times[0]
        if not buffers:
            nothing = np.empty(0, np.int64)
            return log.Documents(b"", nothing, np.empty(0, f.PREFIX), np.empty(0, np.bool_)), nothing
        joined = log.Documents(b"".join(buffers), np.concatenate(starts), np.concatenate(heads), np.concatenate(good))
        return joined, np.concatenate(times)

    def read_small(self, first: int, last: int) -> list[tuple[bytes, int]] | None:
        """Fast path of `read` without arrays, for a few documents that came last: the bytes of each in [first, last), and its
        ready time. Returns None if they are too old, too large or damaged."""
        cached = self.recent.find(first, last)
        tail_first = self.next_offset - self.tail.count
        if cached is not None or first < tail_first:
            return cached
        spans, times = self.tail.spans_small(first - tail_first, last - tail_first)
        if spans[-1][1] - spans[0][0] > small_batches.READ_BYTES:
            return None
        read = log.read_small(self.door, self.segments[-1].path, spans)
        good = [
            (row[3], ready_ms) for row, ready_ms in zip(read, times, strict=True) if row is not None and not row[2] & f.HANDOFF
        ]
        return good if len(good) == len(read) else None

    def split(self, offsets: I64) -> list[tuple[Segment, t.Table | None, I64]]:
        """Split rising offsets by segment and table (None for the tail). Returns ordinals in these."""
        parts: list[tuple[Segment, t.Table | None, I64]] = []
        for i, segment in enumerate(self.segments):
            following = self.segments[i + 1].first_offset if i + 1 < len(self.segments) else self.next_offset
            low, high = np.searchsorted(offsets, (segment.first_offset, following)).tolist()
            if low == high:
                continue
            numbers = offsets[low:high] - segment.first_offset
            at = 0
            for table in segment.tables:
                a, b = np.searchsorted(numbers, (at, at + table.cover.documents)).tolist()
                if a < b:
                    parts.append((segment, table, numbers[a:b] - at))
                at += table.cover.documents
            if numbers[-1] >= at:
                parts.append((segment, None, numbers[np.searchsorted(numbers, at) :] - at))
        return parts

    def _report_damage(self, segment: Segment, read: log.Documents, fits_here: Mask, begin: I64, end: I64) -> None:
        bad = np.flatnonzero(~(read.good & fits_here)).tolist()
        known = {(d.file, d.position) for d in self.damage} if bad else set()
        for i in bad:
            reason = "another document stands in its place" if read.good[i] else "checksum does not match"
            damage = Damage(segment.path.name, int(begin[i]), int(end[i] - begin[i]), reason)
            if (damage.file, damage.position) not in known:
                self.damage.append(damage)

    @repairing
    def offset_at(self, ready_ms: int) -> int:
        """The first offset that became ready at or after a time."""
        for table, at in self._tables():
            rank = table.rank(ready_ms << ORDINAL_BITS)
            if rank < table.cover.documents:
                return at + rank
        return self.next_offset - self.tail.count + self.tail.rank(ready_ms)

    def _restricted_parts(self, first: int, last: int, name: str) -> Iterator[tuple[int, I64, Mask]]:
        """Restricted documents of the tables that reach into [first, last), and of the tail: the offset that their ordinals count
        from, the ordinals, and which of them are retries of group `name`."""
        tail = self.tail.rows(0, self.tail.count)
        yield self.next_offset - self.tail.count, tail.restricted, tail.owners == np.uint64(owner_hash(name.encode(), self.seed))
        for table, at in self._tables():
            if at < last and at + table.cover.documents > first:
                owners = table.owners()
                assert owners is not None, "opening removes a table without owners"
                yield at, table.ending_ordinals(), owners == np.uint64(owner_hash(name.encode(), table.seed))

    @repairing
    def restricted(self, first: int, last: int, name: str, cancelled: Set[int]) -> tuple[int, I64]:
        """How many documents of [first, last) are restricted and not cancelled; and the offsets of those that are retries of
        group `name`."""
        count, own = 0, [np.empty(0, np.int64)]
        for at, ordinals, are_own in self._restricted_parts(first, last, name):
            low, high = np.searchsorted(ordinals, (first - at, last - at)).tolist()
            count += high - low
            if cancelled:
                count -= int(np.isin(at + ordinals[low:high], list(cancelled)).sum())
            own.append(at + ordinals[low:high][are_own[low:high]])
        return count, np.sort(np.concatenate(own))

    @repairing
    def restricted_for_others(self, first: int, last: int, name: str) -> I64:
        """Offsets of restricted documents that are not retries of group `name`: all in [first, last), and perhaps others. Tables
        know this also of documents that are damaged."""
        offsets = [np.empty(0, np.int64)]
        for at, ordinals, are_own in self._restricted_parts(first, last, name):
            offsets.append(at + ordinals[~are_own])
        return np.concatenate(offsets)

    @repairing
    def last_ready_ms(self, segment: Segment) -> int:
        """When the last document of a segment that has a table became ready."""
        last = segment.tables[-1] if segment.tables else None
        return 0 if last is None else int(table_times(last, np.array([last.cover.documents - 1]))[0])

    @repairing
    def find_many(self, ids: Sequence[bytes], hashes: U64 | None = None) -> dict[int, int]:
        """The ids that the log knows, as index → newest offset. `hashes`: of the ids, with the seed of the log, if the caller has
        them."""
        return self._lookup(Lookup(ids, self.seed, hashes)).newest(lambda offsets: self.read(offsets, READ_BYTES)[0])

    @repairing
    def offsets_of(self, id_: bytes) -> list[int]:
        """The offsets, rising, of all documents that may have this id: the id must be compared."""
        return self._lookup(Lookup([id_], self.seed, None)).offsets

    def _lookup(self, lookup: Lookup) -> Lookup:
        """Ask the tail and all tables."""
        lookup.ask(self.tail, self.next_offset - self.tail.count)
        for table, first in self._tables():
            if lookup.ask(table, first) and table.seed != self.seed:
                raise t.Damaged(f"{table.path.name}: too many ids have one hash. {t.Damaged.__doc__}", table=table)
        return lookup

    def _tables(self) -> Iterator[tuple[t.Table, int]]:
        """All tables, each with the offset of its first document."""
        for segment in self.segments:
            at = segment.first_offset
            for table in segment.tables:
                yield table, at
                at += table.cover.documents

    @repairing
    def find_of_groups(
        self, ids: Sequence[bytes], names: Collection[str], count_max: int | None = None
    ) -> tuple[dict[str, RetryAt], int]:
        """The newest retries of messages in all groups, by group/id; and for how many of the ids, from the first on: fewer than
        all if there may be more than `count_max`. `names`: groups that may have retries; others may be missing."""
        lookup, count = self._of_groups(ids, names), len(ids)
        while count_max is not None and count > 1 and len(lookup) > count_max:
            count = max(1, min(count // 2, count * count_max // len(lookup)))
            lookup = self._of_groups(ids[:count], names)
        return lookup.newest(lambda offsets: self.read(offsets, READ_BYTES)[0]), count

    @repairing
    def all_of_groups(self, ids: Sequence[bytes], names: Collection[str]) -> list[tuple[str, RetryAt]]:
        """All retries of messages in all groups, as group/id and place. `names`: as for `find_of_groups`."""
        return list(self._of_groups(ids, names).all(lambda offsets: self.read(offsets, READ_BYTES)[0]))

    def _of_groups(self, ids: Sequence[bytes], names: Collection[str]) -> GroupLookup:
        """Candidates for the retries of messages in all groups."""
        lookup = GroupLookup(ids, names)
        lookup.ask(self.tail, self.next_offset - self.tail.count)
        for table, first in self._tables():
            if not table.seed and self.seed and lookup.pairs > PAIRS_MAX:
                raise t.Damaged(f"{table.path.name}: it was made for few groups. {t.Damaged.__doc__}", table=table)
            lookup.ask(table, first)
        return lookup

    # Repair and removal

    def repair(self, error: t.Damaged) -> None:
        """Build the table that raised `error` again from its segment."""
        broken = error.details.get("table")
        segment = next((s for s in self.segments if any(table is broken for table in s.tables)), None)
        if segment is None or not isinstance(broken, t.Table):
            raise error
        cover = broken.cover
        view = self.door.map(segment.path)
        scanned = scan(view, cover.start, cover.end, sealed=True)
        upto = (cover.end, cover.first_seq + cover.documents)
        batches = read_batches(view, scanned, cover.start, cover.first_seq, upto, seed=self.seed)
        rebuilt = self.write_table(cover, batches.rows)
        segment.tables = [rebuilt if table is broken else table for table in segment.tables]

    def drop_first(self) -> None:
        """Remove the oldest segment."""
        segment = self.segments[0]
        gone = segment.path.with_name(segment.path.name + names.DELETED)
        with self.door.durable_names(self.folder):
            self.door.rename(segment.path, gone)
            del self.segments[0]
        self.door.remove(gone)
        for table in segment.tables:
            self.door.remove(table.path)


def table_times(table: t.Table, ordinals: I64) -> I64:
    """Ready times of documents of a table. They rise with the ordinals, so the rank of a key is its ordinal."""
    first = int(ordinals[0])
    return f.key_dues(table.slice(first, int(ordinals[-1]) + 1)[ordinals - first])
