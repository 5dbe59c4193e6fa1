"""The engine: all topics of a data folder, as a library that needs no server.

>>> import tempfile, pathlib
>>> from turtlemq.model import Message
>>> with tempfile.TemporaryDirectory() as folder:
...     engine = Engine.open(pathlib.Path(folder))
...     receipt = engine.submit("orders", [Message(b"close order 17", due_ms=1_000, id="17")], now_ms=0)
...     engine.tick(999), len(engine.reserve("orders", "default", 10, now_ms=999))
...     _ = engine.tick(1_000)
...     engine.reserve("orders", "default", 10, now_ms=1_000).ids
...     engine.ack("orders", "default", ["17"], now_ms=1_500).acked
...     engine.close()
(1000, 0)
['17']
1

No clock, no threads, no randomness: time is an argument, `tick` says when it wants to be called again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from turtlemq.broker.results import Acked, Reserved
from turtlemq.data_folder import check_format, read_settings, take_clean_mark, write_settings
from turtlemq.errors import (
    Corrupt,
    DiskFull,
    InvalidArgument,
    TurtleError,
    Unavailable,
    UnknownGroup,
    UnknownTopic,
)
from turtlemq.index.columns import as_batch
from turtlemq.index.validate import check_batch
from turtlemq.model import DUE_MS_MAX, Batch, Damage, Forecast, Message, Receipt, State, StoredMessage
from turtlemq.segment import format as f
from turtlemq.settings import Settings, check_settings
from turtlemq.storage import names
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Worker
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.maintenance import MAINTENANCE_MS
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.stats import GroupStats, TopicStats
from turtlemq.topic.topic import Topic
from turtlemq.topic.wake_queue import WakeQueue

GROUP = "default"
NO_TOPICS: frozenset[str] = frozenset()


class Engine:
    """All topics of a data folder. One process at a time; one thread."""

    def __init__(self, root: Path, door: Door, worker: Worker, flusher: Worker, settings: Settings) -> None:
        self.root, self.door, self.settings = root, door, settings
        self.topics: dict[str, Topic] = {}
        self.was_clean = False
        self.woken: Set[str] = NO_TOPICS  # topics that the last tick has looked at
        self.trouble: dict[str, Exception] = {}  # topics whose last tick failed, or that cannot be opened, and why
        self.ballast = Ballast(door, root)
        self._worker, self._flusher = worker, flusher
        self._lock = -1
        self._clean: dict[str, Any] = {}
        self._wake_queue, self._ticked_ms = WakeQueue(), 0

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        door: Door | None = None,
        worker: Worker | None = None,
        flusher: Worker | None = None,
        settings: Settings | None = None,
    ) -> Engine:
        """Open a data folder, making it if there is none. Refuses one that another process holds or a newer version wrote.

        Segments are sealed by `worker`, in another process if need be; tables are written by `flusher`, a thread at most."""
        engine = cls(root, door or Door(), worker or Inline(), flusher or Inline(), check_settings(settings or Settings()))
        engine._start()
        return engine

    def _start(self) -> None:
        self.door.make_folder(self.root)
        self._lock = self.door.lock(self.root / names.LOCK)
        try:
            check_format(self.door, self.root)
            mark = take_clean_mark(self.door, self.root)
            self._clean, self.was_clean = mark or {}, mark is not None
            for name in self.door.names(self.root / names.TOPICS):
                if names.is_dropped(name):
                    self.door.remove_folder(self.root / names.TOPICS / name)
                elif names.is_topic(name) and self.door.is_folder(self.root / names.TOPICS / name):  # else somebody else's
                    self._try_topic(name)
            for name in self._clean.keys() - self.topics.keys() - self.trouble.keys():
                self.trouble[name] = Corrupt("its folder is gone since the last proper stop. Restore it, or delete the topic.")
            self.ballast.load()
        except BaseException:
            self.door.shut()
            self.door.close(self._lock)
            raise

    # Topics

    def topic(self, name: str, create: bool = False) -> Topic:
        """A topic that is there; with `create`, also one that is not yet."""
        if name not in self.topics:
            self._check_name(name)
        found = self.topics.get(name)
        if found is not None:
            return found
        if not create:
            raise UnknownTopic(f"there is no topic {name!r}")
        return self._open_topic(name)

    def configure(self, name: str, **changes: Any) -> Settings:
        """Create a topic with settings of its own, or change those of one that is there."""
        self._check_name(name)
        unknown = sorted(set(changes) - set(Settings.__dataclass_fields__))
        if unknown:
            raise InvalidArgument(f"unknown setting {unknown[0]!r}; there are: {', '.join(Settings.__dataclass_fields__)}")
        folder = self.root / names.TOPICS / name
        settings = check_settings(replace(read_settings(self.door, folder, self.settings), **changes))
        write_settings(self.door, folder, settings)
        self.topic(name, create=True).configure(settings)
        return settings

    def _check_name(self, name: str) -> None:
        """May there be such a topic? One that is there and cannot be opened is left as it is."""
        names.check_topic(name)
        if name not in self.topics and isinstance(self.trouble.get(name), DiskFull):
            del self.trouble[name]
            self._try_topic(name)  # perhaps there is room now
        if name in self.trouble and name not in self.topics:
            raise Unavailable(f"topic {name!r} cannot be opened: {self.trouble[name]}")

    def _try_topic(self, name: str) -> None:
        """Open a topic that is there. If it cannot be, whatever the reason, the others still are."""
        try:
            self._open_topic(name)
        except Exception as error:  # noqa: BLE001 - it is named wherever somebody asks for the topic, and in the log
            self.trouble[name] = error

    def _open_topic(self, name: str) -> Topic:
        folder, mark = self.root / names.TOPICS / name, self._clean.get(name)
        settings = read_settings(self.door, folder, self.settings)
        topic = Topic(name, folder, self.door, settings, self._worker, self._flusher, self.ballast, mark)
        self._clean.pop(name, None)
        self.topics[name] = topic
        self._wake_queue.schedule(name, 0)
        return topic

    def drop_topic(self, name: str) -> None:
        """Remove a topic with everything in it, also one that cannot be opened."""
        if name in self.topics or name not in self.trouble:
            self.topic(name).close()
            del self.topics[name]
        self.trouble.pop(name, None)  # it was the old one's: one of this name may be made again
        self._clean.pop(name, None)
        self._wake_queue.schedule(name, None)
        if self.door.is_folder(self.root / names.TOPICS / name):
            self.door.drop_folder(self.root / names.TOPICS / name)

    # Producing

    def submit(self, topic: str, messages: Sequence[Message] | Batch, now_ms: int) -> Receipt:
        """Store messages: all or none, durable when this returns."""
        found, receipt = self.stage(topic, messages if isinstance(messages, Batch) else as_batch(messages), now_ms)
        found.commit()
        self.changed(found, now_ms)
        return receipt

    def stage(self, topic: str, batch: Batch, now_ms: int) -> tuple[Topic, Receipt]:
        """The part of `submit` before the commit. The receipt counts once the topic's pending group has landed, also for
        duplicates: what they repeat may be in it."""
        if topic not in self.topics:
            check_batch(batch)  # a refused batch makes no topic
        self.ballast.refuse_producers()
        found = self.topic(topic, create=True)
        return found, found.stage(batch, now_ms)

    def get(self, topic: str, id_: str) -> StoredMessage | None:
        """A message that sleeps, by its id."""
        return self.topic(topic).get(id_)

    def cancel(self, topic: str, ids: Sequence[str], now_ms: int) -> dict[str, str]:
        """End messages that sleep or are ready and untouched, durably: cancelled, the state it is in, or unknown."""
        found, outcome = self.stage_cancel(topic, ids, now_ms)
        found.commit()
        return self.finish_cancel(found, outcome, now_ms)

    def stage_cancel(self, topic: str, ids: Sequence[str], now_ms: int) -> tuple[Topic, dict[str, State]]:
        """The part of `cancel` before the commit."""
        found = self.topic(topic)
        return found, found.stage_cancel(ids, now_ms)

    def finish_cancel(self, topic: Topic, outcome: dict[str, State], now_ms: int) -> dict[str, str]:
        """The part of `cancel` behind the commit: what did not sleep may be ready."""
        if self.topics.get(topic.name) is not topic:
            raise UnknownTopic(f"topic {topic.name!r} was deleted meanwhile")
        out = topic.finish_cancel(outcome, now_ms)
        self.changed(topic, now_ms)
        return out

    def reschedule(self, topic: str, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` or `headers`, durably."""
        found, message = self.stage_reschedule(topic, id_, now_ms, **changes)
        found.commit()
        self.changed(found, now_ms)
        return message

    def stage_reschedule(self, topic: str, id_: str, now_ms: int, **changes: Any) -> tuple[Topic, StoredMessage]:
        """The part of `reschedule` before the commit."""
        found = self.topic(topic)
        return found, found.stage_reschedule(id_, now_ms, **changes)

    # Consuming

    def reserve(
        self,
        topic: str,
        group: str,
        count: int,
        now_ms: int,
        *,
        ttr_ms: int | None = None,
        consumer: str = "",
        auto: bool = False,
    ) -> Reserved:
        """Hand out up to `count` ready messages to a consumer of a group, under a lease."""
        found = self.topic(topic)
        try:
            out = found.reserve(names.check_group(group), count, now_ms, ttr_ms=ttr_ms, consumer=consumer, auto=auto)
        except BaseException:
            self._touched(found, now_ms)  # there may be leases already: they must end
            raise
        if not out.idle:
            self._touched(found, now_ms, group)
        return out

    def ack(
        self,
        topic: str,
        group: str,
        acks: Sequence[str],
        now_ms: int,
        *,
        retry_delay_ms: int | None = None,
        error: str = "",
    ) -> Acked:
        """A grouped list, `["MsgID1", "-MsgID2"]`: the first was handled, the second failed."""
        found = self.topic(topic)
        out = found.ack(group, acks, now_ms, retry_delay_ms=retry_delay_ms, error=error)
        self._touched(found, now_ms, None if out.failed or out.dead else group)
        return out

    def extend(self, topic: str, group: str, ids: Sequence[str], ttr_ms: int, now_ms: int) -> tuple[int, list[str]]:
        """More time for messages in reserve: how many, and the ids that the group does not hold."""
        found = self.topic(topic)
        out = found.extend(group, ids, ttr_ms, now_ms)
        self._touched(found, now_ms)
        return out

    def give_back(
        self, topic: str, group: str, ids: Sequence[str], now_ms: int, ends: Sequence[int] | None = None
    ) -> tuple[int, list[str]]:
        """Messages that no consumer was told of come again at once, and their delivery does not count: how many, and the ids that
        the group does not hold. `ends`: of the leases under which they were held; others' are left alone."""
        found = self.topic(topic)
        out = found.give_back(group, ids, now_ms, ends)
        self._touched(found, now_ms)
        return out

    def move_group(self, topic: str, group: str, start: str | int, now_ms: int) -> int:
        """Create a group, or move it, to `earliest`, `latest` or the first message that became ready at a time. Returns the
        ready offset where it stands."""
        found = self.topic(topic, create=True)
        offset = found.move_group(names.check_group(group), start, now_ms)
        self._touched(found, now_ms)
        return offset

    def drop_group(self, topic: str, group: str, now_ms: int) -> None:
        """Forget a group, so that it holds nothing back."""
        found = self.topic(topic)
        found.drop_group(group, now_ms)
        self._touched(found, now_ms)

    # Dead letters

    def requeue(
        self,
        topic: str,
        letters: Sequence[DeadLetter],
        now_ms: int,
        *,
        due_ms: int | None = None,
        reset_attempts: bool = True,
        per_s: float | None = None,
    ) -> int:
        """Let dead letters sleep again, for their groups, until `due_ms` (now); `per_s` spreads them over time. Durable."""
        found = self.topic(topic)
        count = found.requeue(letters, now_ms, due_ms, reset_attempts, per_s)
        self.changed(found, now_ms)
        self._touched(found, now_ms)
        return count

    def delete_dead(self, topic: str, letters: Sequence[DeadLetter], now_ms: int) -> int:
        """Delete dead letters, durably."""
        found = self.topic(topic)
        count = found.delete_dead(letters, now_ms)
        self._touched(found, now_ms)
        return count

    # Looking

    def browse(
        self, topic: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[StoredMessage], str | None]:
        """Sleepers by due time, a page at a time."""
        return self.topic(topic).sleepers(from_ms, to_ms, limit, cursor)

    def forecast(self, topic: str, now_ms: int, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """How much comes due when, from the index alone."""
        return self.topic(topic).forecast(now_ms, bucket_ms, buckets)

    def stats(self, topic: str) -> TopicStats:
        """Figures of a topic, exact. O(segments + groups)."""
        return self.topic(topic).stats()

    def groups(self, topic: str) -> dict[str, GroupStats]:
        """Figures of every group of a topic."""
        return self.topic(topic).groups()

    def group(self, topic: str, group: str) -> GroupStats:
        """Figures of one group. Raises `UnknownGroup`."""
        found = self.groups(topic).get(group)
        if found is None:
            raise UnknownGroup(f"there is no group {group!r}")
        return found

    def message(self, topic: str, id_: str) -> MessageView | None:
        """One message wherever it is: its state, in every group, and what happened to it when."""
        return self.topic(topic).message(id_)

    def damage(self) -> dict[str, list[Damage]]:
        """Everything found damaged so far, by topic."""
        found = {name: topic.damage() for name, topic in self.topics.items()}
        return {name: damage for name, damage in found.items() if damage}

    def check(self) -> list[str]:
        """Every broken invariant of every topic, a line each."""
        closed = [f"{name}: {self.trouble[name]}" for name in self.trouble if name not in self.topics]
        return closed + [line for topic in self.topics.values() for line in topic.check()]

    # Time

    def tick(self, now_ms: int) -> int | None:
        """Hand off what is due, a slice of each topic. Returns when to call again: at once if more is due, None for never."""
        if now_ms < self._ticked_ms:  # the clock went back: what was put down for a time that lies ahead now is looked at anew
            for name, topic in self.topics.items():
                topic.sync_now(now_ms)
                self._wake_queue.schedule_earlier(name, now_ms)
        self._ticked_ms = now_ms
        first = self._wake_queue.first
        if first is None or first > now_ms:
            self.woken = NO_TOPICS
            return first
        self.ballast.load()
        called = self._wake_queue.due(now_ms)
        for name in sorted(called):
            try:
                self._wake_queue.schedule(name, self.topics[name].tick(now_ms))
                self.trouble.pop(name, None)
            except (TurtleError, OSError) as error:  # the other topics go on
                self.trouble[name] = error
                self._wake_queue.schedule(name, now_ms + MAINTENANCE_MS)
        self.woken = called
        return self.next_wake()

    def next_wake(self) -> int | None:
        """When to call `tick` again; None for never."""
        return self._wake_queue.first

    def changed(self, topic: Topic, now_ms: int) -> None:
        """A topic got work: see that it is looked at in time."""
        due_ms = topic.next_due()
        self._wake_queue.schedule_earlier(
            topic.name, now_ms + MAINTENANCE_MS if due_ms is None else min(due_ms, now_ms + MAINTENANCE_MS)
        )

    def _touched(self, topic: Topic, now_ms: int, group: str | None = None) -> None:
        """Consumers did something: leases end, and journals want to be synced. `group`: nothing changed in others."""
        topic.sync_soon(now_ms)
        when_ms = topic.next_wake(now_ms, group)
        self._wake_queue.schedule_earlier(topic.name, now_ms + MAINTENANCE_MS if when_ms is None else when_ms)

    def compact(self, topic: str) -> None:
        """Free what can be freed, now."""
        self.topic(topic).compact()

    def close(self) -> None:
        """Sync everything and leave the clean-shutdown mark."""
        marks: dict[str, Any] = {name: self._clean[name] for name in self.trouble.keys() & self._clean.keys()}
        failed: list[Exception] = []
        for name, topic in self.topics.items():
            try:
                marks[name] = topic.close()
            except (TurtleError, OSError) as error:  # the others still get their chance
                failed.append(error)
        try:
            if not failed and not any(topic.stopped for topic in self.topics.values()):
                self.door.replace(self.root / names.CLEAN, f.encode_checked({"topics": marks}))
        finally:
            self.door.shut()
            self.door.close(self._lock)
        if failed:
            raise failed[0]
