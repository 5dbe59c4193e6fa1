"""Due times as requests give them: a delay in seconds or as text, epoch milliseconds, or RFC 3339 text. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta

from turtlemq.errors import InvalidFireAt
from turtlemq.model import SPREAD_MS_MAX

DELAY_S_MAX = 200 * 365 * 86_400
MS_MIN = 10**11  # in March 1973: a smaller number of milliseconds is one of seconds
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = r"^([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|s|m|h|d|w)$"
_EPOCH = datetime.fromtimestamp(0, UTC)
Delay = float | Annotated[str, Meta(pattern=_DURATION)]
Due = Annotated[datetime, Meta(tz=True)]
Spread = Annotated[float, Meta(ge=0, le=SPREAD_MS_MAX / 1000)]
SPREAD_TEXT = f"spread is a number of seconds, 0 to {SPREAD_MS_MAX // 1000:,}"
DELAY_TEXT = 'delay is a number of seconds, 0 or more, or a text such as "90s", "15m", "36h" or "3d"'
DUE_TEXT = 'due is a time with its zone, such as "2030-01-31T08:00:00Z" or "2030-01-31T08:00:00+02:00"'


def seconds_of(delay: float | str) -> float:
    """The seconds of a delay.

    >>> seconds_of(1.5), seconds_of("90s"), seconds_of("1.5h"), seconds_of("250ms"), seconds_of("3d")
    (1.5, 90.0, 5400.0, 0.25, 259200.0)
    """
    if not isinstance(delay, str):
        return delay
    number = re.fullmatch(_DURATION, delay)
    return float("nan") if number is None else float(number[1]) * _UNITS[number[2]]


def ms_of(due: datetime) -> int:
    """A time in epoch milliseconds, rounded up, so that no message is early."""
    age = due - _EPOCH
    return -(-(age.days * 86_400_000_000 + age.seconds * 1_000_000 + age.microseconds) // 1000)


def due_time(
    delay: float | str | None, due_ms: int | None, now_ms: int, i: int | None = None, due: datetime | None = None
) -> int:
    """The due time of a message that gives a time, a delay, or none (now). `i`: its index, for the error."""
    if (due is not None) + (due_ms is not None) + (delay is not None) > 1:
        problem = "it has one of delay, due and due_ms, not several"
    elif due is not None:
        return ms_of(due)
    elif due_ms is not None:
        if due_ms >= MS_MIN or due_ms < 0:  # of the latter, the Index says which times there are
            return due_ms
        problem = f"due_ms {due_ms} looks like seconds; it is in milliseconds: {due_ms}000"
    elif delay is None:
        return now_ms
    elif 0 <= (seconds := seconds_of(delay)) <= DELAY_S_MAX:
        return now_ms + round(seconds * 1000)
    else:
        problem = DELAY_TEXT
    if i is None:
        raise InvalidFireAt(problem)
    raise InvalidFireAt(f"message {i}: {problem}", index=i)
