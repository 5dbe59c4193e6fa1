"""Deliveries on streams: the consumers of a topic and group share one long poll that never ends, and its messages.

A pool fetches as many messages as its members have room for, and shares them out, the member with the largest free share of its
window first. Deliveries that were never written to the socket are given back as the same attempt; those of a lost stream fail.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from turtlemq.errors import TurtleError, Unavailable, UnknownTopic
from turtlemq.server import logs
from turtlemq.server.grpc.connection import UNSENT_MAX, Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.statuses import retry_after_ms
from turtlemq.server.grpc.window import Window
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.outgoing.messages import Delivered, delivered
from turtlemq.server.service import Service, now_ms

FETCH_MAX = 1_000  # messages of one fetch
WAIT_S = 60.0  # of one long poll; the next one follows at once
TROUBLE_S = 1.0  # before another fetch, after one was refused
LOST = "stream lost"
_PASSING = (429, 503)  # status of errors that pass: overload, copies that are away


@dataclass(slots=True)
class Held:
    """A delivery that is not acknowledged."""

    end: int  # where it ends among the bytes of its call
    lease: str
    until_ms: int
    attempt: int
    sent_s: float


@dataclass(eq=False, slots=True)
class Member:
    """A consumer of a topic and group: one registration of a stream."""

    topic: str
    group: str
    call: Call
    window: Window
    send: Callable[[Member, list[Delivered]], list[int]]  # returns where each message ends among the bytes of the call
    refused: Callable[[Member, TurtleError], object]  # it gets no more messages, for this reason
    ttr_ms: int | None = None
    is_auto: bool = False
    name: str = ""
    free: int | None = None  # deliveries that the client can begin now, where it tells
    held: dict[str, Held] = field(default_factory=dict)  # by id

    @property
    def room(self) -> int:
        """How many deliveries it may get now."""
        if self.call.ended or self.call.unsent > UNSENT_MAX // 2:
            return 0
        room = self.window.size - len(self.held)
        return max(0, room if self.free is None else min(room, self.free))

    @property
    def share(self) -> float:
        """The free share of its window."""
        return self.room / self.window.size

    def take(self, messages: list[Delivered], lease: str, now: float) -> None:
        """Deliver messages."""
        ends = self.send(self, messages)
        if not self.is_auto:
            for message, end in zip(messages, ends, strict=True):
                self.held[message.id] = Held(end, lease, message.lease_until_ms, message.attempt, now)
            self.window.fill(len(self.held), now)
        if self.free is not None:
            self.free = max(0, self.free - len(messages))

    def settle(self, ids: list[str], now: float) -> None:
        """Free the places of acknowledged deliveries."""
        count = sum(self.held.pop(id_, None) is not None for id_ in ids)
        self.window.acknowledge(count, now)
        if self.free is not None:
            self.free += count

    def review(self, at_ms: int, now: float) -> None:
        """Free the places of deliveries whose lease has ended, and adapt the window to the age of the oldest."""
        for id_ in [id_ for id_, held in self.held.items() if held.until_ms <= at_ms]:
            del self.held[id_]
        if self.held:
            self.window.review(now - min(held.sent_s for held in self.held.values()), now)


async def release(service: Service, member: Member, is_lost: bool) -> None:
    """End all deliveries of a member. Those that the socket never had are given back, and all if the stream is not lost: they
    come again as the same attempt. Others fail: the first time they come again at once, then after the topic's back-off."""
    held, member.held = member.held, {}
    if not held or not service.serving or member.topic not in service.engine.topics:
        return
    written = member.call.written
    back, failed = defaultdict[str, list[str]](list), defaultdict[tuple[str, bool], list[str]](list)
    for id_, one in held.items():
        if is_lost and one.end <= written:
            failed[one.lease, one.attempt <= 1].append(f"-{id_}")
        else:
            back[one.lease].append(id_)
    engine, topic = service.engine, service.engine.topic(member.topic)
    for lease, ids in back.items():
        engine.give_back(topic.name, member.group, ids, now_ms(), lease)
    with topic.deferring_syncs():
        for (lease, is_first), acks in failed.items():
            pause = 0 if is_first else None
            engine.ack(topic.name, member.group, acks, now_ms(), leases=lease, retry_delay_ms=pause, error=LOST)
    service.answer_polls_soon(topic.name)
    await service.synced(topic)


