"""Operators at work on a real cluster: the verbs of `turtlemq cluster` against three replica processes and a real etcd."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harness.cluster_process import FAR, eventually, put
from tests.harness.etcd_process import MISSING, free_port, is_installed, running_etcd
from tests.harness.replica_nodes import SECRET, Cluster, Node, cluster_of
from tests.harness.server_process import PROGRAM, Server, environment, running
from turtlemq.cli.verbs import command_line
from turtlemq.replica.cluster_state import Want, decode

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, endpoint: str) -> Iterator[Cluster]:
    with cluster_of(tmp_path, endpoint, "abc") as found:
        found.start()
        found.leader()
        found.until_in_sync()
        yield found


def run(*args: str, code: int | None = 0) -> str:
    found = CliRunner().invoke(command_line("cluster"), ["cluster", *args], env={"COLUMNS": "200"})
    assert code is None or found.exit_code == code, (args, found.exit_code, found.output, found.exception)
    return found.output


def url(node: Node) -> tuple[str, str]:
    return "--url", f"http://127.0.0.1:{node.port}"


def etcd(cluster: Cluster) -> tuple[str, ...]:
    return "--etcd", cluster.endpoint, "--name", cluster.name


def gone(cluster: Cluster, *names: str) -> None:
    """Kill nodes, as a machine that is lost: its supervisor's key ends with its lease."""
    for name in names:
        cluster.nodes[name].kill()
        cluster.do(lambda server, name=name: server.delete(cluster.keys.node(name)))  # type: ignore[misc]


def status(cluster: Cluster, node: Node) -> Any:
    return json.loads(run("status", "--json", *url(node)))


def test_handover_and_drain_move_the_leader(cluster: Cluster) -> None:
    first = cluster.leader()
    put(first.server, 50, "m")
    others = [node for node in cluster.nodes.values() if node is not first]
    shown = run("status", "--check", *url(others[0]))  # a standby tells it as well
    assert f"cluster {cluster.name}: 1 shard, 3 replicas" in shown
    assert shown.count("in sync") >= 2
    told = status(cluster, others[1])
    assert {copy["state"] for copy in told["status"]["0"]["copies"]} == {"leads", "in sync"}
    assert {node["role"] for node in told["replicas"].values()} == {"leader", "standby"}
    assert all(abs(copy["clock_skew_ms"] or 0) < 1_000 for copy in told["status"]["0"]["copies"])
    assert "leads shard 0 already" in run("handover", "0", first.name, *url(first), code=1)
    assert "UNKNOWN_NODE" in run("handover", "0", "z", *url(first), code=1)
    assert "UNKNOWN_SHARD" in run("handover", "5", others[0].name, *url(first), code=1)
    # asked of a node that does not lead, which forwards it
    assert run("handover", "0", others[0].name, *url(others[1])) == f"{others[0].name} leads shard 0\n"
    second = cluster.leader()
    assert second is others[0]
    assert second.server.call("GET", "/v1/topics/t/messages/m49").status == 200
    cluster.until_in_sync()
    assert "UNKNOWN_NODE" in run("drain", "z", *url(second), code=1)
    assert run("drain", second.name, *url(others[1])).startswith(f"{second.name} drained")
    third = cluster.leader(other_than=second.name)
    assert json.loads(run("drain", second.name, "--json", *url(third)))["outcome"] == "drained"
    cluster.until_in_sync()
    assert f"undrain {second.name}" in run("handover", "0", second.name, *url(third), code=1)
    assert status(cluster, third)["nodes"][second.name]["drain"] is True
    assert run("undrain", second.name, *url(third)) == f"{second.name} may lead\n"
    assert "CONFLICT" not in run("handover", "0", second.name, *url(third))
    assert cluster.leader().name == second.name


