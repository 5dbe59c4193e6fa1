"""`python -m benchmarks.spark`: the Spark source against Spark's own JSON and Parquet readers, on the same rows, in one run.

Needs Spark (`make spark`). Every query runs once to warm up, then in turns with the ones it is compared with; a scan is written
to Spark's `noop` sink, so that all columns are read and nothing else is done.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, report
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
WHOLE = ["id", "due_ms", "body"]
Query = Callable[[], object]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="200,000 rows instead of 5,000,000: figures that say little")
    parser.add_argument("--rows", type=int, help="another number of rows")
    parser.add_argument("--rounds", type=int, default=3, help="of each query (default 3)")
    options = parser.parse_args(arguments)
    rows = options.rows or (200_000 if options.quick else 5_000_000)
    console = Console(stderr=True)
    with scratch(rows * 900 + 200_000_000) as folder:
        figures = []
        for name, figure in measure(folder, rows, options.rounds, console):
            figures.append((name, figure))
            console.print(" ".join(report.cells(name, figure)), highlight=False)
        described = machine.describe(folder)
    Console(width=None if sys.stdout.isatty() else 180).print(report.table(figures, f"Spark, {rows:,} rows"))
    _keep(figures, rows, described)
    return 0


def _keep(figures: list[tuple[str, Figure]], rows: int, described: dict[str, str]) -> None:
    told = [
        {"benchmark": name, "figure": f.name, "value": f.value, "unit": f.unit, "met": f.met, "rounds": f.rounds}
        for name, f in figures
    ]
    path = report.FOLDER / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}-spark.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "machine": described, "figures": told}, indent=1), encoding="utf-8")
    print(f"Kept as {os.path.relpath(path)}.")


def build(root: Path, rows: int, console: Console) -> None:
    """Sealed segments of orders of about 200 bytes, due at random over a day."""
    engine = Engine.open(root)
    engine.configure(TOPIC, segment_messages=max(BATCH, rows // SEGMENTS // BATCH * BATCH))
    chance = random.Random(1)
    for first in range(0, rows, BATCH):
        numbers = range(first, min(first + BATCH, rows))
        due = [NOW + chance.randrange(DAY_MS) for _ in numbers]
        bodies = [
            b'{"order":%9d,"customer":"c-%08d","note":"%s"}' % (n, chance.randrange(10**8), chance.randbytes(32).hex().encode())
            for n in numbers
        ]
        engine.submit(TOPIC, Batch(bodies, due, [f"order-{n:010d}" for n in numbers]), NOW - DAY_MS)
    engine.compact(TOPIC)
    engine.close()


def first_segments(root: Path, count: int, into: Path) -> Path:
    """A data folder with only the oldest segments, as links."""
    target = into / "topic" / TOPIC
    target.mkdir(parents=True)
    os.link(root / "FORMAT", into / "FORMAT")
    source = root / "topic" / TOPIC
    for segment in sorted(source.glob("delay_*.bson"))[:count]:
        for file in source.glob(f"{segment.stem}.*"):
            os.link(file, target / file.name)
    return into


class Bench:
    """A session, and the same rows in three formats."""

    def __init__(self, spark: Any, folder: Path, rounds: int) -> None:
        self.spark, self.folder, self.rounds = spark, folder, rounds
        self.root = folder / "data"

    def ours(self, columns: list[str], path: Path | None = None, **options: str) -> Any:
        told = {"columns": ",".join(columns), **({"body": "string"} if "body" in columns else {}), **options}
        return self.spark.read.format("turtlemq").options(**told).load(str(path or self.root))

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

    def turns(self, *queries: Query) -> list[list[float]]:
        """Seconds of each query in each round; they take turns."""
        for query in queries:
            query()
        times: list[list[float]] = [[] for _ in queries]
        for _ in range(self.rounds):
            for query, found in zip(queries, times, strict=True):
                begin = time.perf_counter()
                query()
                found.append(time.perf_counter() - begin)
        return times


def scan(frame: Any) -> Query:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def measure(folder: Path, rows: int, rounds: int, console: Console) -> Iterator[tuple[str, Figure]]:
    """All figures."""
    from pyspark_turtlemq.session import turtlemq_session

    console.print(f"Building {rows:,} rows")
    build(folder / "data", rows, console)
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
    """Columns without and with bodies."""
    for name, columns, json_goal, parquet_goal in (("metadata", METADATA, 4.0, 0.3), ("with id and body", WHOLE, 2.2, 0.6)):
        frames = {"turtlemq": bench.ours(columns), "json": bench.json(columns), "parquet": bench.parquet(columns)}
        if "body" in columns:  # Spark's readers check nothing by default
            frames["turtlemq, checksums not checked"] = bench.ours(columns, verify="never")
        times = bench.turns(*(scan(frame) for frame in frames.values()))
        ours, json_, parquet = (statistics.median(found) for found in times[:3])
        for kind, found in zip(frames, times, strict=True):
            speeds = tuple(rows / seconds / 1e6 for seconds in found)
            yield name, Figure(kind, statistics.median(speeds), "M rows/s", rounds=speeds)
        yield name, Figure("against JSON", json_ / ours, "×", goal=Goal("≥", json_goal))
        yield name, Figure("against Parquet", parquet / ours, "×", goal=Goal("≥", parquet_goal))
        if len(times) > 3:
            unchecked = statistics.median(times[3])
            yield name, Figure("unchecked, against JSON", json_ / unchecked, "×")
            yield name, Figure("unchecked, against Parquet", parquet / unchecked, "×")


def ranges(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """One hundredth of the day."""
    low = NOW + DAY_MS // 2
    frame = bench.ours(WHOLE)
    part = bench.ours(WHOLE, where=f"due_ms >= {low} and due_ms < {low + DAY_MS // 100}")
    whole, some = bench.turns(scan(frame), scan(part))
    value = statistics.median(whole) / statistics.median(some)
    note = f"{statistics.median(some):.2f} s instead of {statistics.median(whole):.2f} s"
    yield "due range of 1 %", Figure("against the full scan", value, "×", goal=Goal("≥", 10.0), note=note)


def forecast(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Counts by minute, from the tables; from Parquet's one column."""
    ours = bench.spark.read.format("turtlemq").option("kind", "forecast").load(str(bench.root))
    theirs = bench.parquet(["due_ms"]).selectExpr("due_ms - due_ms % 60000 as due_ms").groupBy("due_ms").count()
    assert sum(row.messages for row in ours.collect()) == sum(row["count"] for row in theirs.collect()), "the same rows"
    mine, parquet = bench.turns(ours.collect, theirs.collect)
    value = statistics.median(parquet) / statistics.median(mine)
    note = f"{statistics.median(mine):.2f} s instead of {statistics.median(parquet):.2f} s"
    yield "forecast by minute", Figure("against Parquet", value, "×", goal=Goal("≥", 1.0), note=note)


