"""Requests in one of several processes: those about its own topics are answered here, others are passed on to their owner.

A request about a topic with partitions is answered by the process that gets it, with the help of those that have them
(`fan_out`). Requests about all topics are gathered from all processes. A request goes on once: one that was passed on, or
sent directly, to the wrong process gets a 421.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

import aiohttp
from aiohttp import web
from msgspec import Struct

from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import trace
from turtlemq.server.auth import TOKEN_KEY, set_remote
from turtlemq.server.errors import NotLeader
from turtlemq.server.forward import counted
from turtlemq.server.handlers import consume, produce
from turtlemq.server.incoming import body
from turtlemq.server.outgoing.reply import Answered
from turtlemq.server.proxy import CLIENT, DIRECT, EMPTY, HOP, INTERNAL, PARTITION, Payload, pass_back
from turtlemq.server.request import urls_of
from turtlemq.server.service import Service
from turtlemq.server.shards import fan_out
from turtlemq.server.shards.ask import Ask
from turtlemq.server.shards.calls import READ_S, Calls, Misrouted, Part, response_of
from turtlemq.server.shards.fan_fetch import FanFetch
from turtlemq.server.shards.gather import GATHERED, Gathered, gathered
from turtlemq.server.shards.named_polls import END_POLL, POLL, NamedPolls
from turtlemq.server.shards.partitions import Partitions, parse
from turtlemq.server.shards.siblings import Siblings
from turtlemq.shards import partitions_of, shard_of
from turtlemq.storage import names

COMMAND = "/v1/command"
TRIES = 3  # of a request about a topic that is deleted and made anew meanwhile
_TOPIC = "/v1/topics/{topic}"


class Named(Struct):
    """The topic of a command; None: the command is about a message in any topic."""

    topic: str | None = None


class ShardRouter:
    """The requests of one process of a server with several shards."""

    def __init__(self, service: Service, siblings: Siblings) -> None:
        self._service, self._siblings = service, siblings
        self._calls = Calls(service, siblings)
        self._partitions = Partitions(service, siblings, self._calls)
        self._fetches, self._polls = FanFetch(self._calls), NamedPolls()

    async def close(self) -> None:
        """End the connections to other processes."""
        await self._calls.close()

    def has(self, topic: str, named: str | None) -> bool:
        """Whether this process may answer a request about a topic by itself. `named`: the partition that it names, if any."""
        return named is not None or (self._siblings.has(topic) and self._partitions.of(topic) == 1)

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
        if (name := request.headers.get(POLL)) is not None:
            request[consume.POLL] = partial(self._polls.answered, name)
        if (name := request.headers.get(END_POLL)) is not None:
            request[END_POLL] = name
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
        if place.route.resource is None or (is_passed_on and PARTITION not in request.headers):
            return None
        if request.path == COMMAND:
            return await self._command(request)
        found = GATHERED.get(f"{request.method} {place.route.resource.canonical}")
        return None if found is None else await gathered(found, request, await self._parts(request, found))

    # Topics

    async def _by_topic(self, request: web.Request, topic: str, is_command: bool = False) -> Answered | None:
        if PARTITION in request.headers:
            return await self._for_partition(request, topic)
        for _ in range(TRIES):
            count = self._partitions.of(topic)
            if count == 1 or (not self._siblings.has(topic) and (_is_for_owner(request) or HOP in request.headers)):
                return await self._by_owner(request, topic)
            try:
                return await self._by_partitions(request, topic, count, is_command)
            except Misrouted:
                await self._partitions.agree(request, topic)
        raise Unavailable(f"the partitions of topic {topic!r} change: nothing was done. Try again.")

    async def _for_partition(self, request: web.Request, topic: str) -> Answered | None:
        """A request about one partition, which is answered here or refused."""
        if self._partitions.is_question(request):
            return await self._partitions.answer_question(request, topic) if INTERNAL in request else None
        named, may_make = request.headers[PARTITION], _is_put(request) and INTERNAL in request
        number, count = parse(named)
        if not self._partitions.has(topic, number, count, may_make or (_is_put(request) and not number)):
            self._calls.count("refused")
            raise self._misrouted(
                request, topic, f"shard {self._siblings.shard} has not got partition {named} of topic {topic!r}"
            )
        if HOP not in request.headers:
            request[produce.CHECK_IDS] = partial(self._check_ids, request, topic, number, count)
        if END_POLL in request:
            self._polls.end(request[END_POLL])
            return web.json_response({})
        if not number and not _is_for_owner(request):
            self._partitions.confirm_soon(request, topic)
        return None

    def _check_ids(self, request: web.Request, topic: str, number: int, count: int, ids: Sequence[str | None] | None) -> None:
        """Refuse messages of a client that knows the partitions, if one of them belongs into another one, or has no id."""
        known = [] if ids is None else [id_ for id_ in ids if id_ is not None]
        if ids is None or len(known) < len(ids) or partitions_of(known, count).count(number) < len(ids):
            raise self._misrouted(request, topic, f"there are messages that do not belong into partition {number}/{count}")

    def _misrouted(self, request: web.Request, topic: str, why: str) -> NotLeader:
        """The refusal of a request about a partition that another process has."""
        urls, found = urls_of(request, self._siblings), self._service.engine.topics.get(topic)
        owner, count = urls[shard_of(topic, self._siblings.count)], 0 if found is None else found.settings.partitions
        return NotLeader(f"{why}: nothing was done", leader_url=owner, revision=0, partitions=count)

    async def _by_owner(self, request: web.Request, topic: str) -> Answered | None:
        owner = shard_of(topic, self._siblings.count)
        if owner == self._siblings.shard:
            found = await self._partitions.put(request, topic) if _is_put(request) else None
            return None if found is None else await self._united(request, topic, found)
        if HOP in request.headers or request.headers.get(DIRECT) == "1":
            self._calls.count("refused")
            text = f"topic {topic!r} lives in shard {owner}, and this is shard {self._siblings.shard}: nothing was done"
            raise NotLeader(text, leader_url=urls_of(request, self._siblings)[owner], revision=0)
        request[trace.OWNER] = urls_of(request, self._siblings)[owner]
        with counted(self._service):
            return await trace.waited(request, self._passed_on(request, owner))

    async def _by_partitions(self, request: web.Request, topic: str, count: int, is_command: bool) -> Answered | None:
        """The answer of a topic's partitions; None: this process refuses the request. Raises `Misrouted` if they are not as it
        thinks."""
        await body.keep(request)
        places = self._name_places(request, topic, count)
        with counted(self._service):
            if _is_put(request):
                put = await self._partitions.put(request, topic)
                return None if put is None else await self._united(request, topic, put)
            if _is_for_owner(request):
                return response_of(await self._partitions.delete(request, topic))
            ask = self._ask(request, topic, places)
            answered = await (fan_out.command(ask) if is_command else fan_out.answer(ask))
            self._calls.count("split")
            return answered

    def _name_places(self, request: web.Request, topic: str, count: int) -> list[int]:
        """The shards of a topic's partitions, whose addresses will be in the answer."""
        places, urls = self._partitions.places(topic, count), urls_of(request, self._siblings)
        request[trace.PLACES] = " ".join(urls[place] for place in places)
        return places

    async def _united(self, request: web.Request, topic: str, put: Part) -> Answered:
        """The answer to settings that were stored: the whole topic."""
        if put.status != 200:
            return response_of(put)
        places = self._partitions.places(topic, self._partitions.of(topic))
        return await fan_out.topic(self._ask(request, topic, places))

    def _ask(self, request: web.Request, topic: str, places: list[int]) -> Ask:
        agree = partial(self._partitions.agree, request, topic)
        return Ask(request, topic, places, self._calls, self._fetches, agree)

    async def _command(self, request: web.Request) -> Answered | None:
        """A command goes to the owner of its topic. Without a topic, each process is asked, until one knows the message."""
        await body.keep(request)
        try:
            topic = (await body.read_as(request, Named)).topic
        except TurtleError:
            return None  # it is refused here
        if topic is not None:
            return await self._by_topic(request, topic, is_command=True) if names.is_topic(topic) else None
        answered: web.StreamResponse | None = None
        for shard in range(self._siblings.count):
            answered = await self._passed_on(request, shard)
            if not isinstance(answered, web.Response) or b"UNKNOWN_MESSAGE" not in bytes(answered.body or b""):  # type: ignore[arg-type]
                break
        return answered

    # Other processes

    async def _passed_on(self, request: web.Request, shard: int) -> web.StreamResponse:
        """The answer of a shard's process. Raises `Unavailable` if it does not answer."""
        topic = request.match_info.get("topic")

        async def use(response: aiohttp.ClientResponse) -> web.StreamResponse:
            if topic is not None and trace.PLACES_HEADER in response.headers:
                count = len(response.headers[trace.PLACES_HEADER].split())
                self._partitions.learn(topic, count)
                self._name_places(request, topic, count)
            return await pass_back(request, response)

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


def _is_for_owner(request: web.Request) -> bool:
    """Whether a request makes, changes or deletes a topic."""
    resource = request.match_info.route.resource
    return request.method in ("PUT", "DELETE") and resource is not None and resource.canonical == _TOPIC


def _is_put(request: web.Request) -> bool:
    return request.method == "PUT" and _is_for_owner(request)
