"""Long polls: fetches that wait for a message, in queues by topic and group, first come, first served.

Fetches for registered clients, which tell their free share, count as one in the queue: the largest free share is first.

Only the queues live here. `fetches` decides when a waiting fetch is answered, and with what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from turtlemq.broker.results import Reserved


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A consumer's request for up to `count` messages. `auto`: delivery acknowledges, so nothing can be given back. `low`: tells
    how many of low priority it may get when it is answered."""

    topic: str
    group: str
    count: int
    ttr_ms: int | None = None
    consumer: str = ""
    auto: bool = False
    share: Callable[[], float] | None = field(default=None, compare=False)  # of registered clients: the largest free share
    low: Callable[[], int] | None = field(default=None, compare=False)  # how many of low priority it may get
    names: Callable[[], str] | None = field(default=None, compare=False)  # the consumer, where clients come and go meanwhile


class Future(Protocol):
    """The answer of a long poll, as far as it is set here: an `asyncio.Future`, or a simulated one."""

    def done(self) -> bool: ...

    def set_result(self, result: Reserved, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


@dataclass(eq=False, slots=True)
class LongPoll:
    """A fetch that waits. Its future is done when messages were reserved for it, its time is up, or its client is gone."""

    fetch: FetchRequest
    future: Future = field(repr=False)

    def end(self) -> None:
        """Stop waiting: the answer has no messages."""
        if not self.future.done():
            self.future.set_result(Reserved())


Queue = dict[LongPoll, None]  # in order of arrival


class LongPolls:
    """All fetches that wait. Adding, removing and looking up a queue are O(1)."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[str, Queue]] = {}

    @property
    def groups(self) -> Mapping[str, Mapping[str, Queue]]:
        """By topic and group, the queues of all long polls. Read only."""
        return self._queues

    def queues(self, topic: str) -> list[tuple[str, Queue]]:
        """The queues of a topic, each with its group."""
        return list(self._queues.get(topic, {}).items())

    def queue(self, topic: str, group: str) -> Queue:
        """The queue of a group; an empty one if no fetch waits there."""
        return self._queues.get(topic, {}).get(group, {})

    def of_topic(self, topic: str) -> list[LongPoll]:
        """The long polls of a topic."""
        return [poll for _, queue in self.queues(topic) for poll in queue]

    def of_group(self, topic: str, group: str) -> list[LongPoll]:
        """The long polls of a group."""
        return list(self.queue(topic, group))

    def __iter__(self) -> Iterator[LongPoll]:
        return (poll for queues in self._queues.values() for queue in queues.values() for poll in queue)

    def add(self, poll: LongPoll) -> None:
        """Put a long poll at the end of its queue."""
        self._queues.setdefault(poll.fetch.topic, {}).setdefault(poll.fetch.group, {})[poll] = None

    def remove(self, poll: LongPoll) -> None:
        """Remove a long poll, if it is still there."""
        topic, group = poll.fetch.topic, poll.fetch.group
        queues = self._queues.get(topic, {})
        queue = queues.get(group, {})
        queue.pop(poll, None)
        if not queue:
            queues.pop(group, None)
        if not queues:
            self._queues.pop(topic, None)
