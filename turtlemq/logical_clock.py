"""A logical clock: numbers that only rise, also if the wall clock is set back, and where two nodes meet. Pure.

A number is a seq (docs/FORMAT.md): milliseconds of a wall clock over a counter, a hybrid logical clock. So numbers tell a time,
and a node that has met a number of another one gives higher ones from then on, even if its own wall clock is behind.

A number lasts: one that came from a clock set to next week would push all later ones into next week. So a number that is more
than AHEAD_MS_MAX ahead of this node's wall clock is refused. docs/decisions/0022-logical-clock.md says where nodes meet.
"""

from __future__ import annotations

from collections import deque

from turtlemq.errors import TurtleError
from turtlemq.model import SEQ_COUNTER_BITS

AHEAD_MS_MAX = 60_000
_TIMES = 8  # of a peer, of which the latest one counts: those that were long under way are old


class PeerAhead(TurtleError):
    """The clock of a peer is too far ahead of this node's: its numbers are not taken."""


def number_at(at_ms: int) -> int:
    """The first number of a millisecond."""
    return at_ms << SEQ_COUNTER_BITS


def time_of(number: int) -> int:
    """The millisecond of a number.

    >>> time_of(number_at(5) - 1), time_of(number_at(5) + 1)
    (4, 5)
    """
    return number >> SEQ_COUNTER_BITS


def next_number(last: int, now_ms: int) -> int:
    """The number that follows `last`: by the wall clock, or the next one of the counter where that is more.

    >>> next_number(number_at(5), 7) == number_at(7), next_number(number_at(5), 3) == number_at(5) + 1
    (True, True)
    """
    return max(last + 1, now_ms << SEQ_COUNTER_BITS)


class LogicalClock:
    """The clock of one node.

    >>> clock = LogicalClock()
    >>> first = clock.tick(now_ms=1_000)
    >>> second = clock.merge(number_at(1_500), now_ms=1_001)
    >>> third = clock.tick(now_ms=1_002)
    >>> first < second < third, [time_of(number) for number in (first, second, third)]
    (True, [1000, 1500, 1500])
    """

    __slots__ = ("_last",)

    def __init__(self, last: int = -1) -> None:
        """`last`: the highest number that was given or met before; -1: none was."""
        self._last = last

    def now(self) -> int:
        """The highest number so far."""
        return self._last

    def tick(self, now_ms: int) -> int:
        """The number of an event on this node."""
        self._last = next_number(self._last, now_ms)
        return self._last

    def merge(self, peer: int, now_ms: int) -> int:
        """The number of an event that follows one of another node, which has the number `peer`. Raises `PeerAhead`, and takes
        nothing over, if that is too far ahead of the time."""
        if (ahead_ms := time_of(peer) - now_ms) > AHEAD_MS_MAX:
            raise PeerAhead(f"the clock of the peer is {ahead_ms / 1000:,.0f} s ahead, and {AHEAD_MS_MAX // 1000} s are the most")
        self._last = next_number(max(self._last, peer), now_ms)
        return self._last


class PeerTime:
    """The wall clock of another node, from the times that its messages tell. A message under way makes that clock look slower
    than it is, by the time that it took; so the largest lead of the last ones counts.

    >>> peer = PeerTime()
    >>> peer.at(now_ms=1_000)
    1000
    >>> peer.heard(told_ms=5_000, now_ms=1_000), peer.heard(told_ms=5_100, now_ms=1_300), peer.at(now_ms=2_000)
    (None, None, 6000)
    """

    def __init__(self) -> None:
        self._ahead_ms = deque[int](maxlen=_TIMES)

    def heard(self, told_ms: int, now_ms: int) -> None:
        """A message has come, and tells the time of the peer at its sending."""
        self._ahead_ms.append(told_ms - now_ms)

    def at(self, now_ms: int) -> int:
        """The time of the peer now, less the time that its messages take; `now_ms` where it was never heard."""
        return now_ms + max(self._ahead_ms, default=0)
