"""The handler of /metrics: collects all figures and writes them in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web

from turtlemq.server.fair_turns import in_slices
from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.collect import collect
from turtlemq.server.metrics.families import server_families, topic_families
from turtlemq.server.metrics.labels import TopicLabels
from turtlemq.server.metrics.process import process_families
from turtlemq.server.request import SERVICE
from turtlemq.server.service import now_ms

TOPIC_LABELS = web.AppKey("topic_labels", TopicLabels)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    service = request.app[SERVICE]
    topics: list[str] = []
    root = None
    if service.serving:
        engine = service.engine
        root = str(engine.root)
        figures = await collect(engine, request.app[TOPIC_LABELS], now_ms())
        topics = await in_slices(topic_families(figures))
    lines = [*server_families(service), *process_families(root), *topics]
    return web.Response(body="\n".join(lines).encode() + b"\n", headers={"Content-Type": exposition.CONTENT_TYPE})
