"""aiohttp's part of a connection: requests that `front` has passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, cast

from aiohttp import HttpVersion11, web

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server import trace
from turtlemq.server.incoming.body import SLOWEST
from turtlemq.server.media_types import JSON
from turtlemq.server.outgoing.reply import Answered, Reply, encode, error_fields
from turtlemq.server.request import SERVICE

ANSWER_S = 30  # time for a client to read a large answer, and a second more for each 64 KiB of it
ANSWER_SMALL_BYTES = 64 << 10  # a smaller answer fits into the socket's buffers: no timeout, no byte budget
_GONE = "the handler is closed"  # uvloop's error for a connection that was lost, although it does not call it closing
AIOHTTPS = 2  # a bit of `Front.read`: aiohttp wishes it


class Owner(Protocol):
    """The connection that requests are passed on from."""

    def answered(self, keep: bool) -> None: ...

    def aiohttp_closes(self) -> None: ...

    def read(self, who: int, on: bool) -> None: ...

    async def send_reply(self, app: web.Application, head: bytes, reply: Reply) -> bool: ...


class Passage(asyncio.Transport):
    """The connection's transport, as aiohttp sees it: closing it ends aiohttp's part, and the whole only if it has a request."""

    def __init__(self, front: Owner, transport: asyncio.Transport) -> None:
        super().__init__()
        self._front, self._to = front, transport
        self.write, self.writelines, self.abort = transport.write, transport.writelines, transport.abort  # type: ignore[method-assign]
        self.get_extra_info, self.is_closing = transport.get_extra_info, transport.is_closing  # type: ignore[method-assign]
        self.get_write_buffer_size = transport.get_write_buffer_size  # type: ignore[method-assign]

    def close(self) -> None:
        self._front.aiohttp_closes()

    def pause_reading(self) -> None:
        self._front.read(AIOHTTPS, False)

    def resume_reading(self) -> None:
        self._front.read(AIOHTTPS, True)


class PassedConnection(web.RequestHandler):
    """A connection of aiohttp. Refuses bytes that are no HTTP in the shape of every error, and limits the time of an answer."""

    __slots__ = ("_front",)

    def __init__(self, server: web.Server, front: Owner, limits: Mapping[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **limits)
        self._front = front

    async def finish_response(
        self, request: web.BaseRequest, resp: Answered, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, and count its bytes while it is sent. Returns the answer, and whether the client is gone."""
        try:
            answered, lost = await self._sent(request, resp, start_time)
        except BaseException:
            self._front.answered(False)
            raise
        self._front.answered(bool(answered.keep_alive) and not lost)
        return answered, lost

    async def _sent(self, request: web.BaseRequest, resp: Answered, start_time: float | None) -> tuple[web.StreamResponse, bool]:
        if not isinstance(resp, Reply):
            return await self._finish_counted(request, resp, start_time)
        if request.keep_alive and request.version == HttpVersion11 and "Upgrade" not in request.headers:
            is_sent = await self._front.send_reply(cast(web.Request, request).app, resp.head(request), resp)
            return cast(web.StreamResponse, resp), not is_sent  # aiohttp reads its `keep_alive` only
        lost = True
        service = cast(web.Request, request).app[SERVICE]
        size = 2 * resp.size  # `undo` holds the messages that the body was made from
        service.flow.answer_bytes.add(size)
        try:
            answered, lost = await self._finish(request, resp.as_response(), start_time)
            return answered, lost
        finally:
            service.answer_sent(size)
            if lost and resp.undo is not None:
                resp.undo()

    async def _finish_counted(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response of aiohttp. Only a large one, as a listing may be, counts against the byte budget."""
        if (size := resp.content_length or 0) < ANSWER_SMALL_BYTES:
            return await self._finish(request, resp, start_time)
        service = cast(web.Request, request).app[SERVICE]
        service.flow.answer_bytes.add(size)
        try:
            return await self._finish(request, resp, start_time)
        finally:
            service.answer_sent(size)

    async def _finish(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Let aiohttp send an answer. A client that does not read a large one in time is cut off."""
        if isinstance(resp, web.HTTPExpectationFailed):  # raised before any handler runs
            resp = _refused(request, InvalidArgument("the only Expect that is understood here is 100-continue"), resp.status)
        size = resp.content_length or 0
        try:
            if size < ANSWER_SMALL_BYTES:  # it fits into the buffers of the system
                return await super().finish_response(request, resp, start_time)
            async with asyncio.timeout(ANSWER_S + size / SLOWEST):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if (transport := self.transport) is not None:
                transport.abort()  # closing would wait for the rest to be sent
            return resp, True
        except RuntimeError as error:
            if _GONE not in str(error):
                raise
            return resp, True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request head that is no HTTP. Raises `ConnectionResetError` if the client is gone: no failure."""
        if isinstance(exc, ConnectionError) or _GONE in str(exc):
            raise ConnectionResetError("the client is gone") from exc
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        return _refused(request, InvalidArgument(f"this is no HTTP request that can be read here: {message or exc}"), 400)


def _refused(request: web.BaseRequest, error: TurtleError, status: int) -> web.Response:
    """The answer to a request that is refused before it reaches the application."""
    error.details["request_id"] = request[trace.REQUEST_ID] = name = trace.new_id()
    response = web.Response(status=status, body=encode(error_fields(error)), content_type=JSON, headers={trace.HEADER: name})
    response.force_close()
    return response
