"""Listening for clients: TLS, and limits on connections, request heads and the time that a client takes to read an answer.

Also the loud warning where a server without tokens can be reached from other machines. The parts of aiohttp that this builds on
are in `aiohttp_internals`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from aiohttp import HttpVersion11, web

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server import logs, trace
from turtlemq.server.accept import LISTENING, Listener, Policy, bind, inherited
from turtlemq.server.aiohttp_internals import AiohttpConnection, AiohttpSite, Dispatcher, open_connections
from turtlemq.server.auth import AUTH, networks_of
from turtlemq.server.config import Config
from turtlemq.server.descriptors import LIMIT_MAX, Shares, shares_of
from turtlemq.server.errors import Overloaded
from turtlemq.server.incoming.body import SLOWEST
from turtlemq.server.media_types import JSON
from turtlemq.server.metrics.meter import SocketFigures
from turtlemq.server.outgoing.reply import Answered, Reply, encode, error_fields
from turtlemq.server.request import SERVICE

BACKLOG = 4_096  # connections beyond it are tried again after 1 s, 3 s, 7 s, …: a crowd of clients would start slowly
KEEPALIVE_S = 75  # time for the next request head to arrive, after the connection or the last answer
LINGER_S = 5  # time for reading the rest of a refused body, so that the client sees the answer
HANDSHAKE_S = 10  # time for a TLS handshake
ANSWER_S = 30  # time for a client to read a large answer, and a second more for each 64 KiB of it
_GONE = "the handler is closed"  # uvloop's error for a connection that was lost, although it does not call it closing
ANSWER_SMALL_BYTES = 64 << 10  # a smaller answer fits into the socket's buffers: no timeout, no byte budget
REFUSE_S = 1  # a refused connection stays open so long, so that its first request can be answered
HEAD_LINE_BYTES, HEAD_FIELD_BYTES, HEAD_FIELDS = 8_190, 8_190, 100


_LIMITS: dict[str, Any] = {
    "access_log": None,
    "keepalive_timeout": KEEPALIVE_S,
    "lingering_time": LINGER_S,
    "auto_decompress": False,  # `incoming.decompress` does it, and refuses truncated bodies
    "max_line_size": HEAD_LINE_BYTES,
    "max_field_size": HEAD_FIELD_BYTES,
    "max_headers": HEAD_FIELDS,
}


def runner_for(app: web.Application, drain_s: float) -> web.AppRunner:
    """A runner for the application, with limits on request heads. At its end, requests under way get `drain_s`."""
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=drain_s, **_LIMITS)


def tls_of(config: Config) -> ssl.SSLContext | None:
    """The TLS context, version 1.2 at least; None if no certificate is configured. Raises `InvalidArgument` for bad files."""
    if not config.tls_cert:
        return None
    for name, file in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key)):
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise InvalidArgument(f"{name}: {file} cannot be read: {error.strerror or error}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (ssl.SSLError, InvalidArgument) as error:
        reason = "the key has a password; store it without" if isinstance(error, InvalidArgument) else str(error)
        raise InvalidArgument(
            f"tls_cert {config.tls_cert} and tls_key {config.tls_key} are no certificate and its key, as PEM: {reason}"
        ) from None
    return context


def _no_password() -> str:
    raise InvalidArgument("a key with a password")  # otherwise OpenSSL asks for it on the terminal


# Connections


class Connection(AiohttpConnection):
    """A client's connection: refuses requests that are no HTTP in the shape of every error, and limits the time of an answer."""

    __slots__ = ("_allows", "_lost")

    def __init__(
        self, server: web.Server, dispatcher: Dispatcher, allows: Callable[[str], bool], lost: Callable[[], None]
    ) -> None:
        super().__init__(server, dispatcher, _LIMITS)
        self._allows, self._lost = allows, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. A client that is not allowed in gets REFUSE_S to send a request and read its refusal."""
        super().connection_made(transport)
        if not self._allows((transport.get_extra_info("peername") or ("",))[0]):
            asyncio.get_running_loop().call_later(REFUSE_S, transport.close)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End, and give the place to another connection."""
        super().connection_lost(exc)
        self._lost()

    async def finish_response(
        self, request: web.BaseRequest, resp: Answered, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, and count its bytes while it is sent. Returns the answer, and whether the client is gone."""
        if not isinstance(resp, Reply):
            return await self._finish_counted(request, resp, start_time)
        lost, answered = True, cast(web.StreamResponse, resp)  # aiohttp reads its `keep_alive` only
        service = cast(web.Request, request).app[SERVICE]
        size = 2 * resp.size  # `undo` holds the messages that the body was made from
        service.flow.answer_bytes.add(size)
        try:
            if request.keep_alive and request.version == HttpVersion11 and "Upgrade" not in request.headers:
                lost = not await self.send(resp.head(request), resp.pieces, ANSWER_S + resp.size / SLOWEST)
            else:
                answered, lost = await self._finish(request, resp.as_response(), start_time)
            return answered, lost
        finally:
            service.answer_sent(size)
            if lost and resp.undo is not None:
                resp.undo()

    async def _finish_counted(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response of aiohttp. Only a large one, as a listing may be, counts against the byte budget."""
        if (size := resp.content_length or 0) < ANSWER_SMALL_BYTES:
            return await self._finish(request, resp, start_time)
        service = cast(web.Request, request).app[SERVICE]
        service.flow.answer_bytes.add(size)
        try:
            return await self._finish(request, resp, start_time)
        finally:
            service.answer_sent(size)

    async def _finish(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Let aiohttp send an answer. A client that does not read a large one in time is cut off."""
        if isinstance(resp, web.HTTPExpectationFailed):  # raised before any handler runs
            resp = _refused(request, InvalidArgument("the only Expect that is understood here is 100-continue"), resp.status)
        size = resp.content_length or 0
        try:
            if size < ANSWER_SMALL_BYTES:  # it fits into the buffers of the system
                return await super().finish_response(request, resp, start_time)
            async with asyncio.timeout(ANSWER_S + size / SLOWEST):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if (transport := self.transport) is not None:
                transport.abort()  # closing would wait for the rest to be sent
            return resp, True
        except RuntimeError as error:
            if _GONE not in str(error):
                raise
            return resp, True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request head that is no HTTP. Raises `ConnectionResetError` if the client is gone: no failure."""
        if isinstance(exc, ConnectionError) or _GONE in str(exc):
            raise ConnectionResetError("the client is gone") from exc
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        return _refused(request, InvalidArgument(f"this is no HTTP request that can be read here: {message or exc}"), 400)


def _refused(request: web.BaseRequest, error: TurtleError, status: int) -> web.Response:
    """The answer to a request that is refused before it reaches the application."""
    error.details["request_id"] = request[trace.REQUEST_ID] = name = trace.new_id()
    response = web.Response(status=status, body=encode(error_fields(error)), content_type=JSON, headers={trace.HEADER: name})
    response.force_close()
    return response


class RefusedConnection(asyncio.Protocol):
    """A connection beyond `max_connections`: its first request is answered with 429, then it is closed."""

    def __init__(self, rejected: Counter[str], lost: Callable[[], None]) -> None:
        self._rejected, self._lost = rejected, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(REFUSE_S, self._transport.close)

    def data_received(self, data: bytes) -> None:
        if not self._transport.is_closing():
            error = Overloaded("the server has as many connections as max_connections allows", retry_after_ms=1_000)
            body = encode(error_fields(error))
            head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
            self._rejected[error.code] += 1
            self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._lost()


class Site(AiohttpSite):
    """The listening socket, with a limit on the number of connections."""

    def __init__(self, runner: web.AppRunner, config: Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, config.host, config.port, ssl_context=tls)
        self._app_runner, self._config, self._tls, self._allows = runner, config, tls, runner.app[AUTH].allows
        self.dispatcher, self._service = Dispatcher(runner.app), runner.app[SERVICE]
        self.shares = shares_of(config.max_connections)
        self._listener: Listener | None = None  # once it listens

    async def start(self) -> None:
        """Listen."""
        server, dispatcher, allows, meter = self._app_runner.server, self.dispatcher, self._allows, self._service.meter
        assert server is not None, "the runner is set up"
        self._service.connections = open_connections(server).__len__
        policy = Policy(
            serve=lambda lost: Connection(server, dispatcher, allows, lost),
            refuse=lambda lost: RefusedConnection(meter.rejected, lost),
            tls=self._tls,
            handshake_s=HANDSHAKE_S,
            refuse_s=REFUSE_S,
        )
        sockets = inherited(os.environ.get(LISTENING, "")) or await bind(self._config.host, self._config.port, BACKLOG)
        self._listener = Listener(sockets, policy, self.shares, meter.sockets)
        await self.listen(self._listener)

    def accept_siblings(self, listening: socket.socket) -> Listener:
        """Accept connections of other processes of this server: all of them, without TLS. The caller closes the listener."""
        server, dispatcher = self._app_runner.server, self.dispatcher
        assert server is not None, "the runner is set up"

        def serve(lost: Callable[[], None]) -> Connection:
            return Connection(server, dispatcher, lambda _: True, lost)

        shares = Shares(connections=LIMIT_MAX, refusals=1, files=0)
        return Listener([listening], Policy(serve, serve, None, HANDSHAKE_S, REFUSE_S), shares, SocketFigures())

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Use another certificate for connections to come."""
        self._tls = tls
        if self._listener is not None:
            self._listener.use_tls(tls)


# Warnings


def warn_if_open(config: Config, host: str) -> None:
    """Warn on standard error and in the log if other machines can reach a server without tokens, or tokens travel without TLS."""
    if _is_loopback(host):
        return
    outside = [network for network in networks_of(config.allowed_hosts) if not network.is_loopback]
    if config.tokens:
        if outside and not config.tls_cert:
            logs.warning("tokens_in_the_clear", host=host, hint="without tls_cert and tls_key tokens can be read on the way")
        return
    whom = "everybody" if "*" in config.allowed_hosts else ", ".join(map(str, outside)) or "this machine only, so far"
    logs.warning("open_to_all", host=host, allowed_hosts=",".join(config.allowed_hosts), tokens=0)
    lines = (
        f"This server listens on {host}, beyond this machine, and asks for no token.",
        f"allowed_hosts admits: {whom}.",
        "Every admitted client can read, write and delete all messages.",
        "Make tokens with `turtlemq token NAME`, or listen on 127.0.0.1. See docs/CONFIGURATION.md.",
    )
    bar = "!" * 100
    logs.plain("\n".join([bar, *(f"!!  {line}" for line in lines), bar]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
