"""A hostile client on raw sockets. For any input: no 5xx, no traceback, nothing stored that was refused, no client disturbed.

Every refusal has the shape of every error, also where no line of ours has run. After each attack the server is looked over.
"""

from __future__ import annotations

import datetime
import gzip
import io
import json
import random
import re
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from itertools import islice
from pathlib import Path
from typing import Any, cast

import bson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import server_process
from tests.harness.server_process import Answer, Server, running, sockets
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.storage import names

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 1 << 20  # of a body
MEMORY = 150 << 20  # by how much the server may grow, for any input
BODY = b'{"body":1}'
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
POST = b"POST /v1/topics/evil/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    with running(folder / "data", TURTLEMQ_MAX_BODY_BYTES=str(LIMIT), TURTLEMQ_BODY_TIMEOUT_S="0.5") as found:
        found.put("there", {"body": 1, "id": "asleep", "delay": 3600})
        unharmed(found)
        memory, before = memory_of(found), sockets(found)
        yield found
        assert memory_of(found) < memory + MEMORY, "memory is not bounded"
        end = time.monotonic() + 20
        while sockets(found) > before + 1:
            assert time.monotonic() < end, f"connections are still held: {before} → {sockets(found)}"
            time.sleep(0.1)
        assert sorted(path.name for path in folder.iterdir()) == ["data", "server.log"], "it wrote beside its folder"
        assert {path.name for path in (folder / "data" / "topic").iterdir()} <= {"there", "sane", "fuzz", "taken"}
        assert found.ok("GET", "/v1/topics/there")["stats"]["sleep"] == 1


