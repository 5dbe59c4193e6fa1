"""When each topic wants to be looked at: one time a topic, the earliest first. Pure."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_SLACK = 64  # entries that do not count any more, beyond as many as do


class WakeQueue:
    """A heap of (when, topic) in which only the last time that was put for a topic counts. O(log topics) each.

    >>> queue = WakeQueue()
    >>> queue.schedule("a", 30), queue.schedule("b", 10), queue.schedule("a", 20)
    (None, None, None)
    >>> queue.first, sorted(queue.due(20)), queue.first
    (10, ['a', 'b'], 30)
    >>> queue.due(30), queue.first
    (set(), None)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._when: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> int | None:
        """The earliest time, at which there may be nothing to do; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def schedule(self, topic: str, when_ms: int | None) -> None:
        """This time counts from now on; None: none does."""
        if when_ms is None:
            self._when.pop(topic, None)
        elif self._when.get(topic) != when_ms:
            self._when[topic] = when_ms
            heappush(self._heap, (when_ms, topic))
            if len(self._heap) > 2 * len(self._when) + _SLACK:
                self._heap = [(when, name) for name, when in self._when.items()]
                heapify(self._heap)

    def schedule_earlier(self, topic: str, when_ms: int) -> None:
        """The same, unless an earlier time counts."""
        if when_ms < self._when.get(topic, when_ms + 1):
            self.schedule(topic, when_ms)

    def due(self, now_ms: int) -> set[str]:
        """Topics whose time has come. They have none then."""
        found: set[str] = set()
        while self._heap and self._heap[0][0] <= now_ms:
            when, topic = heappop(self._heap)
            if self._when.get(topic) == when:
                del self._when[topic]
                found.add(topic)
        return found
