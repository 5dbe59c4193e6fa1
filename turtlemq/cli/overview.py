"""`turtlemq status` and `turtlemq top`: the server as a whole, and all its topics live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from turtlemq.cli.call import URL, call
from turtlemq.cli.output import console, fail, format_bytes, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import STATES, AsJson, Url, choice, duration_option
from turtlemq.cli.table import Table
from turtlemq.cli.times import format_duration

TOPICS_MAX = 1_000  # of one answer
SORTS = ("topic", "sleep", "ready", "reserve", "dead", "in", "acked")


def status(url: Url = URL, as_json: AsJson = False) -> None:
    """The server as a whole: version, messages of all topics, memory, room on its disk, refused requests and trouble.

    turtlemq status --json
    """
    answer = call(url, "GET", "/v1/status?limit=1000")
    if as_json:
        print_json(answer)
        return
    table = new_table("server", url, left=2)
    for name, text in _rows(answer):
        table.add_row(name, text)
    print_table(table)
    for line in _trouble(answer):
        console().print(printable(line), style="red")


def _rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    free, disk, memory = answer["disk_free_bytes"], answer["disk_bytes"], answer["memory_bytes"]
    left, all_ = answer["memory_free_bytes"], answer["memory_total_bytes"]
    more = "" if left is None else f"; {format_bytes(left)} free of {format_bytes(all_)}"
    refused = ", ".join(f"{count:,} {code}" for code, count in answer["rejected"].items())
    return [
        ("version", answer["version"]),
        ("up", format_duration(answer["uptime_s"] * 1000)),
        ("topics", f"{answer['topics_total']:,}"),
        *((state, f"{answer['states'][state]:,}") for state in STATES),
        ("size", format_bytes(answer["bytes"])),
        ("disk", "-" if free is None else f"{format_bytes(free)} free of {format_bytes(disk)}"),
        ("memory", "-" if memory is None else format_bytes(memory) + more),
        ("requests", f"{answer['requests']:,}, {answer['long_polls']:,} long polls wait"),
        ("refused", refused or "none"),
        ("commit", _quantiles(answer["commit_p50_ms"], answer["commit_p99_ms"])),
        ("lateness", _quantiles(answer["lateness"]["scheduler_p50_ms"], answer["lateness"]["scheduler_p99_ms"])),
    ]


def _quantiles(median: float | None, high: float | None) -> str:
    return "-" if median is None or high is None else f"p50 {median:.1f} ms, p99 {high:.1f} ms"


def _trouble(answer: dict[str, Any]) -> list[str]:
    damage = [f"{hit['topic']}: {hit['file']} is damaged at {hit['position']:,}: {hit['reason']}" for hit in answer["damage"]]
    return damage + [f"{topic['topic']}: {topic['trouble']}" for topic in answer["topics"] if topic["trouble"]]


def top(
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help=f"By which column: {', '.join(SORTS)}.", autocompletion=choice(*SORTS))
    ] = "ready",
    match: Annotated[str, typer.Option(metavar="TEXT", help="Only topics whose name has this in it.")] = "",
    every: Annotated[float, duration_option("How often to look.", show_default=True)] = 2,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, as in a pipe.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """All topics live, until Ctrl-C: messages by state, and how many come in and are acknowledged a second. In a pipe once; with
    --json an object a line for each look.

    turtlemq top --sort dead

    turtlemq top --once
    """
    if sort not in SORTS:
        fail(f"--sort is one of {', '.join(SORTS)}, not {sort!r}", 2)
    target = f"/v1/status?{urlencode({'limit': TOPICS_MAX, 'q': match})}"
    if once or not (as_json or sys.stdout.isatty()):
        answer = call(url, "GET", target)
        print_json(answer) if as_json else print_table(_table(answer, None, sort, TOPICS_MAX))
        return
    try:
        _watch(url, target, sort, max(every, 0.1), as_json)
    except KeyboardInterrupt:
        return


def _watch(url: str, target: str, sort: str, every: float, as_json: bool) -> None:
    from rich.live import Live

    before: dict[str, Any] | None = None
    out = console()
    with Live(console=out, auto_refresh=False, screen=not as_json) as live:
        while True:
            answer = call(url, "GET", target)
            if as_json:
                print_json(answer)
            else:
                live.update(_table(answer, before, sort, out.height - 2), refresh=True)
            before = answer
            time.sleep(every)


def _table(answer: dict[str, Any], before: dict[str, Any] | None, sort: str, height: int) -> Table:
    """The first topics by a column, with rates if there is an earlier answer; a last line tells the rest and the sums."""
    old = {topic["topic"]: topic["totals"] for topic in before["topics"]} if before else {}
    passed_s = max((answer["now_ms"] - before["now_ms"]) / 1000, 0.001) if before else 1.0
    rows = []
    for topic in answer["topics"]:
        earlier = old.get(topic["topic"], topic["totals"])
        rates = {name: (topic["totals"][key] - earlier[key]) / passed_s for name, key in (("in", "produced"), ("acked", "acked"))}
        rows.append({"topic": topic["topic"], **topic["states"], **rates})
    rows.sort(key=lambda row: (row["topic"] if sort == "topic" else -row[sort], row["topic"]))
    table = new_table("topic", "sleep", "ready", "reserve", "dead", "in/s", "acked/s")
    shown = rows[: max(height - 2, 1)]
    for row in shown:
        rates = {name: f"{row[name]:,.0f}" if before else "-" for name in ("in", "acked")}
        table.add_row(row["topic"], *(f"{row[state]:,}" for state in SORTS[1:5]), *rates.values())
    left = answer["topics_total"] - len(shown)
    what = f"all {answer['topics_total']:,}" + (f", {left:,} not shown" if left else "")
    table.add_row(what, *(f"{answer['states'][state]:,}" for state in SORTS[1:5]))
    return table
