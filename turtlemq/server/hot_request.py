"""A request that has arrived whole, with a plain head: as much of aiohttp's `web.Request` as the hot handlers and all checks
around them read, made in a microsecond.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import HttpVersion11, web
from yarl import URL

from turtlemq.server.hot_heads import Head


class HotRequest(dict[str, Any]):
    """A request of a hot route. Like `web.Request` it is a mapping of what middleware notes about it."""

    __slots__ = ("app", "method", "path", "headers", "match_info", "remote", "transport", "_body")
    version, keep_alive, query_string = HttpVersion11, True, ""
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, app: web.Application, head: Head, body: bytes, remote: str, transport: asyncio.Transport) -> None:
        self.app, self.remote, self.transport, self._body = app, remote, transport, body
        self.method, self.path, self.headers, self.match_info = head.method, head.path, head.headers, head.place

    @property
    def raw_path(self) -> str:
        return self.path

    @property
    def url(self) -> URL:
        """The address that the client has asked."""
        is_tls = self.transport.get_extra_info("sslcontext") is not None
        return URL(f"http{'s' if is_tls else ''}://{self.host}{self.path}", encoded=True)

    @property
    def host(self) -> str:
        return self.headers["host"]

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        return len(self._body) if "content-length" in self.headers else None

    @property
    def body_exists(self) -> bool:
        return bool(self._body)

    @property
    def can_read_body(self) -> bool:
        return bool(self._body)

    @property
    def content(self) -> HotRequest:
        """The stream of the body: this object itself."""
        return self

    def is_eof(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def read_nowait(self, n: int = -1) -> bytes:
        """The whole body."""
        return self._body
