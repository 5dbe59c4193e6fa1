"""The operator's view: metrics that Prometheus can read and that add up, log lines, request ids, /healthz and /v1/status."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.cluster_process import CLUSTER_METRICS
from tests.harness.server_process import ROOT, Server, damaged_folder, running
from turtlemq.engine import Engine
from turtlemq.histogram import Histogram
from turtlemq.model import Message
from turtlemq.server import logs
from turtlemq.server.metrics.collect import collect
from turtlemq.server.metrics.delivery_steps import STEPS
from turtlemq.server.metrics.exposition import histogram
from turtlemq.server.metrics.families import topic_families
from turtlemq.server.metrics.labels import GROUPS_MAX, TopicLabels
from turtlemq.server.metrics.tenant_families import FIGURES

Samples = dict[str, list[tuple[dict[str, str], float]]]


PUSH_METRICS = {f"turtlemq_push_{name}" for name in ("total", "seconds", "breaker_open")}  # with push_hosts only
SLO_METRICS = {
    *(f"turtlemq_slo_{name}" for name in ("burn_rate", "deliveries_total", "overdue")),
    *(f"turtlemq_forecast_late_{name}seconds" for name in ("", "timestamp_")),
    "turtlemq_consumer_capacity_per_second",
}
TENANT_METRICS = {name for name, *_ in FIGURES} | {f"turtlemq_tenant_{name}" for name in ("refused_total", "waiting")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("metrics") / "data", "--config", str(_config(tmp_path_factory))) as found:
        yield found


def _config(factory: pytest.TempPathFactory) -> Path:
    file = factory.mktemp("config") / "turtle.toml"
    file.write_text("slow_request_ms = 1\n")
    return file


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def scrape(server: Server) -> Samples:
    """Every sample by its name, as Prometheus' own parser reads them."""
    answer = server.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.data.decode())


def parsed(text: str) -> Samples:
    out: Samples = defaultdict(list)
    seen: set[str] = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in seen, f"{family.name} is there twice"
        assert family.documentation
        assert family.type in ("gauge", "counter", "histogram"), (family.name, family.type)
        seen.add(family.name)
        for sample in family.samples:
            out[sample.name].append((dict(sample.labels), sample.value))
    return out


