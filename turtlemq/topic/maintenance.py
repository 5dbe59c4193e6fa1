"""Maintenance of a topic, in small steps: seals and compaction of its Index, and retention.

`Maintenance` drives `index.maintenance`: it gives seal jobs to a worker, which may be another process, and adopts the result.
`Retention` removes history, dead letters and groups that are too old or too many. What to seal, compact or remove is decided by
`index.policy` and `broker.policy`, not here.
"""

from __future__ import annotations

from collections.abc import Collection

from turtlemq.errors import Exhausted
from turtlemq.index.index import Index
from turtlemq.index.seal import Sealed, seal
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Job, Worker
from turtlemq.topic import requeue
from turtlemq.topic.checkpoints import Checkpoints
from turtlemq.topic.stores import Stores

MAINTENANCE_MS = 1_000  # time between two steps
RETENTION_MS = 60_000
IN_FLIGHT_MAX = 20_000  # messages of a topic whose checkpoint the event loop waits for: 0.3 µs each
STEP_SLEEPERS = 500  # sleepers moved in one step of compaction: about 10 ms


class IndexUpkeep:
    """The maintenance of one Index: the seal under way, if there is one, and the segments that cannot be sealed."""

    def __init__(self, index: Index, door: Door, worker: Worker) -> None:
        self._index, self._door, self._worker = index, door, worker
        self.unsealable: dict[int, str] = {}  # segments whose seal failed, and why
        self.sealing: tuple[int, Job] | None = None  # the segment that the worker seals

    def step(self) -> bool:
        """Do one step. A full disk puts it off. Returns whether there is more to do."""
        try:
            if self.sealing is not None and self.sealing[1].done():
                self._finish_seal(*self.sealing)
            busy = None if self.sealing is None else self.sealing[0]
            job, more = self._index.maintenance.step(STEP_SLEEPERS, busy, self.unsealable.keys())
            if job is not None:
                self.sealing = job.base, self._worker.submit(seal, self._door.fresh(), job)
            return more or self.sealing is not None
        except Exhausted:
            return True

    def _finish_seal(self, base: int, job: Job) -> None:
        self.sealing = None
        try:
            sealed: Sealed = job.result()
        except Exhausted:
            return
        except Exception as error:  # noqa: BLE001 - after any error the segment serves on unsealed
            self.unsealable[base] = str(error)
            return
        if not self._index.maintenance.adopt(sealed):
            self.unsealable[base] = "what it wrote is damaged, or lacks messages that sleep"


class Maintenance:
    """The maintenance of sleepers, dead letters and schedules, and the time of the next step. Called by one thread."""

    def __init__(self, stores: Stores, worker: Worker) -> None:
        self._stores, self._worker = stores, worker
        self.due_ms: int | None = 0  # None: nothing to do
        self._sleepers = IndexUpkeep(stores.index, stores.door, worker)
        self._others = [IndexUpkeep(stores.dead_letters.index, stores.door, worker)]

    @property
    def unsealable(self) -> dict[int, str]:
        """Segments of sleepers whose seal failed, and why."""
        return self._sleepers.unsealable

    def due_soon(self, now_ms: int) -> None:
        """The Index has changed, so there may be work."""
        if self.due_ms is None:
            self.due_ms = now_ms + MAINTENANCE_MS

    def step_if_due(self, now_ms: int) -> None:
        due = self.due_ms is not None and not now_ms < self.due_ms <= now_ms + MAINTENANCE_MS
        if due and not self._stores.has_superseded:  # compaction must not copy documents that the journal has ended
            self.due_ms = now_ms + MAINTENANCE_MS if self.step() else None

    def step(self) -> bool:
        """Do one step for sleepers, one for dead letters and one for schedules. Returns whether there is more to do."""
        schedules = self._stores.schedules
        if schedules is not None and len(self._others) == 1:
            self._others.append(IndexUpkeep(schedules.index, self._stores.door, self._worker))
        more = [upkeep.step() for upkeep in (self._sleepers, *self._others)]
        return any(more)

    def run(self) -> None:
        """Take steps until one changes nothing."""
        before: object = None
        while before != (before := [self._progress(index) for index in self._stores.indexes]):
            self.step()

    def _progress(self, index: Index) -> object:
        return index.stats(), index.counters.moved, [upkeep.sealing for upkeep in (self._sleepers, *self._others)]


class Retention:
    """The time of the next removal of old history, dead letters and groups."""

    def __init__(self, stores: Stores, checkpoints: Checkpoints, maintenance: Maintenance, ballast: Ballast) -> None:
        self._stores, self._checkpoints, self._maintenance, self._ballast = stores, checkpoints, maintenance, ballast
        self.due_ms = 0

    @property
    def has_work(self) -> bool:
        """Is there anything that grows too old by itself?"""
        return self._stores.broker.dead_total > 0 or self._stores.broker.may_retain

    def run_if_due(self, now_ms: int, waiting: Collection[str] = ()) -> None:
        """`waiting`: groups for which a fetch waits."""
        if not now_ms < self.due_ms <= now_ms + RETENTION_MS:
            self.due_ms = now_ms + RETENTION_MS
            self._ballast.freeing(lambda: self._run(now_ms, waiting))

    def _run(self, now_ms: int, waiting: Collection[str]) -> None:
        """Files that are damaged here, and perhaps whole on another machine, stay."""
        if self._stores.door.replicated and self._stores.damage():
            return
        if sum(group.in_flight for group in self._stores.broker.groups.values()) < IN_FLIGHT_MAX:
            self._save()
        removed = self._stores.broker.retain(now_ms, waiting, self._save)
        dead_letters = self._stores.dead_letters
        letters = dead_letters.beyond_limits(now_ms)
        if letters:
            requeue.delete(self._stores, letters, now_ms)
            dead_letters.dropped += len(letters)
            self._maintenance.due_soon(now_ms)
            self.due_ms = now_ms  # there may be more
        if removed or letters:
            self._checkpoints.due_soon(now_ms)

    def _save(self) -> None:
        """Write a checkpoint that needs none of the files to be removed. The event loop waits for it: if very many messages are
        in flight, only when there are such files."""
        self._checkpoints.finish()
        if self._checkpoints.is_needed:
            self._checkpoints.write()
