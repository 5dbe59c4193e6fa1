"""The scheduler of a topic: it turns the times of schedules into messages, and changes schedules on request.

A firing is durable before the version of its schedule that says so. If a crash comes in between, the same time is fired again
under the same id, which the topic knows by then. Changes of a schedule go the other way: its new version is durable before a
firing that sleeps ahead is cancelled.

A schedule whose times cannot be told any more, since its zone has gone from the database of time zones, holds up nothing else: it
is tried again every RETRY_MS, and the tick fails with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from turtlemq.errors import Conflict, InvalidSchedule, UnknownSchedule
from turtlemq.index.writer import CommitGroup
from turtlemq.model import Batch
from turtlemq.schedules import LATE_MS, LEAD_MS, Schedule, check_name, firing_id
from turtlemq.storage.ballast import Ballast
from turtlemq.topic import facts, message_view
from turtlemq.topic.schedule_store import ScheduleStore, StoredSchedule
from turtlemq.topic.staging import Staging
from turtlemq.topic.stores import Stores

SLICE = 200  # schedules of one step: 10 ms, and two syncs
FIRINGS = 1_000  # after which a step comes to no further schedule: each may have many times to make up for
TRIGGERS_MAX = 1_000  # of one schedule in a second: each looks for a time without a message, 0.1 ms for each that has one
RETRY_MS = 600_000  # until a schedule is tried again whose times could not be told
_SLACK_MS = 10_000  # how late a handoff may have been before a crash
_UNDONE = ("sleep", "ready", "reserve")


class Scheduler:
    """Fires the schedules of one topic. Called by one thread."""

    def __init__(self, stores: Stores, staging: Staging, ballast: Ballast) -> None:
        self._stores, self._staging, self._ballast = stores, staging, ballast
        self._since_ms: int | None = None  # since when the topic is open; None: nothing was done yet
        self._late_ms: int | None = None  # times before it were missed, see `Schedule.step`; kept until no schedule waits
        self._made_up: set[str] = set()  # schedules of which a firing slept over an outage, see `Schedule.step`

    @property
    def wake_ms(self) -> int | None:
        """When a schedule has something to do; None: none ever. O(1)."""
        store = self._stores.schedules
        return None if store is None else store.wake_ms

    # Time

    def begin(self, now_ms: int) -> None:
        """Required before each handoff: firings that slept over an outage may be taken back before they come due."""
        if self._since_ms is None:
            store = self._stores.schedules
            if store is not None:
                self._review(store, now_ms)
            self._since_ms = now_ms
        self._since_ms = min(self._since_ms, now_ms)

    def _review(self, store: ScheduleStore, now_ms: int) -> None:
        """Find firings that were put ahead and came due while the server did not run."""
        newest = {one.name: one for one in store.since(store.last_write_ms - LEAD_MS - _SLACK_MS)}
        late: dict[str, Schedule] = {}
        for one in newest.values():
            schedule = one.schedule
            if schedule.catch_up != "all" and schedule.last_ms is not None and schedule.last_ms < now_ms - LATE_MS:
                late[firing_id(schedule.name, schedule.last_ms)] = schedule
        asleep = self._stores.index.sleepers(late) if late else {}
        self._made_up = {late[id_].name for id_ in asleep if late[id_].catch_up == "one"}
        self._cancel([id_ for id_ in asleep if late[id_].catch_up == "skip"], now_ms)

    def run_if_due(self, now_ms: int) -> bool:
        """Fire a slice of the schedules whose time has come. Returns whether there were any. Raises `InvalidSchedule` at the end
        if times of one could not be told."""
        store = self._stores.schedules
        if store is None or not store.has_due(now_ms):
            self._late_ms = None
            return False
        assert self._since_ms is not None, "begin comes first"
        if self._late_ms is None:  # else others of this moment still waited, or the disk is full: that is no outage
            self._late_ms = now_ms - LATE_MS
        store.commit()  # a version that is staged replaces one that would be read here
        versions, ended, times = list[StoredSchedule](), list[StoredSchedule](), list[tuple[StoredSchedule, int]]()
        unknown, why = list[StoredSchedule](), ""
        for one in store.due(now_ms, SLICE):
            if len(times) >= FIRINGS:
                break
            if one.schedule.has_ended:
                ended.append(one)
                continue
            try:
                fired, schedule = self._step(one.schedule, now_ms, self._since_ms, self._late_ms)
            except InvalidSchedule as error:
                unknown.append(one)
                why = f"schedule {one.name!r} cannot fire: {error}. It is tried again in {RETRY_MS // 60_000} minutes."
                continue
            times += [(one, at_ms) for at_ms in fired]
            versions.append(one.changed(schedule))
        self._fire(times, now_ms)
        store.stage(versions, now_ms)
        store.stage(unknown, now_ms, wake_ms=now_ms + RETRY_MS)
        store.stage_removal(ended, now_ms)
        store.commit()
        store.advance(now_ms)
        if not store.has_due(now_ms):
            self._late_ms = None
        self._made_up.difference_update(one.name for one in versions)
        if why:
            raise InvalidSchedule(why)
        return True

    def _step(self, schedule: Schedule, now_ms: int, since_ms: int, late_ms: int) -> tuple[list[int], Schedule]:
        """The times of a schedule to fire now, and the schedule after them."""
        return schedule.step(now_ms, since_ms, late_ms, schedule.name in self._made_up, self._is_busy(schedule))

    def _is_busy(self, schedule: Schedule) -> bool:
        """Does the schedule fire only when its last firing is done with, and is that not so?"""
        if schedule.overlap != "skip" or schedule.last_ms is None:
            return False
        last = message_view.message(self._stores, firing_id(schedule.name, schedule.last_ms))
        return last is not None and last.state in _UNDONE

    def _fire(self, times: Sequence[tuple[StoredSchedule, int]], now_ms: int) -> None:
        """Put the messages of these times, durably; those that are there already are left out."""
        if not times:
            return
        self._ballast.refuse_producers()
        batch = Batch(
            bodies=[one.body for one, _ in times],
            due_ms=[at_ms for _, at_ms in times],
            ids=[firing_id(one.name, at_ms) for one, at_ms in times],
            ttr_ms=[one.ttr_ms for one, _ in times],
            flags=[one.flags for one, _ in times],
            headers=[one.headers for one, _ in times],
        )
        index, ready = self._stores.index, self._stores.broker.ready
        known = partial(facts.known_ids, self._stores) if ready.next_offset else None
        receipt = index.stage(batch, now_ms, known)
        index.commit()
        self._stores.make_schedules().fired += sum(receipt.created)

    # Requests

    def find(self, name: str) -> StoredSchedule | None:
        """A schedule by its name."""
        store = self._stores.schedules
        return None if store is None else store.find(name)

    def get(self, name: str) -> StoredSchedule:
        """A schedule by its name. Raises `UnknownSchedule`."""
        found = self.find(name)
        if found is None:
            raise UnknownSchedule(f"there is no schedule {name!r}")
        return found

    def page(self, limit: int, cursor: str | None = None) -> tuple[list[StoredSchedule], str | None]:
        """Schedules in the order in which they have something to do, a page at a time. Paused ones come last."""
        store = self._stores.schedules
        return ([], None) if store is None else store.page(limit, cursor)

    def put(self, given: StoredSchedule, now_ms: int) -> StoredSchedule:
        """Create a schedule, or replace the one of its name. Durable after `commit`. Returns it with its place in time."""
        check_new(given.schedule, now_ms)
        self._ballast.refuse_producers()
        store = self._stores.make_schedules()
        old = store.find(given.name)
        if old is None:
            made = given.changed(given.schedule.begun(now_ms))
            store.stage([made], now_ms)
            return made
        sleeping = self._sleeping(old, now_ms)
        before = old.schedule.without_last(now_ms) if sleeping else old.schedule
        made = replace(
            given.changed(given.schedule.replacing(before, now_ms)), created_seq=old.created_seq, document=old.document
        )
        self._stage(store, made, sleeping, now_ms)
        return made

    def set_paused(self, name: str, paused: bool, now_ms: int) -> StoredSchedule:
        """Pause a schedule, or resume it. Durable after `commit`."""
        old, store = self.get(name), self._stores.make_schedules()
        if paused == old.schedule.paused:
            return old
        sleeping = self._sleeping(old, now_ms)
        before = old.schedule.without_last(now_ms) if sleeping else old.schedule
        made = old.changed(before.with_pause(paused, now_ms))
        self._stage(store, made, sleeping, now_ms)
        return made

    def remove(self, name: str, now_ms: int) -> None:
        """Delete a schedule. Durable after `commit`. Messages that have come due stay."""
        old, store = self.get(name), self._stores.make_schedules()
        sleeping = self._sleeping(old, now_ms)
        store.stage_removal([old], now_ms)
        self._take_back(store, sleeping, now_ms)

    def trigger(self, name: str, now_ms: int) -> tuple[str, int]:
        """Fire a schedule once, now, paused or not; its times stay as they are. Durable. Returns id and due time of the message:
        the last time up to now that has none yet. Raises `Conflict` if there is none in the last second."""
        found, at_ms = self.get(name), now_ms
        while message_view.message(self._stores, firing_id(name, at_ms)) is not None:
            at_ms -= 1
            if at_ms <= now_ms - TRIGGERS_MAX:
                raise Conflict(f"the topic has a message of each of the last {TRIGGERS_MAX:,} ms of schedule {name!r} already")
        self._fire([(found, at_ms)], now_ms)
        return firing_id(name, at_ms), at_ms

    @property
    def pending(self) -> CommitGroup | None:
        """The group of staged changes that are not durable yet; None: there are none."""
        return None if self._stores.schedules is None else self._stores.schedules.index.pending

    def commit(self) -> None:
        """Make staged changes durable. Raises if that failed."""
        if self._stores.schedules is not None:
            self._stores.schedules.commit()

    def _stage(self, store: ScheduleStore, made: StoredSchedule, sleeping: list[str], now_ms: int) -> None:
        store.stage([made], now_ms)
        self._take_back(store, sleeping, now_ms)

    def _sleeping(self, old: StoredSchedule, now_ms: int) -> list[str]:
        """The id of the firing that was put ahead, if it still sleeps."""
        last_ms = old.schedule.last_ms
        if last_ms is None or last_ms <= now_ms:
            return []
        return list(self._stores.index.sleepers([firing_id(old.name, last_ms)]))

    def _take_back(self, store: ScheduleStore, sleeping: list[str], now_ms: int) -> None:
        """Cancel a firing that sleeps ahead, after the version of its schedule that says so."""
        if sleeping:
            store.commit()
            self._cancel(sleeping, now_ms)

    def _cancel(self, ids: Sequence[str], now_ms: int) -> None:
        if ids:
            self._staging.cancel(ids, now_ms)
            self._stores.index.commit()


def check_new(schedule: Schedule, now_ms: int) -> None:
    """Raise `InvalidSchedule` or `InvalidId` for a schedule that cannot be."""
    check_name(schedule.name)
    schedule.timing.check()
    if schedule.begun(now_ms).has_ended:
        raise InvalidSchedule("the schedule has no time to come")
