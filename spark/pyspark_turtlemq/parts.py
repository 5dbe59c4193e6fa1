"""The logs of a snapshot, opened read-only: parts of documents with one table each, ended documents, progress, damage.

Opened by the decisions of the engine's recovery (`turtlemq.segment.readonly`, `turtlemq.broker.ready_readonly`): tables are used
if they fit their segment, uncovered documents are scanned, torn ends are left out. A table over scanned documents is written
beside the pins, so that all tasks share it.

Different from the engine: nothing is cut or repaired. A seal that a crash has interrupted is not finished; its segment is
scanned. Ended documents come from tombstones alone, not from the ended bits and tables that the engine keeps of them, so a
destroyed tombstone ends nothing here. A snapshot of a running server ends where it was pinned; the newest segment is synced
before it is read, so that a power cut cannot take back any row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyspark_turtlemq.part import Part, bare_table, ready_table
from pyspark_turtlemq.snapshot_files import INNER, File, TopicFiles, Vanished
from pyspark_turtlemq.table_repair import PartTable
from turtlemq.broker.ready_readonly import FIRST_BYTES, CleanEnd, ReadSegment, check_clean_end, first_offset, read_segment
from turtlemq.errors import NotOurs, TurtleError
from turtlemq.model import I64, SEGMENT_MESSAGES_MAX, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.readonly import (
    Runs,
    SegmentFile,
    cover_of,
    data_start,
    fits_sealed,
    fitting_runs,
    open_segment,
    scan_uncovered,
)
from turtlemq.segment.scan import Scan, scan
from turtlemq.storage import names
from turtlemq.storage.door import Door

_NONE: I64 = np.empty(0, np.int64)
_ENDING_DOCUMENTS = 1 << 16  # read at once


@dataclass(slots=True)
class EndedDocuments:
    """Documents that a tombstone or a newer version has ended: sorted seqs, due times, and 1 for a newer version."""

    seqs: I64 = field(default_factory=lambda: _NONE)
    dues: I64 = field(default_factory=lambda: _NONE)
    replaced: I64 = field(default_factory=lambda: _NONE)

    def within(self, first: int, last: int, dues: tuple[int, int]) -> EndedDocuments:
        """Those with a seq and a due time in these inclusive ranges."""
        low, high = np.searchsorted(self.seqs, (first, last + 1)).tolist()
        which = slice(low, high)
        inside = (self.dues[which] >= dues[0]) & (self.dues[which] <= dues[1])
        return EndedDocuments(self.seqs[which][inside], self.dues[which][inside], self.replaced[which][inside])


@dataclass(slots=True)
class LogSnapshot:
    """One log of a topic at the moment of the snapshot."""

    parts: list[Part] = field(default_factory=list)
    ended: EndedDocuments = field(default_factory=EndedDocuments)
    progress: Progress = field(default_factory=Progress)
    end: int = 0  # of the ready log: the next offset
    damage: list[Damage] = field(default_factory=list)

    def add_damage(self, *found: Damage | None) -> None:
        """Note damage, each position of a file once."""
        known = {(damage.file, damage.position) for damage in self.damage}
        self.damage += [damage for damage in found if damage is not None and (damage.file, damage.position) not in known]


class TopicLogs:
    """Opens the logs of one topic in a snapshot."""

    def __init__(self, files: TopicFiles) -> None:
        self.files, self.door = files, Door()
        self.clean_mark: dict[str, Any] = files.clean_mark or {}

    def close(self) -> None:
        self.door.shut()

    def _keep(self, file: File, cover: t.Cover, table: bytes, whole: bool) -> str | bytes:
        """Write a table beside the pins. Returns its path, or its bytes if there are no pins."""
        if self.files.folder is None:
            return table
        kind = file.name.partition("_")[0]
        path = Path(file.path).with_name(names.table(kind, cover.base, None if whole else cover.first))
        self.door.replace(path, table, durable=False)
        return str(path)

    def _table(self, log_name: str, base: int, first: int | None) -> t.Table | None:
        """A table of the snapshot; None if there is none, it is damaged, or another was kept in its place: the segment is scanned
        then. `first`: of a run, None for a whole segment."""
        file = self.files.files[log_name].get(names.table("delay" if log_name in INNER else log_name, base, first))
        if file is None:
            return None
        try:
            return t.parse_table(Path(file.path), file.map())
        except (t.Damaged, Vanished):
            return None

    # The delay log, dead letters and schedules, which have the same format

    def delay_log(self, name: str = "delay") -> LogSnapshot:
        """The log of sleepers (`delay`), of dead letters (`dead`), or of `schedules`."""
        snapshot = LogSnapshot()
        segments = self.files.segments(name)
        for base, file in segments:
            last = base == segments[-1][0]
            clean_end = self._delay_clean_end(name) if last else None
            segment = open_segment(self.door, Path(file.path), "delay", self.files.topic, base, file.size, last=last)
            if clean_end is not None and clean_end > file.size:
                reason = "the file is shorter than it was at the last proper stop"
                snapshot.add_damage(Damage(file.name, file.size, clean_end - file.size, reason))
            if segment is None:
                continue
            snapshot.add_damage(segment.header_damage, segment.length_damage)
            if segment.header is not None and segment.header.sealed:
                self._add_sealed(snapshot, name, file, segment)
            else:
                self._add_growing(snapshot, name, file, segment, last, clean_end is not None)
        snapshot.ended = self._ended(snapshot)
        return snapshot

    def _delay_clean_end(self, name: str) -> int | None:
        """The size of the active segment after a clean shutdown; None if the server runs or was killed."""
        end = self.clean_mark.get("end" if name == "delay" else name)
        return None if end is None else int(end)

    def _add_sealed(self, snapshot: LogSnapshot, name: str, file: File, segment: SegmentFile) -> None:
        table = self._table(name, segment.base, None)
        if table is not None and fits_sealed(segment, table.cover):
            snapshot.parts.append(Part(self.files.topic, name, file, True, str(table.path), table.cover))
            return
        _, scanned = log.scan_file(self.door, segment.path)
        snapshot.add_damage(*log.damage_of(segment.path, scanned))
        self._add_scanned(snapshot, name, file, segment, scanned, Runs(segment.data_start))

    def _add_growing(self, snapshot: LogSnapshot, name: str, file: File, segment: SegmentFile, last: bool, clean: bool) -> None:
        runs = fitting_runs(segment, segment.generation, partial(self._table, name, segment.base))
        snapshot.parts += [Part(self.files.topic, name, file, False, str(run.path), run.cover) for run in runs.tables]
        if runs.missing:
            reason = "the file is shorter than its index says"
            snapshot.add_damage(Damage(file.name, file.size, runs.missing, reason))
        if runs.position >= file.size:
            return
        view, whole = file.map(), clean or not last
        scanned = scan_uncovered(view, segment, runs, whole=whole)
        if not whole and not file.sync():  # only the documents before the last barrier are durable: a sync came before it
            barriers = scanned.positions[(scanned.flags & f.BARRIER) != 0]
            durable_end = int(barriers[-1]) if len(barriers) else runs.position
            scanned = scan_uncovered(view, replace(segment, size=durable_end), runs, whole=False)
        snapshot.add_damage(*log.damage_of(segment.path, scanned))
        self._add_scanned(snapshot, name, file, segment, scanned, runs)

    def _add_scanned(self, snapshot: LogSnapshot, name: str, file: File, segment: SegmentFile, scanned: Scan, runs: Runs) -> None:
        """Parts over scanned documents, which begin behind the runs."""
        sealed = segment.header is not None and segment.header.sealed
        position, number = runs.position, runs.documents
        for first in range(0, len(scanned), SEGMENT_MESSAGES_MAX):
            span = (first, min(first + SEGMENT_MESSAGES_MAX, len(scanned)))
            cover = cover_of(
                scanned, span, base=segment.base, generation=segment.generation, first=number + first, start=position
            )
            chosen = slice(*span)
            flags = scanned.flags[chosen]
            keyed = np.flatnonzero((flags & f.TOMBSTONE) == 0)
            keys = np.sort(f.packed_keys(scanned.due_ms[chosen][keyed], keyed))
            table = bare_table(cover, keys, scanned.positions[chosen], np.flatnonzero(flags & f.ENDS))
            kept = self._keep(file, cover, table, sealed)
            snapshot.parts.append(Part(self.files.topic, name, file, sealed, kept, cover))
            position = cover.end

    def _ended(self, snapshot: LogSnapshot) -> EndedDocuments:
        """All documents that tombstones and newer versions in this log end. 1 µs each.

        The engine marks them in the ended bits of its parts; here parts of one log are read by different tasks."""
        seqs, dues, replaced = [_NONE], [_NONE], [_NONE]
        for part in snapshot.parts:
            starts_of, ends_of = PartTable(part).use(lambda table: table.spans_of(table.ending_ordinals()))
            for i in range(0, len(starts_of), _ENDING_DOCUMENTS):
                starts, ends = starts_of[i : i + _ENDING_DOCUMENTS], ends_of[i : i + _ENDING_DOCUMENTS]
                read = log.read_documents(self.door, Path(part.file.path), starts, ends)
                heads = read.heads[read.good]
                of, due = f.ended_seqs(read.buffer, read.starts[read.good], heads) if len(heads) else (_NONE, _NONE)
                seqs.append(of)
                dues.append(due)
                replaced.append(((heads["flags"] & f.REPLACES) != 0).astype(np.int64))
        of, first = np.unique(np.concatenate(seqs), return_index=True)
        return EndedDocuments(of, np.concatenate(dues)[first], np.concatenate(replaced)[first])

    # The ready log

    def ready_log(self) -> LogSnapshot:
        """The ready log up to its last whole batch, with the progress of the handoff."""
        snapshot = LogSnapshot()
        segments = self.files.segments("ready")
        while segments and segments[-1][1].size <= data_start("ready", self.files.topic, segments[-1][0]):
            segments.pop()
        clean = self._ready_clean_end(snapshot, segments)
        totals = [self._first_offset(*segment) for segment in segments[1:]] + [None if clean is None else clean.next_offset]
        read: ReadSegment | None = None
        for i, total in enumerate(totals[: len(segments)]):
            read = self._add_ready(snapshot, segments, i, total, clean)
        while read is not None and len(segments) > 1 and not read.tables and not len(read.batches.positions) and clean is None:
            segments.pop()  # no whole batch in it: the one before holds the progress
            snapshot.parts = [part for part in snapshot.parts if part.cover.base != segments[-1][0]]
            snapshot.end = snapshot.parts[-1].cover.last_seq + 1 if snapshot.parts else 0
            read = self._add_ready(snapshot, segments, len(segments) - 1, None, None)
        if clean is not None:
            snapshot.progress = clean.progress  # also if the batch with it is damaged
        return snapshot

    def _ready_clean_end(self, snapshot: LogSnapshot, segments: list[tuple[int, File]]) -> CleanEnd | None:
        """The end of the log at a clean shutdown, if it tells the offsets of the last segment."""
        broker = self.clean_mark.get("broker")
        if broker is None:
            return None
        end = CleanEnd.read(broker["ready"])
        last = (segments[-1][0], segments[-1][1].size) if segments else None
        clean, damage = check_clean_end(end, last, data_start("ready", self.files.topic, end.base))
        snapshot.add_damage(damage)
        return clean

    def _first_offset(self, base: int, file: File) -> int | None:
        start = data_start("ready", self.files.topic, base)
        return first_offset(bytes(file.map()[start : start + FIRST_BYTES]), partial(self._table, "ready", base, 0))

    def _add_ready(
        self, snapshot: LogSnapshot, segments: list[tuple[int, File]], i: int, total: int | None, clean: CleanEnd | None
    ) -> ReadSegment:
        """Read segment `i`, and add its parts. `total`: the offset behind its last document, if known."""
        base, file = segments[i]
        last = i + 1 == len(segments)
        if last:
            file.sync()
        segment = open_segment(self.door, Path(file.path), "ready", self.files.topic, base, file.size, last=False)
        assert segment is not None, "only a last segment can be torn, and those are left out above"
        if last and clean is not None:
            segment = replace(segment, size=clean.end)  # a lost end is damage, not torn
        next_offset = snapshot.end if i or not base else None
        read = read_segment(
            segment, file.map(), partial(self._table, "ready", base), next_offset=next_offset, total=total, last=last
        )
        topic = self.files.topic
        snapshot.parts += [Part(topic, "ready", file, False, str(table.path), table.cover) for table in read.tables]
        if len(read.batches.positions):
            cover = read.cover()
            table = self._keep(file, cover, ready_table(cover, read.batches.positions, read.batches.ready_ms), False)
            snapshot.parts.append(Part(topic, "ready", file, False, table, cover))
        snapshot.end = read.next_offset
        snapshot.progress = read.batches.progress or snapshot.progress
        snapshot.add_damage(*read.damage)
        return read

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
        """Base, file, first byte, whether a torn end is impossible, whether it is the newest, which is synced."""
        segments = self.files.segments(kind)
        for base, file in segments:
            start, newest = data_start(kind, self.files.topic, base), base == segments[-1][0]
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
                clean = broker is not None and tuple(map(int, broker[kind])) == (base, file.size)
                yield base, file, start, clean or not newest, newest
