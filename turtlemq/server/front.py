"""Connections of clients, and of other processes. Hot requests (produce, fetch, ack, extend, cancel, reschedule, transaction) are
answered straight from the bytes that came, or go on to the process of their topic. All others, and all that are written in any
way but the plain one, are passed on to aiohttp as they came, over the same connection.

A hot request has a plain head (`hot_heads`) and has arrived as a whole. Its handler is called with the middleware around it that
aiohttp calls too, and runs without a task until it has to wait. The next request is looked at when the one before is answered, so
answers have the order of requests.

A request that is passed on ends where its plain head says. Behind a head that is not plain only aiohttp knows where the request
ends: from then on the connection is aiohttp's. So there is no head that the two could read differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, cast

from aiohttp import web

from turtlemq.segment.buffers import Buffer
from turtlemq.server import logs, trace
from turtlemq.server.accept import REFUSE_S
from turtlemq.server.front_desk import Desk
from turtlemq.server.hot_heads import HEAD_BYTES, Head
from turtlemq.server.hot_request import HotRequest
from turtlemq.server.incoming.body import SLOWEST
from turtlemq.server.metrics.delivery_steps import DELIVERED
from turtlemq.server.outgoing.http_date import http_date
from turtlemq.server.outgoing.pieces import JOIN_BYTES, PIECE_BYTES, cut
from turtlemq.server.outgoing.reply import Answered, Reply
from turtlemq.server.passed import AIOHTTPS, ANSWER_S, Passage, PassedConnection
from turtlemq.server.request import SERVICE

GRACE_S = 0.05  # for the rest of a small request; after that it is aiohttp's, with its limits of time
WAITED_BYTES = 16 << 10  # of a body whose rest is waited for
SIBLING_BYTES = 1 << 20  # the same, of a request of another process, which sends it as soon as it is asked
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HELD_BYTES = 64 << 10  # behind the request that is answered; with more, nothing is read until it is answered
READY, HOT, PASSED, GIVEN = range(4)  # waits for a request; answers one; aiohttp answers one; all is aiohttp's
_MINE = 1  # a bit of `read`, beside AIOHTTPS
_NAMES_SET_HERE = "Content-Length", "Date", trace.CLUSTER_HEADER, trace.PLACES_HEADER, trace.OWNER_HEADER
_SET_HERE = frozenset(name.lower() for name in _NAMES_SET_HERE)
_PLACES = (trace.PLACES_HEADER, trace.PLACES), (trace.OWNER_HEADER, trace.OWNER)
_BEGINS = (b"POST /", b"DELETE /", b"PATCH /")


class Front(asyncio.Protocol):
    """One connection of a client, or of another process of this server."""

    def __init__(self, desk: Desk, lost: Callable[[], None], of_sibling: bool = False) -> None:
        self._desk, self._lost = desk, lost
        self._loop = asyncio.get_running_loop()
        self._state, self._held, self._left, self._is_answered = READY, b"", 0, False
        self._heads = desk.sibling_heads if of_sibling else desk.heads
        self._waited_bytes = SIBLING_BYTES if of_sibling else WAITED_BYTES
        self._has_continued = False  # the body of the next request was asked for
        self._rest_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._passed: PassedConnection | None = None
        self._unread = 0  # _MINE | AIOHTTPS
        self.is_full = False  # the client reads more slowly than it is answered
        self._drained: asyncio.Future[None] | None = None

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. A client that is not allowed in gets REFUSE_S to send a request and read its refusal."""
        self._transport = cast(asyncio.Transport, transport)
        self._remote = str((transport.get_extra_info("peername") or ("",))[0])
        self._desk.open.add(self)
        self._since = self._loop.time()
        self._idle_timer = self._loop.call_later(self._desk.keepalive_s, self._idle)
        if self._heads is self._desk.heads and not self._desk.allows(self._remote):
            self._loop.call_later(REFUSE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and give the place to another connection. The handler of a request under way is cancelled."""
        self._idle_timer.cancel()
        self._stop_waiting()
        self._held = b""
        if self._task is not None:
            self._task.cancel()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError("the client is gone"))
        if self._passed is not None:
            self._passed.connection_lost(exc)
        self._desk.open.discard(self)
        self._lost()

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    @property
    def is_busy(self) -> bool:
        """A request of it is under way, perhaps."""
        return self._state != READY

    def end(self) -> None:
        """Close the connection, and cancel its request."""
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    def _idle(self) -> None:
        left = self._since + self._desk.keepalive_s - self._loop.time()
        if self._state == READY and left <= 0:
            self._transport.close()
        elif self._state != GIVEN:
            self._idle_timer = self._loop.call_later(left if left > 0 else self._desk.keepalive_s, self._idle)

    # Requests

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        if self._state == GIVEN:
            self._aiohttp().data_received(data)
            return
        if self._left:
            part = data[: self._left]
            self._left -= len(part)
            data = data[len(part) :]
            self._aiohttp().data_received(part)
            if not self._left and self._is_answered:
                self._ready()
        if data:
            self._held = self._held + data if self._held else data
            if self._state == READY:
                self._next()
            elif len(self._held) > HELD_BYTES:
                self.read(_MINE, False)

    def _next(self) -> None:
        """Look at the next request."""
        held, desk = self._held, self._desk
        if self._state != READY or not held or self._transport.is_closing():
            return
        end = held.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(held) < HEAD_BYTES and any(held.startswith(begin[: len(held)]) for begin in _BEGINS):
                self._wait_for_rest()
            else:
                self._give()
            return
        head = self._heads.read(held[:end])
        if head is None:
            self._give()
            return
        whole, waited_bytes = end + head.length, self._waited_bytes
        if not (is_here := head.place is not None and desk.answers(head)):
            waited_bytes = desk.passed_bytes(head)
        if not waited_bytes:
            self._pass(whole)
        elif len(held) >= whole:
            self._has_continued = False
            self._answer(head, self._taken(whole)[end:], is_here)
        elif head.length <= waited_bytes:
            if head.expects and not self._has_continued:
                self._has_continued = True
                self._transport.write(CONTINUE)
            self._wait_for_rest()
        else:
            self._pass(whole)

    def _taken(self, count: int) -> bytes:
        """The first bytes of those that came, which are held no longer."""
        if self._rest_timer is not None:
            self._stop_waiting()
        part, self._held = self._held[:count], self._held[count:]
        if self._unread & _MINE and len(self._held) <= HELD_BYTES:
            self.read(_MINE, True)
        return part

    def _wait_for_rest(self) -> None:
        if self._rest_timer is None:
            self._rest_timer = self._loop.call_later(GRACE_S, self._late)

    def _stop_waiting(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _late(self) -> None:
        """The rest of a request has not come in time."""
        end = self._held.find(b"\r\n\r\n") + 4
        head = self._heads.read(self._held[:end]) if end >= 4 else None
        if head is None:
            self._give()
        else:
            self._pass(end + head.length)

    # Hot requests

    def _answer(self, head: Head, body: bytes, is_here: bool) -> None:
        self._state = HOT
        request = HotRequest(self._desk.app, head, body, self._remote, self._transport)
        work: Coroutine[Any, Any, Answered] = head.place.handler(request)
        if not is_here:  # it will wait for another process
            self._task = self._loop.create_task(self._finish(request, work))
            return
        try:
            awaited = work.send(None)
        except StopIteration as done:
            if not self._send_at_once(request, done.value):
                self._task = self._loop.create_task(self._send(request, done.value))
        except ConnectionError:
            self._transport.abort()
        except Exception as error:  # noqa: BLE001 - the middleware has caught all that may happen
            self._failed(error)
        else:
            self._task = self._loop.create_task(self._finish(request, _Begun(work, awaited)))

    async def _finish(self, request: HotRequest, work: Awaitable[Answered]) -> None:
        """Answer a request whose handler has to wait."""
        try:
            answered = await work
        except ConnectionError:
            self._transport.abort()
        except Exception as error:  # noqa: BLE001
            self._failed(error)
        else:
            if not self._send_at_once(request, answered):
                await self._send(request, answered)

    def _failed(self, error: Exception) -> None:
        logs.error("request_failed", error)
        self._transport.abort()

    def _send_at_once(self, request: HotRequest, answered: Answered) -> bool:
        """Send a small answer to a client that reads. False: it is neither. Messages in an answer that cannot be sent are given
        back."""
        if isinstance(answered, Reply):
            pieces = answered.pieces
            if self.is_full or len(pieces) > 1 or answered.size > PIECE_BYTES:
                return False
            if self._transport.is_closing():
                if answered.undo is not None:
                    answered.undo()
                return True
            head, body, keep = answered.head(cast(web.Request, request)), pieces[0], True
        else:
            head, body = _of_aiohttp(request, cast(web.Response, answered))
            keep = answered.keep_alive is not False
            if self.is_full:
                return False
        if len(body) < JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if DELIVERED in request:
            self._desk.steps.sent(request[DELIVERED])
        self._done(keep)
        return True

    async def _send(self, request: HotRequest, answered: Answered) -> None:
        """Send a large answer, or one to a client that reads slowly. Its bytes count against the budget meanwhile."""
        if isinstance(answered, Reply):
            is_sent = await self.send_reply(request.app, answered.head(cast(web.Request, request)), answered)
        else:
            head, body = _of_aiohttp(request, cast(web.Response, answered))
            is_sent = await self.send(head, [body], ANSWER_S)
        self._done(is_sent and answered.keep_alive is not False)

    def _done(self, keep: bool) -> None:
        self._task = None
        if keep and not self._desk.is_ending:
            self._ready()
        else:
            self._transport.close()

    def _ready(self) -> None:
        """Wait for the next request, which may have come already. It gets its turn behind those of other connections."""
        self._state, self._since = READY, self._loop.time()
        if self._held:
            self._loop.call_soon(self._next)

    # Requests for aiohttp

    def _pass(self, whole: int) -> None:
        """Pass on the next request, of `whole` bytes, and wait until it is answered."""
        self._has_continued = False
        part = self._taken(whole)
        self._left, self._is_answered, self._state = whole - len(part), False, PASSED
        self._aiohttp().data_received(part)

    def _give(self) -> None:
        """Leave all that is there and all that comes to aiohttp."""
        self._idle_timer.cancel()
        self._state = GIVEN
        self._aiohttp().data_received(self._taken(len(self._held)))

    def _aiohttp(self) -> PassedConnection:
        if self._passed is None:
            self._passed = PassedConnection(self._desk.server, self, self._desk.limits)
            self._passed.connection_made(Passage(self, self._transport))
            if self.is_full:
                self._passed.pause_writing()
        return self._passed

    def answered(self, keep: bool) -> None:
        """aiohttp has answered a request that was passed on."""
        if self._state == PASSED:
            if not keep or self._desk.is_ending:
                self._state = GIVEN  # it closes the connection
            else:
                self._is_answered = True
                if not self._left:
                    self._ready()

    def aiohttp_closes(self) -> None:
        """aiohttp wants to close the connection. If it has no request it has waited for one too long, and only it shall end."""
        if self._state in (PASSED, GIVEN) or self._desk.is_ending:
            self._transport.close()
        elif self._passed is not None:
            passed, self._passed = self._passed, None
            passed.connection_lost(None)
            self.read(AIOHTTPS, True)

    # The socket

    def read(self, who: int, on: bool) -> None:
        """Read from the client, or do not, as one of both sides wishes."""
        before = self._unread
        self._unread = before & ~who if on else before | who
        if bool(before) != bool(self._unread) and not self._transport.is_closing():
            (self._transport.pause_reading if self._unread else self._transport.resume_reading)()

    def pause_writing(self) -> None:
        self.is_full = True
        if self._passed is not None:
            self._passed.pause_writing()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._passed is not None:
            self._passed.resume_writing()

    async def send_reply(self, app: web.Application, head: bytes, reply: Reply) -> bool:
        """Write an answer, and count its bytes until the system has most of them. False: the client is gone, or too slow; its
        messages are given back."""
        service, size, is_sent = app[SERVICE], 2 * reply.size, False  # `undo` holds the messages that the body was made from
        service.flow.answer_bytes.add(size)
        try:
            is_sent = await self.send(head, reply.pieces, ANSWER_S + reply.size / SLOWEST)
        finally:
            service.answer_sent(size)
            if not is_sent and reply.undo is not None:
                reply.undo()
        return is_sent

    async def send(self, head: bytes, body: Sequence[Buffer], timeout_s: float) -> bool:
        """Write an answer, and wait until the system has taken most of it. False: the client is gone, or was too slow. `body`: in
        one piece or several, of any size."""
        transport = self._transport
        if transport.is_closing():
            return False
        pieces = body if len(body) == 1 and len(body[0]) <= PIECE_BYTES else cut(body)
        transport.writelines((head, *pieces[:1]))
        if not self.is_full and len(pieces) <= 1:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain()
                for piece in pieces[1:]:
                    await asyncio.sleep(0)  # the system takes a piece in up to 3 ms: other requests go on
                    if transport.is_closing():
                        return False
                    transport.write(piece)
                    await self._drain()
            return True
        except TimeoutError:
            transport.abort()  # closing would wait for the rest to be sent
        except ConnectionError:
            pass
        return False

    async def _drain(self) -> None:
        if self.is_full:
            self._drained = self._loop.create_future()
            await self._drained


class _Begun:
    """The rest of a coroutine that has run up to its first wait, for a task. `awaited`: the future that it waits for."""

    __slots__ = ("_work", "_awaited")

    def __init__(self, work: Coroutine[Any, Any, Answered], awaited: Any) -> None:
        self._work, self._awaited = work, awaited

    def __await__(self) -> Generator[Any, Any, Answered]:
        work, awaited = self._work, self._awaited
        try:
            while True:
                try:
                    given = yield awaited
                except GeneratorExit:
                    work.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - the cancellation of the task
                    awaited = work.throw(error)
                else:
                    awaited = work.send(given)
        except StopIteration as done:
            answered: Answered = done.value
            return answered


def _of_aiohttp(request: HotRequest, response: web.Response) -> tuple[bytes, bytes]:
    """Head and body of a response, which is not prepared: a refusal, mostly."""
    body = response.body if isinstance(response.body, bytes) else b""
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items() if name.lower() not in _SET_HERE]
    lines += [f"Content-Length: {len(body)}", f"Date: {http_date()}", f"{trace.HEADER}: {request[trace.REQUEST_ID]}"]
    if (cluster := request.app[SERVICE].cluster) is not None:
        lines.append(f"{trace.CLUSTER_HEADER}: {cluster.options.name}")
    lines += [f"{name}: {request[key]}" for name, key in _PLACES if key in request]
    if response.keep_alive is False:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode(), body
