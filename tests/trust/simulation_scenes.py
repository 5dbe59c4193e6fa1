"""Scenes: a few requests in a row that lead where chance alone seldom comes. Each of them may meet the end of the process.

More messages due at one moment than are fired one by one; sleepers of sealed segments that end right before their tombstones are
sealed in turn; consumers that answer after their lease, when another consumer has the message.
"""

from __future__ import annotations

from functools import partial

from tests.trust.simulation_auditor import Fetch
from tests.trust.simulation_review import Review
from tests.trust.simulation_story import Step, Story
from turtlemq import small_batches
from turtlemq.topic.maintenance import MAINTENANCE_MS

_FULL = 14  # messages that fill a segment


class StoryWithScenes(Story):
    """A run in which scenes come between single requests."""

    def rare_scenes(self) -> list[Step]:
        return [partial(ended_sleepers, self), partial(slow_consumer, self)]

    def rarest_scenes(self) -> list[Step]:
        return [partial(crowd, self)]


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
