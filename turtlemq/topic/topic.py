"""One topic, as the engine sees it: produce, cancel, consume, and do all work that is due.

A topic joins three stores (`stores`): the Index where messages sleep, the Broker for due messages, and the dead letters. This
file only says which part works when: `handoff`, `checkpoints`, `maintenance` and `requeue` do the work, `view` answers questions.

One thread, no clock: time is an argument, and `tick` returns when it wants to be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from bson.int64 import Int64

from turtlemq.broker.cancel import CANCELLED
from turtlemq.broker.results import Acked, Extended, Reserved, ReserveTerms
from turtlemq.broker.save import LogSync
from turtlemq.data_folder import logs
from turtlemq.errors import Conflict, Exhausted, InvalidArgument, InvalidSchedule, TurtleError, UnknownGroup, UnknownMessage
from turtlemq.index.staged_ids import StagedIds
from turtlemq.index.writer import CommitGroup
from turtlemq.model import Batch, Receipt, State, StoredMessage
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Worker
from turtlemq.topic import cancel, facts, recover, requeue, retry_now
from turtlemq.topic.checkpoints import Checkpoints, SaveSlots
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.handoff import Handoff
from turtlemq.topic.maintenance import Maintenance, Retention
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.punctuality import Punctuality
from turtlemq.topic.scheduler import Scheduler
from turtlemq.topic.spread import Spreader
from turtlemq.topic.staging import Staging
from turtlemq.topic.stores import Stores
from turtlemq.topic.transaction import Transaction, TransactionReceipt
from turtlemq.topic.view import TopicView


class Topic:
    """An open topic, used by one thread. The constructor opens it, or creates it. `clean`: its mark from `close`, if the last
    stop was a proper one."""

    def __init__(
        self,
        name: str,
        folder: Path,
        door: Door,
        settings: Settings,
        worker: Worker,
        flusher: Worker,
        ballast: Ballast,
        slots: SaveSlots,
        clean: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.stores, opened = Stores.open(name, folder, door, settings, clean or {}, seed)
        self.stores.use(flusher, ballast.throw)
        self._index, self._broker = self.stores.index, self.stores.broker
        self._ballast = ballast
        self._checkpoints = Checkpoints(self.stores, flusher, ballast, slots)
        self._handoff = Handoff(self.stores, ballast)
        self._maintenance = Maintenance(self.stores, worker)
        self._retention = Retention(self.stores, self._checkpoints, self._maintenance, ballast)
        self._spreader, self._staging = Spreader(), Staging(self.stores, self._checkpoints)
        self.scheduler = Scheduler(self.stores, self._staging, ballast)
        self._punctuality = Punctuality()
        self.view = TopicView(self.stores, self._handoff, self._maintenance, self._punctuality)
        odd = recover.resolve(self.stores, opened)
        if odd or opened.behind:
            self._checkpoints.save_recovered(odd)
        else:
            self._checkpoints.note_opened()

    @property
    def settings(self) -> Settings:
        return self.stores.settings

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self.stores.configure(settings)
        self._retention.due_ms = 0  # they may keep less

    # Producing: staged documents become durable and visible with the next commit

    def stage(self, batch: Batch, now_ms: int) -> Receipt:
        """Check and encode messages for the next commit: all or none. Ids that are ready or settled count as held."""
        batch = self._spreader.spread(batch, self.settings.spread_ms)
        if batch.if_exists is None:
            receipt = self._index.stage(batch, now_ms, facts.known_elsewhere(self.stores))
        else:
            receipt = self._staging.put(batch, now_ms)
        self._maintenance.due_soon(now_ms)
        return receipt

    def stage_transaction(self, given: Transaction, now_ms: int) -> TransactionReceipt:
        """Stage all operations of a transaction with the next commit, or raise and stage none."""
        if len(given.put):
            given = replace(given, put=self._spreader.spread(given.put, self.settings.spread_ms))
        receipt = self._staging.transact(given, now_ms)
        self._maintenance.due_soon(now_ms)
        return receipt

    def held(self, ids: Sequence[str | None], now_ms: int) -> set[int]:
        """Indexes of the ids that `stage` would leave out as duplicates now. They are counted as such."""
        return self._index.held(ids, now_ms, facts.known_elsewhere(self.stores))

    def watch_ids(self, seen: StagedIds) -> None:
        """Add producers' own ids to a set as they are staged, until `unwatch_ids`."""
        self._index.watch_ids(seen)

    def unwatch_ids(self, seen: StagedIds) -> None:
        """End `watch_ids`."""
        self._index.unwatch_ids(seen)

    def stage_cancel(self, ids: Sequence[str], now_ms: int) -> dict[str, State]:
        """End sleepers with the next commit. When it lands, the ready log learns their ids in the same step, so that a lookup
        finds them at every moment."""
        return self._staging.cancel(ids, now_ms)

    def finish_cancel(self, outcome: Mapping[str, State], now_ms: int, pairs_max: int | None = None) -> dict[str, str]:
        """Finish a cancel after its commit: messages that did not sleep are cancelled if they are ready, or wait for another
        attempt, in every group. For each id: `cancelled`, `cancelled before`, the state that does not allow it, or `unknown`.

        `pairs_max`: no more retries and dead letters than that in one step, but those of one message. Messages that it did not
        come to have no answer: call it again for these."""
        self.stores.land_replacements()
        out = {id_: CANCELLED for id_, state in outcome.items() if state is State.CANCELLED}
        awake = [id_ for id_ in outcome if id_ not in out]
        answers, removed = cancel.cancel_awake(self.stores, awake, now_ms, pairs_max)
        if removed:
            self._broker.sync()  # a notice of a cancel that a power cut takes back would be wrong
            self._staging.note_cancelled(removed, now_ms)
        if self._broker.owes_sync:
            self._checkpoints.due_soon(now_ms)  # retention must not be first
        out |= answers
        if CANCELLED in out.values():
            self._maintenance.due_soon(now_ms)
        return out

    def stage_reschedule(self, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` or `headers` with the next commit."""
        try:
            return self._index.stage_reschedule(id_, now_ms, **changes)
        except (Conflict, UnknownMessage):
            known = self.view.message(id_)
            if known is None:
                raise
            raise Conflict(f"{id_!r} {_unchangeable(known)}", state=known.state) from None

    def commit(self) -> None:
        """Make everything staged durable and visible. Raises if that failed."""
        self._index.commit()

    @property
    def pending_commit(self) -> CommitGroup | None:
        """The last group that is not durable yet: when it has landed, so has everything staged up to now."""
        return self._index.pending

    def take_commit(self) -> CommitGroup | None:
        """The staged group, to be run by a committer and then landed; None while another one is under way."""
        return self._index.take()

    def land_commit(self, group: CommitGroup) -> None:
        """Publish a group that was taken and has run, or drop it and raise the cause."""
        self._index.land(group)

    # Consuming. Every method journals, so `sync_soon` must follow.

    def reserve(self, group: str, count: int, now_ms: int, **terms: Unpack[ReserveTerms]) -> Reserved:
        """Hand out up to `count` ready messages to a consumer of a group, under a lease. A paused group gets none: it is only
        noted as used."""
        if self.stores.pauses.holds(group):
            count = 0
        if self.stores.replacing:
            self.stores.land_replacements()
        known, most = self._broker.groups.get(group), self.stores.settings.max_in_flight
        room = most - most // 4 - (0 if known is None else known.in_flight)
        if count > room:  # the last quarter is not for low priority
            low = terms.get("low")
            terms["low"] = max(0, room if low is None else min(low, room))
        messages = self._broker.reserve(group, count, now_ms, **terms)
        if goal_ms := self.stores.settings.lateness_slo_ms:
            self._punctuality.count(messages, goal_ms, now_ms)
        return messages

    def ack(
        self,
        group: str,
        acks: Sequence[str],
        now_ms: int,
        *,
        leases: str | Sequence[str] | None = None,
        retry_delay_ms: int | None = None,
        error: str = "",
    ) -> Acked:
        """Settle messages (`id`), or report them as failed (`-id`), under these `leases`."""
        return self._broker.ack(group, acks, now_ms, leases=leases, retry_delay_ms=retry_delay_ms, error=error)

    def extend(
        self, group: str, ids: Sequence[str], ttr_ms: int, now_ms: int, leases: str | Sequence[str] | None = None
    ) -> Extended:
        """Extend these `leases` to `ttr_ms` from now."""
        return self._broker.extend(group, ids, ttr_ms, now_ms, leases)

    def give_back(self, group: str, ids: Sequence[str], now_ms: int, lease: str | None = None) -> tuple[int, list[str]]:
        """Undo a delivery that no consumer has seen. Returns how many, and the ids that the group does not hold. `lease`: the
        token of the delivery; messages that are held under another lease by now are left alone."""
        return self._broker.give_back(group, ids, now_ms, lease)

    def move_group(self, group: str, start: str | int, now_ms: int) -> int:
        """Create a group, or move it, to `earliest`, `latest` or the first message that became ready at a time. Returns the ready
        offset where it stands."""
        self.stores.land_replacements()
        ready = self._broker.ready
        if isinstance(start, int):
            offset = ready.offset_at(start)
        elif start in ("earliest", "latest"):
            offset = ready.first_offset if start == "earliest" else ready.next_offset
        else:
            raise InvalidArgument(f"a group starts at earliest, latest or a time in epoch milliseconds, not {start!r}")
        self._broker.move_group(group, offset, now_ms)
        return offset

    def drop_group(self, group: str, now_ms: int) -> None:
        """Forget a group, so that it holds nothing back. A new group of its name is not paused."""
        if group in self.stores.pauses.groups:
            self._set_paused(group, False)
        self._broker.forget_group(group, now_ms)

    def set_paused(self, group: str | None, paused: bool) -> None:
        """Pause a group, or resume it; None: the topic. Durable when this returns. Raises `UnknownGroup`."""
        if group is not None and not self.view.has_group(group):
            raise UnknownGroup(f"there is no group {group!r}")
        self._set_paused(group, paused)

    def _set_paused(self, group: str | None, paused: bool) -> None:
        self._ballast.freeing(partial(self.stores.pauses.set, group, paused))  # few bytes, and they help on a full disk

    def _unforgettable(self, waiting: Collection[str]) -> Collection[str]:
        """Groups that do not expire: those for which a fetch waits, and paused ones, which go on when they are resumed."""
        pauses = self.stores.pauses
        return self._broker.groups if pauses.topic else {*waiting, *pauses.groups} if pauses.groups else waiting

    def retry_now(self, id_: str, group: str | None, now_ms: int) -> list[str]:
        """Make a message ready at once that waits for its next attempt, or is a dead letter: in one group, or in all such groups.
        Returns their names."""
        self.stores.land_replacements()
        names = retry_now.retry_now(self.stores, id_, group, now_ms)
        self._hand_off(now_ms)
        return names

    # Dead letters

    def requeue(
        self,
        letters: Sequence[DeadLetter],
        now_ms: int,
        due_ms: int | None,
        reset_attempts: bool,
        per_s: float | None,
        expires_ms: int | None,
    ) -> int:
        """Let dead letters sleep again, for their groups. Durable. Returns how many."""
        self.stores.land_replacements()
        count = requeue.requeue(self.stores, letters, now_ms, due_ms, reset_attempts, per_s, expires_ms)
        if self.stores.has_superseded:  # the disk is full: the letters are removed when there is room
            self._maintenance.due_soon(now_ms)
        return count

    def delete_dead(self, letters: Sequence[DeadLetter], now_ms: int) -> int:
        """Delete dead letters, durably. Returns how many."""
        self.stores.land_replacements()
        self._maintenance.due_soon(now_ms)
        return requeue.delete(self.stores, letters, now_ms)

    # Time

    @property
    def stopped(self) -> BaseException | None:
        """The error that ended all writes to this topic, if there was one."""
        return self.stores.stopped

    def tick(self, now_ms: int, waiting: Collection[str] = ()) -> int | None:
        """Hand off a slice of the due messages, end overdue leases, and write a checkpoint, maintain or remove old data if it is
        time. `waiting`: groups for which a fetch waits. Returns when to call again: at once if more is due, None for never.

        Raises the first `Exhausted` at the end: the rest of the work may make room. So with a schedule that cannot fire."""
        self.stores.refuse_if_stopped()
        failed: TurtleError | None = self._hand_off(now_ms)
        retain = partial(self._retention.run_if_due, waiting=self._unforgettable(waiting))
        for work in (self._schedule, self._end_leases, self._checkpoints.write_if_due, self._maintenance.step_if_due, retain):
            try:
                work(now_ms)
            except (Exhausted, InvalidSchedule) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self.next_wake(now_ms)

    def _schedule(self, now_ms: int) -> None:
        if self.scheduler.run_if_due(now_ms):
            self._maintenance.due_soon(now_ms)

    def _end_leases(self, now_ms: int) -> None:
        before = self._broker.event_count
        try:
            self._broker.tick(now_ms)
        finally:
            if self._broker.event_count > before or self._broker.has_deferred:
                self._checkpoints.due_soon(now_ms)

    def _hand_off(self, now_ms: int) -> Exhausted | None:
        """Nothing is handed off before superseded documents are removed and the recovered state is saved. Returns the error if
        the disk is full: leases must end all the same."""
        try:
            self.stores.remove_superseded()
            self._checkpoints.retry_recovered()
            self.scheduler.begin(now_ms)
            handed = self._handoff.run(now_ms)
        except Exhausted as error:
            return error
        if handed is not None:
            self._maintenance.due_soon(now_ms)
        if handed:
            self._checkpoints.due_soon(now_ms)
        return None

    def next_due(self) -> int | None:
        """When the next sleeper comes due, or a schedule has something to do. O(1)."""
        return _earlier(self._index.next_due(), self.scheduler.wake_ms)

    def next_event(self, now_ms: int) -> int | None:
        """When the next message changes its state by itself: it comes due, its lease ends or its back-off is over."""
        return _earlier(self.next_due(), self._broker.next_wake(now_ms))

    def next_wake(self, now_ms: int, name: str | None = None) -> int | None:
        """When `tick` may have something to do: due messages, checkpoints, maintenance, ends of leases and back-offs; with
        `name`, only the leases and back-offs of this group count."""
        return self._wake(self._broker.next_wake(now_ms, name))

    def _wake(self, first: int | None) -> int | None:
        """The earliest of `first`, at which a group has something to do, and all other times. Called a thousand times a second:
        no lists."""
        for at in (self._index.next_due(), self._checkpoints.wake_ms, self._maintenance.due_ms, self.scheduler.wake_ms):
            if at is not None and (first is None or at < first):
                first = at
        retain_ms = self._retention.due_ms
        if first is not None and first <= retain_ms:
            return first
        return retain_ms if self._retention.has_work else first

    def sync_soon(self, now_ms: int) -> None:
        """Something was journaled: it reaches the disk with the next checkpoint."""
        self._checkpoints.due_soon(now_ms)

    def deferring_syncs(self) -> AbstractContextManager[None]:
        """In the body of a `with`, requests that promise durability only note that they need a sync: see `owes_sync`. The caller
        does it before it answers them."""
        return self._broker.deferring_syncs()

    @property
    def owes_sync(self) -> bool:
        """Whether a request waits for a sync that was deferred."""
        return self._broker.owes_sync

    def begin_sync(self) -> LogSync:
        """A sync of all events so far. `LogSync.run` does it, on any thread; then call `end_sync`."""
        return self._broker.begin_sync()

    def end_sync(self, done: LogSync) -> None:
        """The sync has run. Raises if it failed."""
        self._broker.end_sync(done)

    def sync_now(self, now_ms: int) -> None:
        """The clock went back: the next checkpoint is due."""
        self._checkpoints.due_now(now_ms)

    def checkpoint(self, worker: Worker | None = None) -> None:
        """Make handoffs and journals durable, and write a checkpoint. Waits for it; or lets `worker` write it, if anything was
        written since the last one, and `close` waits for that."""
        if worker is None:
            self._checkpoints.write()
        elif self.stopped is None:
            self._index.commit()  # its consequences are in the checkpoint
            self._checkpoints.begin_last(worker)

    def maintain(self) -> bool:
        """One step of maintenance: a seal, or a slice of a compaction. Returns whether there is more to do."""
        return self._maintenance.step()

    def compact(self) -> None:
        """Maintenance until nothing is left to do."""
        self._checkpoints.write()
        self._maintenance.run()

    def discard(self) -> None:
        """Close the files of a topic that is about to be removed. Needs no room on the disk: nothing is written but messages that
        are staged already, and their requests hear how that ended."""
        self._checkpoints.abandon()
        self._broker.close()
        closing: list[Callable[[], object]] = [index.close for index in self.stores.indexes]
        for close in (self._index.commit, *closing):
            try:
                close()
            except (TurtleError, OSError):
                continue

    def close(self) -> dict[str, Any]:
        """Sync and close. Returns the mark of this topic for the clean-shutdown file."""
        broker = self._broker
        self._checkpoints.leave_queue()
        if self._index.stopped is None:
            self._index.commit()  # its consequences are written, too
        if broker.stopped is None:
            self._checkpoints.write_last()
        else:
            self._checkpoints.abandon()
        ends, (end, *others) = broker.close(), [index.close() for index in self.stores.indexes]
        mark = {"base": Int64(self._index.active_base), "end": Int64(end)}
        mark |= {name: Int64(at) for name, at in zip(names.INNER, others, strict=False)}
        return {**mark, "broker": ends, "files": logs(self.stores.door, self.stores.folder)}


def _earlier(one: int | None, other: int | None) -> int | None:
    """The earlier of two times; None is never."""
    return other if one is None else one if other is None else min(one, other)


def _unchangeable(message: MessageView) -> str:
    """Why a message cannot be rescheduled or edited."""
    waiting = [f"group {name} {entry['summary']}" for name, entry in message.groups.items() if "due_ms" in entry]
    if not waiting:
        return f"has come due, so it can no longer be changed: it is in state {message.state}"
    return f"has come due, so it can no longer be changed: {', '.join(waiting)}. To let it be tried now, use retry"
