"""A report, from the files to the page: one snapshot, what is new in it, the jobs, Parquet, HTML, the state for the next run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import options, pins, plan
from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.predicates import Predicates
from turtlemq.backup import check_format
from turtlemq.errors import TurtleError
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq_report import disk_usage, html_page, increments, jobs, state
from turtlemq_report.model import Report, ReportOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Asked = ReportOptions  # the former name, which notebooks may use

Step = Callable[[str], None]
STEPS = 15  # how often `step` is called
WIDTHS_MS = tuple(minutes * jobs.MINUTE_MS for minutes in (5, 15, 60, 360, 1440, 10_080))
_POINTS = 120  # at most so many times on a picture
# Compiling code for a few hundred rows takes longer than folding them; sorting a million, longer than a table of their groups.
_FOLD = {"spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "4096"}
_LIGHT = {"spark.sql.codegen.wholeStage": "false", "spark.sql.adaptive.enabled": "false"}
_AT_ONCE = 3  # jobs that run beside each other: most of a small one is waiting


class NoData(TurtleError):
    """This is no data folder of TurtleMQ: it has no file FORMAT. Name the one that the server was started with (--data)."""


def report(spark: SparkSession, asked: ReportOptions, step: Step = lambda _: None, now_ms: int | None = None) -> Report:
    """Make a report. `step` hears what is being done, `STEPS` times."""
    began = time.monotonic()
    now_ms = round(time.time() * 1000) if now_ms is None else now_ms
    told = check(asked)
    found = Report(asked, now_ms, told.topics())
    with ExitStack() as stack:
        stack.enter_context(state.locked(asked.out))
        kept = state.load(asked.out, told.path)
        found.first = not kept.tables
        step("snapshot")
        marks = plan.read_clean_marks(told)
        moment = stack.enter_context(pins.take_snapshot(told.path, found.topics, pins.PIN_ORDER))
        found.pinned = moment.folder is not None
        openers = {topic: TopicLogs(pinned, marks.get(topic)) for topic, pinned in moment.topics.items()}
        for opener in openers.values():
            stack.callback(opener.close)
        fresh = _look(found, kept, openers, told)
        partials = _partials(spark, kept, fresh, told, step)
        _answer(spark, found, partials, kept, openers, moment, step)
        step("page")
        for name, table in found.tables.items():
            state.write(asked.out / f"{name}.parquet", table)
        found.seconds = time.monotonic() - began
        state.replace(asked.out / "report.html", html_page.html(found).encode())
        kept.positions |= fresh.as_json()
        state.save(asked.out, kept)
    return found


def check(asked: ReportOptions) -> options.Options:
    """Is this a folder that a report can be made of? Says what is wrong before Spark is started."""
    if not (asked.data / names.FORMAT).is_file():
        raise NoData(f"{asked.data}: {NoData.__doc__}")
    check_format(Door(), asked.data)
    told = options.parse_options({"path": str(asked.data.resolve()), "topic": asked.topic})
    told.topics()
    return told


def _look(found: Report, kept: state.ReportState, openers: dict[str, TopicLogs], told: options.Options) -> increments.Increment:
    """What is new, and what is to be forgotten: topics that are gone or were made anew."""
    fresh = increments.plan_increment(openers, increments.read_positions(kept.positions))
    gone = [topic for topic in kept.positions if not (told.path / names.TOPICS / topic).is_dir()]
    kept.drop([*gone, *fresh.recreated])
    kept.missed = sorted({*kept.missed, *fresh.missed})
    kept.damage = sorted({*kept.damage, *fresh.damage})
    found.missed = [line for line in kept.missed if line.partition(":")[0] in openers]
    found.read_bytes = fresh.bytes
    return fresh


# Partials


def _collect(frames: dict[str, DataFrame], step: Step) -> dict[str, pa.Table]:
    """Run these, a few beside each other."""

    def one(item: tuple[str, DataFrame]) -> tuple[str, pa.Table]:
        table = item[1].toArrow()
        step(item[0])
        return item[0], table

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(pool.map(one, frames.items()))


def _partials(
    spark: SparkSession, kept: state.ReportState, fresh: increments.Increment, told: options.Options, step: Step
) -> dict[str, pa.Table]:
    """The partials of everything so far: those that were kept, and those of what is new. Kept again."""
    if kept.tables and not fresh.bytes:
        for name in kept.tables:
            step(name)
        return kept.tables
    tasks = max(2, spark.sparkContext.defaultParallelism)
    rows = {}
    for kind, pieces in fresh.splits.items():
        asked = options.parse_options({"path": str(told.path), "kind": kind, "columns": ",".join(increments.COLUMNS[kind])})
        rows[kind] = increments.frame(spark, pieces, asked, tasks)
    for kind in ("reserve", "history"):  # both are looked at twice
        rows[kind] = rows[kind].persist() if fresh.splits[kind] else rows[kind]
    leases, settled = rows["reserve"].select(*jobs.LEASES), rows["history"].select(*jobs.SETTLED)
    if kept.tables:
        leases = leases.unionByName(_small(spark, kept.tables["leases"]))
        settled = settled.unionByName(_small(spark, kept.tables["settled"]))
    delivered = jobs.deliveries(leases, settled).persist()
    new = {
        "ready": jobs.ready_partial(rows["ready"]),
        "history": jobs.history_partial(rows["history"]),
        "reserve": jobs.reserve_partial(rows["reserve"]),
        "consumer": jobs.consumer_partial(delivered),
    }
    if kept.tables:
        new = {kind: jobs.merged(part.union(_small(spark, kept.tables[kind])), kind) for kind, part in new.items()}
    new |= {"leases": jobs.under_way(delivered), "settled": jobs.unclaimed(settled, leases)}
    with _set(spark, _FOLD):
        kept.tables = _collect(new, step)
    for used in (rows["reserve"], rows["history"], delivered):
        used.unpersist()
    return kept.tables


# Answers


def _within(table: pa.Table, asked: ReportOptions, topics: list[str]) -> pa.Table:
    """Of a partial: the topics and the times that are asked for. Times go by whole buckets."""
    mask = pc.is_in(table["topic"], pa.array(topics, pa.string()))
    if "bucket_ms" in table.column_names:
        at = table["bucket_ms"]
        if asked.since_ms is not None:  # what is damaged has no time
            mask = pc.and_(mask, pc.or_(pc.equal(at, 0), pc.greater(at, asked.since_ms - jobs.BUCKET_MS)))
        if asked.until_ms is not None:
            mask = pc.and_(mask, pc.less(at, asked.until_ms))
    return table.filter(mask)


def _span(tables: list[pa.Table]) -> tuple[int, int] | None:
    """When the first and the last of them happened, as far as five minutes tell."""
    ends = [pc.min_max(table["bucket_ms"].filter(pc.greater(table["bucket_ms"], 0))).as_py() for table in tables]
    known = [(end["min"], end["max"]) for end in ends if end["min"] is not None]
    return (min(low for low, _ in known), max(high for _, high in known) + jobs.BUCKET_MS) if known else None


def width_for(span: tuple[int, int] | None) -> int:
    """How wide a column of a picture is, so that there are not too many.

    >>> width_for(None), width_for((0, 3_600_000)), width_for((0, 7 * 86_400_000))
    (300000, 300000, 21600000)
    """
    length = 0 if span is None else span[1] - span[0]
    return next((width for width in WIDTHS_MS if length / width <= _POINTS), WIDTHS_MS[-1])


def _answer(
    spark: SparkSession,
    found: Report,
    partials: dict[str, pa.Table],
    kept: state.ReportState,
    openers: dict[str, TopicLogs],
    moment: pins.Snapshot,
    step: Step,
) -> None:
    """All answers, from partials and from the snapshot."""
    chosen = {name: _within(table, found.options, found.topics) for name, table in partials.items()}
    found.range_ms = _span([chosen["ready"], chosen["history"]])
    found.width_ms = width_for(found.range_ms)
    ready, history, consumer, leases = (_small(spark, chosen[name]) for name in ("ready", "history", "consumer", "leases"))
    files = [row for opener in openers.values() for row in disk_usage.rows(opener)]
    due = _read(spark, found, moment, "forecast", "topic,due_ms,messages")
    letters = _read(spark, found, moment, "dead", "topic,group,state,error")
    asked = {
        "forecast": jobs.forecast(due, found.now_ms).orderBy("unit", "start_ms", "topic"),
        "lateness": jobs.lateness(ready, history, found.width_ms).orderBy("part", "topic", "start_ms"),
        "delays": jobs.delays(ready).orderBy("topic", "delay_class"),
        "throughput": jobs.throughput(ready, history, found.width_ms).orderBy("topic", "group", "what", "start_ms"),
        "failures": jobs.failures(ready, history, consumer, letters).orderBy("topic", "group", "error"),
        "consumers": jobs.consumers(consumer, leases).orderBy("topic", "group", "consumer"),
        "storage": jobs.storage(spark.createDataFrame(files, disk_usage.SCHEMA)).orderBy("topic", "log", "segment"),
    }
    with _set(spark, _LIGHT):
        found.tables = _collect(asked, step)
    _damage(found, chosen, kept, openers)


def _small(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A table that is folded already, in one piece: so nothing is shuffled, and an answer takes a fraction of a second."""
    return spark.createDataFrame(table).coalesce(1)


