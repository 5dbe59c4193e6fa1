"""Self-check of an Index: compute the sleepers from a scan of all segments, and compare them with the tables and the memtable.

Reads every byte, changes nothing. 0.5 µs a document, and 10 µs for each tombstone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turtlemq.index import build
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import TablePart
from turtlemq.index.segments import Segment, Segments
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.scan import Scan, scan
from turtlemq.segment.table import Damaged


def check(segments: Segments) -> list[str]:
    """Every broken invariant, a line each."""
    scans = {base: _scan(segments, segment) for base, segment in segments.by_base.items()}
    ended = np.array(sorted({seq for base in scans for seq in _ended(segments, segments.by_base[base], scans[base])}), np.int64)
    problems: list[str] = []
    for base, segment in segments.by_base.items():
        problems += _check_segment(segments, segment, scans[base], ended)
    problems += _check_order(segments)
    due = [scanned.due_ms[asleep] for base, scanned in scans.items() if len(asleep := _asleep(segments, scanned, ended))]
    first = min((int(d.min()) for d in due), default=None)
    promised = segments.next_due_ms()
    if first is not None and (promised is None or promised > first):
        problems.append(f"{segments.topic}: something is due at {first}, but the next tick is asked for at {promised}")
    return problems


def _scan(segments: Segments, segment: Segment) -> Scan:
    if segment.sealed:
        return log.scan_file(segments.door, segment.path)[1]  # its header says how long it must be
    rising = segment.generation >= 0
    return scan(segments.door.map(segment.path), segment.data_start, segment.size, sealed=True, rising=rising)


def _ended(segments: Segments, segment: Segment, scanned: Scan) -> Iterator[int]:
    """Seqs of the documents that those of a segment end."""
    view = segments.door.map(segment.path)
    for i in np.flatnonzero(scanned.flags & f.ENDS).tolist():
        at = int(scanned.positions[i])
        document = f.decode(view[at : at + int(scanned.lengths[i])])
        if document.of is not None:
            yield document.of[0]


def _asleep(segments: Segments, scanned: Scan, ended: I64) -> I64:
    """Numbers of the scanned documents that must sleep."""
    handed = segments.progress.covers(scanned.due_ms, scanned.seq)
    return np.flatnonzero(~handed & ~np.isin(scanned.seq, ended) & ((scanned.flags & f.TOMBSTONE) == 0))


def _check_segment(segments: Segments, segment: Segment, scanned: Scan, ended: I64) -> Iterator[str]:
    name = f"{segments.topic}/{segment.path.name}"
    for damage in log.damage_of(segment.path, scanned):
        yield f"{segments.topic}/{damage}"
    size = segments.door.size(segment.path)
    if size != segment.size:
        yield f"{name}: {size} bytes long, {segment.size} are known"
    if segment.sealed:
        asleep = scanned.due_ms[(scanned.flags & f.TOMBSTONE) == 0]
        if (np.diff(asleep) < 0).any():
            yield f"{name}: sealed, but not in due order"
    elif (np.diff(scanned.seq) <= 0).any():
        yield f"{name}: documents are not in order of arrival"
    if (scanned.due_ms < 0).any():
        yield f"{name}: a due time is negative"
    expected = np.sort(scanned.positions[_asleep(segments, scanned, ended)])
    sleeping: list[I64] = [np.empty(0, np.int64)]
    for part in segment.parts:
        if part.live != part.count_live():
            yield f"{name}: {part.live} are said to sleep in a part where {part.count_live()} do"
        try:
            if isinstance(part, TablePart):
                yield from _check_table(segments, part, scanned)
            keys = [cursor.keys.slice(cursor.pos, len(cursor.keys)) for cursor in part.cursors]
        except Damaged as error:
            yield f"{segments.topic}/{error}"
            continue
        if isinstance(part, Memtable):
            keys.append(np.array(list(part.single_keys), np.uint64))
        joined = np.concatenate(keys) if keys else np.empty(0, np.uint64)
        ordinals = f.key_ordinals(joined)
        try:
            sleeping.append(part.spans_of(ordinals[part.alive(ordinals)])[0])
        except Damaged as error:
            yield f"{segments.topic}/{error}"
    if not np.array_equal(np.sort(np.concatenate(sleeping)), expected):
        here, there = set(np.concatenate(sleeping).tolist()), set(expected.tolist())
        yield (
            f"{name}: the index and the documents disagree on who sleeps: at {sorted(here - there)[:5]} only the index, "
            f"at {sorted(there - here)[:5]} only the documents"
        )


def _check_table(segments: Segments, part: TablePart, scanned: Scan) -> Iterator[str]:
    """Compare a table, byte by byte, with one built from its documents. If some are damaged: compare keys and ids of the rest."""
    name, cover = f"{segments.topic}/{part.table.path.name}", part.table.cover
    part.table.verify()
    keys = part.table.slice(0, len(part.table))
    low, high = np.searchsorted(scanned.positions, (cover.start, cover.end)).tolist()
    if high - low == cover.documents and (f.key_ordinals(keys) < cover.documents).all():
        span, alive = slice(low, high), np.zeros(cover.documents, np.bool_)
        alive[f.key_ordinals(keys)] = True  # the caller checks that no sleeper is left out
        hashes = build.scan_hashes(segments.door.map(part.path), scanned, low, high, part.seed)
        columns = (scanned.due_ms[span], scanned.positions[span], scanned.flags[span], hashes, alive)
        expected = build.tabulate(cover, *columns, part.seed)
        if not part.table.is_made_of(expected):
            yield f"{name}: it is not what its documents make. Remove it: it is made again."
        if low < high and not cover.first_seq <= scanned.seq[span].min() <= scanned.seq[span].max() <= cover.last_seq:
            yield f"{name}: it says that it covers seqs {cover.first_seq} to {cover.last_seq}, and does not"
        return
    if (np.diff(keys.astype(np.int64)) <= 0).any():
        yield f"{name}: keys are out of order"
    ordinals = f.key_ordinals(keys)
    starts, _ = part.spans_of(ordinals)
    at = np.searchsorted(scanned.positions, starts)
    known = (
        (at < len(scanned)) & (scanned.positions[np.minimum(at, max(len(scanned) - 1, 0))] == starts) if len(scanned) else at < 0
    )
    if not (scanned.due_ms[at[known]] == f.key_dues(keys)[known]).all():
        yield f"{name}: a key names another due time than its document"
    hashes = build.scan_hashes(segments.door.map(part.path), scanned, 0, len(scanned), part.seed)
    if part.table.lacks(hashes[at[known]]):  # of two documents with one id, the newer is enough
        yield f"{name}: an id is missing"
    if not part.table.may_hold(hashes[at[known]]).all():
        yield f"{name}: the prints deny an id"


def _check_order(segments: Segments) -> Iterator[str]:
    for before, after in zip(segments.parts, segments.parts[1:], strict=False):
        if before.last_seq >= after.first_seq and after.documents:
            yield f"{segments.topic}: parts overlap at seq {after.first_seq}"
