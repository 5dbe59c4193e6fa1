"""A gRPC connection on the event loop: the thin asyncio protocol around `http2`, and the calls that handlers see.

A handler takes lists of messages from its `Call` and gives lists of messages to it. Back-pressure is HTTP/2's own: the client may
send more only when the handler has taken the messages before. Unsent answers count against the server's byte budget.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

from turtlemq.errors import TooLarge, TurtleError
from turtlemq.server import trace
from turtlemq.server.auth import Token
from turtlemq.server.errors import DeadlineExceeded, Overloaded, RequestTimeout
from turtlemq.server.grpc.framing import BadMessage, Packed, frame, unpacked
from turtlemq.server.grpc.http2 import Began, Ended, Happened, Http2Server, Left, Received
from turtlemq.server.grpc.statuses import Garbage, timeout_s, trailers
from turtlemq.server.service import Service

UNSENT_MAX = 4 << 20  # bytes of a stream that wait for the client; beyond it nothing is delivered on it
STALLED_S = 30.0  # without progress of unsent bytes: the stream is reset
HALF_MESSAGE_S, HALF_MESSAGE_BYTES_S = 30.0, 64 << 10  # time for a message to be complete, and 1 s more for so many bytes
WRITE_BYTES = 256 << 10  # given to the socket at once
CONTROL_BYTES_MAX = 1 << 20  # control frames that the socket does not take: the connection is cut
UNPACKED_BYTES = 4 << 20  # compressed messages that are unpacked at once
REFUSE_S = 1.0  # a connection that is not allowed stays open so long, so that its calls can be answered


class CallEnded(Exception):
    """The client does not wait for this call any more. `why`: reset, lost, left, silent, stalled, drained."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Call:
    """One call of a client, as its handler sees it."""

    def __init__(self, connection: GrpcConnection, began: Began) -> None:
        self.path, self.metadata, self.peer = began.path, began.headers, connection.peer
        given = began.headers.get("x-request-id")
        self.request_id = given if given is not None and trace.is_safe(given) else trace.new_id()
        self.token: Token | None = None
        self.is_unary = False  # a call with one answer, whose duration counts
        self.queued = self.written = 0  # bytes of messages given by the handler, and those that the socket has
        self.on_progress: Callable[[], object] = int  # called when the socket has taken bytes, and when the call ends
        self.ended = ""  # why the client does not wait any more
        self.is_finished = False  # its handler is done
        self._connection, self._stream = connection, began.stream
        self._loop = asyncio.get_running_loop()
        self._messages: list[bytes] = []
        self._to_credit = self._size = 0  # bytes that the client may send again: with the next `receive`, with the one after
        self._partial = self._held = 0  # bytes of a message that is not complete; all bytes that count against the budget
        self._is_half_closed = False
        self._error: TurtleError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._moved_at = self._loop.time()  # of the last progress of unsent bytes
        self._partial_since: float | None = None
        self._deadline = self._set_deadline(began.headers.get("grpc-timeout"))

    def _set_deadline(self, text: str | None) -> asyncio.TimerHandle | None:
        seconds = None if text is None else timeout_s(text)
        return None if seconds is None else self._loop.call_later(seconds, self.fail, DeadlineExceeded("the call's time is over"))

    # For handlers

    async def receive(self) -> list[bytes]:
        """The messages that have come, one at least; none once the client sends no more. Raises `CallEnded`, or the error of a
        call that is no gRPC. The client may send as much again as was taken before."""
        self._credit()
        while not self._messages and not self._is_half_closed and not self.ended and self._error is None:
            await self._wait()
        if self.ended:
            raise CallEnded(self.ended)
        if self._error is not None:
            raise self._error
        out, rest = _taken(self._messages)
        self._messages = rest
        if not rest:
            self._to_credit, self._size = self._to_credit + self._size, 0
        return out

    def send(self, messages: list[bytes]) -> None:
        """Queue messages. `queued` is where they end among all bytes of this call."""
        if self.ended or not messages:
            return
        data = frame(messages)
        if self.unsent == 0:
            self._moved_at = self._loop.time()
        self.queued += len(data)
        self._connection.service.flow.answer_bytes.add(len(data))
        self._connection.send(self._stream, data)

    def flush(self) -> None:
        """Write now, as far as the client lets; without this, at the end of this round of the event loop."""
        self._connection.flush()

    async def sendable(self) -> None:
        """Return when few bytes wait for the client. Raises `CallEnded`."""
        while self.unsent > UNSENT_MAX // 4 and not self.ended and self._error is None:
            await self._wait()
        if self.ended:
            raise CallEnded(self.ended)
        if self._error is not None:
            raise self._error

    @property
    def unsent(self) -> int:
        """Bytes of messages that the socket does not have."""
        return self.queued - self.written

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the call; infinite without one."""
        return math.inf if self._deadline is None else self._deadline.when() - self._loop.time()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life of the client."""
        return self._loop.time() - self._connection.heard_at

    @property
    def is_holding(self) -> bool:
        """Whether bytes of it count against the budget of requests, or should."""
        return bool(self._held or self._size)

    def leave_connection(self) -> None:
        """Let the client begin its next call on another connection. Calls under way go on."""
        self._connection.go_away()

    def finish(self, error: TurtleError | None) -> None:
        """End the call with its status."""
        self._close()
        if not self.ended:
            self._connection.finish(self._stream, trailers(self.request_id, error))

    # For the connection

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _credit(self) -> None:
        if self._to_credit:
            self._connection.taken(self._stream, self._to_credit)
            self._to_credit = 0
        self.count_held(self._partial)

    def take(self, event: Received) -> None:
        """Messages have come."""
        self._messages += event.messages
        self._size += event.size
        self._partial_since = None  # the next message begins
        self._wake()

    def half_close(self) -> None:
        """The client sends no more."""
        self._is_half_closed = True
        self._wake()

    def refuse(self, error: BadMessage) -> None:
        """The client has sent bytes that are no messages."""
        self.fail(TooLarge(str(error)) if error.too_large else Garbage(str(error)))

    def fail(self, error: TurtleError) -> None:
        """End the call with an error, as soon as its handler looks."""
        self._error = self._error or error
        self.on_progress()
        self._wake()

    def count_held(self, partial: int) -> None:
        """Count the bytes that this call holds, `partial` of them of a message that is not complete, against the budget."""
        budget, held = self._connection.service.flow.request_bytes, partial + self._size
        if self.is_finished:
            return
        budget.add(held - self._held)
        self._held, self._partial = held, partial
        self._partial_since = (self._partial_since or self._loop.time()) if partial else None
        if partial and budget.full:
            self.fail(Overloaded("requests hold as many bytes as max_held_bytes allows", retry_after_ms=1_000))

    def progress(self, count: int) -> None:
        """The socket has taken `count` bytes of messages."""
        self.written += count
        self._moved_at = self._loop.time()
        self._connection.service.answer_sent(count)
        self.on_progress()
        self._wake()

    def review(self, now: float, partial: int) -> None:
        """Look for a client that does not read, or does not complete a message."""
        if self.unsent and now - self._moved_at > STALLED_S:
            self._connection.reset(self._stream)
            self.end("stalled")
        since = self._partial_since if self._waiters else None  # without a waiting handler, the client may have no room to go on
        if since is not None and now - since > HALF_MESSAGE_S + partial / HALF_MESSAGE_BYTES_S:
            self.fail(RequestTimeout("a message came too slowly"))

    def end(self, why: str) -> None:
        """The client waits no longer: nothing can be sent."""
        if not self.ended:
            self.ended = why
            self._close()
            self.on_progress()
            self._wake()

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        flow, self.is_finished = self._connection.service.flow, True
        self._connection.taken(self._stream, self._to_credit + self._size)  # the window of the connection is that of other calls
        self._to_credit = 0
        if self.ended and self.unsent:
            self._connection.service.answer_sent(self.unsent)
            self.queued = self.written
        flow.request_bytes.give(self._held)
        self._held = self._size = 0


