"""Requests from one process to that of another shard: a client's as it came, or one that was made out of it. Here they go to
processes of the same server, over Unix sockets; those to the leaders of a cluster are in `cluster_calls`.

A process that restarts has its socket all the time, so requests wait there for a second or two. A request that was not carried
out, or may be carried out twice, is sent again for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar, cast

from aiohttp import web

from turtlemq.errors import Unavailable, describe
from turtlemq.server import trace
from turtlemq.server.auth import remote_of
from turtlemq.server.forward import can_be_repeated
from turtlemq.server.hot_heads import Head, Headers
from turtlemq.server.hot_request import HotRequest
from turtlemq.server.incoming.body import KEPT
from turtlemq.server.outbound import OutboundAnswer
from turtlemq.server.proxy import CHANGES_NOTHING, Lost, Misrouted, NotSent, Payload, Proxy
from turtlemq.server.request import DEADLINE, time_left, urls_of
from turtlemq.server.service import Service
from turtlemq.server.shards.siblings import Siblings

T = TypeVar("T")

READ_S = 60.0  # for the head of the answer to a read: a process may have much to look through
WAIT_S = 10.0  # for a process that restarts, until it takes a request
WAIT_PART = 0.9  # of the caller's own time, so that the refusal reaches it
PAUSE_S = 0.02  # before a process that has ended is asked again


class Part(NamedTuple):
    """The answer of one process."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = {}


def response_of(part: Part) -> web.Response:
    """The answer of a process as a response."""
    kept = {name: part.headers[name] for name in ("Retry-After", "WWW-Authenticate") if name in part.headers}
    return web.Response(status=part.status, body=part.body, headers={"Content-Type": part.kind, **kept})


def made_of(request: web.Request, path: str, body: bytes, more: Mapping[str, str], method: str = "") -> web.Request:
    """A request about a part of `request`, with the same sender, name and time."""
    headers = Headers({name.lower(): value for name, value in request.headers.items()})
    for name in ("content-length", "content-encoding"):
        headers.pop(name, None)
    if body:
        headers["content-length"] = str(len(body))
    headers.update((name.lower(), value) for name, value in more.items())
    asked = "GET" if request.method == "HEAD" else request.method  # the answers are read here
    head = Head(method or asked, path, headers, len(body), request.match_info)
    made = HotRequest(request.app, head, body, remote_of(request), cast(asyncio.Transport, request.transport))
    made[KEPT], made[trace.REQUEST_ID] = body, request[trace.REQUEST_ID]
    if DEADLINE in request:
        made[DEADLINE] = request[DEADLINE]
    return cast(web.Request, made)


Use = Callable[[OutboundAnswer], Awaitable[T]]  # of the head of an answer


class Calls(Protocol):
    """The way from one process to those of all shards, itself included."""

    @property
    def shards(self) -> int:
        """How many there are."""

    def has(self, shard: int) -> bool:
        """Whether this process answers requests about a shard."""

    def urls(self, request: web.Request) -> list[str | None]:
        """The addresses of the processes of all shards, as far as they are known."""

    def count(self, outcome: str) -> None:
        """Count a request that was passed on."""

    async def whole(self, request: web.Request, shard: int, read_s: float = READ_S) -> Part:
        """The whole answer of a shard's process. Raises `Unavailable` if it does not answer, `Misrouted` if it has not got the
        partition."""

    async def asked(self, request: web.Request, shard: int, read_s: float, use: Use[T]) -> T:
        """`use` of the answer of a shard's process."""


class SiblingCalls:
    """The connections of one process to all processes of its server, itself included."""

    def __init__(self, service: Service, siblings: Siblings) -> None:
        self._service, self._siblings = service, siblings
        self._proxies = [Proxy(path=path) for path in siblings.paths]

    @property
    def shards(self) -> int:
        return self._siblings.count

    def has(self, shard: int) -> bool:
        return shard == self._siblings.shard

    def urls(self, request: web.Request) -> list[str | None]:
        return [*urls_of(request, self._siblings)]

    async def close(self) -> None:
        """End the connections."""
        for proxy in self._proxies:
            await proxy.close()

    def count(self, outcome: str) -> None:
        """Count a request that was passed on."""
        self._service.meter.proxied[outcome] += 1

    async def whole(self, request: web.Request, shard: int, read_s: float = READ_S) -> Part:
        """The whole answer of a shard's process. Raises `Unavailable` if it does not answer, `Misrouted` if it has not got the
        partition."""
        return await self.asked(request, shard, read_s, read_whole)

    async def asked(self, request: web.Request, shard: int, read_s: float, use: Use[T]) -> T:
        """`use` of the answer of a process. A request that was not carried out, or may be twice, is sent again for a while."""
        payload, end = Payload(request), asyncio.get_running_loop().time() + min(WAIT_S, read_s, WAIT_PART * time_left(request))
        while True:
            try:
                return await use(await self._head(request, shard, payload, end, read_s))
            except NotSent as error:
                if error.is_misrouted:
                    raise Misrouted(str(error)) from None
                can_repeat, text = True, f"shard {shard} does not answer: {error}. Nothing was done. Try again."
            except Lost as error:
                can_repeat = can_be_repeated(request.method, request.path)
                text = f"the process of shard {shard} was lost: {error}. It may be done, or not; "
                text += "sending it again with the same ids is safe"
            is_over = asyncio.get_running_loop().time() >= end
            if is_over or not can_repeat or not payload.can_be_sent or trace.STARTED in request:
                self.count("lost")
                raise Unavailable(text)
            await asyncio.sleep(PAUSE_S)

    async def _head(self, request: web.Request, shard: int, payload: Payload, end: float, read_s: float) -> OutboundAnswer:
        """The head of a process' answer. Raises `NotSent` if the process does not take the request in time."""
        taken_s = asyncio.get_running_loop().time() + read_s if request.method in CHANGES_NOTHING else end
        return await self._proxies[shard].ask(request, f"http://shard-{shard}", payload, taken_s)


async def read_whole(response: OutboundAnswer) -> Part:
    """The whole answer of a process. Raises `Lost` if it does not come."""
    try:
        kind = response.headers.get("Content-Type", "")
        return Part(response.status, kind, await response.read(), response.headers)
    except (OSError, TimeoutError) as error:
        raise Lost(f"its answer is not complete: {describe(error)}") from error
    finally:
        response.release()
