"""The client for asyncio, over aiohttp: the same calls, following the same rules. A client belongs to one event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar

import aiohttp
from yarl import URL

from turtlemq.client import calls, sending
from turtlemq.client.errors import ClientError, Closed, ConnectionFailed
from turtlemq.client.options import REQUEST_BYTES, REQUEST_COUNT, Options, Sink, new_id, outgoing_all
from turtlemq.client.results import DeadLetter, Look
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.wire import Answer, Priority, Request, error_of, outgoing, path

T = TypeVar("T")
P = ParamSpec("P")
PIECE = 1 << 16


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A call as a method that sends it and awaits the answer."""

    @functools.wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(sending.ask(build(*args, **kwargs), self.options.rules))

    method.__doc__ = (build.__doc__ or "").partition("\n\n    >>>")[0]
    return method


class AsyncClient:
    """`Client` for asyncio: the same arguments and calls.

    >>> async def story():
    ...     async with AsyncClient(client.options.urls) as mine:
    ...         await mine.put("orders", {"close": 17}, id="order-17")
    ...         return [message.body for message in await mine.fetch("orders", wait=5)]
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
        self.options = Options.of(url, token, cacert, timeout, try_timeout, user_agent)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._at = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections. Calls that come later are a `Closed`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Closed("this client was closed; make a new one")
        if self._session is None:
            secure: Any = True
            if self.options.cacert is not None:
                import ssl

                secure = ssl.create_default_context(cafile=self.options.cacert)
            connector = aiohttp.TCPConnector(limit=0, ssl=secure, keepalive_timeout=50)
            self._session = aiohttp.ClientSession(connector=connector)
            self._session._retry_connection = False  # it would try again by itself, and nobody would know that it did
        return self._session

    async def send(self, step: Send, sink: Sink | None = None) -> Answer:
        """Ask once. A good body goes into `sink`, if there is one."""
        session, request = self._open(), step.request
        url = self.options.urls[self._at]
        whole = None if sink is not None else step.timeout_s
        timeout = aiohttp.ClientTimeout(total=whole, sock_connect=step.timeout_s, sock_read=step.timeout_s)
        headers = self.options.headers(step)
        target = URL(url + request.path, encoded=True)  # it is quoted already
        try:
            async with session.request(
                request.method, target, data=request.body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if sink is not None and response.status < 300:
                    async for piece in response.content.iter_chunked(PIECE):
                        sink.write(piece)
                body = await response.read() if sink is None or response.status >= 300 else b""
                if response.status in (502, 503):
                    self._turn(url)
                return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if sink is not None and error is sink.error:
                raise
            self._turn(url)
            raise ConnectionFailed(f"no answer from {url}: {str(error) or type(error).__name__}") from error

    def _turn(self, url: str) -> None:
        """This server failed: the next one, please."""
        if self.options.urls[self._at] == url:
            self._at = (self._at + 1) % len(self.options.urls)

    async def run(self, steps: Flow[T]) -> T:
        """Do what a flow asks for, and return what it returns."""
        try:
            step = next(steps)
            while True:
                try:
                    done = await (asyncio.sleep(step.seconds) if isinstance(step, Pause) else self.send(step))
                except ConnectionFailed as failed:
                    step = steps.throw(failed)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()

    async def put(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        delay: float | None = None,
        due: int | datetime | None = None,
        ttr: float | None = None,
        priority: Priority | None = None,
        expires: int | datetime | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Store one message, durably, and return its id. See `Client.put`."""
        now = self.options.rules.now()
        more = {"delay": delay, "due": due, "ttr": ttr, "priority": priority, "expires": expires}
        out = outgoing(body, new_id() if id is None else id, **more, headers=headers, put_s=now)  # type: ignore[arg-type]
        return (await self.run(sending.store(topic, [out], self.options.rules))).ids[0]

    async def put_many(self, topic: str, messages: Iterable[Any], *, together: bool = False) -> list[str]:
        """Store many messages and return their ids. See `Client.put_many`."""
        batch = outgoing_all(messages, self.options.rules.now())
        ids: list[str] = []
        for part in [batch] if together and batch else sending.chunks(batch, REQUEST_COUNT, REQUEST_BYTES):
            try:
                ids += (await self.run(sending.store(topic, part, self.options.rules))).ids
            except ClientError as error:
                raise sending.after(error, len(ids)) from error
        return ids

    fetch = _method(calls.fetch)
    ack = _method(calls.ack)
    extend = _method(calls.extend)
    get = _method(calls.get)
    cancel = _method(calls.cancel)
    cancel_many = _method(calls.cancel_many)
    reschedule = _method(calls.reschedule)
    browse_page = _method(calls.browse_page)
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
    dead_page = _method(calls.dead_page)
    dead_summary = _method(calls.dead_summary)
    requeue_dead = _method(calls.requeue_dead)
    delete_dead = _method(calls.delete_dead)

    async def browse(self, topic: str, **which: Any) -> AsyncIterator[Look]:
        """All sleepers by due time, a page at a time; arguments as of `browse_page`."""
        cursor: str | None = None
        while True:
            page = await self.browse_page(topic, **which, cursor=cursor)
            for found in page.messages:
                yield found
            cursor = page.cursor
            if cursor is None:
                return

    async def dead(self, topic: str, **which: Any) -> AsyncIterator[DeadLetter]:
        """All dead letters in the order in which they died, a page at a time; arguments as of `dead_page`."""
        cursor: str | None = None
        while True:
            page = await self.dead_page(topic, **which, cursor=cursor)
            for found in page.messages:
                yield found
            cursor = page.cursor
            if cursor is None:
                return

    async def export_dead(self, topic: str, file: BinaryIO) -> None:
        """Write all dead letters into a file, a JSON object a line. See `Client.export_dead`."""
        step = Send(Request("GET", path(topic, "dead", "export")), self.options.rules.try_s, None)
        answer = await self.send(step, Sink(file))
        if answer.status >= 300:
            raise error_of(answer)
