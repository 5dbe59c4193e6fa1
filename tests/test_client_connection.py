"""The client's own HTTP: answers in all forms that a server or a proxy may send, and bytes that are none."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import running
from turtlemq.client import AsyncClient, Client
from turtlemq.client.aio_connection import AsyncConnection
from turtlemq.client.aio_pool import AsyncPool
from turtlemq.client.connection import Connection
from turtlemq.client.errors import ConnectionFailed
from turtlemq.client.http_answers import HEAD_BYTES, BrokenAnswer, Head
from turtlemq.client.options import Options
from turtlemq.client.sending import Send
from turtlemq.client.wire import Request


@contextmanager
def serving(*pieces: bytes) -> Iterator[tuple[str, int, list[bytes]]]:
    """A server that reads a request and sends these bytes, then closes. Yields its address, and the request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                heard.append(peer.recv(1 << 20))
                for piece in pieces:
                    peer.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield *server.getsockname()[:2], heard
        thread.join()


@contextmanager
def answering(*pieces: bytes) -> Iterator[tuple[Connection, list[bytes]]]:
    """A blocking connection to a server that answers with these bytes, and the request that it reads."""
    with serving(*pieces) as (host, port, heard), closing(Connection(host, port)) as connection:
        connection.connect(10)
        yield connection, heard


def asked(*pieces: bytes) -> tuple[Head, bytes]:
    with answering(*pieces) as (connection, _):
        connection.send("POST", "/", {}, b"{}", 10)
        head = connection.head()
        return head, b"".join(connection.body())


def asked_by_asyncio(*pieces: bytes) -> tuple[Head, bytes]:
    async def story(host: str, port: int) -> tuple[Head, bytes]:
        connection = await AsyncConnection.connect(host, port, None, 10)
        with closing(connection):
            return await connection.exchange("POST", "/", {}, b"{}", 10)

    with serving(*pieces) as (host, port, _):
        return asyncio.run(story(host, port))


BOTH = pytest.mark.parametrize("ask", [asked, asked_by_asyncio])


OK = b"HTTP/1.1 200 OK\r\n"
Asking = Callable[..., tuple[Head, bytes]]


