"""Syncs for requests that promise durability: on threads, shared by the requests that wait, and never left out."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness import server_process
from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import abandon
from tests.harness.server_process import running
from turtlemq.engine import Engine
from turtlemq.errors import Stopped
from turtlemq.model import Message
from turtlemq.server.log_syncs import LogSyncs
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.topic.topic import Topic

# A server that writes down which thread syncs which file.
WATCHED = """
import threading
from turtlemq.storage.door import Door
from turtlemq.cli import main
sync = Door.sync
def watched(self, fd, path):
    with open("syncs", "a") as out:
        print(threading.current_thread().name, path.name, file=out)
    sync(self, fd, path)
Door.sync = watched
main()
"""


def test_cancels_and_durable_acks_sync_no_log_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "PROGRAM", [sys.executable, "-c", WATCHED])
    with running(tmp_path / "data") as server, socket.create_connection(("127.0.0.1", server.port)):  # another client
        server.ok("PUT", "/v1/topics/t", {"ack_durability": "fsync"})
        for turn in ("a", "b"):  # the first creates the files of the journals, with syncs on the event loop
            (tmp_path / "syncs").unlink(missing_ok=True)
            server.put("t", *({"id": f"{turn}{n}", "body": 0} for n in range(4)))
            assert len(server.fetch("t", wait=10, max=2)) == 2
            assert server.ok("POST", "/v1/topics/t/cancel", {"ids": [f"{turn}2"]})["cancelled"] == 1
            assert server.call("DELETE", f"/v1/topics/t/messages/{turn}3").status == 200
            assert server.ack("t", f"{turn}0")["acked"] == 1
            server.ok("POST", "/v1/command", {"command": "finish", "topic": "t", "id": f"{turn}1"})
        syncs = [line.split() for line in (tmp_path / "syncs").read_text().splitlines()]
        logs = [(thread.partition("_")[0], file.partition("_")[0]) for thread, file in syncs if not file.startswith("delay_")]
        assert logs.count(("sync", "history")) == 4, "each is durable before it is answered"
        assert [file for thread, file in logs if thread == "MainThread"] == []


def test_a_lone_client_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "PROGRAM", [sys.executable, "-c", WATCHED])
    with running(tmp_path / "data") as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            for method, path, body in (
                ("PUT", "/v1/topics/t", b'{"ack_durability":"fsync"}'),
                ("POST", "/v1/topics/t/messages", b'{"id":"a","body":0}'),
                ("POST", "/v1/topics/t/fetch", b'{"wait":10}'),
                ("POST", "/v1/topics/t/ack", b'["a"]'),
            ):
                connection.request(method, path, body, {"Content-Type": "application/json"})
                assert json.loads(connection.getresponse().read())
        syncs = [line.split() for line in (tmp_path / "syncs").read_text().splitlines()]
        assert [thread for thread, file in syncs if file.startswith("history_")][-1] == "MainThread"


class Gate(Door):
    """A disk whose syncs wait for a signal, on other threads than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.syncs, self.fails = threading.Event(), 0, False

    def beside(self) -> Door:
        return self

    def sync(self, fd: int, path: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(20)
            self.syncs += 1
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
        super().sync(fd, path)


def _with_ready(folder: Path, door: Door, many: int, **settings: Any) -> tuple[Engine, Topic]:
    """An engine with ready messages m0, m1, … that group g holds, and its topic."""
    engine = Engine.open(folder, door=door, settings=Settings(**settings))
    engine.submit("t", [Message(b"x", 0, f"m{n}") for n in range(many)], 0)
    engine.move_group("t", "g", "earliest", 0)
    engine.tick(0)
    topic = engine.topic("t")
    engine.reserve("t", "g", many // 2, 0)
    topic.checkpoint()
    return engine, topic


def _ack(engine: Engine, topic: Topic, id_: str) -> None:
    with topic.deferring_syncs():
        assert engine.ack("t", "g", [id_], 1).acked == 1


def test_requests_that_wait_for_the_next_sync_share_it(tmp_path: Path) -> None:
    door = Gate()
    engine, topic = _with_ready(tmp_path, door, 20, ack_durability="fsync")

    async def story() -> None:
        syncs, durable = LogSyncs(door), list[str]()

        async def request(id_: str) -> None:
            _ack(engine, topic, id_)
            assert topic.owes_sync
            await syncs.sync(topic)
            durable.append(id_)

        first = asyncio.create_task(request("m0"))
        await asyncio.sleep(0.05)  # its sync is under way: it does not cover the others
        others = [asyncio.create_task(request(f"m{n}")) for n in range(1, 10)]
        await asyncio.sleep(0.05)
        assert durable == []
        door.open.set()
        await asyncio.gather(first, *others)
        assert logs_of(engine).history.durable == logs_of(engine).history.number
        assert not syncs.is_needed(topic)
        syncs.close()

    asyncio.run(story())
    assert door.syncs == 2, "one for the first request, one for all others"
    engine.close()


def test_a_failed_sync_is_told_to_every_request_that_waits(tmp_path: Path) -> None:
    door = Gate()
    engine, topic = _with_ready(tmp_path, door, 6, ack_durability="fsync")

    async def story() -> tuple[BaseException | None, ...]:
        syncs = LogSyncs(door)
        for id_ in ("m0", "m1"):
            _ack(engine, topic, id_)
        door.fails = True
        door.open.set()
        answers = await asyncio.gather(syncs.sync(topic), syncs.sync(topic), return_exceptions=True)
        syncs.close()
        return answers

    assert [type(answer) for answer in asyncio.run(story())] == [Stopped, Stopped]
    with pytest.raises(Stopped):
        engine.ack("t", "g", ["m2"], 1)
    abandon(engine)


def test_deferred_cancel_is_over_at_once_and_durable_when_synced(tmp_path: Path) -> None:
    engine, topic = _with_ready(tmp_path, Door(), 6)
    with topic.deferring_syncs():
        assert engine.cancel("t", ["m4", "m5"], 1) == {"m4": "cancelled", "m5": "cancelled"}
    history = logs_of(engine).history
    assert (topic.owes_sync, history.durable < history.number) == (True, True)
    assert engine.reserve("t", "g", 10, 2).ids == ["m3"], "no consumer gets it meanwhile"
    sync = topic.begin_sync()
    sync.run(Door())
    topic.end_sync(sync)
    assert (topic.owes_sync, history.durable == history.number) == (False, True)
    assert engine.cancel("t", ["m4"], 3) == {"m4": "cancelled before"}, "and stays so"
    engine.close()


def test_a_sleeping_retry_ends_after_its_cancel_is_durable(tmp_path: Path) -> None:
    """Otherwise a power cut could take the cancel back and keep the end of the retry: the message would be lost for its group."""
    engine, topic = _with_ready(tmp_path, Door(), 2, backoff_base_ms=50_000)
    assert engine.ack("t", "g", ["-m0"], 1, retry_delay_ms=100_000).failed == 1
    history = logs_of(engine).history
    with topic.deferring_syncs():
        assert engine.cancel("t", ["m0"], 2) == {"m0": "cancelled"}
    assert engine.browse("t")[0] == [], "the retry has ended"
    assert history.durable == history.number
    engine.close()
