"""`AlarmTimer`: the timer service of a server, on its event loop. Errors of calls are logged, and end no round."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from turtlemq.server import logs
from turtlemq.timing import Job, next_round


class _Alarm:
    """A call to come."""

    def __init__(self, call: Callable[[], object], period_ms: float) -> None:
        self._call, self._period_ms, self._loop = call, period_ms, asyncio.get_running_loop()
        self._due_ms = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, due_ms: float) -> _Alarm:
        self._due_ms, self._handle = due_ms, self._loop.call_at(due_ms / 1000, self._ring)
        return self

    def _ring(self) -> None:
        if self._period_ms:
            self.set(next_round(self._due_ms, self._period_ms, 1000 * self._loop.time()))
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 - logged; the next round may do better
            logs.error("alarm_failed", error)

    def cancel(self) -> None:
        """Do not make the call (again)."""
        if self._handle is not None:
            self._handle.cancel()


class AlarmTimer:
    """A `TimerService` on the running event loop."""

    def after_ms(self, delay_ms: float, call: Callable[[], object]) -> Job:
        """Make a call once, after this time."""
        return _Alarm(call, 0).set(1000 * asyncio.get_running_loop().time() + max(0, delay_ms))

    def every_ms(self, period_ms: float, call: Callable[[], object]) -> Job:
        """Make a call each period, the first time after a random part of it; rounds that were missed are skipped."""
        first_ms = random.random() * period_ms
        return _Alarm(call, period_ms).set(1000 * asyncio.get_running_loop().time() + first_ms)
