"""The engine: topics in a data folder, each an Index and a ready log, joined by the handoff. A library: no server needed.

>>> import tempfile, pathlib
>>> from turtlemq.model import Message
>>> with tempfile.TemporaryDirectory() as folder:
...     engine = Engine.open(pathlib.Path(folder))
...     receipt = engine.submit("orders", [Message(b"close order 17", due_ms=1_000, id="17")], now_ms=0)
...     engine.tick(999), engine.stats("orders").sleep
...     _ = engine.tick(1_000)
...     engine.stats("orders").sleep
...     engine.close()
(1000, 1)
0

No clock, no threads, no randomness: time is an argument, `tick` says when it wants to be called again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Protocol

import bson
from bson.int64 import Int64

from turtlemq.broker.ready import ReadyLog
from turtlemq.door import Door
from turtlemq.errors import Conflict, Corrupt, DiskFull, InvalidArgument, NewerFormat, TurtleError, UnknownTopic
from turtlemq.index import care
from turtlemq.index.check import check
from turtlemq.index.index import Index, as_batch
from turtlemq.index.recover import open_index
from turtlemq.index.seal import Sealed, seal
from turtlemq.model import (
    DUE_MS_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENT_MESSAGES_MAX,
    Batch,
    Damage,
    Forecast,
    Found,
    Message,
    Receipt,
    Settings,
    State,
    Stats,
)
from turtlemq.segment import format as f
from turtlemq.segment import names

READY_SYNC_MS = 5_000  # the ready log's own beat
CARE_MS = 1_000  # how often housekeeping looks around
CARE_BUDGET = 500  # sleepers moved in one step of compaction: about 10 ms
FIRE_SLICE = 10_000  # messages handed off before others get a turn


class Job(Protocol):
    """Work under way elsewhere."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Worker(Protocol):
    """Where seals run: in another process (`turtlemq.worker`), or right here."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Job: ...


class Done:
    """A job that has run."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


class Inline:
    """The worker that does the work at once."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Job:
        return Done(work(*args))


class Topic:
    """One topic's Index and ready log, and the few lines that join them."""

    def __init__(self, name: str, index: Index, ready: ReadyLog, worker: Worker) -> None:
        self.name, self.index, self.ready, self._worker = name, index, ready, worker
        self.unsealable: dict[int, str] = {}  # segments whose seal failed, and why
        self._job: Job | None = None
        self._sealing: int | None = None
        self._sync_at: int | None = None  # when the ready log is to be synced; None: nothing to sync
        self._care_at: int | None = 0  # when to keep house; None: nothing to do

    def tick(self, now_ms: int) -> int | None:
        """Hand off a slice of what is due, sync and keep house when it is time. Returns when to come again, None for never."""
        due = self.index.due(now_ms, count_max=FIRE_SLICE)
        if due is not None:
            if len(due):
                self.ready.accept(due, now_ms)
                self._sync_at = self._sync_at or now_ms + READY_SYNC_MS
            self.index.advance(due)
            self.stir(now_ms)
        if self._sync_at is not None and not now_ms < self._sync_at <= now_ms + READY_SYNC_MS:
            self.sync()
        if self._care_at is not None and not now_ms < self._care_at <= now_ms + CARE_MS:
            self._care_at = now_ms + CARE_MS if self.care() else None
        times = (self.index.next_due(), self._sync_at, self._care_at)
        return min((at for at in times if at is not None), default=None)

    def stir(self, now_ms: int) -> None:
        """Something has changed: housekeeping may have work."""
        if self._care_at is None:
            self._care_at = now_ms + CARE_MS

    def sync(self) -> None:
        """Make the handoffs durable, so that the Index may let go of them."""
        self.ready.sync()
        self.index.settle(self.ready.durable)
        self._sync_at = None

    def care(self) -> bool:
        """One step of housekeeping; a full disk only puts it off. Returns whether there is more to do."""
        try:
            if self._job is not None and self._job.done():
                self._finish_seal(self._job)
            order, more = care.step(self.index, CARE_BUDGET, self._sealing, self.unsealable.keys())
            if order is not None:
                self._sealing = order.base
                self._job = self._worker.submit(seal, self.index.shelf.door.fresh(), order)
            return more
        except DiskFull:
            return True

    def _finish_seal(self, job: Job) -> None:
        base, self._job, self._sealing = self._sealing, None, None
        try:
            sealed: Sealed = job.result()
        except DiskFull:
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, the segment serves on unsealed
            assert base is not None
            self.unsealable[base] = str(error)
            return
        care.adopt(self.index, sealed)

    def compact(self) -> None:
        """Housekeeping until nothing is left to do."""
        self.sync()
        before: object = None
        while before != (before := (self.index.stats(), self.index.shelf.counters.moved, self._job)):
            self.care()

    def close(self) -> dict[str, Int64]:
        """Sync and close. Returns what the clean-shutdown mark says of this topic."""
        if self.ready.stopped is None:
            self.ready.sync()
        self.ready.shut()
        end = self.index.close()
        return {"base": Int64(self.index.shelf.active.base), "end": Int64(end)}


