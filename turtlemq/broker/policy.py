"""Policies of the Broker, pure functions: back-off of retries, files that retention removes. Those of priorities are in
`priorities`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from turtlemq.settings import Settings


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
