"""Time over real HTTP: never early, hardly late, long polls woken at once, and stops and kills that lose nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.server_process import Server, run, running
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument
from turtlemq.server.config import load

LATE_S = 1.0  # on a busy machine; idle it is a few milliseconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("time") / "data") as found:
        yield found


class Background:
    """A call on a thread of its own, with the time at which it was answered."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.value = self._call()
        self.at = time.time()

    def result(self) -> Any:
        self._thread.join(20)
        return self.value


def test_a_message_is_never_early_and_hardly_late(server: Server) -> None:
    assert server.fetch("early") == []
    poll = Background(lambda: server.fetch("early", wait=10))
    server.put("early", {"body": 1, "delay": 0.4})
    (message,) = poll.result()
    assert message["ready_ms"] >= message["due_ms"]
    assert 0 <= poll.at - message["due_ms"] / 1000 < LATE_S


def test_an_earlier_message_is_not_held_up_by_a_later_one(server: Server) -> None:
    server.put("order", {"body": "late", "delay": 60})
    server.put("order", {"body": "soon", "delay": 0.3})
    started = time.monotonic()
    assert [message["body"] for message in server.fetch("order", wait=10)] == ["soon"]
    assert time.monotonic() - started < 0.3 + LATE_S


def test_a_long_poll_is_woken_by_a_put(server: Server) -> None:
    poll = Background(lambda: server.fetch("woken", wait=10))
    time.sleep(0.2)
    started = time.time()
    server.put("woken", {"body": 1})
    assert len(poll.result()) == 1
    assert poll.at - started < LATE_S


def test_retries_and_expired_leases_wake_a_long_poll(server: Server) -> None:
    server.put("retried", {"body": 1, "id": "a"}, {"body": 2, "id": "b"})
    server.fetch("retried", max=1, ttr=60)
    server.fetch("retried", max=1, ttr=0.3)
    server.ack("retried", "-a", retry_delay=0.6)
    started = time.monotonic()
    assert [message["id"] for message in server.fetch("retried", wait=10)] == ["b"]
    assert [message["id"] for message in server.fetch("retried", wait=10)] == ["a"]
    assert time.monotonic() - started < 0.6 + LATE_S


def test_an_empty_long_poll_ends_in_time(server: Server) -> None:
    started = time.monotonic()
    assert server.fetch("nothing", wait=0.3) == []
    assert 0.25 < time.monotonic() - started < 0.3 + LATE_S


def test_those_who_wait_share_what_comes(server: Server) -> None:
    polls = [Background(lambda: server.fetch("shared", max=1, wait=10)) for _ in range(5)]
    time.sleep(0.2)
    server.put("shared", *({"body": i} for i in range(5)))
    assert sorted(message["body"] for poll in polls for message in poll.result()) == [0, 1, 2, 3, 4]


def test_what_a_vanished_consumer_was_given_is_not_lost(server: Server) -> None:
    server.ok("PUT", "/v1/topics/vanished", {})
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        body = json.dumps({"wait": 30}).encode()
        head = "POST /v1/topics/vanished/fetch HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.2)
    time.sleep(0.2)
    server.put("vanished", {"body": 1})
    assert len(server.fetch("vanished", wait=5)) == 1


def test_a_budget_that_is_spent_and_one_that_ends_a_poll(server: Server) -> None:
    spent = server.call("POST", "/v1/topics/b/messages", {"body": 1}, headers={"X-Turtlemq-Budget-Ms": "0"})
    assert (spent.status, spent.code) == (504, "DEADLINE_EXCEEDED")
    assert server.call("GET", "/v1/topics/b").status == 404
    started = time.monotonic()
    asked = {"wait": 30}
    assert server.ok("POST", "/v1/topics/b/fetch", asked, headers={"X-Turtlemq-Budget-Ms": "300"}) == {"messages": []}
    assert time.monotonic() - started < 0.3 + LATE_S


def test_a_budget_that_ends_before_the_body_is_not_slowness(server: Server) -> None:
    """Whether the clock of the loop rings a little early or a little late."""
    head = "POST /v1/topics/b/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n"
    for number in range(40):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(f"{head}X-Turtlemq-Budget-Ms: {1 + number % 7}\r\n\r\n".encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 504 ")


# Stopping and starting


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_drains_long_polls_and_leaves_the_clean_mark(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path / "data") as server:
        server.put("t", {"body": 1, "id": "a", "delay": 60})
        poll = Background(lambda: server.fetch("t", wait=30))
        time.sleep(0.2)
        started = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - started < 5
        assert poll.result() == []
    assert (tmp_path / "data" / "CLEAN").exists()
    engine = Engine.open(tmp_path / "data")
    assert engine.was_clean
    assert engine.check() == []
    engine.close()


@pytest.mark.slow
def test_a_kill_forgets_nothing_that_was_answered(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 1})
        server.put("t", *({"body": i, "id": f"m{i}"} for i in range(4)), {"body": 4, "id": "m4", "delay": 1})
        server.fetch("t", max=2)
        server.ack("t", "m0")
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    with running(tmp_path / "data") as server:
        seen: set[str] = set()
        while len(seen) < 4:
            found = server.fetch("t", wait=5)
            assert found, seen
            seen |= {message["id"] for message in found}
        assert seen == {"m1", "m2", "m3", "m4"}
        assert server.ok("GET", "/v1/topics/t")["settings"]["ttr"] == 1


