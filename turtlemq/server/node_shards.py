"""The part of a node's supervisor for a cluster of several shards: those that need a process here, and the controller beside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from turtlemq.errors import InvalidArgument
from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.topology import Topology
from turtlemq.server import logs
from turtlemq.server.cluster_config import parse_address
from turtlemq.server.config import Config
from turtlemq.server.controller import Controller
from turtlemq.server.node_folder import has_copy, shard_folder
from turtlemq.server.presence import Presence

PORT_MAX = 65_535


class Needs:
    """The shards that need a process on this node: the first one always."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._needed: frozenset[int] = frozenset({0})
        self._changed = asyncio.Event()  # replaced at every change

    def use(self, needed: Collection[int]) -> None:
        """Note the shards that need a process now."""
        self._needed = frozenset({0, *needed})
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, shard: int) -> None:
        """Return when a shard needs a process."""
        while shard not in self._needed:
            await self._changed.wait()


def check_shards(config: Config, shards: int) -> None:
    """Raise `InvalidArgument` for a configuration that does not fit to a cluster of so many shards."""
    if shards == 1:
        return
    if config.grpc_port >= 0:
        raise InvalidArgument(
            f"grpc_port works in a cluster of one shard only, and this one has {shards}: a gRPC stream is not passed on to the "
            "leaders of several shards"
        )
    if not config.port:
        raise InvalidArgument(f"port is 0, and each of the {shards} shards has a port behind it: give it a number")
    for what, port in (("port", config.port + 1), ("cluster.peer", parse_address(config.cluster.peer)[1])):
        if port + shards - 1 > PORT_MAX:
            raise InvalidArgument(f"{what} is too high: each of the {shards} shards has a port of its own behind it")


@asynccontextmanager
async def sharing(config: Config, etcd: Etcd, presence: Presence, needs: Needs) -> AsyncIterator[None]:
    """Follow the keys of the cluster: they tell which shards this node needs, and the controller places them."""
    cluster = config.cluster
    view = NamesView(etcd, Keys(cluster.name).prefix, log=logs.info)
    data = presence.folder.root

    def look() -> None:
        wanted = Topology.of(view.keys, view.revision).on(cluster.node)
        needs.use({*wanted, *(shard for shard in range(needs.shards) if has_copy(shard_folder(data, shard)))})

    view.changed.append(look)
    controller = Controller(etcd, view, Keys(cluster.name), cluster.node, lambda: presence.lease, cluster.replace_after_s)
    tasks = [asyncio.create_task(view.run()), asyncio.create_task(controller.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
