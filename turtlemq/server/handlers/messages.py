"""The daily work over HTTP: produce, fetch, acknowledge, extend, cancel, and everything about one message."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import numpy as np
from aiohttp import web
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from turtlemq.broker.cancel import CANCELLED
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument, TooLarge, UnknownMessage
from turtlemq.index.validate import check_ids
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX, TTR_MS_MAX, Batch, Receipt
from turtlemq.server import trace
from turtlemq.server.errors import InvalidAckList
from turtlemq.server.incoming.batches import DELAY_S_MAX, TYPES, Rules, check_due, decode_slices, due_time
from turtlemq.server.incoming.body import read, read_as
from turtlemq.server.incoming.decode import decode
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.media_types import BSON, JSON
from turtlemq.server.outgoing import messages
from turtlemq.server.outgoing.fetch import fetched_bson, fetched_json
from turtlemq.server.outgoing.reply import Reply, answer, encode
from turtlemq.server.request import (
    CONFIG,
    SERVICE,
    check_deadline,
    engine_of,
    group_of,
    id_of,
    query,
    settings_of,
    throttle,
    time_left,
    topic_of,
)
from turtlemq.server.service import Service, now_ms
from turtlemq.standing import CANCELLED_BEFORE

Seconds = Annotated[float, Meta(gt=0, le=TTR_MS_MAX / 1000)]
Time = Annotated[int, Meta(ge=0, le=DUE_MS_MAX)]
PAGE = 500  # messages that are cancelled at once: about 25 ms
HEAVY_BYTES = 16 << 10  # of a request: what takes longer than a fraction of a millisecond waits for its turn
FORECAST_BUCKETS_MAX = 100_000


class Fetch(Struct, forbid_unknown_fields=True):
    """The body of a fetch."""

    max: Annotated[int, Meta(ge=1, le=10_000)] = 100
    wait: Annotated[float, Meta(ge=0, le=60)] = 0
    ttr: Seconds | None = None
    consumer: Annotated[str, Meta(max_length=200)] = ""
    ack: Literal["manual", "auto"] = "manual"


class Ack(Struct, forbid_unknown_fields=True):
    """The long form of an ack."""

    acks: list[str]
    retry_delay: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] | None = None
    error: Annotated[str, Meta(max_length=4_000)] = ""


class Extend(Struct, forbid_unknown_fields=True):
    """The body of an extend."""

    ids: list[str]
    ttr: Seconds | None = None


class Cancel(Struct, forbid_unknown_fields=True):
    """Which messages to cancel."""

    ids: list[str] | None = None
    due_from_ms: Time | None = None
    due_to_ms: Time | None = None


class Patch(Struct, forbid_unknown_fields=True):
    """What to change of a sleeper."""

    due_ms: int | None = None
    delay: float | None = None
    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None
    headers: dict[str, str] | None = None


class BrowseQuery(Struct, forbid_unknown_fields=True):
    """Which page of a listing."""

    state: str = "sleep"
    from_ms: Time = 0
    to_ms: Time = DUE_MS_MAX
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    cursor: str | None = None


class ForecastQuery(Struct, forbid_unknown_fields=True):
    """How far and how finely to look ahead."""

    bucket: Annotated[float, Meta(ge=0.001, le=86_400 * 366)] = 60
    hours: Annotated[float, Meta(gt=0, le=24 * 366 * 90)] = 24


def due_rules(request: web.Request, topic: str) -> Rules:
    """What server and topic say about due times: the shorter of both limits."""
    config, own_ms = request.app[CONFIG], settings_of(request, topic).max_delay_ms
    server_ms = int(config.max_delay_days * 86_400_000)
    return Rules(config.reject_past, min(own_ms, server_ms) if own_ms and server_ms else own_ms or server_ms)


async def produce(request: web.Request) -> Reply:
    """POST /v1/topics/{topic}/messages"""
    topic, service = topic_of(request, may_create=True), request.app[SERVICE]
    data = await read(request, TYPES)
    service.admit(len(data))
    if len(data) > HEAVY_BYTES:
        await service.turns.turn()
    now = now_ms()
    kind = request.content_type if request.headers.get("Content-Type") else ""
    batch = await _decoded(request, decode_slices(data, kind, now, due_rules(request, topic)))
    throttle(request, topic, len(batch))
    if len(data) > HEAVY_BYTES:
        await service.turns.turn()
        check_deadline(request)
    topic_of(request, may_create=True)  # others may have made or deleted topics since
    found, receipt = service.engine.stage(topic, batch, now)
    await service.commit(found, len(data))
    service.meter.produce_batch.add(len(receipt))
    return Reply(receipt_json(receipt), 201)


def receipt_json(receipt: Receipt) -> bytes:
    """The answer to a batch. Ids that the server gave are rows of text, which go into it as they are."""
    duplicates, given = receipt.duplicates, receipt.given
    if isinstance(given, list):
        ids = encode(given)
    else:
        rows = np.full((len(given), given.shape[1] + 3), ord('"'), np.uint8)
        rows[:, 1:-2], rows[:, -1] = given, ord(",")
        ids = b"[%b]" % rows.tobytes()[:-1]
    return b'{"ids":%b,"created":%d,"duplicates":%d,"durable":"fsync"}' % (ids, len(receipt) - duplicates, duplicates)


async def _decoded(request: web.Request, steps: Generator[None, None, Batch]) -> Batch:
    """A batch decoded in steps, between which others get their turn. Nothing is done for a caller who has given up meanwhile."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: Batch = done.value
            return batch
        await request.app[SERVICE].turns.turn()
        check_deadline(request)