@pytest.mark.slow
def test_a_second_server_says_why_it_ends(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        second = run("serve", "--data", str(tmp_path / "data"), "--port", "0")
        assert second.returncode == 1
        assert "Cannot open the data folder" in second.stderr
        other = run("serve", "--data", str(tmp_path / "other"), "--port", str(server.port))
        assert other.returncode == 1
        assert "Cannot listen" in other.stderr


def test_configuration_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "turtlemq.toml"
    file.write_text("auto_create_topics = false\nmax_delay_days = 1\nmax_delivery_retries = 1\n[defaults]\nttr = 5\n")
    with running(tmp_path / "data", "--config", str(file), TURTLEMQ_REJECT_PAST="true") as server:
        assert server.call("POST", "/v1/topics/t/messages", {"body": 1}).code == "UNKNOWN_TOPIC"
        assert server.call("POST", "/v1/topics/t/fetch", {}).code == "UNKNOWN_TOPIC"
        settings = server.ok("PUT", "/v1/topics/t", {})["settings"]
        assert (settings["ttr"], settings["max_attempts"]) == (5, 2)
        messages = [{"body": 1, "delay": 86_000}, {"body": 1, "delay": 87_000}]
        refused = server.call("POST", "/v1/topics/t/messages", {"messages": messages})
        assert (refused.code, refused.json["error"]["index"]) == ("EXCEEDS_MAX_DELAY", 1)
        assert server.call("POST", "/v1/topics/t/messages", {"body": 1, "due_ms": 10**12}).code == "INVALID_FIRE_AT"


@pytest.mark.parametrize(
    ("text", "said"),
    [("prot = 1", "did you mean port?"), ("port = 'x'", "port"), ("= 1", "TOML")],
)
def test_a_wrong_configuration_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        load({}, {}, tmp_path / "t.toml")


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("port = 1\nhost = 'file'\ndata = 'file'\n")
    found = load({"port": 3, "host": None}, {"TURTLEMQ_PORT": "2", "TURTLEMQ_HOST": "environment"}, tmp_path / "t.toml")
    assert (found.port, found.host, found.data) == (3, "environment", "file")


def have_a_segment_sealed(server: Server) -> None:
    """So that there is a worker process."""
    server.ok("PUT", "/v1/topics/t", {"segment_bytes": 50_000})
    for _ in range(4):
        server.put("t", *({"body": "x" * 50, "delay": 3600 + i} for i in range(500)))
    end = time.monotonic() + 15
    while not list((server.data / "topic/t").glob("delay_*.index")):
        assert time.monotonic() < end, "nothing was sealed"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    """It would go on sealing, and the next server may seal the same segment under the same names."""
    with running(tmp_path / "data") as server:
        have_a_segment_sealed(server)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert children, "the worker, and what multiprocessing has beside it"
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 15
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < end, "it is still there"
            time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_does_no_harm_to_the_worker_process(tmp_path: Path) -> None:
    with running(tmp_path / "data", group=True) as server:
        have_a_segment_sealed(server)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(10) == 0
        assert "Traceback" not in server.log
    assert (tmp_path / "data" / "CLEAN").exists()


@pytest.mark.parametrize("kind", ["json", "bson"])
def test_messages_that_could_not_be_sent_come_back_at_once(tmp_path: Path, kind: str) -> None:
    """A consumer hangs up in the middle of a large answer: the next one gets all of it, without waiting for the lease."""
    with running(tmp_path / "data") as server:
        ids = [id_ for _ in range(8) for id_ in server.put("big", *({"body": "x" * 500_000} for _ in range(4)))]
        request = b'{"max": 100, "ttr": 3600}'
        accept = f"Accept: application/{kind}\r\nContent-Type: application/json\r\n"
        head = f"POST /v1/topics/big/fetch HTTP/1.1\r\nHost: x\r\n{accept}"
        with socket.socket() as consumer:
            consumer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            consumer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            consumer.connect(("127.0.0.1", server.port))
            consumer.sendall(f"{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
            assert consumer.recv(1000).startswith(b"HTTP/1.1 200")
            assert server.ok("GET", "/v1/topics/big")["stats"]["reserve"] == len(ids)
        again = server.fetch("big", max=100, wait=10)
        assert sorted(message["id"] for message in again) == sorted(ids)
