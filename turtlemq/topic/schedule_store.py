"""The schedules of a topic on disk: a third Index, in the folder `schedules/`, which exists once the topic has had a schedule.

In this Index the due time of a document is the time at which its schedule has something to do, its body and fields are those of
the messages to come, and `meta` is the schedule itself. Each change is a new version of the document. So schedules cost no
memory, are found by name and by time, and are compacted and backed up like sleepers. Their ids begin with `schedule/`, which is
no id of a message. When schedules fire is decided in `turtlemq.schedules` and done in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turtlemq.index.columns import UNHASHED, Columns, tombstones
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.message_fields import flags_of
from turtlemq.model import DUE_MS_MAX, SEQ_COUNTER_BITS, Progress
from turtlemq.schedules import Schedule
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

PREFIX = "schedule/"
RUN_VERSIONS = 65_536  # versions in a memtable: 6 MB, and 0.1 s of a restart after a crash


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A schedule, and the content of its messages."""

    schedule: Schedule
    body: bytes
    flags: int = f.JSON  # priority and JSON bits of the messages
    ttr_ms: int = 0
    headers: dict[str, str] | None = None
    created_seq: int | None = None  # of the first version; None: this is the first
    document: tuple[int, int] | None = None  # (seq, due) of the stored version; None: it is not stored yet

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def created_ms(self) -> int:
        return (self.created_seq or 0) >> SEQ_COUNTER_BITS

    def changed(self, schedule: Schedule) -> StoredSchedule:
        """With another schedule, the next version of this one."""
        return replace(self, schedule=schedule)


class ScheduleStore:
    """The schedules of one topic. Changes are staged, and durable after `commit`."""

    def __init__(
        self, door: Door, folder: Path, topic: str, settings: Settings, clean_end: int | None = None, seed: int = 0
    ) -> None:
        self.index: Index = open_index(door, folder / names.SCHEDULES, topic, _own(settings), Progress(), clean_end, seed=seed)
        self.wake_ms: int | None = None  # when the first schedule has something to do; None: none ever
        self.fired = 0  # messages put since the topic was opened
        self._staged: set[str] = set()  # names of staged versions
        self._settings = settings
        self._find_first(0)

    def __len__(self) -> int:
        return self.index.stats().sleep

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._settings = settings
        self.index.configure(_own(settings))

    def find(self, name: str) -> StoredSchedule | None:
        """A schedule by its name."""
        if name in self._staged:
            self.commit()
        found = self.index.find_many([PREFIX + name]).get(0)
        return None if found is None else read_schedule(found)

    def page(self, limit: int, cursor: str | None = None) -> tuple[list[StoredSchedule], str | None]:
        """Schedules by the time at which they have something to do, those that fire next first; paused ones come last."""
        documents, cursor = self.index.browse_documents(0, DUE_MS_MAX, limit, cursor)
        return [read_schedule(document) for document in documents], cursor

    def has_due(self, now_ms: int) -> bool:
        """Has a schedule something to do now? O(1)."""
        return self.wake_ms is not None and self.wake_ms <= now_ms

    def due(self, now_ms: int, count_max: int) -> list[StoredSchedule]:
        """Schedules that have something to do now, the earliest first."""
        if self.wake_ms is None or self.wake_ms > now_ms:
            return []
        documents, _ = self.index.browse_documents(self.wake_ms, min(now_ms, DUE_MS_MAX), count_max)
        return [read_schedule(document) for document in documents]

    def since(self, at_ms: int) -> Iterator[StoredSchedule]:
        """Versions that were written at this time or later, the oldest first. 20 µs each."""
        for _, raw in self.index.arrivals.documents(self.index.arrivals.position_at(at_ms)):
            document = f.decode(raw)
            if not document.flags & f.TOMBSTONE and document.seq >> SEQ_COUNTER_BITS >= at_ms:
                yield read_schedule(document)

    @property
    def last_write_ms(self) -> int:
        """When the newest version was written."""
        return self.index.last_seq >> SEQ_COUNTER_BITS

    def stage(self, given: Sequence[StoredSchedule], now_ms: int, wake_ms: int | None = None) -> None:
        """Stage new versions. `wake_ms`: when they have something to do, if not at their own times. Requires: no version of these
        schedules is staged."""
        if given:
            first = self.index.next_seq(now_ms)
            wakes = [self._wake_of(one.schedule) if wake_ms is None else wake_ms for one in given]
            self.index.store(_columns(given, wakes), first, commit=False)
            self._staged.update(one.name for one in given)
            self._note_wake(min(wakes))

    def stage_removal(self, given: Sequence[StoredSchedule], now_ms: int) -> None:
        """Stage the ends of schedules. Requires: as `stage`."""
        if given:
            ended = [_Ended(PREFIX + one.name, *reversed(one.document)) for one in given if one.document is not None]
            self.index.store(tombstones(ended), self.index.next_seq(now_ms), commit=False)
            self._staged.update(one.name for one in given)

    def commit(self) -> None:
        """Make everything staged durable and visible. Raises if that failed."""
        self._staged.clear()
        self.index.commit()

    def advance(self, now_ms: int) -> None:
        """All schedules that were due have new versions: find the next one."""
        if self.wake_ms is not None and self.wake_ms <= now_ms:
            self._find_first(self.wake_ms)  # no schedule has something to do before: all those are replaced

    def _find_first(self, from_ms: int) -> None:
        documents, _ = self.index.browse_documents(from_ms, DUE_MS_MAX, 1)
        self.wake_ms = None
        if documents:
            self._note_wake(documents[0].due_ms)

    def _note_wake(self, at_ms: int) -> None:
        if at_ms < DUE_MS_MAX and (self.wake_ms is None or at_ms < self.wake_ms):
            self.wake_ms = at_ms

    def _wake_of(self, schedule: Schedule) -> int:
        """When a schedule has something to do: an ended one is removed when history of that age is."""
        if schedule.ended_ms is not None:
            return min(schedule.ended_ms + int(self._settings.history_hours * 3_600_000), DUE_MS_MAX)
        return schedule.wake_ms

    def check(self) -> list[str]:
        """Every broken invariant, a line each."""
        late = [] if self.wake_ms == 0 else self.index.browse_documents(0, (self.wake_ms or DUE_MS_MAX) - 1, 1)[0]
        lines = [f"{one.id!r} is due at {one.due_ms}, before the first one" for one in late]
        return self.index.check() + lines


