"""A timer for a time of the wall clock: Linux's timerfd, or the event loop's own timer on other systems.

timerfd is exact to some tens of microseconds, and also rings when the clock is set. The event loop's own timers count whole
milliseconds, which would make a message late by one on average.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import time
from collections.abc import Callable

_REALTIME, _ABSOLUTE, _CANCEL_ON_SET = 0, 1, 2
_MISSED = (BlockingIOError, OSError)  # the timer was set anew before it was read, or the clock was set


class _Spec(ctypes.Structure):
    """struct itimerspec: an interval, here always 0, and the time to ring."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class WallClockTimer:
    """Calls `ring` on the event loop at the time that was set last. A set timer cannot be cancelled, only moved or closed."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring, self._loop = ring, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1
        self._at_ns = 0  # the time that was set last; 0 once it has rung
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        except (AttributeError, OSError, TypeError):
            pass  # not Linux
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    def at(self, when_ms: float) -> None:
        """Ring at this time, in epoch milliseconds, and not earlier."""
        if self._fd >= 0:
            at_ns = max(1, math.ceil(when_ms * 1e6))  # 0 would switch it off
            if at_ns == self._at_ns:
                return
            spec = _Spec(0, 0, at_ns // 10**9, at_ns % 10**9)
            if self._libc.timerfd_settime(self._fd, _ABSOLUTE | _CANCEL_ON_SET, ctypes.byref(spec), None) == 0:
                self._at_ns = at_ns
                return
        if self._timer is not None:
            self._timer.cancel()
        wait_ms = math.ceil(when_ms - time.time_ns() / 1e6)
        self._timer = self._loop.call_later(max(0, wait_ms) / 1000, self._ring)

    def _read(self) -> None:
        self._at_ns = 0
        try:
            os.read(self._fd, 8)
        except _MISSED:
            pass
        self._ring()

    def close(self) -> None:
        """Release the timer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
