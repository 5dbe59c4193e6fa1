"""The door of the server: TLS, how many connections, how long a head may be and take, and a warning where it stands open."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import HttpVersion11, web

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server import logs, trace
from turtlemq.server.auth import AUTH, networks_of
from turtlemq.server.config import Config
from turtlemq.server.errors import Overloaded
from turtlemq.server.http import SERVICE, SLOWEST
from turtlemq.server.outgoing.reply import Reply

BACKLOG = 4_096  # whoever finds no place in it tries again after 1 s, 3 s, 7 s, …: a crowd would not begin at once
KEEPALIVE_S = 75  # a head must have come within this time after the connection, or after the last answer
LINGER_S = 5  # the rest of a body that was refused is read so long, so that the answer is seen
HANDSHAKE_S = 10  # of TLS
ANSWER_S = 30  # for a client to take a large answer, and a second more for each 64 KiB of it
ANSWER_SMALL_BYTES = 64 << 10
WHOLE_BYTES = 4 << 10  # of a body that is copied behind its head, to be sent in one go
PATHS_MAX = 1_000  # of which is remembered where they lead
REFUSE_S = 1  # a connection that is one too many is held so long, to be told
HEAD_LINE_BYTES, HEAD_FIELD_BYTES, HEAD_FIELDS = 8_190, 8_190, 100
FILES_KEPT = 512  # of the open files that the system grants: for segments, not for connections


_LIMITS: dict[str, Any] = {
    "access_log": None,
    "keepalive_timeout": KEEPALIVE_S,
    "lingering_time": LINGER_S,
    "auto_decompress": False,  # `unpack` does it, and refuses what was cut off
    "max_line_size": HEAD_LINE_BYTES,
    "max_field_size": HEAD_FIELD_BYTES,
    "max_headers": HEAD_FIELDS,
}


def runner_for(app: web.Application, drain_s: float) -> web.AppRunner:
    """The application with limits on what a client may send before anything of ours runs."""
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=drain_s, **_LIMITS)


class Switch:
    """Leads requests to their handlers. Finding the way takes 40 µs, so it is remembered for paths that were asked for before."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self.known: dict[tuple[str, str], tuple[web.UrlMappingMatchInfo, Callable[[web.Request], Awaitable[Any]]]] = {}

    async def __call__(self, request: web.Request) -> Any:
        """The answer to a request."""
        path = request.method, request.raw_path
        found = self.known.get(path)
        if found is None or "Expect" in request.headers:
            try:
                return await self._app._handle(request)
            finally:
                self._remember(path, request._match_info)
        request._match_info = found[0]
        return await found[1](request)

    def _remember(self, path: tuple[str, str], match: web.UrlMappingMatchInfo | None) -> None:
        if match is None or match.http_exception is not None or "?" in path[1]:
            return
        handler: Callable[..., Awaitable[Any]] = match.handler
        for around in reversed(self._app.middlewares):
            handler = partial(around, handler=handler)
        if len(self.known) >= PATHS_MAX:
            self.known.clear()
        self.known[path] = match, handler


def tls_of(config: Config) -> ssl.SSLContext | None:
    """What TLS needs, if certificate and key were given: version 1.2 at least."""
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
        said = "the key has a password; store it without" if isinstance(error, InvalidArgument) else str(error)
        raise InvalidArgument(
            f"tls_cert {config.tls_cert} and tls_key {config.tls_key} are no certificate and its key, as PEM: {said}"
        ) from None
    return context


def _no_password() -> str:
    raise InvalidArgument("a key with a password")  # else OpenSSL would ask for it on the terminal


# Connections


