"""The event feed of a topic: puts, deliveries and ends of its messages in the order of time, read from its four logs.

Puts are in the delay log, messages that come due in the ready log, deliveries and failures in the reserve journal, ends in the
history journal. A reader has a place in each of the four, and its cursor is these places: nothing is kept for readers in memory,
and a cursor stays good over restarts. Events that retention has removed are skipped, as are puts into a segment that is sealed by
now; `Feed.missed` tells so. An event is read once it is in the file; a power cut may take back those after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from turtlemq import attempts as a
from turtlemq.broker import events
from turtlemq.broker.journal import Event, Journal
from turtlemq.errors import InvalidArgument
from turtlemq.index.browse import PAGE_BYTES
from turtlemq.model import I64, SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.segment.forward import lacks
from turtlemq.topic.stores import Stores

_STEP = 100  # documents that one step reads
_PLACE_MAX = 1 << 62


class FeedEvent(NamedTuple):
    """Something that happened to a message, or to a group if it has no id."""

    at_ms: int
    event: str
    id: str = ""
    group: str = ""
    consumer: str = ""
    attempt: int = 0
    due_ms: int | None = None
    next_ms: int | None = None  # when the next attempt comes
    error: str = ""

    def changed(self, **fields: Any) -> FeedEvent:
        """This event with other values."""
        return self._replace(**fields)

    def fields(self) -> dict[str, Any]:
        """The fields that the event has, by name."""
        given = {name: value for name, value in self._asdict().items() if value not in ("", None, 0)}
        return given | {"at_ms": self.at_ms}


class Place(NamedTuple):
    """A place in a log: a position, and how many rows of the event there were read."""

    position: int
    row: int = 0


Documents = Iterator[tuple[int, bytes]]  # of one log, each with the position behind it
Rows = Iterator[tuple[Place, FeedEvent | None]]  # without an event: a step on the way


class _Source:
    """The events of one log, and the next of them."""

    def __init__(self, rows: Rows, place: Place) -> None:
        self._rows, self.place = rows, place
        self.next: FeedEvent | None = None

    def advance(self) -> Iterator[None]:
        """Go on to the next event. Yields between steps."""
        self.next = None
        for place, event in self._rows:
            self.place, self.next = place, event
            if event is not None:
                return
            yield


class Feed:
    """Events from a place on, up to those that had happened when it was made. Iterate it once; it yields None between steps."""

    def __init__(self, stores: Stores, places: list[Place]) -> None:
        arrivals, (reserve, history) = stores.index.arrivals, stores.broker.journals
        ends, ready = ends_of(stores), stores.broker.ready
        beyond = any(place.position > end.position for place, end in zip(places, ends, strict=True))  # another topic of that name
        places = ends if beyond else places
        self.missed = beyond or arrivals.lacks(places[0].position) or places[1].position < ready.first_offset
        self.missed = self.missed or any(
            lacks(log.files(), at.position) for log, at in ((reserve, places[2]), (history, places[3]))
        )
        rows = [
            _arrivals(arrivals.documents(places[0].position), places[0]),
            _ready(stores, places[1], ends[1]),
            _journal(stores, reserve.documents_from(places[2].position), places[2]),
            _journal(stores, history.documents_from(places[3].position), places[3]),
        ]
        self._sources = [_Source(one, place) for one, place in zip(rows, places, strict=True)]

    def __iter__(self) -> Iterator[FeedEvent | None]:
        for source in self._sources:
            yield from source.advance()
        while waiting := [source for source in self._sources if source.next is not None]:
            first = min(waiting, key=_time_of)
            event = first.next
            yield from first.advance()
            yield event

    @property
    def cursor(self) -> str:
        """The place behind the last event that was read."""
        return "-".join(f"{at.position}.{at.row}" if at.row else f"{at.position}" for at in (one.place for one in self._sources))


def _time_of(source: _Source) -> int:
    return source.next.at_ms if source.next is not None else 0


def feed(stores: Stores, cursor: str | None = None, since_ms: int | None = None) -> Feed:
    """Events behind a cursor, from about a time on, or without both none yet: those of the future."""
    if cursor is not None:
        return Feed(stores, _parse(cursor))
    return Feed(stores, ends_of(stores) if since_ms is None else _places_at(stores, since_ms))


def _parse(cursor: str) -> list[Place]:
    try:
        places = [Place(*map(int, part.split("."))) for part in cursor.split("-")]
    except (ValueError, TypeError):
        places = []
    if len(places) != 4 or not all(0 <= number < _PLACE_MAX for place in places for number in place):
        raise InvalidArgument(f"{cursor!r} is no cursor of the events of a topic")
    return places


def ends_of(stores: Stores) -> list[Place]:
    """The place behind everything that has happened. O(1)."""
    reserve, history = stores.broker.journals
    return [Place(at) for at in (stores.index.arrivals.end, stores.broker.ready.next_offset, reserve.end, history.end)]


def _places_at(stores: Stores, at_ms: int) -> list[Place]:
    index, ready, journals = stores.index.arrivals, stores.broker.ready, stores.broker.journals
    return [Place(at) for at in (index.position_at(at_ms), ready.offset_at(at_ms), *(log.position_at(at_ms) for log in journals))]


# The four logs


def _arrivals(documents: Documents, place: Place) -> Rows:
    for behind, raw in documents:
        yield place, _arrival(f.decode(raw))
        place = Place(behind)
    yield place, None


def _arrival(document: f.Document) -> FeedEvent | None:
    """The event that a document of the delay log tells. None: another log tells it."""
    at_ms, flags = document.seq >> SEQ_COUNTER_BITS, document.flags
    if flags & (f.TOMBSTONE | f.MOVED):  # of a cancel, or a copy by compaction
        return None
    if flags & f.META:
        return _failure(document, at_ms)
    event = "created"
    if flags & f.SUPERSEDES or (flags & f.REPLACES and document.arrived == document.seq):
        event = "replaced"
    elif flags & f.REPLACES:
        event = "edited" if document.of is not None and document.of[1] == document.due_ms else "rescheduled"
    return FeedEvent(at_ms, event, document.id, due_ms=document.due_ms)


def _failure(retry: f.Document, at_ms: int) -> FeedEvent | None:
    """The failure after which a retry sleeps. None: it sleeps since it was requeued or is tried sooner."""
    last = a.of_notes(retry.meta)[-1:]
    if not last or retry.flags & f.REPLACES or last[0].next_ms != retry.due_ms:
        return None
    group, _, id_ = retry.id.partition("/")
    one = last[0]
    return FeedEvent(at_ms, str(one.outcome), id_, group, one.consumer, one.attempt, None, one.next_ms, one.error)


def _ready(stores: Stores, place: Place, end: Place) -> Rows:
    ready, offset = stores.broker.ready, place.position
    while (offset := max(offset, ready.first_offset)) < end.position:
        read, times = ready.read(np.arange(offset, min(offset + _STEP, end.position)), PAGE_BYTES)
        for i, at_ms in enumerate(times.tolist()):
            yield Place(offset + i), _became_ready(read.decode(i), at_ms) if read.good[i] else None
        offset += len(times)
        yield Place(offset), None
    yield Place(offset), None


def _became_ready(document: f.Document, at_ms: int) -> FeedEvent:
    if document.flags & f.NOTICE:
        return FeedEvent(at_ms, "cancelled", document.id)
    if not document.flags & f.META:
        return FeedEvent(at_ms, "ready", document.id, due_ms=document.due_ms)
    group, _, id_ = document.id.partition("/")
    return FeedEvent(at_ms, "ready", id_, group, attempt=int(document.meta["attempt"]), due_ms=document.due_ms)


def _journal(stores: Stores, documents: Documents, place: Place) -> Rows:
    for behind, raw in documents:
        event, row = Journal.event(raw), 0
        for happened in () if event is None else _happened(stores, event):
            if row >= place.row:
                yield Place(place.position, row), happened
            row += happened is not None
        place = Place(behind)
        yield place, None


def _happened(stores: Stores, event: Event) -> Iterator[FeedEvent | None]:
    """The rows of an event of a journal, one for each message, and None between steps."""
    kind, fields, base = str(event.fields["event"]), event.fields, FeedEvent(event.at_ms, "", group=event.group)
    if kind == events.SETTLE:
        yield from _settled(event, base)
    elif kind in (events.LEASE, events.RETRY):
        columns = {"attempts": event.array("attempts"), "when": event.array("when") if kind == events.RETRY else None}
        for i, id_ in _ids(stores, event.array("offsets"), event.array("seqs")):
            yield None if id_ is None else _delivered(base, fields, id_, i, columns)
    elif kind == events.CANCEL:
        offsets, seqs, again = event.array("offsets"), event.array("seqs"), event.array("again")
        own = ~np.isin(offsets, again)
        for _, id_ in _ids(stores, offsets[own], seqs[own]):
            yield None if id_ is None else FeedEvent(event.at_ms, "cancelled", id_)
    elif kind == events.REMOVE_DEAD:
        became = event.array("became").tolist()
        for id_, seq in zip(events.split_ids(fields["ids"]), became, strict=True):
            yield base.changed(event="requeued" if seq else "deleted", id=id_)
    elif kind in (events.GROUP, events.FORGET):
        yield base.changed(event="group placed" if kind == events.GROUP else "group deleted")


def _settled(event: Event, base: FeedEvent) -> Iterator[FeedEvent]:
    fields, numbers = event.fields, event.array("attempts").tolist()
    outcome, error = str(fields["outcome"]), str(fields["error"])
    names, by = fields.get("consumers", [""]), event.array("by").tolist() if "by" in fields else None
    word = a.DEAD if outcome == events.EXPIRED else outcome
    for i, id_ in enumerate(events.split_ids(fields["ids"])):
        consumer = str(names[by[i] if by is not None else 0])
        yield base.changed(event=word, id=id_, consumer=consumer, attempt=numbers[i], error=error)


def _delivered(base: FeedEvent, fields: dict[str, Any], id_: str, i: int, columns: dict[str, I64 | None]) -> FeedEvent:
    """A row of a LEASE or RETRY event."""
    attempts, when = columns["attempts"], columns["when"]
    assert attempts is not None
    number = int(attempts[i])
    if when is None:
        return base.changed(event="reserved", id=id_, consumer=str(fields["consumer"]), attempt=number)
    outcome = str(fields.get("outcome", a.FAILED))
    ended = number if outcome in ("", a.GIVEN_BACK) else number - 1
    return base.changed(
        event=outcome or "retry now", id=id_, attempt=ended, next_ms=int(when[i]), error=str(fields["error"]) if outcome else ""
    )


def _ids(stores: Stores, offsets: I64, seqs: I64) -> Iterator[tuple[int, str | None]]:
    """The ids of documents of the ready log, by index; (0, None) between steps. Those that retention has removed are left out."""
    ready, order = stores.broker.ready, np.argsort(offsets, kind="stable")
    while len(order := order[offsets[order] >= ready.first_offset]):
        rows = order[:_STEP]
        read, _ = ready.read(offsets[rows], PAGE_BYTES)
        found, stored = read.ids(), read.heads["seq"].tolist()
        for i, id_, seq in zip(rows.tolist(), found, stored, strict=False):
            if id_ and seq == seqs[i]:
                yield i, id_.decode().rpartition("/")[2]
        order = order[len(found) :]
        yield 0, None
