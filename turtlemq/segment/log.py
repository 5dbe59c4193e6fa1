"""Segment files on disk: create one, read its header and documents, scan it.

Documents are read with pread, not through a mapping: an I/O error is an exception then, not a signal, and a page fault does not
block other threads. Every document returned from here was verified against its checksum. Not here: appending (`index.writer`,
`broker.ready_log`, `broker.journal`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from turtlemq.errors import Corrupt, NotOurs, Stopped
from turtlemq.model import I64, Damage, Mask
from turtlemq.segment import format as f
from turtlemq.segment import kernel
from turtlemq.segment import scan as s
from turtlemq.segment.bulk_crc import all_match
from turtlemq.storage import names
from turtlemq.storage.door import Door

_HEAD_BYTES = 1 << 16  # searched for a document if the header is unreadable
_GAP_BYTES = 4096  # reading this much for nothing costs less than another pread


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents read from a file. `starts`: their positions in `buffer`. `good`: which of them are as written."""

    buffer: bytes | bytearray
    starts: I64
    heads: np.ndarray[Any, np.dtype[Any]]
    good: Mask

    def ids(self) -> list[bytes]:
        """The ids of all documents; b"" for those that are not good. 0.2 µs each."""
        begin, end = self.starts + f.PREFIX_BYTES, self.starts + f.PREFIX_BYTES + self.heads["idlen"] - 1
        columns = (begin.tolist(), end.tolist(), self.good.tolist())
        return [bytes(self.buffer[a:b]) if good else b"" for a, b, good in zip(*columns, strict=True)]

    def raw(self, i: int) -> bytes:
        """The bytes of the `i`-th document."""
        at = int(self.starts[i])
        return bytes(self.buffer[at : at + int(self.heads["len"][i])])

    def decode(self, i: int) -> f.Document:
        """The `i`-th document. Required: it is good."""
        at = int(self.starts[i])
        return f.decode(memoryview(self.buffer)[at : at + int(self.heads["len"][i])])


def create(door: Door, path: Path, header: f.FileHeader) -> int:
    """Create a segment with its header; file and name are durable. Returns the descriptor for writing."""
    fd = -1
    try:
        with door.durable_names(path.parent):
            fd = door.create(path)
            door.write(fd, path, 0, [f.encode_header(header)])
            door.sync(fd, path)
    except BaseException:
        if fd >= 0:
            door.close(fd)
            door.remove(path)
        raise
    return fd


def make_durable(door: Door, path: Path, size: int, end: int) -> None:
    """Cut or fill up a file of `size` bytes to `end` bytes, and sync it."""
    fd = door.open_write(path)
    try:
        if end != size:
            door.truncate(fd, path, end)
        door.sync(fd, path)
    finally:
        door.close(fd)


def read_header(door: Door, path: Path) -> tuple[f.FileHeader, int]:
    """The header of a segment, and where its documents begin."""
    return f.decode_header(door.read(path, 0, 4096), f"{path.parent.name}/{path.name}")


def never_synced(data: bytes, blank: bytes) -> bool:
    """Can a power cut have left this content of a new file, whose header was never synced? `blank`: the header with zero numbers;
    only its last two fields, from `killed_seq` on, vary."""
    known = blank[: blank.index(b"killed_seq")]
    return len(data) <= len(blank) and all(byte in (0, expected) for byte, expected in zip(data, known, strict=False))


def try_header(door: Door, path: Path, kind: str, topic: str, base: int) -> tuple[f.FileHeader | None, int]:
    """The header of a segment, or None if it is damaged, and where its documents begin (the same in both cases). Raises NotOurs
    for a segment of another name, and for a file without any trace of our format."""
    blank = f.encode_header(f.FileHeader(kind, topic, base))
    data = door.read(path, 0, _HEAD_BYTES)
    file = f"{path.parent.name}/{path.name}"
    try:
        header, start = f.decode_header(data, file)
    except Corrupt as error:
        alike = sum(a == b for a, b in zip(data, blank, strict=False))
        ours = (
            f.MARK in data or f.MAGIC in data or 2 * alike >= min(len(data), len(blank)) or not data.strip(b"\0")
        )  # truncated, or a lost page
        if isinstance(error, NotOurs) and not ours:
            raise
        return None, len(blank)
    if (header.kind, header.topic, header.base) != (kind, topic, base):
        raise NotOurs(f"{path.name} says it is {header.kind} {header.base} of topic {header.topic!r}. Move it back there.")
    return header, start


