"""Kinds `delay` and `messages` where versions, groups and retention meet: Spark shows the state that the engine tells."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="not run: Spark's packages are not installed; `make test` installs them, then runs this")

from tests.harness.server_process import running
from tests.harness.spark_data import rows
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.settings import Settings


def states(root: Path, kind: str = "messages") -> set[tuple[str, str | None, str]]:
    return {(row["id"], row["group"], row["state"]) for row in rows(root, topic="t", kind=kind)}


def test_message_that_predates_every_group_has_a_row(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.put("t", {"id": "early", "body": 1})
        server.put("t", {"id": "second", "body": 1})
        assert server.call("POST", "/v1/topics/t/groups/first/fetch", {"wait": 5, "max": 2}).json["messages"]
        server.ok("PUT", "/v1/topics/t/groups/g", {"start": "latest"})
        server.ok("DELETE", "/v1/topics/t/groups/first")
        for id_ in ("early", "second"):
            assert server.ok("GET", f"/v1/topics/t/messages/{id_}")["state"] == "history"
        assert states(tmp_path / "data") == {("early", None, "history"), ("second", None, "history")}


def test_retry_in_back_off_outlives_its_first_document(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(segment_bytes=4096, history_hours=0, history_bytes=0))
    engine.submit("t", [Message(b"x" * 3_000, 10, id="k")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 1, 30)
    engine.ack("t", "g", ["-k"], 30, retry_delay_ms=900_000)
    for n in range(3):  # the ready log rolls
        engine.submit("t", [Message(b"x" * 3_000, 40, id=f"next{n}")], 40)
        engine.tick(40)
        engine.ack("t", "g", engine.reserve("t", "g", 9, 40).ids, 40)
    engine.topic("t").checkpoint()
    engine.tick(200_000)
    assert engine.topic("t").stores.broker.ready.find_ids(["k"]) == {}, "retention has removed it"
    view = engine.message("t", "k")
    assert view is not None
    assert view.state == "sleep"
    assert [state for state in states(tmp_path) if state[0] == "k"] == [("k", "g", "sleep")]
    engine.close()


def after_a_reschedule(root: Path, due_ms: int, *, sealed: bool, cancelled: bool = False) -> Engine:
    """A sleeper k in a sealed segment was rescheduled; at 2,000 the segment of the newer version is sealed or removed."""
    engine = Engine.open(root, settings=Settings(segment_bytes=4096, compact_live_ratio=0.05 if sealed else 0.9))
    sleepers = [Message(b"x" * 100, 900_000 + n, id=f"s{n}") for n in range(30)]
    engine.submit("t", [Message(b"old", 800_000, id="k"), *sleepers], 10)
    engine.submit("t", [Message(b"x" * 3_000, 900_000 if sealed else 1_000, id="neighbour")], 15)  # begins a segment
    engine.compact("t")
    engine.reschedule("t", "k", 20, due_ms=due_ms, body=b"new")
    if cancelled:
        assert engine.cancel("t", ["k"], 25) == {"k": "cancelled"}
    newer = max((root / "topic" / "t").glob("delay_*.bson"))
    engine.tick(2_000)
    engine.topic("t").checkpoint()
    engine.submit("t", [Message(b"x" * 3_000, 900_000, id="last")], 2_000)
    engine.compact("t")
    assert newer.exists() == sealed
    return engine


BOTH_WAYS = pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "removed"])


@BOTH_WAYS
def test_replaced_version_is_not_cancelled_when_the_newer_one_goes(tmp_path: Path, sealed: bool) -> None:
    """The newer version was handed off. A tombstone, which keeps the older one ended, takes its place."""
    engine = after_a_reschedule(tmp_path, 1_000, sealed=sealed)
    assert [row["state"] for row in rows(tmp_path, topic="t") if row["id"] == "k"] == ["replaced"]
    view = engine.message("t", "k")
    assert view is not None
    assert view.state == "ready"
    assert [state for state in states(tmp_path) if state[0] == "k"] == [("k", None, "ready")]
    assert engine.check() == []
    engine.close()


@BOTH_WAYS
def test_cancelled_newer_version_leaves_a_replaced_older_one(tmp_path: Path, sealed: bool) -> None:
    engine = after_a_reschedule(tmp_path, 700_000, sealed=sealed, cancelled=True)
    assert [row["state"] for row in rows(tmp_path, topic="t") if row["id"] == "k"] == ["replaced"]
    assert [state for state in states(tmp_path) if state[0] == "k"] == [("k", None, "cancelled")]
    engine.close()


def test_attempts_are_those_of_the_view(tmp_path: Path) -> None:
    settings = Settings(max_attempts=3, backoff_jitter="none", backoff_base_ms=0)
    engine = Engine.open(tmp_path, settings=settings)
    engine.submit("t", [Message(b"x", 10, id=id_) for id_ in ("acked", "dead", "asleep", "held", "retry")], 10)
    engine.move_group("t", "g", "earliest", 10)
    engine.tick(10)
    for now in (20, 30):
        engine.reserve("t", "g", 9, now, consumer=f"c{now}")
        engine.ack("t", "g", ["-acked", "-dead", "-held", "-retry"], now + 1, error=f"no {now}\nframe")
        engine.ack("t", "g", ["-asleep"], now + 1, retry_delay_ms=0 if now == 20 else 90_000, error="long")
        engine.tick(now + 2)
    engine.reserve("t", "g", 9, 40, consumer="c40")
    engine.ack("t", "g", ["acked", "-dead"], 41, error="last")
    engine.give_back("t", "g", ["retry"], 42)
    engine.topic("t").checkpoint()
    shown = {row["id"]: row["attempts"] for row in rows(tmp_path, topic="t", kind="messages")}
    assert {id_: len(attempts) for id_, attempts in shown.items()} == {"acked": 3, "dead": 3, "asleep": 2, "held": 3, "retry": 3}
    for id_, attempts in shown.items():
        view = engine.message("t", id_)
        assert view is not None
        assert attempts == [one.fields() for _, one in view.attempts], id_
    (letter,) = rows(tmp_path, topic="t", kind="dead")
    assert letter["attempts"] == shown["dead"]
    assert "attempts" not in rows(tmp_path, topic="t", kind="messages", columns="id,state")[0]
    engine.close()


def test_dead_letter_belongs_to_the_newest_message_of_its_id(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(max_attempts=1))
    engine.submit("t", [Message(b"first", 10, id="k")], 10)
    engine.tick(10)
    engine.move_group("t", "g", "earliest", 10)
    assert engine.cancel("t", ["k"], 10) == {"k": "cancelled"}
    engine.submit("t", [Message(b"second", 20, id="k")], 20)
    engine.tick(20)
    engine.ack("t", "g", [f"-{id_}" for id_ in engine.reserve("t", "g", 9, 20).ids], 20)
    engine.topic("t").checkpoint()
    assert states(tmp_path) == {("k", "g", "cancelled"), ("k", "g", "dead")}
    engine.close()
