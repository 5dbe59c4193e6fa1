"""Housekeeping of an Index: seal full segments, empty and drop the ones that are nearly dead.

Decided by `policy`, done here in small steps. Compaction is nothing special: each survivor is appended again as a new version of
itself that ends the old one, so a crash at any point leaves exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from turtlemq.index import policy
from turtlemq.index.index import Index
from turtlemq.index.mend import retire, settle
from turtlemq.index.parts import TablePart
from turtlemq.index.seal import Sealed, SealJob
from turtlemq.index.shelf import Segment, Shelf, dead_path, table_path
from turtlemq.index.writer import Columns
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment import log, names
from turtlemq.segment import table as t


def step(index: Index, budget: int, busy: int | None, skip: Set[int] = frozenset()) -> tuple[SealJob | None, bool]:
    """One small step of housekeeping: drop what is empty, move up to `budget` sleepers, or say which segment to seal.

    `busy` is a segment whose seal is under way, `skip` are those that could not be sealed. Also returns whether to come again."""
    shelf = index.shelf
    if policy.should_roll(shelf.active.load, index.settings):
        index.writer.commit()
        index.writer.roll()
    closed = [s.load for s in shelf.segments.values() if s is not shelf.active and s.base != busy]
    waiting = [load.base for load in closed if load.live == 0 and not drop(index, load.base)]
    plan = policy.plan([load for load in closed if load.live and load.base not in skip], index.settings)
    if plan is None:
        return None, bool(waiting)
    if plan.task is policy.Task.COMPACT:
        compact(index, plan.base, budget)
        return None, True
    return (seal_job(index, plan.base) if busy is None else None), True


# Seal


def seal_job(index: Index, base: int) -> SealJob:
    """The order to rewrite a segment, as of now."""
    shelf = index.shelf
    segment = shelf.segments[base]
    before = [other for other in shelf.segments.values() if other.base < base]
    return SealJob(
        folder=shelf.folder,
        topic=shelf.topic,
        base=base,
        generation=segment.generation + 1,
        progress=index.durable,
        ended=_ended_seqs(shelf, segment),
        killed_seq=shelf.memtable.last_seq,
        others=tuple((part.first_seq, part.last_seq) for other in before for part in other.parts),
        first_seq=min(part.first_seq for part in segment.parts),
        last_seq=max(part.last_seq for part in segment.parts),
    )


def _ended_seqs(shelf: Shelf, segment: Segment) -> I64:
    """Seqs of the documents of a segment that tombstones have ended. Those left out of a run's keys count as ended too."""
    found = [np.empty(0, np.int64)]
    for part in segment.parts:
        everything = np.arange(part.documents)
        keyed = np.zeros(part.documents, np.bool_)
        if isinstance(part, TablePart):
            keyed[f.key_ordinals(part.table.slice(0, len(part.table)))] = True
        ordinals = everything[~keyed | ~part.alive(everything)]
        starts, _ = part.places(ordinals)
        found.append(log.read_prefixes(shelf.door, part.path, starts)["seq"])
    return np.unique(np.concatenate(found))


def adopt(index: Index, sealed: Sealed) -> None:
    """Put a sealed segment in the place of the one it was made from."""
    shelf, door = index.shelf, index.shelf.door
    old = shelf.segments[sealed.base]
    path, table = old.path, table_path(shelf.folder, sealed.base, None)
    door.rename(path.with_name(path.name + names.TMP), path)
    door.rename(table.with_name(table.name + names.TMP), table)
    door.sync_folder(shelf.folder)
    for part in old.parts:
        retire(part)
        door.remove(table_path(shelf.folder, part.base, part.first))
        door.remove(dead_path(shelf.folder, part.base, part.first))
    opened = t.open_table(door, table)
    assert opened is not None, "just renamed"
    data_start = sealed.size - (opened.cover.end - opened.cover.start) if sealed.documents else sealed.size
    fresh = Segment(sealed.base, path, sealed.generation, True, sealed.size, data_start)
    part = TablePart(shelf.folder, opened, path.name, True)
    fresh.parts = [part]
    shelf.segments[sealed.base] = fresh
    shelf.arrange()
    settle(shelf, part)
    for damage in sealed.damage:
        shelf.damage(damage)
    shelf.counters.seals += 1