def _taken(messages: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Messages for a handler, unpacked, and the rest: UNPACKED_BYTES of compressed ones are unpacked at once."""
    if not any(isinstance(message, Packed) for message in messages):
        return messages, []
    out, size = list[bytes](), 0
    for i, message in enumerate(messages):
        if size > UNPACKED_BYTES:
            return out, messages[i:]
        try:
            out.append(unpacked(message) if isinstance(message, Packed) else message)
        except BadMessage as error:
            raise (TooLarge if error.too_large else Garbage)(str(error)) from None
        size += len(out[-1])
    return out, []


class GrpcConnection(asyncio.Protocol):
    """A client's connection: bytes to and from `Http2Server`, signs of life, and the calls by stream."""

    def __init__(
        self,
        service: Service,
        allows: Callable[[str], bool],
        begin: Callable[[Call], object],
        lost: Callable[[GrpcConnection], object],
        beat_s: float,
    ) -> None:
        self.service, self.peer, self.is_allowed = service, "", False
        self.calls: dict[int, Call] = {}
        self._allows, self._begin, self._lost, self._beat_s = allows, begin, lost, beat_s
        self._machine = Http2Server()
        self._is_paused = self._has_left = False
        self._flush_soon: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._loop = cast(asyncio.Transport, transport), asyncio.get_running_loop()
        self.peer = (transport.get_extra_info("peername") or ("",))[0]
        self.is_allowed = self._allows(self.peer)
        self.heard_at = self._loop.time()
        self._timer = self._loop.call_later(self._pause_s, self._review)
        if not self.is_allowed:
            self._loop.call_later(REFUSE_S, self._transport.close)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.heard_at = now = self._loop.time()
        for event in self._machine.receive(data, now):
            self._handle(event)
        for stream, call in list(self.calls.items()):
            if (partial := self._machine.held(stream)) or call.is_holding:
                call.count_held(partial)
        self._machine.resume()
        self.flush()

    def _handle(self, event: Happened) -> None:
        if isinstance(event, Began):
            self.calls[event.stream] = call = Call(self, event)
            self._begin(call)
        elif isinstance(event, Left):
            self._end_calls("left")
        elif (found := self.calls.get(event.stream)) is None or found.is_finished:
            if isinstance(event, Received):
                self._machine.taken(event.stream, event.size)
            elif found is not None:
                self._handle_end(event, found)
        elif isinstance(event, Received):
            found.take(event)
        else:
            self._handle_end(event, found)

    def _handle_end(self, event: Ended, call: Call) -> None:
        if event.error is not None:
            call.refuse(event.error)
        elif event.why == "half_close":
            call.half_close()
        else:
            del self.calls[event.stream]
            call.end(event.why)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._machine.resume()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end_calls("lost")
        self._lost(self)

    def _end_calls(self, why: str) -> None:
        for call in list(self.calls.values()):
            call.end(why)
        self.calls.clear()

    # Calls

    def send(self, stream: int, data: bytes) -> None:
        """Queue bytes of a call."""
        self._machine.send(stream, data)
        self._soon()

    def finish(self, stream: int, with_trailers: list[tuple[str, str]]) -> None:
        """End a call with its trailers."""
        self._machine.finish(stream, with_trailers)
        if self.calls[stream].unsent == 0:
            del self.calls[stream]
        self._soon()

    def reset(self, stream: int) -> None:
        """End a call without a status."""
        self._machine.reset(stream)
        self.calls.pop(stream, None)
        self._soon()

    def taken(self, stream: int, size: int) -> None:
        """A handler has taken messages of `size` bytes."""
        self._machine.taken(stream, size)
        self._soon()

    def go_away(self) -> None:
        """Announce, once, that no more calls are served on this connection."""
        if not self._has_left:
            self._has_left = True
            self._machine.go_away()
            self._soon()

    def close(self) -> None:
        """End the connection, once its output was sent."""
        self.flush()
        self._transport.close()

    # Output

    def _soon(self) -> None:
        """Write in the next round of the event loop: answers of one round share a write."""
        if self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write all that the client and the socket take now."""
        if self._flush_soon is not None:
            self._flush_soon.cancel()
            self._flush_soon = None
        while not self._transport.is_closing():
            data = self._machine.output(0 if self._is_paused else WRITE_BYTES)
            self._report_progress()
            if not data:
                break
            self._transport.write(data)
        if self._machine.closed:
            self._end_calls("lost")
            self._transport.close()
        elif self._transport.get_write_buffer_size() > CONTROL_BYTES_MAX + 2 * WRITE_BYTES:
            self._transport.abort()

    def _report_progress(self) -> None:
        progress = self._machine.progress
        while progress:
            stream, count = progress.popitem()
            if (call := self.calls.get(stream)) is not None:
                call.progress(count)
                if call.is_finished and call.unsent == 0:
                    del self.calls[stream]

    # Time

    @property
    def _pause_s(self) -> float:
        return min(5.0, max(0.02, self._beat_s / 2))

    def _review(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(self._pause_s, self._review)
        silent_s = now - self.heard_at
        if silent_s > 3 * self._beat_s:
            self._end_calls("silent")
            self._transport.abort()
            return
        if silent_s >= self._beat_s:
            self._machine.ping()
        for stream, call in list(self.calls.items()):
            call.review(now, self._machine.held(stream))
        self.flush()
