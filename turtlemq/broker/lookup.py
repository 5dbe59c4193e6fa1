"""Looking up the end of one message in the history journal: how groups settled it, or when it was cancelled.

The journal has no index by id, so the events are searched from the newest on, once for all groups, and no further than
`EVENTS_MAX` events or `BYTES_MAX` bytes. Only events that contain the bytes of the id are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

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


def find_settlements(history: Journal, groups: Set[str], id_: str) -> dict[str, Settlement]:
    """The newest settlement of a message in each of these groups; without those that none of the newest events tells."""
    settlements: dict[str, Settlement] = {}
    if not groups:
        return settlements
    for event in _newest(history, events.SETTLE, id_.encode()):
        if event.group in groups and event.group not in settlements and (settlement := _settlement(event, id_)) is not None:
            settlements[event.group] = settlement
            if len(settlements) == len(groups):
                break
    return settlements


def _settlement(event: Event, id_: str) -> Settlement | None:
    ids, fields = events.split_ids(event.fields["ids"]), event.fields
    if id_ not in ids:
        return None
    i = ids.index(id_)
    reserved_ms, attempt = (int(event.array(name)[i]) for name in ("reserved", "attempts"))
    return Settlement(reserved_ms, event.at_ms, str(fields["outcome"]), attempt, str(fields["error"]))


def find_cancellation(history: Journal, offset: int) -> int | None:
    """When the message at a ready offset was cancelled; None: no event tells it among the newest ones."""
    cancellations = _newest(history, events.CANCEL, events.pack([offset]))
    return next((event.at_ms for event in cancellations if offset in event.array("offsets")), None)


def _newest(history: Journal, kind: str, part: bytes) -> Iterator[Event]:
    """The newest events of a kind that contain these bytes."""
    searched = 0
    for number, raw in enumerate(history.documents()):
        searched += len(raw)
        if number and (number >= EVENTS_MAX or searched > BYTES_MAX):
            return
        if part in raw and (event := history.event(raw)) is not None and event.fields["event"] == kind:
            yield event
