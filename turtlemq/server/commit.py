"""Group commit: while one commit group is written and synced on a thread, the documents of further requests gather in the next.

Staging and publishing happen on the event loop; threads only do `CommitGroup.run`, a write and an fdatasync. A topic has at most
one group under way; several topics are synced in parallel. A request is answered when its group has landed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from turtlemq.errors import TurtleError
from turtlemq.fair_queue import FairQueue, Fifo
from turtlemq.index.writer import CommitGroup
from turtlemq.server.tenants import Tenants
from turtlemq.topic.topic import Topic

THREADS = 8  # syncs of several topics go on side by side
COMMIT_BYTES = 32 << 10  # the cost of a sync, as so many bytes; those that were written are charged when it has landed
Job = tuple[Topic, CommitGroup, threading.Lock]  # the lock is released when the group was written


class Committer:
    """Commits staged documents on THREADS threads.

    Calls back on the event loop: `changed` with a topic that has new documents, `observe` with seconds and bytes of each commit,
    `stage` with a topic whose next group is about to be taken.
    """

    def __init__(
        self,
        changed: Callable[[Topic], None],
        observe: Callable[[float, int], None],
        stage: Callable[[Topic], None] = lambda _: None,
        tenants: Tenants | None = None,
    ) -> None:
        self._changed, self._observe, self._stage = changed, observe, stage
        self._under_way: set[Topic] = set()  # topics with a group on a thread, or in the queue
        self._loop = asyncio.get_running_loop()
        # Jobs for which no thread is free
        self._jobs: Fifo[Job] | FairQueue[Job] = Fifo() if tenants is None else FairQueue(tenants.weight)
        self._tenants = tenants
        self._reports: list[tuple[Topic, CommitGroup, float]] = []  # commits that have landed, with the seconds that they took
        self._soon: set[Topic] = set()  # topics whose next group is about to be taken
        self._closed = False
        self._threads = [_Thread(n, self._ran) for n in range(THREADS)]
        self._idle = list(self._threads)
        for thread in self._threads:
            thread.start()

    async def commit(self, topic: Topic, inline: bool = False) -> None:
        """Return when all documents staged in a topic so far are durable and visible; raise if they were not stored.

        With `inline`, the event loop itself writes and syncs, unless another group is under way: no other request is served
        meanwhile.
        """
        group = topic.pending_commit
        if group is None:
            return
        if inline and topic.take_commit() is group:
            start = perf_counter()
            group.run()
            self._publish(topic, group, perf_counter() - start)
        else:
            done: asyncio.Future[None] = self._loop.create_future()
            group.then.append(partial(_wake, done))
            self.take_soon(topic)
            await done
        if group.error is not None:
            raise group.error

    def close(self) -> None:
        """End the threads. Groups that were taken before are still written; closing a topic publishes its last one.

        Requires: no request waits for a commit. From now on no topic is touched here: another thread may close them.
        """
        self._closed = True
        while (job := self._jobs.pop()) is not None:
            _run(job)
        for thread in self._threads:
            thread.give(None)
        for thread in self._threads:
            thread.join()

    def take_soon(self, topic: Topic) -> None:
        """Take the group in the next round of the event loop, so that all requests read in this round share it."""
        if topic not in self._soon:  # the object, not its name: a dropped topic may have been created anew
            self._soon.add(topic)
            self._loop.call_soon(self._take_staged, topic)

    def _take_staged(self, topic: Topic) -> None:
        """Take the group that a request waits for. Another call on this thread may have committed it already."""
        self._take(topic)
        if not self._closed and topic.pending_commit is None:
            self._changed(topic)

    def _take(self, topic: Topic) -> None:
        """Give the pending group of a topic to a thread, or to the queue. Does nothing while a group of it is under way."""
        self._soon.discard(topic)
        if self._closed or topic in self._under_way:
            return
        self._stage(topic)
        group = topic.take_commit()
        if group is None:
            return
        self._under_way.add(topic)
        ran = threading.Lock()
        ran.acquire()
        job = (topic, group, ran)
        group.wait = partial(self._wait, job)  # called at most once
        if self._idle and not self._jobs:
            self._idle.pop().give(job)
            return
        self._jobs.push("" if self._tenants is None else self._tenants.owner(topic.name), job, COMMIT_BYTES)
        self._give_next()

    def _give_next(self) -> None:
        """Give the next job to a thread that has none."""
        if self._idle and (job := self._jobs.pop()) is not None:
            self._idle.pop().give(job)

    def _wait(self, job: Job) -> None:
        """Block the event loop until a job was run. While it blocks, no queued job is given to a thread: run it here."""
        if self._jobs.discard(job):
            self._under_way.discard(job[0])
            self._loop.call_soon(self._report, job[0], job[1], _run(job))
            self.take_soon(job[0])
        job[2].acquire()

    def _ran(self, thread: _Thread, job: Job, seconds: float) -> None:
        """Called on the thread: continue on the event loop."""
        self._loop.call_soon_threadsafe(self._land, thread, job[0], job[1], seconds)

    def _land(self, thread: _Thread, topic: Topic, group: CommitGroup, seconds: float) -> None:
        if self._closed:
            return
        self._publish(topic, group, seconds)
        self._under_way.discard(topic)
        self._idle.append(thread)
        self._take(topic)
        self._give_next()

    def _publish(self, topic: Topic, group: CommitGroup, seconds: float) -> None:
        try:
            topic.land_commit(group)
        except TurtleError:
            pass  # `commit` raises it to every request of the group
        self._reports.append((topic, group, seconds))
        self._loop.call_soon(self.report)  # later, so that waiting requests are answered first

    def report(self) -> None:
        """Tell of all commits that have landed. A fetch that follows one asks for it."""
        reports, self._reports = self._reports, []
        for topic, group, seconds in reports:
            self._report(topic, group, seconds)

    def _report(self, topic: Topic, group: CommitGroup, seconds: float) -> None:
        self._observe(seconds, group.bytes)
        if self._tenants is not None:
            self._jobs.charge(self._tenants.owner(topic.name), group.bytes)
        if not self._closed:
            self._changed(topic)


def _run(job: Job) -> float:
    """Write and sync. Returns the seconds that it took."""
    _, group, ran = job
    start = perf_counter()
    group.run()
    ran.release()
    return perf_counter() - start


class _Thread(threading.Thread):
    """Runs one job after the other. `Committer` prefers the thread that became idle last: its caches are warm."""

    def __init__(self, number: int, done: Callable[[_Thread, Job, float], None]) -> None:
        super().__init__(name=f"commit-{number}", daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.give, self._done = self._jobs.put, done  # giving None ends the thread

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done(self, job, _run(job))
            del job  # frees its bytes before the next job comes


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # else its request was cancelled
        future.set_result(None)
