"""Handlers of recurring schedules: put, look, delete, pause, trigger, and the times to come."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from turtlemq.errors import InvalidSchedule, TurtleError
from turtlemq.index.browse import LIMIT_MAX
from turtlemq.schedules import CatchUp, Overlap
from turtlemq.segment import format as f
from turtlemq.server.audit import ACTION
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.depth import check_body_depth
from turtlemq.server.incoming.schedules import NewSchedule, schedule_of
from turtlemq.server.outgoing.answers import Body, PriorityName
from turtlemq.server.outgoing.messages import PRIORITY_NAMES, body_fields
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of, query, topic_of
from turtlemq.topic.schedule_store import StoredSchedule
from turtlemq.topic.scheduler import check_new
from turtlemq.topic.topic import Topic

UPCOMING_MAX = 1_000  # times in one answer: 30 ms
STEP = 100  # schedules that are read at once: 5 ms


class ScheduleAnswer(Body, kw_only=True):
    """A schedule, its place in time, and the content of its messages."""

    name: str
    cron: str | UnsetType = UNSET
    zone: str | UnsetType = UNSET
    every: float | UnsetType = UNSET
    delays: list[float] | UnsetType = UNSET
    start_ms: int | None
    end_ms: int | None
    count: int | None
    jitter: float
    catch_up: CatchUp
    overlap: Overlap
    paused: bool
    headers: dict[str, str]
    priority: PriorityName
    ttr: float | None
    next_ms: int | None
    last_ms: int | None
    fired: int
    ended_ms: int | None
    created_ms: int


class SchedulePut(Struct):
    """A schedule was put. `next_ms`: its next time, None if it is paused or has ended. `created`: there was none of its name."""

    name: str
    next_ms: int | None
    created: bool


class ScheduleList(Struct):
    """A page of schedules. `cursor` asks for the next one."""

    schedules: list[ScheduleAnswer]
    cursor: str | None


class Upcoming(Struct):
    """The next times of a schedule."""

    next_ms: list[int]


class Triggered(Struct):
    """The message of a firing that was asked for."""

    id: str
    due_ms: int


class ListQuery(Struct, forbid_unknown_fields=True):
    """A page of a listing."""

    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    cursor: str | None = None


class NextQuery(Struct, forbid_unknown_fields=True):
    """How many times are asked for."""

    count: Annotated[int, Meta(ge=1, le=UPCOMING_MAX)] = 10


def _fields(stored: StoredSchedule, now: int) -> dict[str, Any]:
    """A schedule, as answers show it."""
    schedule, timing = stored.schedule, stored.schedule.timing
    kind: dict[str, Any] = {"cron": timing.cron, "zone": timing.zone}
    if timing.every_ms:
        kind = {"every": timing.every_ms / 1000}
    elif timing.delays_ms:
        kind = {"delays": [delay_ms / 1000 for delay_ms in timing.delays_ms]}
    return {
        "name": stored.name,
        **kind,
        "start_ms": timing.start_ms,
        "end_ms": timing.end_ms,
        "count": timing.count,
        "jitter": timing.jitter_ms / 1000,
        "catch_up": schedule.catch_up,
        "overlap": schedule.overlap,
        "paused": schedule.paused,
        **body_fields(stored.body, bool(stored.flags & f.JSON)),
        "headers": stored.headers or {},
        "priority": PRIORITY_NAMES[stored.flags & f.PRIORITY],
        "ttr": stored.ttr_ms / 1000 if stored.ttr_ms else None,
        "next_ms": schedule.shown_next(now),
        "last_ms": schedule.last_ms,
        "fired": schedule.fired,
        "ended_ms": schedule.ended_ms,
        "created_ms": stored.created_ms,
    }


def _opened(request: web.Request) -> Topic:
    """The topic of the path, which must exist."""
    topic = topic_of(request)
    return engine_of(request).topic(topic)


def _name(request: web.Request) -> str:
    return request.match_info["name"]


async def _durable(request: web.Request, topic: Topic) -> None:
    """Return when staged changes of schedules are durable; raise if they were not stored. All requests that are read in one round
    of the event loop share a write and a sync."""
    group = topic.scheduler.pending
    if group is not None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not group.then:
            loop.call_soon(_commit, topic)
        group.then.append(partial(_wake, done))
        await done
        if group.error is not None:
            raise group.error
    engine_of(request).changed(topic, now_ms())
    request.app[SERVICE].tick_soon()


def _commit(topic: Topic) -> None:
    try:
        topic.scheduler.commit()
    except (TurtleError, OSError):
        return  # each request of the group raises it


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # else its request was cancelled
        future.set_result(None)


async def put(request: web.Request) -> web.Response:
    """PUT /v1/topics/{topic}/schedules/{name}"""
    topic_of(request, may_create=True)
    asked, name = await read_as(request, NewSchedule, InvalidSchedule), _name(request)
    if not isinstance(asked.body, UnsetType):
        await in_slices(check_body_depth(bytes(asked.body)))
    engine, now = engine_of(request), now_ms()
    topic = topic_of(request, may_create=True)  # again: it may have been created or deleted meanwhile
    old = engine.topics[topic].scheduler.find(name) if topic in engine.topics else None
    given = schedule_of(name, asked, old is not None and old.schedule.paused, now)
    check_new(given.schedule, now)
    engine.ballast.refuse_producers()
    opened = engine.topic(topic, create=True)
    made = opened.scheduler.put(given, now)
    await _durable(request, opened)
    if old is None:
        request[ACTION] = "schedule_created"
    return answer(SchedulePut(name, made.schedule.shown_next(now), old is None))


async def get(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/schedules/{name}"""
    return answer(_fields(_opened(request).scheduler.get(_name(request)), now_ms()))


async def list_(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/schedules"""
    topic, asked = topic_of(request), query(request, ListQuery)
    request.app[SERVICE].flow.answer_bytes.refuse_if_full()
    found, cursor = list[dict[str, Any]](), asked.cursor
    while True:
        await request.app[SERVICE].turns.turn(topic)
        scheduler, now = engine_of(request).topic(topic).scheduler, now_ms()
        page, cursor = scheduler.page(min(STEP, asked.limit - len(found)), cursor)
        found += [_fields(one, now) for one in page]
        if cursor is None or len(found) >= asked.limit:
            return answer({"schedules": found, "cursor": cursor})


async def upcoming(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/schedules/{name}/next"""
    asked = query(request, NextQuery)
    schedule = _opened(request).scheduler.get(_name(request)).schedule
    return answer(Upcoming(schedule.upcoming(now_ms(), asked.count)))


async def remove(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}/schedules/{name}"""
    topic = _opened(request)
    topic.scheduler.remove(_name(request), now_ms())
    await _durable(request, topic)
    return answer({"outcome": "deleted"})


async def pause(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/schedules/{name}/pause"""
    return await _set_paused(request, True)


async def resume(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/schedules/{name}/resume"""
    return await _set_paused(request, False)


async def _set_paused(request: web.Request, paused: bool) -> web.Response:
    topic = _opened(request)
    topic.scheduler.set_paused(_name(request), paused, now_ms())
    await _durable(request, topic)
    return answer({"paused": paused})


async def trigger(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/schedules/{name}/trigger"""
    topic, name = _opened(request), _name(request)
    id_, due_ms = topic.scheduler.trigger(name, now_ms())
    engine_of(request).changed(topic, now_ms())
    request.app[SERVICE].answer_polls_soon(topic.name)
    return answer(Triggered(id_, due_ms))
