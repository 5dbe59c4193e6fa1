"""Time and waiting: the engine is ticked when it asks for it, and long polls are answered the moment something is ready.

One thread: the event loop's. A timer stands at the time that the last tick named; whatever changes the engine calls `stir`, and
the next tick sets it anew. Never early: a tick at `now` hands out only what is due by the clock's own milliseconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import logs
from turtlemq.server.commit import Committer
from turtlemq.server.errors import Overloaded
from turtlemq.server.fair_turns import FairTurns
from turtlemq.server.metrics.meter import Meter
from turtlemq.server.rate_limit import Flow
from turtlemq.server.timerfd import WallClockTimer
from turtlemq.topic.topic import Topic

NAP_MS = 1_000  # the longest sleep of the timer, so that a clock that was set is noticed
UNCOMMITTED_MAX = 256 << 20  # bytes of requests that may wait for their commit
HERE_BYTES, HERE_S = 16 << 10, 0.005  # so small a request of the only client is synced on the loop, if that takes no longer


def now_ms() -> int:
    """The clock: whole milliseconds that have passed."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Want:
    """What a consumer asks for."""

    topic: str
    group: str
    count: int
    ttr_ms: int | None = None
    consumer: str = ""
    auto: bool = False


@dataclass(eq=False, slots=True)
class Waiter:
    """A long poll."""

    want: Want
    future: asyncio.Future[Reserved] = field(repr=False)


