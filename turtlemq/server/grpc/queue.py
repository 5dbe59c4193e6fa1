"""`turtlemq.v1.Queue`: the native service, for clients in any language that move many messages. Its methods, by path.

Batches are columns. Publishing is in `publishing`, subscriptions are in `subscribing`; look-ups and administration are HTTP's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from turtlemq.errors import InvalidFireAt, TooLarge
from turtlemq.index.validate import check_ids
from turtlemq.model import BATCH_MESSAGES_MAX
from turtlemq.server.auth import CHANGE
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.deliveries import Pools, serve
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.publishing import Publishing, Request
from turtlemq.server.grpc.subscribing import Subscription
from turtlemq.server.grpc.topic_watch import TopicWatch
from turtlemq.server.grpc.unary import Handler, unary
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.incoming.times import due_time
from turtlemq.server.request import rules_for

Named, Cancelled, When = (message(f"turtlemq.v1.{name}") for name in ("Named", "Cancelled", "When"))


def methods(context: Context, pools: Pools) -> dict[str, Handler]:
    """All methods of this service, by path."""
    found: dict[str, Handler] = {
        "Publish": unary(Request, partial(_publish, context)),
        "PublishStream": partial(_publish_stream, context),
        "Subscribe": partial(_subscribe, context, pools, TopicWatch(context.service)),
        "Cancel": unary(Named, partial(_cancel, context)),
        "Reschedule": unary(When, partial(_reschedule, context)),
    }
    return {f"/turtlemq.v1.Queue/{name}": handler for name, handler in found.items()}


async def _publish(context: Context, call: Call, asked: Any) -> Any:
    return await Publishing(context, call).one(asked)


async def _publish_stream(context: Context, call: Call) -> None:
    await Publishing(context, call).stream()


async def _subscribe(context: Context, pools: Pools, watch: TopicWatch, call: Call) -> None:
    await serve(context, pools, call, Subscription(context, pools, watch, call))


async def _cancel(context: Context, call: Call, asked: Any) -> Any:
    """Cancel messages that sleep, are ready or wait for another attempt."""
    context.check_writable()
    if len(asked.ids) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids are cancelled at once")
    count, missed = await context.cancel(call, asked.topic, list(asked.ids))
    return Cancelled(cancelled=count, missed=missed)


async def _reschedule(context: Context, call: Call, asked: Any) -> Any:
    """Give a sleeper another due time."""
    context.check_writable()
    topic, now = context.topic(call, asked.topic, CHANGE), now_ms()
    check_ids([asked.id])
    if not asked.due_ms:
        raise InvalidFireAt("due_ms is missing: the new due time in epoch milliseconds")
    due_ms = due_time(None, asked.due_ms, now)
    check_due(due_ms, now, rules_for(context.config, context.settings(topic)))
    staged_in, found = context.service.engine.stage_reschedule(topic, asked.id, now, due_ms=due_ms)
    await context.service.commit(staged_in)
    context.note(call, "reschedule", topic, 1, asked.id)
    await context.confirmed()
    return When(topic=topic, id=asked.id, due_ms=found.due_ms)
