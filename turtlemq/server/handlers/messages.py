"""Handlers of stored messages: view, change or cancel them, list them by state, and forecast when they come due."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from turtlemq.broker.cancel import CANCELLED
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument, TooLarge, UnknownMessage
from turtlemq.index.browse import PAGE_BYTES
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX, Forecast, State
from turtlemq.server.audit import COUNT, name_target
from turtlemq.server.auth import AUTH, READ
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.depth import check_body_depth
from turtlemq.server.incoming.times import Delay, Due, Spread, due_time
from turtlemq.server.outgoing import messages
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, EpochMs, check_deadline, distinct_ids, due_rules, engine_of, id_of, query, topic_of
from turtlemq.server.service import Service
from turtlemq.server.slo_watch import SLO, lateness_of
from turtlemq.standing import CANCELLED_BEFORE
from turtlemq.topic.listing import Places
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.spread import what_if
from turtlemq.topic.topic import Topic

PAGE = 500  # messages that are cancelled at once: about 25 ms if there are few groups
PAIRS = 2_000  # of an id and a group that a cancel begins with; after each step it adapts to the time that the last one took.
# Of these, no step handles more that have a retry or a dead letter, but those of one message
STEP_S = 0.01
LISTING_STEP = 500  # messages that are listed at once
LISTING_STEPS, LISTING_S = 20, 0.2  # for one answer: so many steps, and more while there is time
FORECAST_BUCKETS_MAX = 100_000


class Cancel(Struct, forbid_unknown_fields=True):
    """The messages to cancel: by id, or by due time."""

    ids: list[str] | None = None
    due_from_ms: EpochMs | None = None
    due_to_ms: EpochMs | None = None


class Patch(Struct, forbid_unknown_fields=True):
    """Changes of a sleeper."""

    due_ms: int | None = None
    due: Due | None = None
    delay: Delay | None = None
    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None
    headers: dict[str, str] | None = None


class Retry(Struct, forbid_unknown_fields=True):
    """The group in which a message is tried again; None: each that waits for its next attempt, or has a dead letter of it."""

    group: str | None = None


class MessageQuery(Struct, forbid_unknown_fields=True):
    """Which state of a message: the present one, or that of a past moment."""

    at_ms: EpochMs | None = None


class BrowseQuery(Struct, forbid_unknown_fields=True):
    """A page of a listing. `prefix`: of ids. `newest`: in the reverse order, the latest first."""

    state: str = "sleep"
    from_ms: EpochMs = 0
    to_ms: EpochMs = DUE_MS_MAX
    prefix: Annotated[str, Meta(max_length=200)] = ""
    newest: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    cursor: str | None = None


class ForecastQuery(Struct, forbid_unknown_fields=True):
    """Length and resolution of a forecast, and where it begins: now, if nothing else is said."""

    bucket: Annotated[float, Meta(ge=0.001, le=86_400 * 366)] = 60
    hours: Annotated[float, Meta(gt=0, le=24 * 366 * 90)] = 24
    from_ms: EpochMs | None = None
    what_if_spread: Spread | None = None
    capacity: bool = False
    capacity_per_s: Annotated[float, Meta(ge=0.001, le=1e9)] | None = None


class WhatIf(Struct):
    """A forecast as it would be if each message had this spread: expected counts."""

    spread_ms: int
    counts: list[int]
    beyond: int


class CapacityAnswer(Struct):
    """Lateness at the end of each bucket, if consumers handle `per_s`. `group`: the one that will be the latest; None if the rate
    was given. Times are None if the goal of the topic will be kept."""

    per_s: float
    late_ms: list[int]
    late_from_ms: int | None
    worst_ms: int
    worst_at_ms: int | None
    group: str | None = None


class ForecastAnswer(Struct, omit_defaults=True):
    """A forecast; `what_if` and `capacity` if they were asked for."""

    from_ms: int
    bucket_ms: int
    counts: list[int]
    overdue: int
    beyond: int
    what_if: WhatIf | UnsetType = UNSET
    capacity: CapacityAnswer | UnsetType = UNSET


# One message


def _view(engine: Engine, topic: str, id_: str) -> MessageView:
    view = engine.message(topic, id_)
    if view is None:
        raise UnknownMessage(f"topic {topic!r} holds no message {id_!r}")
    return view


async def get_message(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/messages/{id}"""
    topic, id_, asked = topic_of(request), id_of(request), query(request, MessageQuery)
    if asked.at_ms is not None:
        return await _message_at(request, topic, id_, asked.at_ms)
    found = _view(engine_of(request), topic, id_)
    if not request.app[AUTH].may(request, topic, READ):
        messages.hide_errors(found)
    return answer(messages.view(found))


