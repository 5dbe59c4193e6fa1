"""The shelf: which segments and parts there are, the heap of cursors over them, and finding documents by id or by seq.

Parts stand in order of the seqs that they hold, ranges never overlap, the memtable comes last. A newer document of an id always
stands behind the older ones, so the first hit from the end decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from turtlemq.door import Door
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Array, Cursor, Part, TablePart
from turtlemq.model import I64, ORDINAL_BITS, SEQ_MAX, U64, Counters, Damage, Progress, SegmentLoad
from turtlemq.segment import format as f
from turtlemq.segment import log, names

KIND = "delay"


@dataclass(slots=True)
class Segment:
    """One segment file and the parts over it."""

    base: int
    path: Path
    generation: int
    sealed: bool
    size: int  # bytes of the file that count
    data_start: int  # where documents begin
    parts: list[Part] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def live(self) -> int:
        return sum(part.live for part in self.parts)

    @property
    def load(self) -> SegmentLoad:
        return SegmentLoad(self.base, self.size, self.documents, self.live, self.sealed)

    def holds(self, seq: int) -> bool:
        return any(part.first_seq <= seq <= part.last_seq for part in self.parts)


class Shelf:
    """All parts of one topic. Nothing here writes."""

    def __init__(self, door: Door, folder: Path, topic: str) -> None:
        self.door, self.folder, self.topic = door, folder, topic
        self.segments: dict[int, Segment] = {}
        self.parts: list[Part] = []
        self.progress = Progress()
        self.counters = Counters()
        self.heap: list[tuple[int, int, Cursor]] = []
        self._damaged: set[tuple[str, int]] = set()
        self._pushed = 0

    # Which parts there are

    @property
    def active(self) -> Segment:
        return self.segments[max(self.segments)]

    @property
    def memtable(self) -> Memtable:
        last = self.parts[-1]
        assert isinstance(last, Memtable), "the memtable stands last"
        return last

    def arrange(self) -> None:
        """Order the parts and rebuild the heap, after parts have come or gone."""
        self.segments = dict(sorted(self.segments.items()))
        self.parts = [part for segment in self.segments.values() for part in segment.parts]
        self.parts.sort(key=lambda part: (part.first_seq, isinstance(part, Memtable)))
        self.heap = []
        for part in self.parts:
            self.push(part.cursors)

    def push(self, cursors: Sequence[Cursor]) -> None:
        """Put cursors on the heap at their next due time. Entries that a cursor has left behind are dropped when met."""
        for cursor in cursors:
            if cursor.head is not None:
                self._pushed += 1
                heappush(self.heap, (cursor.head, self._pushed, cursor))
        if len(self.heap) > 64 + 8 * len(self.parts):
            self.heap = [entry for entry in self.heap if _current(entry)]
            heapify(self.heap)

    def next_due_ms(self) -> int | None:
        """When the next key is due; it may belong to a cancelled message. O(1)."""
        heap = self.heap
        while heap and not _current(heap[0]):
            heappop(heap)
        first = heap[0][0] if heap else None
        small = self.parts[-1].small if isinstance(self.parts[-1], Memtable) else ()
        if small:
            head = int(small[0]) >> ORDINAL_BITS
            return head if first is None else min(first, head)
        return first

    def due_cursors(self, now_ms: int) -> list[Cursor]:
        """Cursors with a key at or before now, oldest documents first. The heap is left as it is."""
        memtable = self.memtable
        if memtable.small and int(memtable.small[0]) >> ORDINAL_BITS <= now_ms:
            self.push(memtable.spill())
        found: dict[int, Cursor] = {}
        while self.heap and self.heap[0][0] <= now_ms:
            entry = heappop(self.heap)
            if _current(entry):
                found[id(entry[2])] = entry[2]
        self.push(list(found.values()))
        return sorted(found.values(), key=lambda cursor: (cursor.order, not cursor.late))

    # Finding documents

    def part_of(self, seq: int) -> Part | None:
        """The part whose range holds this seq. O(log parts)."""
        i = bisect_right(self.parts, seq, key=lambda part: part.first_seq) - 1
        return self.parts[i] if i >= 0 and seq <= self.parts[i].last_seq else None

    def read_one(self, part: Part, ordinal: int) -> f.Document | None:
        """One document, or None if its bytes are damaged (reported)."""
        read = part.read(self.door, np.array([ordinal]))
        self.report(part, read, np.array([ordinal]))
        if not read.good[0]:
            return None
        at = int(read.starts[0])
        return f.decode(memoryview(read.buffer)[at : at + int(read.heads["len"][0])])

    def find(self, id_: str) -> tuple[Part, int, f.Document] | None:
        """The newest document of an id that was not cancelled or replaced. 2 µs a part, and a pread for the hit."""
        hash_ = f.hash_id(id_)
        seq = f.server_seq(id_)
        hinted = None if seq is None else self.part_of(seq)
        if hinted is not None:
            assert seq is not None
            found = hinted.find_seq(seq) if isinstance(hinted, Memtable) else None
            hit = self._verify(hinted, hinted.find(hash_) if found is None else (found,), id_)
            if hit is not None:
                return hit
        for part in reversed(self.parts):
            hit = self._verify(part, part.find(hash_), id_)
            if hit is not None:
                return hit
        return None

    def _verify(self, part: Part, ordinals: Sequence[int], id_: str) -> tuple[Part, int, f.Document] | None:
        for ordinal in ordinals:
            if part.alive(np.array([ordinal]))[0]:
                document = self.read_one(part, ordinal)
                if document is not None and document.id == id_:
                    return part, ordinal, document
        return None

    def find_many(self, ids: Sequence[bytes], hashes: U64) -> dict[int, int]:
        """Which of many ids are held, as index → seq of the document. The Bloom filters keep this at 0.5 µs an id."""
        held: dict[int, int] = {}
        for part in reversed(self.parts):
            candidates = [c for c in part.find_many(hashes) if c[0] not in held]
            if not candidates:
                continue
            ordinals = np.array([ordinal for _, ordinal in candidates])
            alive = part.alive(ordinals)
            read = part.read(self.door, ordinals)
            self.report(part, read, ordinals)
            for k, (i, _) in enumerate(candidates):
                at = int(read.starts[k]) + f.PREFIX_BYTES
                if alive[k] and read.good[k] and read.buffer[at : at + int(read.heads["idlen"][k]) - 1] == ids[i]:
                    held.setdefault(i, int(read.heads["seq"][k]))
        return held

    # Ending documents

    def kill(self, seq: int, due_ms: int) -> bool:
        """End the document with this seq, if it is still there and was not ended yet."""
        part = self.part_of(seq)
        ordinal = None if part is None else part.locate(self.door, due_ms, seq)
        return ordinal is not None and part is not None and part.kill(ordinal)

    def apply_kills(self, victims: Sequence[Part]) -> None:
        """Work tombstones into these parts that are newer than what they know of."""
        oldest = min((part.killed_seq for part in victims), default=SEQ_MAX)
        for part in self.parts:
            if part.last_seq <= oldest:
                continue
            for document in self.killers(part):
                assert document.of is not None
                victim = self.part_of(document.of[0])
                if victim is not None and victim in victims and document.seq > victim.killed_seq:
                    self.kill(*document.of)

    def killers(self, part: Part) -> Iterator[f.Document]:
        """The documents of a part that end others."""
        for ordinal in part.kills().tolist():
            document = self.read_one(part, ordinal)
            if document is not None and document.of is not None:
                yield document

    # Handed off

    def place(self, part: TablePart, seqs: I64 | None = None) -> None:
        """Set the cursors of a part to what `progress` says was handed off. `seqs` by ordinal, where the caller knows them."""
        for cursor in part.cursors:
            cursor.alive = False
        part.cursors = []
        marks = self.progress.marks
        if not len(part.table):
            return
        ends = [part.handed_before(self.door, m.due_ms, m.seq) if m.seq_max >= part.first_seq else 0 for m in marks]
        pos = max(ends, default=0)
        part.cursors = [Cursor(part, part.table, part.first_seq, pos)]
        if all(m.seq_max >= part.last_seq for m, end in zip(marks, ends, strict=True) if end):
            return
        # Some keys before `pos` came after the handoff that reached so far: they sleep still, on a cursor of their own.
        keys = part.table.slice(0, pos)
        if seqs is None:
            starts, _ = part.places(f.key_ordinals(keys))
            seqs = log.read_prefixes(self.door, part.path, starts)["seq"]
        else:
            seqs = seqs[f.key_ordinals(keys)]
        late = keys[~self.progress.covers(f.key_dues(keys), seqs)]
        if len(late):
            part.cursors.append(Cursor(part, Array(late), part.first_seq, late=True))

    # Damage

    def report(self, part: Part, read: log.Documents, ordinals: I64) -> None:
        """Note documents that are not what was written, once each."""
        if read.good.all():
            return
        starts, ends = part.places(ordinals)
        for i in np.flatnonzero(~read.good).tolist():
            self.damage(Damage(part.path.name, int(starts[i]), int(ends[i] - starts[i]), "checksum does not match"))

    def damage(self, damage: Damage) -> None:
        if (damage.file, damage.position) not in self._damaged:
            self._damaged.add((damage.file, damage.position))
            self.counters.damage.append(damage)


def _current(entry: tuple[int, int, Cursor]) -> bool:
    return entry[2].alive and entry[2].head == entry[0]


def table_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.table(KIND, base, first)


def dead_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.dead(KIND, base, first)
