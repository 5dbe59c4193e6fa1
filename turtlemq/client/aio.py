"""Client for asyncio: the calls of `Client` as coroutines. Belongs to one event loop.

The requests themselves are in `calls`, retries in `sending`, connections in `aio_pool`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar, Unpack

from turtlemq.client import (
    calls,
    client_calls,
    clock,
    dead_calls,
    operator_calls,
    past_calls,
    schedule_calls,
    sending,
    topic_calls,
    tracing,
    transaction_calls,
)
from turtlemq.client.aio_pool import AsyncPool
from turtlemq.client.arguments import describe_method
from turtlemq.client.errors import ClientError
from turtlemq.client.options import Options, Sink, new_id, outgoing_messages
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.results import DeadLetter, MessageView, StoredId, StoredIds, Transacted
from turtlemq.client.retry_budget import RETRIES
from turtlemq.client.schedule_results import Schedule
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.wire import Answer, Request, Seconds, error_of, path

T = TypeVar("T")
P = ParamSpec("P")


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A coroutine method that sends a call and awaits its result."""

    @functools.wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(sending.run_call(build(*args, **kwargs), self.options.policy))

    describe_method(method, build)
    return method


async def wait_until(event: asyncio.Event, end_s: float | None) -> bool:
    """Wait for an event until a time of the client's clock. Returns whether it came."""
    try:
        async with asyncio.timeout(None if end_s is None else max(0.0, end_s - clock.now_s())):
            await event.wait()
        return True
    except TimeoutError:
        return False


