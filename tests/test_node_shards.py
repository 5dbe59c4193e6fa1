"""Parts of a node in a cluster of several shards: processes that it needs, its folders, its ports, and the controller's key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from turtlemq.errors import Conflict, InvalidArgument, Locked
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Audit, Config, Keys, Node, Want, decode, encode
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.interventions import plan_leave
from turtlemq.replica.names_view import NamesView
from turtlemq.server import config as configuration
from turtlemq.server.cluster_config import Cluster
from turtlemq.server.controller import Controller
from turtlemq.server.node_folder import has_copy, remove_copy, shard_folder
from turtlemq.server.node_shards import Needs, check_shards
from turtlemq.storage import names
from turtlemq.storage.door import Door

KEYS = Keys("prod")


def test_a_process_begins_when_it_is_needed() -> None:
    async def story() -> None:
        needs = Needs(3)
        await needs.until(0)
        waiting = asyncio.create_task(needs.until(2))
        needs.use([1])
        await needs.until(1)
        await asyncio.sleep(0)
        assert not waiting.done()
        needs.use([2])
        await waiting
        await needs.until(0)

    asyncio.run(story())


# Folders


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = shard_folder(tmp_path, 3)
    (folder / "topic" / "orders").mkdir(parents=True)
    (folder / "topic" / "orders" / "delay_0000000000.bson").write_bytes(b"x")
    shard_folder(tmp_path, 4).mkdir()
    return folder


def test_a_copy_is_removed_as_a_whole(copy: Path) -> None:
    assert has_copy(copy)
    remove_copy(copy)
    assert not has_copy(copy)
    assert os.listdir(copy.parent) == ["04"]
    remove_copy(copy)


def test_the_rest_of_a_copy_is_removed_later(copy: Path) -> None:
    gone = copy.with_name(names.dropped("03"))
    copy.rename(gone)
    assert has_copy(copy)
    remove_copy(copy)
    assert not gone.exists()
    assert has_copy(copy.with_name("04"))


def test_a_copy_in_use_stays(copy: Path) -> None:
    lock = Door().lock(copy / names.LOCK)
    try:
        with pytest.raises(Locked):
            remove_copy(copy)
        assert (copy / "topic" / "orders" / "delay_0000000000.bson").exists()
    finally:
        os.close(lock)


# Configuration


def node_config(**settings: object) -> configuration.Config:
    cluster = Cluster(name="prod", node="a", etcd=("http://e:2379",), peer="h:8900", secret_file="s")
    return configuration.Config(cluster=cluster, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"grpc_port": 8879}, "grpc_port works"), ({"port": 0}, "port is 0"), ({"port": 65_530}, "port is too high")],
)
def test_a_configuration_fits_to_the_shards(settings: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_shards(node_config(**settings), 8)
    check_shards(node_config(**settings), 1)
    check_shards(node_config(), 8)


# Leaving


def view_of(*alive: str, min_isr: int = 1) -> ClusterView:
    nodes = {name: Node(url="http://h:1", peer="h:2") for name in alive}
    return ClusterView(KEYS, Config(id="x", shards=2, replicas=2, min_isr=min_isr), nodes=nodes)


def test_a_node_leaves_only_if_others_can_have_its_copies() -> None:
    by = Audit(at_ms=1, node="n", user="u", action="remove")
    plan = plan_leave(view_of("a", "b"), "a", by)
    assert plan is not None
    assert set(plan.puts) == {KEYS.drain("a"), KEYS.audit(1, 0)}
    with pytest.raises(Conflict, match="start another node first"):
        plan_leave(view_of("a"), "a", by)
    with pytest.raises(Conflict, match="min_isr is 2"):
        plan_leave(view_of("a", "b", min_isr=2), "a", by)


# The controller


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


class Controllers:
    """Two controllers of one cluster, each with a lease and a view of its own."""

    def __init__(self, etcd: Etcd, name: str) -> None:
        self.etcd, self.keys = etcd, Keys(name)
        self.views = {node: NamesView(etcd, self.keys.prefix) for node in "ab"}
        self.leases: dict[str, int] = {}
        self.each = {
            node: Controller(etcd, self.views[node], self.keys, node, lambda node=node: self.leases[node], 600)  # type: ignore[misc]
            for node in "ab"
        }

    async def begin(self) -> None:
        await init_cluster(self.etcd, self.keys.prefix.split("/")[2], Shape(shards=2, replicas=1))
        for node in "ab":
            self.leases[node] = await self.etcd.grant(60)
            value = Node(url="http://h:1", peer="h:2")
            await self.etcd.put(self.keys.node(node), encode(value))

    async def step(self, node: str) -> bool:
        """One look of a controller. Returns whether it is the one that places."""
        await self.views[node].read()
        held = await self.each[node]._holds()
        await self.views[node].read()
        if held:
            await self.each[node]._place()
        return held

    async def wanted(self) -> list[Want]:
        found = await self.etcd.get(self.keys.shards, prefix=True)
        return [decode(key.key, key.value, Want) for key in found.keys if key.key.endswith("/want")]


def test_one_controller_places_and_another_follows_it(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            two = Controllers(etcd, "one-places")
            await two.begin()
            assert [await two.step(node) for node in "abab"] == [False, False, True, False]
            assert sorted(want.nodes for want in await two.wanted()) == [("a",), ("b",)]
            await etcd.revoke(two.leases["a"])
            two.leases["a"] = await etcd.grant(60)
            assert [await two.step(node) for node in "bab"] == [False, False, True]

    asyncio.run(story())


def test_a_controller_that_was_replaced_writes_nothing(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            two = Controllers(etcd, "replaced")
            await two.begin()
            await two.step("a")
            await two.views["a"].read()  # `a` holds the key, and then sees nothing more
            await etcd.revoke(two.leases["a"])
            await two.step("b")
            await two.each["a"]._place()
            assert await two.wanted() == []

    asyncio.run(story())
