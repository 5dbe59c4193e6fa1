"""`delay.DelayScheduler`: the bidirectional stream of the Hyper Delay Server, on which clients schedule, receive and acknowledge.

A stream registers topics, each for a group; it gets their messages within its window. Errors about one message are told on the
stream, which goes on. How a stream ends decides about its unacknowledged deliveries: see `deliveries.release`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from msgspec import UnsetType

from turtlemq.engine import GROUP
from turtlemq.errors import InvalidArgument, TurtleError, UnknownGroup, UnknownMessage, UnknownTopic
from turtlemq.model import DUE_MS_MAX, TTR_MS_MAX
from turtlemq.server.auth import CONSUME
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.deliveries import KEPT, Member, Pools, release, serve
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.registered import StreamClient, registered
from turtlemq.server.grpc.statuses import Garbage
from turtlemq.server.grpc.storing import COMPRESSION, Storing, mark_of, refusal
from turtlemq.server.grpc.window import Window
from turtlemq.server.outgoing.messages import Delivered, budget_ms

SERVICE = "delay.DelayScheduler"
REVIEW_S = 1.0
ERROR_CHARS_MAX, NAME_CHARS_MAX = 4_000, 200
PRIORITIES = {"normal": 0, "high": 1, "low": 2}
ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")


async def connect(context: Context, pools: Pools, call: Call) -> None:
    """Serve one stream, until the client or the server ends it."""
    await serve(context, pools, call, Session(context, pools, call))


class Session:
    """The state of one stream: its registrations, by topic and group."""

    def __init__(self, context: Context, pools: Pools, call: Call) -> None:
        self.is_draining = False
        self._context, self._pools, self._call, self._service = context, pools, call, context.service
        self._prefix = context.config.grpc_topic_prefix
        self._members: dict[tuple[str, str], Member] = {}
        self._entries: dict[Member, StreamClient] = {}  # in the registry of clients
        self._storing = Storing(context, call, self._prefix)
        self._loop = asyncio.get_running_loop()
        self._review_timer: asyncio.TimerHandle | None = None
        call.on_progress = self._wake

    @property
    def unacked(self) -> int:
        """Deliveries that are not acknowledged."""
        return sum(len(member.held) for member in self._members.values())

    async def handle(self, raw: Sequence[bytes]) -> None:
        """Handle the messages of one read. Acks come first; schedules and cancels keep their order."""
        acks, schedules, cancels = list[Any](), list[Any](), list[Any]()
        counts, later = self._context.figures.messages, list[Any]()
        for one in _decoded(raw):
            kind = one.WhichOneof("message")
            counts[SERVICE, kind or "empty"] += 1
            if kind == "ack":
                acks.append(one.ack)
            elif kind == "schedule":
                if cancels:
                    await self._cancel(cancels)
                schedules.append(one.schedule)
            elif kind == "register":
                await self._register(one.register)
            elif kind == "cancel":
                if schedules:
                    await self._schedule(schedules)
                cancels.append(one.cancel)
            elif kind is not None:
                later.append(one)
        if acks:
            await self._ack(acks)
        if schedules:
            await self._schedule(schedules)
        if cancels:
            await self._cancel(cancels)
        for one in later:
            await self._handle_other(one)

    async def _handle_other(self, one: Any) -> None:
        kind = one.WhichOneof("message")
        if kind == "beat":
            for member in self._members.values():
                member.free = one.beat.free or None
            self._call.send([ServerMessage(beat={"number": one.beat.number}).SerializeToString()])
            self._wake()
        elif kind == "extend":
            await self._extend(one.extend)
        elif kind == "leave":
            for member in list(self._members.values()):
                self._leave(member)
                if one.leave.give_back:
                    await release(self._service, member, is_lost=False)

    def drain(self, within_ms: int) -> None:
        """Tell the client that the server stops; nothing more is delivered."""
        self.is_draining = True
        for member in self._members.values():
            self._leave(member)
        self._call.send([ServerMessage(drain={"within_ms": within_ms}).SerializeToString()])

    def _leave(self, member: Member) -> None:
        """Deliver no more to a registration, whose acks still count."""
        self._pools.leave(member)
        self._entries[member].state = "leaving"

    async def close(self, why: str) -> None:
        """End all registrations and their deliveries."""
        is_lost = why not in KEPT
        self._call.on_progress = int
        if self._review_timer is not None:
            self._review_timer.cancel()
        for member in self._members.values():
            self._pools.leave(member)
            self._unlist(member)
        self._service.clients.beats_missed += len(self._members) if why == "silent" else 0
        for member in list(self._members.values()):
            try:
                await release(self._service, member, is_lost)
            except TurtleError:
                pass  # the topic is gone, or the server stops: leases end by themselves

    # Registrations

    async def _register(self, asked: Any) -> None:
        route_key, topic = asked.route_key, self._prefix + asked.route_key
        try:
            if asked.ttr_ms > TTR_MS_MAX:
                raise InvalidArgument(f"ttr_ms is at most {TTR_MS_MAX:,}")
            await self._context.until_writable()
            self._context.topic(self._call, topic, CONSUME, may_create=True)
            group = self._context.group(topic, asked.group or GROUP)
            self._service.engine.topic(topic, create=True)
        except TurtleError as error:
            self._refused(error, route_key=route_key)
            return
        most = self._context.config.grpc_window
        member = self._members.get((topic, group))
        if member is None:
            member = Member(topic, group, self._call, Window(most), self._deliver, self._ended)
        self._pools.leave(member)
        member.window.limit(min(asked.window or most, most))
        member.ttr_ms, member.is_auto = asked.ttr_ms or None, asked.at_most_once
        member.name = asked.client[:NAME_CHARS_MAX]
        try:
            entry = self._listed(member)
        except TurtleError as error:
            self._refused(error, route_key=route_key)
            return
        self._members[topic, group] = member
        told = {"route_key": route_key, "group": group, "window": member.window.most, "stream": entry.client}
        beat_ms = round(self._context.config.grpc_beat_s * 1000)
        self._call.send([ServerMessage(registered={**told, "beat_ms": beat_ms}).SerializeToString()])
        if not self.is_draining:
            entry.state = "active"
            self._pools.join(member)
        if self._review_timer is None:
            self._review_timer = self._loop.call_later(REVIEW_S, self._review)

    def _listed(self, member: Member) -> StreamClient:
        """The entry of a registration among the clients of its group."""
        if member not in self._entries:
            gone = partial(self._dropped, member)
            self._entries[member] = registered(self._service.clients, member, gone)
        return self._entries[member]

    def _unlist(self, member: Member) -> None:
        if (entry := self._entries.pop(member, None)) is not None:
            self._service.clients.remove(entry)

    def _dropped(self, member: Member) -> None:
        """The group or the topic of a registration was deleted."""
        self._pools.leave(member)
        member.held.clear()
        if member.topic in self._service.engine.topics:
            self._ended(member, UnknownGroup(f"group {member.group!r} of topic {member.topic!r} was deleted"))
        else:
            self._ended(member, UnknownTopic(f"topic {member.topic!r} was deleted"))

    def _ended(self, member: Member, error: TurtleError) -> None:
        """A registration gets no more messages: its topic was deleted, or cannot be read."""
        self._members.pop((member.topic, member.group), None)
        self._unlist(member)
        self._refused(error, route_key=member.topic.removeprefix(self._prefix))

    def _review(self) -> None:
        self._review_timer = self._loop.call_later(REVIEW_S, self._review)
        for member in self._members.values():
            member.review(now_ms(), self._loop.time())
        self._wake()

    def _wake(self) -> None:
        for member in self._members.values():
            if member.room:
                self._pools.wake(member)

    def _refused(self, error: TurtleError, id_: str = "", route_key: str = "") -> None:
        self._service.meter.rejected[error.code] += 1
        self._call.send([refusal(error, id_, route_key)])

    # Deliveries

    def _deliver(self, member: Member, messages: list[Delivered]) -> list[int]:
        encoded = [self._encoded(member, one) for one in messages]
        at, ends = self._call.queued, list[int]()
        for data in encoded:
            at += len(data) + 5
            ends.append(at)
        self._call.send(encoded)
        self._context.figures.messages[SERVICE, "delivery"] += len(encoded)
        self._service.meter.fetch_batch.add(len(encoded))
        return ends

    def _encoded(self, member: Member, one: Delivered) -> bytes:
        body, mark, headers = one.body, mark_of(one.headers), one.headers
        if mark:
            headers = {name: value for name, value in headers.items() if name != COMPRESSION}
        told = ServerMessage()
        delivery = told.delivery  # field by field: half the time of keywords
        delivery.id, delivery.fire_at_epoch_ms = one.id, one.due_ms
        delivery.payload = one.body_base64 if isinstance(body, UnsetType) else bytes(body)
        delivery.compression = mark
        delivery.route_key, delivery.group = member.topic.removeprefix(self._prefix), member.group
        delivery.attempt, delivery.lease_until_epoch_ms = one.attempt, one.lease_until_ms
        delivery.priority = PRIORITIES[one.priority]
        delivery.budget_ms = budget_ms(one, one.lease_until_ms, now_ms())
        if headers:
            delivery.headers.update(headers)
        encoded: bytes = told.SerializeToString()
        return encoded

    async def _ack(self, acks: Sequence[Any]) -> None:
        """Acknowledge deliveries: one list for each registration and outcome."""
        try:
            await self._context.until_writable()
        except TurtleError as refused:
            for ack in acks:
                self._refused(refused, ack.id, ack.route_key)
            return
        lists, strays = defaultdict[tuple[Any, ...], list[str]](list), list[Any]()
        for ack in acks:
            topic = self._prefix + ack.route_key if ack.route_key else ""
            holder = next((m for m in self._members.values() if ack.id in m.held and topic in ("", m.topic)), None)
            if holder is None:
                strays.append(ack)
            else:
                lists[holder, *_outcome(ack)].append(ack.id)
        for (member, failed, error, delay_ms), ids in lists.items():
            member.settle(ids, self._loop.time())
            await self._end_deliveries(member, ids, failed, error, delay_ms)
        text = "it is not in flight in a group that this stream has registered"
        unknown = {ack.id: UnknownMessage(text) for ack in strays if not await self._ack_stray(ack)}
        self._context.figures.unknown_acks += len(unknown)
        await self._refuse_all(unknown, {ack.id: ack.route_key for ack in strays})
        self._service.meter.ack_batch.add(len(acks))
        self._wake()

    async def _refuse_all(self, errors: Mapping[str, TurtleError], route_keys: Mapping[str, str]) -> None:
        """Tell errors that say something about stored messages: the copies of a cluster must have it, too."""
        if not errors:
            return
        try:
            await self._context.confirmed()
        except TurtleError as failed:
            errors = dict.fromkeys(errors, failed)
        for id_, error in errors.items():
            self._refused(error, id_, route_keys.get(id_, ""))

    async def _ack_stray(self, ack: Any) -> bool:
        """Acknowledge a message that this stream does not hold: it was delivered on an earlier one, or its lease has ended."""
        topic = self._prefix + ack.route_key if ack.route_key else ""
        for member in list(self._members.values()):
            is_meant = topic in ("", member.topic) and ack.id and ack.id[0] != "-"
            if is_meant and not await self._end_deliveries(member, [ack.id], *_outcome(ack)):
                return True
        return False

    async def _end_deliveries(self, member: Member, ids: list[str], failed: bool, error: str, delay_ms: int | None) -> list[str]:
        """Acknowledge deliveries, or let them fail. Returns the ids that are not in flight."""
        engine = self._service.engine
        topic = engine.topic(member.topic)
        with topic.deferring_syncs():
            acks = [f"-{id_}" for id_ in ids] if failed else ids
            done = engine.ack(topic.name, member.group, acks, now_ms(), retry_delay_ms=delay_ms, error=error)
        self._service.answer_polls_soon(topic.name)
        if topic.settings.ack_durability == "fsync" or failed:
            await self._service.synced(topic)
        return done.unknown

    async def _extend(self, asked: Any) -> None:
        """Extend leases of deliveries that this stream holds."""
        try:
            await self._context.until_writable()
        except TurtleError as refused:
            await self._refuse_all(dict.fromkeys(asked.ids, refused), dict.fromkeys(asked.ids, asked.route_key))
            return
        topic, now = self._prefix + asked.route_key if asked.route_key else "", now_ms()
        unknown = set(asked.ids)
        for member in self._members.values():
            ids = [id_ for id_ in asked.ids if id_ in member.held] if topic in ("", member.topic) else []
            if not ids:
                continue
            engine = self._service.engine
            ttr_ms = min(asked.ttr_ms, TTR_MS_MAX) or engine.topic(member.topic).settings.ttr_ms
            done = engine.extend(member.topic, member.group, ids, ttr_ms, now, [member.held[id_].lease for id_ in ids])
            for id_ in set(ids) - set(done.unknown) - set(done.late):
                member.held[id_].until_ms = now + ttr_ms
                unknown.discard(id_)
            self._service.tick_soon()
        errors = {id_: UnknownMessage(f"this stream does not hold {id_!r:.220}") for id_ in sorted(unknown)}
        await self._refuse_all(errors, dict.fromkeys(errors, asked.route_key))

    # Messages of producers

    def _route(self, route_key: str) -> str:
        """The topic of a message without a prefix: the named one, or the first that this stream has registered."""
        if not route_key and self._members:
            return next(iter(self._members))[0].removeprefix(self._prefix)
        return route_key

    async def _schedule(self, schedules: list[Any]) -> None:
        """Store messages, and empty the list: one batch for each topic."""
        by_topic = defaultdict[str, list[Any]](list)
        for one in schedules:
            by_topic[self._route(one.route_key)].append(one)
        schedules.clear()
        stored = await asyncio.gather(*(self._storing.store(key, requests) for key, requests in by_topic.items()))
        for answers in stored:
            self._call.send(answers)

    async def _cancel(self, cancels: list[Any]) -> None:
        """Cancel messages, and empty the list."""
        by_topic = defaultdict[str, list[str]](list)
        for one in cancels:
            by_topic[self._route(one.route_key)].append(one.id)
        cancels.clear()
        for route_key, ids in by_topic.items():
            try:
                await self._context.until_writable()
                _, missed = await self._context.cancel(self._call, self._prefix + route_key, ids)
            except TurtleError as error:
                for id_ in ids:
                    self._refused(error, id_, route_key)
                continue
            states = [{"id": id_, "state": missed.get(id_, "cancelled")} for id_ in ids]
            self._call.send([ServerMessage(cancelled=state).SerializeToString() for state in states])


def _decoded(raw: Sequence[bytes]) -> list[Any]:
    try:
        return [ClientMessage.FromString(data) for data in raw]
    except DecodeError as error:
        raise Garbage(f"this is no ClientMessage: {error}") from None


def _outcome(ack: Any) -> tuple[bool, str, int | None]:
    """Whether a delivery failed, its error, and the pause before it comes again; None: the topic's back-off."""
    if not ack.failed:
        return False, "", None
    delay_ms = min(ack.retry_delay_ms, DUE_MS_MAX - now_ms()) if ack.HasField("retry_delay_ms") else None
    return True, ack.error[:ERROR_CHARS_MAX], delay_ms
