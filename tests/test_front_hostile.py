"""Requests of hot routes that are sent badly, or whose clients go away: they are answered as others are, and lose no message."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.harness.server_process import Server, running
from tests.harness.talk import Talk, chunked, post

BODY = b'{"body":1,"delay":60}'
PUT, FETCH = post("/v1/topics/odd/messages", BODY), post("/v1/topics/none/fetch", b"{}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("front_hostile") / "d", TURTLEMQ_BODY_TIMEOUT_S="1") as one:
        yield one


def sleeping(server: Server, topic: str) -> int:
    """How many messages of a topic sleep."""
    return int(server.ok("GET", f"/v1/topics/{topic}")["stats"]["sleep"])


# In the midst of hot requests, on one connection; each is answered with 201, and does not change where the next one begins.
ODD: dict[str, bytes] = {
    "trailers": chunked("/v1/topics/odd/messages", BODY)[:-2] + b"X-Sum: 1\r\nX-More: 2\r\n\r\n",
    "absolute form": PUT.replace(b"POST /", b"POST http://other.example:1/"),
    "a wish for another protocol": PUT.replace(b"Host: x", b"Host: x\r\nUpgrade: websocket"),
    "a length with zeros": PUT.replace(b"Length: 21", b"Length: 0000000000021"),
    "a length with a blank": PUT.replace(b"Length: 21", b"Length: 21 "),
    "a request in its body": post("/v1/topics/odd/messages", b'{"body":"POST /v1/topics/odd/compact HTTP/1.1\\r\\n","delay":60}'),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_among_hot_ones_are_answered_in_order(server: Server, name: str) -> None:
    with Talk(server) as talk:
        talk.send(PUT + FETCH + ODD[name] + FETCH + PUT)
        assert [talk.answer()[0] for _ in range(5)] == [201, 200, 201, 200, 201]


def test_a_client_that_waits_for_100_is_told_to_go_on(server: Server) -> None:
    with Talk(server) as talk:
        talk.send(FETCH + PUT[: -len(BODY)].replace(b"Host: x", b"Host: x\r\nExpect: 100-continue"))
        assert talk.answer()[0] == 200
        assert talk.answer()[0] == 100
        talk.send(BODY + FETCH)
        assert [talk.answer()[0] for _ in range(2)] == [201, 200]


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"], ids=["closes", "stays open"])
def test_http_1_0_is_answered_behind_hot_requests(server: Server, more: bytes) -> None:
    old = FETCH.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + more)
    with Talk(server) as talk:
        talk.send(FETCH + old)
        assert [talk.answer()[0] for _ in range(2)] == [200, 200]
        if more:
            talk.send(FETCH)
            assert talk.answer()[0] == 200
        else:
            assert talk.socket.recv(9) == b""


# Smuggling: another reader on the way would see one request here where this one sees two, or the other way round.
HIDDEN: dict[str, bytes] = {
    "two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n",
    "a length and chunks": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
    "chunks in other letters": b"Content-Length: %d\r\ntransfer-encoding: Chunked\r\n",
    "chunks of a kind that is none": b"Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n",
    "a blank before the colon": b"Content-Length : %d\r\n",
    "a length in words": b"Content-Length: %d, 0\r\n",
    "a length with a sign": b"Content-Length: +%d\r\n",
    "a folded length": b"Content-Length:\r\n %d\r\n",
}


def test_a_length_among_trailers_is_refused(server: Server) -> None:
    with Talk(server) as talk:
        talk.send(FETCH + chunked("/v1/topics/odd/messages", BODY)[:-2] + b"Content-Length: 999\r\n\r\n" + FETCH)
        assert [talk.answer()[0] for _ in range(2)] == [200, 400]
        assert talk.socket.recv(9) == b"", "nothing behind it is read"


@pytest.mark.parametrize("method", ["POST /v1/topics/hidden/fetch", "DELETE /v1/topics/hidden/messages/x"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_request_is_never_done(server: Server, name: str, method: str) -> None:
    hidden = post("/v1/topics/hidden/messages", BODY)
    head = f"{method} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    server.put("hidden", {"body": 1, "id": "first", "delay": 60})
    with Talk(server) as talk:
        talk.send(head + HIDDEN[name].replace(b"%d", b"%d" % len(hidden)) + b"\r\n" + hidden)
        assert talk.answer()[0] == 400
        assert talk.socket.recv(9) == b"", "nothing behind it is read"
    assert sleeping(server, "hidden") == 1


@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_half_a_change_changes_nothing(server: Server, method: str) -> None:
    server.put("half", {"body": 1, "id": "it", "delay": 60})
    before = server.ok("GET", "/v1/topics/half/messages/it")
    whole = post("/v1/topics/half/messages/it", b'{"delay":99999}', method=method)
    for end in (9, 30, len(whole) - 16, len(whole) - 15, len(whole) - 1)[
        : 5 if method == "PATCH" else 3
    ]:  # its body says nothing
        with Talk(server) as talk:
            talk.send(whole[:end])
    if method == "PATCH":
        with Talk(server) as talk:
            talk.send(whole[:-1])
            assert talk.answer()[0] == 408
    assert server.ok("GET", "/v1/topics/half/messages/it") == before


@pytest.mark.parametrize("reads", [0, 100_000], ids=["reads nothing", "reads a part"])
def test_an_answer_cut_short_gives_its_messages_back(server: Server, reads: int) -> None:
    """The client stops reading in the midst of an answer that no buffer holds, and goes away."""
    topic = f"cut{reads}"
    for _ in range(8):
        server.put(topic, {"body": "x" * 900_000})
    with Talk(server) as talk:
        talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        talk.send(post(f"/v1/topics/{topic}/fetch", b'{"max":8}'))
        got = 0
        while got < reads:
            got += len(talk.socket.recv(reads - got))
        while server.ok("GET", f"/v1/topics/{topic}")["stats"]["reserve"] < 8:
            time.sleep(0.01)
    while server.ok("GET", f"/v1/topics/{topic}")["stats"]["reserve"]:
        time.sleep(0.01)
    again = server.fetch(topic, max=8)
    assert [message["attempt"] for message in again] == [1] * 8, "no consumer has seen them"
    assert json.dumps(again).count("x" * 900_000) == 8
