"""`turtlemq stats` and `turtlemq forecast`: figures of a topic and its groups, and the number of messages by due time."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import console, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import AsJson, Topic, Url, duration_option
from turtlemq.cli.times import format_duration, format_time
from turtlemq.cli.topics import groups_table

BAR = " ▏▎▍▌▋▊▉█"
BEFORE_BAR = 33  # characters of a forecast's line: the time, the count, and the gaps
LINES = 24  # of a forecast without --bucket, about
_ROUND_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, 86_400, 604_800)


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
        answer = call(url, "GET", path(topic))
        if as_json:
            print_json(answer)
        else:
            for table in _tables(answer, None, 0):
                print_table(table)
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
            answer = call(url, "GET", path(topic))
            now = time.monotonic()
            if as_json:
                print_json(answer)
            else:
                live.update(Group(*_tables(answer, before, now - at)))
            before, at = answer, now
            time.sleep(every)


def _tables(answer: dict[str, Any], before: dict[str, Any] | None, passed_s: float) -> list[Any]:
    """The figures of a topic and of its groups; rates too if there is an answer of `passed_s` seconds before."""
    table = new_table("topic", answer["topic"], *(["a second"] if before else []))
    for name, value in answer["stats"].items():
        row = [name.removesuffix("_ms").replace("_", " "), _figure(name, value)]
        if before is not None and isinstance(value, int) and not name.endswith("_ms"):
            rate = (value - (before["stats"].get(name) or 0)) / max(passed_s, 0.001)
            row.append(f"{rate:+,.0f}" if round(rate) else "")
        table.add_row(*row)
    return [table, groups_table(answer["groups"])] if answer["groups"] else [table]


def _figure(name: str, value: Any) -> str:
    """A figure of a topic as text.

    >>> _figure("live_ratio", 0.9959724451445034), _figure("bytes", 2048), _figure("next_due_ms", None), _figure("sleep", 1200)
    ('99.6 %', '2.0 KiB', '-', '1,200')
    """
    if name.endswith("_ms"):
        return format_time(value)
    if name == "live_ratio":
        return f"{value:.1%}".replace("%", " %")
    return format_bytes(value) if name == "bytes" else f"{value:,}"


def forecast(
    topic: Topic,
    hours: Annotated[float, typer.Option(help="How far to look ahead.", min=0.001)] = 24,
    bucket: Annotated[float | None, duration_option("Seconds of one line, on round times. (default: about 24 lines)")] = None,
    what_if_spread: Annotated[
        float | None, duration_option("As it would be if each message were spread over so many seconds.")
    ] = None,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="How late messages will be, at the rate that consumers have shown lately.")
    ] = False,
    per_s: Annotated[
        float | None, typer.Option(help="How late they would be if consumers handled so many a second.", min=0.001)
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """How much comes due when, as a picture. --capacity needs the setting lateness_slo of the topic; it exits with 1 if messages
    will be later than that.

    turtlemq forecast orders --hours 24 --bucket 1h

    turtlemq forecast orders --hours 2 --bucket 1m --what-if-spread 10m

    turtlemq forecast orders --hours 6 --capacity
    """
    size = bucket if bucket is not None else _round_size(hours * 3600 / LINES)
    now = time.time()
    start = round_start(now, size, time.localtime(now).tm_gmtoff)
    asked = {"hours": hours + (now - start) / 3600, "bucket": size, "from_ms": int(start * 1000)}
    rate: dict[str, Any] = {"capacity_per_s": per_s} if per_s is not None else {"capacity": "true"} if capacity else {}
    answer = call(url, "GET", path(topic, "forecast", **asked, what_if_spread=what_if_spread, **rate))
    if as_json:
        print_json(answer)
    else:
        _draw(answer)
    if "capacity" in answer and answer["capacity"]["late_from_ms"] is not None:
        raise typer.Exit(1)


def _draw(answer: dict[str, Any]) -> None:
    out = console()
    width = max(10, min(50, out.width - BEFORE_BAR))
    if "what_if" in answer:
        peaks = max(answer["counts"], default=0), max(answer["what_if"]["counts"], default=0)
        answer |= answer["what_if"]
        print(f"as it would be with this spread: at most {peaks[1]:,} in one line, instead of {peaks[0]:,}")
    largest, late_ms = max([*answer["counts"], 1]), answer.get("capacity", {}).get("late_ms")
    if answer["overdue"]:
        out.print(f"overdue {answer['overdue']:,}", style="red")
    if not any(answer["counts"]):
        print(f"nothing comes due in the next {format_duration(answer['bucket_ms'] * len(answer['counts']))}")
    for i, count in enumerate(answer["counts"] if any(answer["counts"]) else ()):
        at, drawn = format_time(answer["from_ms"] + i * answer["bucket_ms"])[:19], bar(count / largest, width)
        late = f"  [red]late by {format_duration(late_ms[i])}[/red]" if late_ms and late_ms[i] else ""
        out.print(f"{at}  {count:>10,}" + (f"  [green]{drawn}[/green]" if drawn else "") + late, markup=True)
    if answer["beyond"]:
        print(f"later {answer['beyond']:,}")
    if "capacity" in answer:
        print(_verdict(answer["capacity"]))


def _verdict(found: dict[str, Any]) -> str:
    """A forecast of lateness in words.

    >>> _verdict({"group": "g", "per_s": 2.0, "late_from_ms": None, "worst_ms": 0, "worst_at_ms": None})
    'group g handles 2 a second: in time'
    """
    rate = f"{found['per_s']:,g} a second"
    rate = f"group {found['group']} handles {rate}" if found["group"] else f"with {rate}"
    if found["late_from_ms"] is None:
        late = found["worst_ms"]
        return f"{rate}: in time" + (f", at most {format_duration(late)} late" if late else "")
    begin, worst = format_time(found["late_from_ms"])[:19], format_time(found["worst_at_ms"])[:19]
    return f"{rate}: will be late from {begin} on, by {format_duration(found['worst_ms'])} at {worst}"


def _round_size(seconds: float) -> float:
    """The next round length of a line.

    >>> _round_size(3600), _round_size(3700), _round_size(0.3), _round_size(8_000_000)
    (3600, 7200, 1, 8467200)
    """
    weeks = -int(-seconds // _ROUND_S[-1]) * _ROUND_S[-1]
    return next((size for size in _ROUND_S if size >= seconds), weeks)


def round_start(now: float, size: float, offset: float) -> float:
    """The last round time of a length: in local time, `offset` seconds ahead of UTC. Lines of odd lengths begin now.

    >>> round_start(10_000, 3600, 0), round_start(10_000, 3600, 1800), round_start(10.25, 7, 0)
    (7200, 9000, 10.25)
    """
    return (now + offset) // size * size - offset if size in _ROUND_S else now


def bar(fraction: float, width: int) -> str:
    """A bar over this fraction of a width, precise to an eighth of a character.

    >>> bar(0.5, 4), bar(0.03, 4), bar(0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(fraction * width * 8), 1 if fraction > 0 else 0)
    return ("█" * (eighths // 8) + BAR[eighths % 8]).rstrip()
