"""A cluster of two nodes on loopback, with an etcd of its own: real supervisors and replica processes with default settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, environment
from benchmarks.http_client import Connection, post_request
from benchmarks.probe import cpu_seconds, process_tree
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.etcd import Etcd, EtcdError

NAME = "bench"
_WAIT_S = 60.0  # the longest wait for a start or a standby
_TOPOLOGY = b"GET /v1/cluster HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its folder, its ports and its supervisor."""

    name: str
    home: Path
    port: int
    peer: int
    supervisor: subprocess.Popen[bytes]

    @property
    def replica(self) -> int:
        """The process id of its replica process, which serves or follows."""
        return int((self.home / "data" / "shard" / "00" / "LOCK").read_text())

    def cpu_seconds(self) -> float:
        """Processor time of its replica process so far."""
        return cpu_seconds(self.replica)

    def kill_replica(self) -> None:
        os.kill(self.replica, signal.SIGKILL)


@dataclass(slots=True)
class Pair:
    """Two nodes, one of which leads. Requests go to the leader itself."""

    nodes: dict[str, Node]
    leader: Node
    standby: Node
    epoch: int = 0

    async def ready(self, after: int = 0) -> None:
        """Wait until both nodes know a leader, of an epoch later than `after`, and a standby in sync."""
        end = time.monotonic() + _WAIT_S
        while not await self._in_sync(after):
            if time.monotonic() > end:
                raise TimeoutError("the standby does not get in sync")
            await asyncio.sleep(0.02)

    async def _in_sync(self, after: int) -> bool:
        places = [await self._place(node) for node in self.nodes.values()]
        first = places[0]
        if first is None or first != places[1] or first["node"] is None or len(first["isr"]) < 2 or first["epoch"] <= after:
            return False
        self.epoch, self.leader = first["epoch"], self.nodes[first["node"]]
        self.standby = next(node for node in self.nodes.values() if node is not self.leader)
        return True

    async def _place(self, node: Node) -> dict[str, Any] | None:
        """The leader and the copies in sync, as a node knows them; None if it does not answer."""
        try:
            connection = await Connection.open(node.port)
            try:
                (place,) = json.loads(await connection.call_ok(_TOPOLOGY))["leaders"]
            finally:
                connection.close()
        except (OSError, RuntimeError, ValueError):
            return None
        return dict(place)

    async def connect(self) -> Connection:
        return await Connection.open(self.leader.port)

    def cpu_seconds(self) -> float:
        """Processor time of the leader."""
        return self.leader.cpu_seconds()

    async def hand_over(self) -> None:
        """Ask the leader to hand over to the standby; return when it is done."""
        connection = await self.connect()
        with suppress(ConnectionError):  # it replaces its process
            await connection.call_ok(
                post_request("/v1/cluster/shards/0/handover", json.dumps({"to": self.standby.name}).encode())
            )
        connection.close()


@asynccontextmanager
async def running_pair(folder: Path) -> AsyncIterator[Pair]:
    """Start etcd and two nodes, wait until both are in sync, and end all of them."""
    processes: list[subprocess.Popen[bytes]] = []
    etcd, endpoint = _start_etcd(folder)
    try:
        await _init(endpoint, Shape(replicas=2))
        nodes = {name: _start_node(folder, name, endpoint) for name in ("a", "b")}
        processes = [node.supervisor for node in nodes.values()]
        pair = Pair(nodes, nodes["a"], nodes["b"])
        await pair.ready()
        yield pair
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_WAIT_S)
        etcd.kill()
        etcd.wait()


