"""Publishing of `turtlemq.v1.Queue`: batches as columns, stored through the same path as batches over HTTP.

A batch is stored as a whole or not at all, and answered once it is synced to disk and the copies of a cluster have it. Requests
of a stream that were read together share one group commit; they are answered in their order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from turtlemq.errors import TurtleError
from turtlemq.model import Batch, Receipt
from turtlemq.server.auth import PRODUCE
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.admission import admit, admitted
from turtlemq.server.grpc.batch_columns import decode_slices
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.statuses import retry_after_ms
from turtlemq.server.grpc.unary import decoded
from turtlemq.server.handlers.produce import HEAVY_BYTES, IDS_MAX, is_low_alone
from turtlemq.server.incoming import large_batches
from turtlemq.server.pace import work_of
from turtlemq.server.request import rules_for
from turtlemq.topic.topic import Topic

SERVICE = "turtlemq.v1.Queue"
Request, Reply, Error = (message(f"turtlemq.v1.{name}") for name in ("PublishRequest", "PublishReply", "Error"))


@dataclass(slots=True)
class _Staged:
    """A request whose messages are staged, or that was refused."""

    number: int
    topic: str
    size: int = 0
    staged_in: Topic | None = None
    receipt: Receipt | None = None
    commit: asyncio.Task[TurtleError | None] | None = None  # shared by all that were staged in one topic before it began
    error: TurtleError | None = None


class Publishing:
    """Stores the requests of one call."""

    def __init__(self, context: Context, call: Call) -> None:
        self._context, self._call, self._service = context, call, context.service
        self._staged: list[_Staged] = []  # not answered

    async def one(self, asked: Any) -> Any:
        """The reply to the only request of a call. Raises where its messages were not stored."""
        size, left_s, pace = asked.ByteSize(), self._call.left_s, self._service.flow.pace
        if left_s < math.inf:
            pace.refuse_late(left_s)
        staged = _Staged(asked.number, asked.topic)
        work = pace.begin(size, perf_counter())
        try:
            await self._stage(asked, size, staged, may_wait=False)
            await self._commit([staged])
        finally:
            pace.end(work, perf_counter())
        if staged.error is not None:
            raise staged.error
        return await self._reply(staged)

    async def stream(self) -> None:
        """Serve the requests of a stream until the client sends no more."""
        counts = self._context.figures.messages
        while messages := await self._call.receive():
            for data in messages:
                asked = decoded(Request, data)
                counts[SERVICE, "publish"] += 1
                staged = _Staged(asked.number, asked.topic)
                try:
                    await self._stage(asked, len(data), staged, may_wait=True)
                except TurtleError as error:
                    staged.error = error
                self._staged.append(staged)
            await self._flush()
            await self._call.sendable()

    async def _stage(self, asked: Any, size: int, into: _Staged, may_wait: bool) -> None:
        """Stage the messages of a request. Before anything is awaited, the commits of those before it begin."""
        context, service, topic = self._context, self._service, asked.topic
        check = partial(context.topic, self._call, topic, PRODUCE, may_create=True)
        check()
        if size > HEAVY_BYTES or service.turns.by_tenant:
            self._begin_commits(self._staged)
            await service.turns.turn(topic, size)
        steps = decode_slices(asked.batch, now := now_ms(), rules_for(context.config, context.settings(topic)))
        if size > HEAVY_BYTES:
            batch = await service.turns.finish(steps, topic=topic)
        else:
            batch = _finished(steps)
        is_low = is_low_alone(batch)
        if may_wait:
            await admitted(context, self._call, topic, len(batch), size, is_low, self._flush)
        else:
            if is_low and (left_s := self._call.left_s) < math.inf:
                service.flow.pace.refuse_late(left_s, is_low=True, own=work_of(size))
            admit(context, self._call, topic, len(batch), size, is_low)
        if len(batch) >= large_batches.LARGE:
            self._begin_commits(self._staged)
        into.staged_in, into.receipt = await large_batches.staged(service, topic, batch, size, now, check)
        into.size = size

    async def _flush(self) -> None:
        """Commit all staged requests, and answer them in their order."""
        if not self._staged:
            return
        staged, self._staged = self._staged, []
        await self._commit(staged)
        self._call.send([(await self._reply(one)).SerializeToString() for one in staged])

    def _begin_commits(self, staged: list[_Staged]) -> None:
        """Begin the commit of all that was staged since the last time, one for each topic."""
        sizes, commits = dict[Topic, int](), dict[Topic, asyncio.Task[TurtleError | None]]()
        new = [(one, one.staged_in) for one in staged if one.staged_in is not None and one.commit is None]
        for one, topic in new:
            sizes[topic] = sizes.get(topic, 0) + one.size
        for one, topic in new:
            if topic not in commits:
                commits[topic] = asyncio.create_task(self._committed(topic, sizes[topic]))
            one.commit = commits[topic]

    async def _commit(self, staged: list[_Staged]) -> None:
        """Return when all requests are durable, and the copies have them. A request that was not stored gets its error."""
        self._begin_commits(staged)
        for one in staged:
            if one.commit is not None:
                one.error = await one.commit
        try:
            await self._context.confirmed()
        except TurtleError as error:
            for one in staged:
                one.error = one.error or error

    async def _committed(self, topic: Topic, size: int) -> TurtleError | None:
        """Commit the staged messages of a topic. Returns the error if they were not stored."""
        try:
            await self._service.commit(topic, size)
        except TurtleError as error:
            return error
        return None

    async def _reply(self, staged: _Staged) -> Any:
        """The reply to a request."""
        if staged.error is not None:
            self._service.meter.rejected[staged.error.code] += 1
            return Reply(number=staged.number, error=told(staged.error, staged.topic))
        receipt = staged.receipt
        assert receipt is not None, "it was staged"
        self._service.stored(staged.topic, len(receipt), staged.size)
        reply = Reply(number=staged.number, ids=receipt.ids_of(0, IDS_MAX))
        for at in range(IDS_MAX, len(receipt), IDS_MAX):
            await self._service.turns.turn(staged.topic)
            reply.ids.extend(receipt.ids_of(at, at + IDS_MAX))
        if receipt.duplicates:
            reply.duplicates.extend([i for i, created in enumerate(receipt.created) if not created])
        return reply


def told(error: TurtleError, topic: str = "") -> Any:
    """An error as a stream tells it."""
    index = error.details.get("index")
    found = index if isinstance(index, int) else None
    return Error(code=error.code, message=str(error), index=found, retry_after_ms=max(0, retry_after_ms(error)), topic=topic)


def _finished(steps: Generator[None, None, Batch]) -> Batch:
    """The batch that `steps` returns, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: Batch = done.value
            return batch
