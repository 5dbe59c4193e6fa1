"""`turtlemq list` and `turtlemq find`, and the printing of long listings page by page, so that memory does not grow with them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import body_text, fail, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import STATES, AsJson, Id, Newest, State, Topic, Url, time_option
from turtlemq.cli.table import Table
from turtlemq.cli.times import TIME_HELP, format_duration, format_time

PAGE = 1_000  # messages of one request
Page = list[dict[str, Any]]


def pages(url: str, *parts: str, limit: int | None, items: str = "messages", **query: Any) -> Iterator[Page]:
    """The pages of a listing below /v1/topics. A `limit` is only a hint: one item more shows whether there are more."""
    cursor: str | None = ""
    size = PAGE if limit is None else min(PAGE, limit + 1)
    while cursor is not None:
        answer = call(url, "GET", path(*parts, limit=size, cursor=cursor or None, **query))
        yield answer[items]
        cursor = answer["cursor"]


def print_pages(
    found: Iterator[Page], table: Table, row: Callable[[dict[str, Any]], Sequence[str]], limit: int | None, as_json: bool
) -> None:
    """Print up to `limit` messages, each page as it comes: JSON lines, or rows of a table. Says on stderr if there are more."""
    left = sys.maxsize if limit is None else limit
    for page in found:
        for message in page[:left]:
            print_json(message) if as_json else table.add_row(*row(message))
        if not as_json:
            print_table(table)
        if len(page) > left:
            sys.stdout.flush()
            print(f"… and more than these {limit:,} (--limit)", file=sys.stderr)
            return
        left -= len(page)


def list_(
    topic: Topic,
    state: State = "sleep",
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Only ids that begin with this.")] = "",
    from_: Annotated[int | None, time_option(f"Due from: {TIME_HELP}.", "--from")] = None,
    to: Annotated[int | None, time_option("Due until.")] = None,
    newest: Newest = False,
    limit: Annotated[int, typer.Option(metavar="N", help="How many at most.", min=1)] = 100,
    everything: Annotated[bool, typer.Option("--all", help="All of them, whatever --limit says.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """List messages in one state: sleepers by due time, others in the order in which they came due or died. With --json an
    object a line.

    turtlemq list orders --to +1h --limit 20

    turtlemq list orders --state ready --prefix order- --all --json
    """
    if state not in STATES:
        fail(f"--state is one of {', '.join(STATES)}, not {state!r}", 2)
    most = None if everything else limit
    filters: dict[str, Any] = {
        "state": state,
        "from_ms": from_,
        "to_ms": to,
        "prefix": prefix or None,
        "newest": "true" if newest else None,
    }
    found = pages(url, topic, "messages", limit=most, **filters)
    now_ms = time.time_ns() // 1_000_000

    def row(message: dict[str, Any]) -> Sequence[str]:
        left = format_duration(message["due_ms"] - now_ms) if state == "sleep" else ""
        due = format_time(message["due_ms"])[:19]
        return printable(message["id"]), due, left, message.get("group", ""), body_text(message)

    print_pages(found, new_table("id", "due", "in", "group", "body", left=5, shrink=("body",)), row, most, as_json)


def find(id_: Id, url: Url = URL, as_json: AsJson = False) -> None:
    """Find an id in all topics. Exits with 1 if no topic knows it. With --json an object a line.

    turtlemq find order-17
    """
    found = call(url, "GET", f"/v1/find?{urlencode({'id': id_})}")["found"]
    table = new_table("topic", "id", "state", "due", "next attempt", left=5)
    for message in found:
        if as_json:
            print_json(message)
        else:
            next_ms = message["next_ms"]
            again = "" if next_ms is None else format_time(next_ms)[:19]
            due = format_time(message["due_ms"])[:19]
            table.add_row(message["topic"], printable(message["id"]), message["state"], due, again)
    if not found:
        fail(f"no topic knows a message {id_!r}")
    if not as_json:
        print_table(table)
