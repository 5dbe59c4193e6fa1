"""Subscriptions of `turtlemq.v1.Queue`: deliveries as columns, within the credit that the client gives, from one or many topics.

A subscription is one member in the pool of each of its topics; all of them draw on one credit. Errors are told on the stream,
which goes on. How the stream ends decides about its unacknowledged deliveries: see `deliveries.release`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from turtlemq.broker.results import Acked
from turtlemq.engine import GROUP
from turtlemq.errors import InvalidArgument, TooLarge, TurtleError, UnknownGroup, UnknownTopic
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX, TTR_MS_MAX
from turtlemq.server.auth import CONSUME
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.connection import UNSENT_MAX, Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.credit import HELD_MAX, Credit, Subscriber
from turtlemq.server.grpc.deliveries import KEPT, Member, Pools, release
from turtlemq.server.grpc.delivery_columns import deliveries, parts_of
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.publishing import SERVICE, told
from turtlemq.server.grpc.registered import StreamClient, registered
from turtlemq.server.grpc.topic_watch import TopicWatch
from turtlemq.server.grpc.unary import decoded
from turtlemq.server.grpc.window import Window
from turtlemq.server.list_slices import ack_slices
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.topic_patterns import pattern_of

TOPICS_MAX = 1_000  # of one subscription
REVIEW_S = 1.0
KEEP_MS = 10_000  # a lease that lasts as long as the stream is extended by so much at least, before half of it is over
ERROR_CHARS_MAX, NAME_CHARS_MAX = 4_000, 200
Request, Reply, AckedMessage = (message(f"turtlemq.v1.{name}") for name in ("SubscribeRequest", "SubscribeReply", "Acked"))


class Subscription:
    """The state of one stream."""

    def __init__(self, context: Context, pools: Pools, watch: TopicWatch, call: Call) -> None:
        self.is_draining = False
        self._credit = Credit()
        self._context, self._pools, self._watch, self._call, self._service = context, pools, watch, call, context.service
        self._members: dict[str, Subscriber] = {}  # by topic
        self._entries: dict[str, StreamClient] = {}  # of them, in the registry of clients
        self._open: Any = None
        self._fits: Any = None  # tells whether a topic's name matches one of the patterns
        self._loop = asyncio.get_running_loop()
        self._review_timer: asyncio.TimerHandle | None = None
        call.on_progress = self._wake

    @property
    def unacked(self) -> int:
        """Deliveries that are not acknowledged."""
        return self._credit.unacked

    async def handle(self, raw: Sequence[bytes]) -> None:
        """Handle the messages of one read, in their order. Neighbouring acks share their sync."""
        requests = [decoded(Request, data) for data in raw]
        counts = self._context.figures.messages
        for kind, run in groupby(requests, lambda one: one.WhichOneof("what")):
            some = list(run)
            counts[SERVICE, kind or "empty"] += len(some)
            if kind == "acks":
                await self._ack([one.acks for one in some])
                continue
            for one in some:
                try:
                    await self._handle(kind, one)
                except TurtleError as error:
                    await self._context.confirmed()  # it may tell of something that the copies do not have yet
                    self._refused(error, one.longer.topic if kind == "longer" else "")

    async def _handle(self, kind: str | None, one: Any) -> None:
        if kind in ("open", "longer"):
            await self._context.until_writable()
        if kind == "open":
            self._begin(one.open)
        elif kind == "credit":
            self._take_credit(one.credit)
        elif kind == "longer":
            self._extend(one.longer)
        elif kind == "beat":
            self._send(beat=one.beat)
        elif kind == "leave":
            self._leave_pools()
            if one.leave:
                for member in self._members.values():
                    await release(self._service, member, is_lost=False)

    def drain(self, within_ms: int) -> None:
        """Tell the client that the server stops; nothing more is delivered."""
        self.is_draining = True
        self._leave_pools()
        self._send(drain_ms=within_ms)

    async def close(self, why: str) -> None:
        """End the subscription and its deliveries."""
        self._call.on_progress = int
        self._service.clients.beats_missed += len(self._members) if why == "silent" else 0
        if self._review_timer is not None:
            self._review_timer.cancel()
        self._leave_pools()
        for entry in self._entries.values():
            self._service.clients.remove(entry)
        for member in list(self._members.values()):
            try:
                await release(self._service, member, is_lost=why not in KEPT)
            except TurtleError:
                pass  # the topic is gone, or the server stops: leases end by themselves

    def _send(self, **what: Any) -> None:
        self._call.send([Reply(**what).SerializeToString()])

    def _refused(self, error: TurtleError, topic: str = "") -> None:
        self._service.meter.rejected[error.code] += 1
        self._send(error=told(error, topic))

    # Topics

    def _begin(self, asked: Any) -> None:
        if self._open is not None:
            raise InvalidArgument("the subscription is open already; another one is another stream")
        if not asked.topics or len(asked.topics) > TOPICS_MAX:
            raise InvalidArgument(
                f"a subscription names 1 to {TOPICS_MAX:,} topics, or patterns in which * stands for any characters"
            )
        if asked.ttr_ms > TTR_MS_MAX:
            raise InvalidArgument(f"ttr_ms is at most {TTR_MS_MAX:,}")
        self._open = asked
        self._review_timer = self._loop.call_later(REVIEW_S, self._review)
        patterns = [topic for topic in asked.topics if "*" in topic]
        for topic in asked.topics:
            if "*" not in topic:
                self._join(topic, is_named=True)
        if patterns:
            self._fits = pattern_of(patterns)
            self._watch.listen(self._appeared)

    def _appeared(self, topics: Iterable[str]) -> None:
        """Join those of these topics that match a pattern, and that the token may consume."""
        for topic in topics:
            if self._fits(topic) and topic not in self._members and self._context.may_consume(self._call, topic):
                self._join(topic, is_named=False)

    def _join(self, topic: str, is_named: bool) -> None:
        try:
            if len(self._members) >= TOPICS_MAX:
                raise InvalidArgument(f"a subscription has at most {TOPICS_MAX:,} topics; this one gets no messages")
            self._context.topic(self._call, topic, CONSUME, may_create=is_named)
            group = self._context.group(topic, self._open.group or GROUP)
            self._service.engine.topic(topic, create=is_named)
        except TurtleError as error:
            self._refused(error, topic)
            return
        asked = self._open
        member = Subscriber(
            topic,
            group,
            self._call,
            Window(HELD_MAX),
            self._deliver,
            self._ended,
            ttr_ms=asked.ttr_ms or None,
            is_auto=asked.at_most_once,
            name=asked.client[:NAME_CHARS_MAX],
            credit=self._credit,
        )
        try:
            self._entries[topic] = registered(self._service.clients, member, partial(self._dropped, member))
        except TurtleError as error:
            self._refused(error, topic)
            return
        self._members[topic] = member
        if not self.is_draining:
            self._pools.join(member)

    def _ended(self, member: Member, error: TurtleError) -> None:
        """A topic was deleted, or cannot be read: it has no messages any more. One that only matches a pattern may come again."""
        self._members.pop(member.topic, None)
        if (entry := self._entries.pop(member.topic, None)) is not None:
            self._service.clients.remove(entry)
        if isinstance(error, UnknownTopic) and member.topic not in self._open.topics:
            self._watch.forget(member.topic)
        else:
            self._refused(error, member.topic)

    def _dropped(self, member: Member) -> None:
        """The group or the topic was deleted."""
        self._pools.leave(member)
        for id_ in list(member.held):
            member.drop(id_)
        if member.topic in self._service.engine.topics:
            self._ended(member, UnknownGroup(f"group {member.group!r} of topic {member.topic!r} was deleted"))
        else:
            self._ended(member, UnknownTopic(f"topic {member.topic!r} was deleted"))

    def _leave_pools(self) -> None:
        self._watch.leave(self._appeared)
        for topic, member in self._members.items():
            self._pools.leave(member)
            self._entries[topic].state = "leaving"

    def _review(self) -> None:
        self._review_timer = self._loop.call_later(REVIEW_S, self._review)
        now = now_ms()
        for member in list(self._members.values()):
            try:
                self._context.auth.check(self._call.token, member.topic, CONSUME)  # tokens may have changed
                if self._open.extend:
                    self._keep(member, now)
            except TurtleError as error:
                self._pools.leave(member)
                self._ended(member, error)
                continue
            member.review(now, self._loop.time())
        self._wake()

    def _keep(self, member: Member, now: int) -> None:
        """Extend the leases of which not much is left."""
        ids = [id_ for id_, held in member.held.items() if held.until_ms - now < KEEP_MS // 2]
        if ids:
            self._extend_leases(member, ids, max(KEEP_MS, self._lease_ms(member.topic)), now)

    def _lease_ms(self, topic: str) -> int:
        return int(self._open.ttr_ms or self._service.engine.topic(topic).settings.ttr_ms)

    def _wake(self) -> None:
        """Look after the topics that had no room: there may be some now."""
        if self._credit.lacks_room and self._call.unsent <= UNSENT_MAX // 2:
            self._credit.lacks_room = False
            for member in self._members.values():
                self._pools.wake(member)
        if self._credit.lacks_bytes and not self._credit.unacked:
            self._tell_short()
        if self._credit.lacks_low_room and self._service.serving:
            self._credit.lacks_low_room = False
            self._service.answer_polls_soon(*self._members)  # they may wait for room for low priority

    # Deliveries

    def _take_credit(self, given: Any) -> None:
        self._credit.add(given)
        self._wake()

    def _tell_short(self) -> None:
        """Tell a client that has nothing to acknowledge which messages are larger than all of its credit."""
        lacks, self._credit.lacks_bytes = self._credit.lacks_bytes, set()
        for member in lacks:
            if (left := self._credit.bytes or 0) < member.short_bytes and self._members.get(member.topic) is member:
                text = f"the next message takes {member.short_bytes:,} bytes of credit, and {left:,} are left: give more"
                self._refused(TooLarge(text), member.topic)

    def _deliver(self, member: Member, messages: list[Delivered]) -> list[int]:
        ends, at = list[int](), self._call.queued
        for part in parts_of(messages):
            data: bytes = Reply(deliveries=deliveries(member.topic, part)).SerializeToString()
            self._call.send([data])
            at += len(data) + 5
            ends += [at] * len(part)
            self._context.figures.messages[SERVICE, "deliveries"] += 1
        self._service.meter.fetch_batch.add(len(messages))
        if self._open.extend and min(one.lease_until_ms for one in messages) - now_ms() < KEEP_MS // 2:
            self._loop.call_soon(self._keep_if_held, member)
        return ends

    def _keep_if_held(self, member: Member) -> None:
        if self._members.get(member.topic) is member and member.topic in self._service.engine.topics:
            self._keep(member, now_ms())

    async def _ack(self, asked: Sequence[Any]) -> None:
        """Acknowledge lists of deliveries, and answer each when it is durable."""
        answers, topics = list[tuple[str, Acked | TurtleError]](), dict[str, bool]()
        for acks in asked:
            try:
                await self._context.until_writable()
                done = await self._end_deliveries(acks)
                is_synced = bool(acks.failed) or self._service.engine.topic(acks.topic).settings.ack_durability == "fsync"
                topics[acks.topic] = topics.get(acks.topic, False) or is_synced
                answers.append((acks.topic, done))
            except TurtleError as error:
                answers.append((acks.topic, error))
        self._service.answer_polls_soon(*topics)
        for topic in [name for name, is_synced in topics.items() if is_synced and name in self._service.engine.topics]:
            await self._service.synced(self._service.engine.topic(topic))
        await self._context.confirmed()
        for topic, answer in answers:
            if isinstance(answer, TurtleError):
                self._refused(answer, topic)
            else:
                self._context.figures.unknown_acks += len(answer.unknown)
                self._send(acked=AckedMessage(topic=topic, **_counts(answer)))
        self._wake()

    async def _end_deliveries(self, acks: Any) -> Acked:
        """Acknowledge one list. Its sync is left to the caller."""
        self._context.topic(self._call, acks.topic, CONSUME)
        entries = [*_plain(acks.ids), *(f"-{id_}" for id_ in _plain(acks.failed))]
        if len(entries) > BATCH_MESSAGES_MAX:
            raise TooLarge(f"an ack list holds at most {BATCH_MESSAGES_MAX:,} ids, this one {len(entries):,}")
        now, engine = now_ms(), self._service.engine
        delay_ms = min(acks.retry_delay_ms, DUE_MS_MAX - now) if acks.HasField("retry_delay_ms") else None
        group = self._open.group if self._open is not None else ""
        member = self._members.get(acks.topic)
        if member is not None:
            member.settle([*acks.ids, *acks.failed], self._loop.time())
        slices, unknown = ack_slices(entries, None)
        unknown += [id_ for id_ in (*acks.ids, *acks.failed) if not id_ or id_[0] == "-"]
        out = Acked(0, 0, 0, unknown)
        for part, _ in slices:
            if len(slices) > 1:
                await self._service.turns.turn(acks.topic)
            topic, options = engine.topic(acks.topic), {"retry_delay_ms": delay_ms, "error": acks.error[:ERROR_CHARS_MAX]}
            with topic.deferring_syncs():
                done = engine.ack(topic.name, group or GROUP, part, now_ms(), **options)
            out = Acked(out.acked + done.acked, out.failed + done.failed, out.dead + done.dead, out.unknown + done.unknown)
        self._service.meter.ack_batch.add(len(entries))
        return out

    def _extend(self, asked: Any) -> None:
        """Extend leases of deliveries that this stream holds."""
        self._context.topic(self._call, asked.topic, CONSUME)
        member = self._members.get(asked.topic)
        held = [id_ for id_ in asked.ids if member is not None and id_ in member.held]
        unknown = set(asked.ids) - set(held)
        if member is not None and held:
            ttr_ms = min(asked.ttr_ms, TTR_MS_MAX) or self._lease_ms(asked.topic)
            unknown |= self._extend_leases(member, held, ttr_ms, now_ms())
        if unknown:
            self._send(acked=AckedMessage(topic=asked.topic, unknown=sorted(unknown)))

    def _extend_leases(self, member: Member, ids: list[str], ttr_ms: int, now: int) -> set[str]:
        """Extend leases. Returns the ids whose leases are over."""
        leases = [member.held[id_].lease for id_ in ids]
        done = self._service.engine.extend(member.topic, member.group, ids, ttr_ms, now, leases)
        gone = {*done.unknown, *done.late}
        for id_ in ids:
            if id_ in gone:
                member.drop(id_)
            elif id_ in member.held:
                member.held[id_].until_ms = now + ttr_ms
        self._service.tick_soon()
        return gone


def _plain(ids: Iterable[str]) -> list[str]:
    """Entries that can be ids: in a list of acks a minus in front means that it failed."""
    return [id_ for id_ in ids if id_ and id_[0] != "-"]


def _counts(done: Acked) -> dict[str, Any]:
    return {"acked": done.acked, "failed": done.failed, "dead": done.dead, "unknown": done.unknown}
