"""Verbs on files, without a server: check, inspect, compact. A folder that a server holds is refused by its lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import AsJson, Topic, fail, plain, progress, show, when

if TYPE_CHECKING:
    from turtlemq.engine import Engine
    from turtlemq.segment import format as f

Data = Annotated[Path, typer.Option("--data", help="The data folder of a server that is stopped.")]
BODY_CHARS = 120
_FLAGS = "JSON CONTINUES BARRIER TOMBSTONE REPLACES SERVER_ID EXPIRES HEADERS MOVED HANDOFF META NOTICE".split()


@contextmanager
def _opened(data: Path) -> Iterator[Engine]:
    from turtlemq.engine import Engine
    from turtlemq.errors import TurtleError
    from turtlemq.segment import names

    if not (data / names.FORMAT).is_file():
        fail(f"{data} is no data folder of TurtleMQ")
    try:
        engine = Engine.open(data)
    except (TurtleError, OSError) as error:
        fail(f"{data}: {error}")
    try:
        yield engine
    finally:
        engine.close()


def check(data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Read every byte again and find every broken invariant: a line each, and exit code 1."""
    from turtlemq.index.check import check as check_index

    problems: list[str] = []
    with _opened(data) as engine, progress() as shown:
        task = shown.add_task("check", total=len(engine.topics))
        for name, topic in engine.topics.items():
            shown.update(task, description=f"check {name}")
            problems += check_index(topic.index) + check_index(topic.dead.index)
            problems += [f"{name}/{damage}" for damage in topic.damage()]
            shown.advance(task)
        topics = len(engine.topics)
    problems = list(dict.fromkeys(problems))
    if as_json:
        show({"topics": topics, "problems": problems})
    else:
        print(*problems, sep="\n") if problems else print(f"{topics} topics, no problem found")
    raise typer.Exit(1 if problems else 0)


def inspect(
    file: Annotated[Path, typer.Argument(help="A segment, such as data/topic/orders/delay_0000000000.bson")],
    limit: Annotated[int, typer.Option(help="How many documents at most; 0 for all.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the documents of a segment with their positions. With --json an object a line. Exits with 1 if bytes are damaged."""
    from turtlemq.door import Door
    from turtlemq.errors import TurtleError
    from turtlemq.segment import format as f
    from turtlemq.segment import log

    door = Door()
    try:
        header, found = log.scan_file(door, file)
        view = door.map(file)
    except (TurtleError, OSError) as error:
        fail(f"{file}: {error}")
    sealed = "sealed" if header.sealed else "open"
    if not as_json:
        print(f"{file.name}: {header.kind} of topic {header.topic}, base {header.base}, {sealed}, {len(found)} documents")
    for at, length in list(zip(found.positions.tolist(), found.lengths.tolist(), strict=True))[: limit or None]:
        fields = _fields(header.kind, at, f.decode(view[at : at + length]))
        show(fields) if as_json else print(*(f"{name}={value}" for name, value in fields.items()), sep="  ")
    damage = log.damage_of(file, found)
    for hole in damage:
        print(hole, file=sys.stderr)
    if found.end < found.size:
        print(
            f"{found.size - found.end} bytes at position {found.end} belong to no whole batch; a start cuts them", file=sys.stderr
        )
    raise typer.Exit(1 if damage else 0)


def _fields(kind: str, position: int, document: f.Document) -> dict[str, Any]:
    """A document for people. In journals the id is the group and the body an event."""
    from turtlemq.segment import format as f

    flags = [name for name in _FLAGS if document.flags & getattr(f, name)]
    fields: dict[str, Any] = {"position": position, "length": document.length, "seq": document.seq}
    if kind in ("reserve", "history"):
        return fields | {"at": when(document.due_ms), "group": document.id, "event": _event(document.body), "flags": flags}
    fields |= {"due": when(document.due_ms), "due_ms": document.due_ms, "id": document.id, "flags": flags}
    optional = {
        "ttr_ms": document.ttr_ms,
        "of": document.of,
        "expires_ms": document.expires_ms,
        "headers": document.headers,
        "meta": {name: str(value) for name, value in document.meta.items()},
    }
    fields |= {name: value for name, value in optional.items() if value}
    if document.flags & f.HANDOFF:
        return fields | {"event": _event(document.body)}
    text = document.body[: BODY_CHARS * 4].decode("utf-8", "backslashreplace")
    return fields | {"body_bytes": len(document.body), "body": plain(text[:BODY_CHARS]) + ("…" if len(text) > BODY_CHARS else "")}


def _event(body: bytes) -> dict[str, Any]:
    import bson
    import numpy as np

    out: dict[str, Any] = {}
    for name, value in bson.decode(body).items():
        if name == "ids" and isinstance(value, bytes):
            out[name] = value.decode(errors="backslashreplace").split("\0")
        elif isinstance(value, bytes):
            out[name] = np.frombuffer(value, "<i8").tolist() if len(value) % 8 == 0 else value.hex()
        else:
            out[name] = value
    return out


def compact(topic: Topic, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Free the room of messages that are gone, now."""
    from rich.console import Console

    from turtlemq.errors import UnknownTopic

    with _opened(data) as engine:
        try:
            before = engine.stats(topic).bytes
        except UnknownTopic as error:
            fail(str(error))
        with Console(stderr=True).status(f"compacting {topic}"):
            engine.compact(topic)
        after = engine.stats(topic).bytes
    show({"bytes_before": before, "bytes": after}) if as_json else print(f"{topic}: {before:,} bytes before, {after:,} now")
