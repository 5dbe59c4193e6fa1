"""The connections of a blocking client: a pool of them, which sends a request to the server that should get it. Thread-safe.

It knows nothing of retries and of calls, so that a program which needs neither loads little.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from turtlemq.client import clock
from turtlemq.client.connection import Connection
from turtlemq.client.errors import Closed, ConnectionFailed
from turtlemq.client.http_answers import Head
from turtlemq.client.options import CONNECT_S, IDLE_S_MAX, Options, Sink, at_once, has_messages, later, prefix_of, question_of
from turtlemq.client.partitions import Partitions
from turtlemq.client.sending import Send
from turtlemq.client.topology import Target
from turtlemq.client.wire import Answer

if TYPE_CHECKING:
    import ssl

IDLE_MAX = 64  # idle connections that are kept

ConnectionCallback = Callable[[Connection | None], None]


class Pool:
    """Keep-alive connections to the servers of one client. Thread-safe. `context`: for TLS, instead of one with the certificates
    of the options."""

    def __init__(self, options: Options, context: ssl.SSLContext | None = None) -> None:
        self.options = options
        self.closed = False
        self._lock = threading.Lock()
        self._idle: list[tuple[float, str, Connection]] = []
        self._servers = options.servers()
        self._context = context
        fork_aware.add(self)

    def _take_connection(self, url: str) -> Connection:
        with self._lock:
            if self.closed:
                raise Closed("this client was closed; make a new one")
            while self._idle:
                since, where, connection = self._idle.pop()
                if where == url and clock.now_s() - since < IDLE_S_MAX:
                    return connection
                connection.close()
        return self._connect(url)

    def _connect(self, url: str) -> Connection:
        parts = urlsplit(url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return Connection(parts.hostname, parts.port or 80)
        if self._context is None:
            import ssl

            self._context = ssl.create_default_context(cafile=self.options.cacert)
        return Connection(parts.hostname, parts.port or 443, self._context)

    def _return_connection(self, url: str, connection: Connection) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < IDLE_MAX:
                self._idle.append((clock.now_s(), url, connection))
                return
        connection.close()

    def send(self, step: Send, *, on_connection: ConnectionCallback | None = None, sink: Sink | None = None) -> Answer:
        """Send a request once. `on_connection` gets the connection, and None at the end. The body of a success goes to `sink`."""
        if (question := self._servers.question(clock.now_s())) is not None:
            step = self._ask(question, step)
        request, servers = step.request, self._servers
        if request.at_once is None:
            return self._send(servers.target(clock.now_s(), request.path, request.ids), step, on_connection, sink)
        if (target := servers.fetch_target(clock.now_s(), request.path)) is not None:
            answer = self._send(target, at_once(step), on_connection, sink)
            if has_messages(answer):
                return answer
        target = servers.target(clock.now_s(), request.path)
        answer = self._send(target, step, on_connection, sink)
        servers.partitions.fetched(target.topic, request.path, has_messages(answer))
        return answer

    @property
    def partitions(self) -> Partitions:
        """The topics with partitions that were met."""
        return self._servers.partitions

    def _ask(self, target: Target, step: Send) -> Send:
        """Ask for the topology of the cluster. Returns the step, with the time that is left."""
        begun = clock.now_s()
        with contextlib.suppress(ConnectionFailed):
            self._servers.learn(self._send(target, question_of(step), None, None), clock.now_s())
        return later(step, clock.now_s() - begun)

    def _send(self, target: Target, step: Send, on_connection: ConnectionCallback | None, sink: Sink | None) -> Answer:
        url, connection, keep = target.url, self._take_connection(target.url), False
        try:
            if on_connection is not None:
                on_connection(connection)
            head, body = self._exchange(target, connection, step, sink)
            keep, answer = head.keeps, Answer(head.status, head.headers, body)
            self._servers.answered(target, answer, clock.now_s())
            return answer
        except (OSError, ValueError) as error:
            if sink is not None and error is sink.error:
                raise
            self._servers.failed(target, clock.now_s())
            failed = ConnectionFailed(f"no answer from {url}: {str(error) or type(error).__name__}")
            failed.was_sent = connection.sock is not None
            raise failed from error
        finally:
            if on_connection is not None:
                on_connection(None)
            if keep:
                self._return_connection(url, connection)
            else:
                connection.close()

    def _exchange(self, target: Target, connection: Connection, step: Send, sink: Sink | None) -> tuple[Head, bytes]:
        end = clock.now_s() + step.timeout_s
        if connection.sock is None:
            connection.connect(min(step.timeout_s, CONNECT_S) if self._servers.has_others else step.timeout_s)
        request = step.request
        headers = self.options.headers(step, target.direct, target.partition)
        connection.send(request.method, prefix_of(target.url) + request.path, headers, request.body, step.timeout_s)
        head = connection.head()
        pieces: list[bytes] = []
        for piece in connection.body():
            if sink is not None and head.status < 300:
                sink.write(piece)
            else:
                pieces.append(piece)
            if clock.now_s() > end and sink is None:
                raise TimeoutError("the answer takes too long")
        return head, b"".join(pieces)

    def close(self) -> None:
        """Close idle connections now, others when their requests end."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()

    def reset_after_fork(self) -> None:
        """In a forked child: the sockets belong to the parent, and a thread that the child lacks may hold the lock."""
        self._lock, self._idle = threading.Lock(), []
        if self.options.policy.retries is not None:
            self.options.policy.retries.reset(threading.Lock())


class ForkAware(Protocol):
    """An object with locks, sockets or threads, which a forked child cannot use."""

    def reset_after_fork(self) -> None:
        """Replace them, in the child."""


fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def _after_fork() -> None:
    for instance in list(fork_aware):
        instance.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def end_long_poll(connection: Connection) -> None:
    """End a long poll: the server sees the end of the stream and stops waiting; an answer on its way can still be read."""
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_WR)
