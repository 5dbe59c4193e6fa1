"""The supervisor of a node and the start of a cluster, against a real etcd; the replica process is a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, free_port, is_installed, running_etcd
from tests.harness.node_process import NodeHome, is_running, running_node
from tests.harness.server_process import run
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument
from turtlemq.model import Message
from turtlemq.replica import replica_file
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Audit, Config, Keys, Node, ShardState, Want, decode, encode
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.replica_file import ReplicaFacts
from turtlemq.storage.door import Door

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
T = TypeVar("T")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def names(endpoint: str, tmp_path: Path) -> Names:
    """A cluster of its own, made already."""
    names = Names(endpoint, tmp_path.name.replace("_", "-")[-40:], tmp_path)
    names.do(lambda etcd: init_cluster(etcd, names.cluster, Shape(replicas=2)))
    return names


class Names:
    """The keys of one cluster, and its nodes."""

    def __init__(self, endpoint: str, cluster: str, root: Path) -> None:
        self.endpoint, self.cluster, self.root, self.keys = endpoint, cluster, root, Keys(cluster)

    def do(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        async def story() -> T:
            async with Etcd([self.endpoint]) as etcd:
                return await work(etcd)

        return asyncio.run(story())

    def value(self, key: str) -> bytes | None:
        found = self.do(lambda etcd: etcd.get(key)).keys
        return found[0].value if found else None

    def node_value(self, name: str) -> Node | None:
        value = self.value(self.keys.node(name))
        return None if value is None else decode("nodes", value, Node)

    def wanted(self) -> tuple[str, ...]:
        value = self.value(self.keys.want(0))
        return () if value is None else decode("want", value, Want).nodes

    def home(self, node: str, folder: str = "") -> NodeHome:
        home = NodeHome(self.root / (folder or node), node)
        home.configure(self.endpoint, cluster=self.cluster)
        return home

    def lease_of(self, node: NodeHome) -> int:
        """Give the replica process of a node a lease, with the key `lead` on it."""
        lease = self.do(lambda etcd: etcd.grant(600))
        self.do(lambda etcd: etcd.put(self.keys.lead(0), b"{}", lease))
        (node.home / "lease").write_text(str(lease))
        time.sleep(0.3)  # until it was reported
        return lease


def test_a_cluster_is_made_once(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            made = await init_cluster(etcd, "once", Shape(replicas=3))
            assert (made.is_new, made.config.min_isr) == (True, 2)
            again = await init_cluster(etcd, "once", Shape(replicas=3))
            assert again == (made.config, False)
            with pytest.raises(Conflict, match="3 replicas and min_isr 2"):
                await init_cluster(etcd, "once", Shape(replicas=2))
            (key,) = (await etcd.get(Keys("once").config)).keys
            assert decode(key.key, key.value, Config) == made.config
            for wrong in (Shape(shards=101), Shape(shards=0), Shape(replicas=8), Shape(replicas=0), Shape(replicas=2, least=3)):
                with pytest.raises(InvalidArgument):
                    await init_cluster(etcd, "wrong", wrong)
            assert (await etcd.get(Keys("wrong").prefix, prefix=True)).keys == []

    asyncio.run(story())


# The replica process


def test_a_killed_replica_loses_its_lease_and_starts_again(names: Names) -> None:
    with running_node(names.home("a")) as node:
        first = int(node.get())
        names.lease_of(node)
        os.kill(first, signal.SIGKILL)
        began_s = time.monotonic()
        second = int(node.get())  # waits in the backlog
        assert second != first
        eventually(lambda: names.value(names.keys.lead(0)) is None, 5)
        assert time.monotonic() - began_s < 5
        assert "signal=SIGKILL" in node.events("child_ended")[0]
        assert len(node.events("lease_revoked")) == 1
        assert node.stop() == 0


def test_a_silent_replica_is_killed(names: Names) -> None:
    with running_node(names.home("a")) as node:
        stopped = int(node.get())
        names.lease_of(node)
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: node.has_ended(stopped), 10)
        eventually(lambda: names.value(names.keys.lead(0)) is None, 5)
        assert f"pid={stopped}" in node.events("child_silent_killed")[0]
        assert int(node.get()) != stopped


def test_a_stopped_supervisor_does_not_kill_a_healthy_replica(names: Names) -> None:
    with running_node(names.home("a")) as node:
        child = int(node.get())
        assert node.process is not None
        os.kill(child, signal.SIGSTOP)
        node.process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        node.process.send_signal(signal.SIGCONT)
        os.kill(child, signal.SIGCONT)
        time.sleep(1.5)
        assert int(node.get()) == child
        assert node.events("child_ended") == []


def test_a_replica_ends_with_its_supervisor(names: Names) -> None:
    node = names.home("a")
    with running_node(node):
        child = int(node.get())
        assert node.process is not None
        node.process.kill()
        eventually(lambda: not is_running(child))
    with running_node(node):  # the key of the killed supervisor is no obstacle
        assert int(node.get()) != child
        assert node.events("node_name_in_use") == []
        assert node.stop(signal.SIGINT) == 0
    assert names.node_value("a") is None


def test_a_replica_that_does_not_end_is_killed(names: Names) -> None:
    node = names.home("a")
    with running_node(node):
        (node.home / "stubborn").touch()
        names.lease_of(node)
        child = int(node.get())
        assert node.process is not None
        node.process.terminate()
        time.sleep(0.5)
        assert is_running(child)
        assert names.value(names.keys.lead(0)) is not None, "its lease is revoked when it has ended"
        assert node.stop(signal.SIGINT) == 1  # the second signal
        assert not is_running(child)
        assert names.value(names.keys.lead(0)) is None


def test_restarts_take_longer_and_longer(names: Names) -> None:
    node = names.home("a")
    (node.home / "exit").write_text("3")
    with running_node(node):
        eventually(lambda: len(node.events("child_ended")) >= 4)
        assert "code=3" in node.events("child_ended")[0]
        (node.home / "exit").unlink()
        assert int(node.get()) == node.children()[-1]


def test_a_replica_that_cannot_use_its_configuration_ends_the_node(names: Names) -> None:
    node = names.home("a")
    (node.home / "exit").write_text("2")
    node.start()
    assert node.ended() == 2
    assert len(node.children()) == 1


# The node


def test_a_node_tells_its_address_and_health(names: Names) -> None:
    with running_node(names.home("a")) as node:
        value = names.node_value("a")
        assert value is not None
        assert (value.url, value.peer) == (node.url, f"127.0.0.1:{node.peer}")
        assert value.free_bytes > 0
        assert abs(value.clock_ms - 1000 * time.time()) < 60_000
        assert value.format > 0
        assert not value.drain
        audit = encode(Audit(at_ms=1, node="a", user="", action="drain"))
        names.do(lambda etcd: etcd.put(names.keys.drain("a"), audit))
        eventually(lambda: (now := names.node_value("a")) and now.drain and now.clock_ms > value.clock_ms, 10)


def test_lost_keys_of_a_node_come_again(names: Names) -> None:
    with running_node(names.home("a")) as node:
        names.do(lambda etcd: etcd.delete(names.keys.node("a")))
        eventually(lambda: names.node_value("a"), 10)
        (key,) = names.do(lambda etcd: etcd.get(names.keys.node("a"))).keys
        names.do(lambda etcd: etcd.revoke(key.lease))
        eventually(lambda: names.node_value("a"), 10)
        assert len(node.children()) == 1


def test_nodes_join_until_there_are_enough(names: Names) -> None:
    with running_node(names.home("a")):
        eventually(lambda: names.wanted() == ("a",), 10)
        with running_node(names.home("b")):
            eventually(lambda: names.wanted() == ("a", "b"), 10)
            with running_node(names.home("c")) as spare:
                time.sleep(2.5)
                assert names.wanted() == ("a", "b")
                names.do(lambda etcd: etcd.put(names.keys.want(0), encode(Want(nodes=("b",)))))  # a was removed
                eventually(lambda: names.wanted() == ("b", "c"), 10)
                assert "nodes=b,c" in spare.events("node_joined")[0]


def test_a_spare_replaces_a_node_that_stays_away(names: Names) -> None:
    names.do(lambda etcd: etcd.put(names.keys.want(0), encode(Want(nodes=("a", "b"), leader="b"))))
    state = ShardState(epoch=1, leader="ra", isr=("ra", "rb"), nodes={"ra": "a", "rb": "b"}, nonce="")
    names.do(lambda etcd: etcd.put(names.keys.state(0), encode(state)))
    names.do(lambda etcd: etcd.put(names.keys.lead(0), b"{}"))
    spare = names.home("c")
    spare.configure(names.endpoint, "replace_after_s = 1", cluster=names.cluster)
    with running_node(names.home("a")), running_node(spare):
        time.sleep(4)
        assert names.wanted() == ("a", "b"), "b holds a copy in sync"
        names.do(lambda etcd: etcd.put(names.keys.state(0), encode(msgspec.structs.replace(state, isr=("ra",)))))
        eventually(lambda: names.wanted() == ("a", "c"), 10)
        assert "node=b by=c" in spare.events("node_replaced")[0]


def test_a_drained_node_does_not_join(names: Names) -> None:
    audit = encode(Audit(at_ms=1, node="a", user="", action="drain"))
    names.do(lambda etcd: etcd.put(names.keys.drain("a"), audit))
    with running_node(names.home("a")):
        time.sleep(2.5)
        assert names.wanted() == ()
        names.do(lambda etcd: etcd.delete(names.keys.drain("a")))
        eventually(lambda: names.wanted() == ("a",), 10)


# Refusals


def test_a_second_supervisor_on_one_folder_is_refused(names: Names) -> None:
    with running_node(names.home("a")) as node:
        second = NodeHome(node.home, "a", node.port, node.peer)
        second.start()
        assert second.ended() == 1
        assert f"{node.home / 'data'} is in use by process {node.process.pid if node.process else 0}" in node.log


def test_a_second_node_of_one_name_is_refused(names: Names) -> None:
    with running_node(names.home("a")) as node:
        other = names.home("a", "another")
        other.start()
        assert other.ended() == 2
        assert f"another supervisor runs as node 'a' of cluster '{names.cluster}', at {node.url}" in other.log
        assert other.children() == []
        assert len(node.children()) == 1


def test_a_folder_of_another_cluster_or_node_is_refused(names: Names) -> None:
    node = names.home("a")
    with running_node(node):
        pass
    facts = json.loads((node.home / "data" / "NODE").read_text())
    assert (facts["cluster"], facts["node"]) == (names.cluster, "a")
    other = NodeHome(node.home, "b")
    other.configure(names.endpoint, cluster=names.cluster)
    other.start()
    assert other.ended() == 2
    assert "belongs to node 'a' of cluster" in node.log
    names.do(lambda etcd: etcd.delete(names.keys.config))
    names.do(lambda etcd: init_cluster(etcd, names.cluster, Shape(replicas=2)))
    node.configure(names.endpoint, cluster=names.cluster)
    node.start()
    assert node.ended() == 2
    assert f"with the id {facts['id']}, but the one in etcd has the id" in node.log


def test_a_node_waits_for_the_cluster_to_be_made(endpoint: str, tmp_path: Path) -> None:
    node = NodeHome(tmp_path / "a", "a")
    node.configure(endpoint, cluster="later")
    process = node.start()
    eventually(lambda: "turtlemq cluster init" in node.log)
    assert process.poll() is None
    Names(endpoint, "later", tmp_path).do(lambda etcd: init_cluster(etcd, "later", Shape(replicas=1)))
    eventually(node.children)
    assert node.stop() == 0


def test_folders_of_single_servers_and_nodes_are_told_apart(names: Names) -> None:
    node = names.home("a")
    (node.home / "data").mkdir()
    (node.home / "data" / "FORMAT").write_text("1\n")
    node.start()
    assert node.ended() == 2
    assert "holds the messages of a single server" in node.log
    (node.home / "data" / "FORMAT").unlink()
    with running_node(node):
        pass
    single = run("serve", "--data", str(node.home / "data"), "--port", "0")
    assert single.returncode == 2
    assert f"belongs to node 'a' of cluster '{names.cluster}'" in single.stderr


def test_a_copy_is_not_changed_outside_of_its_cluster(tmp_path: Path) -> None:
    copy = tmp_path / "data" / "shard" / "00"
    copy.mkdir(parents=True)
    engine = Engine.open(copy)
    engine.submit("t", [Message(b"x", due_ms=4 * 10**12)], 1_000)
    engine.close()
    (tmp_path / "data" / "NODE").write_text('{"cluster": "prod", "id": "0", "node": "a"}')
    assert run("compact", "t", "--data", str(copy)).returncode == 0
    replica_file.write(Door(), copy, ReplicaFacts("prod", 0, "r1", complete=True, epoch=1, lsn=5, chain=7))
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    for words in (("serve", "--port", "0"), ("compact", "t")):
        refused = run(*words, "--data", str(copy))
        assert refused.returncode > 0
        assert "a copy that belongs to a cluster" in refused.stderr.replace("\n", " ")
    assert "belongs to node 'a'" in run("serve", "--port", "0", "--data", str(tmp_path / "data")).stderr.replace("\n", " ")
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before
    assert run("check", "--data", str(tmp_path / "data")).returncode == 0


# Etcd


def test_the_replica_goes_on_while_etcd_is_away(tmp_path: Path) -> None:
    port, node = free_port(), NodeHome(tmp_path / "a", "a")
    with running_etcd(tmp_path, port=port) as endpoint:
        names = Names(endpoint, "away", tmp_path)
        names.do(lambda etcd: init_cluster(etcd, "away", Shape(replicas=1)))
        node.configure(endpoint, cluster="away")
        node.start()
        eventually(node.children)
        child = int(node.get())
    try:
        eventually(lambda: node.events("name_server_away"))
        time.sleep(1)
        assert int(node.get()) == child
        os.kill(child, signal.SIGKILL)
        assert int(node.get()) != child, "a replica is started again without etcd"
        with running_etcd(tmp_path, port=port):
            eventually(lambda: node.events("name_server_back"))
            eventually(lambda: names.node_value("a"), 15)
            assert node.stop() == 0
    finally:
        if node.process is not None and node.process.poll() is None:
            node.process.kill()