async def _message_at(request: web.Request, topic: str, id_: str, at_ms: int) -> web.Response:
    """A message as it was. The journals are searched a piece at a time, between which other requests get their turn."""
    if at_ms > (now := now_ms()):
        raise InvalidArgument(f"at_ms {at_ms} lies in the future: now it is {now}. GET …/forecast tells what comes due")
    steps = engine_of(request).topic(topic).view.message_at(id_, at_ms)
    found = await request.app[SERVICE].turns.finish(steps, partial(check_deadline, request), topic)
    if not request.app[AUTH].may(request, topic, READ):
        messages.hide_errors(found.view)
    return answer(messages.past_view(found))


async def remove(request: web.Request) -> web.Response:
    """DELETE /v1/topics/{topic}/messages/{id}"""
    topic, id_ = topic_of(request), id_of(request)
    missed = (await cancel_ids(request.app[SERVICE], topic, [id_]))[1]
    if id_ in missed:
        blocking = missed[id_] if missed[id_] in ("reserve", "history", "dead") else None  # its state in one of the groups
        state = blocking or _view(engine_of(request), topic, id_).state
        raise Conflict(f"{id_!r} can no longer be cancelled: it is in state {state}", state=state)
    return answer({"outcome": "cancelled"})


async def patch(request: web.Request) -> web.Response:
    """PATCH /v1/topics/{topic}/messages/{id}"""
    topic, id_ = topic_of(request), id_of(request)
    asked = await read_as(request, Patch)
    if not isinstance(asked.body, UnsetType):
        await in_slices(check_body_depth(bytes(asked.body)))
    engine, now = engine_of(request), now_ms()
    changes: dict[str, Any] = {}
    if asked.due_ms is not None or asked.delay is not None or asked.due is not None:
        changes["due_ms"] = due_time(asked.delay, asked.due_ms, now, due=asked.due)
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
        raise InvalidArgument("nothing to change: give delay, due or due_ms, body or body_base64, headers")
    staged_in, message = engine.stage_reschedule(topic, id_, now, **changes)
    await request.app[SERVICE].commit(staged_in)
    return answer({"outcome": "rescheduled" if "due_ms" in changes else "edited", "due_ms": message.due_ms})


async def retry(request: web.Request) -> web.Response:
    """POST /v1/topics/{topic}/messages/{id}/retry"""
    topic, id_ = topic_of(request), id_of(request)
    asked = await read_as(request, Retry)
    engine_of(request).retry_now(topic, id_, asked.group, now_ms())
    request.app[SERVICE].answer_polls_soon(topic)
    return answer({"outcome": "ready"})


# Many messages


