"""A limit of time for all calls of a thread or task: the end of the budget of the message that it handles. Pure.

Consumers set it around a handler. Calls take it as their deadline and send the remaining time to the server, so that no work goes
on for a message after its lease or expiry. Times are those of the client's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NO_LIMIT = float("inf")
_limit: ContextVar[Callable[[], float] | None] = ContextVar("turtlemq_time_limit", default=None)


def time_limit() -> float:
    """The time at which calls made here end at the latest; infinite without a limit."""
    limit = _limit.get()
    return NO_LIMIT if limit is None else limit()


@contextmanager
def limited(limit: Callable[[], float]) -> Iterator[None]:
    """Limit the calls made inside. `limit` is asked at each call: leases are extended. An outer limit stays in force.

    >>> with limited(lambda: 10.0), limited(lambda: 20.0):
    ...     time_limit()
    10.0
    """
    outer = _limit.get()
    token = _limit.set(limit if outer is None else lambda: min(limit(), outer()))
    try:
        yield
    finally:
        _limit.reset(token)
