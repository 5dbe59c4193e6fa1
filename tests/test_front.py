"""Hot requests are answered by the front, all others by aiohttp behind it: no client can tell, and no head has two meanings."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser

from tests.harness.server_process import Server, running
from tests.harness.talk import Talk, chunked, post
from turtlemq.server import auth, front, listen, trace
from turtlemq.server.config import Config
from turtlemq.server.front_desk import HOT
from turtlemq.server.hot_heads import Heads, hot_routes, plain
from turtlemq.server.outgoing.reply import Reply
from turtlemq.server.request import SERVICE
from turtlemq.server.service import Service

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front") / "d"
    with running(folder, TURTLEMQ_MAX_BODY_BYTES=str(LIMIT), TURTLEMQ_BODY_TIMEOUT_S="1") as one:
        yield one


# Both ways

CASES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "a message": ("/v1/topics/both/messages", b'{"body":{"n":1},"delay":60}', ()),
    "a message with a priority and an id": (
        "/v1/topics/both/messages",
        b'{"body":1,"id":"same","priority":"high","delay":60}',
        (),
    ),
    "the same once more": ("/v1/topics/both/messages", b'{"body":1,"id":"same","delay":60}', ()),
    "a message with headers": ("/v1/topics/both/messages", b'{"body":1,"headers":{"a":"b"},"delay":60}', ()),
    "an empty body": ("/v1/topics/both/messages", b"", ()),
    "no JSON": ("/v1/topics/both/messages", b'{"body":', ()),
    "an unknown field": ("/v1/topics/both/messages", b'{"body":1,"dely":3}', ()),
    "an id that is too long": ("/v1/topics/both/messages", b'{"body":1,"id":"%b"}' % (b"x" * 500), ()),
    "a bad topic": ("/v1/topics/-/messages", b'{"body":1}', ()),
    "no time left": ("/v1/topics/both/messages", b'{"body":1}', ("X-Turtlemq-Budget-Ms: 0",)),
    "a budget in words": ("/v1/topics/both/messages", b'{"body":1}', ("X-Turtlemq-Budget-Ms: much",)),
    "an encoding that is not known": ("/v1/topics/both/messages", b'{"body":1}', ("Content-Encoding: br",)),
    "no gzip": ("/v1/topics/both/messages", b'{"body":1}', ("Content-Encoding: gzip",)),
    "a page of another site": ("/v1/topics/both/messages", b'{"body":1}', ("Origin: http://evil.example",)),
    "a fetch": ("/v1/topics/nothing/fetch", b"{}", ()),
    "a fetch as BSON": ("/v1/topics/nothing/fetch", b"{}", ("Accept: application/bson",)),
    "a fetch of a group": ("/v1/topics/nothing/groups/g/fetch", b'{"max":3}', ()),
    "a bad fetch": ("/v1/topics/both/fetch", b'{"max":0}', ()),
    "an ack": ("/v1/topics/both/ack", b'["nobody"]', ()),
    "an ack of a group": ("/v1/topics/both/groups/g/ack", b'["nobody","-x"]', ()),
    "a bad ack": ("/v1/topics/both/ack", b'[""]', ()),
    "an ack in an unknown topic": ("/v1/topics/unknown/ack", b'["x"]', ()),
    "an extend": ("/v1/topics/both/extend", b'{"ids":["x"]}', ()),
    "a bad extend": ("/v1/topics/both/extend", b'{"ids":3}', ()),
    "a request's name": ("/v1/topics/both/fetch", b"{}", ("X-Request-Id: mine",)),
    "a transaction": (
        "/v1/topics/both/transaction",
        b'{"put":[{"id":"same","body":1,"delay":60}],"if":[{"id":"no","state":"unknown"}]}',
        (),
    ),
    "a condition that is not met": ("/v1/topics/both/transaction", b'{"if":[{"id":"no","state":"sleep"}]}', ()),
    "a transaction on what is not there": ("/v1/topics/new/transaction", b'{"cancel":["no"]}', ()),
    "a transaction that is none": ("/v1/topics/both/transaction", b'{"put":[{"id":3,"body":1}]}', ()),
    "a transaction of two topics": ("/v1/topics/both/transaction", b'{"put":[{"topic":"x","body":1}]}', ()),
    "a cancel of many": ("/v1/topics/both/cancel", b'{"ids":["x","y"]}', ()),
    "a cancel of none": ("/v1/topics/both/cancel", b"{}", ()),
    "a cancel in an unknown topic": ("/v1/topics/unknown/cancel", b'{"ids":["x"]}', ()),
    "a cancel of one": ("DELETE /v1/topics/both/messages/sleeps", b"", ()),
    "a cancel of one that is not there": ("DELETE /v1/topics/both/messages/nothing", b"", ()),
    "a cancel of one that is ready": ("DELETE /v1/topics/both/messages/reserved", b"", ()),
    "a cancel of dots": ("DELETE /v1/topics/both/messages/..", b"", ()),
    "a cancel of what is no id": ("DELETE /v1/topics/both/messages/-x", b"", ()),
    "a cancel in what is no topic": ("DELETE /v1/topics/-/messages/x", b"", ()),
    "a change of one": ("PATCH /v1/topics/both/messages/sleeps", b'{"delay":90,"body":3}', ()),
    "a change of one that is not there": ("PATCH /v1/topics/both/messages/nothing", b'{"delay":90}', ()),
    "a change of one that is ready": ("PATCH /v1/topics/both/messages/reserved", b'{"delay":90}', ()),
    "no change": ("PATCH /v1/topics/both/messages/sleeps", b"{}", ()),
    "a change that is no JSON": ("PATCH /v1/topics/both/messages/sleeps", b"{", ()),
    "a change by a page of another site": (
        "PATCH /v1/topics/both/messages/sleeps",
        b'{"delay":90}',
        ("Origin: http://evil.example",),
    ),
}


def told(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, str], Any]:
    """An answer without its names and times."""
    status, headers, body = answer
    kept = {name: value for name, value in headers.items() if name not in ("date", "server", "content-length")}
    kept["x-request-id"] = "mine" if kept["x-request-id"] == "mine" else "made"
    value = json.loads(body) if body else None
    if isinstance(value, dict):
        for name in ("ids", "due_ms"):
            value.pop(name, None)
        value.get("error", {}).pop("request_id", None)
    return status, kept, value


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_answer(server: Server, name: str) -> None:
    path, body, more = CASES[name]
    method, _, path = path.rpartition(" ")
    method = method or "POST"
    if method in ("DELETE", "PATCH"):
        server.put("both", {"id": "sleeps", "body": 1, "delay": 60}, {"id": "reserved", "body": 1})
        server.fetch("both")
    if name in ("the same once more", "a transaction"):
        server.put("both", {"body": 1, "id": "same", "delay": 60})
    if name == "a message with a priority and an id":
        body = body.replace(b'"id":"same",', b"")
    server.put("both", {"body": 1, "delay": 60})
    with Talk(server) as talk:
        talk.send(post(path, body, *more, method=method))
        plainly = talk.answer()
        if name == "a cancel of one":
            server.put("both", {"id": "sleeps", "body": 1, "delay": 60})
        talk.send(chunked(path, body, *more, method=method))
        assert told(plainly) == told(talk.answer())
        assert "server" not in plainly[1], "aiohttp names itself: the front has not answered"


def test_kinds_of_requests_take_turns_on_one_connection(server: Server) -> None:
    put, get = post("/v1/topics/turns/messages", b'{"body":1,"delay":9}'), b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    large = post("/v1/topics/turns/messages", json.dumps({"messages": [{"body": "x" * 90, "delay": 9}] * 3000}).encode())
    kinds = [(put, 201), (get, 200), (large, 201), (get.replace(b"healthz", b"nothing"), 404), (put, 201)]
    kinds += [(post("/v1/topics/turns/nothing", b"{}"), 404), (put, 201), (get, 200)]
    kinds += [(put, 201), (chunked("/v1/topics/turns/messages", b'{"body":1}'), 201), (put, 201), (get, 200)]
    for together in (True, False):
        with Talk(server) as talk:
            if together:
                talk.send(b"".join(data for data, _ in kinds))
            for data, status in kinds:
                if not together:
                    talk.send(data)
                assert talk.answer()[0] == status


def test_requests_may_be_cut_anywhere(server: Server) -> None:
    first, second = (
        post("/v1/topics/cut/messages", b'{"body":"cut","delay":60}'),
        b"GET /v1/topics/cut HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    data = first + second + first
    for at in range(1, len(data), 3):
        with Talk(server) as talk:
            talk.send(data[:at])
            talk.send(data[at:])
            assert [talk.answer()[0] for _ in range(3)] == [201, 200, 201], at
    for at in (3, 20, len(first) - 30, len(first) - 3, len(first) + 3):  # longer than the front waits
        with Talk(server) as talk:
            talk.send(data[:at], data[at:], pause_s=3 * front.GRACE_S)
            assert [talk.answer()[0] for _ in range(3)] == [201, 200, 201], at
    with Talk(server) as talk:
        talk.send(*(bytes([byte]) for byte in data))
        assert [talk.answer()[0] for _ in range(3)] == [201, 200, 201]


def test_a_body_that_never_ends_meets_its_time_limit(server: Server) -> None:
    with Talk(server) as talk:
        talk.send(post("/v1/topics/slow/messages", b'{"body":1}')[:-2])
        assert talk.answer()[0] == 408
        assert talk.socket.recv(9) == b""


@pytest.mark.parametrize("length", [LIMIT + 1, 10**14])
def test_a_length_beyond_the_limit_is_refused(server: Server, length: int) -> None:
    with Talk(server) as talk:
        talk.send(post("/v1/topics/long/messages", b'{"body":1}').replace(b"Length: 10", b"Length: %d" % length))
        status, _, body = talk.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "TOO_LARGE")


def test_a_client_that_only_sends_is_not_read_forever(server: Server) -> None:
    """Behind a long poll, and without reading answers: neither fills the server's memory."""
    poll = post("/v1/topics/quiet/fetch", b'{"wait":20}')
    with Talk(server) as talk:
        talk.socket.setblocking(False)
        taken, end = 0, time.monotonic() + 5
        filler = post("/v1/topics/quiet/ack", b'["x"]') * 1_000
        talk.socket.send(poll)
        while time.monotonic() < end:
            try:
                taken += talk.socket.send(filler)
            except BlockingIOError:
                time.sleep(0.05)
                if taken > 64 << 20:
                    break
        assert taken < 64 << 20
        assert server.call("GET", "/healthz").status == 200