@pytest.fixture(autouse=True)
def after_each(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        unharmed(request.getfixturevalue("server"))


def memory_of(server: Server) -> int:
    return int(re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[0]) << 10


def unharmed(server: Server) -> None:
    """It lives, serves, has logged no traceback, and the refused topic is not there."""
    assert server.call("GET", "/healthz").status == 200
    (id_,) = server.put("sane", {"body": "still"})
    found = server.fetch("sane", wait=10)
    assert [(message["id"], message["body"]) for message in found] == [(id_, "still")]
    assert server.ack("sane", id_)["acked"] == 1
    before, traceback, after = server.log.partition("Traceback")
    assert not traceback, before[-300:] + traceback + after[:2_000]
    assert server.call("GET", "/v1/topics/evil").status == 404, "something was stored that was refused"


# Raw sockets


class _Socket:
    """As much of one as `HTTPResponse` wants."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def makefile(self, mode: str) -> io.BytesIO:
        return self._file


def heard(data: bytes, method: str = "GET") -> list[Answer]:
    """All answers in the bytes that a server has sent, each checked for the rules of any answer."""
    out: list[Answer] = []
    while data:
        file = io.BytesIO(data)
        response = HTTPResponse(cast(socket.socket, _Socket(file)), method=method)
        response.begin()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        data = data[len(data) - len(file.read()) if not file.closed else len(data) - len(_rest(data, answer)) :]
        decent(answer, method)
        out.append(answer)
    return out


def _rest(data: bytes, answer: Answer) -> bytes:
    return data.partition(b"\r\n\r\n")[2][len(answer.data) :]


def decent(answer: Answer, method: str = "GET") -> None:
    """No 5xx; a refusal in the one shape of all."""
    assert answer.status < 500, answer
    if answer.status >= 400 and method != "HEAD":
        assert answer.headers["Content-Type"].startswith("application/json"), answer
        error = answer.json["error"]
        assert re.fullmatch(r"[A-Z_]+", error["code"]), answer
        assert len(error["message"]) > 10, answer
        assert error["request_id"] == answer.headers["X-Request-Id"], answer
        assert len(answer.data) < 20_000, "it says too much"


def sent(server: Server, *pieces: bytes, wait_s: float = 15) -> bytes:
    """The bytes that come back before the server closes the connection, which it must."""
    out = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait_s) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except ConnectionError:
            pass  # it does not want to hear more
        try:
            while piece := connection.recv(1 << 16):
                out += piece
        except ConnectionError:
            pass
    return out


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"", host: str = "Host: x") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", host, "Connection: close", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(line for line in lines if line).encode("latin-1") + b"\r\n\r\n" + body


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


# JSON


LEVELS_MAX = 100  # docs/HTTP.md


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b'{"body":' + opening * depth + b"1" + closing * depth + b"}"


BAD_JSON: dict[str, bytes] = {
    "no UTF-8": b'{"body":"\xff"}',
    "overlong UTF-8": b'{"body":"\xc0\xaf"}',
    "half a pair, as bytes": b'{"body":"\xed\xa0\x80"}',
    "half a pair": b'{"body":"\\ud800"}',
    "half a pair in a name": b'{"body":{"\\udc00":1}}',
    "half a pair in an id": b'{"body":1,"id":"\\ud800"}',
    "half a pair in a header": b'{"body":1,"headers":{"x":"\\ud800"}}',
    "UTF-16": '{"body":1}'.encode("utf-16"),
    "a mark of the byte order": b"\xef\xbb\xbf" + BODY,
    "NaN": b'{"body":NaN}',
    "infinity": b'{"body":[-Infinity]}',
    "a leading zero": b'{"body":01}',
    "a control character": b'{"body":"a\x01"}',
    "an escape that is none": b'{"body":"\\q"}',
    "a comment": b'{"body":1/*x*/}',
    "NUL behind": BODY + b"\0",
    "lists that are a level too deep": nested(b"[", b"]", LEVELS_MAX + 1),
    "objects that are a level too deep": nested(b'{"a":', b"}", LEVELS_MAX + 1),
    "900 levels": nested(b"[", b"]", 900),
    "deep lists": nested(b"[", b"]", 100_000),
    "deep objects": nested(b'{"a":', b"}", 100_000),
    "deep and open": b'{"body":' + b"[" * 500_000,
}
BAD_MESSAGES: dict[str, tuple[bytes, str]] = {
    "a huge due time": (b'{"body":1,"due_ms":' + b"9" * 5_000 + b"}", "INVALID_FIRE_AT"),
    "a huge delay": (b'{"body":1,"delay":1e400}', "INVALID_FIRE_AT"),
    "a huge exponent": (b'{"body":1,"delay":1e' + b"9" * 5_000 + b"}", "INVALID_FIRE_AT"),
    "NUL in an id": (b'{"body":1,"id":"a\\u0000"}', "INVALID_ID"),
    "DEL in an id": (b'{"body":1,"id":"a\\u007f"}', "INVALID_ID"),
    "a right-to-left mark in an id": ('{"body":1,"id":"\u202ea"}'.encode(), "INVALID_ID"),
    "an id of 202 bytes": (json.dumps({"body": 1, "id": "é" * 101}).encode(), "INVALID_ID"),
    "NUL in a header's name": (b'{"body":1,"headers":{"a\\u0000":"b"}}', "INVALID_MESSAGE"),
    "many unknown names": (b"{" + b",".join(b'"k%d":1' % i for i in range(50_000)) + b"}", "INVALID_MESSAGE"),
    "deep headers": (b'{"headers":' + b'{"a":' * 900 + b"1" + b"}" * 901, "INVALID_MESSAGE"),
    "lists of lists": (b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", "INVALID_MESSAGE"),
    "too many headers": (json.dumps({"body": 1, "headers": {str(i): "" for i in range(20_000)}}).encode(), "TOO_LARGE"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none(server: Server, name: str) -> None:
    for kind in ("application/json", "application/x-ndjson"):
        answer = server.call("POST", "/v1/topics/evil/messages", data=BAD_JSON[name], headers={"Content-Type": kind})
        decent(answer)
        assert (answer.status, answer.code) == (400, "INVALID_JSON"), answer
    for path in ("/v1/topics/there/ack", "/v1/topics/there/fetch", "/v1/topics/there/cancel", "/v1/topics/there/dead/requeue"):
        answer = server.call("POST", path, data=BAD_JSON[name])
        decent(answer)
        assert answer.status == 400, answer


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_messages_that_are_none(server: Server, name: str) -> None:
    data, code = BAD_MESSAGES[name]
    answer = server.call("POST", "/v1/topics/evil/messages", data=data)
    decent(answer)
    assert answer.code == code, answer


ODD_BODIES: dict[str, bytes] = {
    "a number beyond all": b"1e999",
    "a number of 100,000 digits": b"9" * 100_000,
    "a number of 2^64": b"[18446744073709551616]",
    "names that come twice": b'{"a":1,"a":2}',
    "NUL in a name": b'{"a\\u0000b":1}',
    "names of operators": b'{"$oid":"x","$date":1,"a.b":{"$":1}}',
    "an empty name": b'{"":{"":[{}]}}',
    "depth": b"[" * LEVELS_MAX + b"]" * LEVELS_MAX,
    "deep objects": b'{"a":' * LEVELS_MAX + b"1" + b"}" * LEVELS_MAX,
    "width": b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(20_000)) + b"}",
}


@pytest.mark.parametrize("name", ODD_BODIES)
def test_odd_bodies_come_back_everywhere_as_they_were(server: Server, name: str) -> None:
    """Or in BSON as near as can be; and nowhere do they break the answer that they are in."""
    body, topic = ODD_BODIES[name], "/v1/topics/odd"
    try:
        server.ok("PUT", topic, {"max_attempts": 1})
        server.ok("POST", f"{topic}/messages", data=b'{"id":"odd","body":%b}' % body)
        assert body in server.call("POST", f"{topic}/groups/a/fetch", {"wait": 10}).data
        packed = server.call("POST", f"{topic}/groups/b/fetch", {"wait": 10}, headers={"Accept": "application/bson"})
        assert [document["id"] for document in bson.decode_all(packed.data)] == ["odd"]
        assert body in server.call("GET", f"{topic}/messages/odd").data
        server.ok("POST", f"{topic}/groups/a/ack", {"acks": ["-odd"], "error": "\0 \U0001f422"})
        assert body in server.call("GET", f"{topic}/dead").data
        assert body in server.call("GET", f"{topic}/dead/export").data
        assert server.ok("GET", f"{topic}/dead/summary")["total"] == 1
        assert server.ok("POST", f"{topic}/dead/requeue", {"filter": {}, "delay": 1_000})["requeued"] == 1
        assert body in server.call("GET", f"{topic}/messages").data
        assert body in server.call("POST", "/v1/command", {"command": "pop", "topic": "odd"}).data
    finally:
        server.ok("DELETE", topic)


# BSON


def element(kind: int, name: bytes, value: bytes) -> bytes:
    return bytes([kind]) + name + b"\0" + value


def document(*elements: bytes) -> bytes:
    body = b"".join(elements) + b"\0"
    return struct.pack("<i", len(body) + 4) + body


def text(data: bytes) -> bytes:
    return struct.pack("<i", len(data) + 1) + data + b"\0"


def nest(depth: int, kind: int) -> bytes:
    out = document()
    for _ in range(depth):
        out = document(element(kind, b"0", out))
    return document(element(kind, b"body", out))


def of(**fields: Any) -> bytes:
    return bytes(bson.encode({"body": 1, **fields}))


GOOD_BSON = bytes(bson.encode({"body": b"x"}))
BAD_BSON: dict[str, bytes] = {
    "4 bytes": b"\x04\0\0\0",
    "zeros": b"\0\0\0\0\0",
    "2^31-1 bytes": b"\xff\xff\xff\x7f" + b"x" * 100,
    "-1 bytes": b"\xff\xff\xff\xff\0",
    "-2^31 bytes": b"\0\0\0\x80\0",
    "no name": struct.pack("<i", 9) + b"\x0aabc\0",
    "a type that is none": document(element(0x20, b"body", b"")),
    "rubbish before the end": struct.pack("<i", 16) + element(10, b"body", b"") + b"\0" * 5,
    "a binary that is too long": document(element(5, b"body", struct.pack("<i", 1_000) + b"\0abc")),
    "a binary of -1 bytes": document(element(5, b"body", struct.pack("<i", -1) + b"\0abc")),
    "a binary of -2^31 bytes": document(element(5, b"body", struct.pack("<i", -(2**31)) + b"\0abc")),
    "an old binary that lies": document(element(5, b"body", struct.pack("<i", 8) + b"\x02" + struct.pack("<i", 100) + b"abcd")),
    "a text that is too long": document(element(2, b"body", struct.pack("<i", 1_000) + b"abc\0")),
    "a text of 0 bytes": document(element(2, b"body", struct.pack("<i", 0) + b"\0")),
    "a text of -5 bytes": document(element(2, b"body", struct.pack("<i", -5) + b"abc\0")),
    "a text without end": document(element(2, b"body", struct.pack("<i", 3) + b"abc")),
    "a text that is no UTF-8": document(element(2, b"body", text(b"\xff\xfe"))),
    "half a pair": document(element(2, b"body", text(b"\xed\xa0\x80"))),
    "an id that is no UTF-8": document(element(2, b"id", text(b"\xff")), element(10, b"body", b"")),
    "a name that is no UTF-8": document(element(3, b"body", document(element(10, b"\xff", b"")))),
    "an inner document that is too long": document(element(3, b"body", struct.pack("<i", 1_000) + b"\0")),
    "an inner document of 4 bytes": document(element(3, b"body", struct.pack("<i", 4))),
    "a truth of 2": document(element(8, b"body", b"\2")),
    "code with a scope that lies": document(element(0x0F, b"body", struct.pack("<i", 100) + text(b"x") + document())),
    "documents that are a level too deep": nest(LEVELS_MAX, 3),
    "lists that are a level too deep": nest(LEVELS_MAX, 4),
    "20,000 documents in each other": nest(20_000, 3),
    "20,000 lists in each other": nest(20_000, 4),
}
BAD_BSON_MESSAGES: dict[str, tuple[bytes, str]] = {
    "nothing": (document(), "INVALID_MESSAGE"),
    "no body": (bson.encode({"id": "a"}), "INVALID_MESSAGE"),
    "decimal128": (of(body={"a": bson.Decimal128("1.5")}), "INVALID_MESSAGE"),
    "code": (of(body=bson.Code("x")), "INVALID_MESSAGE"),
    "code with a scope": (of(body=[bson.Code("x", {"a": 1})]), "INVALID_MESSAGE"),
    "a date beyond all": (document(element(9, b"body", struct.pack("<q", 2**63 - 1))), "INVALID_MESSAGE"),
    "an object id": (of(body=bson.ObjectId()), "INVALID_MESSAGE"),
    "a regular expression that is none": (of(body=bson.Regex("(")), "INVALID_MESSAGE"),
    "the least of all": (of(body=bson.MinKey()), "INVALID_MESSAGE"),
    "not a number": (of(body=[float("nan")]), "INVALID_MESSAGE"),
    "an unknown name": (of(evil=1), "INVALID_MESSAGE"),
    "an id of bytes": (of(id=b"a"), "INVALID_ID"),
    "an id with NUL": (document(element(2, b"id", text(b"a\0b")), element(10, b"body", b"")), "INVALID_ID"),
    "a delay that is no number": (of(delay=float("nan")), "INVALID_FIRE_AT"),
    "a delay without end": (of(delay=float("inf")), "INVALID_FIRE_AT"),
    "a delay of 2^62": (of(delay=bson.Int64(2**62)), "INVALID_FIRE_AT"),
    "a due time of -2^63": (of(due_ms=bson.Int64(-(2**63))), "INVALID_FIRE_AT"),
    "a due time as a date": (of(due_ms=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)), "INVALID_FIRE_AT"),
    "a due time as a truth": (of(due_ms=True), "INVALID_FIRE_AT"),
    "ttr without end": (of(ttr=float("inf")), "INVALID_MESSAGE"),
    "ttr as decimal": (of(ttr=bson.Decimal128("1")), "INVALID_MESSAGE"),
    "headers of bytes": (of(headers={"a": b"x"}), "INVALID_MESSAGE"),
    "headers as a list": (of(headers=["a"]), "INVALID_MESSAGE"),
    "a priority as a document": (of(priority={}), "INVALID_MESSAGE"),
    "an end of -2^63": (of(expires_ms=bson.Int64(-(2**63))), "INVALID_MESSAGE"),
}


def in_a_crowd(bad: bytes) -> Iterable[tuple[bytes, int]]:
    """A document alone, and among many good ones that arrays read."""
    return (bad, 0), (GOOD_BSON * 60 + bad + GOOD_BSON * 60, 60)


@pytest.mark.parametrize("name", BAD_BSON)
def test_bson_that_is_none(server: Server, name: str) -> None:
    for data, index in in_a_crowd(BAD_BSON[name]):
        answer = server.call("POST", "/v1/topics/evil/messages", data=data, headers={"Content-Type": "application/bson"})
        decent(answer)
        assert (answer.status, answer.code, answer.json["error"]["index"]) == (400, "INVALID_BSON", index), answer


@pytest.mark.parametrize("name", BAD_BSON_MESSAGES)
def test_bson_that_is_no_message(server: Server, name: str) -> None:
    bad, code = BAD_BSON_MESSAGES[name]
    for data, index in in_a_crowd(bad):
        answer = server.call("POST", "/v1/topics/evil/messages", data=data, headers={"Content-Type": "application/bson"})
        decent(answer)
        assert (answer.status, answer.code, answer.json["error"]["index"]) == (400, code, index), answer
        assert "np." not in answer.json["error"]["message"]


def test_bson_of_some_depth_is_a_message(server: Server) -> None:
    for kind in (3, 4):
        data = nest(LEVELS_MAX - 1, kind)  # the innermost one is a level, too
        answer = server.call("POST", "/v1/topics/taken/messages", data=data, headers={"Content-Type": "application/bson"})
        assert answer.status == 201, answer


# Fuzzing

ENDPOINTS = [
    *(("POST", f"/v1/topics/fuzz/{verb}") for verb in "messages fetch ack extend cancel dead/requeue dead/delete".split()),
    *(("POST", f"/v1/topics/fuzz/groups/g/{verb}") for verb in "fetch ack extend".split()),
    ("PUT", "/v1/topics/fuzz/groups/g"),
    ("PATCH", "/v1/topics/fuzz/messages/m"),
    ("POST", "/v1/command"),
]
NAMES = (
    "messages body body_base64 id ids delay due_ms ttr priority expires_ms headers max wait consumer ack acks retry_delay error "
    "due_from_ms due_to_ms filter group from_ms to_ms reset_attempts per_s start ready_ms command topic TTR limit cursor"
).split()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 2**42, 2**53, 2**63, -(2**63), 1.5, 1e308, -0.0, 5e-324])
    | st.sampled_from(["", "-", "--", "-m", "m", "/", "a/b", "\0", "fuzz", "add", "pop", "finish", "delete", "earliest", "auto"])
    | st.text(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
PIECES = [GET, POST, CHUNKED, BODY, LAST, b"\r\n", b"\r\n\r\n", b"Content-Length: 10\r\n", b"a\r\n", b"\0", b"Host: y\r\n"]
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def no_wait(value: Any) -> Any:
    """Long polls would take their time."""
    return {**value, "wait": 0} if isinstance(value, dict) and "wait" in value else value


def fits_bson(value: Any) -> bool:
    return not isinstance(value, int) or -(2**63) <= value < 2**63


@FEW
@given(endpoint=st.sampled_from(ENDPOINTS), value=OBJECTS | VALUES)
def test_any_json_on_any_endpoint(server: Server, endpoint: tuple[str, str], value: Any) -> None:
    decent(server.call(*endpoint, data=json.dumps(no_wait(value)).encode()))


@FEW
@given(
    endpoint=st.sampled_from(ENDPOINTS),
    data=st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "application/x-ndjson", "application/bson"]),
    packed=st.sampled_from(["identity", "gzip", "deflate", "zstd"]),
)
def test_any_bytes_on_any_endpoint(server: Server, endpoint: tuple[str, str], data: bytes, kind: str, packed: str) -> None:
    decent(server.call(*endpoint, data=data, headers={"Content-Type": kind, "Content-Encoding": packed}))


@FEW
@given(
    fields=st.dictionaries(st.sampled_from(NAMES[:11]), LEAVES.filter(fits_bson), max_size=5),
    body=st.binary(max_size=10) | st.text(max_size=10),
    copies=st.sampled_from([1, 60]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3),
)
def test_any_bson(server: Server, fields: Any, body: Any, copies: int, changes: list[tuple[int, int]]) -> None:
    data = bytearray(bson.encode(fields | {"body": body}) * copies)
    for place, byte in changes:
        data[place % len(data)] = byte
    answer = server.call("POST", "/v1/topics/fuzz/messages", data=bytes(data), headers={"Content-Type": "application/bson"})
    decent(answer)
    found = server.call("POST", "/v1/topics/fuzz/fetch", {"ack": "auto"}, headers={"Accept": "application/bson"})
    decent(found)
    bson.decode_all(found.data)


@FEW
@given(
    parts=st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), max_size=6),
)
def test_any_bytes_on_a_connection(server: Server, parts: list[bytes]) -> None:
    """The rest of an ordinary request follows, so that there is an answer, after any beginning."""
    data = b"".join(parts).replace(b"evil", b"fuzz")
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as connection:
        connection.sendall(data + b"\r\n\r\n")
        connection.sendall(GET + b"\r\n")
        out = b""
        try:
            while piece := connection.recv(1 << 16):
                out += piece
        except ConnectionError:
            pass
    heard(out)


# Topics that vanish while clients use them


def deeds(dice: random.Random) -> Iterator[tuple[str, str, Any]]:
    """All permitted requests, in any order."""
    while True:
        topic, group, id_ = f"/v1/topics/{dice.choice('ab')}", f"/groups/{dice.choice('gh')}", f"m{dice.randrange(50)}"
        name = topic[-1]
        messages = [{"id": f"m{dice.randrange(50)}", "body": "x" * 99, "delay": dice.choice([0, 0.01, 99])} for _ in range(50)]
        tuned = {"max_attempts": 1, "segment_bytes": dice.choice([4_096, 1 << 20]), "backoff": {"base": 0.01, "max": 0.01}}
        often: list[tuple[str, str, Any]] = [
            ("POST", f"{topic}/messages", {"messages": messages}),
            ("POST", f"{topic}{group}/fetch", {"max": 50, "wait": dice.choice([0, 0.1]), "ttr": 0.1, "ack": "manual"}),
            ("POST", f"{topic}{group}/ack", [dice.choice(["", "-"]) + f"m{dice.randrange(50)}" for _ in range(20)]),
            ("POST", f"{topic}/cancel", dice.choice([{"ids": [id_, "m1"]}, {"due_from_ms": 0}])),
            ("PATCH", f"{topic}/messages/{id_}", {"delay": dice.choice([0, 50]), "body": 2}),
            ("DELETE", f"{topic}/messages/{id_}", None),
        ]
        seldom: list[tuple[str, str, Any]] = [
            ("POST", f"{topic}{group}/extend", {"ids": [id_], "ttr": 1}),
            *(
                ("GET", topic + rest, None)
                for rest in ("", "/messages", f"/messages/{id_}", "/forecast", "/dead", "/dead/export")
            ),
            *(("GET", path, None) for path in ("/v1/topics", "/v1/status", "/metrics", f"{topic}/dead/summary")),
            *(("POST", f"{topic}/dead/{verb}", {"filter": {}}) for verb in ("requeue", "delete")),
            ("POST", f"{topic}/compact", None),
            ("PUT", topic, tuned),
            ("PUT", topic + group, {"start": dice.choice(["earliest", "latest", {"ready_ms": 0}])}),
            ("DELETE", topic + group, None),
            *(("DELETE", topic, None) for _ in range(3)),
            *((method, "/v1/backup", None) for method in ("POST", "DELETE")),
            (
                "POST",
                "/v1/command",
                {"command": dice.choice("add pop finish delete".split()), "topic": name, "id": id_, "body": 1},
            ),
        ]
        yield dice.choice(often if dice.random() < 0.6 else seldom)


@pytest.mark.slow
def test_whatever_is_deleted_while_others_use_it_nothing_breaks(tmp_path: Path) -> None:
    def work(server: Server, seed: int) -> None:
        for method, path, value in islice(deeds(random.Random(seed)), 100):
            answer = server.call(method, path, value)
            assert answer.status < 500, (method, path, value, answer)

    with running(tmp_path / "data") as server:
        with ThreadPoolExecutor(6) as pool:
            working = [pool.submit(work, server, seed) for seed in range(6)]
            for one in working:
                one.result()
        unharmed(server)
    found = server_process.run("check", "--data", str(tmp_path / "data"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_recreated_topic_knows_nothing_of_the_old_one(server: Server) -> None:
    for body in ("old", "new"):
        assert server.ok("POST", "/v1/topics/again/messages", {"id": "a", "body": body})["created"] == 1
        assert server.ok("GET", "/v1/topics/again/messages/a")["body"] == body
        assert [message["body"] for message in server.fetch("again", wait=10)] == [body]
        assert server.ok("DELETE", "/v1/topics/again") == {"outcome": "deleted"}


def test_a_topic_whose_removal_was_cut_off_does_not_come_back(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    for topic in ("gone", "kept"):
        engine.submit(topic, [Message(b"x", due_ms=0)], now_ms=0)
    engine.close()
    (tmp_path / "topic" / "gone").rename(tmp_path / "topic" / names.dropped("gone"))
    engine = Engine.open(tmp_path)
    assert list(engine.topics) == ["kept"]
    engine.drop_topic("kept")
    assert list((tmp_path / "topic").iterdir()) == []
    engine.close()
