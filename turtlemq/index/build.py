"""Building tables, from a memtable or from a scan, and reading and writing the files of ended bits.

Both are caches of the segments: a write that fails costs time at the next opening, nothing else. The byte layout of a table is
`segment.table`; ended bits are described below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.errors import Exhausted
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Bits, Part, TablePart
from turtlemq.index.segments import Segment, Segments, ended_path, table_path
from turtlemq.model import I64, U32, U64, Mask
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.ids import hash_ids, hash_seqs
from turtlemq.segment.readonly import cover_of
from turtlemq.segment.scan import Scan
from turtlemq.storage.door import Door


@dataclass(frozen=True, slots=True)
class FlushJob:
    """The order to write the table of a frozen memtable. Its columns no longer change, so another thread may read them."""

    path: Path
    cover: t.Cover
    seq: I64
    due_ms: I64
    starts: I64
    flags: U32
    hashes: U64  # of producers' own ids; 0 for others
    alive: Mask
    seed: int  # of the hashes


def flush_job(segments: Segments, memtable: Memtable) -> FlushJob:
    """The job for a frozen memtable. Ended documents get no key; handed off ones do, for a crash may undo the handoff."""
    n = memtable.count
    cover = t.Cover(
        base=memtable.base,
        generation=0,
        first=memtable.first,
        documents=n,
        start=memtable.start,
        end=memtable.end,
        first_seq=memtable.first_seq,
        last_seq=memtable.last_seq,
        killed_seq=segments.memtable.last_seq,
    )
    columns = (memtable.seq[:n], memtable.due[:n], memtable.starts[:n], memtable.flags[:n], memtable.hashes[:n])
    path = table_path(segments.folder, cover.base, cover.first)
    return FlushJob(path, cover, *columns, memtable.alive(np.arange(n)), memtable.seed)


def write_run(door: Door, job: FlushJob) -> None:
    """Write the table of a job. 100 ns a message."""
    hashes = job.hashes.copy()
    given = (job.flags & f.SERVER_ID) != 0
    hashes[given] = hash_seqs(job.seq[given], job.seed)
    buffers = tabulate(job.cover, job.due_ms, job.starts, job.flags, hashes, job.alive, job.seed)
    door.replace(job.path, b"".join(buffers), durable=False)


def open_run(segments: Segments, memtable: Memtable, job: FlushJob) -> TablePart:
    """The part over the written table, with the ended bits and the cursor of its memtable as of now."""
    opened = t.open_table(segments.door, job.path)
    if opened is None or opened.cover != job.cover:
        raise t.Damaged(f"{job.path.name}: what was written is not there any more.")
    part = TablePart(segments.folder, opened, memtable.path.name, False)
    if memtable.ended is not None:
        part.ended, part.dirty = memtable.ended, True
    segments.set_cursors(part, memtable.seq)
    part.live = part.count_live()
    return part


def tabulate(cover: t.Cover, due_ms: I64, starts: I64, flags: U32, hashes: U64, alive: Mask, seed: int) -> list[bytes]:
    """The bytes of a table, from columns by ordinal. Tombstones get no key and no id; a hash of 0 is left out. `seed`: of the
    hashes."""
    keyed = np.flatnonzero(alive & ((flags & f.TOMBSTONE) == 0))
    keys = np.sort(f.packed_keys(due_ms[keyed], keyed))
    hashed = keyed[hashes[keyed] != 0]
    ending = np.flatnonzero(flags & f.ENDS)
    return t.build(cover, keys, np.append(starts, cover.end), hashes[hashed], hashed, ending, seed=seed)


def _store(segments: Segments, segment: Segment, cover: t.Cover, buffers: list[bytes]) -> TablePart:
    path = table_path(segments.folder, cover.base, None if segment.sealed else cover.first)
    segments.door.replace(path, b"".join(buffers), durable=False)
    opened = t.open_table(segments.door, path)
    assert opened is not None, "just written"
    return TablePart(segments.folder, opened, segment.path.name, segment.sealed)


def from_scan(
    segments: Segments, segment: Segment, buffer: memoryview, scanned: Scan, span: tuple[int, int], number: int, start: int
) -> TablePart:
    """A part over the documents `span` = [first, last) of a scan, which begin at byte `start`. `number`: ordinal of the first one
    in the segment."""
    first, last = span
    part = slice(first, last)
    cover = cover_of(
        scanned, span, base=segment.base, generation=segment.generation, first=number, start=start, killed_seq=segment.ended_by
    )
    hashes = scan_hashes(buffer, scanned, first, last, segments.seed)
    alive = np.ones(last - first, np.bool_)
    columns = (scanned.due_ms[part], scanned.positions[part], scanned.flags[part], hashes, alive)
    buffers = tabulate(cover, *columns, segments.seed)
    try:
        return _store(segments, segment, cover, buffers)
    except (Exhausted, OSError):  # the table stays in memory; its file is only a cache
        data = memoryview(b"".join(buffers))
        return TablePart(segments.folder, t.parse_table(Path(segment.path.name), data), segment.path.name, segment.sealed)


def scan_hashes(buffer: memoryview, scanned: Scan, first: int, last: int, seed: int) -> U64:
    """Hashes of the ids of the scanned documents [first, last)."""
    hashes = hash_seqs(scanned.seq[first:last], seed)
    own = np.flatnonzero((scanned.flags[first:last] & f.SERVER_ID) == 0)
    starts, sizes = scanned.positions[first:last][own] + f.PREFIX_BYTES, scanned.id_bytes[first:last][own]
    if len(own):
        hashes[own] = hash_ids(buffer, starts, sizes, seed)
    return hashes


# Ended bits, in files with the suffix .dead: {cover, killed_seq, bits, crc}. A cache of the tombstones in the log. They say which
# of the documents that a table covers were ended up to the seq `killed_seq` (here `ended_by`), beyond those left out of it.


def write_ended_bits(segments: Segments, parts: Sequence[Part], *, every: bool = False) -> None:
    """Write the changed ended bits of table parts, as far as there is room. Requires: everything published is durable.

    `every`: also unchanged bits, so that the next opening does not read all tombstones since."""
    for part in parts:
        behind = every and part.ended_by < segments.last_ending_seq
        if not isinstance(part, TablePart) or part in segments.unintegrated or not (part.dirty or behind):
            continue
        ended_by = segments.memtable.last_seq
        fields: dict[str, Any] = {
            "cover": {name: Int64(value) for name, value in asdict(part.table.cover).items()},
            "killed_seq": Int64(ended_by),
            "bits": b"" if part.ended is None else part.ended.data.tobytes(),
        }
        path = ended_path(segments.folder, part.base, None if part.sealed else part.first)
        try:
            segments.door.replace(path, f.encode_checked(fields), durable=False)
        except (Exhausted, OSError):
            return
        part.dirty, part.ended_by = False, ended_by


def read_ended_bits(door: Door, folder: Path, part: TablePart) -> None:
    """Load the ended bits of a part, if there are any that fit its table."""
    path = ended_path(folder, part.base, None if part.sealed else part.first)
    if not door.exists(path):
        return
    try:
        fields = f.decode_checked(door.read_all(path))[0]
        cover = t.Cover(**fields["cover"])
        same = replace(cover, killed_seq=part.ended_by) == part.table.cover
        if same and cover.killed_seq <= part.ended_by <= fields["killed_seq"]:
            part.ended = Bits(part.documents, np.frombuffer(fields["bits"], np.uint8).copy()) if fields["bits"] else None
            part.ended_by = int(fields["killed_seq"])
    except (KeyError, TypeError, ValueError):
        return