def value(samples: Samples, name: str, **labels: str) -> float:
    found = [number for given, number in samples[name] if labels.items() <= given.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_a_message_is_counted_at_every_step_of_its_life(server: Server) -> None:
    server.ok("PUT", "/v1/topics/life", {"max_attempts": 1})
    server.put(
        "life", {"id": "soon", "body": 1, "delay": 0.05}, {"id": "now", "body": 2}, {"id": "later", "body": 3, "delay": 900}
    )
    server.put("life", {"id": "now", "body": 2}, {"id": "gone", "body": 4, "delay": 900})
    server.ok("DELETE", "/v1/topics/life/messages/gone")
    got = server.fetch("life", wait=5) + server.fetch("life", wait=5)
    assert sorted(m["id"] for m in got) == ["now", "soon"]
    assert server.ack("life", "now", "-soon", error="broken")["dead"] == 1
    samples = scrape(server)
    assert value(samples, "turtlemq_produced_total", topic="life") == 4
    assert value(samples, "turtlemq_duplicates_total", topic="life") == 1
    assert value(samples, "turtlemq_cancelled_total", topic="life") == 1
    assert value(samples, "turtlemq_handed_off_total", topic="life") == 2
    assert value(samples, "turtlemq_delivered_total", topic="life", group="default") == 2
    assert value(samples, "turtlemq_acked_total", topic="life", group="default") == 1
    assert value(samples, "turtlemq_failed_total", topic="life", group="default") == 1
    assert value(samples, "turtlemq_died_total", topic="life", group="default") == 1
    states = {labels["state"]: n for labels, n in samples["turtlemq_messages"] if labels["topic"] == "life"}
    assert states == {"sleep": 1, "ready": 0, "reserve": 0, "history": 1, "dead": 1, "cancelled": 1}
    assert server.ok("POST", "/v1/topics/life/dead/requeue", {"filter": {}})["requeued"] == 1
    assert value(scrape(server), "turtlemq_dead_requeued_total", topic="life") == 1


def test_lateness_is_split_into_the_schedulers_part_and_the_consumers(server: Server) -> None:
    server.put("late", *({"body": i, "delay": 0.05} for i in range(40)), {"body": "at once"})
    got: list[object] = []
    while len(got) < 41:
        got += server.fetch("late", wait=5)
    samples = scrape(server)
    assert value(samples, "turtlemq_scheduler_lateness_seconds_count", topic="late") == 40  # one was never to sleep
    assert value(samples, "turtlemq_consumer_wait_seconds_count", topic="late") == 41
    assert value(samples, "turtlemq_scheduler_lateness_seconds_sum", topic="late") >= 0
    buckets = [n for labels, n in samples["turtlemq_consumer_wait_seconds_bucket"] if labels["topic"] == "late"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 41


def test_a_redelivery_is_no_second_wait(server: Server) -> None:
    server.put("again", {"id": "x", "body": 1})
    assert server.fetch("again", wait=5)
    server.ack("again", "-x", retry_delay=0)
    assert server.fetch("again", wait=5)[0]["attempt"] == 2
    samples = scrape(server)
    assert value(samples, "turtlemq_consumer_wait_seconds_count", topic="again") == 1
    assert value(samples, "turtlemq_delivered_total", topic="again") == 2


def test_requests_batches_and_commits_are_counted(server: Server) -> None:
    before = scrape(server)
    server.put("batches", *({"body": i} for i in range(30)))
    assert server.call("POST", "/v1/topics/batches/messages", {"body": 1, "delya": 3}).code == "INVALID_MESSAGE"
    assert server.call("GET", "/v1/topics/batches/nothing").code == "NOT_FOUND"
    after = scrape(server)
    route = {"method": "POST", "route": "/v1/topics/{topic}/messages", "status": "400"}
    assert value(after, "turtlemq_requests_total", **route) >= 1
    assert value(after, "turtlemq_rejected_total", code="INVALID_MESSAGE") >= 1
    for name in (
        "turtlemq_batch_messages_sum",
        "turtlemq_commit_seconds_count",
        "turtlemq_commit_bytes_sum",
        "turtlemq_tick_seconds_count",
    ):
        old = sum(n for _, n in before[name])
        assert sum(n for _, n in after[name]) > old, name
    assert (
        value(after, "turtlemq_batch_messages_sum", kind="produce") - value(before, "turtlemq_batch_messages_sum", kind="produce")
        == 30
    )
    for name in ("process_resident_memory_bytes", "process_open_fds", "turtlemq_disk_free_bytes", "turtlemq_up"):
        assert value(after, name) > 0


def test_each_step_of_a_delivery_is_timed(server: Server) -> None:
    server.ok("PUT", "/v1/topics/steps", {})
    due_ms = time.time_ns() // 1_000_000 + 300
    server.put("steps", {"body": 1, "due_ms": due_ms})
    before = scrape(server)
    assert len(server.fetch("steps", wait=10)) == 1
    after = scrape(server)
    waited = value(after, "turtlemq_delivery_step_seconds_count", step="wake")
    for step in STEPS:
        added = [value(found, "turtlemq_delivery_step_seconds_count", step=step) for found in (before, after)]
        assert added[1] - added[0] == 1, step
        spent = value(after, "turtlemq_delivery_step_seconds_sum", step=step)
        assert 0 <= spent - value(before, "turtlemq_delivery_step_seconds_sum", step=step) < 60
    server.put("steps", {"body": 2})
    assert len(server.fetch("steps")) == 1
    assert value(scrape(server), "turtlemq_delivery_step_seconds_count", step="wake") == waited, "it did not wait"


def test_the_table_in_the_docs_lists_every_metric(server: Server) -> None:
    text = (ROOT / "docs" / "OBSERVE.md").read_text()
    listed = set(re.findall(r"^\| `((?:turtlemq|process)_[a-z_]+)", text, re.MULTILINE))
    told = {family.name + ("_total" if family.type == "counter" else "") for family in _families(server)}
    optional = CLUSTER_METRICS | PUSH_METRICS | TENANT_METRICS | SLO_METRICS
    assert {name for name in listed - optional if not name.startswith("turtlemq_grpc_")} == told
    assert listed >= optional


def test_the_docs_list_every_event_of_the_log() -> None:
    folders = (ROOT / "turtlemq" / "server", ROOT / "turtlemq" / "replica")
    source = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    told = set(re.findall(r"""(?:logs\.(?:info|warning|error)\)?|\b_?log|self\._(?:log|remind))\(\s*"(\w+)\"""", source)) | set(
        re.findall(r'"event=(\w+)', source)
    )
    table = (ROOT / "docs" / "OBSERVE.md").read_text().partition("| event |")[2].partition("\n\n")[0]
    listed = {event for line in table.splitlines()[2:] for event in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert told | {"log"} <= listed
    unknown = {event for event in listed - told - {"log"} if f'"{event}"' not in source}  # some are chosen before they are logged
    assert {event.upper() for event in unknown} <= {"UNAUTHENTICATED", "FORBIDDEN", "HOST_NOT_ALLOWED"}  # by code


def test_the_alert_rules_use_metrics_that_exist(server: Server) -> None:
    rules = (ROOT / "deploy" / "prometheus-alerts.yml").read_text()
    used = set(re.findall(r"\b((?:turtlemq|process)_[a-z_]+)", " ".join(re.findall(r"expr: .*", rules))))
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    known = {family.name + ending for family in _families(server) for ending in endings[family.type]}
    assert len(used) > 10
    assert used - known - CLUSTER_METRICS - SLO_METRICS == set()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == set(re.findall(r"^\| `(Turtle\w+)` \|", (ROOT / "docs" / "OBSERVE.md").read_text(), re.MULTILINE))


def _families(server: Server) -> list[Metric]:
    return list(text_string_to_metric_families(server.call("GET", "/metrics").data.decode()))


# Labels are bounded


def _filled(folder: Path, topics: int) -> Engine:
    engine = Engine.open(folder)
    for i in range(topics):
        engine.submit(f"t{i:03}", [Message(b"x", due_ms=0)] * (1 + (i == 7) * 5), 1_000)
        engine.submit(f"t{i:03}", [Message(b"x", due_ms=10**12)], 1_000)
    engine.tick(2_000)
    for i in range(topics):
        engine.reserve(f"t{i:03}", "g", 1, 3_000)
    return engine


async def _page(engine: Engine, labels: TopicLabels) -> str:
    figures = await collect(engine, labels, time.time_ns() // 1_000_000)
    return "\n".join(topic_families(figures)) + "\n"


def test_topics_beyond_the_limit_are_one(tmp_path: Path) -> None:
    engine = _filled(tmp_path, 30)
    shown = TopicLabels(4)
    samples = parsed(asyncio.run(_page(engine, shown)))
    names = {labels["topic"] for labels, _ in samples["turtlemq_messages"]}
    assert names == {"t007", "t000", "t001", "t002", "other"}  # the busiest, then by name
    assert value(samples, "turtlemq_messages", topic="other", state="sleep") == 26
    assert value(samples, "turtlemq_delivered_total", topic="other", group="other") == 26
    assert value(samples, "turtlemq_consumer_wait_seconds_count", topic="other") == 26
    assert sum(n for _, n in samples["turtlemq_produced_total"]) == 65
    engine.drop_topic("t001")
    engine.submit("t020", [Message(b"x", due_ms=10**12)] * 9, 4_000)
    names = {labels["topic"] for labels, _ in parsed(asyncio.run(_page(engine, shown)))["turtlemq_messages"]}
    assert names == {"t007", "t000", "t002", "t020", "other"}  # a topic with a name keeps it; the free place is the busiest's
    engine.close()


def test_groups_beyond_the_limit_are_one(tmp_path: Path) -> None:
    engine = _filled(tmp_path, 1)
    for i in range(25):
        engine.reserve("t000", f"g{i:02}", 1, 3_000)
    samples = parsed(asyncio.run(_page(engine, TopicLabels())))
    delivered = {labels["group"]: n for labels, n in samples["turtlemq_delivered_total"]}
    assert len(delivered) == GROUPS_MAX + 1
    assert delivered["other"] == 26 - GROUPS_MAX
    engine.close()


def test_counters_of_groups_never_go_back(server: Server) -> None:
    """A new or deleted group moves no other into or out of `other`."""
    for i in range(15):
        server.put("ranks", *({"body": 0} for _ in range(20)))
        server.ok("PUT", f"/v1/topics/ranks/groups/g{i:02}", {})
    until(lambda: server.ok("GET", "/v1/topics/ranks/groups/g00")["stats"]["ready"] == 300)
    for i in range(15):
        server.fetch("ranks", f"g{i:02}", ack="auto", max=100)
    before = _delivered(server)
    assert before["other"] == 500
    for path in ("a", "g00", "g03", "g12"):
        server.ok("PUT" if path == "a" else "DELETE", f"/v1/topics/ranks/groups/{path}", {} if path == "a" else None)
        after = _delivered(server)
        gone = before.keys() - after.keys()
        assert gone == ({path} if path in before else set())
        assert {group: after[group] for group in before.keys() - gone if after[group] < before[group]} == {}
        before = after


def _delivered(server: Server) -> dict[str, float]:
    samples = scrape(server)["turtlemq_delivered_total"]
    return {labels["group"]: count for labels, count in samples if labels["topic"] == "ranks"}


class Fleet:
    """Topics and groups that come and go under a scraper; series that may begin anew, since their group or topic is gone."""

    def __init__(self, folder: Path, chance: Random) -> None:
        self.engine, self.chance, self.labels = Engine.open(folder), chance, TopicLabels(3)
        self.begun: set[tuple[str, str]] = set()  # (topic, group) deleted since the last scrape; an empty group stands for all

    def step(self) -> None:
        chance, engine = self.chance, self.engine
        topic, group = f"t{chance.randrange(7)}", chance.choice([*(f"g{i}" for i in range(14)), "other"])
        dice = chance.random()
        if dice < 0.1 and topic in engine.topics:
            engine.drop_topic(topic)
            self.begun.add((topic, ""))
        elif dice < 0.25 and topic in engine.topics and engine.topics[topic].view.has_group(group):
            engine.drop_group(topic, group, 1_000)
            self.begun.add((topic, group))
        else:
            engine.submit(topic, [Message(b"x", due_ms=0)] * chance.randint(1, 3), 1_000)
            engine.tick(1_000)
            engine.reserve(topic, group, 5, 1_000, auto=True)

    def scrape(self) -> dict[tuple[str, str, str], float]:
        """Counters by name, topic and group."""
        samples = parsed(asyncio.run(_page(self.engine, self.labels)))
        names = [name for name in samples if name.endswith(("_total", "_count", "_sum"))]
        return {(name, at["topic"], at.get("group", "")): count for name in names for at, count in samples[name]}

    def may_begin_anew(self, topic: str, group: str) -> bool:
        return topic != "other" and ((topic, "") in self.begun or (group != "other" and (topic, group) in self.begun))


@pytest.mark.parametrize("seed", range(12))
def test_a_counter_goes_back_only_with_its_group_or_topic(tmp_path: Path, seed: int) -> None:
    fleet = Fleet(tmp_path, Random(seed))
    before: dict[tuple[str, str, str], float] = {}
    for _ in range(60):
        for _ in range(fleet.chance.randint(1, 8)):
            fleet.step()
        after = fleet.scrape()
        for (name, topic, group), count in before.items():
            if after.get((name, topic, group), 0) < count:
                assert fleet.may_begin_anew(topic, group), (name, topic, group, count, after.get((name, topic, group)))
        before, fleet.begun = after, set()
    fleet.engine.close()


# Histograms


@given(st.lists(st.integers(-5, 400), max_size=80), st.lists(st.integers(0, 400), max_size=80))
def test_a_histogram_counts_batches_as_it_counts_single_values(first: list[int], second: list[int]) -> None:
    bounds = (1, 5, 25, 100)
    one, many = Histogram(bounds), Histogram(bounds)
    for values in (first, second):
        many.add_many(np.array(values, np.int64))
        for number in values:
            one.add(number)
    assert (one.counts, one.total) == (many.counts, many.total)
    assert one.count == len(first) + len(second)
    text = "\n".join(histogram("h", "Help.", [({}, many)])) + "\n"
    buckets = [n for _, n in parsed(text)["h_bucket"]]
    assert buckets == [sum(v <= bound for v in first + second) for bound in (*bounds, 1e9)]


def test_a_quantile_lies_in_its_bucket() -> None:
    found = Histogram((10, 20, 40))
    assert found.quantile(0.5) is None
    found.add_many(np.array([1] * 50 + [15] * 49 + [1000]))
    assert found.quantile(0.5) == 10
    assert 10 < (found.quantile(0.9) or 0) <= 20
    assert found.quantile(1) == 40
    assert found.quantile(0.5, since=[50, 0, 0, 0]) == pytest.approx(10 + 10 * 25 / 49)


# Logs and request ids


def test_every_answer_has_a_request_id(server: Server) -> None:
    made = server.call("GET", "/healthz").headers["X-Request-Id"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]+", made)
    kept = server.call("GET", "/v1/topics/absent", headers={"X-Request-Id": "order-service:77/a"})
    assert kept.headers["X-Request-Id"] == "order-service:77/a"
    assert kept.json["error"]["request_id"] == "order-service:77/a"
    for odd in ("a b", "x" * 129, '"><script>', "-x", ""):
        assert server.call("GET", "/healthz", headers={"X-Request-Id": odd}).headers["X-Request-Id"] != odd
    for path in ("/nowhere", "/v1/topics/no%20name"):
        refused = server.call("GET", path)
        assert refused.json["error"]["request_id"] == refused.headers["X-Request-Id"]
    assert "X-Request-Id" in server.call("GET", "/v1/topics/life/dead/export").headers


def test_slow_requests_are_logged_without_their_bodies(server: Server) -> None:
    line, named = "", {"X-Request-Id": "slow-one", "Authorization": "Bearer hidden"}
    while not line:  # of many in one second, some are left out
        body = {"messages": [{"body": "secret " * 50} for _ in range(2000)]}
        server.ok("POST", "/v1/topics/slow/messages", body, headers=named)
        found = [line for line in server.log.splitlines() if "event=slow_request" in line and "request_id=slow-one" in line]
        line = found[0] if found else ""
        time.sleep(0 if line else 0.3)
    assert re.search(r"level=warning .*method=POST path=/v1/topics/slow/messages status=201 ms=[\d.]+", line)
    assert "secret" not in server.log
    assert "hidden" not in server.log


def test_a_long_poll_is_not_slow_because_it_waits(server: Server) -> None:
    before = value_or_zero(scrape(server), "turtlemq_request_seconds_sum", "/v1/topics/{topic}/fetch")
    server.ok("POST", "/v1/topics/poll/fetch", {"wait": 1}, headers={"X-Request-Id": "poller"})
    after = value_or_zero(scrape(server), "turtlemq_request_seconds_sum", "/v1/topics/{topic}/fetch")
    assert after - before < 1  # the rest is the work, a thousandth of that


def value_or_zero(samples: Samples, name: str, route: str) -> float:
    return sum(n for labels, n in samples[name] if labels["route"] == route)


@pytest.mark.slow
def test_what_happens_by_itself_is_told(tmp_path: Path) -> None:
    with running(tmp_path / "data", TURTLEMQ_LOG_FORMAT="json") as server:
        server.ok("PUT", "/v1/topics/t", {"max_attempts": 1})
        server.put("t", {"id": "x", "body": 1})
        assert server.fetch("t", wait=5)
        server.ack("t", "-x", error="no")
        _wait_for(server, "dead_letters")
        server.ok("DELETE", "/v1/topics/t")
        _wait_for(server, "topic_deleted")
    events = [json.loads(line) for line in server.log.splitlines()]
    names = [event["event"] for event in events]
    assert [name for name in names if name in ("ready", "stopping", "stopped")] == ["ready", "stopping", "stopped"]
    dead = next(event for event in events if event["event"] == "dead_letters")
    assert (dead["level"], dead["topic"], dead["group"], dead["count"]) == ("warning", "t", "default", 1)
    assert {"topic_created", "topic_deleted"} <= set(names)


def _wait_for(server: Server, event: str) -> None:
    end = time.monotonic() + 20
    while f'"{event}"' not in server.log:
        assert time.monotonic() < end, server.log
        time.sleep(0.05)


@pytest.mark.slow
def test_a_damaged_file_is_told_in_log_status_and_metrics(tmp_path: Path) -> None:
    damaged_folder(tmp_path / "data")
    with running(tmp_path / "data") as server:
        server.ok("GET", "/v1/topics/t/messages")
        (found,) = server.ok("GET", "/v1/status")["damage"]
        assert found["topic"] == "t"
        assert value(scrape(server), "turtlemq_damaged", topic="t") == 1
        assert server.ok("GET", "/readyz")["damaged"] == 1
        end = time.monotonic() + 20
        while "event=damage" not in server.log:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert re.search(r"level=error event=damage topic=t file=\S+ position=\d+ length=\d+ reason=", server.log)


def test_lines_cannot_be_forged_and_are_one_line_each() -> None:
    record = logging.LogRecord("turtlemq", logging.ERROR, "f", 1, "refused", None, None)
    record.fields = {"path": "/a\nlevel=error event=forged", "why": 'say "no"', "ok": True, "n": None, "odd": "a\x1b[31m"}
    line = logs.Formatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert r'path="/a\nlevel=error event=forged" why="say \"no\"" ok=true n=null' in line
    assert json.loads(logs.Formatter("json").format(record))["path"] == "/a\nlevel=error event=forged"
    byhand = logging.LogRecord("turtlemq", logging.INFO, "f", 1, "event=old topic=%s error=%s", ("t", "no room left"), None)
    assert logs.Formatter().format(byhand).endswith('level=info event=old topic=t error="no room left"')
    theirs = logging.LogRecord("aiohttp.server", logging.INFO, "f", 1, "hello %s", ("you",), None)
    assert logs.Formatter().format(theirs).endswith('event=log logger=aiohttp.server message="hello you"')


# Status


def test_health_readiness_and_status(server: Server) -> None:
    alive = server.ok("GET", "/healthz")
    assert (alive["status"], alive["state"]) == ("alive", "serving")
    server.put("status.one", {"body": 1, "delay": 900}, {"body": 2})
    server.fetch("status.one", wait=5)
    found = server.ok("GET", "/v1/status?q=status.&limit=5")
    (topic,) = found["topics"]
    assert topic["states"]["sleep"] == 1
    assert topic["totals"]["produced"] == 2
    assert topic["groups"]["default"]["reserve"] == 1
    assert sum(found["lateness"]["consumer_wait"]) == 1
    assert found["topics_total"] == 1
    assert server.call("GET", "/v1/status?limit=0").code == "INVALID_ARGUMENT"
    assert server.ok("GET", "/readyz")["status"] == "ready"
