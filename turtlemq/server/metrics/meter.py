"""Counters and histograms of the server itself: requests, refusals, batches, commits, ticks, lag of the event loop.

One object, made with the service; the code that does the work adds to it, once for a request or a batch. Counters of the engine
(`turtlemq.histogram`) are not repeated here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from time import perf_counter

from turtlemq.histogram import Histogram

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
FINE_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
MESSAGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
LAG_INTERVAL_S = 0.25


class Meter:
    """All counters and histograms of a server since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self.durations: dict[str, Histogram] = {}  # by route, in seconds, without the wait of a long poll
        self.rejected: Counter[str] = Counter()  # by error code
        self.in_flight = 0
        self.produce_batch = Histogram(MESSAGES)
        self.fetch_batch = Histogram(MESSAGES)
        self.ack_batch = Histogram(MESSAGES)
        self.commit = Histogram(FINE_SECONDS)  # one write and one fdatasync
        self.commit_bytes = Histogram(BYTES)
        self.tick = Histogram(FINE_SECONDS)
        self.lag = Histogram(FINE_SECONDS)  # lateness of a timer of the event loop

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests[method, route, status] += 1
        durations = self.durations.get(route)
        if durations is None:
            durations = self.durations[route] = Histogram(SECONDS)
        durations.add(seconds)

    async def measure_lag(self, _: object) -> AsyncIterator[None]:
        """A cleanup context of aiohttp: measure the lag of the event loop for as long as the application runs."""
        task = asyncio.create_task(self._measure_lag())
        try:
            yield
        finally:
            task.cancel()

    async def _measure_lag(self) -> None:
        while True:
            wanted = perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lag.add(max(0.0, perf_counter() - wanted))
