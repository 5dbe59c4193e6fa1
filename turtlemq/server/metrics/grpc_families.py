"""The metric families of gRPC: streams, messages, windows, ends and pauses. A server without gRPC has none of them."""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.labels import OTHER
from turtlemq.server.metrics.meter import GrpcFigures

GROUPS_MAX = 100  # with labels of their own; all others are summed


def grpc_families(figures: GrpcFigures) -> Iterator[str]:
    """Families of gRPC."""
    for name, kind, text, label, counts in (
        ("streams", "gauge", "gRPC calls under way.", "service", figures.streams),
        ("streams_ended_total", "counter", "Streams of consumers that have ended.", "why", figures.ended),
        ("paused_seconds_total", "counter", "Time in which a stream was read no further.", "why", figures.paused_s),
    ):
        samples = [({label: key}, count) for key, count in sorted(counts.items())]
        yield from exposition.family(f"turtlemq_grpc_{name}", kind, text, samples)
    text = "Messages of streams, in both directions."
    kinds = [({"service": service, "kind": kind}, count) for (service, kind), count in sorted(figures.messages.items())]
    yield from exposition.family("turtlemq_grpc_messages_total", "counter", text, kinds)
    text = "Acks of messages that were not in flight."
    yield from exposition.family("turtlemq_grpc_unknown_acks_total", "counter", text, [({}, figures.unknown_acks)])
    yield from exposition.family("turtlemq_grpc_sockets", "gauge", "Connections of gRPC clients.", [({}, figures.sockets.open)])
    if figures.passed_on is not None:
        text = "Connections that are passed on to the leader."
        yield from exposition.family("turtlemq_grpc_passed_on", "gauge", text, [({}, figures.passed_on())])
    groups = _bounded(figures.gauges())
    for i, (name, text) in enumerate((("unacked", "Deliveries without an ack."), ("window", "Sum of the streams' windows."))):
        samples = [({"topic": topic, "group": group}, values[i]) for (topic, group), values in groups.items()]
        yield from exposition.family(f"turtlemq_grpc_{name}", "gauge", text, samples)


def _bounded(groups: dict[tuple[str, str], tuple[int, int]]) -> dict[tuple[str, str], tuple[int, int]]:
    """The first GROUPS_MAX groups by name, and the sum of all others."""
    out, others = dict(sorted(groups.items())[:GROUPS_MAX]), sorted(groups.items())[GROUPS_MAX:]
    if others:
        out[OTHER, OTHER] = sum(values[0] for _, values in others), sum(values[1] for _, values in others)
    return out
