"""The segments: which segments and parts there are, the heap of cursors over them, and finding documents by id or by seq.

Parts stand in order of the seqs that they hold, ranges never overlap, the memtable comes last. A newer document of an id always
stands behind the older ones, so the first hit from the end decides. Nothing here writes, but for copies of damaged bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from turtlemq.errors import DiskFull
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Array, Cursor, IdQuery, Part, TablePart, rank_behind
from turtlemq.model import I64, ORDINAL_BITS, SEQ_MAX, U64, Counters, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.bloom import BloomFilter
from turtlemq.segment.ids import hash_id, server_seq
from turtlemq.storage import names
from turtlemq.storage.door import Door

KIND = "delay"
_KILLERS = 16_384  # tombstones read at once
_ASIDE_BYTES_MAX = 1 << 26


@dataclass(slots=True)
class Segment:
    """One segment file and the parts over it."""

    base: int
    path: Path
    generation: int
    sealed: bool
    size: int  # bytes of the file that count
    data_start: int  # where documents begin
    ended_by: int = 0  # only documents behind this seq can end what is in here: when it began, or what a seal worked in
    parts: list[Part] = field(default_factory=list)
    sifted: bool = False  # its tombstones were sifted by a seal, and nothing before it has changed since

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def live(self) -> int:
        return sum(part.live for part in self.parts)

    @property
    def ending_count(self) -> int:
        """How many documents end others, perhaps in segments before this one."""
        return sum(part.ending_count for part in self.parts)

    def needs(self, stone: f.Document) -> bool:
        """Would a document of this segment come back without this tombstone?"""
        of = -1 if stone.of is None else stone.of[0]
        return stone.seq > self.ended_by and any(part.first_seq <= of <= part.last_seq for part in self.parts)


class Hit(NamedTuple):
    """A document that was found, and its place."""

    part: Part
    ordinal: int
    document: f.Document


class Segments:
    """All parts of one topic."""

    def __init__(self, door: Door, folder: Path, topic: str, progress: Progress) -> None:
        self.door, self.folder, self.topic = door, folder, topic
        self.by_base: dict[int, Segment] = {}
        self.parts: list[Part] = []
        self.progress = progress  # handed off
        self.durable = progress  # handed off and durable with the receiver: these documents may be dropped from here
        self.counters = Counters()
        self.heap: list[tuple[int, int, Cursor]] = []
        self.unintegrated: list[TablePart] = []  # parts that have just come: see `finish`
        self.cursors_stale = False  # cursors do not stand where `progress` says
        self.last_ending_seq = 0  # the newest document that ended another
        self._damaged: set[tuple[str, int]] = set()
        self._pushed = 0
        self._active: Segment | None = None  # both are asked for many times a message
        self._memtable: Memtable | None = None

    # Which parts there are

    @property
    def active(self) -> Segment:
        return self._active or self.by_base[max(self.by_base)]

    @property
    def memtable(self) -> Memtable:
        assert self._memtable is not None, "the memtable stands last"
        return self._memtable

    def arrange(self) -> None:
        """Order the parts and rebuild the heap, after parts have come or gone."""
        self.by_base = dict(sorted(self.by_base.items()))
        self.parts = [part for segment in self.by_base.values() for part in segment.parts]
        self.parts.sort(key=lambda part: (part.first_seq, isinstance(part, Memtable)))
        self._active = self.by_base[max(self.by_base)]
        self._memtable = self.parts[-1] if self.parts and isinstance(self.parts[-1], Memtable) else None
        self.heap = []
        for part in self.parts:
            self.push(part.cursors)

    def changed(self, base: int) -> None:
        """A segment was sealed or dropped: positions in its file mean nothing now, and tombstones behind it may be needless."""
        self._damaged = {place for place in self._damaged if place[0] != names.segment(KIND, base)}
        for segment in self.by_base.values():
            segment.sifted &= segment.base <= base

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
        if self._memtable is not None and self._memtable.single_keys:
            head = self._memtable.single_keys[0] >> ORDINAL_BITS
            return head if first is None or head < first else first
        return first

    def due_cursors(self, now_ms: int) -> list[Cursor]:
        """Cursors with a key at or before now, oldest documents first. The heap is left as it is."""
        heap, memtable = self.heap, self.memtable
        due: list[Cursor] = []
        if heap and heap[0][0] <= now_ms:
            found: dict[int, Cursor] = {}
            while heap and heap[0][0] <= now_ms:
                entry = heappop(heap)
                if _current(entry):
                    found[id(entry[2])] = entry[2]
            due = list(found.values())
            self.push(due)
            if len(due) > 1:
                due.sort(key=lambda cursor: (cursor.order, not cursor.late))
        if memtable.single_keys and memtable.single_keys[0] >> ORDINAL_BITS <= now_ms:
            due.append(memtable.singles())
        return due

    # Finding documents

    def part_of(self, seq: int) -> Part | None:
        """The part whose range holds this seq. O(log parts)."""
        return _holding(self.parts, seq)

    def read_one(self, part: Part, ordinal: int) -> f.Document | None:
        """One document, or None if its bytes are damaged (reported)."""
        start, end = part.span_of(ordinal)
        data = log.read_document(self.door, part.path, start, end)
        if data is None:
            self.damage(Damage(part.path.name, start, end - start, "checksum does not match"))
        return None if data is None else f.decode(data)

    def read_many(self, part: Part, ordinals: I64) -> Iterator[f.Document | None]:
        """Documents of a part, with None for those whose bytes are damaged (reported). 10 µs each."""
        read = part.read(self.door, ordinals)
        self.report(part, read, ordinals)
        view = memoryview(read.buffer)
        for at, length, good in zip(read.starts.tolist(), read.heads["len"].tolist(), read.good.tolist(), strict=True):
            yield f.decode(view[at : at + length]) if good else None

    def find(self, id_: str) -> Hit | None:
        """The newest document of an id that was not cancelled or replaced. 2 µs a part, and a pread for the hit."""
        if not id_.isprintable():  # no id is, and some such text has no bytes
            return None
        hash_ = hash_id(id_)
        seq = server_seq(id_)
        hinted = None if seq is None else self.part_of(seq)
        if hinted is not None:
            assert seq is not None
            found = hinted.find_seq(seq) if isinstance(hinted, Memtable) else None
            hit = self._verify(hinted, hinted.find(hash_) if found is None else (found,), id_)
            if hit is not None:
                return hit
        maybe: dict[BloomFilter | None, bool] = {None: True}
        for part in reversed(self.parts):
            filter_ = part.filter
            if filter_ not in maybe:
                assert filter_ is not None
                maybe[filter_] = filter_.may_hold_one(hash_)
            if maybe[filter_] and (ordinals := part.find(hash_)) and (hit := self._verify(part, ordinals, id_)) is not None:
                return hit
        return None

    def _verify(self, part: Part, ordinals: Sequence[int], id_: str) -> Hit | None:
        for ordinal in ordinals:
            if part.alive_one(ordinal):
                document = self.read_one(part, ordinal)
                if document is not None and document.id == id_:
                    return Hit(part, ordinal, document)
        return None

    def find_many(self, ids: Sequence[bytes], hashes: U64, after_seq: int = -1) -> dict[int, int]:
        """Which of many ids are held, as index → seq of the document. 0.2 µs for one that is not. Parts in which nothing is newer
        than `after_seq` are passed over."""
        held: dict[int, int] = {}
        everything = IdQuery.of(hashes)
        wanted: dict[BloomFilter | None, IdQuery] = {None: everything}
        for part in reversed(self.parts):
            if part.last_seq <= after_seq:
                continue
            if part.filter is not None and part.filter not in wanted:
                wanted[part.filter] = everything.through(part.filter)
            candidates = part.find_many(wanted[part.filter])
            if held:
                candidates = [candidate for candidate in candidates if candidate[0] not in held]
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

    def end_document(self, seq: int, due_ms: int, seen: tuple[Part, int] | None = None) -> bool:
        """End the document with this seq, if it is still there and was not ended yet. `seen`: where it was found before."""
        if seen is not None and not seen[0].gone:
            return seen[0].mark_ended(seen[1])
        part = self.part_of(seq)
        ordinal = None if part is None else part.locate(self.door, due_ms, seq)
        return ordinal is not None and part is not None and part.mark_ended(ordinal)

    def apply_ends(self, victims: Sequence[Part]) -> None:
        """Work tombstones into these parts that are newer than what they know of."""
        victims = sorted(victims, key=lambda part: part.first_seq)
        oldest = min((max(part.ended_by, part.first_seq) for part in victims), default=SEQ_MAX)
        for part in self.parts:
            if part.last_seq <= oldest:
                continue
            kills = part.ending_ordinals()
            for i in range(0, len(kills), _KILLERS):
                self._apply(part, kills[i : i + _KILLERS], victims)

    def _apply(self, part: Part, kills: I64, victims: Sequence[Part]) -> None:
        """Work these documents of a part into those that they end. 3 µs each."""
        read = part.read(self.door, kills)
        self.report(part, read, kills)
        if not read.good.any():
            return
        by = read.heads["seq"][read.good]
        seqs, dues = f.ended_seqs(read.buffer, read.starts[read.good], read.heads[read.good])
        self.last_ending_seq = max(self.last_ending_seq, int(by.max()))
        for victim in victims:
            mine = (seqs >= victim.first_seq) & (seqs <= victim.last_seq) & (by > victim.ended_by)
            if mine.any():
                for ordinal in victim.locate_many(self.door, dues[mine], seqs[mine]).tolist():
                    victim.mark_ended(ordinal)

    def ending_documents(self, part: Part) -> Iterator[f.Document]:
        """The documents of a part that end others. 10 µs each."""
        kills = part.ending_ordinals()
        for i in range(0, len(kills), _KILLERS):
            for document in self.read_many(part, kills[i : i + _KILLERS]):
                if document is not None and document.of is not None:
                    yield document

    # Handed off

    def set_cursors(self, part: TablePart, seqs: I64 | None = None) -> None:
        """Set the cursors of a part to what `progress` says was handed off. `seqs` by ordinal, where the caller knows them."""
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
        # Some keys before `pos` came after the handoff that reached so far: they sleep still, on a cursor of their own.
        keys = part.table.slice(0, pos)
        if seqs is None:
            starts, _ = part.spans_of(f.key_ordinals(keys))
            seqs = log.read_prefixes(self.door, part.path, starts)["seq"]
        else:
            seqs = seqs[f.key_ordinals(keys)]
        late = keys[~self.progress.covers(f.key_dues(keys), seqs)]
        if len(late):
            part.cursors.append(Cursor(part, Array(late), part.first_seq, late=True))

    def finish(self) -> None:
        """Do what an error left half done, before anything is read or handed off."""
        if not self.unintegrated and not self.cursors_stale:
            return
        while self.unintegrated:
            part = self.unintegrated[-1]
            if part in self.parts:
                self.integrate(part)
            self.unintegrated.remove(part)
        self.set_all_cursors()

    def integrate(self, part: TablePart) -> None:
        """Set the cursors of a part that has just come, and end in it what was ended since it was made."""
        self.set_cursors(part)
        self.apply_ends([part])
        part.live = part.count_live()

    def set_all_cursors(self) -> None:
        """Set every cursor to what `progress` says was handed off, and count the sleepers anew."""
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
        """Note documents that are not what was written, once each."""
        if read.good.all():
            return
        starts, ends = part.spans_of(ordinals)
        for i in np.flatnonzero(~read.good).tolist():
            self.damage(Damage(part.path.name, int(starts[i]), int(ends[i] - starts[i]), "checksum does not match"))

    def strays(self, part: Part, found: Iterable[tuple[int, f.Document]]) -> Iterator[int]:
        """Of good documents, each with the ordinal whose place it has, the numbers of those that were not written there
        (reported). A misplaced write leaves one twice; of two that no index tells apart, the second counts as such. 5 µs each."""
        seen: set[int] = set()
        for number, (ordinal, document) in enumerate(found):
            if part.holds(ordinal, document) and document.seq not in seen:
                seen.add(document.seq)
            else:
                start, end = part.span_of(ordinal)
                self.damage(Damage(part.path.name, start, end - start, "another document stands in its place"))
                yield number

    def damage(self, damage: Damage) -> None:
        """Note damaged bytes, and keep a copy of them: their segment may go one day."""
        if (damage.file, damage.position) in self._damaged:
            return
        self._damaged.add((damage.file, damage.position))
        self.counters.damage.append(damage)
        try:
            keep_aside(self.door, self.folder / damage.file, damage)
        except (OSError, DiskFull):
            return  # the damage is what must be told


def keep_aside(door: Door, path: Path, damage: Damage) -> None:
    """Keep damaged bytes in a file of their own, beside those that stood at the same place before a seal."""
    data = door.read(path, damage.position, min(damage.length, _ASIDE_BYTES_MAX))
    for number in count():
        target = path.with_name(f"{path.name}.{damage.position}{f'.{number}' if number else ''}.damaged")
        if not data or (door.exists(target) and door.read_all(target) == data):
            return
        if not door.exists(target):
            door.replace(target, data)
            return


def _holding(parts: Sequence[Part], seq: int) -> Part | None:
    """Of parts in order of their seqs, the one whose range holds this seq."""
    i = bisect_right(parts, seq, key=lambda part: part.first_seq) - 1
    return parts[i] if i >= 0 and seq <= parts[i].last_seq else None


def _current(entry: tuple[int, int, Cursor]) -> bool:
    return entry[2].alive and entry[2].head == entry[0]


def table_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.table(KIND, base, first)


def ended_path(folder: Path, base: int, first: int | None) -> Path:
    return folder / names.ended_bits(KIND, base, first)
