"""Forwarding: a process that does not lead passes requests about stored messages on to the leader, so any node answers them.

Without a leader the request waits for one, within its own time and WAIT_S: an election takes a second or two. It waits as well
while the leader opens its files, or hands over. A request goes on once: a node that gets a forwarded one, or one that was sent to
it as the leader, refuses it with 421 if it does not lead.

A request that a lost leader may have carried out is sent again only if a second time makes no difference: reads, and settings of
a topic. All others are answered with 503, for the caller knows whether its ids make a second try safe: a message that the first
DELETE has removed is unknown to the second one, and a group is moved twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from turtlemq.errors import NotReplicated
from turtlemq.server import logs, trace
from turtlemq.server.errors import NoLeader, NotLeader, Overloaded
from turtlemq.server.proxy import CHANGES_NOTHING, DIRECT, EMPTY, HOP, Lost, Misrouted, NotSent, Payload, Proxy, pass_back
from turtlemq.server.request import time_left
from turtlemq.server.service import Service

if TYPE_CHECKING:  # a single node loads nothing of replication
    from turtlemq.replica.topology import ShardPlace
    from turtlemq.server.cluster_part import ClusterPart
    from turtlemq.server.outbound import OutboundAnswer

T = TypeVar("T")
Use = Callable[["OutboundAnswer"], Awaitable[T]]  # of the head of an answer

TO_LEADER = ("/v1/topics", "/v1/find", "/v1/command", "/v1/status", "/v1/tenants", "/v1/cluster/shards/")  # beginnings of paths
WAIT_S = 5.0  # for a leader
WAIT_PART = 0.9  # of the caller's own time, so that the refusal reaches it
LOOK_S = 0.02  # between two looks at the role of this process, while requests wait for a leader
PAUSE_S = 0.05, 0.4  # before a leader that could not be reached is tried again, at first and at most
LAST_WORD_S = 0.5  # for a leader that was replaced: it answers the request to hand over after that, or says that it does not lead
FORWARDS_MAX = 4_096  # requests under way


def is_for_leader(path: str) -> bool:
    """Whether only the leader can answer requests of this path.

    >>> [is_for_leader(path) for path in ("/v1/topics/orders", "/v1/cluster/shards/0/handover", "/v1/cluster", "/healthz")]
    [True, True, False, False]
    """
    return path.startswith(TO_LEADER)


def can_be_repeated(method: str, path: str) -> bool:
    """Whether a request that may have been carried out can be sent again without a difference for its caller.

    >>> can_be_repeated("GET", "/v1/topics/t/messages"), can_be_repeated("PUT", "/v1/topics/t")
    (True, True)
    >>> can_be_repeated("DELETE", "/v1/topics/t/messages/m"), can_be_repeated("PUT", "/v1/topics/t/groups/g")
    (False, False)
    """
    return method in CHANGES_NOTHING or (method == "PUT" and path.startswith("/v1/topics/") and path.count("/") == 3)


def leads(service: Service) -> bool:
    """Whether this process answers requests about stored messages itself. A leader that hands over does not."""
    return service.cluster is not None and service.cluster.role == "leader" and service.serving


def answers(service: Service, topic: str) -> bool:
    """Whether this process of a cluster answers requests about a topic itself."""
    cluster = service.cluster
    return leads(service) and cluster is not None and cluster.has(topic)


def leads_shard(service: Service, cluster: ClusterPart, shard: int) -> bool:
    """Whether this process answers requests about a shard itself."""
    return shard == cluster.shard and leads(service)


@contextmanager
def counted(service: Service) -> Iterator[None]:
    """Count a request that is passed on. Raises `Overloaded` if too many are under way."""
    if service.forwards >= FORWARDS_MAX:
        raise Overloaded(f"{service.forwards:,} requests are passed on already; nothing was done", retry_after_ms=1_000)
    service.forwards += 1
    try:
        yield
    finally:
        service.forwards -= 1


class Forwarder:
    """Finds the leader for requests that this process cannot answer itself."""

    def __init__(self, service: Service, cafile: str = "", proof: str = "") -> None:
        self._service, self._proxy = service, Proxy(cafile, proof=proof)
        self._unreached: dict[int, str] = {}  # why the leader of a shard could not be reached, as long as that is so
        self._watched: ClusterPart | None = None  # whose changes are noticed
        self._seen: object = None  # role and leader at the last look
        self._waiting: set[asyncio.Future[None]] = set()  # for a change of them
        self._next_look: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """End the connections to other nodes."""
        if self._next_look is not None:
            self._next_look.cancel()
        await self._proxy.close()

    async def elsewhere(self, request: web.Request, cluster: ClusterPart) -> web.StreamResponse | None:
        """The leader's answer to a request; None if this process leads, perhaps after a while, and has to answer itself."""
        return await self.to_shard(request, cluster, cluster.shard) if is_for_leader(request.path) else None

    def _count(self, outcome: str) -> None:
        self._service.meter.proxied[outcome] += 1

    async def to_shard(
        self, request: web.Request, cluster: ClusterPart, shard: int, use: Use[web.StreamResponse] | None = None
    ) -> web.StreamResponse | None:
        """The answer of a shard's leader to a request; None if this process leads it, perhaps after a while, and has to answer
        itself. `use`: how the answer is passed back."""
        is_here = partial(leads_shard, self._service, cluster, shard)
        if is_here() or EMPTY in request.headers:
            await Payload(request).arrive()  # before it is decided: this process may hand over meanwhile
        if is_here():
            return None
        self._watch(cluster)
        with counted(self._service):
            if HOP in request.headers or request.headers.get(DIRECT) == "1":
                await trace.waited(request, self._until_leading(request, cluster, shard))
                return None
            return await trace.waited(request, self._forwarded(request, cluster, shard, use or partial(pass_back, request)))

    async def part(self, request: web.Request, cluster: ClusterPart, shard: int, use: Use[T]) -> T:
        """`use` of the answer of a shard's leader, which may be this process itself. Raises `NoLeader`, or `Misrouted`."""
        self._watch(cluster)
        return await self._asked_until(request, cluster, shard, use, lambda: False)

    # The leader

    def _leader(self, cluster: ClusterPart, shard: int) -> ShardPlace | None:
        """The leader that the name server tells; it may be this process, which opens its files or hands over."""
        return cluster.topology().leader(shard)

    def _is_here(self, cluster: ClusterPart, place: ShardPlace | None) -> bool:
        return place is not None and place.node == cluster.options.node and place.shard == cluster.shard

    # Requests

    async def _until_leading(self, request: web.Request, cluster: ClusterPart, shard: int) -> None:
        """Return when this process leads, if it is about to. Raises `NotLeader` if it is not."""
        end = _end(request)
        while not leads_shard(self._service, cluster, shard):
            place = self._leader(cluster, shard)
            if not self._is_here(cluster, place):
                self._count("refused")
                url = None if place is None else place.url
                raise NotLeader(leader_url=url, revision=cluster.topology().revision)
            await self._change(cluster, end, shard)

    async def _forwarded(
        self, request: web.Request, cluster: ClusterPart, shard: int, use: Use[web.StreamResponse]
    ) -> web.StreamResponse | None:
        """The answer of the leader of a shard; None if this process leads it."""
        is_here = partial(leads_shard, self._service, cluster, shard)
        try:
            return await self._asked_until(request, cluster, shard, use, is_here)
        except _Here:
            return None

    async def _asked_until(
        self, request: web.Request, cluster: ClusterPart, shard: int, use: Use[T], is_here: Callable[[], bool]
    ) -> T:
        """`use` of the leader's answer. Raises `_Here` once `is_here`: then this process has to answer."""
        payload, end, pause_s, hint, failed = Payload(request), _end(request), PAUSE_S[0], "", None
        while not is_here():
            place = self._leader(cluster, shard)
            if place is None or place.url is None or (self._is_here(cluster, place) and not leads(self._service)):
                await self._change(cluster, end, shard)
                continue
            try:
                response = await self._asked(request, cluster, place, hint or place.url, payload)
                answered = await use(response)
            except NotSent as error:
                if error.is_misrouted:
                    raise Misrouted(str(error)) from None
                hint = "" if hint else self._hint(cluster, error)
                self._note(shard, str(error))
            except Lost as error:
                if not can_be_repeated(request.method, request.path) or trace.STARTED in request:
                    self._count("lost")
                    text = f"the leader was lost: {error}. It may be done, or not; sending it again with the same ids is safe"
                    raise NotReplicated(text) from error
                hint = ""
            else:
                self._count("answered")
                self._unreached.pop(shard, None)
                return answered
            if place.epoch != failed:  # the time until a leader has failed was no time without one
                failed, end = place.epoch, _end(request)
            await self._pause(cluster, payload, end, 0.0 if hint else pause_s, shard)
            pause_s = min(PAUSE_S[1], 2 * pause_s)
        raise _Here

    async def _asked(
        self, request: web.Request, cluster: ClusterPart, place: ShardPlace, url: str, payload: Payload
    ) -> OutboundAnswer:
        """The head of the leader's answer. Raises `Lost` also when another leader is elected: the first may stay silent."""
        asking: asyncio.Future[OutboundAnswer] = asyncio.ensure_future(self._proxy.ask(request, url, payload))
        try:
            while True:
                with self._next_change(cluster) as change:
                    either: list[asyncio.Future[Any]] = [asking, change]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                now = self._leader(cluster, place.shard)
                if now is not None and now.epoch != place.epoch:
                    return await _last_word(asking, payload, f"{url} was replaced by {now.url}")
        except BaseException:
            give_up(asking)
            raise

    def _note(self, shard: int, why: str) -> None:
        """Log that the leader of a shard cannot be reached, and why, once."""
        if why != self._unreached.get(shard):
            self._unreached[shard] = why
            logs.warning("leader_unreachable", why=why)

    def _hint(self, cluster: ClusterPart, error: NotSent) -> str:
        """The leader that another node names, if it knows more and names a node of the cluster."""
        topology = cluster.topology()
        known = {node.url for name, node in topology.nodes.items() if name != cluster.options.node}
        if cluster.shards > 1:
            from turtlemq.replica.topology import shard_url

            known = {shard_url(node.url, shard) for node in topology.nodes.values() for shard in range(cluster.shards)}
        return error.leader_url if error.leader_url in known and error.revision > topology.revision else ""

    async def _pause(self, cluster: ClusterPart, payload: Payload, end: float, seconds: float, shard: int) -> None:
        """Wait before the next try. Raises `NoLeader` if there can be none."""
        if not payload.can_be_sent:
            self._count("no_leader")
            raise NoLeader("the leader has changed while the body was sent: nothing was done. Send it again.")
        now = asyncio.get_running_loop().time()
        if now + seconds >= end:
            await self._change(cluster, end, shard)
        elif seconds:
            await self._change_until(cluster, now + seconds)

    # Changes

    async def _change(self, cluster: ClusterPart, end: float, shard: int) -> None:
        """Return at the next change of role or leader. Raises `NoLeader` at the end of the time."""
        self._look_often(cluster)
        if not await self._change_until(cluster, end):
            self._count("no_leader")
            why = self._unreached.get(shard)
            raise NoLeader(f"{NoLeader.__doc__} The last failure: {why}" if why else None)

    async def _change_until(self, cluster: ClusterPart, end: float) -> bool:
        with self._next_change(cluster) as change:
            try:
                async with asyncio.timeout_at(end):
                    await change
                return True
            except TimeoutError:
                return False

    @contextmanager
    def _next_change(self, cluster: ClusterPart) -> Iterator[asyncio.Future[None]]:
        """A future of the next change from the present role and leader."""
        self._look(cluster)
        change = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            yield change
        finally:
            self._waiting.discard(change)

    def _watch(self, cluster: ClusterPart) -> None:
        if self._watched is not cluster:
            self._watched = cluster
            cluster.view.changed.append(lambda: self._look(cluster))

    def _state(self, cluster: ClusterPart) -> object:
        topology = cluster.topology()
        return leads(self._service), [topology.leader(shard) for shard in range(cluster.shards)]

    def _look(self, cluster: ClusterPart) -> None:
        """Wake all requests that wait, if role or leader have changed."""
        state = self._state(cluster)
        if state == self._seen:
            return
        self._seen = state
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
        self._waiting = set()

    def _look_often(self, cluster: ClusterPart) -> None:
        """The name server does not tell when this process has opened its files: look now and then, while requests wait."""
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._looked, cluster)

    def _looked(self, cluster: ClusterPart) -> None:
        self._next_look = None
        self._look(cluster)
        if self._waiting:
            self._look_often(cluster)


class _Here(Exception):
    """This process leads."""


def _end(request: web.Request) -> float:
    """The time until which a request waits for a leader."""
    return asyncio.get_running_loop().time() + min(WAIT_S, WAIT_PART * time_left(request))


async def _last_word(asking: asyncio.Future[OutboundAnswer], payload: Payload, why: str) -> OutboundAnswer:
    """The answer of a leader that was replaced. Raises `Lost` if none comes, `NotSent` if it has not got the whole request."""
    if payload.is_under_way:
        await asyncio.wait([asking], timeout=LAST_WORD_S)
    if asking.done():
        return asking.result()
    raise Lost(why) if payload.is_under_way else NotSent(why)


def give_up(asking: asyncio.Future[OutboundAnswer]) -> None:
    """End a request whose answer no caller waits for."""
    asking.cancel()
    asking.add_done_callback(_discard)


def _discard(asking: asyncio.Future[OutboundAnswer]) -> None:
    """End the connection of an answer that has come all the same."""
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()
