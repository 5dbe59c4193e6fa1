"""Housekeeping of an Index: seal full segments, empty and drop the ones that are nearly dead.

Decided by `policy`, done here in small steps. Compaction is nothing special: each survivor is appended again as a new version of
itself that ends the old one, so a crash at any point leaves exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from pathlib import Path

import numpy as np

from turtlemq.errors import DiskFull
from turtlemq.index import policy
from turtlemq.index.columns import Columns
from turtlemq.index.index import Index
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.repair import repairing, retire
from turtlemq.index.seal import Sealed, SealJob
from turtlemq.index.segments import Segment, Segments, ended_path, table_path
from turtlemq.model import I64, SegmentLoad
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.ids import hash_id
from turtlemq.storage import names

_MOVED_BYTES = 4 << 20  # of sleepers moved in one step: whoever waits for the loop waits for it


def step(index: Index, budget: int, busy: int | None, skip: Set[int] = frozenset()) -> tuple[SealJob | None, bool]:
    """One small step of housekeeping: drop what is empty, move up to `budget` sleepers, or say which segment to seal.

    `busy` is a segment whose seal is under way, `skip` are those that could not be sealed. Also returns whether to come again."""
    shelf = index.segments
    if index.writer.stopped is not None:
        return None, False
    if policy.should_roll(_load(index, shelf.active), index.settings):
        index.writer.commit()
        index.writer.roll()
    try:
        index.writer.finish_flush()
    except (OSError, t.Damaged):
        pass  # the memtable serves on
    waiting, loads = False, []
    for segment in list(shelf.by_base.values()):
        if segment is shelf.active or segment.base == busy or _flushing(index, segment):  # asked anew: `drop` may roll
            continue
        if segment.live:
            loads.append(_load(index, segment, segment.base in skip))
        elif not repairing(shelf, partial(_all_safe, index, segment)):
            waiting = True
        elif _stones(shelf, segment) > min(budget, index.settings.compact_live_ratio * segment.documents):
            loads.append(_load(index, segment, segment.base in skip))  # a seal finds out which of its tombstones are needed
        else:
            drop(index, segment.base)
    plan, waiting = policy.plan(loads, index.settings), waiting or bool(index.writer.frozen)
    if plan is None:
        return None, waiting
    if plan.task is policy.Task.COMPACT:
        compact(index, plan.base, budget)
        return None, True
    return (seal_job(index, plan.base) if busy is None else None), True


def _flushing(index: Index, segment: Segment) -> bool:
    """Is a table of it still to be written? Then a part of it is a memtable, which only firing knows how to read."""
    return any(memtable.base == segment.base for memtable in index.writer.frozen)


def _load(index: Index, segment: Segment, unsealable: bool = False) -> SegmentLoad:
    """What the policy goes by. Tombstones that may be needed count as live, or they would be moved on and on; a sealed segment
    with many of them is worth another seal once something before it has changed."""
    stones = _stones(index.segments, segment)
    stale = stones > index.settings.compact_live_ratio * segment.documents and not segment.sifted
    sealed = unsealable or (segment.sealed and not stale)
    return SegmentLoad(segment.base, segment.size, segment.documents, segment.live + stones, sealed)


def _stones(shelf: Segments, segment: Segment) -> int:
    """How many documents of a segment may still keep others ended: none in the oldest, for these stand before it."""
    return 0 if segment.base == min(shelf.by_base) else repairing(shelf, lambda: segment.ending_count)


# Seal


def seal_job(index: Index, base: int) -> SealJob:
    """The order to rewrite a segment, as of now."""
    shelf = index.segments
    segment = shelf.by_base[base]
    segment.sifted = True
    before = [other for other in shelf.by_base.values() if other.base < base]
    return SealJob(
        folder=shelf.folder,
        topic=shelf.topic,
        base=base,
        generation=segment.generation + 1,
        progress=index.durable,
        ended=repairing(shelf, partial(_ended_seqs, shelf, segment)),
        ended_by=shelf.memtable.last_seq,
        others=tuple((part.first_seq, part.last_seq, other.ended_by) for other in before for part in other.parts),
        first_seq=min(part.first_seq for part in segment.parts),
        last_seq=max(part.last_seq for part in segment.parts),
    )


def _ended_seqs(shelf: Segments, segment: Segment) -> I64:
    """Seqs of the documents of a segment that tombstones have ended. Those left out of a run's keys count as ended too."""
    found = [np.empty(0, np.int64)]
    for part in segment.parts:
        assert isinstance(part, TablePart), "a memtable's documents would all count as ended"
        everything = np.arange(part.documents)
        keyed = np.zeros(part.documents, np.bool_)
        keyed[f.key_ordinals(part.table.slice(0, len(part.table)))] = True
        ordinals = everything[~keyed | ~part.alive(everything)]
        starts, _ = part.spans_of(ordinals)
        found.append(log.read_prefixes(shelf.door, part.path, starts)["seq"])
    return np.unique(np.concatenate(found))


