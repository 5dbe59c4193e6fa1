"""/metrics: the engine's figures and the server's own, as Prometheus reads them. docs/OBSERVE.md lists every one.

Figures are taken at the scrape, a few milliseconds at a time, so that nobody waits. Labels are bounded: the first TOPICS_MAX
topics, the busiest first, keep their names for as long as they exist; all others are one, `other`, so that no counter goes back
because somebody else became busier. Likewise the groups of a topic.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from aiohttp import web

from turtlemq import __version__
from turtlemq.engine import Engine
from turtlemq.histogram import LATENESS_MS, GroupTally, Histogram
from turtlemq.lifecycle import STATES
from turtlemq.server import exposition
from turtlemq.server.exposition import Labels
from turtlemq.server.http import SERVICE
from turtlemq.server.meter import in_slices
from turtlemq.server.service import Service, now_ms
from turtlemq.topic.stats import GroupStats, TopicStats, TopicTotals
from turtlemq.topic.topic import Topic

TOPICS_MAX = 100
GROUPS_MAX = 10  # of a topic
OTHER = "other"
GROUP_STATES = ("ready", "reserve", "history", "dead")


@dataclass(slots=True)
class Row:
    """Figures of one topic, or of all others together."""

    stats: dict[str, float | None]
    totals: dict[str, int]
    groups: dict[str, dict[str, int]]
    lateness: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))
    wait: Histogram = field(default_factory=lambda: Histogram(LATENESS_MS))


# name, kind, help, key of `Row.stats`; figures that do not add up over topics are left out for `other`
GAUGES = (
    ("turtlemq_bytes", "Bytes on disk.", "bytes"),
    ("turtlemq_segments", "Segment files.", "segments"),
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
)
ADD_UP = ("bytes", "segments", "damaged", "trouble", "stopped", "ready_unsynced", *STATES)
TOTALS = (
    ("turtlemq_produced_total", "Messages stored.", "produced"),
    ("turtlemq_duplicates_total", "Messages that were known already and not stored again.", "duplicates"),
    ("turtlemq_handed_off_total", "Messages that came due.", "handed_off"),
    ("turtlemq_cancelled_total", "Messages cancelled, asleep or ready.", "cancelled"),
    ("turtlemq_rescheduled_total", "Sleepers that got another due time, body or headers.", "rescheduled"),
    ("turtlemq_retried_asleep_total", "Messages put to sleep again: long back-offs and requeued dead letters.", "retried"),
    ("turtlemq_dead_requeued_total", "Dead letters requeued.", "dead_requeued"),
    ("turtlemq_dead_dropped_total", "Dead letters dropped for their age or number.", "dead_dropped"),
    ("turtlemq_compaction_moved_total", "Sleepers moved out of segments that were mostly empty.", "moved"),
    ("turtlemq_compaction_dropped_bytes_total", "Bytes of segments dropped.", "bytes_dropped"),
    ("turtlemq_compaction_dropped_segments_total", "Segments dropped.", "segments_dropped"),
    ("turtlemq_seals_total", "Segments rewritten in due order.", "seals"),
)
GROUP_TOTALS = (
    ("turtlemq_delivered_total", "Messages given to consumers.", "delivered"),
    ("turtlemq_acked_total", "Messages acknowledged.", "acked"),
    ("turtlemq_failed_total", "Deliveries that a consumer reported as failed, or went away with.", "failed"),
    ("turtlemq_timed_out_total", "Deliveries whose lease ended.", "timed_out"),
    ("turtlemq_died_total", "Messages that became dead letters.", "dead"),
)


class Shown:
    """Which topics have a label of their own."""

    def __init__(self, most: int = TOPICS_MAX) -> None:
        self._most, self._names = most, set[str]()

    async def names(self, engine: Engine) -> set[str]:
        """Those that had one keep it; free places go to the busiest. O(topics) where there are too many."""
        self._names &= engine.topics.keys()
        if len(self._names) < min(self._most, len(engine.topics)):
            new = [name for name in engine.topics if name not in self._names]
            if len(new) > self._most - len(self._names):
                new = await busiest(engine, new)
            self._names.update(new[: self._most - len(self._names)])
        return set(self._names)


SHOWN = web.AppKey("shown", Shown)


async def busiest(engine: Engine, names: Iterable[str]) -> list[str]:
    """Topics by how much has happened in them, and then by name. 7 µs each."""
    scored = await in_slices((-engine.topics[name].activity, name) for name in names if name in engine.topics)
    return [name for _, name in sorted(scored)]


# Taking


def row_of(engine: Engine, name: str, now: int, brief: bool = False) -> Row:
    """A topic's figures. 150 µs; `brief`: 30 µs, without those that do not add up."""
    topic = engine.topics[name]
    found = topic.stats(oldest=not brief)
    stats: dict[str, float | None] = {key: getattr(found, key) for key in TopicStats.__dataclass_fields__}
    stats |= {
        "trouble": int(name in engine.trouble),
        "stopped": int(topic.stopped is not None),
        "ready_unsynced": topic.unsynced_handoffs,
        "oldest_ready": None if found.oldest_ready_ms is None else max(0, now - found.oldest_ready_ms) / 1000,
        "next_due": None if found.next_due_ms is None else found.next_due_ms / 1000,
    }
    counted = topic.totals()
    totals: dict[str, int] = {key: getattr(counted, key) for key in TopicTotals.__dataclass_fields__}
    return Row(stats, totals, _groups(topic), topic.lateness, topic.wait)


