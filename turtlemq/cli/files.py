"""Verbs on files: check, inspect, compact. They need no server, and the lock of the data folder refuses one that runs.

`compact` without a folder asks a running server.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import fail, format_bytes, print_error, print_json, printable, progress
from turtlemq.cli.parameters import AsJson, Topic, Url
from turtlemq.cli.times import format_time

if TYPE_CHECKING:
    from turtlemq.engine import Engine
    from turtlemq.segment import format as f
    from turtlemq.storage.copy_on_write import CopyOnWriteDoor

Data = Annotated[Path, typer.Option("--data", help="The data folder of a server that is stopped.")]
BODY_CHARS = 120
_FLAGS = "JSON CONTINUES BARRIER TOMBSTONE REPLACES SERVER_ID EXPIRES HEADERS MOVED HANDOFF META NOTICE SUPERSEDES".split()


@contextmanager
def _open_engine(data: Path) -> Iterator[Engine]:
    """The engine of a data folder."""
    from turtlemq.engine import Engine
    from turtlemq.errors import TurtleError
    from turtlemq.storage import names
    from turtlemq.storage.door import Door

    try:
        if (data / names.REPLICA).exists():
            from turtlemq.server.node_folder import refuse_cluster_folder

            refuse_cluster_folder(data)
        mode = data.stat().st_mode & 0o755 | 0o700  # new files are as readable as those of the server
        os.umask(0o777 & ~mode)
        engine = Engine.open(data, door=Door(folder_mode=mode))
    except (TurtleError, OSError) as error:
        fail(str(error))
    try:
        yield engine
    finally:
        engine.close()


def data_folders(data: Path) -> list[Path]:
    """The folders that hold the files: the given one or, of a server with several shards or a node of a cluster, those of its
    shards."""
    from turtlemq.errors import TurtleError
    from turtlemq.shard_folders import data_folders, read_layout
    from turtlemq.storage import names
    from turtlemq.storage.door import Door

    try:
        if read_layout(Door(), data) is not None:
            return data_folders(Door(), data)
    except TurtleError as error:
        fail(str(error))
    if (data / names.FORMAT).is_file():
        return [data]
    shards = sorted(each for each in (data / names.SHARDS).glob("[0-9]*") if (each / names.FORMAT).is_file())
    if not shards:
        fail(f"{data} is no data folder of TurtleMQ")
    return shards


def check(
    data: Data = Path("data"),
    scratch: Annotated[
        Path | None, typer.Option(help="Where to keep what a start would write; the system's temporary folder if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte again and find every broken invariant: a line each, and exit code 1. Nothing in the folder is changed.

    turtlemq check --data data
    """
    topics, problems, notes = 0, list[str](), list[str]()
    folders = data_folders(data)
    for folder in folders:
        count, *found = _check_folder(folder, scratch)
        where = "" if len(folders) == 1 else f"{folder.relative_to(data)}/"
        topics += count
        for lines, more in zip((problems, notes), found, strict=True):
            lines += [f"{where}{line}" for line in more]
    problems += _partition_problems(data, folders)
    if as_json:
        print_json({"topics": topics, "problems": problems, "notes": notes})
    else:
        print(*problems, sep="\n") if problems else print(f"{topics} topics, no problem found")
        for note in notes:
            print_error(f"note: {note}")
    raise typer.Exit(1 if problems else 0)


def _partition_problems(data: Path, folders: list[Path]) -> list[str]:
    """Topics with partitions whose folders do not agree."""
    from turtlemq.shard_folders import partition_problems
    from turtlemq.storage.door import Door

    return [f"{folder.relative_to(data)}/{line}" for folder, line in partition_problems(Door(), folders)]


def _check_folder(data: Path, scratch: Path | None) -> tuple[int, list[str], list[str]]:
    """Check one data folder. Returns the number of topics, problems and notes."""
    from turtlemq.errors import TurtleError

    try:
        with tempfile.TemporaryDirectory(prefix="turtlemq-check-", dir=scratch) as copy:
            try:
                topics, problems, notes = _check_copy(data, Path(copy))
            except (TurtleError, OSError) as error:
                fail(str(error).replace(copy, str(data)))
    except OSError as error:
        fail(f"{error}. See --scratch.")
    lists = ([line.replace(copy, str(data)) for line in dict.fromkeys(lines)] for lines in (problems, notes))
    return topics, *lists  # type: ignore[return-value]


