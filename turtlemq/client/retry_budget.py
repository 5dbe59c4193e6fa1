"""A budget of retries for all calls of a client, so that refusals of an overloaded server do not multiply its load. Pure.

Time is an argument, and so is the lock of clients with threads. Figures are kept in slots of a second: each operation is O(1).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

WINDOW_S = 10
RETRIES = 10  # in a window, beside those for calls
PER_CALL = 0.2  # retries more, for each first try in the window
PROBE_S = 0.1  # the longest pause of a sender while another one probes
_SLOTS = WINDOW_S + 1  # the present second is not over


class RetryBudget:
    """Allows `retries` and a fifth of the first tries in a sliding window of 10 s.

    >>> budget = RetryBudget(retries=1)
    >>> for _ in range(5):
    ...     budget.call(0.0)
    >>> [budget.take(0.0) for _ in range(3)], budget.take(11.0)
    ([True, True, False], True)
    """

    def __init__(self, retries: int = RETRIES, lock: AbstractContextManager[Any] | None = None) -> None:
        """`lock`: for a client with threads."""
        self._retries = retries
        self._lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock
        self._second = 0  # of the newest slot
        self._calls, self._taken = [0] * _SLOTS, [0] * _SLOTS
        self._left = float(retries)
        self._is_probed = False

    def call(self, now_s: float) -> None:
        """Count the first try of a call."""
        with self._lock:
            self._calls[self._slot(now_s)] += 1
            self._left += PER_CALL

    def take(self, now_s: float) -> bool:
        """Take a retry out of the budget, if there is one."""
        with self._lock:
            slot = self._slot(now_s)
            if self._left < 1 - 1e-9:
                return False
            self._taken[slot] += 1
            self._left -= 1
            return True

    def is_empty(self, now_s: float) -> bool:
        """Whether there is no retry left."""
        with self._lock:
            self._slot(now_s)
            return self._left < 1 - 1e-9

    def begin_probe(self) -> bool:
        """Take the right to send while the budget is empty: one request at a time. `end_probe` gives it back."""
        with self._lock:
            if self._is_probed:
                return False
            self._is_probed = True
            return True

    def end_probe(self) -> None:
        """Give the right back that `begin_probe` gave."""
        self._is_probed = False

    def reset(self, lock: AbstractContextManager[Any]) -> None:
        """In a forked child: the old lock may be held by a thread that the child lacks."""
        self._lock, self._is_probed = lock, False

    def _slot(self, now_s: float) -> int:
        """The slot of this second. Empties those of seconds that have left the window."""
        second = int(now_s)
        if second > self._second:
            for passed in range(max(self._second + 1, second - _SLOTS + 1), second + 1):
                self._calls[passed % _SLOTS] = self._taken[passed % _SLOTS] = 0
            self._second = second
            self._left = self._retries + PER_CALL * sum(self._calls) - sum(self._taken)
        return self._second % _SLOTS


class Allowance:
    """The tries that a budget allows one call. `empty`: the rule for a call without a retry.

    give up: the call ends with its error. go on: for loops that send one request at a time. probe: go on as soon as no other
    request does so; with an empty budget, first tries do likewise.
    """

    def __init__(
        self, budget: RetryBudget | None, empty: Literal["give up", "go on", "probe"], random: Callable[[], float]
    ) -> None:
        self._budget, self._empty, self._random = budget, empty, random
        self._is_counted = self._is_probe = False

    def pause_s(self, now_s: float, is_first: bool, is_free: bool) -> float | None:
        """Seconds until to ask again; 0: send now; None: give up. `is_free`: the last try was no work for the server."""
        budget = self._budget
        if budget is None or self._is_probe:
            return 0.0
        if is_first:
            if not self._is_counted:
                budget.call(now_s)
                self._is_counted = True
            if self._empty != "probe" or not budget.is_empty(now_s):
                return 0.0
        elif is_free or budget.take(now_s) or self._empty == "go on":
            return 0.0
        elif self._empty == "give up":
            return None
        self._is_probe = budget.begin_probe()
        return 0.0 if self._is_probe else PROBE_S * (1 + self._random()) / 2

    def end(self) -> None:
        """The call has ended."""
        if self._is_probe and self._budget is not None:
            self._budget.end_probe()
