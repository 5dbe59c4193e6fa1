"""Metric families of registered clients and of callbacks. Those of callbacks are there only if these are on."""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.exposition import Labels
from turtlemq.server.service import Service

_NONE: Labels = {}


def push_families(service: Service) -> Iterator[str]:
    """All families of registered clients."""
    family, clients, push = exposition.family, service.clients, service.meter.push
    counts = [({"transport": transport}, count) for transport, count in clients.counts().items()]
    yield from family("turtlemq_clients", "gauge", "Registered clients.", counts)
    text = "Clients that were removed because their heartbeats stopped."
    yield from family("turtlemq_beats_missed_total", "counter", text, [(_NONE, clients.beats_missed)])
    if push is None:
        return
    outcomes = [({"outcome": outcome}, count) for outcome, count in sorted(push.outcomes.items())]
    yield from family("turtlemq_push_total", "counter", "Callbacks, by outcome.", outcomes)
    yield from exposition.histogram("turtlemq_push_seconds", "From a callback to its answer.", [(_NONE, push.seconds)])
    text = "Endpoints that rest after failures in a row, or are being probed."
    yield from family("turtlemq_push_breaker_open", "gauge", text, [(_NONE, push.breakers_open())])
