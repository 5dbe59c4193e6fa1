"""The ground of client tests: a server, a network that can be broken at will, and both shells behind one interface."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import pytest

from tests.harness.server_process import Server, running
from turtlemq.client import AsyncConsumer, AsyncProducer, Consumer, Message, Producer

WAIT_S = 30.0  # for events that must happen; nothing takes so long
Mode = Literal["pass", "refuse", "hold", "cut-request", "cut-answer", "cut-half", "answer"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests of a module."""
    with running(tmp_path_factory.mktemp("client") / "data") as one:
        yield one


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic for each test, by its name."""
    return re.sub(r"[^A-Za-z0-9]", "-", request.node.name).strip("-")


class Proxy:
    """A TCP proxy on a port of its own. Its mode decides the fate of each request from then on.

    pass: nothing. refuse: connections end at once. hold: requests wait until the mode changes. cut-request: the connection ends
    when a request has come, and the server does not get it. cut-answer: the server gets it, and the connection ends in place of
    the answer. cut-half: in the middle of the answer's body. answer: `canned` comes in place of an answer. Modes with a count go
    back to `pass` after so many requests.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.requests: list[bytes] = []
        self.canned = b""
        self._mode: Mode = "pass"
        self._left = 0
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept_all, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: Mode, count: int = 0) -> None:
        with self._changed:
            self._mode, self._left = mode, count
            self._changed.notify_all()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(happened, WAIT_S)

    def _act(self) -> Mode:
        with self._changed:
            self._changed.wait_for(lambda: self._mode != "hold")
            mode = self._mode
            if self._left:
                self._left -= 1
                if not self._left:
                    self._mode = "pass"
            return mode

    def _accept_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with self._changed:
            self._open.add(client)
        try:
            while request := _read(client):
                with self._changed:
                    self.requests.append(request)
                    self._changed.notify_all()
                mode = self._act()
                if mode in ("refuse", "cut-request"):
                    return
                if mode == "answer":
                    client.sendall(self.canned)
                    continue
                server = server or socket.create_connection(("127.0.0.1", self.target))
                server.sendall(request)
                answer = _read(server, aside=client)
                if mode == "cut-answer" or not answer:
                    return
                if mode == "cut-half":
                    client.sendall(answer[: -max(1, len(answer.partition(b"\r\n\r\n")[2]) // 2)])
                    return
                client.sendall(answer)
        except OSError:
            pass
        finally:
            with self._changed:
                self._open.discard(client)
            for one in (client, server):
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)  # a close alone waits for pending reads
                    one.close()

    def close(self) -> None:
        self.set("refuse")
        self._listener.close()
        with self._changed:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def _read(source: socket.socket, aside: socket.socket | None = None) -> bytes:
    """One request or answer with a Content-Length, or nothing at the end. If `aside` goes away meanwhile, so does the source."""
    data = b""
    if aside is not None:
        threading.Thread(target=_follow, args=(aside, source), daemon=True).start()
    while b"\r\n\r\n" not in data:
        piece = source.recv(1 << 16)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    parts, missing = [body], (int(found[1]) if found else 0) - len(body)
    while missing > 0:
        piece = source.recv(1 << 20)
        if not piece:
            return b""
        parts.append(piece)
        missing -= len(piece)
    return head + b"\r\n\r\n" + b"".join(parts)


def _follow(client: socket.socket, server: socket.socket) -> None:
    """A client that sends no more while it waits for its answer: tell the server."""
    with contextlib.suppress(OSError):
        if client.recv(1, socket.MSG_PEEK) == b"":
            server.shutdown(socket.SHUT_WR)


@contextmanager
def proxied(target: int) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def canned(status: str, body: bytes = b"{}", *headers: str) -> bytes:
    """An answer in bytes."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# Both shells behind one face


class Handle(Protocol):
    id: str

    def result(self, timeout: float | None = None) -> str: ...


Handling = Callable[[Any], Mapping[str, BaseException | str] | None]


class Shell(Protocol):
    """Makes producers and consumers with blocking methods, around the sync shell or the asyncio shell."""

    def producer(self, topic: str, url: str, **how: Any) -> Any: ...

    def consumer(self, topic: str, handler: Handling, url: str, **how: Any) -> Any: ...


class Threads:
    """The sync shell, as it is."""

    def producer(self, topic: str, url: str, **how: Any) -> Any:
        return Producer(topic, url=url, **how)

    def consumer(self, topic: str, handler: Handling, url: str, **how: Any) -> Any:
        return Consumer(topic, handler, url=url, **how)


class Loop:
    """The async shell, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def do(self, work: Any, timeout: float | None = WAIT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def producer(self, topic: str, url: str, **how: Any) -> Any:
        async def make() -> AsyncProducer:
            return AsyncProducer(topic, url=url, **how)

        return _Blocking(self, self.do(make()))

    def consumer(self, topic: str, handler: Handling, url: str, **how: Any) -> Any:
        async def handle(some: Any) -> Any:
            return await asyncio.to_thread(handler, some)

        async def make() -> AsyncConsumer:
            return AsyncConsumer(topic, handle, url=url, **how)

        return _Blocking(self, self.do(make()))


class _Blocking:
    """An async producer or consumer whose coroutines are waited for."""

    def __init__(self, shell: Loop, inner: Any) -> None:
        self._shell, self._inner = shell, inner

    def __enter__(self) -> _Blocking:
        self._shell.do(self._inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._shell.do(self._inner.__aexit__(*error))

    def put(self, body: Any, **fields: Any) -> Handle:
        put = self._shell.do(self._inner.put(body, **fields))

        async def done() -> str:
            return str(await put)

        class Waiting:
            id = put.id

            @property
            def created(_) -> bool | None:  # noqa: N805
                created: bool | None = put.created
                return created

            def result(_, timeout: float | None = None) -> str:  # noqa: N805
                return str(self._shell.do(done(), timeout))

        return Waiting()

    def holds(self, message: Message) -> bool:
        return bool(self._inner.holds(message))

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._inner.counts)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return lambda *args, **kwargs: self._shell.do(method(*args, **kwargs))


@pytest.fixture(params=["threads", "asyncio"])
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    if request.param == "threads":
        yield Threads()
        return
    loop = Loop()
    yield loop
    loop.close()


class Log:
    """The actions of handlers; `until` waits for them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.seen: list[Any] = []

    def add(self, what: Any) -> None:
        with self.changed:
            self.seen.append(what)
            self.changed.notify_all()

    def until(self, happened: Callable[[list[Any]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: happened(self.seen), WAIT_S), self.seen


def settled(server: Server, topic: str, **wanted: int) -> None:
    """Wait until the stats of a topic are these."""
    end = time.monotonic() + WAIT_S
    while True:
        stats = server.ok("GET", f"/v1/topics/{topic}")["stats"]
        if all(stats[name] == value for name, value in wanted.items()):
            return
        assert time.monotonic() < end, (stats, wanted)
        time.sleep(0.02)
