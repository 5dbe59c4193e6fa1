"""Counting as the engine works: totals that only rise, and histograms over fixed buckets. Pure.

A histogram is fed a whole batch at a time: a microsecond for a few values, 10 to 50 for a thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from turtlemq import small_batches
from turtlemq.model import I64

LATENESS_MS = (1, 2, 3, 4, 5, 7, 10, 15, 25, 50, 100, 250, 500, 1_000, 5_000, 30_000, 300_000, 3_600_000)


class Histogram:
    """How many values are at most each bound, and one more bucket for those above the last.

    >>> h = Histogram((1, 10))
    >>> h.add(1), h.add_many(np.array([2, 10, 11])), h.counts, h.total, h.count
    (None, None, [1, 2, 1], 24, 4)
    >>> h.quantile(0.5)
    5.5
    """

    __slots__ = ("_array", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self._array = bounds, np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        """One value. 0.3 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_many(self, values: I64) -> None:
        """A batch of values."""
        if len(values) < small_batches.HISTOGRAM:
            for value in values.tolist():
                self.add(value)
            return
        self.total += int(values.sum())
        low, high = bisect_left(self.bounds, values.min()), bisect_left(self.bounds, values.max())
        if low == high:  # what is handed out together has usually waited as long
            self.counts[low] += len(values)
            return
        found = np.bincount(np.searchsorted(self._array, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]

    def merge(self, others: Iterable[Histogram]) -> Histogram:
        """This one and others with the same bounds, as a new one."""
        out = Histogram(self.bounds)
        for one in (self, *others):
            out.counts = [a + b for a, b in zip(out.counts, one.counts, strict=True)]
            out.total += one.total
        return out

    def quantile(self, q: float, since: list[int] | None = None) -> float | None:
        """About how large a value is that the share `q` of all does not exceed; `since`: of those after these counts. None: there
        are none. As Prometheus does it: even within a bucket, and the last bound for what is above all."""
        counts = self.counts if since is None else [new - old for new, old in zip(self.counts, since, strict=True)]
        wanted = q * sum(counts)
        if not wanted:
            return None
        seen = 0
        for i, bound in enumerate(self.bounds):
            if seen + counts[i] >= wanted:
                low = self.bounds[i - 1] if i else 0
                return low + (bound - low) * (wanted - seen) / counts[i]
            seen += counts[i]
        return self.bounds[-1]


@dataclass(slots=True)
class GroupTally:
    """What happened in a group since the topic was opened."""

    delivered: int = 0
    acked: int = 0
    failed: int = 0  # said by the consumer
    timed_out: int = 0  # leases that ended by themselves
    dead: int = 0
