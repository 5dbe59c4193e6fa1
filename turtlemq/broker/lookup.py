"""Looking up the end of one message in the history journal: how a group settled it, or when it was cancelled.

The journal has no index by id, so the events are read from the newest on, and no further than `EVENTS_MAX`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from turtlemq.broker import events
from turtlemq.broker.journal import Event, Journal

EVENTS_MAX = 2_000  # read for one message: about 100 ms


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a delivery of a message ended."""

    reserved_ms: int
    settled_ms: int
    outcome: str  # see `events`
    attempt: int
    error: str


def find_settlement(history: Journal, group: str, id_: str) -> Settlement | None:
    """The newest settlement of a message in a group; None: there is none among the newest events."""
    part = f"\0{id_}\0".encode()
    for event in _newest(history, events.SETTLE):
        ids = event.fields["ids"]
        if event.group == group and part in b"\0" + ids + b"\0":
            i, fields = events.split_ids(ids).index(id_), event.fields
            reserved_ms, attempt = (int(event.array(name)[i]) for name in ("reserved", "attempts"))
            return Settlement(reserved_ms, event.at_ms, str(fields["outcome"]), attempt, str(fields["error"]))
    return None


def find_cancellation(history: Journal, offset: int) -> int | None:
    """When the message at a ready offset was cancelled; None: no event tells it among the newest ones."""
    return next((event.at_ms for event in _newest(history, events.CANCEL) if offset in event.array("offsets")), None)


def _newest(history: Journal, kind: str) -> Iterator[Event]:
    return (event for event in islice(history.events(), EVENTS_MAX) if event.fields["event"] == kind)
