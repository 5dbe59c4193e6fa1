"""The handler that stores messages: read, decode, stage, and answer when the commit has landed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Literal

import numpy as np
from aiohttp import web
from msgspec import Struct

from turtlemq.if_exists import MODES, IfExists
from turtlemq.model import U8, Batch, Priority, Receipt
from turtlemq.segment.format import PRIORITY
from turtlemq.server.clock import now_ms
from turtlemq.server.incoming import large_batches
from turtlemq.server.incoming.batches import TYPES, decode_slices
from turtlemq.server.incoming.body import read
from turtlemq.server.outgoing.reply import Reply, encode
from turtlemq.server.pace import work_of
from turtlemq.server.request import SERVICE, check_deadline, due_rules, query, throttle, time_left, topic_of
from turtlemq.server.service import Service
from turtlemq.server.singles import is_plain
from turtlemq.server.spans import SPANS

HEAVY_BYTES = 16 << 10  # a larger body takes more than a fraction of a millisecond, so its work waits for its turn
IDS_MAX = 10_000  # of an answer, written at once: 5 ms if they are as long as ids can be

CHECK_IDS = "check_ids"  # a key of requests for one partition of a topic: raises if a message belongs into another one


class ProduceQuery(Struct):
    """Options for all messages of a request."""

    if_exists: Literal["keep", "replace", "reschedule", "error"] = "keep"


async def produce(request: web.Request) -> Reply:
    """POST /v1/topics/{topic}/messages"""
    topic, service = topic_of(request, may_create=True), request.app[SERVICE]
    data = await read(request, TYPES)
    if (left_s := time_left(request)) < math.inf:
        service.flow.pace.refuse_late(left_s)
    if_exists = MODES.index(query(request, ProduceQuery).if_exists) if request.query_string else IfExists.KEEP
    work = service.flow.pace.begin(len(data), perf_counter())
    try:
        return await _store(request, service, topic, data, if_exists)
    finally:
        service.flow.pace.end(work, perf_counter())


async def _store(request: web.Request, service: Service, topic: str, data: bytes, if_exists: int) -> Reply:
    service.admit(len(data))
    if service.tenants is not None:
        service.tenants.refuse_bytes(topic, len(data), asyncio.get_running_loop().time())
    if len(data) > HEAVY_BYTES or service.turns.by_tenant:
        await service.turns.turn(topic, len(data))
        check_deadline(request)
    now = now_ms()
    kind = request.content_type if request.headers.get("Content-Type") else ""
    steps = decode_slices(data, kind, now, due_rules(request, topic), if_exists)
    batch = await service.turns.finish(steps, partial(check_deadline, request), topic)
    if (spans := request.app[SPANS]) is not None:
        spans.carry(request, batch)
    if (check_ids := request.get(CHECK_IDS)) is not None:
        check_ids(batch.ids)
    is_low = is_low_alone(batch)
    if is_low and (left_s := time_left(request)) < math.inf:
        service.flow.pace.refuse_late(left_s, is_low=True, own=work_of(len(data)))
    throttle(request, topic, len(batch), len(data), is_low)
    if len(data) > HEAVY_BYTES:
        await service.turns.turn(topic, len(data))
        check_deadline(request)
    opened = service.engine.topics.get(topic) if len(batch) == 1 and len(data) <= HEAVY_BYTES and is_plain(batch) else None
    if opened is not None:
        receipt = await service.put(opened, batch, len(data))
        service.stored(topic, 1, len(data))
        return _answer_to_one(receipt)
    check = partial(topic_of, request, may_create=True)  # again: topics may have been created or deleted meanwhile
    staged_in, receipt = await large_batches.staged(service, topic, batch, len(data), now, check)
    await service.commit(staged_in, len(data))
    service.stored(topic, len(receipt), len(data))
    pieces = [b'{"ids":[', _ids_json(receipt.given[:IDS_MAX])]
    for at in range(IDS_MAX, len(receipt), IDS_MAX):
        await service.turns.turn(topic)
        pieces += (b",", _ids_json(receipt.given[at : at + IDS_MAX]))
    pieces += (b"],", *outcomes(receipt), b'"durable":"fsync"}')
    return Reply(b"".join(pieces), 201, counts_copies=True)


def is_low_alone(batch: Batch) -> bool:
    """Whether all messages are of low priority."""
    flags = batch.flags
    if flags is None or isinstance(flags, int):
        return flags is not None and flags & PRIORITY == Priority.LOW
    if len(flags) == 1:
        return flags[0] & PRIORITY == Priority.LOW
    return bool((np.asarray(flags) & PRIORITY == Priority.LOW).all())


def _answer_to_one(receipt: Receipt) -> Reply:
    """The answer to a plain message."""
    created, (id_,) = receipt.created[0], receipt.ids
    index = b"" if created else b'"duplicate_indexes":[0],'
    counts = b'"created":%d,"duplicates":%d,"replaced":0,"rescheduled":0,' % (created, not created)
    return Reply(b'{"ids":[%b],%b%b"durable":"fsync"}' % (encode(id_), counts, index), 201, counts_copies=True)


def outcomes(receipt: Receipt) -> Iterator[bytes]:
    """The counts of outcomes, and the indexes of messages that were not created."""
    replaced, rescheduled, duplicates = receipt.replaced, receipt.rescheduled, receipt.duplicates
    created = len(receipt) - duplicates - len(replaced) - len(rescheduled)
    counts = (created, duplicates, len(replaced), len(rescheduled))
    yield b'"created":%d,"duplicates":%d,"replaced":%d,"rescheduled":%d,' % counts
    if duplicates:
        others = {*replaced, *rescheduled}
        known = [i for i, created in enumerate(receipt.created) if not created and i not in others]
        yield b'"duplicate_indexes":%b,' % encode(known)
    if replaced:
        yield b'"replaced_indexes":%b,' % encode(replaced)
    if rescheduled:
        yield b'"rescheduled_indexes":%b,' % encode(rescheduled)


def _ids_json(given: list[str] | U8) -> bytes:
    """Ids, separated by commas. Ids that the server gave are rows of text in an array, and are copied as they are."""
    if isinstance(given, list):
        return encode(given)[1:-1]
    rows = np.full((len(given), given.shape[1] + 3), ord('"'), np.uint8)
    rows[:, 1:-2], rows[:, -1] = given, ord(",")
    return rows.tobytes()[:-1]
