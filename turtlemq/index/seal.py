"""Seal: a full segment is rewritten in due order with its table, beside the old one. Only files are read and written, so it can
run in another process while appends and ticks go on; `care.adopt` puts the result in place.

Left out: what was handed off and is safe with the receiver, and what was cancelled, replaced or moved. Kept at the end of the
file: tombstones for documents of segments that still exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turtlemq.index import build
from turtlemq.index.segments import keep_aside
from turtlemq.model import I64, Damage, Mask, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.scan import Scan
from turtlemq.storage import names
from turtlemq.storage.door import Door

_CHUNK = 1 << 15  # documents gathered for one write: 6 MB at 187 B


@dataclass(frozen=True, slots=True)
class SealJob:
    """Everything that a seal needs to know. Small, for it travels to another process."""

    folder: Path
    topic: str
    base: int
    generation: int  # of the result
    progress: Progress  # handed off and durable there
    ended: I64  # seqs of documents that tombstones have ended, sorted
    ended_by: int  # as of this seq
    others: tuple[tuple[int, int, int], ...]  # ranges of seqs of the parts before, and up to where tombstones are worked in there
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """What came out. The files end in .tmp until they are adopted."""

    base: int
    generation: int
    documents: int
    size: int
    damage: tuple[Damage, ...]


def seal(door: Door, job: SealJob) -> Sealed:
    """Rewrite one segment. 1.5 µs a document, mostly checksums and copying."""
    path = job.folder / names.segment("delay", job.base)
    _, found = log.scan_file(door, path, whole=True, hint=_hint(door, job))
    view = door.map(path)
    sleepers = _sleepers(found, job)
    order = sleepers[np.argsort(f.packed_keys(found.due_ms[sleepers], sleepers), kind="stable")]
    stones = _tombstones(view, found, job, sleepers)
    lengths = np.append(found.lengths[order], [len(s) for s in stones]).astype(np.int64)
    header = f.FileHeader("delay", job.topic, job.base, job.generation, True, len(lengths), int(lengths.sum()), job.ended_by)
    tmp = path.with_name(path.name + names.TMP)
    start = _write(door, tmp, header, view, found, order, stones)
    positions = start + np.cumsum(lengths) - lengths
    _write_table(door, job, view, found, order, positions, start + int(lengths.sum()), len(stones))
    return Sealed(job.base, job.generation, len(lengths), start + header.bytes, tuple(_quarantine(door, path, found)))


def _hint(door: Door, job: SealJob) -> I64:
    """Where documents begin, as the runs of the segment tell. Only a hint: the scan follows the lengths all the same."""
    found = [np.empty(0, np.int64)]
    number = 0
    try:
        while (run := t.open_table(door, job.folder / names.table("delay", job.base, number))) and run.cover.documents:
            found.append(run.spans_of(np.arange(run.cover.documents))[0])
            number += run.cover.documents
    except t.Damaged:
        return np.empty(0, np.int64)
    return np.concatenate(found)


def _sleepers(found: Scan, job: SealJob) -> I64:
    """Documents to keep, by their number in the scan."""
    handed = job.progress.covers(found.due_ms, found.seq)
    place = np.minimum(np.searchsorted(job.ended, found.seq), max(len(job.ended) - 1, 0))
    ended: Mask = job.ended[place] == found.seq if len(job.ended) else np.zeros(len(found), np.bool_)
    return np.flatnonzero(~handed & ~ended & ((found.flags & f.TOMBSTONE) == 0))


def _tombstones(view: memoryview, found: Scan, job: SealJob, sleepers: I64) -> list[bytes]:
    """Documents that still keep others ended: as plain tombstones under their own seq, where they do not sleep themselves."""
    ends = (found.flags & f.ENDS) != 0
    ends[sleepers] = False
    killers = np.flatnonzero(ends)
    stones = []
    for i in killers.tolist():
        at = int(found.positions[i])
        document = f.decode(view[at : at + int(found.lengths[i])])
        of = -1 if document.of is None else document.of[0]
        if any(low <= of <= high and document.seq > killed_seq for low, high, killed_seq in job.others):
            stones.append(tombstone(document))
    return stones


def tombstone(document: f.Document) -> bytes:
    """A document that does nothing but end what `document` ends."""
    extra = f.extra_elements(document.of)
    data, _ = f.encode([document.id.encode()], [b""], [document.due_ms], document.seq, [0], [f.TOMBSTONE], [extra])
    return bytes(data)


def _write(door: Door, tmp: Path, header: f.FileHeader, view: memoryview, found: Scan, order: I64, stones: list[bytes]) -> int:
    """The file, synced. Returns where documents begin."""
    fd = door.create(tmp)
    try:
        at = start = door.write(fd, tmp, 0, [f.encode_header(header)])
        for i in range(0, len(order), _CHUNK):
            some = order[i : i + _CHUNK]
            at += door.write(fd, tmp, at, [f.gather(view, found.positions[some], found.lengths[some])])
        if stones:
            at += door.write(fd, tmp, at, [b"".join(stones)])
        door.sync(fd, tmp)
    finally:
        door.close(fd)
    return start


def _write_table(
    door: Door, job: SealJob, view: memoryview, found: Scan, order: I64, positions: I64, end: int, stones: int
) -> None:
    cover = t.Cover(
        base=job.base,
        generation=job.generation,
        first=0,
        documents=len(positions),
        start=end - int(found.lengths[order].sum()) if not len(positions) else int(positions[0]),
        end=end,
        first_seq=job.first_seq,
        last_seq=job.last_seq,
        killed_seq=job.ended_by,
    )
    nothing = np.zeros(stones, np.int64)
    hashes = np.append(build.scan_hashes(view, found, 0, len(found))[order], nothing.astype(np.uint64))
    flags = np.append(found.flags[order], np.full(stones, f.TOMBSTONE, np.uint32)).astype(np.uint32)
    due_ms = np.append(found.due_ms[order], nothing)
    buffers = build.tabulate(cover, due_ms, positions, flags, hashes, np.ones(len(positions), np.bool_))
    path = job.folder / (names.table("delay", job.base, None) + names.TMP)
    fd = door.create(path)
    try:
        door.write(fd, path, 0, buffers)
        door.sync(fd, path)
    finally:
        door.close(fd)


def _quarantine(door: Door, path: Path, found: Scan) -> list[Damage]:
    """Damaged bytes are kept in files of their own before the segment that held them goes."""
    damage = log.damage_of(path, found)
    for hole in damage:
        keep_aside(door, path, hole)
    return damage
