"""Retries of one group that wait in memory: by ready offset, ordered by time until their back-off is over, then by priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from turtlemq.model import I64, Priority

SORTED_MAX = 4_096  # due retries that one fetch sorts by priority: 2 µs each
_NORMAL = int(Priority.NORMAL)


@dataclass(slots=True)
class Retry:
    """A message that waits in memory for its next delivery."""

    when_ms: int
    attempt: int  # number of the next delivery
    error: str


Retries = list[tuple[int, Retry]]  # by ready offset


class RetryQueue(dict[int, Retry]):
    """Retries by ready offset. An entry may be replaced or deleted at any time: the places in the order that it leaves behind are
    found to be outdated when their turn comes."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[tuple[int, int]] = []  # heap of (when, offset)
        self._due: dict[int, deque[tuple[int, int]]] = {}  # by priority: the same of those whose back-off is over
        self._sorted_ms = 0  # the time of the last sort
        self._taken: set[int] = set()  # offsets that `take` gave; an entry may have two equal places

    def add(self, offset: int, retry: Retry) -> None:
        """Deliver the message at a ready offset again when its back-off is over."""
        self[offset] = retry
        heappush(self._times, (retry.when_ms, offset))

    def has_due(self, now_ms: int) -> bool:
        """Whether a back-off is over. May be true for a retry that is gone."""
        self._follow_clock(now_ms)
        return bool(self._due) or (bool(self._times) and self._times[0][0] <= now_ms)

    def sort_due(self, now_ms: int, levels_at: Callable[[I64], I64] | None) -> None:
        """Sort those whose back-off is over by priority, the next SORTED_MAX of them. `levels_at`: the priorities of documents at
        rising offsets; None: all are normal."""
        self._follow_clock(now_ms)
        self._sorted_ms = now_ms
        due: list[tuple[int, int]] = []
        while self._times and self._times[0][0] <= now_ms and len(due) < SORTED_MAX:
            place = heappop(self._times)
            if self._holds(place):
                due.append(place)
        if not due:
            return
        levels = dict[int, int]()
        if levels_at is not None:
            offsets = np.unique([offset for _, offset in due])
            levels = dict(zip(offsets.tolist(), levels_at(offsets).tolist(), strict=True))
        for place in due:
            self._due.setdefault(levels.get(place[1], _NORMAL), deque()).append(place)

    def due(self, level: int) -> int:
        """How many retries of a priority `take` may find, at most."""
        return len(self._due.get(level, ()))

    def oldest_due(self, level: int) -> int | None:
        """Since when the first retry of a priority is due; None: there is none."""
        self._drop_outdated(level)
        return self._due[level][0][0] if level in self._due else None

    def take(self, level: int, count: int) -> Retries:
        """Up to `count` sorted retries of a priority. They stay entries until the caller gives them to `remove` or `put_back`, so
        that a checkpoint in between knows them."""
        taken: Retries = []
        places = self._due.get(level, deque())
        while places and len(taken) < count:
            place = places.popleft()
            if self._holds(place) and place[1] not in self._taken:
                self._taken.add(place[1])
                taken.append((place[1], self[place[1]]))
        if not places:
            self._due.pop(level, None)
        return taken

    def put_back(self, retries: Sequence[tuple[int, Retry]]) -> None:
        """Retries that `take` gave were not delivered: they stay due."""
        for offset, retry in retries:
            self._taken.discard(offset)
            heappush(self._times, (retry.when_ms, offset))

    def remove(self, retries: Sequence[tuple[int, Retry]]) -> None:
        """Retries that `take` gave were delivered."""
        for offset, _ in retries:
            self._taken.discard(offset)
            del self[offset]

    def next_time(self, now_ms: int) -> int | None:
        """When the next back-off is over; None if the first one is over already, or there is none."""
        self._follow_clock(now_ms)
        for level in tuple(self._due):
            self._drop_outdated(level)
        while self._times and not self._holds(self._times[0]):
            heappop(self._times)
        return self._times[0][0] if self._times and not self._due and self._times[0][0] > now_ms else None

    def _follow_clock(self, now_ms: int) -> None:
        """The clock was set back: sorted retries may not be due any more."""
        if now_ms < self._sorted_ms:
            self._sorted_ms = now_ms
            for place in (place for places in self._due.values() for place in places):
                heappush(self._times, place)
            self._due.clear()

    def _drop_outdated(self, level: int) -> None:
        places = self._due.get(level, deque())
        while places and not self._holds(places[0]):
            places.popleft()
        if not places:
            self._due.pop(level, None)

    def _holds(self, place: tuple[int, int]) -> bool:
        retry = self.get(place[1])
        return retry is not None and retry.when_ms == place[0]
