"""Replica processes with a real etcd: leaders are killed, stopped and replaced, and nothing that was answered is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import pytest

from tests.harness.cluster_process import FAR, eventually, everything, put
from tests.harness.etcd_process import MISSING, free_port, is_installed, running_etcd
from tests.harness.replica_nodes import Cluster, Node, cluster_of, pair_of

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
DIRECT = {"X-Turtlemq-Direct": "1", "X-Turtlemq-Budget-Ms": "2000"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> Iterator[Cluster]:
    """Two nodes for many stories, each of which begins with both in sync."""
    with cluster_of(tmp_path_factory.mktemp("cluster"), endpoint) as found:
        yield found


class Clients:
    """Threads that put messages to the node that leads, each id again until it is answered."""

    def __init__(self, cluster: Cluster, prefix: str, count: int = 3) -> None:
        self.cluster, self.prefix, self.stop = cluster, prefix, False
        self.answered: dict[str, float] = {}  # by id: when
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        n = 0
        while not self.stop:
            for node in self.cluster.nodes.values():
                with suppress(OSError, HTTPException, AssertionError):
                    message = {"id": f"{self.prefix}{number}-{n}", "body": n, "due_ms": FAR}
                    if node.server.call("POST", "/v1/topics/t/messages", message, headers=DIRECT).status == 201:
                        self.answered[message["id"]] = time.monotonic()  # type: ignore[index]
                        n += 1

    def more(self, count: int = 20) -> None:
        """Wait for more answers."""
        wanted = len(self.answered) + count
        eventually(lambda: len(self.answered) >= wanted)

    def end(self) -> set[str]:
        self.stop = True
        for thread in self.threads:
            thread.join()
        return set(self.answered)

    def longest_pause_s(self) -> float:
        times = sorted(self.answered.values())
        return max(after - before for before, after in pairwise(times))


def stored(node: Node, ids: set[str]) -> set[str]:
    return {id_ for id_ in ids if node.server.call("GET", f"/v1/topics/t/messages/{id_}").status == 200}


def test_a_killed_leader_is_replaced_and_comes_back(cluster: Cluster) -> None:
    leader = cluster.healthy()
    before = cluster.state
    everything(leader.server)
    clients = Clients(cluster, "k")
    clients.more()
    leader.kill()
    new = cluster.leader(leader.name)
    clients.more()
    cluster.start(leader.name)
    cluster.until_in_sync()
    clients.more()
    answered = clients.end()
    assert stored(new, answered) == answered
    again = new.server.ok("POST", "/v1/topics/t/messages", {"messages": [{"id": id_, "body": 1} for id_ in sorted(answered)]})
    assert (again["duplicates"], again["copies"]) == (len(answered), 2)
    assert "event=reconcile_done" in leader.log
    cluster.until_equal(new.name, leader.name)
    after = cluster.state
    assert before is not None
    assert after is not None
    assert after.epoch == before.epoch + 1
    metrics = new.server.call("GET", "/metrics").data.decode()
    assert re.search(r"^turtlemq_elections_total 1", metrics, re.MULTILINE)
    assert re.search(r'^turtlemq_role\{role="leader"\} 1', metrics, re.MULTILINE)


def test_a_stopped_leader_answers_nothing_when_it_wakes_up(cluster: Cluster) -> None:
    leader = cluster.healthy()
    put(leader.server, 10, "s")
    leader.signal(signal.SIGSTOP)
    new = cluster.leader(leader.name)
    put(new.server, 10, "w")
    new.server.ok("DELETE", "/v1/topics/t/messages/s1")
    statuses: list[int] = []

    def ask() -> None:  # connections that the old leader finds when it wakes up
        with suppress(OSError, HTTPException):
            statuses.append(leader.server.call("GET", "/v1/topics/t/messages/s1", headers=DIRECT).status)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    time.sleep(0.1)
    leader.signal(signal.SIGCONT)
    for thread in asking:
        thread.join()
    assert set(statuses) <= {421, 503}
    eventually(lambda: leader.events("deposed"))
    cluster.until_in_sync()
    assert put(new.server, 10, "v")["copies"] == 2
    cluster.until_equal(new.name, leader.name)


def test_a_handover_under_load_is_short(cluster: Cluster) -> None:
    leader = cluster.healthy()
    clients = Clients(cluster, "h")
    clients.more()
    for turn in range(2):
        other = cluster.other_of(leader)
        cluster.until_in_sync()
        cluster.want(leader=other.name)
        eventually(partial(cluster.leads, other.name))
        clients.more()
        assert len(leader.events("handed_over")) == 1, turn
        leader = other
    cluster.until_in_sync()
    cluster.want()
    answered = clients.end()
    assert stored(leader, answered) == answered
    assert "reconcile" not in leader.log + cluster.other_of(leader).log
    assert clients.longest_pause_s() < 3  # on a busy machine; alone it is far below a second
    cluster.until_equal("a", "b")


def test_a_leader_that_is_stopped_properly_hands_over(cluster: Cluster) -> None:
    leader = cluster.healthy()
    put(leader.server, 10, "p")
    assert leader.stop() == 0
    new = cluster.leader(leader.name, seconds=5)
    assert put(new.server, 10, "q")["copies"] == 1
    assert cluster.in_sync() == [new.name]
    cluster.start(leader.name)
    cluster.until_in_sync()
    assert "reconcile" not in leader.log
    cluster.until_equal(new.name, leader.name)


def test_an_old_leader_with_another_tail_follows(tmp_path: Path, endpoint: str) -> None:
    with pair_of(tmp_path, endpoint) as (cluster, leader, standby):
        diverge(leader, standby)
        assert cluster.leader(leader.name) is standby
        assert len(stored(standby, {f"big{n}" for n in range(24)})) < 24
        cluster.start(leader.name)
        cluster.until_in_sync()
        assert put(standby.server, 10, "head")["copies"] == 2
        assert list((leader.data / "DIVERGED").glob("*/*"))
        cluster.until_equal()


def diverge(leader: Node, standby: Node) -> None:
    """Kill a leader that has records which its standby, stopped meanwhile, has not got."""
    put(leader.server, 100, "tail")
    standby.signal(signal.SIGSTOP)
    codes: list[str] = []

    def put_big(n: int) -> None:  # more than the buffers of a connection hold
        message = {"id": f"big{n}", "body": "x" * 1_000_000, "due_ms": FAR}
        codes.append(leader.server.call("POST", "/v1/topics/t/messages", message, headers={"X-Turtlemq-Budget-Ms": "3000"}).code)

    threads = [threading.Thread(target=put_big, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {"NOT_REPLICATED", "DEADLINE_EXCEEDED"}
    leader.kill()
    standby.signal(signal.SIGCONT)


def test_a_leader_whose_sync_fails_hands_over(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "sync = os.fdatasync\n"
        "def failing(fd):\n"
        f"    if os.path.exists({str(tmp_path / 'fail')!r}) and 'delay_' in os.readlink(f'/proc/self/fd/{{fd}}'):\n"
        "        raise OSError(5, 'Input/output error')\n"
        "    return sync(fd)\n"
        "os.fdatasync = failing\n"
    )
    leader = cluster.healthy()
    if leader.name == "a":  # let it lead that can be made to fail
        cluster.nodes["b"].stop()
        cluster.start("b", path=str(tmp_path))
        cluster.until_in_sync()
        leader.stop()
    else:
        leader.stop()
        cluster.leader("b")
        cluster.start("b", path=str(tmp_path))
        cluster.until_in_sync()
        cluster.nodes["a"].stop()
    leader = cluster.leader("a")
    cluster.start("a")
    cluster.until_in_sync()
    put(leader.server, 10, "sound")
    (tmp_path / "fail").touch()
    refused = leader.server.call("POST", "/v1/topics/t/messages", {"id": "failed", "body": 1, "due_ms": FAR}, headers=DIRECT)
    assert refused.status >= 500
    new = cluster.leader(leader.name)
    (tmp_path / "fail").unlink()
    assert new.server.call("GET", "/v1/topics/t/messages/sound1").status == 200
    cluster.until_in_sync()
    assert leader.events("copy_not_trusted")
    assert leader.events("handed_over")
    assert leader.events("reconcile_done")
    cluster.until_equal()


def test_a_wiped_standby_copies_again(cluster: Cluster) -> None:
    leader = cluster.healthy()
    standby = cluster.other_of(leader)
    put(leader.server, 1_000, "wiped")
    first = standby.facts.replica
    standby.kill()
    eventually(lambda: cluster.in_sync() == [leader.name])
    assert put(leader.server, 10, "alone")["copies"] == 1
    shutil.rmtree(standby.data)
    cluster.start(standby.name)
    cluster.until_in_sync()
    assert standby.facts.replica != first
    assert put(leader.server, 10, "both")["copies"] == 2
    cluster.until_equal(leader.name, standby.name)


def test_everything_restarts_at_once(cluster: Cluster) -> None:
    leader = cluster.healthy()
    put(leader.server, 50, "all")
    for node in cluster.nodes.values():
        node.signal(signal.SIGKILL)
    for node in cluster.nodes.values():
        node.ended()
    cluster.start()
    leader = cluster.leader()
    ids = {f"all{n}" for n in range(50)}
    assert stored(leader, ids) == ids
    cluster.until_in_sync()
    assert put(leader.server, 10, "again")["copies"] == 2


def test_service_goes_on_while_etcd_is_away(tmp_path: Path) -> None:
    port = free_port()
    with running_etcd(tmp_path, port=port) as endpoint, cluster_of(tmp_path, endpoint) as cluster:
        leader = cluster.healthy()
        os.kill(_etcd_of(port), signal.SIGSTOP)
        try:
            end = time.monotonic() + 4
            while time.monotonic() < end:  # two leases
                assert put(leader.server, 2, f"x{time.monotonic()}")["copies"] == 2
                time.sleep(0.05)
        finally:
            os.kill(_etcd_of(port), signal.SIGCONT)
        eventually(lambda: cluster.lead is not None)
        assert put(leader.server, 2, "y")["copies"] == 2
        assert cluster.leader().name == leader.name
        assert not leader.events("deposed")


def _etcd_of(port: int) -> int:
    """The process that listens there."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"http://127.0.0.1:{port}\0".encode() in path.read_bytes() + b"\0" and b"etcd" in path.read_bytes()[:40]:
                return int(path.parent.name)
    raise AssertionError("no etcd")