# Consuming


async def fetch(request: web.Request) -> Reply:
    """POST …/fetch"""
    topic, group = topic_of(request, may_create=True), group_of(request, may_create=True)
    asked = await read_as(request, Fetch)
    service = request.app[SERVICE]
    topic, group = (
        topic_of(request, may_create=True),
        group_of(request, may_create=True),
    )  # others may have made or deleted some since
    service.engine.topic(topic, create=True)
    ttr_ms = None if asked.ttr is None else max(1, round(asked.ttr * 1000))
    want = FetchRequest(topic, group, asked.max, ttr_ms, asked.consumer, asked.ack == "auto")
    found = await trace.waited(request, service.fetch(want, min(asked.wait, time_left(request))))
    service.meter.fetch_batch.add(len(found))
    back = partial(service.give_back, want, found)
    if _wants_bson(request.headers.get("Accept", "")):
        return Reply(fetched_bson(found), 200, BSON, back)
    return Reply(fetched_json(found), 200, JSON, back)


@lru_cache(64)  # every fetch asks, and clients say the same again and again
def _wants_bson(accept: str) -> bool:
    """Does a client like BSON, and no less than JSON?

    >>> [_wants_bson(a) for a in ("application/BSON", "application/bson;q=0", "application/json, application/bson;q=0.1", "*/*")]
    [True, False, False, False]
    """
    likes = {BSON: 0.0, JSON: 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        found = [text[2:] for text in parameters if text.startswith("q=")]
        try:
            likes[kind] = float(found[0]) if found else 1.0
        except ValueError:
            likes[kind] = 1.0
    return likes[BSON] > 0 and likes[BSON] >= likes[JSON]


async def ack(request: web.Request) -> Reply:
    """POST …/ack"""
    topic, group = topic_of(request), group_of(request)
    asked = parse_acks(await read(request))
    delay_ms = None if asked.retry_delay is None else round(asked.retry_delay * 1000)
    now = now_ms()
    if now + (delay_ms or 0) > DUE_MS_MAX:
        raise InvalidArgument("retry_delay reaches beyond May 2109")
    out = engine_of(request).ack(topic, group, asked.acks, now, retry_delay_ms=delay_ms, error=asked.error)
    request.app[SERVICE].meter.ack_batch.add(len(asked.acks))
    request.app[SERVICE].answer_polls_soon(topic)
    return Reply.of(out)


def parse_acks(data: bytes) -> Ack:
    """An ack list in either form.

    >>> parse_acks(b'["a", "-b"]').acks
    ['a', '-b']
    """
    found: list[str] | Ack = decode(data, list[str] | Ack, InvalidAckList)  # type: ignore[arg-type]
    asked = Ack(found) if isinstance(found, list) else found
    if len(asked.acks) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"an ack list holds at most {BATCH_MESSAGES_MAX:,} ids, this one {len(asked.acks):,}")
    for nobody in ("", "-"):
        if nobody in asked.acks:
            i = asked.acks.index(nobody)
            raise InvalidAckList(f"entry {i} names no message: {nobody!r}", index=i)
    return asked


async def extend(request: web.Request) -> web.Response:
    """POST …/extend"""
    topic, group = topic_of(request), group_of(request)
    asked = await read_as(request, Extend)
    engine = engine_of(request)
    ttr_ms = engine.topic(topic).settings.ttr_ms if asked.ttr is None else max(1, round(asked.ttr * 1000))
    extended, unknown = engine.extend(topic, group, asked.ids, ttr_ms, now_ms())
    request.app[SERVICE].tick_soon()
    return answer({"extended": extended, "unknown": unknown})


# One message


def state_of(engine: Engine, topic: str, id_: str) -> str:
    """The state of a message that is there."""
    found = engine.message(topic, id_)
    if found is None:
        raise UnknownMessage(f"topic {topic!r} holds no message {id_!r}")
    return found.state


