"""Long polls: fetches that wait for a message, in queues by topic and group, first come, first served.

Only the queues live here. `service` decides when a waiting fetch is answered, and with what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

from turtlemq.broker.results import Reserved


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A consumer's request for up to `count` messages. `auto`: delivery acknowledges, so nothing can be given back."""

    topic: str
    group: str
    count: int
    ttr_ms: int | None = None
    consumer: str = ""
    auto: bool = False


@dataclass(eq=False, slots=True)
class LongPoll:
    """A fetch that waits. Its future is done when messages were reserved for it, its time is up, or its client is gone."""

    fetch: FetchRequest
    future: asyncio.Future[Reserved] = field(repr=False)

    def end(self) -> None:
        """Stop waiting: the answer has no messages."""
        if not self.future.done():
            self.future.set_result(Reserved())


Queue = dict[LongPoll, None]  # in order of arrival


class LongPolls:
    """All fetches that wait. Adding, removing and looking up a queue are O(1)."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[str, Queue]] = {}

    def topics(self) -> KeysView[str]:
        """Topics that have a long poll."""
        return self._queues.keys()

    def queues(self, topic: str) -> list[tuple[str, Queue]]:
        """The queues of a topic, each with its group."""
        return list(self._queues.get(topic, {}).items())

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
