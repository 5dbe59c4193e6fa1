"""Replica processes of a cluster on loopback, with a real etcd and without supervisors, for tests of elections and handovers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, free_port, is_installed, running_etcd
from tests.harness.server_process import PATIENCE_S, PROGRAM, Server, environment
from tests.trust.failover import compare
from tests.trust.model import Broken
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Keys, Lead, ShardState, Want, decode, encode
from turtlemq.replica.cluster_state import Node as NodeKey
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.replica_file import ReplicaFacts, read
from turtlemq.storage.door import Door

T = TypeVar("T")
SECRET = "a secret of this cluster"


@dataclass
class Node:
    """A node: its folder, its ports, its process."""

    home: Path
    name: str
    port: int = field(default_factory=free_port)
    peer: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None
    log_from: int = 0  # characters of the log before it belong to the past

    @property
    def data(self) -> Path:
        return self.home / "data" / "shard" / "00"

    @property
    def server(self) -> Server:
        assert self.process is not None
        return Server(self.process, self.port, self.home / "data")

    @property
    def log(self) -> str:
        return (self.home / "server.log").read_text()[self.log_from :]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def events(self, name: str) -> list[str]:
        return [line for line in self.log.splitlines() if f"event={name}" in line.split()]

    @property
    def facts(self) -> ReplicaFacts:
        facts = read(Door(), self.data)
        assert facts is not None
        return facts

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()


class Cluster:
    """Nodes `a`, `b`, … of one cluster."""

    def __init__(self, root: Path, endpoint: str, names: str, name: str, min_isr: int = 1) -> None:
        self.root, self.endpoint, self.keys, self.name = root, endpoint, Keys(name), name
        self.nodes = {node: Node(root / node, node) for node in names}
        self.settings: dict[str, Any] = {}
        self.lines = ""
        self.do(lambda etcd: init_cluster(etcd, name, Shape(1, len(names), min_isr)))
        self.want()
        for node in self.nodes.values():  # as a supervisor does
            value = encode(NodeKey(url=f"http://127.0.0.1:{node.port}", peer=f"127.0.0.1:{node.peer}"))
            self.put(self.keys.node(node.name), value)

    # Etcd

    def do(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        async def story() -> T:
            async with Etcd([self.endpoint]) as etcd:
                return await work(etcd)

        with ThreadPoolExecutor(1) as thread:  # the thread of a test may have an event loop already
            return thread.submit(lambda: asyncio.run(story())).result()

    def put(self, key: str, value: bytes) -> None:
        self.do(lambda etcd: etcd.put(key, value))

    def want(self, leader: str | None = None) -> None:
        """All nodes should have a copy; this one should lead."""
        self.put(self.keys.want(0), encode(Want(nodes=tuple(self.nodes), leader=leader)))

    def leads(self, name: str) -> bool:
        lead = self.lead
        return lead is not None and lead.node == name

    def value(self, key: str) -> bytes | None:
        found = self.do(lambda etcd: etcd.get(key)).keys
        return found[0].value if found else None

    @property
    def state(self) -> ShardState | None:
        value = self.value(self.keys.state(0))
        return None if value is None else decode("state", value, ShardState)

    @property
    def lead(self) -> Lead | None:
        value = self.value(self.keys.lead(0))
        return None if value is None else decode("lead", value, Lead)

    def in_sync(self) -> list[str]:
        """The names of the nodes in the in-sync set."""
        state = self.state
        return [] if state is None else sorted(state.nodes[replica] for replica in state.isr)

    # Nodes

    def start(self, *names: str, secret: str = SECRET, lines: str = "", path: str = "", **settings: Any) -> None:
        """Start processes. `lines`: of the configuration, behind the table `[cluster]`, whose values are `settings`."""
        settings = self.settings | settings
        own_path = {"PYTHONPATH": f"{path}{os.pathsep}{environment()['PYTHONPATH']}"} if path else {}
        for name in names or self.nodes:
            node = self.nodes[name]
            node.home.mkdir(exist_ok=True)
            (node.home / "secret").write_text(secret)
            own = {
                "name": self.name,
                "node": name,
                "etcd": [self.endpoint],
                "peer": f"127.0.0.1:{node.peer}",
                "secret_file": str(node.home / "secret"),
                "heartbeat_ms": 200,
                "lease_s": 2,
                "lag_max_s": 1.5,
                **settings,
            }
            text = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in own.items())
            (node.home / "turtle.toml").write_text(f"[cluster]\n{text}\n{lines or self.lines}\n")
            command = ["serve", "--data", str(node.home / "data"), "--port", str(node.port)]
            command += ["--config", str(node.home / "turtle.toml"), "--replica", "0"]
            with (node.home / "server.log").open("ab") as log:
                node.process = subprocess.Popen(
                    [*PROGRAM, *command], stdout=log, stderr=log, text=True, env=environment(**own_path), cwd=node.home
                )

    def leader(self, other_than: str = "", seconds: float = 30) -> Node:
        """The node that leads and serves."""
        found: list[Node] = []

        def serves() -> bool:
            lead = self.lead
            if lead is None or lead.node == other_than:
                return False
            node = self.nodes[lead.node]
            try:
                if node.server.call("GET", "/readyz").status != 200 or node.server.call("GET", "/v1/topics").status != 200:
                    return False
            except OSError:
                return False
            found.append(node)
            return True

        eventually(serves, seconds)
        return found[-1]

    def until_in_sync(self, *names: str) -> None:
        eventually(lambda: set(names or self.nodes) <= set(self.in_sync()))

    def until_equal(self, one: str = "a", other: str = "b") -> None:
        """Wait until the folders are equal byte for byte: nothing is under way then."""

        def is_equal() -> bool:
            with suppress(Broken, OSError):
                compare(self.nodes[one].data, self.nodes[other].data)
                return True
            return False

        eventually(is_equal, 15)

    def healthy(self) -> Node:
        """Start nodes that do not run, and wait until all are in sync. Returns the leader. Logs begin anew."""
        absent = [node.name for node in self.nodes.values() if not node.is_running]
        if absent:
            self.start(*absent)
        leader = self.leader()
        self.until_in_sync()
        for node in self.nodes.values():
            node.log_from += len(node.log)
        return leader

    def compare(self, one: str, other: str) -> None:
        compare(self.nodes[one].data, self.nodes[other].data)

    def other_of(self, node: Node) -> Node:
        (other,) = [each for each in self.nodes.values() if each is not node]
        return other

    def end(self) -> None:
        running = [node for node in self.nodes.values() if node.is_running]
        for node in running:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGTERM)
        for node in running:
            assert node.process is not None
            try:
                node.process.wait(15)
            except subprocess.TimeoutExpired:
                node.kill()


@contextmanager
def cluster_of(root: Path, endpoint: str, names: str = "ab", **options: Any) -> Iterator[Cluster]:
    """A cluster with a name of its own. Its processes are ended afterwards."""
    name = re.sub(r"[^a-z0-9]", "-", root.name.lower())[-40:].strip("-")
    cluster = Cluster(root, endpoint, names, name, **options)
    try:
        yield cluster
    finally:
        cluster.end()


@contextmanager
def pair_of(root: Path, endpoint: str, lines: str = "", **settings: Any) -> Iterator[tuple[Cluster, Node, Node]]:
    """A cluster of two nodes that are in sync; the leader, and the standby. A silent standby counts for half a minute."""
    with cluster_of(root, endpoint) as cluster:
        cluster.settings, cluster.lines = {"lag_max_s": 30, **settings}, lines
        cluster.start()
        leader = cluster.leader()
        cluster.until_in_sync()
        yield cluster, leader, cluster.other_of(leader)


@contextmanager
def running_pair(root: Path, **settings: Any) -> Iterator[tuple[Cluster, Node, Node]]:
    """A pair with an etcd of its own, which ends with it."""
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(root) as endpoint, pair_of(root, endpoint, **settings) as found:
        yield found
