"""The handler of /metrics: collects all figures and writes them in Prometheus' text format, or as OpenMetrics on wish."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.collect import collect
from turtlemq.server.metrics.families import exemplars, server_families, topic_families
from turtlemq.server.metrics.labels import TopicLabels
from turtlemq.server.metrics.process import process_families
from turtlemq.server.metrics.slo_families import slo_families
from turtlemq.server.request import SERVICE
from turtlemq.server.slo_watch import SLO

TOPIC_LABELS = web.AppKey("topic_labels", TopicLabels)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    service = request.app[SERVICE]
    as_open_metrics = exposition.OPENMETRICS in request.headers.get("Accept", "")
    examples = exemplars(service) if as_open_metrics else {}

    def form(lines: Iterable[str]) -> Iterable[str]:
        return exposition.open_metrics(lines, examples) if as_open_metrics else lines

    topics: list[str] = []
    root = None
    if service.serving:
        engine = service.engine
        root = str(engine.root)
        figures = await collect(engine, request.app[TOPIC_LABELS], now_ms())
        topics = await in_slices(form(topic_families(figures)))
        goals = {name: request.app[SLO].of(engine.topics[name]) for name in figures if name in engine.topics}
        topics += form(slo_families({name: goal.answer(now_ms()) for name, goal in goals.items() if goal is not None}))
    lines = [*form(server_families(service)), *form(process_families(root)), *topics, *(["# EOF"] if as_open_metrics else [])]
    kind = exposition.OPENMETRICS_TYPE if as_open_metrics else exposition.CONTENT_TYPE
    return web.Response(body="\n".join(lines).encode() + b"\n", headers={"Content-Type": kind})
