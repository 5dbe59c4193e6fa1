"""/metrics in Prometheus' text format, over the engine's own figures and a count of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aiohttp import web

from turtlemq import __version__
from turtlemq.engine import Engine
from turtlemq.server.http import SERVICE

REQUESTS = web.AppKey("requests", Counter[tuple[str, str, int]])
STATES = ("sleep", "ready", "reserve", "history", "dead", "cancelled")
TOPICS_MAX = 1_000  # labels are bounded
_FIGURES = (
    ("turtlemq_bytes", "gauge", "Bytes on disk.", "bytes"),
    ("turtlemq_segments", "gauge", "Segment files.", "segments"),
    ("turtlemq_live_ratio", "gauge", "Sleeping documents among all in the delay segments.", "live_ratio"),
    ("turtlemq_damaged", "gauge", "Stretches of files that are not what was written.", "damaged"),
)
_TOTALS = (("appended", "Messages stored."), ("duplicates", "Messages known already."), ("handed_off", "Messages come due."))


def render(engine: Engine | None, requests: Counter[tuple[str, str, int]], waiting: int) -> str:
    """The whole page."""
    lines = [*_head("turtlemq_info", "gauge", "The version."), f'turtlemq_info{{version="{__version__}"}} 1']
    lines += [*_head("turtlemq_up", "gauge", "1 while it serves."), f"turtlemq_up {int(engine is not None)}"]
    lines += [*_head("turtlemq_long_polls", "gauge", "Fetches that wait."), f"turtlemq_long_polls {waiting}"]
    lines += _head("turtlemq_requests_total", "counter", "Answered requests.")
    for (method, route, status), count in sorted(requests.items()):
        lines.append(f'turtlemq_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
    if engine is not None:
        lines += _topics(engine)
    return "\n".join(lines) + "\n"


def _topics(engine: Engine) -> Iterator[str]:
    names = sorted(engine.topics)[:TOPICS_MAX]
    stats = {name: engine.stats(name) for name in names}
    yield from _head("turtlemq_messages", "gauge", "Messages by state; from ready on summed over groups.")
    for name in names:
        for state in STATES:
            yield f'turtlemq_messages{{topic="{name}",state="{state}"}} {getattr(stats[name], state)}'
    for metric, kind, text, field in _FIGURES:
        yield from _head(metric, kind, text)
        for name in names:
            yield f'{metric}{{topic="{name}"}} {getattr(stats[name], field)}'
    for total, text in _TOTALS:
        yield from _head(f"turtlemq_{total}_total", "counter", text)
        for name in names:
            yield f'turtlemq_{total}_total{{topic="{name}"}} {getattr(engine.topics[name].index.shelf.counters, total)}'
    yield from _head("turtlemq_trouble", "gauge", "1 for a topic whose last tick failed.")
    for name in names:
        yield f'turtlemq_trouble{{topic="{name}"}} {int(name in engine.trouble)}'


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    service = request.app[SERVICE]
    waiting = sum(len(queue) for queue in service.waiting.values())
    text = render(service.engine if service.serving else None, request.app[REQUESTS], waiting)
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=text.encode(), headers=headers)