def _own(settings: Settings) -> Settings:
    """The settings of the Index of schedules. Its memtable is small, since a restart after a crash reads all of it again."""
    return replace(settings, run_messages=min(settings.run_messages, RUN_VERSIONS))


@dataclass(frozen=True, slots=True)
class _Ended:
    id: str
    due_ms: int
    seq: int


def read_schedule(document: f.Document) -> StoredSchedule:
    """The schedule that a document of this Index holds."""
    return StoredSchedule(
        schedule=Schedule.from_fields(document.id.removeprefix(PREFIX), document.meta),
        body=document.body,
        flags=document.flags & f.USER_FLAGS,
        ttr_ms=document.ttr_ms,
        headers=document.headers or None,
        created_seq=document.arrived,
        document=(document.seq, document.due_ms),
    )


def _columns(given: Sequence[StoredSchedule], wakes: list[int]) -> Columns:
    """Versions as one batch: all are stored or none."""
    flags, extras = [], []
    for one in given:
        optional: dict[str, Any] = {} if one.headers is None else {"headers": one.headers}
        flags.append(one.flags | f.META | f.CONTINUES | flags_of(optional) | (0 if one.document is None else f.REPLACES))
        arrived = None if one.document is None else one.created_seq
        extras.append(f.extra_elements(one.document, arrived, None, one.schedule.to_fields() or {"name": ""}, **optional))
    flags[-1] &= ~f.CONTINUES
    return Columns(
        ids=[(PREFIX + one.name).encode() for one in given],
        bodies=[one.body for one in given],
        due_ms=wakes,
        ttr_ms=[one.ttr_ms for one in given],
        flags=flags,
        extras=extras,
        hashes=UNHASHED,
        ends=[one.document for one in given if one.document is not None],
        purpose="rescheduled",
    )
