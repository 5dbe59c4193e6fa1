"""Handlers of dead letters: list, count, export, requeue, delete. Long work is done in pages, in turns with other requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument, InvalidFireAt, TooLarge, headline
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX
from turtlemq.server.audit import COUNT, name_target
from turtlemq.server.clock import now_ms
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.times import Delay, Due, due_time
from turtlemq.server.media_types import NDJSON
from turtlemq.server.outgoing.messages import letter_fields
from turtlemq.server.outgoing.reply import answer, encode
from turtlemq.server.output_commit import confirm_page
from turtlemq.server.request import SERVICE, EpochMs, distinct_ids, due_rules, engine_of, query, topic_of
from turtlemq.server.service import Service
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.requeue import check_new_expiry

PAGE = 100  # letters: 25 ms to requeue them
LETTERS_MAX = 4_000  # read at once: a message may have one in each group


class DeadFilter(Struct, forbid_unknown_fields=True):
    """A filter of dead letters: all given fields must match. Times are times of death, `prefix` is the beginning of an id."""

    group: str | None = None
    from_ms: EpochMs = 0
    to_ms: EpochMs = DUE_MS_MAX
    error: str | None = None
    prefix: Annotated[str, Meta(max_length=200)] = ""


class DeadPage(DeadFilter, forbid_unknown_fields=True):
    """A page of a listing of dead letters. `newest`: the last deaths first."""

    newest: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    cursor: str | None = None


class DeadChoice(Struct, forbid_unknown_fields=True):
    """A choice of dead letters: by id, in `group` or in any, or by filter."""

    ids: list[str] | None = None
    group: str | None = None
    filter: DeadFilter | None = None


class DeadRequeue(DeadChoice, forbid_unknown_fields=True):
    """Dead letters that shall sleep again, and their new due time."""

    delay: Delay | None = None
    due_ms: int | None = None
    due: Due | None = None
    expires_ms: int | None = None
    reset_attempts: bool = True
    per_s: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None


def _filter(asked: DeadFilter) -> Filter:
    return Filter(asked.group, asked.from_ms, asked.to_ms, asked.error, asked.prefix)


async def pages_of(service: Service, topic: str, chosen: Filter) -> AsyncIterator[list[DeadLetter]]:
    """All matching letters, in the order in which they died. Pages are read by time alone and filtered here: reading until a
    selective filter has filled a page would block the event loop."""
    cursor: str | None = None
    by_time = Filter(None, chosen.from_ms, chosen.to_ms)
    while True:
        letters, cursor = service.engine.topic(topic).view.dead_letters.page(by_time, PAGE, cursor)
        yield [letter for letter in letters if chosen.matches(letter)]
        if cursor is None:
            return
        await asyncio.sleep(0)


async def list_dead(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead"""
    topic, asked = topic_of(request), query(request, DeadPage)
    request.app[SERVICE].flow.answer_bytes.refuse_if_full()
    found = engine_of(request).topic(topic).view.dead_letters
    letters, cursor = found.page(_filter(asked), asked.limit, asked.cursor, asked.newest)
    return answer({"messages": [letter_fields(letter) for letter in letters], "cursor": cursor})


