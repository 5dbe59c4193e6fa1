"""aiohttp's private and undocumented names: every use of one is in this file.

They buy speed (answers without a `web.Response`, remembered routes) and limits that aiohttp does not offer (connections, TLS
handshakes). tests/test_aiohttp_internals.py states what each name is relied on for and fails when an upgrade changes it.
Policy does not live here: limits, refusals and byte budgets are in `listen`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence, Sized
from functools import partial
from typing import Any, Protocol, cast

from aiohttp import ClientRequest, ClientSession, web
from aiohttp.helpers import rfc822_formatted_time as http_date
from aiohttp.http_exceptions import HttpProcessingError

from turtlemq.segment.buffers import Buffer

__all__ = [
    "AiohttpConnection",
    "AiohttpSite",
    "Dispatcher",
    "HttpProcessingError",
    "QuietRequest",
    "cut",
    "http_date",
    "open_connections",
    "send_once",
    "set_remote",
]

ROUTES_MAX = 1_000  # paths whose handler is remembered
PIECE_BYTES = 1 << 20  # of a long answer that are written at once
JOIN_BYTES = 4 << 10  # a smaller body is copied behind its head, so that both are sent with one system call


class Dispatcher:
    """Calls the handler of a request. Finding it takes aiohttp 40 µs, so the match is remembered for paths without a query."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self.cache: dict[tuple[str, str], tuple[web.UrlMappingMatchInfo, Callable[[web.Request], Awaitable[Any]]]] = {}

    async def __call__(self, request: web.Request) -> Any:
        """The answer to a request."""
        path = request.method, request.raw_path
        known = self.cache.get(path)
        if known is None or "Expect" in request.headers:
            try:
                return await self._app._handle(request)
            finally:
                self._remember(path, request._match_info)
        request._match_info = known[0]
        return await known[1](request)

    def _remember(self, path: tuple[str, str], match: web.UrlMappingMatchInfo | None) -> None:
        if match is None or match.http_exception is not None or "?" in path[1]:
            return
        handler: Callable[..., Awaitable[Any]] = match.handler
        for middleware in reversed(self._app.middlewares):
            handler = partial(middleware, handler=handler)
        if len(self.cache) >= ROUTES_MAX:
            self.cache.clear()
        self.cache[path] = match, handler


class AiohttpConnection(web.RequestHandler):
    """A connection whose requests go to a `Dispatcher`, and which can send an answer without a `web.Response`."""

    __slots__ = ()

    def __init__(self, server: web.Server, dispatcher: Dispatcher, limits: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **limits)
        self._request_handler = cast(Any, dispatcher)

    async def send(self, head: bytes, body: Sequence[Buffer], timeout_s: float) -> bool:
        """Write an answer, and wait until the system has taken most of it. False: the client is gone, or was too slow. `body`: in
        one piece or several, of any size."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return False
        pieces = body if len(body) == 1 and len(body[0]) <= PIECE_BYTES else cut(body)
        if len(pieces) == 1 and len(pieces[0]) < JOIN_BYTES:
            transport.write(head + pieces[0])
        else:
            transport.writelines((head, *pieces[:1]))
        if not self._paused and len(pieces) <= 1:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain_helper()
                for piece in pieces[1:]:
                    await asyncio.sleep(0)  # the system takes a piece in up to 3 ms: other requests go on
                    if transport.is_closing():
                        return False
                    transport.write(piece)
                    await self._drain_helper()
            return True
        except TimeoutError:
            transport.abort()  # closing would wait for the rest to be sent
        except ConnectionError:
            pass
        return False


def cut(body: Sequence[Buffer]) -> list[Buffer]:
    """Pieces of at most PIECE_BYTES, without a copy.

    >>> [len(piece) for piece in cut([b"", b"abc", bytes(PIECE_BYTES + 1)])]
    [3, 1048576, 1]
    """
    return [memoryview(part)[at : at + PIECE_BYTES] for part in body for at in range(0, len(part), PIECE_BYTES)]


def open_connections(server: web.Server) -> Sized:
    """The open connections, for `len`: `Server.connections` copies them all."""
    return server._connections


def send_once(session: ClientSession) -> None:
    """Turn off a session's own retry of PUT and DELETE, which may send a request twice without notice."""
    session._retry_connection = False


def set_remote(request: web.BaseRequest, address: str) -> None:
    """Let `request.remote` be the address of the client, of a request that another process has passed on."""
    request._cache["remote"] = address


class QuietRequest(ClientRequest):
    """A client's request. The task that sends its body fails beside it if the connection breaks before 100 Continue: the request
    gets the error of its answer, and the event loop would log that of the task as one that was never retrieved."""

    async def write_bytes(self, *args: Any, **options: Any) -> None:
        """Send the body."""
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)
        await super().write_bytes(*args, **options)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class AcceptsConnections(Protocol):
    """Listening sockets. A runner closes them when it ends."""

    sockets: list[socket.socket]

    def close(self) -> None: ...


class AiohttpSite(web.TCPSite):
    """A site that accepts its connections by a listener of the caller."""

    async def listen(self, listener: AcceptsConnections) -> None:
        """Do what `TCPSite.start` does, but with `listener`."""
        await web.BaseSite.start(self)
        self._server = cast(asyncio.AbstractServer, listener)
