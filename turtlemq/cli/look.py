"""Client verbs that look: topics, stats, forecast."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, AsJson, Topic, Url, call, path, show, when

STATES = ("sleep", "ready", "reserve", "history", "dead", "cancelled")
BAR = " ▏▎▍▌▋▊▉█"


def topics(url: Url = URL, as_json: AsJson = False) -> None:
    """List all topics with their figures."""
    found = call(url, "GET", path())["topics"]
    if as_json:
        show(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("topic", *STATES, "bytes", box=None, pad_edge=False)
    for one in found:
        table.add_row(one["topic"], *(f"{one['stats'][state]:,}" for state in STATES), f"{one['stats']['bytes']:,}")
    Console().print(table)


def stats(
    topic: Topic,
    watch: Annotated[bool, typer.Option("--watch", help="Show them again every second, until Ctrl-C.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Figures of one topic and its groups."""
    if as_json:
        show(call(url, "GET", path(topic)))
        return
    from rich.console import Console
    from rich.live import Live

    if not watch:
        Console().print(_picture(call(url, "GET", path(topic))))
        return
    with Live(refresh_per_second=4) as live:
        try:
            while True:
                live.update(_picture(call(url, "GET", path(topic))))
                time.sleep(1)
        except KeyboardInterrupt:
            return


def _picture(found: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table

    figures = found["stats"]
    table = Table("topic", found["topic"], box=None, pad_edge=False)
    for name, value in figures.items():
        table.add_row(name, when(value) if name.endswith("_ms") else f"{value:,}")
    groups = Table("group", "ready", "reserve", "history", "dead", "lag", box=None, pad_edge=False)
    for name, one in found["groups"].items():
        groups.add_row(name, *(f"{one[key]:,}" for key in ("ready", "reserve", "history", "dead", "lag")))
    return Group(table, "", groups) if found["groups"] else table


def forecast(
    topic: Topic,
    hours: Annotated[float, typer.Option(help="How far to look ahead.", min=0.001)] = 24,
    bucket: Annotated[float, typer.Option(help="Seconds of one line.", min=0.001)] = 3600,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """How much comes due when, as a picture."""
    found = call(url, "GET", path(topic, "forecast", hours=hours, bucket=bucket))
    if as_json:
        show(found)
        return
    top = max([*found["counts"], 1])
    if found["overdue"]:
        print(f"overdue {found['overdue']:,}")
    for i, count in enumerate(found["counts"]):
        print(f"{when(found['from_ms'] + i * found['bucket_ms'])[:19]}  {count:>10,}  {bar(count / top, 50)}".rstrip())
    if found["beyond"]:
        print(f"later {found['beyond']:,}")


def bar(part: float, width: int) -> str:
    """A bar that is this part of a width, to the eighth of a character.

    >>> bar(0.5, 4), bar(0.03, 4), bar(0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(part * width * 8), 1 if part > 0 else 0)
    return ("█" * (eighths // 8) + BAR[eighths % 8]).rstrip()