@dataclass(frozen=True, slots=True)
class ShardedNode:
    """The only node of a cluster: it leads all shards, without standbys."""

    node: Node
    shards: int

    def port_of(self, shard: int) -> int:
        """The port of the process of a shard."""
        return self.node.port if self.shards == 1 else self.node.port + 1 + shard

    def replica(self, shard: int) -> int:
        """The process id of a shard's replica."""
        return int((self.node.home / "data" / "shard" / f"{shard:02}" / "LOCK").read_text())

    def replicas(self) -> list[int]:
        return [self.replica(shard) for shard in range(self.shards)]

    def cpu_seconds(self) -> float:
        """Processor time of all replica processes so far."""
        return sum(map(cpu_seconds, self.replicas()))

    async def ready(self) -> None:
        """Wait until it leads all shards."""
        end = time.monotonic() + _WAIT_S
        while True:
            try:
                connection = await Connection.open(self.node.port)
                try:
                    places = json.loads(await connection.call_ok(_TOPOLOGY))["leaders"]
                finally:
                    connection.close()
                if len(places) == self.shards and all(place["node"] for place in places):
                    return
            except (OSError, RuntimeError, ValueError):
                pass
            if time.monotonic() > end:
                raise TimeoutError("the node does not lead")
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running_node(folder: Path, shards: int) -> AsyncIterator[ShardedNode]:
    """Start etcd and a node with so many shards, wait until it leads them, and end both. Requires: the folder is there."""
    etcd, endpoint = _start_etcd(folder)
    processes = [etcd]
    try:
        await _init(endpoint, Shape(shards=shards, replicas=1))
        node = ShardedNode(_start_node(folder, "a", endpoint, shards), shards)
        processes.insert(0, node.node.supervisor)
        await node.ready()
        yield node
    finally:
        for process in processes:
            process.terminate()
            process.wait(_WAIT_S)


class Trio:
    """Three nodes of a cluster with several shards, two copies of each. They begin when they are started."""

    def __init__(self, folder: Path, endpoint: str, shards: int) -> None:
        self.endpoint, self._shards, self._folder = endpoint, shards, folder
        self.nodes = {name: _configured(folder, name, endpoint, shards) for name in "abc"}
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """Start nodes, or start them again."""
        for name in names:
            self._supervisors[name] = self.nodes[name].run()

    def kill(self, name: str) -> None:
        """Kill a node with all of its processes."""
        supervisor = self._supervisors.pop(name)
        for pid in reversed(list(process_tree(supervisor.pid))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        supervisor.wait(_WAIT_S)

    def end(self) -> None:
        for supervisor in self._supervisors.values():
            supervisor.terminate()
        for supervisor in self._supervisors.values():
            supervisor.wait(_WAIT_S)


@asynccontextmanager
async def running_trio(folder: Path, shards: int) -> AsyncIterator[Trio]:
    """Start etcd for three nodes with so many shards, and end all of them."""
    etcd, endpoint = _start_etcd(folder)
    try:
        await _init(endpoint, Shape(shards=shards, replicas=2))
        trio = Trio(folder, endpoint, shards)
        try:
            yield trio
        finally:
            trio.end()
    finally:
        etcd.kill()
        etcd.wait()


async def _init(endpoint: str, shape: Shape) -> None:
    end = time.monotonic() + _WAIT_S
    async with Etcd([endpoint]) as etcd:
        while True:
            try:
                await init_cluster(etcd, NAME, shape)
            except EtcdError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)
            else:
                return


def _start_etcd(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    options = {
        "data-dir": folder / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    return _start(["etcd", *(f"--{name}={value}" for name, value in options.items())], folder / "etcd.log"), client


@dataclass(frozen=True, slots=True)
class Configured:
    """A node that has a folder, ports and a configuration file."""

    home: Path
    port: int
    peer: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self) -> subprocess.Popen[bytes]:
        """Start its supervisor."""
        command = [sys.executable, "-m", "turtlemq", "serve", "--config", str(self.home / "turtlemq.toml")]
        return _start(command, self.home / "log")


def _start_node(folder: Path, name: str, endpoint: str, shards: int = 1) -> Node:
    made = _configured(folder, name, endpoint, shards)
    return Node(name, made.home, made.port, made.peer, made.run())


def _configured(folder: Path, name: str, endpoint: str, shards: int) -> Configured:
    home, port, peer = folder / name, _free_port(shards + 1), _free_port(shards)
    home.mkdir()
    secret, config = home / "secret", home / "turtlemq.toml"
    secret.write_text("the secret of the benchmark")
    config.write_text(
        f'data = "{home / "data"}"\nport = {port}\n\n[cluster]\nname = "{NAME}"\nnode = "{name}"\netcd = ["{endpoint}"]\n'
        f'peer = "127.0.0.1:{peer}"\nsecret_file = "{secret}"\n'
    )
    return Configured(home, port, peer)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment())


def _free_port(count: int = 1) -> int:
    """The first of so many free ports."""
    while True:
        with ExitStack() as probes:
            port = _bound(probes, 0)
            try:
                for other in range(port + 1, port + count):
                    _bound(probes, other)
            except (OSError, OverflowError):
                continue
            return port


def _bound(probes: ExitStack, port: int) -> int:
    probe = probes.enter_context(socket.socket())
    probe.bind(("127.0.0.1", port))
    return int(probe.getsockname()[1])
