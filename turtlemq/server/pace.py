"""The pace of storing: how long a request to store messages would take, from the work that waits and its rate lately. Pure.

Work is measured in bytes, and a small request counts as SMALL_BYTES: it takes as long. A server with too much work refuses at
once those requests whose callers would have gone before their answer; so it answers the others in time.
"""

from __future__ import annotations

from collections import deque

from turtlemq.server.errors import Overloaded

SMALL_BYTES = 8 << 10
INTERVAL_S = 0.05  # of one measurement; shorter times of work are not measured
RATE_MIN = 20e6  # bytes a second at least: a rate that was measured while little waited is too low
INTERVALS, COMMITS = 20, 64  # the last ones count
LOW_SHARE = 0.5  # a request of low priority is refused once it would take this part of its time


def work_of(size: int) -> int:
    """The work of a request of so many bytes."""
    return max(SMALL_BYTES, size)


class Pace:
    """Work under way, the rates of the last intervals, and the times of the last commits. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.waiting = 0  # bytes of requests that are not answered
        self._done, self._since = 0, 0.0  # in this interval
        self._rates: deque[float] = deque(maxlen=INTERVALS)
        self._commits: deque[float] = deque(maxlen=COMMITS)
        self._commit_p95_s, self._noted = 0.0, 0

    def begin(self, size: int, now: float) -> int:
        """Count a request of so many bytes. Returns its work, for `end`."""
        work = work_of(size)
        if not self.waiting:
            self._done, self._since = 0, now
        self.waiting += work
        return work

    def end(self, work: int, now: float) -> None:
        """A request is answered, or has failed."""
        self.waiting -= work
        self._done += work
        if now - self._since >= INTERVAL_S:
            self._rates.append(self._done / (now - self._since))
            self._done, self._since = 0, now

    def committed(self, seconds: float) -> None:
        """Note the time of a commit."""
        self._commits.append(seconds)
        self._noted += 1
        if self._noted % 4 == 1:  # sorting costs 3 µs
            self._commit_p95_s = sorted(self._commits)[int(len(self._commits) * 0.95)]

    def expected_s(self) -> float:
        """How long a request would take that comes now."""
        return self.waiting / max(RATE_MIN, *self._rates, 0.0) + self._commit_p95_s

    def refuse_late(self, left_s: float, is_low: bool = False, own: int = 0) -> None:
        """Raise `Overloaded` if a request that has so much time left would not be answered within it. The only request is never
        refused: it shows whether a slow disk is fast again. `own`: its work, if it was counted already."""
        if self.waiting <= own:
            return
        expected_s = self.expected_s()
        if expected_s > (left_s * LOW_SHARE if is_low else left_s):
            raise Overloaded(
                f"storing takes about {1000 * expected_s:,.0f} ms now, and the request has {1000 * left_s:,.0f} ms"
                f"{', of which low priority may use half' if is_low else ''}; nothing was stored",
                retry_after_ms=max(1, round(1000 * expected_s)),
            )
