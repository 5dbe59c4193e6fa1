"""Recovery without writes: which segments a log has, which tables fit them, and which documents no table covers.

Segments are the truth, tables are caches. The engine's opening acts on these decisions: it removes, truncates, syncs and builds
(`index.recover`, `broker.ready_recover`). Spark reads the files of a running server by the same decisions, and only leaves out
the bytes that the engine would cut. Rule: nothing here writes, renames or removes a file.
Not here: batches and offsets of the ready log (`broker.ready_readonly`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from turtlemq.errors import NotOurs
from turtlemq.model import Damage
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.segment.scan import Scan, scan
from turtlemq.storage import names
from turtlemq.storage.door import Door


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file as opening finds it."""

    base: int
    path: Path
    size: int  # bytes that count
    header: f.FileHeader | None  # None: damaged
    data_start: int  # byte of the first document, also behind a damaged header

    @property
    def generation(self) -> int:
        """That of the header; -1 if it is damaged. Tables of such a segment carry -1, too."""
        return -1 if self.header is None else self.header.generation

    @property
    def header_damage(self) -> Damage | None:
        return Damage(self.path.name, 0, self.data_start, "its header is damaged") if self.header is None else None

    @property
    def length_damage(self) -> Damage | None:
        """The difference between the size of a sealed segment and its header. A table made of the rest fits all the same."""
        if self.header is None or not self.header.sealed:
            return None
        odd = self.size - (self.data_start + self.header.bytes)
        reason = f"the file is {'shorter' if odd < 0 else 'longer'} than its header says"
        return Damage(self.path.name, self.size - max(odd, 0), abs(odd), reason) if odd else None


def segment_bases(files: Iterable[names.FileName | None], kind: str) -> list[int]:
    """Bases of the segments of one kind among parsed file names, sorted.

    >>> segment_bases(map(names.parse, ["delay_0000000900.bson", "delay_0000000000.bson", "delay_0000000000.index"]), "delay")
    [0, 900]
    """
    return sorted(file.base for file in files if file and file.kind == kind and file.what == "bson" and not file.suffix)


def data_start(kind: str, topic: str, base: int) -> int:
    """The byte at which the documents of a segment begin."""
    return len(f.encode_header(f.FileHeader(kind, topic, base)))


def open_segment(door: Door, path: Path, kind: str, topic: str, base: int, size: int, *, last: bool) -> SegmentFile | None:
    """A segment file with its header. Returns None for the last one if a power cut left its header unsynced: it never held a
    document. Raises `NotOurs` for a file of another log or of another program."""
    blank = f.encode_header(f.FileHeader(kind, topic, base))
    torn = last and size <= len(blank) and log.never_synced(door.read(path, 0, size), blank)
    try:
        header, start = log.try_header(door, path, kind, topic, base)
    except NotOurs:
        if not torn:
            raise
        return None
    return None if header is None and torn else SegmentFile(base, path, size, header, start)


def fits_sealed(segment: SegmentFile, cover: t.Cover) -> bool:
    """True if a table covers exactly this generation of a sealed segment. Requires: a segment with a sealed header."""
    header = segment.header
    assert header is not None, "sealed"
    same = (cover.generation, cover.end, cover.killed_seq) == (header.generation, segment.size, header.killed_seq)
    return same and cover.documents <= header.documents


@dataclass(slots=True)
class Runs:
    """Tables that cover a growing segment without a gap from its first document on."""

    position: int  # byte behind the documents that they cover
    tables: list[t.Table] = field(default_factory=list)
    documents: int = 0
    rejected: t.Table | None = None  # the next one, which does not fit
    missing: int = 0  # bytes behind the end of the file that the rejected one covers

    @property
    def last_seq(self) -> int:
        return self.tables[-1].cover.last_seq if self.tables else -1


def fitting_runs(segment: SegmentFile, generation: int, open_run: Callable[[int], t.Table | None]) -> Runs:
    """The runs of a growing segment. `open_run` opens the one that begins with a document; None: there is none to be used.

    A table covers only synced documents, so a file that is shorter than a fitting one has lost bytes (`missing`)."""
    runs = Runs(segment.data_start)
    while (table := open_run(runs.documents)) is not None:
        cover = table.cover
        fits = (cover.base, cover.generation, cover.first) == (segment.base, generation, runs.documents)
        fits = fits and cover.start == runs.position
        if not fits or cover.end > segment.size or not cover.documents:
            runs.rejected, runs.missing = table, max(cover.end - segment.size, 0) if fits else 0
            break
        runs.tables.append(table)
        runs.position, runs.documents = cover.end, runs.documents + cover.documents
    return runs


def scan_uncovered(view: memoryview, segment: SegmentFile, runs: Runs, *, whole: bool) -> Scan:
    """The documents of a growing delay segment behind its runs. `whole`: no torn end is possible.

    Seqs rise but behind a damaged header: such a segment may have been sealed, so in due order."""
    rising = segment.generation >= 0
    return scan(view, runs.position, segment.size, sealed=whole, rising=rising, after=runs.last_seq)


def cover_of(
    scanned: Scan, span: tuple[int, int], *, base: int, generation: int, first: int, start: int, killed_seq: int = 0
) -> t.Cover:
    """The cover of a table over documents [span) of a scan, from byte `start` on; `first` is their number in the segment."""
    low, high = span
    seqs = scanned.seq[low:high]
    end = int(scanned.positions[high]) if high < len(scanned) else scanned.end
    return t.Cover(base, generation, first, high - low, start, end, int(seqs.min()), int(seqs.max()), killed_seq)
