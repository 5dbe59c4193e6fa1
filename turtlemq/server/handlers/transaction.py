"""The handler of transactions: puts, cancels and reschedules of one topic under conditions, in one commit or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Raw, Struct, field

from turtlemq.errors import Conflict, InvalidArgument, InvalidMessage
from turtlemq.index.validate import check_batch, check_expiry
from turtlemq.model import Batch, Receipt
from turtlemq.server.audit import COUNT
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import InvalidJson
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.handlers.produce import outcomes
from turtlemq.server.incoming.batches import DueRules, batch_of, check_due
from turtlemq.server.incoming.body import read_with
from turtlemq.server.incoming.columns import Columns, columns_of
from turtlemq.server.incoming.decode import check_text, decode
from turtlemq.server.incoming.depth import check_depth
from turtlemq.server.incoming.json_messages import JsonMessage, bodies, listed
from turtlemq.server.incoming.times import Delay, Due, due_time
from turtlemq.server.outgoing.answers import Stored
from turtlemq.server.outgoing.reply import Reply, encode
from turtlemq.server.request import SERVICE, due_rules, throttle, topic_of
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic
from turtlemq.topic.transaction import Condition, Reschedule, Transaction, TransactionReceipt, check, check_new_topic


class NewDue(Struct, forbid_unknown_fields=True):
    """Another due time of a sleeper."""

    id: str
    due_ms: int | None = None
    due: Due | None = None
    delay: Delay | None = None


class InState(Struct, forbid_unknown_fields=True):
    """A condition: this message is in this state."""

    id: str
    state: Literal["sleep", "ready", "reserve", "history", "dead", "cancelled", "unknown"]


class Operations(Struct, forbid_unknown_fields=True):
    """The body: what to do, and under which conditions."""

    put: list[JsonMessage] = []
    cancel: list[str] = []
    reschedule: list[NewDue] = []
    conditions: list[InState] = field(name="if", default_factory=list)


class Done(Struct):
    """A transaction that was done."""

    put: Stored
    cancelled: int
    rescheduled: int


async def transact(request: web.Request) -> Reply:
    """POST /v1/topics/{topic}/transaction"""
    topic_of(request, may_create=True)
    with _explaining():
        asked, put = await read_with(request, _decoded)
    await in_slices(check_depth(put.bodies, put.flags, InvalidJson))
    service, size = request.app[SERVICE], sum(map(len, put.bodies))
    service.admit(size)
    topic, now = topic_of(request, may_create=True), now_ms()  # again: it may have been created or deleted meanwhile
    throttle(request, topic, len(put), size)
    if service.turns.by_tenant:
        await service.turns.turn(topic, size)
    given = _transaction(asked, put, now, due_rules(request, topic))
    opened, receipt = _staged(service, topic, given, now)
    if opened is not None:
        await service.commit(opened, size)
    service.meter.transactions["done"] += 1
    if len(given.put):
        service.stored(topic, len(given.put), size)
    request[COUNT] = receipt.cancelled + receipt.rescheduled
    stored = (b'{"ids":', encode(receipt.put.ids), b",", *outcomes(receipt.put), b'"durable":"fsync"}')
    counts = b',"cancelled":%d,"rescheduled":%d}' % (receipt.cancelled, receipt.rescheduled)
    return Reply(b"".join((b'{"put":', *stored, counts)))


def _staged(service: Service, topic: str, given: Transaction, now: int) -> tuple[Topic | None, TransactionReceipt]:
    """Stage a transaction. Raises, and counts, a conflict. A topic is created by one alone that puts messages: None else."""
    engine = service.engine
    try:
        if topic not in engine.topics:
            check_new_topic(given)
            if not len(given.put):
                return None, TransactionReceipt(Receipt([], []), 0, 0)
            check_batch(given.put)
            check_expiry(given.put, now)
        elif given.conditions:
            service.catch_up(topic)
        engine.ballast.refuse_producers()
        opened = engine.topic(topic, create=True)
        return opened, opened.stage_transaction(given, now)
    except Conflict:
        service.meter.transactions["conflict"] += 1
        raise


@contextmanager
def _explaining() -> Iterator[None]:
    """Say of a body that names topics why it must not."""
    try:
        yield
    except (InvalidMessage, InvalidArgument) as error:
        if "`topic`" not in str(error):
            raise
        text = "all operations of a transaction are about the topic of its path, since files of two topics cannot change in one "
        raise InvalidArgument(f"{text}write ({error}). Nothing was done: send a request for each topic") from None


class _Quick(Operations):
    """The body with messages that are not decoded yet."""

    put: Raw = Raw(b"[]")  # type: ignore[assignment]


_quick = msgspec.json.Decoder(_Quick)


def _decoded(data: bytes) -> tuple[Operations, Columns]:
    """The operations, and the messages among them as columns, decoded as those of a batch. The type `Operations` has the errors
    for a body that is not valid."""
    try:
        check_text(data)
        quick = _quick.decode(data)
        return quick, listed(bytes(quick.put))
    except (msgspec.DecodeError, RecursionError):
        asked = decode(data, Operations, InvalidArgument)
        return asked, columns_of(asked.put, *bodies(asked.put, 0))


def _transaction(asked: Operations, put: Columns, now: int, rules: DueRules) -> Transaction:
    """The transaction that is asked for, with due times. Raises for one that is none."""
    moves = []
    for i, move in enumerate(asked.reschedule):
        if move.due_ms is None and move.due is None and move.delay is None:
            raise InvalidArgument(f"reschedule {i}: give delay, due or due_ms", index=i)
        due_ms = due_time(move.delay, move.due_ms, now, i, move.due)
        check_due(due_ms, now, rules)
        moves.append(Reschedule(move.id, due_ms))
    conditions = [Condition(one.id, one.state) for one in asked.conditions]
    batch = batch_of(put, now, rules) if len(put) else Batch([], [])
    given = Transaction(batch, asked.cancel, moves, conditions)
    check(given)
    return given
