"""`turtlemq schedules …`: list, put, look at, pause, trigger and delete recurring schedules, on a running server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, json_with_body, path
from turtlemq.cli.listing import pages, print_pages
from turtlemq.cli.output import body_text, confirm, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, Topic, Url, Yes, asked, choice, duration_option, time_option
from turtlemq.cli.placeholders import Verbs
from turtlemq.cli.queue import AsText, Header, Priority, headers_of, warn_of_broken_json
from turtlemq.cli.times import TIME_HELP, format_duration, format_time, parse_duration

app = typer.Typer(cls=Verbs)


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    """Names of schedules of the topic that the line names already."""
    words = [word for word in context.args if not word.startswith("-")]
    topic = context.params.get("topic") or (words[0] if words else None)
    answer = asked(context, topic, "schedules") if topic else None
    return [one["name"] for one in answer["schedules"] if one["name"].startswith(incomplete)] if answer else []


Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.", show_default=False, autocompletion=_complete_name)]


Cron = Annotated[
    str | None, typer.Option(metavar="CRON", help="Five fields, or six with seconds: '0 9 * * MON-FRI'.", show_default=False)
]
Zone = Annotated[str | None, typer.Option(metavar="ZONE", help="Of --cron, as Europe/Berlin; else UTC.", show_default=False)]
Delays = Annotated[
    str | None, typer.Option(metavar="DURATIONS", help="Growing pauses between firings: 1m,5m,1h.", show_default=False)
]
CatchUp = Annotated[
    str | None,
    typer.Option(
        metavar="skip|one|all",
        help="Of times that pass while the server is down, fire none, one (default) or all.",
        show_default=False,
        autocompletion=choice("skip", "one", "all"),
    ),
]
Overlap = Annotated[
    str | None,
    typer.Option(
        metavar="allow|skip",
        help="skip: leave a time out until the message before is done with.",
        show_default=False,
        autocompletion=choice("allow", "skip"),
    ),
]


@app.command("list")
def list_(
    topic: Topic,
    limit: Annotated[int, typer.Option(metavar="N", help="How many at most.", min=1)] = 100,
    everything: Annotated[bool, typer.Option("--all", help="All of them, whatever --limit says.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """List schedules, those that fire next first. With --json an object a line.

    turtlemq schedules list mails
    """
    most, now_ms = None if everything else limit, time.time_ns() // 1_000_000

    def row(one: dict[str, Any]) -> Sequence[str]:
        due = "-" if one["next_ms"] is None else format_time(one["next_ms"])[:19]
        left = _state(one) or format_duration(one["next_ms"] - now_ms)
        return printable(one["name"]), timing_text(one), due, left, f"{one['fired']:,}", body_text(one)

    table = new_table("name", "when", "next", "in", "fired", "body", left=4, shrink=("when", "body"))
    print_pages(pages(url, topic, "schedules", limit=most, items="schedules"), table, row, most, as_json)


def timing_text(one: dict[str, Any]) -> str:
    """When a schedule fires, on one line.

    >>> timing_text({"cron": "0 9 * * *", "zone": "UTC"}), timing_text({"every": 5400}), timing_text({"delays": [60, 300]})
    ('0 9 * * * UTC', 'every 1.5 h', 'after 1 min, 5 min')
    """
    if "cron" in one:
        return f"{one['cron']} {one['zone']}"
    if "every" in one:
        return f"every {format_duration(one['every'] * 1000)}"
    return f"after {', '.join(format_duration(delay * 1000) for delay in one['delays'])}"


def _state(one: dict[str, Any]) -> str:
    """Why a schedule has no next time; empty if it has one."""
    if one["next_ms"] is not None:
        return ""
    return "ended" if one["ended_ms"] is not None else "paused"


@app.command()
def put(
    topic: Topic,
    name: Name,
    body: Annotated[str, typer.Argument(help="The body: JSON, or any other text.", show_default=False)],
    cron: Cron = None,
    zone: Zone = None,
    every: Annotated[float | None, duration_option("Time between two firings.")] = None,
    delays: Delays = None,
    start: Annotated[int | None, time_option(f"No firing before; --every counts from it: {TIME_HELP}.")] = None,
    end: Annotated[int | None, time_option("No firing after.")] = None,
    count: Annotated[int | None, typer.Option(help="So many firings in all.", show_default=False)] = None,
    jitter: Annotated[float | None, duration_option("Each firing is later by up to so much.")] = None,
    catch_up: CatchUp = None,
    overlap: Overlap = None,
    paused: Annotated[bool, typer.Option("--paused", help="Do not fire until it is resumed.")] = False,
    ttr: Annotated[float | None, duration_option("Seconds that a consumer may take.")] = None,
    priority: Priority = None,
    header: Header = None,
    text: AsText = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Create a schedule, or replace the one of its name. Prints its next time.

    turtlemq schedules put mails report '{"report": "daily"}' --cron '0 9 * * MON-FRI' --zone Europe/Berlin

    turtlemq schedules put jobs cleanup now --every 1h --overlap skip

    turtlemq schedules put payments ask-17 17 --delays 1m,5m,1h,1d
    """
    times = [parse_duration(one) for one in delays.split(",")] if delays is not None else None
    given: dict[str, Any] = {
        "cron": cron,
        "zone": zone,
        "every": every,
        "delays": times,
        "start_ms": start,
        "end_ms": end,
        "count": count,
    }
    given |= {"jitter": jitter, "catch_up": catch_up, "overlap": overlap, "paused": paused or None, "ttr": ttr}
    given |= {"priority": priority, "headers": headers_of(header) if header else None}
    fields = {name: value for name, value in given.items() if value is not None}
    warn_of_broken_json(body, text)
    answer = call(url, "PUT", path(topic, "schedules", name), json_with_body(fields, body, text))
    if as_json:
        print_json(answer)
    else:
        print(
            f"next: {format_time(answer['next_ms'])}" if answer["next_ms"] is not None else "paused or ended: it has no next time"
        )


