"""`turtlemq report`: run the Spark jobs of `turtlemq_report` over a data folder; the result is an HTML page and Parquet files.

Spark is an extra and slow to load: it is imported only when the verb runs.
"""

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

_REQUIRED = ("pyspark", "pyarrow", "pyspark_turtlemq", "turtlemq_report")
_INSTALL_HINT = (
    "Run 'make spark' in the checkout (half a gigabyte, a Java included where there is none), or: pip install 'turtlemq[spark]'"
)
LOG = "spark.log"
SMALL_BYTES = 256 << 20  # below this, starting Java takes longer than reading


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
    """Due times, lateness, failures with their reasons, disk use by topic: pictures and tables of a data folder.

    Reads the files with Spark, at one moment, without asking a server. A second run reads only new data. Opens as
    report/report.html; every table is a Parquet file beside it.

    turtlemq report --data data

    turtlemq report --data data --out report --topic 'orders*' --since -24h
    """
    since_ms, until_ms = (None if text is None else parse_time(text) for text in (since, until))
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        fail("--since is not before --until: nothing would be left", 2)
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"a report needs Spark, and {missing[0]} is not installed. {_INSTALL_HINT}")
    from turtlemq_report.model import ReportOptions

    result = _run_report(ReportOptions(data, out, topic, since_ms, until_ms))
    if as_json:
        from turtlemq_report.summary_text import summary

        print_json(summary(result))
    else:
        _print_summary(result)


def _run_report(options: ReportOptions) -> Report:
    """Start Spark, run the report, stop Spark. The log of Spark goes to a file."""
    from pyspark_turtlemq.java import NoJava
    from pyspark_turtlemq.session import turtlemq_session
    from turtlemq.errors import TurtleError
    from turtlemq_report.run import STEPS, check, report

    try:
        check(options)
        options.out.mkdir(0o700, parents=True, exist_ok=True)
        with _step_progress(STEPS + 1) as step:
            with _redirect_stderr(options.out / LOG):
                session = turtlemq_session("turtlemq report", conf=_spark_conf(options.data))
            step("Spark")
            try:
                return report(session, options, step)
            finally:
                session.stop()
    except NoJava as error:
        fail(str(error))
    except (TurtleError, OSError) as error:
        fail(str(error))
    except Exception as error:
        if not type(error).__module__.startswith(("py4j", "pyspark")):
            raise
        fail(f"Spark failed: {str(error).strip().splitlines()[0]}. Its log is {options.out / LOG}")


def _spark_conf(data: Path) -> dict[str, str]:
    """Settings of the Spark session. With little data, optimizing Java code would take longer than reading, so it is off."""
    from pyspark_turtlemq.session import QUIET

    size = sum(
        file.stat().st_size
        for kind in ("ready", "reserve", "history")
        for folder in (data, *data.glob("shard/*"))
        for file in folder.glob(f"topic/*/{kind}_*.bson")
    )
    fast_start = " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC" if size < SMALL_BYTES else ""
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET.as_uri()}{fast_start}",
    }


@contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Send stderr to a file, also that of processes that are started meanwhile."""
    stderr, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(log)


@contextmanager
def _step_progress(count: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr that counts steps. Shown only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        os.fdopen(os.dup(2), "w") as terminal,
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as shown,
    ):
        out.file = terminal  # a copy of stderr that `_redirect_stderr` does not touch
        task = shown.add_task("Spark is starting", total=count)
        yield lambda what: shown.update(task, advance=1, description=what)


def _print_summary(result: Report) -> None:
    from turtlemq_report.html_page import headline, room

    rows: Any = new_table("", "")
    for name, value, _ in headline(result):
        rows.add_row(name, value)
    print_table(rows)
    out = console()
    for line in [*result.damage, *(f"removed before it was read: {line}" for line in result.missed)]:
        out.print(printable(line), style="red")
    read = f"read {'everything' if result.first else 'only what is new'} ({room(result.read_bytes)})"
    out.print(f"{result.options.out / 'report.html'}: {len(result.topics)} topics, {read}, {result.seconds:.1f} s")
