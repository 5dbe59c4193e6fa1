"""Facts about housekeeping at the very edges of segments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.compaction_batches import batch, forget_caches
from tests.harness.engine_disk import Quick
from tests.harness.index_world import World, abandon
from turtlemq.engine import Engine
from turtlemq.model import Batch, Message
from turtlemq.settings import Settings


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", Settings(run_messages=100))
    yield made
    made.compare_all()
    made.reopen(clean=False, meanwhile=lambda: forget_caches(made))
    made.compare_all()
    abandon(made.index)


@pytest.mark.parametrize("which", ["a0", "a1", "a2"])
@pytest.mark.parametrize("then", ["sealed", "dropped", "opened"])
def test_first_and_last_message_of_a_segment_stay_cancelled(world: World, which: str, then: str) -> None:
    world.append(batch("a", 3), 0)
    world.roll()
    world.cancel([which])
    if then == "sealed":
        world.append(batch("b", 2), 0)
    world.roll()
    _, base = world.closed
    if then == "sealed":
        world.seal(base)
        world.adopt()
    elif then == "dropped":
        assert world.index.maintenance.drop(base)


def test_a_segment_half_handed_off_is_not_dropped(world: World) -> None:
    world.append(Batch([b"x"] * 2, [10, 20], ids=["a", "b"]), 0)
    world.roll()
    world.drain(10)
    world.settle()
    world.drain(20)
    assert not world.index.maintenance.drop(0)
    world.reopen(clean=False)
    assert list(world.asleep) == ["b"]


def test_times_of_the_ready_log_never_fall(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(run_messages=4))
    clock = [*range(1_000, 1_010), *range(500, 510), *range(2_000, 2_010)]
    for n, now in enumerate(clock):
        engine.submit("t", [Message(b"", 0, id=f"m{n}")], now)
        engine.tick(now)
    assert logs_of(engine).ready.segments[0].tables
    assert [engine.move_group("t", "g", at, 3_000) for at in (0, 900, 1_005, 1_500, 2_000, 2_009)] == [0, 0, 5, 20, 20, 29]
    engine.move_group("t", "g", "earliest", 3_000)
    times = [at for piece in engine.reserve("t", "g", 99, 3_000).pieces for at in piece.messages.ready_ms.tolist()]
    assert times == [*range(1_000, 1_010), *[1_009] * 10, *range(2_000, 2_010)]
    assert engine.check() == []
    engine.close()
