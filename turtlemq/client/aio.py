"""Client for asyncio, over aiohttp: the calls of `Client` as coroutines. Belongs to one event loop.

The requests themselves are in `calls`, retries in `sending`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar, Unpack

import aiohttp
from yarl import URL

from turtlemq.client import calls, client_calls, clock, dead_calls, operator_calls, sending, tracing, transaction_calls
from turtlemq.client.arguments import describe_method
from turtlemq.client.errors import ClientError, Closed, ConnectionFailed
from turtlemq.client.options import CONNECT_S, Options, Sink, later, new_id, outgoing_messages, question_of
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.results import DeadLetter, MessageView, StoredId, StoredIds, Transacted
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.topology import Target
from turtlemq.client.wire import Answer, Request, Seconds, error_of, path

T = TypeVar("T")
P = ParamSpec("P")
READ_BYTES = 1 << 16


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
    ) -> None:
        self.options = Options.from_arguments(url, token, cacert, timeout, try_timeout, user_agent)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._servers = self.options.servers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections. Later calls raise `Closed`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        """The session, made at the first request, inside the event loop."""
        if self._closed:
            raise Closed("this client was closed; make a new one")
        if self._session is None:
            tls: Any = True
            if self.options.cacert is not None:
                import ssl

                tls = ssl.create_default_context(cafile=self.options.cacert)
            connector = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=50)
            self._session = aiohttp.ClientSession(connector=connector)
            self._session._retry_connection = False  # its own silent retry would bypass the retry policy
        return self._session

    async def send(self, step: Send, sink: Sink | None = None) -> Answer:
        """Send a request once. The body of a success goes to `sink`."""
        if (question := self._servers.question(clock.now_s())) is not None:
            step = await self._ask(question, step)
        return await self._send(self._servers.target(clock.now_s(), step.request.path), step, sink)

    async def _ask(self, target: Target, step: Send) -> Send:
        """Ask for the topology of the cluster. Returns the step, with the time that is left."""
        begun = clock.now_s()
        with contextlib.suppress(ConnectionFailed):
            self._servers.learn(await self._send(target, question_of(step), None), clock.now_s())
        return later(step, clock.now_s() - begun)

    async def _send(self, target: Target, step: Send, sink: Sink | None) -> Answer:
        session, request = self._open_session(), step.request
        total_s = None if sink is not None else step.timeout_s
        connect_s = min(step.timeout_s, CONNECT_S) if self._servers.has_others else step.timeout_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=step.timeout_s)
        headers = self.options.headers(step, target.direct)
        url = URL(target.url + request.path, encoded=True)  # the path is quoted already
        try:
            async with session.request(
                request.method, url, data=request.body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if sink is not None and response.status < 300:
                    async for piece in response.content.iter_chunked(READ_BYTES):
                        sink.write(piece)
                body = await response.read() if sink is None or response.status >= 300 else b""
                answer = Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, body)
                self._servers.answered(target, answer, clock.now_s())
                return answer
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if sink is not None and error is sink.error:
                raise
            self._servers.failed(target, clock.now_s())
            raise ConnectionFailed(f"no answer from {target.url}: {str(error) or type(error).__name__}") from error

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
            return await self.run(sending.store_all(topic, batch, self.options.policy, together=together))

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
    get = _method(calls.get)
    find = _method(calls.find)
    cancel = _method(calls.cancel)
    cancel_many = _method(calls.cancel_many)
    reschedule = _method(calls.reschedule)
    retry = _method(calls.retry)
    browse_page = _method(calls.browse_page)
    events = _method(calls.events)
    forecast = _method(calls.forecast)
    topics = _method(calls.topics)
    topic = _method(calls.topic)
    stats = _method(calls.stats)
    configure = _method(calls.configure)
    compact = _method(calls.compact)
    drop_topic = _method(calls.drop_topic)
    place_group = _method(calls.place_group)
    group = _method(calls.group)
    drop_group = _method(calls.drop_group)
    pause = _method(operator_calls.pause)
    resume = _method(operator_calls.resume)
    audit = _method(operator_calls.audit)
    clock = _method(operator_calls.clock)
    move_clock = _method(operator_calls.move_clock)
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
