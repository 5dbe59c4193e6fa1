"""Maintenance of an Index: seal full segments, compact segments in which few messages sleep, drop empty ones.

`policy` decides, this module acts, in small steps. Compaction is nothing special: each sleeper is appended again as a new version
of itself that ends the old one, so a crash at any point leaves exactly one of the two. `seal` rewrites a segment, perhaps in
another process; `adopt` puts its result in place.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from pathlib import Path

import numpy as np

from turtlemq.errors import Exhausted
from turtlemq.index import policy
from turtlemq.index.columns import UNHASHED, Columns
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.repair import repairing, retire
from turtlemq.index.seal import Sealed, SealJob
from turtlemq.index.segments import Segment, Segments, ended_path, table_path
from turtlemq.index.writer import Writer
from turtlemq.message_fields import optional_of
from turtlemq.model import I64, Mask, SegmentLoad
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.storage import names

_PUT_OFF_MAX = 30  # steps in a row that are put off while large batches are written
_MOVED_BYTES = 4 << 20  # of sleepers moved in one step: requests wait as long as it takes


class Maintenance:
    """The maintenance of one Index. Same thread as the Index; each call is one small step."""

    def __init__(self, segments: Segments, writer: Writer) -> None:
        self._segments, self._writer = segments, writer
        self._put_off = 0  # steps put off in a row

    def step(self, budget: int, busy: int | None, skip: Set[int] = frozenset()) -> tuple[SealJob | None, bool]:
        """Drop empty segments, move up to `budget` sleepers, or choose a segment to seal. Returns the order for that seal, or
        None, and whether there is more to do.

        `busy`: the segment whose seal is under way. `skip`: segments that could not be sealed."""
        segments, writer, settings = self._segments, self._writer, self._writer.settings
        if writer.stopped is not None:
            return None, False
        if writer.is_writing_much and self._put_off < _PUT_OFF_MAX:  # a commit now would wait for it: up to 300 ms
            self._put_off += 1
            return None, True
        self._put_off = 0
        waiting = not self._roll_if_sparse()
        try:
            writer.finish_flush()
        except (OSError, t.Damaged):
            pass  # the memtable serves on
        if self._keeps_files:
            return None, bool(writer.frozen)
        loads = []
        for segment in list(segments.by_base.values()):
            if segment is segments.active or segment.base == busy or self._flushing(segment):  # asked anew: `drop` may roll
                continue
            if segment.live:
                loads.append(self._load(segment, segment.base in skip))
            elif not repairing(segments, partial(self._all_safe, segment)):
                waiting = True
            elif self._ending_count(segment) > min(budget, settings.compact_live_ratio * segment.documents):
                loads.append(self._load(segment, segment.base in skip))  # a seal finds out which of its tombstones are needed
            else:
                self.drop(segment.base)
        plan, waiting = policy.plan(loads, settings), waiting or bool(writer.frozen)
        if plan is None:
            return None, waiting
        if plan.task is policy.Task.COMPACT:
            self.compact(plan.base, budget)
            return None, True
        return (self.seal_job(plan.base) if busy is None else None), True

    @property
    def _keeps_files(self) -> bool:
        """Does another machine have a copy of files that are damaged here? A rewritten file would take the place of the good one
        there. Alone, maintenance saves the rest."""
        return self._segments.door.replicated and bool(self._segments.counters.damage)

    def _roll_if_sparse(self) -> bool:
        """Close the active segment if hardly any message sleeps in it. Returns False if there is no room for a new one: then
        other segments come first, whose removal makes room."""
        if policy.should_roll(self._load(self._segments.active), self._writer.settings):
            try:
                self.roll()
            except Exhausted:
                return False
        return True

    def roll(self) -> None:
        """Commit everything staged, close the active segment and begin the next one."""
        self._writer.commit()
        self._writer.roll()

    def flush(self) -> None:
        """Write the memtable to disk as a run now. Raises if that fails; the memtable serves on."""
        self._writer.flush()

    def _flushing(self, segment: Segment) -> bool:
        """Is a table of it still to be written? Then a part of it is a memtable, which only firing knows how to read."""
        return any(memtable.base == segment.base for memtable in self._writer.frozen)

    def _load(self, segment: Segment, unsealable: bool = False) -> SegmentLoad:
        """The figures on which the policy decides. Tombstones that may be needed count as live, or they would be moved on and on;
        a sealed segment with many of them is worth another seal once something before it has changed."""
        ending = self._ending_count(segment)
        stale = ending > self._writer.settings.compact_live_ratio * segment.documents and not segment.sifted
        sealed = unsealable or (segment.sealed and not stale)
        return SegmentLoad(segment.base, segment.size, segment.documents, segment.live + ending, sealed)

    def _ending_count(self, segment: Segment) -> int:
        """How many documents of a segment may keep others ended. None in the oldest: the ended ones always stand before them."""
        segments = self._segments
        return 0 if segment.base == min(segments.by_base) else repairing(segments, lambda: segment.ending_count)

    def _all_safe(self, segment: Segment) -> bool:
        """Is every handed off message of this segment durable with the receiver?"""
        segments = self._segments
        if segments.durable == segments.progress:
            return True
        for part in segment.parts:
            for cursor in part.cursors:
                keys = cursor.keys.slice(0, len(cursor.keys))
                ordinals = f.key_ordinals(keys)
                keys, ordinals = keys[part.alive(ordinals)], ordinals[part.alive(ordinals)]
                if not self._covers(part, f.key_dues(keys), part.first_seq).all():  # whatever their seqs are
                    return False
                unsure = ~self._covers(part, f.key_dues(keys), part.last_seq)
                keys, ordinals = keys[unsure], ordinals[unsure]
                seqs = log.read_prefixes(segments.door, part.path, part.spans_of(ordinals)[0])["seq"]
                if not segments.durable.covers(f.key_dues(keys), seqs).all():
                    return False
        return True

    def _covers(self, part: Part, dues: I64, seq: int) -> Mask:
        """Which messages of these due times would be durable with the receiver if their seq were this one. If they are so with
        the last seq of their part, they are so with every other, and no document need be read for it."""
        return self._segments.durable.covers(dues, np.full(len(dues), seq))

    # Seal

    def seal_job(self, base: int) -> SealJob:
        """The order to rewrite a segment, as of now."""
        segments = self._segments
        segment = segments.by_base[base]
        segment.sifted = True
        before = [other for other in segments.by_base.values() if other.base < base]
        return SealJob(
            folder=segments.folder,
            topic=segments.topic,
            base=base,
            generation=segment.generation + 1,
            progress=segments.durable,
            ended=repairing(segments, partial(_ended_seqs, segments, segment)),
            ended_by=segments.memtable.last_seq,
            others=tuple((part.first_seq, part.last_seq, other.ended_by) for other in before for part in other.parts),
            first_seq=min(part.first_seq for part in segment.parts),
            last_seq=max(part.last_seq for part in segment.parts),
            seed=segments.seed,
        )

    def adopt(self, sealed: Sealed) -> bool:
        """Put a sealed segment in the place of its original. Returns False, and keeps the original, if the seal cannot be used.

        Everything that can fail comes before the rename: behind it, positions in the old file mean nothing."""
        self._writer.refuse_if_stopped()
        segments, door = self._segments, self._segments.door
        old = segments.by_base[sealed.base]
        path, table = old.path, table_path(segments.folder, sealed.base, None)
        try:
            new, part = self._prepare(sealed)
        except t.Damaged:
            return False
        if part.live < old.live and not sealed.damage:  # both as of now: messages ended or handed off meanwhile are so in both
            return False
        for damage in sealed.damage:
            segments.damage(damage)
        if self._keeps_files:
            return False
        try:
            with door.durable_names(segments.folder):
                door.rename(part.path, path)
                self._replace(old, new, part)
        except OSError as error:
            if segments.by_base[sealed.base] is old:  # nothing was renamed
                raise
            # The old file may come back, with documents that only tombstones keep ended.
            raise self._writer.stop(error) from error
        self._discard([path for gone in old.parts for path in self._caches(old, gone) if path != table])
        return True

    def _replace(self, old: Segment, new: Segment, part: TablePart) -> None:
        """The file of a sealed segment has the name of its original: serve from it, and give its table its name."""
        segments, table = self._segments, table_path(self._segments.folder, old.base, None)
        part.path = old.path
        for gone in old.parts:
            retire(gone)
        segments.by_base[old.base] = new
        segments.changed(old.base)
        segments.arrange()
        segments.counters.seals += 1
        try:
            segments.door.rename(table.with_name(table.name + names.TMP), table)
        except (OSError, Exhausted):  # a cache: opening finds it under its unfinished name too
            pass

    def _prepare(self, sealed: Sealed) -> tuple[Segment, TablePart]:
        """The sealed segment and its part, still read under its unfinished name."""
        segments = self._segments
        old = segments.by_base[sealed.base]
        table = table_path(segments.folder, sealed.base, None)
        opened = t.open_table(segments.door, table.with_name(table.name + names.TMP))
        if opened is None or (opened.cover.generation, opened.cover.end) != (sealed.generation, sealed.size):
            raise t.Damaged(f"{table.name}: what the seal wrote is not there any more.")
        part = TablePart(segments.folder, opened, old.path.name + names.TMP, True)
        repairing(segments, partial(segments.integrate, part))
        start = sealed.size - (opened.cover.end - opened.cover.start) if sealed.documents else sealed.size
        new = Segment(sealed.base, old.path, sealed.generation, True, sealed.size, start, part.ended_by, [part])
        new.sifted = old.sifted
        return new, part

    def _caches(self, segment: Segment, part: Part) -> list[Path]:
        """The paths of a part's table and ended bits."""
        folder, first = self._segments.folder, None if segment.sealed else part.first
        return [table_path(folder, part.base, first), ended_path(folder, part.base, first)]

    def _discard(self, paths: list[Path]) -> None:
        """Remove files that nothing refers to any more. Where that fails, the next opening does it."""
        for path in paths:
            try:
                self._segments.door.remove(path)
            except OSError:
                continue

    # Compaction

    def compact(self, base: int, budget: int) -> int:
        """Move up to `budget` sleepers of a segment into the active one, durably. Returns how many."""
        self._writer.refuse_if_stopped()
        sleepers = repairing(self._segments, partial(self._first_sleepers, base, budget))
        if sleepers:
            columns = _copies([document for _, document in sleepers])
            columns.seen = [seen for seen, _ in sleepers]
            self._writer.stage(columns, self._writer.next_seq(0))
            self._writer.commit()
        return len(sleepers)

    def _first_sleepers(self, base: int, budget: int) -> list[tuple[tuple[Part, int], f.Document]]:
        """Sleepers of a segment with part and ordinal, without those whose end is being committed."""
        segments, ending = self._segments, self._writer.staged_ends
        sleepers: list[tuple[tuple[Part, int], f.Document]] = []
        size = 0
        for part in segments.by_base[base].parts:
            for cursor in part.cursors:
                ordinals = f.key_ordinals(cursor.keys.slice(cursor.pos, len(cursor.keys)))
                for ordinal in ordinals[part.alive(ordinals)][: budget - len(sleepers)].tolist():
                    if size >= _MOVED_BYTES:
                        return sleepers
                    document = segments.read_one(part, ordinal)
                    if document is None or any(True for _ in segments.strays(part, [(ordinal, document)])):
                        part.mark_ended(ordinal)  # damaged and reported: a copy of its bytes is kept aside
                    elif document.seq not in ending:
                        sleepers.append(((part, ordinal), document))
                        size += document.length
        return sleepers

    def drop(self, base: int) -> bool:
        """Remove a segment in which nothing sleeps. False while handed off messages of it are not durable with the receiver."""
        self._writer.refuse_if_stopped()
        segments, door = self._segments, self._segments.door
        segment = segments.by_base[base]
        if segment.live or not repairing(segments, partial(self._all_safe, segment)):
            return False
        self._keep_tombstones(segment)
        deleted = segment.path.with_name(segment.path.name + names.DELETED)
        try:
            with door.durable_names(segments.folder):  # before tombstones for its documents may go
                door.rename(segment.path, deleted)
                for part in segment.parts:
                    retire(part)
                del segments.by_base[base]
                segments.changed(base)
                segments.arrange()
                segments.counters.segments_dropped += 1
                segments.counters.bytes_dropped += segment.size
        except OSError as error:
            if base in segments.by_base:  # nothing was renamed
                raise
            raise self._writer.stop(error) from error
        self._discard([deleted, *(path for part in segment.parts for path in self._caches(segment, part))])
        return True

    def _keep_tombstones(self, segment: Segment) -> None:
        """Write the tombstones of a segment that goes again, if they end documents of segments that stay."""
        segments = self._segments
        if not self._ending_count(segment):
            return
        others = [other for other in segments.by_base.values() if other is not segment]
        ending = repairing(segments, lambda: [document for part in segment.parts for document in segments.ending_documents(part)])
        needed = [document for document in ending if any(other.needs(document) for other in others)]
        if needed:
            self._writer.stage(_renewed_tombstones(needed), self._writer.next_seq(0))
            self._writer.commit()


