"""Client verbs about single messages: get (with its timeline as a picture), reschedule, list."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, json_with_body, path
from turtlemq.cli.output import body_text, console, fail, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, Topic, Url, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, format_duration, format_time, parse_time

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
Id = Annotated[str, typer.Argument(help="The message's id.", show_default=False)]


def get(
    topic: Topic, id_: Annotated[str, typer.Argument(metavar="ID", help="Its id.")], url: Url = URL, as_json: AsJson = False
) -> None:
    """Everything about one message: where it is, in every group, and what happened to it when, as a picture.

    turtlemq get orders order-17
    """
    found = call(url, "GET", path(topic, "messages", id_))
    if as_json:
        print_json(found)
        return
    out, state = console(), found["state"]
    out.print(printable(found["id"]), style="bold cyan", end="  ")
    out.print(state, style=COLOURS.get(state))
    for name in ("due_ms", "created_ms", "expires_ms"):
        if found.get(name) is not None:
            print(f"  {name.removesuffix('_ms'):<9} {format_time(found[name])}")
    print(f"  {'attempt':<9} {found['attempt']}")
    if found.get("headers"):
        print(f"  {'headers':<9} {printable(json.dumps(found['headers'], ensure_ascii=False))}")
    print(f"  {'body':<9} {body_text(found)}")
    for name, group in found["groups"].items():
        out.print(f"  group {name}: ", end="")
        out.print(str(group["state"]), style=COLOURS.get(str(group["state"])))
    print()
    for line, style in timeline(found["timeline"]):
        out.print(line, style=style)


def timeline(moments: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """What happened, a line each, with the time that passed between, and their colours.

    >>> moments = [{"at_ms": 0, "event": "created"}, {"at_ms": 2500, "event": "ready"}]
    >>> [line.rpartition("  ")[2].strip() for line, _ in timeline(moments)]
    ['created', '2.5 s', 'ready']
    """
    lines: list[tuple[str, str | None]] = []
    before: int | None = None
    for one in moments:
        if before is not None:
            lines.append((f"│   {format_duration(one['at_ms'] - before)}", "dim"))
        more = [printable(str(one[name])) for name in ("group", "detail") if one.get(name)]
        lines.append(("  ".join([f"● {format_time(one['at_ms'])}", one["event"], *more]), COLOURS.get(one["event"])))
        before = one["at_ms"]
    return lines


def reschedule(
    topic: Topic,
    id_: Annotated[str, typer.Argument(metavar="ID", help="Its id.")],
    delay: Annotated[float | None, duration_option("Sleep so many seconds from now.")] = None,
    due: Annotated[int | None, time_option(f"Or until: {TIME_HELP}.")] = None,
    body: Annotated[str | None, typer.Option(help="Another body: JSON, or any other text.", show_default=False)] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Give a sleeper another due time, or another body.

    turtlemq reschedule orders order-17 --delay 2h
    """
    asked: dict[str, Any] = {name: value for name, value in (("delay", delay), ("due_ms", due)) if value is not None}
    if not asked and body is None:
        fail("what shall change? Give --delay, --due or --body", 2)
    answer = call(url, "PATCH", path(topic, "messages", id_), json_with_body(asked, body))
    print_json(answer) if as_json else print(f"{answer['outcome']}, due {format_time(answer['due_ms'])}")


def list_(
    topic: Topic,
    from_: Annotated[int | None, time_option(f"Due from: {TIME_HELP}.", "--from")] = None,
    to: Annotated[int | None, time_option("Due until.")] = None,
    limit: Annotated[int, typer.Option(help="How many at most.", min=1, max=10_000)] = 100,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """List sleepers by due time. With --json an object a line.

    turtlemq list orders --to +1h --limit 20
    """
    found = call(url, "GET", path(topic, "messages", state="sleep", from_ms=from_, to_ms=to, limit=limit))
    if as_json:
        for message in found["messages"]:
            print_json(message)
        return
    made = new_table("id", "due", "in", "body", left=4)
    now = parse_time("+0s")
    for message in found["messages"]:
        text = body_text(message)
        left = message["due_ms"] - now
        made.add_row(
            printable(message["id"]),
            format_time(message["due_ms"]),
            format_duration(left),
            text[:60] + ("…" if len(text) > 60 else ""),
        )
    print_table(made)
    if found["cursor"] is not None:
        print("… and more (--limit)", file=sys.stderr)