def growth(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """From one segment to all of them: seconds for each, against those for one, without what any query costs."""
    folders = [first_segments(bench.root, count, bench.folder / f"first-{count}") for count in (1, 2, 4, SEGMENTS)]
    times = [statistics.median(found) for found in bench.turns(*(scan(bench.ours(WHOLE, path)) for path in folders))]
    one, eight = times[1] - times[0], (times[3] - times[2]) / (SEGMENTS // 2)
    note = " ".join(f"{count}: {seconds:.2f} s" for count, seconds in zip((1, 2, 4, SEGMENTS), times, strict=True))
    yield (
        "1 to 8 segments",
        Figure("seconds for 8, of 8 times those for 1", times[3] / (SEGMENTS * times[0]), "×", goal=Goal("≤", 1.25), note=note),
    )
    yield "1 to 8 segments", Figure("a segment more, late against early", eight / max(one, 1e-9), "×")


def cores(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Everything on one core, Java and Python, against all cores: a single task keeps two busy, one on either side."""
    everything = os.sched_getaffinity(0)
    frame, java = bench.ours(WHOLE), bench.spark.sparkContext._gateway.proc.pid
    if len(everything) < 2:
        return

    def confined() -> None:
        confine(java, {min(everything)})
        try:
            scan(frame)()
        finally:
            confine(java, everything)

    one, all_ = bench.turns(confined, scan(frame))
    value = statistics.median(one) / statistics.median(all_)
    yield "cores", Figure(f"{len(everything)} against one", value, "×", goal=Goal("≥", 1.6))


def confine(process: int, cpus: set[int]) -> None:
    """Let a process and all below it use these processors only."""
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
            below = (task / "children").read_text().split()
        except OSError:
            continue  # it has ended
        for child in below:
            confine(int(child), cpus)


def latency(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """From the append of a batch to its rows in `foreachBatch`."""
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
    found = []
    try:
        for n in range(12):
            at, began = NOW + 1_000 * (n + 1), time.perf_counter()
            engine.submit("t", [Message(b"x", at, f"m{n}")], at)
            engine.tick(at)
            while f"m{n}" not in seen:
                if time.perf_counter() - began > 60:
                    raise TimeoutError("a batch never reached the stream")
                time.sleep(0.002)
            found.append(seen[f"m{n}"] - began)
    finally:
        query.stop()
        engine.close()
    yield (
        "stream",
        Figure("append to foreachBatch", statistics.median(found[2:]), "s", goal=Goal("≤", 1.0), rounds=tuple(found[2:])),
    )


if __name__ == "__main__":
    sys.exit(main())
