"""Recovery of the ready log without writes: the tables of a segment that fit, the whole batches behind them, the clean end.

The engine's opening (`ready_recover`) reads each segment with `read_segment`, then removes, truncates, syncs and builds. Spark
reads the files of a running or stopped server in the same way, and only leaves out the bytes that the engine would cut.
Rule: nothing here writes, renames or removes a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bson.int64 import Int64

from turtlemq.broker.ready_batches import KIND, Batches, read_batches
from turtlemq.model import Damage, Mark, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.readonly import SegmentFile, fitting_runs
from turtlemq.segment.scan import Hole, Scan, scan
from turtlemq.storage import names

FIRST_BYTES = 4096  # of a segment's documents: enough for the first HANDOFF document


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """The end of the ready log at a clean shutdown: no later bytes, and nothing before it is torn."""

    base: int  # of the last segment
    end: int  # its size
    next_offset: int
    progress: Progress

    @staticmethod
    def read(fields: dict[str, Any]) -> CleanEnd:
        """The inverse of `fields`."""
        base, end, offset = (int(number) for number in fields["at"])
        return CleanEnd(base, end, offset, Progress(tuple(Mark(*map(int, mark)) for mark in fields["marks"])))

    def fields(self) -> dict[str, Any]:
        """For the clean-shutdown mark."""
        marks = [[Int64(m.seq_max), Int64(m.due_ms), Int64(m.seq)] for m in self.progress.marks]
        return {"at": [Int64(number) for number in (self.base, self.end, self.next_offset)], "marks": marks}


def check_clean_end(clean: CleanEnd, last: tuple[int, int] | None, header_bytes: int) -> tuple[CleanEnd | None, Damage | None]:
    """Compare the clean end with base and size of the last segment. Returns the clean end if it still tells the offsets of that
    segment, which may have lost bytes; and the damage if the log ends elsewhere now. An empty segment may be gone."""
    if (last or (0, 0)) == (clean.base, clean.end):
        return clean, None
    reason = "the log ended here at the last proper stop, and does no longer"
    damage = Damage(names.segment(KIND, clean.base), clean.end, 0, reason) if clean.end > header_bytes else None
    applies = last is not None and last[0] == clean.base and last[1] <= clean.end
    return clean if applies else None, damage


def first_offset(head: bytes, open_first: Callable[[], t.Table | None]) -> int | None:
    """The offset with which a segment begins, by its first document or else by its first table; None if both are lost."""
    found = scan(head, 0, len(head), sealed=True)
    if len(found) and found.positions[0] == 0 and found.flags[0] & f.HANDOFF:
        return int(found.seq[0])
    table = open_first()
    return None if table is None else table.cover.first_seq


@dataclass(slots=True)
class ReadSegment:
    """A segment as opening reads it: tables over its first documents, batches over the rest."""

    file: SegmentFile
    tables: list[t.Table]
    position: int  # byte behind the documents of the tables
    scanned: Scan  # from there on
    batches: Batches
    unused: list[t.Table] = field(default_factory=list)  # tables that do not fit, or whose documents are in `batches`
    lost: Damage | None = None  # documents that a table knew, and that are gone

    @property
    def tabled(self) -> int:
        return sum(table.cover.documents for table in self.tables)

    @property
    def first_offset(self) -> int:
        return self.tables[0].cover.first_seq if self.tables else self.batches.first_offset

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.tabled + len(self.batches.positions)

    @property
    def damage(self) -> list[Damage]:
        holes = [damage for damage in log.damage_of(self.file.path, self.scanned) if damage.position < self.batches.end]
        return [damage for damage in (self.file.header_damage, self.lost) if damage is not None] + holes

    def cover(self) -> t.Cover:
        """That of a table over the batches. Requires: at least one document in them."""
        offset, count = self.first_offset + self.tabled, len(self.batches.positions)
        return t.Cover(self.file.base, 0, self.tabled, count, self.position, self.batches.end, offset, offset + count - 1, 0)


def read_segment(
    file: SegmentFile,
    view: memoryview,
    open_run: Callable[[int], t.Table | None],
    *,
    next_offset: int | None,
    total: int | None,
    last: bool,
    seed: int = 0,
) -> ReadSegment:
    """Read a segment: its fitting tables, then the whole batches behind them.

    `next_offset`: of its first document, if known. `total`: the offset behind its last document, if known; then no batch is torn.
    A `view` shorter than the file's size has lost its end: that is damage. `seed`: of the hashes in the batches.

    The newest batch holds the progress, so it must be among the `batches` of the last segment: if there is none behind the
    tables, the last table is dropped and its documents are read."""
    runs = fitting_runs(file, 0, open_run)
    tables, position = runs.tables, runs.position
    unused = [] if runs.rejected is None else [runs.rejected]
    expected = tables[0].cover.first_seq + runs.documents if tables else next_offset
    upto = None if total is None else (file.size, total)
    scanned, batches = _read_batches(view, file.size, position, expected, upto, seed)
    while last and not len(batches.positions) and tables:
        table = tables.pop()
        unused.append(table)
        position = table.cover.start
        scanned, batches = _read_batches(view, file.size, position, table.cover.first_seq, upto, seed)
    lost = None
    if last and batches.end < runs.position:  # tables cover synced documents only
        lost = Damage(file.path.name, batches.end, runs.position - batches.end, "no document is left of what a table knew")
    return ReadSegment(file, tables, position, scanned, batches, unused, lost)


def _read_batches(
    view: memoryview, size: int, position: int, expected: int | None, upto: tuple[int, int] | None, seed: int
) -> tuple[Scan, Batches]:
    scanned = scan(view, position, min(size, len(view)), sealed=True)
    if len(view) < size:
        scanned = _with_lost_end(scanned, size)
    return scanned, read_batches(view, scanned, position, expected, upto, seed=seed)


def _with_lost_end(scanned: Scan, size: int) -> Scan:
    """A scan of a file that has lost its end, as if that was full of zeros: one hole, from the last broken document on."""
    holes, at = scanned.damaged, scanned.size
    if holes and holes[-1].position + holes[-1].length == scanned.size:
        holes, at = holes[:-1], holes[-1].position
    return replace(scanned, size=size, end=size, damaged=(*holes, Hole(at, size - at, "the file has lost its end")))
