"""`turtlemq replay`: copy delivered messages of a topic into another one, with a progress bar; Ctrl-C cancels."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import fail, print_json
from turtlemq.cli.parameters import AsJson, Topic, Url, complete_topic, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, parse_time

LOOK_S = 0.2  # between two looks at the progress
WIDTH = 30  # of the bar


def replay(
    topic: Topic,
    into: Annotated[
        str, typer.Option("--into", metavar="TOPIC", help="The other topic.", show_default=False, autocompletion=complete_topic)
    ],
    from_: Annotated[int, time_option(f"Messages that became ready from then on: {TIME_HELP}.", "--from")],
    to: Annotated[int | None, time_option(f"And before: {TIME_HELP}. Without it, until now.", "--to")] = None,
    delay: Annotated[float | None, duration_option("Let the copies sleep so long.")] = None,
    state: Annotated[str | None, typer.Option(help="Only messages in this state, as dead.", show_default=False)] = None,
    prefix: Annotated[str | None, typer.Option(help="Only ids that begin so.", show_default=False)] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only messages with this header.", show_default=False)
    ] = None,
    per_s: Annotated[float | None, typer.Option("--per-s", metavar="N", help="Copies a second.", show_default=False)] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy messages that became ready in a range of times into another topic. Begun again, it copies only the rest.

    turtlemq replay orders --from -2h --into orders-again
    """
    headers = dict(one.partition("=")[::2] for one in header or ())
    given = {"state": state, "prefix": prefix, "headers": headers or None}
    asked: dict[str, Any] = {"from_ms": from_, "to_ms": parse_time("-1ms") if to is None else to, "into": into}
    asked |= {"filter": {name: value for name, value in given.items() if value is not None}}
    asked |= {name: value for name, value in (("delay", delay), ("per_s", per_s)) if value is not None}
    job = call(url, "POST", path(topic, "replay"), asked)
    try:
        while job["state"] == "running":
            _show(job)
            time.sleep(LOOK_S)
            job = call(url, "GET", path(topic, "replays", job["id"]))
    except KeyboardInterrupt:
        job = call(url, "DELETE", path(topic, "replays", job["id"]))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print_json(job) if as_json else print(f"{job['state']}: {job['copied']:,} copied, {job['duplicates']:,} were there already")
    if job["state"] != "done":
        fail(job["error"] or f"the replay was ended; {job['scanned']:,} of {job['total']:,} were looked at")


def _show(job: dict[str, Any]) -> None:
    """The progress, on one line of a terminal."""
    if sys.stderr.isatty():
        done = job["scanned"] / max(1, job["total"])
        print(f"\r{bar(done)} {done:4.0%}  {job['copied']:,} copied ", end="", file=sys.stderr, flush=True)


def bar(done: float) -> str:
    """A progress bar.

    >>> bar(0.5)
    '███████████████···············'
    """
    full = round(WIDTH * min(1.0, done))
    return "█" * full + "·" * (WIDTH - full)
