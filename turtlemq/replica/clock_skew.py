"""The distance of each node's clock from that of the others, as the leader measures it with heartbeats. Pure.

A heartbeat is sent at one time of the leader's clock and acknowledged at another; the standby's clock, told with the
acknowledgement, belongs to a moment between both. So the offset is known up to half of the round trip; of the last ones, the one
with the shortest round trip counts.

With three or more clocks, the median is the reference, and a leader may be wrong itself. With two, none can tell which is right:
the leader's is the reference, as messages were scheduled by it.

>>> clocks = Clocks("a")
>>> clocks.heard("b", sent_ms=1_000, took_ms=4, told_ms=1_702)
>>> clocks.skews()
{'a': Skew(ms=0.0, error_ms=0.0), 'b': Skew(ms=700.0, error_ms=2.0)}
>>> clocks.heard("c", sent_ms=1_000, took_ms=4, told_ms=1_712)
>>> skews = clocks.skews()
>>> skews["a"].ms, skews["a"].is_beyond(500), skews["b"].is_beyond(500)
(-700.0, True, False)
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

SAMPLES = 8  # heartbeats of which the best counts


class Skew(NamedTuple):
    """The distance of a clock from the reference, and how wrong this may be."""

    ms: float
    error_ms: float

    def is_beyond(self, limit_ms: float) -> bool:
        """Is the clock certainly wrong by more than this?"""
        return abs(self.ms) - self.error_ms > limit_ms


class Clocks:
    """Clocks of other members, relative to that of this one, `me`."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._samples: dict[str, deque[Skew]] = {}

    def heard(self, member: str, sent_ms: float, took_ms: float, told_ms: float) -> None:
        """A heartbeat, sent at `sent_ms` of this clock, was acknowledged after `took_ms`, at `told_ms` of the member's clock."""
        sample = Skew(told_ms - (sent_ms + took_ms / 2), took_ms / 2)
        self._samples.setdefault(member, deque(maxlen=SAMPLES)).append(sample)

    def forget(self, member: str) -> None:
        """The connection to a member has ended."""
        self._samples.pop(member, None)

    def skews(self) -> dict[str, Skew]:
        """Distances from the reference, of this clock as well."""
        best = {member: min(samples, key=lambda each: each.error_ms) for member, samples in self._samples.items()}
        best[self.me] = Skew(0.0, 0.0)
        reference = median(each.ms for each in best.values()) if len(best) > 2 else 0.0
        return {member: Skew(each.ms - reference, each.error_ms) for member, each in sorted(best.items())}
