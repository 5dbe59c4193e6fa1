"""One request, passed on to another node, and its answer, passed back: bodies untouched, and streamed if they are large.

A small body is read first, so that it can be sent again to another node. No body is sent before the other node's process has
taken the request (100 Continue): its port is open while a process is replaced, and a body that waits there would leave in doubt
whether the request is carried out. For the same reason a request without a body that may change something is sent with an empty
one (EMPTY), whose end the other node awaits. Which node is asked, and whether a failed request may be sent again, is decided in
`forward`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from turtlemq.errors import InvalidArgument, describe
from turtlemq.server.auth import remote_of
from turtlemq.server.hot_request import HotRequest
from turtlemq.server.incoming import body
from turtlemq.server.request import BUDGET, check_deadline, time_left
from turtlemq.server.trace import HEADER, REQUEST_ID

if TYPE_CHECKING:  # a server alone asks no other, and does not load it
    from turtlemq.server.outbound import Body, OutboundAnswer, OutboundPool

HOP, DIRECT = "X-Turtlemq-Hop", "X-Turtlemq-Direct"
CLIENT = "X-Turtlemq-Client"  # the address of the client, on the way to another process of the same server
EMPTY = "X-Turtlemq-Empty"  # the body has no bytes, and an end: nothing is done before that has arrived
PARTITION = "X-Turtlemq-Partition"  # of a request for one partition of a topic: "2/4" is the third of four
INTERNAL = (
    "X-Turtlemq-Internal"  # a request of another process of this server itself, which needs no right; also a key of requests
)
PROOF = "X-Turtlemq-Proof"  # of another node of the cluster, that it knows the secret
CHANGES_NOTHING = ("GET", "HEAD")
CONNECT_S = 1.0  # a machine that is gone does not refuse connections
GRACE_S = 1.0  # beyond the caller's own time: the other node tells better what became of the request
STALL_S = 30.0  # for the next piece of a streamed answer, on its way from the other node and to the client
KEPT_BYTES = 1 << 20  # of a request body that is read first, so that it can be sent twice
SMALL_BYTES = 64 << 10  # an answer so small is read first: if that fails, the client gets an error instead of a broken answer
# Headers of one connection, not of the request; those that the sender sets anew; Origin was checked against Host here.
_OF_CONNECTION = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_SET_ANEW = frozenset(
    {"host", "origin", "expect", *(name.lower() for name in (BUDGET, HOP, DIRECT, EMPTY, CLIENT, INTERNAL, PROOF, HEADER))}
)
_SPELLED = {"www-authenticate": "WWW-Authenticate", "etag": "ETag"}  # headers that are not written as all others


class NotSent(Exception):
    """The other node has done nothing: it cannot be reached, or does not lead. `leader_url`: the leader that it names.
    `is_misrouted`: it was asked about a partition that it has not got."""

    def __init__(self, why: str, leader_url: str | None = None, revision: int = 0, is_misrouted: bool = False) -> None:
        super().__init__(why)
        self.leader_url, self.revision, self.is_misrouted = leader_url, revision, is_misrouted


class Misrouted(Exception):
    """A process has not got that partition: the topic was deleted, or made anew. Nothing was done."""


class Lost(Exception):
    """The connection to the other node broke: the request may have been carried out, or may still be."""


class Payload:
    """The body of a request: read first if it is small, so that it can be sent again; a large one is streamed, once."""

    def __init__(self, request: web.Request) -> None:
        self._request, self._begun = request, False
        length = 0 if EMPTY in request.headers else request.content_length
        self._is_small = not request.body_exists or body.KEPT in request or (length is not None and length <= KEPT_BYTES)
        self.is_under_way = True  # the other node may have all that it needs to carry out the request

    @property
    def can_be_sent(self) -> bool:
        """Nothing of it is gone. False: neither this process nor another node can be given the whole body any more."""
        return self._is_small or not self._begun

    async def arrive(self) -> None:
        """Return when a small body is there as a whole."""
        if self._request.body_exists and self._is_small and not self._request.content.is_eof():
            await body.keep(self._request)

    async def data(self) -> Body | None:
        """The body for one try. Requires: it can be sent."""
        assert self.can_be_sent, "a streamed body was given away before"
        if not self._request.body_exists and self._request.method in CHANGES_NOTHING:
            return None
        self.is_under_way = False
        if not self._request.body_exists:
            return self._kept(b"")
        return self._kept(await body.keep(self._request)) if self._is_small else self._streamed()

    async def _kept(self, data: bytes) -> Body:
        self.is_under_way = True
        if data:
            yield data

    async def _streamed(self) -> Body:
        self.is_under_way = self._begun = True
        while piece := await self._request.content.readany():
            yield piece


class Proxy:
    """Connections to other nodes, kept open between requests."""

    def __init__(self, cafile: str = "", path: str = "", proof: str = "") -> None:
        """`path`: of the Unix socket of another process of this server, in place of nodes at URLs; `proof`: for these nodes, that
        requests are from one of them."""
        self._cafile, self._path, self._proof = cafile, path, proof
        self._pool: OutboundPool | None = None

    async def close(self) -> None:
        """End all connections."""
        if self._pool is not None:
            self._pool.close()

    def _opened(self) -> OutboundPool:
        if self._pool is None:
            from turtlemq.server.outbound import OutboundPool

            tls = None if self._path else ssl.create_default_context(cafile=self._cafile or None)
            self._pool = OutboundPool(self._path, tls)
        return self._pool

    def _of_process(self, request: web.Request) -> dict[str, str]:
        """The headers that processes believe each other."""
        found = {CLIENT: remote_of(request)} if self._path else {PROOF: self._proof}
        if INTERNAL in request:
            found[INTERNAL] = "1"
        if PARTITION in request:
            found[PARTITION] = request[PARTITION]
        return found

    async def ask(self, request: web.Request, url: str, payload: Payload, taken_s: float | None = None) -> OutboundAnswer:
        """Send a request to the node at `url`. Returns when the head of the answer is there. `taken_s`: the time of the event
        loop until which that node must have taken the request. Raises `NotSent` or `Lost`."""
        from turtlemq.server.outbound import Limits, NotTaken, Unreached

        data = await payload.data()
        check_deadline(request)
        if not request.raw_path.startswith("/"):
            raise InvalidArgument("the target of a request is a path")
        left_s = time_left(request)
        end_s = asyncio.get_running_loop().time() + left_s + GRACE_S if left_s < float("inf") else None
        headers = forwarded_headers(request, left_s)
        if self._path or self._proof:
            headers.update(self._of_process(request))
        target, connect_s = url.rstrip("/") + request.raw_path, min(CONNECT_S, left_s)
        try:
            response = await self._opened().ask(request.method, target, headers, data, Limits(end_s, taken_s), connect_s)
        except Unreached as error:
            raise NotSent(f"{url} cannot be reached: {describe(error)}") from error
        except NotTaken as error:
            raise NotSent(str(error)) from None
        except Exception as error:
            if (broken := request.content.exception()) is not None:
                raise InvalidArgument(f"the body cannot be read: {broken}") from None
            if not isinstance(error, OSError | TimeoutError):
                raise
            why = f"{url} did not answer: {describe(error)}"
            raise (Lost(why) if payload.is_under_way else NotSent(why)) from error
        if response.status == 421:
            raise await _not_leading(url, response)
        return response


async def _not_leading(url: str, response: OutboundAnswer) -> NotSent:
    """The refusal of a node that does not lead."""
    why = f"{url} does not lead"
    try:
        details = msgspec.json.decode(await response.read())["error"]
        leader_url, revision = details["leader_url"], details["revision"]
        is_misrouted = details.get("partitions") is not None
        return NotSent(why, leader_url if isinstance(leader_url, str) else None, int(revision), is_misrouted)
    except (OSError, TimeoutError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return NotSent(why)
    finally:
        response.release()


def forwarded_headers(request: web.Request, left_s: float) -> CIMultiDict[str]:
    """The headers of a request for its second way: with its name, and with the time that the caller still has."""
    headers = _end_to_end(request.headers, _SET_ANEW)
    headers[HOP], headers[HEADER] = "1", request[REQUEST_ID]
    if not request.body_exists and request.method not in CHANGES_NOTHING:
        headers[EMPTY] = "1"
        headers.popall("Content-Length", None)
    if left_s < float("inf"):
        headers[BUDGET] = str(max(1, int(left_s * 1000)))
    return headers


def _end_to_end(headers: Mapping[str, str], without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Headers that go on beyond one connection."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = _OF_CONNECTION | without | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


async def pass_back(request: web.Request, response: OutboundAnswer) -> web.StreamResponse:
    """Give the answer of another node to the client. Raises `Lost` if it does not arrive whole."""
    told = _end_to_end(response.headers, frozenset({HEADER.lower()}))
    headers = CIMultiDict((_SPELLED.get(name) or name.title(), value) for name, value in told.items())
    try:
        if request.method == "HEAD":
            return web.Response(status=response.status, headers=headers)
        is_small = response.content_length is not None and response.content_length <= SMALL_BYTES
        if is_small or isinstance(cast(object, request), HotRequest):  # it cannot be streamed to
            headers.popall("Content-Length", None)
            return web.Response(body=await response.read(), status=response.status, headers=headers)
        out = web.StreamResponse(status=response.status, headers=headers)
        await _stream_back(request, response, out)
        return out
    except (OSError, TimeoutError) as error:
        raise Lost(f"the answer of {response.origin} is not complete: {describe(error)}") from error
    finally:
        response.release()  # closes the connection, if the answer was not read to its end


async def _stream_back(request: web.Request, response: OutboundAnswer, out: web.StreamResponse) -> None:
    await out.prepare(request)
    while True:
        async with asyncio.timeout(STALL_S):
            piece = await response.piece()
            if not piece:
                break
            await out.write(piece)
    await out.write_eof()
