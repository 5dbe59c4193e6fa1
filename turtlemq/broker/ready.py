"""The ready log: documents in the order in which they came due, byte for byte as they slept, in `ready_*.bson`.

Each handoff is one batch: a HANDOFF document that says how many documents follow, at which ready offset they begin and what the
Index has handed off with them, then the documents. A batch counts when it is whole, so a crash repeats nothing and loses nothing:
what the last whole batch says was handed off is the truth, and the Index goes on from there. Synced on its own beat; until then
the Index keeps what it handed off.

A ready offset is the number of a document since the topic began. Runs of documents get a table (see `segment.table`) whose keys
are ready times and whose ids are those of the documents, so nothing is resident but the last run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from turtlemq.broker.handoffs import Batches, encode_head, read_batches
from turtlemq.broker.tail import Tail
from turtlemq.door import Door
from turtlemq.errors import Corrupt, DiskFull, Stopped, TurtleError
from turtlemq.model import I64, ORDINAL_BITS, SEGMENT_MESSAGES_MAX, U64, Damage, Progress, Settings
from turtlemq.segment import format as f
from turtlemq.segment import log, names
from turtlemq.segment import table as t
from turtlemq.segment.ids import hash_id
from turtlemq.segment.scan import Scan, scan

KIND = "ready"
P = ParamSpec("P")
R = TypeVar("R")


def mending(method: Callable[Concatenate[ReadyLog, P], R]) -> Callable[Concatenate[ReadyLog, P], R]:
    """Methods that only read: on meeting a damaged table they have it built again and begin anew."""

    @wraps(method)
    def mended(self: ReadyLog, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(sum(len(segment.tables) for segment in self.segments)):
            try:
                return method(self, *args, **kwargs)
            except t.Damaged as error:
                self.mend(error)
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

    @property
    def tabled(self) -> int:
        return sum(table.cover.documents for table in self.tables)


class ReadyLog:
    """The one writer and reader of a topic's ready log."""

    def __init__(self, door: Door, folder: Path, topic: str, settings: Settings) -> None:
        self.door, self.folder, self.topic, self.settings = door, folder, topic, settings
        self.progress = self.durable = Progress()
        self.segments: list[Segment] = []
        self.next_offset = self.durable_offset = 0
        self.damage: list[Damage] = []
        self.stopped: BaseException | None = None
        self.tail = Tail(0, 0)
        self._fd = -1
        self._last_batch = (0, 0)  # documents of the tail before the last batch, and where its head lies

    # Opening

    def open(self) -> None:
        """Find the last whole batch, cut what is behind it, and take up or make the tables."""
        files = [names.parse(name) for name in self.door.names(self.folder)]
        mine = [file for file in files if file is not None and file.kind == KIND]
        bases = sorted(file.base for file in mine if file.what == "bson" and not file.suffix)
        for file in mine:
            if file.suffix or (file.what != "bson" and file.base not in bases):
                self.door.remove(self.folder / _name(file))
        while bases and self.door.size(self.folder / names.segment(KIND, bases[-1])) <= self._header_bytes(bases[-1]):
            self.door.remove(self.folder / names.segment(KIND, bases.pop()))  # made, and nothing written to it
        for base in bases:
            self._open_segment(base, last=base == bases[-1])
        while len(self.segments) > 1 and not self.segments[-1].tables and not self.tail.count:
            self._step_back()
        self.durable, self.durable_offset = self.progress, self.next_offset

    def _step_back(self) -> None:
        """The last segment holds no whole batch: what was handed off last stands in the one before."""
        self.door.remove(self.segments.pop().path)
        before = self.segments.pop()
        self.next_offset = before.first_offset
        self._open_segment(before.base, last=True)

    def _header_bytes(self, base: int) -> int:
        return len(f.encode_header(f.FileHeader(KIND, self.topic, base)))

    def _open_segment(self, base: int, last: bool) -> None:
        path = self.folder / names.segment(KIND, base)
        header, start = log.read_header(self.door, path)
        if (header.kind, header.topic, header.base) != (KIND, self.topic, base):
            raise Corrupt(f"{path.name} says it is {header.kind} {header.base} of topic {header.topic!r}. Move it back there.")
        segment = Segment(base, path, self.next_offset, self.door.size(path), start)
        position = self._take_tables(segment)
        expected = self.next_offset if self.segments else None
        if segment.tables:
            expected = segment.tables[0].cover.first_seq + segment.tabled
        position, found, batches = self._scan(segment, position, expected)
        if last and not len(batches.positions) and segment.tables:  # what was handed off last stands in the last table
            gone = segment.tables.pop()
            self.door.remove(gone.path)
            position, found, batches = self._scan(segment, gone.cover.start, gone.cover.first_seq)
        segment.first_offset = segment.tables[0].cover.first_seq if segment.tables else batches.first_offset
        offset = segment.first_offset + segment.tabled
        self.next_offset = offset + len(batches.positions)
        self.progress = batches.progress or self.progress
        self.damage += [d for d in log.damage_of(path, found) if d.position < batches.end]
        self.segments.append(segment)
        if last:
            self._cut(segment, batches.end)
            self.tail = Tail(position, 0, self.tail.last_ready_ms)
            self.tail.extend(batches.positions, batches.ready_ms, batches.hashes)
            self.tail.end = batches.end
        elif len(batches.positions):
            count = len(batches.positions)
            cover = t.Cover(base, 0, segment.tabled, count, position, batches.end, offset, offset + count - 1, 0)
            segment.tables.append(self.store(cover, batches.positions, batches.ready_ms, batches.hashes))

    def _scan(self, segment: Segment, position: int, expected: int | None) -> tuple[int, Scan, Batches]:
        view = self.door.map(segment.path)
        found = scan(view, position, segment.size, sealed=True)
        return position, found, read_batches(view, found, position, expected)

    def _take_tables(self, segment: Segment) -> int:
        """Tables that follow each other from the first document on. Returns the byte position behind them."""
        position = segment.data_start
        while True:
            path = self.folder / names.table(KIND, segment.base, segment.tabled)
            try:
                table = t.open_table(self.door, path)
            except t.Damaged:
                table = None
                self.door.remove(path)
            if table is None:
                return position
            cover = table.cover
            if (cover.base, cover.first, cover.start) != (segment.base, segment.tabled, position) or cover.end > segment.size:
                self.door.remove(path)
                return position
            segment.tables.append(table)
            position = cover.end

    def _cut(self, segment: Segment, end: int) -> None:
        """Cut what is behind the last whole batch, and make the rest durable: from here on it is relied on."""
        fd = self.door.open_write(segment.path)
        try:
            if end < segment.size:
                self.door.truncate(fd, segment.path, end)
            self.door.sync(fd, segment.path)
        finally:
            self.door.close(fd)
        segment.size = end

    # Writing

    def accept(self, raw: bytes, starts: I64, progress: Progress, now_ms: int) -> int:
        """Append a batch of documents, return the offset of the first. Durable after `sync`. A full disk changes nothing."""
        self._refuse_if_stopped()
        segment = self._segment_for(len(raw), len(starts))
        ready_ms = max(now_ms, self.tail.last_ready_ms)
        synced = self.durable_offset == self.next_offset
        head = encode_head(self.next_offset, ready_ms, len(starts), len(raw), progress, synced)
        try:
            self.door.write(self._fd, segment.path, segment.size, [head, raw])
        except DiskFull:
            raise
        except OSError as error:
            self.stopped = error
            raise Stopped(f"{Stopped.__doc__} The cause was: {error}") from error
        first = self.next_offset
        self._last_batch = (self.tail.count, segment.size)
        self.tail.add(starts + segment.size + len(head), ready_ms, raw, starts)
        segment.size += len(head) + len(raw)
        self.tail.end = segment.size
        self.next_offset += len(starts)
        self.progress = progress
        if self._last_batch[0] >= self.settings.run_messages:
            self._flush_if_room(*self._last_batch)
        return first

    def _refuse_if_stopped(self) -> None:
        if self.stopped is not None:
            raise Stopped(f"{Stopped.__doc__} The cause was: {self.stopped}")

    def _segment_for(self, size: int, count: int) -> Segment:
        """The active segment, after a roll if the batch does not fit."""
        active = self.segments[-1] if self.segments else None
        if active is not None:
            documents = active.tabled + self.tail.count
            fits = active.size + size <= self.settings.segment_bytes and documents + count <= SEGMENT_MESSAGES_MAX
            if fits or not documents:
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
        self.shut()
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
        segment.tables.append(self.store(cover, *self.tail.columns(count)))
        self.tail = self.tail.rest(count, end)
        self._last_batch = (0, end)

    def store(self, cover: t.Cover, starts: I64, ready_ms: I64, hashes: U64) -> t.Table:
        """Write a table over ready documents; where the disk is full, serve it from memory."""
        ordinals = np.arange(cover.documents)
        keys = f.packed_keys(ready_ms, ordinals)
        data = b"".join(t.build(cover, keys, np.append(starts, cover.end), hashes, ordinals, np.empty(0, np.int64)))
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
        self._refuse_if_stopped()
        if self._fd >= 0 and self.durable_offset < self.next_offset:
            try:
                self.door.sync(self._fd, self.segments[-1].path)
            except OSError as error:
                self.stopped = error
                raise Stopped(f"{Stopped.__doc__} The cause was: {error}") from error
        self.durable, self.durable_offset = self.progress, self.next_offset

    def shut(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            self.door.close(self._fd)
            self._fd = -1

    # Reading

    @property
    def first_offset(self) -> int:
        """The oldest document that is still there."""
        return self.segments[0].first_offset if self.segments else self.next_offset

    @mending
    def read(self, offsets: I64, bytes_max: int | None = None) -> tuple[log.Documents, I64]:
        """Documents at rising offsets, checked, and their ready times; no more than `bytes_max`, but one at least."""
        buffers: list[bytes | bytearray] = []
        starts, heads, good, times = [], [], [], []
        size = 0
        for segment, table, ordinals in self._split(offsets):
            begin, end = self.tail.places(ordinals) if table is None else table.places(ordinals)
            if bytes_max is not None:
                fits = max(not size, int(np.searchsorted(np.cumsum(end - begin), bytes_max - size, side="right")))
                begin, end, ordinals = begin[:fits], end[:fits], ordinals[:fits]
            read = log.read_documents(self.door, segment.path, begin, end)
            self._report(segment, read, begin, end)
            buffers.append(read.buffer)
            starts.append(read.starts + size)
            heads.append(read.heads)
            good.append(read.good)
            times.append(self.tail.ready_ms[ordinals] if table is None else _ready_times(table, ordinals))
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

    def _report(self, segment: Segment, read: log.Documents, begin: I64, end: I64) -> None:
        known = {(d.file, d.position) for d in self.damage} if not read.good.all() else set()
        for i in np.flatnonzero(~read.good).tolist():
            damage = Damage(segment.path.name, int(begin[i]), int(end[i] - begin[i]), "checksum does not match")
            if (damage.file, damage.position) not in known:
                self.damage.append(damage)

    @mending
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

    @mending
    def newest_ms(self, segment: Segment) -> int:
        """When the last document of a segment became ready."""
        last = segment.tables[-1] if segment.tables else None
        return 0 if last is None else int(_ready_times(last, np.array([last.cover.documents - 1]))[0])

    def find(self, id_: str) -> int | None:
        """The newest offset of an id."""
        found = self.find_many([id_.encode()], np.array([hash_id(id_)], np.uint64))
        return found.get(0)

    @mending
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
        return {i: hit for i, offsets in candidates.items() if (hit := self._verify(ids[i], offsets)) is not None}

    def _verify(self, id_: bytes, offsets: list[int]) -> int | None:
        for offset in sorted(offsets, reverse=True):
            read, _ = self.read(np.array([offset]))
            at = int(read.starts[0]) + f.PREFIX_BYTES
            if read.good[0] and read.buffer[at : at + int(read.heads["idlen"][0]) - 1] == id_:
                return offset
        return None

    # Mending and letting go

    def mend(self, error: t.Damaged) -> None:
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
        fresh = self.store(cover, batches.positions, batches.ready_ms, batches.hashes)
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


def _ready_times(table: t.Table, ordinals: I64) -> I64:
    """Keys are ready times, which rise with the ordinals, so a key's rank is its ordinal."""
    first = int(ordinals[0])
    return f.key_dues(table.slice(first, int(ordinals[-1]) + 1)[ordinals - first])


def _name(file: names.FileName) -> str:
    plain = names.segment(file.kind, file.base) if file.what == "bson" else names.table(file.kind, file.base, file.first)
    return plain + file.suffix
