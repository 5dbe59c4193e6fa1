"""Promises to a client while other clients stop reading, send slowly, go away late or ask for very much at once, and when a
disk fails. No client is starved, stalled, robbed of a message, told a wrong number or left without an answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import server_process
from tests.harness.committer import Server as Committing
from tests.harness.committer import Slow
from tests.harness.server_process import Server, running, sockets
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.server.clock import now_ms
from turtlemq.server.commit import THREADS
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.service import Service
from turtlemq.storage.door import Door

PATIENCE_S = 20  # a request that takes longer hangs
FAR_MS = 4_000_000_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("trust") / "data") as found:
        yield found
        assert "Traceback" not in found.log


def request(method: str, path: str, body: bytes, *headers: str) -> bytes:
    told = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((f"{method} {path} HTTP/1.1", *told, "", "")).encode() + body


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def greedy(server: Server, topic: str, group: str) -> Iterator[socket.socket]:
    """A consumer that is given everything, and takes only the beginning of it. At the end it hangs up."""
    with socket.socket() as consumer:
        consumer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        consumer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        consumer.settimeout(PATIENCE_S)
        consumer.connect(("127.0.0.1", server.port))
        consumer.sendall(request("POST", f"/v1/topics/{topic}/groups/{group}/fetch", b'{"ttr":3600,"wait":20,"max":1000}'))
        assert consumer.recv(1000).startswith(b"HTTP/1.1 200")
        yield consumer


def more_than_buffers_hold(server: Server, topic: str) -> list[str]:
    ids = [id_ for _ in range(8) for id_ in server.put(topic, *({"body": "x" * 500_000} for _ in range(4)))]
    until(lambda: server.ok("GET", f"/v1/topics/{topic}")["stats"]["ready"] == len(ids))
    return ids


# Consumers


def test_a_poll_whose_time_is_up_takes_no_message_with_it(tmp_path: Path) -> None:
    """It ends in the same turn of the loop in which a message is ready; with `auto` nothing can be given back."""
    want = FetchRequest("t", "g", 1, auto=True)

    def send_late(engine: Engine, id_: str) -> None:
        time.sleep(0.03)  # the poll's time is up, but the clock was not read yet
        engine.submit("t", [Message(b"x", due_ms=0, id=id_)], now_ms())

    async def story() -> list[str]:
        engine, service, got = Engine.open(tmp_path / "d"), Service(), list[str]()
        engine.topic("t", create=True)
        service.start(engine)
        for number in range(5):
            poll = asyncio.create_task(service.fetch(want, 0.02))
            await asyncio.sleep(0.005)
            send_late(engine, str(number))
            await asyncio.sleep(0)
            service.answer_polls_soon("t")
            got += (await poll).ids
            got += (await service.fetch(want, 0.2)).ids if str(number) not in got else []
        service.drain()
        service.close()
        engine.close()
        return got

    assert asyncio.run(story()) == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
def test_unread_answers_count_as_held_bytes(tmp_path: Path) -> None:
    env: dict[str, Any] = {"TURTLEMQ_MAX_BODY_BYTES": "4194304", "TURTLEMQ_MAX_HELD_BYTES": "8388608"}
    asked = ("POST", "/v1/topics/big/groups/other/fetch", {"max": 1})
    with running(tmp_path / "data", **env) as server, ThreadPoolExecutor(1) as threads:
        more_than_buffers_hold(server, "big")
        server.put("later", {"body": 1, "delay": 0.7})
        poll = threads.submit(server.fetch, "later", wait=PATIENCE_S)
        until(lambda: server.ok("GET", "/v1/status")["long_polls"] == 1)
        with greedy(server, "big", "slow"):
            refused = server.call(*asked)
            assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "OVERLOADED", "1")
            assert "other" not in server.ok("GET", "/v1/topics/big")["groups"], "nothing was taken for it"
            until(lambda: server.ok("GET", "/v1/topics/later")["stats"]["sleep"] == 0)
        until(lambda: server.call(*asked).status == 200)
        assert [message["body"] for message in poll.result()] == [1], "who waited goes on as well"


def test_who_hangs_up_late_takes_no_lease_of_another(server: Server) -> None:
    """Both have it for the first time: between them the group was moved back."""
    ids = more_than_buffers_hold(server, "late")
    before = sockets(server)
    with greedy(server, "late", "g"):
        server.ok("PUT", "/v1/topics/late/groups/g", {"start": "earliest"})
        assert [message["attempt"] for message in server.fetch("late", "g", max=100, ttr=600)] == [1] * len(ids)
    until(lambda: sockets(server) <= before)
    stats = server.ok("GET", "/v1/topics/late")["stats"]
    assert (stats["ready"], stats["reserve"]) == (0, len(ids))
    acked = server.ok("POST", "/v1/topics/late/groups/g/ack", ids)
    assert (acked["acked"], acked["unknown"]) == (len(ids), [])


# Heavy requests


@pytest.mark.slow
@pytest.mark.parametrize("by", ["range", "ids"])
def test_a_long_cancel_gives_others_their_turn(tmp_path: Path, by: str) -> None:
    """Even if its connection was the only one, and every commit is made on the loop."""
    with running(tmp_path / "data") as server:
        ids = server.put("many", *({"body": 1, "id": f"a message of ours {i}", "delay": 90_000} for i in range(20_000)))
        server.put("other", *({"body": 1, "delay": i / 100} for i in range(3_000)))
        asked = {"ids": ids} if by == "ids" else {"due_from_ms": 0, "due_to_ms": FAR_MS}
        time.sleep(0.1)  # earlier requests are over
        answered = found = 0
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as one:
            one.sendall(request("POST", "/v1/topics/many/cancel", json.dumps(asked).encode()))
            time.sleep(0.1)  # it is at work before other requests come
            while not _has_come(one):
                some = server.fetch("other", ack="auto")
                if not _has_come(one):
                    answered, found = answered + 1, found + bool(some)
            assert b'"cancelled":20000' in one.recv(4096)
        assert answered > 1, "requests of others"
        assert found > 1, "ticks that handed something off"


def _has_come(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(PATIENCE_S)


def dead_letters(server: Server, topic: str, count: int) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    ids = server.put(topic, *({"body": i} for i in range(count)))
    while count:
        count -= len(server.fetch(topic, max=count, wait=PATIENCE_S))
    server.ack(topic, *(f"-{id_}" for id_ in ids))


@pytest.mark.parametrize(("what", "told"), [("delete", "deleted"), ("requeue", "requeued")])
def test_two_who_clear_the_same_dead_letters_count_each_once(server: Server, what: str, told: str) -> None:
    topic, count = f"graves-{what}", 2_000
    dead_letters(server, topic, count)
    asked = json.dumps({"filter": {}} if what == "delete" else {"filter": {}, "delay": 3600})
    both = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S) for _ in range(2)]
    for one in both:
        one.connect()
    for one in both:
        one.request("POST", f"/v1/topics/{topic}/dead/{what}", asked, {"Content-Type": "application/json"})
    answers = [json.loads(one.getresponse().read()) for one in both]
    for one in both:
        one.close()
    assert sum(answer[told] for answer in answers) == count
    stats = server.ok("GET", f"/v1/topics/{topic}")["stats"]
    assert (stats["dead"], stats["sleep"]) == (0, count if what == "requeue" else 0)


def test_dead_letters_cannot_be_requeued_to_a_time_that_is_none(server: Server) -> None:
    dead_letters(server, "timeless", 1)
    for due_ms in (10**30, -1):
        refused = server.call("POST", "/v1/topics/timeless/dead/requeue", {"filter": {}, "due_ms": due_ms})
        assert (refused.status, refused.code) == (400, "INVALID_FIRE_AT")
    assert server.ok("GET", "/v1/topics/timeless")["stats"]["dead"] == 1


def test_an_exported_dead_letter_is_one_line(server: Server) -> None:
    server.ok("PUT", "/v1/topics/lines", {"max_attempts": 1})
    for body in (b'{\n  "a": 1\n}', b"[1,\r\n2]", b'"\\n"', b"3"):
        server.ok("POST", "/v1/topics/lines/messages", data=b'{"body": ' + body + b"}")
    until(lambda: server.ok("GET", "/v1/topics/lines")["stats"]["ready"] == 4)
    server.ack("lines", *(f"-{message['id']}" for message in server.fetch("lines", max=4)))
    exported = server.call("GET", "/v1/topics/lines/dead/export").data
    assert [json.loads(line)["body"] for line in exported.splitlines()] == [{"a": 1}, [1, 2], "\n", 3]


# Commits


def test_a_topic_recreated_in_one_turn_commits(tmp_path: Path) -> None:
    async def story() -> None:
        server = Committing(tmp_path / "d", Door())

        async def drop() -> None:
            server.engine.drop_topic("t")

        first, _, last = (asyncio.create_task(one) for one in (server.put("first"), drop(), server.put("last")))
        assert await asyncio.wait_for(first, PATIENCE_S) == [True]
        assert await asyncio.wait_for(last, PATIENCE_S) == [True]
        server.close()

    asyncio.run(story())
    engine = Engine.open(tmp_path / "d")
    assert engine.get("t", "last") is not None
    assert engine.get("t", "first") is None
    engine.close()


@pytest.mark.timeout(PATIENCE_S)
def test_an_urgent_write_does_not_deadlock_with_its_thread(tmp_path: Path) -> None:
    """A long back-off is stored at once, behind a group of its topic that no thread has begun; it is the loop that frees them."""
    door = Slow()

    async def story() -> None:
        server = Committing(tmp_path / "d", door)
        door.gate.set()
        await server.put("failed", due_ms=0)
        server.engine.tick(0)
        assert server.engine.reserve("t", "g", 1, 0).ids == ["failed"]
        door.gate.clear()
        topics = [*(f"busy{n}" for n in range(THREADS)), "t"]
        tasks = [asyncio.create_task(server.put("new", topic=topic)) for topic in topics]
        await asyncio.sleep(0.1)
        threading.Timer(0.1, door.gate.set).start()
        assert server.engine.ack("t", "g", ["-failed"], 0, retry_delay_ms=3_600_000).failed == 1
        assert await asyncio.gather(*tasks) == [[True]] * len(tasks)
        assert server.engine.stats("t").sleep == 2
        assert server.engine.check() == []
        server.close()

    asyncio.run(story())


# Slow bodies


class SlowBody:
    """A request whose handler has begun, and whose last byte has not come."""

    def __init__(self, server: Server, method: str, path: str, body: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        head = request(method, path, body, "Expect: 100-continue").removesuffix(body)
        self._socket.sendall(head + body[:-1])
        self._last = body[-1:]
        assert self._socket.recv(1000).startswith(b"HTTP/1.1 100")

    def status(self) -> int:
        """Of the answer to all of it."""
        with self._socket:
            self._socket.sendall(self._last)
            return int(self._socket.recv(4096).split()[1])


def test_limits_of_topics_and_groups_hold_for_slow_bodies(tmp_path: Path) -> None:
    with running(tmp_path / "data", TURTLEMQ_MAX_TOPICS="2", TURTLEMQ_MAX_GROUPS="2") as server:
        kinds = (("POST", "/messages", b'{"body":1}'), ("POST", "/fetch", b"{}"), ("PUT", "/groups/g", b"{}"))
        made = [SlowBody(server, method, f"/v1/topics/t{i}{path}", body) for method, path, body in kinds for i in (1, 2, 3)]
        made += [SlowBody(server, "PUT", f"/v1/topics/u{i}", b"{}") for i in range(3)]
        assert sorted({one.status() for one in made}) == [200, 201, 400]
        assert [found["topic"] for found in server.ok("GET", "/v1/topics")["topics"]] == ["t1", "t2"]
        server.ok("DELETE", "/v1/topics/t1")
        server.ok("PUT", "/v1/topics/t1", {})
        crowd = [SlowBody(server, "POST", f"/v1/topics/t1/groups/a{i}/fetch", b"{}") for i in range(3)]
        crowd += [SlowBody(server, "PUT", f"/v1/topics/t1/groups/b{i}", b"{}") for i in range(3)]
        assert [one.status() for one in crowd] == [200, 200, 400, 400, 400, 400]
        assert set(server.ok("GET", "/v1/topics/t1")["groups"]) == {"a0", "a1"}


def test_a_slow_body_does_not_recreate_a_deleted_topic(tmp_path: Path) -> None:
    """Where topics do not appear by themselves."""
    with running(tmp_path / "data", TURTLEMQ_AUTO_CREATE_TOPICS="false") as server:
        server.ok("PUT", "/v1/topics/t", {})
        kinds = (("POST", "/messages", b'{"body":1}'), ("POST", "/fetch", b"{}"), ("PUT", "/groups/g", b"{}"))
        slow = [SlowBody(server, method, f"/v1/topics/t{path}", body) for method, path, body in kinds]
        server.ok("DELETE", "/v1/topics/t")
        assert [one.status() for one in slow] == [404, 404, 404]
        assert server.call("GET", "/v1/topics/t").code == "UNKNOWN_TOPIC"


def test_a_command_that_came_too_slowly_ends_its_connection(tmp_path: Path) -> None:
    """Else the rest of its body could be taken for another request."""
    with running(tmp_path / "data", TURTLEMQ_BODY_TIMEOUT_S="0.1") as server:
        heard = b""
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as slow:
            slow.sendall(request("POST", "/v1/command", b" " * 100)[:-50])
            while piece := slow.recv(4096):
                heard += piece
        assert b"REQUEST_TIMEOUT" in heard
        assert b"Connection: close" in heard


# Disks that fail


BROKEN = """
import errno, os
real = os.open

