"""A ring buffer of figures: one row a minute for the last 24 hours, of the server and of its busiest topics, in memory.

It feeds the charts of the dashboard. A ring has ROWS rows of 8 bytes a column, 150 kB; the first TOPICS_MAX topics, the busiest
first, have one each for as long as they exist, so all rings together stay below 8 MB. A restart empties them: figures over longer
times are the task of Prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import numpy as np

from turtlemq.engine import Engine
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.model import I64
from turtlemq.server import logs
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.metrics.labels import busiest
from turtlemq.server.metrics.meter import Meter
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic

ROWS, TOPICS_MAX, INTERVAL_MS = 24 * 60, 50, 60_000
GAUGES = ("sleep", "ready", "reserve", "dead")  # at the end of the interval
COUNTS = ("produced", "delivered", "acked", "failed", "refused")  # in the interval
COLUMNS = ("at_ms", "seconds", *GAUGES, *COUNTS, "scheduler_p99_ms", "consumer_wait_p99_ms")
REFUSALS = ("RATE_LIMITED", "OVERLOADED", "DISK_FULL")  # codes of 429 and 507
_BUCKETS = len(LATENESS_MS) + 1
_SAMPLE = len(GAUGES) + len(COUNTS) + 2 * _BUCKETS  # numbers of a sample: gauges, counters, both histograms


def sample_of(topic: Topic) -> I64:
    """The present figures of a topic, its counters since it was opened. 50 µs."""
    view = topic.view
    stats, tallies = view.stats(oldest=False), view.group_tallies().values()
    counts = (view.totals().produced, *(sum(getattr(tally, name) for tally in tallies) for name in COUNTS[1:-1]), 0)
    return np.array([*(getattr(stats, name) for name in GAUGES), *counts, *view.lateness.counts, *view.wait.counts])


def no_sample() -> I64:
    """The figures of nothing."""
    return np.zeros(_SAMPLE, np.int64)


def row_of(before: I64, after: I64, at_ms: int, seconds: float) -> list[float]:
    """The row between two samples. The later one lacks deleted topics: no count is below 0."""
    grown = np.maximum(after - before, 0)
    first = len(GAUGES) + len(COUNTS)
    late, wait = grown[first : first + _BUCKETS], grown[first + _BUCKETS :]
    counted = (*after[: len(GAUGES)].tolist(), *grown[len(GAUGES) : first].tolist())
    return [at_ms, seconds, *counted, _p99(late), _p99(wait)]


def _p99(counts: I64) -> float:
    histogram = Histogram(LATENESS_MS)
    histogram.counts = counts.tolist()
    found = histogram.quantile(0.99)
    return float("nan") if found is None else round(found, 3)


class Ring:
    """The last ROWS rows. The first row begins where the ring was made."""

    def __init__(self, at_ms: int) -> None:
        self._rows = np.zeros((ROWS, len(COLUMNS)))  # the system gives memory to rows when they are written
        self._count, self._at_ms, self._last = 0, at_ms, no_sample()

    def add(self, sample: I64, at_ms: int) -> None:
        """Add the row from the last sample to this one."""
        self._rows[self._count % ROWS] = self._row(sample, at_ms)
        self._count, self._at_ms, self._last = self._count + 1, at_ms, sample

    def rows(self, after_ms: int, sample: I64, at_ms: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Rows that ended after a time, oldest first, and the one that has not ended, with the present sample."""
        kept = np.roll(self._rows, -self._count, axis=0) if self._count > ROWS else self._rows[: self._count]
        return np.vstack([kept[kept[:, 0] > after_ms], [self._row(sample, at_ms)]])

    def _row(self, sample: I64, at_ms: int) -> list[float]:
        return row_of(self._last, sample, at_ms, max(0, at_ms - self._at_ms) / 1000)


class HistoryRing:
    """The rings of a server. As a cleanup context of aiohttp, it adds a row to each at every full minute."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine: Engine | None = None  # whose figures these are
        self._all = Ring(now_ms())
        self._topics: dict[str, tuple[Topic, Ring]] = {}

    async def __call__(self, _: object) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        yield
        task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep((INTERVAL_MS - now_ms() % INTERVAL_MS) / 1000)
            try:
                if self._service.serving:
                    await self.add(self._service.engine, now_ms())
            except Exception as error:  # noqa: BLE001 - logged; the next minute may do better
                logs.error("history_failed", error)

    async def add(self, engine: Engine, at_ms: int) -> None:
        """Add a row to every ring. O(topics), in slices."""
        self._use(engine, at_ms)
        samples = dict(await in_slices((name, sample_of(topic)) for name, topic in list(engine.topics.items())))
        self._all.add(whole(samples.values(), self._service.meter), at_ms)
        kept = {name: found for name, found in self._topics.items() if engine.topics.get(name) is found[0]}
        new = await busiest(engine, [name for name in samples if name not in kept]) if len(kept) < TOPICS_MAX else []
        for name in new[: TOPICS_MAX - len(kept)]:
            if name in engine.topics:
                kept[name] = engine.topics[name], Ring(at_ms - INTERVAL_MS)
        self._topics = kept
        for name, (_, ring) in kept.items():
            if name in samples:
                ring.add(samples[name], at_ms)

    def _use(self, engine: Engine, at_ms: int) -> None:
        """Counters of another engine begin at 0, and so do rings."""
        if self._engine is not None and engine is not self._engine:
            self._all, self._topics = Ring(at_ms), {}
        self._engine = engine

    async def of_all(self, engine: Engine, after_ms: int) -> dict[str, list[float | None]]:
        """The columns of the whole server."""
        self._use(engine, at_ms := now_ms())
        samples = await in_slices(sample_of(topic) for topic in list(engine.topics.values()))
        return columns(self._all.rows(after_ms, whole(samples, self._service.meter), at_ms))

    def of_topic(self, topic: Topic, after_ms: int) -> dict[str, list[float | None]]:
        """The columns of a topic; of one without a ring, no row."""
        found = self._topics.get(topic.name)
        if found is None or found[0] is not topic:
            return {name: [] for name in COLUMNS}
        return columns(found[1].rows(after_ms, sample_of(topic), now_ms()))


def whole(samples: Iterable[I64], meter: Meter) -> I64:
    """The sum of samples, and the refusals of the server."""
    out = sum(samples, no_sample())
    out[len(GAUGES) + COUNTS.index("refused")] = sum(meter.rejected[code] for code in REFUSALS)
    return out


def columns(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> dict[str, list[float | None]]:
    """Rows by column: whole numbers without a fraction, None for no number."""
    return {name: [_plain(value) for value in rows[:, i].tolist()] for i, name in enumerate(COLUMNS)}


def _plain(value: float) -> float | None:
    return None if value != value else int(value) if value.is_integer() else value