def test_a_consumer_that_goes_away_leaves_its_messages(server: Server) -> None:
    for _ in range(5):
        with Talk(server) as talk:
            talk.send(post("/v1/topics/leave/fetch", b'{"wait":20}'))
            server.put("leave", {"body": 1})
        found = server.fetch("leave", wait=10)
        if not found:  # it was handed to the client that left, in the last moment: until its lease ends
            continue
        assert server.ack("leave", found[0]["id"])["acked"] == 1
        return
    pytest.fail("no message came back")


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
@pytest.mark.parametrize("goes", ["slow", "gone"])
def test_a_hot_answer_that_cannot_be_sent_is_undone(monkeypatch: pytest.MonkeyPatch, goes: str) -> None:
    monkeypatch.setattr(front, "ANSWER_S", 0.2 if goes == "slow" else 20)
    monkeypatch.setattr(front, "SLOWEST", 1 << 40)

    async def story() -> None:
        undone = asyncio.Event()

        async def large(request: web.Request) -> Reply:
            request[trace.REQUEST_ID] = "x"
            return Reply(b"x" * (64 << 20), undo=undone.set)

        app = web.Application()
        app[auth.AUTH], app[SERVICE] = auth.Auth(), Service()
        app.router.add_post("/v1/topics/{topic}/fetch", large)  # type: ignore[arg-type]
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        writer.write(post("/v1/topics/t/fetch", b"{}"))
        await reader.readexactly(100)
        if goes == "gone":
            writer.transport.abort()
        await undone.wait()
        assert app[SERVICE].flow.answer_bytes.bytes == 0
        writer.close()
        await runner.cleanup()

    asyncio.run(asyncio.wait_for(story(), 30))


