"""What people ask of a topic, put together from Index, Broker and dead letters: figures, and the whole story of one message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from turtlemq.broker import cancel, delivery
from turtlemq.broker.group import Group
from turtlemq.errors import InvalidArgument
from turtlemq.index.browse import LIMIT_MAX, PAGE_BYTES
from turtlemq.lifecycle import STATES
from turtlemq.model import DUE_MS_MAX, State
from turtlemq.segment import format as f
from turtlemq.topic import retries
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.stores import Stores

FURTHEST = ("reserve", "sleep", "ready", "dead", "history")  # the state of a message is the first of these that a group has it in
_EVENTS_MAX = 2_000  # looked through for one message: about 100 ms
_LOOK_MAX = 4_000  # documents of the ready log that one page of a listing looks at: 100 ms
_LOOK_STEP = 500


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


def topic_stats(stores: Stores, oldest: bool = True) -> TopicStats:
    """See `Engine.stats`. Four fifths of its cost are for the oldest, which is read from its file."""
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


def _oldest_ready(stores: Stores) -> int | None:
    """When the oldest message that some group has not fetched became ready."""
    ready = stores.broker.ready
    cursors = [cursor for group in stores.broker.groups.values() for cursor in group.cursors.values()]
    first = max(min(cursors, default=ready.first_offset), ready.first_offset)
    if first >= ready.next_offset:
        return None
    return int(ready.read(np.array([first]))[1][0])


def group_stats(stores: Stores) -> dict[str, GroupStats]:
    """See `Engine.groups`."""
    end = stores.broker.ready.next_offset
    return {
        name: GroupStats(
            g.ready, g.in_flight, g.settled, stores.broker.dead_counts[name], g.committed, end - g.committed, g.changed_ms
        )
        for name, g in stores.broker.groups.items()
    }


def message(stores: Stores, id_: str) -> MessageView | None:
    """See `Engine.message`. Looks into the history of settlements, newest first, only if a group has settled it."""
    if not id_.isprintable() or "/" in id_:  # no id is like that
        return None
    found = stores.index.find(id_)
    if found is not None and not stores.index.is_handed_off(found):
        return _view(found, State.SLEEP.value)
    offset = stores.broker.ready.find(id_)
    if offset is None:
        return _survivor(stores, id_)
    read, times = stores.broker.ready.read(np.array([offset]))
    if not read.good[0]:
        return None
    document = delivery.document(read, 0)
    view = _view(document, "cancelled" if stores.broker.is_cancelled(offset) else "ready")
    if document.flags & f.NOTICE:
        view.timeline = [Moment(int(times[0]), "cancelled")]
        return view
    view.timeline.append(Moment(int(times[0]), "ready"))
    return _complete(stores, view, offset)


def _complete(stores: Stores, view: MessageView, offset: int) -> MessageView:
    """What every group makes of a message at a ready offset; -1: only its retries and dead letters are left."""
    if view.state == "cancelled":
        view.groups = {name: {"state": "cancelled"} for name in stores.broker.groups}
        view.timeline += _cancellation(stores, offset)
        return view
    for group in stores.broker.groups.values():
        view.groups[group.name] = _in_group(stores, group, view.id, offset, view.priority, view)
    states = {str(entry["state"]) for entry in view.groups.values()}
    if states:
        view.state = next(s for s in FURTHEST if s in states)
    view.attempt = max((int(str(entry.get("attempt", 0))) for entry in view.groups.values()), default=0)
    view.timeline.sort(key=lambda moment: moment.at_ms)
    return view


def _survivor(stores: Stores, id_: str) -> MessageView | None:
    """A message that retention has removed, but that a group still tries, or has among its dead."""
    for name in stores.broker.groups:
        key = f"{name}/{id_}"
        found = stores.index.find(key)
        if found is None and (at := stores.broker.ready.find(key)) is not None:
            found = delivery.document(stores.broker.ready.read(np.array([at]))[0], 0)
        if found is None:
            found = stores.dead_letters.index.find(key)
        if found is not None:
            view = _view(found, "history")
            view.id, view.due_ms = id_, int(found.meta["due"])
            return _complete(stores, view, -1)
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


def _in_group(stores: Stores, group: Group, id_: str, offset: int, level: int, view: MessageView) -> dict[str, object]:
    """A message's state in one group."""
    slot = group.ids.get(id_)
    if slot is not None:
        lease, i = group.slot(slot)
        view.timeline.append(Moment(lease.reserved_ms, "reserved", group.name, lease.consumer))
        attempt = int(lease.messages.attempts[i])
        return {"state": "reserve", "attempt": attempt, "lease_until_ms": lease.until_ms, "consumer": lease.consumer}
    key = f"{group.name}/{id_}"
    again = stores.index.find(key)
    if again is not None and not stores.index.is_handed_off(again) and not delivery.void(group, again):
        return {"state": "sleep", "due_ms": again.due_ms}
    for at in (_own_retry(stores, group, key), offset):
        if at is not None and at in group.waiting:
            waiting = group.waiting[at]
            return {"state": "ready", "attempt": waiting.attempt - 1, "due_ms": waiting.when_ms, "error": waiting.error}
        if at is not None and at >= group.cursors[level]:
            return {"state": "ready", "attempt": 0}
    letter = stores.dead_letters.get(group.name, id_)
    if letter is not None:
        view.timeline.append(Moment(letter.dropped_ms, "dead", group.name, letter.error))
        return {"state": "dead", "attempt": letter.attempts, "error": letter.error}
    return _settled(stores, group, id_, view)


