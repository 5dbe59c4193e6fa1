"""The view of one message: its state in every group, its last attempts there, and a timeline of its events.

`turtlemq.standing` decides the states; here the details of each state are read from the store that has them. Pages of
messages are in `listing`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import merge

import numpy as np

from turtlemq.attempts import Attempt, Attempts, latest, of_notes
from turtlemq.broker.lookup import Settlement
from turtlemq.index.browse import PAGE_BYTES
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.message_fields import StoredFields, optional_of
from turtlemq.segment import format as f
from turtlemq.standing import NEVER_HAD, shown
from turtlemq.topic import facts
from turtlemq.topic.dead_letters import notes_of
from turtlemq.topic.facts import Gathered
from turtlemq.topic.stores import Stores

Details = dict[str, object]


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
    body: bytes | None  # None: it is unknown, since the message was cancelled while it slept
    json: bool
    ttr_ms: int
    priority: int
    optional: StoredFields
    groups: dict[str, Details] = field(default_factory=dict)
    timeline: list[Moment] = field(default_factory=list)
    attempts: list[tuple[str, Attempt]] = field(default_factory=list)  # the last ones of each group, oldest first

    @property
    def next_ms(self) -> int | None:
        """When its next attempt is due, the earliest of all groups; None where none waits for one."""
        waits = [int(str(group["due_ms"])) for group in self.groups.values() if "due_ms" in group]
        return min(waits, default=None)


def view_of(document: f.Document, state: str) -> MessageView:
    """A message as its document tells it, in a given state. The id and due time of a retry or a dead letter are the message's."""
    own = bool(document.flags & f.META)
    view = MessageView(
        id=document.id.partition("/")[2] if own else document.id,
        state=state,
        due_ms=int(document.meta["due"]) if own else document.due_ms,
        created_ms=document.created_ms,
        attempt=0,
        body=None if document.flags & f.NOTICE else document.body,
        json=bool(document.flags & f.JSON),
        ttr_ms=document.ttr_ms,
        priority=document.flags & f.PRIORITY,
        optional=StoredFields(**optional_of(document)),
    )
    if not document.flags & f.NOTICE:
        view.timeline = [Moment(document.created_ms, "created"), Moment(view.due_ms, "due")]
    elif view.created_ms:
        view.timeline = [Moment(document.created_ms, "created")]
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
        view.state = "cancelled"
        view.timeline.append(Moment(became_ready_ms, "cancelled"))
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
    """Add the state in every group and over all of them, attempts and timeline. `offset`: of the message in the ready log, if it
    is there."""
    cancelled = offset is not None and stores.broker.ready.is_cancelled_ready(offset)
    known = facts.facts_of(stores, [view.id], gathered, {view.id} if cancelled else frozenset())
    view.state = facts.states(known)[view.id]
    read = _Read(stores, view, gathered, offset)
    standings = facts.standings(stores, view.id, gathered, known)
    read.find_settlements(standings)
    for name, standing in standings.items():
        details = read.details(name, standing)
        view.groups[name] = {"state": shown(standing), **details, "summary": summary_of(standing, details)}
    by_group = {name: read.attempts(name, standing) for name, standing in standings.items()}
    rows = ([(name, one) for one in own] for name, own in by_group.items())
    view.attempts = list(merge(*rows, key=lambda row: row[1].reserved_ms))
    view.timeline += moments(view.attempts)
    view.timeline += [moment for name in by_group for moment in read.ends(name, by_group[name])]
    if cancelled and offset is not None:
        cancelled_ms = stores.broker.find_cancellation(offset)
        view.timeline += [] if cancelled_ms is None else [Moment(cancelled_ms, "cancelled")]
        return view
    view.attempt = max((int(str(entry.get("attempt", 0))) for entry in view.groups.values()), default=0)
    view.timeline.sort(key=lambda moment: moment.at_ms)
    return view


def moments(attempts: list[tuple[str, Attempt]]) -> list[Moment]:
    """Beginnings and ends of attempts."""
    found = []
    for name, one in attempts:
        found.append(Moment(one.reserved_ms, "reserved", name, one.consumer))
        if one.ended_ms is not None:
            found.append(Moment(one.ended_ms, str(one.outcome), name, one.error))
    return found


