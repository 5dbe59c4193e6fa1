"""Requests in a cluster of several shards: those about a topic go to the leader of its shard, those about all topics to all.

Every process of every node answers every request: the name of a topic tells the shard, and the name server the leader, so that a
request is passed on once at most (`forward`). Requests about the machine itself, as for its metrics, go to all processes of the
node that was asked. Other requests without a topic are answered by the process that gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from turtlemq.errors import TurtleError, Unavailable
from turtlemq.replica.topology import shard_url
from turtlemq.server.forward import Forwarder, counted, give_up
from turtlemq.server.incoming import body
from turtlemq.server.proxy import DIRECT, HOP, Lost, NotSent, Payload, Proxy, pass_back
from turtlemq.server.service import Service
from turtlemq.server.shards import merge
from turtlemq.server.shards.calls import Part, read_whole
from turtlemq.server.shards.gather import GATHERED, GLANCE_S, Gathered, gathered
from turtlemq.server.shards.router import COMMAND, Named
from turtlemq.shards import shard_of

if TYPE_CHECKING:
    from turtlemq.server.cluster_part import ClusterPart

OF_LEADERS = ("GET /v1/topics", "GET /v1/find", "GET /v1/status", "GET /v1/status/history", "GET /v1/tenants")
METRICS, AUDIT = "GET /metrics", "GET /v1/audit"  # of all processes of a node


class ClusterRouter:
    """The requests of one process of a node."""

    def __init__(self, service: Service, cluster: ClusterPart) -> None:
        cafile = cluster.options.tls_ca
        self._service, self._cluster = service, cluster
        self._forwarder, self._proxy = Forwarder(service, cafile), Proxy(cafile)

    async def close(self) -> None:
        """End the connections to other processes."""
        await self._forwarder.close()
        await self._proxy.close()

    def receive(self, request: web.Request) -> bool:
        """Nothing is to be taken over from the process that has passed a request on, and no request is its own."""
        return False

    def has(self, topic: str, named: str | None) -> bool:
        """Whether this process may answer a request about a topic by itself, if it leads: topics have no partitions here."""
        return True

    async def elsewhere(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of other processes to a request; None if this one has to answer itself. Requires: it is admitted."""
        place, cluster = request.match_info, self._cluster
        if place.route.resource is None:
            return None
        if (topic := place.get("topic")) is not None:
            return await self._forwarder.to_shard(request, cluster, shard_of(topic, cluster.shards))
        is_passed_on = HOP in request.headers
        if request.path == COMMAND and not is_passed_on:
            return await self._command(request)
        operation = f"{request.method} {place.route.resource.canonical}"
        if (number := place.get("shard")) is not None:
            return await self._forwarder.to_shard(request, cluster, int(number)) if self._is_shard(number) else None
        if is_passed_on or request.headers.get(DIRECT) == "1":
            needs_leader = operation in OF_LEADERS or request.path == COMMAND
            return await self._forwarder.to_shard(request, cluster, cluster.shard) if needs_leader else None
        if operation in OF_LEADERS:
            return await self._of_leaders(request, GATHERED[operation])
        return await self._of_node(request, operation) if operation in (METRICS, AUDIT) else None

    def _is_shard(self, text: str) -> bool:
        return text.isascii() and text.isdigit() and len(text) < 4 and int(text) < self._cluster.shards

    async def _command(self, request: web.Request) -> web.StreamResponse | None:
        """A command goes to the shard of its topic. Without a topic, each shard is asked, until one knows the message."""
        await body.keep(request)
        try:
            topic = (await body.read_as(request, Named)).topic
        except TurtleError:
            return None  # it is refused here
        if topic is not None:
            return await self._forwarder.to_shard(request, self._cluster, shard_of(topic, self._cluster.shards))
        answered: web.StreamResponse | None = None
        with counted(self._service):
            for shard in range(self._cluster.shards):
                answered = await self._forwarder.part(request, self._cluster, shard, partial(pass_back, request))
                if not isinstance(answered, web.Response) or b"UNKNOWN_MESSAGE" not in bytes(answered.body or b""):  # type: ignore[arg-type]
                    break
        return answered

    # All leaders

    async def _of_leaders(self, request: web.Request, found: Gathered) -> web.StreamResponse:
        with counted(self._service):
            asked = (self._of_leader(request, shard, found) for shard in range(self._cluster.shards))
            return await gathered(found, request, await asyncio.gather(*asked))

    async def _of_leader(self, request: web.Request, shard: int, found: Gathered) -> Part | None:
        """The answer of a shard's leader; None if it does not come in time, and the answer may do without it."""
        try:
            async with asyncio.timeout(found.wait_s):
                return await self._forwarder.part(request, self._cluster, shard, read_whole)
        except (TurtleError, TimeoutError) as error:
            if found.is_partial:
                return None
            raise error if isinstance(error, TurtleError) else Unavailable(f"shard {shard} does not answer") from error

    # All processes of this node

    async def _of_node(self, request: web.Request, operation: str) -> web.StreamResponse:
        topology, node = self._cluster.topology(), self._cluster.options.node
        place, shards = topology.nodes.get(node), topology.on(node)
        if place is None:
            return await gathered(_merged(operation, [self._cluster.shard]), request, [None])
        with counted(self._service):
            asked = (self._of_process(request, shard_url(place.url, shard)) for shard in shards)
            return await gathered(_merged(operation, shards), request, await asyncio.gather(*asked))

    async def _of_process(self, request: web.Request, url: str) -> Part | None:
        asking: asyncio.Future[aiohttp.ClientResponse] = asyncio.ensure_future(self._proxy.ask(request, url, Payload(request)))
        try:
            async with asyncio.timeout(GLANCE_S):
                return await read_whole(await asyncio.shield(asking))
        except (NotSent, Lost, TimeoutError):
            give_up(asking)
            return None


def _merged(operation: str, shards: Sequence[int]) -> Gathered:
    """The way from the answers of a node's processes, of these shards, to one."""
    if operation == AUDIT:
        return GATHERED[AUDIT]

    def metrics(_: web.Request, parts: Sequence[bytes | None]) -> bytes:
        return merge.metrics([None if part is None else part.decode() for part in parts], shards).encode()

    return Gathered(metrics, is_partial=True)
