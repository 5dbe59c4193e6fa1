"""Clients that hold the door of a server: too many connections, slow bodies, endless heads, answers that are not taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from contextlib import ExitStack

import pytest
from aiohttp import web

from tests.harness.guarded_server import narrow
from tests.harness.server_process import Server
from turtlemq.server import auth as guarding
from turtlemq.server import listen, passed
from turtlemq.server.auth import Auth
from turtlemq.server.config import Config
from turtlemq.server.request import SERVICE
from turtlemq.server.service import Service

__all__ = ["narrow"]


def answer_to(server: Server, data: bytes) -> bytes:
    """All that comes back on a connection until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(data)
        out = b""
        while chunk := connection.recv(65_536):
            out += chunk
        return out


def test_a_connection_too_many_is_told_so(narrow: Server) -> None:
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(socket.create_connection(("127.0.0.1", narrow.port), 20))
        refused = narrow.call("GET", "/healthz")
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "OVERLOADED", "1")
        assert refused.json["error"]["retry_after_ms"] == 1000
    end = time.monotonic() + 10
    while narrow.call("GET", "/healthz").status != 200:
        assert time.monotonic() < end, "connections that were closed still count"


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_comes_too_slowly_is_not_waited_for(narrow: Server, head: str) -> None:
    start = "POST /v1/topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = "5\r\n{'bod\r\n" if "chunked" in head else '{"bod'
    out = answer_to(narrow, f"{start}{head}\r\n\r\n{body}".encode())
    assert out.startswith(b"HTTP/1.1 408 ")
    assert b"REQUEST_TIMEOUT" in out
    assert narrow.call("GET", "/v1/topics/slow").status == 404


@pytest.mark.parametrize("body", ["5\r\n{'bod\r\nZZ\r\n", "5\r\ntoo long for five\r\n", "-1\r\n"])
def test_chunks_that_are_none(narrow: Server, body: str) -> None:
    head = "POST /v1/topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    out = answer_to(narrow, f"{head}\r\n\r\n{body}".encode())
    assert out.split(maxsplit=2)[1] == b"400", out
    assert b"INVALID_" in out


def test_a_body_in_pieces_is_read_whole(narrow: Server) -> None:
    pieces = [b'{"body": "', *[b"x" * 10_000 for _ in range(30)], b'"}']
    head = "POST /v1/topics/pieces/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", narrow.port), 20) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 201 ")
    assert len(narrow.fetch("pieces")[0]["body"]) == 300_000


@pytest.mark.parametrize(
    "head",
    [
        "GET /" + "x" * 9_000 + " HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + "x" * 9_000 + "\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: x\r\n" + "".join(f"X{i}: 1\r\n" for i in range(200)) + "\r\n",
    ],
)
def test_heads_are_bounded(narrow: Server, head: str) -> None:
    out = answer_to(narrow, head.encode())
    assert out.split(maxsplit=2)[1] == b"400"
    assert json.loads(out.partition(b"\r\n\r\n")[2])["error"]["code"] == "INVALID_ARGUMENT"


def test_a_client_that_does_not_take_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fetched messages go back then: sending them is cancelled, as if it had gone away."""
    monkeypatch.setattr(passed, "ANSWER_S", 0.2)
    monkeypatch.setattr(passed, "SLOWEST", 1 << 40)
    cancelled = asyncio.Event()

    class Large(web.Response):
        async def write_eof(self, data: bytes = b"") -> None:
            try:
                await super().write_eof(data)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def large(_: web.Request) -> web.Response:
        return Large(body=b"x" * (64 << 20))

    async def story() -> int:
        app = web.Application()
        app[guarding.AUTH], app[SERVICE] = Auth(), Service()
        app.router.add_get("/", large)
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await cancelled.wait()
        size = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 20):
                size += len(chunk)
        writer.close()
        await runner.cleanup()
        return size

    assert asyncio.run(asyncio.wait_for(story(), 30)) < 64 << 20


def test_a_head_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(listen._LIMITS, "keepalive_timeout", 0.3)

    async def story() -> bytes:
        app = web.Application()
        app[guarding.AUTH], app[SERVICE] = Auth(), Service()
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():  # a little more of it all the time
            writer.write(b"X: y\r\n")
            await asyncio.wait([answer], timeout=0.05)
        writer.close()
        await runner.cleanup()
        return answer.result() if answer.exception() is None else b""

    assert asyncio.run(asyncio.wait_for(story(), 30)) == b""
