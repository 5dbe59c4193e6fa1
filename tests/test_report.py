"""`turtlemq report`: every job against figures worked out by hand, a second run that reads only new data, the page in a
browser, the command, and the same on a cluster. One Spark session for all that can share one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from typer.testing import CliRunner

from tests.harness.spark_session import HURRY, MARKS, need_spark, spark

need_spark()

from pyspark_turtlemq import pin_owners, pins  # noqa: E402 - only where Spark is
from pyspark_turtlemq.parts import TopicLogs  # noqa: E402
from pyspark_turtlemq.session import environment  # noqa: E402
from pyspark_turtlemq.snapshot_files import LOGS  # noqa: E402
from tests.harness.browser import running_browser, watched_page, window  # noqa: E402
from tests.harness.report_data import DAY, HOUR, NOW, T, first_half, opened, second_half  # noqa: E402
from tests.harness.server_process import PROGRAM, running  # noqa: E402
from turtlemq.cli import report as verb  # noqa: E402
from turtlemq.cli.verbs import command_line  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq_report import increments, jobs, state  # noqa: E402
from turtlemq_report.bundle import bundle  # noqa: E402
from turtlemq_report.model import Report, ReportOptions  # noqa: E402
from turtlemq_report.run import NoData, report  # noqa: E402

__all__ = ["spark"]
pytestmark = MARKS


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop") / "data"
    engine = opened(root)
    first_half(engine)
    second_half(engine)
    engine.close()
    return root


@pytest.fixture(scope="module")
def made(spark: Any, shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report(spark, ReportOptions(shop, tmp_path_factory.mktemp("report")), now_ms=NOW)


def rows(made: Report, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in made.tables[name].to_pylist()]


# Every job, by hand


def test_the_forecast_counts_what_sleeps_by_minute_and_hour(made: Report) -> None:
    assert rows(made, "forecast", "topic", "unit", "start_ms", "messages") == [
        ("shop", "hour", T + 2 * HOUR, 1),
        ("shop", "hour", T + 3 * DAY, 1),
        ("shop", "later", 0, 1),
        ("shop", "minute", T + 2 * HOUR, 1),
    ]


def test_lateness_is_split_into_scheduler_and_consumers(made: Report) -> None:
    """Late by 5, four times 10, twice 20; waited 10, 10, 20, 30 and 1025 for a consumer, first deliveries only."""
    columns = ("part", "messages", "p50_ms", "p90_ms", "p99_ms", "max_ms")
    scheduler, consumer = ("scheduler", 7, 10, 20, 20, 20), ("consumer", 5, 20, 1_025, 1_025, 1_025)
    found = rows(made, "lateness", "topic", "start_ms", *columns)
    assert {row[:2] for row in found} == {(None, None), (None, T), ("shop", None), ("shop", T)}
    assert {row[2:] for row in found} == {scheduler, consumer}
    assert len(found) == 8


def test_delays_are_counted_by_class(made: Report) -> None:
    assert rows(made, "delays", "topic", "upto_ms", "messages") == [("shop", 0, 1), ("shop", 1_000, 4), ("shop", 60_000, 2)]


def test_throughput_is_by_topic_and_group(made: Report) -> None:
    assert rows(made, "throughput", "topic", "group", "start_ms", "what", "messages") == [
        ("shop", None, T, "ready", 7),
        ("shop", "default", T, "acked", 5),
        ("shop", "default", T, "dead", 1),
    ]


def test_failures_are_classified_by_error(made: Report) -> None:
    assert rows(made, "failures", "topic", "group", "error", "retries", "died", "letters") == [
        ("shop", "default", "KeyError: '…'", 1, 1, 1),
        ("shop", "default", "lease expired", 1, 0, 0),
    ]


def test_consumers_are_told_apart(made: Report) -> None:
    columns = "group consumer taken acked failed lapsed holds share p50_ms max_ms verdict".split()
    assert rows(made, "consumers", *columns) == [
        ("audit", "x", 0, 0, 0, 0, 1, 1.0, None, None, ""),
        ("default", "w1", 6, 4, 2, 0, 0, 0.75, 100, 200, ""),
        ("default", "w2", 2, 1, 0, 1, 0, 0.25, 500, 60_010, ""),
    ]


def test_storage_is_told_by_segment(made: Report, shop: Path) -> None:
    found = {row["log"]: row for row in made.tables["storage"].to_pylist()}
    assert set(found) == {"delay", "ready", "reserve", "history", "dead"}
    for log, row in found.items():
        place = shop / "topic" / "shop" / ("dead" if log == "dead" else "") / row["segment"]
        assert row["bytes"] == place.stat().st_size
    asleep = found["delay"]
    assert (asleep["documents"], asleep["live"], asleep["live_ratio"], asleep["advice"]) == (10, 3, 0.3, "grows")
    assert asleep["ended_bytes"] == int(asleep["bytes"] * 0.7)


def test_advice_follows_the_engine_s_own_rules(spark: Any) -> None:
    def segment(name: str, live: int, sealed: bool = True, last: bool = False) -> tuple[Any, ...]:
        return ("t", "delay", name, 1_000, 0, 100, live, sealed, last, 0.05)

    from turtlemq_report.disk_usage import SCHEMA

    given = [
        segment("empty", 0),
        segment("sparse", 5),
        segment("open", 90, sealed=False),
        segment("half", 49),
        segment("full", 50),
    ]
    found = jobs.storage(spark.createDataFrame([*given, segment("newest", 0, last=True)], SCHEMA)).collect()
    assert {row.segment: row.advice for row in found} == {
        "empty": "will be removed",
        "sparse": "will be compacted",
        "open": "will be sealed",
        "half": "compact to free room",
        "full": "",
        "newest": "grows",
    }


def test_the_kind_of_an_error_leaves_out_what_differs(spark: Any) -> None:
    given = {
        "KeyError: 'user_17'": "KeyError: '…'",
        'no row "x-1" in 10.2 s': "no row '…' in # s",
        "can't reach host, didn't answer": "can't reach host, didn't answer",
        "order 6f9619ff-8b86-d011-b42d-00cf4fc964ff at 0x7f3a": "order # at #",
        "commit 9fceb02d0ae598e9 lost\nTraceback …": "commit # lost",
        "": jobs.NO_ERROR,
        None: jobs.NO_ERROR,
        "x" * 500: "x" * 120,
    }
    frame = spark.createDataFrame([(text,) for text in given], "error string").coalesce(1)
    found = frame.select(jobs.classified(frame["error"])).collect()
    assert [row[0] for row in found] == list(given.values())


def test_slow_hot_and_failing_consumers_are_named(spark: Any) -> None:
    """Of five in a group, one works ten times as long as the others, one takes half of everything, one fails with each fourth."""
    leases: list[tuple[Any, ...]] = []
    settled: list[tuple[Any, ...]] = []
    offset = 0
    for name, count, work_ms, bad in (
        ("a", 30, 10, 0),
        ("b", 30, 10, 0),
        ("slow", 30, 100, 0),
        ("hot", 120, 10, 0),
        ("bad", 40, 10, 4),
    ):
        for i in range(count):
            offset += 1
            failed = bool(bad) and i % bad == 0
            leases.append(("t", 2 * offset, "lease", "g", T, 0, name, offset, 1, None))
            if failed:
                leases.append(("t", 2 * offset + 1, "retry", "g", T + work_ms, 0, None, offset, 2, "boom"))
            else:
                settled.append(("t", "settle", "acked", "g", T + work_ms, offset, T))
    kinds = "topic string, number bigint, event string, `group` string, at_ms bigint, epoch bigint, consumer string, "
    taken = spark.createDataFrame(leases, kinds + "offset bigint, attempt int, error string").coalesce(1)
    kinds = "topic string, event string, outcome string, `group` string, at_ms bigint, offset bigint, reserved_ms bigint"
    delivered = jobs.deliveries(taken, spark.createDataFrame(settled, kinds).coalesce(1)).cache()
    found = jobs.consumers(jobs.consumer_partial(delivered), jobs.under_way(delivered)).collect()
    verdicts = {row.consumer: row.verdict for row in found}
    assert verdicts == {"a": "", "b": "", "slow": "slow", "hot": "hot", "bad": "failing"}
    assert {row.consumer: row.p50_ms for row in found}["slow"] == 100


# Only new data


def told(made: Report) -> dict[str, list[dict[str, Any]]]:
    return {name: table.to_pylist() for name, table in made.tables.items()}


def test_a_second_run_reads_only_new_data_and_agrees(spark: Any, tmp_path: Path, made: Report) -> None:
    root, out = tmp_path / "data", tmp_path / "report"
    engine = opened(root)
    first_half(engine)
    half = report(spark, ReportOptions(root, out), now_ms=NOW)
    assert half.first
    assert [row["messages"] for row in half.tables["throughput"].to_pylist()] == [5, 3]
    second_half(engine)  # leases that the first run saw under way end in the second
    engine.close()
    rest = report(spark, ReportOptions(root, out), now_ms=NOW)
    assert not rest.first
    assert 0 < rest.read_bytes < half.read_bytes < made.read_bytes
    assert half.read_bytes + rest.read_bytes <= made.read_bytes  # nothing is read twice
    assert told(rest) == told(made)
    again = report(spark, ReportOptions(root, out), now_ms=NOW)
    assert again.read_bytes == 0
    assert told(again) == told(made)
    assert not (root / pin_owners.FOLDER).exists()


def planned(root: Path, known: dict[str, Any]) -> increments.Increment:
    with pins.take_snapshot(root, sorted(os.listdir(root / "topic")), LOGS) as moment:
        return increments.plan_increment(
            {name: TopicLogs(pinned) for name, pinned in moment.topics.items()}, increments.read_positions(known)
        )


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    engine = opened(tmp_path / "data")
    first_half(engine)
    before = planned(tmp_path / "data", {})
    assert planned(tmp_path / "data", before.as_json()).bytes == 0
    engine.drop_topic("shop")
    engine.submit("shop", [Message(b"y", T, f"n{n}") for n in range(50)], T)
    engine.tick(T + 9)
    engine.reserve("shop", "default", 50, T + 10, consumer="w")
    engine.ack("shop", "default", [f"n{n}" for n in range(50)], T + 11)
    engine.close()
    after = planned(tmp_path / "data", before.as_json())
    assert after.recreated == ["shop"]
    assert after.bytes == planned(tmp_path / "data", {}).bytes
    kept = state.ReportState("data", positions=before.as_json(), damage=["shop/x: torn", "shop2/x: torn"])
    kept.drop(["shop"])
    assert (kept.positions, kept.damage) == ({}, ["shop2/x: torn"])


def test_what_retention_took_before_it_was_read_is_named(tmp_path: Path) -> None:
    engine = opened(tmp_path / "data")
    engine.configure("shop", segment_bytes=4_096)
    first_half(engine)
    before = planned(tmp_path / "data", {})
    for n in range(200):
        engine.submit("shop", [Message(b"z" * 200, T + n, f"z{n}")], T + n)
        engine.tick(T + 5_000 + n)
        found = engine.reserve("shop", "default", 100, T + 6_000 + n)
        engine.ack("shop", "default", list(found.ids), T + 6_001 + n)
    engine.close()
    files = sorted((tmp_path / "data" / "topic" / "shop").glob("history_*.bson"))
    assert len(files) > 2
    for path in files[:2]:  # as retention does, the oldest first
        path.unlink()
    (line,) = [line for line in planned(tmp_path / "data", before.as_json()).missed if "history" in line]
    assert re.fullmatch(r"shop: \d+ events of its history", line)


def test_a_folder_is_one_report_s_at_a_time(tmp_path: Path) -> None:
    kept = state.ReportState("/data/a", positions={"t": {}})
    with state.locked(tmp_path):
        state.save(tmp_path, kept)
        with pytest.raises(state.Busy, match="Another report"), state.locked(tmp_path):
            pass
    assert state.load(tmp_path, Path("/data/a")).positions == {"t": {}}
    with pytest.raises(state.OtherData, match="another one with --out"):
        state.load(tmp_path, Path("/data/b"))


# Odd folders


def test_a_folder_without_topics_has_an_empty_report(spark: Any, tmp_path: Path) -> None:
    Engine.open(tmp_path / "data").close()
    found = report(spark, ReportOptions(tmp_path / "data", tmp_path / "report"), now_ms=NOW)
    assert all(len(table) == 0 for table in found.tables.values())
    page = (tmp_path / "report" / "report.html").read_text("utf-8")
    assert page.count("Nothing yet.") == 7


def test_damage_is_counted_and_the_rest_is_told(spark: Any, shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "data")
    path = tmp_path / "data" / "topic" / "shop" / "history_0000000000.bson"
    data = bytearray(path.read_bytes())
    data[data.index(b"acked") + 1] ^= 1  # d1 and a1 were handled, says this event
    path.write_bytes(data)
    path = path.with_name("ready_0000000000.bson")
    data = bytearray(path.read_bytes())
    data[data.index(b"x", data.index(b"a3\0"))] ^= 1  # its body
    path.write_bytes(data)
    found = report(
        spark, ReportOptions(tmp_path / "data", tmp_path / "report", topic="sh*", since_ms=T, until_ms=T + 1), now_ms=NOW
    )
    assert (found.damaged, len(found.damage)) == (2, 1)
    assert found.damage[0].startswith("shop/ready_0000000000.bson: checksum does not match at position ")
    told = rows(found, "throughput", "group", "what", "messages")
    assert told == [(None, "ready", 6), ("default", "acked", 3), ("default", "dead", 1)]
    page = (tmp_path / "report" / "report.html").read_text("utf-8")
    assert found.damage[0] in page
    assert "1 documents could not be read" in page
    later = report(spark, ReportOptions(tmp_path / "data", tmp_path / "report", since_ms=T + HOUR), now_ms=NOW)
    assert (len(later.tables["throughput"]), later.read_bytes) == (0, 0)


def test_what_is_no_data_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no data folder"):
        report(None, ReportOptions(tmp_path, tmp_path / "report"))


# The page


def test_the_page_in_a_browser(made: Report) -> None:
    address = (made.options.out / "report.html").resolve().as_uri()
    with running_browser() as browser:
        for scheme, width in (("light", 1280), ("dark", 420)):
            with (
                window(browser, width, color_scheme=scheme) as context,
                watched_page(context, ours=(address, "data:,")) as page,
            ):
                page.goto(address)
                _look_at(page, scheme)


def _look_at(page: Page, scheme: str) -> None:
    cards = {card.split("\n")[1]: card.split("\n")[0] for card in page.locator(".card").all_inner_texts()}
    assert cards == {
        "asleep": "3",
        "due within the hour": "0",
        "came due": "7",
        "handled": "5",
        "scheduler p99": "20 ms",
        "consumers p99": "1 s",
        "dead letters": "1",
        "on disk": cards["on disk"],
        "damaged": "0",
    }
    assert page.locator("svg.chart").count() == 10
    assert all(box["width"] > 200 for one in page.locator("svg.chart").all() if (box := one.bounding_box()))
    assert page.locator("#forecast rect.s0").count() == 1 + 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#failures summary").click()
    cells = page.locator("#table-failures tbody tr").first.locator("td").all_inner_texts()
    assert cells == ["KeyError: '…'", "shop", "default", "1", "1", "1"]
    colours = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colours == "rgb(16, 22, 19)") == (scheme == "dark")


# The command


def line(*args: str, code: int = 0) -> str:
    found = CliRunner().invoke(command_line(), ["report", *args])
    assert found.exit_code == code, found.output
    return found.output + found.stderr


def test_wrong_use_is_told_before_spark_is_started(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "report")
    assert "no data folder" in line("--data", str(tmp_path), "--out", out, code=1)
    assert "there is no topic 'nobody'" in line("--data", str(shop), "--out", out, "--topic", "nobody", code=1)
    assert "is no time" in line("--data", str(shop), "--since", "yesterday", code=2)
    assert "--since is not before --until" in line("--data", str(shop), "--since", "-1h", "--until", "-2h", code=2)
    monkeypatch.setattr(verb, "_REQUIRED", ("a_package_that_nobody_has",))
    assert "make spark" in line("--data", str(shop), code=1)
    assert not Path(out).exists()


def test_the_command_on_a_running_server_s_folder(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.put("mail", *({"id": f"m{n}", "body": n} for n in range(20)))
        server.put("mail", *({"id": f"s{n}", "body": n, "delay": 1800} for n in range(5)))
        assert len(server.fetch("mail", max=20, wait=5)) == 20
        server.ack("mail", *(f"m{n}" for n in range(15)))
        command = [*PROGRAM, "report", "--data", str(server.data), "--out", str(tmp_path / "report"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        server.ok("GET", "/readyz")
    head = found["headline"]
    assert (head["asleep"], head["came due"], head["handled"], head["damaged"]) == ("5", "20", "15", "0")
    assert (found["topics"], found["pinned"], found["incremental"]) == (["mail"], True, False)
    assert Path(found["page"]).read_text("utf-8").startswith("<!doctype html>")
    assert all(Path(table["file"]).is_file() for table in found["tables"].values())
    assert not (server.data / pin_owners.FOLDER).exists()


# A cluster


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_same_jobs_on_a_cluster(made: Report, shop: Path, tmp_path: Path) -> None:
    """A master and two workers, each a process of its own, with nothing of TurtleMQ but the archive that is shipped to them."""
    import pyspark

    home, port = Path(pyspark.__file__).parent, free_port()
    env = {
        **os.environ,
        **environment(),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
        "SPARK_NO_DAEMONIZE": "1",
    }
    env.pop("PYTHONPATH")
    bundle(tmp_path / "turtlemq.zip")
    quiet = ["-Dlog4j2.configurationFile=" + Path(tmp_path / "log4j2.properties").as_uri()]
    (tmp_path / "log4j2.properties").write_text("rootLogger.level = info\nrootLogger.appenderRef.out.ref = out\n"
        "appender.out.type = Console\nappender.out.name = out\nappender.out.layout.type = PatternLayout\n"
        "appender.out.layout.pattern = %p %c{1}: %m%n\n")  # fmt: skip
    with ExitStack() as stack:

        def start(name: str, *args: str) -> Path:
            log = tmp_path / f"{name}.log"
            command = [str(home / "bin" / "spark-class"), *args]
            told = env | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": f"{quiet[0]} {HURRY}"}
            process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=told, cwd=tmp_path)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return log

        master = f"spark://127.0.0.1:{port}"
        deploy = "org.apache.spark.deploy"
        log = start("master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        for name in ("one", "two"):
            more = ["--cores", "1", "--memory", "600m", "--webui-port", "0", "--work-dir", str(tmp_path / name)]
            start(name, f"{deploy}.worker.Worker", "--host", "127.0.0.1", *more, master)
        until(lambda: log.read_text(errors="replace").count("Registering worker") == 2, log)
        submit = [sys.executable, str(home / "bin" / "spark-submit")][1:]
        conf = {
            "spark.driver.memory": "700m",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": HURRY,
            "spark.executor.extraJavaOptions": HURRY,
        }
        options = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        main = Path(jobs.__file__).with_name("__main__.py")
        job = [*submit, "--master", master, *options, "--py-files", str(tmp_path / "turtlemq.zip"), str(main)]
        done = subprocess.run([*job, "--data", str(shop), "--out", str(tmp_path / "report")], capture_output=True, text=True,
                              timeout=400, env=env, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr[-4_000:]
        workers = log.read_text(errors="replace")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["headline"]["came due"] == "7"
    import pyarrow.parquet as pq

    for name in ("lateness", "delays", "throughput", "failures", "consumers"):
        assert pq.read_table(tmp_path / "report" / f"{name}.parquet").to_pylist() == made.tables[name].to_pylist()
    assert workers.count("Launching executor") >= 2


def until(true: Any, log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, log.read_text(errors="replace")[-3_000:]
        time.sleep(0.1)