async def summary(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/dead/summary: counts by the headline of the error, without its traceback."""
    topic, asked = topic_of(request), query(request, DeadFilter)
    counts: Counter[str] = Counter()
    async for page in pages_of(request.app[SERVICE], topic, _filter(asked)):
        counts.update(headline(letter.error) for letter in page)
    return answer({"total": counts.total(), "errors": dict(counts.most_common())})


def _lines(page: list[DeadLetter]) -> bytes:
    return b"".join([_one_line(encode(letter_fields(letter))) + b"\n" for letter in page])


def _one_line(text: bytes) -> bytes:
    """JSON on one line. Bodies are kept as they were sent, with line breaks between tokens; strings contain none."""
    return text.replace(b"\r", b" ").replace(b"\n", b" ") if b"\n" in text or b"\r" in text else text


async def export(request: web.Request) -> web.StreamResponse:
    """GET /v1/topics/{topic}/dead/export"""
    topic, asked = topic_of(request), query(request, DeadFilter)
    pages = pages_of(request.app[SERVICE], topic, _filter(asked))
    first = await anext(pages)  # errors must be raised before the answer begins
    await confirm_page(request)
    response = web.StreamResponse(headers={"Content-Type": NDJSON})
    await response.prepare(request)
    if request.method != "HEAD":  # aiohttp would send the lines of a stream all the same
        await response.write(_lines(first))
        async for page in pages:
            await confirm_page(request)
            await response.write(_lines(page))
    await response.write_eof()
    return response


async def _chosen(request: web.Request, topic: str, asked: DeadChoice, unknown: list[str]) -> AsyncIterator[list[DeadLetter]]:
    """The letters that a request chooses, in pages, since their bodies may not fit into memory. Ids without a letter are added to
    `unknown`. Messages that die meanwhile are left out: they may be the ones that were just requeued."""
    if (asked.ids is None) == (asked.filter is None):
        raise InvalidArgument('give "ids", or "filter" ({} for all of them)')
    if asked.filter is not None:
        chosen = _filter(asked.filter)
        return pages_of(request.app[SERVICE], topic, replace(chosen, to_ms=min(chosen.to_ms, now_ms())))
    assert asked.ids is not None
    if len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids at once")
    return letters_by_id(request.app[SERVICE], topic, await distinct_ids(asked.ids), asked.group, unknown)


async def letters_by_id(
    service: Service, topic: str, ids: list[str], group: str | None, unknown: list[str]
) -> AsyncIterator[list[DeadLetter]]:
    """The letters of these ids, in pages. Ids without a letter are added to `unknown`."""
    at = 0
    while at < len(ids):
        view = service.engine.topic(topic).view
        groups = 1 if group is not None else max(1, view.dead_group_count)
        following = at + max(1, min(PAGE, LETTERS_MAX // groups))
        by_id = view.letters_of(ids[at:following], group)
        at = following
        unknown += [id_ for id_, of_groups in by_id.items() if not of_groups]
        letters = [letter for of_groups in by_id.values() for letter in of_groups]
        for first in range(0, len(letters), PAGE):
            yield letters[first : first + PAGE]
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def requeue(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/requeue"""
    topic = topic_of(request)
    asked = await read_as(request, DeadRequeue)
    start = due_time(asked.delay, asked.due_ms, now := now_ms(), due=asked.due)
    check_due(start, now, due_rules(request, topic))
    unknown, count, request[COUNT] = list[str](), 0, 0
    name_target(request, asked.ids)
    pages = await _chosen(request, topic, asked, unknown)
    found = engine_of(request).topic(topic)
    most = len(found.view.dead_letters)
    if asked.ids is not None:
        most = min(most, len(asked.ids) * found.view.dead_group_count)
    if not 0 <= start + (most / asked.per_s * 1000 if asked.per_s else 0) <= DUE_MS_MAX:
        raise InvalidFireAt("the last of them would be due after May 2109, or the first before 1970")
    check_new_expiry(asked.expires_ms, start + (max(0, most - 1) / asked.per_s * 1000 if asked.per_s else 0))
    async for page in pages:
        due_ms = start + int(count * 1000 / asked.per_s) if asked.per_s else start
        count += engine_of(request).requeue(
            topic,
            page,
            now_ms(),
            due_ms=due_ms,
            reset_attempts=asked.reset_attempts,
            per_s=asked.per_s,
            expires_ms=asked.expires_ms,
        )
        request[COUNT] = count
        request.app[SERVICE].answer_polls_soon()
    return answer({"requeued": count, "unknown": unknown})


async def delete(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/dead/delete"""
    topic = topic_of(request)
    asked = await read_as(request, DeadChoice)
    unknown, count, request[COUNT] = list[str](), 0, 0
    name_target(request, asked.ids)
    async for page in await _chosen(request, topic, asked, unknown):
        count += engine_of(request).delete_dead(topic, page, now_ms())
        request[COUNT] = count
    return answer({"deleted": count, "unknown": unknown})