async def cancel_ids(service: Service, topic: str, ids: list[str]) -> tuple[int, dict[str, str]]:
    """Cancel messages. Returns how many are cancelled now, and the state of each that was not."""
    ids, outcome = await distinct_ids(ids), dict[str, str]()
    at, count = 0, max(1, min(PAGE, PAIRS // max(1, service.engine.topic(topic).view.group_count)))
    while at < len(ids):
        if at:
            await service.turns.turn(topic)
        engine = service.engine
        staged_in, staged = engine.stage_cancel(topic, ids[at : at + count], now_ms())
        await service.commit(staged_in)
        start = perf_counter()
        outcome |= await _finish_cancel(service, staged_in, staged)
        at, count = at + count, min(PAGE, 2 * count) if perf_counter() - start < STEP_S else max(1, count // 2)
        await service.synced(staged_in)
    missed = {id_: "cancelled" if state == CANCELLED_BEFORE else state for id_, state in outcome.items() if state != CANCELLED}
    if len(missed) < len(outcome):
        service.tick_if_sooner()
    return len(outcome) - len(missed), missed


async def _finish_cancel(service: Service, topic: Topic, staged: dict[str, State]) -> dict[str, str]:
    """Finish a cancel after its commit. Messages that have very many retries and dead letters are cancelled in several steps. A
    sync must follow."""
    outcome, left = dict[str, str](), staged
    while True:
        with topic.deferring_syncs():
            outcome |= service.engine.finish_cancel(topic, left, now_ms(), PAIRS)
        left = {id_: state for id_, state in left.items() if id_ not in outcome}
        if not left:
            return outcome
        await service.turns.turn(topic.name)


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
        request.app[SERVICE].answer_polls_soon(topic)
    request[COUNT] = count
    name_target(request, asked.ids)
    return answer({"cancelled": count, "missed": missed})


async def _cancel_range(request: web.Request, topic: str, first: int, last: int) -> int:
    """Cancel sleepers by due time, in pages, between which other requests get their turn. Sleeping retries are left out."""
    count, cursor = 0, None
    while True:
        await request.app[SERVICE].turns.turn(topic)  # needed: an inline commit, or a page without sleepers, never waits
        engine = engine_of(request)
        page, cursor = engine.browse(topic, first, last, PAGE, cursor)
        staged_in, staged = engine.stage_cancel(topic, [message.id for message in page if not message.group], now_ms())
        await request.app[SERVICE].commit(staged_in)
        outcome = await _finish_cancel(request.app[SERVICE], staged_in, staged)
        await request.app[SERVICE].synced(staged_in)
        count += sum(state == "cancelled" for state in outcome.values())
        if cursor is None:
            return count


async def browse(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/messages"""
    topic, asked = topic_of(request), query(request, BrowseQuery)
    request.app[SERVICE].flow.answer_bytes.refuse_if_full()
    page, cursor, size = list[dict[str, Any]](), asked.cursor, 0
    end, step, places = perf_counter() + LISTING_S, 0, Places()
    while step < LISTING_STEPS or perf_counter() < end:  # a step may be short, too, if its messages have many retries
        step += 1
        await request.app[SERVICE].turns.turn(topic)
        view, limit = engine_of(request).topic(topic).view, min(LISTING_STEP, asked.limit - len(page))
        found, cursor = view.messages(asked.state, asked.from_ms, asked.to_ms, limit, cursor, places, asked.prefix, asked.newest)
        page += [messages.listed(message) for message in found]
        size += sum(len(message.body or b"") for message in found)
        if cursor is None or len(page) >= asked.limit or size >= PAGE_BYTES:
            break
    return answer({"messages": page, "cursor": cursor})


async def forecast(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/forecast"""
    topic, asked = topic_of(request), query(request, ForecastQuery)
    buckets = max(1, -int(-asked.hours * 3600 // asked.bucket))
    if buckets > FORECAST_BUCKETS_MAX:
        raise InvalidArgument(f"a forecast has at most {FORECAST_BUCKETS_MAX:,} buckets, this one {buckets:,}")
    start_ms = now_ms() if asked.from_ms is None else asked.from_ms
    found = engine_of(request).forecast(topic, start_ms, round(asked.bucket * 1000), buckets)
    out = ForecastAnswer(found.from_ms, found.bucket_ms, found.counts, found.overdue, found.beyond)
    if asked.what_if_spread is not None:
        spread_ms = round(asked.what_if_spread * 1000)
        counts, pushed = what_if(found.counts, found.bucket_ms, spread_ms)
        out.what_if = WhatIf(spread_ms, counts, found.beyond + pushed)
        found = Forecast(found.from_ms, found.bucket_ms, counts, found.overdue, found.beyond + pushed)
    if asked.capacity or asked.capacity_per_s is not None:
        out.capacity = _capacity(request, topic, found, asked.capacity_per_s)
    return answer(out)


def _capacity(request: web.Request, name: str, found: Forecast, per_s: float | None) -> CapacityAnswer:
    """The lateness to come, at a given rate or at the one that consumers have shown."""
    topic, group = engine_of(request).topic(name), None
    if per_s is not None:
        late = lateness_of(topic, found, now_ms(), per_s)
    elif (goal := request.app[SLO].of(topic)) is None:
        text = f"topic {name!r} has no goal: set lateness_slo.ms, and its consumers are measured; or give capacity_per_s"
        raise InvalidArgument(text)
    elif not goal.rates:
        raise InvalidArgument(f"consumers of {name!r} have not been measured yet: ask again in a minute, or give capacity_per_s")
    else:
        group, late = goal.worst(found, now_ms())
        per_s = goal.rates[group]
    return CapacityAnswer(round(per_s, 3), late.late_ms, late.late_from_ms, late.worst_ms, late.worst_at_ms, group)
