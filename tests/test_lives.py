"""What becomes of a message where features meet: groups that begin late, are moved or forgotten; dead letters; retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.server_process import running
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter

SMALL = Settings(segment_bytes=4096, run_messages=8, history_hours=0, history_bytes=0, max_attempts=2)


def with_a_dead_one(folder: Path) -> Engine:
    """Of two messages a group has handled one, the other is dead."""
    engine = Engine.open(folder, settings=Settings(max_attempts=1))
    engine.submit("t", [Message(b"", 10, id="a"), Message(b"", 10, id="b")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 9, 11)
    assert engine.ack("t", "g", ["-a", "b"], 11).dead == 1
    return engine


@pytest.mark.parametrize("forgotten", [True, False])
def test_dead_letters_of_moved_or_forgotten_groups_block_cancels(tmp_path: Path, forgotten: bool) -> None:
    engine = with_a_dead_one(tmp_path)
    if forgotten:
        engine.drop_group("t", "g", 12)
    else:
        engine.move_group("t", "g", "earliest", 12)
    assert engine.cancel("t", ["a"], 13) == {"a": "dead"}
    engine.delete_dead("t", list(engine.topic("t").dead_letters.all(Filter())), 14)
    assert engine.cancel("t", ["a"], 15) == {"a": "cancelled"}
    engine.close()


@pytest.mark.parametrize("stop", [True, False])
def test_a_requeued_letter_of_a_forgotten_group_can_be_cancelled(tmp_path: Path, stop: bool) -> None:
    engine = with_a_dead_one(tmp_path)
    engine.drop_group("t", "g", 12)
    assert engine.requeue("t", list(engine.topic("t").dead_letters.all(Filter())), 13, due_ms=100) == 1
    assert engine.cancel("t", ["a"], 14) == {"a": "cancelled"}
    if stop:
        engine.close()
        engine = Engine.open(tmp_path)
    engine.move_group("t", "g", "latest", 15)
    engine.tick(200)
    assert engine.reserve("t", "g", 9, 200).ids == []
    assert engine.check() == []
    engine.close()


def test_a_requeued_letter_reaches_a_recreated_group(tmp_path: Path) -> None:
    engine = with_a_dead_one(tmp_path)
    engine.drop_group("t", "g", 12)
    assert engine.requeue("t", list(engine.topic("t").dead_letters.all(Filter())), 13, due_ms=100) == 1
    engine.tick(200)
    assert engine.reserve("t", "g", 9, 200).ids == ["a"]
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("ready", [True, False])
def test_a_requeue_only_removes_a_letter_with_a_sleeping_retry(tmp_path: Path, ready: bool) -> None:
    engine = Engine.open(tmp_path, settings=Settings(max_attempts=2))
    engine.move_group("t", "g", "earliest", 10)
    engine.submit("t", [Message(b"", 10, id="m")], 10)
    for now in (10, 20):
        engine.tick(now)
        engine.ack("t", "g", ["-" + id_ for id_ in engine.reserve("t", "g", 1, now).ids], now, retry_delay_ms=0)
    engine.move_group("t", "g", "earliest", 30)
    assert engine.reserve("t", "g", 1, 30).ids == ["m"]
    engine.ack("t", "g", ["-m"], 30, retry_delay_ms=90_000)
    if ready:
        engine.tick(100_000)
    assert engine.requeue("t", list(engine.topic("t").dead_letters.all(Filter())), 100_000, due_ms=150_000) == 1
    engine.tick(200_000)
    assert engine.reserve("t", "g", 9, 200_000).ids == ["m"]
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize(("attempts", "state"), [(1, "sleep"), (2, "dead")])
def test_an_id_is_known_while_retried_or_dead(tmp_path: Path, attempts: int, state: str) -> None:
    engine = Engine.open(tmp_path, settings=SMALL)
    engine.submit("t", [Message(b"first", 10, id="k")], 10)
    engine.tick(10)
    for _ in range(attempts):
        assert engine.reserve("t", "g", 1, 20).ids == ["k"]
        engine.ack("t", "g", ["-k"], 20, retry_delay_ms=0 if attempts == 2 else 10_000_000)
    for n in range(100):
        now = 100 + n
        engine.submit("t", [Message(b"x" * 500, now, id=f"o{n}")], now)
        engine.tick(now)
        engine.ack("t", "g", engine.reserve("t", "g", 9, now).ids, now)
    for now in (100_000, 200_000, 300_000, 400_000):
        engine.topic("t").checkpoint()
        engine.tick(now)
        engine.compact("t")
    assert engine.message("t", "o0") is None
    found = engine.message("t", "k")
    assert found is not None
    assert found.state == state
    receipt = engine.submit("t", [Message(b"second", 500_000, id="k"), Message(b"", 500_000, id="o0")], 500_000)
    assert receipt.created == [False, True]
    engine.close()


def test_what_a_group_tries_again_after_a_sleep_is_listed(tmp_path: Path) -> None:
    engine = with_a_dead_one(tmp_path)
    topic = engine.topic("t")
    engine.requeue("t", list(topic.dead_letters.all(Filter())), 12)
    engine.tick(12)
    assert [(m.id, m.due_ms) for m in topic.browse("ready")[0]] == [("a", 10)]
    engine.reserve("t", "g", 9, 13)
    assert [m.id for m in topic.browse("reserve")[0]] == ["a"]
    assert topic.browse("ready")[0] == []
    engine.close()


def test_what_a_group_never_had_can_be_cancelled(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"", 10, id="a"), Message(b"", 10, id="b")], 10)
    engine.tick(10)
    engine.move_group("t", "g", "earliest", 11)
    engine.move_group("t", "late", "latest", 11)
    assert engine.cancel("t", ["a"], 12) == {"a": "cancelled"}
    assert engine.reserve("t", "g", 9, 13).ids == ["b"]
    engine.ack("t", "g", ["b"], 13)
    assert engine.cancel("t", ["b"], 14) == {"b": "history"}
    engine.close()
    engine = Engine.open(tmp_path)
    assert (engine.stats("t").cancelled, engine.stats("t").ready, engine.check()) == (1, 0, [])
    engine.close()


def test_letters_of_a_forgotten_group_are_found_by_their_ids(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert server.call("PUT", "/v1/topics/t", {"max_attempts": 1}).status in (200, 201)
        server.call("POST", "/v1/topics/t/messages", {"id": "a", "body": 1})
        assert server.call("POST", "/v1/topics/t/groups/g/fetch", {"wait": 5}).json["messages"][0]["id"] == "a"
        assert server.call("POST", "/v1/topics/t/groups/g/ack", ["-a"]).json["dead"] == 1
        assert server.call("DELETE", "/v1/topics/t/groups/g").status == 200
        assert server.call("POST", "/v1/topics/t/dead/requeue", {"ids": ["a", "x"]}).json == {"requeued": 1, "unknown": ["x"]}
        got = server.call("POST", "/v1/topics/t/groups/g/fetch", {"wait": 5}).json["messages"]
        assert [message["id"] for message in got] == ["a"]


def test_bson_is_sent_where_the_accept_header_prefers_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for accept, kind in [
            ("application/bson", "application/bson"),
            ("application/BSON", "application/bson"),
            ("text/html, application/bson;q=0.8", "application/bson"),
            ("application/bson;q=0", "application/json"),
            ("application/json, application/bson; q=0.1", "application/json"),
            ("*/*", "application/json"),
        ]:
            answer = server.call("POST", "/v1/topics/t/groups/g/fetch", {}, headers={"Accept": accept})
            assert answer.headers["Content-Type"].split(";")[0] == kind, accept
