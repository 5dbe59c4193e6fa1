"""Recovery: open an Index from its files. Segments are the truth; tables and ended bits are caches.

A table is used if it fits its segment. Only bytes that no table covers are scanned; they get new tables, or the memtable. The
torn tail of the last segment is cut at the last whole batch; good documents are never cut off, and damage is reported. Opening
twice gives the same state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from turtlemq.index import build
from turtlemq.index.index import Index
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import TablePart
from turtlemq.index.repair import repairing
from turtlemq.index.segments import KIND, Segment, Segments, table_path
from turtlemq.index.writer import Writer
from turtlemq.model import SEGMENT_MESSAGES_MAX, Damage, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.readonly import (
    Runs,
    SegmentFile,
    fits_sealed,
    fitting_runs,
    open_segment,
    scan_uncovered,
    segment_bases,
)
from turtlemq.segment.scan import Scan
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door


def open_index(
    door: Door,
    folder: Path,
    topic: str,
    settings: Settings,
    progress: Progress,
    clean_end: int | None = None,
    *,
    seed: int = 0,
) -> Index:
    """Open the Index in `folder`, or create it. `progress`: the handoffs that the receiver holds durably. `clean_end`: the size
    of the active segment after a clean shutdown; then nothing in it can be torn. `seed`: for the hashes of ids in new tables."""
    door.make_folder(folder)
    segments = Segments(door, folder, topic, progress, seed)
    bases = _remove_leftovers(door, folder)
    if clean_end is None:
        door.sync_folder(folder)  # a killed process may have left names that are not durable; from now on all are relied on
    for base in bases:
        file = _open_file(segments, base, base == bases[-1], clean_end)
        if file is not None:
            segments.by_base[base] = segment = _segment(file)
            _open_parts(segments, segment, file, settings, base == bases[-1], clean_end)
    if not segments.by_base or not isinstance(_last_part(segments), Memtable):
        _create_segment(segments)
    segments.arrange()
    for part in segments.parts:
        if isinstance(part, TablePart):
            build.read_ended_bits(door, folder, part)
    repairing(segments, partial(_set_cursors_and_ends, segments))
    return Index(segments, Writer(segments, settings, max(_last_seq(segments), door.seq_floor)))


def _set_cursors_and_ends(segments: Segments) -> None:
    """Set all cursors behind the handed off messages, and all ended bits."""
    segments.set_all_cursors()
    segments.apply_ends(segments.parts)
    for part in segments.parts:
        part.live = part.count_live()


def _last_seq(segments: Segments) -> int:
    """The highest seq in any file. A number given twice could make a new tombstone count as applied already."""
    seqs = [max(part.last_seq, part.ended_by) for part in segments.parts]
    return max([segments.progress.seq_max, *seqs, *(segment.ended_by for segment in segments.by_base.values())])


def _remove_leftovers(door: Door, folder: Path) -> list[int]:
    """Remove unfinished files, and tables without a segment. Returns the bases of the segments in order."""
    files = {name: names.parse(name) for name in door.names(folder)}
    bases = segment_bases(files.values(), KIND)
    for name, file in files.items():
        if file is None or file.kind != KIND:
            continue
        finishing = file.what == "index" and file.suffix == names.TMP  # a crash may have come between the two renames of a seal
        orphan = file.what != "bson" and file.base not in bases
        if orphan or (file.suffix and not finishing):
            door.remove(folder / name)
    return bases


def _open_file(segments: Segments, base: int, last: bool, clean_end: int | None) -> SegmentFile | None:
    """A segment file with its header. A last file whose header was never synced is removed: it never held a document."""
    path = segments.folder / names.segment(KIND, base)
    size = segments.door.size(path)
    file = open_segment(segments.door, path, KIND, segments.topic, base, size, last=last)
    if file is None:
        if clean_end is not None:
            segments.damage(Damage(path.name, size, clean_end - size, "the file is shorter than it was at the last proper stop"))
        segments.door.remove(path)
    elif file.header_damage is not None:
        segments.damage(file.header_damage)
    return file


def _segment(file: SegmentFile) -> Segment:
    if file.header is None:
        return Segment(file.base, file.path, file.generation, False, file.size, file.data_start)
    return Segment(file.base, file.path, file.generation, file.header.sealed, file.size, file.data_start, file.header.killed_seq)


def _open_parts(
    segments: Segments, segment: Segment, file: SegmentFile, settings: Settings, last: bool, clean_end: int | None
) -> None:
    """Take the tables that fit, scan the rest of the segment, cut a torn tail, and cover the rest with new parts."""
    if segment.sealed:
        _open_sealed(segments, segment, file)
        return
    if segment.generation < 0:  # perhaps sealed, so seqs do not rise: one run over all of it
        settings = replace(settings, run_messages=SEGMENT_MESSAGES_MAX)
    runs = _fitting_runs(segments, segment, file)
    if runs.position == segment.size and not last:
        return
    view = segments.door.map(segment.path)
    scanned = scan_uncovered(view, file, runs, whole=not last or clean_end is not None)
    for damage in log.damage_of(segment.path, scanned):
        segments.damage(damage)
    if last and clean_end is None and file.header is None and scanned.end == segment.data_start:
        # Nothing in it is whole. Without its torn tail, no later opening could tell that the file is of this program.
        segments.door.remove(segment.path)
        del segments.by_base[segment.base]
        return
    if last and clean_end is not None and clean_end > segment.size:
        gone = clean_end - segment.size
        segments.damage(Damage(segment.path.name, segment.size, gone, "the file is shorter than it was at the last proper stop"))
    if last:
        _make_durable(segments, segment, scanned.end)
    active = last and segment.generation >= 0 and not _ends_badly(scanned)
    _cover_scanned(segments, segment, view, scanned, runs.position, runs.documents, settings, active)


def _ends_badly(scanned: Scan) -> bool:
    """Whether an end that a proper stop vouches for has bad bytes or half a batch. A new file is begun behind it: a document that
    has lost its end would reach into those appended there, and after a crash all of it would count as torn."""
    return bool(scanned.damaged) or bool(len(scanned) and scanned.flags[-1] & f.CONTINUES)


def _open_sealed(segments: Segments, segment: Segment, file: SegmentFile) -> None:
    """A sealed segment has one table. If a crash came between the two renames of its seal, the second is done now."""
    path = table_path(segments.folder, segment.base, None)
    unfinished = path.with_name(path.name + names.TMP)
    if file.length_damage is not None:  # reported at every opening: a table built from the rest fits, and would hide it
        segments.damage(file.length_damage)
    for candidate in (path, unfinished):
        part = _open_part(segments, segment, candidate)
        if part is not None and fits_sealed(file, part.table.cover):
            if candidate is unfinished:
                segments.door.rename(unfinished, path)
            segment.parts = [part]
            return
    segments.door.remove(unfinished)
    _, scanned = log.scan_file(segments.door, segment.path)
    for damage in log.damage_of(segment.path, scanned):
        segments.damage(damage)
    if len(scanned):
        view = segments.door.map(segment.path)
        segment.parts = [build.from_scan(segments, segment, view, scanned, (0, len(scanned)), 0, segment.data_start)]


def _fitting_runs(segments: Segments, segment: Segment, file: SegmentFile) -> Runs:
    """Take up the runs that fit, and remove the first one that does not."""
    opened: list[TablePart] = []

    def open_run(number: int) -> t.Table | None:
        part = _open_part(segments, segment, table_path(segments.folder, segment.base, number))
        if part is None:
            return None
        opened.append(part)
        return part.table

    runs = fitting_runs(file, segment.generation, open_run)
    segment.parts += opened[: len(runs.tables)]
    if runs.missing:
        reason = "the file is shorter than its index says"
        segments.damage(Damage(segment.path.name, segment.size, runs.missing, reason))
    if runs.rejected is not None:
        segments.door.remove(runs.rejected.path)
    return runs


def _open_part(segments: Segments, segment: Segment, path: Path) -> TablePart | None:
    """The part of a segment that a table describes; None if there is no table. A damaged one is removed."""
    try:
        table = t.open_table(segments.door, path)
        return None if table is None else TablePart(segments.folder, table, segment.path.name, segment.sealed)
    except t.Damaged:
        segments.door.remove(path)
        return None


def _cover_scanned(
    segments: Segments,
    segment: Segment,
    view: memoryview,
    scanned: Scan,
    position: int,
    number: int,
    settings: Settings,
    active: bool,
) -> None:
    """Build runs over scanned documents; in the active segment the last ones go to the memtable."""
    first = 0
    while len(scanned) - first >= (settings.run_messages if active else 1):
        span = (first, min(first + settings.run_messages, len(scanned)))
        part = build.from_scan(segments, segment, view, scanned, span, number, position)
        segment.parts.append(part)
        position, number, first = part.table.cover.end, number + part.documents, span[1]
    if not active:
        return
    memtable = Memtable(segment.path, segment.base, number, position, _first_free_seq(segments, segment), segments.seed)
    if first < len(scanned):
        given = (scanned.flags[first:] & (f.SERVER_ID | f.TOMBSTONE)) != 0
        own = None
        if not given.all():
            own = build.scan_hashes(view, scanned, first, len(scanned), segments.seed)
            own[given] = 0
        rest = slice(first, None)
        memtable.add(scanned.seq[rest], scanned.due_ms[rest], scanned.positions[rest], scanned.end, scanned.flags[rest], own)
    segment.parts.append(memtable)


def _first_free_seq(segments: Segments, segment: Segment) -> int:
    """The seq behind all parts: the range of an empty memtable begins there."""
    parts = [part for other in (*segments.by_base.values(), segment) for part in other.parts]
    return max((part.last_seq for part in parts), default=-1) + 1


def _make_durable(segments: Segments, segment: Segment, end: int) -> None:
    """Cut the torn tail and sync the rest. A killed process may have left documents unsynced; from here on they are found, fired,
    and answered as duplicates, so they must be durable."""
    log.make_durable(segments.door, segment.path, segment.size, end)
    segment.size = end


def _last_part(segments: Segments) -> object:
    parts = segments.active.parts
    return parts[-1] if parts else None


def _create_segment(segments: Segments) -> None:
    """Create the first segment, or a new one behind a last one that cannot be appended to."""
    base = segments.active.base + segments.active.size if segments.by_base else 0
    path = segments.folder / names.segment(KIND, base)
    segments.parts = [part for segment in segments.by_base.values() for part in segment.parts]
    header = f.FileHeader(KIND, segments.topic, base, killed_seq=max(_last_seq(segments), 0))
    segments.door.close(log.create(segments.door, path, header))
    start = len(f.encode_header(header))
    segment = Segment(base, path, 0, False, start, start, header.killed_seq)
    segment.parts = [Memtable(path, base, 0, start, _first_free_seq(segments, segment), segments.seed)]
    segments.by_base[base] = segment
