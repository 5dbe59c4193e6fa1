"""Scenes: a few requests in a row that lead where chance alone seldom comes. Each of them may meet the end of the process.

More messages due at one moment than are fired one by one; sleepers of sealed segments that end right before their tombstones are
sealed in turn; consumers that answer after their lease, when another consumer has the message; consumers that ask and wait on a
quiet topic for longer than an unused group is kept; groups and topics that are deleted while a fetch waits for their messages;
in every third story, ids that are used as timers, and in every third recurring schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from tests.trust.simulation_auditor import Fetch
from tests.trust.simulation_polls import Poll
from tests.trust.simulation_review import Review
from tests.trust.simulation_schedules import Timetable
from tests.trust.simulation_story import Step, Story
from tests.trust.simulation_timers import Refusal, Timer
from turtlemq import small_batches
from turtlemq.errors import Conflict
from turtlemq.if_exists import IfExists
from turtlemq.model import Batch, Receipt
from turtlemq.topic.maintenance import MAINTENANCE_MS, RETENTION_MS

_FULL = 14  # messages that fill a segment


class StoryWithScenes(Story):
    """A run in which scenes come between single requests."""

    @cached_property
    def timetable(self) -> Timetable:
        """Recurring schedules, in a topic of their own."""
        return Timetable(self)

    def rare_scenes(self) -> list[Step]:
        return [
            partial(ended_sleepers, self),
            partial(slow_consumer, self),
            partial(quiet_consumer, self),
            partial(drop_group, self),
            *([partial(start_timers, self)] * 12 if self.uses_timers else []),
            *([self.timetable.step] * 12 if self.uses_schedules else []),
        ]

    def rarest_scenes(self) -> list[Step]:
        return [partial(crowd, self), partial(drop_topic, self)]

    def drain(self) -> None:
        """Schedules come to their end first."""
        if self.uses_schedules:
            self.ends, self.process.ends_in = 0.0, -1
            self.timetable.finish(next(iter(self.topics.values())))
        super().drain()


def crowd(story: Story, name: str, audit: Review) -> None:
    """Many are due at one moment, some right before and behind it, and the clock stands at each of these."""
    chance = story.chance
    due = story.now + chance.choice([2, 300, 3_000])
    dues = [*[due] * (small_batches.HANDOFF + chance.randint(1, 15)), due - 1, due + 1, due + 1]
    chance.shuffle(dues)
    batch = story.compose(dues, [0, 10])
    story.send(name, audit, batch)
    story.tick_to(due - 1)
    asked = Fetch(chance.choice(story.groups), 1_000, None, False)
    for moment in (due, due + 1):
        story.tick_to(moment)
        story.look_at(name, audit, [sent.id for sent in batch if sent.due_ms > due and sent.id in audit.sent])
        story.fetch_so(name, audit, asked)


def ended_sleepers(story: Story, name: str, audit: Review) -> None:
    """A segment of sleepers is sealed, some of them end, and their tombstones are sealed before the rest is forgotten."""
    _fill(story, name, audit)
    _keep_house(story, name, audit)
    old = [sent.id for sent in audit.sent.values() if sent.accepted and sent.cancelled is False and audit.asleep(sent)]
    chosen = story.some(old, 6)
    half = story.chance.randint(0, len(chosen))
    if chosen[half:]:
        story.cancel_so(name, audit, chosen[half:])
    for id_ in chosen[:half]:
        story.reschedule_so(name, audit, id_, story.now + story.chance.choice([10, 40_000]))
    _fill(story, name, audit)
    _keep_house(story, name, audit)
    if story.chance.random() < story.ends * 5:
        story.end_now()
    story.look_at(name, audit, story.some(chosen, 2))


def start_timers(story: Story, name: str, audit: Review) -> None:
    """Messages under ids of which some are known, in every mode; the put may not be answered, and is looked at then."""
    chance = story.chance
    usable = [sent for sent in audit.sent.values() if sent.accepted and sent.cancelled is not None and len(sent.versions) == 1]
    ids = [sent.id for sent in story.some(usable, 3)] if usable else []
    fresh = story.compose([story.now + chance.choice([0, 5, 200, 20_000]) for _ in range(len(ids) + 1)], [10, 30])
    modes = [chance.choice([IfExists.KEEP, *[IfExists.REPLACE] * 3, *[IfExists.RESCHEDULE] * 2, IfExists.ERROR]) for _ in fresh]
    batch = [Timer(sent, mode) for sent, mode in zip(fresh, modes, strict=True)]
    for timer, id_ in zip(batch, ids, strict=False):
        timer.sent.id = id_
    for sent in fresh:
        sent.expires_ms = None
    chance.shuffle(batch)
    if any(audit.sent[id_].expires_ms is not None for id_ in ids):
        return  # a later due time may be refused
    unheard: list[bool] = []

    def put() -> Receipt | Refusal:
        try:
            return story.engine.submit(name, as_batch_of(batch), story.now)
        except Conflict as refused:
            return Refusal(int(str(refused.details["index"])), str(refused.details["state"]))

    story.ask(audit, put, lambda told: unheard.append(True) if told is None else audit.timers(batch, told))
    while unheard:
        views = story.ask(audit, lambda: [story.engine.message(name, timer.sent.id) for timer in batch], nothing)
        if views is not None:
            audit.timers_found(batch, views)
            return


def as_batch_of(batch: Sequence[Timer]) -> Batch:
    """Timers as the columns of a put."""
    sent = [timer.sent for timer in batch]
    return Batch(
        [s.body for s in sent],
        [s.due_ms for s in sent],
        [s.id for s in sent],
        [s.ttr_ms for s in sent],
        [s.level for s in sent],
        [timer.mode for timer in batch],
        headers=[s.headers or None for s in sent],
    )


def nothing(_: object) -> None:
    """An answer that tells the auditor nothing."""


def _fill(story: Story, name: str, audit: Review) -> None:
    """A segment of messages that sleep for long."""
    pick = story.chance.choice
    dues = [story.now + pick([30_000, 60_000, 200_000]) for _ in range(_FULL)]
    story.send(name, audit, story.compose(dues, [story.settings.segment_bytes // (_FULL - 2)]))


def _keep_house(story: Story, name: str, audit: Review) -> None:
    """All at once, or in the pace of the engine."""
    if story.chance.random() < 0.3:
        story.compact(name, audit)
    else:
        for _ in range(3):
            story.pass_time(MAINTENANCE_MS)


def slow_consumer(story: Story, name: str, audit: Review) -> None:
    """Its leases run out, the messages go to another, and then it reports their outcome; the other does so after it."""
    chance, seen = story.chance, story.seen
    group, ttr = chance.choice(story.groups), chance.choice([10, 40])
    first = story.fetch_so(name, audit, Fetch(group, chance.choice([1, 5, 50]), ttr, False))
    if first is None or not first.ids:
        return
    ids = list(first.ids)
    story.tick_to(story.now + ttr)
    other = story.fetch_so(name, audit, Fetch(group, 50, None, False)) if chance.random() < 0.8 else None
    theirs = [] if other is None else list(other.ids)
    late = story.some(ids, 5)
    acks, lease = [f"-{id_}" if chance.random() < 0.4 else id_ for id_ in late], first.lease
    if story.ack_so(name, audit, group, acks, [lease] * len(late) if chance.random() < 0.5 else None):
        seen["late acks"] += len(late)
        seen["of them for another's lease"] += len(set(late) & set(theirs))
    if theirs:
        story.ack_so(name, audit, group, story.some(theirs, 50))


def quiet_consumer(story: Story, name: str, audit: Review) -> None:
    """A group has acknowledged everything, and goes on asking, or waits, until it would be forgotten if that were no use."""
    limit = round(story.settings.group_expire_hours * 3_600_000)
    if not limit:
        return
    chance, group = story.chance, story.chance.choice(story.groups)
    wait, end = chance.choice([0, 20_000, 3 * limit]), story.steady + 2 * limit + 3 * RETENTION_MS
    while story.steady < end:
        if group not in story.polls.groups(name):
            out = story.poll_so(name, audit, Fetch(group, 50, None, False), wait)
            if out is None:
                return
            if out.ids:
                story.ack_so(name, audit, group, list(out.ids))
        story.pass_time(chance.choice([10_000, RETENTION_MS // 2, min(limit // 2, RETENTION_MS)]))
        story.seen["asked on a quiet topic"] += 1
    story.look(name, audit)


def drop_group(story: Story, name: str, audit: Review) -> None:
    """A group is deleted. Fetches that wait for its messages are answered, and do not make it anew."""
    group = story.chance.choice(story.groups)
    if story.chance.random() < 0.7:
        story.poll_so(name, audit, Fetch(group, 5, None, False), 60_000)
    if group not in audit.groups or audit.groups[group].exists is not True:
        return
    mine = [poll for poll in story.polls.waiting if (poll.topic, poll.asked.group) == (name, group)]

    def drop() -> bool:
        story.fetches.drop_group(name, group, story.now)
        return True

    def heard(told: bool | None) -> None:
        audit.dropped(group, done=bool(told))
        _ended(story, audit, mine if told else [])

    story.ask(audit, drop, heard)
    story.tick()
    story.look(name, audit)


def drop_topic(story: Story, name: str, audit: Review) -> None:
    """A topic is deleted and created anew. Fetches that wait for its messages are answered, and get nothing from the new one."""
    if story.chance.random() < 0.7:
        story.poll_so(name, audit, Fetch(story.chance.choice(story.groups), 5, None, False), 60_000)
    mine = [poll for poll in story.polls.waiting if poll.topic == name]

    def drop() -> bool:
        story.fetches.drop_topic(name)
        return True

    story.ask(audit, drop, lambda told: _ended(story, audit, mine if told else []))
    if name in story.engine.topics:
        return  # the process has ended before
    story.seen += audit.seen
    story.seen["topics deleted"] += 1
    fresh = story.topics[name] = story.review(name)
    story.unanswered[name] = []
    while name not in story.engine.topics:
        story.ask(fresh, lambda: story.engine.topic(name, create=True), lambda _: None)
    story.submit(name, fresh)
    story.tick()


def _ended(story: Story, audit: Review, polls: list[Poll]) -> None:
    """These fetches were to be answered, without messages."""
    story.seen["polls of deleted groups"] += len(polls)
    if any(poll.result is None or poll.result.ids for poll in polls):
        audit.fail("fetches that wait for messages of a deleted group or topic are answered, without any", polls)
    story.hear_polls()
