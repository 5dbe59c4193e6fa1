"""Deliveries on streams: the consumers of a topic and group share one long poll that never ends, and its messages.

A pool fetches as many messages as its members have room for, and shares them out, the member with the largest free share of its
window first. Deliveries that were never written to the socket are given back as the same attempt; those of a lost stream fail.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turtlemq.errors import TurtleError, Unavailable, UnknownTopic
from turtlemq.server import logs
from turtlemq.server.clients import shared_name
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.connection import UNSENT_MAX, Call, CallEnded
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.statuses import retry_after_ms
from turtlemq.server.grpc.window import Window
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.outgoing.messages import Delivered, delivered
from turtlemq.server.service import Service

FETCH_MAX = 1_000  # messages of one fetch
WAIT_S = 60.0  # of one long poll; the next one follows at once
TROUBLE_S = 1.0  # before another fetch, after one was refused
LOST = "stream lost"
_PASSING = (429, 503)  # status of errors that pass: overload, copies that are away
KEPT = frozenset({"half_close", "left", "drained"})  # ends of a stream after which its deliveries are given back
LOW = "low"
NO_PLACE_S = 0.05  # before the next fetch, if none of the fetched messages could be delivered


@dataclass(slots=True)
class Held:
    """A delivery that is not acknowledged."""

    end: int  # where it ends among the bytes of its call
    lease: str
    until_ms: int
    attempt: int
    sent_s: float
    is_low: bool


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
    lows: int = 0  # of them, those of low priority
    claimed: int = 0  # messages about to be delivered
    claimed_lows: int = 0

    @property
    def room(self) -> int:
        """How many deliveries it may get now."""
        if self.call.ended or self.call.unsent > UNSENT_MAX // 2:
            return 0
        room = self.window.size - len(self.held) - self.claimed
        return max(0, room if self.free is None else min(room, self.free))

    @property
    def share(self) -> float:
        """The free share of its window."""
        return self.room / self.size

    @property
    def size(self) -> int:
        """How many deliveries it may have without an ack."""
        return self.window.size

    @property
    def low_room(self) -> int:
        """How many deliveries of low priority it may get now: they have at most 3/4 of its window, and at least one place."""
        return max(0, max(1, self.size * 3 // 4) - self.lows - self.claimed_lows)

    def claim(self, messages: list[Delivered], count: int) -> tuple[list[Delivered], list[Delivered]]:
        """The first `count` messages that it may get, and all others. The former have their places from now on."""
        low, mine, others = self.low_room, messages[:count], messages[count:]
        if len(mine) > low and any(message.priority == LOW for message in mine):
            mine, others = list[Delivered](), list[Delivered]()
            for message in messages:
                is_low = message.priority == LOW
                fits = len(mine) < count and (not is_low or low > 0)
                (mine if fits else others).append(message)
                low -= fits and is_low
        self._count_claims(mine, 1)
        return mine, others

    def unclaim(self, messages: list[Delivered]) -> None:
        """Give up the places of messages that are not delivered."""
        self._count_claims(messages, -1)

    def _count_claims(self, messages: list[Delivered], sign: int) -> None:
        self.claimed += sign * len(messages)
        self.claimed_lows += sign * sum(message.priority == LOW for message in messages)

    def take(self, messages: list[Delivered], lease: str, now: float) -> None:
        """Deliver claimed messages."""
        self._count_claims(messages, -1)
        ends = self.send(self, messages)
        if lease and not self.is_auto:
            for message, end in zip(messages, ends, strict=True):
                is_low = message.priority == LOW
                self.drop(message.id)
                self.hold(message.id, Held(end, lease, message.lease_until_ms, message.attempt, now, is_low))
            self.window.fill(len(self.held), now)
        if self.free is not None:
            self.free = max(0, self.free - len(messages))

    def hold(self, id_: str, held: Held) -> None:
        """Hold a delivery."""
        self.held[id_] = held
        self.lows += held.is_low

    def drop(self, id_: str) -> Held | None:
        """Hold a delivery no longer. Returns it, if it was held."""
        held = self.held.pop(id_, None)
        self.lows -= held is not None and held.is_low
        return held

    def settle(self, ids: list[str], now: float) -> None:
        """Free the places of acknowledged deliveries."""
        count = sum(self.drop(id_) is not None for id_ in ids)
        self.window.acknowledge(count, now)
        if self.free is not None:
            self.free += count

    def review(self, at_ms: int, now: float) -> None:
        """Free the places of deliveries whose lease has ended, and adapt the window to the age of the oldest."""
        for id_ in [id_ for id_, held in self.held.items() if held.until_ms <= at_ms]:
            self.drop(id_)
        if self.held:
            self.window.review(now - min(held.sent_s for held in self.held.values()), now)


async def release(service: Service, member: Member, is_lost: bool) -> None:
    """End all deliveries of a member. Those that the socket never had are given back, and all if the stream is not lost: they
    come again as the same attempt. Others fail: the first time they come again at once, then after the topic's back-off."""
    held = dict(member.held)
    for id_ in held:
        member.drop(id_)
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


