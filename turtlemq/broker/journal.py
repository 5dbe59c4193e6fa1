"""A journal: a write-ahead log of events. A Broker has two, `reserve_*.bson` (leases, retries, groups) and `history_*.bson`
(settlements, cancellations).

An event is one document, and is written before the caller gets an answer, so a killed process loses none; it is synced with the
next checkpoint. Events that belong together are one batch: a crash leaves all of them or none. Opening replays the events behind
the last checkpoint. Files are rolled by size, and removed from the oldest on.

Not here: which events there are (`events`), and their effects (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any

import bson

from turtlemq.broker import events
from turtlemq.broker.policy import Extent
from turtlemq.errors import Corrupt, DiskFull
from turtlemq.model import I64, Damage
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.forward import NEAR_BYTES, File, documents_from, first_from
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

_OVERHEAD_BYTES = 300  # of a document beside its body: a group's name has at most 200
_WINDOW_BYTES = 1 << 20  # at the end of a file that are searched first for its newest events; then eight times as many
_CANDIDATES_MAX = 4  # tried as the first document of such a window
_LENGTH, _MARK_AT = Struct("<i"), 4  # the first field of a document, and the position of `MARK` behind it
Encoded = list[tuple[str, bytes]]  # events of one batch: group and body of each


@dataclass(frozen=True, slots=True)
class Event:
    """One document of a journal."""

    number: int
    at_ms: int
    group: str
    fields: dict[str, Any]

    def array(self, name: str) -> I64:
        """A packed column of numbers."""
        return events.unpack(self.fields[name])


def _event(raw: memoryview) -> Event | None:
    """The event in an undamaged document; None if it holds none, since the file is of another kind and has a wrong name."""
    document = f.decode(raw)
    try:
        fields: dict[str, Any] = bson.decode(document.body)
    except bson.errors.InvalidBSON:
        return None
    return Event(document.seq, document.due_ms, document.id, fields) if "event" in fields else None


class Journal(log.OpenLog):
    """One journal of a topic: its files, and the only writer to them."""

    def __init__(self, door: Door, folder: Path, topic: str, kind: str, settings: Settings) -> None:
        self.door, self.folder, self.topic, self.kind, self.settings = door, folder, topic, kind, settings
        self.bases: list[int] = []  # of the files; the base is the number of bytes in the files before
        self.size = 0  # of the active file
        self.number = 0  # of the next event
        self.damage: list[Damage] = []
        self.make_room: Callable[[], bool] = bool  # called when the disk is full; true if there is room now
        self.make_checkpoint: Callable[[], dict[str, Any]] | None = None  # for the first event of each file but the very first
        self._last_ms: dict[int, int] = {}  # by base: the time of the last event, if known
        self._paths: dict[int, Path] = {}  # by base; joining a path takes 10 µs
        self._dirty = False
        self.durable = 0  # events before this number are synced
        self._header_damaged = False  # the header of the active file is damaged
        self._state_end: int | None = None  # where the checkpoint at the start of the active file ends; None: not known yet

    def _path(self, base: int) -> Path:
        path = self._paths.get(base)
        if path is None:
            path = self._paths[base] = self.folder / names.segment(self.kind, base)
        return path

    def _header(self, base: int) -> bytes:
        return f.encode_header(f.FileHeader(self.kind, self.topic, base))

    @property
    def position(self) -> tuple[int, int]:
        """(base of the file, position in it) of the next event."""
        return (self.bases[-1], self.size) if self.bases else (0, 0)

    @property
    def end(self) -> int:
        """Bytes written since the topic began."""
        return self.bases[-1] + self.size if self.bases else 0

    @property
    def bytes_total(self) -> int:
        """Bytes on disk."""
        return sum(self.door.size(self._path(base)) for base in self.bases)

    def find_files(self) -> None:
        """Find the files of this journal. The first step of opening."""
        files = [names.parse(name) for name in self.door.names(self.folder)]
        journal_files = [file for file in files if file is not None and file.kind == self.kind]
        self.bases = sorted(file.base for file in journal_files if file.what == "bson" and not file.suffix)
        while self.bases and self._never_written(self.bases[-1]):
            self.door.remove(self._path(self.bases.pop()))

    def _never_written(self, base: int) -> bool:
        """Whether a crash left this file without an event, and perhaps with an unsynced header."""
        blank = self._header(base)
        size = self.door.size(self._path(base))
        if size != len(blank):
            return size < len(blank)
        data = self.door.read_all(self._path(base))
        return data != blank and log.never_synced(data, blank)

    def holds(self, start: tuple[int, int]) -> bool:
        """Whether a file has this position."""
        return start == (0, 0) or (start[0] in self.bases and start[1] <= self.door.size(self._path(start[0])))

    def open(self, start: tuple[int, int], clean: tuple[int, int] | None = None) -> list[Event]:
        """Find the end, cut a torn last event, and return the events from `start` on, or all if there is no such position.
        `clean`: the end at a proper stop; if it still is the end, no event is torn."""
        known = start[1] > 0 and self.holds(start)
        events: list[Event] = []
        self.damage += log.missing_files(self.kind, {base: self.door.size(self._path(base)) for base in self.bases})
        for base in self.bases:
            if known and base < start[0]:
                continue
            first = start[1] if known and base == start[0] else len(self._header(base))
            events += self._read(base, first, base == self.bases[-1], clean)
        if events:
            self.number = events[-1].number + 1
        self.durable = self.number
        return events

    def _read(self, base: int, first: int, last: bool, clean: tuple[int, int] | None) -> Iterator[Event]:
        path = self._path(base)
        header, start = log.try_header(self.door, path, self.kind, self.topic, base)
        if header is None:  # events begin at the same position in any case; no more are added to this file
            self.damage.append(Damage(path.name, 0, start, "its header is damaged"))
            self._header_damaged = last
        view = self.door.map(path)
        scanned = scan(view, first, len(view), sealed=not last or clean == (base, len(view)))
        self.damage += log.damage_of(path, scanned)
        if last:
            log.make_durable(self.door, path, len(view), scanned.end)
            self.size = scanned.end
        for at, length in zip(scanned.positions.tolist(), scanned.lengths.tolist(), strict=True):
            event = _event(view[at : at + length])
            if event is not None:
                yield event
            else:
                self.damage.append(Damage(path.name, at, length, "it tells of no event"))

    def events(self) -> Iterator[Event]:
        """All retained events, newest first."""
        return (event for raw in self.documents() if (event := self.event(raw)) is not None)

    def documents(self) -> Iterator[bytes]:
        """The bytes of all retained events, newest first. Files are read from their ends, no more than is asked for."""
        for base in reversed(self.bases):
            view = self.door.map(self._path(base))
            first, end, window = len(self._header(base)), self.size if base == self.bases[-1] else len(view), _WINDOW_BYTES
            while end > first:
                start = first if end - first <= window else _boundary(view, end - window, end)
                window = min(8 * window, end) if start is None else window
                if start is None:
                    continue
                scanned = scan(view, start, end, sealed=True)
                for at, length in zip(scanned.positions[::-1].tolist(), scanned.lengths[::-1].tolist(), strict=True):
                    yield bytes(view[at : at + length])
                end, window = start, max(window, 8 * _WINDOW_BYTES)

    def files(self) -> list[File]:
        """The files, for reading forward."""
        ends = {base: self.size if base == self.bases[-1] else self.door.size(self._path(base)) for base in self.bases}
        return [File(base, len(self._header(base)), ends[base], partial(self.door.map, self._path(base))) for base in self.bases]

    def position_at(self, at_ms: int) -> int:
        """A position before all events from a time on, close to the first of them. If the clock was set back meanwhile, it may be
        behind some. The place is found by bisection."""
        for base, start, end, open_ in self.files():
            if self.last_event_ms(base) >= at_ms:
                return base + first_from(open_(), start, end, lambda found: 0 < found.due_ms < at_ms)
        return self.end

    def documents_from(self, position: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of retained events from a position on, oldest first, each with the position behind it."""
        return documents_from(self.files(), position)

    def documents_since(self, at_ms: int) -> Iterator[bytes]:
        """The bytes of retained events from about this time on, oldest first. If the clock was set back meanwhile, some may be
        missing."""
        return (raw for _, raw in self.documents_from(self.position_at(at_ms)))

    @staticmethod
    def event(raw: bytes) -> Event | None:
        """The event in a document of `documents`; None if it holds none, since the file is of another kind."""
        return _event(memoryview(raw))

    def verify(self) -> Iterator[Damage]:
        """Read every event again, also those before the checkpoint. Returns the damage."""
        for base in self.bases:
            path = self._path(base)
            try:
                header, start = log.try_header(self.door, path, self.kind, self.topic, base)
            except Corrupt as error:  # of another topic or program
                yield Damage(path.name, 0, self.door.size(path), str(error))
                continue
            if header is None:
                yield Damage(path.name, 0, start, "its header is damaged")
            view = self.door.map(path)
            scanned = scan(view, start, self.size if base == self.bases[-1] else len(view), sealed=True)
            yield from log.damage_of(path, scanned)
            for at, length in zip(scanned.positions.tolist(), scanned.lengths.tolist(), strict=True):
                if _event(view[at : at + length]) is None:
                    yield Damage(path.name, at, length, "it tells of no event")

    def last_event_ms(self, base: int) -> int:
        """The time of the last events of a file, 0 if it has none. Reads only its end: a file may have a gigabyte."""
        if base not in self._last_ms:
            view, start, width = self.door.map(self._path(base)), len(self._header(base)), NEAR_BYTES
            while not len(scanned := scan(view, max(start, len(view) - width), len(view), sealed=True)) and width < len(view):
                width *= 16  # an event is longer than that, or damaged
            self._last_ms[base] = int(scanned.due_ms.max()) if len(scanned) else 0
        return self._last_ms[base]

    def append(self, at_ms: int, group: str, *pieces: dict[str, Any]) -> None:
        """Write an event of a group, or the several events into which it was split. See `append_many`."""
        self.append_many(at_ms, [(group, fields) for fields in pieces])

    def append_many(self, at_ms: int, pieces: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Write events, given with their groups, as one batch: a crash leaves all of them or none. They survive the end of the
        process from here on, and a power cut after `sync`. Raises `DiskFull`, and changes nothing then."""
        self.refuse_if_stopped()
        batch = [(group, bson.encode(fields)) for group, fields in pieces]
        self._append(at_ms, batch)

    def _append(self, at_ms: int, batch: Encoded, *, is_checkpoint: bool = False) -> None:
        try:
            self._write_or_roll(at_ms, batch, is_checkpoint)
        except DiskFull:
            if not self.make_room():
                raise
            self._write_or_roll(at_ms, batch, is_checkpoint)

    def _write_or_roll(self, at_ms: int, batch: Encoded, is_checkpoint: bool) -> None:
        size = _size(batch)
        full = self._fd < 0 or self.size + size > self.settings.segment_bytes
        if not (full and self._open_or_roll(at_ms, size) and is_checkpoint):
            self._write(at_ms, batch)

    def _write(self, at_ms: int, batch: Encoded) -> None:
        if not batch:
            return
        flags = [f.CONTINUES] * len(batch)
        flags[-1] = 0
        flags[0] |= 0 if self._dirty else f.BARRIER
        groups, bodies = [group.encode() for group, _ in batch], [body for _, body in batch]
        data, _ = f.encode(groups, bodies, [at_ms] * len(batch), self.number, 0, flags)
        try:
            self.size += self.door.write(self._fd, self._path(self.bases[-1]), self.size, [data])
        except DiskFull:
            raise
        except OSError as error:
            raise self.stop(error) from error
        self.number += len(batch)
        self._dirty = True
        self._last_ms[self.bases[-1]] = max(at_ms, self._last_ms.get(self.bases[-1], at_ms))

    def _open_or_roll(self, at_ms: int, size: int) -> bool:
        """Open the active file, or begin a new one if `size` bytes more are too many. Returns whether it begins with a new
        checkpoint."""
        if not self.bases or self._header_damaged or not (self._is_empty or self._has_room(size)):
            return self.roll(at_ms)
        if self._fd < 0:
            self._keep(self.door.open_write(self._path(self.bases[-1])))
        return False

    @property
    def _is_empty(self) -> bool:
        """Whether the active file has no event. Required: there is one."""
        return self.size == len(self._header(self.bases[-1]))

    def _has_room(self, size: int) -> bool:
        """Whether the active file takes so many bytes more. It may be longer than a segment if the checkpoint at its start is
        long: checkpoints are at most half of all bytes written."""
        if self.size + size <= self.settings.segment_bytes:
            return True
        if self._state_end is None:
            self._state_end = self._find_state_end()
        return self.size + size <= 2 * self._state_end

    def _find_state_end(self) -> int:
        """Where the checkpoint at the start of the active file ends; if it has none, where its events begin."""
        path = self._path(self.bases[-1])
        at = len(self._header(self.bases[-1]))
        while at + f.DOCUMENT_BYTES_MIN <= self.size:
            end = at + int.from_bytes(self.door.read(path, at, 4), "little")
            raw = log.read_document(self.door, path, at, end) if at < end <= self.size else None
            event = None if raw is None else _event(memoryview(raw))
            if event is None or event.fields["event"] not in (events.STATE, events.STATE_PART):
                break
            at = end
        return at

    def _checkpoint(self) -> Encoded:
        """A checkpoint as events; nothing if this journal has none."""
        pieces = [] if self.make_checkpoint is None else events.state(self.make_checkpoint())
        return [("", bson.encode(fields)) for fields in pieces]

    def write_checkpoint(self) -> None:
        """Write a checkpoint, so that no event before it need be replayed."""
        assert self.make_checkpoint is not None, "only the reserve journal has checkpoints"
        self.refuse_if_stopped()
        self._append(0, self._checkpoint(), is_checkpoint=True)

    def roll(self, at_ms: int) -> bool:
        """Begin a new file, with a checkpoint at its start if this journal has them and it is not the first; returns whether. An
        active file without events is used."""
        state = self._checkpoint() if self.bases else []
        self.sync()
        if not self.bases or self._header_damaged or not self._is_empty:
            base = self.bases[-1] + self.size if self.bases else 0
            fd = log.create(self.door, self._path(base), f.FileHeader(self.kind, self.topic, base))
            self.close()
            self.size = len(self._header(base))
            self.bases.append(base)
            self._header_damaged = False
            self._keep(fd)
        elif self._fd < 0:
            self._keep(self.door.open_write(self._path(self.bases[-1])))
        self._state_end = self.size
        self._write(at_ms, state)
        self._state_end = self.size
        return bool(state)

    def sync(self) -> None:
        """Make every event so far durable. After a failed sync the journal accepts no more events."""
        self.refuse_if_stopped()
        if self._dirty and self._fd >= 0:
            try:
                self.door.sync(self._fd, self._path(self.bases[-1]))
            except OSError as error:
                raise self.stop(error) from error
        self._dirty, self.durable = False, self.number

    def sync_target(self) -> tuple[int, Path] | None:
        """A new descriptor and the path of the active file, for a sync on another thread; None if every event is durable. Not a
        duplicate: of two duplicates the kernel reports a failed write to one only."""
        if not self._dirty or self._fd < 0:
            return None
        path = self._path(self.bases[-1])
        return self.door.open_write(path), path

    def note_synced(self, number: int) -> None:
        """Every event before this number was synced through `sync_target`."""
        self._dirty &= self.number != number
        self.durable = max(self.durable, number)
        if not self._dirty:
            self.close()  # an idle topic holds no file open; the next event opens it again

    def extents(self) -> list[Extent]:
        """The files, for retention. The newest one has no time: it always stays."""
        last_ms = [*map(self.last_event_ms, self.bases[:-1]), 0][: len(self.bases)]
        sizes = [self.door.size(self._path(base)) for base in self.bases]
        return [Extent(size, at_ms, True) for size, at_ms in zip(sizes, last_ms, strict=True)]

    def drop_first(self) -> int:
        """Remove the oldest file. Returns its size."""
        base = self.bases[0]
        size = self.door.size(self._path(base))
        with self.door.durable_names(self.folder):
            self.door.remove(self._path(base))
            del self.bases[0], self._paths[base]
            self._last_ms.pop(base, None)
        return size


def _size(batch: Encoded) -> int:
    """The bytes of a batch in a file, at most."""
    return sum(len(body) + _OVERHEAD_BYTES for _, body in batch)


def _boundary(view: memoryview, at: int, end: int) -> int | None:
    """The start of the first document behind `at` from which the lengths of documents lead to `end`. None if there is none, or
    bytes on the way are damaged."""
    data = bytes(view[at:end])
    mark = data.find(f.MARK, _MARK_AT)
    for _ in range(_CANDIDATES_MAX):
        position = mark - _MARK_AT
        while 0 <= position <= len(data) - f.DOCUMENT_BYTES_MIN and (length := _LENGTH.unpack_from(data, position)[0]) > 0:
            position += length
        if mark >= 0 and position == len(data):
            return at + mark - _MARK_AT
        mark = data.find(f.MARK, mark + 1) if mark >= 0 else -1
    return None
