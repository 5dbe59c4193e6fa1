"""The work: what producers send, and an engine driven the way a server drives it.

Bodies of 100 random bytes; due times at random over one day, which begins a day after the start, so that nothing comes due
before a benchmark wants it. Time is simulated: a millisecond a batch.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import probe
from turtlemq.engine import Engine
from turtlemq.model import Batch, Receipt
from turtlemq.settings import Settings
from turtlemq.storage.process_worker import ProcessWorker
from turtlemq.storage.workers import Worker

START_MS = 1_700_000_000_000
DUE_FROM_MS = START_MS + 86_400_000
DUE_TO_MS = DUE_FROM_MS + 86_400_000
BODY_BYTES = 100
TOPIC = "bench"
_SETTLE_SECONDS_MAX = 900


def own_id(number: int) -> str:
    """The producer's own id of its n-th message."""
    return f"order-{number:012d}"


class Load:
    """Batches of messages, the same ones in every run."""

    def __init__(self, batch: int, own: bool = False, first: int = 0, due_to_ms: int = DUE_TO_MS) -> None:
        self.size, self.own, self.next, self._due_to_ms = batch, own, first, due_to_ms
        self._chance = np.random.default_rng(first)
        self._bodies = [self._chance.bytes(BODY_BYTES) for _ in range(batch)]

    def batch(self, *, arrays: bool = False) -> Batch:
        """The next messages. Columns are lists, as they come out of JSON, or arrays."""
        dues = self._chance.integers(DUE_FROM_MS, self._due_to_ms, self.size)
        ids = [own_id(n) for n in range(self.next, self.next + self.size)] if self.own else None
        self.next += self.size
        return Batch(self._bodies, dues if arrays else dues.tolist(), ids)

    def one(self) -> list[Batch]:
        """The next batch, for `rate`."""
        return [self.batch()]

    def singles(self, count: int) -> list[Batch]:
        """The next messages, each on its own."""
        dues = self._chance.integers(DUE_FROM_MS, self._due_to_ms, count).tolist()
        ids = [own_id(n) for n in range(self.next, self.next + count)] if self.own else [None] * count
        self.next += count
        bodies = self._bodies
        return [
            Batch([bodies[i % self.size]], [due], None if id_ is None else [id_])
            for i, (due, id_) in enumerate(zip(dues, ids, strict=True))
        ]


def rate(append: Callable[[Batch], object], make: Callable[[], list[Batch]], count: int) -> float:
    """Messages a second that `append` takes, over `count` messages or more. `make` gives some at a time, shortly before they are
    appended, so that they are as warm in the caches of the processor as what a server has just decoded; it is not counted."""
    taken, done = 0.0, 0
    while done < count:
        work = make()
        begin = time.perf_counter()
        for batch in work:
            append(batch)
        taken += time.perf_counter() - begin
        done += sum(map(len, work))
    return done / taken


class Server:
    """An engine with one topic and its clock. With `worker`, seals run in another process while appends go on."""

    def __init__(self, folder: str | Path, settings: Settings | None = None, *, worker: bool = False) -> None:
        process: Worker | None = ProcessWorker() if worker else None
        self.engine = Engine.open(Path(folder), worker=process, settings=settings)
        self.topic = self.engine.topic(TOPIC, create=True)
        self.index = self.topic.stores.index
        self.now_ms = START_MS
        self.worker_peak_bytes = 0

    def append(self, batch: Batch) -> Receipt:
        """Store a batch without a sync, a millisecond later than the one before."""
        self.now_ms += 1
        receipt = self.topic.stage(batch, self.now_ms)
        self.index.commit(sync=False)
        return receipt

    def submit(self, batch: Batch) -> Receipt:
        """Store a batch durably."""
        self.now_ms += 1
        return self.engine.submit(TOPIC, batch, self.now_ms)

    def tick(self) -> None:
        """What a server does between requests: look at the clock, keep house when it is time."""
        self.topic.tick(self.now_ms)
        for process in multiprocessing.active_children():
            try:
                self.worker_peak_bytes = max(self.worker_peak_bytes, probe.anonymous_bytes(process.pid or 0))
            except (OSError, LookupError):  # it has just ended
                continue

    def settle(self) -> None:
        """Idle until every segment that takes no more writes is sealed."""
        until = time.monotonic() + _SETTLE_SECONDS_MAX
        while self.unsealed:
            if time.monotonic() > until or self.topic.unsealable:
                raise RuntimeError(f"segments are not getting sealed: {self.unsealed}, {self.topic.unsealable}")
            time.sleep(0.02)
            self.now_ms += 1_000
            self.tick()

    @property
    def sleepers(self) -> int:
        return self.index.stats().sleep

    @property
    def unsealed(self) -> list[int]:
        segments = self.index._segments
        return [segment.base for segment in segments.by_base.values() if not segment.sealed and segment is not segments.active]

    def fire(self) -> int:
        """Hand off a slice of everything that is due now. Returns how many messages that was."""
        before = self.index.counters.handed_off
        self.engine.tick(self.now_ms)
        return self.index.counters.handed_off - before
