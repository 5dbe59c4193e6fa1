"""Syncs of ready logs and journals on threads, for requests that promise durability: cancels, and acks of topics with
`ack_durability = "fsync"`.

A sync takes as long as the disk takes, and the event loop goes on meanwhile. All requests of a topic that wait for the next sync
share it: group commit. Appends to the delay log have a committer of their own (`commit`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import perf_counter

from turtlemq.broker.save import LogSync
from turtlemq.errors import TurtleError
from turtlemq.storage.door import Door
from turtlemq.topic.topic import Topic

THREADS = 4  # syncs of several topics go on side by side


class LogSyncs:
    """The syncs under way, one of each topic at most. Used on the event loop."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._threads = ThreadPoolExecutor(THREADS, "sync")
        self._under_way: dict[Topic, tuple[int, asyncio.Task[None]]] = {}  # with the time when it began
        self._clock = count()  # tells which of two moments was first

    def is_needed(self, topic: Topic) -> bool:
        """Whether an event that was promised to be durable is not yet."""
        return topic.owes_sync or topic in self._under_way

    def sync_here(self, topic: Topic) -> float | None:
        """Make all events of a topic so far durable on the event loop, which serves nothing meanwhile. Returns how many seconds
        it took; None if a sync is under way on a thread. Raises if it failed."""
        if topic in self._under_way:
            return None
        start, sync = perf_counter(), topic.begin_sync()
        sync.run(self._door)
        topic.end_sync(sync)
        return perf_counter() - start

    async def sync(self, topic: Topic) -> None:
        """Return when all events of a topic so far are durable. Raises if a sync failed: the topic accepts no more writes."""
        asked = next(self._clock)
        while True:
            began, task = self._under_way.get(topic) or self._begin(topic)
            try:
                await asyncio.shield(task)  # others may wait for it, too
            except TurtleError:
                if began > asked:
                    raise
            if began > asked:
                return

    def _begin(self, topic: Topic) -> tuple[int, asyncio.Task[None]]:
        task = asyncio.get_running_loop().create_task(self._run(topic, topic.begin_sync()))
        self._under_way[topic] = begun = next(self._clock), task
        return begun

    async def _run(self, topic: Topic, sync: LogSync) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, sync.run, self._door.beside())
        finally:
            del self._under_way[topic]
        topic.end_sync(sync)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
