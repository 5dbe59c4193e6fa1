"""Client verbs about single messages: get (with a timeline), reschedule."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, json_with_body, path
from turtlemq.cli.output import body_text, console, fail, print_json, printable
from turtlemq.cli.parameters import AsJson, Id, Topic, Url, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, format_duration, format_time

COLOURS = {
    "sleep": "blue",
    "ready": "green",
    "reserve": "yellow",
    "reserved": "yellow",
    "history": "dim",
    "acked": "green",
    "dead": "red",
    "failed": "red",
    "cancelled": "magenta",
}


def get(topic: Topic, id_: Id, url: Url = URL, as_json: AsJson = False) -> None:
    """Everything about one message: its state in every group, and its events with their times, as a picture.

    turtlemq get orders order-17
    """
    message = call(url, "GET", path(topic, "messages", id_))
    if as_json:
        print_json(message)
        return
    out, state = console(), message["state"]
    out.print(printable(message["id"]), style="bold cyan", end="  ")
    out.print(state, style=COLOURS.get(state))
    is_note = not message["created_ms"]  # of a sleeper that was cancelled only its id and the time of that are left
    for name in () if is_note else ("due_ms", "created_ms", "expires_ms"):
        if message.get(name) is not None:
            print(f"  {name.removesuffix('_ms'):<9} {format_time(message[name])}")
    if not is_note:
        print(f"  {'attempt':<9} {message['attempt']}")
    if message.get("headers"):
        print(f"  {'headers':<9} {printable(json.dumps(message['headers'], ensure_ascii=False))}")
    if not is_note:
        print(f"  {'body':<9} {body_text(message)}")
    for name, group in message["groups"].items():
        out.print(f"  group {name}: ", end="")
        out.print(str(group["state"]), style=COLOURS.get(str(group["state"])), end="")
        out.print(f", expires {format_time(group['expires_ms'])}" if "expires_ms" in group else "")
    print()
    for line, style in timeline(message["timeline"]):
        out.print(line, style=style)


def timeline(events: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """The events of a message as lines with their colours, with the time that passed between two of them.

    >>> events = [{"at_ms": 0, "event": "created"}, {"at_ms": 2500, "event": "ready"}]
    >>> [line.rpartition("  ")[2].strip() for line, _ in timeline(events)]
    ['created', '2.5 s', 'ready']
    """
    lines: list[tuple[str, str | None]] = []
    before: int | None = None
    for event in events:
        if before is not None:
            lines.append((f"│   {format_duration(event['at_ms'] - before)}", "dim"))
        details = [printable(str(event[name])) for name in ("group", "detail") if event.get(name)]
        lines.append(("  ".join([f"● {format_time(event['at_ms'])}", event["event"], *details]), COLOURS.get(event["event"])))
        before = event["at_ms"]
    return lines


def reschedule(
    topic: Topic,
    id_: Id,
    delay: Annotated[float | None, duration_option("Sleep so many seconds from now.")] = None,
    due: Annotated[int | None, time_option(f"Or until: {TIME_HELP}.")] = None,
    body: Annotated[str | None, typer.Option(help="Another body: JSON, or any other text.", show_default=False)] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Give a sleeper another due time, or another body.

    turtlemq reschedule orders order-17 --delay 2h
    """
    fields: dict[str, Any] = {name: value for name, value in (("delay", delay), ("due_ms", due)) if value is not None}
    if not fields and body is None:
        fail("what shall change? Give --delay, --due or --body", 2)
    answer = call(url, "PATCH", path(topic, "messages", id_), json_with_body(fields, body))
    print_json(answer) if as_json else print(f"{answer['outcome']}, due {format_time(answer['due_ms'])}")
