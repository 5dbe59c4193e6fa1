"""The load of the engine benchmarks: batches of messages, and an engine that is driven as the server drives it.

Bodies of 100 random bytes; due times at random over one day, which begins a day after the start, so that no message comes due
before a benchmark wants it. Time is simulated: each batch takes a millisecond.
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
_SEAL_S_MAX = 900


def own_id(number: int) -> str:
    """The own id of the n-th message of the producer."""
    return f"order-{number:012d}"


class Load:
    """A generator of batches, the same ones in every run."""

    def __init__(self, batch: int, own: bool = False, first: int = 0, due_to_ms: int = DUE_TO_MS) -> None:
        self.size, self.own_ids, self.next_number, self._due_to_ms = batch, own, first, due_to_ms
        self._random = np.random.default_rng(first)
        self._bodies = [self._random.bytes(BODY_BYTES) for _ in range(batch)]

    def batch(self, *, arrays: bool = False) -> Batch:
        """The next batch. Its columns are lists, as JSON decodes them, or arrays."""
        dues = self._random.integers(DUE_FROM_MS, self._due_to_ms, self.size)
        ids = [own_id(n) for n in range(self.next_number, self.next_number + self.size)] if self.own_ids else None
        self.next_number += self.size
        return Batch(self._bodies, dues if arrays else dues.tolist(), ids)

    def next_batch(self) -> list[Batch]:
        """The next batch in a list, for `append_rate`."""
        return [self.batch()]

    def singles(self, count: int) -> list[Batch]:
        """The next messages, each in its own batch."""
        dues = self._random.integers(DUE_FROM_MS, self._due_to_ms, count).tolist()
        ids = [own_id(n) for n in range(self.next_number, self.next_number + count)] if self.own_ids else [None] * count
        self.next_number += count
        bodies = self._bodies
        return [
            Batch([bodies[i % self.size]], [due], None if id_ is None else [id_])
            for i, (due, id_) in enumerate(zip(dues, ids, strict=True))
        ]


def append_rate(append: Callable[[Batch], object], make: Callable[[], list[Batch]], count: int) -> float:
    """Messages per second through `append`, over `count` messages or more.

    `make` is not counted. It makes some batches at a time, shortly before their appends, so that they are in the caches of the
    processor, like messages that a server has just decoded.
    """
    taken, done = 0.0, 0
    while done < count:
        work = make()
        begin = time.perf_counter()
        for batch in work:
            append(batch)
        taken += time.perf_counter() - begin
        done += sum(map(len, work))
    return done / taken


class SimulatedServer:
    """An engine with one topic and a simulated clock. With `worker`, seals run in another process beside the appends."""

    def __init__(self, folder: str | Path, settings: Settings | None = None, *, worker: bool = False) -> None:
        process: Worker | None = ProcessWorker() if worker else None
        self.engine = Engine.open(Path(folder), worker=process, settings=settings)
        self.topic = self.engine.topic(TOPIC, create=True)
        self.index = self.topic.stores.index
        self.now_ms = START_MS
        self.worker_peak_bytes = 0

    def append(self, batch: Batch) -> Receipt:
        """Store a batch without a sync; the clock advances a millisecond."""
        self.now_ms += 1
        receipt = self.topic.stage(batch, self.now_ms)
        self.index.commit(sync=False)
        return receipt

    def submit(self, batch: Batch) -> Receipt:
        """Store a batch durably."""
        self.now_ms += 1
        return self.engine.submit(TOPIC, batch, self.now_ms)

    def tick(self) -> None:
        """Run the work of a server between requests: due messages and maintenance."""
        self.topic.tick(self.now_ms)
        for process in multiprocessing.active_children():
            try:
                self.worker_peak_bytes = max(self.worker_peak_bytes, probe.anonymous_bytes(process.pid or 0))
            except (OSError, LookupError):  # it has just ended
                continue

    def wait_until_sealed(self) -> None:
        """Wait until all segments but the active one are sealed."""
        until = time.monotonic() + _SEAL_S_MAX
        while self.unsealed:
            if time.monotonic() > until or self.topic.view.unsealable:
                raise RuntimeError(f"segments are not getting sealed: {self.unsealed}, {self.topic.view.unsealable}")
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
        """Hand off a slice of the due messages. Returns their number."""
        before = self.index.counters.handed_off
        self.engine.tick(self.now_ms)
        return self.index.counters.handed_off - before
