"""Fetches that find nothing or wait: they keep their group in use, and end with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness import server_process
from tests.harness.server_process import Server, running
from turtlemq.broker import delivery
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.server.fetches import Fetches
from turtlemq.server.long_polls import FetchRequest, LongPoll
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.tenants import Tenant, Tenants

# A server whose retention runs five times a second, not once a minute.
FAST_RETENTION = "import turtlemq.topic.maintenance as m; m.RETENTION_MS = 200; from turtlemq.cli import main; main()"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _poll(threads: ThreadPoolExecutor, server: Server, topic: str, group: str = "default") -> Future[list[dict[str, Any]]]:
    """A long poll that waits."""
    before = server.ok("GET", "/v1/status")["long_polls"]
    poll = threads.submit(server.fetch, topic, group, wait=30)
    until(lambda: server.ok("GET", "/v1/status")["long_polls"] == before + 1)
    return poll


def _settle(server: Server, topic: str, *ids: str) -> None:
    """Messages that the group `default` has acknowledged."""
    server.put(topic, *({"id": id_, "body": 0} for id_ in ids))
    assert len(server.fetch(topic, wait=10, max=len(ids))) == len(ids)
    server.ack(topic, *ids)


def test_a_group_that_asks_in_vain_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "PROGRAM", [sys.executable, "-c", FAST_RETENTION])
    with running(tmp_path / "data") as server, ThreadPoolExecutor(1) as threads:
        server.ok("PUT", "/v1/topics/t", {"group_expire_hours": 0.5 / 3600})
        for group in ("asks", "waits"):
            server.ok("PUT", f"/v1/topics/t/groups/{group}", {})
        _settle(server, "t", "m0", "m1")
        for group in ("asks", "waits"):
            assert len(server.fetch("t", group, ack="auto")) == 2
        poll = _poll(threads, server, "t", "waits")
        for _ in range(2):
            server.ok("PUT", "/v1/topics/t/groups/silent", {})
            while "silent" in server.ok("GET", "/v1/topics/t")["groups"]:
                assert server.fetch("t", "asks", wait=0.02) == [], "acknowledged messages do not come again"
        assert set(server.ok("GET", "/v1/topics/t")["groups"]) == {"asks", "waits"}
        server.put("t", {"id": "m2", "body": 0})
        assert [message["id"] for message in poll.result(30)] == ["m2"]


def test_a_step_answers_few_of_the_polls_that_one_message_wakes(tmp_path: Path) -> None:
    """Every group in turn, so that none with many polls and messages keeps others waiting."""
    engine = Engine.open(tmp_path / "d")
    engine.submit("t", [Message(b"0", 0)], 0)
    engine.tick(1)
    fetches, polls = Fetches(engine, FlowControl()), list[tuple[str, Future[Reserved]]]()
    for group in ("a", "a", "b", "c"):
        engine.move_group("t", group, "latest", 1)
        polls.append((group, Future()))
        fetches.wait(LongPoll(FetchRequest("t", group, 1), polls[-1][1]))
    fetches.answer_polls(1, 0.0, lambda: True)
    engine.submit("t", [Message(b"0", 2, id=id_) for id_ in ("m0", "m1")], 1)
    fetches.tick(2, lambda: True)
    steps = list[list[tuple[str, list[str]]]]()
    while fetches.has_changed:
        fetches.answer_polls(2, 0.0, lambda: False)
        steps.append([(group, future.result().ids) for group, future in polls if future.done()])
    answered = [("a", ["m0"]), ("b", ["m0"]), ("c", ["m0"]), ("a", ["m1"])]
    assert [sorted(step) for step in steps[:4]] == [sorted(answered[: n + 1]) for n in range(4)]
    assert sorted(steps[-1]) == sorted(answered)
    engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(tmp_path_factory.mktemp("fetches") / "data") as one:
        yield one


def test_ends_of_deliveries_matter_to_waiting_fetches_alone(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "d")
    for topic in ("t", "other"):
        engine.submit(topic, [Message(b"0", 0)], 0)
    fetches, poll = Fetches(engine, FlowControl()), LongPoll(FetchRequest("t", "g", 1), Future[Reserved]())
    assert not fetches.needs_ends("t")
    fetches.wait(poll)
    assert fetches.needs_ends("t")
    assert not fetches.needs_ends("other")
    fetches.leave(poll)
    assert not fetches.needs_ends("t")
    tenants = Tenants([Tenant("shop", ("*",), max_in_flight=1)], 1 << 20)
    assert Fetches(engine, FlowControl(), tenants).needs_ends("other"), "a fetch of another topic of the tenant may wait"
    engine.close()


def test_polls_of_a_deleted_group_do_not_make_it_anew(server: Server) -> None:
    _settle(server, "g", "a", "b")
    with ThreadPoolExecutor(2) as threads:
        assert len(server.fetch("g", "other", ack="auto")) == 2
        polls = [_poll(threads, server, "g", group) for group in ("default", "other")]
        server.ok("DELETE", "/v1/topics/g/groups/default")
        assert polls[0].result(10) == [], "it is answered at once"
        server.put("g", {"id": "c", "body": 0})
        assert [message["id"] for message in polls[1].result(10)] == ["c"]
        assert set(server.ok("GET", "/v1/topics/g")["groups"]) == {"other"}


def test_a_poll_of_a_deleted_topic_takes_nothing_from_its_successor(server: Server) -> None:
    _settle(server, "u", "a")
    with ThreadPoolExecutor(1) as threads:
        poll = _poll(threads, server, "u")
        server.ok("DELETE", "/v1/topics/u")
        server.ok("PUT", "/v1/topics/u", {})
        server.put("u", {"id": "b", "body": 0})
        assert poll.result(10) == []
        assert server.ok("GET", "/v1/topics/u")["groups"] == {}
        assert [message["id"] for message in server.fetch("u", wait=10)] == ["b"]


@pytest.mark.parametrize("priorities", [False, True])
def test_an_answer_has_as_many_bytes_as_allowed_or_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priorities: bool
) -> None:
    monkeypatch.setattr(delivery, "FETCH_BYTES_MAX", 10_000)
    engine = Engine.open(tmp_path)
    level = Priority.HIGH if priorities else Priority.NORMAL
    engine.submit("t", [Message(bytes(size), 0, priority=level) for size in (*[4_000] * 5, 30_000, *[10] * 30)], 0)
    engine.move_group("t", "g", "earliest", 0)
    engine.tick(0)
    fetched = [len(engine.reserve("t", "g", 100, 0)) for _ in range(6)]
    assert fetched == [2, 2, 1, 1, 30, 0]
    engine.close()
