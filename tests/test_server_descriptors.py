"""Descriptors of a real server: connections never take those of files, and hundreds of topics never use up all of them."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.certificates import certificate
from tests.harness.server_process import Server, running, sockets

SMALL_SEGMENTS = json.dumps({"segment_bytes": 4096})


class Client:
    """Requests over one connection that stays open; it is opened again when it is lost."""

    def __init__(self, server: Server) -> None:
        self._server, self.seen = server, Counter[int]()
        self._connection = self._new()

    def _new(self) -> http.client.HTTPConnection:
        if self._server.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=20)
        return http.client.HTTPSConnection("127.0.0.1", self._server.port, timeout=20, context=self._server.tls)

    def call(self, method: str, path: str, value: object = None) -> bytes:
        """Send until it succeeds: 503 and 429 with a time to come again are the only other answers."""
        for _ in range(100):
            try:
                self._connection.request(method, path, json.dumps(value), {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                data = answer.read()
            except (http.client.HTTPException, ConnectionError):
                self._connection.close()
                self._connection = self._new()
                self.seen[0] += 1
                continue
            self.seen[answer.status] += 1
            if answer.status < 300:
                return data
            assert answer.status in (429, 503), (answer.status, data)
            assert answer.headers["Retry-After"], data
            time.sleep(0.05)
        raise AssertionError(f"{method} {path}: {self.seen}")

    def close(self) -> None:
        self._connection.close()


def metric(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@contextmanager
def crowd(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send nothing. The kernel takes them, whether or not the server accepts them."""
    idle: list[socket.socket] = []
    try:
        for _ in range(count):
            idle.append(one := socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", server.port))
        yield idle
    finally:
        for one in idle:
            one.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("with_tls", [False, True])
def test_idle_connections_take_no_descriptors_from_topics(tmp_path: Path, with_tls: bool) -> None:
    tls: ssl.SSLContext | None = None
    settings: dict[str, Any] = {"TURTLEMQ_DEFAULTS": SMALL_SEGMENTS}
    if with_tls:
        cert, key = certificate(tmp_path)
        tls = ssl.create_default_context(cafile=str(cert))
        settings |= {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key)}
    with running(tmp_path / "data", tls=tls, files=256, **settings) as server:
        client = Client(server)
        for topic in range(10):
            client.call("POST", f"/v1/topics/t{topic}/messages", {"body": "x"})
        with crowd(server, 600):
            until(lambda: sockets(server) >= (32 if with_tls else 128))  # TLS: the most handshakes of one host
            for i in range(20):
                for topic in range(10):
                    client.call("POST", f"/v1/topics/t{topic}/messages", {"body": "x" * 400, "id": f"m{i}"})
                assert sockets(server) <= 128 + 16 + 8, "connections, refusals, and sockets of the server itself"
        assert client.seen == {201: 210}
        figures = client.call("GET", "/metrics").decode()
        assert metric(figures, "turtlemq_sockets") <= metric(figures, "turtlemq_sockets_max") == 128 + 16
        assert metric(figures, "turtlemq_connections_refused_total") > 0
        assert with_tls or metric(figures, "turtlemq_accept_pauses_total") > 0
        until(lambda: sockets(server) < 12)
        for topic in range(10):
            assert server.ok("GET", f"/v1/topics/t{topic}")["stats"]["sleep"] in range(22)
            server.put(f"t{topic}", {"body": "y"})
        client.close()
        assert "topic_stopped" not in server.log


@pytest.mark.parametrize(("open_files", "topics"), [(256, 65), pytest.param(1024, 400, marks=pytest.mark.slow)])
def test_many_topics_within_one_beat_never_wedge_the_server(tmp_path: Path, open_files: int, topics: int) -> None:
    with running(tmp_path / "data", files=open_files, TURTLEMQ_BEAT_MS="2000") as server:
        client, acked = Client(server), 0
        for i in range(4):
            for topic in range(topics):
                client.call("POST", f"/v1/topics/t{topic}/messages", {"body": "x", "id": f"m{i}"})
            for topic in range(topics):
                got = json.loads(client.call("POST", f"/v1/topics/t{topic}/fetch", {"max": 10, "wait": 5}))["messages"]
                acks = {"acks": [message["id"] for message in got]}
                acked += json.loads(client.call("POST", f"/v1/topics/t{topic}/ack", acks))["acked"]
            assert server.call("GET", "/readyz").status == 200
            assert metric(server.call("GET", "/metrics").data.decode(), "process_open_fds") < open_files
        assert acked == 4 * topics
        assert client.seen == {201: 4 * topics, 200: 8 * topics}
        client.close()
        assert server.stop() == 0
        assert "topic_in_trouble" not in server.log
        assert "topic_stopped" not in server.log


def test_the_limit_on_open_files_is_raised_as_far_as_allowed(tmp_path: Path) -> None:
    with running(tmp_path / "data", TURTLEMQ_MAX_CONNECTIONS="50") as server:
        soft, hard = Path(f"/proc/{server.process.pid}/limits").read_text().split("Max open files")[1].split()[:2]
        assert soft == hard or int(soft) == 1 << 20
