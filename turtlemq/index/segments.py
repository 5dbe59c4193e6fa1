"""All segments of an Index and their parts: lookup by seq, a heap of cursors by due time, ended bits, damage.

Parts are ordered by the seqs that they hold; ranges never overlap, the memtable is last. A newer document of an id is always in
the same or a later part, so the first hit from the end decides. Nothing is written here but copies of damaged bytes: appending is
`writer`, files are opened by `recover`. Lookup by id is `lookup`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, zip_longest
from pathlib import Path

import numpy as np

from turtlemq.errors import Exhausted
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Cursor, KeyArray, Part, TablePart, rank_behind
from turtlemq.model import I64, ORDINAL_BITS, SEQ_MAX, Counters, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.storage import names
from turtlemq.storage.door import Door

KIND = "delay"
_ENDING_READ = 16_384  # documents that end others, read at once
_ASIDE_BYTES_MAX = 1 << 26  # of one damaged place that are copied
_READ_DOCUMENTS = 4_096  # read at once by a lookup
_READ_BYTES = 4 << 20  # read at once by a lookup, but one document at least


@dataclass(slots=True)
class Segment:
    """One segment file and the parts over it."""

    base: int
    path: Path
    generation: int
    sealed: bool
    size: int  # bytes up to the end of the last document
    data_start: int  # where documents begin
    ended_by: int = 0  # ends up to this seq are applied: the last seq when it was created, or when a seal rewrote it
    parts: list[Part] = field(default_factory=list)
    sifted: bool = False  # a seal removed its needless tombstones, and no segment before it has changed since

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def live(self) -> int:
        return sum(part.live for part in self.parts)

    @property
    def ending_count(self) -> int:
        """How many documents end others, in this segment or in older ones."""
        return sum(part.ending_count for part in self.parts)

    def needs(self, ending: f.Document) -> bool:
        """Would a document of this segment come back without this document that ends it?"""
        of = -1 if ending.of is None else ending.of[0]
        return ending.seq > self.ended_by and any(part.first_seq <= of <= part.last_seq for part in self.parts)


class Segments:
    """All segments and parts of one Index. `seed`: for the hashes of ids in new parts; tables of older versions have another."""

    def __init__(self, door: Door, folder: Path, topic: str, progress: Progress, seed: int = 0) -> None:
        self.door, self.folder, self.topic, self.seed = door, folder, topic, seed
        self.by_base: dict[int, Segment] = {}
        self.parts: list[Part] = []
        self.progress = progress  # handed off
        self.durable = progress  # handed off and durable with the receiver: these documents may be dropped from here
        self.counters = Counters()
        self.heap: list[tuple[int, int, Cursor]] = []
        self.unintegrated: list[TablePart] = []  # rebuilt parts without cursors and ended bits: see `finish`
        self.cursors_stale = False  # cursors are not where `progress` says
        self.last_ending_seq = 0  # of the newest document that ended another
        self._damaged: set[tuple[str, int]] = set()
        self._pushed = 0
        self._active: Segment | None = None  # cached: read many times for each message, as is the memtable
        self._memtable: Memtable | None = None

    # Segments and parts

    @property
    def active(self) -> Segment:
        return self._active or self.by_base[max(self.by_base)]

    @property
    def memtable(self) -> Memtable:
        assert self._memtable is not None, "the memtable is the last part"
        return self._memtable

    def arrange(self) -> None:
        """Order the parts and rebuild the heap. Call it after parts were added or removed."""
        self.by_base = dict(sorted(self.by_base.items()))
        self.parts = [part for segment in self.by_base.values() for part in segment.parts]
        self.parts.sort(key=lambda part: (part.first_seq, isinstance(part, Memtable)))
        self._active = self.by_base[max(self.by_base)]
        self._memtable = self.parts[-1] if self.parts and isinstance(self.parts[-1], Memtable) else None
        self.heap = []
        for part in self.parts:
            self.push(part.cursors)

    def changed(self, base: int) -> None:
        """A segment was sealed or dropped: forget positions in its file; tombstones in later segments may be needless now."""
        self._damaged = {(file, at) for file, at in self._damaged if file != names.segment(KIND, base)}
        for segment in self.by_base.values():
            segment.sifted &= segment.base <= base

    def push(self, cursors: Sequence[Cursor]) -> None:
        """Put cursors on the heap at their next due time. Outdated entries stay until they are met at the top."""
        for cursor in cursors:
            if cursor.head is not None:
                self._pushed += 1
                heappush(self.heap, (cursor.head, self._pushed, cursor))
        if len(self.heap) > 64 + 8 * len(self.parts):
            self.heap = [entry for entry in self.heap if _current(entry)]
            heapify(self.heap)

    def next_due_ms(self) -> int | None:
        """Due time of the next key, perhaps of a cancelled message. O(1)."""
        heap = self.heap
        while heap and not _current(heap[0]):
            heappop(heap)
        first = heap[0][0] if heap else None
        if self._memtable is not None and self._memtable.single_keys:
            head = self._memtable.single_keys[0] >> ORDINAL_BITS
            return head if first is None or head < first else first
        return first

    def due_cursors(self, now_ms: int) -> list[Cursor]:
        """Cursors with a key at or before `now_ms`, oldest documents first. They stay on the heap."""
        heap, memtable = self.heap, self.memtable
        due: list[Cursor] = []
        if heap and heap[0][0] <= now_ms:
            distinct: dict[int, Cursor] = {}
            while heap and heap[0][0] <= now_ms:
                entry = heappop(heap)
                if _current(entry):
                    distinct[id(entry[2])] = entry[2]
            due = list(distinct.values())
            self.push(due)
            if len(due) > 1:
                due.sort(key=lambda cursor: (cursor.order, not cursor.late))
        if memtable.single_keys and memtable.single_keys[0] >> ORDINAL_BITS <= now_ms:
            due.append(memtable.list_cursor())
        return due

    # Finding documents

    def part_of(self, seq: int) -> Part | None:
        """The part whose range of seqs includes this one. O(log parts)."""
        return _holding(self.parts, seq)

    def read_one(self, part: Part, ordinal: int) -> f.Document | None:
        """One document. None, and a report, if its bytes are damaged."""
        start, end = part.span_of(ordinal)
        data = log.read_document(self.door, part.path, start, end)
        if data is None:
            self.damage(Damage(part.path.name, start, end - start, "checksum does not match"))
        return None if data is None else f.decode(data)

    def read_many(self, part: Part, ordinals: I64) -> Iterator[f.Document | None]:
        """Documents of a part; None, and a report, for damaged ones. 10 µs each."""
        for _, read in self.read_slices(part, ordinals):
            view = memoryview(read.buffer)
            for at, length, good in zip(read.starts.tolist(), read.heads["len"].tolist(), read.good.tolist(), strict=True):
                yield f.decode(view[at : at + length]) if good else None

    def read_slices(self, part: Part, ordinals: I64) -> Iterator[tuple[I64, log.Documents]]:
        """Read documents of a part in slices of bounded number and size. Damaged ones are reported."""
        starts, ends = part.spans_of(ordinals)
        total = np.cumsum(ends - starts)
        first = 0
        while first < len(ordinals):
            fits = int(np.searchsorted(total, (total[first - 1] if first else 0) + _READ_BYTES, side="right"))
            last = max(first + 1, min(fits, first + _READ_DOCUMENTS))
            read = part.read(self.door, ordinals[first:last])
            self.report(part, read, ordinals[first:last])
            yield ordinals[first:last], read
            first = last

    def read_raw(self, places: Sequence[tuple[Part, int]]) -> Iterator[bytes | None]:
        """The bytes of documents, given as part and ordinal, in this order; None, and a report, for damaged ones. Read in slices
        of bounded number and size, without arrays. 3 µs each."""
        spans = [part.span_of(ordinal) for part, ordinal in places]
        first = 0
        while first < len(spans):
            last, size = first, 0
            while last < min(len(spans), first + _READ_DOCUMENTS) and (size < _READ_BYTES or last == first):
                size += spans[last][1] - spans[last][0]
                last += 1
            yield from self._read_together([part.path for part, _ in places[first:last]], spans[first:last])
            first = last

    def _read_together(self, paths: Sequence[Path], spans: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The bytes of documents in these ranges of files, one call for each file. None, and a report, for damaged ones."""
        out: list[bytes | None] = [None] * len(spans)
        by_path: dict[Path, list[int]] = {}
        for i, path in enumerate(paths):
            by_path.setdefault(path, []).append(i)
        for path, rows in by_path.items():
            for i, found in zip(rows, log.read_small(self.door, path, [spans[i] for i in rows]), strict=True):
                if found is None:
                    start, end = spans[i]
                    self.damage(Damage(path.name, start, end - start, "checksum does not match"))
                else:
                    out[i] = found[3]
        return out

    # Ending documents

    def end_documents(self, ends: Sequence[tuple[int, int]], seen: Sequence[tuple[Part, int]] = ()) -> None:
        """End documents, given as seq and due time. Those that are gone are left out. `seen`: the places of all of them from an
        earlier lookup, or none."""
        for part, ordinal in self._places(ends, seen):
            part.mark_ended(ordinal)

    def end_handed_off(self, ends: Sequence[tuple[int, int]]) -> None:
        """End documents that were handed off, given as seq and due time: if a power cut takes their handoff back, they must not
        sleep again. Those that are gone are left out."""
        for part, ordinal in self._places(ends, ()):
            changed = part.mark_ended(ordinal)
            part.live += changed  # it did not count as a sleeper any more

    def _places(self, ends: Sequence[tuple[int, int]], seen: Sequence[tuple[Part, int]]) -> list[tuple[Part, int]]:
        """Parts and ordinals of documents, given as seq and due time, and their places if a lookup has `seen` them."""
        places: list[tuple[Part, int]] = []
        unseen: dict[Part, list[tuple[int, int]]] = {}
        for end, place in zip_longest(ends, seen):
            if place is not None and not place[0].gone:
                places.append(place)
            elif (part := self.part_of(end[0])) is not None:
                unseen.setdefault(part, []).append(end)
        for part, rows in unseen.items():
            places += [(part, ordinal) for ordinal in self._locate(part, rows)]
        return places

    def _locate(self, part: Part, rows: Sequence[tuple[int, int]]) -> list[int]:
        """Ordinals of documents of a part, given as seq and due time. Those that it does not have are left out."""
        if len(rows) == 1:  # without arrays
            ((seq, due_ms),) = rows
            ordinal = part.locate(self.door, due_ms, seq)
            return [] if ordinal is None else [ordinal]
        seqs, dues = np.array(rows, np.int64).T
        ordinals: list[int] = part.locate_many(self.door, dues, seqs).tolist()
        return ordinals

    def apply_ends(self, targets: Sequence[Part]) -> None:
        """Set ended bits in these parts, from all documents of the Index that end others and are newer than their `ended_by`."""
        targets = sorted(targets, key=lambda part: part.first_seq)
        oldest = min((max(part.ended_by, part.first_seq) for part in targets), default=SEQ_MAX)
        for part in self.parts:
            if part.last_seq <= oldest:
                continue
            ordinals = part.ending_ordinals()
            for i in range(0, len(ordinals), _ENDING_READ):
                self._apply(part, ordinals[i : i + _ENDING_READ], targets)

    def _apply(self, part: Part, ordinals: I64, targets: Sequence[Part]) -> None:
        """Set ended bits for what these documents of `part` end. 3 µs each."""
        read = part.read(self.door, ordinals)
        self.report(part, read, ordinals)
        if not read.good.any():
            return
        ending_seqs = read.heads["seq"][read.good]
        seqs, dues = f.ended_seqs(read.buffer, read.starts[read.good], read.heads[read.good])
        self.last_ending_seq = max(self.last_ending_seq, int(ending_seqs.max()))
        for target in targets:
            inside = (seqs >= target.first_seq) & (seqs <= target.last_seq) & (ending_seqs > target.ended_by)
            if inside.any():
                for ordinal in target.locate_many(self.door, dues[inside], seqs[inside]).tolist():
                    target.mark_ended(ordinal)

    def ending_documents(self, part: Part) -> Iterator[f.Document]:
        """The documents of a part that end others. 10 µs each."""
        ordinals = part.ending_ordinals()
        for i in range(0, len(ordinals), _ENDING_READ):
            for document in self.read_many(part, ordinals[i : i + _ENDING_READ]):
                if document is not None and document.of is not None:
                    yield document

    # Cursors

    def set_cursors(self, part: TablePart, seqs: I64 | None = None) -> None:
        """Put the cursors of a part behind the keys that were handed off, by `progress`. `seqs`: by ordinal, if the caller has
        them; else they are read."""
        for cursor in part.cursors:
            cursor.alive = False
        part.cursors = []
        marks = self.progress.marks
        if not len(part.table):
            return
        ends = [rank_behind(self.door, part, part.table, m.due_ms, m.seq) if m.seq_max >= part.first_seq else 0 for m in marks]
        pos = max(ends, default=0)
        part.cursors = [Cursor(part, part.table, part.first_seq, pos)]
        if all(m.seq_max >= part.last_seq for m, end in zip(marks, ends, strict=True) if end):
            return
        # Some keys before `pos` were appended after the handoff that got there: they still sleep, on a cursor of their own.
        keys = part.table.slice(0, pos)
        if seqs is None:
            starts, _ = part.spans_of(f.key_ordinals(keys))
            seqs = log.read_prefixes(self.door, part.path, starts)["seq"]
        else:
            seqs = seqs[f.key_ordinals(keys)]
        late = keys[~self.progress.covers(f.key_dues(keys), seqs)]
        if len(late):
            part.cursors.append(Cursor(part, KeyArray(late), part.first_seq, late=True))

    def finish(self) -> None:
        """Complete steps that an error interrupted. Required before anything is read or handed off."""
        if not self.unintegrated and not self.cursors_stale:
            return
        while self.unintegrated:
            part = self.unintegrated[-1]
            if part in self.parts:
                self.integrate(part)
            self.unintegrated.remove(part)
        self.set_all_cursors()

    def integrate(self, part: TablePart) -> None:
        """Set the cursors of a new part, and the bits of documents that were ended since its table was built."""
        self.set_cursors(part)
        self.apply_ends([part])
        part.live = part.count_live()

    def set_all_cursors(self) -> None:
        """Put every cursor behind the keys that were handed off, and count the sleepers again."""
        for part in self.parts:
            if isinstance(part, TablePart):
                self.set_cursors(part)
            elif isinstance(part, Memtable):
                part.restart(self.progress.covers(part.due[: part.count], part.seq[: part.count]))
            part.live = part.count_live()
        self.arrange()
        self.cursors_stale = False

    # Damage

    def report(self, part: Part, read: log.Documents, ordinals: I64) -> None:
        """Report the documents of a read that are not as written, each once."""
        if read.good.all():
            return
        starts, ends = part.spans_of(ordinals)
        for i in np.flatnonzero(~read.good).tolist():
            self.damage(Damage(part.path.name, int(starts[i]), int(ends[i] - starts[i]), "checksum does not match"))

    def strays(self, part: Part, documents: Iterable[tuple[int, f.Document]]) -> Iterator[int]:
        """Report good documents that were not written for their place. Yields their numbers in `documents`, which has ordinals
        with the document read there. 5 µs each.

        A misplaced write leaves a document twice. If the index cannot tell the two apart, the second is the stray."""
        seen: set[int] = set()
        for number, (ordinal, document) in enumerate(documents):
            if part.holds(ordinal, document) and document.seq not in seen:
                seen.add(document.seq)
            else:
                start, end = part.span_of(ordinal)
                self.damage(Damage(part.path.name, start, end - start, "another document stands in its place"))
                yield number

    def damage(self, damage: Damage) -> None:
        """Report damaged bytes once, and keep a copy of them: the segment may be dropped later."""
        if (damage.file, damage.position) in self._damaged:
            return
        self._damaged.add((damage.file, damage.position))
        self.counters.damage.append(damage)
        try:
            keep_aside(self.door, self.folder / damage.file, damage)
        except (OSError, Exhausted):
            return  # the report is what matters


def keep_aside(door: Door, path: Path, damage: Damage) -> None:
    """Copy damaged bytes to a file of their own. A number in its name keeps it apart from bytes of that place before a seal."""
    data = door.read(path, damage.position, min(damage.length, _ASIDE_BYTES_MAX))
    for number in count():
        target = path.with_name(f"{path.name}.{damage.position}{f'.{number}' if number else ''}.damaged")
        if not data or (door.exists(target) and door.read_all(target) == data):
            return
        if not door.exists(target):
            door.replace(target, data)
            return


def _holding(parts: Sequence[Part], seq: int) -> Part | None:
    """The part whose range of seqs includes this one. Requires: ordered by seq."""
    i = bisect_right(parts, seq, key=lambda part: part.first_seq) - 1
    return parts[i] if i >= 0 and seq <= parts[i].last_seq else None


def _current(entry: tuple[int, int, Cursor]) -> bool:
    return entry[2].alive and entry[2].head == entry[0]


def table_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.table(KIND, base, first)


def ended_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.ended_bits(KIND, base, first)
