"""The view of one message: its state in every group, and a timeline of its events.

`turtlemq.standing` decides the states; here the details of each state are read from the store that has them. Pages of
messages are in `listing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from turtlemq.broker.lookup import Settlement
from turtlemq.index.browse import PAGE_BYTES
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.message_fields import StoredFields, optional_of
from turtlemq.segment import format as f
from turtlemq.standing import shown
from turtlemq.topic import facts
from turtlemq.topic.dead_letters import notes_of
from turtlemq.topic.facts import Gathered
from turtlemq.topic.stores import Stores


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
    ttr_ms: int
    priority: int
    optional: StoredFields
    groups: dict[str, dict[str, object]] = field(default_factory=dict)
    timeline: list[Moment] = field(default_factory=list)


def view_of(document: f.Document, state: str) -> MessageView:
    """A message as its document tells it, in a given state. The id and due time of a retry or a dead letter are the message's."""
    own = bool(document.flags & f.META)
    view = MessageView(
        id=document.id.partition("/")[2] if own else document.id,
        state=state,
        due_ms=int(document.meta["due"]) if own else document.due_ms,
        created_ms=document.created_ms,
        attempt=0,
        body=document.body,
        json=bool(document.flags & f.JSON),
        ttr_ms=document.ttr_ms,
        priority=document.flags & f.PRIORITY,
        optional=StoredFields(**optional_of(document)),
    )
    if not document.flags & f.NOTICE:
        view.timeline = [Moment(document.created_ms, "created"), Moment(view.due_ms, "due")]
    return view


def message(stores: Stores, id_: str) -> MessageView | None:
    """One message wherever it is, or None if it is unknown. The history is read, newest event first and once for all groups, only
    if a group has settled the message."""
    if not id_.isprintable() or "/" in id_:  # no id is like that
        return None
    sleeper = stores.index.find(id_)
    if sleeper is not None and not stores.index.is_handed_off(sleeper):
        return view_of(sleeper, "sleep")
    gathered = facts.gather(stores, [id_])
    offset = gathered.located.documents.get(id_)
    if offset is None:
        left = _left_document(stores, gathered)
        return None if left is None else _complete(stores, view_of(left, ""), gathered, None)
    read, times = stores.broker.ready.read(np.array([offset]))
    if not read.good[0]:
        return None
    document, became_ready_ms = read.decode(0), int(times[0])
    view = view_of(document, "")
    if document.flags & f.NOTICE:
        view.state, view.timeline = "cancelled", [Moment(became_ready_ms, "cancelled")]
        return view
    view.timeline.append(Moment(became_ready_ms, "ready"))
    return _complete(stores, view, gathered, offset)


def _left_document(stores: Stores, gathered: Gathered) -> f.Document | None:
    """A retry or a dead letter of a message whose own document retention has removed."""
    for retry in gathered.asleep.values():
        return stores.index.find(retry.id)
    for offset in gathered.located.retries.values():
        read, _ = stores.broker.ready.read(np.array([offset]))
        if read.good[0]:
            return read.decode(0)
    for letter in gathered.letters.values():
        return stores.dead_letters.index.find(letter.id)
    return None


def _complete(stores: Stores, view: MessageView, gathered: Gathered, offset: int | None) -> MessageView:
    """Add the state in every group and over all of them. `offset`: of the message in the ready log, if it is there."""
    cancelled = offset is not None and stores.broker.ready.is_cancelled_ready(offset)
    known = facts.facts_of(stores, [view.id], gathered, {view.id} if cancelled else frozenset())
    view.state = facts.states(known)[view.id]
    standings = facts.standings(stores, view.id, gathered, known)
    settled = stores.broker.find_settlements({name for name, standing in standings.items() if standing == "history"}, view.id)
    expiries = _new_expiries(stores, gathered)
    for name, standing in standings.items():
        if name in settled:
            details = _settled(settled[name])
        elif standing == "ready":
            retry = gathered.located.retries.get((name, view.id))
            details = _waiting(stores, name, (retry, offset), {} if retry is None else expiries.get(retry, {}))
        else:
            details = _details(stores, name, standing, view, gathered)
        view.groups[name] = {"state": shown(standing), **details}
    for name, settlement in settled.items():
        view.timeline.append(Moment(settlement.reserved_ms, "reserved", name))
        view.timeline.append(Moment(settlement.settled_ms, settlement.outcome, name, settlement.error))
    if cancelled and offset is not None:
        cancelled_ms = stores.broker.find_cancellation(offset)
        view.timeline += [] if cancelled_ms is None else [Moment(cancelled_ms, "cancelled")]
        return view
    view.attempt = max((int(str(entry.get("attempt", 0))) for entry in view.groups.values()), default=0)
    view.timeline.sort(key=lambda moment: moment.at_ms)
    return view


def _details(stores: Stores, name: str, standing: str, view: MessageView, gathered: Gathered) -> dict[str, object]:
    """The details of a standing other than ready in a group. Adds to the timeline of the view."""
    if standing == "reserve":
        leased = stores.broker.groups[name].lease_of(view.id)
        assert leased is not None, "that is how the state was decided"
        lease, i = leased
        view.timeline.append(Moment(lease.reserved_ms, "reserved", name, lease.consumer))
        attempt = int(lease.messages.attempts[i])
        return {"attempt": attempt, "lease_until_ms": lease.until_ms, "consumer": lease.consumer}
    if standing == "sleep":
        retry = gathered.asleep[name, view.id]
        return {"due_ms": retry.due_ms, **_new_expiry(retry)}
    if standing == "dead":
        letter = gathered.letters[name, view.id]
        meta = notes_of(letter)
        view.timeline.append(Moment(letter.due_ms, "dead", name, str(meta["error"])))
        return {"attempt": int(meta["attempt"]), "error": str(meta["error"])}
    return {} if standing == "cancelled" else {"attempt": 0}


def _waiting(stores: Stores, name: str, offsets: tuple[int | None, int | None], expiry: dict[str, object]) -> dict[str, object]:
    """Details of a message that is ready, at one of these offsets. `expiry`: of its retry that has come due."""
    for offset in offsets:
        retry = None if offset is None else stores.broker.groups[name].retry_at(offset)
        if retry is not None:
            return {"attempt": retry.attempt - 1, "due_ms": retry.when_ms, "error": retry.error}
    return {"attempt": 0, **expiry}


def _new_expiries(stores: Stores, gathered: Gathered) -> dict[int, dict[str, object]]:
    """The details that `_new_expiry` gives of retries in the ready log, by offset."""
    expiries: dict[int, dict[str, object]] = {}
    offsets = np.array(sorted(gathered.located.retries.values()), np.int64)
    while len(offsets):
        read, _ = stores.broker.ready.read(offsets, PAGE_BYTES)
        for i in np.flatnonzero(read.good & ((read.heads["flags"] & f.EXPIRES) != 0)).tolist():
            expiries[int(offsets[i])] = _new_expiry(read.decode(i))
        offsets = offsets[len(read.starts) :]
    return expiries


def _new_expiry(retry: f.Document | GroupDocument) -> dict[str, object]:
    """The expiry that a requeue gave to a message in one group. Other retries do not expire."""
    return {"expires_ms": retry.expires_ms} if retry.meta.get("renewed") else {}


def _settled(settlement: Settlement) -> dict[str, object]:
    """How a group settled the message."""
    return {"attempt": settlement.attempt, "settled_ms": settlement.settled_ms}
