"""Answers of daily work, which are written without aiohttp's responses, and paths that are remembered: no client sees it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.harness.server_process import Server, running
from turtlemq.server import auth, front, listen, trace
from turtlemq.server.config import Config
from turtlemq.server.outgoing.reply import Reply
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.request import SERVICE
from turtlemq.server.service import Service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("reply") / "d") as one:
        yield one


def read_answer(stream: socket.socket) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and body of the next answer, and not a byte more."""
    head, body = b"", b""
    while not head.endswith(b"\r\n\r\n"):
        head += stream.recv(1) or pytest.fail(f"no answer but {head!r}")
    status, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < (size := int(headers.get("content-length", 0))):
        body += stream.recv(size - len(body)) or pytest.fail(f"only {body!r} of {size} bytes")
    return status, headers, body


def request(path: str, body: bytes, version: str = "1.1", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    ("version", "header", "stays"),
    [
        ("1.1", "X-Request-Id: mine", True),
        ("1.1", "Connection: close", False),
        ("1.0", "X-Request-Id: mine", False),
        ("1.0", "Connection: keep-alive", True),
    ],
)
def test_every_kind_of_client_is_answered(server: Server, version: str, header: str, stays: bool) -> None:
    """HTTP/1.0 wants to be told that a connection stays open, 1.1 that it does not."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        stream.sendall(request("/v1/topics/kinds/messages", b'{"body":1}', version, header))
        status, headers, body = read_answer(stream)
        assert status.endswith("201 Created"), status
        assert status.startswith(f"HTTP/{version}") or version == "1.0"
        assert json.loads(body)["created"] == 1
        assert headers["content-type"] == "application/json"
        assert headers["x-request-id"] == "mine" if "mine" in header else headers["x-request-id"]
        assert "date" in headers
        assert headers.get("connection") == {("1.1", False): "close", ("1.0", True): "keep-alive"}.get((version, stays))
        if stays:
            stream.sendall(request("/v1/topics/kinds/fetch", b"{}", version, header))
            assert read_answer(stream)[0].endswith("200 OK")
        else:
            assert stream.recv(1) == b"", "it was closed"


@pytest.mark.parametrize(("version", "header"), [("1.1", "X: y"), ("1.1", "Connection: close"), ("1.0", "X: y")])
def test_a_large_answer_is_whole_for_every_kind_of_client(server: Server, version: str, header: str) -> None:
    topic = f"large-{version}-{header[0]}"
    sent = [{"id": str(n), "body": str(n) * 600_000} for n in range(5)]
    server.put(topic, *sent)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        stream.sendall(request(f"/v1/topics/{topic}/fetch", b'{"wait": 5}', version, header))
        status, headers, body = read_answer(stream)
        assert status.endswith("200 OK"), status
        assert int(headers["content-length"]) == len(body) > 3_000_000
        assert "transfer-encoding" not in headers
    assert [{"id": m["id"], "body": m["body"]} for m in json.loads(body)["messages"]] == sent


def test_requests_sent_without_waiting_are_answered_in_their_order(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        sent = [request("/v1/topics/many/messages", b'{"body":1,"id":"m%d"}' % n) for n in range(20)]
        stream.sendall(b"".join(sent))
        data = b""
        while data.count(b'"durable"') < 20:
            data += stream.recv(1 << 16) or pytest.fail("it was closed")
        assert [line.partition(b'"')[0] for line in data.split(b'"ids":["')[1:]] == [b"m%d" % n for n in range(20)]


def test_a_wish_to_speak_something_else_is_passed_over(server: Server) -> None:
    """The connection goes on as it was, with the bytes sent behind that request too."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        asked = request("/v1/topics/up/messages", b"", "1.1", "Connection: upgrade", "Upgrade: websocket")
        stream.sendall(asked + request("/v1/topics/up/messages", b'{"body":1}'))
        assert read_answer(stream)[0].startswith("HTTP/1.1 400")
        assert read_answer(stream)[0].endswith("201 Created")
        stream.sendall(request("/v1/topics/up/fetch", b"{}", "1.1", "Connection: upgrade", "Upgrade: websocket"))
        assert read_answer(stream)[0].endswith("200 OK")
        stream.sendall(request("/v1/topics/up/fetch", b"{}"))
        assert read_answer(stream)[0].endswith("200 OK")


