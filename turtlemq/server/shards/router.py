"""Requests in one of several processes: those about its own topics are answered here, others are passed on to their owner.

Requests about all topics are gathered from all processes; those about topics with partitions are in `topics`. A request goes on
once: one that was passed on, or sent directly, to the wrong process gets a 421.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from aiohttp import web
from msgspec import Struct

from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import trace
from turtlemq.server.auth import TOKEN_KEY, set_remote
from turtlemq.server.errors import NotLeader
from turtlemq.server.forward import counted
from turtlemq.server.incoming import body
from turtlemq.server.outgoing.reply import Answered
from turtlemq.server.proxy import CLIENT, DIRECT, EMPTY, HOP, INTERNAL, PARTITION, Payload
from turtlemq.server.request import urls_of
from turtlemq.server.service import Service
from turtlemq.server.shards.calls import READ_S, Part, SiblingCalls
from turtlemq.server.shards.gather import GATHERED, Gathered, gathered
from turtlemq.server.shards.siblings import Siblings
from turtlemq.server.shards.topics import TopicRouter
from turtlemq.storage import names

COMMAND = "/v1/command"


class Named(Struct):
    """The topic of a command; None: the command is about a message in any topic."""

    topic: str | None = None


class ShardRouter(TopicRouter):
    """The requests of one process of a server with several shards."""

    def __init__(self, service: Service, siblings: Siblings) -> None:
        self._siblings, self._to = siblings, SiblingCalls(service, siblings)
        super().__init__(service, self._to)

    async def close(self) -> None:
        """End the connections to other processes."""
        await self._to.close()

    def receive(self, request: web.Request) -> bool:
        """Take over the client's address, of a request that another process has passed on. Only those can use the Unix socket.
        Returns whether the request is of that process itself."""
        address = request.headers.get(CLIENT)
        if address is None or request.transport is None:
            return False
        connection: socket.socket | None = request.transport.get_extra_info("socket")
        if connection is None or connection.family != socket.AF_UNIX:
            return False
        set_remote(request, address)
        self._receive_names(request)
        if INTERNAL not in request.headers:
            return False
        request[INTERNAL], request[TOKEN_KEY] = True, None
        return True

    async def elsewhere(self, request: web.Request) -> Answered | None:
        """The answer of other processes to a request; None if this one has to answer itself. Requires: it is admitted."""
        place = request.match_info
        topic, is_passed_on = place.get("topic"), HOP in request.headers
        if EMPTY in request.headers:
            await Payload(request).arrive()
        if topic is not None:
            return await self._by_topic(request, topic) if names.is_topic(topic) else None
        if place.route.resource is None:
            return None
        if request.path == COMMAND:
            return await self._command(request)
        if is_passed_on:
            return None
        found = GATHERED.get(f"{request.method} {place.route.resource.canonical}")
        return None if found is None else await gathered(found, request, await self._parts(request, found))

    def _revision(self) -> int:
        return 0

    async def _of_shard(self, request: web.Request, topic: str, shard: int) -> Answered | None:
        if shard == self._siblings.shard or PARTITION in request.headers:
            return None  # a partition that is not here is refused
        url = urls_of(request, self._siblings)[shard]
        if HOP in request.headers or request.headers.get(DIRECT) == "1":
            self._calls.count("refused")
            text = f"topic {topic!r} lives in shard {shard}, and this is shard {self._siblings.shard}: nothing was done"
            raise NotLeader(text, leader_url=url, revision=0)
        request[trace.OWNER] = url
        with counted(self._service):
            return await trace.waited(request, self._passed_on(request, shard))

    async def _command(self, request: web.Request) -> Answered | None:
        """A command goes to the owner of its topic. Without a topic, each process is asked, until one knows the message."""
        await body.keep(request)
        try:
            topic = (await body.read_as(request, Named)).topic
        except TurtleError:
            return None  # it is refused here
        if topic is not None:
            return await self._by_topic(request, topic, is_command=True) if names.is_topic(topic) else None
        if HOP in request.headers:
            return None
        answered: web.StreamResponse | None = None
        for shard in range(self._siblings.count):
            answered = await self._passed_on(request, shard)
            if not isinstance(answered, web.Response) or b"UNKNOWN_MESSAGE" not in bytes(answered.body or b""):  # type: ignore[arg-type]
                break
        return answered

    # Other processes

    async def _passed_on(self, request: web.Request, shard: int) -> web.StreamResponse:
        """The answer of a shard's process. Raises `Unavailable` if it does not answer."""
        use = partial(self._pass_back, request, request.match_info.get("topic"))
        answered = await self._calls.asked(request, shard, READ_S, use)
        self._calls.count("answered")
        return answered

    async def _parts(self, request: web.Request, found: Gathered) -> list[Part | None]:
        """The answers of all processes; None for one that does not answer, if that is allowed."""
        return list(await asyncio.gather(*(self._part(request, shard, found) for shard in range(self._siblings.count))))

    async def _part(self, request: web.Request, shard: int, found: Gathered) -> Part | None:
        try:
            return await self._calls.whole(request, shard, found.wait_s)
        except Unavailable:
            if found.is_partial:
                return None
            raise