def opened(path, flags, *more, **named):
    if flags & os.O_CREAT and os.path.exists("broken"):
        raise OSError(errno.EIO, "made to fail")
    return real(path, flags, *more, **named)

os.open = opened
from turtlemq.cli import main
main()
"""


def test_a_file_that_cannot_be_made_is_no_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "PROGRAM", [sys.executable, "-c", BROKEN])
    with running(tmp_path / "data") as server:
        (id_,) = server.put("t", {"body": 1})
        assert len(server.fetch("t", wait=PATIENCE_S)) == 1
        for method, path, value in (
            ("POST", "new/messages", {"body": 1}),
            ("POST", "new/fetch", {}),
            ("PUT", "new", {}),
            ("POST", "t/ack", [id_]),
        ):
            (tmp_path / "broken").touch()
            refused = server.call(method, f"/v1/topics/{path}", value)
            (tmp_path / "broken").unlink()
            assert (refused.status, refused.code) == (503, "UNAVAILABLE"), path
        assert "Traceback" not in server.log
        server.put("new", {"body": 2})
        assert [message["body"] for message in server.fetch("new", wait=PATIENCE_S)] == [2]


@pytest.mark.slow
def test_an_unopened_topic_differs_from_an_unknown_one(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 5})
        server.put("t", {"body": 1, "delay": 60})
    (tmp_path / "data" / "topic" / "t" / "topic.toml").write_bytes(b"\xff= garbage")
    with running(tmp_path / "data") as server:
        for method, path, value in (("GET", "", None), ("GET", "/messages", None), ("POST", "/messages", {"body": 1})):
            refused = server.call(method, f"/v1/topics/t{path}", value)
            assert (refused.status, refused.code) == (503, "UNAVAILABLE"), path
        assert server.call("GET", "/v1/topics/never").code == "UNKNOWN_TOPIC"
        server.ok("DELETE", "/v1/topics/t")
        assert server.call("GET", "/v1/topics/t").code == "UNKNOWN_TOPIC"
        server.put("t", {"body": 2})
        assert [message["body"] for message in server.fetch("t", wait=PATIENCE_S)] == [2]


# One message


def test_a_change_gives_one_body(server: Server) -> None:
    server.put("changed", {"body": 1, "id": "a", "delay": 60})
    refused = server.call("PATCH", "/v1/topics/changed/messages/a", {"body": 2, "body_base64": "Mw=="})
    assert (refused.status, refused.code) == (400, "INVALID_ARGUMENT")
    assert server.ok("GET", "/v1/topics/changed/messages/a")["body"] == 1
