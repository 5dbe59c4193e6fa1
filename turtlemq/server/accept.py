"""Accepting connections: every accepted socket is counted until it is closed, also in its TLS handshake and while it is refused.

At the limit no socket is accepted: clients wait in the backlog of the kernel until another one is closed. So connections never
take the descriptors that are set aside for files. The event loop's own `create_server` accepts without a limit, and its protocols
do not hear of handshakes that fail.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from turtlemq.server import logs
from turtlemq.server.descriptors import Shares
from turtlemq.server.metrics.meter import SocketFigures

# Variables of a replica process: descriptors of the sockets that its supervisor has bound, for HTTP and for gRPC
LISTENING, LISTENING_GRPC = "TURTLEMQ_LISTENING", "TURTLEMQ_LISTENING_GRPC"
ACCEPTED_AT_ONCE = 64  # before other events get their turn
EXHAUSTED_S = 1.0  # pause after the system had no descriptor or memory for another socket
HANDSHAKES_MIN = 16  # TLS handshakes that one host may always have under way; more: a quarter of all connections
REFUSE_S = 1  # a refused connection stays open so long, so that its first request can be answered
SHUTDOWN_S = 5.0  # time for a client to end TLS
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
Factory = Callable[[Callable[[], None]], asyncio.Protocol]  # takes the function to be called when the connection is lost


@dataclass(frozen=True, slots=True)
class Policy:
    """How sockets are served: `serve` makes the protocol of a connection, `refuse` that of one beyond the limit."""

    serve: Factory
    refuse: Factory
    tls: ssl.SSLContext | None
    handshake_s: float
    refuse_s: float


class Listener:
    """Listening sockets, and the count of those accepted."""

    def __init__(self, sockets: list[socket.socket], policy: Policy, shares: Shares, figures: SocketFigures) -> None:
        self.sockets = sockets
        self._policy, self._shares, self._figures = policy, shares, figures
        self._loop = asyncio.get_running_loop()
        self._served = 0  # among the open ones, those that are no refusals
        self._handshakes: Counter[str] = Counter()  # by host
        self._tasks: set[asyncio.Task[None]] = set()  # connections that are not made yet
        self._is_paused, self._is_closed = True, False
        figures.most = shares.connections + shares.refusals
        self._resume()

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Use another certificate for connections to come."""
        self._policy = replace(self._policy, tls=tls)

    def close(self) -> None:
        """Accept no more; connections that are not made yet are closed."""
        self._pause()
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for listening in self.sockets:
            listening.close()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            for listening in self.sockets:
                self._loop.remove_reader(listening)

    def _resume(self) -> None:
        if self._is_paused and not self._is_closed and self._figures.open < self._figures.most:
            self._is_paused = False
            for listening in self.sockets:
                self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._figures.open >= self._figures.most:
                self._figures.pauses += 1
                self._pause()
                return
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._figures.pauses += 1
                logs.warning("accept_failed", error=error)
                self._pause()
                self._loop.call_later(EXHAUSTED_S, self._resume)
                return
            accepted.setblocking(False)
            if listening.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._begin(accepted, str(address[0]) if address else "")

    def _begin(self, accepted: socket.socket, host: str) -> None:
        most = max(HANDSHAKES_MIN, self._shares.connections // 4)
        if self._policy.tls is not None and self._handshakes[host] >= most:
            self._figures.refused += 1
            accepted.close()
            return
        is_served = self._served < self._shares.connections
        self._figures.open += 1
        self._served += is_served
        self._figures.refused += not is_served
        task = self._loop.create_task(self._make(accepted, host, is_served))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, accepted: socket.socket, host: str, is_served: bool) -> None:
        """Make the connection of an accepted socket: a TLS handshake, if the server has TLS."""
        policy, is_open = self._policy, True

        def lost() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._figures.open -= 1
                self._served -= is_served
                self._resume()

        protocol = (policy.serve if is_served else policy.refuse)(lost)
        handshake_s = policy.handshake_s if is_served else policy.refuse_s
        tls = {} if policy.tls is None else {"ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": SHUTDOWN_S}
        self._handshakes[host] += 1
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=policy.tls, **tls)
        except BaseException as error:
            lost()
            if not isinstance(error, OSError):  # else the client is gone, or speaks no TLS
                raise
        finally:
            self._handshakes[host] -= 1
            if not self._handshakes[host]:
                del self._handshakes[host]


def inherited(descriptors: str) -> list[socket.socket]:
    """Listening sockets that the supervisor of a node has bound, from their numbers with commas between them. They stay open when
    these are closed: a process that replaces itself finds them again."""
    sockets = [socket.socket(fileno=os.dup(int(number))) for number in descriptors.split(",") if number]
    for listening in sockets:
        listening.setblocking(False)
    return sockets


async def bind(host: str, port: int, backlog: int, *, shared: bool = False) -> list[socket.socket]:
    """Sockets that listen on every address of a host. `shared`: other sockets may listen on the same port, and the system deals
    out the connections."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(listening := socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(backlog)
            listening.setblocking(False)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets
