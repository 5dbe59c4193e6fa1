"""Handlers of replays: begin one, list those of a topic, follow one, cancel it."""

from __future__ import annotations

from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct, field

from turtlemq.errors import InvalidArgument
from turtlemq.server.auth import AUTH, PRODUCE
from turtlemq.server.clock import now_ms
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.times import Delay, due_time
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.proxy import CLIENT
from turtlemq.server.replays import Job, Replays
from turtlemq.server.request import CONFIG, SERVICE, EpochMs, allowed_topic, due_rules, engine_of, topic_of
from turtlemq.storage import names
from turtlemq.topic.copies import Wanted

REPLAYS = web.AppKey("replays", Replays)


class ReplayFilter(Struct, forbid_unknown_fields=True):
    """Which messages are copied: all conditions that are given must hold."""

    state: Literal["sleep", "ready", "reserve", "history", "dead"] | None = None
    prefix: Annotated[str, Meta(max_length=200)] = ""
    headers: dict[str, str] = {}


class Replay(Struct, forbid_unknown_fields=True):
    """The body: a range of ready times, and where its messages go."""

    from_ms: EpochMs
    to_ms: EpochMs
    into: str
    delay: Delay | None = None
    filter: ReplayFilter = field(default_factory=ReplayFilter)
    per_s: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


class ReplayList(Struct):
    """The newest replays of a topic, oldest first."""

    replays: list[Job]


async def begin(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/replay"""
    topic_of(request)
    asked, now = await read_as(request, Replay), now_ms()
    topic = topic_of(request)
    if not asked.from_ms < asked.to_ms <= now:
        raise InvalidArgument(f"from_ms is before to_ms, and to_ms not in the future: now it is {now}")
    if asked.into == topic:
        raise InvalidArgument("into is another topic; PUT …/groups/{group} lets a group of this one get its messages again")
    _check_target(request, asked.into)
    due_ms = due_time(asked.delay, None, now)
    check_due(due_ms, now, due_rules(request, asked.into))
    job = Job("", topic, asked.into, asked.from_ms, asked.to_ms, now, due_ms - now, asked.per_s or 0)
    wanted = Wanted(asked.filter.state or "", asked.filter.prefix, asked.filter.headers)
    token = request.headers.get("Authorization")
    sender = {CLIENT: request.remote or ""} | ({} if token is None else {"Authorization": token})
    return answer(request.app[REPLAYS].start(job, wanted, sender), 202)


def _check_target(request: web.Request, into: str) -> None:
    """Raise unless the request may put messages into a topic, which this server has."""
    names.check_topic(into)
    request.app[AUTH].require(request, into, PRODUCE)
    service = request.app[SERVICE]
    if service.cluster is not None and service.router is not None and not service.router.has(into, None):
        raise InvalidArgument(
            f"into is a topic without partitions, of the same shard as {request.match_info['topic']!r}, in a cluster of several"
        )
    if service.siblings is not None and not service.siblings.has(into):
        return  # its process decides whether it may be created
    allowed_topic(engine_of(request), request.app[CONFIG], into, may_create=True)


async def replays(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/replays"""
    return answer(ReplayList(request.app[REPLAYS].of(topic_of(request))))


async def replay(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/replays/{replay}"""
    return answer(request.app[REPLAYS].find(topic_of(request), request.match_info["replay"]))


async def cancel(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}/replays/{replay}"""
    jobs = request.app[REPLAYS]
    job = jobs.find(topic_of(request), request.match_info["replay"])
    request.app[AUTH].require(request, job.into, PRODUCE)  # as for its beginning
    return answer(jobs.cancel(job))
