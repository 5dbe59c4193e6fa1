"""Client verbs that look at a topic: stats, forecast."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import console, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import AsJson, Topic, Url, duration_option
from turtlemq.cli.times import format_time
from turtlemq.cli.topics import groups_table

BAR = " ▏▎▍▌▋▊▉█"
LINES = 24  # of a forecast, where the bucket is not said


def stats(
    topic: Topic,
    watch: Annotated[bool, typer.Option("--watch", help="Show them again every second, until Ctrl-C.")] = False,
    every: Annotated[float, duration_option("With --watch: how often.", show_default=True)] = 1,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Figures of one topic and its groups. With --watch also as rates; with --watch --json an object a line.

    turtlemq stats orders

    turtlemq stats orders --watch
    """
    if not watch:
        found = call(url, "GET", path(topic))
        if as_json:
            print_json(found)
        else:
            for made in _tables(found, None, 0):
                print_table(made)
        return
    try:
        _watch(url, topic, max(every, 0.1), as_json)
    except KeyboardInterrupt:
        return


def _watch(url: str, topic: str, every: float, as_json: bool) -> None:
    from rich.console import Group
    from rich.live import Live

    before: dict[str, Any] | None = None
    at = time.monotonic()
    with Live(console=console(), refresh_per_second=4, auto_refresh=not as_json) as live:
        while True:
            found = call(url, "GET", path(topic))
            now = time.monotonic()
            if as_json:
                print_json(found)
            else:
                live.update(Group(*_tables(found, before, now - at)))
            before, at = found, now
            time.sleep(every)


def _tables(found: dict[str, Any], before: dict[str, Any] | None, passed_s: float) -> list[Any]:
    figures = found["stats"]
    made = new_table("topic", found["topic"], *(["a second"] if before else []))
    for name, value in figures.items():
        text = format_time(value) if name.endswith("_ms") else format_bytes(value) if name == "bytes" else f"{value:,}"
        row = [name, text]
        if before is not None and isinstance(value, int) and not name.endswith("_ms"):
            rate = (value - (before["stats"].get(name) or 0)) / max(passed_s, 0.001)
            row.append(f"{rate:+,.0f}" if round(rate) else "")
        made.add_row(*row)
    return [made, groups_table(found["groups"])] if found["groups"] else [made]


def forecast(
    topic: Topic,
    hours: Annotated[float, typer.Option(help="How far to look ahead.", min=0.001)] = 24,
    bucket: Annotated[float | None, duration_option("Seconds of one line. (default: 24 lines)")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """How much comes due when, as a picture.

    turtlemq forecast orders --hours 24 --bucket 1h
    """
    size = bucket if bucket is not None else max(round(hours * 3600 / LINES, 3), 0.001)
    found = call(url, "GET", path(topic, "forecast", hours=hours, bucket=size))
    if as_json:
        print_json(found)
        return
    out = console()
    top = max([*found["counts"], 1])
    if found["overdue"]:
        out.print(f"overdue {found['overdue']:,}", style="red")
    for i, count in enumerate(found["counts"]):
        at, drawn = format_time(found["from_ms"] + i * found["bucket_ms"])[:19], bar(count / top, 50)
        out.print(f"{at}  {count:>10,}" + (f"  [green]{drawn}" if drawn else ""), markup=True)
    if found["beyond"]:
        print(f"later {found['beyond']:,}")


def bar(part: float, width: int) -> str:
    """A bar that is this part of a width, to the eighth of a character.

    >>> bar(0.5, 4), bar(0.03, 4), bar(0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(part * width * 8), 1 if part > 0 else 0)
    return ("█" * (eighths // 8) + BAR[eighths % 8]).rstrip()
