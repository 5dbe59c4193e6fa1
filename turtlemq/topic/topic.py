"""One topic: an Index where messages sleep, a Broker for those that came due, a second Index for dead letters; and the few lines
that join them. Index and Broker do not know each other.

Order of writes: whatever takes a message over has it durably before the one that gave it lets go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.broker.cancel import CANCELLED, cancel
from turtlemq.broker.retention import keep_house, may_go
from turtlemq.broker.save import Save, begin_save, clean_mark, end_save
from turtlemq.data_folder import logs
from turtlemq.errors import DiskFull, TurtleError
from turtlemq.histogram import FEW, LATENESS_MS, Histogram
from turtlemq.index.seal import Sealed, seal
from turtlemq.model import DUE_MS_MAX, SEQ_COUNTER_BITS, Batch, Damage, Due, Receipt, State
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_ids
from turtlemq.settings import Settings
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Job, Worker
from turtlemq.topic import listing, recover, requeue, retries
from turtlemq.topic.check import check_topic
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.listing import GroupStats, MessageView, TopicStats
from turtlemq.topic.stores import Stores

CHECKPOINT_POLL_MS = 2  # when to look first whether a beat is over; then after as long as it has taken so far
MAINTENANCE_MS = 1_000  # how often housekeeping looks around
RETENTION_MS = 60_000
MAINTENANCE_BUDGET = 500  # sleepers moved in one step of compaction: about 10 ms
FIRE_SLICE = 4_000  # messages handed off before others get a turn: 2 to 3 ms
FIRE_BYTES = 16 << 20  # of them, too


class Topic:
    """See the module. Opened by the constructor of `Engine`; one thread."""

    def __init__(
        self,
        name: str,
        folder: Path,
        door: Door,
        settings: Settings,
        worker: Worker,
        flusher: Worker,
        ballast: Ballast,
        clean: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.folder, self.door, self._worker, self._ballast = name, folder, door, worker, ballast
        self.stores, opened = Stores.open(name, folder, door, settings, clean or {})
        self.index, self.broker, self.dead = self.stores.index, self.stores.broker, self.stores.dead_letters
        self.broker.reserve_log.relief = self.broker.history.relief = ballast.throw
        self._flusher = flusher
        self.index.use_flusher(flusher)
        self.dead.index.use_flusher(flusher)
        self.unsealable: dict[int, str] = {}  # segments whose seal failed, and why
        self.lateness = Histogram(LATENESS_MS)  # of handoffs, where the message was to sleep at all
        self._saving: tuple[Save, Job] | None = None  # a beat under way
        self._poll_at = self._begun_at = 0  # when to look whether it is over, and when it began
        self._job: Job | None = None
        self._sealing: int | None = None
        self._checkpoint_at: int | None = None  # when to sync; None: nothing to sync
        self._maintain_at: int | None = 0  # when to keep house; None: nothing to do
        self._retention_at = 0
        self._unnoted = False  # what opening found out is not on the disk yet
        odd = recover.resolve(self.stores, opened.interrupted) or opened.torn
        recover.count_letters(self.stores)
        if odd or opened.behind:
            self._save_recovered_state(odd)

    def configure(self, settings: Settings) -> None:
        """Settings for what comes from now on."""
        self.index.configure(settings)
        self.dead.configure(settings)
        self.broker.settings = self.broker.ready.settings = settings
        self.broker.reserve_log.settings = self.broker.history.settings = settings

    # Producing

    def stage(self, batch: Batch, now_ms: int) -> Receipt:
        """Check and encode messages for the next commit: all or none. Ids that are ready or settled count as held."""
        known = partial(retries.known_ids, self.stores) if self.broker.ready.next_offset else None
        receipt = self.index.stage(batch, now_ms, known)
        self.maintain_soon(now_ms)
        return receipt

    def stage_cancel(self, ids: Sequence[str], now_ms: int) -> dict[str, State]:
        """End sleepers with the next commit. In the moment in which it lands the ready log knows their ids, so that there is none
        in which nobody does."""
        outcome = self.index.stage_cancel(ids)
        ended = [id_ for id_, state in outcome.items() if state is State.CANCELLED]
        group = self.index.pending
        if ended and group is not None:
            group.then.append(lambda: self._note_cancelled_ids(ended, now_ms) if group.error is None else None)
        return outcome

    def cancelled(self, outcome: dict[str, State], now_ms: int) -> dict[str, str]:
        """Sleepers were cancelled, durably; what did not sleep is cancelled if it is ready, or waits to be tried again, in every
        group. For each id: `cancelled`, `cancelled before`, the state that does not allow it, or unknown."""
        out = {id_: CANCELLED for id_, state in outcome.items() if state is State.CANCELLED}
        others = [id_ for id_, state in outcome.items() if state is not State.CANCELLED]
        buried = requeue.dead_in_any_group(self.stores, others)
        others = [id_ for id_ in others if id_ not in buried]
        found = retries.sleeping(self.stores, others)
        answers = cancel(self.broker, others, now_ms, found.keys())
        self.stores.superseded_retries += [doc for (_, id_), doc in found.items() if answers[id_] == CANCELLED]
        try:
            self.stores.remove_superseded()
        except DiskFull:
            pass  # nothing can be handed off either before there is room
        out |= {id_: state or "unknown" for id_, state in answers.items()} | dict.fromkeys(buried, "dead")
        self.maintain_soon(now_ms)
        return out

    def _note_cancelled_ids(self, ids: Sequence[str], now_ms: int) -> None:
        """Let the ready log know the ids of cancelled sleepers. Only for looking them up: a full disk loses nothing."""
        count = len(ids)
        texts = [id_.encode() for id_ in ids]
        raw, lengths = f.encode(texts, [b""] * count, [now_ms] * count, 0, 0, [f.NOTICE] * count)
        try:
            self.broker.notice(bytes(raw), np.cumsum(lengths) - np.asarray(lengths), now_ms)
            self._checkpoint_at = self._checkpoint_at or now_ms + self.broker.settings.beat_ms
        except (TurtleError, OSError):
            return

    # Dead letters

    def requeue(
        self, letters: Sequence[DeadLetter], now_ms: int, due_ms: int | None, reset_attempts: bool, per_s: float | None
    ) -> int:
        """Let dead letters sleep again, for their groups. Durable."""
        count = requeue.requeue(self.stores, letters, now_ms, due_ms, reset_attempts, per_s)
        if self.stores.requeued_letters:  # the disk is full: the letters go when there is room
            self.maintain_soon(now_ms)
        return count

    def delete_dead(self, letters: Sequence[DeadLetter], now_ms: int) -> int:
        """Delete dead letters, durably."""
        return requeue.delete(self.stores, letters, now_ms)

    # State

    def stats(self, oldest: bool = True) -> TopicStats:
        """Figures of this topic, exact. O(segments + groups). `oldest=False` leaves out the time of the oldest ready message,
        which is read from its file and costs four times as much as all the rest."""
        return listing.topic_stats(self.stores, oldest)

    def groups(self) -> dict[str, GroupStats]:
        """Figures of every group."""
        return listing.group_stats(self.stores)

    def message(self, id_: str) -> MessageView | None:
        """One message wherever it is: its state, in every group, and its history."""
        return listing.message(self.stores, id_)

    def browse(
        self, state: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[MessageView], str | None]:
        """Messages in one state, a page at a time; without their timelines."""
        return listing.browse(self.stores, state, from_ms, to_ms, limit, cursor)

    def check(self) -> list[str]:
        """Every broken invariant, a line each. Costs a scan of all files."""
        return check_topic(self.stores)

    def damage(self) -> list[Damage]:
        """All damage found so far."""
        return self.stores.damage()

    @property
    def stopped(self) -> BaseException | None:
        """The error that ended all writes to this topic, if there was one."""
        return self.stores.stopped

    # Time

    def tick(self, now_ms: int) -> int | None:
        """Hand off a slice of what is due, take back what was held too long, sync and keep house when it is time.

        Returns when to come again: at once if more is due, None for never."""
        for part in (self.broker.reserve_log, self.broker.history, self.dead.index):
            part.refuse_if_stopped()  # a message may have gone over without a note of it: nothing else is said of any before that
        try:
            self.stores.remove_superseded()
            if self._unnoted:
                self._save_recovered_state_now()
            full = self._hand_off(now_ms)
        except DiskFull as error:  # nothing is handed off before they are over; leases end all the same
            full = error
        before = self.broker.events
        wake = self.broker.tick(now_ms)
        if self.broker.events > before or self.broker.deferred:
            self.sync_soon(now_ms)
        for work in (self._checkpoint_if_due, self._maintain_if_due, self._retain_if_due):
            try:
                work(now_ms)
            except DiskFull as error:  # what comes next may make room
                full = full or error
        if full is not None:
            raise full
        return self._wake(wake)

    def _maintain_if_due(self, now_ms: int) -> None:
        due = self._maintain_at is not None and not now_ms < self._maintain_at <= now_ms + MAINTENANCE_MS
        if due and not (self.stores.superseded_retries or self.stores.requeued_letters):  # compaction must not copy what is over
            self._maintain_at = now_ms + MAINTENANCE_MS if self.maintain() else None

    def _retain_if_due(self, now_ms: int) -> None:
        if not now_ms < self._retention_at <= now_ms + RETENTION_MS:
            self._retention_at = now_ms + RETENTION_MS
            self._retain(now_ms)

    def _hand_off(self, now_ms: int) -> DiskFull | None:
        """A slice of what is due goes to the Broker. A full disk keeps it asleep, and must not keep leases from ending."""
        room = self._ballast.spare(FIRE_BYTES)
        due = self.index.due(now_ms, count_max=FIRE_SLICE, bytes_max=room)
        if due is None:
            return None
        fresh = self._not_handed_off(due) if len(due) and self.broker.ready.damage else due
        if len(fresh):
            try:
                if len(fresh.raw) > room < FIRE_BYTES:  # `due` gives one message at least
                    raise DiskFull
                self.broker.accept(fresh, now_ms)
            except DiskFull as error:
                return error
            self._note_lateness(fresh, now_ms)
            self.sync_soon(now_ms)
        self.index.advance(due)
        self.maintain_soon(now_ms)
        return None

    def _not_handed_off(self, due: Due) -> Due:
        """Where the ready log is damaged, what says that it took messages over may be gone, so that they come due again. Those
        that it still has are not handed to it twice. A retry has the id of the one before it."""
        heads = f.prefixes(due.raw, due.starts)
        begin, sizes = due.starts + f.PREFIX_BYTES, heads["idlen"].astype(np.int64) - 1
        texts = [due.raw[a:b] for a, b in zip(begin.tolist(), (begin + sizes).tolist(), strict=True)]
        there = self.broker.ready.find_many(texts, hash_ids(due.raw, begin, sizes))
        keep = np.array([i for i in range(len(due)) if i not in there or heads["flags"][i] & f.META], np.int64)
        lengths = heads["len"][keep].astype(np.int64)
        raw = bytes(f.gather(due.raw, due.starts[keep], lengths))
        return replace(due, raw=raw, starts=np.cumsum(lengths) - lengths, due_ms=due.due_ms[keep], seq=due.seq[keep], hashes=None)

    def _note_lateness(self, due: Due, now_ms: int) -> None:
        if len(due) >= FEW:
            self.lateness.add_many((now_ms - due.due_ms)[due.due_ms > due.seq >> SEQ_COUNTER_BITS])
            return
        for due_ms, seq in zip(due.due_ms.tolist(), due.seq.tolist(), strict=True):
            if due_ms > seq >> SEQ_COUNTER_BITS:
                self.lateness.add(now_ms - due_ms)

    def next_wake(self, now_ms: int, name: str | None = None) -> int | None:
        """When there may be something to do: what is due, syncs, housekeeping, leases that end, back-offs that are over;
        with `name`, those of one group alone."""
        first: int | None = None
        groups = self.broker.groups
        for group in groups.values() if name is None else (groups[name],) if name in groups else ():
            for at in (group.next_deadline(), group.next_retry(now_ms)):
                if at is not None and (first is None or at < first):
                    first = at
        return self._wake(first)

    def _wake(self, first: int | None) -> int | None:
        """The same, where `first` is when a group has something to do. Asked a thousand times a second: no lists."""
        for at in (self.index.next_due(), self._checkpoint_at if self._saving is None else self._poll_at, self._maintain_at):
            if at is not None and (first is None or at < first):
                first = at
        if first is not None and first <= self._retention_at:
            return first
        return self._retention_at if self.broker.dead_counts.total() or may_go(self.broker) else first

    def maintain_soon(self, now_ms: int) -> None:
        """Something has changed: housekeeping may have work."""
        if self._maintain_at is None:
            self._maintain_at = now_ms + MAINTENANCE_MS

    def sync_soon(self, now_ms: int) -> None:
        """A consumer did something: it reaches the disk with the next beat, which does not wait if there is much of it."""
        if self.broker.unsaved:
            self._checkpoint_at = now_ms
        elif self._checkpoint_at is None:
            self._checkpoint_at = now_ms + self.broker.settings.beat_ms

    def sync_now(self, now_ms: int) -> None:
        """The clock went back, so nobody knows how long ago something was done: the next beat is due."""
        if self._checkpoint_at is not None:
            self._checkpoint_at = min(self._checkpoint_at, now_ms)

    def checkpoint(self) -> None:
        """Make handoffs and journals durable, write the checkpoint, and let the Index let go of what was handed off."""
        self._end_checkpoint()
        try:
            self._begin_checkpoint(Inline())
            self._end_checkpoint()
        except DiskFull:
            if not self._ballast.throw():
                raise
            self._begin_checkpoint(Inline())
            self._end_checkpoint()

    def _checkpoint_if_due(self, now_ms: int) -> None:
        """The same when it is time, while others go on: `flusher` does what takes long."""
        self._end_checkpoint_if_done()
        late = self._checkpoint_at is not None and not now_ms < self._checkpoint_at <= now_ms + self.broker.settings.beat_ms
        if self._saving is None and (late or self.broker.unsaved):
            self._begin_checkpoint(self._flusher)
            self._begun_at = now_ms
            self._end_checkpoint_if_done()
        self._poll_at = now_ms + max(CHECKPOINT_POLL_MS, min(now_ms - self._begun_at, MAINTENANCE_MS))

    def _end_checkpoint_if_done(self) -> None:
        if self._saving is not None and self._saving[1].done():
            self._end_checkpoint()

    def _begin_checkpoint(self, worker: Worker) -> None:
        self.stores.remove_superseded()
        save = begin_save(self.broker, self.folder)
        self._checkpoint_at = None
        self._saving = save, worker.submit(save.run, self.door.fresh())

    def _end_checkpoint(self) -> None:
        if self._saving is None:
            return
        (save, job), self._saving = self._saving, None
        try:
            job.result()
            end_save(self.broker, save)
        except BaseException:
            self._checkpoint_at = 0  # it is late, until there is room, or for good
            raise
        self.index.release(self.broker.ready.durable)
        self.index.rest()
        self.dead.index.rest()

    def _abandon_checkpoint(self) -> None:
        """Wait for a beat under way, whatever becomes of it: it must not write into a folder that is another topic's by then."""
        if self._saving is not None:
            (_, job), self._saving = self._saving, None
            try:
                job.result()
            except (TurtleError, OSError):
                return

    # Housekeeping

    def maintain(self) -> bool:
        """One step; a full disk only puts it off. Returns whether there is more to do."""
        try:
            if self._job is not None and self._job.done():
                self._finish_seal(self._job)
            order, more = self.index.maintenance.step(MAINTENANCE_BUDGET, self._sealing, self.unsealable.keys())
            if order is not None:
                self._sealing = order.base
                self._job = self._worker.submit(seal, self.door.fresh(), order)
            return more or self._job is not None
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
        if not self.index.maintenance.adopt(sealed):
            self.unsealable[sealed.base] = "what it wrote is damaged, or lacks messages that sleep"

    def _retain(self, now_ms: int) -> None:
        """Let go of history, dead letters and groups that are old enough. What is to go must not be needed by the checkpoint."""
        self._end_checkpoint()
        if self._checkpoint_at is not None:
            self.checkpoint()
        gone = keep_house(self.broker, now_ms)
        letters = self.dead.too_many(now_ms)
        if letters:
            requeue.delete(self.stores, letters, now_ms)
            self.dead.dropped += len(letters)
            self.dead.maintain()
            self._retention_at = now_ms  # there may be more
        if gone or letters:
            self.sync_soon(now_ms)

    def compact(self) -> None:
        """Housekeeping until nothing is left to do."""
        self.checkpoint()
        before: object = None
        while before != (before := (self.index.stats(), self.index.counters.moved, self._job)):
            self.maintain()

    # Opening and closing

    def _save_recovered_state(self, odd: bool) -> None:
        """What was found out in opening must not have to be found out again, when other documents may have those offsets. Nor,
        if it was `odd`, from the journals alone."""
        self._unnoted = odd
        try:
            self._save_recovered_state_now()
        except DiskFull:
            return  # nothing is handed off before there is room

    def _save_recovered_state_now(self) -> None:
        if self._unnoted:
            self.broker.reserve_log.note_state()
            self.checkpoint()
            self._unnoted = False
        elif self._checkpoint_at is None:
            self.checkpoint()

    def close(self) -> dict[str, Any]:
        """Sync and close. Returns what the clean-shutdown mark says of this topic."""
        broker = self.broker
        if self.index.stopped is None:
            self.index.commit()  # what follows from it is written, too
        if not any((broker.ready.stopped, broker.reserve_log.stopped, broker.history.stopped)):
            self.checkpoint()
        else:
            self._abandon_checkpoint()
        for part in (broker.ready, broker.reserve_log, broker.history):
            part.shut()
        dead, end = self.dead.close(), self.index.close()
        mark = {"base": Int64(self.index.active_base), "end": Int64(end), "dead": Int64(dead)}
        return {**mark, "broker": clean_mark(broker), "files": logs(self.door, self.folder)}
