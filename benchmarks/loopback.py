"""Limits of the loopback between two Python processes: bytes per second through a socket, and empty POSTs per second.

`python -m benchmarks.loopback` is the other process: a sink for bytes and an empty aiohttp server, on free ports.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time

import uvloop
from aiohttp import web

from benchmarks.child import ROOT

_HOST = "127.0.0.1"
_BLOCK = 1 << 20
_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def measure(size: int, posts: int = 2_000) -> tuple[float, float]:
    """Bytes per second for `size` bytes, and POSTs per second on one connection: medians of three."""
    command = [sys.executable, "-m", "benchmarks.loopback"]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        sink, server = map(int, other.stdout.readline().split())
        rates = [size / _pour(sink, size) for _ in range(3)]
        calls = [posts / _call(server, posts) for _ in range(3)]
    finally:
        other.kill()
        other.communicate()
    return statistics.median(rates), statistics.median(calls)


def _pour(port: int, size: int) -> float:
    """Seconds to send `size` bytes, until the other process confirms them."""
    block = bytes(_BLOCK)
    with socket.create_connection((_HOST, port)) as connection:
        begin = time.perf_counter()
        for _ in range(size // _BLOCK):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return time.perf_counter() - begin


def _call(port: int, count: int) -> float:
    with socket.create_connection((_HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.perf_counter()
        for _ in range(count):
            connection.sendall(_POST)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "an empty answer arrives in one read"
        return time.perf_counter() - begin


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    sink = socket.create_server((_HOST, 0))
    loop.run_in_executor(None, _swallow, sink)

    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/", empty)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, _HOST, 0)
    await site.start()
    print(sink.getsockname()[1], runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def _swallow(sink: socket.socket) -> None:
    room = memoryview(bytearray(_BLOCK))
    while True:
        connection, _ = sink.accept()
        with connection:
            while connection.recv_into(room):
                pass
            connection.sendall(b"!")


if __name__ == "__main__":
    uvloop.run(_serve())