def _own_retry(stores: Stores, group: Group, key: str) -> int | None:
    """Where in the ready log a group's latest retry of a message is, if it counts."""
    at = stores.broker.ready.find(key)
    if at is None:
        return None
    read, _ = stores.broker.ready.read(np.array([at]))
    return None if delivery.void(group, delivery.document(read, 0)) else at


def _settled(stores: Stores, group: Group, id_: str, view: MessageView) -> dict[str, object]:
    """How a group settled it, from the history; not told where that lies too far back."""
    mark = f"\0{id_}\0".encode()
    for event in islice(stores.broker.history.events(), _EVENTS_MAX):
        if event.group != group.name or event.fields["event"] != "settle" or mark not in b"\0" + event.fields["ids"] + b"\0":
            continue
        i = event.fields["ids"].decode().split("\0").index(id_)
        view.timeline.append(Moment(int(event.array("reserved")[i]), "reserved", group.name))
        view.timeline.append(Moment(event.at_ms, str(event.fields["outcome"]), group.name, str(event.fields["error"])))
        return {"state": "history", "attempt": int(event.array("attempts")[i]), "settled_ms": event.at_ms}
    return {"state": "history", "attempt": 0}


def _cancellation(stores: Stores, offset: int) -> list[Moment]:
    """When the message at a ready offset was cancelled."""
    for event in islice(stores.broker.history.events(), _EVENTS_MAX):
        if event.fields["event"] == "cancel" and offset in event.array("offsets"):
            return [Moment(event.at_ms, "cancelled")]
    return []


# Listings


