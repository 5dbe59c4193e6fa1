"""Listings: messages in one state, a page at a time, under a bound on the documents that one page reads.

Sleepers are listed by due time, dead letters by time of death, all others in the order of the ready log. `turtlemq.standing`
decides the states, as for the view of one message (`message_view`); figures are in `stats`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turtlemq.errors import InvalidArgument
from turtlemq.index.browse import LIMIT_MAX, PAGE_BYTES
from turtlemq.lifecycle import STATES
from turtlemq.model import DUE_MS_MAX
from turtlemq.segment import format as f
from turtlemq.topic import facts, retries
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.message_view import MessageView, view_of
from turtlemq.topic.stores import Stores

_READ_MAX = 500  # documents of the ready log that one page reads: 12 ms, more if they are retries of many groups
_READ_STEP = 500


def browse(
    stores: Stores, state: str, from_ms: int = 0, to_ms: int = DUE_MS_MAX, limit: int = 100, cursor: str | None = None
) -> tuple[list[MessageView], str | None]:
    """Messages in one state, a page at a time, without their timelines, and a cursor for the next page. A page may be short, or
    empty, although there are more messages: as long as there is a cursor.

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
    return _browse_ready(stores, state, from_ms, to_ms, limit, cursor)


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
    stores: Stores, state: str, from_ms: int, to_ms: int, limit: int, cursor: str | None
) -> tuple[list[MessageView], str | None]:
    """A page of the messages in the ready log. Reads no more than `_READ_MAX` documents."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidArgument(f"{cursor!r} is no cursor of this listing")
    ready, (first, last) = stores.broker.ready, _range(stores, state)
    at, page, states = max(first, int(cursor or 0)), list[MessageView](), States(stores, first)
    stop = min(last, at + _READ_MAX)
    while at < stop:
        offsets = np.arange(at, min(at + _READ_STEP, stop))
        read, _ = ready.read(offsets, PAGE_BYTES)
        at += len(read.starts)
        due, own = read.heads["due"], (read.heads["flags"] & f.META) != 0  # the due time of a retry is not that of its message
        chosen = np.flatnonzero(read.good & (own | ((due >= from_ms) & (due <= to_ms)))).tolist()
        for offset, view in states.views({int(offsets[i]): read.decode(i) for i in chosen}):
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


class States:
    """The states of messages over all groups, for one page: each message is looked up once, however many retries it has there."""

    def __init__(self, stores: Stores, first: int) -> None:
        self._stores, self._first = stores, first  # offsets before `first` are not listed
        self._places: dict[str, int] = {}  # id → offset at which the message is listed
        self._states: dict[str, str] = {}

    def views(self, documents: dict[int, f.Document]) -> Iterator[tuple[int, MessageView]]:
        """Messages at ready offsets, each with its state, in that order. A message is listed at its own document; if that lies
        before the first offset or is removed, at the first of its groups' valid retries."""
        ids = {offset: document.id.partition("/")[2] or document.id for offset, document in documents.items()}
        self._look_up([id_ for id_ in dict.fromkeys(ids.values()) if id_ not in self._states])
        for offset, document in sorted(documents.items()):
            if self._places.get(ids[offset]) == offset:
                yield offset, view_of(document, self._states[ids[offset]])

    def _look_up(self, ids: list[str]) -> None:
        gathered = facts.gather(self._stores, ids)
        for (_, id_), offset in gathered.located.retries.items():
            if offset >= self._first:
                self._places[id_] = min(offset, self._places.get(id_, offset))
        own = gathered.located.documents
        self._places |= {id_: offset for id_, offset in own.items() if offset >= self._first}
        ended = self._stores.broker.ready.cancelled_among(own.values())
        cancelled = {id_ for id_, offset in own.items() if offset in ended}
        self._states |= facts.states(facts.facts_of(self._stores, ids, gathered, cancelled))
