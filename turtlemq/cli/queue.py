"""Client verbs that move messages: put, fetch, ack, cancel."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from turtlemq.cli.call import URL, AsJson, Group, Topic, Url, answered, body_text, call, fail, path, progress, show, when

LINES = 1_000  # of a file in one request


def put(
    topic: Topic,
    body: Annotated[str | None, typer.Argument(help="The body: JSON, or any other text. '-' reads messages from stdin.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds to sleep.", min=0)] = None,
    id_: Annotated[str | None, typer.Option("--id", help="An id of your own.")] = None,
    ttr: Annotated[float | None, typer.Option(help="Seconds that a consumer may take.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file of messages, a JSON object a line (NDJSON).")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Store a message, or many from a file. Prints their ids."""
    if (body is None) == (file is None):
        fail("give a BODY, or --file F.ndjson, or '-' for stdin", 2)
    if body is not None and body != "-":
        given = {"body": _value(body), "id": id_, "delay": delay, "ttr": ttr}
        message = {name: value for name, value in given.items() if value is not None or name == "body"}
        answer = call(url, "POST", path(topic, "messages"), message)
        show(answer) if as_json else print(*answer["ids"], sep="\n")
        return
    if (delay, id_, ttr) != (None, None, None):
        fail("--delay, --id and --ttr are for one BODY; a file says them in its lines", 2)
    if file is None:
        _put_lines(url, topic, sys.stdin.buffer, 0, as_json)
        return
    try:
        with file.open("rb") as source:
            _put_lines(url, topic, source, file.stat().st_size, as_json)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put_lines(url: str, topic: str, source: BinaryIO, size: int, as_json: bool) -> None:
    created = duplicates = 0
    with progress() as shown:
        task = shown.add_task("put", total=size or None)
        for lines in _batches(source):
            data = b"".join(lines)
            with answered(url, "POST", path(topic, "messages"), data, "application/x-ndjson") as response:
                answer = json.loads(response.read())
            created, duplicates = created + answer["created"], duplicates + answer["duplicates"]
            shown.advance(task, len(data))
    if as_json:
        show({"created": created, "duplicates": duplicates})
    else:
        print(f"{created} created, {duplicates} duplicates")


def _batches(source: BinaryIO) -> Iterator[list[bytes]]:
    full = (line if line.endswith(b"\n") else line + b"\n" for line in source if line.strip())
    while lines := list(itertools.islice(full, LINES)):
        yield lines


def fetch(
    topic: Topic,
    count: Annotated[int, typer.Option("--max", help="How many at most.", min=1, max=10_000)] = 100,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the first.", min=0, max=60)] = 0,
    ttr: Annotated[float | None, typer.Option(help="Seconds that you may take; then they come again.")] = None,
    group: Group = "default",
    consumer: Annotated[str, typer.Option(help="Your name.")] = "",
    auto: Annotated[bool, typer.Option("--auto-ack", help="They are settled before you get them: at most once.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Fetch messages that are due. With --json an object a line."""
    asked = {"max": count, "wait": wait, "consumer": consumer, "ack": "auto" if auto else "manual"}
    if ttr is not None:
        asked["ttr"] = ttr
    for message in call(url, "POST", path(topic, "groups", group, "fetch"), asked)["messages"]:
        if as_json:
            show(message)
        else:
            print(message["id"], f"attempt {message['attempt']}", f"due {when(message['due_ms'])}", body_text(message), sep="\t")


def ack(
    topic: Topic,
    ids: Annotated[list[str], typer.Argument(help="ID for a message that was handled, -ID for one that failed.")],
    group: Group = "default",
    error: Annotated[str, typer.Option(help="Why the failed ones failed.")] = "",
    retry_delay: Annotated[float | None, typer.Option(help="Seconds until the failed ones come again.", min=0)] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Acknowledge messages: turtlemq ack orders 17 -18"""
    asked: dict[str, Any] = {"acks": ids, "error": error}
    if retry_delay is not None:
        asked["retry_delay"] = retry_delay
    answer = call(url, "POST", path(topic, "groups", group, "ack"), asked)
    if as_json:
        show(answer)
    else:
        print(f"{answer['acked']} acked, {answer['failed']} failed, {answer['dead']} dead, {len(answer['unknown'])} unknown")


def cancel(
    topic: Topic,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of messages.")] = None,
    due_from_ms: Annotated[int | None, typer.Option(help="Instead of ids: all that are due from here on …")] = None,
    due_to_ms: Annotated[int | None, typer.Option(help="… up to here, in epoch milliseconds.")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Cancel messages that nobody has fetched yet. Exits with 1 if one could not be cancelled."""
    times = {"due_from_ms": due_from_ms, "due_to_ms": due_to_ms}
    asked: dict[str, Any] = {name: value for name, value in times.items() if value is not None}
    if bool(ids) == bool(asked):
        fail("give ids, or --due-from-ms and --due-to-ms", 2)
    answer = call(url, "POST", path(topic, "cancel"), {"ids": ids} if ids else asked)
    if as_json:
        show(answer)
    else:
        print(f"{answer['cancelled']} cancelled")
        for id_, state in answer["missed"].items():
            print(f"{id_}: {state}", file=sys.stderr)
    raise typer.Exit(1 if answer["missed"] else 0)