def test_a_remembered_path_still_knows_expect_methods_and_queries(server: Server) -> None:
    path = "/v1/topics/known/messages"
    for _ in range(2):
        assert server.call("POST", path, {"body": 1}).status == 201
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        whole = request(path, b'{"body":2}', "1.1", "Expect: 100-continue")
        stream.sendall(whole[:-10])
        assert read_answer(stream)[0] == "HTTP/1.1 100 Continue"
        stream.sendall(whole[-10:])
        assert read_answer(stream)[0].endswith("201 Created")
    assert server.call("GET", f"{path}?limit=1").status == 200
    assert server.call("PUT", path).status == 405
    assert server.call("POST", "/v1/topics/known/nothing", {}).status == 404
    for _ in range(2):
        assert server.call("POST", "/v1/topics/-/messages", {"body": 1}).status == 400, "what it names is looked at each time"


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
@pytest.mark.parametrize("goes", ["slow", "gone"])
def test_what_cannot_be_sent_is_undone(monkeypatch: pytest.MonkeyPatch, goes: str) -> None:
    """A fetch's messages go back if its client does not take them, or is not there any more."""
    monkeypatch.setattr(front, "ANSWER_S", 0.2 if goes == "slow" else 20)
    monkeypatch.setattr(front, "SLOWEST", 1 << 40)

    async def story() -> None:
        undone = asyncio.Event()

        async def large(request: web.Request) -> Reply:
            request[trace.REQUEST_ID] = "x"
            return Reply(b"x" * (64 << 20), undo=undone.set)

        app = web.Application()
        app[auth.AUTH], app[SERVICE] = auth.Auth(), Service()
        app.router.add_get("/", large)  # type: ignore[arg-type]
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(100)
        assert not undone.is_set()
        if goes == "gone":
            writer.transport.abort()
        await undone.wait()
        writer.close()
        await runner.cleanup()

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
@pytest.mark.parametrize("kind", ["reply", "response"])
def test_long_polls_are_served_when_a_large_answer_was_taken(kind: str) -> None:
    """While answers fill their byte budget no long poll is answered, so the end of a large answer must look after them."""

    async def story() -> int:
        service, body = Service(), b"x" * (2 << 20)
        service.flow = FlowControl(held_bytes_max=1 << 20)
        served = asyncio.Event()
        service.answer_polls_soon = lambda *topics: served.set()  # type: ignore[method-assign]

        async def large(request: web.Request) -> web.Response | Reply:
            request[trace.REQUEST_ID] = "x"
            return Reply(body) if kind == "reply" else web.Response(body=body)

        app = web.Application()
        app[auth.AUTH], app[SERVICE] = auth.Auth(), service
        app.router.add_get("/", large)  # type: ignore[arg-type]
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(body))
        await served.wait()
        writer.close()
        await runner.cleanup()
        return service.flow.answer_bytes.bytes

    assert asyncio.run(asyncio.wait_for(story(), 20)) == 0


def test_bson_is_sent_where_the_accept_header_prefers_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for accept, kind in [
            ("application/bson", "application/bson"),
            ("application/BSON", "application/bson"),
            ("text/html, application/bson;q=0.8", "application/bson"),
            ("application/bson;q=0", "application/json"),
            ("application/json, application/bson; q=0.1", "application/json"),
            ("*/*", "application/json"),
        ]:
            answer = server.call("POST", "/v1/topics/t/groups/g/fetch", {}, headers={"Accept": accept})
            assert answer.headers["Content-Type"].split(";")[0] == kind, accept


def test_an_answer_that_counts_copies_stays_in_one_piece() -> None:
    """Several pieces would be sent with a system call and a turn of the event loop each."""
    reply = Reply(b'{"ids":["x"],"durable":"fsync"}', 201, counts_copies=True)
    reply.add_copies(2)
    assert [bytes(piece) for piece in reply.pieces] == [b'{"ids":["x"],"durable":"fsync","copies":2}']
    assert reply.size == len(reply.pieces[0])
