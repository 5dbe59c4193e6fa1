"""A copy of the table of optional fields with three fields more, and a walk of messages through every place that copies or shows
them. A program of its own (`python -m tests.harness.added_fields FOLDER`): the copy must be in place before anything else is
imported. It prints the fields as seen at each step, as JSON; tests/test_message_fields.py compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROWS = """
    weight: int | None = field(default=None, metadata=_row("weight", Kind.NUMBER, 1 << 14, for_consumers=True))
    labels: dict[str, str] | None = field(default=None, metadata=_row("labels", Kind.TEXTS, 1 << 15, for_consumers=True))
    seen_ms: int | None = field(default=None, metadata=_row("seen", Kind.TIME, 1 << 16))
"""
COLUMNS = """
    weight: Any = None
    labels: Any = None
    seen_ms: Any = None
"""
NOW = 1_790_000_000_000
HOUR = 3_600_000
FOR_CONSUMERS: dict[str, Any] = {
    "headers": {"trace": "1"},
    "expires_ms": NOW + 1000 * HOUR,
    "weight": -5,
    "labels": {"kind": "order", "$ref": "x"},
}
VALUES: dict[str, Any] = {**FOR_CONSUMERS, "seen_ms": NOW - 1}
PUT = 60  # messages of a batch: enough for the paths with arrays
Seen = Iterator[tuple[str, Any]]  # a step, and the fields that it showed


def install() -> None:
    """Put the copy of the table in place."""
    import turtlemq

    path = Path(turtlemq.__file__).with_name("message_fields.py")
    source = _extended(_extended(path.read_text("utf-8"), "OptionalFields", ROWS), "OptionalColumns", COLUMNS)
    module = ModuleType("turtlemq.message_fields")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    turtlemq.message_fields = module


def _extended(source: str, name: str, lines: str) -> str:
    """The source with more lines at the end of a class."""
    source, count = re.subn(rf"(class {name}:.*?)\n\n\n", lambda m: f"{m[1]}{lines}\n\n", source, count=1, flags=re.DOTALL)
    assert count == 1, name
    return source


def fields(shown: Any, wanted: dict[str, Any] = VALUES) -> dict[str, Any]:
    """The fields of a message, which is an object or a dict."""
    return {name: shown.get(name) if isinstance(shown, dict) else getattr(shown, name) for name in wanted}


# Put


def put(root: Path) -> Seen:
    """In every encoding, alone and in batches that are read with arrays."""
    import bson

    from turtlemq.engine import Engine
    from turtlemq.server.media_types import BSON, JSON, NDJSON

    messages = [{"id": f"m{i}", "delay": 60, "body": i, **VALUES} for i in range(PUT)]
    numbers = [{name: value for name, value in message.items() if not isinstance(value, dict)} for message in messages]
    bodies = {
        "put one, JSON": (JSON, json.dumps(messages[0]).encode()),
        "put many, JSON": (JSON, json.dumps({"messages": messages}).encode()),
        "put lines, NDJSON": (NDJSON, b"\n".join(json.dumps(message).encode() for message in messages)),
        "put many, BSON": (BSON, b"".join(bson.encode({**message, "body": b"x"}) for message in messages)),
        "put numbers alone, BSON": (BSON, b"".join(bson.encode({**message, "body": b"x"}) for message in numbers)),
    }
    for step, (kind, data) in bodies.items():
        engine = Engine.open(root / step.replace(" ", "-").replace(",", ""))
        engine.submit("t", _decoded(data, kind), NOW)
        count = 1 if "one" in step else PUT
        seen = [fields(engine.get("t", f"m{i}")) for i in range(count)]
        assert seen == [seen[0]] * count, "all of them"
        yield step, {name: value for name, value in seen[0].items() if value}
        engine.close()


def _decoded(data: bytes, kind: str) -> Any:
    from tests.harness.codec import decode_batch
    from turtlemq.server.incoming.batches import DueRules

    return decode_batch(data, kind, NOW, DueRules())


# Life


def live(root: Path) -> Seen:
    """A message `a` through its whole life; `asleep`, `waiting`, `dead` and `ready` stay where their names say."""
    from turtlemq.engine import Engine
    from turtlemq.model import Message
    from turtlemq.settings import Settings

    settings = Settings(
        segment_messages=50, run_messages=10, compact_live_ratio=0.9, max_attempts=3, backoff_jitter="none", ttr_ms=HOUR
    )
    engine = Engine.open(root, settings=settings)
    others = [Message(b"other", NOW + HOUR, f"other{i}") for i in range(45)]
    ours = [Message(b"body", NOW + HOUR, id_, **VALUES) for id_ in ("a", "waiting", "dead", "ready")]
    engine.submit("t", [*others, *ours, Message(b"body", NOW + 900 * HOUR, "asleep", **VALUES)], NOW)
    yield "put", fields(engine.get("t", "a"))
    yield "reschedule", fields(engine.reschedule("t", "a", NOW + 1, due_ms=NOW + 2 * HOUR))
    yield "edit the body", fields(engine.reschedule("t", "a", NOW + 2, body=b"other body", due_ms=NOW + HOUR))
    yield from _compact(engine)
    yield from _deliver(engine)
    engine.close()


def _compact(engine: Any) -> Seen:
    from turtlemq.model import Message

    counters = engine.topic("t").stores.index.counters
    engine.submit("t", [Message(b"other", NOW + HOUR, f"more{i}") for i in range(60)], NOW + 3)
    engine.compact("t")
    assert counters.seals, "segments were rewritten"
    yield "seal", fields(engine.get("t", "a"))
    engine.cancel("t", [f"{name}{i}" for name in ("other", "more") for i in range(60)], NOW + 4)
    engine.compact("t")
    assert counters.moved >= 4, "survivors were appended to the active segment"
    yield "compaction", fields(engine.get("t", "asleep"))


def _deliver(engine: Any) -> Seen:
    now = NOW + HOUR
    engine.tick(now)
    engine.reserve("t", "reader", 1, now)  # a group of its own, in which all others are ready
    yield "fetch, JSON", _fetched(engine, now, "json")
    engine.ack("t", "g", ["-a", "-waiting", "-dead", "ready"], now, retry_delay_ms=1_000, error="soon")
    yield "short back-off, BSON", _fetched(engine, now + 1_000, "bson")
    engine.ack("t", "g", ["-a", "-dead"], now + 1_000, retry_delay_ms=HOUR, error="late")
    engine.ack("t", "g", ["-waiting"], now + 1_000, retry_delay_ms=900 * HOUR, error="late")
    yield "long back-off, listing", _listed(engine, "sleep", "waiting")
    engine.compact("t")
    yield "long back-off, JSON", _fetched(engine, now + 2 * HOUR, "json")
    engine.ack("t", "g", ["-a", "-dead"], now + 2 * HOUR, error="last")
    yield from _die(engine, now + 2 * HOUR)


def _die(engine: Any, now: int) -> Seen:
    from turtlemq.server.outgoing import messages
    from turtlemq.topic.dead_letters import Filter

    letters = {letter.id: letter for letter in engine.topic("t").view.dead_letters.all(Filter())}
    yield "dead letter", fields(messages.letter_fields(letters["a"]), FOR_CONSUMERS)
    yield "dead letter, listing", _listed(engine, "dead", "dead")
    engine.requeue("t", [letters["a"]], now, due_ms=now + HOUR)
    yield "requeue, view", fields(messages.view(engine.message("t", "a")))
    yield "requeue, JSON", _fetched(engine, now + HOUR, "json")


def _fetched(engine: Any, now: int, form: str) -> dict[str, Any]:
    """The fields of `a` in the answer to a fetch."""
    import bson

    from turtlemq.server.outgoing.fetch import fetched_bson, fetched_json

    engine.tick(now)
    out = engine.reserve("t", "g", 100, now)
    shown = (
        json.loads(b"".join(fetched_json(out)))["messages"] if form == "json" else bson.decode_all(b"".join(fetched_bson(out)))
    )
    return fields(next(message for message in shown if message["id"] == "a"), FOR_CONSUMERS)


def _listed(engine: Any, state: str, id_: str) -> dict[str, Any]:
    from turtlemq.server.outgoing import messages

    page, _ = engine.topic("t").view.messages(state)
    return fields(next(shown for shown in map(messages.listed, page) if shown["id"] == id_))


# Backup, restore, Spark


def restore(root: Path, again: Path) -> Seen:
    """A backup of the folder, restored elsewhere."""
    from turtlemq import backup
    from turtlemq.engine import Engine
    from turtlemq.server.outgoing import messages
    from turtlemq.storage.door import Door

    door = Door()
    name, _ = backup.make(door, backup.files_of_stopped(door, root), again / "backups", NOW)
    backup.restore(door, again / "backups" / name, again / "data")
    engine = Engine.open(again / "data")
    assert engine.check() == []
    for id_ in ("a", "asleep", "waiting", "dead", "ready"):
        view = engine.message("t", id_)
        assert view is not None, id_
        yield f"restored, {id_}", fields(messages.view(view))
    engine.close()


def spark(root: Path) -> Seen:
    """The columns of the Spark source, read without Spark."""
    from pyspark_turtlemq.table import read_table

    for kind, id_ in (("delay", "asleep"), ("delay", "waiting"), ("ready", "ready"), ("dead", "dead")):
        shown = read_table(root, topic="t", kind=kind).to_pylist()
        found = next(row for row in shown if row["id"] == id_ and row["state"] in ("sleep", "ready", "dead"))
        assert found["seen"].timestamp() * 1000 == NOW - 1, "a time has two columns"
        maps = {name: dict(found[name]) for name in ("headers", "labels")}
        yield f"Spark, {kind}, {id_}", fields({**found, **maps})


def describe() -> Seen:
    """Types in the OpenAPI document that name all of the fields."""
    from turtlemq.server.openapi import document

    types = document()["components"]["schemas"]
    names = ("JsonMessage", "BsonMessage", "MessageAnswer", "Listed")
    yield "OpenAPI", {name: value for name, value in VALUES.items() if all(name in types[kind]["properties"] for kind in names)}
    shown = [types[kind]["properties"] for kind in ("Delivered", "Letter")]
    yield "OpenAPI, consumers", {name: value for name, value in VALUES.items() if all(name in properties for properties in shown)}


if __name__ == "__main__":
    install()
    folder = Path(sys.argv[1])
    steps = dict([*put(folder / "put"), *live(folder / "life"), *restore(folder / "life", folder / "again"), *describe()])
    if "spark" in sys.argv[2:]:
        steps |= spark(folder / "again" / "data")
    print(json.dumps(steps))
