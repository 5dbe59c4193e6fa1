"""Admission of a producer's messages on a stream: where a rate or a byte budget says "wait", the stream is read no further.

The client is slowed down by HTTP/2's own window, for up to PAUSE_S; then its messages are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import PAUSE_S, Context
from turtlemq.server.grpc.statuses import retry_after_ms


def admit(context: Context, call: Call, topic: str, count: int, size: int, is_low: bool = False) -> None:
    """Admit messages of a call into a topic; `is_low`: all are of low priority. Raises `RateLimited`, `Overloaded` or
    `NotEnoughReplicas`."""
    context.check_writable()
    context.service.admit(size)
    service, settings = context.service, context.settings(topic)
    if settings.rate_produce_per_s or service.flow.client_rate or service.tenants is not None:
        service.throttle(topic, settings, context.client_of(call), count, size, is_low)


async def admitted(
    context: Context,
    call: Call,
    topic: str,
    count: int,
    size: int,
    is_low: bool,
    before_pause: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Return when rate and budgets admit these messages. Raises if they do not within PAUSE_S."""
    await context.until_writable()
    begun = perf_counter()
    while True:
        try:
            admit(context, call, topic, count, size, is_low)
            return
        except (RateLimited, Overloaded) as error:
            pause_s = max(0.001, retry_after_ms(error) / 1000)
            if perf_counter() - begun + pause_s > PAUSE_S or call.ended:
                raise
            if before_pause is not None:
                await before_pause()
            await asyncio.sleep(pause_s)
            context.figures.paused_s["rate" if isinstance(error, RateLimited) else "overload"] += pause_s
