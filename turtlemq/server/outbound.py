"""Connections to other processes and nodes: a request whose body waits until the other side has taken it (100 Continue), and its
answer, read as a whole or piece by piece. Kept open between requests.

This is the client's part of HTTP/1.1 as far as servers of TurtleMQ need it among each other: no redirects, cookies, compression
or retries. A request costs two system calls each way, one future for each wait, and no task.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from turtlemq.client.http_answers import AnswerReader, BrokenAnswer, Head, host_header
from turtlemq.server.hot_heads import Headers

IDLE_S = 50.0  # a connection that was idle for longer is not used again
UNREAD_BYTES = 1 << 20  # that came and wait; above, the transport rests
PORTS = {"http": 80, "https": 443}


Body = AsyncGenerator[bytes, None]  # its pieces


class Unreached(OSError):
    """No connection to the other side was made."""


class NotTaken(TimeoutError):
    """The other side has not taken the request in time: nothing was done."""


class OutboundAnswer:
    """An answer whose head has come. `content_length`: of its body, None if that is not known. It is released when it was read,
    so that another request can use the connection, or closed."""

    def __init__(self, connection: Outbound, head: Head, is_whole: bool, end_s: float | None) -> None:
        """`is_whole`: it has no body, as that to HEAD. `end_s`: when reading it takes too long."""
        self.status, self.headers, self.content_length = head.status, Headers(head.headers), head.length
        self._connection, self._head, self._is_whole, self._end_s = connection, head, is_whole, end_s

    @property
    def origin(self) -> str:
        """The address that was asked."""
        return self._connection.origin

    async def piece(self) -> bytes:
        """The next bytes of the body; empty behind the last ones. Raises `OSError` or `TimeoutError`."""
        if self._is_whole:
            return b""
        while (data := self._connection.reader.piece()) is None:
            await self._connection.more(self._end_s)
        self._is_whole = not data
        return data

    async def read(self) -> bytes:
        """The whole body. Raises `OSError` or `TimeoutError`."""
        pieces = []
        while data := await self.piece():
            pieces.append(data)
        return b"".join(pieces)

    def release(self) -> None:
        """Give the connection back, if the body was read to its end; else close it."""
        if not self._is_whole:
            with suppress(BrokenAnswer):
                self._is_whole = self._connection.reader.piece() == b""
        self._connection.done(self._is_whole and self._head.keeps)

    def close(self) -> None:
        """Close the connection."""
        self._connection.done(False)


class Outbound(asyncio.Protocol):
    """One connection. One request at a time."""

    def __init__(self, pool: OutboundPool, origin: str, host: str) -> None:
        self.origin, self.host, self.reader = origin, host, AnswerReader()
        self.idle_since = 0.0
        self._pool, self._loop = pool, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None  # for bytes, or for room to write
        self._error: Exception | None = None
        self._is_full = self._rests = self._is_sending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        if self.reader.waiting > UNREAD_BYTES and not self._rests and self._transport is not None:
            self._rests = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.reader.has_ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._error, self.reader.has_ended = exc, True
        self._wake()
        self._pool.lost(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    @property
    def is_usable(self) -> bool:
        """A request can be sent: it is open, and no byte came that nothing was asked for."""
        is_open = self._transport is not None and not self._transport.is_closing() and not self.reader.has_ended
        return is_open and not self.reader.waiting

    @property
    def _is_answered(self) -> bool:
        """Bytes have come, or will never come: there is no use in sending more."""
        return self.reader.waiting > 0 or self.reader.has_ended

    def done(self, keep: bool) -> None:
        """The answer was read, or is not read any more."""
        if keep and not self._is_sending and self.is_usable:
            self._pool.give(self)
        else:
            self.close()

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: Body | None, limits: Limits
    ) -> OutboundAnswer:
        """Send a request, and return when the head of its answer is there. The body is asked for when the other side has taken
        the request. Raises `OSError`, `NotTaken` or `TimeoutError`, and errors of the body."""
        assert self._transport is not None, "it was opened"
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.host}", *(f"{name}: {value}" for name, value in headers.items())]
        is_chunked = body is not None and "Content-Length" not in headers
        if body is not None:
            lines += ["Transfer-Encoding: chunked", "Expect: 100-continue"] if is_chunked else ["Expect: 100-continue"]
        text, interims, is_asked = "\r\n".join([*lines, "", ""]), self.reader.interims, False
        if not text.count("\n") == text.count("\r") == len(lines) + 1:
            raise ValueError("a header has a line end in it")
        self._transport.write(text.encode("utf-8", "surrogateescape"))
        self._is_sending = body is not None
        while (head := self.reader.head()) is None:
            if body is not None and not is_asked and self.reader.interims > interims:
                is_asked = True
                await self._send(body, is_chunked, limits.end_s)
            elif is_asked:
                await self.more(limits.end_s)
            else:
                await self._until_taken(limits)
        return OutboundAnswer(self, head, method == "HEAD", limits.end_s)

    async def _until_taken(self, limits: Limits) -> None:
        """Wait for bytes. Raises `NotTaken` if none come in time."""
        if limits.taken_s is None or (limits.end_s is not None and limits.end_s < limits.taken_s):
            await self.more(limits.end_s)
            return
        try:
            await self.more(limits.taken_s)
        except TimeoutError:
            raise NotTaken("it restarts, or has too much to do") from None

    async def _send(self, body: Body, is_chunked: bool, end_s: float | None) -> None:
        """Send the body. Stops early if the other side answers before it has all, or is gone."""
        assert self._transport is not None, "it was opened"
        async for data in body:
            if self._is_answered:
                return
            if is_chunked:
                self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            else:
                self._transport.write(data)
            while self._is_full and not self._is_answered:
                await self.more(end_s)
        if is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._is_sending = False

    async def more(self, end_s: float | None) -> None:
        """Wait until something has happened: bytes have come, there is room to write, or the connection was lost. Raises
        `OSError` or `TimeoutError`."""
        if self._error is not None:
            raise self._error
        if self.reader.has_ended:
            raise BrokenAnswer("the other side has closed the connection")
        if self._rests and self._transport is not None:
            self._rests = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        timer = None if end_s is None else self._loop.call_at(end_s, self._expire, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    @staticmethod
    def _expire(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError("the answer takes too long"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Limits(NamedTuple):
    """Times of the event loop until which one request may take. `end_s`: the whole answer; `taken_s`: 100 Continue, or without a
    body the head of the answer. None: no limit."""

    end_s: float | None = None
    taken_s: float | None = None


NO_LIMITS = Limits()


class OutboundPool:
    """The connections of one process to others. `path`: of a Unix socket, in place of addresses."""

    def __init__(self, path: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._path, self._tls = path, tls
        self._idle: dict[str, list[Outbound]] = {}  # by origin, the one that was used last at the end
        self._open: set[Outbound] = set()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.close()

    async def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None,
        limits: Limits = NO_LIMITS,
        connect_s: float = 10.0,
    ) -> OutboundAnswer:
        """Send a request. Returns when the head of its answer is there. Raises `Unreached`, `OSError`, `NotTaken` or
        `TimeoutError`, and errors of the body."""
        origin, target = origin_of(url)
        now_s = asyncio.get_running_loop().time()
        connection = self._taken(origin, now_s) or await self._opened(origin, connect_s)
        try:
            if body is None:
                return await connection.exchange(method, target, headers, None, limits)
            async with aclosing(body):
                return await connection.exchange(method, target, headers, body, limits)
        except BaseException:
            connection.close()
            raise

    def _taken(self, origin: str, now_s: float) -> Outbound | None:
        """A connection that is open already."""
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable and now_s - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _opened(self, origin: str, connect_s: float) -> Outbound:
        """A new connection. Raises `Unreached`."""
        loop, parts = asyncio.get_running_loop(), urlsplit(origin)
        is_tls, host = parts.scheme == "https", parts.hostname or ""
        port = parts.port or PORTS[parts.scheme]
        name = host_header(host, port, is_tls)
        try:
            async with asyncio.timeout(connect_s):
                if self._path:
                    _, made = await loop.create_unix_connection(lambda: Outbound(self, origin, name), self._path)
                else:
                    tls = self._tls if is_tls else None
                    _, made = await loop.create_connection(lambda: Outbound(self, origin, name), host, port, ssl=tls)
        except TimeoutError:
            raise Unreached("the connection takes too long") from None
        except (OSError, ssl.CertificateError) as error:
            raise Unreached(str(error)) from error
        self._open.add(made)
        return made

    def give(self, connection: Outbound) -> None:
        """Keep a connection for another request."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.origin, []).append(connection)

    def lost(self, connection: Outbound) -> None:
        """Forget a connection that was closed."""
        self._open.discard(connection)
        if connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)


def origin_of(url: str) -> tuple[str, str]:
    """The origin and the target of a URL, both as they are written.

    >>> origin_of("http://[::1]:8878/v1/topics/a%20b?x=/")
    ('http://[::1]:8878', '/v1/topics/a%20b?x=/')
    """
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}", slash + path or "/"