@BOTH
@pytest.mark.parametrize(
    ("pieces", "body", "keeps"),
    [
        ((OK + b"Content-Length: 2\r\n\r\nab",), b"ab", True),
        ((OK + b"content-LENGTH:2  \r\n\r\na", b"b"), b"ab", True),
        ((OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nab",), b"ab", False),
        ((b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab",), b"ab", False),
        ((b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nab",), b"ab", True),
        ((OK + b"\r\nall ", b"that comes"), b"all that comes", False),
        (
            (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: t\r\n\r\n",),
            b"abc0123456789",
            True,
        ),
        (tuple(bytes([b]) for b in OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"), b"abc", True),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na",), b"a", True),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b"", True),
        ((b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\na",), b"a", True),
        ((OK + b"Content-Length: 1\r\n\r\na and more",), b"a", False),
    ],
)
def test_answers_are_read_in_all_their_forms(pieces: tuple[bytes, ...], body: bytes, keeps: bool, ask: Asking) -> None:
    head, found = ask(*pieces)
    assert (found, head.keeps) == (body, keeps)


@BOTH
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        OK + b"Content-Length: 3\r\n\r\nab",
        OK + b"Content-Length: -3\r\n\r\nab",
        OK + b"Content-Length: 1 1\r\n\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\nx\r\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\nab",
        OK + b"no header\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        OK + b"X: " + b"a" * (2 * HEAD_BYTES),
        bytes(range(256)) * 1_000,
    ],
)
def test_bytes_that_are_no_answer_are_a_broken_connection(data: bytes, ask: Asking) -> None:
    with pytest.raises((BrokenAnswer, ConnectionError)):
        ask(data)


def test_head_and_body_are_sent_together() -> None:
    with answering(OK + b"Content-Length: 0\r\n\r\n") as (connection, heard):
        connection.send("POST", "/v1", {"Accept": "a/b"}, b'{"a":1}', 10)
        assert connection.head().status == 200
        head, _, body = heard[0].partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == b"POST /v1 HTTP/1.1"
        assert {b"Accept: a/b", b"Content-Length: 7", f"Host: {connection.host}".encode()} <= set(head.split(b"\r\n"))
        assert body == b'{"a":1}'


@pytest.mark.parametrize("bad", ["a\r\nX: y", "a\nb", "a\rb", "a b"])
def test_nothing_is_smuggled_into_a_request(bad: str) -> None:
    with answering(b"") as (connection, heard):
        for path, value in ((f"/{bad}", "v"), ("/", bad)):
            if (path, bad) == ("/", "a b"):
                continue
            with pytest.raises(ValueError, match="line end"):
                connection.send("GET", path, {"X": value}, None, 10)
    assert heard == [b""]


# Connections of asyncio


class Peer(asyncio.Protocol):
    """A server that answers each request at once, as the test wishes."""

    answer = OK + b"Content-Length: 2\r\n\r\nab"
    made: ClassVar[list[Peer]] = []
    asked: ClassVar[asyncio.Event]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.requests = 0
        Peer.made.append(self)

    def data_received(self, data: bytes) -> None:
        self.requests += data.count(b" HTTP/1.1")
        self.transport.write(self.answer)
        Peer.asked.set()


@asynccontextmanager
async def peers(answer: bytes = Peer.answer) -> AsyncIterator[tuple[AsyncPool, list[Peer]]]:
    """A pool of connections to a server, and the connections that the server has."""
    Peer.made, Peer.asked, kind = [], asyncio.Event(), type("Answering", (Peer,), {"answer": answer})
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0)
    pool = AsyncPool(Options.from_arguments(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None, 30, 10, None))
    async with server:
        yield pool, Peer.made
        pool.close()
        for peer in Peer.made:
            peer.transport.abort()


def get(timeout_s: float = 9) -> Send:
    return Send(Request("GET", "/v1"), timeout_s, None)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_an_idle_connection_is_used_again() -> None:
    async def story() -> None:
        async with peers() as (pool, made):
            assert [(await pool.send(get())).body for _ in range(3)] == [b"ab"] * 3
            await asyncio.gather(*(pool.send(get()) for _ in range(4)))
            await asyncio.gather(*(pool.send(get()) for _ in range(4)))
            assert len(made) == 4
            assert sum(peer.requests for peer in made) == 11

    run(story())


@pytest.mark.parametrize("ending", ["closed", "reset", "bytes"])
def test_a_connection_that_ended_while_idle_is_not_used(ending: str) -> None:
    async def story() -> None:
        async with peers() as (pool, made):
            await pool.send(get())
            if ending == "bytes":
                made[0].transport.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            else:
                made[0].transport.abort() if ending == "reset" else made[0].transport.close()
            await asyncio.sleep(0.1)
            assert (await pool.send(get())).body == b"ab"
            assert len(made) == 2

    run(story())


def test_a_cancelled_request_closes_its_connection() -> None:
    async def story() -> None:
        async with peers(OK + b"Content-Length: 9\r\n\r\nab") as (pool, _):
            waiting = asyncio.create_task(pool.send(get()))
            await Peer.asked.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not any(pool._idle.values())

    run(story())


@pytest.mark.parametrize("answer", [b"", OK + b"Content-Length: 9\r\n\r\nab"])
def test_an_answer_that_does_not_come_is_an_error(answer: bytes) -> None:
    async def story() -> None:
        async with peers(answer) as (pool, _):
            with pytest.raises(ConnectionFailed, match="takes too long") as met:
                await pool.send(get(0.05))
            assert met.value.was_sent

    run(story())


def test_a_refused_connection_was_not_asked() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
        pool = AsyncPool(Options.from_arguments(url, None, None, 30, 10, None))
        with pytest.raises(ConnectionFailed) as met:
            await pool.send(get())
        assert not met.value.was_sent

    run(story())


def test_a_large_answer_and_a_large_request_arrive_whole() -> None:
    body = bytes(range(256)) * (64 << 10)

    async def story() -> None:
        async with peers(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as (pool, _):
            answer = await pool.send(Send(Request("GET", "/v1"), 20, None))
            assert answer.body == body

    run(story())


def test_proxies_of_the_environment_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, running(tmp_path / "data") as server:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")

        async def story() -> str:
            async with AsyncClient(server.url) as client:
                return await client.put("direct", 1, id="a")

        with Client(server.url) as client:
            assert (client.put("direct", 1, id="b"), asyncio.run(story())) == ("b", "a")
        assert len(Line(server.url).json("fetch", "direct", "--wait", "5")) == 2
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_connections_of_an_ended_event_loop_are_not_used(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        client = AsyncClient(server.url)
        assert [asyncio.run(client.put("loops", b"x", id="a")) for _ in range(2)] == ["a", "a"]
        asyncio.run(client.close())
    del client
    gc.collect()  # sockets of ended loops are closed here, with a warning