# One meaning


def of_aiohttp(data: bytes) -> tuple[Any, Any]:
    """The first request as aiohttp's parser reads it, and its body. Raises if it is none."""
    loop = mock.Mock()
    messages, _, tail = HttpRequestParser(mock.Mock(), loop, 1 << 16, 8190, 8190, 100).feed_data(data)
    assert (len(messages), tail) == (1, b""), "another request, or none"
    return messages[0]


def test_a_plain_head_means_the_same_to_aiohttp() -> None:
    """Heads with random changes: aiohttp's parser refuses each one that is plain to the front, or reads exactly the same."""
    dice, plains = random.Random(19), 0
    parts = [
        "Host: x",
        "Content-Length: 5",
        "Connection: keep-alive",
        "Accept: */*",
        "X-Request-Id: a b",
        "Content-Type:application/json",
    ]
    odd = [
        "Content-Length: 5",
        "Content-Length: 05",
        "Content-Length: +5",
        "Content-Length:",
        "Transfer-Encoding: chunked",
        "X : y",
    ]
    odd += [
        " folded",
        "Connection: close",
        "Upgrade: h2c",
        "Expect: 100-continue",
        "Host: y",
        "content-length: 6",
        "X\t: y",
        ":",
        "\xe9: x",
    ]
    for _ in range(4_000):
        lines = dice.sample(parts, dice.randint(1, len(parts))) + dice.sample(odd, dice.choice((0, 0, 1, 2)))
        dice.shuffle(lines)
        data = bytearray("\r\n".join(["POST /v1/topics/t/messages HTTP/1.1", *lines, "", ""]).encode())
        for _ in range(dice.choice((0, 0, 1, 2))):
            data[dice.randrange(len(data))] = dice.choice(b'\0\t\n\r :,;"AZaz09+-_\x7f\xff')
        head = plain(bytes(data))
        if head is None or not bytes(data).endswith(b"\r\n\r\n"):
            continue
        plains += 1
        try:
            message, content = of_aiohttp(bytes(data) + b"x" * head.length)
        except HttpProcessingError:
            continue
        assert (message.method, message.path) == (head.method, head.path), data
        assert {name.lower(): value for name, value in message.headers.items()} == dict(head.headers), data
        assert (message.should_close, message.upgrade, message.chunked) == (False, False, False), data
        assert head.length == 0 or (content.is_eof() and content.total_bytes == head.length), data
    assert plains > 500


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\nHost: x\n\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX: \xff\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX: a\nY: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: x\r\n\r\n",
        b"POST http://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nX: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n\r\n",
        b"\r\nPOST / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9_000 + b"\r\n\r\n",
    ],
)
def test_a_head_with_a_second_meaning_is_not_plain(head: bytes) -> None:
    assert plain(head) is None


