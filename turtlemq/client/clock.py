"""The clock of the client: seconds that count while the machine is suspended, too.

`time.monotonic` stands still during a suspend on Linux, so that a lease would seem to last after the server has ended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def _boot_time_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def choose(best: Callable[[], float]) -> Callable[[], float]:
    """A clock that this system has: the best one, or `time.monotonic`."""
    try:
        return best if best() > 0 else time.monotonic
    except (AttributeError, OSError):
        return time.monotonic


now_s = choose(_boot_time_s)
