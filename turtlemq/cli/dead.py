"""`turtlemq dead …`: list, summarize, requeue, delete and export the dead letters of a topic, on a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from turtlemq.cli.call import URL, call, path, request
from turtlemq.cli.listing import pages, print_pages
from turtlemq.cli.output import body_text, confirm, fail, new_table, print_json, printable
from turtlemq.cli.parameters import AsJson, InGroup, Newest, Topic, Url, Yes, duration_option, time_option
from turtlemq.cli.placeholders import Verbs
from turtlemq.cli.times import format_time
from turtlemq.errors import headline

app = typer.Typer(cls=Verbs)

Ids = Annotated[list[str] | None, typer.Argument(help="Ids; or use --all, --in-group, --error.", show_default=False)]
OfError = Annotated[str | None, typer.Option("--error", help="Only those that died of this.", show_default=False)]
Since = Annotated[int | None, time_option("Only those that died since.")]
Until = Annotated[int | None, time_option("Only those that died until.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]


def _selection(ids: list[str] | None, group: str | None, error: str | None, everything: bool) -> dict[str, Any]:
    """The ids or the filter of a request, from exactly one of both on the command line."""
    if ids:
        if everything or error is not None:
            fail("give ids, or a filter, not both", 2)
        return {"ids": ids} if group is None else {"ids": ids, "group": group}
    given = {name: value for name, value in (("group", group), ("error", error)) if value is not None}
    if not given and not everything:
        fail("which ones? Give ids, --in-group, --error or --all", 2)
    return {"filter": given}


@app.command("list")
def list_dead(
    topic: Topic,
    limit: Annotated[int, typer.Option(metavar="N", help="How many at most.", min=1)] = 100,
    everything: Annotated[bool, typer.Option("--all", help="All of them, whatever --limit says.")] = False,
    group: InGroup = None,
    error: OfError = None,
    since: Since = None,
    until: Until = None,
    newest: Newest = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """List dead letters in the order in which they died. With --json an object a line.

    turtlemq dead list orders --newest --limit 20
    """
    filters: dict[str, Any] = {
        "group": group,
        "error": error,
        "from_ms": since,
        "to_ms": until,
        "newest": "true" if newest else None,
    }
    most = None if everything else limit
    table = new_table("id", "group", "attempts", "died", "error", "body", left=6, shrink=("error", "body"))
    print_pages(pages(url, topic, "dead", limit=most, **filters), table, _row, most, as_json)


def _row(letter: dict[str, Any]) -> Sequence[str]:
    died, error = format_time(letter["dropped_ms"])[:19], printable(headline(letter["error"]))
    return printable(letter["id"]), letter["group"], str(letter["attempts"]), died, error, body_text(letter)


@app.command()
def summary(topic: Topic, group: InGroup = None, url: Url = URL, as_json: AsJson = False) -> None:
    """How many died of what.

    turtlemq dead summary orders
    """
    counts = call(url, "GET", path(topic, "dead", "summary", group=group))
    if as_json:
        print_json(counts)
        return
    for error, count in counts["errors"].items():
        print(f"{count:>10,}  {printable(error) or '(no reason given)'}")
    print(f"{counts['total']:>10,}  in all")


@app.command()
def requeue(
    topic: Topic,
    ids: Ids = None,
    group: InGroup = None,
    error: OfError = None,
    everything: All = False,
    delay: Annotated[float | None, duration_option("Seconds to sleep first.")] = None,
    per_s: Annotated[float | None, typer.Option(help="Spread them: so many a second.", show_default=False)] = None,
    keep_attempts: Annotated[bool, typer.Option("--keep-attempts", help="Do not count from 1 again.")] = False,
    expires: Annotated[int | None, time_option("Not delivered by then, they are dead again; without, they never expire.")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Let dead letters sleep and be delivered again. Exits with 1 if an id is not among them.

    turtlemq dead requeue orders --error "no connection" --delay 5m --per-s 100
    """
    request_fields = _selection(ids, group, error, everything) | {"reset_attempts": not keep_attempts}
    given = {"delay": delay, "per_s": per_s, "expires_ms": expires}
    request_fields |= {name: value for name, value in given.items() if value is not None}
    answer = call(url, "POST", path(topic, "dead", "requeue"), request_fields)
    _end(answer, "requeued", as_json)


@app.command()
def delete(
    topic: Topic,
    ids: Ids = None,
    group: InGroup = None,
    error: OfError = None,
    everything: All = False,
    yes: Yes = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters for good: asks first, unless it is by ids. Exits with 1 if an id is not among them.

    turtlemq dead delete orders order-17

    turtlemq dead delete orders --error "no such customer" --yes
    """
    selection = _selection(ids, group, error, everything)
    if not ids:
        which = " and ".join(f"{name} {value!r}" for name, value in selection["filter"].items())
        confirm(f"Delete all dead letters of {topic!r}{' with ' if which else ''}{which}?", yes)
    answer = call(url, "POST", path(topic, "dead", "delete"), selection)
    _end(answer, "deleted", as_json)


def _end(answer: dict[str, Any], what: str, as_json: bool) -> NoReturn:
    """Print the outcome, with ids that are no dead letters on stderr, and end the program."""
    if as_json:
        print_json(answer)
    else:
        print(f"{answer[what]} {what}")
        for id_ in answer["unknown"]:
            print(f"{printable(id_)}: no dead letter", file=sys.stderr)
    raise typer.Exit(1 if answer["unknown"] else 0)


@app.command()
def export(topic: Topic, group: InGroup = None, error: OfError = None, url: Url = URL) -> None:
    """Write all dead letters to stdout, a JSON object a line.

    turtlemq dead export orders > dead.ndjson
    """
    try:
        request(url, "GET", path(topic, "dead", "export", group=group, error=error), file=sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as failed:
        fail(f"cannot write to stdout: {failed.strerror}")
