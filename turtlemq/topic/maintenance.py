"""Maintenance of a topic, in small steps: seals and compaction of its Index, and retention.

`Maintenance` drives `index.maintenance`: it gives seal jobs to a worker, which may be another process, and adopts the result.
`Retention` removes history, dead letters and groups that are too old or too many. What to seal, compact or remove is decided by
`index.policy` and `broker.policy`, not here.
"""

from __future__ import annotations

from collections.abc import Collection

from turtlemq.errors import Exhausted
from turtlemq.index.seal import Sealed, seal
from turtlemq.storage.workers import Job, Worker
from turtlemq.topic import requeue
from turtlemq.topic.checkpoints import Checkpoints
from turtlemq.topic.stores import Stores

MAINTENANCE_MS = 1_000  # time between two steps
RETENTION_MS = 60_000
STEP_SLEEPERS = 500  # sleepers moved in one step of compaction: about 10 ms


class Maintenance:
    """The seal under way, if there is one, and the time of the next step. Called by one thread."""

    def __init__(self, stores: Stores, worker: Worker) -> None:
        self._stores, self._worker = stores, worker
        self.due_ms: int | None = 0  # None: nothing to do
        self.unsealable: dict[int, str] = {}  # segments whose seal failed, and why
        self._sealing: tuple[int, Job] | None = None  # the segment that the worker seals

    def due_soon(self, now_ms: int) -> None:
        """The Index has changed, so there may be work."""
        if self.due_ms is None:
            self.due_ms = now_ms + MAINTENANCE_MS

    def step_if_due(self, now_ms: int) -> None:
        due = self.due_ms is not None and not now_ms < self.due_ms <= now_ms + MAINTENANCE_MS
        if due and not self._stores.has_superseded:  # compaction must not copy documents that the journal has ended
            self.due_ms = now_ms + MAINTENANCE_MS if self.step() else None

    def step(self) -> bool:
        """Do one step. A full disk puts it off. Returns whether there is more to do."""
        try:
            if self._sealing is not None and self._sealing[1].done():
                self._finish_seal(*self._sealing)
            busy = None if self._sealing is None else self._sealing[0]
            job, more = self._stores.index.maintenance.step(STEP_SLEEPERS, busy, self.unsealable.keys())
            if job is not None:
                self._sealing = job.base, self._worker.submit(seal, self._stores.door.fresh(), job)
            return more or self._sealing is not None
        except Exhausted:
            return True

    def _finish_seal(self, base: int, job: Job) -> None:
        self._sealing = None
        try:
            sealed: Sealed = job.result()
        except Exhausted:
            return
        except Exception as error:  # noqa: BLE001 - after any error the segment serves on unsealed
            self.unsealable[base] = str(error)
            return
        if not self._stores.index.maintenance.adopt(sealed):
            self.unsealable[base] = "what it wrote is damaged, or lacks messages that sleep"

    def run(self) -> None:
        """Take steps until one changes nothing."""
        index, before = self._stores.index, object()
        while before != (before := (index.stats(), index.counters.moved, self._sealing)):
            self.step()


class Retention:
    """The time of the next removal of old history, dead letters and groups."""

    def __init__(self, stores: Stores, checkpoints: Checkpoints) -> None:
        self._stores, self._checkpoints = stores, checkpoints
        self.due_ms = 0

    @property
    def has_work(self) -> bool:
        """Is there anything that grows too old by itself?"""
        return self._stores.broker.dead_total > 0 or self._stores.broker.may_retain

    def run_if_due(self, now_ms: int, waiting: Collection[str] = ()) -> None:
        """`waiting`: groups for which a fetch waits."""
        if not now_ms < self.due_ms <= now_ms + RETENTION_MS:
            self.due_ms = now_ms + RETENTION_MS
            self._run(now_ms, waiting)

    def _run(self, now_ms: int, waiting: Collection[str]) -> None:
        """Requires a checkpoint that needs none of the files to be removed, so it writes one first."""
        self._checkpoints.finish()
        if self._checkpoints.is_needed:
            self._checkpoints.write()
        removed = self._stores.broker.retain(now_ms, waiting)
        dead_letters = self._stores.dead_letters
        letters = dead_letters.beyond_limits(now_ms)
        if letters:
            requeue.delete(self._stores, letters, now_ms)
            dead_letters.dropped += len(letters)
            dead_letters.maintain()
            self.due_ms = now_ms  # there may be more
        if removed or letters:
            self._checkpoints.due_soon(now_ms)
