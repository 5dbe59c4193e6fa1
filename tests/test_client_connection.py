"""The client's own HTTP: answers in all forms that a server or a proxy may send, and bytes that are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from turtlemq.client.connection import HEAD_BYTES, BrokenAnswer, Connection, Head


@contextmanager
def answering(*pieces: bytes) -> Iterator[tuple[Connection, list[bytes]]]:
    """A connection to a server that reads a request and sends these bytes, then closes. Yields the request too."""
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
        with closing(Connection(*server.getsockname()[:2])) as connection:
            connection.connect(10)
            yield connection, heard
        thread.join()


def asked(*pieces: bytes) -> tuple[Head, bytes]:
    with answering(*pieces) as (connection, _):
        connection.send("POST", "/", {}, b"{}", 10)
        head = connection.head()
        return head, b"".join(connection.body(head))


OK = b"HTTP/1.1 200 OK\r\n"


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
def test_answers_are_read_in_all_their_forms(pieces: tuple[bytes, ...], body: bytes, keeps: bool) -> None:
    head, found = asked(*pieces)
    assert (found, head.keeps) == (body, keeps)


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
def test_bytes_that_are_no_answer_are_a_broken_connection(data: bytes) -> None:
    with pytest.raises((BrokenAnswer, ConnectionError)):
        asked(data)


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
