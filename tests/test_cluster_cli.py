"""The verbs of `turtlemq cluster` that change keys of the name server: a real etcd, and nodes that only tell their state."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from turtlemq.cli import cluster as verbs
from turtlemq.cli.verbs import command_line
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument, Locked
from turtlemq.model import Message
from turtlemq.replica import first_copy, replica_file
from turtlemq.replica.cluster_state import Audit, Keys, Lead, Node, ShardState, Want, decode, encode, offsets
from turtlemq.replica.etcd import Etcd
from turtlemq.storage.door import Door

_numbers = count()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


class Cluster:
    """A cluster of keys alone."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.name = endpoint, f"c{next(_numbers)}"
        self.keys = Keys(self.name)

    def __call__(self, *args: str, code: int = 0) -> str:
        given = [] if "--config" in args or args[0] in ("handover", "drain", "undrain", "verify") else self.where
        return run("cluster", *args, *given, code=code)

    @property
    def where(self) -> list[str]:
        return ["--etcd", self.endpoint, "--name", self.name]

    def json(self, *args: str, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code).splitlines()[-1])

    def put(self, key: str, value: Any) -> None:
        self.do(lambda etcd: etcd.put(key, value if isinstance(value, bytes) else encode(value)))

    def get(self, key: str, kind: type[Any]) -> Any:
        (found,) = self.do(lambda etcd: etcd.get(key)).keys
        return decode(key, found.value, kind)

    def do(self, work: Any) -> Any:
        async def connected() -> Any:
            async with Etcd([self.endpoint]) as etcd:
                return await work(etcd)

        return asyncio.run(connected())

    def shard(self, *isr: str, leads: str | None, **nodes: str) -> None:
        """Write `state`, `want` and `lead`: replicas are named `ra` on node `a`."""
        known = {f"r{name}": name for name in nodes}
        members = tuple(f"r{name}" for name in isr)
        self.put(self.keys.state(0), ShardState(epoch=4, leader=members[0], isr=members, nodes=known, nonce="n"))
        self.put(self.keys.want(0), Want(nodes=tuple(nodes)))
        for name, url in nodes.items():
            if url:
                self.put(self.keys.node(name), Node(url=url, peer="h:1", version="1.2", free_bytes=5 << 30))
        if leads is not None:
            lead = Lead(epoch=4, replica=f"r{leads}", node=leads, url=nodes[leads], peer="h:1")
            self.put(self.keys.lead(0), lead)


def run(*args: str, code: int = 0) -> str:
    found = CliRunner().invoke(command_line(args[0]), list(args), env={"COLUMNS": "200"})
    assert found.exit_code == code, (args, found.exit_code, found.output, found.exception)
    return found.output


@pytest.fixture
def cluster(endpoint: str) -> Cluster:
    return Cluster(endpoint)


