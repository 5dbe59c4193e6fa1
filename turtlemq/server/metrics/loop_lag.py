"""Measures the event loop: how late its timers ring, and how often something held it longer than its budget.

A timer rings every INTERVAL_S seconds. Its lateness is the lag. Lateness minus the time that the process was ready to run but had
no processor is the time that a callback held the loop: more than BUDGET_S of it is a stall. So a busy machine shows as lag, and
only the server's own work as a stall.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import perf_counter

from turtlemq.histogram import FINE_SECONDS, Histogram

BUDGET_S = 0.05  # the longest time for which the work of one client, topic or timer may keep all others waiting
INTERVAL_S = 0.02  # 5 µs each
_SCHEDSTAT = "/proc/self/schedstat"  # of the main thread, which runs the event loop: time on a processor, time waiting for one


class LoopLag:
    """Lag and stalls of the event loop since the start of the server."""

    def __init__(self) -> None:
        self.lag = Histogram(FINE_SECONDS)
        self.stalls = 0
        self.longest_s = 0.0  # of the stalls since `take_longest`
        self._wanted = self._waited_s = 0.0
        self._schedstat = -1

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure the running event loop inside a `with` block."""
        loop = asyncio.get_running_loop()
        with suppress(FileNotFoundError):  # not on every system: a stall may then be a wait for a processor
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self._waited_s, timer = self._processor_waits_s(), loop.call_later(0, lambda: None)

        def ring() -> None:
            nonlocal timer
            self._ring(perf_counter())
            self._wanted = perf_counter() + INTERVAL_S
            timer = loop.call_later(INTERVAL_S, ring)

        self._wanted = perf_counter()
        ring()
        try:
            yield
        finally:
            timer.cancel()
            self._ring(perf_counter())  # the work since the last time counts as well
            if self._schedstat >= 0:
                os.close(self._schedstat)
                self._schedstat = -1

    def _ring(self, now: float) -> None:
        """The timer rang."""
        late, waited = max(0.0, now - self._wanted), self._processor_waits_s()
        self.lag.add(late)
        held, self._waited_s = late - (waited - self._waited_s), waited
        if held > BUDGET_S:
            self.stalls += 1
            self.longest_s = max(self.longest_s, held)

    def _processor_waits_s(self) -> float:
        """How long the event loop's thread has been ready to run without a processor, since its start."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0

    def take_longest(self) -> float:
        """The longest stall since the last call, in seconds."""
        longest, self.longest_s = self.longest_s, 0.0
        return longest
