"""Long polls for the topology of a cluster: they wait until it differs from the one at the revision that the caller has.

Free space and clocks of nodes, which are told anew every two seconds, are no difference. The topology of a server without a
cluster never changes, so that a poll there waits for its whole time. A server that stops ends all polls.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import structs

if TYPE_CHECKING:  # a single node loads nothing of replication
    from turtlemq.replica.topology import Topology
    from turtlemq.server.cluster_part import ClusterPart


class TopologyWatch:
    """Notices changes of the topology, from the first question for it on. All methods run on the event loop."""

    def __init__(self) -> None:
        self._cluster: ClusterPart | None = None
        self._essence: Topology | None = None
        self._changed_at = 0  # the revision at which the last change was seen
        self._changed = asyncio.Event()  # replaced at every change
        self._is_over = False

    def use(self, cluster: ClusterPart) -> None:
        """Follow the keys of a cluster."""
        if self._cluster is not cluster:
            self._cluster = cluster
            cluster.view.changed.append(self._look)
        self._look()

    async def after(self, revision: int, seconds: float) -> None:
        """Return when the topology has changed since a revision, or when the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while self._changed_at <= revision and not self._is_over:
                    await self._changed.wait()
        except TimeoutError:
            return

    def end(self) -> None:
        """End all polls."""
        self._is_over = True
        self._changed.set()

    def _look(self) -> None:
        assert self._cluster is not None
        topology = self._cluster.topology()
        essence = _essence(topology)
        if essence != self._essence:
            self._essence, self._changed_at = essence, topology.revision
            self._changed.set()
            self._changed = asyncio.Event()


def _essence(topology: Topology) -> Topology:
    """A topology without the figures that change all the time."""
    nodes = {name: structs.replace(node, free_bytes=0, clock_ms=0) for name, node in topology.nodes.items()}
    return structs.replace(topology, revision=0, nodes=nodes)


WATCH = web.AppKey("topology_watch", TopologyWatch)
