"""Goals for lateness (SLO): burn rates, the capacity of consumers, and forecasts of lateness. Pure.

A topic says `lateness_slo {ms, share}`: this share of its messages reaches a consumer at most so long after it is due. The rest
is the error budget. The burn rate says how fast the budget is spent: 1 uses it up exactly; 14.4 uses that of 30 days in two days.

A forecast is a queue seen as a fluid: messages flow in as they come due, and out at the rate that consumers have shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS_MS = {"5m": 300_000, "1h": 3_600_000, "6h": 21_600_000}
STEP_MS = 29_000  # between two samples
LATE_MS_MAX = 86_400_000  # lateness in forecasts at most: a queue that is not served would be late forever
SLOWER = 0.2  # the part of a slower rate that one measurement brings in


@dataclass(frozen=True, slots=True)
class Deliveries:
    """First deliveries since the start, on time and late."""

    on_time: int = 0
    late: int = 0


class BurnWindows:
    """Samples of the counters over the longest window, oldest first, at least STEP_MS apart."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Deliveries]] = deque()

    def add(self, at_ms: int, counted: Deliveries) -> None:
        """Add a sample."""
        samples, longest = self._samples, max(WINDOWS_MS.values())
        if samples and not samples[-1][0] + STEP_MS <= at_ms:
            return
        samples.append((at_ms, counted))
        while len(samples) > 1 and samples[1][0] <= at_ms - longest:
            samples.popleft()

    def rates(self, at_ms: int, now: Deliveries, share: float, overdue: int = 0) -> dict[str, float]:
        """The burn rate of each window that ends now. `overdue`: messages that wait, and are late already. A window begins at the
        newest sample that is as old as the window, or at the oldest one.

        >>> windows = BurnWindows()
        >>> windows.add(0, Deliveries())
        >>> windows.rates(60_000, Deliveries(on_time=90, late=10), 0.99)
        {'5m': 10.0, '1h': 10.0, '6h': 10.0}
        """
        begins = {name: self._at(at_ms - length) for name, length in WINDOWS_MS.items()}
        return {name: burn_rate(now.on_time - was.on_time, now.late - was.late + overdue, share) for name, was in begins.items()}

    def _at(self, at_ms: int) -> Deliveries:
        for when, counted in reversed(self._samples):
            if when <= at_ms:
                return counted
        return self._samples[0][1] if self._samples else Deliveries()


def burn_rate(on_time: int, late: int, share: float) -> float:
    """How fast deliveries spend the error budget; 0 without deliveries.

    >>> burn_rate(99, 1, 0.9), burn_rate(0, 0, 0.9)
    (0.1, 0.0)
    """
    total = on_time + late
    return round(late / total / (1 - share), 6) if total else 0.0


def learned_rate(known_per_s: float | None, measured_per_s: float, is_busy: bool) -> float:
    """The rate at which consumers are able to handle messages, after another measurement. `is_busy`: there were more messages
    than they could take, all the time; else the measurement is only their least. Rises at once, falls slowly.

    >>> learned_rate(None, 5, is_busy=False), learned_rate(10, 5, is_busy=False), learned_rate(10, 5, is_busy=True)
    (5, 10, 9.0)
    """
    if known_per_s is None or measured_per_s >= known_per_s:
        return measured_per_s
    return known_per_s + SLOWER * (measured_per_s - known_per_s) if is_busy else known_per_s


@dataclass(frozen=True, slots=True)
class LatenessForecast:
    """Lateness as it will be: at the end of each bucket, and at its worst. Times are None if no message will be later than the
    goal."""

    late_ms: list[int]
    late_from_ms: int | None  # the beginning of the first bucket in which messages are later than the goal
    worst_ms: int
    worst_at_ms: int | None  # the end of the bucket in which it is worst


def forecast_lateness(
    counts: Sequence[int], from_ms: int, bucket_ms: int, now_ms: int, waiting: int, per_s: float, goal_ms: int
) -> LatenessForecast:
    """Lateness in each bucket of a forecast that begins at `from_ms`, if `waiting` messages are to be handled first, and
    consumers handle `per_s` from `now_ms` on.

    >>> forecast_lateness([0, 120, 0], 0, 60_000, 0, 0, 1.0, 30_000)
    LatenessForecast(late_ms=[0, 60000, 0], late_from_ms=60000, worst_ms=60000, worst_at_ms=120000)
    """
    queue, late_ms = max(0.0, waiting - per_s * max(0, from_ms - now_ms) / 1000), list[int]()
    for i, count in enumerate(counts):
        end_ms = from_ms + (i + 1) * bucket_ms
        queue = max(0.0, queue + count - per_s * min(bucket_ms, max(0, end_ms - now_ms)) / 1000)
        late_ms.append(_lateness(queue, per_s))
    worst_ms = max(late_ms, default=0)
    if worst_ms <= goal_ms:
        return LatenessForecast(late_ms, None, worst_ms, None)
    first = next(i for i, late in enumerate(late_ms) if late > goal_ms)
    return LatenessForecast(late_ms, from_ms + first * bucket_ms, worst_ms, from_ms + (late_ms.index(worst_ms) + 1) * bucket_ms)


def _lateness(queue: float, per_s: float) -> int:
    """The time that a queue takes, in ms. Less than one message is none: a queue of whole messages has not begun."""
    if queue < 1:
        return 0
    return LATE_MS_MAX if per_s <= 0 else min(LATE_MS_MAX, round(1000 * queue / per_s))