class Service:
    """The engine, its timer, and those who wait. Serves from `start` to `drain`."""

    def __init__(self, tick_ms: int = 0) -> None:
        self.waiting: dict[str, dict[str, dict[Waiter, None]]] = {}  # by topic and group, the first come first
        self.stopping = False
        self.opened: frozenset[str] = frozenset()  # topics that were there from the start
        self.meter = Meter()
        self.flow = Flow()
        self.turns = FairTurns()
        self.waiters, self.waiters_max = 0, 15_000  # long polls
        self.connections: Callable[[], int] = int  # how many there are; whoever listens knows
        self._engine: Engine | None = None
        self._tick_ms = tick_ms
        self._soon: asyncio.Handle | None = None
        self._alarm: WallClockTimer | None = None
        self._armed = 0.0  # what the engine wanted when it was set: it rings by then, or soon after where `tick_ms` says so
        self._troubled: set[str] = set()
        self._stopped: set[str] = set()  # topics of which it was said that they take no more writes
        self._stirred: set[str] = set()  # topics in which something may have become ready
        self._paused: dict[str, float] = {}  # topics whose rate lets nothing flow, and until when
        self._committer: Committer | None = None
        self._uncommitted = 0  # bytes of requests that wait for their commit
        self._commit_s = 0.001  # how long one takes, about

    @property
    def serving(self) -> bool:
        return self._engine is not None and not self.stopping

    @property
    def engine(self) -> Engine:
        """The engine, while it serves."""
        if self._engine is None:
            raise Unavailable("the server is starting: it reads its files. Try again in a moment.")
        if self.stopping:
            raise Unavailable("the server is stopping.")
        return self._engine

    def start(self, engine: Engine) -> None:
        """Serve with an engine that is open."""
        self._engine, self.opened = engine, frozenset(engine.topics)
        self._committer = Committer(self._landed, self._observe_commit)
        self._alarm = WallClockTimer(self._tick)
        self.serve_waiters_soon()

    def drain(self) -> None:
        """Serve no more: long polls are answered with nothing, and no tick comes."""
        self.stopping = True
        for waiter in [w for groups in self.waiting.values() for queue in groups.values() for w in queue]:
            if not waiter.future.done():
                waiter.future.set_result(Reserved())
        self.waiting.clear()
        if self._soon is not None:
            self._soon.cancel()

    def close(self) -> None:
        """End the threads, once all requests are answered."""
        if self._committer is not None:
            self._committer.close()
        if self._alarm is not None:
            self._alarm.close()

    # Committing

    def admit(self, size: int) -> None:
        """Refuse a request of so many bytes that would wait behind too many others."""
        if self._uncommitted and self._uncommitted + size > UNCOMMITTED_MAX:
            raise Overloaded(
                f"{self._uncommitted:,} bytes wait to be written already; nothing was stored. Try again in a moment.",
                retry_after_ms=max(1, round(2000 * self._commit_s)),
            )

    async def landed(self, topic: Topic, size: int = 0) -> None:
        """Returns when everything that was staged in a topic up to now is durable and visible; raises if it was not stored."""
        assert self._committer is not None, "it serves"
        self._uncommitted += size
        try:
            await self._committer.landed(topic, here=size <= HERE_BYTES and self._commit_s < HERE_S and self.connections() == 1)
        finally:
            self._uncommitted -= size

    def _landed(self, topic: Topic) -> None:
        if topic.stopped is not None and topic.name not in self._stopped:
            self._stopped.add(topic.name)
            logs.error("topic_stopped", topic=topic.name, error=topic.stopped)
        if self._engine is not None and self._engine.topics.get(topic.name) is topic:
            self._engine.changed(topic, now_ms())
            self._tick_if_sooner(self._engine)

    def _observe_commit(self, seconds: float, size: int) -> None:
        self.meter.commit.add(seconds)
        self.meter.commit_bytes.add(size)
        self._commit_s += (seconds - self._commit_s) / 16

    # Time

    def serve_waiters_soon(self, *topics: str) -> None:
        """Tick as soon as the caller is done, and serve the long polls of these topics, or of all, if none is named."""
        self._stirred.update(topics or self.waiting)
        self.tick_soon()

    def tick_soon(self) -> None:
        """Something is to happen at another time now."""
        if self._soon is None and not self.stopping:
            self._soon = asyncio.get_running_loop().call_soon(self._tick)

    def _tick_if_sooner(self, engine: Engine) -> None:
        """Tick only if the engine wants it before the alarm rings. Nothing else has changed."""
        when = engine.next_wake()
        if when is not None and (when < self._armed or when <= now_ms()):
            self.tick_soon()

    def _tick(self) -> None:
        self._soon = None
        if not self.serving:
            return
        now = now_ms()
        begun = time.perf_counter()
        engine = self.engine
        try:
            engine.tick(now)
            self._report_trouble()
            self._stirred |= engine.woken
            self._answer_waiting(now)
        except Exception as error:  # noqa: BLE001 - logged; the next tick may do better
            logs.error("tick_failed", error)
        self.meter.tick.add(time.perf_counter() - begun)
        self._arm(engine.next_wake())

    def _arm(self, when: int | None) -> None:
        """Tick again at `when`, or when a rate lets the next message flow; at once if somebody is to be looked after."""
        exact = time.time_ns() / 1e6
        at = exact + NAP_MS
        self._armed = at if when is None else min(at, when)
        if when is not None:
            at = min(at, max(when, exact + self._tick_ms))
        if self._paused:
            at = min(at, exact + 1000 * (min(self._paused.values()) - time.monotonic()))
        if at <= exact or self._stirred:
            self.tick_soon()
        elif self._alarm is not None:
            self._alarm.at(at)

    def _report_trouble(self) -> None:
        trouble = self.engine.trouble
        for name in trouble.keys() - self._troubled:
            logs.error("topic_in_trouble", topic=name, error=trouble[name])
        for name in self._troubled - trouble.keys():
            logs.info("topic_recovered", topic=name)
        self._troubled = set(trouble)

    # Waiting

    async def fetch(self, want: Want, wait_s: float) -> Reserved:
        """What is ready; if nothing is, what becomes ready within `wait_s`."""
        now = now_ms()
        self.flow.answers.refuse_if_full()
        if not self._knows(want) or self._has_ready(want.topic, want.group, now):
            out = self._reserve(want)
            self._tick_if_sooner(self.engine)
            if len(out):
                return out
        if wait_s <= 0:
            return Reserved()
        if self.waiters >= self.waiters_max:
            raise Overloaded(f"{self.waiters:,} long polls wait already; nothing was fetched", retry_after_ms=1_000)
        return await self._wait(want, wait_s)

    async def _wait(self, want: Want, wait_s: float) -> Reserved:
        loop = asyncio.get_running_loop()
        waiter = Waiter(want, loop.create_future())
        self.waiters += 1
        self.waiting.setdefault(want.topic, {}).setdefault(want.group, {})[waiter] = None
        self._stirred.add(want.topic)
        self.tick_soon()
        timer = loop.call_later(wait_s, _time_is_up, waiter.future)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.give_back(want, waiter.future.result())  # it went away with messages in its hands
            raise
        finally:
            timer.cancel()
            self.waiters -= 1
            self._leave(waiter)

    def _knows(self, want: Want) -> bool:
        """Is there this group already?"""
        return self.engine.topic(want.topic).has_group(want.group)

    def give_back(self, want: Want, out: Reserved) -> None:
        """They come again at once, to whoever is there, and this was no attempt."""
        if len(out) and not want.auto and self.serving:
            self.engine.give_back(want.topic, want.group, out.ids, now_ms(), out.lease_ends)
            self.serve_waiters_soon(want.topic)

    def answer_sent(self, size: int) -> None:
        """An answer of so many bytes was taken, or given up. If answers filled their budget, long polls may be answered again."""
        answers = self.flow.answers
        if answers.full:
            self.serve_waiters_soon()
        answers.give(size)

    def _leave(self, waiter: Waiter) -> None:
        topic, group = waiter.want.topic, waiter.want.group
        groups = self.waiting.get(topic, {})
        queue = groups.get(group, {})
        queue.pop(waiter, None)
        if not queue:
            groups.pop(group, None)
        if not groups:
            self.waiting.pop(topic, None)

    def _reserve(self, want: Want) -> Reserved:
        settings, now = self.engine.topic(want.topic).settings, time.monotonic()
        count = self.flow.room(want.topic, want.group, settings, want.count, now)
        if not count:
            return Reserved()
        out = self.engine.reserve(
            want.topic, want.group, count, now_ms(), ttr_ms=want.ttr_ms, consumer=want.consumer, auto=want.auto
        )
        self.flow.delivered(want.topic, want.group, settings, len(out), now)
        return out

    def _answer_waiting(self, now: int) -> None:
        """Give what is ready to those who wait, the first come first, in topics where something has changed."""
        clock = time.monotonic()
        changed = self._stirred | {topic for topic, until in self._paused.items() if until <= clock}
        self._stirred = set()
        for topic in changed:
            self._paused.pop(topic, None)
            for group, queue in list(self.waiting.get(topic, {}).items()):
                self._answer_queue(topic, group, queue, now)

    def _answer_queue(self, topic: str, group: str, queue: dict[Waiter, None], now: int) -> None:
        while queue and not self.flow.answers.full and self._has_ready(topic, group, now):
            waiter = next(iter(queue))
            if waiter.future.done():  # its time is up, or it has gone: nothing is taken for it, which `auto` could not give back
                self._leave(waiter)
                continue
            try:
                out = self._reserve(waiter.want)
            except (TurtleError, OSError) as error:
                self._leave(waiter)
                waiter.future.set_exception(error)
                continue
            if not len(out):
                if out.more:  # it has passed over what is gone, and goes on with the next tick
                    self._stirred.add(topic)
                return  # else as much is in flight as the topic allows
            self._leave(waiter)
            waiter.future.set_result(out)

    def _has_ready(self, topic: str, name: str, now: int) -> bool:
        """Would a fetch bring anything? O(1)."""
        found = self.engine.topics.get(topic)
        if found is None:
            return False
        clock = time.monotonic()
        if pause := self.flow.pause(topic, name, found.settings, clock):
            self._paused[topic] = min(self._paused.get(topic, math.inf), clock + pause)
            return False
        return found.has_ready(name, now)


def _time_is_up(future: asyncio.Future[Reserved]) -> None:
    if not future.done():
        future.set_result(Reserved())
