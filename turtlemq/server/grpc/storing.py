"""Storing scheduled messages of a stream: all of one read are one batch for each topic, and are answered after its commit.

A client of the Hyper Delay Server reads no errors, so a refusal is a lost task: the stream is read no further where rates or
byte budgets say "wait", see `admission`. A bad message is refused alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turtlemq.errors import InvalidFireAt, InvalidMessage, TurtleError
from turtlemq.index.validate import check_batch, check_expiry
from turtlemq.model import Batch, Priority
from turtlemq.server.auth import PRODUCE
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import ExceedsMaxDelay
from turtlemq.server.fair_turns import Slices
from turtlemq.server.grpc.admission import admitted
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.statuses import retry_after_ms
from turtlemq.server.handlers.produce import HEAVY_BYTES
from turtlemq.server.request import rules_for

COMPRESSION = "compression"  # the header that keeps the mark of a payload
_LZ4 = 1
_PRIORITY_MAX = max(Priority)
ServerMessage, AckResponse, ErrorResponse = (
    message(f"delay.{name}") for name in ("ServerMessage", "AckResponse", "ErrorResponse")
)


def refusal(error: TurtleError, id_: str = "", route_key: str = "") -> bytes:
    """An error about one message, as a stream tells it."""
    told = ErrorResponse(
        code=error.code, message=str(error), id=id_, route_key=route_key, retry_after_ms=max(0, retry_after_ms(error))
    )
    encoded: bytes = ServerMessage(error=told).SerializeToString()
    return encoded


def mark_of(headers: dict[str, str]) -> int:
    """The number of a payload's compression mark.

    >>> mark_of({}), mark_of({"compression": "lz4"}), mark_of({"compression": "7"}), mark_of({"compression": "br"})
    (0, 1, 7, 0)
    """
    text = headers.get(COMPRESSION, "")
    if text == "lz4":
        return _LZ4
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


class Storing:
    """Stores the scheduled messages of one stream."""

    def __init__(self, context: Context, call: Call, prefix: str) -> None:
        self._context, self._call, self._prefix = context, call, prefix
        self._service, self._config = context.service, context.config

    async def store(self, route_key: str, requests: Sequence[Any]) -> list[bytes]:
        """Store messages of one topic. Returns the answer to each, in their order."""
        topic, answers = self._prefix + route_key, dict[int, bytes]()
        try:
            self._context.topic(self._call, topic, PRODUCE, may_create=True)
            await self._admitted(topic, requests)
            await self._store(topic, route_key, requests, answers)
        except TurtleError as error:
            self._service.meter.rejected[error.code] += 1
            told = {i: refusal(error, request.id, route_key) for i, request in enumerate(requests) if i not in answers}
            answers |= told
        try:
            await self._context.confirmed()
        except TurtleError as error:
            answers = {i: refusal(error, request.id, route_key) for i, request in enumerate(requests)}
        return [answers[i] for i in range(len(requests))]

    async def _admitted(self, topic: str, requests: Sequence[Any]) -> None:
        """Return when rate and budgets admit these messages. Raises if they do not in time."""
        size = sum(len(request.payload) for request in requests)
        is_low = all(request.priority == Priority.LOW for request in requests)
        await admitted(self._context, self._call, topic, len(requests), size, is_low)
        if size > HEAVY_BYTES or self._service.turns.by_tenant:
            await self._service.turns.turn(topic, size)

    async def _store(self, topic: str, route_key: str, requests: Sequence[Any], answers: dict[int, bytes]) -> None:
        now, rows, due = now_ms(), list[int](), list[int]()
        slices = Slices()
        for i, request in enumerate(requests):
            at_ms = request.fire_at_epoch_ms or now + request.delay_ms
            try:
                if not self._is_late(topic, request, at_ms, now):
                    rows.append(i)
                    due.append(at_ms)
                    continue
                await slices.pause()
                answers[i] = _acknowledged(request.id, at_ms, True, route_key)
            except TurtleError as error:
                self._refuse(i, request, route_key, error, answers)
        if not rows:
            return
        batch = _batch([requests[i] for i in rows], due)
        try:
            staged_in, receipt = self._service.engine.stage(topic, batch, now)
        except TurtleError as error:
            if "index" not in error.details:
                raise
            rows, due = self._singly(rows, due, requests, route_key, answers)
            if not rows:
                return
            staged_in, receipt = self._service.engine.stage(topic, _batch([requests[i] for i in rows], due), now)
        size = sum(map(len, batch.bodies))
        await self._service.commit(staged_in, size)
        self._service.stored(topic, len(receipt), size)
        for i, at_ms, id_, created in zip(rows, due, receipt.ids, receipt.created, strict=True):
            answers[i] = _acknowledged(id_, at_ms, not created, route_key)

    def _is_late(self, topic: str, request: Any, at_ms: int, now: int) -> bool:
        """Whether a message is a late repetition of one that the topic knows. Raises for a due time that is not allowed."""
        if request.priority > _PRIORITY_MAX or request.priority < 0:
            raise InvalidMessage(f"there is no priority {request.priority}")
        rules, grace = rules_for(self._config, self._context.settings(topic)), self._config.grpc_past_grace_ms
        if rules.max_delay_ms and at_ms - now > rules.max_delay_ms:
            raise ExceedsMaxDelay(f"a message may sleep for at most {rules.max_delay_ms / 1000:,.15g} s here")
        if grace < 0 or at_ms >= now - grace:
            return False
        engine = self._service.engine
        if request.id and topic in engine.topics and engine.message(topic, request.id) is not None:
            return True
        raise InvalidFireAt(f"it was due {now - at_ms:,} ms ago; the server's clock is at {now}")

    def _singly(
        self, rows: list[int], due: list[int], requests: Sequence[Any], route_key: str, answers: dict[int, bytes]
    ) -> tuple[list[int], list[int]]:
        """Check messages one by one. Returns the good ones with their due times; the others are refused."""
        good = list[tuple[int, int]]()
        for i, at_ms in zip(rows, due, strict=True):
            try:
                one = _batch([requests[i]], [at_ms])
                check_batch(one)
                check_expiry(one, now_ms())
                good.append((i, at_ms))
            except TurtleError as error:
                self._refuse(i, requests[i], route_key, error, answers)
        return [i for i, _ in good], [at_ms for _, at_ms in good]

    def _refuse(self, i: int, request: Any, route_key: str, error: TurtleError, answers: dict[int, bytes]) -> None:
        self._service.meter.rejected[error.code] += 1
        answers[i] = refusal(error, request.id, route_key)


def _acknowledged(id_: str, at_ms: int, duplicate: bool, route_key: str) -> bytes:
    ack = AckResponse(id=id_, fire_at_epoch_ms=at_ms, duplicate=duplicate, route_key=route_key)
    encoded: bytes = ServerMessage(ack=ack).SerializeToString()
    return encoded


def _batch(requests: Sequence[Any], due: list[int]) -> Batch:
    """Messages as columns; a column without values is None."""
    ttr, flags = [request.ttr_ms for request in requests], [request.priority for request in requests]
    expires = [request.expires_at_epoch_ms or None for request in requests]
    headers = [_headers(request) for request in requests]
    return Batch(
        bodies=[request.payload for request in requests],
        due_ms=due,
        ids=[request.id or None for request in requests],
        ttr_ms=ttr if any(ttr) else None,
        flags=flags if any(flags) else None,
        expires_ms=expires if any(expires) else None,
        headers=headers if any(headers) else None,
    )


def _headers(request: Any) -> dict[str, str] | None:
    mark, headers = request.compression, dict(request.headers)
    if mark:
        headers[COMPRESSION] = "lz4" if mark == _LZ4 else str(mark)
    return headers or None
