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

No clock, no threads, no randomness: time is an argument, and `tick` returns when it wants to be called again. The engine opens
topics and decides which of them is due; the work on messages is done by `topic.Topic`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from turtlemq.broker.cancel import CANCELLED
from turtlemq.broker.results import Acked, Extended, Reserved, ReserveTerms
from turtlemq.data_folder import DataFolder, changed_settings, read_settings, write_settings
from turtlemq.errors import Corrupt, Exhausted, TurtleError, Unavailable, UnknownGroup, UnknownTopic, describe
from turtlemq.index.columns import as_batch
from turtlemq.index.validate import check_batch, check_expiry
from turtlemq.model import DUE_MS_MAX, Batch, CheckedBatch, Damage, Forecast, Message, Receipt, State, StoredMessage
from turtlemq.settings import Settings, check_partitions, check_settings
from turtlemq.storage import names
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Worker
from turtlemq.topic.checkpoints import SaveSlots
from turtlemq.topic.closing import close_topics
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.maintenance import MAINTENANCE_MS
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.stats import GroupStats, TopicStats
from turtlemq.topic.topic import Topic
from turtlemq.topic.wake_queue import WakeQueue

GROUP = "default"
NO_TOPICS: frozenset[str] = frozenset()
Waiting = Mapping[str, Collection[str]]  # by topic: groups for which a fetch waits
NOTHING: Waiting = MappingProxyType({})