@contextmanager
def telling(answers: dict[str, Any]) -> Iterator[str]:
    """A server that answers these paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(f"{self.command} {self.path}", answers.get(self.path))
            body = json.dumps(found or {"error": {"code": "NOT_FOUND", "message": "no"}}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def replica(name: str, *, complete: bool = True, lsn: int = 90, role: str = "standby", why: str = "") -> dict[str, Any]:
    fixed = {"cluster": "c", "node": name, "shard": 0, "healthy": True, "epoch": 4, "state": "attach"}
    return fixed | {"replica": f"r{name}", "complete": complete, "lsn": lsn, "role": role, "why": why}


# Make a cluster


@pytest.mark.slow
def test_init_writes_the_shape_once(cluster: Cluster) -> None:
    assert cluster("init", "--replicas", "3").startswith(f"cluster {cluster.name}: 1 shard, 3 replicas, min_isr 2\n")
    again = cluster("init", "--replicas", "3", code=1)
    assert "exists already: 1 shard, 3 replicas, min_isr 2. Nothing was done." in again
    assert "3 replicas and min_isr 2" in cluster("init", "--replicas", "2", code=1)
    other = Cluster(cluster.endpoint)
    assert other.json("init", "--replicas", "2", "--min-isr", "2")["min_isr"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ("--replicas 2 --min-isr 3", 2, "min_isr is 1 to 2, the number of replicas, not 3"),
        ("--replicas 0", 2, "1 to 7 replicas"),
        ("--replicas 99", 2, "1 to 7 replicas"),
        ("--replicas 3 --shards 400", 2, "1 to 100 shards, not 400"),
        ("--replicas 3 --from /nowhere", 2, "--from needs --config"),
        ("", 2, "--replicas"),
    ],
)
def test_init_refuses_a_wrong_shape(cluster: Cluster, words: str, code: int, why: str) -> None:
    assert why in cluster("init", *words.split(), code=code)
    assert cluster.do(lambda etcd: etcd.get(cluster.keys.prefix, prefix=True)).keys == []


@pytest.mark.slow
def test_the_name_server_must_be_told_and_answer(cluster: Cluster, tmp_path: Path) -> None:
    assert "Give --config FILE, or --etcd and --name" in run("cluster", "offsets", code=2)
    assert "go together" in run("cluster", "offsets", "--name", "x", code=2)
    assert "go together" in run("cluster", "offsets", "--etcd", cluster.endpoint, code=2)
    assert "is no address" in run("cluster", "offsets", "--etcd", "host", "--name", "x", code=2)
    assert "A-Z a-z 0-9" in run("cluster", "offsets", "--etcd", cluster.endpoint, "--name", "a/b", code=2)
    assert "no endpoint of etcd answers" in run("cluster", "offsets", "--etcd", "http://127.0.0.1:9", "--name", "x", code=1)
    file = tmp_path / "node.toml"
    file.write_text("port = 1\n")
    assert "no table [cluster]" in run("cluster", "offsets", "--config", str(file), code=2)


def configured(cluster: Cluster, root: Path) -> Path:
    (root / "secret").write_text("a secret of this cluster")
    file = root / "node.toml"
    table = [f'name = "{cluster.name}"', 'node = "a"', f'etcd = ["{cluster.endpoint}"]', 'peer = "127.0.0.1:1"']
    lines = [f'data = "{root / "node"}"', "[cluster]", *table, f'secret_file = "{root / "secret"}"']
    file.write_text("\n".join(lines) + "\n")
    return file


def single_node(data: Path) -> None:
    engine = Engine.open(data)
    engine.submit("orders", [Message(b"1", due_ms=4 * 10**12, id="m1")], 1)
    engine.close()


def has_message(data: Path) -> bool:
    engine = Engine.open(data)
    try:
        return engine.get("orders", "m1") is not None
    finally:
        engine.close()


@pytest.mark.slow
def test_init_takes_the_folder_of_a_single_node(cluster: Cluster, tmp_path: Path) -> None:
    single_node(tmp_path / "data")
    words = ["init", "--replicas", "2", "--from", str(tmp_path / "data"), "--config", str(configured(cluster, tmp_path))]
    assert cluster.json(*words)["first"] == "a"
    copy = tmp_path / "node" / "shard" / "00"
    facts = replica_file.read(Door(), copy)
    assert facts is not None
    assert (facts.cluster, facts.shard, facts.complete, facts.epoch) == (cluster.name, 0, True, 0)
    assert cluster.get(cluster.keys.want(0), Want) == Want(nodes=("a",))
    assert has_message(copy)
    single_node(tmp_path / "data")
    assert "exists already" in cluster(*words, code=1)
    assert (tmp_path / "data" / "topic").exists()


def test_the_folder_of_a_running_server_is_not_moved(tmp_path: Path) -> None:
    data, door = tmp_path / "data", Door()
    single_node(data)
    engine = Engine.open(data)
    with pytest.raises(Locked):
        first_copy.adopt(Door(), data, tmp_path / "node", "prod")
    engine.close()
    assert (data / "topic" / "orders").exists()
    with pytest.raises(InvalidArgument, match="no data folder of a single node"):
        first_copy.adopt(door, tmp_path / "nothing", tmp_path / "node", "prod")
    copy = first_copy.adopt(door, data, data, "prod")  # into its own folder
    assert copy == data / "shard" / "00"
    assert sorted(door.names(data)) == ["LOCK", "shard"]
    single_node(tmp_path / "other")
    with pytest.raises(InvalidArgument, match="holds a copy already"):
        first_copy.adopt(door, tmp_path / "other", data, "prod")


def test_an_interrupted_move_is_finished(tmp_path: Path) -> None:
    data, node = tmp_path / "data", tmp_path / "node"
    single_node(data)
    moving = node / "shard" / "00.from"
    moving.mkdir(parents=True)
    (data / "topic").rename(moving / "topic")
    copy = first_copy.adopt(Door(), data, node, "prod")
    assert has_message(copy)
    (node / "shard" / "00").rename(moving)  # all but the last step
    single_node(data)
    with pytest.raises(InvalidArgument, match="both exist"):
        first_copy.adopt(Door(), data, node, "prod")


# Look at it


@pytest.mark.slow
def test_status_tells_nodes_that_do_not_answer(cluster: Cluster) -> None:
    assert f"etcd holds no cluster '{cluster.name}'" in cluster("status", code=1)
    cluster("init", "--replicas", "3")
    cluster("status", "--check", code=1)
    copy = {"replica": "rb", "node": "b", "state": "in sync", "in_sync": True, "lsn": 90, "lag_bytes": 2048, "lag_s": 0.25}
    copies = [copy | {"clock_skew_ms": 7, "copying": None}]
    copies += [copy | {"replica": "rc", "clock_skew_ms": None, "copying": {"bytes_done": 1024, "bytes_total": 4096}}]
    copies += [copy | {"replica": "ra", "node": "a", "state": "leads", "clock_skew_ms": None, "copying": None}]
    told = {
        "/v1/cluster/replica": replica("a", role="leader"),
        "/v1/cluster/shards/0": {"lsn": 99, "covered_lsn": 90, "copies": copies},
    }
    with telling(told) as url:
        cluster.shard("a", "b", leads="a", a=url, b="http://127.0.0.1:9", c="")
        shown = cluster("status")
        for part in (
            "1 shard, 3 replicas, min_isr 2",
            "+7 ms",
            "250 ms",
            "2.0 KiB",
            "1.0 KiB of 4.0 KiB",
            "2 of 3 copies are in sync (a, b)",
            "node c should have a copy of shard 0, and its supervisor is gone",
            "node b does not answer: no answer from http://127.0.0.1:9",
        ):
            assert part in shown
        plain = cluster.json("status")
        assert plain["status"]["0"]["covered_lsn"] == 90
        assert "no answer" in plain["replicas"]["b"]["error"]
        cluster("status", "--check", code=1)
        cluster.shard("a", "b", "c", leads="a", a=url, b=url, c=url)
        cluster("status", "--check")
        copies[0]["state"] = "away"  # etcd does not know yet
        cluster("status", "--check", code=1)


@pytest.mark.slow
def test_offsets_and_audits_are_listed(cluster: Cluster) -> None:
    assert "no leader has written any yet" in cluster("offsets")
    assert cluster("audit") == "none\n"
    cluster.put(cluster.keys.seen(0), offsets(77, {"orders": {"default": 1234}}, 1_790_000_000_000))
    shown = cluster("offsets")
    assert "1,234" in shown
    assert "at record 77" in shown
    assert cluster.json("offsets")["shards"]["0"]["topics"] == {"orders": {"default": 1234}}
    cluster.put(cluster.keys.audit(5, 0), Audit(at_ms=5, node="host", user="me\x1b", action="remove", details={"node": "c"}))
    assert "node: c" in cluster("audit")
    assert "\x1b" not in cluster("audit")
    assert cluster.json("audit")["action"] == "remove"


# Act on it


@pytest.mark.slow
def test_remove_takes_a_node_out_of_the_wanted_ones(cluster: Cluster) -> None:
    cluster("init", "--replicas", "3", "--min-isr", "1")
    cluster.shard("a", "b", leads="a", a="http://h:1", b="http://h:2", c="")
    assert "Say --yes" in cluster("remove", "c", code=2)
    assert "drain a" in cluster("remove", "a", "--yes", code=1)
    assert "knows no node 'z'" in cluster("remove", "z", "--yes", code=1)
    assert cluster("remove", "c", "--yes") == "c removed\n"
    assert cluster.json("remove", "b", "--yes") == {"node": "b", "outcome": "removed", "alive": True}
    assert cluster.get(cluster.keys.want(0), Want).nodes == ("a",)
    assert cluster.get(cluster.keys.drain("b"), Audit).action == "remove"
    assert [line.rpartition("  ")[2] for line in cluster("audit").splitlines()] == ["node: c", "node: b"]


@pytest.mark.slow
@pytest.mark.parametrize(("ahead_ms", "order"), [(30_000, ["b", "c"]), (3_600_000, ["c", "b"])])
def test_a_note_stands_behind_those_before_it_whatever_the_clocks_say(cluster: Cluster, ahead_ms: int, order: list[str]) -> None:
    """The note about b was written by a machine whose clock is ahead; a clock that is an hour ahead is not followed."""
    cluster("init", "--replicas", "3", "--min-isr", "1")
    cluster.shard("a", leads="a", a="http://h:1", b="", c="")
    noted_ms = time.time_ns() // 1_000_000 + ahead_ms
    before = Audit(at_ms=noted_ms, node="fast", user="me", action="remove", details={"node": "b"})
    cluster.put(cluster.keys.audit(noted_ms, 0), before)
    said = cluster("remove", "c", "--yes")
    assert ("was not written by the clock of this machine" in said) == (order[0] == "c")
    assert [line.rpartition("  ")[2] for line in cluster("audit").splitlines()] == [f"node: {name}" for name in order]


@pytest.mark.slow
def test_force_leader_says_the_loss_and_asks_for_consent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LEAD_S", 0.5)
    cluster("init", "--replicas", "3")
    cluster.put(cluster.keys.seen(0), offsets(120, {}, 1))
    with telling({"/v1/cluster/replica": replica("b")}) as b, telling({"/v1/cluster/replica": replica("c", complete=False)}) as c:
        cluster.shard("a", leads=None, a="", b=b, c=c)
        told = cluster("force-leader", "0", "b", code=2)
        for part in ("In sync were the copies of a", "At least 30 records are missing", "nothing was done"):
            assert part in told
        assert cluster.get(cluster.keys.state(0), ShardState).epoch == 4
        assert "not complete" in cluster("force-leader", "0", "c", "--i-accept-loss", code=1)
        assert "does not answer" in cluster("force-leader", "0", "a", "--i-accept-loss", code=1)
        assert "no shard 7" in cluster("force-leader", "7", "b", "--i-accept-loss", code=1)
        assert "no node 'z'" in cluster("force-leader", "0", "z", "--i-accept-loss", code=1)
        assert "does not lead after" in cluster("force-leader", "0", "b", "--i-accept-loss", code=1)
        state = cluster.get(cluster.keys.state(0), ShardState)
        assert (state.epoch, state.leader, state.isr, state.why) == (5, "rb", ("rb",), "forced")
        assert "At least 30 records" in cluster("audit")
        cluster.put(cluster.keys.lead(0), Lead(epoch=6, replica="rb", node="b", url=b, peer="h:1"))
        assert "has a leader, node b" in cluster("force-leader", "0", "c", "--i-accept-loss", code=1)


def test_verify_waits_and_names_what_differs() -> None:
    path = "/v1/cluster/shards/0/verify"
    file = {"path": "topic/t/delay_0000000000.bson", "ranges": [[0, 4096]], "why": "its bytes differ"}
    copies: list[Any] = [{"node": "b", "replica": "rb", "state": "equal", "why": "", "files": []}]
    running = {"shard": 0, "state": "running", "bytes": 1, "bytes_total": 2}
    done = {"state": "done", "files": 3, "bytes": 2, "last_lsn": 7, "why": "", "copies": copies}
    with telling({f"POST {path}": running, f"GET {path}": done}) as url:
        assert "equal" in run("cluster", "verify", "0", "--url", url)
    copies.append({"node": "c", "replica": "rc", "state": "differs", "why": "", "files": [file]})
    with telling({f"POST {path}": done}) as url:
        shown = run("cluster", "verify", "0", "--url", url, code=1)
        assert "c: topic/t/delay_0000000000.bson: its bytes differ (0 to 4,096)" in shown
        assert json.loads(run("cluster", "verify", "0", "--url", url, "--json", code=1))["last_lsn"] == 7
    with telling({f"POST {path}": done | {"state": "failed", "why": "the leader is gone"}}) as url:
        assert "the leader is gone" in run("cluster", "verify", "0", "--url", url, code=1)


def test_verbs_for_a_server_pass_its_refusals_on() -> None:
    refusal = "NOT_FOUND: no"
    leaders = [{"shard": 0, "node": "b"}]
    answers = {
        "POST /v1/cluster/nodes/a/drain": {"outcome": "drained", "node": "a", "leads": [0]},
        "/v1/cluster": {"leaders": leaders},
    }
    with telling(answers) as url:
        assert run("cluster", "drain", "a", "--url", url) == "a drained\n"
        leaders[0]["node"] = "a"
        told = run("cluster", "drain", "a", "--wait", "0.3", "--url", url, code=1)
        assert told == "a drained; no other node leads shard 0 yet: is one in sync?\n"
        assert refusal in run("cluster", "undrain", "a", "--url", url, code=1)
        assert refusal in run("cluster", "handover", "0", "b", "--url", url, code=1)
        run("cluster", "handover", "-1", "b", "--url", url, code=2)
        run("cluster", "handover", "zero", "b", "--url", url, code=2)


def test_status_is_shown_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    single = {"cluster": "", "revision": 0, "shards": 1, "replicas": 1, "min_isr": 1, "nodes": {}, "leaders": [], "problems": []}
    pauses = iter([None, KeyboardInterrupt])

    def sleep(_: float) -> None:
        if (error := next(pauses)) is not None:
            raise error

    monkeypatch.setattr("turtlemq.cli.cluster.time.sleep", sleep)
    with telling({"/v1/cluster": single}) as url:
        shown = run("cluster", "status", "--watch", "--url", url)
    assert shown.count("this is a single node") == 2
