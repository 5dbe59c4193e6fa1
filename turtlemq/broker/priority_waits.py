"""Waits of messages of high priority in one group, second by second, and the weight that follows from them.

Used only where the topic has a goal for them (`priority.high_p95_ms`). The rule itself is `priorities.weigh`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from turtlemq.broker.priorities import Weight, weigh
from turtlemq.model import I64

WINDOW_S = 5  # the p95 is that of so many seconds
SAMPLES_MIN = 20  # fewer tell no p95
SECOND_MAX = 1_000  # waits of one second that are kept
_LOOKS_MAX = 40  # after a longer silence the weight is back at its base


class HighWaits:
    """The waits of the last seconds. A look is taken once a second, by the first fetch in it."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, list[int]]] = deque()  # rising
        self._looked: int | None = None

    def note(self, waits: Iterable[int], now_ms: int) -> None:
        """Messages were delivered for the first time, after these milliseconds."""
        second = now_ms // 1_000
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, []))
        kept = self._seconds[-1][1]
        kept += list(waits)[: SECOND_MAX - len(kept)]

    def look(self, weight: Weight, goal_ms: float, now_ms: int) -> Weight:
        """The weight in this second."""
        second = now_ms // 1_000
        if self._looked is None or second < self._looked:
            self._looked = second
        for at in range(max(self._looked + 1, second + 1 - _LOOKS_MAX), second + 1):
            weight = weigh(weight, self._p95(at), goal_ms)
        self._looked = second
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()
        return weight

    def _p95(self, second: int) -> float | None:
        """Of the waits in the WINDOW_S seconds before this one."""
        parts = [waits for at, waits in self._seconds if second - WINDOW_S <= at < second]
        waits: I64 = np.array([wait for part in parts for wait in part], np.int64)
        return float(np.quantile(waits, 0.95)) if len(waits) >= SAMPLES_MIN else None
