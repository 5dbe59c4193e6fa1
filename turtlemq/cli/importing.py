"""The verbs of `turtlemq import`: one for each kind of source, with the same options for batches, rate, range and dry run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, unreachable
from turtlemq.cli.output import console, fail, print_error, print_json, printable
from turtlemq.cli.parameters import AsJson, Topic, Url, time_option
from turtlemq.cli.placeholders import Verbs
from turtlemq.cli.times import TIME_HELP, format_time

if TYPE_CHECKING:
    from turtlemq.importing.copy import Report
    from turtlemq.importing.source import Source

app = typer.Typer(cls=Verbs, context_settings={"help_option_names": ["--help"]})

Batch = Annotated[int, typer.Option(metavar="N", help="Messages in a request at most.", min=1, max=10_000)]
PerS = Annotated[float, typer.Option("--per-s", metavar="N", help="Messages a second at most; 0: no limit.", min=0)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only read: say what would be stored.")]
DueFrom = Annotated[int | None, time_option(f"Only messages that are due from here on: {TIME_HELP}.", "--due-from")]
DueTo = Annotated[int | None, time_option("Only messages that are due before.", "--due-to")]
Prefix = Annotated[str | None, typer.Option("--id-prefix", metavar="TEXT", help="In front of each id.", show_default=False)]
Body = Annotated[
    str,
    typer.Option("--body", metavar="auto|json|text|bytes", help="How bodies are read. auto: JSON if it is, else text or bytes."),
]
Redis = Annotated[str, typer.Option("--redis", metavar="URL", help="Address of Redis: redis://, rediss:// or unix://")]
REDIS = "redis://127.0.0.1:6379/0"
KINDS = ("auto", "json", "text", "bytes")


def _body_kind(given: str) -> Any:
    if given not in KINDS:
        fail(f"--body is one of {', '.join(KINDS)}, not {given!r}", 2)
    return given


@app.command("redis-zset")
def redis_zset(
    topic: Topic,
    key: Annotated[str, typer.Option(help="The sorted set; its scores are due times.", show_default=False)],
    redis: Redis = REDIS,
    bodies: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A hash with the bodies by member; else a member is the body.", show_default=False),
    ] = None,
    body_key: Annotated[
        str | None,
        typer.Option("--body-key", metavar="PATTERN", help="Keys with the bodies, such as 'job:{}'.", show_default=False),
    ] = None,
    score: Annotated[str, typer.Option(metavar="auto|s|ms", help="Unit of the scores. auto: seconds below 1e11.")] = "auto",
    body: Body = "auto",
    prefix: Prefix = None,
    batch: Batch = 1000,
    per_s: PerS = 0,
    due_from: DueFrom = None,
    due_to: DueTo = None,
    dry_run: DryRun = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy the members of a sorted set of Redis, whose scores are due times.

    turtlemq import redis-zset orders --key delayed --dry-run

    turtlemq import redis-zset orders --redis redis://10.0.0.5/0 --key delayed --bodies jobs --score ms
    """
    if score not in ("auto", "s", "ms"):
        fail(f"--score is auto, s or ms, not {score!r}", 2)
    if (bodies and body_key) or (body_key is not None and "{}" not in body_key):
        fail("give --bodies, or --body-key with {} in place of the member", 2)

    def open_source() -> Source:
        from turtlemq.importing.redis_client import connect
        from turtlemq.importing.redis_zset import RedisZset

        unit: Any = score
        return RedisZset(connect(redis), key, prefix or "", bodies, body_key, unit, _body_kind(body))

    _copy(open_source, topic, url, dry_run, as_json, batch=batch, per_s=per_s, due_from_ms=due_from, due_to_ms=due_to)


