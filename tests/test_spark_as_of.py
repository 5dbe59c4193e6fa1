"""Kind `messages` with `asOf`: the states of noted moments, as the engine told them then, with pyarrow alone and with Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.spark_session import MARKS, need_spark, spark

need_spark()

from tests.harness.spark_data import rows  # noqa: E402 - only where pyarrow is
from tests.harness.standing_walk import EVENTS, TOPIC, WEIGHTS, Walk  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.errors import InvalidArgument  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq.settings import Settings  # noqa: E402
from turtlemq.topic.message_view import MessageView  # noqa: E402

__all__ = ["spark"]  # the fixture
pytestmark = MARKS
States = dict[str | None, str]  # by group; None: no group has to do with it


def told(view: MessageView | None) -> States:
    """The states of a message that rows show: without groups that never had it."""
    if view is None:
        return {}
    if not view.groups:
        return {None: view.state}
    return {name: str(entry["state"]) for name, entry in view.groups.items() if "not seen" not in str(entry["summary"])}


def states_at(root: Path, topic: str, at_ms: int) -> dict[str, States]:
    found = dict[str, States]()
    for row in rows(root, topic=topic, kind="messages", asOf=str(at_ms), columns="id,group,state"):
        found.setdefault(row["id"], {})[row["group"]] = row["state"]
    return found


@pytest.mark.parametrize("seed", [0, 2])
def test_random_walks_are_shown_as_they_were(tmp_path: Path, seed: int) -> None:
    walk, noted, seen = Walk(tmp_path, seed, spark=False), list[tuple[int, dict[str, MessageView | None]]](), Counter[str]()
    assert not walk.retention, "everything is kept"
    weights = [WEIGHTS.get(name, 1.0) for name in EVENTS]
    for _ in range(40):
        operation = walk.chance.choices(list(EVENTS), weights)[0]
        walk.now += 1  # so that each step has a moment of its own
        walk.reused = set()
        walk.compare(operation, getattr(walk, f"_{operation}")())
        noted.append((walk.now, dict(walk.before.views)))
    for at, views in noted[::4]:
        found = states_at(tmp_path, TOPIC, at)
        for id_, view in views.items():
            expected = told(view)
            shown = {name: state for name, state in found.get(id_, {}).items() if not expected or name in expected}
            assert shown == expected, (at, id_)  # rows of deleted groups are left out of the comparison
            seen.update(expected.values())
    walk.engine.close()
    assert sum(seen.values()) > 40
    assert len(seen) > 3


def lived(root: Path) -> list[tuple[int, dict[str, States]]]:
    """A short life, and the states of its messages at moments."""
    engine, noted = Engine.open(root, settings=Settings(max_attempts=1)), list[tuple[int, dict[str, States]]]()

    def note(at_ms: int) -> None:
        noted.append((at_ms, {id_: told(engine.message("t", id_)) for id_ in ("a", "b", "c")}))

    engine.submit("t", [Message(b"", 1_000, id=id_) for id_ in "abc"], 10)
    note(10)
    engine.cancel("t", ["c"], 20)
    note(20)
    engine.tick(1_000)
    engine.reserve("t", "g", 2, 1_010)
    note(1_010)
    engine.ack("t", "g", ["a", "-b"], 1_020, error="no")
    note(1_020)
    engine.requeue("t", engine.topic("t").view.letters_of(["b"])["b"], 1_030, due_ms=9_000)
    note(1_030)
    engine.move_group("t", "g", "earliest", 1_040)
    note(1_040)
    engine.close()
    return noted


def test_spark_shows_moments_as_the_engine_told_them(tmp_path: Path, spark: Any) -> None:
    noted = lived(tmp_path)
    for at, expected in noted:
        frame = spark.read.format("turtlemq").option("kind", "messages").option("asOf", str(at)).load(str(tmp_path))
        found = {id_: dict[str | None, str]() for id_ in expected}
        for row in frame.select("id", "group", "state").collect():
            found[row.id][row.group] = row.state
        assert found == expected, at
    assert {state for _, at in noted for states in at.values() for state in states.values()} == {
        *("sleep", "cancelled", "reserve", "history", "dead", "ready"),
    }


def test_times_kinds_and_lost_journals_are_refused(tmp_path: Path) -> None:
    lived(tmp_path)
    assert states_at(tmp_path, "t", 1_020)["b"] == {"g": "dead"}
    with pytest.raises(InvalidArgument, match="asOf"):
        rows(tmp_path, kind="messages", asOf="yesterday")
    with pytest.raises(InvalidArgument, match="asOf is for kind 'messages'"):
        rows(tmp_path, kind="ready", asOf="1000")
    same = rows(tmp_path, kind="messages", asOf="1970-01-01T00:00:01.020Z", columns="id,group,state")
    assert same == rows(tmp_path, kind="messages", asOf="1020", columns="id,group,state")
    settings = Settings(segment_bytes=4096, history_hours=0.0003, beat_ms=10)
    engine = Engine.open(tmp_path / "short", settings=settings)
    for n in range(1, 120):
        now = 1_000 * n
        engine.submit("t", [Message(b"x" * 200, due_ms=now, id=f"m{n}")], now)
        engine.tick(now)
        engine.ack("t", "g", engine.reserve("t", "g", 9, now).ids, now + 1)
        for _ in range(3):
            engine.topic("t").maintain()
    engine.close()
    with pytest.raises(InvalidArgument, match="the journals of 1500 are gone; messages are known from"):
        rows(tmp_path / "short", kind="messages", asOf="1500")
    assert states_at(tmp_path / "short", "t", 119_000)["m119"] == {"g": "reserve"}
