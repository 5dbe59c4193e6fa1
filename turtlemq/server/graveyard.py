"""Dead letters over HTTP: list, count, export, requeue, delete. Long work goes a page at a time, so others get their turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.dead import DeadLetter, Filter
from turtlemq.errors import InvalidArgument, TooLarge
from turtlemq.index.limits import check_ids
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX
from turtlemq.server.deliver import letter
from turtlemq.server.http import SERVICE, answer, engine_of, query, read_as, topic_of
from turtlemq.server.loop import now_ms
from turtlemq.server.messages import check_due, due_time
from turtlemq.server.work import rules_of

PAGE = 500
Time = Annotated[int, Meta(ge=0, le=DUE_MS_MAX)]
_line = msgspec.json.Encoder().encode


class Which(Struct, forbid_unknown_fields=True):
    """Which dead letters: every field that is given must match. Times are when they died."""

    group: str | None = None
    from_ms: Time = 0
    to_ms: Time = DUE_MS_MAX
    error: str | None = None


class Page(Which, forbid_unknown_fields=True):
    """A page of them."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    cursor: str | None = None


class Chosen(Struct, forbid_unknown_fields=True):
    """Some of them, by id (in `group`, or in any) or by filter."""

    ids: list[str] | None = None
    group: str | None = None
    filter: Which | None = None


class Requeue(Chosen, forbid_unknown_fields=True):
    """Which of them shall sleep again, until when."""

    delay: float | None = None
    due_ms: int | None = None
    reset_attempts: bool = True
    per_s: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


def _filter(asked: Which) -> Filter:
    return Filter(asked.group, asked.from_ms, asked.to_ms, asked.error)


async def pages(request: web.Request, topic: str, asked: Filter) -> AsyncIterator[list[DeadLetter]]:
    """All that match, in the order in which they died. Read without the filter, for one that seldom matches would hold all up."""
    cursor: str | None = None
    while True:
        found, cursor = engine_of(request).topic(topic).dead.page(Filter(None, asked.from_ms, asked.to_ms), PAGE, cursor)
        yield [one for one in found if asked.matches(one)]
        if cursor is None:
            return
        await asyncio.sleep(0)


async def list_dead(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead"""
    topic, asked = topic_of(request), query(request, Page)
    found, cursor = engine_of(request).topic(topic).dead.page(_filter(asked), asked.limit, asked.cursor)
    return answer({"messages": [letter(one) for one in found], "cursor": cursor})


async def summary(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead/summary"""
    topic, asked = topic_of(request), query(request, Which)
    counts: Counter[str] = Counter()
    async for page in pages(request, topic, _filter(asked)):
        counts.update(one.error for one in page)
    return answer({"total": counts.total(), "errors": dict(counts.most_common())})


def _lines(page: list[DeadLetter]) -> bytes:
    return b"".join([_line(letter(one)) + b"\n" for one in page])


async def export(request: web.Request) -> web.StreamResponse:
    """GET /v1/topics/{topic}/dead/export"""
    topic, asked = topic_of(request), query(request, Which)
    found = pages(request, topic, _filter(asked))
    first = await anext(found)  # what is to be refused is refused before the answer begins
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    await response.write(_lines(first))
    async for page in found:
        await response.write(_lines(page))
    await response.write_eof()
    return response


async def _chosen(request: web.Request, topic: str, asked: Chosen) -> tuple[list[DeadLetter], list[str]]:
    """The letters that a request names, and ids that are not dead."""
    if (asked.ids is None) == (asked.filter is None):
        raise InvalidArgument('give "ids", or "filter" ({} for all of them)')
    if asked.ids is None:
        assert asked.filter is not None
        return [one async for page in pages(request, topic, _filter(asked.filter)) for one in page], []
    if len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids at once")
    check_ids(asked.ids)
    found = engine_of(request).topic(topic)
    groups = list(found.broker.groups) if asked.group is None else [asked.group]
    letters = {id_: [one for group in groups if (one := found.dead.get(group, id_))] for id_ in asked.ids}
    return [one for some in letters.values() for one in some], [id_ for id_, some in letters.items() if not some]


async def requeue(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/requeue"""
    topic = topic_of(request)
    asked = await read_as(request, Requeue)
    start = due_time(asked.delay, asked.due_ms, now := now_ms())
    check_due(start, now, rules_of(request, topic))
    letters, unknown = await _chosen(request, topic, asked)
    if not 0 <= start + (len(letters) / asked.per_s * 1000 if asked.per_s else 0) <= DUE_MS_MAX:
        raise InvalidArgument("the last of them would be due after May 2109, or the first before 1970")
    for at in range(0, len(letters), PAGE):
        due_ms = start + int(at * 1000 / asked.per_s) if asked.per_s else start
        some = letters[at : at + PAGE]
        reset = asked.reset_attempts
        engine_of(request).requeue(topic, some, now_ms(), due_ms=due_ms, reset_attempts=reset, per_s=asked.per_s)
        request.app[SERVICE].stir()
        await asyncio.sleep(0)
    return answer({"requeued": len(letters), "unknown": unknown})


async def delete(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/delete"""
    topic = topic_of(request)
    letters, unknown = await _chosen(request, topic, await read_as(request, Chosen))
    for at in range(0, len(letters), PAGE):
        engine_of(request).delete_dead(topic, letters[at : at + PAGE], now_ms())
        await asyncio.sleep(0)
    out: dict[str, Any] = {"deleted": len(letters), "unknown": unknown}
    return answer(out)