@app.command("bullmq")
def bullmq(
    topic: Topic,
    queue: Annotated[str, typer.Option(help="The name of the queue.", show_default=False)],
    redis: Redis = REDIS,
    redis_prefix: Annotated[str, typer.Option("--redis-prefix", metavar="TEXT", help="The prefix of BullMQ's keys.")] = "bull",
    prefix: Prefix = None,
    batch: Batch = 1000,
    per_s: PerS = 0,
    due_from: DueFrom = None,
    due_to: DueTo = None,
    dry_run: DryRun = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy the delayed and waiting jobs of a BullMQ queue. Active, completed and failed ones stay.

    The body is the data of the job; headers have its name (bullmq-name), its time of adding and its attempts.

    turtlemq import bullmq mails --queue mails --dry-run
    """

    def open_source() -> Source:
        from turtlemq.importing.bullmq import BullMq
        from turtlemq.importing.redis_client import connect

        return BullMq(connect(redis), queue, f"{queue}-" if prefix is None else prefix, redis_prefix)

    _copy(open_source, topic, url, dry_run, as_json, batch=batch, per_s=per_s, due_from_ms=due_from, due_to_ms=due_to)


@app.command("beanstalkd")
def beanstalkd(
    topic: Topic,
    tube: Annotated[str, typer.Option(help="The tube.")] = "default",
    host: Annotated[str, typer.Option(help="The host of beanstalkd.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.", min=1, max=65_535)] = 11_300,
    buried: Annotated[bool, typer.Option("--buried", help="Buried jobs too; they are due at once.")] = False,
    last_id: Annotated[
        int | None,
        typer.Option("--last-id", metavar="N", help="The newest job; else a job is put into a tube of its own to see.", min=0),
    ] = None,
    body: Body = "auto",
    prefix: Prefix = None,
    batch: Batch = 1000,
    per_s: PerS = 0,
    due_from: DueFrom = None,
    due_to: DueTo = None,
    dry_run: DryRun = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy the delayed and ready jobs of a tube of beanstalkd. Reserved ones stay, and buried ones unless asked for.

    turtlemq import beanstalkd orders --tube orders --dry-run
    """

    def open_source() -> Source:
        from turtlemq.importing.beanstalkd import Beanstalkd, Connection

        of_tube = f"{tube}-" if prefix is None else prefix
        return Beanstalkd(Connection(host, port), tube, of_tube, buried, last_id, _body_kind(body))

    _copy(open_source, topic, url, dry_run, as_json, batch=batch, per_s=per_s, due_from_ms=due_from, due_to_ms=due_to)


@app.command("sqs-json")
def sqs_json(
    topic: Topic,
    file: Annotated[
        Path, typer.Argument(help="A file of messages as 'aws sqs receive-message' prints them.", show_default=False)
    ],
    due_attribute: Annotated[
        str | None,
        typer.Option("--due-attribute", metavar="NAME", help="The message attribute with the due time.", show_default=False),
    ] = None,
    body: Body = "auto",
    prefix: Prefix = None,
    batch: Batch = 1000,
    per_s: PerS = 0,
    due_from: DueFrom = None,
    due_to: DueTo = None,
    dry_run: DryRun = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy messages of Amazon SQS from a file of JSON.

    turtlemq import sqs-json orders received.json --due-attribute deliver-at
    """

    def open_source() -> Source:
        from turtlemq.importing.sqs_json import SqsJson

        return SqsJson(file, prefix or "", due_attribute, _body_kind(body))

    _copy(open_source, topic, url, dry_run, as_json, batch=batch, per_s=per_s, due_from_ms=due_from, due_to_ms=due_to)


@app.command("csv")
def csv(
    topic: Topic,
    file: Annotated[Path, typer.Argument(help="A CSV file with a head line.", show_default=False)],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=COLUMN", help="Which column is which field; may be repeated.", show_default=False),
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Between two cells.")] = ",",
    body: Body = "auto",
    prefix: Prefix = None,
    batch: Batch = 1000,
    per_s: PerS = 0,
    due_from: DueFrom = None,
    due_to: DueTo = None,
    dry_run: DryRun = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy the rows of a CSV file. Columns: body, id, due or delay, priority, ttr, expires, and header.NAME for headers.

    A due time is in epoch seconds or milliseconds, or 2030-01-31T08:00+01:00. Other columns are left.

    turtlemq import csv orders orders.csv --column id=order --column due=close_at
    """
    from turtlemq.importing.csv_file import COLUMNS, CsvFile

    columns = {name: text for name, _, text in (given.partition("=") for given in column or ())}
    if not columns.keys() <= set(COLUMNS) or not all(columns.values()) or len(delimiter) != 1:
        fail(f"--column is FIELD=COLUMN with a field of {', '.join(COLUMNS)}; --delimiter is one character", 2)

    def open_source() -> Source:
        return CsvFile(file, prefix or "", columns, delimiter, _body_kind(body))

    _copy(open_source, topic, url, dry_run, as_json, batch=batch, per_s=per_s, due_from_ms=due_from, due_to_ms=due_to)


def _copy(open_source: Callable[[], Source], topic: str, url: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Run a copy with a progress bar, print its report, and end with 1 if messages were refused."""
    from turtlemq.client import Client, ClientError
    from turtlemq.importing.copy import CopyOptions, copy_messages
    from turtlemq.importing.fields import Unusable

    if not dry_run and (why := unreachable(url)):
        fail(why)
    client = None if dry_run else Client(url)
    try:
        with closing(open_source()) as source, _progress() as shown:
            task = shown.add_task(f"import {topic}", total=source.total())
            report = copy_messages(source, topic, client, CopyOptions(**options), lambda count: shown.advance(task, count))
    except Unusable as why:
        fail(str(why))
    except ClientError as error:
        fail(f"{error} Run it again: messages that are stored are not stored twice.")
    except OSError as error:
        fail(f"{error.filename or 'the source'}: {error.strerror or error}")
    finally:
        if client is not None:
            client.close()
    _print(report, dry_run, as_json)
    raise typer.Exit(1 if report.refused else 0)


def _progress() -> Any:
    """A progress bar in messages, on stderr. Shown only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def _print(report: Report, dry_run: bool, as_json: bool) -> None:
    skipped = {reason: count for reason, count in report.skipped.items() if count}
    if as_json:
        names = ("read", "created", "duplicates", "refused", "first_ms", "last_ms")
        print_json({"dry_run": dry_run, **{name: getattr(report, name) for name in names}, "skipped": skipped})
        return
    if dry_run:
        for message in report.sample:
            print(printable(str(message.id)), f"due {format_time(_ms(message.due))}", _shown(message.body), sep="\t")
        print(f"dry run: {report.read} would be put" + _range(report))
    else:
        print(f"{report.read} read: {report.created} created, {report.duplicates} duplicates, {len(report.refused)} refused")
    for reason, count in skipped.items():
        print(f"{count} left out: {printable(reason)}")
    for id_, error in list(report.refused.items())[:10]:
        print_error(f"{id_}: {error}")


def _ms(due: Any) -> int | None:
    return due if isinstance(due, int) else None


def _range(report: Report) -> str:
    if report.first_ms is None:
        return ""
    return f", due {format_time(report.first_ms)} to {format_time(report.last_ms)}"


def _shown(body: Any) -> str:
    """A body on one short line."""
    text = repr(body) if isinstance(body, bytes) else body if isinstance(body, str) else bytes(body).decode(errors="replace")
    return printable(text if len(text) <= 60 else f"{text[:60]}…")
