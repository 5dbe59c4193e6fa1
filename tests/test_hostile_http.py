"""Hostile HTTP on raw sockets: bytes that are none, requests that are meant badly, slow ones, bodies that are packed.

For any input: no 5xx, no traceback, nothing stored that was refused, no client disturbed. Every refusal has the shape of every
error, also where no line of ours has run.
"""

from __future__ import annotations

import gzip
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import server_process
from tests.harness.server_process import Server, running, sockets

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from tests.harness.hostile_client import (
    BODY,
    CHUNKED,
    GET,
    LAST,
    LIMIT,
    POST,
    after_each,
    decent,
    heard,
    memory_of,
    request,
    sent,
    server,
    unharmed,
)

__all__ = ["after_each", "server"]


# HTTP that is none

NO_HTTP: dict[str, bytes] = {
    "noise": bytes(range(256)) * 10,
    "NULs": b"\0" * 1_000,
    "a hello of TLS": bytes.fromhex("1603010200010001fc0303") + b"\0" * 100,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version 3.0": b"GET /healthz HTTP/3.0\r\n\r\n",
    "version 1.9": b"GET /healthz HTTP/1.9\r\nHost: x\r\n\r\n",
    "version x": b"GET /healthz HTTP/x\r\nHost: x\r\n\r\n",
    "line feeds alone": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "a long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line without end": b"GET /" + b"a" * 1_000_000,
    "a long header": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "a long header's name": GET + b"X" * 100_000 + b": a\r\n\r\n",
    "a header without end": GET + b"X: " + b"a" * 1_000_000,
    "thousands of headers": GET + b"".join(b"X%d: a\r\n" % i for i in range(5_000)) + b"\r\n",
    "a huge cookie": GET + b"Cookie: " + b"a=b; " * 20_000 + b"\r\n\r\n",
    "a folded header": GET + b"X: a\r\n b\r\n\r\n",
    "a header with NUL": GET + b"X: a\0b\r\n\r\n",
    "a header without colon": GET + b"nonsense\r\n\r\n",
    "a header without name": GET + b": x\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\na\r\n" + BODY + LAST,
    "no host": b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    "a method in small letters": request("/healthz", method="get"),
    "an unknown method": request("/healthz", method="BREW"),
    "a method of signs": request("/healthz", method="G@T"),
    "a long method": request("/healthz", method="G" * 9_000),
    "no path": b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star as path": request("*"),
    "NUL in the path": request("/v1/topics/a\0b"),
    "bytes above ASCII in the path": request("/v1/topics/\xff"),
    "bytes above ASCII in the query": request("/v1/topics/there/messages?state=\xff"),
    "a URI with a broken host": request("http://[::1/healthz"),
    "a URI with a port that is none": request("http://a:999999/healthz"),
    "a URI of a file": request("file:///etc/passwd"),
    "a negative length": POST + b"Content-Length: -5\r\n\r\n" + BODY,
    "a length with a sign": POST + b"Content-Length: +10\r\n\r\n" + BODY,
    "a length in words": POST + b"Content-Length: ten\r\n\r\n" + BODY,
    "a length with a point": POST + b"Content-Length: 10.0\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 10, 10\r\n\r\n" + BODY,
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "two lengths that agree": POST + b"Content-Length: 10\r\nContent-Length: 10\r\n\r\n" + BODY,
    "two lengths that do not": POST + b"Content-Length: 10\r\nContent-Length: 5\r\n\r\n" + BODY,
    "length, then chunks": POST + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\na\r\n" + BODY + LAST,
    "chunks, then length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\na\r\n" + BODY + LAST,
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\na\r\n" + BODY + LAST,
    "chunks, then something": POST + b"Transfer-Encoding: chunked, identity\r\n\r\na\r\n" + BODY + LAST,
    "nearly chunks": POST + b"Transfer-Encoding: xchunked\r\n\r\na\r\n" + BODY + LAST,
    "chunks by another name": POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "a chunk's size that is none": CHUNKED + b"zz\r\n" + BODY + LAST,
    "a chunk's negative size": CHUNKED + b"-a\r\n" + BODY + LAST,
    "a chunk's size with 0x": CHUNKED + b"0xa\r\n" + BODY + LAST,
    "a chunk's size beyond 64 bits": CHUNKED + b"ffffffffffffffffffff\r\n" + BODY + LAST,
    "a chunk that is longer than it says": CHUNKED + b"5\r\n" + BODY + LAST,
    "a chunk without line end": CHUNKED + b"a\r\n" + BODY + b"0\r\n\r\n",
    "chunks with line feeds alone": CHUNKED + b"a\n" + BODY + b"\n0\n\n",
    "a good chunk, then a bad one": CHUNKED + b"a\r\n" + BODY + b"\r\nqq\r\n",
    "a trailer that is none": CHUNKED + b"a\r\n" + BODY + b"\r\n0\r\nbad\r\n\r\n",
    "thousands of trailers": CHUNKED + b"a\r\n" + BODY + b"\r\n0\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    "a control character in a cookie": GET + b"Cookie: \xff=\x01\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_non_http_bytes_get_the_usual_error_shape(server: Server, name: str) -> None:
    (answer,) = heard(sent(server, NO_HTTP[name]))
    assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT"), answer


# HTTP that is meant badly

REFUSED: dict[str, tuple[bytes, int, str]] = {
    "an unknown Expect": (request("/healthz", "Expect: miracles"), 417, "INVALID_ARGUMENT"),
    "an Expect on no path": (request("/nowhere", "Expect: miracles"), 417, "INVALID_ARGUMENT"),
    "TRACE": (request("/healthz", method="TRACE"), 405, "METHOD_NOT_ALLOWED"),
    "OPTIONS": (request("*", method="OPTIONS"), 404, "NOT_FOUND"),
    "CONNECT": (request("/healthz", method="CONNECT"), 404, "NOT_FOUND"),
    "DELETE of everything": (request("/v1/topics", method="DELETE"), 405, "METHOD_NOT_ALLOWED"),
    "a shorter length": (POST.replace(b"close", b"keep-alive") + b"Content-Length: 5\r\n\r\n" + BODY, 400, "INVALID_JSON"),
    "a longer length": (POST + b"Content-Length: 50\r\n\r\n" + BODY, 408, "REQUEST_TIMEOUT"),
    "half a body": (POST + b"Content-Length: 1000000\r\n\r\n" + BODY, 408, "REQUEST_TIMEOUT"),
    "half a chunk": (CHUNKED + b"a\r\n" + BODY[:5], 408, "REQUEST_TIMEOUT"),
    "no last chunk": (CHUNKED + b"a\r\n" + BODY + b"\r\n", 408, "REQUEST_TIMEOUT"),
    "a length over the limit": (POST + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1) + b" " * (LIMIT + 1), 413, "TOO_LARGE"),
    "chunks over the limit": (CHUNKED + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 40 + b"0\r\n\r\n", 413, "TOO_LARGE"),
    "a content type above ASCII": (
        request("/v1/topics/evil/messages", "Content-Type: \xff\xfe", method="POST", body=BODY),
        415,
        "UNSUPPORTED_MEDIA_TYPE",
    ),
    "a form": (
        request("/v1/topics/evil/messages", "Content-Type: multipart/form-data; boundary=x", method="POST", body=BODY),
        415,
        "UNSUPPORTED_MEDIA_TYPE",
    ),
    "an encoding above ASCII": (
        request("/v1/topics/evil/messages", "Content-Encoding: \xff", method="POST", body=BODY),
        415,
        "UNSUPPORTED_MEDIA_TYPE",
    ),
    "another origin": (request("/v1/topics/evil/messages", "Origin: https://a.b", method="POST", body=BODY), 403, "FORBIDDEN"),
    "an origin above ASCII": (request("/v1/topics/evil/messages", "Origin: \xff", method="POST", body=BODY), 403, "FORBIDDEN"),
    "no origin at all": (request("/v1/topics/evil/messages", "Origin: null", method="POST", body=BODY), 403, "FORBIDDEN"),
    "a budget above ASCII": (
        request("/v1/topics/evil/messages", "X-Turtlemq-Budget-Ms: \xb2", method="POST", body=BODY),
        400,
        "INVALID_ARGUMENT",
    ),
    "a budget of words": (request("/healthz", "X-Turtlemq-Budget-Ms: soon"), 400, "INVALID_ARGUMENT"),
    "a huge budget": (request("/healthz", "X-Turtlemq-Budget-Ms: " + "9" * 400), 400, "INVALID_ARGUMENT"),
    "another cursor": (request("/v1/topics/there/messages?cursor=%ff"), 400, "INVALID_ARGUMENT"),
    "a huge cursor": (request("/v1/topics/there/messages?cursor=" + "9" * 5_000), 400, "INVALID_ARGUMENT"),
    "a huge limit": (request("/v1/topics/there/messages?limit=" + "9" * 5_000), 400, "INVALID_ARGUMENT"),
    "a limit in other digits": (request("/v1/topics/there/messages?limit=%D9%A3"), 400, "INVALID_ARGUMENT"),
    "two limits": (request("/v1/topics/there/messages?limit=1&limit=x"), 400, "INVALID_ARGUMENT"),
    "a bucket that is no number": (request("/v1/topics/there/forecast?bucket=nan"), 400, "INVALID_ARGUMENT"),
    "hours without end": (request("/v1/topics/there/forecast?hours=inf"), 400, "INVALID_ARGUMENT"),
    "a thousand parameters": (request("/v1/topics/there/messages?" + "a=1&" * 1_900), 400, "INVALID_ARGUMENT"),
    "an id with NUL": (request("/v1/topics/there/messages/a%00"), 400, "INVALID_ID"),
    "an id that is no UTF-8": (request("/v1/topics/there/messages/%ff%fe"), 404, "UNKNOWN_MESSAGE"),
    "an id of half a pair": (request("/v1/topics/there/messages/%ed%a0%80"), 404, "UNKNOWN_MESSAGE"),
    "a long id": (request("/v1/topics/there/messages/" + "a" * 8_000), 400, "INVALID_ID"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_http_that_is_meant_badly_is_refused(server: Server, name: str) -> None:
    data, status, code = REFUSED[name]
    answer = heard(sent(server, data))[0]
    assert (answer.status, answer.code) == (status, code), answer


TAKEN: dict[str, bytes] = {
    "version 1.0": b"GET /healthz HTTP/1.0\r\n\r\n",
    "version 0.9": b"GET /healthz\r\n\r\n",
    "empty lines before": b"\r\n" * 1_000 + GET + b"\r\n",
    "a body of a GET": GET + b"Content-Length: 10\r\n\r\n" + BODY,
    "a header above ASCII": GET + b"X: \xff\xfe\r\n\r\n",
    "a broken host": request("/healthz", host="Host: [::1"),
    "an empty host": request("/healthz", host="Host:"),
    "a name for the request that is none": request("/healthz", "X-Request-Id: \xff\r\nX-Request-Id: a b"),
    "a fragment": request("/healthz#x"),
    "an Upgrade to HTTP/2": GET.replace(b"close", b"Upgrade, close") + b"Upgrade: h2c\r\n\r\n",
    "a Range, and conditions": request("/healthz", "Range: bytes=0-1", "If-None-Match: \xff", "If-Modified-Since: never"),
    "encodings that are none": request("/healthz", "Accept-Encoding: \xff;q=zz", "Accept: \xff"),
    "lies about the way": request("/healthz", "X-Forwarded-For: 8.8.8.8", 'Forwarded: for="[::"', "X-Real-Ip: 1.1.1.1"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_odd_but_harmless_is_answered(server: Server, name: str) -> None:
    assert heard(sent(server, TAKEN[name]))[0].status == 200


PATHS = """
    /v1/topics/%2e%2e /v1/topics/..%2f..%2fetc /v1/topics/%2e%2e%2f%2e%2e/messages /v1/topics/a%2Fb /v1/topics/a%5Cb
    /v1/topics/. /v1/topics/%252e%252e /v1/topics/%00 /v1/topics/%ff /v1/topics/%zz /v1/topics/%C0%AE%C0%AE
    /v1/topics/there;a=b /v1/topics/~root /v1/topics/con%3A /v1/topics/a%0d%0aX:y /v1/topics/xLONG /v1/topics//
    /../../etc/passwd /v1/topics/../../../etc/passwd //etc/passwd //v1//topics /%2e%2e/%2e%2e/etc
    /pages/..%2f..%2fapp.py /pages/..%5c..%5capp.py /pages/%00 /pages/__init__.py /pages/%ff /pages/xLONG
    /pages/%2e%2e%2f__init__.py /healthz;x /healthz/ /healthz%00 /HEALTHZ /openapi.json%2f..%2f
""".replace("LONG", "x" * 5_000).split()


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
def test_no_path_leads_out_of_the_data_folder(server: Server, method: str) -> None:
    for path in PATHS:
        for rest in ("", "/messages", "/groups/..%2f..", "/messages/..%2f..%2fx"):
            data = heard(sent(server, request(path + rest, method=method, body=b"" if method == "GET" else BODY)))[0]
            assert data.status in (400, 403, 404, 405), (method, path + rest, data)
            assert b"root:" not in data.data
            assert b"import" not in data.data


def test_a_client_that_expects_100_is_told_to_go_on(server: Server) -> None:
    head = POST.replace(b"evil", b"taken") + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n"
    data = sent(server, head, BODY)
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert heard(data.partition(b"\r\n\r\n")[2])[0].status == 201


def test_requests_one_behind_the_other_are_answered_in_order(server: Server) -> None:
    put = b"POST /v1/topics/taken/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n" + BODY
    look = b"GET /v1/topics/%s HTTP/1.1\r\nHost: x\r\n\r\n"
    answers = heard(sent(server, put + look % b"nobody" + put + look % b"taken" + GET + b"\r\n"))
    assert [answer.status for answer in answers] == [201, 404, 201, 200, 200]


def test_rubbish_behind_a_request_is_not_part_of_it(server: Server) -> None:
    smuggled = b"POST /v1/topics/evil/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n" + BODY
    inside = b"POST /v1/topics/evil/fetch HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(smuggled)
    (answer,) = heard(sent(server, inside + smuggled))
    assert answer.code == "INVALID_JSON", "the body is a body, whatever it looks like"


# Slow ones


def test_slow_bodies_delay_no_other_client_and_are_dropped(server: Server) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=15) for _ in range(100)]
    try:
        for connection in connections:
            connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        pending = list(connections)
        while pending:
            unharmed(server)
            for connection in pending:
                try:
                    connection.sendall(b"{")  # a byte now and then
                except ConnectionError:
                    pass
            pending = [connection for connection in pending if not _answered(connection)]
        for connection in connections:
            connection.settimeout(15)
            try:
                assert heard(connection.recv(1 << 16))[0].status == 408
            except ConnectionError:
                pass  # its last bytes came after the listener was gone
    finally:
        for connection in connections:
            connection.close()


def _answered(connection: socket.socket) -> bool:
    """Has something come, or is it closed?"""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(15)
    return True


def test_slow_heads_delay_no_other_client_and_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second instead of the minute that a head may take."""
    code = "from turtlemq.server import listen; listen._LIMITS['keepalive_timeout'] = 1; from turtlemq.cli import main; main()"
    monkeypatch.setattr(server_process, "PROGRAM", [sys.executable, "-c", code])
    with running(tmp_path / "data") as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=15) for _ in range(100)]
        try:
            head, pending = iter(GET * 1_000), list(connections)
            while pending:
                byte = bytes([next(head)])
                for connection in pending:
                    try:
                        connection.sendall(byte)
                    except ConnectionError:
                        pass
                assert server.call("GET", "/healthz").status == 200
                pending = [connection for connection in pending if not _answered(connection)]
            end = time.monotonic() + 10
            while sockets(server) > 20:
                assert time.monotonic() < end, "they are still held"
                time.sleep(0.05)
        finally:
            for connection in connections:
                connection.close()


# Bodies that are packed

BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 9),
    "deflate": lambda data: zlib.compress(data, 9),
    "zstd": lambda data: zstd.compress(data, 19),
}


@pytest.mark.parametrize("how", BOMBS)
def test_bombs_stay_small(server: Server, how: str) -> None:
    pack, before = BOMBS[how], memory_of(server)
    bomb = pack(b" " * (256 << 20)) if how == "zstd" else pack(b" " * (64 << 20)) * (1 if how == "deflate" else 8)
    cases = [
        (bomb, how, 413, "TOO_LARGE"),
        (pack(bomb), how, 400, "INVALID_JSON"),  # a bomb in a bomb is noise, once unpacked
        (pack(bomb), f"{how}, {how}", 415, "UNSUPPORTED_MEDIA_TYPE"),
        (bomb[:-9], how, 413, "TOO_LARGE"),
        (pack(BODY)[:-1], how, 400, "INVALID_ARGUMENT"),
        (pack(BODY) + b"\0" * 1_000, how, 400, "INVALID_ARGUMENT"),
        (b"", how, 400, "INVALID_JSON"),
        (b"\x1f\x8b\x28\xb5\x2f\xfd" * 100, how, 400, "INVALID_ARGUMENT"),
    ]
    for data, encoding, status, code in cases:
        answer = server.call("POST", "/v1/topics/evil/messages", data=data, headers={"Content-Encoding": encoding})
        decent(answer)
        assert (answer.status, answer.code) == (status, code), (encoding, len(data), answer)
    assert memory_of(server) < before + (64 << 20)
