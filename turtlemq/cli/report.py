"""`turtlemq report`: the Spark jobs over a data folder, as Parquet and as a page with pictures. Loads Spark only when run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.output import console, fail, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson
from turtlemq.cli.times import TIME_HELP, parse_time

if TYPE_CHECKING:
    from turtlemq_report.model import Report, ReportOptions

_NEEDED = ("pyspark", "pyarrow", "pyspark_turtlemq", "turtlemq_report")
_HOW = (
    "Run 'make spark' in the checkout (half a gigabyte, a Java included where there is none), or: pip install 'turtlemq[spark]'"
)
LOG = "spark.log"
LITTLE_BYTES = 256 << 20


def report(
    data: Annotated[Path, typer.Option("--data", help="The data folder; a server may be using it.")] = Path("data"),
    out: Annotated[Path, typer.Option("--out", help="A folder for the report and for what the next run must know.")] = Path(
        "report"
    ),
    topic: Annotated[str, typer.Option("--topic", metavar="GLOB", help="Which topics: names or globs, with commas.")] = "*",
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Only what happened from here on: {TIME_HELP}.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only what happened up to here.")] = None,
    as_json: AsJson = False,
) -> None:
    """What comes due, how late things are, what fails and why, who fills the disk: pictures and tables of a data folder.

    Reads the files with Spark, at one moment, without asking a server. A second run reads only what is new. Opens as
    report/report.html; every table is a Parquet file beside it.

    turtlemq report --data data

    turtlemq report --data data --out report --topic 'orders*' --since -24h
    """
    since_ms, until_ms = (None if text is None else parse_time(text) for text in (since, until))
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        fail("--since is not before --until: nothing would be left", 2)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"a report needs Spark, and {missing[0]} is not installed. {_HOW}")
    from turtlemq_report.model import ReportOptions

    made = _run_report(ReportOptions(data, out, topic, since_ms, until_ms))
    if as_json:
        from turtlemq_report.summary_text import summary

        print_json(summary(made))
    else:
        _print_summary(made)


def _run_report(asked: ReportOptions) -> Report:
    """Spark from start to end; what it has to say goes to a file."""
    from pyspark_turtlemq.java import NoJava
    from pyspark_turtlemq.session import turtlemq_session
    from turtlemq.errors import TurtleError
    from turtlemq_report.run import STEPS, check, report

    try:
        check(asked)
        asked.out.mkdir(parents=True, exist_ok=True)
        with _step_progress(STEPS + 1) as step:
            with _redirect_stderr(asked.out / LOG):
                session = turtlemq_session("turtlemq report", conf=_spark_conf(asked.data))
            step("Spark")
            try:
                return report(session, asked, step)
            finally:
                session.stop()
    except NoJava as error:
        fail(str(error))
    except (TurtleError, OSError) as error:
        fail(str(error))
    except Exception as error:
        if not type(error).__module__.startswith(("py4j", "pyspark")):
            raise
        fail(f"Spark failed: {str(error).strip().splitlines()[0]}. Its log is {asked.out / LOG}")


def _spark_conf(data: Path) -> dict[str, str]:
    """Java is told not to polish its code where there is little to read: that takes longer than the reading."""
    from pyspark_turtlemq.session import QUIET

    size = sum(file.stat().st_size for kind in ("ready", "reserve", "history") for file in data.glob(f"topic/*/{kind}_*.bson"))
    hurry = " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC" if size < LITTLE_BYTES else ""
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET.as_uri()}{hurry}",
    }


@contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Programs that are started meanwhile write their complaints into this file instead of on the terminal."""
    kept, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)


@contextmanager
def _step_progress(count: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves with each step, where a person looks at it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        os.fdopen(os.dup(2), "w") as terminal,
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as shown,
    ):
        out.file = terminal  # which stays where it is while others are put aside
        task = shown.add_task("Spark is starting", total=count)
        yield lambda what: shown.update(task, advance=1, description=what)


def _print_summary(made: Report) -> None:
    from turtlemq_report.html_page import headline, room

    rows: Any = new_table("", "")
    for name, value, _ in headline(made):
        rows.add_row(name, value)
    print_table(rows)
    out = console()
    for line in [*made.damage, *(f"removed before it was read: {line}" for line in made.missed)]:
        out.print(printable(line), style="red")
    read = f"read {'everything' if made.first else 'only what is new'} ({room(made.read_bytes)})"
    out.print(f"{made.options.out / 'report.html'}: {len(made.topics)} topics, {read}, {made.seconds:.1f} s")