class Engine:
    """All topics of a data folder. One process at a time; one thread."""

    def __init__(self, root: Path, door: Door, worker: Worker, settings: Settings) -> None:
        self.root, self.door, self.settings = root, door, settings
        self.topics: dict[str, Topic] = {}
        self.was_clean = False
        self.trouble: dict[str, Exception] = {}  # topics whose last tick failed, and why
        self._worker = worker
        self._lock = -1
        self._clean: dict[str, Any] = {}
        self._wake: list[tuple[int, str]] = []  # a heap of (when, topic)
        self._when: dict[str, int] = {}  # the entry of the heap that counts

    @classmethod
    def open(
        cls, root: Path, *, door: Door | None = None, worker: Worker | None = None, settings: Settings | None = None
    ) -> Engine:
        """Open a data folder, making it if there is none. Refuses one that another process holds or a newer version wrote."""
        engine = cls(root, door or Door(), worker or Inline(), check_settings(settings or Settings()))
        engine._start()
        return engine

    def _start(self) -> None:
        self.door.make_folder(self.root)
        self._lock = self.door.lock(self.root / names.LOCK)
        try:
            self._check_format()
            self._take_clean_mark()
            for name in self.door.names(self.root / names.TOPICS):
                self._open_topic(names.check_topic(name))
        except BaseException:
            self.door.shut()
            self.door.close(self._lock)
            raise

    def _check_format(self) -> None:
        path = self.root / names.FORMAT
        if not self.door.exists(path):
            self.door.replace(path, f"{f.VERSION}\n".encode())
            return
        text = self.door.read_all(path).decode(errors="replace").strip()
        if not text.isdigit():
            raise Corrupt(
                f"{path.name} in the data folder should hold a format number, not {text[:40]!r}. Restore it: {f.VERSION}."
            )
        if int(text) > f.VERSION:
            raise NewerFormat(f"{self.root}: format {text}, this program reads up to {f.VERSION}. {NewerFormat.__doc__}")

    def _take_clean_mark(self) -> None:
        """The mark is gone before anything is written: if it is there, the last stop was a proper one."""
        path = self.root / names.CLEAN
        if self.door.exists(path):
            try:
                self._clean = bson.decode(self.door.read_all(path))["topics"]
                self.was_clean = True
            except (bson.errors.InvalidBSON, KeyError, TypeError):
                self._clean = {}
            self.door.remove(path)
            self.door.sync_folder(self.root)

    # Topics

    def topic(self, name: str, create: bool = False) -> Topic:
        """A topic that is there; with `create`, also one that is not yet."""
        found = self.topics.get(name)
        if found is not None:
            return found
        names.check_topic(name)
        if not create:
            raise UnknownTopic(f"there is no topic {name!r}")
        return self._open_topic(name)

    def configure(self, name: str, **changes: Any) -> Settings:
        """Create a topic with settings of its own, or change those of one that is there (from its next segment on)."""
        names.check_topic(name)
        unknown = sorted(set(changes) - set(Settings.__dataclass_fields__))
        if unknown:
            raise InvalidArgument(f"unknown setting {unknown[0]!r}; there are: {', '.join(Settings.__dataclass_fields__)}")
        settings = check_settings(replace(self._settings_of(name), **changes))
        folder = self.root / names.TOPICS / name
        self.door.make_folder(folder)
        text = "".join(f"{key} = {value}\n" for key, value in asdict(settings).items())
        self.door.replace(folder / names.SETTINGS, text.encode())
        topic = self.topic(name, create=True)
        topic.index.settings = topic.index.writer.settings = topic.ready.settings = settings
        return settings

    def _settings_of(self, name: str) -> Settings:
        path = self.root / names.TOPICS / name / names.SETTINGS
        if not self.door.exists(path):
            return self.settings
        try:
            return check_settings(replace(self.settings, **tomllib.loads(self.door.read_all(path).decode())))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
            raise Corrupt(f"{names.SETTINGS} of topic {name!r} cannot be read ({error}). Mend or remove that file.") from error

    def _open_topic(self, name: str) -> Topic:
        folder = self.root / names.TOPICS / name
        settings = self._settings_of(name)
        ready = ReadyLog(self.door, folder, name, settings)
        self.door.make_folder(folder)
        ready.open()
        mark = self._clean.pop(name, None)
        index = open_index(self.door, folder, name, settings, ready.progress, mark and int(mark["end"]))
        for damage in ready.damage:
            index.shelf.damage(damage)
        topic = self.topics[name] = Topic(name, index, ready, self._worker)
        self._wake_at(name, 0)
        return topic

    def _wake_at(self, name: str, when_ms: int | None) -> None:
        """Let the next tick at or after `when_ms` look at a topic."""
        if when_ms is None:
            self._when.pop(name, None)
        elif self._when.get(name) != when_ms:
            self._when[name] = when_ms
            heappush(self._wake, (when_ms, name))

    def _changed(self, topic: Topic, now_ms: int) -> None:
        topic.stir(now_ms)
        due_ms = topic.index.next_due()
        when = now_ms + CARE_MS if due_ms is None else min(due_ms, now_ms + CARE_MS)
        if when < self._when.get(topic.name, when + 1):
            self._wake_at(topic.name, when)

    def drop_topic(self, name: str) -> None:
        """Remove a topic with everything in it."""
        topic = self.topic(name)
        topic.close()
        del self.topics[name]
        self._wake_at(name, None)
        self.door.remove_folder(self.root / names.TOPICS / name)
        self.door.sync_folder(self.root / names.TOPICS)

    # Messages

    def submit(self, topic: str, messages: Sequence[Message] | Batch, now_ms: int) -> Receipt:
        """Store messages: all or none, durable when this returns."""
        batch = messages if isinstance(messages, Batch) else as_batch(messages)
        found = self.topic(topic, create=True)
        receipt = found.index.append(batch, now_ms)
        self._changed(found, now_ms)
        return receipt

    def get(self, topic: str, id_: str) -> Found | None:
        """One message by its id."""
        return self.topic(topic).index.get(id_)

    def cancel(self, topic: str, ids: Sequence[str]) -> dict[str, State]:
        """End sleepers, durably: CANCELLED, READY where it was too late, UNKNOWN."""
        return self.topic(topic).index.cancel(ids)

    def cancel_range(self, topic: str, from_ms: int, to_ms: int) -> int:
        """End every sleeper due in [from_ms, to_ms]. Returns how many."""
        index = self.topic(topic).index
        count = 0
        while page := index.browse(from_ms, to_ms, limit=1_000)[0]:
            outcome = index.cancel([message.id for message in page])
            done = sum(state is State.CANCELLED for state in outcome.values())
            count += done
            if not done:
                raise Conflict("some of these messages cannot be cancelled; see the damage report")
        return count

    def reschedule(self, topic: str, id_: str, now_ms: int, **changes: Any) -> Found:
        """Give a sleeper another due time (`due_ms`), `body` or `headers`, durably."""
        found = self.topic(topic)
        message = found.index.reschedule(id_, now_ms, **changes)
        self._changed(found, now_ms)
        return message

    def browse(
        self, topic: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[Found], str | None]:
        """Sleepers by due time, a page at a time."""
        return self.topic(topic).index.browse(from_ms, to_ms, limit=limit, cursor=cursor)

    def forecast(self, topic: str, now_ms: int, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """How much comes due when, from the index alone."""
        return self.topic(topic).index.forecast(now_ms, bucket_ms=bucket_ms, buckets=buckets)

    def stats(self, topic: str) -> Stats:
        """Figures of a topic. O(segments)."""
        return self.topic(topic).index.stats()

    def damage(self) -> dict[str, list[Damage]]:
        """Everything found damaged so far, by topic."""
        return {name: list(t.index.shelf.counters.damage) for name, t in self.topics.items() if t.index.shelf.counters.damage}

    # Time

    def tick(self, now_ms: int) -> int | None:
        """Hand off what is due, a slice of each topic. Returns when to call again: at once if more is due, None for never."""
        if not self._wake or self._wake[0][0] > now_ms:
            return self._wake[0][0] if self._wake else None
        called: set[str] = set()
        while self._wake and self._wake[0][0] <= now_ms:
            when, name = heappop(self._wake)
            if self._when.get(name) == when:
                del self._when[name]
                called.add(name)
        for name in sorted(called):
            try:
                self._wake_at(name, self.topics[name].tick(now_ms))
                self.trouble.pop(name, None)
            except (TurtleError, OSError) as error:  # the other topics go on
                self.trouble[name] = error
                self._wake_at(name, now_ms + CARE_MS)
        return self._wake[0][0] if self._wake else None

    def check(self) -> list[str]:
        """Every broken invariant of every topic, a line each."""
        return [line for topic in self.topics.values() for line in check(topic.index)]

    def compact(self, topic: str) -> None:
        """Free what can be freed, now."""
        self.topic(topic).compact()

    def close(self) -> None:
        """Sync everything and leave the clean-shutdown mark."""
        marks = {name: topic.close() for name, topic in self.topics.items()}
        stopped = any(t.index.writer.stopped or t.ready.stopped for t in self.topics.values())
        if not stopped:
            self.door.replace(self.root / names.CLEAN, bson.encode({"topics": marks}))
        self.door.shut()
        self.door.close(self._lock)


def check_settings(settings: Settings) -> Settings:
    """The settings themselves, if each is within its limits."""
    limits = {
        "segment_bytes": (SEGMENT_BYTES_MIN, 1 << 32),
        "segment_messages": (1, SEGMENT_MESSAGES_MAX),
        "run_messages": (1, SEGMENT_MESSAGES_MAX),
        "compact_live_ratio": (0, 0.9),
    }
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        kinds = (int, float) if name == "compact_live_ratio" else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidArgument(f"{name} is a number from {low} to {high}, not {value!r}")
    return settings