def test_heads_that_are_remembered_are_few_and_short() -> None:
    heads = Heads(lambda method, path: path)
    for n in range(3_000):
        assert heads.read(b"GET /%d HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (n, b"x" * (n % 2_000))) is not None
    for known in (heads._heads, heads._headers):
        assert 0 < len(known) <= 1_000
        assert max(map(len, known)) <= 1 << 10


def test_of_heads_that_name_a_message_headers_are_remembered() -> None:
    heads = Heads(hot_routes(dict.fromkeys(HOT)))
    assert heads.read(b"POST /v1/topics/t/fetch HTTP/1.1\r\nHost: x\r\n\r\n") is not None
    for n in range(50):
        head = heads.read(b"DELETE /v1/topics/t/messages/order:%d HTTP/1.1\r\nHost: x\r\n\r\n" % n)
        assert head is not None
        assert (head.place["topic"], head.place["id"]) == ("t", f"order:{n}")
    assert (len(heads._heads), len(heads._headers)) == (1, 1)


def test_an_answered_put_is_seen_by_the_next_fetch(server: Server) -> None:
    with Talk(server) as talk:
        for n in range(200):
            talk.send(post("/v1/topics/seen/messages", b'{"body":%d}' % n))
            assert talk.answer()[0] == 201
            talk.send(post("/v1/topics/seen/fetch", b'{"ack":"auto"}'))
            assert [message["body"] for message in json.loads(talk.answer()[2])["messages"]] == [n]


def test_an_answered_put_is_seen_by_the_next_condition(server: Server) -> None:
    with Talk(server) as talk:
        for n in range(200):
            talk.send(post("/v1/topics/met/messages", b'{"id":"%d","body":1}' % n))
            assert talk.answer()[0] == 201
            talk.send(post("/v1/topics/met/transaction", b'{"if":[{"id":"%d","state":"ready"}]}' % n))
            assert talk.answer()[0] == 200