def test_a_lost_node_is_removed(cluster: Cluster) -> None:
    leader = cluster.leader()
    lost, kept = (name for name in cluster.nodes if name != leader.name)
    assert f"drain {leader.name}" in run("remove", leader.name, "--yes", *etcd(cluster), code=1)
    gone(cluster, lost)
    eventually(lambda: lost not in cluster.in_sync())
    assert "NOT_IN_SYNC" in run("handover", "0", lost, *url(leader), code=1)
    shown = run("status", "--check", *url(leader), code=1)
    assert "2 of 3 copies are in sync" in shown
    assert f"node {lost} should have a copy of shard 0" in shown
    assert run("remove", lost, "--yes", *etcd(cluster)) == f"{lost} removed\n"
    want = cluster.value(cluster.keys.want(0))
    assert want is not None
    assert lost not in decode("want", want, Want).nodes
    put(leader.server, 10, "after")
    # a node that runs and is in sync goes, too: its copy no longer counts
    run("remove", kept, "--yes", *etcd(cluster))
    eventually(lambda: cluster.in_sync() == [leader.name])
    eventually(lambda: cluster.state is not None and set(cluster.state.nodes.values()) == {leader.name})
    put(leader.server, 10, "alone")
    audit = run("audit", *etcd(cluster))
    assert f"node: {lost}" in audit
    assert f"node: {kept}" in audit


def test_force_leader_after_all_copies_in_sync_are_lost(cluster: Cluster) -> None:
    leader = cluster.leader()
    other, third = (name for name in cluster.nodes if name != leader.name)
    put(leader.server, 50, "all")
    assert "has a leader" in run("force-leader", "0", third, "--i-accept-loss", *etcd(cluster), code=1)
    cluster.nodes[third].kill()
    eventually(lambda: third not in cluster.in_sync())
    put(leader.server, 50, "two")
    gone(cluster, leader.name, other)
    eventually(lambda: cluster.lead is None)
    cluster.start(third)
    eventually(lambda: "does not answer" not in run("force-leader", "0", third, *etcd(cluster), code=None))  # it has started
    time.sleep(1)
    assert cluster.lead is None, "a copy that was not in sync must not lead by itself"
    told = run("force-leader", "0", third, *etcd(cluster), code=2)
    assert "In sync were the copies of" in told
    assert "nothing was done" in told
    assert cluster.lead is None
    assert f"{third} leads shard 0" in run("force-leader", "0", third, "--i-accept-loss", *etcd(cluster))
    new = cluster.leader()
    assert new.name == third
    assert new.server.call("GET", "/v1/topics/t/messages/all49").status == 200
    put(new.server, 10, "new")
    assert cluster.in_sync() == [third]
    assert "In sync were the copies of" in run("audit", *etcd(cluster))
    # the leader of before comes back: it is no member, and gets the files of the new one
    cluster.start(leader.name)
    cluster.until_in_sync(leader.name, third)
    assert cluster.leader().name == third
    assert new.server.call("GET", "/v1/topics/t/messages/two1").status == 404
    eventually(lambda: json.loads(run("verify", "0", "--json", *url(new), code=None))["copies"][0]["state"] == "equal")


def test_offsets_are_noted_for_tools(cluster: Cluster) -> None:
    leader = cluster.leader()
    leader.server.put("orders", {"id": "one", "body": 1}, {"id": "two", "body": 2}, {"id": "far", "body": 3, "due_ms": FAR})
    got = [message["id"] for message in leader.server.fetch("orders", wait=5, max=2)]
    leader.server.ack("orders", *got)
    eventually(
        lambda: json.loads(run("offsets", "--json", *etcd(cluster)))["shards"].get("0", {}).get("topics", {}).get("orders")
    )
    told = json.loads(run("offsets", "--json", *etcd(cluster)))["shards"]["0"]
    assert set(told["topics"]["orders"]) == {"default"}
    assert told["lsn"] > 0
    assert "orders" in run("offsets", *etcd(cluster))


def test_a_mistake_in_the_name_server_ends_no_leader(cluster: Cluster) -> None:
    leader = cluster.leader()
    for key in (cluster.keys.want(0), cluster.keys.seen(0), cluster.keys.node("a"), cluster.keys.drain("b")):
        cluster.put(key, b'{"nodes": []}')
    time.sleep(1)
    put(leader.server, 10, "m")
    assert leader.process is not None
    assert leader.process.poll() is None
    assert leader.events("name_server_unreadable")
    assert cluster.leads(leader.name)
    cluster.want()
    put(leader.server, 10, "n")


