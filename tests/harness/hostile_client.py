"""A hostile client on raw sockets, and the server that it attacks: after each test the server is looked over."""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import pytest

from tests.harness.server_process import Answer, Server, running, sockets

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
