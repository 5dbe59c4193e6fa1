"""Staging a large batch without holding the event loop: its checks run on a thread, its ids are looked up in slices.

An id that is known when its slice is looked up is a duplicate, even if the other message is removed afterwards; but the commit
that is to store the other one must not fail. Ids that other requests stage meanwhile are looked up once more at the end. If the
topic was deleted meanwhile, or a commit failed, the whole batch is looked up at once: slow, rare and right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from turtlemq.errors import InvalidId
from turtlemq.index.staged_ids import StagedIds
from turtlemq.index.validate import checked, pick
from turtlemq.index.writer import CommitGroup
from turtlemq.model import Batch, CheckedBatch, Receipt
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic

LARGE = 5_000  # messages of a batch that is staged in this way
LARGE_BYTES = 4 << 20  # of a request whose batch is staged in this way, however few its messages are
SLICE = 1_000  # ids that are looked up at once: 10 ms if all are duplicates


async def staged(
    service: Service, topic: str, batch: Batch, size: int, now_ms: int, check: Callable[[], object]
) -> tuple[Topic, Receipt]:
    """Stage a batch of a request of `size` bytes: a small one at once, a large one in turns with other requests. `check` is
    called right before, and may raise. Returns the topic and the receipt."""
    if batch.if_exists is not None or (len(batch) < LARGE and size < LARGE_BYTES):
        check()
        return service.engine.stage(topic, batch, now_ms)
    prepared = await prepare(service, topic, batch, now_ms)
    try:
        check()
        return stage(service, topic, prepared, now_ms)
    finally:
        finish(prepared)


@dataclass(slots=True)
class Prepared:
    """A checked batch, and the findings about its ids."""

    batch: CheckedBatch
    is_new: list[bool]  # by message: its id is not known, and stands at no message before it
    topic: Topic | None  # in which the ids were looked up
    fresh: CheckedBatch | None = None  # the new messages, if some are not
    commits: list[CommitGroup] = field(default_factory=list)  # under way during the look-ups
    seen: StagedIds = field(default_factory=StagedIds)  # ids that other requests have staged since


async def prepare(service: Service, topic: str, batch: Batch, now_ms: int) -> Prepared:
    """Check a batch and look up its ids, in turns with other requests. Raises if anything is wrong with the batch. The caller
    calls `finish` when the batch was staged or refused."""
    seed = service.engine.folder.seed
    whole, is_new = await asyncio.to_thread(_checked, batch, seed)
    prepared = Prepared(whole, is_new, service.engine.topics.get(topic) if whole.ids is not None else None)
    if prepared.topic is not None:
        prepared.topic.watch_ids(prepared.seen)
        try:
            await _look_up(service, prepared, prepared.topic, now_ms)
            if not all(prepared.is_new):
                prepared.fresh = await asyncio.to_thread(_picked, whole, prepared.is_new)
        except BaseException:
            finish(prepared)
            raise
    return prepared


def _checked(batch: Batch, seed: int) -> tuple[CheckedBatch, list[bool]]:
    """A checked batch, and which of its messages do not repeat the id of one before."""
    whole, met = checked(batch, seed), set[bytes]()
    is_new = [True] * len(batch)
    for i, raw in enumerate(whole.raw_ids):
        if raw:
            is_new[i] = raw not in met
            met.add(raw)
    return whole, is_new


def _picked(whole: CheckedBatch, is_new: list[bool]) -> CheckedBatch:
    """The new messages of a batch."""
    return pick(whole, [i for i, new in enumerate(is_new) if new])


async def _look_up(service: Service, prepared: Prepared, topic: Topic, now_ms: int) -> None:
    ids = prepared.batch.ids or ()
    for at in range(0, len(ids), SLICE):
        await service.turns.turn(topic.name)
        group = topic.pending_commit
        if group is not None and (not prepared.commits or prepared.commits[-1] is not group):
            prepared.commits.append(group)
        try:
            held = topic.held(ids[at : at + SLICE], now_ms)
        except InvalidId as error:
            raise InvalidId(str(error), index=at + int(str(error.details["index"]))) from None
        for i in held:
            prepared.is_new[at + i] = False


def finish(prepared: Prepared) -> None:
    """The batch was staged, or will not be."""
    if prepared.topic is not None:
        prepared.topic.unwatch_ids(prepared.seen)


def stage(service: Service, topic: str, prepared: Prepared, now_ms: int) -> tuple[Topic, Receipt]:
    """Stage the new messages of a prepared batch. Returns the topic, and the receipt of the whole batch."""
    whole, engine, looked_up = prepared.batch, service.engine, prepared.topic
    if looked_up is None or looked_up is not engine.topics.get(topic) or any(group.error for group in prepared.commits):
        return engine.stage(topic, whole, now_ms)
    is_new, fresh = list(prepared.is_new), prepared.fresh or whole
    if repeated := prepared.seen.common(whole.own_ids):
        unsure = [i for i, raw in enumerate(whole.raw_ids) if raw in repeated and is_new[i]]
        if held := looked_up.held([whole.ids[i] for i in unsure], now_ms) if whole.ids and unsure else set():
            for k in held:
                is_new[unsure[k]] = False
            fresh = _picked(whole, is_new)
    finish(prepared)  # its own ids are known
    if all(is_new):
        return engine.stage(topic, replace(whole, are_new=True), now_ms)
    given, rows = list(whole.ids or ()), [i for i, new in enumerate(is_new) if new]
    if rows:
        _, receipt = engine.stage(topic, replace(fresh, are_new=True), now_ms)
        for i, id_ in zip(rows, receipt.ids, strict=True):
            given[i] = id_
    return looked_up, Receipt([id_ or "" for id_ in given], is_new)
