"""The ready log: documents in the order in which they came due, byte for byte as they slept, in `ready_*.bson`.

Each handoff is one batch: a HANDOFF document that says how many documents follow, at which ready offset they begin and what the
Index has handed off with them, then the documents. A batch counts when it is whole, so a crash repeats nothing and loses nothing:
what the last whole batch says was handed off is the truth, and the Index goes on from there. Synced on its own beat; until then
the Index keeps what it handed off.

A ready offset is the number of a document since the topic began. Runs of documents get a table (see `segment.table`) whose keys
are ready times and whose ids are those of the documents, so nothing is resident but the last run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.ready_batches import KIND, encode_head, read_batches
from turtlemq.broker.ready_cache import RecentDocuments
from turtlemq.broker.ready_tail import Rows, Tail, owner_hash
from turtlemq.errors import DiskFull, TurtleError
from turtlemq.model import I64, ORDINAL_BITS, SEGMENT_MESSAGES_MAX, U64, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.ids import hash_id
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

P = ParamSpec("P")
R = TypeVar("R")


def repairing(method: Callable[Concatenate[ReadyLog, P], R]) -> Callable[Concatenate[ReadyLog, P], R]:
    """Methods that only read: on meeting a damaged table they have it built again and begin anew."""

    @wraps(method)
    def mended(self: ReadyLog, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(sum(len(segment.tables) for segment in self.segments)):
            try:
                return method(self, *args, **kwargs)
            except t.Damaged as error:
                self.repair(error)
        return method(self, *args, **kwargs)

    return mended


@dataclass(slots=True)
class Segment:
    """One ready segment. Its tables cover documents from the first on; the active one's tail covers the rest."""

    base: int
    path: Path
    first_offset: int
    size: int
    data_start: int
    tables: list[t.Table] = field(default_factory=list)
    header_damaged: bool = False  # its header is damaged: what is there is served, and nothing is added

    @property
    def tabled(self) -> int:
        return sum(table.cover.documents for table in self.tables)


