"""Dead letters over HTTP: list, count, export, requeue, delete. Long work goes a page at a time, so others get their turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument, InvalidFireAt, TooLarge
from turtlemq.index.validate import check_ids
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX
from turtlemq.server.handlers.messages import due_rules
from turtlemq.server.incoming.batches import check_due, due_time
from turtlemq.server.incoming.body import read_as
from turtlemq.server.outgoing.messages import letter
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of, query, topic_of
from turtlemq.server.service import now_ms
from turtlemq.topic.dead_letters import DeadLetter, Filter

PAGE = 500
Time = Annotated[int, Meta(ge=0, le=DUE_MS_MAX)]
_line = msgspec.json.Encoder().encode


class DeadFilter(Struct, forbid_unknown_fields=True):
    """Which dead letters: every field that is given must match. Times are when they died."""

    group: str | None = None
    from_ms: Time = 0
    to_ms: Time = DUE_MS_MAX
    error: str | None = None


class DeadPage(DeadFilter, forbid_unknown_fields=True):
    """A page of them."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    cursor: str | None = None


class DeadChoice(Struct, forbid_unknown_fields=True):
    """Some of them, by id (in `group`, or in any) or by filter."""

    ids: list[str] | None = None
    group: str | None = None
    filter: DeadFilter | None = None


class DeadRequeue(DeadChoice, forbid_unknown_fields=True):
    """Which of them shall sleep again, until when."""

    delay: float | None = None
    due_ms: int | None = None
    reset_attempts: bool = True
    per_s: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


def _filter(asked: DeadFilter) -> Filter:
    return Filter(asked.group, asked.from_ms, asked.to_ms, asked.error)


async def pages(request: web.Request, topic: str, asked: Filter) -> AsyncIterator[list[DeadLetter]]:
    """All that match, in the order in which they died. Read without the filter, for one that seldom matches would hold all up."""
    cursor: str | None = None
    while True:
        found, cursor = engine_of(request).topic(topic).dead_letters.page(Filter(None, asked.from_ms, asked.to_ms), PAGE, cursor)
        yield [one for one in found if asked.matches(one)]
        if cursor is None:
            return
        await asyncio.sleep(0)


async def list_dead(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead"""
    topic, asked = topic_of(request), query(request, DeadPage)
    request.app[SERVICE].flow.answer_bytes.refuse_if_full()
    found, cursor = engine_of(request).topic(topic).dead_letters.page(_filter(asked), asked.limit, asked.cursor)
    return answer({"messages": [letter(one) for one in found], "cursor": cursor})


async def summary(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead/summary"""
    topic, asked = topic_of(request), query(request, DeadFilter)
    counts: Counter[str] = Counter()
    async for page in pages(request, topic, _filter(asked)):
        counts.update(one.error for one in page)
    return answer({"total": counts.total(), "errors": dict(counts.most_common())})


def _lines(page: list[DeadLetter]) -> bytes:
    return b"".join([_one_line(_line(letter(one))) + b"\n" for one in page])


def _one_line(text: bytes) -> bytes:
    """A body is kept as it was sent, line breaks between its tokens included; inside its texts there are none."""
    return text.replace(b"\r", b" ").replace(b"\n", b" ") if b"\n" in text or b"\r" in text else text


async def export(request: web.Request) -> web.StreamResponse:
    """GET /v1/topics/{topic}/dead/export"""
    topic, asked = topic_of(request), query(request, DeadFilter)
    found = pages(request, topic, _filter(asked))
    first = await anext(found)  # what is to be refused is refused before the answer begins
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    await response.write(_lines(first))
    async for page in found:
        await response.write(_lines(page))
    await response.write_eof()
    return response


def _chosen(request: web.Request, topic: str, asked: DeadChoice, unknown: list[str]) -> AsyncIterator[list[DeadLetter]]:
    """The letters that a request names, a page at a time: their bodies may not fit into memory. Ids that are not dead go to
    `unknown`. Who dies meanwhile is not among them: it may be one that was requeued."""
    if (asked.ids is None) == (asked.filter is None):
        raise InvalidArgument('give "ids", or "filter" ({} for all of them)')
    if asked.filter is not None:
        which = _filter(asked.filter)
        return pages(request, topic, replace(which, to_ms=min(which.to_ms, now_ms())))
    assert asked.ids is not None
    if len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids at once")
    check_ids(asked.ids)
    return _named(request, topic, list(dict.fromkeys(asked.ids)), asked.group, unknown)


async def _named(
    request: web.Request, topic: str, ids: list[str], group: str | None, unknown: list[str]
) -> AsyncIterator[list[DeadLetter]]:
    for at in range(0, len(ids), PAGE):
        found = engine_of(request).topic(topic)
        letters = {id_: found.letters_of(id_, group) for id_ in ids[at : at + PAGE]}
        unknown += [id_ for id_, some in letters.items() if not some]
        yield [one for some in letters.values() for one in some]
        await asyncio.sleep(0)


async def requeue(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/requeue"""
    topic = topic_of(request)
    asked = await read_as(request, DeadRequeue)
    start = due_time(asked.delay, asked.due_ms, now := now_ms())
    check_due(start, now, due_rules(request, topic))
    unknown, count = list[str](), 0
    letters = _chosen(request, topic, asked, unknown)
    found = engine_of(request).topic(topic)
    most = len(found.dead_letters)
    if asked.ids is not None:
        most = min(most, len(asked.ids) * found.dead_group_count)
    if not 0 <= start + (most / asked.per_s * 1000 if asked.per_s else 0) <= DUE_MS_MAX:
        raise InvalidFireAt("the last of them would be due after May 2109, or the first before 1970")
    async for some in letters:
        due_ms = start + int(count * 1000 / asked.per_s) if asked.per_s else start
        reset = asked.reset_attempts
        count += engine_of(request).requeue(topic, some, now_ms(), due_ms=due_ms, reset_attempts=reset, per_s=asked.per_s)
        request.app[SERVICE].answer_polls_soon()
    return answer({"requeued": count, "unknown": unknown})


async def delete(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/delete"""
    topic = topic_of(request)
    unknown, count = list[str](), 0
    async for some in _chosen(request, topic, await read_as(request, DeadChoice), unknown):
        count += engine_of(request).delete_dead(topic, some, now_ms())
    out: dict[str, Any] = {"deleted": count, "unknown": unknown}
    return answer(out)
