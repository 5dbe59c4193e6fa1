"""The handler for events of a topic: a page of them, or a long poll for the next ones."""

from __future__ import annotations

import asyncio
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.server.fair_turns import Slices
from turtlemq.server.outgoing.answers import Events, TopicEvent
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, EpochMs, engine_of, query, topic_of
from turtlemq.topic.event_feed import Feed

LOOK_S = 0.2  # between two looks for a new event, while a request waits
STEPS_MAX = 20_000  # of the logs, of one page


class EventsQuery(Struct, forbid_unknown_fields=True):
    """Which events: behind a cursor, or from a time on; without both, those from now on. `group`: without those of others."""

    cursor: str | None = None
    since_ms: EpochMs | None = None
    group: str | None = None
    wait: Annotated[float, Meta(ge=0, le=60)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


async def events(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/events"""
    topic, asked, service = topic_of(request), query(request, EventsQuery), request.app[SERVICE]
    loop = asyncio.get_running_loop()
    end = loop.time() + asked.wait
    feed = engine_of(request).topic(topic).view.events(asked.cursor, asked.since_ms)
    while True:
        seen = engine_of(request).topic(topic).view.event_ends
        found, missed = await _page(feed, asked), feed.missed
        if found or missed or loop.time() >= end:
            return answer(Events(found, feed.cursor, missed))
        while engine_of(request).topic(topic).view.event_ends == seen:
            if loop.time() >= end or service.stopping:
                return answer(Events([], feed.cursor, missed))
            await asyncio.sleep(min(LOOK_S, max(0.0, end - loop.time())))
        feed = engine_of(request).topic(topic).view.events(feed.cursor)


async def _page(feed: Feed, asked: EventsQuery) -> list[TopicEvent]:
    """The next events that were asked for, read in slices between which the event loop does other work."""
    found, slices, since = list[TopicEvent](), Slices(), asked.since_ms or 0
    for steps, event in enumerate(feed):
        if event is not None and event.at_ms >= since and asked.group in (None, event.group or asked.group):
            found.append(TopicEvent(**event.fields()))
        if len(found) >= asked.limit or steps >= STEPS_MAX:
            break
        await slices.pause()
    return found
