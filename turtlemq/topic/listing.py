"""Listings: messages in one state, a page at a time, under a bound on the documents that one page reads.

Sleepers are listed by due time, dead letters by time of death, all others in the order of the ready log. `turtlemq.standing`
decides the states, as for the view of one message (`message_view`); figures are in `stats`.
"""

from __future__ import annotations

import numpy as np

from turtlemq.errors import InvalidArgument
from turtlemq.index.browse import LIMIT_MAX, PAGE_BYTES
from turtlemq.lifecycle import STATES
from turtlemq.model import DUE_MS_MAX
from turtlemq.segment import format as f
from turtlemq.topic import facts, retries
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.facts import Gathered
from turtlemq.topic.message_view import MessageView, view_of
from turtlemq.topic.stores import Stores

_READ_MAX = 500  # documents of the ready log that one page reads: 12 ms
Places = dict[str, int]  # by id: the ready offset at which a message is listed, -1 for none
_PAIRS_MAX = 2_000  # of a message and a group that has a retry or a dead letter of it, for one page: 5 µs each


def browse(
    stores: Stores,
    state: str,
    from_ms: int = 0,
    to_ms: int = DUE_MS_MAX,
    limit: int = 100,
    cursor: str | None = None,
    places: Places | None = None,
) -> tuple[list[MessageView], str | None]:
    """Messages in one state, a page at a time, without their timelines, and a cursor for the next page. A page may be short, or
    empty, although there are more messages: as long as there is a cursor.

    `places`: an empty table for the first page, and the same for those that follow at once: it keeps results of lookups.
    Dead letters are chosen by their time of death, all others by due time. A sleeper that was cancelled is listed where that
    happened."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"limit is 1 to {LIMIT_MAX}, not {limit}")
    if state == "sleep":
        documents, following = stores.index.browse_documents(from_ms, to_ms, limit, cursor)
        valid = [document for document in documents if not document.flags & f.META or retries.is_valid(stores, document)]
        return [_sleeper(document) for document in valid], following
    if state == "dead":
        letters, following = stores.dead_letters.page(Filter(from_ms=from_ms, to_ms=to_ms), limit, cursor)
        return [_dead(letter) for letter in letters], following
    if state not in STATES:
        raise InvalidArgument(f"state is one of {', '.join(STATES)}, not {state!r}")
    if not 0 <= from_ms <= to_ms:
        raise InvalidArgument(f"from_ms {from_ms} and to_ms {to_ms} do not make a range")
    return _browse_ready(stores, state, from_ms, to_ms, limit, cursor, {} if places is None else places)


def _sleeper(document: f.Document) -> MessageView:
    """A message that sleeps; a retry with its group."""
    view = view_of(document, "sleep")
    if document.flags & f.META:
        view.due_ms, view.attempt = document.due_ms, int(document.meta["attempt"]) - 1
        group = document.id.partition("/")[0]
        view.groups[group] = {"state": "sleep", "attempt": view.attempt, "due_ms": document.due_ms}
    return view


def _dead(letter: DeadLetter) -> MessageView:
    """A message that is dead, with its group."""
    view = view_of(letter.document, "dead")
    view.attempt = letter.attempts
    details: dict[str, object] = {"state": "dead", "attempt": letter.attempts, "error": letter.error}
    view.groups[letter.group] = {**details, "dropped_ms": letter.dropped_ms}
    return view


# In the order of the ready log


def _browse_ready(
    stores: Stores, state: str, from_ms: int, to_ms: int, limit: int, cursor: str | None, places: Places
) -> tuple[list[MessageView], str | None]:
    """A page of the messages in the ready log. Reads no more than `_READ_MAX` documents."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidArgument(f"{cursor!r} is no cursor of this listing")
    ready, (first, last) = stores.broker.ready, _range(stores, state)
    at, page = max(first, int(cursor or 0)), list[MessageView]()
    if at < last:
        offsets = np.arange(at, min(at + _READ_MAX, last))
        read, _ = ready.read(offsets, PAGE_BYTES)
        due, own = read.heads["due"], (read.heads["flags"] & f.META) != 0  # the due time of a retry is not that of its message
        chosen = np.flatnonzero(read.good & (own | ((due >= from_ms) & (due <= to_ms)))).tolist()
        views, decided = _views(stores, first, {int(offsets[i]): read.decode(i) for i in chosen}, places)
        at = at + len(read.starts) if decided is None else decided
        for offset, view in views:
            if view.state == state and from_ms <= view.due_ms <= to_ms:
                page.append(view)
                if len(page) == limit:
                    return page, str(offset + 1) if offset + 1 < last else None
    return page, str(at) if at < last else None


def _range(stores: Stores, state: str) -> tuple[int, int]:
    """The offsets between which messages of a state can lie, by the cursors of the groups."""
    groups, ready = stores.broker.groups.values(), stores.broker.ready
    first, last = ready.first_offset, ready.next_offset
    if state in ("ready", "reserve"):
        first = max(first, min((group.committed for group in groups), default=first))
    if state in ("reserve", "history"):
        last = max((group.last_cursor for group in groups), default=first)
    return first, last


def _views(
    stores: Stores, first: int, documents: dict[int, f.Document], places: Places
) -> tuple[list[tuple[int, MessageView]], int | None]:
    """Messages at rising ready offsets, each with its state over all groups. A message is listed at its own document; if that
    lies before offset `first` or is removed, at the first of its groups' valid retries. Also returns the offset up to which this
    is so, if it is not for all: then they have too many retries and dead letters for one step."""
    ids = {offset: document.id.partition("/")[2] or document.id for offset, document in documents.items()}
    retries = [offset for offset, document in documents.items() if document.flags & f.META]
    unknown = list({ids[offset] for offset in retries if ids[offset] not in places})
    places |= {id_: offset for id_, offset in stores.broker.ready.find_ids(unknown).items() if offset >= first}
    elsewhere = {offset for offset in retries if places.get(ids[offset], offset) != offset}
    shown = [offset for offset in documents if offset not in elsewhere]
    gathered = facts.gather(stores, list(dict.fromkeys(ids[offset] for offset in shown)), _PAIRS_MAX)
    states, found = _states(stores, gathered), _places(gathered, first)
    places |= {id_: found.get(id_, -1) for id_ in gathered.ids}
    views = [(at, view_of(documents[at], states[ids[at]])) for at in shown if ids[at] in states and found.get(ids[at]) == at]
    return views, next((offset for offset in shown if ids[offset] not in states), None)


def _places(gathered: Gathered, first: int) -> dict[str, int]:
    """The offsets at which messages are listed, by id."""
    places: dict[str, int] = {}
    for (_, id_), offset in gathered.located.retries.items():
        if offset >= first:
            places[id_] = min(offset, places.get(id_, offset))
    return places | {id_: offset for id_, offset in gathered.located.documents.items() if offset >= first}


def _states(stores: Stores, gathered: Gathered) -> dict[str, str]:
    """The states of messages over all groups, by id."""
    own = gathered.located.documents
    ended = stores.broker.ready.cancelled_among(own.values())
    cancelled = {id_ for id_, offset in own.items() if offset in ended}
    return facts.states(facts.facts_of(stores, gathered.ids, gathered, cancelled)) if gathered.ids else {}