def adopt(index: Index, sealed: Sealed) -> bool:
    """Put a sealed segment in the place of the one it was made from. What can fail comes before the rename: then positions of the
    old file mean nothing any more. False if what the seal wrote cannot be used: the segment serves on as it was."""
    index.writer.refuse_if_stopped()
    shelf, door = index.segments, index.segments.door
    old = shelf.by_base[sealed.base]
    path, table = old.path, table_path(shelf.folder, sealed.base, None)
    try:
        fresh, part = _prepare(index, sealed)
    except t.Damaged:
        return False
    if part.live < old.live and not sealed.damage:  # both as of now: whatever was ended or handed off meanwhile is so in both
        return False
    for damage in sealed.damage:
        shelf.damage(damage)
    door.rename(part.path, path)
    part.path = path
    for gone in old.parts:
        retire(gone)
    shelf.by_base[sealed.base] = fresh
    shelf.changed(sealed.base)
    shelf.arrange()
    shelf.counters.seals += 1
    try:
        door.rename(table.with_name(table.name + names.TMP), table)
    except (OSError, DiskFull):  # a cache: opening finds it under its unfinished name too
        pass
    try:
        door.sync_folder(shelf.folder)
    except OSError as error:  # the old file may come back, and with it what only tombstones keep ended
        raise index.writer.stop(error) from error
    _discard(shelf, [path for gone in old.parts for path in _caches(shelf, old, gone) if path != table])
    return True


def _prepare(index: Index, sealed: Sealed) -> tuple[Segment, TablePart]:
    """The sealed segment as it will stand on the shelf, read under its unfinished name."""
    shelf = index.segments
    old = shelf.by_base[sealed.base]
    table = table_path(shelf.folder, sealed.base, None)
    opened = t.open_table(shelf.door, table.with_name(table.name + names.TMP))
    if opened is None or (opened.cover.generation, opened.cover.end) != (sealed.generation, sealed.size):
        raise t.Damaged(f"{table.name}: what the seal wrote is not there any more.")
    part = TablePart(shelf.folder, opened, old.path.name + names.TMP, True)
    repairing(shelf, partial(shelf.integrate, part))
    start = sealed.size - (opened.cover.end - opened.cover.start) if sealed.documents else sealed.size
    fresh = Segment(sealed.base, old.path, sealed.generation, True, sealed.size, start, part.ended_by, [part])
    fresh.sifted = old.sifted
    return fresh, part


def _caches(shelf: Segments, segment: Segment, part: Part) -> list[Path]:
    """The index files of a part."""
    first = None if segment.sealed else part.first
    return [table_path(shelf.folder, part.base, first), ended_path(shelf.folder, part.base, first)]


def _discard(shelf: Segments, paths: list[Path]) -> None:
    """Remove files that mean nothing any more. Where that fails, the next opening does it."""
    for path in paths:
        try:
            shelf.door.remove(path)
        except OSError:
            continue


# Compaction


def compact(index: Index, base: int, budget: int) -> int:
    """Move up to `budget` sleepers of a segment into the active one, durably. Returns how many."""
    index.writer.refuse_if_stopped()
    documents = repairing(index.segments, partial(_first_sleepers, index, base, budget))
    if documents:
        columns = _copies([document for _, document in documents])
        columns.seen = [seen for seen, _ in documents]
        index.writer.stage(columns, index.writer.next_seq(0))
        index.writer.commit()
    return len(documents)