def _read(spark: SparkSession, found: Report, moment: pins.Snapshot, kind: str, columns: str) -> DataFrame:
    """What `spark.read.format("turtlemq")` reads of the same moment. Planned here, which spares a process for each read."""
    told = {"path": str(found.options.data.resolve()), "kind": kind, "columns": columns, "topic": found.options.topic}
    asked = options.parse_options(told | ({"snapshot": moment.name} if found.pinned else {"pin": "false"}))
    pieces = [piece for task in plan.make_plan(asked, Predicates()).partitions for piece in task] if found.topics else []
    return increments.frame(spark, pieces, asked, max(2, spark.sparkContext.defaultParallelism))


@contextmanager
def _set(spark: SparkSession, conf: dict[str, str]) -> Iterator[None]:
    """Settings of the session for a while."""
    before = {name: spark.conf.get(name) for name in conf}
    for name, value in conf.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def _damage(found: Report, chosen: dict[str, pa.Table], kept: state.ReportState, openers: dict[str, TopicLogs]) -> None:
    """What could not be read: named by those who open the logs, counted by those who read the rows."""
    sleeping = [(opener.files.topic, log) for opener in openers.values() for log in _damaged(opener)]
    named = {f"{topic}/{one.file}: {one.reason} at position {one.position}" for topic, one in sleeping}
    found.damage = sorted(named | {line for line in kept.damage if line.partition("/")[0] in openers})
    marks = (("ready", "delay_class", jobs.DAMAGED), ("history", "outcome", "damaged"), ("reserve", "event", "damaged"))
    counts = [chosen[name].filter(pc.equal(chosen[name][column], mark))["messages"] for name, column, mark in marks]
    found.damaged = len(found.damage) + sum(int(pc.sum(count).as_py() or 0) for count in counts)


def _damaged(opener: TopicLogs) -> list[Any]:
    return [*opener.delay_log("delay").damage, *opener.delay_log("dead").damage]