def _groups(topic: Topic) -> dict[str, dict[str, int]]:
    """Figures of the first groups by name, and of all others as one."""
    out: dict[str, dict[str, int]] = {}
    tallies = topic.tallies()
    for i, (name, stats) in enumerate(sorted(topic.groups().items())):
        tally = tallies[name]
        found = {f"now_{key}": getattr(stats, key) for key in GroupStats.__dataclass_fields__ if key in (*GROUP_STATES, "lag")}
        found |= {key: getattr(tally, key) for key in GroupTally.__dataclass_fields__}
        label = name if i < GROUPS_MAX else OTHER
        out[label] = _sum(out[label], found) if label in out else found
    return out


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


def merged(rows: list[Row]) -> Row:
    """All others as one."""
    stats: dict[str, float | None] = {key: sum(row.stats[key] or 0 for row in rows) for key in ADD_UP}
    totals: dict[str, int] = {}
    groups: dict[str, int] = {}
    for row in rows:
        totals = _sum(totals, row.totals)
        for group in row.groups.values():
            groups = _sum(groups, group)
    nothing = Histogram(LATENESS_MS)
    lateness, wait = nothing.merge(row.lateness for row in rows), nothing.merge(row.wait for row in rows)
    return Row(stats, totals, {OTHER: groups} if groups else {}, lateness, wait)


async def take(engine: Engine, shown: set[str]) -> dict[str, Row]:
    """The rows of all topics, by label."""
    now = now_ms()
    listed = sorted(engine.topics, key=lambda name: (name not in shown, name))
    rows = await in_slices((name, row_of(engine, name, now, name not in shown)) for name in listed if name in engine.topics)
    out = {name: row for name, row in rows if name in shown}
    rest = [row for name, row in rows if name not in shown]
    if rest:
        parts = await in_slices(merged(rest[i : i + 50]) for i in range(0, len(rest), 50))
        out[OTHER] = merged(parts if OTHER not in out else [*parts, out[OTHER]])  # a topic may have that name
    return out


# Showing


def topics(rows: dict[str, Row]) -> Iterator[str]:
    """Everything that has a topic for a label."""
    states = [({"topic": name, "state": state}, row.stats[state]) for name, row in rows.items() for state in STATES]
    yield from exposition.family("turtlemq_messages", "gauge", "Messages by state; from ready on summed over the groups.", states)
    for name, text, key in GAUGES:
        yield from exposition.family(name, "gauge", text, [({"topic": t}, row.stats.get(key)) for t, row in rows.items()])
    for name, text, key in TOTALS:
        yield from exposition.family(name, "counter", text, [({"topic": t}, row.totals[key]) for t, row in rows.items()])
    groups = [({"topic": t, "group": group}, found) for t, row in rows.items() for group, found in row.groups.items()]
    held = [({**labels, "state": state}, found[f"now_{state}"]) for labels, found in groups for state in GROUP_STATES]
    yield from exposition.family("turtlemq_group_messages", "gauge", "Messages of a group by state; reserve: in flight.", held)
    lag = [(labels, found["now_lag"]) for labels, found in groups]
    yield from exposition.family("turtlemq_group_lag", "gauge", "Ready offsets that a group has not settled.", lag)
    for name, text, key in GROUP_TOTALS:
        yield from exposition.family(name, "counter", text, [(labels, found[key]) for labels, found in groups])
    late = [({"topic": t}, row.lateness) for t, row in rows.items()]
    text = "From due to ready, of messages that were to sleep: the scheduler's part of lateness."
    yield from exposition.histogram("turtlemq_scheduler_lateness_seconds", text, late, 0.001)
    text = "From ready to the first delivery, in every group: the consumers' part of lateness."
    yield from exposition.histogram(
        "turtlemq_consumer_wait_seconds", text, [({"topic": t}, r.wait) for t, r in rows.items()], 0.001
    )


