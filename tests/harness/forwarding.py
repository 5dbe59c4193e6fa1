"""Real HTTP servers on one event loop for tests of forwarding: a node that does not lead, and leaders of two kinds.

`Follower` and `Leader` are the application itself with a stand-in for the cluster; `Stub` is a server of its own that notes each
request, and answers as the test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from turtlemq.engine import Engine
from turtlemq.replica.topology import NodePlace, ShardPlace, Topology
from turtlemq.server.app import make_app
from turtlemq.server.config import Config
from turtlemq.server.listen import Site, runner_for, tls_of
from turtlemq.server.service import Service
from turtlemq.shards import shard_of

Answers = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class StandIn:
    """The cluster as requests see it. `node` is this process; `role` is that of a standby unless told otherwise."""

    def __init__(self, node: str) -> None:
        self.options, self.shard, self.shards, self.role = SimpleNamespace(node=node, name="prod"), 0, 1, "standby"
        self.view = SimpleNamespace(changed=[], is_fresh=True)
        self._topology = Topology(cluster="prod", revision=1, shards=1, leaders=(ShardPlace(shard=0),))

    def topology(self) -> Topology:
        return self._topology

    def has(self, topic: str) -> bool:
        return shard_of(topic, self.shards) == self.shard

    def leader_url(self) -> str | None:
        return self._topology.leaders[0].url

    def set_leader(self, node: str | None, url: str | None, epoch: int = 1) -> None:
        """The name server tells of a leader, or that there is none."""
        old, place = self._topology, ShardPlace(shard=0, epoch=epoch, node=node, url=url)
        nodes = old.nodes | ({} if node is None or url is None else {node: NodePlace(url=url)})
        self._topology = Topology(cluster="prod", revision=old.revision + 1, shards=1, nodes=nodes, leaders=(place,))
        for function in self.view.changed:
            function()


class Process:
    """A server process with its own service and stand-in."""

    def __init__(self, node: str, config: Config) -> None:
        self.cluster, self.service = StandIn(node), Service()
        self.service.cluster = self.cluster  # type: ignore[assignment]
        self.app = make_app(self.service, config)
        self.url = ""

    def lead(self, root: Path) -> None:
        """Open the files and serve."""
        self.service.start(Engine.open(root))
        self.cluster.role = "leader"

    def proxied(self, outcome: str) -> int:
        return self.service.meter.proxied[outcome]


@asynccontextmanager
async def process(node: str, **settings: Any) -> AsyncIterator[Process]:
    """A process that does not lead, on a free port."""
    config = Config(port=0, **settings)
    one = Process(node, config)
    runner = runner_for(one.app, 1.0)
    await runner.setup()
    try:
        tls = tls_of(config)
        await Site(runner, config, tls).start()
        one.url = "http{}://{}:{}".format("s" if tls else "", *runner.addresses[0][:2])
        yield one
    finally:
        serving = one.service.serving
        engine = one.service.engine if serving else None
        one.service.drain()
        await runner.cleanup()
        one.service.close()
        if engine is not None:
            engine.close()


class Stub:
    """A server that stands for a leader. `gone`: requests whose connection ended before they were answered. `takes_bodies`: it
    says so before a body is sent."""

    def __init__(self, answers: Answers) -> None:
        self.requests: list[web.BaseRequest] = []
        self.gone = 0
        self.takes_bodies = True
        self.url = ""
        self._answers = answers

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        if "Expect" in request.headers and self.takes_bodies:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            return await self._answers(request)
        except asyncio.CancelledError:
            self.gone += 1
            raise


@asynccontextmanager
async def stub(answers: Answers) -> AsyncIterator[Stub]:
    """A stub on a free port."""
    one = Stub(answers)
    server = web.Server(one.handle, handler_cancellation=True, auto_decompress=False)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        one.url = "http://{}:{}".format(*runner.addresses[0][:2])
        yield one
    finally:
        await runner.cleanup()
