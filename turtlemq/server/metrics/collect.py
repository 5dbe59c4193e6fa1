"""Collecting the figures of topics, for /metrics and /v1/status: counts by state, totals since the start, histograms.

Figures are taken when they are asked for, in slices of a few milliseconds, so that other requests are not delayed. The module
`labels` decides which topics and groups are shown on their own; all others are summed as `other`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turtlemq.engine import Engine
from turtlemq.histogram import LATENESS_MS, GroupTally, Histogram
from turtlemq.lifecycle import STATES
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.metrics.labels import OTHER, TALLIES, Counters, GroupLabels, Member, TopicLabels, totals_of
from turtlemq.topic.stats import GroupStats, TopicStats
from turtlemq.topic.topic import Topic

GROUP_STATES = ("ready", "reserve", "history", "dead")
GAUGES = (*GROUP_STATES, "lag", "paused")  # of a group
_NO_MESSAGES = dict.fromkeys((f"now_{key}" for key in GAUGES), 0)
ADD_UP = ("bytes", "segments", "damaged", "trouble", "stopped", "ready_unsynced", "paused", *STATES)  # may be summed over topics


@dataclass(slots=True)
class TopicFigures:
    """Figures of one topic, or of several together. Groups that share a label are summed."""

    stats: dict[str, float | None]
    totals: dict[str, int]
    groups: dict[str, dict[str, int]]
    lateness: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))
    wait: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))


def figures_of(engine: Engine, name: str, now: int, groups: GroupLabels | None = None) -> TopicFigures:
    """A topic's figures. 150 µs. `groups`: the labels of its groups; by default the first groups by name have one."""
    topic = engine.topics[name]
    stats = _stats(engine, topic)
    oldest_ms, next_ms = stats["oldest_ready_ms"], stats["next_due_ms"]
    stats["oldest_ready"] = None if oldest_ms is None else max(0, now - oldest_ms) / 1000
    stats["next_due"] = None if next_ms is None else next_ms / 1000
    return TopicFigures(stats, totals_of(topic), _groups(topic, groups or GroupLabels()), topic.view.lateness, topic.view.wait)


def _stats(engine: Engine, topic: Topic, brief: bool = False) -> dict[str, float | None]:
    """Gauges of a topic. `brief`: 30 µs, without those that do not add up."""
    counts = topic.view.stats(oldest=not brief)
    stats: dict[str, float | None] = {key: getattr(counts, key) for key in TopicStats.__dataclass_fields__}
    return stats | {
        "trouble": int(topic.name in engine.trouble),
        "stopped": int(topic.stopped is not None),
        "ready_unsynced": topic.view.unsynced_handoffs,
        "paused": int(topic.view.is_paused()),
        "high_weight": topic.view.high_weight,
    }


def _groups(topic: Topic, labels: GroupLabels) -> dict[str, dict[str, int]]:
    """Figures of the groups of a topic, by label."""
    out: dict[str, dict[str, int]] = {}
    tallies = topic.view.group_tallies()
    labels.update(tallies)
    for name, stats in sorted(topic.view.group_stats().items()):
        figures = {f"now_{key}": int(getattr(stats, key)) for key in GroupStats.__dataclass_fields__ if key in GAUGES}
        label = labels.label_of(name)
        if label != OTHER:
            figures |= _counts(tallies[name])
        out[label] = _sum(out[label], figures) if label in out else figures
    if (others := labels.others) is not None:
        out[OTHER] = out.get(OTHER, _NO_MESSAGES) | _counts(others)
    return out


def _counts(tally: GroupTally) -> dict[str, int]:
    return {key: getattr(tally, key) for key in TALLIES}


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left | right}


@dataclass(slots=True)
class _Rest:
    """A part of the members of `other`: their gauges that add up, and their counters."""

    stats: dict[str, float]
    groups: dict[str, int]  # gauges of groups
    counters: Counters

    @classmethod
    def of(cls, engine: Engine, member: Member) -> _Rest:
        """One topic. Of one that was deleted since the scrape began, only the counters are left."""
        counters, gauges, stats = Counters.of(member), dict[str, int](), dict.fromkeys(ADD_UP, 0.0)
        if engine.topics.get(member.topic.name) is member.topic:
            figures = _stats(engine, member.topic, brief=True)
            stats = {key: figures[key] or 0 for key in ADD_UP}
            for group in member.topic.view.group_stats().values():
                gauges = _sum(gauges, {f"now_{key}": int(getattr(group, key)) for key in GAUGES})
        return cls(stats, gauges, counters)

    @classmethod
    def join(cls, parts: list[_Rest]) -> _Rest:
        stats = {key: sum(part.stats[key] for part in parts) for key in ADD_UP}
        groups: dict[str, int] = {}
        for part in parts:
            groups = _sum(groups, part.groups)
        return cls(stats, groups, Counters().plus(part.counters for part in parts))


async def collect(engine: Engine, labels: TopicLabels, now: int) -> dict[str, TopicFigures]:
    """The figures of all topics, by label."""
    scrape = await labels.scrape(engine)
    rows = await in_slices(
        (name, figures_of(engine, name, now, member.groups))
        for name, member in sorted(scrape.own.items())
        if engine.topics.get(name) is member.topic
    )
    out = dict(rows)
    if scrape.others or scrape.departed.totals:
        parts = await in_slices(_Rest.of(engine, member) for member in scrape.others)
        parts = await in_slices(_Rest.join(parts[i : i + 50]) for i in range(0, len(parts), 50))
        out[OTHER] = _others(_Rest.join(parts), scrape.departed)
    return out


def _others(rest: _Rest, departed: Counters) -> TopicFigures:
    """All members of `other`, former ones included."""
    counters = departed.plus([rest.counters])
    groups = {OTHER: _NO_MESSAGES | rest.groups | _counts(counters.groups)}
    no_groups = not rest.groups and counters.groups == GroupTally()
    return TopicFigures({**rest.stats}, counters.totals, {} if no_groups else groups, counters.lateness, counters.wait)
