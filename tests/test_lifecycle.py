"""The life cycle table against the engine: each row happens, any other event is refused, and the diagram in the docs shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from turtlemq import lifecycle
from turtlemq.broker.results import Extended
from turtlemq.engine import Engine
from turtlemq.errors import Conflict
from turtlemq.lifecycle import Transition
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import DeadLetter, Filter

SETTINGS = Settings(max_attempts=2, backoff_base_ms=0, ttr_ms=100, segment_bytes=4096, history_hours=0.001)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    return engine


def bring(engine: Engine, state: str) -> None:
    """Put message x and bring it into a state."""
    due_ms, expires_ms = (1_000, 1_000_000) if state == "sleep" else (10, 400)
    engine.submit("t", [Message(b"", due_ms, id="x", expires_ms=expires_ms)], 0)
    if state == "cancelled":
        happen(engine, "cancel")
    if state in ("sleep", "cancelled"):
        return
    engine.tick(10)
    if state != "ready":
        happen(engine, "fetch")
    if state == "history":
        happen(engine, "ack")
    if state == "dead":
        happen(engine, "last attempt fails")


def bring_retry_to_sleep(engine: Engine) -> None:
    """Put message x and bring it into `sleep` as a retry of the group."""
    bring(engine, "reserve")
    happen(engine, "back off")


def state(engine: Engine, id_: str = "x") -> str:
    view = engine.message("t", id_)
    return lifecycle.NOWHERE if view is None else view.state


def letters(engine: Engine) -> list[DeadLetter]:
    return list(engine.topic("t").view.dead_letters.all(Filter()))


def happen(engine: Engine, event: str) -> None:
    """Let an event happen to message x. Raises Conflict if the engine refuses it or leaves the message out."""
    match event:
        case "put":
            engine.submit("t", [Message(b"", 1_000, id="x")], 0)
        case "reschedule":
            engine.reschedule("t", "x", 5, due_ms=2_000)
        case "due":
            engine.tick(1_000)
        case "cancel":
            done(engine.cancel("t", ["x"], 12)["x"] == "cancelled")
        case "fetch":
            done(engine.reserve("t", "g", 1, 15).ids == ["x"])
        case "expire":
            done(engine.reserve("t", "g", 1, 500).ids == [])
        case "ack":
            done(engine.ack("t", "g", ["x"], 15).acked == 1)
        case "extend":
            done(engine.extend("t", "g", ["x"], 100, 15) == Extended(1, []))
        case "fail" | "back off":
            done(engine.ack("t", "g", ["-x"], 15, retry_delay_ms=0 if event == "fail" else 90_000).unknown == [])
        case "last attempt fails":
            happen(engine, "fail")
            happen(engine, "fetch")
            happen(engine, "fail")
        case "lease ends":
            engine.tick(5_000)
        case "give back":
            done(engine.give_back("t", "g", ["x"], 15) == (1, []))
        case "requeue":
            done(engine.requeue("t", letters(engine), 20) == 1)
        case "delete":
            done(engine.delete_dead("t", letters(engine), 20) == 1)
        case "retry now":
            done(engine.retry_now("t", "x", "g", 20) == ["g"])
        case "replay" | "skip":
            engine.move_group("t", "g", "earliest" if event == "replay" else "latest", 30)
        case _:
            raise AssertionError(event)


def done(happened: bool) -> None:
    if not happened:
        raise Conflict


ROWS = [row for row in lifecycle.TRANSITIONS if row.event != "retention"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source} {row.event}")
def test_every_row_of_the_table_happens(engine: Engine, row: Transition) -> None:
    if (row.source, row.event) in (("sleep", "replay"), ("sleep", "retry now")):
        bring_retry_to_sleep(engine)
    elif (row.source, row.event) == ("ready", "retry now"):
        bring(engine, "reserve")
        engine.ack("t", "g", ["-x"], 15, retry_delay_ms=5_000)
    elif row.source:
        bring(engine, row.source)
    assert state(engine) == row.source
    happen(engine, row.event)
    assert state(engine) == row.target
    assert engine.check() == []


EVENTS = ("reschedule", "cancel", "fetch", "ack", "extend", "fail", "back off", "give back", "requeue", "delete", "retry now")
REFUSED = [(source, event) for source in lifecycle.STATES for event in EVENTS if lifecycle.target(source, event) is None]


@pytest.mark.parametrize(("source", "event"), REFUSED)
def test_event_without_row_is_refused_and_changes_nothing(engine: Engine, source: str, event: str) -> None:
    bring(engine, source)
    with pytest.raises(Conflict):
        happen(engine, event)
    assert state(engine) == source
    assert engine.check() == []


def test_no_state_has_two_rows_for_one_event() -> None:
    assert len({(row.source, row.event) for row in lifecycle.TRANSITIONS}) == len(lifecycle.TRANSITIONS)


def test_retention_removes_only_settled_and_cancelled_messages(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    for n in range(40):
        engine.submit("t", [Message(b"x" * 300, 10, id=f"m{n}")], 10)
        engine.tick(10)
    assert engine.cancel("t", ["m0"], 10) == {"m0": "cancelled"}
    ids = engine.reserve("t", "g", 20, 10).ids
    engine.ack("t", "g", ids, 11)
    for now in (100_000, 200_000, 300_000):
        engine.tick(now)
    gone = [n for n in range(40) if state(engine, f"m{n}") == lifecycle.NOWHERE]
    assert gone == list(range(len(gone)))
    assert 1 < len(gone) <= 21
    assert (engine.stats("t").history, engine.stats("t").cancelled) == (20, 1)
    assert engine.check() == []


def test_diagram_shows_every_row() -> None:
    picture = lifecycle.diagram()
    assert picture.startswith("stateDiagram-v2\n")
    assert picture.count("-->") == len(lifecycle.TRANSITIONS)
    assert all(state in picture for state in lifecycle.STATES)


def test_diagram_in_the_docs_is_made_from_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn = text.split("<!-- lifecycle:begin -->\n```mermaid\n")[1].split("```\n<!-- lifecycle:end -->")[0]
    assert drawn == lifecycle.diagram()
