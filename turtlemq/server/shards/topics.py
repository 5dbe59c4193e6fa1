"""Requests about one topic in one of several processes: of a topic without partitions its owner answers, the process with its
shard. Those about a topic with partitions are answered by the process that gets them, with the help of those that have them
(`fan_out`), and those that name a partition by the process with it.

How a request reaches the process of a shard is the matter of its two kinds: `router` for the processes of one server, and
`cluster_router` for the leaders of a cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from turtlemq.errors import Unavailable
from turtlemq.server import trace
from turtlemq.server.errors import NotLeader
from turtlemq.server.forward import counted
from turtlemq.server.handlers import consume, produce
from turtlemq.server.incoming import body
from turtlemq.server.outbound import OutboundAnswer
from turtlemq.server.outgoing.reply import Answered
from turtlemq.server.proxy import HOP, INTERNAL, PARTITION, Misrouted, pass_back
from turtlemq.server.service import Service
from turtlemq.server.shards import fan_out
from turtlemq.server.shards.ask import Ask
from turtlemq.server.shards.calls import Calls, response_of
from turtlemq.server.shards.fan_fetch import FanFetch
from turtlemq.server.shards.named_polls import END_POLL, POLL, NamedPolls
from turtlemq.server.shards.partitions import Partitions, parse
from turtlemq.shards import partitions_of

TRIES = 3  # of a request about a topic that is deleted and made anew meanwhile
TOPIC = "/v1/topics/{topic}"


class TopicRouter(ABC):
    """The requests about topics of one process."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service, self._calls = service, calls
        self._partitions = Partitions(service, calls)
        self._fetches, self._polls = FanFetch(calls), NamedPolls()

    @property
    def shards(self) -> int:
        """How many processes share the topics; a topic has no more partitions."""
        return self._calls.shards

    def partitioned(self) -> dict[str, int]:
        """The number of partitions of topics with several, as far as this process has or has met them."""
        return self._partitions.met()

    @abstractmethod
    async def _of_shard(self, request: web.Request, topic: str, shard: int) -> Answered | None:
        """The answer of the process of a shard to a request as it came; None if this process has to answer. Raises `NotLeader` if
        it has not got the shard, and the request must not be passed on."""

    @abstractmethod
    def _revision(self) -> int:
        """Of the addresses of processes."""

    def has(self, topic: str, named: str | None) -> bool:
        """Whether this process may answer a request about a topic by itself. `named`: the partition that it names, if any."""
        if named is not None:
            return True
        return self._calls.has(self._partitions.owner(topic)) and self._partitions.of(topic) == 1

    def _receive_names(self, request: web.Request) -> None:
        """Take over what another process says about its fetch. Requires: it is one."""
        if (name := request.headers.get(POLL)) is not None:
            request[consume.POLL] = partial(self._polls.answered, name)
        if (name := request.headers.get(END_POLL)) is not None:
            request[END_POLL] = name

    async def _by_topic(self, request: web.Request, topic: str, is_command: bool = False) -> Answered | None:
        if PARTITION in request.headers:
            return await self._for_partition(request, topic)
        owner = self._partitions.owner(topic)
        for _ in range(TRIES):
            count = self._partitions.of(topic)
            try:
                if count == 1 or (not self._calls.has(owner) and (is_for_owner(request) or HOP in request.headers)):
                    if (answered := await self._of_shard(request, topic, owner)) is not None:
                        return answered
                    if (count := self._partitions.of(topic)) == 1:
                        return await self._put(request, topic) if is_put(request) else None
                return await self._by_partitions(request, topic, count, is_command)
            except Misrouted:
                await self._partitions.agree(request, topic)
        raise Unavailable(f"the partitions of topic {topic!r} change: nothing was done. Try again.")

    # One partition

    async def _for_partition(self, request: web.Request, topic: str) -> Answered | None:
        """A request about one partition, which is answered here or refused."""
        if self._partitions.is_question(request) and INTERNAL in request:
            answered = await self._of_shard(request, topic, self._partitions.owner(topic))
            return answered or await self._partitions.answer_question(request, topic)
        named = request.headers[PARTITION]
        number, count = parse(named)
        if count > self._calls.shards:
            raise self._misrouted(request, topic, f"there are {self._calls.shards} shards: no topic has {count} partitions")
        shard = self._partitions.places(topic, count)[number]
        try:
            if (answered := await self._of_shard(request, topic, shard)) is not None:
                return answered
        except Misrouted as error:
            raise self._misrouted(request, topic, str(error), await self._partitions.agree(request, topic)) from None
        may_make = is_put(request) and INTERNAL in request
        if not self._partitions.has(topic, number, count, may_make or (is_put(request) and not number)):
            self._calls.count("refused")
            raise self._misrouted(request, topic, f"shard {shard} has not got partition {named} of topic {topic!r}")
        if HOP not in request.headers:
            request[produce.CHECK_IDS] = partial(self._check_ids, request, topic, number, count)
        if END_POLL in request:
            self._polls.end(request[END_POLL])
            return web.json_response({})
        if not number and not is_for_owner(request):
            self._partitions.confirm_soon(request, topic)
        return None

    def _check_ids(self, request: web.Request, topic: str, number: int, count: int, ids: Sequence[str | None] | None) -> None:
        """Refuse messages of a client that knows the partitions, if one of them belongs into another one, or has no id."""
        known = [] if ids is None else [id_ for id_ in ids if id_ is not None]
        if ids is None or len(known) < len(ids) or partitions_of(known, count).count(number) < len(ids):
            raise self._misrouted(request, topic, f"there are messages that do not belong into partition {number}/{count}")

    def _misrouted(self, request: web.Request, topic: str, why: str, count: int | None = None) -> NotLeader:
        """The refusal of a request about a partition that another process has. `count`: of the topic's partitions, if it was
        asked for."""
        owner = self._calls.urls(request)[self._partitions.owner(topic)]
        if count is None:
            found = self._service.engine.topics.get(topic) if self._service.serving else None
            count = 0 if found is None else found.settings.partitions
        return NotLeader(f"{why}: nothing was done", leader_url=owner, revision=self._revision(), partitions=count)

    # All partitions

    async def _by_partitions(self, request: web.Request, topic: str, count: int, is_command: bool) -> Answered | None:
        """The answer of a topic's partitions; None: this process refuses the request. Raises `Misrouted` if they are not as it
        thinks."""
        await body.keep(request)
        places = self._name_places(request, topic, count)
        with counted(self._service):
            if is_put(request):
                return await self._put(request, topic)
            if is_for_owner(request):
                return response_of(await self._partitions.delete(request, topic))
            ask = self._ask(request, topic, places)
            answered = await (fan_out.command(ask) if is_command else fan_out.answer(ask))
            self._calls.count("split")
            return answered

    def _name_places(self, request: web.Request, topic: str, count: int) -> list[int]:
        """The shards of a topic's partitions, whose addresses will be in the answer if they are all known."""
        places, urls = self._partitions.places(topic, count), self._calls.urls(request)
        known = [url for place in places if (url := urls[place]) is not None]
        if len(known) == len(places):
            request[trace.PLACES] = " ".join(known)
        return places

    async def _put(self, request: web.Request, topic: str) -> Answered | None:
        """The answer to settings of a topic of this process: the whole topic, if it has partitions. None: it has none, or the
        settings are refused."""
        put = await self._partitions.put(request, topic)
        if put is None or put.status != 200:
            return None if put is None else response_of(put)
        places = self._partitions.places(topic, self._partitions.of(topic))
        return await fan_out.topic(self._ask(request, topic, places))

    def _ask(self, request: web.Request, topic: str, places: list[int]) -> Ask:
        agree = partial(self._partitions.agree, request, topic)
        return Ask(request, topic, places, self._calls, self._fetches, agree)

    async def _pass_back(self, request: web.Request, topic: str | None, response: OutboundAnswer) -> web.StreamResponse:
        """Give the answer of another process to the client, and learn from it how many partitions the topic has."""
        if topic is not None and trace.PLACES_HEADER in response.headers:
            count = len(response.headers[trace.PLACES_HEADER].split())
            self._partitions.learn(topic, count)
            self._name_places(request, topic, count)
        return await pass_back(request, response)


def is_for_owner(request: web.Request) -> bool:
    """Whether a request makes, changes or deletes a topic."""
    resource = request.match_info.route.resource
    return request.method in ("PUT", "DELETE") and resource is not None and resource.canonical == TOPIC


def is_put(request: web.Request) -> bool:
    """Whether a request makes or changes a topic."""
    return request.method == "PUT" and is_for_owner(request)
