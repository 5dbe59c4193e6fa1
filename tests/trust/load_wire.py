"""Connections by the thousand on one event loop: just enough HTTP, and a look at the server's memory."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import uvloop

from tests.harness.server_process import Server
from tests.trust.model import Broken

_encode, _decode = msgspec.json.encode, msgspec.json.decode
_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run it with as many open files as a crowd needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def all_wait(server: Server, count: int) -> None:
    """Until so many long polls wait at the server."""
    end = time.monotonic() + 60
    while server.ok("GET", "/v1/status")["long_polls"] < count:
        if time.monotonic() > end:
            raise Broken(f"{count} long polls were sent, and do not all wait")
        time.sleep(0.05)


class Wire:
    """A connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, server: Server, receive_bytes: int = 0) -> AsyncIterator[Wire]:
        """Open for a while; with `receive_bytes` the system takes no more than about that before the client reads."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        wire = cls(*await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 24))
        try:
            yield wire
        finally:
            wire._writer.close()
            with contextlib.suppress(OSError):
                await wire._writer.wait_closed()

    def send(self, path: str, value: Any, method: str = "POST") -> None:
        """A request about a topic: `path` is the rest after `/v1/topics/`."""
        body = _encode(value)
        head = f"{method} /v1/topics/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def answer(self) -> tuple[int, Any]:
        """Status and value of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(head[9:12]), _decode(await self.reader.readexactly(length))

    async def receive(self) -> Any:
        """The next answer, which must be a good one."""
        status, value = await self.answer()
        if status >= 300:
            raise Broken(f"{status}: {str(value)[:500]}")
        return value

    async def call(self, path: str, value: Any, method: str = "POST") -> Any:
        self.send(path, value, method)
        return await self.receive()
