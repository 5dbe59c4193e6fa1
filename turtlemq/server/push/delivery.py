"""Deliveries of one group to its endpoints: reserve, send, settle.

Messages are reserved through `Service.fetch`, as a long poll does it: delivery rates and pauses hold here as well. Nothing is
reserved while no endpoint has room, so an outage of all endpoints costs no attempts. A reservation is for endpoints with the
same terms of delivery; each of its messages goes to one of two endpoints chosen at random, that with fewer under way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from msgspec import UNSET

from turtlemq.broker.failures import NO_RETRY
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError, UnknownTopic
from turtlemq.server import logs
from turtlemq.server.clients import shared_name
from turtlemq.server.clock import now_ms
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.media_types import JSON
from turtlemq.server.outgoing.messages import Delivered, budget_ms, delivered
from turtlemq.server.push.endpoint import Endpoint
from turtlemq.server.push.hosts import Refused
from turtlemq.server.push.policy import Verdict, choose, classify, error_of
from turtlemq.server.push.sender import Answer, Lost, NoAnswer, Sender, Unreachable
from turtlemq.server.push.signature import field_value, header_fields, signed_fields, webhook_id
from turtlemq.server.service import Service

WAIT_S = 20.0  # of a fetch for messages
LEASE_S = 10.0  # that a lease lasts longer than the time for an answer
TROUBLE_S = 1.0  # before another try, after a fetch was refused
FETCH_MAX = 256  # messages of one fetch
CLIENT_GONE = "client gone"
Key = tuple[bool, float]  # of endpoints that can share a fetch: at most once, timeout


class Slots(Protocol):
    """Deliveries under way in the whole server, and their figures."""

    def free(self) -> int: ...

    def begun(self) -> None: ...

    def ended(self, verdict: Verdict | None, seconds: float) -> None: ...

    def learned(self, endpoint: Endpoint) -> None: ...


class InHand:
    """A message that is being sent. `lease`: empty if it is settled already (at most once)."""

    __slots__ = ("endpoint", "message", "lease", "task")

    def __init__(self, endpoint: Endpoint, message: Delivered, lease: str) -> None:
        self.endpoint, self.message, self.lease = endpoint, message, lease
        self.task: asyncio.Task[None] | None = None


class GroupDelivery:
    """The deliveries of one group, from `start` to `stop`."""

    def __init__(self, topic: str, group: str, service: Service, sender: Sender, slots: Slots) -> None:
        self.topic, self.group = topic, group
        self.endpoints: list[Endpoint] = []
        self._service, self._sender, self._slots = service, sender, slots
        self._engine: Engine = service.engine  # acks come in after the service has begun to stop
        self._in_hand: dict[InHand, None] = {}
        self._acks: list[tuple[str, str]] = []  # id and lease, until the end of this turn of the event loop
        self._wake = asyncio.Event()
        self._fetching: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._syncs: set[asyncio.Task[None]] = set()
        self._refusal = ""  # of the last fetch, which was logged

    # Endpoints

    def start(self) -> None:
        """Begin to deliver."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, now and later."""
        return not self.endpoints and not self._in_hand and not self._acks

    def changed(self) -> None:
        """An endpoint came, went, or may take more or fewer deliveries: begin anew with the choice."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._wake.set()

    def wake(self) -> None:
        """There may be room."""
        self._wake.set()

    def forsake(self, endpoint: Endpoint) -> None:
        """The client is gone: messages that it holds fail, and go to another client at once."""
        for held in [held for held in self._in_hand if held.endpoint is endpoint]:
            self._settle(held, Verdict("client_gone", 0), CLIENT_GONE)
            self._end(held, Verdict("client_gone"), 0.0)
            assert held.task is not None
            held.task.cancel()

    def drain(self) -> None:
        """Fetch nothing more; deliveries under way go on."""
        for task in (self._running, self._fetching):
            if task is not None:
                task.cancel()

    def stop(self) -> None:
        """Give back messages without an answer, and end all work. No attempt is counted."""
        self.drain()
        self._flush()
        for held in list(self._in_hand):
            if held.lease:
                self._give_back([held.message.id], held.lease)
            self._end(held, None, 0.0)
            assert held.task is not None
            held.task.cancel()
        for task in self._syncs:
            task.cancel()

    # The loop

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            key, usable = self._usable()
            if not usable:
                await self._until_changed()
                continue
            room = sum(endpoint.room(time.monotonic()) for endpoint in usable)
            self._fetching = asyncio.get_running_loop().create_task(self._round(key, min(room, self._slots.free(), FETCH_MAX)))
            try:
                await asyncio.wait([self._fetching])
                if not self._fetching.cancelled() and (error := self._fetching.exception()) is not None:
                    logs.error("push_failed", error, topic=self.topic, group=self.group)
                    await asyncio.sleep(TROUBLE_S)
            finally:
                self._fetching.cancel()
                self._fetching = None

    def _usable(self) -> tuple[Key, list[Endpoint]]:
        """Endpoints with room that share their terms with one that the choice of two has found."""
        now = time.monotonic()
        open_ = [endpoint for endpoint in self.endpoints if endpoint.room(now)] if self._slots.free() else []
        if not open_:
            return (False, 0.0), []
        key = _key(_chosen(open_))
        return key, [endpoint for endpoint in open_ if _key(endpoint) == key]

    async def _until_changed(self) -> None:
        """Wait for room, or for the end of a breaker's pause."""
        now = time.monotonic()
        ends = [endpoint.breaker.until_s - now for endpoint in self.endpoints if endpoint.breaker.is_open]
        soonest = min((end for end in ends if end > 0), default=WAIT_S)
        try:
            async with asyncio.timeout(min(soonest, WAIT_S)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _round(self, key: Key, count: int) -> None:
        """One fetch, and the beginning of its deliveries."""
        at_most_once, timeout_s = key
        lease_ms = round(1000 * (timeout_s + LEASE_S))
        share, names = partial(self._share, key), partial(self._names, key)
        wanted = FetchRequest(self.topic, self.group, count, lease_ms, auto=at_most_once, share=share, names=names)
        try:
            if self._service.lead is not None:
                self._service.lead.check_writable()
            fetched = await self._service.fetch(wanted, WAIT_S)
            if not len(fetched):
                return
            try:
                await self._covered()
            except BaseException:
                self._service.give_back(wanted, fetched)
                raise
        except UnknownTopic:
            await asyncio.sleep(TROUBLE_S)  # it is being deleted, and its clients with it
            return
        except (TurtleError, OSError) as error:
            if self._refusal != str(error):
                self._refusal = str(error)
                logs.warning("push_waits", topic=self.topic, group=self.group, error=error)
            await asyncio.sleep(TROUBLE_S)
            return
        self._refusal = ""
        self._begin(key, delivered(fetched), fetched.lease)

    def _share(self, key: Key) -> float:
        """The largest free share of the endpoints with the same terms."""
        now = time.monotonic()
        return max((endpoint.share(now) for endpoint in self.endpoints if _key(endpoint) == key), default=0.0)

    def _names(self, key: Key) -> str:
        """The consumer of a fetch: the endpoints that share it."""
        return shared_name(endpoint.client for endpoint in self.endpoints if _key(endpoint) == key)

    async def _covered(self) -> None:
        """In a cluster, wait until the required copies know of the delivery, as the answer to a fetch does."""
        lead = self._service.lead
        if lead is not None and lead.options.acks != "local":
            await lead.covered(lead.stream.lsn, WAIT_S)

    def _begin(self, key: Key, messages: Sequence[Delivered], lease: str) -> None:
        """Begin deliveries; give back messages for which there is no room any more."""
        late: list[str] = []
        for message in messages:
            now = time.monotonic()
            usable = [endpoint for endpoint in self.endpoints if _key(endpoint) == key and endpoint.room(now)]
            if not usable and lease:
                late.append(message.id)
                continue
            # A settled message cannot be given back: it is sent to an endpoint without room, if there is one.
            usable = usable or [endpoint for endpoint in self.endpoints if _key(endpoint) == key]
            if usable:
                self._send_soon(InHand(_chosen(usable), message, lease))
        if late:
            self._give_back(late, lease)
            self._service.tick_soon()

    # One delivery

    def _send_soon(self, held: InHand) -> None:
        self._in_hand[held] = None
        held.endpoint.unacked += 1
        self._slots.begun()
        held.task = asyncio.get_running_loop().create_task(self._deliver(held))

    async def _deliver(self, held: InHand) -> None:
        begun = time.perf_counter()
        verdict, error = await self._sent(held)
        if held in self._in_hand:
            self._settle(held, verdict, error)
            held.endpoint.learn(verdict, error, time.monotonic())
            self._end(held, verdict, time.perf_counter() - begun)
            self._slots.learned(held.endpoint)

    async def _sent(self, held: InHand) -> tuple[Verdict, str]:
        """Send a message. Returns the meaning of the answer, and the error to record."""
        endpoint, message = held.endpoint, held.message
        now = now_ms()
        body = body_of(message)
        headers = headers_of(endpoint, message, body, now)
        try:
            answer: Answer = await self._sender.post(endpoint.terms.url, headers, body, endpoint.terms.timeout)
        except Unreachable as error:
            return Verdict("unreachable", self._elsewhere(endpoint)), f"{CLIENT_GONE}: {error}"
        except Lost as error:  # the first time the message comes again at once; one that kills its client waits, and dies at last
            return Verdict("unreachable", 0 if message.attempt == 1 else None), str(error)
        except NoAnswer as error:
            return Verdict("timeout"), str(error)
        except Refused as error:
            return Verdict("unreachable"), str(error)
        except Exception as error:  # noqa: BLE001 - logged; the message comes again
            logs.error("push_failed", error, topic=self.topic, group=self.group)
            return Verdict("failed"), f"{type(error).__name__}"
        verdict = classify(answer.status, answer.retry_after, answer.retry, time.time())
        return verdict, "" if verdict.outcome == "acked" else error_of(verdict, answer.status, answer.body)

    def _elsewhere(self, endpoint: Endpoint) -> int | None:
        """The delay of a message whose client cannot be reached: none if another one can take it."""
        now = time.monotonic()
        return 0 if any(other is not endpoint and other.room(now) for other in self.endpoints) else None

    def _end(self, held: InHand, verdict: Verdict | None, seconds: float) -> None:
        del self._in_hand[held]
        held.endpoint.unacked -= 1
        self._slots.ended(verdict, seconds)
        self._wake.set()

    # Settling

    def _settle(self, held: InHand, verdict: Verdict, error: str) -> None:
        if not held.lease:
            return
        if verdict.outcome == "acked":
            if not self._acks:
                asyncio.get_running_loop().call_soon(self._flush)
            self._acks.append((held.message.id, held.lease))
            return
        delay_ms = NO_RETRY if verdict.outcome == "refused" else verdict.delay_ms
        self._change([f"-{held.message.id}"], [held.lease], delay_ms, error)

    def _flush(self) -> None:
        """Acknowledge all messages of this turn of the event loop together."""
        acks, self._acks = self._acks, []
        if acks:
            self._change([id_ for id_, _ in acks], [lease for _, lease in acks], None, "")

    def _change(self, acks: list[str], leases: list[str], delay_ms: int | None, error: str) -> None:
        def change() -> None:
            opened = self._engine.topic(self.topic)
            with opened.deferring_syncs():
                self._engine.ack(self.topic, self.group, acks, now_ms(), leases=leases, retry_delay_ms=delay_ms, error=error)
            if not self._service.stopping:
                self._service.answer_polls_soon(self.topic)
                if opened.settings.ack_durability == "fsync":
                    self._sync_soon(self._service.synced(opened))

        self._guard(change)

    def _give_back(self, ids: list[str], lease: str) -> None:
        self._guard(lambda: self._engine.give_back(self.topic, self.group, ids, now_ms(), lease))

    def _sync_soon(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._syncs.add(task)
        task.add_done_callback(self._syncs.discard)

    def _guard(self, change: Callable[[], object]) -> None:
        """Change the engine. A change that fails leaves the lease to its end: the message comes again."""
        try:
            change()
        except (TurtleError, OSError) as error:
            logs.warning("push_not_settled", topic=self.topic, group=self.group, error=error)


def _key(endpoint: Endpoint) -> Key:
    return endpoint.terms.at_most_once, endpoint.terms.timeout


def _chosen(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Of two endpoints at random, the one with fewer deliveries under way for its capacity."""
    if len(endpoints) == 1:
        return endpoints[0]
    first, second = random.sample(range(len(endpoints)), 2)
    return endpoints[choose([(endpoint.unacked, endpoint.capacity) for endpoint in endpoints], first, second)]


def body_of(message: Delivered) -> bytes:
    """The body of a callback: that of the message."""
    return bytes(message.body_base64) if message.body is UNSET else bytes(memoryview(message.body))  # type: ignore[arg-type]


def headers_of(endpoint: Endpoint, message: Delivered, body: bytes, now: int) -> dict[str, str]:
    """The header fields of a callback. The lease outlasts the time for an answer, so that or the expiry is the budget."""
    mark = message.headers.get("compression")
    return {
        **header_fields(message.headers),
        **({} if mark is None else {"turtlemq-compression": field_value(mark)}),
        "content-type": "application/octet-stream" if message.body is UNSET else JSON,
        "turtlemq-topic": endpoint.topic,
        "turtlemq-group": endpoint.group,
        "turtlemq-attempt": str(message.attempt),
        "turtlemq-due-ms": str(message.due_ms),
        "turtlemq-budget-ms": str(budget_ms(message, now + round(1000 * endpoint.terms.timeout), now)),
        **signed_fields(endpoint.secrets(now), webhook_id(endpoint.topic, message.id), now // 1000, body),
    }
