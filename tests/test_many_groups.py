"""Costs add up over messages and groups, they do not multiply: the function calls of an operation are counted, not its time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turtlemq.engine import Engine
from turtlemq.model import Message

FEW, MANY, IDS = 10, 60, 200
HOUR_MS = 3_600_000
TOPIC = "t"


def _calls(work: Callable[[], Any]) -> int:
    """How many functions of Python are called meanwhile."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _engine(folder: Path) -> Engine:
    engine = Engine.open(folder)
    engine.configure(TOPIC, backoff_base_ms=HOUR_MS, backoff_max_ms=HOUR_MS, backoff_jitter="none")
    return engine


def _ready(folder: Path, groups: int) -> Engine:
    """Messages m0, m1, … are ready in all groups."""
    engine = _engine(folder)
    engine.submit(TOPIC, [Message(b"", 0, id=f"m{i}") for i in range(IDS)], 0)
    engine.tick(1)
    for i in range(groups):
        engine.move_group(TOPIC, f"g{i}", "earliest", 1)
    return engine


def _settled(folder: Path, groups: int) -> Engine:
    """All groups have settled m0."""
    engine = _ready(folder, groups)
    for i in range(groups):
        assert engine.reserve(TOPIC, f"g{i}", 1, 2).ids == ["m0"]
        engine.ack(TOPIC, f"g{i}", ["m0"], 3)
    return engine


def _listing(state: str) -> Callable[[Engine], Any]:
    return lambda engine: engine.topic(TOPIC).view.messages(state, limit=IDS)


UNKNOWN = [f"x{i}" for i in range(IDS)]
OPERATIONS: dict[str, tuple[Callable[[Path, int], Engine], Callable[[Engine], Any]]] = {
    "list ready": (_ready, _listing("ready")),
    "list history": (_ready, _listing("history")),
    "cancel unknown": (_ready, lambda engine: engine.cancel(TOPIC, UNKNOWN, 2)),
    "view settled": (_settled, lambda engine: engine.message(TOPIC, "m0")),
    "cancel ready": (_ready, lambda engine: engine.cancel(TOPIC, [f"m{i}" for i in range(IDS)], 2)),
}


def test_view_tells_how_each_group_settled_the_message(tmp_path: Path) -> None:
    engine = _settled(tmp_path / "d", 3)
    engine.move_group(TOPIC, "late", "latest", 4)
    view = engine.message(TOPIC, "m0")
    assert view is not None
    settled = {"state": "history", "attempt": 1, "settled_ms": 3}
    assert view.groups == {"g0": settled, "g1": settled, "g2": settled, "late": {"state": "history", "attempt": 0}}
    assert sorted((moment.at_ms, moment.event, moment.group) for moment in view.timeline if moment.group) == [
        *((2, "reserved", f"g{i}") for i in range(3)),
        *((3, "acked", f"g{i}") for i in range(3)),
    ]
    engine.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_add_up_over_ids_and_groups(tmp_path: Path, name: str) -> None:
    build, work = OPERATIONS[name]
    counts = []
    for groups in (FEW, MANY):
        engine = build(tmp_path / str(groups), groups)
        counts.append(_calls(lambda engine=engine: work(engine)))  # type: ignore[misc]
        engine.close()
    assert counts[1] - counts[0] < 60 * (MANY - FEW), counts