def test_force_repairs_a_cluster_whose_etcd_was_restored(tmp_path: Path) -> None:
    """Etcd knows an older epoch than the replicas: all of them stop, until a forced epoch is above theirs."""
    port = free_port()
    with running_etcd(tmp_path, port=port) as endpoint, cluster_of(tmp_path, endpoint) as cluster:
        cluster.start()
        first = cluster.leader()
        cluster.until_in_sync()
    shutil.copytree(tmp_path / "etcd", tmp_path / "backup")
    with running_etcd(tmp_path, port=port):
        cluster.start()
        put(cluster.leader().server, 20, "m")
        cluster.until_in_sync()
        to = "b" if cluster.leads("a") else "a"
        run("handover", "0", to, *url(cluster.leader()))
        put(cluster.leader().server, 20, "n")
        cluster.until_in_sync()
        cluster.end()
    shutil.rmtree(tmp_path / "etcd")
    shutil.move(tmp_path / "backup", tmp_path / "etcd")
    try:
        with running_etcd(tmp_path, port=port):
            cluster.start()
            eventually(lambda: all(node.events("name_server_went_back") for node in cluster.nodes.values()))
            assert cluster.lead is None
            assert "restored" in run("status", *url(first))
            told = run("force-leader", "0", to, "--i-accept-loss", *etcd(cluster))
            assert "In sync were the copies of" in told
            assert "restart all nodes" in told
            cluster.end()
            cluster.start()
            eventually(lambda: cluster.leads(to))
            put(cluster.leader().server, 5, "o")
            assert cluster.leader().server.call("GET", "/v1/topics/t/messages/n19").status == 200
            cluster.until_in_sync()
            cluster.end()
    finally:
        cluster.end()


def configured(home: Path, name: str, cluster: str, endpoint: str) -> int:
    """Write the configuration of a node as it is installed. Returns its port."""
    port, peer = free_port(), free_port()
    home.mkdir()
    (home / "secret").write_text(SECRET)
    table = {"name": cluster, "node": name, "etcd": [endpoint], "peer": f"127.0.0.1:{peer}", "secret_file": str(home / "secret")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**table, "heartbeat_ms": 200, "lease_s": 2}.items()]
    (home / "node.toml").write_text("\n".join([f'data = "{home / "data"}"', f"port = {port}", "[cluster]", *lines]) + "\n")
    return port


@contextmanager
def supervised(home: Path, port: int) -> Iterator[Server]:
    """A node: its supervisor, and the replica process below."""
    command = [*PROGRAM, "serve", "--config", str(home / "node.toml")]
    with (home / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment(), cwd=home)
    try:
        yield Server(process, port, home / "data")
    finally:
        process.terminate()
        process.wait(30)


def has(server: Server, id_: str) -> bool:
    with suppress(OSError):
        return server.call("GET", f"/v1/topics/t/messages/{id_}").status == 200
    return False


def test_a_single_node_becomes_a_cluster(tmp_path: Path, endpoint: str) -> None:
    with running(tmp_path / "data") as single:
        put(single, 20, "old")
        ports = {name: configured(tmp_path / name, name, "grown", endpoint) for name in "ab"}
        words = "init", "--replicas", "2", "--from", str(tmp_path / "data"), "--config", str(tmp_path / "a" / "node.toml")
        assert "is in use by process" in run(*words, code=1)
    run(*words)
    with supervised(tmp_path / "b", ports["b"]) as second, supervised(tmp_path / "a", ports["a"]) as first:
        eventually(lambda: has(first, "old19"))
        put(first, 5, "new")
        eventually(lambda: has(second, "new4"))  # forwarded
        where = "--config", str(tmp_path / "b" / "node.toml")
        eventually(lambda: is_healthy(where))
        shown = run("status", *where)
        assert "1 shard, 2 replicas, min_isr 1" in shown
        assert json.loads(run("verify", "0", "--json", "--url", first.url))["copies"][0]["state"] == "equal"


def is_healthy(where: tuple[str, ...]) -> bool:
    return CliRunner().invoke(command_line("cluster"), ["cluster", "status", "--check", *where]).exit_code == 0
