"""A clock that tests can set, for processes with this folder in PYTHONPATH and a file of 8 bytes in CLOCK_FILE.

The file holds nanoseconds, which are added to the wall clock; other clocks stay. timerfd is told the true time. A clock that is
set does not ring a timer, as the kernel's would: the next one is right again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from typing import Any


def _set_up(file: str) -> None:
    with open(file, "rb") as opened:
        shared = mmap.mmap(opened.fileno(), 8, prot=mmap.PROT_READ)
    true_ns, true_clock, true_attribute = time.time_ns, time.clock_gettime, ctypes.CDLL.__getattr__

    def ahead_ns() -> int:
        (ns,) = struct.unpack("<q", shared)
        return int(ns)

    def time_ns() -> int:
        return true_ns() + ahead_ns()

    def seconds() -> float:
        return time_ns() / 1e9

    def clock_gettime(clock: int) -> float:
        return true_clock(clock) + (ahead_ns() / 1e9 if clock == time.CLOCK_REALTIME else 0)

    def attribute(library: ctypes.CDLL, name: str) -> Any:
        function = true_attribute(library, name)
        if name != "timerfd_settime":
            return function

        def settime(fd: int, flags: int, spec: Any, old: Any) -> int:
            at = spec._obj
            ns = max(1, at.at_s * 10**9 + at.at_ns - ahead_ns())
            at.at_s, at.at_ns = divmod(ns, 10**9)
            return int(function(fd, flags, spec, old))

        return settime

    time.time_ns, time.time, time.clock_gettime = time_ns, seconds, clock_gettime
    ctypes.CDLL.__getattr__ = attribute  # type: ignore[method-assign]


if os.environ.get("CLOCK_FILE"):
    _set_up(os.environ["CLOCK_FILE"])