def test_an_etcd_that_was_restored_stops_everybody(tmp_path: Path) -> None:
    port = free_port()
    with running_etcd(tmp_path, port=port) as endpoint, cluster_of(tmp_path, endpoint) as cluster:
        leader = cluster.healthy()
        put(leader.server, 2, "a")
        cluster.end()
    shutil.rmtree(tmp_path / "etcd")
    with running_etcd(tmp_path, port=port) as endpoint:
        again = Cluster(tmp_path, endpoint, "ab", cluster.name)
        again.nodes = cluster.nodes
        again.start()
        try:
            for node in again.nodes.values():
                eventually(partial(node.events, "name_server_went_back"))
                assert "restored from an old copy" in node.log
                assert node.server.call("GET", "/v1/topics", headers=DIRECT).status in (421, 503)
            assert again.lead is None
        finally:
            again.end()


def test_an_etcd_restored_within_an_epoch_stops_everybody(tmp_path: Path) -> None:
    """The in-sync set of the old copy may have a member that lacks answers. All nodes have been restarted since the newer one."""
    port = free_port()
    with ExitStack() as stack:
        with running_etcd(tmp_path, port=port) as endpoint:
            cluster = stack.enter_context(cluster_of(tmp_path, endpoint))
            leader = cluster.healthy()
            standby = cluster.other_of(leader)
            epoch = leader.facts.epoch
        shutil.copytree(tmp_path / "etcd", tmp_path / "backup")
        with running_etcd(tmp_path, port=port):
            standby.kill()
            eventually(lambda: cluster.in_sync() == [leader.name])
            put(leader.server, 2, "a")
            cluster.start(standby.name)
            cluster.until_in_sync()
            newest = epoch, revision_of(cluster)
            eventually(lambda: all(node.facts.newest == newest for node in cluster.nodes.values()))
            for node in cluster.nodes.values():
                node.kill()
                node.log_from += len(node.log)
        shutil.rmtree(tmp_path / "etcd")
        shutil.move(tmp_path / "backup", tmp_path / "etcd")
        with running_etcd(tmp_path, port=port):
            cluster.start()
            for node in cluster.nodes.values():
                eventually(partial(node.events, "name_server_went_back"))
                assert "cluster force-leader" in node.log
            eventually(lambda: cluster.lead is None)  # the old copy holds a lease as well
            assert cluster.state is not None
            assert cluster.state.epoch == epoch
            cluster.end()


