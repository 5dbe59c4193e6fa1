"""The files in deploy/ for Prometheus and Grafana: alerts fire when they should and only then, and a real Prometheus that scrapes
a real server answers every query of the dashboard."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.harness.cluster_process import CLUSTER_METRICS
from tests.harness.server_process import Server, running
from tests.harness.tools import program, run

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
ALERTS, RECORDED, CONFIG = DEPLOY / "prometheus-alerts.yml", DEPLOY / "prometheus-rules.yml", DEPLOY / "prometheus.yml"
NEVER = "0x90"
GROWS = "0+60x90"


def _slow(name: str, bound: str) -> tuple[dict[str, str], dict[str, str]]:
    """Series of a histogram whose values are all above a bound, and below it."""
    more = {f'{name}_bucket{{topic="t",le="60"}}': GROWS, f'{name}_bucket{{topic="t",le="+Inf"}}': GROWS}
    low = f'{name}_bucket{{topic="t",le="{bound}"}}'
    return {low: NEVER, **more}, {low: GROWS, **more}


def _burn(rate: str, *windows: str) -> dict[str, str]:
    """Series of a burn rate that stays as it is, in these windows."""
    return {f'turtlemq_slo_burn_rate{{topic="t",window="{window}"}}': f"{rate}x90" for window in windows}


# By alert: series that make it fire, and series that do not. Each has a value a minute, for 90 minutes.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TurtleDown": ({'up{job="turtlemq"}': NEVER}, {'up{job="turtlemq"}': "1x90"}),
    "TurtleTopicStopped": ({'turtlemq_stopped{topic="t"}': "1x90"}, {'turtlemq_stopped{topic="t"}': NEVER}),
    "TurtleTopicInTrouble": ({'turtlemq_trouble{topic="t"}': "1x90"}, {'turtlemq_trouble{topic="t"}': NEVER}),
    "TurtleDamage": ({'turtlemq_damaged{topic="t"}': "2x90"}, {'turtlemq_damaged{topic="t"}': NEVER}),
    "TurtleDiskFillsUp": (
        {"turtlemq_disk_free_bytes": "100000000000-500000000x90"},
        {"turtlemq_disk_free_bytes": "100000000000-1000000x90"},
    ),
    "TurtleSchedulerLate": _slow("turtlemq_scheduler_lateness_seconds", "0.5"),
    "TurtleConsumersBehind": ({"turtlemq_oldest_ready_seconds": "400x90"}, {"turtlemq_oldest_ready_seconds": "200x90"}),
    "TurtleLateFastBurn": (_burn("20", "1h", "5m"), _burn("20", "1h") | _burn("1", "5m")),
    "TurtleLateSlowBurn": (_burn("4", "6h", "1h"), _burn("4", "6h") | _burn("1", "1h")),
    "TurtleWillBeLate": (
        {'turtlemq_forecast_late_seconds{topic="t",group="g"}': "720x90"},
        {"turtlemq_forecast_late_seconds": NEVER},
    ),
    "TurtleDeadLetters": ({"turtlemq_died_total": "0+1x90"}, {"turtlemq_died_total": "5x90"}),
    "TurtleDeadLettersDropped": ({"turtlemq_dead_dropped_total": "0+1x90"}, {"turtlemq_dead_dropped_total": "5x90"}),
    "TurtleLeasesTimeOut": (
        {"turtlemq_timed_out_total": "0+6x90", "turtlemq_delivered_total": GROWS},
        {"turtlemq_timed_out_total": "0+1x90", "turtlemq_delivered_total": GROWS},
    ),
    "TurtleCommitsSlow": _slow("turtlemq_commit_seconds", "0.1"),
    "TurtleLoopStalls": _slow("turtlemq_loop_lag_seconds", "0.1"),
    "TurtleRefuses": (
        {'turtlemq_rejected_total{code="DISK_FULL"}': "0+1x90"},
        {'turtlemq_rejected_total{code="DISK_FULL"}': "3x90", 'turtlemq_rejected_total{code="NOT_FOUND"}': GROWS},
    ),
    "TurtleFilesRunOut": (
        {'process_open_fds{job="turtlemq"}': "900x90", 'process_max_fds{job="turtlemq"}': "1000x90"},
        {'process_open_fds{job="turtlemq"}': "700x90", 'process_max_fds{job="turtlemq"}': "1000x90"},
    ),
    "TurtleCopiesMissing": (
        {"turtlemq_isr": "2x90", "turtlemq_replicas": "3x90"},
        {"turtlemq_isr": "3x90", "turtlemq_replicas": "3x90"},
    ),
    "TurtleBytesRot": ({"turtlemq_healed_files_total": "0+1x90"}, {"turtlemq_healed_files_total": "5x90"}),
    "TurtleClockWrong": ({"turtlemq_clock_skew_seconds": "-0.6x90"}, {"turtlemq_clock_skew_seconds": "-0.4x90"}),
    "TurtleCopyBehind": ({"turtlemq_replica_lag_seconds": "2x90"}, {"turtlemq_replica_lag_seconds": "0.5x90"}),
    "TurtleNoLeader": (
        {'turtlemq_leader_known{instance="a"}': NEVER, 'turtlemq_leader_known{instance="b"}': NEVER},
        {'turtlemq_leader_known{instance="a"}': NEVER, 'turtlemq_leader_known{instance="b"}': "1x90"},
    ),
    "TurtleNameServerDown": ({"turtlemq_name_server_up": NEVER}, {"turtlemq_name_server_up": "1x90"}),
    "TurtleCopiesDiffer": ({"turtlemq_copies_differ": "1x90"}, {"turtlemq_copies_differ": NEVER}),
}


def _story(alert: str, series: dict[str, str], fires: bool) -> dict[str, Any]:
    """A unit test as promtool runs it: how many alerts of this name fire after an hour and a quarter."""
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {
        "name": f"{alert}: {fires}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "75m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}],
    }


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == CASES.keys()
    stories = [_story(alert, pair[i], fires=not i) for alert, pair in CASES.items() for i in range(2)]
    file = tmp_path / "stories.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": stories}))
    run(program("promtool"), "test", "rules", file)
    stories[0]["promql_expr_test"][0]["exp_samples"][0]["value"] = 0
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": stories}))
    with pytest.raises(AssertionError, match="TurtleDown"):
        run(program("promtool"), "test", "rules", file)


def test_promtool_accepts_the_configuration() -> None:
    assert "8 rules found" in run(program("promtool"), "check", "config", CONFIG)


# The dashboard


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return loaded


def queries() -> list[tuple[str, str]]:
    """Title of the panel and query, with every variable of Grafana replaced."""
    values = {"$job": "turtlemq", "$instance": ".*", "$topic": ".*", "$__rate_interval": "1m"}
    out = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            for name, value in values.items():
                text = text.replace(name, value)
            assert "$" not in text, text
            out.append((panel["title"], text))
    return out


def test_panels_of_the_dashboard_have_places_ids_and_units() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert [target["refId"] for target in panel.get("targets", [])] == list("ABCDEF")[: len(panel.get("targets", []))]


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """A Prometheus with our configuration, that scrapes a server each second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RECORDED), str(ALERTS)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("w") as log:
        started = subprocess.Popen(
            [program("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            started.terminate()
            started.wait(30)


def ask(url: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def until_known(url: str, query: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if ask(url, query):
                return
        except OSError:
            pass  # it starts
        time.sleep(0.2)
    raise AssertionError(query)


@pytest.mark.slow
def test_a_real_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    program("prometheus")
    with running(tmp_path / "data") as server, prometheus(server, tmp_path) as url:
        server.put("orders", {"id": "a", "body": 1, "delay": 0.2}, {"id": "b", "body": 2, "delay": 3600}, {"id": "c", "body": 3})
        for message in server.fetch("orders", wait=5):
            server.ack("orders", message["id"])
        server.put("orders", {"id": "d", "body": "ready, and not fetched"})
        server.call("GET", "/v1/topics/none")
        until_known(url, "rate(turtlemq_rejected_total[1m]) and on () turtlemq_oldest_ready_seconds")
        empty = {(title, query) for title, query in queries() if not ask(url, query)}
        rules = [rule["record"] for rule in yaml.safe_load(RECORDED.read_text())["groups"][0]["rules"]]
        until_known(url, rules[0])
        missing = [name for name in rules if not ask(url, name)]
        firing = ask(url, 'ALERTS{alertstate="firing"}')
    names = re.compile(r"turtlemq_[a-z_]+?(?=_bucket|\b)")
    assert {title for title, query in empty if not set(names.findall(query)) & CLUSTER_METRICS} == set()
    assert len(empty) < 14
    assert set(missing) <= {"instance:turtlemq_errors:ratio5m"}, "only errors may be missing: there need not be one"
    assert firing == []
