"""Parts: stretches of documents with one table each, of a log as it was when it was pinned; and what has become of sleepers.

As the engine does when it opens a topic, but read-only: tables are taken where they fit their segment, what none covers is
scanned, a torn tail is left out. For what was scanned a table is made and kept beside the pins, so that all who read have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyspark_turtlemq.pins import File, TopicFiles
from turtlemq.broker.ready_batches import read_batches
from turtlemq.errors import Corrupt, NotOurs, TurtleError
from turtlemq.model import I64, SEGMENT_MESSAGES_MAX, U64, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.scan import Scan, scan
from turtlemq.storage import names
from turtlemq.storage.door import Door

_NOTHING: I64 = np.empty(0, np.int64)
_NO_HASHES: U64 = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a log that are no document any more."""

    topic: str
    file: str
    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """Documents [0, documents) by ordinal. `table`: its file, or its bytes where no folder could be written to."""

    topic: str
    log: str
    file: File
    sealed: bool
    table: str | bytes
    cover: t.Cover

    def open(self) -> t.Table:
        """Its table, mapped."""
        if isinstance(self.table, bytes):
            return t.parse_table(Path(self.file.name), memoryview(self.table))
        opened = t.open_table(Door(), Path(self.table))
        if opened is None:
            raise Corrupt(f"{self.table} is gone: the snapshot was released while it was being read. Run the query again.")
        return opened


@dataclass(slots=True)
class EndedDocuments:
    """Which sleepers were ended: their seqs, sorted, when they were due, and whether a newer version took their place."""

    seqs: I64 = field(default_factory=lambda: _NOTHING)
    dues: I64 = field(default_factory=lambda: _NOTHING)
    replaced: I64 = field(default_factory=lambda: _NOTHING)

    def within(self, first: int, last: int, dues: tuple[int, int]) -> EndedDocuments:
        """Those of a range of seqs and a range of due times."""
        low, high = np.searchsorted(self.seqs, (first, last + 1)).tolist()
        which = slice(low, high)
        inside = (self.dues[which] >= dues[0]) & (self.dues[which] <= dues[1])
        return EndedDocuments(self.seqs[which][inside], self.dues[which][inside], self.replaced[which][inside])


@dataclass(slots=True)
class LogSnapshot:
    """A log of one topic, of one moment."""

    parts: list[Part] = field(default_factory=list)
    ended: EndedDocuments = field(default_factory=EndedDocuments)
    progress: Progress = field(default_factory=Progress)
    end: int = 0  # in the ready log: the next offset
    damage: list[Damage] = field(default_factory=list)