class ReadyLog(log.Stoppable):
    """The one writer and reader of a topic's ready log. Opened by `recover.open_ready`."""

    kind = KIND

    def __init__(self, door: Door, folder: Path, topic: str, settings: Settings) -> None:
        self.door, self.folder, self.topic, self.settings = door, folder, topic, settings
        self.progress = self.durable_progress = Progress()
        self.segments: list[Segment] = []
        self.next_offset = self.durable_offset = 0
        self.damage: list[Damage] = []
        self.tail = Tail(0, 0)
        self.recent = RecentDocuments()
        self._fd = -1
        self._last_batch = (0, 0)  # documents of the tail before the last batch, and where its head lies

    # Writing

    def accept(self, raw: bytes, starts: I64, progress: Progress, now_ms: int, hashes: U64 | None = None) -> int:
        """Append a batch of documents, return the offset of the first. Durable after `sync`. A full disk changes nothing.
        `hashes`: of their ids, where they are known."""
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
        """The active segment, after a roll if the batch does not fit."""
        active = self.segments[-1] if self.segments else None
        if active is not None:
            documents = active.tabled + self.tail.count
            fits = active.size + size <= self.settings.segment_bytes and documents + count <= SEGMENT_MESSAGES_MAX
            if (fits or not documents) and not active.header_damaged:
                if self._fd < 0:
                    self._fd = self.door.open_write(active.path)
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
        self._fd = fd
        start = len(f.encode_header(header))
        self.segments.append(Segment(base, path, self.next_offset, start, start))
        self.tail = Tail(start, 0, self.tail.last_ready_ms)
        self._last_batch = (0, start)
        return self.segments[-1]

    def _flush_if_room(self, count: int, end: int) -> None:
        try:
            self._flush(count, end)
        except (TurtleError, OSError):
            return  # the tail grows on: the batch itself is written

    def _flush(self, count: int, end: int) -> None:
        """The first `count` documents of the tail, up to byte `end`, get a table. The last batch stays out while the segment is
        active, so that recovery finds in what it scans what was handed off."""
        if not count:
            return
        if self.durable_offset < self.next_offset:
            self.sync()  # an index must never speak of documents that a power cut could take back
        segment = self.segments[-1]
        first = segment.tabled
        offset = segment.first_offset + first
        cover = t.Cover(segment.base, 0, first, count, self.tail.start, end, offset, offset + count - 1, 0)
        segment.tables.append(self.write_table(cover, self.tail.rows(0, count)))
        self.tail = self.tail.without_first(count, end)
        self._last_batch = (0, end)

    def write_table(self, cover: t.Cover, rows: Rows) -> t.Table:
        """Write a table over ready documents; where the disk is full, serve it from memory."""
        data = b"".join(encode_table(cover, rows))
        path = self.folder / names.table(KIND, cover.base, cover.first)
        try:
            self.door.replace(path, data, durable=False)
        except DiskFull:
            return t.parse_table(path, memoryview(data))
        opened = t.open_table(self.door, path)
        assert opened is not None, "just written"
        return opened

    def sync(self) -> None:
        """Make every batch so far durable; then the Index may let go of those documents. After an error the descriptor is not
        trusted again."""
        self.refuse_if_stopped()
        if self._fd >= 0 and self.durable_offset < self.next_offset:
            try:
                self.door.sync(self._fd, self.segments[-1].path)
            except OSError as error:
                raise self.stop(error) from error
        self.durable_progress, self.durable_offset = self.progress, self.next_offset
        self._empty_caches()

    def _empty_caches(self) -> None:
        """What is kept in memory for those who come at once need not be kept for others."""
        self.tail.enter_pending()
        self.recent.clear()

    def sync_target(self) -> tuple[int, Path] | None:
        """A descriptor of its own for whoever syncs this log elsewhere (see `Journal.unsynced`), and its file; None if nothing is
        to be synced."""
        behind = self._fd >= 0 and self.durable_offset < self.next_offset
        return (self.door.open_write(self.segments[-1].path), self.segments[-1].path) if behind else None

    def note_synced(self, progress: Progress, offset: int) -> None:
        """Everything up to this offset was synced elsewhere."""
        if offset >= self.durable_offset:
            self.durable_progress, self.durable_offset = progress, offset
        self._empty_caches()
        if self.durable_offset == self.next_offset:
            self.close()  # ten thousand quiet topics must not hold forty thousand files open

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            self.door.close(self._fd)
            self._fd = -1

    # Reading

    @property
    def first_offset(self) -> int:
        """The oldest document that is still there."""
        return self.segments[0].first_offset if self.segments else self.next_offset

    @repairing
    def read(self, offsets: I64, bytes_max: int | None = None) -> tuple[log.Documents, I64]:
        """Documents at rising offsets, checked, and their ready times; no more than `bytes_max`, but one at least."""
        buffers: list[bytes | bytearray] = []
        starts, heads, good, times = [], [], [], []
        size = 0
        for segment, table, ordinals in self._split(offsets):
            begin, end = self.tail.spans_of(ordinals) if table is None else table.spans_of(ordinals)
            if bytes_max is not None:
                fits = max(not size, int(np.searchsorted(np.cumsum(end - begin), bytes_max - size, side="right")))
                begin, end, ordinals = begin[:fits], end[:fits], ordinals[:fits]
            read = log.read_documents(self.door, segment.path, begin, end)
            np.logical_and(read.good, (read.heads["flags"] & f.HANDOFF) == 0, out=read.good)  # no offset is that of a head
            self._report_damage(segment, read, begin, end)
            buffers.append(read.buffer)
            starts.append(read.starts + size)
            heads.append(read.heads)
            good.append(read.good)
            times.append(self.tail.ready_times(ordinals) if table is None else _ready_times(table, ordinals))
            size += len(read.buffer)
            if bytes_max is not None and size >= bytes_max:
                break
        if len(buffers) == 1:
            return log.Documents(buffers[0], starts[0], heads[0], good[0]), times[0]
        if not buffers:
            nothing = np.empty(0, np.int64)
            return log.Documents(b"", nothing, np.empty(0, f.PREFIX), np.empty(0, np.bool_)), nothing
        joined = log.Documents(b"".join(buffers), np.concatenate(starts), np.concatenate(heads), np.concatenate(good))
        return joined, np.concatenate(times)

    def read_small(self, first: int, last: int) -> list[tuple[bytes, int]] | None:
        """`read` for a few documents that came last, without arrays: each in [first, last), and when it became ready. None: they
        are too far back, too large, or damaged."""
        found = self.recent.find(first, last)
        tail_first = self.next_offset - self.tail.count
        if found is not None or first < tail_first:
            return found
        places, times = self.tail.spans_small(first - tail_first, last - tail_first)
        if places[-1][1] - places[0][0] > small_batches.READ_BYTES:
            return None
        read = log.read_small(self.door, self.segments[-1].path, places)
        found = [
            (one[3], ready_ms) for one, ready_ms in zip(read, times, strict=True) if one is not None and not one[2] & f.HANDOFF
        ]
        return found if len(found) == len(read) else None

    def _split(self, offsets: I64) -> list[tuple[Segment, t.Table | None, I64]]:
        """Rising offsets by segment and table (None for the tail), as ordinals there."""
        found: list[tuple[Segment, t.Table | None, I64]] = []
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
                    found.append((segment, table, numbers[a:b] - at))
                at += table.cover.documents
            if numbers[-1] >= at:
                found.append((segment, None, numbers[np.searchsorted(numbers, at) :] - at))
        return found

    def _report_damage(self, segment: Segment, read: log.Documents, begin: I64, end: I64) -> None:
        known = {(d.file, d.position) for d in self.damage} if not read.good.all() else set()
        for i in np.flatnonzero(~read.good).tolist():
            damage = Damage(segment.path.name, int(begin[i]), int(end[i] - begin[i]), "checksum does not match")
            if (damage.file, damage.position) not in known:
                self.damage.append(damage)

    def count_unpassed(self, offsets: I64, cursors: Sequence[int]) -> int:
        """How many of these rising offsets the cursors of a group, one for each level, have not passed."""
        ahead = offsets[np.searchsorted(offsets, min(cursors)) :]
        if not len(ahead):
            return 0
        read, _ = self.read(ahead)
        levels = np.minimum(read.heads["flags"] & f.PRIORITY, len(cursors) - 1)
        return int((ahead >= np.array(cursors)[levels]).sum())

    @repairing
    def offset_at(self, ready_ms: int) -> int:
        """The first offset that became ready at or after a time."""
        for segment in self.segments:
            at = segment.first_offset
            for table in segment.tables:
                rank = table.rank(ready_ms << ORDINAL_BITS)
                if rank < table.cover.documents:
                    return at + rank
                at += table.cover.documents
        return self.next_offset - self.tail.count + self.tail.rank(ready_ms)

    @repairing
    def restricted(self, first: int, last: int, name: str, cancelled: Set[int]) -> tuple[int, I64]:
        """How many documents of [first, last) not every group sees, without cancelled ones, and the offsets of those that are one
        group's own."""
        count, mine, wanted = 0, [np.empty(0, np.int64)], np.uint64(owner_hash(name.encode()))
        tail = self.tail.rows(0, self.tail.count)
        parts = [(self.next_offset - self.tail.count, tail.restricted, tail.owners)]
        for segment in self.segments:
            at = segment.first_offset
            for table in segment.tables:
                if at < last and at + table.cover.documents > first:
                    owners = table.owners()
                    assert owners is not None, "or it would not have been taken up"
                    parts.append((at, table.ending_ordinals(), owners))
                at += table.cover.documents
        for at, special, owners in parts:
            low, high = np.searchsorted(special, (first - at, last - at)).tolist()
            count += high - low
            if cancelled:
                count -= int(np.isin(at + special[low:high], list(cancelled)).sum())
            mine.append(at + special[low:high][owners[low:high] == wanted])
        return count, np.sort(np.concatenate(mine))

    @repairing
    def restricted_for_others(self, first: int, last: int, name: str) -> I64:
        """Offsets in [first, last) of documents that a group does not see, as they were when they were written."""
        wanted, found = np.uint64(owner_hash(name.encode())), [np.empty(0, np.int64)]
        tail = self.tail.rows(0, self.tail.count)
        parts = [(self.next_offset - self.tail.count, tail.restricted, tail.owners)]
        for segment in self.segments:
            at = segment.first_offset
            for table in segment.tables:
                if at < last and at + table.cover.documents > first and (owners := table.owners()) is not None:
                    parts.append((at, table.ending_ordinals(), owners))
                at += table.cover.documents
        found += [at + special[owners != wanted] for at, special, owners in parts]
        return np.concatenate(found)

    @repairing
    def last_ready_ms(self, segment: Segment) -> int:
        """When the last document of a segment became ready."""
        last = segment.tables[-1] if segment.tables else None
        return 0 if last is None else int(_ready_times(last, np.array([last.cover.documents - 1]))[0])

    def find(self, id_: str) -> int | None:
        """The newest offset of an id."""
        found = self.find_many([id_.encode()], np.array([hash_id(id_)], np.uint64))
        return found.get(0)

    @repairing
    def find_many(self, ids: Sequence[bytes], hashes: U64) -> dict[int, int]:
        """Which of many ids are here, as index → newest offset."""
        candidates: dict[int, list[int]] = {}
        tail_first = self.next_offset - self.tail.count
        for i, ordinal in self.tail.find_many(hashes):
            candidates.setdefault(i, []).append(tail_first + ordinal)
        for segment in reversed(self.segments):
            at = segment.first_offset + segment.tabled
            for table in reversed(segment.tables):
                at -= table.cover.documents
                maybe = np.flatnonzero(table.may_hold(hashes)).tolist()
                for i in maybe:
                    candidates.setdefault(i, []).extend(at + ordinal for ordinal in table.find(int(hashes[i])))
        return {i: hit for i, offsets in candidates.items() if (hit := self._newest_match(ids[i], offsets)) is not None}

    def _newest_match(self, id_: bytes, offsets: list[int]) -> int | None:
        for offset in sorted(offsets, reverse=True):
            read, _ = self.read(np.array([offset]))
            at = int(read.starts[0]) + f.PREFIX_BYTES
            if read.good[0] and read.buffer[at : at + int(read.heads["idlen"][0]) - 1] == id_:
                return offset
        return None

    # Mending and letting go

    def repair(self, error: t.Damaged) -> None:
        """Build the table that raised `error` again: its segment is the truth."""
        broken = error.details.get("table")
        segment = next((s for s in self.segments if any(table is broken for table in s.tables)), None)
        if segment is None or not isinstance(broken, t.Table):
            raise error
        cover = broken.cover
        view = self.door.map(segment.path)
        found = scan(view, cover.start, cover.end, sealed=True)
        upto = (cover.end, cover.first_seq + cover.documents)
        batches = read_batches(view, found, cover.start, cover.first_seq, upto)
        fresh = self.write_table(cover, batches.rows)
        segment.tables = [fresh if table is broken else table for table in segment.tables]

    def drop_first(self) -> None:
        """Remove the oldest segment."""
        segment = self.segments.pop(0)
        gone = segment.path.with_name(segment.path.name + names.DELETED)
        self.door.rename(segment.path, gone)
        self.door.sync_folder(self.folder)
        self.door.remove(gone)
        for table in segment.tables:
            self.door.remove(table.path)


def encode_table(cover: t.Cover, rows: Rows) -> list[bytes]:
    """A table's bytes. Keys are ready times."""
    ordinals = np.arange(cover.documents)
    keys, positions = f.packed_keys(rows.ready_ms, ordinals), np.append(rows.starts, cover.end)
    return t.build(cover, keys, positions, rows.hashes, ordinals, rows.restricted, rows.owners)


def _ready_times(table: t.Table, ordinals: I64) -> I64:
    """Keys are ready times, which rise with the ordinals, so a key's rank is its ordinal."""
    first = int(ordinals[0])
    return f.key_dues(table.slice(first, int(ordinals[-1]) + 1)[ordinals - first])
