"""Heads of requests that are written in the one plain way in which nearly all clients write them. Pure.

This is no parser of HTTP: it knows a small part of the language in which a head has one meaning for every reader, and says of
anything else that it does not know it. No header twice, no line folded, no bare line feed, no byte beyond printable ASCII, the
body's length in digits or no body at all, HTTP/1.1, a connection that stays open. All other heads are for aiohttp's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

T = TypeVar("T")

HEAD_BYTES = 8 << 10  # of a head; a longer one is for aiohttp
HEADERS_MAX = 64
_KNOWN_MAX, _KNOWN_BYTES = 1_000, 1 << 10  # heads that are remembered, and how long each may be
_HEAD = re.compile(
    rb"([A-Z]{3,7}) (/[!-~]*) HTTP/1\.1\r\n"  # method and target
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ -~]*\r\n)+)"
    rb"\r\n"
)
_LENGTH = re.compile(r"[0-9]{1,15}")
_NOT_HERE = frozenset({"transfer-encoding", "upgrade", "expect", "trailer", "te", "proxy-connection", "http2-settings"})
_NAME = "[A-Za-z0-9_.-]{1,200}"  # of a topic or group in a path without escapes; which are valid, is checked behind


class Headers(dict[str, str]):
    """Headers by their names in lower case; names are given in any case."""

    @overload
    def get(self, name: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, name: str, default: str, /) -> str: ...
    @overload
    def get(self, name: str, default: T, /) -> str | T: ...
    def get(self, name: str, default: Any = None, /) -> Any:
        return dict.get(self, name.lower(), default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and dict.__contains__(self, name.lower())

    def __getitem__(self, name: str) -> str:
        return dict.__getitem__(self, name.lower())


class Head:
    """A plain head. `place`: what `Heads.place_of` says about its method and path."""

    __slots__ = ("method", "path", "headers", "length", "place")

    def __init__(self, method: str, path: str, headers: Headers, length: int, place: Any) -> None:
        self.method, self.path, self.headers, self.length, self.place = method, path, headers, length, place


class Heads:
    """Knows plain heads; those that were seen before by their bytes, since clients send the same ones again and again."""

    def __init__(self, place_of: Callable[[str, str], Any]) -> None:
        self._place_of = place_of
        self._known: dict[bytes, Head] = {}

    def read(self, data: bytes) -> Head | None:
        """The head in these bytes, which end with its empty line; None if it is not plain."""
        head = self._known.get(data)
        if head is None:
            head = plain(data, self._place_of)
            if head is not None and len(data) <= _KNOWN_BYTES:
                if len(self._known) >= _KNOWN_MAX:
                    self._known.clear()
                self._known[data] = head
        return head


def plain(data: bytes, place_of: Callable[[str, str], Any] = lambda method, path: None) -> Head | None:
    r"""A plain head; None of any other.

    >>> plain(b"POST /v1/topics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n").length
    2
    >>> plain(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    """
    found = _HEAD.fullmatch(data) if len(data) <= HEAD_BYTES else None
    if found is None:
        return None
    method, path, lines = found[1].decode(), found[2].decode(), found[3].decode().split("\r\n")
    headers = Headers()
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip(" ")
    length = headers.get("content-length", "0")
    if (
        len(headers) != len(lines) - 1  # a header stands there twice
        or len(headers) > HEADERS_MAX
        or "host" not in headers
        or not _LENGTH.fullmatch(length)
        or headers.get("connection", "keep-alive").lower() != "keep-alive"
        or method == "CONNECT"
        or not _NOT_HERE.isdisjoint(headers)
    ):
        return None
    return Head(method, path, headers, int(length), place_of(method, path))


class Place:
    """A route with the values of its variables, as handlers ask `request.match_info` for them."""

    __slots__ = ("values", "route", "handler")

    def __init__(self, values: dict[str, str], route: Route, handler: Any) -> None:
        self.values, self.route, self.handler = values, route, handler

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


class Route:
    """A route of the application; it is its own `resource`."""

    __slots__ = ("canonical", "resource")

    def __init__(self, canonical: str) -> None:
        self.canonical, self.resource = canonical, self


def hot_routes(handlers: Mapping[str, Any]) -> Callable[[str, str], Place | None]:
    """A function that finds the place of a POST among these handlers by path; None where there is none.

    >>> find = hot_routes({"/v1/topics/{topic}/fetch": print})
    >>> find("POST", "/v1/topics/orders/fetch")["topic"], find("POST", "/v1/topics/a%62/fetch"), find("GET", "/v1/topics/a/fetch")
    ('orders', None, None)
    """
    routes = [
        (re.compile(re.sub(r"\\{(\w+)\\}", rf"(?P<\1>{_NAME})", re.escape(path))), Route(path), handler)
        for path, handler in handlers.items()
    ]

    def find(method: str, path: str) -> Place | None:
        if method == "POST":
            for pattern, route, handler in routes:
                if found := pattern.fullmatch(path):
                    return Place(found.groupdict(), route, handler)
        return None

    return find
