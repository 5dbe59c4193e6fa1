"""Handlers about the state of the server: /healthz and /readyz for supervisors, /v1/status for the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq import __version__
from turtlemq.engine import Engine
from turtlemq.errors import Unavailable, describe
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.lifecycle import STATES
from turtlemq.server.auth import AUTH
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import Slices, in_slices
from turtlemq.server.forward import leads
from turtlemq.server.metrics.collect import figures_of
from turtlemq.server.metrics.labels import busiest
from turtlemq.server.metrics.memory import memory_usage
from turtlemq.server.metrics.process import disk_usage, resident_bytes
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of, query
from turtlemq.server.service import Service
from turtlemq.topic.view import TopicView

if TYPE_CHECKING:
    from turtlemq.server.cluster_part import ClusterPart

_STARTED = time.monotonic()
DAMAGE_MAX = 20
GROUP_TOTALS = ("delivered", "acked", "failed", "timed_out")


class StatusQuery(Struct, forbid_unknown_fields=True):
    """The topics to show: the `limit` busiest whose name contains `q`."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 50
    q: Annotated[str, Meta(max_length=200)] = ""


class ReadyQuery(Struct):
    """`lead`: only the leader of a cluster is meant."""

    lead: bool = False


class Lateness(Struct):
    """Histograms since the start: count i is of at most bounds_ms[i], and one more count is of everything above. The difference
    of two answers is the lateness in the time between."""

    bounds_ms: list[float]
    scheduler: list[int]
    consumer_wait: list[int]
    scheduler_p50_ms: float | None
    scheduler_p99_ms: float | None
    consumer_wait_p50_ms: float | None
    consumer_wait_p99_ms: float | None


class TopicStatus(Struct):
    """A topic: messages by state, totals since the start, its groups and its lateness."""

    topic: str
    states: dict[str, int]
    totals: dict[str, int]
    groups: dict[str, dict[str, int]]
    bytes: int
    segments: int
    live_ratio: float
    damaged: int
    oldest_ready_ms: int | None
    next_due_ms: int | None
    trouble: str | None
    paused: bool
    lateness: Lateness


class DamageFound(Struct):
    """A damaged stretch of a file."""

    topic: str
    file: str
    position: int
    length: int
    reason: str


class ShardState(Struct):
    """A shard of a server with several: serving, or down if its process does not answer."""

    shard: int
    state: str


class Status(Struct):
    """The server as a whole. `topics` are those of the query; `states`, `totals` and `bytes` the sums over all that match `q` and
    that the token may see; `damage` has at most DAMAGE_MAX entries."""

    version: str
    now_ms: int
    uptime_s: float
    was_clean: bool
    topics_total: int
    long_polls: int
    requests_in_flight: int
    requests: int
    rejected: dict[str, int]
    commit_p50_ms: float | None
    commit_p99_ms: float | None
    loop_lag_p99_ms: float | None
    memory_bytes: int | None
    memory_free_bytes: int | None
    memory_total_bytes: int | None
    disk_free_bytes: int | None
    disk_bytes: int | None
    states: dict[str, int]
    totals: dict[str, int]
    bytes: int
    lateness: Lateness
    topics: list[TopicStatus]
    damage: list[DamageFound]
    tenants: int = 0
    shards: list[ShardState] = []


async def healthz(request: web.Request) -> web.Response:
    """GET /healthz"""
    service = request.app[SERVICE]
    state = "stopping" if service.stopping else "serving" if service.serving else "starting"
    return answer({"status": "alive", "state": state, "version": __version__, "uptime_s": uptime_s()})


async def readyz(request: web.Request) -> web.Response:
    """GET /readyz"""
    asked, service = query(request, ReadyQuery), request.app[SERVICE]
    if (cluster := service.cluster) is not None and cluster.shards > 1:
        return _ready_node(cluster, asked.lead)
    if cluster is not None and not leads(service):
        url = cluster.leader_url()
        if asked.lead or url is None:
            raise Unavailable("this node does not lead" if url else "the cluster has no leader now", leader_url=url)
        return answer({"status": "ready", "role": cluster.role, "leader_url": url})
    engine = engine_of(request)  # 503 while it starts or stops
    health = await in_slices((bool(topic.view.damage()), topic.stopped is not None) for topic in list(engine.topics.values()))
    damaged, stopped, trouble = sum(d for d, _ in health), sum(s for _, s in health), len(engine.trouble)
    figures = {"topics": len(owned(service, engine.topics)), "damaged": damaged, "stopped": stopped, "trouble": trouble}
    return answer({"status": "ready", "was_clean": engine.was_clean, **figures})


def _ready_node(cluster: ClusterPart, must_lead: bool) -> web.Response:
    """A node of a cluster with several shards is ready while there are leaders to which it can forward."""
    led = [place for place in cluster.topology().leaders if place.node is not None]
    if must_lead:
        led = [place for place in led if place.node == cluster.options.node]
    if not led:
        raise Unavailable("this node leads no shard" if must_lead else "no shard has a leader now")
    return answer({"status": "ready", "role": cluster.role, "shards": len(led)})


