"""The client for programs with threads: connections, and every call as a method. Thread-safe: one client is enough."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from turtlemq.client import calls, sending
from turtlemq.client.errors import ClientError, Closed, ConnectionFailed
from turtlemq.client.options import REQUEST_BYTES, REQUEST_COUNT, Options, Sink, new_id, outgoing_all
from turtlemq.client.results import DeadLetter, Look
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.wire import Answer, Priority, Request, error_of, outgoing, path

T = TypeVar("T")
P = ParamSpec("P")
IDLE_S_MAX = 50.0  # servers close connections that were idle for longer
IDLE_MAX = 64
PIECE = 1 << 20

Connection = http.client.HTTPConnection
Watch = Callable[[Connection | None], None]


class Pool:
    """Connections to the servers of one client, used again while they are fresh. Thread-safe."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.closed = False
        self._lock = threading.Lock()
        self._idle: list[tuple[float, str, Connection]] = []
        self._at = 0
        self._context: Any = None
        forked.add(self)

    def _take(self) -> tuple[str, Connection]:
        with self._lock:
            if self.closed:
                raise Closed("this client was closed; make a new one")
            url = self.options.urls[self._at]
            while self._idle:
                since, where, connection = self._idle.pop()
                if where == url and time.monotonic() - since < IDLE_S_MAX:
                    return url, connection
                connection.close()
        return url, self._connect(url)

    def _connect(self, url: str) -> Connection:
        parts = urlsplit(url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port)
        if self._context is None:
            import ssl

            self._context = ssl.create_default_context(cafile=self.options.cacert)
        return http.client.HTTPSConnection(parts.hostname, parts.port, context=self._context)

    def _give(self, url: str, connection: Connection) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < IDLE_MAX:
                self._idle.append((time.monotonic(), url, connection))
                return
        connection.close()

    def _turn(self, url: str) -> None:
        """This server failed: the next one, please."""
        with self._lock:
            if self.options.urls[self._at] == url:
                self._at = (self._at + 1) % len(self.options.urls)

    def send(self, step: Send, *, watch: Watch | None = None, sink: Sink | None = None) -> Answer:
        """Ask once. `watch` gets the connection while it is in use; a good body goes into `sink`, if there is one."""
        url, connection = self._take()
        kept = False
        try:
            if watch is not None:
                watch(connection)
            response, body = self._exchange(url, connection, step, sink)
            kept = not response.will_close
            if response.status in (502, 503):
                self._turn(url)
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if sink is not None and error is sink.error:
                raise
            self._turn(url)
            raise ConnectionFailed(f"no answer from {url}: {str(error) or type(error).__name__}") from error
        finally:
            if watch is not None:
                watch(None)
            if kept:
                self._give(url, connection)
            else:
                connection.close()

    def _exchange(
        self, url: str, connection: Connection, step: Send, sink: Sink | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        end = time.monotonic() + step.timeout_s
        connection.timeout = step.timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(step.timeout_s)
        request = step.request
        target = urlsplit(url).path + request.path
        connection.request(request.method, target, request.body, self.options.headers(step))
        response = connection.getresponse()
        pieces: list[bytes] = []
        while piece := response.read(PIECE):
            if sink is not None and response.status < 300:
                sink.write(piece)
            else:
                pieces.append(piece)
            if time.monotonic() > end and sink is None:
                raise TimeoutError("the answer takes too long")
        if response.length:  # read() with a size does not tell
            raise http.client.IncompleteRead(b"", response.length)
        return response, b"".join(pieces)

    def close(self) -> None:
        """Close what is idle, and what is in use as soon as it is not."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()

    def begin_anew(self) -> None:
        """In a forked child: the sockets are the parent's, and the lock may be held by a thread that only the parent has."""
        self._lock, self._idle = threading.Lock(), []


class Forked(Protocol):
    """Something with locks, sockets or threads, of which a forked child has none."""

    def begin_anew(self) -> None:
        """In the child."""


forked: weakref.WeakSet[Forked] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(forked):
        one.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def stop_sending(connection: Connection) -> None:
    """End a long poll: the server sees that nobody waits, and what it has sent already can still be read."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_WR)


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A call as a method that sends it and waits."""

    @functools.wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(sending.ask(build(*args, **kwargs), self.options.rules))

    method.__doc__ = (build.__doc__ or "").partition("\n\n    >>>")[0]
    return method


class Client:
    """A client of a server, or of several that share the work.

    url: its address, or several; else TURTLEMQ_URL, else this machine. token: else TURTLEMQ_TOKEN. cacert: a file with the
    certificates to trust; else TURTLEMQ_CACERT. timeout: seconds for a call with all its tries; try_timeout: for each of them, to
    which a long poll adds its wait.

    >>> client.put("orders", {"close": 17}, id="order-17")
    'order-17'
    >>> [message.body for message in client.fetch("orders", wait=5)]
    [{'close': 17}]
    >>> client.ack("orders", ["order-17"]).acked
    1
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
        self.pool = Pool(self.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections. Calls that come later are a `Closed`."""
        self.pool.close()

    def run(self, steps: Flow[T], *, pause: Callable[[float], object] = time.sleep, watch: Watch | None = None) -> T:
        """Do what a flow asks for, and return what it returns."""
        try:
            step = next(steps)
            while True:
                try:
                    done = pause(step.seconds) if isinstance(step, Pause) else self.pool.send(step, watch=watch)
                except ConnectionFailed as failed:
                    step = steps.throw(failed)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            steps.close()

    # Producing

    def put(
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
        """Store one message, durably. Returns its id. A `Producer` gathers many of these into batches, which is much faster.

        body: bytes, or anything that JSON can say. delay: seconds from now; due: a datetime or epoch milliseconds.
        """
        now = self.options.rules.now()
        more = {"delay": delay, "due": due, "ttr": ttr, "priority": priority, "expires": expires}
        out = outgoing(body, new_id() if id is None else id, **more, headers=headers, put_s=now)  # type: ignore[arg-type]
        return self.run(sending.store(topic, [out], self.options.rules)).ids[0]

    def put_many(self, topic: str, messages: Iterable[Any], *, together: bool = False) -> list[str]:
        """Store many messages, bodies or `NewMessage`s, and return their ids.

        They go in requests of 10,000 messages and 16 MiB; with `together` in one, whatever its size: all are stored, or none. An
        error has the `index` of the first bad message, and `stored` says how many before it are stored.

        >>> client.put_many("orders", [b"a", NewMessage(body={"b": 1}, id="b", delay=60)])[1]
        'b'
        """
        batch = outgoing_all(messages, self.options.rules.now())
        parts = [batch] if together and batch else sending.chunks(batch, REQUEST_COUNT, REQUEST_BYTES)
        ids: list[str] = []
        for part in parts:
            try:
                ids += self.run(sending.store(topic, part, self.options.rules)).ids
            except ClientError as error:
                raise sending.after(error, len(ids)) from error
        return ids

    # Calls

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

    def browse(self, topic: str, **which: Any) -> Iterator[Look]:
        """All sleepers by due time, a page at a time; arguments as of `browse_page`.

        >>> _ = client.put_many("orders", [NewMessage(body=i, id=str(i), delay=60 + i) for i in range(5)])
        >>> [found.id for found in client.browse("orders", limit=2)]
        ['0', '1', '2', '3', '4']
        """
        cursor: str | None = None
        while True:
            page = self.browse_page(topic, **which, cursor=cursor)
            yield from page.messages
            cursor = page.cursor
            if cursor is None:
                return

    def dead(self, topic: str, **which: Any) -> Iterator[DeadLetter]:
        """All dead letters in the order in which they died, a page at a time; arguments as of `dead_page`."""
        cursor: str | None = None
        while True:
            page = self.dead_page(topic, **which, cursor=cursor)
            yield from page.messages
            cursor = page.cursor
            if cursor is None:
                return

    def export_dead(self, topic: str, file: BinaryIO) -> None:
        """Write all dead letters into a file, a JSON object a line, as they come: nothing is held in memory. Not tried again."""
        step = Send(Request("GET", path(topic, "dead", "export")), self.options.rules.try_s, None)
        answer = self.pool.send(step, sink=Sink(file))
        if answer.status >= 300:
            raise error_of(answer)