class Handler(web.RequestHandler):
    """A connection. What is no HTTP is refused in the shape of every error; who is not allowed in cannot hold the door open."""

    __slots__ = ("_allows",)

    def __init__(self, server: web.Server, switch: Switch, allows: Callable[[str], bool]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_LIMITS)
        self._allows = allows
        self._request_handler = cast(Any, switch)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        super().connection_made(transport)
        if not self._allows((transport.get_extra_info("peername") or ("",))[0]):
            asyncio.get_running_loop().call_later(REFUSE_S, transport.close)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse | Reply, start_time: float | None
    ) -> tuple[Any, bool]:
        """Send an answer. A client that does not take a large one in time is left alone with what it has."""
        if not isinstance(resp, Reply):
            return await self._finish_held(request, resp, start_time)
        lost, answered = True, cast(Any, resp)
        service = cast(web.Request, request).app[SERVICE]
        size = 2 * len(resp.body)  # with what it was made from, which `undo` keeps
        service.flow.answers.add(size)
        try:
            if request.keep_alive and request.version == HttpVersion11 and "Upgrade" not in request.headers:
                lost = not await self._send(resp.head(request), resp.body)
            else:
                answered, lost = await self._finish(request, resp.usual(), start_time)
            return answered, lost
        finally:
            if service.flow.answers.full:
                service.serve_waiters_soon()  # whoever waits may be answered now
            service.flow.answers.give(size)
            if lost and resp.undo is not None:
                resp.undo()

    async def _finish_held(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """A listing may be as large as what a fetch brings."""
        if (size := resp.content_length or 0) < ANSWER_SMALL_BYTES:
            return await self._finish(request, resp, start_time)
        service = cast(web.Request, request).app[SERVICE]
        service.flow.answers.add(size)
        try:
            return await self._finish(request, resp, start_time)
        finally:
            if service.flow.answers.full:
                service.serve_waiters_soon()  # whoever waits may be answered now
            service.flow.answers.give(size)

    async def _send(self, head: bytes, body: bytes | bytearray | memoryview) -> bool:
        """Whether somebody took it, or the system for him."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return False
        if len(body) < WHOLE_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        if not self._paused:
            return True
        try:
            async with asyncio.timeout(ANSWER_S + len(body) / SLOWEST):
                await self._drain_helper()
            return True
        except TimeoutError:
            transport.abort()  # closing would wait for what is still to be sent
        except ConnectionError:
            pass
        return False

    async def _finish(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # raised before anything of ours runs
            resp = _refused(request, InvalidArgument("the only Expect that is understood here is 100-continue"), resp.status)
        size = resp.content_length or 0
        if size < ANSWER_SMALL_BYTES:  # it fits into the buffers of the system
            return await super().finish_response(request, resp, start_time)
        try:
            async with asyncio.timeout(ANSWER_S + size / SLOWEST):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if (transport := self.transport) is not None:
                transport.abort()  # closing would wait for what is still to be sent
            return resp, True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a head that cannot be read."""
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        return _refused(request, InvalidArgument(f"this is no HTTP request that can be read here: {message or exc}"), 400)


def _refused(request: web.BaseRequest, error: TurtleError, status: int) -> web.Response:
    """A refusal before anything of ours runs."""
    error.details["request_id"] = request[trace.REQUEST_ID] = name = trace.made()
    response = web.Response(status=status, body=_body(error), content_type="application/json", headers={trace.HEADER: name})
    response.force_close()
    return response


def _body(error: TurtleError) -> bytes:
    return msgspec.json.encode({"error": {"code": error.code, "message": str(error), **error.details}})


class Refusal(asyncio.Protocol):
    """A connection that is one too many: it is told so, and closed."""

    def __init__(self, rejected: Counter[str]) -> None:
        self._rejected = rejected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(REFUSE_S, self._transport.close)

    def data_received(self, data: bytes) -> None:
        if not self._transport.is_closing():
            error = Overloaded("the server has as many connections as max_connections allows", retry_after_ms=1_000)
            body = _body(error)
            head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
            self._rejected[error.code] += 1
            self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


class Site(web.TCPSite):
    """Where clients connect: not more of them than allowed."""

    def __init__(self, runner: web.AppRunner, config: Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, config.host, config.port, ssl_context=tls, backlog=BACKLOG)
        self._most, self._allows = connections_of(config), runner.app[AUTH].allows
        self.switch, self._service = Switch(runner.app), runner.app[SERVICE]

    async def start(self) -> None:
        """Listen. As in the parent, but with a count."""
        await web.BaseSite.start(self)
        server, loop, allows = self._runner.server, asyncio.get_running_loop(), self._allows
        assert server is not None
        rejected, switch, connections = self._service.meter.rejected, self.switch, server._connections
        self._service.connections = connections.__len__

        def admitted() -> asyncio.Protocol:
            return Handler(server, switch, allows) if len(connections) < self._most else Refusal(rejected)

        handshake = HANDSHAKE_S if self._ssl_context else None
        self._server = await loop.create_server(
            admitted, self._host, self._port, ssl=self._ssl_context, backlog=self._backlog, ssl_handshake_timeout=handshake
        )


def connections_of(config: Config) -> int:
    """How many connections there may be: as configured, as far as the system grants open files. Asks it for all it grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config.max_connections
    allowed = max(soft - FILES_KEPT, soft // 2)
    logs.info("fewer_connections", max_connections=config.max_connections, open_files=soft, allowed=allowed)
    return allowed


# Warnings


def warn_if_open(config: Config, host: str) -> None:
    """Say loudly where others than this machine can reach a server that asks nobody for a token."""
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
        f"This server listens on {host}, beyond this machine, and asks nobody for a token.",
        f"allowed_hosts admits: {whom}.",
        "Whoever is admitted can read, write and delete every message.",
        "Make tokens with `turtlemq token NAME`, or listen on 127.0.0.1. See docs/CONFIGURATION.md.",
    )
    bar = "!" * 100
    print(bar, *(f"!!  {line}" for line in lines), bar, sep="\n", file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
