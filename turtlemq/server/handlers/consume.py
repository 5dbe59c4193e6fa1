"""Handlers of consumers: fetch, acknowledge, extend a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from turtlemq.broker import results
from turtlemq.broker.results import Reserved
from turtlemq.errors import InvalidArgument, TooLarge, TurtleError
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX, TTR_MS_MAX
from turtlemq.segment.buffers import Buffer
from turtlemq.server import trace
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import InvalidAckList
from turtlemq.server.incoming.body import read, read_as
from turtlemq.server.incoming.decode import decode
from turtlemq.server.incoming.times import DELAY_S_MAX
from turtlemq.server.list_slices import HANDLED_MAX, Slice, ack_slices, extend_slices
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.media_types import BSON, JSON
from turtlemq.server.metrics.delivery_steps import DELIVERED
from turtlemq.server.outgoing.answers import Acked, Extended
from turtlemq.server.outgoing.fetch import count_odd, fetched_bson, fetched_json
from turtlemq.server.outgoing.reply import Reply, answer
from turtlemq.server.request import SERVICE, engine_of, group_of, time_left, topic_and_group, topic_of

PAUSED = b'{"messages":[],"paused":true}'  # the answer to a fetch of a paused group or topic
_LARGE_BYTES = 4 << 20  # of an answer that is encoded on a thread: on the event loop it takes 15 ms or more
_ODD_MAX = 1_000  # messages of an answer that are encoded one by one; more are encoded on a thread
_LARGE_LIST_BYTES = 256 << 10  # of an ack list that is parsed on a thread
Token = Annotated[str, Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, Meta(gt=0, le=TTR_MS_MAX / 1000)]


POLL = "poll"  # a key of requests: notes how to give back the messages of a fetch that another process may end


class Fetch(Struct, forbid_unknown_fields=True):
    """The body of a fetch."""

    max: Annotated[int, Meta(ge=1, le=10_000)] = 100
    wait: Annotated[float, Meta(ge=0, le=60)] = 0
    ttr: Seconds | None = None
    consumer: Annotated[str, Meta(max_length=200)] = ""
    ack: Literal["manual", "auto"] = "manual"
    low: Annotated[int, Meta(ge=0, le=10_000)] | None = None


class Ack(Struct, forbid_unknown_fields=True):
    """The long form of an ack."""

    acks: list[str]
    retry_delay: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] | None = None
    error: Annotated[str, Meta(max_length=4_000)] = ""
    lease: Token | list[Token] | None = None


class Extend(Struct, forbid_unknown_fields=True):
    """The body of an extend."""

    ids: list[str]
    ttr: Seconds | None = None
    lease: Token | list[Token] | None = None


async def fetch(request: web.Request) -> Reply:
    """POST …/fetch"""
    topic_and_group(request)
    asked = await read_as(request, Fetch)
    topic, group = topic_and_group(request)  # again: topics and groups may have been created or deleted meanwhile
    service = request.app[SERVICE]
    service.engine.topic(topic, create=True)
    ttr_ms = None if asked.ttr is None else max(1, round(asked.ttr * 1000))
    low = None if asked.low is None else partial(int, asked.low)
    wanted = FetchRequest(topic, group, asked.max, ttr_ms, asked.consumer, asked.ack == "auto", low=low)
    note, cannot_wait = request.get(POLL), False  # of a process that asks all partitions of the topic
    if note is not None:
        cannot_wait = wanted.auto or engine_of(request).topic(topic).settings.delivery == "at-most-once"
    wait_s = 0.0 if cannot_wait else min(asked.wait, time_left(request))
    messages = await trace.waited(request, service.fetch(wanted, wait_s))
    woken_s = service.meter.steps.take_woken()
    service.meter.fetch_batch.add(len(messages))
    undo = partial(service.give_back, wanted, messages)
    if note is not None and len(messages) and not note(undo):
        messages = Reserved()
    as_bson = prefers_bson(request.headers.get("Accept", ""))
    if not len(messages) and service.is_paused(wanted):
        return Reply(b"", 200, BSON, paused=True) if as_bson else Reply(PAUSED)
    if cannot_wait and not len(messages):
        return Reply(b'{"messages":[]}', no_wait=True)
    body = await _encoded(fetched_bson if as_bson else fetched_json, messages, undo)
    if woken_s is not None:
        request[DELIVERED] = service.meter.steps.encoded(woken_s)
    return Reply(body, 200, BSON, undo, messages.lease) if as_bson else Reply(body, 200, JSON, undo)


async def _encoded(encode: Callable[[Reserved], list[Buffer]], messages: Reserved, undo: Callable[[], None]) -> list[Buffer]:
    """The body of an answer to a fetch. A large one takes up to 80 ms, and is encoded on a thread: other requests go on."""
    if messages.bytes < _LARGE_BYTES and (len(messages) < _ODD_MAX or count_odd(messages) < _ODD_MAX):
        return encode(messages)
    try:
        return await asyncio.to_thread(encode, messages)
    except BaseException:  # also if the server stops meanwhile: the messages did not reach their consumer
        undo()
        raise


@lru_cache(64)  # clients send the same few headers again and again
def prefers_bson(accept: str) -> bool:
    """Whether an Accept header names BSON with at least the quality of JSON.

    >>> accepts = "application/BSON", "application/bson;q=0", "application/json, application/bson;q=0.1", "*/*"
    >>> [prefers_bson(accept) for accept in accepts]
    [True, False, False, False]
    """
    quality = {BSON: 0.0, JSON: 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        values = [text[2:] for text in parameters if text.startswith("q=")]
        try:
            quality[kind] = float(values[0]) if values else 1.0
        except ValueError:
            quality[kind] = 1.0
    return quality[BSON] > 0 and quality[BSON] >= quality[JSON]


async def ack(request: web.Request) -> Reply:
    """POST …/ack"""
    topic, group = topic_of(request), group_of(request)
    data = await read(request)
    asked, slices, repeated = _parse_acks(data) if len(data) < _LARGE_LIST_BYTES else await asyncio.to_thread(_parse_acks, data)
    delay_ms = None if asked.retry_delay is None else round(asked.retry_delay * 1000)
    if now_ms() + (delay_ms or 0) > DUE_MS_MAX:
        raise InvalidArgument("retry_delay reaches beyond May 2109")
    service, done = request.app[SERVICE], list[results.Acked]()
    for acks, lease in slices:
        if len(slices) > 1:
            await service.turns.turn(topic)
        engine = engine_of(request)
        opened = engine.topic(topic)
        with opened.deferring_syncs():
            done.append(engine.ack(topic, group, acks, now_ms(), leases=lease, retry_delay_ms=delay_ms, error=asked.error))
        if service.fetches.needs_ends(topic):
            service.answer_polls_soon(topic)
        else:
            service.tick_if_sooner()
        if opened.settings.ack_durability == "fsync":
            await service.synced(opened)
    service.meter.ack_batch.add(len(asked.acks))
    acked, failed, dead = (sum(getattr(part, name) for part in done) for name in ("acked", "failed", "dead"))
    return Reply.of(Acked(acked, failed, dead, _joined(done, "unknown", repeated), _late(asked, done)))


def _parse_acks(data: bytes) -> tuple[Ack, list[Slice], list[str]]:
    """An ack list in its short or long form, and its slices. A long list takes 60 ms.

    >>> _parse_acks(b'["a", "-b"]')[0].acks
    ['a', '-b']
    """
    body: list[str] | Ack = decode(data, list[str] | Ack, InvalidAckList)  # type: ignore[arg-type]
    asked = Ack(body) if isinstance(body, list) else body
    if len(asked.acks) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"an ack list holds at most {BATCH_MESSAGES_MAX:,} ids, this one {len(asked.acks):,}")
    for empty in ("", "-"):
        if empty in asked.acks:
            i = asked.acks.index(empty)
            raise InvalidAckList(f"entry {i} names no message: {empty!r}", index=i)
    _check_lease(asked.lease, asked.acks, InvalidAckList)
    return asked, *ack_slices(asked.acks, asked.lease)


def _check_lease(lease: str | list[str] | None, entries: list[str], error: type[TurtleError]) -> None:
    """Refuse a list of leases that does not fit the list of messages."""
    if isinstance(lease, list) and len(lease) != len(entries):
        raise error(f"lease is one text, or a list with one for each entry: it has {len(lease):,} for {len(entries):,} entries")


async def extend(request: web.Request) -> web.Response:
    """POST …/extend"""
    topic, group = topic_of(request), group_of(request)
    asked = await read_as(request, Extend)
    if len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} leases are extended at once, these are {len(asked.ids):,}")
    _check_lease(asked.lease, asked.ids, InvalidArgument)
    settings = engine_of(request).topic(topic).settings
    ttr_ms = settings.ttr_ms if asked.ttr is None else max(1, round(asked.ttr * 1000))
    service, done = request.app[SERVICE], list[results.Extended]()
    cut = partial(extend_slices, asked.ids, asked.lease)
    slices, repeated = cut() if len(asked.ids) <= HANDLED_MAX else await asyncio.to_thread(cut)
    for ids, lease in slices:
        if len(slices) > 1:
            await service.turns.turn(topic)
        done.append(engine_of(request).extend(topic, group, ids, ttr_ms, now_ms(), lease))
        service.tick_soon()
    extended = sum(part.extended for part in done)
    return answer(Extended(extended, _joined(done, "unknown", repeated), _late(asked, done)))


def _joined(done: Sequence[results.Acked | results.Extended], field: str, more: list[str]) -> list[str]:
    """A list of ids over all slices of a request."""
    return [id_ for part in done for id_ in getattr(part, field)] + more


def _late(asked: Ack | Extend, done: Sequence[results.Acked | results.Extended]) -> list[str] | UnsetType:
    """Late ids, if the request named leases."""
    return UNSET if asked.lease is None else _joined(done, "late", [])
