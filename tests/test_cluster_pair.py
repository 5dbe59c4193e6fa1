"""A leader and a standby as real processes: copies are equal, answers wait for them, and bad starts are refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.certificates import certificate
from tests.harness.cluster_process import CLUSTER_METRICS, FAR, STANDBY_METRICS, eventually, everything, put
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import Cluster, Node, cluster_of, pair_of
from tests.harness.server_process import Server, environment, run, running
from turtlemq.engine import Engine

needs_etcd = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> Iterator[tuple[Cluster, Node, Node]]:
    """Tests leave both as they were, in sync."""
    with pair_of(tmp_path_factory.mktemp("pair"), endpoint) as found:
        yield found


def has_sealed(server: Server) -> bool:
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    return any(line.startswith("turtlemq_seals_total") and not line.endswith(" 0") for line in lines)


def shown(server: Server) -> str:
    return server.call("GET", "/metrics").data.decode()


def test_copies_are_equal_after_all_kinds_of_requests(pair: tuple[Cluster, Node, Node]) -> None:
    cluster, first, standby = pair
    leader = first.server
    everything(leader)
    assert put(leader, 1, "last")["copies"] == 2
    assert (
        set(re.findall(r"^# TYPE (turtlemq_\w+)", shown(leader), re.MULTILINE)) & CLUSTER_METRICS
        == CLUSTER_METRICS - STANDBY_METRICS
    )
    assert 'turtlemq_role{role="leader"} 1' in shown(leader)
    assert 'turtlemq_role{role="standby"} 1' in shown(standby.server)
    counts = re.findall(r"^(turtlemq_\w+)_count ([1-9]\d*)$", shown(standby.server), re.MULTILINE)
    assert {name for name, _ in counts} >= STANDBY_METRICS
    export = leader.call("GET", "/v1/topics/other/dead/export").data
    assert export.count(b"\n") == 45
    refused = standby.server.call("POST", "/v1/topics/t/fetch", {}, headers={"X-Turtlemq-Direct": "1"})
    assert (refused.status, refused.code) == (421, "NOT_LEADER")
    cluster.until_equal()
    assert first.facts.replica != standby.facts.replica
    assert (first.facts.epoch, standby.facts.epoch, standby.facts.complete) == (1, 1, True)


def test_answers_wait_for_a_stopped_standby_and_go_on_with_it(pair: tuple[Cluster, Node, Node]) -> None:
    _, first, standby = pair
    leader = first.server
    put(leader, 10, "wait", "w", delay=0)
    assert len(leader.fetch("w", max=5, wait=5)) == 5
    standby.signal(signal.SIGSTOP)
    try:
        budget = {"X-Turtlemq-Budget-Ms": "300"}
        refused = leader.call("POST", "/v1/topics/w/messages", {"id": "x", "body": 1, "due_ms": FAR}, headers=budget)
        assert (refused.status, refused.code) == (503, "NOT_REPLICATED")
        refused = leader.call("POST", "/v1/topics/w/fetch", {"max": 5}, headers=budget)  # its messages are given back
        assert (refused.status, refused.code) == (503, "NOT_REPLICATED")
        for path in ("/v1/topics", "/v1/topics/w", "/v1/topics/w/messages/x", "/v1/topics/w/messages/unknown"):
            assert leader.call("GET", path, headers=budget).code == "NOT_REPLICATED", path
        assert leader.call("GET", "/healthz").status == 200
        assert leader.call("GET", "/metrics").status == 200
    finally:
        standby.signal(signal.SIGCONT)
    again = leader.ok("POST", "/v1/topics/w/messages", {"id": "x", "body": 1, "due_ms": FAR})
    assert (again["duplicates"], again["copies"]) == (1, 2)
    assert len(leader.fetch("w", max=10, wait=5)) == 5


def test_a_standby_that_stopped_resumes(pair: tuple[Cluster, Node, Node]) -> None:
    cluster, first, standby = pair
    assert standby.stop() == 0
    eventually(lambda: cluster.in_sync() == [first.name])
    assert put(first.server, 100, "alone")["copies"] == 1
    cluster.start(standby.name)
    cluster.until_in_sync()
    assert put(first.server, 100, "both")["copies"] == 2
    assert "reconcile" not in standby.log


def test_a_second_process_on_one_folder_is_refused(pair: tuple[Cluster, Node, Node]) -> None:
    _, first, _ = pair
    flags = ["--data", str(first.home / "data"), "--port", "0", "--config", str(first.home / "turtle.toml"), "--replica", "0"]
    second = run("serve", *flags)
    assert second.returncode == 1
    assert "is in use by process" in second.stderr


def test_a_node_without_its_secret_does_not_start(pair: tuple[Cluster, Node, Node], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    text = (pair[1].home / "turtle.toml").read_text()
    (tmp_path / "turtle.toml").write_text(re.sub('secret_file = ".*"', f'secret_file = "{tmp_path / "secret"}"', text))
    flags = ["--data", str(tmp_path / "data"), "--port", "0", "--config", str(tmp_path / "turtle.toml"), "--replica", "0"]
    refused = run("serve", *flags)
    assert refused.returncode == 2
    assert "16 to 4096 make a secret" in refused.stderr.replace("\n", " ")
    assert not (tmp_path / "data" / "shard").exists()


def test_a_folder_of_another_cluster_is_not_served(tmp_path: Path, endpoint: str) -> None:
    with cluster_of(tmp_path, endpoint, "a") as cluster:
        cluster.start()
        cluster.leader().stop()
        other = Cluster(tmp_path, endpoint, "a", "other")
        other.start()
        assert other.nodes["a"].ended() == 1
        assert f"holds shard 0 of cluster '{cluster.name}'" in other.nodes["a"].log


def test_without_enough_copies_nothing_is_written(tmp_path: Path, endpoint: str) -> None:
    with cluster_of(tmp_path, endpoint, min_isr=2) as cluster:
        cluster.start("a")
        leader = cluster.leader()
        before = sorted(path.name for path in leader.data.rglob("*.bson"))
        refused = leader.server.call("POST", "/v1/topics/u/messages", {"body": 1})
        assert (refused.code, refused.headers["Retry-After"]) == ("NOT_ENOUGH_REPLICAS", "1")
        assert (refused.json["error"]["in_sync"], refused.json["error"]["min_isr"]) == (1, 2)
        assert sorted(path.name for path in leader.data.rglob("*.bson")) == before


def test_copies_travel_encrypted(tmp_path: Path, endpoint: str) -> None:
    cert, key = map(str, certificate(tmp_path))
    with pair_of(tmp_path, endpoint, tls_cert=cert, tls_key=key, tls_ca=cert) as (cluster, leader, standby):
        everything(leader.server)
        assert put(leader.server, 1, "last")["copies"] == 2
        cluster.until_equal()
        standby.stop()
        cluster.start(standby.name, tls_cert="", tls_key="", tls_ca="")
        eventually(lambda: standby.events("no_leader"))
        eventually(lambda: cluster.in_sync() == [leader.name])


def test_producers_wait_for_a_standby_that_is_far_behind(tmp_path: Path, endpoint: str) -> None:
    with pair_of(tmp_path, endpoint, acks="local", ring_bytes=16 << 20) as (cluster, first, standby):
        leader = first.server
        assert put(leader, 10, "b")["copies"] == 1
        standby.signal(signal.SIGSTOP)
        try:
            big = "x" * 1_000_000
            answers = [
                leader.call("POST", "/v1/topics/t/messages", {"id": f"m{n}", "body": big, "due_ms": FAR}) for n in range(25)
            ]
            assert (answers[7].status, answers[-1].status, answers[-1].code) == (201, 429, "OVERLOADED")
            assert leader.call("POST", "/v1/command", {"command": "add", "topic": "t", "body": 1}).json["success"] is False
        finally:
            standby.signal(signal.SIGCONT)
        eventually(lambda: leader.call("POST", "/v1/topics/t/messages", {"id": "last", "body": 1, "due_ms": FAR}).status == 201)
        cluster.until_equal()
        standby.kill()
        first.kill()
    engine = Engine.open(standby.data)
    assert engine.check() == []
    engine.close()


def test_a_single_node_loads_nothing_of_replication(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        answer = put(server, 3, "a")
        assert "copies" not in answer
        assert not (tmp_path / "data" / "REPLICA").exists()
    unwanted = ("turtlemq.replica.", "turtlemq.shard", "turtlemq.server.shards")
    program = f"import sys, turtlemq.server.run; print(*[name for name in sys.modules if name.startswith({unwanted!r})])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment())
    assert loaded.stdout.split() == ["turtlemq.replica.records"]


def test_a_request_without_a_cluster_waits_for_nothing(tmp_path: Path) -> None:
    """With every function of the output commit broken, a single node serves all the same."""
    spoiled = tmp_path / "sitecustomize.py"
    spoiled.write_text(
        "import turtlemq.server.output_commit as module\n"
        "def broken(*_): raise AssertionError('it was called')\n"
        "module.check_writable = module.confirm = module.wait = module.applies = broken\n"
    )
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    program = "import turtlemq.server.output_commit as module; print(module.confirm.__name__)"
    used = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(PYTHONPATH=path))
    assert used.stdout == "broken\n"
    with running(tmp_path / "data", PYTHONPATH=path) as server:
        everything(server)