# Compaction


def compact(index: Index, base: int, budget: int) -> int:
    """Move up to `budget` sleepers of a segment into the active one, durably. Returns how many."""
    shelf = index.shelf
    documents: list[f.Document] = []
    for part in shelf.segments[base].parts:
        for cursor in part.cursors:
            ordinals = f.key_ordinals(cursor.keys.slice(cursor.pos, len(cursor.keys)))
            for ordinal in ordinals[part.alive(ordinals)][: budget - len(documents)].tolist():
                document = shelf.read_one(part, ordinal)
                if document is None:
                    part.kill(ordinal)  # damaged and reported: its bytes stay in quarantine
                else:
                    documents.append(document)
    if documents:
        index.writer.stage(_copies(documents), index.writer.next_seq(0))
        index.writer.commit()
    return len(documents)


def _copies(documents: list[f.Document]) -> Columns:
    """New versions of sleepers, each a batch of its own, that end the old ones."""
    keep = f.USER_FLAGS | f.EXPIRES | f.HEADERS
    return Columns(
        ids=[d.id.encode() for d in documents],
        bodies=[d.body for d in documents],
        due_ms=[d.due_ms for d in documents],
        ttr_ms=[d.ttr_ms for d in documents],
        flags=[d.flags & keep | f.REPLACES | f.MOVED for d in documents],
        extras=[f.extra_elements((d.seq, d.due_ms), d.arrived, d.order, d.expires_ms, d.headers) for d in documents],
        hashes=[f.hash_id(d.id) for d in documents],
        kills=[(d.seq, d.due_ms) for d in documents],
        purpose="moved",
    )


def drop(index: Index, base: int) -> bool:
    """Remove a segment in which nothing sleeps. False while what was handed off from it is not durable with the receiver."""
    shelf = index.shelf
    segment = shelf.segments[base]
    if segment.live or not _all_safe(index, segment):
        return False
    _keep_tombstones(index, segment)
    quarantine(shelf, segment)
    for part in segment.parts:
        retire(part)
    del shelf.segments[base]
    shelf.arrange()
    shelf.door.rename(segment.path, segment.path.with_name(segment.path.name + names.DELETED))
    shelf.door.sync_folder(shelf.folder)  # before tombstones for its documents may go
    shelf.door.remove(segment.path.with_name(segment.path.name + names.DELETED))
    for part in segment.parts:
        first = None if segment.sealed else part.first
        shelf.door.remove(table_path(shelf.folder, base, first))
        shelf.door.remove(dead_path(shelf.folder, base, first))
    shelf.counters.segments_dropped += 1
    return True


def _all_safe(index: Index, segment: Segment) -> bool:
    """Is everything that was handed off from this segment covered by what is durable elsewhere?"""
    if index.durable == index.shelf.progress:
        return True
    for part in segment.parts:
        for cursor in part.cursors:
            keys = cursor.keys.slice(0, len(cursor.keys))
            ordinals = f.key_ordinals(keys)
            keys, ordinals = keys[part.alive(ordinals)], ordinals[part.alive(ordinals)]
            seqs = log.read_prefixes(index.shelf.door, part.path, part.places(ordinals)[0])["seq"]
            if not index.durable.covers(f.key_dues(keys), seqs).all():
                return False
    return True


def _keep_tombstones(index: Index, segment: Segment) -> None:
    """Tombstones of a segment that goes, for documents of segments that stay, are written again."""
    shelf = index.shelf
    others = [other for other in shelf.segments.values() if other is not segment]
    killers = [document for part in segment.parts for document in shelf.killers(part)]
    stones = [d for d in killers if d.of is not None and any(other.holds(d.of[0]) for other in others)]
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
        kills=[d.of for d in stones if d.of is not None],
        purpose="moved",
    )


def quarantine(shelf: Shelf, segment: Segment) -> None:
    """Damaged bytes of a segment are kept in files of their own before it goes."""
    for damage in shelf.counters.damage:
        if damage.file == segment.path.name:
            data = shelf.door.read(segment.path, damage.position, damage.length)
            shelf.door.replace(segment.path.with_name(f"{damage.file}.{damage.position}.damaged"), data)
