"""Seal: rewrite a full segment in due order, with its table, beside the old file.

Works on files alone, so it can run in another process while appends and ticks go on; `Maintenance.adopt` puts the result in
place. Left out: documents that are durable with the receiver, and ended ones. Kept at the end of the file: tombstones for
documents of older segments that still exist.
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
from turtlemq.segment.buffers import gather
from turtlemq.segment.scan import Scan
from turtlemq.storage import names
from turtlemq.storage.door import Door

_CHUNK = 1 << 15  # documents gathered for one write: 6 MB at 187 B


@dataclass(frozen=True, slots=True)
class SealJob:
    """The order for a seal. Small, for it is sent to another process."""

    folder: Path
    topic: str
    base: int
    generation: int  # of the result
    progress: Progress  # handed off and durable with the receiver
    ended: I64  # seqs of ended documents, sorted
    ended_by: int  # ends up to this seq are in `ended`
    others: tuple[tuple[int, int, int], ...]  # of each part of an older segment: first seq, last seq, its segment's `ended_by`
    first_seq: int
    last_seq: int
    seed: int = 0  # of the hashes of ids in its table


@dataclass(frozen=True, slots=True)
class Sealed:
    """The result of a seal. Its files have the suffix .tmp until they are adopted."""

    base: int
    generation: int
    documents: int
    size: int
    damage: tuple[Damage, ...]
    files: tuple[Path, ...] = ()  # that it made, under their unfinished names


def seal(door: Door, job: SealJob) -> Sealed:
    """Rewrite one segment. 1.5 µs a document, mostly checksums and copying."""
    path = job.folder / names.segment("delay", job.base)
    _, scanned = log.scan_file(door, path, whole=True, hint=_hint(door, job))
    view = door.map(path)
    sleepers = _sleepers(scanned, job)
    order = sleepers[np.argsort(f.packed_keys(scanned.due_ms[sleepers], sleepers), kind="stable")]
    tombstones = _tombstones(view, scanned, job, sleepers)
    lengths = np.append(scanned.lengths[order], list(map(len, tombstones))).astype(np.int64)
    header = f.FileHeader("delay", job.topic, job.base, job.generation, True, len(lengths), int(lengths.sum()), job.ended_by)
    tmp = files_of(job)[0]
    start = _write(door, tmp, header, view, scanned, order, tombstones)
    positions = start + np.cumsum(lengths) - lengths
    _write_table(door, job, view, scanned, order, positions, start + int(lengths.sum()), len(tombstones))
    damage = tuple(_quarantine(door, path, scanned))
    return Sealed(job.base, job.generation, len(lengths), start + header.bytes, damage, files_of(job))


def files_of(job: SealJob) -> tuple[Path, Path]:
    """The unfinished names of the files that a seal makes: the segment and its table."""
    made = names.segment("delay", job.base), names.table("delay", job.base, None)
    return job.folder / (made[0] + names.TMP), job.folder / (made[1] + names.TMP)


def _hint(door: Door, job: SealJob) -> I64:
    """Where documents begin, from the runs of the segment. Only a hint: the scan checks it against the lengths."""
    positions = [np.empty(0, np.int64)]
    number = 0
    try:
        while (run := t.open_table(door, job.folder / names.table("delay", job.base, number))) and run.cover.documents:
            positions.append(run.spans_of(np.arange(run.cover.documents))[0])
            number += run.cover.documents
    except t.Damaged:
        return np.empty(0, np.int64)
    return np.concatenate(positions)


def _sleepers(scanned: Scan, job: SealJob) -> I64:
    """Numbers in the scan of the documents to keep as sleepers."""
    handed = job.progress.covers(scanned.due_ms, scanned.seq)
    nearest = np.minimum(np.searchsorted(job.ended, scanned.seq), max(len(job.ended) - 1, 0))
    ended: Mask = job.ended[nearest] == scanned.seq if len(job.ended) else np.zeros(len(scanned), np.bool_)
    return np.flatnonzero(~handed & ~ended & ((scanned.flags & f.TOMBSTONE) == 0))


def _tombstones(view: memoryview, scanned: Scan, job: SealJob, sleepers: I64) -> list[bytes]:
    """Plain tombstones, with unchanged seqs, for the documents that still keep others ended and do not sleep themselves."""
    ending = (scanned.flags & f.ENDS) != 0
    ending[sleepers] = False
    tombstones = []
    for i in np.flatnonzero(ending).tolist():
        at = int(scanned.positions[i])
        document = f.decode(view[at : at + int(scanned.lengths[i])])
        of = -1 if document.of is None else document.of[0]
        if any(low <= of <= high and document.seq > ended_by for low, high, ended_by in job.others):
            tombstones.append(tombstone(document))
    return tombstones


def tombstone(document: f.Document) -> bytes:
    """A document that only ends what `document` ends, and says whether that was by a newer version."""
    extra, flags = f.extra_elements(document.of), f.TOMBSTONE | document.flags & f.REPLACES
    data, _ = f.encode([document.id.encode()], [b""], [document.due_ms], document.seq, [0], [flags], [extra])
    return bytes(data)


def _write(
    door: Door, tmp: Path, header: f.FileHeader, view: memoryview, scanned: Scan, order: I64, tombstones: list[bytes]
) -> int:
    """Write and sync the file. Returns where its documents begin."""
    fd = door.create(tmp)
    try:
        at = start = door.write(fd, tmp, 0, [f.encode_header(header)])
        for i in range(0, len(order), _CHUNK):
            rows = order[i : i + _CHUNK]
            at += door.write(fd, tmp, at, [gather(view, scanned.positions[rows], scanned.lengths[rows])])
        if tombstones:
            at += door.write(fd, tmp, at, [b"".join(tombstones)])
        door.sync(fd, tmp)
    finally:
        door.close(fd)
    return start


def _write_table(
    door: Door, job: SealJob, view: memoryview, scanned: Scan, order: I64, positions: I64, end: int, tombstone_count: int
) -> None:
    cover = t.Cover(
        base=job.base,
        generation=job.generation,
        first=0,
        documents=len(positions),
        start=end - int(scanned.lengths[order].sum()) if not len(positions) else int(positions[0]),
        end=end,
        first_seq=job.first_seq,
        last_seq=job.last_seq,
        killed_seq=job.ended_by,
    )
    nothing = np.zeros(tombstone_count, np.int64)
    hashes = np.append(build.scan_hashes(view, scanned, 0, len(scanned), job.seed)[order], nothing.astype(np.uint64))
    flags = np.append(scanned.flags[order], np.full(tombstone_count, f.TOMBSTONE, np.uint32)).astype(np.uint32)
    due_ms = np.append(scanned.due_ms[order], nothing)
    buffers = build.tabulate(cover, due_ms, positions, flags, hashes, np.ones(len(positions), np.bool_), job.seed)
    path = files_of(job)[1]
    fd = door.create(path)
    try:
        door.write(fd, path, 0, buffers)
        door.sync(fd, path)
    finally:
        door.close(fd)


def _quarantine(door: Door, path: Path, scanned: Scan) -> list[Damage]:
    """Copy damaged bytes to files of their own: the segment that has them will be replaced."""
    damage = log.damage_of(path, scanned)
    for hole in damage:
        keep_aside(door, path, hole)
    return damage
