"""The standing of a message where features meet: groups that begin late, are moved or dropped; dead letters; retention; Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.server_process import running
from tests.harness.spark_data import rows
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
    engine.delete_dead("t", list(engine.topic("t").view.dead_letters.all(Filter())), 14)
    assert engine.cancel("t", ["a"], 15) == {"a": "cancelled"}
    engine.close()


@pytest.mark.parametrize("stop", [True, False])
def test_a_requeued_letter_of_a_forgotten_group_can_be_cancelled(tmp_path: Path, stop: bool) -> None:
    engine = with_a_dead_one(tmp_path)
    engine.drop_group("t", "g", 12)
    assert engine.requeue("t", list(engine.topic("t").view.dead_letters.all(Filter())), 13, due_ms=100) == 1
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
    assert engine.requeue("t", list(engine.topic("t").view.dead_letters.all(Filter())), 13, due_ms=100) == 1
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
    assert engine.requeue("t", list(engine.topic("t").view.dead_letters.all(Filter())), 100_000, due_ms=150_000) == 1
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


def test_retry_after_a_long_back_off_is_listed(tmp_path: Path) -> None:
    engine = with_a_dead_one(tmp_path)
    topic = engine.topic("t")
    engine.requeue("t", list(topic.view.dead_letters.all(Filter())), 12)
    engine.tick(12)
    assert [(m.id, m.due_ms) for m in topic.view.messages("ready")[0]] == [("a", 10)]
    engine.reserve("t", "g", 9, 13)
    assert [m.id for m in topic.view.messages("reserve")[0]] == ["a"]
    assert topic.view.messages("ready")[0] == []
    engine.close()


def test_message_that_a_group_never_had_can_be_cancelled(tmp_path: Path) -> None:
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


# Moves of a group


def states_at_each_step(engine: Engine, root: Path) -> list[tuple[str, str]]:
    """A group is replayed while its message is in long back-off: the state by the message view and by Spark after each step."""
    states: list[tuple[str, str]] = []

    def ask() -> None:
        view = engine.message("t", "k")
        assert view is not None
        (row,) = rows(root, topic="t", kind="messages")
        assert row["group"] == "g"
        states.append((str(view.groups["g"]["state"]), row["state"]))

    engine.submit("t", [Message(b"", 10, id="k")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 1, 20)
    engine.ack("t", "g", ["-k"], 30, retry_delay_ms=90_000)
    ask()
    engine.move_group("t", "g", "earliest", 40)
    ask()
    engine.reserve("t", "g", 1, 50)
    ask()
    engine.ack("t", "g", ["k"], 60)
    ask()
    engine.tick(100_000)  # the void retry comes due
    ask()
    return states


def test_spark_follows_a_replay_during_a_long_back_off(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    engine = Engine.open(tmp_path, settings=Settings())
    expected = ["sleep", "ready", "reserve", "history", "history"]
    assert states_at_each_step(engine, tmp_path) == [(state, state) for state in expected]
    engine.close()


def test_void_retry_is_no_longer_listed_among_sleepers(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"", 10, id="k")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 1, 20)
    engine.ack("t", "g", ["-k"], 30, retry_delay_ms=90_000)
    assert [view.id for view in engine.topic("t").view.messages("sleep")[0]] == ["k"]
    engine.move_group("t", "g", "earliest", 40)
    assert engine.topic("t").view.messages("sleep") == ([], None)
    engine.drop_group("t", "g", 50)
    assert engine.topic("t").view.messages("sleep") == ([], None)
    engine.close()


def test_older_retry_is_ready_after_a_move_between_two_retries(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"", 10, id="k")], 10)
    engine.tick(10)
    for now in (20, 100_000):  # two retries in the ready log, at offsets 1 and 2
        engine.reserve("t", "g", 1, now)
        engine.ack("t", "g", ["-k"], now, retry_delay_ms=90_000)
        engine.tick(now + 90_000)
    engine.reserve("t", "g", 1, 200_000)
    engine.ack("t", "g", ["k"], 200_000)
    assert engine.move_group("t", "g", 90_000, 200_000) == 1  # to the first of them
    view = engine.message("t", "k")
    assert view is not None
    assert (view.groups["g"]["state"], engine.groups("t")["g"].ready) == ("ready", 1)
    assert [message.id for message in engine.topic("t").view.messages("ready")[0]] == ["k"]
    assert engine.cancel("t", ["k"], 200_001) == {"k": "cancelled"}
    assert engine.reserve("t", "g", 9, 300_000).ids == []
    assert engine.check() == []
    engine.close()


# Retention removes the message's own document first


def with_only_a_retry_left(folder: Path, due: bool, *others: str) -> Engine:
    """Retention has removed message k but for a retry of group g that sleeps until 90,030, or has come due. `others` were
    cancelled and lay beside k."""
    engine = Engine.open(folder, settings=SMALL)
    engine.submit("t", [Message(b"x" * 1_500, 10, id="k"), *(Message(b"", 10, id=id_) for id_ in others)], 10)
    engine.tick(10)
    engine.cancel("t", others, 20)
    assert engine.reserve("t", "g", 1, 30).ids == ["k"]
    engine.ack("t", "g", ["-k"], 30, retry_delay_ms=90_000)
    engine.submit("t", [Message(b"x" * 3_000, 40, id="next")], 40)  # begins a segment
    engine.tick(40)
    engine.ack("t", "g", engine.reserve("t", "g", 9, 40).ids, 40)
    engine.topic("t").checkpoint()
    engine.tick(100_000 if due else 70_000)
    engine.topic("t").stores.broker.retain(100_000)
    assert engine.topic("t").stores.broker.ready.find_ids(["k"]) == {}
    return engine


@pytest.mark.parametrize("due", [False, True])
def test_cancelled_message_stays_known_when_only_retries_were_left(tmp_path: Path, due: bool) -> None:
    engine = with_only_a_retry_left(tmp_path, due)
    assert engine.cancel("t", ["k"], 20_000_000) == {"k": "cancelled"}
    view = engine.message("t", "k")
    assert view is not None
    assert (view.state, engine.stats("t").cancelled) == ("cancelled", 1)
    assert engine.cancel("t", ["k"], 20_000_001) == {"k": "cancelled before"}
    assert [message.id for message in engine.topic("t").view.messages("cancelled")[0]] == ["k"]
    engine.tick(20_000_002)
    assert engine.reserve("t", "g", 9, 20_000_003).ids == []
    assert engine.check() == []
    engine.close()


def test_id_is_known_while_a_handled_retry_is_retained(tmp_path: Path) -> None:
    """A move of the group would deliver that retry again."""
    engine = with_only_a_retry_left(tmp_path, due=True)
    assert "k" in engine.reserve("t", "g", 9, 20_000_000).ids
    engine.ack("t", "g", ["k"], 20_000_000)
    view = engine.message("t", "k")
    assert view is not None
    assert view.state == "history"
    assert engine.submit("t", [Message(b"second", 20_000_000, id="k")], 20_000_000).created == [False]
    engine.close()


def test_id_is_free_once_the_ready_log_forgot_it(tmp_path: Path) -> None:
    """The Index may hold the handed-off document until compaction, which must not make a put a duplicate."""
    engine = Engine.open(tmp_path, settings=SMALL)
    for n in range(60):
        engine.submit("t", [Message(b"x" * 500, 10 + n, id=f"o{n}")], 10 + n)
        engine.tick(10 + n)
        engine.ack("t", "g", engine.reserve("t", "g", 9, 10 + n).ids, 10 + n)
    topic = engine.topic("t")
    topic.checkpoint()
    topic.stores.broker.retain(100_000)
    gone = [f"o{n}" for n in range(60) if engine.message("t", f"o{n}") is None]
    held = [id_ for id_ in gone if topic.stores.index.find(id_) is not None]
    assert held
    receipt = engine.submit("t", [Message(b"again", 200_000, id=id_) for id_ in held], 100_000)
    assert receipt.created == [True] * len(held)
    engine.tick(200_000)
    assert sorted(engine.reserve("t", "g", 99, 200_000).ids) == sorted(held)
    engine.close()
    engine = Engine.open(tmp_path)
    assert {id_ for id_ in held if (view := engine.message("t", id_)) and view.state == "reserve"} == {*held}
    assert engine.check() == []
    engine.close()


# Groups that are gone


def test_view_shows_the_dead_letter_of_a_dropped_group(tmp_path: Path) -> None:
    engine = with_a_dead_one(tmp_path)
    engine.move_group("t", "late", "latest", 12)
    engine.drop_group("t", "g", 12)
    view = engine.message("t", "a")
    assert view is not None
    assert (view.state, view.groups["g"]["state"], view.groups["late"]["state"]) == ("dead", "dead", "history")
    assert engine.cancel("t", ["a"], 13) == {"a": "dead"}
    assert [message.id for message in engine.topic("t").view.messages("history")[0]] == ["b"]
    engine.close()


def test_spark_has_a_row_for_messages_without_a_group(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    engine = with_a_dead_one(tmp_path)
    engine.drop_group("t", "g", 12)
    found = {(row["group"], row["id"]): row["state"] for row in rows(tmp_path, topic="t", kind="messages")}
    assert found == {("g", "a"): "dead", ("g", "b"): "history", (None, "a"): "ready", (None, "b"): "ready"}
    engine.move_group("t", "late", "latest", 13)
    found = {(row["group"], row["id"]): row["state"] for row in rows(tmp_path, topic="t", kind="messages")}
    assert found == {("g", "a"): "dead", ("g", "b"): "history", (None, "a"): "history", (None, "b"): "history"}
    engine.close()


@pytest.mark.parametrize("due", [False, True])
def test_spark_shows_messages_of_which_only_a_retry_is_left(tmp_path: Path, due: bool) -> None:
    pytest.importorskip("pyarrow")
    engine = with_only_a_retry_left(tmp_path, due)
    (row,) = [row for row in rows(tmp_path, topic="t", kind="messages") if row["id"] == "k"]
    view = engine.message("t", "k")
    assert view is not None
    assert (row["group"], row["state"], row["due_ms"]) == ("g", view.state, 10)
    assert view.state == ("ready" if due else "sleep")
    engine.close()


@pytest.mark.parametrize("due", [False, True])
def test_spark_takes_no_retry_for_a_cancelled_message_beside_it(tmp_path: Path, due: bool) -> None:
    pytest.importorskip("pyarrow")
    engine = with_only_a_retry_left(tmp_path, due, "other")
    (row,) = [row for row in rows(tmp_path, topic="t", kind="messages") if row["id"] == "k"]
    assert row["state"] == ("ready" if due else "sleep")
    engine.close()


def test_spark_reads_a_ready_log_of_nothing_but_void_retries(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    engine = Engine.open(tmp_path, settings=SMALL)
    engine.submit("t", [Message(b"x" * 3_000, 10, id="k")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 1, 30)
    engine.ack("t", "g", ["-k"], 30, retry_delay_ms=90_000)
    for now in (100_000, 200_000):  # the retry begins a segment, and the first one is removed
        engine.tick(now)
    engine.drop_group("t", "g", 200_000)
    assert engine.message("t", "k") is None
    assert rows(tmp_path, topic="t", kind="messages") == []
    engine.close()