def _ended_seqs(segments: Segments, segment: Segment) -> I64:
    """Seqs of the ended documents of a segment, sorted. Documents without a key in their run's table count as ended too."""
    seqs = [np.empty(0, np.int64)]
    for part in segment.parts:
        assert isinstance(part, TablePart), "a memtable's documents would all count as ended"
        everything = np.arange(part.documents)
        keyed = np.zeros(part.documents, np.bool_)
        keyed[f.key_ordinals(part.table.slice(0, len(part.table)))] = True
        ordinals = everything[~keyed | ~part.alive(everything)]
        starts, _ = part.spans_of(ordinals)
        seqs.append(log.read_prefixes(segments.door, part.path, starts)["seq"])
    return np.unique(np.concatenate(seqs))


def _copies(documents: list[f.Document]) -> Columns:
    """New versions of sleepers, each a batch of its own, that end the old ones."""
    keep = f.USER_FLAGS | f.OPTIONAL | f.META
    return Columns(
        ids=[d.id.encode() for d in documents],
        bodies=[d.body for d in documents],
        due_ms=[d.due_ms for d in documents],
        ttr_ms=[d.ttr_ms for d in documents],
        flags=[d.flags & keep | f.REPLACES | f.MOVED for d in documents],
        extras=[f.extra_elements((d.seq, d.due_ms), d.arrived, d.order, d.meta, **optional_of(d)) for d in documents],
        hashes=UNHASHED,
        ends=[(d.seq, d.due_ms) for d in documents],
        purpose="moved",
    )


def _renewed_tombstones(ending: list[f.Document]) -> Columns:
    """Tombstones that end the same documents as these, and say if that was by a newer version. Each is a batch of its own."""
    return Columns(
        ids=[d.id.encode() for d in ending],
        bodies=[b""] * len(ending),
        due_ms=[d.due_ms for d in ending],
        ttr_ms=[0] * len(ending),
        flags=[f.TOMBSTONE | d.flags & f.REPLACES for d in ending],
        extras=[f.extra_elements(d.of) for d in ending],
        hashes=None,
        ends=[d.of for d in ending if d.of is not None],
        purpose="moved",
    )
