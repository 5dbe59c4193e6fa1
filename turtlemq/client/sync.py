"""Blocking client: a pool of connections, and every call as a method. Thread-safe: a program needs only one.

The requests themselves are in `calls`, retries in `sending`; the asyncio client is in `aio`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack
from urllib.parse import urlsplit

from turtlemq.client import calls, client_calls, clock, dead_calls, operator_calls, sending, tracing, transaction_calls
from turtlemq.client.arguments import describe_method
from turtlemq.client.connection import Connection, Head
from turtlemq.client.errors import ClientError, Closed, ConnectionFailed
from turtlemq.client.options import CONNECT_S, Options, Sink, later, new_id, outgoing_messages, question_of
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.results import DeadLetter, MessageView, StoredId, StoredIds, Transacted
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.topology import Target
from turtlemq.client.wire import Answer, Request, Seconds, error_of, path

T = TypeVar("T")
P = ParamSpec("P")
IDLE_S_MAX = 50.0  # older idle connections may be closed by the server at any moment
IDLE_MAX = 64  # idle connections that are kept

ConnectionCallback = Callable[[Connection | None], None]


@functools.lru_cache(100)
def _prefix(url: str) -> str:
    """The path of a server's address, before that of each request."""
    return urlsplit(url).path


class Pool:
    """Keep-alive connections to the servers of one client. Thread-safe."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.closed = False
        self._lock = threading.Lock()
        self._idle: list[tuple[float, str, Connection]] = []
        self._servers = options.servers()
        self._context: Any = None
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
        return self._send(self._servers.target(clock.now_s(), step.request.path), step, on_connection, sink)

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
            raise ConnectionFailed(f"no answer from {url}: {str(error) or type(error).__name__}") from error
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
        headers = self.options.headers(step, target.direct)
        connection.send(request.method, _prefix(target.url) + request.path, headers, request.body, step.timeout_s)
        head = connection.head()
        pieces: list[bytes] = []
        for piece in connection.body(head):
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


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method that sends a call and waits for its result."""

    @functools.wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(sending.run_call(build(*args, **kwargs), self.options.policy))

    describe_method(method, build)
    return method


