"""What people ask of a topic, put together from Index, Broker and dead letters: figures, and the whole story of one message."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from turtlemq.broker import delivery
from turtlemq.broker.group import Group
from turtlemq.model import State
from turtlemq.segment import format as f
from turtlemq.topic import Topic


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Figures of a topic. ready, reserve and history are summed over groups; without any, what is ready waits for the first."""

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
class GroupStats:
    """Figures of a group. `offset`: everything before it is settled."""

    ready: int
    reserve: int
    history: int
    dead: int
    offset: int
    lag: int  # offsets between there and the end of the ready log
    changed_ms: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a message."""

    at_ms: int
    event: str
    group: str = ""
    detail: str = ""


@dataclass(slots=True)
class MessageView:
    """Everything known of one message."""

    id: str
    state: str
    due_ms: int
    created_ms: int
    attempt: int
    body: bytes
    json: bool
    headers: dict[str, str]
    ttr_ms: int
    priority: int
    expires_ms: int | None
    groups: dict[str, dict[str, object]] = field(default_factory=dict)
    timeline: list[Moment] = field(default_factory=list)


def topic_stats(topic: Topic) -> TopicStats:
    """See `Engine.stats`."""
    index, broker = topic.index.stats(), topic.broker
    groups = broker.groups.values()
    waiting = sum(group.ready for group in groups) if groups else broker.unclaimed
    logs = sum(segment.size for segment in broker.ready.segments) + broker.reserve_log.bytes_total + broker.history.bytes_total
    dead = topic.dead.index.stats()
    return TopicStats(
        sleep=index.sleep,
        ready=waiting,
        reserve=sum(group.in_flight for group in groups),
        history=sum(group.settled for group in groups),
        dead=dead.sleep,
        cancelled=broker.notices + len(broker.cancelled),
        bytes=index.bytes + logs + dead.bytes,
        segments=index.segments + len(broker.ready.segments),
        live_ratio=index.live_ratio,
        oldest_ready_ms=_oldest_ready(topic),
        next_due_ms=index.next_due_ms,
        damaged=len(topic.damage()),
    )


def _oldest_ready(topic: Topic) -> int | None:
    """When the oldest message that some group has not fetched became ready."""
    ready = topic.broker.ready
    cursors = [cursor for group in topic.broker.groups.values() for cursor in group.cursors.values()]
    first = max(min(cursors, default=ready.first_offset), ready.first_offset)
    if first >= ready.next_offset:
        return None
    return int(ready.read(np.array([first]))[1][0])


def group_stats(topic: Topic) -> dict[str, GroupStats]:
    """See `Engine.groups`."""
    end = topic.broker.ready.next_offset
    return {
        name: GroupStats(g.ready, g.in_flight, g.settled, topic.broker.dead[name], g.committed, end - g.committed, g.changed_ms)
        for name, g in topic.broker.groups.items()
    }


def message(topic: Topic, id_: str) -> MessageView | None:
    """See `Engine.message`. Looks into the history of settlements, newest first, only if a group has settled it."""
    hit = topic.index.shelf.find(id_)
    if (
        hit is not None
        and topic.index.get(id_) is not None
        and not topic.index.shelf.progress.covers_one(hit[2].due_ms, hit[2].seq)
    ):
        return _view(hit[2], State.SLEEP.value)
    offset = topic.broker.ready.find(id_)
    if offset is None:
        return _survivor(topic, id_)
    read, times = topic.broker.ready.read(np.array([offset]))
    document = delivery.document(read, 0)
    view = _view(document, topic.broker.state(offset))
    if document.flags & f.NOTICE:
        view.timeline = [Moment(int(times[0]), "cancelled")]
        return view
    view.timeline.append(Moment(int(times[0]), "ready"))
    return _complete(topic, view, offset)


def _complete(topic: Topic, view: MessageView, offset: int) -> MessageView:
    """What every group makes of a message at a ready offset; -1: only its retries and dead letters are left."""
    for group in topic.broker.groups.values():
        view.groups[group.name] = _in_group(topic, group, view.id, offset, view.priority, view)
    states = {str(entry["state"]) for entry in view.groups.values()}
    if view.state != "cancelled" and states:
        view.state = next(s for s in ("reserve", "sleep", "ready", "dead", "history") if s in states)
    view.attempt = max((int(str(entry.get("attempt", 0))) for entry in view.groups.values()), default=0)
    view.timeline.sort(key=lambda moment: moment.at_ms)
    return view


def _survivor(topic: Topic, id_: str) -> MessageView | None:
    """A message that retention has removed, but that a group still tries, or has among its dead."""
    for name in topic.broker.groups:
        key = f"{name}/{id_}"
        found = topic.index.find(key)
        if found is None and (at := topic.broker.ready.find(key)) is not None:
            found = delivery.document(topic.broker.ready.read(np.array([at]))[0], 0)
        if found is None:
            found = topic.dead.index.find(key)
        if found is not None:
            view = _view(found, "history")
            view.id, view.due_ms = id_, int(found.meta["due"])
            return _complete(topic, view, -1)
    return None


def _view(document: f.Document, state: str) -> MessageView:
    view = MessageView(
        id=document.id,
        state=state,
        due_ms=document.due_ms,
        created_ms=document.created_ms,
        attempt=0,
        body=document.body,
        json=bool(document.flags & f.JSON),
        headers=document.headers,
        ttr_ms=document.ttr_ms,
        priority=document.flags & f.PRIORITY,
        expires_ms=document.expires_ms,
    )
    if not document.flags & f.NOTICE:
        view.timeline = [Moment(document.created_ms, "created"), Moment(document.due_ms, "due")]
    return view


def _in_group(topic: Topic, group: Group, id_: str, offset: int, level: int, view: MessageView) -> dict[str, object]:
    """A message's state in one group."""
    slot = group.ids.get(id_)
    if slot is not None:
        lease, i = group.slot(slot)
        view.timeline.append(Moment(lease.reserved_ms, "reserved", group.name, lease.consumer))
        attempt = int(lease.held.attempts[i])
        return {"state": "reserve", "attempt": attempt, "lease_until_ms": lease.until_ms, "consumer": lease.consumer}
    key = f"{group.name}/{id_}"
    again, progress = topic.index.find(key), topic.index.shelf.progress
    if again is not None and not progress.covers_one(again.due_ms, again.seq) and not delivery.void(group, again):
        return {"state": "sleep", "due_ms": again.due_ms}
    for at in (_own_retry(topic, group, key), offset):
        if at is not None and at in group.waiting:
            waiting = group.waiting[at]
            return {"state": "ready", "attempt": waiting.attempt - 1, "due_ms": waiting.when_ms, "error": waiting.error}
        if at is not None and at >= group.cursors[level]:
            return {"state": "ready", "attempt": 0}
    letter = topic.dead.get(group.name, id_)
    if letter is not None:
        view.timeline.append(Moment(letter.dropped_ms, "dead", group.name, letter.error))
        return {"state": "dead", "attempt": letter.attempts, "error": letter.error}
    return _settled(topic, group, id_, view)


def _own_retry(topic: Topic, group: Group, key: str) -> int | None:
    """Where in the ready log a group's latest retry of a message is, if it counts."""
    at = topic.broker.ready.find(key)
    if at is None:
        return None
    read, _ = topic.broker.ready.read(np.array([at]))
    return None if delivery.void(group, delivery.document(read, 0)) else at


def _settled(topic: Topic, group: Group, id_: str, view: MessageView) -> dict[str, object]:
    """How a group settled it, from the history. O(settlements behind it)."""
    for event in topic.broker.history.events():
        if event.group != group.name or event.fields["event"] != "settle":
            continue
        ids = event.fields["ids"].decode().split("\0")
        if id_ in ids:
            i = ids.index(id_)
            view.timeline.append(Moment(int(event.array("reserved")[i]), "reserved", group.name))
            view.timeline.append(Moment(event.at_ms, str(event.fields["outcome"]), group.name))
            return {"state": "history", "attempt": int(event.array("attempts")[i]), "settled_ms": event.at_ms}
    return {"state": "history", "attempt": 0}
