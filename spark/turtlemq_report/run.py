"""One run of the report: take a snapshot, plan the increment, run the jobs, write Parquet and HTML, save the state.

Only this module knows the order of these steps. Each step lives in a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import pins
from pyspark_turtlemq.options import Options, parse_options
from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.plan import make_plan
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.shard_layout import ShardLayout, topic_of
from pyspark_turtlemq.snapshot_files import LOGS
from turtlemq.errors import TurtleError
from turtlemq.storage import names
from turtlemq_report import disk_usage, html_page, increments, jobs, state
from turtlemq_report.model import Report, ReportOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Asked = ReportOptions  # the former name, which notebooks may use
Step = Callable[[str], None]
STEPS = 15  # calls of `step` in a run
WIDTHS_MS = tuple(minutes * jobs.MINUTE_MS for minutes in (5, 15, 60, 360, 1440, 10_080))
_POINTS_MAX = 120  # times on a chart
# Partials: sorting a million rows takes longer than a hash table of their groups.
_HASH_AGGREGATION = {"spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "4096"}
# Results: compiling code for a few hundred rows takes longer than aggregating them.
_NO_CODEGEN = {"spark.sql.codegen.wholeStage": "false", "spark.sql.adaptive.enabled": "false"}
_CONCURRENT_JOBS = 3  # a small job mostly waits


class NoData(TurtleError):
    """This is no data folder of TurtleMQ: it has no file FORMAT. Name the one that the server was started with (--data)."""


def report(spark: SparkSession, options: ReportOptions, step: Step = lambda _: None, now_ms: int | None = None) -> Report:
    """Make a report. Calls `step` with the name of each finished step, `STEPS` times."""
    began = time.monotonic()
    now_ms = round(time.time() * 1000) if now_ms is None else now_ms
    source = check(options)
    made = Report(options, now_ms, source.topics())
    with ExitStack() as stack:
        stack.enter_context(state.locked(options.out))
        saved = state.load(options.out, source.path)
        made.first = not saved.tables
        step("snapshot")
        snapshot = stack.enter_context(pins.take_snapshot(source.path, ShardLayout.of(source.path).names_of(made.topics), LOGS))
        made.pinned = snapshot.folder is not None
        logs = {topic: TopicLogs(files) for topic, files in snapshot.topics.items()}
        for topic_logs in logs.values():
            stack.callback(topic_logs.close)
        run = _Run(spark, made, saved, source, snapshot, logs, step)
        increment = run.plan()
        run.aggregate(increment)
        run.make_tables()
        step("page")
        for name, table in made.tables.items():
            state.write(options.out / f"{name}.parquet", table)
        made.seconds = time.monotonic() - began
        state.replace(options.out / "report.html", html_page.html(made).encode())
        saved.positions |= increment.as_json()
        state.save(options.out, saved)
    return made


def check(options: ReportOptions) -> Options:
    """Options of the data source for a report. Raises for a wrong data folder or topic, so before Spark is started."""
    layout = ShardLayout.of(options.data)
    if not (layout.folders[0] / names.FORMAT).is_file():
        raise NoData(f"{options.data}: {NoData.__doc__}")
    layout.check()
    source = parse_options({"path": str(options.data.resolve()), "topic": options.topic})
    source.topics()
    return source


@dataclass(slots=True)
class _Run:
    """The parts of one run."""

    spark: SparkSession
    report: Report
    saved: state.ReportState  # of the last run; changed into that of this run
    source: Options
    snapshot: pins.Snapshot
    logs: dict[str, TopicLogs]
    step: Step

    def plan(self) -> increments.Increment:
        """The increment since the last run. Drops the results of topics that were deleted or created again."""
        saved = self.saved
        known = increments.read_positions(saved.positions)
        increment = increments.plan_increment(self.logs, known)
        layout = ShardLayout.of(self.source.path)
        gone = [*(name for name in saved.positions if not layout.topic_folder(name).is_dir()), *increment.recreated]
        again = {topic_of(name) for name in gone}  # of a topic with partitions, all of them
        gone = [name for name in {*known, *self.logs, *gone} if topic_of(name) in again]
        if any(name in self.logs and name not in increment.recreated for name in gone):
            increment = increments.plan_increment(self.logs, {name: at for name, at in known.items() if name not in gone})
        saved.drop(sorted({*gone, *again}))
        saved.missed = sorted({*saved.missed, *increment.missed})
        saved.damage = sorted({*saved.damage, *increment.damage})
        self.report.missed = [line for line in saved.missed if line.partition(":")[0] in self.logs]
        self.report.read_bytes = increment.bytes
        return increment

    # Partial aggregates

    def aggregate(self, increment: increments.Increment) -> None:
        """Merge the increment into the partial aggregates of the saved state."""
        saved, spark = self.saved, self.spark
        if saved.tables and not increment.bytes:
            for name in saved.tables:
                self.step(name)
            return
        tasks = max(2, spark.sparkContext.defaultParallelism)
        rows = {}
        for kind, splits in increment.splits.items():
            columns = ",".join(increments.COLUMNS[kind])
            options = parse_options({"path": str(self.source.path), "kind": kind, "columns": columns})
            rows[kind] = increments.frame(spark, splits, options, tasks)
        for kind in ("reserve", "history"):  # two jobs read each
            rows[kind] = rows[kind].persist() if increment.splits[kind] else rows[kind]
        leases, settled = rows["reserve"].select(*jobs.LEASES), rows["history"].select(*jobs.SETTLED)
        if saved.tables:
            leases = leases.unionByName(self._small(saved.tables["leases"]))
            settled = settled.unionByName(self._small(saved.tables["settled"]))
        delivered = jobs.deliveries(leases, settled).persist()
        partials = {
            "ready": jobs.ready_partial(rows["ready"]),
            "history": jobs.history_partial(rows["history"]),
            "reserve": jobs.reserve_partial(rows["reserve"]),
            "consumer": jobs.consumer_partial(delivered),
        }
        if saved.tables:
            known = {kind: self._small(saved.tables[kind]) for kind in partials}  # in another order of columns, by `merged`
            partials = {kind: jobs.merged(partial.unionByName(known[kind]), kind) for kind, partial in partials.items()}
        partials |= {"leases": jobs.under_way(delivered), "settled": jobs.unclaimed(settled, leases)}
        with _conf(spark, _HASH_AGGREGATION):
            saved.tables = self._collect(partials)
        for cached in (rows["reserve"], rows["history"], delivered):
            cached.unpersist()

    def _collect(self, frames: dict[str, DataFrame]) -> dict[str, pa.Table]:
        """Run the jobs of these frames, a few at a time."""

        def collect(item: tuple[str, DataFrame]) -> tuple[str, pa.Table]:
            table = item[1].toArrow()
            self.step(item[0])
            return item[0], table

        with ThreadPoolExecutor(_CONCURRENT_JOBS) as pool:
            return dict(pool.map(collect, frames.items()))

    # Result tables

    def make_tables(self) -> None:
        """Fill the result tables, from the partial aggregates and from the snapshot."""
        made = self.report
        partials = {name: _within(table, made.options, made.topics) for name, table in self.saved.tables.items()}
        made.range_ms = _time_range([partials["ready"], partials["history"]])
        made.width_ms = width_for(made.range_ms)
        ready, history, consumer, leases = (self._small(partials[name]) for name in ("ready", "history", "consumer", "leases"))
        files = [row for logs in self.logs.values() for row in disk_usage.rows(logs)]
        due = self._read("forecast", "topic,due_ms,messages")
        letters = self._read("dead", "topic,group,state,error")
        frames = {
            "forecast": jobs.forecast(due, made.now_ms).orderBy("unit", "start_ms", "topic"),
            "lateness": jobs.lateness(ready, history, made.width_ms).orderBy("part", "topic", "start_ms"),
            "delays": jobs.delays(ready).orderBy("topic", "delay_class"),
            "throughput": jobs.throughput(ready, history, made.width_ms).orderBy("topic", "group", "what", "start_ms"),
            "failures": jobs.failures(ready, history, consumer, letters).orderBy("topic", "group", "error"),
            "consumers": jobs.consumers(consumer, leases).orderBy("topic", "group", "consumer"),
            "storage": jobs.storage(self.spark.createDataFrame(files, disk_usage.SCHEMA)).orderBy("topic", "log", "segment"),
        }
        with _conf(self.spark, _NO_CODEGEN):
            made.tables = self._collect(frames)
        self._count_damage(partials)

    def _small(self, table: pa.Table) -> DataFrame:
        """An aggregated table as one partition: nothing is shuffled, so a job over it takes a fraction of a second."""
        return self.spark.createDataFrame(table).coalesce(1)

    def _read(self, kind: str, columns: str) -> DataFrame:
        """`spark.read.format("turtlemq")` on the snapshot of this run; planned here, which saves a planner process for each."""
        made = self.report
        texts = {"path": str(self.source.path), "kind": kind, "columns": columns, "topic": made.options.topic}
        options = parse_options(texts | ({"snapshot": self.snapshot.name} if made.pinned else {"pin": "false"}))
        partitions = make_plan(options, Predicates()).partitions if made.topics else []
        splits = [split for partition in partitions for split in partition]
        return increments.frame(self.spark, splits, options, max(2, self.spark.sparkContext.defaultParallelism))

    def _count_damage(self, partials: dict[str, pa.Table]) -> None:
        """Name the damage that opening the logs has found, and count that together with damaged rows."""
        damage = set()
        for topic, logs in self.logs.items():
            for hole in (*logs.delay_log("delay").damage, *logs.delay_log("dead").damage):
                damage.add(f"{topic}/{hole.file}: {hole.reason} at position {hole.position}")
        self.report.damage = sorted(damage | {line for line in self.saved.damage if line.partition("/")[0] in self.logs})
        marks = (("ready", "delay_class", jobs.DAMAGED), ("history", "outcome", "damaged"), ("reserve", "event", "damaged"))
        counts = [partials[name].filter(pc.equal(partials[name][column], mark))["messages"] for name, column, mark in marks]
        named = [line for line in self.report.damage if "/ready_" not in line]  # those of the ready log are rows, too
        self.report.damaged = len(named) + sum(int(pc.sum(count).as_py() or 0) for count in counts)


def _within(table: pa.Table, options: ReportOptions, topics: list[str]) -> pa.Table:
    """The rows of a partial aggregate for the topics and times of the report. Times are rounded to whole buckets."""
    mask = pc.is_in(table["topic"], pa.array(topics, pa.string()))
    if "bucket_ms" in table.column_names:
        at = table["bucket_ms"]
        if options.since_ms is not None:  # damaged rows have the time 0
            mask = pc.and_(mask, pc.or_(pc.equal(at, 0), pc.greater(at, options.since_ms - jobs.BUCKET_MS)))
        if options.until_ms is not None:
            mask = pc.and_(mask, pc.less(at, options.until_ms))
    return table.filter(mask)


def _time_range(tables: list[pa.Table]) -> tuple[int, int] | None:
    """The range of event times, in whole buckets; None without events."""
    ends = [pc.min_max(table["bucket_ms"].filter(pc.greater(table["bucket_ms"], 0))).as_py() for table in tables]
    ranges = [(end["min"], end["max"]) for end in ends if end["min"] is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges) + jobs.BUCKET_MS) if ranges else None


def width_for(range_ms: tuple[int, int] | None) -> int:
    """The width of a chart's time step, so that a chart has at most `_POINTS_MAX` of them.

    >>> width_for(None), width_for((0, 3_600_000)), width_for((0, 7 * 86_400_000))
    (300000, 300000, 21600000)
    """
    length = 0 if range_ms is None else range_ms[1] - range_ms[0]
    return next((width for width in WIDTHS_MS if length / width <= _POINTS_MAX), WIDTHS_MS[-1])


@contextmanager
def _conf(spark: SparkSession, conf: dict[str, str]) -> Iterator[None]:
    """Set options of the session within a block."""
    before = {name: spark.conf.get(name) for name in conf}
    for name, value in conf.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