def _first_sleepers(index: Index, base: int, budget: int) -> list[tuple[tuple[Part, int], f.Document]]:
    """Sleepers of a segment, but for those whose end is being committed."""
    shelf, ending = index.segments, index.writer.staged_ends
    documents: list[tuple[tuple[Part, int], f.Document]] = []
    size = 0
    for part in shelf.by_base[base].parts:
        for cursor in part.cursors:
            ordinals = f.key_ordinals(cursor.keys.slice(cursor.pos, len(cursor.keys)))
            for ordinal in ordinals[part.alive(ordinals)][: budget - len(documents)].tolist():
                if size >= _MOVED_BYTES:
                    return documents
                document = shelf.read_one(part, ordinal)
                if document is None or any(True for _ in shelf.strays(part, [(ordinal, document)])):
                    part.mark_ended(ordinal)  # damaged and reported: a copy of its bytes is kept aside
                elif document.seq not in ending:
                    documents.append(((part, ordinal), document))
                    size += document.length
    return documents


def _copies(documents: list[f.Document]) -> Columns:
    """New versions of sleepers, each a batch of its own, that end the old ones."""
    keep = f.USER_FLAGS | f.EXPIRES | f.HEADERS | f.META
    return Columns(
        ids=[d.id.encode() for d in documents],
        bodies=[d.body for d in documents],
        due_ms=[d.due_ms for d in documents],
        ttr_ms=[d.ttr_ms for d in documents],
        flags=[d.flags & keep | f.REPLACES | f.MOVED for d in documents],
        extras=[f.extra_elements((d.seq, d.due_ms), d.arrived, d.order, d.expires_ms, d.headers, d.meta) for d in documents],
        hashes=[hash_id(d.id) for d in documents],
        ends=[(d.seq, d.due_ms) for d in documents],
        purpose="moved",
    )


def drop(index: Index, base: int) -> bool:
    """Remove a segment in which nothing sleeps. False while what was handed off from it is not durable with the receiver."""
    index.writer.refuse_if_stopped()
    shelf, door = index.segments, index.segments.door
    segment = shelf.by_base[base]
    if segment.live or not repairing(shelf, partial(_all_safe, index, segment)):
        return False
    _keep_tombstones(index, segment)
    deleted = segment.path.with_name(segment.path.name + names.DELETED)
    door.rename(segment.path, deleted)
    for part in segment.parts:
        retire(part)
    del shelf.by_base[base]
    shelf.changed(base)
    shelf.arrange()
    shelf.counters.segments_dropped += 1
    shelf.counters.bytes_dropped += segment.size
    try:
        door.sync_folder(shelf.folder)  # before tombstones for its documents may go
    except OSError as error:
        raise index.writer.stop(error) from error
    _discard(shelf, [deleted, *(path for part in segment.parts for path in _caches(shelf, segment, part))])
    return True


def _all_safe(index: Index, segment: Segment) -> bool:
    """Is everything that was handed off from this segment covered by what is durable elsewhere?"""
    if index.durable == index.segments.progress:
        return True
    for part in segment.parts:
        for cursor in part.cursors:
            keys = cursor.keys.slice(0, len(cursor.keys))
            ordinals = f.key_ordinals(keys)
            keys, ordinals = keys[part.alive(ordinals)], ordinals[part.alive(ordinals)]
            seqs = log.read_prefixes(index.segments.door, part.path, part.spans_of(ordinals)[0])["seq"]
            if not index.durable.covers(f.key_dues(keys), seqs).all():
                return False
    return True


def _keep_tombstones(index: Index, segment: Segment) -> None:
    """Tombstones of a segment that goes, for documents of segments that stay, are written again."""
    shelf = index.segments
    others = [other for other in shelf.by_base.values() if other is not segment]
    killers = repairing(shelf, lambda: [document for part in segment.parts for document in shelf.ending_documents(part)])
    stones = [stone for stone in killers if any(other.needs(stone) for other in others)]
    if stones:
        index.writer.stage(renewed_tombstones(stones), index.writer.next_seq(0))
        index.writer.commit()


def renewed_tombstones(stones: list[f.Document]) -> Columns:
    """The same endings once more, for documents that go."""
    return Columns(
        ids=[d.id.encode() for d in stones],
        bodies=[b""] * len(stones),
        due_ms=[d.due_ms for d in stones],
        ttr_ms=[0] * len(stones),
        flags=[f.TOMBSTONE] * len(stones),
        extras=[f.extra_elements(d.of) for d in stones],
        hashes=None,
        ends=[d.of for d in stones if d.of is not None],
        purpose="moved",
    )
