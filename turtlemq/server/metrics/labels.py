"""Labels of metrics: which topics and groups have one of their own, and the counters of all others together, as `other`.

Labels are bounded. The first TOPICS_MAX topics, the busiest first, and the first GROUPS_MAX groups of each, by name, keep their
own label for as long as they exist. No counter goes back because another topic or group comes or goes: when a member of `other`
is deleted, or gets a free label, its counts so far stay in `other`. For that, the sources of these counters are held from each
scrape to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from turtlemq.engine import Engine
from turtlemq.histogram import LATENESS_MS, GroupTally, Histogram
from turtlemq.server.fair_turns import Slices, in_slices
from turtlemq.topic.stats import TopicTotals
from turtlemq.topic.topic import Topic

TOPICS_MAX = 100  # labels
GROUPS_MAX = 10  # labels of one topic
OTHER = "other"
TALLIES = tuple(field.name for field in fields(GroupTally))


class GroupLabels:
    """The groups of one topic that have a label of their own, at most `most`."""

    def __init__(self, most: int = GROUPS_MAX) -> None:
        self._most = most
        self._own: set[str] = set()
        self._shared: dict[str, GroupTally] = {}  # members of `other`
        self._departed = GroupTally()  # counts of former members

    def update(self, tallies: Mapping[str, GroupTally]) -> None:
        """Use the groups that exist now. One with the name `other` has no label of its own."""
        self._own &= tallies.keys()
        if free := self._most - len(self._own):
            self._own.update(sorted(tallies.keys() - self._own - {OTHER})[:free])
        for name, tally in self._shared.items():
            if tallies.get(name) is not tally or name in self._own:
                self._departed = add_tallies([self._departed, tally])
        self._shared = {name: tally for name, tally in tallies.items() if name not in self._own}

    def label_of(self, name: str) -> str:
        """The label of a group."""
        return name if name in self._own else OTHER

    @property
    def others(self) -> GroupTally | None:
        """The counters of all members of `other`, former ones included; None if there never was one."""
        if not self._shared and self._departed == GroupTally():
            return None
        return add_tallies([self._departed, *self._shared.values()])


def add_tallies(tallies: Iterable[GroupTally]) -> GroupTally:
    """The sum of counters of groups."""
    return GroupTally(*(sum(counts) for counts in zip(*([getattr(t, name) for name in TALLIES] for t in tallies), strict=True)))


@dataclass(slots=True)
class Member:
    """A topic as one scrape knows it, with the labels of its groups."""

    topic: Topic
    groups: GroupLabels


@dataclass(slots=True)
class Counters:
    """All counters of a topic, or of several together."""

    totals: dict[str, int] = field(default_factory=dict)
    groups: GroupTally = field(default_factory=GroupTally)
    lateness: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))
    wait: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))

    @classmethod
    def of(cls, member: Member) -> Counters:
        """The counters of a member of `other`, with all of its groups. It may be closed."""
        topic, groups = member.topic, member.groups
        groups.update(topic.view.group_tallies())
        return cls(totals_of(topic), groups.others or GroupTally(), topic.view.lateness, topic.view.wait)

    def plus(self, others: Iterable[Counters]) -> Counters:
        """The sum of these counters and others."""
        rows = [self, *others]
        totals: dict[str, int] = {}
        for row in rows:
            totals = {key: totals.get(key, 0) + row.totals.get(key, 0) for key in totals | row.totals}
        empty = Histogram(LATENESS_MS)
        return Counters(
            totals,
            add_tallies([row.groups for row in rows]),
            empty.merge(row.lateness for row in rows),
            empty.merge(row.wait for row in rows),
        )


def totals_of(topic: Topic) -> dict[str, int]:
    """The counters of a topic without its groups."""
    totals = topic.view.totals()
    return {key: getattr(totals, key) for key in TopicTotals.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Scrape:
    """The topics of one scrape: those with a label of their own, the members of `other`, and the counts of its former members."""

    own: dict[str, Member]
    others: list[Member]
    departed: Counters


class TopicLabels:
    """The topics that have a label of their own, at most `most`."""

    def __init__(self, most: int = TOPICS_MAX) -> None:
        self._most = most
        self._own: dict[str, Member] = {}
        self._shared: dict[str, Member] = {}  # members of `other`
        self._departed = Counters()  # counts of former members

    async def scrape(self, engine: Engine) -> Scrape:
        """The topics that exist now: those that had a label keep it, free labels go to the busiest. O(topics), in slices."""
        new = [name for name in engine.topics if name not in self._own and name != OTHER]
        if len(new) > self._most - len(self._own.keys() & engine.topics.keys()):
            new = await busiest(engine, new)
        self._label(engine, new)
        slices = Slices()
        for name, member in list(self._shared.items()):
            if name in self._own or engine.topics.get(name) is not member.topic:
                self._depart(name, member)
            await slices.pause()
        for name, topic in engine.topics.items():
            if name not in self._own and name not in self._shared:
                self._shared[name] = Member(topic, GroupLabels(0))
        return Scrape(dict(self._own), list(self._shared.values()), self._departed)

    def _label(self, engine: Engine, new: list[str]) -> None:
        names = [name for name in self._own if name in engine.topics]
        names += [name for name in new if name in engine.topics and name not in self._own][: max(0, self._most - len(names))]
        self._own = {name: _member(self._own, engine.topics[name]) for name in names}

    def _depart(self, name: str, member: Member) -> None:
        """A topic leaves `other`, unless another scrape has seen that meanwhile."""
        if self._shared.get(name) is member:
            del self._shared[name]
            self._departed = self._departed.plus([Counters.of(member)])


def _member(known: Mapping[str, Member], topic: Topic) -> Member:
    """A topic as it was known; one that was deleted and created again is a new one."""
    member = known.get(topic.name)
    return member if member is not None and member.topic is topic else Member(topic, GroupLabels())


async def busiest(engine: Engine, names: Iterable[str]) -> list[str]:
    """Topics by activity, then by name. 7 µs each."""
    scored = await in_slices((-engine.topics[name].view.activity, name) for name in names if name in engine.topics)
    return [name for _, name in sorted(scored)]
