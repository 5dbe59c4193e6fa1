"""`python -m benchmarks.spark`: the Spark source against Spark's own JSON and Parquet readers, on the same rows, in one run.

Needs Spark (`make spark`). Every query runs once to warm up, then in turns with those it is compared with. A scan is written
to the `noop` sink of Spark, so that all columns are read and nothing else is done. A ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, probe, report
from benchmarks.__main__ import scratch
from benchmarks.model import Figure, Goal
from turtlemq.engine import Engine
from turtlemq.model import Batch, Message

TOPIC = "orders"
NOW = 1_790_000_000_000
DAY_MS = 86_400_000
SEGMENTS = 8
BATCH = 5_000
METADATA = ["due_ms", "created_ms", "seq", "ttr_ms"]
ID_AND_BODY = ["id", "due_ms", "body"]
_LINES = ("BOOK", "TOY", "SHOE", "LAMP", "TEA", "SOAP", "DISC", "PEN")
Query = Callable[[], object]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="200,000 rows instead of 5,000,000: figures that say little")
    parser.add_argument("--rows", type=int, help="another number of rows")
    parser.add_argument("--rounds", type=int, default=3, help="of each query (default 3; short ones have four times as many)")
    parser.add_argument("--markdown", action="store_true", help="print the figures as docs/PERFORMANCE.md has them")
    options = parser.parse_args(arguments)
    rows = options.rows or (200_000 if options.quick else 5_000_000)
    console = Console(stderr=True)
    with scratch(rows * 900 + 200_000_000) as folder:
        figures = []
        for name, figure in measure(folder, rows, options.rounds, console):
            figures.append((name, figure))
            console.print(" ".join(report.cells(name, figure)), highlight=False)
        described = machine.describe(folder)
    if options.markdown:
        print(markdown(figures))
    else:
        Console(width=None if sys.stdout.isatty() else 180).print(report.table(figures, f"Spark, {rows:,} rows"))
    _save(figures, rows, described)
    return 0


def markdown(figures: list[tuple[str, Figure]]) -> str:
    """The figures with their goals, as a Markdown table for the documentation."""
    lines = ["| work | figure | seen | goal | met | |", "| --- | --- | --- | --- | --- | --- |"]
    for name, figure in figures:
        row = report.cells(name, figure)
        lines.append("| " + " | ".join((*row[:5], figure.note)) + " |")
    return "\n".join(lines)


def _save(figures: list[tuple[str, Figure]], rows: int, described: dict[str, str]) -> None:
    fields = [
        {"benchmark": name, "figure": f.name, "value": f.value, "unit": f.unit, "met": f.met, "rounds": f.rounds}
        for name, f in figures
    ]
    path = report.FOLDER / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}-spark.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "machine": described, "figures": fields}, indent=1), encoding="utf-8")
    print(f"Kept as {os.path.relpath(path)}.")


def build(root: Path, rows: int) -> None:
    """Segments of orders in documents of about 200 bytes, due at random over a day; all sealed but the last one."""
    engine = Engine.open(root)
    engine.configure(TOPIC, segment_messages=max(BATCH, rows // SEGMENTS // BATCH * BATCH))
    chance = random.Random(1)
    for first in range(0, rows, BATCH):
        numbers = range(first, min(first + BATCH, rows))
        due = [NOW + chance.randrange(DAY_MS) for _ in numbers]
        engine.submit(TOPIC, Batch([body(n, chance) for n in numbers], due, [f"order-{n}" for n in numbers]), NOW - DAY_MS)
    engine.compact(TOPIC)
    engine.close()


def body(number: int, chance: random.Random) -> bytes:
    """An order: its number, one of a million customers, one to three of a thousand articles, a sum."""
    draws = [int(chance.random() * 1e6) for _ in range(1 + number % 3)]
    items = ",".join(f'{{"sku":"{_LINES[draw % 8]}-{draw % 1000:03}","n":{1 + draw % 3}}}' for draw in draws)
    customer, total = int(chance.random() * 1e6), chance.random() * 300
    return f'{{"order":{number},"customer":{customer},"items":[{items}],"total":{total:.2f},"currency":"EUR"}}'.encode()


def first_segments(root: Path, count: int, into: Path) -> Path:
    """A data folder with only the oldest segments, as hard links."""
    target = into / "topic" / TOPIC
    target.mkdir(parents=True)
    os.link(root / "FORMAT", into / "FORMAT")
    source = root / "topic" / TOPIC
    for segment in sorted(source.glob("delay_*.bson"))[:count]:
        for file in source.glob(f"{segment.stem}.*"):
            os.link(file, target / file.name)
    return into


class Bench:
    """A Spark session, and the rows in three formats: TurtleMQ, JSON, Parquet."""

    def __init__(self, spark: Any, folder: Path, rounds: int) -> None:
        self.spark, self.folder, self.rounds = spark, folder, rounds
        self.root = folder / "data"
        self.java: int = spark.sparkContext._gateway.proc.pid

    def ours(self, columns: list[str], path: Path | None = None, **options: str) -> Any:
        all_options = {"columns": ",".join(columns), **({"body": "string"} if "body" in columns else {}), **options}
        return self.spark.read.format("turtlemq").options(**all_options).load(str(path or self.root))

    def json(self, columns: list[str]) -> Any:
        types = {"id": "string", "body": "string"}
        ddl = ", ".join(f"{name} {types.get(name, 'bigint')}" for name in columns)
        return self.spark.read.schema(ddl).json(str(self.folder / "json"))

    def parquet(self, columns: list[str]) -> Any:
        return self.spark.read.parquet(str(self.folder / "parquet")).select(*columns)

    def write_others(self) -> None:
        frame = self.ours([*METADATA, "id", "body"], numPartitions=str(SEGMENTS))
        frame.write.json(str(self.folder / "json"))
        frame.write.option("compression", "zstd").parquet(str(self.folder / "parquet"))

    def time_in_turns(self, *queries: Query, often: int = 1) -> list[Timings]:
        """The durations of each query in each round, measured in turns. The first round warms up and does not count."""
        timings = [Timings() for _ in queries]
        for number in range(1 + self.rounds * often):
            for query, times in zip(queries, timings, strict=True):
                begin, before = time.perf_counter(), cpu_seconds(self.java)
                query()
                if number:
                    times.seconds.append(time.perf_counter() - begin)
                    times.cpu_seconds.append(sum(now - before.get(pid, 0.0) for pid, now in cpu_seconds(self.java).items()))
        return timings


@dataclass
class Timings:
    """Seconds of the rounds of a query, and the processor time of Java and Python together."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def faster(name: str, ours: Timings, theirs: Timings, goal: float | None = None, note: str = "") -> Figure:
    """How many times faster the first query is, by rounds."""
    ratios = tuple(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    note = note or f"{ours.median:.2f} s, {theirs.median:.2f} s"
    return Figure(name, statistics.median(ratios), "×", goal=None if goal is None else Goal("≥", goal), rounds=ratios, note=note)


def cheaper(name: str, ours: Timings, theirs: Timings) -> Figure:
    """How many times less processor time the first query needs. Other load on the machine hardly changes that."""
    ratios = tuple(b / a for a, b in zip(ours.cpu_seconds, theirs.cpu_seconds, strict=True) if a)
    note = f"{statistics.median(ours.cpu_seconds):.2f} s, {statistics.median(theirs.cpu_seconds):.2f} s"
    return Figure(f"{name}, processor time", statistics.median(ratios), "×", rounds=ratios, note=note)


def cpu_seconds(process: int) -> dict[int, float]:
    """Processor seconds of a process and its descendants, by pid."""
    seconds = {}
    for pid in probe.process_tree(process):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds[pid] = (int(fields[11]) + int(fields[12])) / probe.TICKS_S
    return seconds


def scan(frame: Any) -> Query:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def measure(folder: Path, rows: int, rounds: int, console: Console) -> Iterator[tuple[str, Figure]]:
    """Build the data and measure all figures."""
    from pyspark_turtlemq.session import turtlemq_session

    console.print(f"Building {rows:,} rows")
    build(folder / "data", rows)
    spark = turtlemq_session("benchmarks", conf={"spark.driver.memory": "4g"})
    try:
        bench = Bench(spark, folder, rounds)
        console.print("Writing them as JSON and Parquet")
        bench.write_others()
        yield from scans(bench, rows)
        yield from ranges(bench)
        yield from forecast(bench)
        yield from growth(bench)
        yield from cores(bench)
        yield from latency(bench)
    finally:
        spark.stop()


def scans(bench: Bench, rows: int) -> Iterator[tuple[str, Figure]]:
    """Full scans: columns without and with bodies."""
    for name, columns, json_goal, parquet_goal in (("metadata", METADATA, 4.0, 0.3), ("id and body", ID_AND_BODY, 2.2, 0.6)):
        frames = {"turtlemq": bench.ours(columns), "json": bench.json(columns), "parquet": bench.parquet(columns)}
        if "body" in columns:  # Spark's readers check nothing by default
            frames["turtlemq, checksums not checked"] = bench.ours(columns, verify="never")
        timings = dict(zip(frames, bench.time_in_turns(*(scan(frame) for frame in frames.values())), strict=True))
        for kind, turns in timings.items():
            speeds = tuple(rows / seconds / 1e6 for seconds in turns.seconds)
            yield name, Figure(kind, statistics.median(speeds), "M rows/s", rounds=speeds)
        for kind, ours in timings.items():
            if kind.startswith("turtlemq"):
                more, goals = kind.removeprefix("turtlemq"), (json_goal, parquet_goal) if kind == "turtlemq" else (None, None)
                for other, title, goal in zip(("json", "parquet"), ("JSON", "Parquet"), goals, strict=True):
                    yield name, faster(f"against {title}{more}", ours, timings[other], goal)
                    yield name, cheaper(f"against {title}{more}", ours, timings[other])


def ranges(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """A scan of one hundredth of the day, by due time."""
    low = NOW + DAY_MS // 2
    whole, some = (
        scan(bench.ours(ID_AND_BODY)),
        bench.ours(ID_AND_BODY, where=f"due_ms >= {low} and due_ms < {low + DAY_MS // 100}"),
    )
    full, part = bench.time_in_turns(whole, scan(some))
    yield "due range of 1 %", faster("against the full scan", part, full, 10.0)
    yield "due range of 1 %", cheaper("against the full scan", part, full)


def forecast(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Counts by minute: from the tables, and from one column of Parquet; with ready frames, and with their planning."""

    def ours() -> Any:
        return bench.spark.read.format("turtlemq").option("kind", "forecast").load(str(bench.root)).select("due_ms", "messages")

    def theirs() -> Any:
        return bench.parquet(["due_ms"]).selectExpr("due_ms - due_ms % 60000 as due_ms").groupBy("due_ms").count()

    mine, other = ours(), theirs()
    assert sorted(map(tuple, mine.collect())) == sorted(map(tuple, other.collect())), "the same counts"
    kept = bench.time_in_turns(mine.collect, other.collect, often=4)
    yield "forecast by minute", faster("against Parquet", kept[0], kept[1], 1.0)
    anew = bench.time_in_turns(lambda: ours().collect(), lambda: theirs().collect(), often=4)
    yield "forecast by minute", faster("against Parquet, asked anew", anew[0], anew[1])


def growth(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Scans from one segment to all: seconds per segment against those for one, without the fixed cost of a query."""
    folders = [first_segments(bench.root, count, bench.folder / f"first-{count}") for count in (1, 2, 4, SEGMENTS)]
    times = [timings.median for timings in bench.time_in_turns(*(scan(bench.ours(ID_AND_BODY, path)) for path in folders))]
    one, eight = times[1] - times[0], (times[3] - times[2]) / (SEGMENTS // 2)
    note = " ".join(f"{count}: {seconds:.2f} s" for count, seconds in zip((1, 2, 4, SEGMENTS), times, strict=True))
    yield (
        "1 to 8 segments",
        Figure("seconds for 8, of 8 times those for 1", times[3] / (SEGMENTS * times[0]), "×", goal=Goal("≤", 1.25), note=note),
    )
    yield "1 to 8 segments", Figure("a segment more, late against early", eight / max(one, 1e-9), "×")


def cores(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """One core for Java and Python against all cores. A single task keeps two cores busy, one on each side."""
    everything = os.sched_getaffinity(0)
    frame = bench.ours(ID_AND_BODY)
    if len(everything) < 2:
        return

    def confined() -> None:
        confine(bench.java, {min(everything)})
        try:
            scan(frame)()
        finally:
            confine(bench.java, everything)

    one, all_ = bench.time_in_turns(confined, scan(frame))
    yield "cores", faster(f"{len(everything)} against one", all_, one, 1.6)


def confine(process: int, cpus: set[int]) -> None:
    """Confine a process and its descendants to these processors."""
    for pid in list(probe.process_tree(process)):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), cpus)


def latency(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Seconds from the append of a batch to its rows in `foreachBatch`."""
    root = bench.folder / "stream"
    engine = Engine.open(root)
    engine.submit("t", [Message(b"first", NOW, "first")], NOW)
    engine.tick(NOW)
    seen: dict[str, float] = {}

    def note(frame: Any, _: int) -> None:
        ids = [row.id for row in frame.select("id").collect()]
        seen.update(dict.fromkeys(ids, time.perf_counter()))

    frame = bench.spark.readStream.format("turtlemq").options(kind="ready", columns="id").load(str(root))
    query = frame.writeStream.foreachBatch(note).option("checkpointLocation", str(bench.folder / "check")).start()
    timings = []
    try:
        for n in range(12):
            at, began = NOW + 1_000 * (n + 1), time.perf_counter()
            engine.submit("t", [Message(b"x", at, f"m{n}")], at)
            engine.tick(at)
            while f"m{n}" not in seen:
                if time.perf_counter() - began > 60:
                    raise TimeoutError("a batch never reached the stream")
                time.sleep(0.002)
            timings.append(seen[f"m{n}"] - began)
    finally:
        query.stop()
        engine.close()
    yield (
        "stream",
        Figure("append to foreachBatch", statistics.median(timings[2:]), "s", goal=Goal("≤", 1.0), rounds=tuple(timings[2:])),
    )


if __name__ == "__main__":
    sys.exit(main())
