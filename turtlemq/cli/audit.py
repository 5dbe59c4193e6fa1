"""`turtlemq audit`: changes that were asked for, with the name of the token."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import urlencode

import typer

from turtlemq.cli.call import URL, call
from turtlemq.cli.output import console, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, Url, complete_topic, time_option
from turtlemq.cli.times import TIME_HELP, format_time

COLUMNS = ("token", "client", "action", "topic", "target", "count", "request_id")
_NARROW = 100  # characters of a terminal on which ids of requests are left out


def audit(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Only of this topic.", show_default=False, autocompletion=complete_topic),
    ] = None,
    since: Annotated[int | None, time_option(f"From when on: {TIME_HELP}.", "--since")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest.")] = 100,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """List changes with their time and token: cancels, requeues, settings, deletes, pauses … The newest come last.

    turtlemq audit orders --since -1d
    """
    wanted = {"topic": topic, "from_ms": since, "limit": limit}
    given = urlencode({name: value for name, value in wanted.items() if value is not None})
    events = call(url, "GET", f"/v1/audit?{given}")["events"]
    if as_json:
        for event in events:
            print_json(event)
        return
    is_narrow = sys.stdout.isatty() and console().width < _NARROW
    columns = [column for column in COLUMNS if not is_narrow or column != "request_id"]
    table = new_table("at", *columns, left=6, shrink=("client",), whole=("at", "action"))
    for event in events:
        table.add_row(format_time(event["at_ms"])[:19], *(printable(str(event.get(column, ""))) for column in columns))
    print_table(table)
