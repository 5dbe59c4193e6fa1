"""The table of the life cycle is what the engine does: every row happens, and what is not in it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from turtlemq import lifecycle
from turtlemq.engine import Engine
from turtlemq.errors import Conflict
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter

SETTINGS = Settings(max_attempts=2, backoff_base_ms=0, ttr_ms=100, segment_bytes=4096, history_hours=0.001)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    return engine


def bring(engine: Engine, state: str, id_: str = "x") -> None:
    """A message in a state."""
    engine.submit("t", [Message(b"", 1_000 if state == "sleep" else 10, id=id_)], 0)
    if state == "sleep":
        return
    if state == "cancelled":
        engine.cancel("t", [id_], 0)
        return
    engine.tick(10)
    if state == "ready":
        return
    assert engine.reserve("t", "g", 1, 10).ids == [id_]
    if state == "history":
        engine.ack("t", "g", [id_], 11)
    if state == "dead":
        engine.ack("t", "g", [f"-{id_}"], 11)
        engine.reserve("t", "g", 1, 11)
        engine.ack("t", "g", [f"-{id_}"], 11)


def state(engine: Engine, id_: str = "x") -> str:
    view = engine.message("t", id_)
    return "" if view is None else view.state


def letters(engine: Engine) -> list:  # type: ignore[type-arg]
    return list(engine.topic("t").dead.all(Filter()))


def happen(engine: Engine, event: str) -> None:
    """Let an event happen to message x."""
    match event:
        case "put":
            bring(engine, "sleep")
        case "reschedule":
            engine.reschedule("t", "x", 5, due_ms=2_000)
        case "due":
            engine.tick(1_000)
        case "cancel":
            if engine.cancel("t", ["x"], 12)["x"] != "cancelled":
                raise Conflict
        case "fetch":
            if engine.reserve("t", "g", 1, 14).ids != ["x"]:
                raise Conflict
        case "expire":
            engine.submit("t", [Message(b"", 20, id="y", expires_ms=30)], 0)
            engine.tick(20)
            assert engine.reserve("t", "g", 10, 40).ids == ["x"]
            assert state(engine, "y") == "dead"
            engine.cancel("t", ["x"], 40)
        case "ack":
            if engine.ack("t", "g", ["x"], 13).acked != 1:
                raise Conflict
        case "fail" | "last attempt fails":
            if not engine.ack("t", "g", ["-x"], 13).unknown == []:
                raise Conflict
        case "lease ends":
            engine.tick(5_000)
        case "give back":
            if engine.give_back("t", "g", ["x"], 13) != (1, []):
                raise Conflict
        case "requeue" | "delete":
            act = engine.requeue if event == "requeue" else engine.delete_dead
            if act("t", letters(engine), 20) != 1:
                raise Conflict
        case _:
            raise AssertionError(event)


@pytest.mark.parametrize("step", [s for s in lifecycle.TABLE if s.event != "retention"], ids=lambda s: f"{s.source} {s.event}")
def test_every_row_of_the_table_happens(engine: Engine, step: lifecycle.Step) -> None:
    if step.source:
        bring(engine, step.source)
        assert state(engine) == step.source
    if step.event == "last attempt fails":
        happen(engine, "fail")
        happen(engine, "fetch")
    happen(engine, step.event)
    if step.event != "expire":
        assert (state(engine) == step.target) or (step.event == "delete" and letters(engine) == [])
    assert engine.check() == []


EVENTS = ("reschedule", "cancel", "fetch", "ack", "fail", "give back", "requeue", "delete")
ILLEGAL = [(source, event) for source in lifecycle.STATES for event in EVENTS if lifecycle.allowed(source, event) is None]


@pytest.mark.parametrize(("source", "event"), ILLEGAL)
def test_what_is_not_in_the_table_is_refused_and_changes_nothing(engine: Engine, source: str, event: str) -> None:
    bring(engine, source)
    with pytest.raises(Conflict):
        happen(engine, event)
    assert state(engine) == source
    assert engine.check() == []


def test_retention_ends_what_is_settled(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    for n in range(40):
        engine.submit("t", [Message(b"x" * 300, 10, id=f"m{n}")], 10)
        engine.tick(10)
    ids = engine.reserve("t", "g", 20, 10).ids
    engine.ack("t", "g", ids, 11)
    for now in (100_000, 200_000, 300_000):
        engine.tick(now)
    gone = [n for n in range(40) if state(engine, f"m{n}") == ""]
    assert gone == list(range(len(gone)))
    assert 0 < len(gone) <= 20
    assert engine.stats("t").history == 20
    assert engine.check() == []


def test_the_diagram_shows_every_row() -> None:
    picture = lifecycle.diagram()
    assert picture.startswith("stateDiagram-v2\n")
    assert picture.count("-->") == len(lifecycle.TABLE)
    assert all(state in picture for state in lifecycle.STATES)


def test_the_picture_in_the_docs_is_made_from_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn = text.split("<!-- lifecycle:begin -->\n```mermaid\n")[1].split("```\n<!-- lifecycle:end -->")[0]
    assert drawn == lifecycle.diagram()
