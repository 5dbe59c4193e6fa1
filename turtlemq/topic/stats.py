"""Figures of a topic and of its groups, from counters that the stores keep: nothing is counted by reading messages."""

from __future__ import annotations

from dataclasses import dataclass

from turtlemq.broker.priorities import HIGH, weights_of
from turtlemq.topic.stores import Stores


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Figures of a topic.

    `sleep`, `dead` and `cancelled` count documents: sleepers (void retries included until they come due), dead letters, and
    messages cancelled since the topic began. `ready`, `reserve` and `history` are sums over groups; without a group, `ready`
    counts the messages that wait for the first."""

    sleep: int
    ready: int
    reserve: int
    history: int
    dead: int
    cancelled: int
    bytes: int
    segments: int
    live_ratio: float
    oldest_ready_ms: int | None
    next_due_ms: int | None
    damaged: int
    schedules: int = 0


@dataclass(frozen=True, slots=True)
class TopicTotals:
    """Counters of a topic since it was opened."""

    produced: int
    duplicates: int
    replaced: int
    rescheduled: int
    cancelled: int
    handed_off: int
    retried: int
    moved: int  # by compaction
    seals: int
    segments_dropped: int
    bytes_dropped: int
    dead_requeued: int
    dead_dropped: int  # by age or number
    fired: int  # by schedules


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Figures of a group. `history` counts acknowledged deliveries; everything before `offset` is settled. `paused`: the group
    itself; the groups of a paused topic are given no messages either. `high_weight`: the weight of high priority now;
    `preempting`: low and normal priority give way to it."""

    ready: int
    reserve: int
    history: int
    dead: int
    offset: int
    lag: int  # offsets between there and the end of the ready log
    changed_ms: int
    paused: bool
    high_weight: float
    preempting: bool


def topic_stats(stores: Stores, oldest: bool = True) -> TopicStats:
    """Figures of a topic, exact. O(segments + groups). `oldest=False` leaves out the time of the oldest ready message, which is
    read from its file and costs four times as much as all the rest."""
    index, dead, broker = stores.index.stats(), stores.dead_letters.index.stats(), stores.broker.stats()
    return TopicStats(
        sleep=index.sleep,
        ready=broker.ready,
        reserve=broker.reserve,
        history=broker.history,
        dead=dead.sleep,
        cancelled=broker.cancelled,
        bytes=broker.bytes + sum(one.stats().bytes for one in stores.indexes),
        segments=index.segments + broker.segments,
        live_ratio=index.live_ratio,
        oldest_ready_ms=stores.broker.oldest_ready_ms() if oldest and broker.ready else None,
        next_due_ms=index.next_due_ms,
        damaged=len(stores.damage()),
        schedules=0 if stores.schedules is None else len(stores.schedules),
    )


def topic_totals(stores: Stores) -> TopicTotals:
    """Counters of the stores, since the topic was opened."""
    counters, dead_letters = stores.index.counters, stores.dead_letters
    return TopicTotals(
        produced=counters.appended,
        duplicates=counters.duplicates,
        replaced=counters.replaced,
        rescheduled=counters.rescheduled,
        cancelled=counters.cancelled + stores.broker.cancel_count,
        handed_off=counters.handed_off,
        retried=counters.retried,
        moved=counters.moved,
        seals=counters.seals,
        segments_dropped=counters.segments_dropped,
        bytes_dropped=counters.bytes_dropped,
        dead_requeued=dead_letters.requeued,
        dead_dropped=dead_letters.dropped,
        fired=0 if stores.schedules is None else stores.schedules.fired,
    )


def group_stats(stores: Stores) -> dict[str, GroupStats]:
    """Figures of every group."""
    end = stores.broker.ready.next_offset
    dead, paused = stores.broker.dead_counts, stores.pauses.groups
    return {
        name: GroupStats(
            group.ready,
            group.in_flight,
            group.settled,
            dead[name],
            done,
            end - done,
            group.changed_ms,
            name in paused,
            weights_of(stores.broker.settings, group.weight)[HIGH],
            group.preemption.active,
        )
        for name, group in stores.broker.groups.items()
        for done in [group.committed]
    }
