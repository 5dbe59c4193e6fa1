"""Supervisors with real replica processes: a leader that is killed, stopped or asked to end is replaced long before its lease
ends, and its node comes back as a standby."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.node_process import NodeHome, running_node
from tests.harness.server_process import PATIENCE_S
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Keys, Lead, ShardState, decode
from turtlemq.replica.etcd import Etcd

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
LEASE_S = 120  # so long that no failover can have waited for its end
SETTLED_S = 2  # three heartbeats: the first ones ask for a promise, and its giver waits as long as the old leader itself
KEYS = Keys("prod")


class Nodes:
    """Two nodes, each with one of the two copies."""

    def __init__(self, root: Path, endpoint: str, stack: ExitStack) -> None:
        self.endpoint, self._stack, self._count = endpoint, stack, 0
        self._ended: set[int] = set()
        self.homes = {name: NodeHome(root / name, name) for name in "ab"}
        for home in self.homes.values():
            home.configure(endpoint, f"lease_s = {LEASE_S}", heartbeat_ms=600)
            self.start(home)

    def start(self, home: NodeHome) -> None:
        self._stack.enter_context(running_node(home, stand_in=False))

    def values(self) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            async with Etcd([self.endpoint]) as etcd:
                return {found.key: found.value for found in (await etcd.get(KEYS.prefix, prefix=True)).keys}

        return asyncio.run(read())

    def leader(self) -> NodeHome:
        """The node that leads, once both copies are in sync."""
        found: list[NodeHome] = []

        def is_whole() -> bool:
            values = self.values()
            if KEYS.lead(0) not in values or len(decode("", values[KEYS.state(0)], ShardState).isr) < 2:
                return False
            found.append(self.homes[decode("", values[KEYS.lead(0)], Lead).node])
            return True

        eventually(is_whole)
        return found[-1]

    def other(self, home: NodeHome) -> NodeHome:
        return next(one for one in self.homes.values() if one is not home)

    def signal_replica(self, home: NodeHome, number: signal.Signals) -> None:
        """End the replica of a node. The file with its number still names the one before until the next has opened the folder."""
        lock = home.home / "data" / "shard" / "00" / "LOCK"
        eventually(lambda: int(lock.read_text() or 0) not in {0, *self._ended})
        self._ended.add(pid := int(lock.read_text()))
        os.kill(pid, number)

    def put(self, home: NodeHome) -> float:
        """Put a message through a node, however often it takes. Returns how long that was."""
        self._count += 1
        body = json.dumps({"id": f"m{self._count}", "body": 1, "delay": 1_000}).encode()
        request = Request(f"{home.url}/v1/topics/t/messages", body, {"Content-Type": "application/json"})
        began_s = time.monotonic()
        while time.monotonic() < began_s + LEASE_S - 20:
            try:
                with urlopen(request, timeout=PATIENCE_S):
                    return time.monotonic() - began_s
            except (HTTPError, OSError):
                time.sleep(0.1)
        raise AssertionError("no leader:\n" + "\n".join(home.log for home in self.homes.values()))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    root = tmp_path_factory.mktemp("nodes")

    async def make(endpoint: str) -> None:
        async with Etcd([endpoint]) as etcd:
            await init_cluster(etcd, "prod", Shape(replicas=2))

    with ExitStack() as stack:
        endpoint = stack.enter_context(running_etcd(root))
        asyncio.run(make(endpoint))
        yield Nodes(root, endpoint, stack)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_killed_or_stopped_is_replaced(nodes: Nodes, number: signal.Signals) -> None:
    old = nodes.leader()
    new, count = nodes.other(old), len(old.events("lease_revoked"))
    nodes.put(new)
    time.sleep(SETTLED_S)
    nodes.signal_replica(old, number)
    assert nodes.put(new) < LEASE_S / 2
    assert nodes.leader() is new
    assert len(old.events("lease_revoked")) == count + 1
    assert bool(old.events("child_silent_killed")) == (number == signal.SIGSTOP)


def test_a_node_that_is_asked_to_end_hands_over(nodes: Nodes) -> None:
    old = nodes.leader()
    new = nodes.other(old)
    assert old.stop() == 0
    assert nodes.put(new) < LEASE_S / 2
    assert KEYS.node(old.node) not in nodes.values()
    assert old.events("handed_over"), old.log
    nodes.start(old)
    assert nodes.leader() is new


def test_a_leader_ends_with_its_killed_supervisor(nodes: Nodes) -> None:
    old = nodes.leader()
    assert old.process is not None
    old.process.kill()
    old.ended()
    nodes.put(nodes.other(old))
    nodes.start(old)
    assert nodes.leader() is nodes.other(old)


def test_the_port_stays_open_while_a_replica_restarts(nodes: Nodes) -> None:
    standby = nodes.other(nodes.leader())
    for _ in range(3):
        nodes.signal_replica(standby, signal.SIGKILL)
        standby.get("/healthz")  # waits in the backlog
        nodes.leader()
