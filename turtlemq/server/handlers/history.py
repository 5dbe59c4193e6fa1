"""Handlers of the last 24 hours: one row a minute, of the whole server or of a topic, for charts."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from turtlemq.server.history_ring import HistoryRing
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import EpochMs, engine_of, query, topic_of

HISTORY = web.AppKey("history", HistoryRing)


class HistoryQuery(Struct, forbid_unknown_fields=True):
    """Rows that ended after this time."""

    after_ms: EpochMs = 0


class History(Struct):
    """Columns of equal length, a row for each minute, oldest first. The last row is the minute that has not ended: it has
    `seconds` so far.

    `sleep`, `ready`, `reserve` and `dead` are counts at `at_ms`, the end of the row. `produced`, `delivered`, `acked`, `failed`
    and `refused` (429 and 507, of the whole server only) happened in it. The quantiles are null if nothing came due."""

    at_ms: list[int]
    seconds: list[float]
    sleep: list[int]
    ready: list[int]
    reserve: list[int]
    dead: list[int]
    produced: list[int]
    delivered: list[int]
    acked: list[int]
    failed: list[int]
    refused: list[int]
    scheduler_p99_ms: list[float | None]
    consumer_wait_p99_ms: list[float | None]


async def of_server(request: web.Request) -> web.Response:
    """GET /v1/status/history"""
    asked = query(request, HistoryQuery)
    return answer(await request.app[HISTORY].of_all(engine_of(request), asked.after_ms))


async def of_topic(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/history"""
    topic, asked = topic_of(request), query(request, HistoryQuery)
    return answer(request.app[HISTORY].of_topic(engine_of(request).topic(topic), asked.after_ms))