def owned(service: Service, names: Iterable[str]) -> list[str]:
    """Topics that this process counts: a topic with partitions is counted where its first one is."""
    sharing = service.siblings or service.cluster
    return [name for name in names if sharing is None or sharing.has(name)]


def uptime_s() -> float:
    """Seconds since the process started."""
    return round(time.monotonic() - _STARTED, 3)


async def status(request: web.Request) -> web.Response:
    """GET /v1/status"""
    asked, engine, service = query(request, StatusQuery), engine_of(request), request.app[SERVICE]
    auth = request.app[AUTH]
    visible = await in_slices(name for name in list(engine.topics) if asked.q in name and auth.may(request, name))
    names = (await busiest(engine, visible))[: asked.limit]
    now = now_ms()
    rows = await in_slices(_topic(engine, name, now) for name in names if name in engine.topics)
    meter, views = service.meter, [engine.topics[name].view for name in visible if name in engine.topics]
    sums = await in_slices(view.stats() for view in views)
    disk, memory = disk_usage(str(engine.root)), memory_usage()
    late, wait = await _merged([view.lateness for view in views]), await _merged([view.wait for view in views])
    return answer(
        Status(
            version=__version__,
            now_ms=now,
            uptime_s=uptime_s(),
            was_clean=engine.was_clean,
            topics_total=len(owned(service, visible)),
            long_polls=service.polls,
            requests_in_flight=meter.in_flight,
            requests=meter.requests.total(),
            rejected=dict(meter.rejected),
            commit_p50_ms=_ms(meter.commit.quantile(0.5)),
            commit_p99_ms=_ms(meter.commit.quantile(0.99)),
            loop_lag_p99_ms=_ms(meter.loop.lag.quantile(0.99)),
            memory_bytes=resident_bytes(),
            memory_free_bytes=memory and memory.free,
            memory_total_bytes=memory and memory.total,
            disk_free_bytes=disk and disk.free,
            disk_bytes=disk and disk.total,
            states={state: sum(getattr(stats, state) for stats in sums) for state in STATES},
            totals=await _totals(views),
            bytes=sum(stats.bytes for stats in sums),
            lateness=_lateness(late, wait),
            topics=rows,
            damage=await _damage(engine, visible),
            tenants=len(service.tenants.accounts) if service.tenants is not None and auth.may(request, "*") else 0,
        )
    )


def _topic(engine: Engine, name: str, now: int) -> TopicStatus:
    figures = figures_of(engine, name, now)
    stats: Any = figures.stats
    trouble = engine.trouble.get(name) or engine.topics[name].stopped
    return TopicStatus(
        topic=name,
        states={state: stats[state] for state in STATES},
        totals=figures.totals | {key: sum(group[key] for group in figures.groups.values()) for key in GROUP_TOTALS},
        groups={
            name: {key.removeprefix("now_"): count for key, count in group.items() if key != "dead"}
            for name, group in figures.groups.items()
        },
        bytes=stats["bytes"],
        segments=stats["segments"],
        live_ratio=stats["live_ratio"],
        damaged=stats["damaged"],
        oldest_ready_ms=stats["oldest_ready_ms"],
        next_due_ms=stats["next_due_ms"],
        trouble=None if trouble is None else describe(trouble),
        paused=bool(stats["paused"]),
        lateness=_lateness(figures.lateness, figures.wait),
    )


def _lateness(late: Histogram, wait: Histogram) -> Lateness:
    quantiles = (late.quantile(0.5), late.quantile(0.99), wait.quantile(0.5), wait.quantile(0.99))
    return Lateness(list(late.bounds), list(late.counts), list(wait.counts), *(q and round(q, 3) for q in quantiles))


async def _totals(views: list[TopicView]) -> dict[str, int]:
    """Messages of all topics since the start: stored, delivered, acknowledged, and failed deliveries. In slices."""
    rows = await in_slices((view.totals().produced, *_of_groups(view)) for view in views)
    return {name: sum(row[i] for row in rows) for i, name in enumerate(("produced", *GROUP_TOTALS))}


def _of_groups(view: TopicView) -> tuple[int, ...]:
    tallies = view.group_tallies().values()
    return tuple(sum(getattr(tally, name) for tally in tallies) for name in GROUP_TOTALS)


async def _merged(histograms: list[Histogram]) -> Histogram:
    """The sum of histograms, in slices."""
    empty, step = Histogram(LATENESS_MS), 100
    parts = await in_slices(empty.merge(histograms[i : i + step]) for i in range(0, len(histograms), step))
    return empty.merge(parts)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


async def _damage(engine: Engine, names: list[str]) -> list[DamageFound]:
    damage, slices = list[DamageFound](), Slices()
    for name in names:
        if name in engine.topics:
            hits = engine.topics[name].view.damage()
            damage += [DamageFound(name, hit.file, hit.position, hit.length, hit.reason) for hit in hits[:DAMAGE_MAX]]
        if len(damage) >= DAMAGE_MAX:
            break
        await slices.pause()
    return damage[:DAMAGE_MAX]