def _check_copy(data: Path, copy: Path) -> tuple[int, list[str], list[str]]:
    """Open a copy-on-write view of the folder, whose changes go to `copy`, and check it.

    Returns the number of topics, one line per problem, and one line per torn end that the next start will cut.
    """
    from turtlemq.data_folder import dropped_in
    from turtlemq.engine import Engine
    from turtlemq.errors import describe
    from turtlemq.storage.copy_on_write import CopyOnWriteDoor
    from turtlemq.storage.door import Door

    door = CopyOnWriteDoor(data, copy)
    engine = Engine.open(door.root, door=door)
    problems = [f"{name}: {describe(error)}" for name, error in engine.trouble.items()]
    problems += [
        f"{name}: it is not as it was left at the last stop; a start makes it again" for name in _rebuilt_caches(engine, door)
    ]
    notes = [f"{path.relative_to(data)}: left of a deleted topic; a start removes it" for path in dropped_in(Door(), data)]
    notes += _about_copy(data)
    notes += [f"{name}: {cut} bytes at its end belong to no whole batch; a start cuts them" for name, cut in door.cut().items()]
    with progress() as shown:
        sizes = {name: engine.stats(name).bytes for name in engine.topics}
        task = shown.add_task("check", total=sum(sizes.values()))
        for name, topic in engine.topics.items():
            shown.update(task, description=f"check {name}")
            problems += topic.view.check()
            problems += [f"{name}/{damage}" for damage in topic.view.damage()]
            shown.advance(task, sizes[name])
    engine.close()
    return len(engine.topics), problems, notes


def _about_copy(data: Path) -> list[str]:
    """Notes about a folder that is a copy in a cluster."""
    from turtlemq.replica import replica_file
    from turtlemq.storage.door import Door

    facts = replica_file.read(Door(), data)
    if facts is None:
        return []
    notes = [f"REPLICA: {path} has damage; it is replaced by the leader's when this copy follows" for path in facts.suspect]
    if not facts.complete:
        notes.append("REPLICA: this copy is not complete: it was being made equal to its leader's, or its disk has failed")
    return notes


def _rebuilt_caches(engine: Engine, door: CopyOnWriteDoor) -> list[str]:
    """Caches that opening had to rebuild after a clean stop, where all of them should have been valid. Empty after a crash."""
    from turtlemq.storage import names

    changed = [(name, names.parse(name.rpartition("/")[2])) for name in door.changed() if engine.was_clean]
    return [name for name, file in changed if name.endswith("/offset") or (file and not file.suffix and file.what != "bson")]


