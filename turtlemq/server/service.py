"""The loop around the engine: ticks at the times that the engine asks for, commits, and long polls.

Everything runs on the event loop's thread. The timer stands at the time that the last tick named; code that changes the engine
calls `tick_soon` or `answer_polls_soon`, and the next tick sets the timer anew. No message is early: a tick hands off messages
that are due by the wall clock in whole milliseconds.

Fetches are decided in `fetches`, threads that write are in `commit`, rates in `rate_limit`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, LockLost, TurtleError, Unavailable, UnknownTopic, describe
from turtlemq.model import Batch, Damage, Receipt
from turtlemq.server import logs
from turtlemq.server.advance import advance
from turtlemq.server.clients import Clients
from turtlemq.server.clock import VirtualClock, now_ms
from turtlemq.server.commit import Committer
from turtlemq.server.errors import Overloaded
from turtlemq.server.fair_turns import SMALL_BYTES, FairTurns, TenantTurns
from turtlemq.server.fetches import Fetches, in_flight
from turtlemq.server.log_syncs import LogSyncs
from turtlemq.server.long_polls import FetchRequest, LongPoll
from turtlemq.server.metrics.meter import Meter
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.singles import Singles
from turtlemq.server.tenants import Tenants
from turtlemq.server.timerfd import WallClockTimer
from turtlemq.settings import Settings
from turtlemq.topic.topic import Topic

if TYPE_CHECKING:  # a single node loads nothing of replication
    from turtlemq.replica.healing import LeaderCare
    from turtlemq.replica.lead import Lead
    from turtlemq.replica.standby import Standby
    from turtlemq.server.cluster_part import ClusterPart
    from turtlemq.server.routing import Router
    from turtlemq.server.shards.siblings import Siblings

TICK_S = 0.01  # after this time a tick begins with no further topic: requests are served before the next tick
POLLS_S = 0.005  # after this time a tick answers no further long poll; to send the answers takes three times as long
TIMER_MS_MAX = 1_000  # the longest sleep of the timer, so that a change of the clock is noticed
UNCOMMITTED_MAX = 256 << 20  # bytes of requests that may wait for their commit
# A request of the only connection is synced on the event loop, not on a thread, if it is so small and commits are so fast.
INLINE_BYTES, INLINE_S = 16 << 10, 0.005
BEHIND_S = 0.05  # the pause of ticks and producers while required copies are far behind


async def _stop_nothing() -> None: ...


class Service:
    """The engine with its timer, its committer and its long polls. Serves from `start` to `drain`."""

    def __init__(self, tick_ms: int = 0) -> None:
        self.stopping = False
        self.opened: frozenset[str] = frozenset()  # topics that existed at the start
        self.meter = Meter()
        self.flow = FlowControl()
        self.turns = FairTurns()
        self.tenants: Tenants | None = None  # None: the configuration has none
        self.clients = Clients()  # streams and callbacks
        self.polls, self.polls_max = 0, 15_000  # long polls, those included whose answer is about to be sent
        self.connections: Callable[[], int] = int  # the number of open connections; set by `listen`
        self.streams: Callable[[], int] = int  # the number of open connections of gRPC; set by `grpc.site`
        self.failed: LockLost | None = None  # why the process must end
        self.on_failure: Callable[[], object] = int  # called then; set by `run`
        self.on_topic_stopped: Callable[[], object] = int  # called when a sync has failed
        self.stop_listening: Callable[[], Awaitable[None]] = _stop_nothing  # and end requests under way; set by `run`
        self.cluster: ClusterPart | None = None  # None: a single node
        self.lead: Lead | None = None  # the leader's part of replication; None: there is no cluster, or another process leads
        self.standby: Standby | None = None  # this process follows a leader
        self.care: LeaderCare | None = None  # of this leader for all copies
        self.siblings: Siblings | None = None  # the processes that share the topics; None: this one has all
        self.router: Router | None = None  # to these processes
        self.on_damage: Callable[[str, list[Damage]], None] = lambda *_: None  # damage that was met in a topic
        self.clock: VirtualClock | None = None  # None: the wall clock
        self.push: object = None  # callbacks (`push.Push`); None: they are off
        self.ports: frozenset[int] = frozenset()  # on which this process listens; set by `run`
        self.on_start: Callable[[], object] = int  # called when it serves; set by `push`, as the next one
        self.on_drain: list[Callable[[], object]] = []  # called when it stops: nothing more may be fetched
        self.end_streams: Callable[[], Awaitable[None]] = _stop_nothing  # before a leader stops serving; set by `run`
        self.not_serving = "the server is starting: it reads its files. Try again in a moment."
        self.under_way = 0  # requests that a leader works on
        self.forwards = 0  # requests that another process works on
        self._refusal: TurtleError = Unavailable("the server is stopping.")  # of requests, once it stops
        self._engine: Engine | None = None
        self._tick_ms = tick_ms
        self._next_tick: asyncio.Handle | None = None
        self._fresh: set[str] = set()  # topics with new messages that the next tick may hand off
        self._timer: WallClockTimer | None = None
        self._wake_ms = 0.0  # the engine's wish for which the timer was set; it rings then, or up to `tick_ms` later
        self._reported_trouble: set[str] = set()
        self._reported_stopped: set[str] = set()
        self._reported_leftovers: set[str] = set()
        self._fetches: Fetches | None = None  # beside the engine
        self._committer: Committer | None = None
        self._singles = Singles(self._staged)
        self._syncs: LogSyncs | None = None
        self._uncommitted = 0  # bytes of requests that wait for their commit
        self._commit_s = 0.001  # mean time of a commit, exponentially smoothed

    @property
    def serving(self) -> bool:
        return self._engine is not None and not self.stopping

    @property
    def engine(self) -> Engine:
        """The engine. Raises `Unavailable` before it is open and once the server stops."""
        if self._engine is None:
            raise Unavailable(self.not_serving)
        if self.stopping:
            raise self._refusal
        if self._engine.folder.is_lost(now_ms()):
            self._engine.folder.refuse_if_lost()
        return self._engine

    @property
    def fetches(self) -> Fetches:
        """The fetches that are asked and wait. Raises as `engine` does."""
        assert self.engine is not None
        assert self._fetches is not None
        return self._fetches

    def use_virtual_clock(self, engine: Engine, begin_ms: int | None = None) -> None:
        """Run on the virtual clock of the data folder. A new one begins at `begin_ms`, by default the present."""
        self.clock = VirtualClock(engine.door, engine.root, begin_ms)
        self.clock.use()

    def use_tenants(self, tenants: Tenants) -> None:
        """Share decoding, commits, ticks and deliveries among tenants. Call it before `start`."""
        self.tenants, self.turns = tenants, TenantTurns(tenants)

    def start(self, engine: Engine) -> None:
        """Serve with an open engine."""
        self._engine, self.opened, tenants = engine, frozenset(engine.topics), self.tenants
        self._fetches = Fetches(engine, self.flow, tenants)
        self._committer = Committer(self._committed, self._observe_commit, self._singles.stage, tenants)
        if tenants is not None:
            engine.share_ticks(tenants.owner, tenants.weight)
            tenants.count_with(partial(in_flight, engine), engine.topics)
        self._syncs = LogSyncs(engine.door)
        self._timer = WallClockTimer(self._tick)
        self.answer_polls_soon()
        self.on_start()

    def drain(self) -> None:
        """Stop serving: long polls are answered without messages, and there are no more ticks."""
        if not self.stopping:
            for drain in self.on_drain:
                drain()
        self.stopping = True
        if self._fetches is not None:
            self._fetches.end()
        if self._next_tick is not None:
            self._next_tick.cancel()

    def retire(self, refusal: TurtleError) -> None:
        """Stop serving, and refuse requests with this error: another process leads, or will."""
        self._refusal = refusal
        self.drain()

    async def until_idle(self, timeout_s: float) -> None:
        """Wait for the requests under way, or for the end of the time."""
        end = time.monotonic() + timeout_s
        while self.under_way and time.monotonic() < end:  # noqa: ASYNC110 - once in the life of a process
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """End threads and timer. Requires: all requests are answered."""
        if self._committer is not None:
            self._committer.close()
        if self._syncs is not None:
            self._syncs.close()
        if self._timer is not None:
            self._timer.close()
        if self.clock is not None:
            self.clock.leave()

    # Commits

    def admit(self, size: int) -> None:
        """Admission control: refuse a request of `size` bytes if too many bytes wait for their commit."""
        if self._uncommitted and self._uncommitted + size > UNCOMMITTED_MAX:
            raise Overloaded(
                f"{self._uncommitted:,} bytes wait to be written already; nothing was stored. Try again in a moment.",
                retry_after_ms=max(1, round(2000 * self._commit_s)),
            )
        if self.lead is not None and self.lead.is_far_behind():
            text = "required copies are far behind; nothing was stored. Try again in a moment."
            raise Overloaded(text, retry_after_ms=round(1000 * BEHIND_S))

    def throttle(self, topic: str, settings: Settings, client: str, count: int, size: int, is_low: bool = False) -> None:
        """Admit `count` messages of a client, `size` bytes, into a topic, or raise `RateLimited` and admit none."""
        tenants, now = self.tenants, asyncio.get_running_loop().time()
        first = int if tenants is None else partial(tenants.admit, topic, count, size, now)
        self.flow.admit_produced(topic, settings, client, count, now, first, is_low)

    def stored(self, topic: str, count: int, size: int) -> None:
        """Count a request whose messages were stored."""
        self.meter.produce_batch.add(count)
        if self.tenants is not None:
            self.tenants.stored(topic, count, size)

    async def commit(self, topic: Topic, size: int = 0) -> None:
        """Return when all documents staged in a topic so far are durable and visible; raise if they were not stored."""
        assert self._committer is not None, "it serves"
        self._uncommitted += size
        try:
            await self._committer.commit(topic, size <= INLINE_BYTES and self._is_alone())
        finally:
            self._uncommitted -= size

    async def put(self, topic: Topic, batch: Batch, size: int) -> Receipt:
        """Store a plain message (`singles`), together with those of other requests. Returns when it is durable and visible."""
        assert self._committer is not None, "it serves"
        if self._is_alone():
            receipt = self._staged(topic, batch)
            await self.commit(topic, size)
            return receipt
        self._uncommitted += size
        try:
            stored = self._singles.add(topic, batch)
            self._committer.take_soon(topic)
            return await stored
        finally:
            self._uncommitted -= size

    def _staged(self, topic: Topic, batch: Batch) -> Receipt:
        now = now_ms()
        if self.engine.topics.get(topic.name) is not topic:
            raise UnknownTopic(f"topic {topic.name!r} was deleted meanwhile")
        return self.engine.stage(topic.name, batch, now)[1]

    def _is_alone(self) -> bool:
        """Whether a small commit on the event loop delays no other client."""
        if self.connections() != 1 or self._commit_s >= INLINE_S or self.lead is not None:
            return False
        return not self.streams() and not self.clients  # whose deliveries would wait for the disk

    async def synced(self, topic: Topic) -> None:
        """Return when the syncs that requests left out in `Topic.deferring_syncs` are done: on a thread, or on the event loop
        where that delays no other client, as for commits. Raises if one failed."""
        assert self._syncs is not None, "it serves"
        if self._syncs.is_needed(topic):
            seconds = self._syncs.sync_here(topic) if self._is_alone() else None
            if seconds is None:
                await self._syncs.sync(topic)
            else:
                self._note_sync(seconds)

    def _committed(self, topic: Topic) -> None:
        if topic.stopped is not None and topic.name not in self._reported_stopped:
            self._reported_stopped.add(topic.name)
            logs.error("topic_stopped", topic=topic.name, error=topic.stopped)
            self.on_topic_stopped()
        if self._engine is not None and self._engine.topics.get(topic.name) is topic:
            self._engine.changed(topic, now_ms())
            self._fresh.add(topic.name)
            self.tick_if_sooner()

    def _observe_commit(self, seconds: float, size: int) -> None:
        self.meter.commit.add(seconds)
        self.meter.commit_bytes.add(size)
        self.flow.pace.committed(seconds)
        self._note_sync(seconds)

    def _note_sync(self, seconds: float) -> None:
        """Note how long the disk took, for `_is_alone`."""
        self._commit_s += (seconds - self._commit_s) / 16

    # Ticks

    def answer_polls_soon(self, *topics: str) -> None:
        """Tick as soon as the caller is done, and look after the long polls of these topics; of all topics, if none is named."""
        if self._fetches is not None:
            self._fetches.look_after(*topics)
        self.tick_soon()

    def tick_soon(self) -> None:
        """Tick as soon as the caller is done: the engine may want to be called at another time now."""
        if self._next_tick is None and not self.stopping:
            self._next_tick = asyncio.get_running_loop().call_soon(self._tick)

    def tick_if_sooner(self) -> None:
        """Tick if the engine wants it before the timer rings. Requires: no message became ready."""
        when = None if self._engine is None else self._engine.next_wake()
        if when is not None and (when < self._wake_ms or when <= now_ms()):
            self.tick_soon()

    def _tick(self) -> None:
        self._next_tick = None
        self._fresh.clear()
        if not self.serving:
            return
        if self.lead is not None and self.lead.is_far_behind():
            asyncio.get_running_loop().call_later(BEHIND_S, self.tick_soon)
            return
        now = now_ms()
        begun = time.perf_counter()
        late_s = time.time() - self._wake_ms / 1000 if self._wake_ms and self.clock is None else 0.0
        try:
            engine, fetches = self.engine, self.fetches
        except LockLost as error:
            self._fail(error)
            return
        try:
            fetches.tick(now, lambda: time.perf_counter() < begun + TICK_S)
            self._report_trouble()
            answered = time.perf_counter()
            fetches.answer_polls(now_ms(), time.monotonic(), lambda: time.perf_counter() < answered + POLLS_S)
            self.meter.steps.ticked(late_s, begun, answered)
        except Exception as error:  # noqa: BLE001 - logged; the next tick may do better
            logs.error("tick_failed", error)
        self.meter.tick.add(time.perf_counter() - begun)
        self._set_timer(engine.next_wake(), fetches)

    def advance(self, to_ms: int) -> None:
        """Move the virtual clock, and do all work that lies on the way; no request is served meanwhile. Durable. Afterwards, long
        polls get their messages."""
        if self.clock is None:
            raise Conflict("this server runs on the wall clock, which cannot be moved: start it with --virtual-clock")
        engine, fetches, begin = self.engine, self.fetches, now_ms()
        self.clock.move(to_ms)
        advance(engine, fetches, begin, to_ms)
        self._report_trouble()
        self.answer_polls_soon()

    def _fail(self, error: LockLost) -> None:
        """End the process: another one may write to the data folder."""
        logs.error("lock_lost", error=error)
        self.failed = error
        self.on_failure()

    def _set_timer(self, when: int | None, fetches: Fetches) -> None:
        """Tick again at `when`, or when a delivery rate allows the next message; at once if long polls are to be looked after."""
        if self.clock is not None and when is not None:
            when = 0 if when <= self.clock.now_ms else None  # anything later waits for a move of the clock
        exact = time.time_ns() / 1e6
        at = exact - exact % TIMER_MS_MAX + TIMER_MS_MAX  # the same for all ticks until then: the timer need not be set anew
        self._wake_ms = at if when is None else min(at, when)
        if when is not None:
            at = min(at, max(when, exact + self._tick_ms))
        if (clock := fetches.next_clock()) is not None:
            at = min(at, exact + 1000 * (clock - time.monotonic()))
        if at <= exact or fetches.has_changed:
            self.tick_soon()
        elif self._timer is not None:
            self._timer.at(at)

    def _report_trouble(self) -> None:
        trouble, leftovers = self.engine.trouble, self.engine.folder.leftovers
        if not (trouble or leftovers or self._reported_trouble or self._reported_leftovers):
            return  # nearly always
        for name in trouble.keys() - self._reported_trouble:
            foreseen = isinstance(trouble[name], TurtleError | OSError)
            logs.error("topic_in_trouble", None if foreseen else trouble[name], topic=name, error=describe(trouble[name]))
        for name in self._reported_trouble - trouble.keys():
            logs.info("topic_recovered", topic=name)
        self._reported_trouble = set(trouble)
        for path in leftovers.keys() - self._reported_leftovers:
            logs.warning("leftover", path=path, reason=leftovers[path])
        self._reported_leftovers = set(leftovers)

    # Fetches

    def catch_up(self, topic: str) -> None:
        """Hand off due messages whose puts were answered, so that the next request sees them."""
        if self._committer is not None:
            self._committer.report()
        if self._next_tick is not None and topic in self._fresh:
            self._next_tick.cancel()
            self._tick()

    async def fetch(self, fetch: FetchRequest, wait_s: float) -> Reserved:
        """Reserve ready messages; if there are none, wait up to `wait_s` for the first. Raises `Overloaded` if too many wait."""
        self.catch_up(fetch.topic)
        if self.tenants is not None:
            await self.turns.turn(fetch.topic, SMALL_BYTES)
        messages = self.fetches.fetch(fetch, now_ms(), time.monotonic())
        while messages.more:  # so many documents were skipped that others get their turn first
            await self.turns.turn(fetch.topic)
            messages = self.fetches.fetch(fetch, now_ms(), time.monotonic())
        if not messages.idle:
            self.tick_if_sooner()
        if self.tenants is not None:
            self.turns.charge(fetch.topic, messages.bytes)
        if len(messages) or wait_s <= 0:
            return messages
        if self.polls >= self.polls_max:
            raise Overloaded(f"{self.polls:,} long polls wait already; nothing was fetched", retry_after_ms=1_000)
        return await self._wait(fetch, wait_s)

    async def _wait(self, fetch: FetchRequest, wait_s: float) -> Reserved:
        loop = asyncio.get_running_loop()
        fetches, future = self.fetches, loop.create_future()
        poll = LongPoll(fetch, future)
        self.polls += 1
        fetches.wait(poll)
        self.tick_soon()
        timer = loop.call_later(wait_s, poll.end)
        try:
            messages: Reserved = await future
            if len(messages):
                self.meter.steps.woken()
            return messages
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(fetch, future.result())  # the client is gone, with messages reserved for it
            raise
        finally:
            timer.cancel()
            self.polls -= 1
            fetches.leave(poll)

    def is_paused(self, fetch: FetchRequest) -> bool:
        """Whether a fetch gets no messages because its group or its topic is paused."""
        topic = None if self._engine is None else self._engine.topics.get(fetch.topic)
        return topic is not None and topic.view.is_paused(fetch.group)

    def give_back(self, fetch: FetchRequest, messages: Reserved) -> None:
        """Make messages ready again that did not reach their consumer. It does not count as an attempt."""
        if self.serving and self.fetches.give_back(fetch, messages, now_ms()):
            self.tick_soon()

    def answer_sent(self, size: int) -> None:
        """Release the bytes of an answer that was sent or given up. If answers filled their budget, long polls are next."""
        budget = self.flow.answer_bytes
        if budget.full:
            self.answer_polls_soon()
        budget.give(size)
