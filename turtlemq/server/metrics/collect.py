"""Collecting the figures of topics, for /metrics and /v1/status: counts by state, totals since the start, histograms.

Figures are taken when they are asked for, in slices of a few milliseconds, so that other requests are not delayed. Labels are
bounded: the first TOPICS_MAX topics, the busiest first, keep their own label for as long as they exist; all others share `other`,
so that no counter goes back when another topic becomes busier. The groups of a topic are bounded likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turtlemq.engine import Engine
from turtlemq.histogram import LATENESS_MS, GroupTally, Histogram
from turtlemq.lifecycle import STATES
from turtlemq.server.fair_turns import in_slices
from turtlemq.topic.stats import GroupStats, TopicStats, TopicTotals
from turtlemq.topic.topic import Topic

TOPICS_MAX = 100  # labels
GROUPS_MAX = 10  # labels of one topic
OTHER = "other"
GROUP_STATES = ("ready", "reserve", "history", "dead")
ADD_UP = ("bytes", "segments", "damaged", "trouble", "stopped", "ready_unsynced", *STATES)  # may be summed over topics


@dataclass(slots=True)
class TopicFigures:
    """Figures of one topic, or of several together. Groups that share a label are summed."""

    stats: dict[str, float | None]
    totals: dict[str, int]
    groups: dict[str, dict[str, int]]
    lateness: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))
    wait: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))


class TopicLabels:
    """The topics that have a label of their own."""

    def __init__(self, most: int = TOPICS_MAX) -> None:
        self._most, self._names = most, set[str]()

    async def names(self, engine: Engine) -> set[str]:
        """Their names: topics that had a label keep it, free places go to the busiest. O(topics) where there are too many."""
        self._names &= engine.topics.keys()
        if len(self._names) < min(self._most, len(engine.topics)):
            new = [name for name in engine.topics if name not in self._names]
            if len(new) > self._most - len(self._names):
                new = await busiest(engine, new)
            self._names.update(new[: self._most - len(self._names)])
        return set(self._names)


async def busiest(engine: Engine, names: Iterable[str]) -> list[str]:
    """Topics by activity, then by name. 7 µs each."""
    scored = await in_slices((-engine.topics[name].view.activity, name) for name in names if name in engine.topics)
    return [name for _, name in sorted(scored)]


def figures_of(engine: Engine, name: str, now: int, brief: bool = False) -> TopicFigures:
    """A topic's figures. 150 µs; `brief`: 30 µs, without those that do not add up."""
    topic = engine.topics[name]
    counts, totals = topic.view.stats(oldest=not brief), topic.view.totals()
    stats: dict[str, float | None] = {key: getattr(counts, key) for key in TopicStats.__dataclass_fields__}
    stats |= {
        "trouble": int(name in engine.trouble),
        "stopped": int(topic.stopped is not None),
        "ready_unsynced": topic.view.unsynced_handoffs,
        "oldest_ready": None if counts.oldest_ready_ms is None else max(0, now - counts.oldest_ready_ms) / 1000,
        "next_due": None if counts.next_due_ms is None else counts.next_due_ms / 1000,
    }
    since_start: dict[str, int] = {key: getattr(totals, key) for key in TopicTotals.__dataclass_fields__}
    return TopicFigures(stats, since_start, _groups(topic), topic.view.lateness, topic.view.wait)


def _groups(topic: Topic) -> dict[str, dict[str, int]]:
    """Figures of the first GROUPS_MAX groups by name, and of all others together, by label."""
    out: dict[str, dict[str, int]] = {}
    tallies = topic.view.group_tallies()
    for i, (name, stats) in enumerate(sorted(topic.view.group_stats().items())):
        tally = tallies[name]
        figures = {f"now_{key}": getattr(stats, key) for key in GroupStats.__dataclass_fields__ if key in (*GROUP_STATES, "lag")}
        figures |= {key: getattr(tally, key) for key in GroupTally.__dataclass_fields__}
        label = name if i < GROUPS_MAX else OTHER
        out[label] = _sum(out[label], figures) if label in out else figures
    return out


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left | right}


def _merged(rows: list[TopicFigures]) -> TopicFigures:
    """Several topics together, as `other`."""
    stats: dict[str, float | None] = {key: sum(row.stats[key] or 0 for row in rows) for key in ADD_UP}
    totals: dict[str, int] = {}
    groups: dict[str, int] = {}
    for row in rows:
        totals = _sum(totals, row.totals)
        for group in row.groups.values():
            groups = _sum(groups, group)
    empty = Histogram(LATENESS_MS)
    lateness, wait = empty.merge(row.lateness for row in rows), empty.merge(row.wait for row in rows)
    return TopicFigures(stats, totals, {OTHER: groups} if groups else {}, lateness, wait)


async def collect(engine: Engine, labels: set[str], now: int) -> dict[str, TopicFigures]:
    """The figures of all topics, by label: `labels`, and `other` for the rest."""
    listed = sorted(engine.topics, key=lambda name: (name not in labels, name))
    rows = await in_slices((name, figures_of(engine, name, now, name not in labels)) for name in listed if name in engine.topics)
    out = {name: row for name, row in rows if name in labels}
    rest = [row for name, row in rows if name not in labels]
    if rest:
        parts = await in_slices(_merged(rest[i : i + 50]) for i in range(0, len(rest), 50))
        out[OTHER] = _merged(parts if OTHER not in out else [*parts, out[OTHER]])  # a topic may have this name
    return out