def revision_of(cluster: Cluster) -> int:
    """The revision of `state`."""
    return cluster.do(lambda etcd: etcd.get(cluster.keys.state(0))).keys[0].mod_revision


@pytest.mark.parametrize("order", ["standby first", "leader first"])
def test_after_a_stop_of_all_nodes_copies_resume(cluster: Cluster, order: str) -> None:
    """The nodes have stopped at different records, and no file is compared."""
    leader = cluster.healthy()
    standby = cluster.other_of(leader)
    put(leader.server, 10, "s")
    last = leader
    if order == "standby first":
        standby.stop()
        put(leader.server, 10, "t")
    else:
        leader.stop()
        last = cluster.leader(leader.name)
        put(last.server, 10, "u")
    cluster.end()
    assert all(node.facts.lsn is not None for node in cluster.nodes.values())
    for node in cluster.nodes.values():
        node.log_from += len(node.log)
    cluster.start(last.name)
    put(cluster.leader().server, 5, "v")
    cluster.start(cluster.other_of(last).name)
    cluster.until_in_sync()
    assert not any(node.events("reconcile_begun") for node in cluster.nodes.values())
    cluster.until_equal()


def test_a_standby_with_another_secret_is_refused(cluster: Cluster) -> None:
    leader = cluster.healthy()
    standby = cluster.other_of(leader)
    lost = len(standby.events("leader_lost"))
    standby.stop()
    assert len(standby.events("leader_lost")) == lost + 1, "a standby that stops calls its leader no more"
    cluster.start(standby.name, secret="another secret of sixteen")
    eventually(lambda: standby.events("refused_by_leader"))
    assert "secret_file must be equal on all nodes" in standby.server.call("GET", "/v1/cluster/replica").json["why"]
    assert put(leader.server, 2, "secret")["copies"] == 1
    assert cluster.in_sync() == [leader.name]
    standby.stop()


def test_with_three_replicas_two_must_have_it(tmp_path: Path, endpoint: str) -> None:
    with cluster_of(tmp_path, endpoint, "abc", min_isr=2) as cluster:
        leader = cluster.healthy()
        assert put(leader.server, 10, "a")["copies"] == 3
        leader.kill()
        new = cluster.leader(leader.name)
        assert put(new.server, 10, "b")["copies"] == 2
        (last,) = [node for node in cluster.nodes.values() if node not in (leader, new)]
        last.kill()
        eventually(lambda: new.server.call("POST", "/v1/topics/t/messages", {"id": "x", "body": 1}).code == "NOT_ENOUGH_REPLICAS")
        cluster.start(leader.name)
        eventually(lambda: new.server.call("POST", "/v1/topics/t/messages", {"id": "x", "body": 1}).status == 201)
