"""Requests in one of several processes: those about its own topics are answered here, others are passed on to their owner.

Requests about all topics are gathered from all processes. A process that restarts has its socket all the time, so requests wait
there for a second or two. A request goes on once: one that was passed on, or sent directly, to the wrong process gets a 421.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import aiohttp
from aiohttp import web
from msgspec import Struct

from turtlemq.errors import TurtleError, Unavailable, describe
from turtlemq.server import trace
from turtlemq.server.aiohttp_internals import set_remote
from turtlemq.server.errors import NotLeader
from turtlemq.server.forward import can_be_repeated, counted, give_up
from turtlemq.server.incoming import body
from turtlemq.server.proxy import CHANGES_NOTHING, CLIENT, DIRECT, EMPTY, HOP, Lost, NotSent, Payload, Proxy, pass_back
from turtlemq.server.request import time_left, urls_of
from turtlemq.server.service import Service
from turtlemq.server.shards.gather import GATHERED, READ_S, Gathered, Part, gathered
from turtlemq.server.shards.siblings import Siblings
from turtlemq.shards import shard_of
from turtlemq.storage import names

T = TypeVar("T")

COMMAND = "/v1/command"
WAIT_S = 10.0  # for a process that restarts, until it takes a request
WAIT_PART = 0.9  # of the caller's own time, so that the refusal reaches it
PAUSE_S = 0.02  # before a process that has ended is asked again


class Named(Struct):
    """The topic of a command; None: the command is about a message in any topic."""

    topic: str | None = None


class ShardRouter:
    """The requests of one process of a server with several shards."""

    def __init__(self, service: Service, siblings: Siblings) -> None:
        self._service, self._siblings = service, siblings
        self._proxies = [Proxy(path=path) for path in siblings.paths]

    async def close(self) -> None:
        """End the connections to other processes."""
        for proxy in self._proxies:
            await proxy.close()

    def receive(self, request: web.Request) -> None:
        """Take over the client's address, of a request that another process has passed on. Only those can use the Unix socket."""
        address = request.headers.get(CLIENT)
        if address is None or request.transport is None:
            return
        connection: socket.socket | None = request.transport.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_UNIX:
            set_remote(request, address)

    async def elsewhere(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of other processes to a request; None if this one has to answer itself. Requires: it is admitted."""
        place = request.match_info
        topic, is_passed_on = place.get("topic"), HOP in request.headers
        if EMPTY in request.headers:
            await Payload(request).arrive()
        if topic is not None:
            return await self._by_topic(request, topic) if names.is_topic(topic) else None
        if is_passed_on or place.route.resource is None:
            return None
        if request.path == COMMAND:
            return await self._command(request)
        found = GATHERED.get(f"{request.method} {place.route.resource.canonical}")
        return None if found is None else await gathered(found, request, await self._parts(request, found))

    async def _by_topic(self, request: web.Request, topic: str) -> web.StreamResponse | None:
        owner = shard_of(topic, self._siblings.count)
        if owner == self._siblings.shard:
            return None
        if HOP in request.headers or request.headers.get(DIRECT) == "1":
            self._count("refused")
            text = f"topic {topic!r} lives in shard {owner}, and this is shard {self._siblings.shard}: nothing was done"
            raise NotLeader(text, leader_url=urls_of(request, self._siblings)[owner], revision=0)
        request[trace.OWNER] = urls_of(request, self._siblings)[owner]
        with counted(self._service):
            return await trace.waited(request, self._passed_on(request, owner))

    async def _command(self, request: web.Request) -> web.StreamResponse | None:
        """A command goes to the owner of its topic. Without a topic, each process is asked, until one knows the message."""
        await body.keep(request)
        try:
            topic = (await body.read_as(request, Named)).topic
        except TurtleError:
            return None  # it is refused here
        if topic is not None:
            return await self._by_topic(request, topic) if names.is_topic(topic) else None
        answered: web.StreamResponse | None = None
        for shard in range(self._siblings.count):
            answered = await self._passed_on(request, shard)
            if not isinstance(answered, web.Response) or b"UNKNOWN_MESSAGE" not in bytes(answered.body or b""):  # type: ignore[arg-type]
                break
        return answered

    # Other processes

    def _count(self, outcome: str) -> None:
        self._service.meter.proxied[outcome] += 1

    async def _passed_on(self, request: web.Request, shard: int) -> web.StreamResponse:
        """The answer of a shard's process. Raises `Unavailable` if it does not answer."""
        answered = await self._asked(request, shard, READ_S, partial(pass_back, request))
        self._count("answered")
        return answered

    async def _asked(
        self, request: web.Request, shard: int, read_s: float, use: Callable[[aiohttp.ClientResponse], Awaitable[T]]
    ) -> T:
        """`use` of the answer of a process. A request that was not carried out, or may be twice, is sent again for a while."""
        payload, end = Payload(request), asyncio.get_running_loop().time() + min(WAIT_S, read_s, WAIT_PART * time_left(request))
        while True:
            try:
                return await use(await self._head(request, shard, payload, end, read_s))
            except NotSent as error:
                can_repeat, text = True, f"shard {shard} does not answer: {error}. Nothing was done. Try again."
            except Lost as error:
                can_repeat = can_be_repeated(request.method, request.path)
                text = f"the process of shard {shard} was lost: {error}. It may be done, or not; "
                text += "sending it again with the same ids is safe"
            is_over = asyncio.get_running_loop().time() >= end
            if is_over or not can_repeat or not payload.can_be_sent or trace.STARTED in request:
                self._count("lost")
                raise Unavailable(text)
            await asyncio.sleep(PAUSE_S)

    async def _head(
        self, request: web.Request, shard: int, payload: Payload, end: float, read_s: float
    ) -> aiohttp.ClientResponse:
        """The head of a process' answer. Raises `NotSent` if the process does not take the request in time."""
        asking: asyncio.Future[aiohttp.ClientResponse] = asyncio.ensure_future(
            self._proxies[shard].ask(request, f"http://shard-{shard}", payload)
        )
        is_read = request.method in CHANGES_NOTHING
        try:
            await asyncio.wait([asking], timeout=read_s if is_read else max(0.0, end - asyncio.get_running_loop().time()))
            if not asking.done() and (is_read or not payload.is_under_way):
                raise NotSent("it restarts, or has too much to do")
            return await asking
        except BaseException:
            give_up(asking)
            raise

    async def _parts(self, request: web.Request, found: Gathered) -> list[Part | None]:
        """The answers of all processes; None for one that does not answer, if that is allowed."""
        return list(await asyncio.gather(*(self._part(request, shard, found) for shard in range(self._siblings.count))))

    async def _part(self, request: web.Request, shard: int, found: Gathered) -> Part | None:
        try:
            return await self._asked(request, shard, found.wait_s, _read)
        except Unavailable:
            if found.is_partial:
                return None
            raise


async def _read(response: aiohttp.ClientResponse) -> Part:
    """The whole answer of a process. Raises `Lost` if it does not come."""
    try:
        return Part(response.status, response.headers.get("Content-Type", ""), await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(f"its answer is not complete: {describe(error)}") from error
    finally:
        response.release()
