"""Looking up the end of one message in the history journal: how groups settled it, or when it was cancelled.

The journal has no index by id, so events are searched once for all groups: from the newest on backwards, then from the time on at
which the message became ready, each no further than `EVENTS_MAX` events or `BYTES_MAX` bytes. Only events that contain the bytes
of the id are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from turtlemq.attempts import Attempt, Attempts
from turtlemq.broker import events
from turtlemq.broker.journal import Event, Journal

EVENTS_MAX = 2_000  # searched for one message
BYTES_MAX = 16 << 20  # of these events: 10 ms


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a delivery of a message ended."""

    reserved_ms: int
    settled_ms: int
    outcome: str  # see `events`
    attempt: int
    error: str
    offset: int  # of its document in the ready log
    attempts: Attempts  # since that document became ready


def find_settlements(history: Journal, groups: Mapping[str, int], id_: str, first: int) -> dict[str, Settlement]:
    """The newest settlement of a message in each of these groups; without those that no searched event tells. `groups`: with the
    time at which each got the message. `first`: the first ready offset that the message had; lower ones are of an earlier message
    with the same id."""
    settlements: dict[str, Settlement] = {}
    if not groups:
        return settlements
    part = id_.encode()
    searches = [_matching(history, events.SETTLE, part, history.documents())]
    searches.append(_matching(history, events.SETTLE, part, history.documents_since(min(groups.values()))))
    for event in chain.from_iterable(searches):
        if event.group in groups and event.group not in settlements:
            settlement = _settlement(event, id_)
            if settlement is not None and settlement.offset >= first:
                settlements[event.group] = settlement
                if len(settlements) == len(groups):
                    break
    return settlements


def _settlement(event: Event, id_: str) -> Settlement | None:
    ids, fields = events.split_ids(event.fields["ids"]), event.fields
    if id_ not in ids:
        return None
    i, outcome, error = ids.index(id_), str(fields["outcome"]), str(fields["error"])
    reserved_ms, attempt, offset = (int(event.array(name)[i]) for name in ("reserved", "attempts", "offsets"))
    last = Attempt(attempt, events.consumer_at(fields, i), reserved_ms, event.at_ms, outcome, error, None)
    delivered = () if outcome == events.EXPIRED else (last,)
    return Settlement(reserved_ms, event.at_ms, outcome, attempt, error, offset, (*events.earlier_at(fields, i), *delivered))


def find_cancellation(history: Journal, offset: int) -> int | None:
    """When the message at a ready offset was cancelled; None: no event tells it among the newest ones."""
    cancellations = _matching(history, events.CANCEL, events.pack([offset]), history.documents())
    return next((event.at_ms for event in cancellations if offset in event.array("offsets")), None)


def _matching(history: Journal, kind: str, part: bytes, documents: Iterable[bytes]) -> Iterator[Event]:
    """The events of a kind that contain these bytes, among the first of these documents."""
    searched = 0
    for number, raw in enumerate(documents):
        searched += len(raw)
        if number and (number >= EVENTS_MAX or searched > BYTES_MAX):
            return
        if part in raw and (event := history.event(raw)) is not None and event.fields["event"] == kind:
            yield event
