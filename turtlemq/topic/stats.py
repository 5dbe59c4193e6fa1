"""Figures of a topic and of its groups, from counters that the stores keep: nothing is counted by reading messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True)
class TopicTotals:
    """Counters of a topic since it was opened."""

    produced: int
    duplicates: int
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


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Figures of a group. `history` counts acknowledged deliveries; everything before `offset` is settled."""

    ready: int
    reserve: int
    history: int
    dead: int
    offset: int
    lag: int  # offsets between there and the end of the ready log
    changed_ms: int


def topic_stats(stores: Stores, oldest: bool = True) -> TopicStats:
    """Figures of a topic, exact. O(segments + groups). `oldest=False` leaves out the time of the oldest ready message, which is
    read from its file and costs four times as much as all the rest."""
    index, broker = stores.index.stats(), stores.broker
    groups = broker.groups.values()
    waiting = sum(group.ready for group in groups) if groups else broker.unclaimed
    logs = sum(segment.size for segment in broker.ready.segments) + broker.reserve_log.bytes_total + broker.history.bytes_total
    dead = stores.dead_letters.index.stats()
    return TopicStats(
        sleep=index.sleep,
        ready=waiting,
        reserve=sum(group.in_flight for group in groups),
        history=sum(group.settled for group in groups),
        dead=dead.sleep,
        cancelled=broker.notices + len(broker.cancelled) - len(broker.cancelled_retries),
        bytes=index.bytes + logs + dead.bytes,
        segments=index.segments + len(broker.ready.segments),
        live_ratio=index.live_ratio,
        oldest_ready_ms=_oldest_ready(stores) if oldest and waiting else None,
        next_due_ms=index.next_due_ms,
        damaged=len(stores.damage()),
    )


def topic_totals(stores: Stores) -> TopicTotals:
    """Counters of Index, Broker and dead letters, since the topic was opened."""
    counters, dead_letters = stores.index.counters, stores.dead_letters
    return TopicTotals(
        produced=counters.appended,
        duplicates=counters.duplicates,
        rescheduled=counters.rescheduled,
        cancelled=counters.cancelled + stores.broker.cancels,
        handed_off=counters.handed_off,
        retried=counters.retried,
        moved=counters.moved,
        seals=counters.seals,
        segments_dropped=counters.segments_dropped,
        bytes_dropped=counters.bytes_dropped,
        dead_requeued=dead_letters.requeued,
        dead_dropped=dead_letters.dropped,
    )


def _oldest_ready(stores: Stores) -> int | None:
    """When the oldest message that a group has not fetched became ready."""
    ready = stores.broker.ready
    cursors = [cursor for group in stores.broker.groups.values() for cursor in group.cursors.values()]
    first = max(min(cursors, default=ready.first_offset), ready.first_offset)
    if first >= ready.next_offset:
        return None
    return int(ready.read(np.array([first]))[1][0])


def group_stats(stores: Stores) -> dict[str, GroupStats]:
    """Figures of every group."""
    end = stores.broker.ready.next_offset
    return {
        name: GroupStats(
            g.ready, g.in_flight, g.settled, stores.broker.dead_counts[name], g.committed, end - g.committed, g.changed_ms
        )
        for name, g in stores.broker.groups.items()
    }