class ConsumerStream(Protocol):
    """A stream that holds deliveries, as far as a server that stops needs it."""

    @property
    def unacked(self) -> int: ...

    def drain(self, within_ms: int) -> None: ...


Key = tuple[str, str, int | None, bool]


class Pools:
    """All pools of a server, by topic, group and terms of delivery."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.streams: set[ConsumerStream] = set()
        self._pools: dict[Key, _Pool] = {}

    def join(self, member: Member) -> None:
        """Deliver to a member from now on."""
        key = _key(member)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self._context, key, lambda: self._pools.pop(key, None))
        pool.members[member] = None
        pool.wake()

    def leave(self, member: Member) -> None:
        """Deliver no more to a member. The fetch of a pool without members is given back."""
        pool = self._pools.get(_key(member))
        if pool is not None and pool.members.pop(member, 0) is None and not pool.members:
            pool.end()

    def wake(self, member: Member) -> None:
        """A member may have more room."""
        if (pool := self._pools.get(_key(member))) is not None:
            pool.wake()

    def gauges(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By topic and group: unacknowledged deliveries of all streams, and the sum of their windows."""
        out: dict[tuple[str, str], tuple[int, int]] = {}
        for (topic, group, *_), pool in self._pools.items():
            unacked, size = out.get((topic, group), (0, 0))
            held = sum(len(member.held) for member in pool.members)
            out[topic, group] = unacked + held, size + sum(member.window.size for member in pool.members)
        return out

    def members(self) -> list[Member]:
        """All members."""
        return [member for pool in self._pools.values() for member in pool.members]


def _key(member: Member) -> Key:
    return member.topic, member.group, member.ttr_ms, member.is_auto


class _Pool:
    """Members with the same topic, group and terms. Its task fetches while there is room."""

    def __init__(self, context: Context, key: Key, ended: Callable[[], object]) -> None:
        self.members: dict[Member, None] = {}
        self._context, self._key, self._ended = context, key, ended
        self._room = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        self._room.set()

    def end(self) -> None:
        self._ended()
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self._room.clear()
            room = sum(member.room for member in self.members)
            if not room:
                await self._room.wait()
                continue
            try:
                await self._fetch(min(room, FETCH_MAX))
            except TurtleError as error:
                if error.status not in _PASSING:
                    self._refuse(error)
                    return
                await asyncio.sleep(retry_after_ms(error) / 1000 or TROUBLE_S)
            except Exception as error:  # noqa: BLE001 - logged, and told to the members
                logs.error("grpc_delivery_failed", error, topic=self._key[0])
                self._refuse(TurtleError())
                return

    def _refuse(self, error: TurtleError) -> None:
        self._ended()
        for member in self.members:
            member.refused(member, error)

    async def _fetch(self, room: int) -> None:
        topic, group, ttr_ms, is_auto = self._key
        service = self._context.service
        names = {member.name for member in self.members}
        name = names.pop() if len(names) == 1 else f"{len(self.members)} gRPC streams"
        wanted = FetchRequest(topic, group, room, ttr_ms, name, is_auto, self._largest_share)
        self._context.check_writable()
        reserved = await service.fetch(wanted, WAIT_S)
        if not len(reserved):
            if topic not in service.engine.topics:
                raise UnknownTopic(f"topic {topic!r} was deleted")
            return
        try:
            await self._context.confirmed()
        except BaseException:
            service.give_back(wanted, reserved)
            raise
        left = self._share(delivered(reserved), reserved.lease)
        if left and not is_auto and service.serving:
            service.engine.give_back(topic, group, [message.id for message in left], now_ms(), reserved.lease)
            service.answer_polls_soon(topic)

    def _largest_share(self) -> float:
        return max((member.share for member in self.members), default=0.0)

    def _share(self, messages: list[Delivered], lease: str) -> list[Delivered]:
        """Share messages out. Returns those for which no member has room any more."""
        now = asyncio.get_running_loop().time()
        while messages:
            takers = [member for member in self.members if member.room]
            if not takers:
                break
            takers.sort(key=lambda member: member.share, reverse=True)
            each = -(-len(messages) // len(takers))
            for member in takers:
                part, messages = messages[: (count := min(each, member.room))], messages[count:]
                if part:
                    member.take(part, lease, now)
        return messages


def stopping() -> Unavailable:
    """The status of streams that the server ends because it stops."""
    return Unavailable("the server stops: connect again", retry_after_ms=1_000)