async def get_message(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/messages/{id}"""
    topic, id_ = topic_of(request), id_of(request)
    found = engine_of(request).message(topic, id_)
    if found is None:
        raise UnknownMessage(f"topic {topic!r} holds no message {id_!r}")
    return answer(messages.view(found))


async def remove(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}/messages/{id}"""
    topic, id_ = topic_of(request), id_of(request)
    missed = (await cancel_ids(request.app[SERVICE], topic, [id_]))[1]
    if id_ in missed:
        known = missed[id_] if missed[id_] in ("reserve", "history", "dead") else None  # in some group, whatever it is in others
        state = known or state_of(engine_of(request), topic, id_)
        raise Conflict(f"{id_!r} can no longer be cancelled: it is in state {state}", state=state)
    return answer({"outcome": "cancelled"})


async def patch(request: web.Request) -> web.Response:
    """PATCH /v1/topics/{topic}/messages/{id}"""
    topic, id_ = topic_of(request), id_of(request)
    asked = await read_as(request, Patch)
    engine, now = engine_of(request), now_ms()
    changes: dict[str, Any] = {}
    if asked.due_ms is not None or asked.delay is not None:
        changes["due_ms"] = due_time(asked.delay, asked.due_ms, now)
        check_due(changes["due_ms"], now, due_rules(request, topic))
    if not isinstance(asked.body, UnsetType) and asked.body_base64 is not None:
        raise InvalidArgument("give body or body_base64, not both")
    if not isinstance(asked.body, UnsetType):
        changes |= {"body": bytes(asked.body), "json": True}
    elif asked.body_base64 is not None:
        changes |= {"body": asked.body_base64, "json": False}
    if asked.headers is not None:
        changes["headers"] = asked.headers
    if not changes:
        raise InvalidArgument("nothing to change: give due_ms or delay, body or body_base64, headers")
    try:
        place, found = engine.stage_reschedule(topic, id_, now, **changes)
    except (UnknownMessage, Conflict) as error:
        state = state_of(engine, topic, id_)
        raise Conflict(f"{id_!r} no longer sleeps, so it cannot be changed: it is in state {state}", state=state) from error
    await request.app[SERVICE].commit(place)
    return answer({"outcome": "rescheduled" if "due_ms" in changes else "edited", "due_ms": found.due_ms})


# Many messages


async def cancel_ids(service: Service, topic: str, ids: list[str]) -> tuple[int, dict[str, str]]:
    """Cancel, and tell how many are cancelled now, and the state of each that was not."""
    check_ids(ids)
    ids, outcome = list(dict.fromkeys(ids)), dict[str, str]()
    for at in range(0, len(ids), PAGE):
        if at:
            await service.turns.turn()
        engine = service.engine
        found, staged = engine.stage_cancel(topic, ids[at : at + PAGE], now_ms())
        await service.commit(found)
        outcome |= engine.finish_cancel(found, staged, now_ms())
    service.answer_polls_soon()
    missed = {id_: "cancelled" if state == CANCELLED_BEFORE else state for id_, state in outcome.items() if state != CANCELLED}
    return len(outcome) - len(missed), missed


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/cancel"""
    topic = topic_of(request)
    asked = await read_as(request, Cancel)
    ranged = asked.due_from_ms is not None or asked.due_to_ms is not None
    if (asked.ids is None) == (not ranged):
        raise InvalidArgument("give ids, or due_from_ms and due_to_ms")
    if asked.ids is not None and len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids are cancelled at once")
    try:
        if asked.ids is not None:
            count, missed = await cancel_ids(request.app[SERVICE], topic, asked.ids)
        else:
            last = DUE_MS_MAX if asked.due_to_ms is None else asked.due_to_ms
            count, missed = await _cancel_range(request, topic, asked.due_from_ms or 0, last), {}
    finally:
        request.app[SERVICE].answer_polls_soon()
    return answer({"cancelled": count, "missed": missed})


async def _cancel_range(request: web.Request, topic: str, first: int, last: int) -> int:
    """A page at a time, so that others get their turn. Messages that a group is to try again do not sleep for the first time."""
    count, cursor = 0, None
    while True:
        await request.app[SERVICE].turns.turn()  # a commit may be made here and now, and a page may have nothing to commit
        engine = engine_of(request)
        page, cursor = engine.browse(topic, first, last, PAGE, cursor)
        found, staged = engine.stage_cancel(topic, [m.id for m in page if not m.group], now_ms())
        await request.app[SERVICE].commit(found)
        outcome = engine.finish_cancel(found, staged, now_ms())
        count += sum(state == "cancelled" for state in outcome.values())
        if cursor is None:
            return count


async def browse(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/messages"""
    topic, asked = topic_of(request), query(request, BrowseQuery)
    request.app[SERVICE].flow.answer_bytes.refuse_if_full()
    place = engine_of(request).topic(topic)
    found, cursor = place.browse(asked.state, asked.from_ms, asked.to_ms, asked.limit, asked.cursor)
    return answer({"messages": [messages.listed(message) for message in found], "cursor": cursor})


async def forecast(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/forecast"""
    topic, asked = topic_of(request), query(request, ForecastQuery)
    buckets = max(1, -int(-asked.hours * 3600 // asked.bucket))
    if buckets > FORECAST_BUCKETS_MAX:
        raise InvalidArgument(f"a forecast has at most {FORECAST_BUCKETS_MAX:,} buckets, this one {buckets:,}")
    return answer(engine_of(request).forecast(topic, now_ms(), round(asked.bucket * 1000), buckets))
