"""The metric families of /metrics: names, help texts and samples. docs/OBSERVE.md lists them all.

Pure formatting of figures that `collect`, `meter` and `process` hold; names and help texts are part of the interface.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from turtlemq import __version__
from turtlemq.lifecycle import STATES
from turtlemq.segment import kernel
from turtlemq.server import logs
from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.cluster_families import cluster_families
from turtlemq.server.metrics.collect import GROUP_STATES, TopicFigures
from turtlemq.server.metrics.exposition import Labels
from turtlemq.server.metrics.grpc_families import grpc_families
from turtlemq.server.metrics.meter import SECONDS
from turtlemq.server.metrics.push_families import push_families
from turtlemq.server.metrics.tenant_families import tenant_families
from turtlemq.server.service import Service

# Name, help text, key of `TopicFigures.stats`. Figures that do not add up over topics are left out for `other`.
GAUGES = (
    ("turtlemq_bytes", "Bytes on disk.", "bytes"),
    ("turtlemq_segments", "Segment files.", "segments"),
    ("turtlemq_schedules", "Recurring schedules, paused and ended ones included.", "schedules"),
    ("turtlemq_live_ratio", "Sleeping documents among all in the delay segments.", "live_ratio"),
    ("turtlemq_damaged", "Stretches of files that are not what was written.", "damaged"),
    ("turtlemq_trouble", "1 for a topic whose last tick failed.", "trouble"),
    ("turtlemq_stopped", "1 for a topic that takes no more writes since one failed.", "stopped"),
    ("turtlemq_ready_unsynced", "Messages at the end of the ready log that the next beat makes durable.", "ready_unsynced"),
    (
        "turtlemq_oldest_ready_seconds",
        "For how long the oldest message that some group has not fetched is ready.",
        "oldest_ready",
    ),
    ("turtlemq_next_due_timestamp_seconds", "When the next message is due.", "next_due"),
    (
        "turtlemq_priority_weight",
        "The highest weight of high priority in a group, of topics with a goal for its waits.",
        "high_weight",
    ),
)
_ABOUT: Labels = {"version": __version__, "kernel": kernel.status}
TOTALS = (
    ("turtlemq_produced_total", "Messages stored.", "produced"),
    ("turtlemq_duplicates_total", "Messages that were known already and not stored again.", "duplicates"),
    ("turtlemq_replaced_total", "Messages stored in the place of another one of the same id.", "replaced"),
    ("turtlemq_handed_off_total", "Messages that came due.", "handed_off"),
    ("turtlemq_cancelled_total", "Messages cancelled, asleep or ready.", "cancelled"),
    ("turtlemq_rescheduled_total", "Sleepers that got another due time, body or headers.", "rescheduled"),
    ("turtlemq_retried_asleep_total", "Messages put to sleep again: long back-offs and requeued dead letters.", "retried"),
    ("turtlemq_dead_requeued_total", "Dead letters requeued.", "dead_requeued"),
    ("turtlemq_dead_dropped_total", "Dead letters dropped for their age or number.", "dead_dropped"),
    ("turtlemq_compaction_moved_total", "Sleepers moved out of segments that were mostly empty.", "moved"),
    ("turtlemq_compaction_dropped_bytes_total", "Bytes of segments dropped.", "bytes_dropped"),
    ("turtlemq_compaction_dropped_segments_total", "Segments dropped.", "segments_dropped"),
    ("turtlemq_schedules_fired_total", "Messages put by recurring schedules.", "fired"),
    ("turtlemq_seals_total", "Segments rewritten in due order.", "seals"),
)
GROUP_TOTALS = (
    ("turtlemq_delivered_total", "Messages given to consumers.", "delivered"),
    ("turtlemq_acked_total", "Messages acknowledged.", "acked"),
    ("turtlemq_failed_total", "Deliveries that a consumer reported as failed, or went away with.", "failed"),
    ("turtlemq_timed_out_total", "Deliveries whose lease ended.", "timed_out"),
    ("turtlemq_late_total", "Acks and extends that named a lease which another one has replaced.", "late"),
    ("turtlemq_died_total", "Messages that became dead letters.", "dead"),
)


def topic_families(rows: dict[str, TopicFigures]) -> Iterator[str]:
    """Families whose samples have a topic as label."""
    states = [({"topic": name, "state": state}, row.stats[state]) for name, row in rows.items() for state in STATES]
    yield from exposition.family("turtlemq_messages", "gauge", "Messages by state; from ready on summed over the groups.", states)
    for name, text, key in GAUGES:
        yield from exposition.family(name, "gauge", text, [({"topic": t}, row.stats.get(key)) for t, row in rows.items()])
    for name, text, key in TOTALS:
        yield from exposition.family(name, "counter", text, [({"topic": t}, row.totals[key]) for t, row in rows.items()])
    groups = [({"topic": t, "group": group}, counts) for t, row in rows.items() for group, counts in row.groups.items()]
    states = [({**labels, "state": state}, counts[f"now_{state}"]) for labels, counts in groups for state in GROUP_STATES]
    yield from exposition.family("turtlemq_group_messages", "gauge", "Messages of a group by state; reserve: in flight.", states)
    lag = [(labels, counts["now_lag"]) for labels, counts in groups]
    yield from exposition.family("turtlemq_group_lag", "gauge", "Ready offsets that a group has not settled.", lag)
    paused: list[tuple[Labels, float | None]] = [({"topic": t}, row.stats["paused"]) for t, row in rows.items()]
    paused += [(labels, counts["now_paused"]) for labels, counts in groups]
    text = "1 for a paused topic (without a group) or group; of several under one label, how many are."
    yield from exposition.family("turtlemq_paused", "gauge", text, paused)
    for name, text, key in GROUP_TOTALS:
        yield from exposition.family(name, "counter", text, [(labels, counts[key]) for labels, counts in groups])
    late = [({"topic": t}, row.lateness) for t, row in rows.items()]
    text = "From due to ready, of messages that were to sleep: the scheduler's part of lateness."
    yield from exposition.histogram("turtlemq_scheduler_lateness_seconds", text, late, 0.001)
    text = "From ready to the first delivery, in every group: the consumers' part of lateness."
    yield from exposition.histogram(
        "turtlemq_consumer_wait_seconds", text, [({"topic": t}, r.wait) for t, r in rows.items()], 0.001
    )


def exemplars(service: Service) -> dict[str, str]:
    """Exemplars of the durations of requests, by their bucket."""
    bounds = (*SECONDS, math.inf)
    return dict(
        exposition.exemplar("turtlemq_request_seconds", {"route": route}, bounds[bucket], *given)
        for (route, bucket), given in service.meter.exemplars.items()
    )


def server_families(service: Service) -> Iterator[str]:
    """Families of the server as a whole."""
    meter, family, histogram = service.meter, exposition.family, exposition.histogram
    none: Labels = {}
    engine = service.engine if service.serving else None
    yield from family("turtlemq_info", "gauge", "The version, and whether the kernel is compiled.", [(_ABOUT, 1)])
    yield from family("turtlemq_up", "gauge", "1 while it serves.", [(none, int(engine is not None))])
    yield from family("turtlemq_topics", "gauge", "Topics.", [(none, len(engine.topics) if engine else None)])
    yield from family("turtlemq_long_polls", "gauge", "Fetches that wait.", [(none, service.polls)])
    yield from family(
        "turtlemq_requests_in_flight", "gauge", "Requests under way, long polls included.", [(none, meter.in_flight)]
    )
    text, at = (
        "The time of the virtual clock; only of a server that has one.",
        None if service.clock is None else service.clock.now_ms / 1000,
    )
    yield from family("turtlemq_virtual_clock_timestamp_seconds", "gauge", text, [(none, at)])
    sockets = meter.sockets
    for name, kind, text, value in (
        ("sockets", "gauge", "Accepted sockets: connections, TLS handshakes and refusals.", sockets.open),
        ("sockets_max", "gauge", "How many may be open; beyond it no connection is accepted.", sockets.most),
        ("connections_refused_total", "counter", "Connections refused at max_connections.", sockets.refused),
        (
            "accept_pauses_total",
            "counter",
            "How often accepting was paused, at the limit or without a descriptor.",
            sockets.pauses,
        ),
        ("replays_running", "gauge", "Replays into other topics that run.", meter.replays),
        ("replayed_messages_total", "counter", "Copies that replays have made.", meter.replayed),
        ("log_lines_dropped_total", "counter", "Lines of the log that standard error did not take in time.", logs.dropped()),
    ):
        yield from family(f"turtlemq_{name}", kind, text, [(none, value)])
    counted = sorted(meter.requests.items())
    samples = [({"method": m, "route": r, "status": str(s)}, n) for (m, r, s), n in counted]
    yield from family("turtlemq_requests_total", "counter", "Answered requests.", samples)
    outcomes = [({"outcome": outcome}, count) for outcome, count in meter.transactions.items()]
    yield from family("turtlemq_transactions_total", "counter", "Transactions that were done, or not for a conflict.", outcomes)
    refused = [({"code": code}, count) for code, count in sorted(meter.rejected.items())]
    yield from family("turtlemq_rejected_total", "counter", "Refused requests, by error code.", refused)
    routes = [({"route": route}, durations) for route, durations in sorted(meter.durations.items())]
    yield from histogram("turtlemq_request_seconds", "From a request's head to its answer, a long poll's wait left out.", routes)
    batches = [({"kind": kind}, getattr(meter, f"{kind}_batch")) for kind in ("produce", "fetch", "ack")]
    yield from histogram("turtlemq_batch_messages", "Messages of one request.", batches)
    yield from histogram("turtlemq_commit_seconds", "A group commit: one write and one fdatasync.", [(none, meter.commit)])
    yield from histogram("turtlemq_commit_bytes", "Bytes of a group commit.", [(none, meter.commit_bytes)])
    yield from histogram("turtlemq_tick_seconds", "One tick of the engine.", [(none, meter.tick)])
    steps = [({"step": step}, seconds) for step, seconds in meter.steps.seconds.items()]
    yield from histogram("turtlemq_delivery_step_seconds", "Of deliveries to fetches that wait, by step.", steps)
    yield from histogram("turtlemq_loop_lag_seconds", "How late a timer of the event loop rings.", [(none, meter.loop.lag)])
    stalls = [(none, meter.loop.stalls)]
    about = "Times that something held the event loop above 50 ms, waits for a processor left out."
    yield from family("turtlemq_loop_stalls_total", "counter", about, stalls)
    yield from push_families(service)
    yield from tenant_families(service)
    yield from cluster_families(service)
    if meter.grpc is not None:
        yield from grpc_families(meter.grpc)
