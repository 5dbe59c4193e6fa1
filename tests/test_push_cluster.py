"""Callbacks in a cluster of real nodes: the copies have the endpoints, and only the leader sends."""

from __future__ import annotations

import asyncio
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.node_process import NodeHome, running_node
from tests.harness.receiver import receiving
from turtlemq.client import Client
from turtlemq.client.errors import ClientError
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.topology import Topology

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


async def _init(endpoint: str) -> None:
    async with Etcd([endpoint]) as etcd:
        await init_cluster(etcd, "prod", Shape(1, 2, 1))


async def _topology(endpoint: str) -> Topology:
    async with Etcd([endpoint]) as etcd:
        found = await etcd.get("/tmq/prod/", prefix=True)
        return Topology.of({key.key: key for key in found.keys}, found.revision)


def _leader(endpoint: str) -> str | None:
    """The leader's node, if both copies are in sync."""
    topology = asyncio.run(_topology(endpoint))
    place = topology.leader(0)
    return None if place is None or len(topology.leaders[0].isr) < 2 else place.node


def _answered(client: Client, count: int) -> bool:
    try:
        return client.group("t").stats.history == count
    except ClientError:  # between two leaders
        return False


def test_the_next_leader_goes_on_with_the_endpoints(tmp_path: Path) -> None:
    homes = {name: NodeHome(tmp_path / name, name) for name in "ab"}
    with running_etcd(tmp_path) as endpoint, receiving() as receiver, ExitStack() as stack:
        asyncio.run(_init(endpoint))
        for home in homes.values():
            home.configure(endpoint, "lease_s = 2")
            file = home.home / "turtle.toml"
            file.write_text('push_hosts = ["127.0.0.0/8:*"]\n' + file.read_text())
            stack.enter_context(running_node(home, stand_in=False))
        eventually(lambda: _leader(endpoint) is not None)
        first = _leader(endpoint)
        assert first is not None
        second = "b" if first == "a" else "a"
        with Client(homes[second].url, timeout=60) as client:
            receiver.secrets.append(client.register_client("t", receiver.url, name="kept", ttl=0).secret)
            client.put("t", 1, id="one")
            eventually(lambda: _answered(client, 1))
            (file,) = homes[second].home.rglob("endpoints.json")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            homes[first].stop()
            client.put("t", 2, id="two")
            eventually(lambda: _answered(client, 2))
            assert [one.client for one in client.registered_clients("t")] == ["kept"]
        assert set(receiver.ids) == {"one", "two"}
        assert receiver.broken == []
