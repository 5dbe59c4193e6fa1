"""Policies of the Broker, pure functions: back-off of retries, shares of priorities in a fetch, files that retention removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from turtlemq.model import Priority
from turtlemq.settings import Settings

WEIGHTS: dict[int, int] = {int(Priority.HIGH): 6, int(Priority.NORMAL): 3, int(Priority.LOW): 1}


def backoff_ms(settings: Settings, id_: str, attempt: int) -> int:
    """The back-off after the `attempt`-th failed delivery: exponential, with jitter that depends on id and attempt alone.

    >>> plain = Settings(backoff_jitter="none")
    >>> [backoff_ms(plain, "x", n) for n in (1, 2, 3, 30)]
    [1000, 2000, 4000, 3600000]
    >>> 500 <= backoff_ms(Settings(backoff_jitter="equal"), "x", 1) <= 1000
    True
    """
    growth = min(settings.backoff_factor ** min(attempt - 1, 64), 1e12)
    full = min(settings.backoff_base_ms * growth, settings.backoff_max_ms)
    share = xxhash.xxh3_64_intdigest(f"{attempt}:{id_}".encode()) / 2**64
    if settings.backoff_jitter == "equal":
        full = full / 2 + full / 2 * share
    elif settings.backoff_jitter == "full":
        full *= share
    return int(full)


def shares(count: int, credit: dict[int, float]) -> dict[int, int]:
    """How many of `count` messages each priority gets. Fractions are carried over in `credit`, so low is never starved.

    >>> shares(10, {})
    {1: 6, 0: 3, 2: 1}
    >>> credit: dict[int, float] = {}
    >>> [next(level for level, n in shares(1, credit).items() if n) for _ in range(10)].count(2)
    1
    """
    total = sum(WEIGHTS.values())
    for level, weight in WEIGHTS.items():
        credit[level] = credit.get(level, 0.0) + count * weight / total
    given = {level: max(0, int(credit[level] + 1e-9)) for level in WEIGHTS}
    spare = count - sum(given.values())
    for level in sorted(given, key=lambda level: -(credit[level] - given[level])):
        extra = 1 if spare > 0 else 0
        given[level] += extra
        spare -= extra
    for level, n in given.items():
        credit[level] -= n
    return given


@dataclass(frozen=True, slots=True)
class Extent:
    """One file of a log, for retention."""

    bytes: int
    last_ms: int  # time of the newest entry
    settled: bool  # no group needs it


def droppable(extents: Sequence[Extent], settings: Settings, now_ms: int, bytes_total: int) -> int:
    """How many of the oldest files are removed: those that are settled, and too old or above the limit of bytes. The newest file
    always stays.

    >>> old, new = Extent(100, 0, True), Extent(100, 10**12, True)
    >>> droppable([old, old, new], Settings(history_hours=1), 10**12, 300)
    2
    >>> droppable([Extent(100, 0, False), new], Settings(history_hours=1), 10**12, 200)
    0
    """
    count = 0
    for extent in extents[:-1]:
        too_old = now_ms - extent.last_ms > settings.history_hours * 3_600_000
        if not extent.settled or not (too_old or bytes_total > settings.history_bytes):
            break
        bytes_total -= extent.bytes
        count += 1
    return count
