"""Data for the tests of the Spark source: topics with a whole life behind them, written by the engine, and its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turtlemq.engine import Engine
from turtlemq.model import Message, Priority

NOW = 1_790_000_000_000


def messages(count: int, first: int = 0, due_ms: int = NOW + 1_000, **more: Any) -> list[Message]:
    """Messages `m0`, `m1`, …, due one millisecond after the other."""
    return [Message(b"body %d" % n, due_ms + n, f"m{n}", **more) for n in range(first, first + count)]


def rows(*args: Any, **options: Any) -> list[dict[str, Any]]:
    """The rows that the source reads, without Spark. Needs pyarrow."""
    from pyspark_turtlemq.table import read_table

    found: list[dict[str, Any]] = read_table(*args, **options).to_pylist()
    return found


def lived(root: Path) -> Engine:
    """A topic `life` in which everything has happened: rolled, sealed, compacted; cancelled, rescheduled, fetched, acknowledged,
    failed, dead, requeued. An open engine."""
    engine = Engine.open(root)
    engine.configure("life", segment_messages=200, run_messages=50, max_attempts=2, backoff_base_ms=60_000, backoff_jitter="none")
    for n in range(0, 1_000, 20):
        engine.submit("life", messages(20, n), NOW + n)
    rich, headers = b'{"rich": true}', {"kind": "order"}
    extra = Message(rich, NOW + 900_000, "rich", 30_000, Priority.HIGH, True, expires_ms=NOW + 999_000, headers=headers)
    engine.submit("life", [extra, Message(b"given", NOW + 800_000)], NOW + 1_000)
    engine.cancel("life", [f"m{n}" for n in range(500, 530)], NOW + 1_001)
    for n in range(530, 540):
        engine.reschedule("life", f"m{n}", NOW + 1_002, due_ms=NOW + 700_000 + n, body=b"later")
    at = NOW + 1_100
    engine.tick(at)
    first = engine.reserve("life", "default", 60, at + 10, consumer="c1")
    engine.ack("life", "default", list(first.ids[:40]), at + 20)
    engine.ack("life", "default", [f"-{id_}" for id_ in first.ids[40:50]], at + 30, error="boom")
    engine.reserve("life", "other", 5, at + 40)
    engine.tick(at + 70_000)  # the back-off is over
    again = engine.reserve("life", "default", 10_000, at + 70_010, consumer="c2")
    engine.ack("life", "default", [f"-{id_}" for id_ in again.ids if 40 <= int(id_[1:]) < 50], at + 70_020, error="boom again")
    engine.ack("life", "default", [id_ for id_ in again.ids if int(id_[1:]) >= 60][:700], at + 70_030)
    engine.cancel("life", ["m999"], at + 70_040)
    engine.compact("life")
    engine.submit("life", messages(30, 2_000, NOW + 950_000), at + 70_050)
    engine.submit("empty", [Message(b"x", NOW + 10, "gone")], NOW)
    engine.cancel("empty", ["gone"], NOW + 1)
    return engine


def sleepers(engine: Engine, topic: str) -> dict[str, tuple[int, bytes]]:
    """All sleepers as the engine tells them: due time and body by id."""
    found: dict[str, tuple[int, bytes]] = {}
    cursor: str | None = None
    while True:
        page, cursor = engine.browse(topic, limit=1_000, cursor=cursor)
        found |= {one.id: (one.due_ms, one.body) for one in page}
        if cursor is None:
            return found