class AsyncClient:
    """`Client` for asyncio, with its arguments and calls.

    >>> async def story():
    ...     async with AsyncClient(client.options.urls) as async_client:
    ...         await async_client.put("orders", {"close": 17}, id="order-17")
    ...         return [message.body for message in await async_client.fetch("orders", wait=5)]
    >>> asyncio.run(story())
    [{'close': 17}]
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        cacert: str | None = None,
        timeout: float = 30.0,
        try_timeout: float = 10.0,
        user_agent: str | None = None,
        retries: int = RETRIES,
    ) -> None:
        self.options = Options.from_arguments(url, token, cacert, timeout, try_timeout, user_agent, retries)
        self._pool = AsyncPool(self.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections. Later calls raise `Closed`."""
        self._pool.close()

    def chooser(self, topic: str) -> sending.Choose | None:
        """For producers: a function from ids to partitions of a topic; None if it has none, as far as is known."""
        return self._pool.partitions.chooser(topic)

    async def send(self, step: Send, sink: Sink | None = None) -> Answer:
        """Send a request once. The body of a success goes to `sink`."""
        return await self._pool.send(step, sink)

    async def run(self, flow: Flow[T]) -> T:
        """Perform the steps of a flow. Returns its result."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = await (asyncio.sleep(step.seconds) if isinstance(step, Pause) else self.send(step))
                except ClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    async def put(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        **fields: Unpack[MessageFields],
    ) -> StoredId:
        """Store one message durably. Returns its id. Arguments as of `Client.put`."""
        now = self.options.policy.now()
        out = outgoing_message(body, new_id() if id is None else id, put_s=now, **fields)
        with tracing.sending(topic, [out]):
            stored = await self.run(sending.store_batch(topic, [out], self.options.policy))
        return StoredId(stored[0], stored.created[0], stored.outcomes[0])

    async def put_many(
        self, topic: str, messages: Iterable[Any], *, together: bool = False, if_exists: IfExists | None = None
    ) -> StoredIds:
        """Store many messages and return their ids. Arguments and errors as of `Client.put_many`."""
        batch = outgoing_messages(messages, self.options.policy.now(), if_exists)
        with tracing.sending(topic, batch):
            return await self.run(
                sending.store_all(topic, batch, self.options.policy, together=together, choose=self.chooser(topic))
            )

    async def transaction(
        self,
        topic: str,
        put: Iterable[Any] = (),
        *,
        cancel: Sequence[str] = (),
        reschedule: Mapping[str, Seconds | datetime] | None = None,
        conditions: Mapping[str, str] | None = None,
    ) -> Transacted:
        """`Client.transaction` for asyncio: puts, cancels and reschedules of one topic, all of them or none."""
        now = self.options.policy.now()
        batch = outgoing_messages(put, now)
        call = transaction_calls.transaction(topic, batch, cancel, reschedule or {}, conditions or {}, now)
        return await self.run(sending.run_call(call, self.options.policy))

    fetch = _method(calls.fetch)
    ack = _method(calls.ack)
    fail = _method(calls.fail)
    extend = _method(calls.extend)
    get = _method(past_calls.get)
    find = _method(calls.find)
    cancel = _method(calls.cancel)
    cancel_many = _method(calls.cancel_many)
    reschedule = _method(calls.reschedule)
    retry = _method(calls.retry)
    browse_page = _method(calls.browse_page)
    events = _method(past_calls.events)
    replay = _method(past_calls.replay)
    replays = _method(past_calls.replays)
    replay_state = _method(past_calls.replay_state)
    cancel_replay = _method(past_calls.cancel_replay)
    forecast = _method(topic_calls.forecast)
    topics = _method(topic_calls.topics)
    topic = _method(topic_calls.topic)
    stats = _method(topic_calls.stats)
    configure = _method(topic_calls.configure)
    compact = _method(topic_calls.compact)
    drop_topic = _method(topic_calls.drop_topic)
    place_group = _method(topic_calls.place_group)
    group = _method(topic_calls.group)
    drop_group = _method(topic_calls.drop_group)
    pause = _method(operator_calls.pause)
    resume = _method(operator_calls.resume)
    audit = _method(operator_calls.audit)
    tenants = _method(operator_calls.tenants)
    clock = _method(operator_calls.clock)
    move_clock = _method(operator_calls.move_clock)
    put_schedule = _method(schedule_calls.put_schedule)
    get_schedule = _method(schedule_calls.get_schedule)
    schedule_page = _method(schedule_calls.schedule_page)
    next_times = _method(schedule_calls.next_times)
    trigger_schedule = _method(schedule_calls.trigger_schedule)
    pause_schedule = _method(schedule_calls.pause_schedule)
    resume_schedule = _method(schedule_calls.resume_schedule)
    drop_schedule = _method(schedule_calls.drop_schedule)
    dead_page = _method(dead_calls.dead_page)
    dead_summary = _method(dead_calls.dead_summary)
    requeue_dead = _method(dead_calls.requeue_dead)
    delete_dead = _method(dead_calls.delete_dead)
    register_client = _method(client_calls.register_client)
    registered_clients = _method(client_calls.registered_clients)
    beat_client = _method(client_calls.beat_client)
    rotate_secret = _method(client_calls.rotate_secret)
    drop_client = _method(client_calls.drop_client)

    async def browse(self, topic: str, **filters: Any) -> AsyncIterator[MessageView]:
        """All sleepers by due time, fetched page by page; arguments as of `browse_page`."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.browse_page(topic, **filters, cursor=cursor or None)
            for message in page.messages:
                yield message
            cursor = page.cursor

    async def schedules(self, topic: str, *, limit: int = 1000) -> AsyncIterator[Schedule]:
        """All schedules, those that fire next first, fetched in pages of `limit`."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.schedule_page(topic, limit=limit, cursor=cursor or None)
            for schedule in page.schedules:
                yield schedule
            cursor = page.cursor

    async def dead(self, topic: str, **filters: Any) -> AsyncIterator[DeadLetter]:
        """All dead letters in the order of their deaths, fetched page by page; arguments as of `dead_page`."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.dead_page(topic, **filters, cursor=cursor or None)
            for letter in page.messages:
                yield letter
            cursor = page.cursor

    async def export_dead(self, topic: str, file: BinaryIO) -> None:
        """Write all dead letters into a file, a JSON object a line. They are streamed, so memory stays small; not tried again."""
        step = Send(Request("GET", path(topic, "dead", "export")), self.options.policy.try_timeout_s, None)
        answer = await self.send(step, Sink(file))
        if answer.status >= 300:
            raise error_of(answer)
