"""The wake queue of the engine: for each topic the time of its next tick, the earliest first. Pure.

A heap with lazy deletion: a topic that is rescheduled leaves its old entry behind, which is skipped when it comes up. Where
topics have owners, those whose time has come wait in a fair queue, so that the topics of one owner do not delay those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from heapq import heapify, heappop, heappush

from turtlemq.fair_queue import FairQueue

_SLACK = 64  # outdated entries that are tolerated, beyond as many as there are topics


class WakeQueue:
    """Times by topic. O(log topics) for each change.

    >>> queue = WakeQueue()
    >>> queue.schedule("a", 30), queue.schedule("b", 10), queue.schedule("a", 20)
    (None, None, None)
    >>> queue.first, sorted(queue.run(20, lambda topic: None, lambda: True)), queue.first
    (10, ['a', 'b'], 30)
    >>> sorted(queue.run(30, lambda topic: None, lambda: True)), queue.first
    ([], None)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # time, number, topic: of equal times the one that was set first
        self._when: dict[str, int] = {}
        self._number = 0
        self._owner_of: Callable[[str], str] = str
        self._due: FairQueue[tuple[int, str]] | None = None  # topics whose time has come, with it; None: they have no owners
        self._due_ms = 0  # the latest time in there

    def share(self, owner_of: Callable[[str], str], weight_of: Callable[[str], float]) -> None:
        """Give turns to owners of topics in proportion to their weights.

        >>> queue = WakeQueue()
        >>> queue.share(lambda topic: topic[0], lambda owner: 1)
        >>> for when, topic in enumerate(["a1", "a2", "a3", "b1"]):
        ...     queue.schedule(topic, when)
        >>> [*(sorted(queue.run(9, lambda _: None, lambda: False)) for _ in range(4))]
        [['a1'], ['b1'], ['a2'], ['a3']]
        """
        self._owner_of, self._due = owner_of, FairQueue(weight_of, 1, self._is_valid)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> int | None:
        """The earliest time, perhaps of an outdated entry; None: no topic is scheduled."""
        if self._due:
            return self._due_ms
        return self._heap[0][0] if self._heap else None

    def schedule(self, topic: str, when_ms: int | None) -> None:
        """Set the time of a topic; None: remove it."""
        if when_ms is None:
            self._when.pop(topic, None)
        elif self._when.get(topic) != when_ms:
            self._when[topic] = when_ms
            self._number += 1
            heappush(self._heap, (when_ms, self._number, topic))
            if len(self._heap) > 2 * len(self._when) + _SLACK:
                self._heap = [(when, self._number, name) for name, when in self._when.items()]
                heapify(self._heap)

    def schedule_earlier(self, topic: str, when_ms: int) -> None:
        """Set the time of a topic, unless it has an earlier one."""
        if when_ms < self._when.get(topic, when_ms + 1):
            self.schedule(topic, when_ms)

    def run(self, now_ms: int, work: Callable[[str], int | None], may_go_on: Callable[[], bool]) -> Set[str]:
        """Give a turn to each topic whose time has come, those that wait longest first. `work` returns when a topic wants its
        next turn; None: never. `may_go_on`: asked before each turn but the first; the topics that are left come first when this
        is called again. Returns the topics that had a turn.

        >>> queue = WakeQueue()
        >>> queue.schedule("a", 10), queue.schedule("b", 20)
        (None, None)
        >>> [*(sorted(queue.run(now, lambda _: 0, lambda: False)) for now in (20, 20, 20, 30))]  # both are always busy
        [['a'], ['b'], ['a'], ['b']]
        """
        wishes: dict[str, int | None] = {}
        while (not wishes or may_go_on()) and (topic := self._pop(now_ms)) is not None:
            wishes[topic] = now_ms if topic in wishes else work(topic)  # at most one turn
        for topic, when_ms in wishes.items():
            if when_ms is not None:
                self.schedule_earlier(topic, max(when_ms, now_ms))  # behind topics whose time has come
        return wishes.keys()

    def _pop(self, now_ms: int) -> str | None:
        """Remove and return the topic that waits longest of those whose time has come; None: there is none."""
        while self._heap and self._heap[0][0] <= now_ms:
            when, _, topic = heappop(self._heap)
            if self._when.get(topic) != when:
                continue
            if self._due is None:
                del self._when[topic]
                return topic
            self._due.push(self._owner_of(topic), (when, topic), 1)
            self._due_ms = now_ms
        found = None if self._due is None else self._due.pop()
        if found is None:
            return None
        del self._when[found[1]]
        return found[1]

    def _is_valid(self, entry: tuple[int, str]) -> bool:
        """Whether an entry is not outdated."""
        return self._when.get(entry[1]) == entry[0]
