"""Staging a large batch without holding the event loop: its checks run on a thread, its ids are looked up in slices.

An id that is known when its slice is looked up is a duplicate, even if the other message is removed afterwards. An id that is
new then is looked up once more when the rest of the batch is staged, all at once, which is fast as long as all are new.
"""

from __future__ import annotations

import asyncio

from turtlemq.index.validate import check_expiry, checked, pick
from turtlemq.model import Batch, CheckedBatch, Receipt
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic

LARGE = 5_000  # messages of a batch that is staged in this way
SLICE = 2_000  # ids that are looked up at once: 10 ms if all are duplicates


async def prepare(service: Service, topic: str, batch: Batch, now_ms: int) -> tuple[CheckedBatch, list[bool]]:
    """A checked batch, and which of its messages are no duplicates as of now. Raises if anything is wrong with the batch."""
    whole, created = await asyncio.to_thread(_checked, batch, now_ms)
    if whole.ids is None:
        return whole, created
    for at in range(0, len(whole), SLICE):
        await service.turns.turn()
        opened = service.engine.topics.get(topic)
        if opened is not None:
            for i in opened.held(whole.ids[at : at + SLICE], now_ms):
                created[at + i] = False
    return whole, created


def _checked(batch: Batch, now_ms: int) -> tuple[CheckedBatch, list[bool]]:
    """A checked batch, and which of its messages do not repeat the id of one before."""
    whole, seen, created = checked(batch), set[str](), [True] * len(batch)
    check_expiry(whole, now_ms)
    for i, id_ in enumerate(whole.ids or ()):
        if id_ is not None:
            created[i] = id_ not in seen
            seen.add(id_)
    return whole, created


def stage(service: Service, topic: str, prepared: tuple[CheckedBatch, list[bool]], now_ms: int) -> tuple[Topic, Receipt]:
    """Stage the new messages of a prepared batch. Returns the topic, and the receipt of the whole batch."""
    whole, created = prepared
    if all(created):
        return service.engine.stage(topic, whole, now_ms)
    given, rows = list(whole.ids or ()), [i for i, new in enumerate(created) if new]
    opened = service.engine.topic(topic, create=True)
    if rows:
        opened, receipt = service.engine.stage(topic, pick(whole, rows), now_ms)
        for i, id_, new in zip(rows, receipt.ids, receipt.created, strict=True):
            given[i], created[i] = id_, new
    return opened, Receipt([id_ or "" for id_ in given], created)
