"""Listening for clients: TLS, and limits on connections, request heads and the time that a client takes to read an answer.

Also the loud warning where a server without tokens can be reached from other machines. Connections themselves are in
`front`.
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

from aiohttp import web

from turtlemq.errors import InvalidArgument
from turtlemq.server import logs
from turtlemq.server.accept import LISTENING, REFUSE_S, Listener, Policy, bind, inherited
from turtlemq.server.auth import networks_of
from turtlemq.server.config import Config
from turtlemq.server.descriptors import LIMIT_MAX, Shares, shares_of
from turtlemq.server.errors import Overloaded
from turtlemq.server.front import Front
from turtlemq.server.front_desk import Desk
from turtlemq.server.metrics.meter import SocketFigures
from turtlemq.server.outgoing.reply import encode, error_fields
from turtlemq.server.request import SERVICE

BACKLOG = 4_096  # connections beyond it are tried again after 1 s, 3 s, 7 s, …: a crowd of clients would start slowly
KEEPALIVE_S = 75  # time for the next request head to arrive, after the connection or the last answer
LINGER_S = 5  # time for reading the rest of a refused body, so that the client sees the answer
HANDSHAKE_S = 10  # time for a TLS handshake
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


def runner_for(app: web.Application, drain_s: float) -> Runner:
    """A runner for the application, with limits on request heads. At its end, requests under way get `drain_s`."""
    return Runner(app, drain_s)


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


class Runner(web.AppRunner):
    """Runs an application behind the connections of a `Site`."""

    def __init__(self, app: web.Application, drain_s: float) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=drain_s, **_LIMITS)
        self.site: Site | None = None  # once it listens
        self._drain_s = drain_s

    @property
    def addresses(self) -> list[Any]:
        """Where it listens."""
        return [] if self.site is None else [listening.getsockname() for listening in self.site.sockets]

    async def cleanup(self) -> None:
        """Stop listening, and end all connections: requests under way get the time that the runner was made with."""
        if self.site is None:
            await super().cleanup()
        else:
            await asyncio.gather(self.site.end(self._drain_s), super().cleanup())


class Site:
    """The listening sockets, with a limit on the number of connections."""

    def __init__(self, runner: Runner, config: Config, tls: ssl.SSLContext | None) -> None:
        self._runner, self._config, self._tls, self._service = runner, config, tls, runner.app[SERVICE]
        self.shares = shares_of(config.max_connections)
        self._listener: Listener | None = None  # once it listens
        self._desk: Desk | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [] if self._listener is None else self._listener.sockets

    async def start(self) -> None:
        """Listen."""
        server, meter = self._runner.server, self._service.meter
        assert server is not None, "the runner is set up"
        desk = self._desk = Desk(self._runner.app, server, _LIMITS)
        self._service.connections = desk.open.__len__
        policy = Policy(
            serve=lambda lost: Front(desk, lost),
            refuse=lambda lost: RefusedConnection(meter.rejected, lost),
            tls=self._tls,
            handshake_s=HANDSHAKE_S,
            refuse_s=REFUSE_S,
        )
        sockets = inherited(os.environ.get(LISTENING, "")) or await bind(self._config.host, self._config.port, BACKLOG)
        self._listener = Listener(sockets, policy, self.shares, meter.sockets)
        self._runner.site = self

    def accept_siblings(self, listening: socket.socket) -> Listener:
        """Accept connections of other processes of this server: all of them, without TLS. The caller closes the listener."""
        desk = self._desk
        assert desk is not None, "it listens"

        def serve(lost: Callable[[], None]) -> Front:
            return Front(desk, lost, of_sibling=True)

        shares = Shares(connections=LIMIT_MAX, refusals=1, files=0)
        return Listener([listening], Policy(serve, serve, None, HANDSHAKE_S, REFUSE_S), shares, SocketFigures())

    async def end(self, timeout_s: float) -> None:
        """Stop listening, and end all connections."""
        if self._listener is not None and self._desk is not None:
            self._listener.close()
            await self._desk.end(timeout_s)

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
