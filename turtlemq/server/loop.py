"""Time and waiting: the engine is ticked when it asks for it, and long polls are answered the moment something is ready.

One thread: the event loop's. A timer stands at the time that the last tick named; whatever changes the engine calls `stir`, and
the next tick sets it anew. Never early: a tick at `now` hands out only what is due by the clock's own milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field

from turtlemq.broker.broker import Reserved
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError, Unavailable

log = logging.getLogger("turtlemq")

NAP_MS = 1_000  # the longest sleep of the timer, so that a clock that was set is noticed
GONE = "the consumer went away before it was answered"


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
        self.waiting: dict[tuple[str, str], deque[Waiter]] = {}
        self.stopping = False
        self._engine: Engine | None = None
        self._tick_ms = tick_ms
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._troubled: set[str] = set()

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
        self._engine = engine
        self.stir()

    def drain(self) -> None:
        """Serve no more: long polls are answered with nothing, and no tick comes."""
        self.stopping = True
        for queue in self.waiting.values():
            for waiter in queue:
                if not waiter.future.done():
                    waiter.future.set_result(Reserved())
        self.waiting.clear()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()

    # Time

    def stir(self) -> None:
        """Something changed: tick as soon as the caller is done."""
        if self._soon is None and not self.stopping:
            self._soon = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.serving:
            return
        now = now_ms()
        when: int | None = now + NAP_MS
        try:
            when = self.engine.tick(now)
            self._report_trouble()
            if self._answer_waiting(now):
                self.stir()  # new leases may end before anything else happens
        except Exception:
            log.exception("event=tick_failed")
        self._arm(when)

    def _arm(self, when: int | None) -> None:
        """Tick again at `when`, or when a message somebody waits for is to be tried again."""
        exact = time.time_ns() / 1e6
        times = [exact + NAP_MS, *self._retries(int(exact))]
        if when is not None:
            times.append(max(when, exact + self._tick_ms))
        wait_ms = min(times) - exact
        if wait_ms <= 0:
            self.stir()
        else:
            self._timer = asyncio.get_running_loop().call_later(math.ceil(wait_ms) / 1000, self._tick)

    def _retries(self, now: int) -> list[int]:
        times = []
        for topic, name in self.waiting:
            found = self.engine.topics.get(topic)
            group = found.broker.groups.get(name) if found is not None else None
            if group is not None and (at := group.next_retry(now)) is not None:
                times.append(at)
        return times

    def _report_trouble(self) -> None:
        trouble = self.engine.trouble
        for name in trouble.keys() - self._troubled:
            log.error("event=topic_in_trouble topic=%s error=%s", name, trouble[name])
        self._troubled = set(trouble)

    # Waiting

    async def fetch(self, want: Want, wait_s: float) -> Reserved:
        """What is ready; if nothing is, what becomes ready within `wait_s`."""
        out = self._reserve(want)
        self.stir()
        if len(out) or wait_s <= 0:
            return out
        waiter = Waiter(want, asyncio.get_running_loop().create_future())
        queue = self.waiting.setdefault((want.topic, want.group), deque())
        queue.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(waiter.future)
        except TimeoutError:
            return self._taken(waiter)
        except asyncio.CancelledError:
            self._give_back(waiter)
            raise
        finally:
            self._leave(waiter)

    def _taken(self, waiter: Waiter) -> Reserved:
        """What a waiter was given in the very moment in which its time was up."""
        return waiter.future.result() if waiter.future.done() else Reserved()

    def _give_back(self, waiter: Waiter) -> None:
        """A consumer went away with messages in its hands: they come again at once."""
        out = self._taken(waiter)
        if len(out) and not waiter.want.auto and self.serving:
            acks = ["-" + id_ for id_ in out.ids]
            self.engine.ack(waiter.want.topic, waiter.want.group, acks, now_ms(), retry_delay_ms=0, error=GONE)
            self.stir()

    def _leave(self, waiter: Waiter) -> None:
        key = (waiter.want.topic, waiter.want.group)
        queue = self.waiting.get(key)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self.waiting[key]

    def _reserve(self, want: Want) -> Reserved:
        return self.engine.reserve(
            want.topic, want.group, want.count, now_ms(), ttr_ms=want.ttr_ms, consumer=want.consumer, auto=want.auto
        )

    def _answer_waiting(self, now: int) -> bool:
        """Give what is ready to those who wait, the first come first. Returns whether anybody got something."""
        served = False
        for key in list(self.waiting):
            queue = self.waiting[key]
            while queue and self._has_ready(*key, now):
                waiter = queue[0]
                try:
                    out = self._reserve(waiter.want)
                except (TurtleError, OSError) as error:
                    queue.popleft()
                    if not waiter.future.done():
                        waiter.future.set_exception(error)
                    continue
                if not len(out):
                    served |= out.more  # it has passed over what is gone, and goes on with the next tick
                    break  # else as much is in flight as the topic allows
                queue.popleft()
                waiter.future.set_result(out)
                served = True
            if not queue:
                del self.waiting[key]
        return served

    def _has_ready(self, topic: str, name: str, now: int) -> bool:
        """Would a fetch bring anything? O(1)."""
        found = self.engine.topics.get(topic)
        if found is None:
            return False
        group = found.broker.groups.get(name)
        if group is None:
            return found.broker.ready.next_offset > found.broker.ready.first_offset
        return group.unfetched > 0 or (bool(group.waiting) and group.next_retry(now) is None)
