"""Requests in a cluster of several shards go to the leader of their topic's shard, or to those of its partitions, or to all.
Answers of partitions are put together in `shards.topics`.

Every process of every node answers every request: the name of a topic tells the shard, and the name server the leader, so that a
request is passed on once at most (`forward`). Requests about the machine itself, as for its metrics, go to all processes of the
node that was asked. Other requests without a topic are answered by the process that gets them.

Processes of the cluster believe each other beside a client's request: one may be a step of another request, which was admitted
already, and a fetch may have a name. They prove their knowledge of the cluster's secret (`proof_of`).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from turtlemq.errors import InvalidArgument, TurtleError, Unavailable
from turtlemq.replica.topology import shard_url
from turtlemq.server.auth import TOKEN_KEY
from turtlemq.server.cluster_config import read_secret
from turtlemq.server.forward import Forwarder, counted, give_up, leads_shard
from turtlemq.server.incoming import body
from turtlemq.server.outbound import OutboundAnswer
from turtlemq.server.outgoing.reply import Answered
from turtlemq.server.proxy import DIRECT, HOP, INTERNAL, PROOF, Lost, NotSent, Payload, Proxy, pass_back
from turtlemq.server.service import Service
from turtlemq.server.shards import merge
from turtlemq.server.shards.calls import READ_S, Part, Use, read_whole
from turtlemq.server.shards.gather import GATHERED, GLANCE_S, Gathered, gathered
from turtlemq.server.shards.partitions import parse
from turtlemq.server.shards.router import COMMAND, Named
from turtlemq.server.shards.topics import TopicRouter
from turtlemq.storage import names

if TYPE_CHECKING:
    from turtlemq.server.cluster_part import ClusterPart

T = TypeVar("T")

OF_LEADERS = ("GET /v1/topics", "GET /v1/find", "GET /v1/status", "GET /v1/status/history", "GET /v1/tenants")
METRICS, AUDIT = "GET /metrics", "GET /v1/audit"  # of all processes of a node


def proof_of(secret: bytes, cluster: str) -> str:
    """The proof of a cluster's processes among each other, over HTTP."""
    return hmac.new(secret, f"turtlemq http {cluster}".encode(), "sha256").hexdigest()


class LeaderCalls:
    """The way from one process to the leaders of all shards."""

    def __init__(self, service: Service, cluster: ClusterPart, forwarder: Forwarder) -> None:
        self._service, self._cluster, self._forwarder = service, cluster, forwarder

    @property
    def shards(self) -> int:
        return self._cluster.shards

    def has(self, shard: int) -> bool:
        return leads_shard(self._service, self._cluster, shard)

    def urls(self, request: web.Request) -> list[str | None]:
        leaders = self._cluster.topology().leaders
        return [leaders[shard].url if shard < len(leaders) else None for shard in range(self.shards)]

    def count(self, outcome: str) -> None:
        self._service.meter.proxied[outcome] += 1

    async def whole(self, request: web.Request, shard: int, read_s: float = READ_S) -> Part:
        return await self.asked(request, shard, read_s, read_whole)

    async def asked(self, request: web.Request, shard: int, read_s: float, use: Use[T]) -> T:
        return await self._forwarder.part(request, self._cluster, shard, use)


class ClusterRouter(TopicRouter):
    """The requests of one process of a node."""

    def __init__(self, service: Service, cluster: ClusterPart) -> None:
        cafile, self._proof = cluster.options.tls_ca, proof_of(read_secret(cluster.options.secret_file), cluster.options.name)
        self._cluster, self._proxy = cluster, Proxy(cafile, proof=self._proof)
        self._forwarder = Forwarder(service, cafile, self._proof)
        super().__init__(service, LeaderCalls(service, cluster, self._forwarder))

    async def close(self) -> None:
        """End the connections to other processes."""
        await self._forwarder.close()
        await self._proxy.close()

    def receive(self, request: web.Request) -> bool:
        """Take over what another process of the cluster says. Returns whether the request is of that process itself."""
        given = request.headers.get(PROOF)
        if given is None or not hmac.compare_digest(given.encode(), self._proof.encode()):
            return False
        self._receive_names(request)
        if INTERNAL not in request.headers:
            return False
        request[INTERNAL], request[TOKEN_KEY] = True, None
        return True

    def has(self, topic: str, named: str | None) -> bool:
        """Whether this process answers a request about a topic by itself. `named`: the partition that it names, if any."""
        if named is None:
            return super().has(topic, None)
        try:
            number, count = parse(named)
        except InvalidArgument:
            return False
        return self._calls.has(self._partitions.places(topic, count)[number])

    async def elsewhere(self, request: web.Request) -> Answered | None:
        """The answer of other processes to a request; None if this one has to answer itself. Requires: it is admitted."""
        place, cluster = request.match_info, self._cluster
        if place.route.resource is None:
            return None
        if (topic := place.get("topic")) is not None:
            return await self._of_topic(request, topic)
        is_passed_on = HOP in request.headers
        if request.path == COMMAND:
            return await self._command(request)
        operation = f"{request.method} {place.route.resource.canonical}"
        if (number := place.get("shard")) is not None:
            return await self._forwarder.to_shard(request, cluster, int(number)) if self._is_shard(number) else None
        if is_passed_on or request.headers.get(DIRECT) == "1":
            return await self._forwarder.to_shard(request, cluster, cluster.shard) if operation in OF_LEADERS else None
        if operation in OF_LEADERS:
            return await self._of_leaders(request, GATHERED[operation])
        return await self._of_node(request, operation) if operation in (METRICS, AUDIT) else None

    def _is_shard(self, text: str) -> bool:
        return text.isascii() and text.isdigit() and len(text) < 4 and int(text) < self._cluster.shards

    async def _of_topic(self, request: web.Request, topic: str, is_command: bool = False) -> Answered | None:
        if names.is_topic(topic):
            return await self._by_topic(request, topic, is_command)
        return await self._of_shard(request, topic, self._partitions.owner(topic))  # a leader refuses it

    def _revision(self) -> int:
        return self._cluster.topology().revision

    async def _of_shard(self, request: web.Request, topic: str, shard: int) -> Answered | None:
        return await self._forwarder.to_shard(request, self._cluster, shard, partial(self._pass_back, request, topic))

    async def _command(self, request: web.Request) -> Answered | None:
        """A command goes to the shard of its topic. Without a topic, each shard is asked, until one knows the message."""
        await body.keep(request)
        try:
            topic = (await body.read_as(request, Named)).topic
        except TurtleError:
            return None  # it is refused here
        if topic is not None:
            return await self._of_topic(request, topic, is_command=True)
        if HOP in request.headers:
            return await self._forwarder.to_shard(request, self._cluster, self._cluster.shard)
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
        asking: asyncio.Future[OutboundAnswer] = asyncio.ensure_future(self._proxy.ask(request, url, Payload(request)))
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
