"""Fetches: the decision which messages a consumer's request gets, at once or while it waits.

Every fetch asks the engine, also where nothing can be ready, so that its group counts as used; and the groups of waiting fetches
are named to each tick of the engine. A waiting fetch belongs to the group that it found or created: with the group, or the topic,
it ends, and it never creates a group.

No event loop and no clock: time is an argument, `now_ms` for the engine and `clock`, in monotonic seconds, for rates. `service`
drives it with real time, the simulation of the tests with its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from turtlemq.broker.results import Reserved, ReserveTerms
from turtlemq.engine import Engine
from turtlemq.fair_queue import FairQueue
from turtlemq.server.long_polls import FetchRequest, LongPoll, LongPolls, Queue
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.tenants import Tenants

ANSWER_BYTES = 4 << 10  # the cost of an answer to a long poll, as so many bytes; those of its messages are charged as well
LOOKED_AT = 64  # long polls among which the largest share, or the most room for low priority, is found


class Fetches:
    """All fetches of a server: those that are answered at once, and the long polls."""

    def __init__(self, engine: Engine, flow: FlowControl, tenants: Tenants | None = None) -> None:
        self._engine, self._flow, self._tenants = engine, flow, tenants
        self._waiting = LongPolls()
        self._changed: set[str] = set()  # topics in which a message may have become ready
        self._unasked: dict[tuple[str, str], None] = {}  # (topic, group) for whose long polls messages may be ready
        self._paused_until: dict[str, float] = {}  # topics whose delivery rate is used up
        # With tenants, those of `_unasked` whose turn is to come, and the same as a set
        self._turns = None if tenants is None else FairQueue[tuple[str, str]](tenants.weight)
        self._queued: set[tuple[str, str]] = set()

    # Requests

    def fetch(self, fetch: FetchRequest, now_ms: int, clock: float) -> Reserved:
        """Reserve ready messages. A group that does not exist is created at the oldest message. Raises `Overloaded` if too many
        bytes of answers are under way."""
        self._flow.answer_bytes.refuse_if_full()
        return self._reserve(fetch, now_ms, clock)

    def wait(self, poll: LongPoll) -> None:
        """Let a fetch wait that found nothing. `answer_polls` should follow: it may tell when to look again."""
        self._waiting.add(poll)
        self._unasked[poll.fetch.topic, poll.fetch.group] = None

    def leave(self, poll: LongPoll) -> None:
        """A fetch waits no longer, answered or not."""
        self._waiting.remove(poll)

    def give_back(self, fetch: FetchRequest, messages: Reserved, now_ms: int) -> bool:
        """Make messages ready again that did not reach their consumer. It does not count as an attempt. Returns whether any
        could be given back: the topic may be gone, and an `auto` fetch has settled them."""
        if not len(messages) or fetch.auto or fetch.topic not in self._engine.topics:
            return False
        self._engine.give_back(fetch.topic, fetch.group, messages.ids, now_ms, messages.lease)
        self._unasked[fetch.topic, fetch.group] = None
        self._ended(fetch.topic)
        return True

    def drop_group(self, topic: str, group: str, now_ms: int) -> None:
        """Delete a group. Its long polls are answered without messages."""
        self._engine.drop_group(topic, group, now_ms)
        self._ended(topic)
        self._end(self._waiting.of_group(topic, group))

    def drop_topic(self, topic: str) -> None:
        """Delete a topic. Its long polls are answered without messages."""
        try:
            self._engine.drop_topic(topic)
        finally:
            if topic not in self._engine.topics:
                self._ended(topic)
                self._end(self._waiting.of_topic(topic))

    def end(self) -> None:
        """Answer all long polls without messages."""
        self._end(list(self._waiting))

    def _end(self, polls: list[LongPoll]) -> None:
        for poll in polls:
            self._waiting.remove(poll)
            poll.end()

    # Time

    def tick(self, now_ms: int, may_go_on: Callable[[], bool]) -> None:
        """Let the engine do its due work; `may_go_on`: see `Engine.tick`. Call `answer_polls` afterwards."""
        self._engine.tick(now_ms, self._waiting.groups, may_go_on)
        self._changed |= self._engine.woken
        self._ended(*self._engine.woken)

    def look_after(self, *topics: str) -> None:
        """Messages of these topics may have become ready, or ended; of all topics, if none is named."""
        self._changed.update(topics or self._waiting.groups)
        self._ended(*(topics or self._waiting.groups))

    def needs_ends(self, topic: str) -> bool:
        """Whether the end of a delivery may let a waiting fetch have messages: of this topic, or of another one of its tenant."""
        return self._tenants is not None or topic in self._waiting.groups

    def _ended(self, *topics: str) -> None:
        """Messages in flight may have ended: there may be room for others of the same tenant."""
        if self._tenants is not None:
            self._tenants.ended(topics)

    @property
    def has_changed(self) -> bool:
        """Whether `answer_polls` may have something to do at once."""
        return bool(self._changed or self._unasked or self._turns)

    def next_clock(self) -> float | None:
        """When a delivery rate, or a tenant's limit, allows the next message to a long poll: the `clock` at which to call
        `answer_polls`."""
        paused = min(self._paused_until.values(), default=None)
        counted = None if self._tenants is None else self._tenants.next_count()
        return paused if counted is None else counted if paused is None else min(paused, counted)

    def answer_polls(self, now_ms: int, clock: float, may_go_on: Callable[[], bool]) -> None:
        """Give ready messages to long polls in topics that changed, or whose rate allows a message again. `may_go_on` is asked
        after each group: one message may be for a thousand of them. Groups that are left over come first the next time."""
        changed = self._changed | {topic for topic, until in self._paused_until.items() if until <= clock}
        self._changed = set()
        if self._tenants is not None:
            changed.update(self._tenants.unblocked(clock))
        for topic in changed:
            self._paused_until.pop(topic, None)
            self._unasked.update(((topic, group), None) for group, _ in self._waiting.queues(topic))
        if self._turns is not None:
            self._answer_in_turn(self._turns, now_ms, clock, may_go_on)
            return
        while self._unasked:
            for topic, group in list(self._unasked):
                del self._unasked[topic, group]
                if self._answer_next(topic, group, now_ms, clock):
                    self._unasked[topic, group] = None  # behind the others
                if not may_go_on():
                    return

    def _answer_in_turn(
        self, turns: FairQueue[tuple[str, str]], now_ms: int, clock: float, may_go_on: Callable[[], bool]
    ) -> None:
        """Answer the long polls of all tenants in turn, in proportion to their weights."""
        assert self._tenants is not None
        while True:
            for key in self._unasked.keys() - self._queued:
                self._queued.add(key)
                turns.push(self._tenants.owner(key[0]), key, ANSWER_BYTES)
            self._unasked.clear()
            following = turns.pop()
            if following is None:
                return
            self._queued.discard(following)
            if self._answer_next(*following, now_ms, clock):
                self._unasked[following] = None
            if not may_go_on():
                return

    def _answer_next(self, topic: str, group: str, now_ms: int, clock: float) -> bool:
        """Answer one long poll of a group. Returns whether there may be messages for another one."""
        queue = self._waiting.queue(topic, group)
        if not queue or self._flow.answer_bytes.full or not self._has_ready(topic, group, now_ms, clock):
            return False
        poll = next(iter(queue))
        if poll.fetch.share is not None:
            poll = max(_registered(queue), key=_share)
        return self._offer(poll, queue, now_ms, clock)

    def _offer(self, poll: LongPoll, queue: Queue, now_ms: int, clock: float) -> bool:
        """Answer this long poll; or, if it may get too few of low priority, the one that may get the most."""
        topic = poll.fetch.topic
        if poll.future.done():  # its time is up, or its client is gone: an `auto` fetch could not be given back
            self._waiting.remove(poll)
            return True
        try:
            messages = self._reserve(self._granted(poll.fetch, queue), now_ms, clock)
        except Exception as error:  # noqa: BLE001 - answered to this request: the polls of other topics go on
            self._waiting.remove(poll)
            poll.future.set_exception(error)
            return True
        if not len(messages):
            if messages.more:  # only expired or cancelled messages so far: go on with the next tick
                self._changed.add(topic)
                return False
            other = _with_most_low(poll, queue)
            return other is not None and self._offer(other, queue, now_ms, clock)  # otherwise `max_in_flight` is reached
        self._waiting.remove(poll)
        poll.future.set_result(messages)
        return True

    def _granted(self, fetch: FetchRequest, queue: Queue) -> FetchRequest:
        """The fetch for a registered client with its part of the ready messages: each gets as its room is to that of all."""
        if fetch.share is None or len(queue) == 1:
            return fetch
        ready = self._engine.topic(fetch.topic).view.ready_bound(fetch.group)
        room = sum(other.fetch.count for other in _registered(queue))
        return fetch if ready >= room else replace(fetch, count=max(1, -(-ready * fetch.count // room)))

    def _reserve(self, fetch: FetchRequest, now_ms: int, clock: float) -> Reserved:
        """Ask the engine, also if the delivery rate allows no message now: that uses the group, too."""
        settings = self._engine.topic(fetch.topic).settings
        count = self._flow.deliverable(fetch.topic, fetch.group, settings, fetch.count, clock)
        if self._tenants is not None and not fetch.auto:
            count = self._tenants.room(fetch.topic, count, clock)
        low = None if fetch.low is None else fetch.low()
        consumer = fetch.consumer if fetch.names is None else fetch.names()
        allowed = self._flow.deliverable_low(fetch.topic, fetch.group, settings, clock)
        low = allowed if low is None else low if allowed is None else min(low, allowed)
        terms = ReserveTerms(ttr_ms=fetch.ttr_ms, consumer=consumer, auto=fetch.auto, low=low)
        messages = self._engine.reserve(fetch.topic, fetch.group, count, now_ms, **terms)
        self._flow.delivered(fetch.topic, fetch.group, settings, len(messages), clock, messages.bytes)
        if self._tenants is not None and self._turns is not None:
            self._tenants.delivered(fetch.topic, len(messages), not fetch.auto)
            self._turns.charge(self._tenants.owner(fetch.topic), messages.bytes)
        return messages

    def _has_ready(self, topic: str, group: str, now_ms: int, clock: float) -> bool:
        """Whether a waiting fetch may get messages, as far as the delivery rate allows any now. O(1)."""
        opened = self._engine.topics.get(topic)
        if opened is None:
            return False
        if pause := self._flow.delivery_pause(topic, group, opened.settings, clock):
            self._paused_until[topic] = min(self._paused_until.get(topic, math.inf), clock + pause)
            return False
        if not opened.view.has_ready(group, now_ms):
            return False
        if self._tenants is not None and not self._tenants.room(topic, 1, clock):
            self._tenants.block(topic, clock)
            return False
        return True


def _registered(queue: Queue) -> list[LongPoll]:
    return [poll for poll in islice(queue, LOOKED_AT) if poll.fetch.share is not None]


def _share(poll: LongPoll) -> float:
    return 0.0 if poll.fetch.share is None else poll.fetch.share()


def _with_most_low(poll: LongPoll, queue: Queue) -> LongPoll | None:
    """The long poll that may get the most messages of low priority, if that are more than this one may get; None: there is none.
    Looks at the first ones alone."""
    if poll.fetch.low is None:
        return None
    most = max(islice(queue, LOOKED_AT), key=_low)
    return most if _low(most) > _low(poll) else None


def _low(poll: LongPoll) -> float:
    return math.inf if poll.fetch.low is None else poll.fetch.low()


def in_flight(engine: Engine, topic: str) -> int:
    """Messages of a topic under a lease; 0 for one that was deleted."""
    found = engine.topics.get(topic)
    return 0 if found is None else found.view.in_flight
