"""Facts about tables that deny no id, and about `check` that passes over nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.harness.engine_disk import Quick
from tests.harness.table_model import Model
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.settings import Settings


def test_no_id_of_a_crowded_bucket_is_denied() -> None:
    model = Model(300)
    model.hashes = [(1 << 63) + (n << 40) for n in range(300)]  # all in one bucket, of which one look sees a part
    table = model.table()
    assert table.may_hold(np.array(model.hashes, np.uint64)).all()
    assert all(table.find(hash_) == [n] for n, hash_ in enumerate(model.hashes))


def test_check_names_the_damaged_file_of_dead_letters(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(max_attempts=1))
    engine.submit("t", [Message(b"body", 10, id="a")], 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    assert engine.ack("t", "g", ["-a"], 10).dead == 1
    assert engine.check() == []
    (path,) = (tmp_path / "topic" / "t" / "dead").glob("delay_*.bson")
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff")
    assert any("dead letters" in line and path.name in line for line in engine.check())


def test_check_tells_when_a_group_says_something_else_than_its_journals(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, door=Quick())
    engine.submit("t", [Message(b"", 10, id=id_) for id_ in "abc"], 0)
    engine.tick(10)
    engine.reserve("t", "g", 3, 10)
    engine.ack("t", "g", ["a"], 11)
    assert engine.check() == []
    engine.topic("t").stores.broker.groups["g"].settled += 1
    assert len(engine.check()) == 1, "an ack too many"