def inspect(
    file: Annotated[Path, typer.Argument(help="A segment, such as data/topic/orders/delay_0000000000.bson")],
    limit: Annotated[int, typer.Option(help="How many documents at most; 0 for all.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the documents of a segment with their positions. With --json an object a line. Exits with 1 if bytes are damaged.

    turtlemq inspect data/topic/orders/delay_0000000000.bson --limit 10
    """
    from turtlemq.errors import TurtleError
    from turtlemq.segment import format as f
    from turtlemq.segment import log
    from turtlemq.storage.door import Door

    door = Door()
    try:
        header, scan = log.scan_file(door, file)
        view = door.map(file)
    except (TurtleError, OSError) as error:
        fail(f"{file}: {error.strerror or error if isinstance(error, OSError) else error}")
    sealed = "sealed" if header.sealed else "open"
    if not as_json:
        print(f"{file.name}: {header.kind} of topic {header.topic}, base {header.base}, {sealed}, {len(scan)} documents")
    for at, length in list(zip(scan.positions.tolist(), scan.lengths.tolist(), strict=True))[: limit or None]:
        fields = _fields(header.kind, at, f.decode(view[at : at + length]))
        print_json(fields) if as_json else print(*(f"{name}={value}" for name, value in fields.items()), sep="  ")
    damage = log.damage_of(file, scan)
    for hole in damage:
        print(hole, file=sys.stderr)
    if scan.end < scan.size:
        print(f"{scan.size - scan.end} bytes at position {scan.end} belong to no whole batch; a start cuts them", file=sys.stderr)
    raise typer.Exit(1 if damage else 0)


def _fields(kind: str, position: int, document: f.Document) -> dict[str, Any]:
    """The fields of a document to print. In journals the id is the group and the body an event."""
    from turtlemq.message_fields import FIELDS, optional_of
    from turtlemq.segment import format as f

    known = {name: getattr(f, name) for name in _FLAGS} | {row.element.upper(): row.flag for row in FIELDS}
    flags = [name for name, flag in known.items() if document.flags & flag]
    fields: dict[str, Any] = {"position": position, "length": document.length, "seq": document.seq}
    if kind in ("reserve", "history"):
        return fields | {"at": format_time(document.due_ms), "group": document.id, "event": _event(document.body), "flags": flags}
    fields |= {"due": format_time(document.due_ms), "due_ms": document.due_ms, "id": document.id, "flags": flags}
    optional = {
        "ttr_ms": document.ttr_ms,
        "of": document.of,
        **optional_of(document),
        "meta": {name: str(value) for name, value in document.meta.items()},
    }
    fields |= {name: value for name, value in optional.items() if value}
    if document.flags & f.HANDOFF:
        return fields | {"event": _event(document.body)}
    text = document.body[: BODY_CHARS * 4].decode("utf-8", "backslashreplace")
    return fields | {
        "body_bytes": len(document.body),
        "body": printable(text[:BODY_CHARS]) + ("…" if len(text) > BODY_CHARS else ""),
    }


def _event(body: bytes) -> dict[str, Any]:
    import bson

    try:
        return {name: _event_field(name, value) for name, value in bson.decode(body).items()}
    except bson.errors.InvalidBSON:
        return {"unknown": body.hex()}  # not an event: a document of another kind of file


def _event_field(name: str, value: Any) -> Any:
    """A field of an event to print: packed columns as numbers, ids as texts; a dict has such a field for each group."""
    import numpy as np

    if isinstance(value, dict):
        return {group: _event_field(name, field) for group, field in value.items()}
    if not isinstance(value, bytes):
        return value
    if name in ("ids", "naps"):
        return value.decode(errors="backslashreplace").split("\0")
    return np.frombuffer(value, "<i8").tolist() if len(value) % 8 == 0 else value.hex()


def compact(
    topic: Topic,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="The data folder of a server that is stopped; else a running one is asked.", show_default=False
        ),
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Free the room of messages that are gone, now.

    turtlemq compact orders

    turtlemq compact orders --data data
    """
    with progress() as shown:
        shown.add_task(f"compact {topic}", total=None)
        before, after = _compact_files(data, topic) if data is not None else _compact_on_server(url, topic)
    if as_json:
        print_json({"bytes_before": before, "bytes": after})
    else:
        print(f"{topic}: {before:,} bytes before, {after:,} now ({format_bytes(before - after)} freed)")


def _compact_files(data: Path, topic: str) -> tuple[int, int]:
    """Compact a topic, in all folders that have it. Returns its bytes before and after."""
    from turtlemq.shards import shard_of
    from turtlemq.storage import names

    folders, before, after = data_folders(data), 0, 0
    home = folders[shard_of(topic, len(folders))]
    for folder in folders:
        if folder != home and not (folder / names.TOPICS / topic).is_dir():
            continue
        with _open_engine(folder) as engine:
            if topic not in engine.topics:
                fail(f"there is no topic {topic!r}")
            before += engine.stats(topic).bytes
            engine.compact(topic)
            after += engine.stats(topic).bytes
    return before, after


def _compact_on_server(url: str, topic: str) -> tuple[int, int]:
    """Ask the server to compact until it has finished; each request is answered after half a minute at most."""
    before: int | None = None
    while True:
        answer = call(url, "POST", path(topic, "compact"))
        before = answer["bytes_before"] if before is None else before
        if answer["outcome"] != "running":
            return before, answer["bytes"]
