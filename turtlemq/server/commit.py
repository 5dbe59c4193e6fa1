"""Group commit: while one group of documents is being written and synced on a thread, requests gather the next.

The engine stages and publishes on the event loop; only `Group.run`, a write and an fdatasync, happens elsewhere. A topic has one
group under way at a time; several topics are synced in parallel. A request is answered when the group that it is in has landed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from turtlemq.errors import TurtleError
from turtlemq.index.writer import CommitGroup
from turtlemq.topic.topic import Topic

THREADS = 8  # syncs of several topics go on side by side
Job = tuple[Topic, CommitGroup, threading.Lock]  # the lock is released when it was run


class Committer:
    """See the module. `changed` is called on the loop for a topic that has new documents, `observe` with the seconds that each
    commit took and the bytes that it wrote."""

    def __init__(self, changed: Callable[[Topic], None], observe: Callable[[float, int], None]) -> None:
        self._changed, self._observe = changed, observe
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()  # for which no thread is free
        self._soon: set[Topic] = set()  # topics whose next group is about to be taken
        self._threads = [_Thread(n, self._ran) for n in range(THREADS)]
        self._idle = list(self._threads)
        for thread in self._threads:
            thread.start()

    async def landed(self, topic: Topic, here: bool = False) -> None:
        """Returns when everything that was staged in a topic up to now is durable and visible; raises if it was not stored.
        With `here`, no thread is asked if nothing is under way: everybody else waits meanwhile."""
        group = topic.pending_commit
        if group is None:
            return
        if here and topic.take_commit() is group:
            start = perf_counter()
            group.run()
            self._publish(topic, group, perf_counter() - start)
        else:
            done: asyncio.Future[None] = self._loop.create_future()
            group.then.append(partial(_wake, done))
            self._take_soon(topic)
            await done
        if group.error is not None:
            raise group.error

    def close(self) -> None:
        """End the threads. What was taken before is still written."""
        while self._jobs:
            _run(self._jobs.popleft())
        for thread in self._threads:
            thread.give(None)
        for thread in self._threads:
            thread.join()

    def _take_soon(self, topic: Topic) -> None:
        """Requests that are read in the same turn of the loop share a group."""
        if topic not in self._soon:  # not its name: another topic may have that by now
            self._soon.add(topic)
            self._loop.call_soon(self._take, topic)

    def _take(self, topic: Topic) -> None:
        self._soon.discard(topic)
        group = topic.take_commit()
        if group is None:
            return
        ran = threading.Lock()
        ran.acquire()
        job = (topic, group, ran)
        group.wait = partial(self._wait, job)  # it is waited for once at most
        self._jobs.append(job)
        if self._idle:
            self._idle.pop().give(self._jobs.popleft())

    def _wait(self, job: Job) -> None:
        """On the loop: until a job was run. One that no thread was given yet never would be while the loop waits: do it here."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._loop.call_soon(self._tell, job[0], job[1], _run(job))
        job[2].acquire()

    def _ran(self, thread: _Thread, job: Job, seconds: float) -> None:
        """On the thread: go on with it on the loop."""
        self._loop.call_soon_threadsafe(self._land, thread, job[0], job[1], seconds)

    def _land(self, thread: _Thread, topic: Topic, group: CommitGroup, seconds: float) -> None:
        self._publish(topic, group, seconds)
        self._idle.append(thread)
        self._take(topic)
        if self._jobs and self._idle:
            self._idle.pop().give(self._jobs.popleft())

    def _publish(self, topic: Topic, group: CommitGroup, seconds: float) -> None:
        try:
            topic.land_commit(group)
        except TurtleError:
            pass  # those who wait have heard of it
        self._loop.call_soon(self._tell, topic, group, seconds)  # behind those who were waiting: they are answered first

    def _tell(self, topic: Topic, group: CommitGroup, seconds: float) -> None:
        self._observe(seconds, sum(map(len, group.buffers)))
        self._changed(topic)


def _run(job: Job) -> float:
    """Write and sync. How long it took."""
    _, group, ran = job
    start = perf_counter()
    group.run()
    ran.release()
    return perf_counter() - start


class _Thread(threading.Thread):
    """Runs one job after the other. The one that has rested for the shortest time is given the next: its caches are warm."""

    def __init__(self, number: int, done: Callable[[_Thread, Job, float], None]) -> None:
        super().__init__(name=f"commit-{number}", daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.give, self._done = self._jobs.put, done  # None: there are no more

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done(self, job, _run(job))
            del job  # else its bytes stay until the next one comes


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # else its request was cancelled
        future.set_result(None)