class Client:
    """A client of one server, or of several: after a failure it asks the next.

    url: the address of the server, or several; default TURTLEMQ_URL, else this machine. token: default TURTLEMQ_TOKEN.
    cacert: a file with the certificates to trust, default TURTLEMQ_CACERT. timeout: seconds for a call with all its tries.
    try_timeout: seconds for each try; a long poll adds its wait.

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
        self.options = Options.from_arguments(url, token, cacert, timeout, try_timeout, user_agent)
        self.pool = Pool(self.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections. Later calls raise `Closed`."""
        self.pool.close()

    def run(
        self,
        flow: Flow[T],
        *,
        sleep: Callable[[float], object] = time.sleep,
        on_connection: ConnectionCallback | None = None,
    ) -> T:
        """Perform the steps of a flow. Returns its result."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = sleep(step.seconds) if isinstance(step, Pause) else self.pool.send(step, on_connection=on_connection)
                except ClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    # Producing

    def put(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        **fields: Unpack[MessageFields],
    ) -> StoredId:
        """Store one message durably. Returns its id, whose `created` is False if the topic knew it already, and whose `outcome`
        tells whether it was replaced. A `Producer` sends single puts in batches, which is much faster.

        body: bytes, or a JSON value, a dataclass, a pydantic model. fields: `delay` (seconds from now, or a timedelta) or `due`
        (an aware datetime or epoch milliseconds), `ttr`, `priority`, `expires`, `headers`, `if_exists`; see `MessageFields`.

        >>> client.put("orders", {"close": 17}, id="order-17").created
        True
        >>> client.put("orders", {"close": 17}, id="order-17").created
        False
        >>> client.put("orders", {"close": 17}, id="order-17", delay=60, if_exists="replace").outcome
        'replaced'
        """
        now = self.options.policy.now()
        out = outgoing_message(body, new_id() if id is None else id, put_s=now, **fields)
        with tracing.sending(topic, [out]):
            stored = self.run(sending.store_batch(topic, [out], self.options.policy))
        return StoredId(stored[0], stored.created[0], stored.outcomes[0])

    def put_many(
        self, topic: str, messages: Iterable[Any], *, together: bool = False, if_exists: IfExists | None = None
    ) -> StoredIds:
        """Store many messages, bodies or `NewMessage`s, and return their ids; `created` of that list says which are new.

        They go in requests of 16 MiB and 10,000 messages, or 1,000 if one has `if_exists`; with `together` in a single one: all
        are stored, or none. An error has the `index` of the bad message, and `stored`, the number of messages that earlier
        requests have stored. `if_exists`: of the messages that do not say it.

        >>> client.put_many("orders", [b"a", NewMessage(body={"b": 1}, id="b", delay=60)])[1]
        'b'
        """
        batch = outgoing_messages(messages, self.options.policy.now(), if_exists)
        with tracing.sending(topic, batch):
            return self.run(sending.store_all(topic, batch, self.options.policy, together=together))

    def transaction(
        self,
        topic: str,
        put: Iterable[Any] = (),
        *,
        cancel: Sequence[str] = (),
        reschedule: Mapping[str, Seconds | datetime] | None = None,
        conditions: Mapping[str, str] | None = None,
    ) -> Transacted:
        """Put messages, cancel and reschedule sleepers of a topic: all of it, or nothing. Returns the outcome.

        reschedule: by id, an aware datetime or a delay. conditions: by id, the state that the message must be in, `unknown` for
        an id that the topic does not know. A `Conflict` has in its `details` the index of the first `condition` that is not met,
        and the `state`. After a lost answer it may mean that an earlier try was done.

        >>> _ = client.put("orders", b"remind", id="reminder-17", delay=3600)
        >>> client.transaction("orders", [NewMessage(body=b"paid", id="paid-17")], cancel=["reminder-17"]).cancelled
        1
        >>> client.transaction("orders", [b"again"], conditions={"reminder-17": "sleep"})
        Traceback (most recent call last):
        turtlemq.client.errors.Conflict: condition 0: 'reminder-17' is in state cancelled, not sleep; nothing was done
        """
        now = self.options.policy.now()
        batch = outgoing_messages(put, now)
        call = transaction_calls.transaction(topic, batch, cancel, reschedule or {}, conditions or {}, now)
        return self.run(sending.run_call(call, self.options.policy))

    # Calls

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

    def browse(self, topic: str, **filters: Any) -> Iterator[MessageView]:
        """All sleepers by due time, fetched page by page; arguments as of `browse_page`.

        >>> _ = client.put_many("orders", [NewMessage(body=i, id=str(i), delay=60 + i) for i in range(5)])
        >>> [message.id for message in client.browse("orders", limit=2)]
        ['0', '1', '2', '3', '4']
        """
        cursor: str | None = ""
        while cursor is not None:
            page = self.browse_page(topic, **filters, cursor=cursor or None)
            yield from page.messages
            cursor = page.cursor

    def dead(self, topic: str, **filters: Any) -> Iterator[DeadLetter]:
        """All dead letters in the order of their deaths, fetched page by page; arguments as of `dead_page`."""
        cursor: str | None = ""
        while cursor is not None:
            page = self.dead_page(topic, **filters, cursor=cursor or None)
            yield from page.messages
            cursor = page.cursor

    def export_dead(self, topic: str, file: BinaryIO) -> None:
        """Write all dead letters into a file, a JSON object a line. They are streamed, so memory stays small; not tried again."""
        step = Send(Request("GET", path(topic, "dead", "export")), self.options.policy.try_timeout_s, None)
        answer = self.pool.send(step, sink=Sink(file))
        if answer.status >= 300:
            raise error_of(answer)
