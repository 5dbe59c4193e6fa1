"""Client verbs about single messages: get (with attempts and a timeline), reschedule, retry."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, json_with_body, path
from turtlemq.cli.output import body_text, console, fail, print_json, printable
from turtlemq.cli.parameters import AsJson, Id, OneGroup, Topic, Url, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, format_duration, format_time
from turtlemq.errors import headline

COLOURS = {
    "sleep": "blue",
    "ready": "green",
    "reserve": "yellow",
    "reserved": "yellow",
    "history": "dim",
    "acked": "green",
    "dead": "red",
    "failed": "red",
    "expired": "red",
    "given back": "dim",
    "cancelled": "magenta",
}


def get(
    topic: Topic,
    id_: Id,
    at: Annotated[int | None, time_option(f"As it was then: {TIME_HELP}.", "--at")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Everything about one message: its state in every group, its last attempts, and its events with their times, as a picture.

    turtlemq get orders order-17

    turtlemq get orders order-17 --at -2h
    """
    moment = {} if at is None else {"at_ms": at}
    message = call(url, "GET", path(topic, "messages", id_, **moment))
    if as_json:
        print_json(message)
        return
    out, state = console(), message["state"]
    out.print(printable(message["id"]), style="bold cyan", end="  ")
    out.print(state, style=COLOURS.get(state), end="" if at is not None else "\n")
    if at is not None:
        print(f"  at {format_time(at)}")
    known = "created_ms" in message  # else only its id and the time of its cancel are left
    for name in ("due_ms", "created_ms", "expires_ms") if known else ():
        if message.get(name) is not None:
            print(f"  {name.removesuffix('_ms'):<9} {format_time(message[name])}")
    has_body = "body" in message or "body_base64" in message
    if has_body:
        print(f"  {'attempt':<9} {message['attempt']}")
    if message.get("headers"):
        print(f"  {'headers':<9} {printable(json.dumps(message['headers'], ensure_ascii=False))}")
    if has_body:
        print(f"  {'body':<9} {body_text(message)}")
    for name, group in message["groups"].items():
        out.print(f"  group {name}: ", end="")
        out.print(group_text(group, round(time.time() * 1000) if at is None else at), style=COLOURS.get(str(group["state"])))
    for one in message.get("attempts", ()):
        out.print(attempt_text(one), style=COLOURS.get(one["outcome"] or "reserve"))
    for line in last_traceback(message.get("attempts", ())):
        out.print(f"    {line}", style="dim")
    print()
    for line, style in timeline(message["timeline"]):
        out.print(line, style=style)


def group_text(group: dict[str, Any], now_ms: int) -> str:
    """The state of a message in a group, in words and with its time.

    >>> group_text({"state": "history", "summary": "not seen by this group: before its start"}, 0)
    'not seen by this group: before its start'
    >>> group_text({"state": "reserve", "summary": "attempt 1 is running", "consumer": "w", "lease_until_ms": 60_000}, 0)
    'attempt 1 is running at w until 1970-01-01 00:01:00.000+00:00'
    """
    text, at_ms = str(group.get("summary", group["state"])), group.get("due_ms")
    if "lease_until_ms" in group:
        consumer = f" at {printable(group['consumer'])}" if group.get("consumer") else ""
        text += f"{consumer} until {format_time(group['lease_until_ms'])}"
    if at_ms is not None:
        text += f" at {format_time(at_ms)}" if at_ms > now_ms else f", which is due since {format_time(at_ms)}"
    error = headline(str(group.get("error", "")))
    expires = f", expires {format_time(group['expires_ms'])}" if "expires_ms" in group else ""
    return text + (f" ({printable(error)})" if error else "") + expires


def attempt_text(one: dict[str, Any]) -> str:
    """An attempt on a line: its group and number, when it began, its consumer, how and after which time it ended, its error."""
    words = [f"  attempt {one['attempt']} of {one['group']}", format_time(one["reserved_ms"])]
    words += [printable(one["consumer"])] if one["consumer"] else []
    if one["outcome"] is None:
        return "  ".join([*words, "is running"])
    words.append(f"{one['outcome']} after {format_duration(one['ended_ms'] - one['reserved_ms'])}")
    words += [printable(headline(one["error"]))] if one["error"] else []
    return "  ".join(words)


def last_traceback(attempts: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the last error that has more than one, as lines that a terminal can show.

    >>> last_traceback([{"error": "KeyError: 'x'\\n  frame"}, {"error": ""}])
    ["KeyError: 'x'", '  frame']
    """
    error = next((one["error"] for one in reversed(attempts) if "\n" in one["error"].strip()), "")
    return [printable(line) for line in error.strip().split("\n") if line]


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
        details = [printable(headline(str(event[name]))) for name in ("group", "detail") if event.get(name)]
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


def retry(topic: Topic, id_: Id, group: OneGroup = None, url: Url = URL, as_json: AsJson = False) -> None:
    """Try a message again now that waits for its next attempt, or is dead.

    turtlemq retry orders order-17
    """
    answer = call(url, "POST", path(topic, "messages", id_, "retry"), {} if group is None else {"group": group})
    print_json(answer) if as_json else print(answer["outcome"])