class TopicLogs:
    """Opens the logs of one pinned topic."""

    def __init__(self, pinned: TopicFiles, clean: dict[str, object] | None = None) -> None:
        self.files, self.door = pinned, Door()
        self.clean_mark = clean or {}  # what the clean-shutdown mark says of the topic

    def close(self) -> None:
        self.door.shut()

    def _damage(self, into: LogSnapshot, file: File, found: Scan, upto: int | None = None) -> None:
        holes = [hole for hole in found.damaged if upto is None or hole.position < upto]
        into.damage += [Damage(self.files.topic, file.name, h.position, h.length, h.reason) for h in holes]

    def _keep(self, file: File, cover: t.Cover, keys: U64, positions: I64, kills: I64, whole: bool) -> str | bytes:
        """A table over what was scanned, beside the pins."""
        kind = file.name.partition("_")[0]
        data = b"".join(t.build(cover, keys, np.append(positions, cover.end), _NO_HASHES, _NOTHING, kills))
        if self.files.folder is None:
            return data
        path = Path(file.path).with_name(names.table(kind, cover.base, None if whole else cover.first))
        self.door.replace(path, data, durable=False)
        return str(path)

    def _table(self, folder: str, base: int, first: int | None) -> t.Table | None:
        known = self.files.files[folder].get(names.table("delay" if folder == "dead" else folder, base, first))
        if known is None:
            return None
        try:
            return t.parse_table(Path(known.path), known.map())
        except t.Damaged:
            return None

    # Sleepers, and dead letters, which are kept in the same way

    def delay_log(self, folder: str = "delay") -> LogSnapshot:
        """The log of sleepers, or that of dead letters."""
        found = LogSnapshot()
        segments = self.files.segments(folder)
        for base, file in segments:
            self._segment(found, folder, base, file, last=base == segments[-1][0])
        found.ended = self._ended(found)
        return found

    def _segment(self, into: LogSnapshot, folder: str, base: int, file: File, last: bool) -> None:
        """As `turtlemq.index.recover` opens one."""
        path, topic = Path(file.path), self.files.topic
        blank = f.encode_header(f.FileHeader("delay", topic, base))
        torn = last and file.size <= len(blank) and log.never_synced(bytes(file.map()), blank)
        try:
            header, start = log.try_header(self.door, path, "delay", topic, base)
        except NotOurs:
            if not torn:
                raise
            return
        if header is None and torn:
            return
        if header is None:
            into.damage.append(Damage(topic, file.name, 0, start, "its header is damaged"))
        if header is not None and header.sealed:
            self._sealed(into, folder, base, file, header, start)
        else:
            self._growing(into, folder, base, file, header, start, last)

    def _sealed(self, into: LogSnapshot, folder: str, base: int, file: File, header: f.FileHeader, start: int) -> None:
        table = self._table(folder, base, None)
        wanted = (header.generation, file.size, header.killed_seq)
        cover = None if table is None else table.cover
        if table is not None and cover is not None and (cover.generation, cover.end, cover.killed_seq) == wanted:
            into.parts.append(Part(self.files.topic, folder, file, True, str(table.path), cover))
            return
        end = min(file.size, start + header.bytes)
        found = scan(file.map(), start, end, sealed=True, rising=False)
        self._damage(into, file, found)
        if start + header.bytes != file.size:
            lacks = abs(start + header.bytes - file.size)
            into.damage.append(Damage(self.files.topic, file.name, end, lacks, "the file is not as long as its header says"))
        self._scanned(into, folder, base, file, found, (start, 0), True, header.generation)

    def _growing(
        self, into: LogSnapshot, folder: str, base: int, file: File, header: f.FileHeader | None, start: int, last: bool
    ) -> None:
        generation = -1 if header is None else header.generation
        position, number = start, 0
        while (run := self._run(folder, base, generation, number, position, file)) is not None:
            into.parts.append(Part(self.files.topic, folder, file, False, str(run.path), run.cover))
            position, number = run.cover.end, number + run.cover.documents
        if position >= file.size:
            return
        durable = not last or file.sync()
        whole = not last or self.clean_mark.get("end" if folder == "delay" else "dead") == file.size
        found = scan(file.map(), position, file.size, sealed=whole, rising=generation >= 0)
        if not durable:  # nobody here can make it so: only what was synced before the last barrier surely is
            barriers = found.positions[(found.flags & f.BARRIER) != 0]
            found = scan(file.map(), position, int(barriers[-1]) if len(barriers) else position, sealed=whole, rising=True)
        self._damage(into, file, found)
        self._scanned(into, folder, base, file, found, (position, number), False, generation)

    def _run(self, folder: str, base: int, generation: int, number: int, position: int, file: File) -> t.Table | None:
        run = self._table(folder, base, number)
        if run is None:
            return None
        cover = run.cover
        fits = (cover.base, cover.generation, cover.first, cover.start) == (base, generation, number, position)
        return run if fits and cover.end <= file.size and cover.documents else None

    def _scanned(
        self,
        into: LogSnapshot,
        folder: str,
        base: int,
        file: File,
        found: Scan,
        begin: tuple[int, int],
        sealed: bool,
        generation: int,
    ) -> None:
        """Parts over what a scan found from byte and document `begin` on."""
        position, number = begin
        for first in range(0, len(found), SEGMENT_MESSAGES_MAX):
            last = min(first + SEGMENT_MESSAGES_MAX, len(found))
            some = slice(first, last)
            end = int(found.positions[last]) if last < len(found) else found.end
            seqs = found.seq[some]
            low, high = int(seqs.min()), int(seqs.max())
            cover = t.Cover(base, generation, number + first, last - first, position, end, low, high, 0)
            asleep = np.flatnonzero((found.flags[some] & f.TOMBSTONE) == 0)
            keys = np.sort(f.packed_keys(found.due_ms[some][asleep], asleep))
            kills = np.flatnonzero(found.flags[some] & f.ENDS)
            table = self._keep(file, cover, keys, found.positions[some], kills, sealed)
            into.parts.append(Part(self.files.topic, folder, file, sealed, table, cover))
            position = end

    def _ended(self, found: LogSnapshot) -> EndedDocuments:
        """What tombstones and newer versions end, in the whole log. 1 µs each."""
        seqs, dues, replaced = [_NOTHING], [_NOTHING], [_NOTHING]
        for part in found.parts:
            table = part.open()
            kills = table.ending_ordinals()
            for i in range(0, len(kills), 1 << 16):
                starts, ends = table.spans_of(kills[i : i + (1 << 16)])
                read = log.read_documents(self.door, Path(part.file.path), starts, ends)
                heads = read.heads[read.good]
                of, was = f.ended_seqs(read.buffer, read.starts[read.good], heads) if len(heads) else (_NOTHING, _NOTHING)
                seqs.append(of)
                dues.append(was)
                replaced.append(((heads["flags"] & f.TOMBSTONE) == 0).astype(np.int64))
        of, first = np.unique(np.concatenate(seqs), return_index=True)
        return EndedDocuments(of, np.concatenate(dues)[first], np.concatenate(replaced)[first])

    # The ready log

    def ready_log(self) -> LogSnapshot:
        """The ready log up to its last whole batch, and what was handed off with that."""
        found = LogSnapshot()
        segments = self.files.segments("ready")
        while segments and segments[-1][1].size <= self._blank("ready", segments[-1][0]):
            segments.pop()
        clean = self._clean_ready(segments)
        for i, (base, file) in enumerate(segments):
            last = i + 1 == len(segments)
            following = None if last else self._first_offset(*segments[i + 1])
            if last and clean is not None:
                following = clean
            self._ready_segment(found, base, file, following, last)
        return found

    def _blank(self, kind: str, base: int) -> int:
        return len(f.encode_header(f.FileHeader(kind, self.files.topic, base)))

    def _clean_ready(self, segments: list[tuple[int, File]]) -> int | None:
        """With which offset the log ended at a proper stop."""
        broker = self.clean_mark.get("broker")
        if not isinstance(broker, dict) or not segments:
            return None
        base, end, offset = (int(number) for number in broker["ready"]["at"])
        return offset if (base, end) == (segments[-1][0], segments[-1][1].size) else None

    def _first_offset(self, base: int, file: File) -> int | None:
        """With which offset a segment begins, as far as its first document or its first table tells."""
        start = self._blank("ready", base)
        head = bytes(file.map()[start : start + 4096])
        found = scan(head, 0, len(head), sealed=True)
        if len(found) and found.positions[0] == 0 and found.flags[0] & f.HANDOFF:
            return int(found.seq[0])
        table = self._table("ready", base, 0)
        return None if table is None else table.cover.first_seq

    def _ready_segment(self, into: LogSnapshot, base: int, file: File, following: int | None, last: bool) -> None:
        """As `turtlemq.broker.ready_recover` opens one."""
        header, position = log.try_header(self.door, Path(file.path), "ready", self.files.topic, base)
        if header is None:
            into.damage.append(Damage(self.files.topic, file.name, 0, position, "its header is damaged"))
        number, expected = 0, into.end if into.parts else None
        table: t.Table | None = None
        while (run := self._run("ready", base, 0, number, position, file)) is not None:
            table = run
            into.parts.append(Part(self.files.topic, "ready", file, False, str(run.path), run.cover))
            position, number = run.cover.end, number + run.cover.documents
            expected = into.end = run.cover.last_seq + 1
        if last:
            file.sync()
        upto = None if following is None else (file.size, following)
        view = file.map()
        found = scan(view, position, file.size, sealed=True)
        batches = read_batches(view, found, position, expected, upto)
        if batches.progress is not None:
            into.progress = batches.progress
        elif table is not None:  # what was handed off last stands in the last table
            again = scan(view, table.cover.start, table.cover.end, sealed=True)
            into.progress = read_batches(view, again, table.cover.start, table.cover.first_seq).progress or into.progress
        self._damage(into, file, found, batches.end)
        count = len(batches.positions)
        if count:
            first = batches.first_offset if expected is None else expected
            cover = t.Cover(base, 0, number, count, position, batches.end, first, first + count - 1, 0)
            keys = f.packed_keys(batches.ready_ms, np.arange(count))
            kept = self._keep(file, cover, keys, batches.positions, _NOTHING, False)
            into.parts.append(Part(self.files.topic, "ready", file, False, kept, cover))
            into.end = first + count

    # Journals

    def journal(self, kind: str) -> Iterator[tuple[File, int, int]]:
        """Files of a journal with the bytes [start, end) of their events. Only the newest file is scanned, for its torn end."""
        for _, file, start, whole, newest in self._journal_files(kind, (-1, 0)):
            yield file, start, scan(file.map(), start, file.size, sealed=whole).end if newest else file.size

    def journal_scans(self, kind: str, since: tuple[int, int]) -> Iterator[tuple[int, File, int, Scan]]:
        """Base, file, first byte and events of each file of a journal, from a segment base and a byte in it on."""
        for base, file, start, whole, _ in self._journal_files(kind, since):
            events = scan(file.map(), start, file.size, sealed=whole)
            if len(events):
                yield base, file, start, events

    def _journal_files(self, kind: str, since: tuple[int, int]) -> Iterator[tuple[int, File, int, bool, bool]]:
        """Base, file, first byte, no torn end is possible, is the newest. The newest is synced."""
        segments = self.files.segments(kind)
        for base, file in segments:
            start, newest = self._blank(kind, base), base == segments[-1][0]
            if base < since[0] or file.size <= start:
                continue
            start = since[1] if base == since[0] else start
            try:
                log.try_header(self.door, Path(file.path), kind, self.files.topic, base)
            except TurtleError as error:
                if isinstance(error, NotOurs):
                    raise
            if newest:
                file.sync()
            if start < file.size:
                broker = self.clean_mark.get("broker")
                clean = isinstance(broker, dict) and tuple(map(int, broker[kind])) == (base, file.size)
                yield base, file, start, clean or not newest, newest
