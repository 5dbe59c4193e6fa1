"""The wake queue of the engine: for each topic the time of its next tick, the earliest first. Pure.

A heap with lazy deletion: a topic that is rescheduled leaves its old entry behind, which is skipped when it comes up.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_SLACK = 64  # outdated entries that are tolerated, beyond as many as there are topics


class WakeQueue:
    """Times by topic. O(log topics) for each change.

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
        """The earliest time, perhaps of an outdated entry; None: no topic is scheduled."""
        return self._heap[0][0] if self._heap else None

    def schedule(self, topic: str, when_ms: int | None) -> None:
        """Set the time of a topic; None: remove it."""
        if when_ms is None:
            self._when.pop(topic, None)
        elif self._when.get(topic) != when_ms:
            self._when[topic] = when_ms
            heappush(self._heap, (when_ms, topic))
            if len(self._heap) > 2 * len(self._when) + _SLACK:
                self._heap = [(when, name) for name, when in self._when.items()]
                heapify(self._heap)

    def schedule_earlier(self, topic: str, when_ms: int) -> None:
        """Set the time of a topic, unless it has an earlier one."""
        if when_ms < self._when.get(topic, when_ms + 1):
            self.schedule(topic, when_ms)

    def due(self, now_ms: int) -> set[str]:
        """Remove and return the topics whose time has come."""
        topics: set[str] = set()
        while self._heap and self._heap[0][0] <= now_ms:
            when, topic = heappop(self._heap)
            if self._when.get(topic) == when:
                del self._when[topic]
                topics.add(topic)
        return topics
