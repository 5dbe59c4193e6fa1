"""Answers: JSON values, errors in their one shape, and `Reply`, a cheap answer for daily work.

A `web.Response` costs 50 µs, most of it for mutable headers, streams, cookies and compression. A `Reply` is written to the socket
as bytes instead, if the client speaks HTTP/1.1 and its connection stays open; otherwise it becomes a `web.Response`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from turtlemq.errors import TurtleError
from turtlemq.segment.buffers import Buffer
from turtlemq.server.errors import RequestTimeout, Unauthenticated
from turtlemq.server.media_types import JSON
from turtlemq.server.outgoing.http_date import http_date
from turtlemq.server.outgoing.pieces import PIECE_BYTES, cut
from turtlemq.server.trace import CLUSTER_HEADER, HEADER, PLACES, PLACES_HEADER, REQUEST_ID

# Of a fetch that is answered with BSON documents: they have no place for these.
LEASE_HEADER, PAUSED_HEADER = "X-Turtlemq-Lease", "X-Turtlemq-Paused"
NO_WAIT_HEADER = "X-Turtlemq-No-Wait"  # for another process of this server: the fetch has not waited, see `shards.fan_fetch`
encode = msgspec.json.Encoder().encode
_STATUS = {status: f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: " for status in (200, 201)}


class Reply:
    """An answer as bytes, in one piece or several. `undo` is called if it cannot be sent because the client is gone. `lease` and
    `paused`: for headers of their own. `counts_copies`: a JSON object that says in a cluster how many copies have the stored
    messages. `cluster`: the name of the cluster, for a header; set behind the handler."""

    __slots__ = ("pieces", "size", "status", "kind", "undo", "lease", "counts_copies", "paused", "cluster", "no_wait")
    keep_alive = True

    def __init__(
        self,
        body: Buffer | list[Buffer],
        status: int = 200,
        kind: str = JSON,
        undo: Callable[[], None] | None = None,
        lease: str = "",
        counts_copies: bool = False,
        paused: bool = False,
        no_wait: bool = False,
    ) -> None:
        self.pieces = body if isinstance(body, list) else [body]
        self.size = len(self.pieces[0]) if len(self.pieces) == 1 else sum(map(len, self.pieces))
        self.status, self.kind, self.undo, self.lease, self.counts_copies = status, kind, undo, lease, counts_copies
        self.paused, self.cluster, self.no_wait = paused, "", no_wait

    @classmethod
    def of(cls, value: Any, status: int = 200) -> Reply:
        """A JSON answer."""
        return cls(encode(value), status)

    def add_copies(self, count: int) -> None:
        """Add the number of copies to the JSON object. Requires: the body is one piece. It stays one, since two are sent in two
        turns of the event loop."""
        tail = b',"copies":%d}' % count
        self.pieces = [b"".join((memoryview(self.pieces[0])[:-1], tail))]
        self.size += len(tail) - 1

    def head(self, request: web.BaseRequest) -> bytes:
        """Status line and headers."""
        more = f"{LEASE_HEADER}: {self.lease}\r\n" if self.lease else ""
        if self.paused:
            more += f"{PAUSED_HEADER}: true\r\n"
        if self.no_wait:
            more += f"{NO_WAIT_HEADER}: true\r\n"
        if PLACES in request:
            more += f"{PLACES_HEADER}: {request[PLACES]}\r\n"
        if self.cluster:
            more += f"{CLUSTER_HEADER}: {self.cluster}\r\n"
        return (
            f"{_STATUS[self.status]}{self.kind}\r\nContent-Length: {self.size}\r\nDate: {http_date()}\r\n"
            f"{HEADER}: {request[REQUEST_ID]}\r\n{more}\r\n"
        ).encode()

    def as_response(self) -> web.Response:
        """This answer as a response of aiohttp."""
        headers = {LEASE_HEADER: self.lease} if self.lease else {}
        if self.paused:
            headers[PAUSED_HEADER] = "true"
        if self.size <= PIECE_BYTES:
            return web.Response(body=b"".join(self.pieces), status=self.status, content_type=self.kind, headers=headers)
        headers["Content-Length"] = str(self.size)
        return web.Response(body=self._streamed(), status=self.status, content_type=self.kind, headers=headers)

    async def _streamed(self) -> AsyncIterator[bytes]:
        for piece in cut(self.pieces):
            yield bytes(piece)
            await asyncio.sleep(0)  # other requests go on


Answered = web.StreamResponse | Reply


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=encode(value), status=status, content_type=JSON)


def error_fields(error: TurtleError) -> dict[str, Any]:
    """The body of every refusal."""
    return {"error": {"code": error.code, "message": str(error), **error.details}}


def refusal(error: TurtleError, status: int | None = None) -> web.Response:
    """The answer to a request that failed with `error`."""
    response = answer(error_fields(error), status or error.status)
    if isinstance(error, Unauthenticated):
        response.headers["WWW-Authenticate"] = 'Bearer realm="turtlemq"'
    elif isinstance(error, RequestTimeout):
        response.force_close()
    if "retry_after_ms" in error.details:
        response.headers["Retry-After"] = str(-(-int(str(error.details["retry_after_ms"])) // 1000))
    return response