def summary_of(standing: str, details: Mapping[str, object]) -> str:
    """A state in a group in words, without the times that the details have."""
    attempt = int(str(details.get("attempt", 0)))
    if standing == NEVER_HAD:
        return "not seen by this group: before its start"
    if standing == "sleep" or (standing == "ready" and "due_ms" in details):
        return f"waits for attempt {attempt + 1}"
    if standing == "ready":
        return f"ready for attempt {attempt + 1}"
    if standing == "reserve":
        return f"attempt {attempt} is running"
    if standing == "dead":
        return f"dead after {attempt} attempt{'' if attempt == 1 else 's'}"
    if standing == "history" and "outcome" in details:
        return f"{details['outcome']} in attempt {attempt}"
    return "done" if standing == "history" else standing


def _joined(before: Attempts, now: Attempts) -> Attempts:
    """Attempts up to a settlement, and those that the message has with it now, each once: it may have died, and been requeued."""
    known = {(one.attempt, one.reserved_ms, one.ended_ms) for one in now}
    return latest((*(one for one in before if (one.attempt, one.reserved_ms, one.ended_ms) not in known), *now))


class _Read:
    """All that the stores have about one message: documents of retries in the ready log, settlements, leases, letters."""

    def __init__(self, stores: Stores, view: MessageView, gathered: Gathered, offset: int | None) -> None:
        self._stores, self._id, self._gathered, self._offset = stores, view.id, gathered, offset
        self._ready_ms = next((moment.at_ms for moment in view.timeline if moment.event == "ready"), view.created_ms)
        self._settled: dict[str, Settlement] = {}
        leased = [group.lease_of(view.id) for group in stores.broker.groups.values() if group.in_flight]
        offsets = {int(held[0].messages.offsets[held[1]]) for held in leased if held is not None}
        self._retries = _retry_documents(stores, {*gathered.located.retries.values(), *offsets} - {offset})

    def find_settlements(self, standings: Mapping[str, str]) -> None:
        """Search the history for groups that have settled the message; also for those that were moved since they were made, and
        may have it again."""
        wanted: dict[str, int] = {}
        for name, standing in standings.items():
            group, retry = self._stores.broker.groups.get(name), self._gathered.located.retries.get((name, self._id))
            moved = group is not None and group.epoch != group.born and standing not in (NEVER_HAD, "cancelled")
            if standing == "dead" and group is not None:  # the letter may be from before the group was moved, or made anew
                moved = int(self._gathered.letters[name, self._id].meta["epoch"]) != group.epoch
            if standing == "history" or moved:
                wanted[name] = self._ready_ms if retry is None or moved else self._retries[retry][0]
        first = 0 if self._offset is None else self._offset
        self._settled = self._stores.broker.find_settlements(wanted, self._id, first)
        left = {settlement.offset for settlement in self._settled.values()} - {self._offset} - self._retries.keys()
        self._retries |= _retry_documents(self._stores, left)

    def details(self, name: str, standing: str) -> Details:
        """The details of a standing in a group."""
        gathered, pair = self._gathered, (name, self._id)
        if standing == "reserve":
            return self._lease(name)[0]
        if standing == "sleep":
            retry = gathered.asleep[pair]
            notes = retry.meta
            error = {"error": notes["error"]} if notes["error"] else {}
            return {"attempt": int(notes["attempt"]) - 1, "due_ms": retry.due_ms, **error, **_new_expiry(retry)}
        if standing == "dead":
            meta = notes_of(gathered.letters[pair])
            return {"attempt": int(meta["attempt"]), "error": str(meta["error"])}
        if standing == "ready":
            return self._waiting(name)
        if standing == "history" and name in self._settled:
            settlement = self._settled[name]
            return {"attempt": settlement.attempt, "settled_ms": settlement.settled_ms, "outcome": settlement.outcome}
        return {} if standing == "cancelled" else {"attempt": 0}

    def _lease(self, name: str) -> tuple[Details, int, Attempt]:
        """Details of a message in flight, the ready offset of its document, and its running attempt."""
        leased = self._stores.broker.groups[name].lease_of(self._id)
        assert leased is not None, "that is how the state was decided"
        lease, i = leased
        attempt = int(lease.messages.attempts[i])
        running = Attempt(attempt, lease.consumer, lease.reserved_ms, None, None, "", None)
        details: Details = {"attempt": attempt, "lease_until_ms": lease.until_ms, "consumer": lease.consumer}
        return details, int(lease.messages.offsets[i]), running

    def _waiting(self, name: str) -> Details:
        """Details of a message that is ready: it waits in memory, or its document or a retry of it was not fetched yet."""
        at = self._gathered.located.retries.get((name, self._id))
        for offset in (at, self._offset):
            retry = None if offset is None else self._stores.broker.groups[name].retries.get(offset)
            if retry is not None:
                return {"attempt": retry.attempt - 1, "due_ms": retry.when_ms, "error": retry.error}
        if at not in self._retries:
            return {"attempt": 0}
        document = self._retries[at][1]
        return {"attempt": int(document.meta["attempt"]) - 1, **_new_expiry(document)}

    def attempts(self, name: str, standing: str) -> Attempts:
        """The last attempts of the message in a group."""
        gathered, pair, settled = self._gathered, (name, self._id), self._settled.get(name)
        before = () if settled is None else (*self._noted(settled.offset), *settled.attempts)
        if standing == "sleep":
            return _joined(before, of_notes(gathered.asleep[pair].meta))
        if standing == "dead":
            letter = gathered.letters[pair]
            own, later = of_notes(letter.meta), settled is not None and settled.settled_ms > letter.due_ms
            return _joined(own, before) if later else _joined(before, own)
        if standing == "reserve":
            _, offset, running = self._lease(name)
            return _joined(before, (*self._ended(name, offset), running))
        retry = gathered.located.retries.get(pair)
        if standing == "ready":
            return _joined(before, self._ended(name, self._offset if retry is None else retry))
        return latest(before or self._noted(retry))

    def _ended(self, name: str, offset: int | None) -> Attempts:
        """Ended attempts of the message at a ready offset that the group has not settled."""
        if offset is None:
            return ()
        return (*self._noted(offset), *self._stores.broker.groups[name].attempts.get(offset, ()))

    def _noted(self, offset: int | None) -> Attempts:
        """The attempts that the document of a retry tells: those before its sleep."""
        return of_notes(self._retries[offset][1].meta) if offset in self._retries else ()

    def ends(self, name: str, attempts: Attempts) -> list[Moment]:
        """Ends of the message in a group that are no end of an attempt: it expired, or an older version has kept no attempts."""
        settled, letter = self._settled.get(name), self._gathered.letters.get((name, self._id))
        told = {one.ended_ms for one in attempts}
        moments = []
        if letter is not None and letter.due_ms not in told:
            moments.append(Moment(letter.due_ms, "dead", name, str(notes_of(letter)["error"])))
        if settled is not None and settled.settled_ms not in told and not (letter and letter.due_ms == settled.settled_ms):
            moments.append(Moment(settled.settled_ms, settled.outcome, name, settled.error))
        return moments


def _retry_documents(stores: Stores, wanted: Collection[int | None]) -> dict[int | None, tuple[int, f.Document]]:
    """The retries at ready offsets, by offset, each with the time at which it became ready. Other documents are left out."""
    documents: dict[int | None, tuple[int, f.Document]] = {}
    first = stores.broker.ready.first_offset
    offsets = np.array(sorted(at for at in wanted if at is not None and at >= first), np.int64)
    while len(offsets):
        read, times = stores.broker.ready.read(offsets, PAGE_BYTES)
        for i in np.flatnonzero(read.good & ((read.heads["flags"] & f.META) != 0)).tolist():
            documents[int(offsets[i])] = int(times[i]), read.decode(i)
        offsets = offsets[len(read.starts) :]
    return documents


def _new_expiry(retry: f.Document | GroupDocument) -> Details:
    """The expiry that a requeue gave to a message in one group. Other retries do not expire."""
    return {"expires_ms": retry.expires_ms} if retry.meta.get("renewed") else {}
