"""Handlers of topics and groups: settings, figures, compaction, replay."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument
from turtlemq.server.audit import ACTION, COUNT
from turtlemq.server.auth import AUTH
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.incoming.body import read_as
from turtlemq.server.media_types import JSON
from turtlemq.server.outgoing.reply import answer, encode
from turtlemq.server.request import SERVICE, EpochMs, check_topic_limit, engine_of, group_of, topic_and_group, topic_of
from turtlemq.server.slo_watch import SLO, SloWatch
from turtlemq.server.topic_settings import TopicSettings, to_flat, to_nested
from turtlemq.storage import names
from turtlemq.topic.maintenance import IN_FLIGHT_MAX

COMPACT_S_MAX = 30  # then the request is answered, and maintenance goes on by itself
COMPACT_STEP_S = 0.005


class GroupStartAt(Struct, forbid_unknown_fields=True):
    """A group's start: the first message that became ready at this time or later."""

    ready_ms: EpochMs


class GroupStart(Struct, forbid_unknown_fields=True):
    """The position of a group. Without `start`, a new group begins at the oldest message, and an existing one stays in place."""

    start: Literal["earliest", "latest"] | GroupStartAt | None = None


def describe(engine: Engine, name: str, slo: SloWatch) -> dict[str, Any]:
    """A topic with its settings and figures, as answers show it."""
    topic, goal = engine.topic(name), slo.of(engine.topic(name))
    return {
        "topic": name,
        "settings": to_nested(topic.settings),
        "stats": engine.stats(name),
        "groups": engine.groups(name),
        "paused": topic.view.is_paused(),
        **({} if goal is None else {"slo": goal.answer(now_ms())}),
    }


async def list_topics(request: web.Request) -> web.Response:
    """GET /v1/topics: topics on which the token has any right."""
    engine, auth, slo = engine_of(request), request.app[AUTH], request.app[SLO]
    names = await in_slices(name for name in sorted(engine.topics) if auth.may(request, name))
    topics = await in_slices(encode(describe(engine, name, slo)) for name in names if name in engine.topics)
    return web.Response(body=b'{"topics":[' + b",".join(topics) + b"]}", content_type=JSON)


async def put_topic(request: web.Request) -> web.Response:
    """PUT /v1/topics/{topic}"""
    topic = names.check_topic(request.match_info["topic"])
    changes = to_flat(await read_as(request, TopicSettings))
    engine, router = engine_of(request), request.app[SERVICE].router
    if changes.get("partitions", 1) > (1 if router is None else router.shards):
        raise InvalidArgument(
            "partitions is at most the number of shards: start the server with --shards, or make a cluster with several"
        )
    check_topic_limit(request, topic)
    if topic not in engine.topics:
        request[ACTION] = "topic_created"
    engine.configure(topic, **changes)
    request.app[SERVICE].answer_polls_soon()
    return answer(describe(engine, topic, request.app[SLO]))


async def get_topic(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}"""
    return answer(describe(engine_of(request), topic_of(request), request.app[SLO]))


async def drop_topic(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}"""
    topic = names.check_topic(request.match_info["topic"])  # it may be one that cannot be opened
    request.app[SERVICE].fetches.drop_topic(topic)
    request.app[SERVICE].clients.drop(topic)
    request.app[SERVICE].tick_soon()
    return answer({"outcome": "deleted"})


async def pause(request: web.Request) -> web.Response:
    """POST …/pause: of a topic, or of a group"""
    return _set_paused(request, True)


async def resume(request: web.Request) -> web.Response:
    """POST …/resume: of a topic, or of a group"""
    return _set_paused(request, False)


def _set_paused(request: web.Request, paused: bool) -> web.Response:
    topic = topic_of(request)
    group = group_of(request) if "group" in request.match_info else None
    engine_of(request).topic(topic).set_paused(group, paused)
    request.app[SERVICE].answer_polls_soon(topic)
    return answer({"paused": paused})


async def compact(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/compact: maintenance in small steps, until none is left or COMPACT_S_MAX is over."""
    name, engine = topic_of(request), engine_of(request)
    topic, before = engine.topic(name), engine.stats(name)
    if before.reserve < IN_FLIGHT_MAX:
        topic.checkpoint()
    else:  # the next tick lets a thread write it, and maintenance waits for that
        topic.sync_soon(now_ms())
        topic.sync_now(now_ms())
        request.app[SERVICE].tick_soon()
    end = asyncio.get_running_loop().time() + COMPACT_S_MAX
    more = True
    while more and asyncio.get_running_loop().time() < end and engine_of(request).topics.get(name) is topic:
        more = topic.maintain()
        await asyncio.sleep(COMPACT_STEP_S if more else 0)
    request.app[SERVICE].answer_polls_soon()
    after = engine_of(request).stats(topic_of(request))
    outcome = "running" if more else "compacted"
    return answer({"outcome": outcome, "bytes_before": before.bytes, "bytes": after.bytes, "live_ratio": after.live_ratio})


async def put_group(request: web.Request) -> web.Response:
    """PUT /v1/topics/{topic}/groups/{group}"""
    topic_and_group(request)
    start = (await read_as(request, GroupStart)).start
    topic, group = topic_and_group(request)  # again: topics and groups may have been created or deleted meanwhile
    engine = engine_of(request)
    exists = topic in engine.topics and engine.topics[topic].view.has_group(group)
    if not exists:
        request[ACTION] = "group_created"
    elif start is None:
        request[COUNT] = 0  # nothing changes
    if start is not None or not exists:
        engine.move_group(topic, group, start.ready_ms if isinstance(start, GroupStartAt) else start or "earliest", now_ms())
        request.app[SERVICE].answer_polls_soon()
    return answer({"topic": topic, "group": group, "stats": engine.groups(topic)[group]})


async def get_group(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/groups/{group}"""
    topic, group = topic_of(request), group_of(request)
    return answer({"topic": topic, "group": group, "stats": engine_of(request).group(topic, group)})


async def drop_group(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}/groups/{group}"""
    topic, group = topic_of(request), group_of(request)
    request.app[SERVICE].fetches.drop_group(topic, group, now_ms())
    request.app[SERVICE].clients.drop(topic, group)
    request.app[SERVICE].tick_soon()
    return answer({"outcome": "deleted"})