def browse(
    stores: Stores, state: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
) -> tuple[list[MessageView], str | None]:
    """Messages in one state, a page at a time; without their timelines. A page may be short, or empty, though there are more: as
    long as there is a cursor. Sleepers come by due time; the dead by the time of their death, which is what `from_ms` and `to_ms`
    are about; all others in the order in which they came due, sleepers that were cancelled where that happened."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"limit is 1 to {LIMIT_MAX}, not {limit}")
    if state == "sleep":
        documents, following = stores.index.browse_documents(from_ms, to_ms, limit, cursor)
        return [_sleeper(document) for document in documents], following
    if state == "dead":
        letters, following = stores.dead_letters.page(Filter(from_ms=from_ms, to_ms=to_ms), limit, cursor)
        return [_dead(letter) for letter in letters], following
    if state not in STATES:
        raise InvalidArgument(f"state is one of {', '.join(STATES)}, not {state!r}")
    if not 0 <= from_ms <= to_ms:
        raise InvalidArgument(f"from_ms {from_ms} and to_ms {to_ms} do not make a range")
    return _browse_ready(stores, state, from_ms, to_ms, limit, cursor)


def _sleeper(document: f.Document) -> MessageView:
    view = _view(document, State.SLEEP.value)
    if document.flags & f.META:
        group, _, view.id = document.id.rpartition("/")
        view.attempt = int(document.meta["attempt"]) - 1
        view.groups[group] = {"state": "sleep", "attempt": view.attempt, "due_ms": document.due_ms}
    return view


def _dead(letter: DeadLetter) -> MessageView:
    view = _view(letter.document, "dead")
    view.id, view.due_ms, view.attempt = letter.id, letter.due_ms, letter.attempts
    told: dict[str, object] = {"state": "dead", "attempt": letter.attempts, "error": letter.error}
    view.groups[letter.group] = {**told, "dropped_ms": letter.dropped_ms}
    return view


def _browse_ready(
    stores: Stores, state: str, from_ms: int, to_ms: int, limit: int, cursor: str | None
) -> tuple[list[MessageView], str | None]:
    """What the ready log tells. Looks at no more than `_LOOK_MAX` documents."""
    broker = stores.broker
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidArgument(f"{cursor!r} is no cursor of this listing")
    groups = broker.groups.values()
    first, last = broker.ready.first_offset, broker.ready.next_offset
    if state in ("ready", "reserve"):
        first = max(first, min((group.committed for group in groups), default=first))
    if state in ("reserve", "history"):
        last = max((max(group.cursors.values()) for group in groups), default=first)
    at, found = max(first, int(cursor or 0)), list[MessageView]()
    stop = min(last, at + _LOOK_MAX)
    while at < stop:
        offsets = np.arange(at, min(at + _LOOK_STEP, stop))
        read, _ = broker.ready.read(offsets, PAGE_BYTES)
        at += len(read.starts)
        flags, due = read.heads["flags"], read.heads["due"]
        rows = np.flatnonzero(read.good & ((flags & f.META) == 0) & (due >= from_ms) & (due <= to_ms)).tolist()
        documents = {int(offsets[i]): delivery.document(read, i) for i in rows}
        bases = {offset: offset for offset in documents}
        if state in ("ready", "reserve"):
            again = np.flatnonzero(read.good & ((flags & f.META) != 0)).tolist()
            retries = {int(offsets[i]): delivery.document(read, i) for i in again}
            for offset, document, base in _alone(stores, retries, first):
                if from_ms <= document.due_ms <= to_ms:
                    documents[offset], bases[offset] = document, base
        for offset, told in sorted(_states(stores, documents, bases).items()):
            if told == state:
                found.append(_view(documents[offset], state))
                if len(found) == limit:
                    return found, str(offset + 1) if offset + 1 < last else None
    return found, str(at) if at < last else None


def _alone(stores: Stores, retries: dict[int, f.Document], first: int) -> Iterator[tuple[int, f.Document, int]]:
    """Messages of which nothing but groups' own retries lies at `first` or behind it, each where the first of these lies, as the
    producer sent them; and where they came due themselves, -1 if that was removed."""
    ids = {offset: document.id.partition("/")[2] for offset, document in retries.items()}
    asked = list(dict.fromkeys(ids.values()))
    bases, places = cancel.find(stores.broker, asked), dict[str, int]()
    for (_, id_), at in cancel.own_retries(stores.broker, asked).items():
        if at >= first:
            places[id_] = min(at, places.get(id_, at))
    for offset, id_ in ids.items():
        base = bases.get(id_, -1)
        if base < first and places.get(id_) == offset:
            yield offset, replace(retries[offset], id=id_, due_ms=int(retries[offset].meta["due"])), base


def _states(stores: Stores, documents: dict[int, f.Document], bases: dict[int, int]) -> dict[int, str]:
    """The states of messages at ready offsets, over all groups, as `message` tells them. `bases`: where each came due itself."""
    broker, groups = stores.broker, stores.broker.groups.values()
    ids = [document.id for document in documents.values()]
    asleep, own = retries.sleeping(stores, ids), cancel.own_retries(broker, ids)
    asked = [(group.name, id_) for group in groups for id_ in ids]
    dead = {asked[i] for i in stores.dead_letters.holds(asked)}
    out: dict[int, str] = {}
    for offset, document in documents.items():
        id_, states = document.id, set()
        for group in groups:
            key = (group.name, id_)
            if id_ in group.ids:
                states.add("reserve")
            elif key in asleep:
                states.add("sleep")
            elif (key in own and cancel.fresh(broker, group, own[key])) or cancel.fresh(broker, group, bases[offset]):
                states.add("ready")
            else:
                states.add("dead" if key in dead else "history")
        gone = bases[offset] in broker.cancelled or document.flags & f.NOTICE
        out[offset] = "cancelled" if gone else next((s for s in FURTHEST if s in states), "ready")
    return out
