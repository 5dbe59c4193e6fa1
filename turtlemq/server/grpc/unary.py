"""Calls with one request: decoding of the request, and encoding of one answer or a stream of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.statuses import Garbage

Handler = Callable[[Call], Awaitable[None]]


def decoded(kind: Any, data: bytes) -> Any:
    """A message of a kind. Raises `Garbage` if the bytes are none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Garbage(f"this is no {kind.DESCRIPTOR.full_name}: {error}") from None


async def _request(call: Call, kind: Any) -> Any:
    messages = await call.receive()
    if len(messages) != 1:
        raise Garbage(f"this method takes one request, not {len(messages)}")
    return decoded(kind, messages[0])


def unary(kind: Any, answer: Callable[[Call, Any], Awaitable[Any]]) -> Handler:
    """A method with one request and one answer."""

    async def handle(call: Call) -> None:
        call.is_unary = True
        call.send([(await answer(call, await _request(call, kind))).SerializeToString()])

    return handle


def streamed(kind: Any, answers: Callable[[Call, Any], AsyncIterator[list[Any]]]) -> Handler:
    """A method with one request and a stream of answers, which are made in lists. A slow reader slows the making."""

    async def handle(call: Call) -> None:
        async for page in answers(call, await _request(call, kind)):
            await call.sendable()
            call.send([one.SerializeToString() for one in page])

    return handle
