"""One connection to a server: requests and answers (`http_answers`) on an asyncio transport.

One timer and one future for each wait are all that a request costs beside its bytes: no task, no stream, no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from turtlemq.client.http_answers import AnswerReader, Head, host_header, request_head
from turtlemq.client.options import Sink

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

_JOINED_BYTES = 64 << 10  # of a body that is copied, to be sent by one system call with its head
_UNREAD_BYTES = 1 << 20  # that came and wait; above, the transport rests


class AsyncConnection(asyncio.Protocol):
    """A connection of one event loop, made by `connect`. One request at a time."""

    def __init__(self, host: str, port: int, is_tls: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host_header(host, port, is_tls)
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_late = self._rests = False
        self._error: Exception | None = None  # with which the connection was lost

    @classmethod
    async def connect(cls, host: str, port: int, context: ssl.SSLContext | None, timeout_s: float) -> AsyncConnection:
        """Open a connection. Raises `OSError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, made = await loop.create_connection(
                    lambda: cls(host, port, context is not None),
                    host,
                    port,
                    ssl=context,
                    server_hostname=None if context is None else host,
                )
        except TimeoutError:
            raise TimeoutError("the connection takes too long") from None
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._reader.waiting > _UNREAD_BYTES and not self._rests and self._transport is not None:
            self._rests = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._reader.has_ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._error = error
        self._reader.has_ended = error is None
        self._wake()

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent: it is open, and no byte came that nothing was asked for."""
        is_open = self._transport is not None and not self._transport.is_closing() and not self._reader.has_ended
        return is_open and not self._reader.waiting and self._loop is asyncio.get_running_loop()

    def close(self) -> None:
        """Close it at once; bytes that were not sent are lost."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # its event loop was closed before
                self._transport.abort()

    async def exchange(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        sink: Sink | None = None,
    ) -> tuple[Head, bytes]:
        """Send a request and read its answer, in so many seconds. With `sink`, which gets the body of a success, each wait for
        more bytes may take that long. Raises `OSError` or `ValueError`."""
        assert self._transport is not None, "it was opened"
        head = request_head(method, path, self._host, headers, body)
        timer = self._loop.call_later(timeout_s, self._expire)
        try:
            if body is None or len(body) <= _JOINED_BYTES:
                self._transport.write(head + (body or b""))
            else:
                self._transport.write(head)
                self._transport.write(body)
            while (answer := self._reader.head()) is None:
                await self._more()
            if sink is not None and answer.status >= 300:
                sink = None
            pieces: list[bytes] = []
            while (piece := self._reader.piece()) != b"":
                if piece is not None:
                    (pieces.append if sink is None else sink.write)(piece)
                    continue
                if sink is not None:
                    timer.cancel()
                    timer = self._loop.call_later(timeout_s, self._expire)
                await self._more()
            return answer, b"".join(pieces)
        finally:
            timer.cancel()

    async def _more(self) -> None:
        """Wait until more bytes have come, or no more will come."""
        if self._is_late:
            raise TimeoutError("the answer takes too long")
        if self._error is not None:
            raise self._error
        if self._rests and self._transport is not None:
            self._rests = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _expire(self) -> None:
        self._is_late = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError("the answer takes too long"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
