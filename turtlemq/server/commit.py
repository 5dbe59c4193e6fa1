"""Group commit: while one group of documents is being written and synced on a thread, requests gather the next.

The engine stages and publishes on the event loop; only `Group.run`, a write and an fdatasync, happens elsewhere. A topic has one
group under way at a time; several topics are synced in parallel. A request is answered when the group that it is in has landed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from turtlemq.errors import TurtleError
from turtlemq.index.writer import Group
from turtlemq.topic import Topic

THREADS = 8  # syncs of several topics go on side by side


class Committer:
    """See the module. `changed` is called on the loop for a topic that has new documents, `observe` with the seconds that each
    commit took and the bytes that it wrote."""

    def __init__(self, changed: Callable[[Topic], None], observe: Callable[[float, int], None]) -> None:
        self._changed, self._observe = changed, observe
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Topic, Group, threading.Event] | None] = SimpleQueue()
        self._soon: set[str] = set()  # topics whose next group is about to be taken
        self._threads = [threading.Thread(target=self._work, name=f"commit-{n}", daemon=True) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    async def landed(self, topic: Topic) -> None:
        """Returns when everything that was staged in a topic up to now is durable and visible; raises if it was not stored."""
        group = topic.index.writer.pending
        if group is None:
            return
        done: asyncio.Future[None] = self._loop.create_future()
        group.then.append(partial(_wake, done))
        self._take_soon(topic)
        await done
        if group.error is not None:
            raise group.error

    def close(self) -> None:
        """End the threads. What was taken before is still written."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _take_soon(self, topic: Topic) -> None:
        """Requests that are read in the same turn of the loop share a group."""
        if topic.name not in self._soon:
            self._soon.add(topic.name)
            self._loop.call_soon(self._take, topic)

    def _take(self, topic: Topic) -> None:
        self._soon.discard(topic.name)
        group = topic.index.writer.take()
        if group is not None:
            ran = threading.Event()
            group.wait = ran.wait
            self._jobs.put((topic, group, ran))

    def _work(self) -> None:
        """A thread's life."""
        while (job := self._jobs.get()) is not None:
            topic, group, ran = job
            start = perf_counter()
            group.run()
            ran.set()
            self._loop.call_soon_threadsafe(self._land, topic, group, perf_counter() - start)

    def _land(self, topic: Topic, group: Group, seconds: float) -> None:
        self._observe(seconds, sum(map(len, group.buffers)))
        try:
            topic.index.writer.land(group)
        except TurtleError:
            pass  # those who wait have heard of it
        self._changed(topic)
        self._take(topic)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # else its request was cancelled
        future.set_result(None)
