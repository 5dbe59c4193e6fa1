"""The good answers of daily work, as bytes: what aiohttp does for any response, without what these never need.

A `web.Response` costs 50 µs, most of it for headers that may be changed, streams, cookies and packing. Where the client is not
an ordinary one of HTTP/1.1 whose connection stays open, a reply takes that way as well: `usual`.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from turtlemq.errors import TurtleError
from turtlemq.server.aiohttp_internals import http_date
from turtlemq.server.errors import RequestTimeout, Unauthenticated
from turtlemq.server.media_types import JSON
from turtlemq.server.outgoing.fetch import Buffer
from turtlemq.server.trace import HEADER, REQUEST_ID

encode = msgspec.json.Encoder().encode
_STATUS = {status: f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: " for status in (200, 201)}


class Reply:
    """Status, type and body. `undo` is called if it cannot be sent, because nobody is there any more."""

    __slots__ = ("body", "status", "kind", "undo")
    keep_alive = True

    def __init__(self, body: Buffer, status: int = 200, kind: str = JSON, undo: Callable[[], None] | None = None) -> None:
        self.body, self.status, self.kind, self.undo = body, status, kind, undo

    @classmethod
    def of(cls, value: Any, status: int = 200) -> Reply:
        """A JSON answer."""
        return cls(encode(value), status)

    def head(self, request: web.BaseRequest) -> bytes:
        """Everything before the body."""
        return (
            f"{_STATUS[self.status]}{self.kind}\r\nContent-Length: {len(self.body)}\r\nDate: {http_date()}\r\n"
            f"{HEADER}: {request[REQUEST_ID]}\r\n\r\n"
        ).encode()

    def usual(self) -> web.Response:
        """The same as any other response."""
        return web.Response(body=bytes(self.body), status=self.status, content_type=self.kind)


Answered = web.StreamResponse | Reply


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=encode(value), status=status, content_type=JSON)


def refusal(error: TurtleError, status: int | None = None) -> web.Response:
    """An error as the contract shapes it."""
    body = {"error": {"code": error.code, "message": str(error), **error.details}}
    response = answer(body, status or error.status)
    if isinstance(error, Unauthenticated):
        response.headers["WWW-Authenticate"] = 'Bearer realm="turtlemq"'
    elif isinstance(error, RequestTimeout):
        response.force_close()
    if "retry_after_ms" in error.details:
        response.headers["Retry-After"] = str(-(-int(str(error.details["retry_after_ms"])) // 1000))
    return response