Share = tuple[Member, list[Delivered]]


class ConsumerStream(Protocol):
    """A stream that holds deliveries."""

    is_draining: bool

    @property
    def unacked(self) -> int: ...

    async def handle(self, raw: Sequence[bytes]) -> None: ...

    async def close(self, why: str) -> None: ...

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
        pool.add(member)

    def leave(self, member: Member) -> None:
        """Deliver no more to a member. The fetch of a pool without members is given back."""
        pool = self._pools.get(_key(member))
        if pool is not None and pool.drop(member) and not pool.members:
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
            out[topic, group] = unacked + held, size + sum(member.size for member in pool.members)
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
        self._name: str | None = None  # the consumer of its fetches; None: members have changed
        self._context, self._key, self._ended = context, key, ended
        self._room = asyncio.Event()
        self._settled: list[Delivered] = []  # by their topic, before they were delivered, and without a place so far
        self._task = asyncio.create_task(self._run())

    def add(self, member: Member) -> None:
        self.members[member], self._name = None, None
        self.wake()

    def drop(self, member: Member) -> bool:
        """Returns whether it was a member."""
        self._name = None
        return self.members.pop(member, 0) is None

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
            if self._settled:
                shares, self._settled = self._share(self._settled)
                self._deliver(shares, "")
                await asyncio.sleep(0 if shares else NO_PLACE_S)
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
        self._context.check_writable()
        # Settled only when it is known which messages are sent: no other could be given back.
        share, low = self._largest_share, self._low_room
        wanted = FetchRequest(topic, group, room, ttr_ms, share=share, low=low, names=self._names)
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
        shares, left = self._share(delivered(reserved))
        if not reserved.lease:  # the topic delivers at most once: they are settled
            self._settled += left
        elif left:
            self._give_back(left, reserved.lease)
        if is_auto and reserved.lease and shares:
            shares = await self._settle(shares, reserved.lease)
        self._deliver(shares, reserved.lease)
        if not shares:
            await asyncio.sleep(NO_PLACE_S)

    def _names(self) -> str:
        if self._name is None:
            self._name = shared_name(member.name for member in self.members)
        return self._name

    def _low_room(self) -> int:
        return sum(member.low_room for member in self.members)

    def _give_back(self, messages: list[Delivered], lease: str) -> None:
        topic, group, service = self._key[0], self._key[1], self._context.service
        if service.serving and topic in service.engine.topics:
            service.engine.give_back(topic, group, [message.id for message in messages], now_ms(), lease)
            service.answer_polls_soon(topic)

    def _largest_share(self) -> float:
        return max((member.share for member in self.members), default=0.0)

    async def _settle(self, shares: list[Share], lease: str) -> list[Share]:
        """Settle messages, durably, before they are sent. Returns the shares without those that are not leased any more."""
        topic, group, service = self._key[0], self._key[1], self._context.service
        gone = {one.id for _, part in shares for one in part}
        try:
            opened = service.engine.topic(topic)
            with opened.deferring_syncs():
                done = service.engine.ack(topic, group, list(gone), now_ms(), leases=lease)
            await service.synced(opened)
            await self._context.confirmed()
            gone = {*done.unknown, *done.late}
        finally:
            for member, part in shares:
                member.unclaim([one for one in part if one.id in gone])
        return [(member, [one for one in part if one.id not in gone]) for member, part in shares] if gone else shares

    def _deliver(self, shares: list[Share], lease: str) -> None:
        now = asyncio.get_running_loop().time()
        for member, part in shares:
            member.take(part, lease, now)
        for member, _ in shares:
            member.call.flush()

    def _share(self, messages: list[Delivered]) -> tuple[list[Share], list[Delivered]]:
        """Share messages out. Returns the members with their messages, and those for which no member has room any more."""
        shares, before = list[Share](), -1
        while messages and len(messages) != before:
            takers = sorted(self.members, key=lambda member: member.share, reverse=True)
            takers = [member for member in takers if member.room]
            each, before = -(-len(messages) // max(1, len(takers))), len(messages)
            for member in takers:
                part, messages = member.claim(messages, min(each, member.room))
                if part:
                    shares.append((member, part))
        return shares, messages


async def serve(context: Context, pools: Pools, call: Call, stream: ConsumerStream) -> None:
    """Serve one stream, until the client or the server ends it."""
    why = "reset"
    pools.streams.add(stream)
    try:
        while messages := await call.receive():
            await stream.handle(messages)
        why = "half_close"
    except CallEnded as ended:
        why = ended.why
        raise
    except TurtleError:
        why = "drained" if stream.is_draining else "reset"
        raise
    finally:
        context.figures.ended[why] += 1
        try:
            await stream.close(why)
        finally:
            pools.streams.discard(stream)


def stopping() -> Unavailable:
    """The status of streams that the server ends because it stops."""
    return Unavailable("the server stops: connect again", retry_after_ms=1_000)
