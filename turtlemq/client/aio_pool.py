"""The connections of a client for asyncio: a pool of them, which sends a request to the server that should get it.

Belongs to one event loop. Connections of a loop that has ended are not used again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from turtlemq.client import clock
from turtlemq.client.aio_connection import AsyncConnection
from turtlemq.client.errors import Closed, ConnectionFailed
from turtlemq.client.http_answers import Head
from turtlemq.client.options import CONNECT_S, IDLE_S_MAX, Options, Sink, at_once, has_messages, later, prefix_of, question_of
from turtlemq.client.partitions import Partitions
from turtlemq.client.sending import Send
from turtlemq.client.topology import Target
from turtlemq.client.wire import Answer

if TYPE_CHECKING:
    import ssl


class AsyncPool:
    """Keep-alive connections to the servers of one client."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._closed = False
        self._idle: dict[str, list[tuple[float, AsyncConnection]]] = {}  # by address, the one that was used last behind
        self._servers = options.servers()
        self._context: ssl.SSLContext | None = None

    async def send(self, step: Send, sink: Sink | None = None) -> Answer:
        """Send a request once. The body of a success goes to `sink`."""
        if (question := self._servers.question(clock.now_s())) is not None:
            step = await self._ask(question, step)
        request, servers = step.request, self._servers
        if request.at_once is None:
            return await self._send(servers.target(clock.now_s(), request.path, request.ids), step, sink)
        if (target := servers.fetch_target(clock.now_s(), request.path)) is not None:
            answer = await self._send(target, at_once(step), sink)
            if has_messages(answer):
                return answer
        target = servers.target(clock.now_s(), request.path)
        answer = await self._send(target, step, sink)
        servers.partitions.fetched(target.topic, request.path, has_messages(answer))
        return answer

    @property
    def partitions(self) -> Partitions:
        """The topics with partitions that were met."""
        return self._servers.partitions

    def close(self) -> None:
        """Close idle connections now, others when their requests end."""
        self._closed = True
        for _, connection in (one for idle in self._idle.values() for one in idle):
            connection.close()
        self._idle.clear()

    async def _ask(self, target: Target, step: Send) -> Send:
        """Ask for the topology of the cluster. Returns the step, with the time that is left."""
        begun = clock.now_s()
        with contextlib.suppress(ConnectionFailed):
            self._servers.learn(await self._send(target, question_of(step), None), clock.now_s())
        return later(step, clock.now_s() - begun)

    async def _send(self, target: Target, step: Send, sink: Sink | None) -> Answer:
        connection, keep = self._take(target.url), False
        try:
            if connection is None:
                connection = await self._connect(target.url, step.timeout_s)
            head, body = await self._exchange(target, connection, step, sink)
            keep, answer = head.keeps, Answer(head.status, head.headers, body)
            self._servers.answered(target, answer, clock.now_s())
            return answer
        except (OSError, ValueError) as error:
            if sink is not None and error is sink.error:
                raise
            self._servers.failed(target, clock.now_s())
            failed = ConnectionFailed(f"no answer from {target.url}: {str(error) or type(error).__name__}")
            failed.was_sent = connection is not None
            raise failed from error
        finally:
            if connection is not None:
                self._give_back(target.url, connection, keep)

    async def _exchange(self, target: Target, connection: AsyncConnection, step: Send, sink: Sink | None) -> tuple[Head, bytes]:
        request = step.request
        headers = self.options.headers(step, target.direct, target.partition)
        path = prefix_of(target.url) + request.path
        return await connection.exchange(request.method, path, headers, request.body, step.timeout_s, sink)

    async def _connect(self, url: str, timeout_s: float) -> AsyncConnection:
        parts = urlsplit(url)
        assert parts.hostname is not None
        context, port = None, parts.port or 80
        if parts.scheme == "https":
            context, port = self._tls(), parts.port or 443
        limit_s = min(timeout_s, CONNECT_S) if self._servers.has_others else timeout_s
        return await AsyncConnection.connect(parts.hostname, port, context, limit_s)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            import ssl

            self._context = ssl.create_default_context(cafile=self.options.cacert)
        return self._context

    def _take(self, url: str) -> AsyncConnection | None:
        """An idle connection, or None."""
        if self._closed:
            raise Closed("this client was closed; make a new one")
        idle = self._idle.get(url)
        while idle:
            since, connection = idle.pop()
            if clock.now_s() - since < IDLE_S_MAX and connection.is_usable:
                return connection
            connection.close()
        return None

    def _give_back(self, url: str, connection: AsyncConnection, keep: bool) -> None:
        if self._closed or not keep or not connection.is_usable:
            connection.close()
            return
        idle = self._idle.setdefault(url, [])
        if idle and clock.now_s() - idle[0][0] >= IDLE_S_MAX:
            idle.pop(0)[1].close()
        idle.append((clock.now_s(), connection))
