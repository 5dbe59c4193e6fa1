"""The ready log: documents in the order in which they came due, byte for byte as they slept, in `ready_*.bson`.

Each handoff is one batch: a HANDOFF document that says how many documents follow, at which ready offset they begin and what the
Index has handed off with them, then the documents. A batch counts when it is whole, so a crash repeats nothing and loses
nothing: what the last whole batch says was handed off is the truth, and the Index goes on from there.

Synced on its own beat: until then the Index keeps what it handed off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson
import numpy as np
from bson.int64 import Int64

from turtlemq.door import Door
from turtlemq.errors import DiskFull, Stopped
from turtlemq.model import I64, Damage, Due, Mark, Progress, Settings
from turtlemq.segment import format as f
from turtlemq.segment import log, names
from turtlemq.segment.scan import Scan

KIND = "ready"


class ReadyLog:
    """The one writer of a topic's ready log."""

    def __init__(self, door: Door, folder: Path, topic: str, settings: Settings) -> None:
        self.door, self.folder, self.topic, self.settings = door, folder, topic, settings
        self.progress = self.durable = Progress()
        self.next_offset = 0
        self.damage: list[Damage] = []
        self.stopped: BaseException | None = None
        self.base = self.size = 0
        self._fd = -1

    @property
    def path(self) -> Path:
        return self.folder / names.segment(KIND, self.base)

    def open(self) -> None:
        """Find the last whole batch and cut what is behind it."""
        files = [names.parse(name) for name in self.door.names(self.folder)]
        bases = sorted(
            file.base for file in files if file is not None and (file.kind, file.what, file.suffix) == (KIND, "bson", "")
        )
        while bases and self.door.size(self.folder / names.segment(KIND, bases[-1])) < self._header_bytes(bases[-1]):
            self.door.remove(self.folder / names.segment(KIND, bases.pop()))  # a crash while it was being made
        if not bases:
            return
        for base in reversed(bases):
            self.base = base
            _, found = log.scan_file(self.door, self.path, whole=True)
            last = self._last_batch(found)
            if base == bases[-1]:
                self.size = self._cut(found, last)
            if last is not None:
                break
        self.base = bases[-1]

    def _header_bytes(self, base: int) -> int:
        return len(f.encode_header(f.FileHeader(KIND, self.topic, base)))

    def _last_batch(self, found: Scan) -> int | None:
        """Take up the last whole batch of a scan: the number of its HANDOFF document, or None."""
        batches: list[int] = np.flatnonzero(found.flags & f.HANDOFF).tolist()
        for i in reversed(batches):
            head = self._read_handoff(found, i)
            following = slice(i + 1, i + 1 + head["count"])
            if len(found.positions[following]) == head["count"] and _contiguous(found, i, head["bytes"]):
                self.progress = self.durable = Progress(tuple(Mark(*map(int, mark)) for mark in head["marks"]))
                self.next_offset = int(found.seq[i]) + head["count"]
                return i
        return None

    def _read_handoff(self, found: Scan, i: int) -> dict[str, Any]:
        data = self.door.read(self.path, int(found.positions[i]), int(found.lengths[i]))
        fields: dict[str, Any] = bson.decode(f.decode(data).body)
        return fields

    def _cut(self, found: Scan, last: int | None) -> int:
        """Where the log goes on. Bytes behind the last whole batch were never relied on."""
        end = self._header_bytes(self.base)
        if last is not None:
            head = self._read_handoff(found, last)
            end = int(found.positions[last] + found.lengths[last]) + head["bytes"]
        self.damage = [d for d in log.damage_of(self.path, found) if d.position < end]
        fd = self.door.open_write(self.path)
        try:
            if end < found.size:
                self.door.truncate(fd, self.path, end)
            self.door.sync(fd, self.path)
        finally:
            self.door.close(fd)
        return end

    def accept(self, due: Due, now_ms: int) -> None:
        """Append one handoff. Not durable before `sync`. On a full disk nothing changes."""
        if self.stopped is not None:
            raise Stopped(f"{Stopped.__doc__} The cause was: {self.stopped}")
        if self._fd < 0 or self.size + len(due.raw) > self.settings.segment_bytes:
            self._open_or_roll(len(due.raw))
        marks = [[Int64(m.seq_max), Int64(m.due_ms), Int64(m.seq)] for m in due.progress.marks]
        body = bson.encode({"count": len(due), "bytes": len(due.raw), "marks": marks})
        head, _ = f.encode([b"handoff"], [body], [now_ms], self.next_offset, 0, [f.HANDOFF])
        try:
            self.size += self.door.write(self._fd, self.path, self.size, [head, due.raw])
        except DiskFull:
            raise
        except OSError as error:
            self.stopped = error
            raise Stopped(f"{Stopped.__doc__} The cause was: {error}") from error
        self.next_offset += len(due)
        self.progress = due.progress

    def _open_or_roll(self, size: int) -> None:
        if self._fd < 0 and self.size:
            self._fd = self.door.open_write(self.path)
        if self._fd < 0 or (self.size + size > self.settings.segment_bytes and self.size > self._header_bytes(self.base)):
            self.sync()
            base = self.base + self.size
            fd = log.create(self.door, self.folder / names.segment(KIND, base), f.FileHeader(KIND, self.topic, base))
            self.shut()
            self._fd, self.base, self.size = fd, base, self._header_bytes(base)

    def sync(self) -> None:
        """Make every handoff so far durable; then the Index may let go of those documents."""
        if self._fd >= 0 and self.durable != self.progress:
            try:
                self.door.sync(self._fd, self.path)
            except OSError as error:
                self.stopped = error
                raise Stopped(f"{Stopped.__doc__} The cause was: {error}") from error
            self.durable = self.progress

    def shut(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            self.door.close(self._fd)
            self._fd = -1


def _contiguous(found: Scan, i: int, size: int) -> bool:
    """Do the documents behind number `i` fill `size` bytes without a gap?"""
    start = int(found.positions[i] + found.lengths[i])
    inside: I64 = np.flatnonzero((found.positions >= start) & (found.positions < start + size))
    return int(found.lengths[inside].sum()) == size