class Engine:
    """All topics of a data folder. Only one process may have it open; only one thread may use it."""

    def __init__(self, root: Path, door: Door, worker: Worker, flusher: Worker, settings: Settings) -> None:
        self.root, self.door, self.settings = root, door, settings
        self.topics: dict[str, Topic] = {}
        self.woken: Set[str] = NO_TOPICS  # topics that the last tick has worked on
        self.trouble: dict[str, Exception] = {}  # topics whose last tick failed, or that cannot be opened, with the error
        self.ballast = Ballast(door, root)
        self._worker, self._flusher = worker, flusher
        self.folder = DataFolder(root, door)
        self._wake_queue, self._ticked_ms = WakeQueue(), 0
        self._slots = SaveSlots(door.budget.saves, lambda name: self._wake_queue.schedule_earlier(name, 0))

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        door: Door | None = None,
        worker: Worker | None = None,
        flusher: Worker | None = None,
        settings: Settings | None = None,
        lock: int | None = None,
    ) -> Engine:
        """Open a data folder, or create it. Refuses a folder that another process holds, or that a newer version wrote.

        `worker` seals segments, and may use another process; `flusher` writes tables and checkpoints, and may use a thread.
        `lock`: the descriptor of the folder's lock, if this process holds it already; closing the engine releases it."""
        engine = cls(root, door or Door(), worker or Inline(), flusher or Inline(), check_settings(settings or Settings()))
        engine._start(lock)
        return engine

    def _start(self, lock: int | None) -> None:
        try:
            for name in self.folder.acquire(lock):
                self._try_topic(name)
            for name in self.folder.marks.keys() - self.topics.keys() - self.trouble.keys():
                self.trouble[name] = Corrupt("its folder is gone since the last proper stop. Restore it, or delete the topic.")
            self.ballast.load()
        except BaseException:
            self._abort_start()
            raise

    def _abort_start(self) -> None:
        """End a start that failed. After a proper stop this is another one, so the clean-shutdown mark is written again."""
        try:
            if self.folder.was_clean:
                self.close()
            else:
                self.folder.close(None)
        except (TurtleError, OSError):
            return  # the next start is one after a crash; the caller raises the error of this one

    @property
    def was_clean(self) -> bool:
        """Was the last stop a proper one?"""
        return self.folder.was_clean

    # Topics

    def topic(self, name: str, create: bool = False) -> Topic:
        """An open topic. Raises `UnknownTopic`, or with `create` creates it."""
        self.folder.refuse_if_lost()
        if name not in self.topics:
            self._check_name(name)
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        if not create:
            raise UnknownTopic(f"there is no topic {name!r}")
        return self._open_topic(name)

    def configure(self, name: str, **changes: Any) -> Settings:
        """Change settings of a topic, which is created if it does not exist. Returns all of them."""
        self.folder.refuse_if_lost()
        self._check_name(name)
        folder = self.root / names.TOPICS / name
        settings = changed_settings(self.door, folder, self.settings, changes)
        if name in self.topics:
            check_partitions(self.topics[name].settings, settings)
            self.ballast.freeing(lambda: write_settings(self.door, folder, settings))  # the retention may be shorter now
        else:
            write_settings(self.door, folder, settings)
        self.topic(name, create=True).configure(settings)
        self._wake_queue.schedule(name, 0)
        return settings

    def _check_name(self, name: str) -> None:
        """Raise if the name is not valid, or if its topic exists and cannot be opened."""
        names.check_topic(name)
        if name not in self.topics and isinstance(self.trouble.get(name), Exhausted):
            del self.trouble[name]
            self._try_topic(name)  # there may be space, or files, now
        if name in self.trouble and name not in self.topics:
            raise Unavailable(f"topic {name!r} cannot be opened: {describe(self.trouble[name])}")

    def _try_topic(self, name: str) -> None:
        """Open an existing topic. An error is kept in `trouble`, so that the other topics are opened all the same."""
        try:
            self._open_topic(name)
        except Exception as error:  # noqa: BLE001 - requests for the topic, and the log, tell it
            self.trouble[name] = error

    def _open_topic(self, name: str) -> Topic:
        folder, mark = self.root / names.TOPICS / name, self.folder.marks.get(name)
        settings = read_settings(self.door, folder, self.settings)
        workers, seed = (self._worker, self._flusher), self.folder.seed
        topic = Topic(name, folder, self.door, settings, *workers, self.ballast, self._slots, mark, seed)
        self.folder.marks.pop(name, None)
        self.topics[name] = topic
        self._wake_queue.schedule(name, 0)
        return topic

    def drop_topic(self, name: str) -> None:
        """Remove a topic and all its messages, also if it cannot be opened."""
        self.folder.refuse_if_lost()
        if name in self.topics or name not in self.trouble:
            self.topic(name).discard()
            del self.topics[name]
        self.trouble.pop(name, None)  # a new topic may have the same name
        self._wake_queue.schedule(name, None)
        self.ballast.freeing(lambda: self.folder.remove_topic(name))

    # Producing

    def submit(self, topic: str, messages: Sequence[Message] | Batch, now_ms: int) -> Receipt:
        """Store messages: all or none, durable when this returns."""
        opened, receipt = self.stage(topic, messages if isinstance(messages, Batch) else as_batch(messages), now_ms)
        opened.commit()
        self.changed(opened, now_ms)
        return receipt

    def stage(self, topic: str, batch: Batch, now_ms: int) -> tuple[Topic, Receipt]:
        """The part of `submit` before the commit. The receipt is true once `Topic.pending_commit` has landed, even if all
        messages are duplicates: the originals may be in that commit."""
        if topic not in self.topics:  # a refused batch creates no topic
            if not isinstance(batch, CheckedBatch):
                check_batch(batch)
            check_expiry(batch, now_ms)
        self.ballast.refuse_producers()
        opened = self.topic(topic, create=True)
        return opened, opened.stage(batch, now_ms)

    def get(self, topic: str, id_: str) -> StoredMessage | None:
        """A message that sleeps, by its id."""
        return self.topic(topic).view.sleeper(id_)

    def cancel(self, topic: str, ids: Sequence[str], now_ms: int) -> dict[str, str]:
        """Cancel messages that sleep, are ready or wait for another attempt, durably. Returns for each id `cancelled`, `cancelled
        before`, the state that does not allow it, or `unknown`."""
        opened, outcome = self.stage_cancel(topic, ids, now_ms)
        opened.commit()
        return self.finish_cancel(opened, outcome, now_ms)

    def stage_cancel(self, topic: str, ids: Sequence[str], now_ms: int) -> tuple[Topic, dict[str, State]]:
        """The part of `cancel` before the commit: sleepers."""
        opened = self.topic(topic)
        return opened, opened.stage_cancel(ids, now_ms)

    def finish_cancel(
        self, topic: Topic, outcome: Mapping[str, State], now_ms: int, pairs_max: int | None = None
    ) -> dict[str, str]:
        """The part of `cancel` after the commit: messages that did not sleep. `pairs_max`: see `Topic.finish_cancel`."""
        if self.topics.get(topic.name) is not topic:
            raise UnknownTopic(f"topic {topic.name!r} was deleted meanwhile")
        out = topic.finish_cancel(outcome, now_ms, pairs_max)
        if CANCELLED in out.values():
            self.changed(topic, now_ms)
        return out

    def reschedule(self, topic: str, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` or `headers`, durably."""
        opened, message = self.stage_reschedule(topic, id_, now_ms, **changes)
        opened.commit()
        self.changed(opened, now_ms)
        return message

    def stage_reschedule(self, topic: str, id_: str, now_ms: int, **changes: Any) -> tuple[Topic, StoredMessage]:
        """The part of `reschedule` before the commit."""
        opened = self.topic(topic)
        return opened, opened.stage_reschedule(id_, now_ms, **changes)

    # Consuming

    def reserve(self, topic: str, group: str, count: int, now_ms: int, **terms: Unpack[ReserveTerms]) -> Reserved:
        """Hand out up to `count` ready messages, to a consumer of a group, under a lease."""
        opened = self.topic(topic)
        try:
            out = opened.reserve(names.check_group(group), count, now_ms, **terms)
        except BaseException:
            self._journaled(opened, now_ms)  # there may be leases already: they must end
            raise
        if not out.idle:
            self._journaled(opened, now_ms, group)
        return out

    def ack(
        self,
        topic: str,
        group: str,
        acks: Sequence[str],
        now_ms: int,
        *,
        leases: str | Sequence[str] | None = None,
        retry_delay_ms: int | None = None,
        error: str = "",
    ) -> Acked:
        """End deliveries, as one list: `["MsgID1", "-MsgID2"]` says that the first was handled and the second failed. `leases`:
        the token of each message's lease, or one for all; messages that are held under another lease are left alone."""
        opened = self.topic(topic)
        out = opened.ack(group, acks, now_ms, leases=leases, retry_delay_ms=retry_delay_ms, error=error)
        if out.acked or out.failed or out.dead:
            self._journaled(opened, now_ms, None if out.failed or out.dead else group)
        return out

    def extend(
        self, topic: str, group: str, ids: Sequence[str], ttr_ms: int, now_ms: int, leases: str | Sequence[str] | None = None
    ) -> Extended:
        """Extend leases to `ttr_ms` from now. `leases`: as for `ack`."""
        opened = self.topic(topic)
        out = opened.extend(group, ids, ttr_ms, now_ms, leases)
        if out.extended:
            self._journaled(opened, now_ms)
        return out

    def give_back(
        self, topic: str, group: str, ids: Sequence[str], now_ms: int, lease: str | None = None
    ) -> tuple[int, list[str]]:
        """Undo deliveries that no consumer has seen: the messages are due again, and the delivery does not count. Returns how
        many, and the ids that the group does not hold. `lease`: the token of the delivery; messages of others are left alone."""
        opened = self.topic(topic)
        out = opened.give_back(group, ids, now_ms, lease)
        if out[0]:
            self._journaled(opened, now_ms)
        return out

    def move_group(self, topic: str, group: str, start: str | int, now_ms: int) -> int:
        """Create a group, or move it, to `earliest`, `latest` or the first message that became ready at a time. Returns the
        ready offset where it stands."""
        opened = self.topic(topic, create=True)
        offset = opened.move_group(names.check_group(group), start, now_ms)
        self._journaled(opened, now_ms)
        return offset

    def drop_group(self, topic: str, group: str, now_ms: int) -> None:
        """Forget a group, so that it holds nothing back."""
        opened = self.topic(topic)
        opened.drop_group(group, now_ms)
        self._journaled(opened, now_ms)

    def retry_now(self, topic: str, id_: str, group: str | None, now_ms: int) -> list[str]:
        """Make a message ready that waits for its next attempt, or is dead: in one group, or in all such. Returns their names."""
        opened = self.topic(topic)
        groups = opened.retry_now(id_, group, now_ms)
        self._journaled(opened, now_ms)
        return groups

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
        expires_ms: int | None = None,
    ) -> int:
        """Let dead letters sleep again, for their groups, until `due_ms` (default: now). Durable. `per_s`: spread them over time,
        so many each second. `expires_ms`: as of a new message (default: never). Returns how many were requeued."""
        opened = self.topic(topic)
        count = opened.requeue(letters, now_ms, due_ms, reset_attempts, per_s, expires_ms)
        if count:
            self._journaled(opened, now_ms)
        return count

    def delete_dead(self, topic: str, letters: Sequence[DeadLetter], now_ms: int) -> int:
        """Delete dead letters, durably."""
        opened = self.topic(topic)
        count = self.ballast.freeing(lambda: opened.delete_dead(letters, now_ms))
        if count:
            self._journaled(opened, now_ms)
        return count

    # Looking

    def browse(
        self, topic: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[StoredMessage], str | None]:
        """Sleepers by due time, a page at a time."""
        return self.topic(topic).view.sleepers(from_ms, to_ms, limit, cursor)

    def forecast(self, topic: str, now_ms: int, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """Numbers of sleepers by due time, from the index alone."""
        return self.topic(topic).view.forecast(now_ms, bucket_ms, buckets)

    def stats(self, topic: str) -> TopicStats:
        """Figures of a topic, exact. O(segments + groups)."""
        return self.topic(topic).view.stats()

    def groups(self, topic: str) -> dict[str, GroupStats]:
        """Figures of every group of a topic."""
        return self.topic(topic).view.group_stats()

    def group(self, topic: str, group: str) -> GroupStats:
        """Figures of one group. Raises `UnknownGroup`."""
        stats = self.groups(topic).get(group)
        if stats is None:
            raise UnknownGroup(f"there is no group {group!r}")
        return stats

    def message(self, topic: str, id_: str) -> MessageView | None:
        """One message, in whatever state: its state in every group, and its timeline. None if it is unknown."""
        return self.topic(topic).view.message(id_)

    def damage(self) -> dict[str, list[Damage]]:
        """All damage found so far, by topic."""
        damage = {name: topic.view.damage() for name, topic in self.topics.items()}
        return {name: lines for name, lines in damage.items() if lines}

    def check(self) -> list[str]:
        """Every broken invariant of every topic, a line each."""
        closed = [f"{name}: {describe(self.trouble[name])}" for name in self.trouble if name not in self.topics]
        return closed + [line for topic in self.topics.values() for line in topic.view.check()]

    # Time

    def tick(self, now_ms: int, waiting: Waiting = NOTHING, may_go_on: Callable[[], bool] = lambda: True) -> int | None:
        """Do the due work of all topics, a slice of each, until `may_go_on` says no. `waiting`: groups that a waiting fetch uses.
        Returns when to call again: at once if more is due, None for never."""
        if now_ms < self._ticked_ms:  # the clock went back: every scheduled time may lie too far ahead
            for name, topic in self.topics.items():
                topic.sync_now(now_ms)
                self._wake_queue.schedule_earlier(name, now_ms)
        self._ticked_ms = now_ms
        first = None if self.folder.is_lost(now_ms) else self._wake_queue.first
        if first is None or first > now_ms:
            self.woken = NO_TOPICS
            return first
        self.ballast.load()
        self.woken = self._wake_queue.run(now_ms, lambda name: self._tick_topic(name, now_ms, waiting), may_go_on)
        return self.next_wake()

    def _tick_topic(self, name: str, now_ms: int, waiting: Waiting) -> int | None:
        """Tick one topic. Returns when to do it again; None: never. An error is kept in `trouble`: the other topics go on."""
        try:
            when_ms = self.topics[name].tick(now_ms, waiting.get(name, ()))
        except Exception as error:  # noqa: BLE001 - kept in `trouble`: the other topics go on
            self.trouble[name] = error
            return now_ms + MAINTENANCE_MS
        self.trouble.pop(name, None)
        return when_ms

    def share_ticks(self, owner_of: Callable[[str], str], weight_of: Callable[[str], float]) -> None:
        """Share ticks among owners of topics, in proportion to their weights, instead of by the time that topics wait."""
        self._wake_queue.share(owner_of, weight_of)

    def next_wake(self) -> int | None:
        """When to call `tick` again; None for never."""
        return self._wake_queue.first

    def changed(self, topic: Topic, now_ms: int) -> None:
        """A commit has changed the Index of a topic: schedule its next tick."""
        due_ms, later_ms = topic.next_due(), now_ms + MAINTENANCE_MS
        self._wake_queue.schedule_earlier(topic.name, later_ms if due_ms is None else min(due_ms, later_ms))

    def _journaled(self, topic: Topic, now_ms: int, group: str | None = None) -> None:
        """Events were journaled: schedule the tick for ends of leases and the checkpoint. `group`: the only one that changed."""
        topic.sync_soon(now_ms)
        when_ms = topic.next_wake(now_ms, group)
        self._wake_queue.schedule_earlier(topic.name, now_ms + MAINTENANCE_MS if when_ms is None else when_ms)

    def compact(self, topic: str) -> None:
        """Free all disk space that can be freed, now: a checkpoint, then maintenance until nothing is left to do."""
        self.topic(topic).compact()

    def close(self, worker: Worker | None = None) -> None:
        """Sync and close all topics, and write the clean-shutdown mark. Raises the first error; the other topics are closed.
        `worker` writes the last checkpoints, and may use several threads."""
        if self.folder.lost is not None:
            self.folder.close(None)  # the files may belong to another process: nothing is written
            return
        marks, failed = close_topics(self.topics, worker or Inline(), self.door.budget.saves)
        clean = not failed and not any(topic.stopped for topic in self.topics.values())
        self.folder.close(marks if clean else None)
        if failed:
            raise failed[0]
