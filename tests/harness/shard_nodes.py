"""Real nodes of a cluster with several shards on loopback: supervisors, their replicas, and the state that etcd tells."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import running_etcd
from tests.harness.node_process import NodeHome, running_node
from tests.harness.server_process import PATIENCE_S, Server
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.intervene import Intervention, intervene, read_view

KEYS = Keys("prod")


_chosen = random.Random(os.getpid())
_given: set[int] = set()  # ports that nothing may listen on yet


def ports_behind(count: int) -> int:
    """The first of so many free ports, below those that the system gives to connections."""
    while True:
        wanted = range(first := _chosen.randrange(12_000, 32_000), first + count)
        if _given.isdisjoint(wanted) and all(map(_is_free, wanted)):
            _given.update(wanted)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class ShardNodes:
    """Nodes `a`, `b`, … of one cluster. They begin when a test starts them."""

    def __init__(self, root: Path, endpoint: str, stack: ExitStack, shards: int, replicas: int, names: str, *lines: str) -> None:
        self.root, self.endpoint, self.shards, self._stack = root, endpoint, shards, stack
        asyncio.run(self._init(replicas))
        self.homes = {name: self._home(name) for name in names}
        for home in self.homes.values():
            home.configure(endpoint, "lease_s = 3", *lines, heartbeat_ms=600)

    def _home(self, name: str) -> NodeHome:
        return NodeHome(self.root / name, name, ports_behind(self.shards + 1), ports_behind(self.shards))

    async def _init(self, replicas: int) -> None:
        async with Etcd([self.endpoint]) as etcd:
            await init_cluster(etcd, "prod", Shape(self.shards, replicas, 1))

    def start(self, *names: str) -> None:
        for name in names or self.homes:
            self._stack.enter_context(running_node(self.homes[name], stand_in=False))

    @property
    def server(self) -> Server:
        """The first node, as a server of its own."""
        home = next(iter(self.homes.values()))
        return Server(cast("subprocess.Popen[str]", home.process), home.port, self.root)

    @property
    def ports(self) -> list[int]:
        """Of all processes. Requires: each node has a copy of each shard."""
        return [home.port + at for home in self.homes.values() for at in range(self.shards + 1)]

    # Etcd

    @property
    def view(self) -> ClusterView:
        async def read() -> ClusterView:
            async with Etcd([self.endpoint]) as etcd:
                return await read_view(etcd, KEYS)

        return asyncio.run(read())

    def change(self, plan_of: Callable[[ClusterView], Any]) -> Intervention:
        async def work() -> Intervention:
            async with Etcd([self.endpoint]) as etcd:
                return await intervene(etcd, KEYS, plan_of)

        return asyncio.run(work())

    def is_whole(self, *names: str, copies: int = 2) -> bool:
        """Whether these nodes, and no others, have all copies in sync, and each shard has a leader."""
        view, nodes = self.view, set(names)
        rows = [(set(shard.wanted), set(shard.in_sync.values()), shard.lead) for shard in view.shards.values()]
        return all(want == in_sync and len(want) == copies and want <= nodes and lead for want, in_sync, lead in rows)

    def until_whole(self, *names: str, copies: int = 2, seconds: float = 4 * PATIENCE_S) -> ClusterView:
        """Wait until these nodes have all copies, and until leaders are even. Returns the keys."""
        eventually(lambda: self.is_whole(*names, copies=copies) and self._is_even(*names) and self._is_attached(), seconds)
        return self.view

    def _is_even(self, *names: str) -> bool:
        led = [shard.lead.node for shard in self.view.shards.values() if shard.lead is not None]
        counts = [led.count(name) for name in names]
        return max(counts) - min(counts) <= 1

    def _is_attached(self) -> bool:
        """Whether each leader is connected to its standbys: one that restarts may be in sync in etcd for a moment."""
        for number, shard in self.view.shards.items():
            if shard.lead is None:
                return False
            try:
                status, told = call(f"{shard.lead.url}/v1/cluster/shards/{number}")
            except OSError:
                return False
            if status != 200 or any(copy["state"] not in ("leads", "in sync") for copy in told["copies"]):
                return False
        return True

    # Requests

    def kill(self, name: str) -> None:
        """Kill a node: its supervisor, and with it all of its processes."""
        home = self.homes[name]
        assert home.process is not None
        for pid in (home.process.pid, *home.children()):
            if _is_python(pid):
                os.kill(pid, signal.SIGKILL)
        home.process.wait(PATIENCE_S)

    def kill_process(self, name: str, shard: int) -> None:
        """Kill the process of a shard on a node; its supervisor goes on."""
        os.kill(self.pid_of(name, shard), signal.SIGKILL)

    def pid_of(self, name: str, shard: int) -> int:
        """The process of a shard on a node."""
        found = [line for line in self.homes[name].events("child_started") if f"shard={shard}" in line.split()]
        match = re.search(r"pid=(\d+)", found[-1])
        assert match is not None
        return int(match[1])


def _is_python(pid: int) -> bool:
    try:
        return b"turtlemq" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def call(url: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, _decoded(answer.read())
    except HTTPError as refused:
        return refused.code, _decoded(refused.read())


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


@contextmanager
def shard_nodes(root: Path, names: str, *lines: str, shards: int = 4, replicas: int = 2) -> Iterator[ShardNodes]:
    """A cluster with an etcd of its own; its nodes end with it."""
    with running_etcd(root) as endpoint, ExitStack() as stack:
        yield ShardNodes(root, endpoint, stack, shards, replicas, names, *lines)