@app.command()
def get(topic: Topic, name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Show a schedule: its timing, its next and its last time, and its message.

    turtlemq schedules get mails report
    """
    one = call(url, "GET", path(topic, "schedules", name))
    if as_json:
        print_json(one)
        return
    table = new_table("name", printable(one["name"]), left=2)
    table.add_row("when", timing_text(one))
    table.add_row("next", format_time(one["next_ms"]) if not _state(one) else _state(one))
    for label, field in (
        ("last", "last_ms"),
        ("from", "start_ms"),
        ("until", "end_ms"),
        ("ended", "ended_ms"),
        ("made", "created_ms"),
    ):
        if one[field] is not None:
            table.add_row(label, format_time(one[field]))
    table.add_row("fired", f"{one['fired']:,}" + (f" of {one['count']:,}" if one["count"] is not None else ""))
    if one["jitter"]:
        table.add_row("jitter", format_duration(one["jitter"] * 1000))
    table.add_row("catch up", one["catch_up"])
    table.add_row("overlap", one["overlap"])
    table.add_row("body", body_text(one))
    print_table(table)


@app.command("next")
def next_(
    topic: Topic,
    name: Name,
    count: Annotated[int, typer.Option(help="How many.", min=1)] = 10,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Show the next times of a schedule, in your time zone.

    turtlemq schedules next mails report --count 3
    """
    answer = call(url, "GET", path(topic, "schedules", name, "next", count=count))
    if as_json:
        print_json(answer)
        return
    for at_ms in answer["next_ms"]:
        print(format_time(at_ms))


@app.command()
def trigger(topic: Topic, name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Put the message of a schedule now. Its times stay as they are. Prints the id.

    turtlemq schedules trigger mails report
    """
    answer = call(url, "POST", path(topic, "schedules", name, "trigger"))
    print_json(answer) if as_json else print(printable(answer["id"]))


@app.command()
def pause(topic: Topic, name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Let a schedule fire no more until it is resumed.

    turtlemq schedules pause mails report
    """
    _set_paused(topic, name, "pause", url, as_json)


@app.command()
def resume(topic: Topic, name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Let a schedule fire again. Times that passed in the pause are left out.

    turtlemq schedules resume mails report
    """
    _set_paused(topic, name, "resume", url, as_json)


def _set_paused(topic: str, name: str, verb: str, url: str, as_json: bool) -> None:
    answer = call(url, "POST", path(topic, "schedules", name, verb))
    print_json(answer) if as_json else print("paused" if answer["paused"] else "resumed")


@app.command()
def delete(topic: Topic, name: Name, yes: Yes = False, url: Url = URL, as_json: AsJson = False) -> None:
    """Delete a schedule: asks first. Messages that have come due stay.

    turtlemq schedules delete mails report --yes
    """
    confirm(f"Delete the schedule {name!r} of {topic!r}?", yes)
    answer = call(url, "DELETE", path(topic, "schedules", name))
    print_json(answer) if as_json else print(answer["outcome"])
