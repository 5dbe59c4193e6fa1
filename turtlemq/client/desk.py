"""The desk of a consumer: fetched messages that are not begun, by priority, and how many there should be. Pure.

A long desk makes urgent messages wait behind others, and holds messages that another consumer could begin at once; with a short
one handlers wait for the network. So it is as long as the handlers need for a tenth of a second.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

AHEAD_S = 0.1  # of work that a desk holds, handlers included
AHEAD_MAX = 25  # messages for each handler at most
NEWEST = 0.1  # the weight of the last handling time in the mean
LOW_OF_4 = 3  # quarters of a desk that low priority may take
LEVELS = {"high": 0, "normal": 1, "low": 2}


T = TypeVar("T")


def desk_size(handlers: int, mean_s: float | None) -> int:
    """How many messages should be in hand, for so many handlers that take `mean_s` for each; None: not known yet.

    >>> [desk_size(4, mean_s) for mean_s in (None, 5, 0.05, 0.01, 0.0001)]
    [4, 4, 8, 40, 100]
    """
    ahead = 1.0 if mean_s is None else min(AHEAD_MAX, max(1.0, AHEAD_S / max(mean_s, 1e-6)))
    return round(handlers * ahead)


def low_most(size: int, handlers: int) -> int:
    """How many messages in hand may be of low priority: three quarters, but as many as there are handlers.

    >>> low_most(100, 4), low_most(4, 4)
    (75, 4)
    """
    return max(min(size, handlers), size - size // 4)


def new_mean(mean_s: float | None, seconds: float) -> float:
    """The mean of handling times after another one, exponentially smoothed."""
    return seconds if mean_s is None else mean_s + NEWEST * (seconds - mean_s)


class Desk(Generic[T]):
    """Messages in the order in which handlers get them: high priority first; within one, as they came."""

    def __init__(self) -> None:
        self._levels: tuple[deque[T], ...] = tuple(deque() for _ in LEVELS)

    def add(self, message: T, priority: str) -> None:
        """Add a message behind those of its priority."""
        self._levels[LEVELS.get(priority, 1)].append(message)

    def take(self) -> T:
        """Remove and return the next message. Requires: there is one."""
        return next(level for level in self._levels if level).popleft()

    def count(self, priority: str) -> int:
        """The number of messages of a priority."""
        return len(self._levels[LEVELS[priority]])

    def __len__(self) -> int:
        return sum(map(len, self._levels))
