"""Listings: messages in one state, a page at a time, under a bound on the documents that one page reads.

Sleepers are listed by due time, dead letters by time of death, all others in the order of the ready log. `turtlemq.standing`
decides the states, as for the view of one message (`message_view`); figures are in `stats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turtlemq.errors import InvalidArgument
from turtlemq.index.browse import LIMIT_MAX, PAGE_BYTES
from turtlemq.lifecycle import STATES
from turtlemq.model import DUE_MS_MAX, I64
from turtlemq.segment import format as f
from turtlemq.topic import facts, retries
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.facts import Gathered
from turtlemq.topic.message_view import MessageView, view_of
from turtlemq.topic.stores import Stores

_READ_MIN, _READ_MAX = 100, 500  # documents of the ready log that one page reads: 12 ms
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
    prefix: str = "",
    newest: bool = False,
) -> tuple[list[MessageView], str | None]:
    """Messages in one state whose ids begin with `prefix`, a page at a time, without their timelines, and a cursor for the next
    page. A page may be short, or empty, although there are more messages: as long as there is a cursor.

    `newest`: in the reverse order. Another order needs another cursor.
    `places`: an empty table for the first page, and the same for those that follow at once: it keeps results of lookups.
    Dead letters are chosen by their time of death, all others by due time. A sleeper that was cancelled is listed where that
    happened."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"limit is 1 to {LIMIT_MAX}, not {limit}")
    if state == "sleep":
        return _browse_sleepers(stores, from_ms, to_ms, limit, cursor, prefix, newest)
    if state == "dead":
        letters, following = stores.dead_letters.page(Filter(from_ms=from_ms, to_ms=to_ms, prefix=prefix), limit, cursor, newest)
        return [_dead(letter) for letter in letters], following
    if state not in STATES:
        raise InvalidArgument(f"state is one of {', '.join(STATES)}, not {state!r}")
    if not 0 <= from_ms <= to_ms:
        raise InvalidArgument(f"from_ms {from_ms} and to_ms {to_ms} do not make a range")
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidArgument(f"{cursor!r} is no cursor of this listing")
    asked = _Asked(state, from_ms, to_ms, limit, None if cursor is None else int(cursor), prefix, newest)
    return _browse_ready(stores, asked, {} if places is None else places)


def _browse_sleepers(
    stores: Stores, from_ms: int, to_ms: int, limit: int, cursor: str | None, prefix: str, newest: bool
) -> tuple[list[MessageView], str | None]:
    """A page of sleepers. A prefix is compared with the ids of up to `_READ_MAX` documents."""
    count = max(limit, _READ_MAX) if prefix else limit
    documents, following = stores.index.browse_documents(from_ms, to_ms, count, cursor, newest)
    chosen = [document for document in documents if _id_of(document).startswith(prefix)] if prefix else documents
    if len(chosen) > limit:
        chosen = chosen[:limit]
        following = f"{chosen[-1].due_ms}-{chosen[-1].seq}"
    valid = [document for document in chosen if not document.flags & f.META or retries.is_valid(stores, document)]
    return [_sleeper(document) for document in valid], following


def _id_of(document: f.Document) -> str:
    """The id of a message; documents of a group begin with its name."""
    return document.id.partition("/")[2] or document.id


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A page of messages in the ready log, from the offset `cursor` on, or below it if the newest come first."""

    state: str
    from_ms: int
    to_ms: int
    limit: int
    cursor: int | None
    prefix: str
    newest: bool

    def fits(self, view: MessageView) -> bool:
        return view.state == self.state and self.from_ms <= view.due_ms <= self.to_ms

    def window(self, low: int, high: int) -> I64:
        """The offsets that one step reads: some more than it should find, and many if few of them can fit."""
        is_sparse = self.prefix or self.state in ("reserve", "cancelled")
        count = min(high - low, _READ_MAX if is_sparse else min(_READ_MAX, max(_READ_MIN, 2 * self.limit)))
        return np.arange(high - count, high) if self.newest else np.arange(low, low + count)


def _browse_ready(stores: Stores, asked: _Asked, places: Places) -> tuple[list[MessageView], str | None]:
    """A page of the messages in the ready log. Reads no more than `_READ_MAX` documents."""
    first, last = _range(stores, asked.state)
    low, high, newest = first, last, asked.newest
    if asked.cursor is not None:
        low, high = (low, min(high, asked.cursor)) if newest else (max(low, asked.cursor), high)
    if low >= high:
        return [], None
    documents, at = _read(stores, asked, asked.window(low, high))
    views, undecided = _views(stores, first, documents, places)
    if undecided is not None:
        at = undecided + newest
    fitting = [(offset, view) for offset, view in views if asked.fits(view)]
    if asked.state == "cancelled" and fitting:
        again = _sleeping_again(stores, [view.id for _, view in fitting])
        fitting = [(offset, view) for offset, view in fitting if view.id not in again]
    page = [view for _, view in fitting[: asked.limit]]
    if len(fitting) >= asked.limit:
        at = fitting[asked.limit - 1][0] + (not newest)
    return page, str(at) if (low < at if newest else at < high) else None


def _sleeping_again(stores: Stores, ids: Sequence[str]) -> set[str]:
    """Ids that a newer, sleeping message has: such an id is listed as that message, not as the cancelled or replaced one."""
    found = stores.index.find_many(ids).values()
    return {document.id for document in found if not stores.index.is_handed_off(document)}


def _read(stores: Stores, asked: _Asked, offsets: I64) -> tuple[dict[int, f.Document], int]:
    """Documents of the ready log that may belong to a page, by offset, in its order; and the offset of the next step."""
    read, _ = stores.broker.ready.read(offsets, PAGE_BYTES)
    while asked.newest and len(read.starts) < len(offsets):  # they are large, and the last ones were not read
        offsets = offsets[-max(1, len(read.starts) // 2) :]
        read, _ = stores.broker.ready.read(offsets, PAGE_BYTES)
    due, own = read.heads["due"], (read.heads["flags"] & f.META) != 0  # the due time of a retry is not that of its message
    chosen = np.flatnonzero(read.good & (own | ((due >= asked.from_ms) & (due <= asked.to_ms)))).tolist()
    if asked.newest:
        chosen.reverse()
    documents = {int(offsets[i]): read.decode(i) for i in chosen}
    if asked.prefix:
        documents = {offset: document for offset, document in documents.items() if _id_of(document).startswith(asked.prefix)}
    return documents, int(offsets[0]) if asked.newest else int(offsets[0]) + len(read.starts)


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
    """Messages at rising or falling ready offsets, each with its state over all groups. A message is listed at its own document;
    if that lies before offset `first` or is removed, at the first of its groups' valid retries. Also returns the offset up to
    which this is so, if it is not for all: then they have too many retries and dead letters for one step."""
    ids = {offset: _id_of(document) for offset, document in documents.items()}
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