def read_spans(door: Door, path: Path, starts: I64, ends: I64) -> tuple[bytes | bytearray, I64]:
    """Read the byte ranges [start, end) of a file, adjacent ones with one pread. Returns a buffer and the start of each in it."""
    if len(starts) == 1:
        size = max(int(ends[0] - starts[0]), 0)  # a damaged table may give an end before the start
        return door.read(path, int(starts[0]), size).ljust(size, b"\0"), np.zeros(1, np.int64)
    if (starts[1:] == ends[:-1]).all():  # adjacent
        size = max(int(ends[-1] - starts[0]), 0)
        return door.read(path, int(starts[0]), size).ljust(size, b"\0"), starts - starts[0]
    order = np.argsort(starts, kind="stable")
    begin, stop = starts[order], ends[order]
    reach = np.maximum.accumulate(np.maximum(begin, stop))
    cuts = np.flatnonzero(begin[1:] - reach[:-1] > _GAP_BYTES) + 1
    firsts, lasts = np.append(0, cuts), np.append(cuts, len(begin)) - 1
    origins, sizes = begin[firsts], reach[lasts] - begin[firsts]
    if len(firsts) == 1:  # perhaps more than 2 GiB, the limit of one pread: `read` loops
        parts = [door.read(path, int(origins[0]), int(sizes[0]))]
    else:
        parts = door.read_many(path, origins.tolist(), sizes.tolist())
    if sum(map(len, parts)) < int(sizes.sum()):
        parts = [part.ljust(size, b"\0") for part, size in zip(parts, sizes.tolist(), strict=True)]
    span = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
    offsets = np.empty(len(starts), np.int64)
    offsets[order] = begin - origins[span] + (np.cumsum(sizes) - sizes)[span]
    return (parts[0] if len(parts) == 1 else b"".join(parts)), offsets


def read_documents(door: Door, path: Path, starts: I64, ends: I64) -> Documents:
    """Read and verify the documents that begin at `starts`; each ends at or before its `end`."""
    if not len(starts):
        return Documents(b"", starts, np.empty(0, f.PREFIX), np.empty(0, np.bool_))
    buffer, at = read_spans(door, path, starts, ends)
    heads = f.prefixes(buffer.ljust(int(at.max()) + f.PREFIX_BYTES, b"\0"), at)
    fits = (heads["len"] >= f.DOCUMENT_BYTES_MIN) & (heads["len"] <= ends - starts)
    good = fits & f.well_formed(heads)
    if good.all():
        if kernel.compiled is not None or not all_match(memoryview(buffer), at, heads):  # the kernel checks each alone as fast
            good = f.checksums_match(memoryview(buffer), at, heads)
    else:
        good[good] = f.checksums_match(memoryview(buffer), at[good], heads[good])
    return Documents(buffer, at, heads, good)


def read_small(door: Door, path: Path, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, bytes] | None]:
    """Read and verify a few documents without arrays: (due, seq, flags, bytes) for each range [start, end), None if it is not as
    written. 1.5 µs each if one pread gets all of them, else 2.5 µs."""
    low, high = min(spans)[0], max(spans)[1]
    sizes = [end - start for start, end in spans]
    if high - low <= sum(sizes) + _GAP_BYTES:
        data = door.read(path, low, high - low).ljust(high - low, b"\0")
        return [f.read_one(data, start - low, end - low) for start, end in spans]
    pieces = door.read_many(path, [start for start, _ in spans], sizes)
    return [f.read_one(piece.ljust(size, b"\0"), 0, size) for piece, size in zip(pieces, sizes, strict=True)]


