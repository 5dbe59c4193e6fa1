"""A small reverse proxy on a free port: it serves a server under a path prefix, and tells the server about its client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

_OWN = ("Host", "Connection", "Transfer-Encoding", "Content-Length")  # headers that each side of a proxy sets for itself


class ReverseProxy:
    """Passes `prefix/…` on to `target/…`, as `location /prefix/ { proxy_pass http://target/; }` of nginx does."""

    def __init__(self, target: str, prefix: str, client: str) -> None:
        """`client`: the address that `X-Forwarded-For` names."""
        self._target, self._prefix, self._client = target, prefix, client
        self.paths: list[str] = []  # asked of the server
        self.strange: list[str] = []  # asked outside the prefix
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self._prefix}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith(f"{self._prefix}/"):
            self.strange.append(request.raw_path)
            raise web.HTTPNotFound
        path = request.raw_path.removeprefix(self._prefix)
        self.paths.append(path)
        headers = CIMultiDict(item for item in request.headers.items() if item[0].title() not in _OWN)
        headers.update({"X-Forwarded-For": self._client, "X-Forwarded-Prefix": self._prefix, "X-Forwarded-Proto": "https"})
        body = await request.read()
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, self._target + path, headers=headers, data=body, allow_redirects=False) as answer,
        ):
            kept = CIMultiDict(item for item in answer.headers.items() if item[0].title() not in _OWN)
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


@contextmanager
def reverse_proxy(target: str, prefix: str = "/turtle", client: str = "203.0.113.7") -> Iterator[ReverseProxy]:
    """A proxy on a thread of its own."""
    proxy, loop, started = ReverseProxy(target, prefix, client), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.port = runner.addresses[0][1]
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