def server(service: Service) -> Iterator[str]:
    """Everything that has none."""
    meter, family, histogram = service.meter, exposition.family, exposition.histogram
    none: Labels = {}
    engine = service.engine if service.serving else None
    waiting = service.waiters
    yield from family("turtlemq_info", "gauge", "The version.", [({"version": __version__}, 1)])
    yield from family("turtlemq_up", "gauge", "1 while it serves.", [(none, int(engine is not None))])
    yield from family("turtlemq_topics", "gauge", "Topics.", [(none, len(engine.topics) if engine else None)])
    yield from family("turtlemq_long_polls", "gauge", "Fetches that wait.", [(none, waiting)])
    yield from family(
        "turtlemq_requests_in_flight", "gauge", "Requests under way, long polls included.", [(none, meter.in_flight)]
    )
    counted = sorted(meter.requests.items())
    samples = [({"method": m, "route": r, "status": str(s)}, n) for (m, r, s), n in counted]
    yield from family("turtlemq_requests_total", "counter", "Answered requests.", samples)
    refused = [({"code": code}, count) for code, count in sorted(meter.rejected.items())]
    yield from family("turtlemq_rejected_total", "counter", "Refused requests, by error code.", refused)
    routes = [({"route": route}, found) for route, found in sorted(meter.durations.items())]
    yield from histogram("turtlemq_request_seconds", "From a request's head to its answer, a long poll's wait left out.", routes)
    batches = [({"kind": kind}, getattr(meter, f"{kind}_batch")) for kind in ("produce", "fetch", "ack")]
    yield from histogram("turtlemq_batch_messages", "Messages of one request.", batches)
    yield from histogram("turtlemq_commit_seconds", "A group commit: one write and one fdatasync.", [(none, meter.commit)])
    yield from histogram("turtlemq_commit_bytes", "Bytes of a group commit.", [(none, meter.commit_bytes)])
    yield from histogram("turtlemq_tick_seconds", "One tick of the engine.", [(none, meter.tick)])
    yield from histogram("turtlemq_loop_lag_seconds", "How late a timer of the event loop rings.", [(none, meter.lag)])


def _or_none(take_it: Callable[[], float]) -> float | None:
    try:
        return take_it()
    except (OSError, ValueError, IndexError):  # not this operating system
        return None


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int | None:
    """The memory that this process has."""
    found = _or_none(_resident)
    return None if found is None else int(found)


_STARTED = time.time()


def process(root: str | None) -> Iterator[str]:
    """The process and its disk, named as Prometheus' own clients do."""
    times = os.times()
    cpu = times.user + times.system
    free = None if root is None else _or_none(lambda: shutil.disk_usage(root).free)
    fds = _or_none(lambda: len(os.listdir("/proc/self/fd")))
    for name, kind, text, value in (
        ("process_cpu_seconds_total", "counter", "Processor time.", cpu),
        ("process_resident_memory_bytes", "gauge", "Memory.", resident_bytes()),
        ("process_open_fds", "gauge", "Open file descriptors.", fds),
        ("process_max_fds", "gauge", "How many may be open.", _or_none(lambda: os.sysconf("SC_OPEN_MAX"))),
        ("process_start_time_seconds", "gauge", "When the process started.", round(_STARTED, 3)),
        ("turtlemq_disk_free_bytes", "gauge", "Room on the disk of the data folder.", free),
    ):
        yield from exposition.family(name, kind, text, [({}, value)])


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    service = request.app[SERVICE]
    lines: list[str] = []
    root = None
    if service.serving:
        engine = service.engine
        root = str(engine.root)
        lines = await in_slices(topics(await take(engine, await request.app[SHOWN].names(engine))))
    lines = [*server(service), *process(root), *lines]
    return web.Response(body="\n".join(lines).encode() + b"\n", headers={"Content-Type": exposition.CONTENT_TYPE})