def read_document(door: Door, path: Path, start: int, end: int) -> bytes | None:
    """Read and verify one document, without arrays: 3 µs. None if it is not as written."""
    document = f.read_one(door.read(path, start, end - start).ljust(end - start, b"\0"), 0, end - start)
    return None if document is None else document[3]


def read_prefixes(door: Door, path: Path, starts: I64) -> np.ndarray[Any, np.dtype[Any]]:
    """The fixed prefixes of documents, not verified: for searches whose result is verified later."""
    if not len(starts):
        return np.empty(0, f.PREFIX)
    buffer, at = read_spans(door, path, starts, starts + f.PREFIX_BYTES)
    return f.prefixes(buffer.ljust(int(at.max()) + f.PREFIX_BYTES, b"\0"), at)


def scan_file(door: Door, path: Path, *, whole: bool = False, hint: I64 | None = None) -> tuple[f.FileHeader, s.Scan]:
    """Header and scan of a file. `whole`: nothing in it counts as torn. A sealed file with a wrong length counts as damaged."""
    header, first = read_header(door, path)
    view = door.map(path)
    size = len(view)
    end = first + header.bytes if header.sealed else size
    rising = not header.sealed and header.kind != "ready"
    scanned = s.scan(view, first, min(end, size), sealed=header.sealed or whole, rising=rising, hint=hint)
    if end == size:
        return header, scanned
    reason = "the file is shorter than its header says" if size < end else "the file is longer than its header says"
    odd = s.Hole(min(size, end), abs(end - size), reason)
    return header, replace(scanned, size=size, end=size, damaged=(*scanned.damaged, odd))


def damage_of(path: Path, scanned: s.Scan) -> list[Damage]:
    """The holes of a scan as reports of damage."""
    return [Damage(path.name, hole.position, hole.length, hole.reason) for hole in scanned.damaged]


def missing_files(kind: str, sizes: Mapping[int, int]) -> list[Damage]:
    """The bytes that no file of a log has. `sizes`: by base, in order. Requires: each file begins where the one before ends, and
    files are only removed from the front.

    >>> missing_files("history", {0: 300, 300: 100, 500: 80})[0].file
    'history_0000000400.bson'
    """
    ends = [base + size for base, size in sizes.items()]
    gaps = [(end, base - end, base) for end, base in zip(ends, [*sizes][1:], strict=False) if end < base]
    reason = "this file is missing, or the one before has lost its end; the next one is"
    return [Damage(names.segment(kind, end), 0, gone, f"{reason} {names.segment(kind, base)}") for end, gone, base in gaps]


class Stoppable:
    """A log that accepts no more writes after one has failed with an unknown result. Opening the topic again finds out."""

    stopped: BaseException | None = None

    def refuse_if_stopped(self) -> None:
        """Raise `Stopped` if a write has failed with an unknown result."""
        if self.stopped is not None:
            raise Stopped(f"{Stopped.__doc__} The cause was: {self.stopped}")

    def stop(self, error: BaseException) -> Stopped:
        """Accept no more writes until the topic is opened again. Returns the error to raise."""
        self.stopped = self.stopped or error
        return Stopped(f"{Stopped.__doc__} The cause was: {error}")


class OpenLog(Stoppable):
    """A log whose active file stays open between two writes. Every unsynced byte was written through the open descriptor: the
    kernel tells it of writes that failed later, and need not tell a new one."""

    door: Door
    _fd = -1

    def _keep(self, fd: int) -> None:
        """Use this descriptor of the active file from now on."""
        self._fd = fd
        self.door.keep(self)

    def close(self) -> None:
        """Close the descriptor. Nothing is synced."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self.door.release(self)
            self.door.close(fd)

    def rest(self) -> bool:
        """Close the file, synced, unless a write is under way. The next write opens it again. Returns whether it is closed."""
        if self.stopped is None:
            self.sync()
        self.close()
        return True

    def sync(self) -> None:
        """Make everything written so far durable."""
        raise NotImplementedError
