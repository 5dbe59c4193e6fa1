"""Heads of requests that are written in the one plain way in which nearly all clients write them. Pure.

This is no parser of HTTP: it knows a small part of the language in which a head has one meaning for every reader, and says of
anything else that it does not know it. No header twice, no line folded, no bare line feed, no byte beyond printable ASCII, the
body's length in digits or no body at all, HTTP/1.1, a connection that stays open. All other heads are for aiohttp's parser.
Another process of this server may ask for 100 Continue as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

T = TypeVar("T")

HEAD_BYTES = 8 << 10  # of a head; a longer one is for aiohttp
HEADERS_MAX = 64
_KNOWN_MAX, _KNOWN_BYTES = 1_000, 1 << 10  # heads that are remembered, and how long each may be; of headers the same
_LINE = re.compile(rb"([A-Z]{3,7}) (/[!-~]*) HTTP/1\.1")  # method and target
_LINES = re.compile(rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ -~]*\r\n)+)\r\n")
_LENGTH = re.compile(r"[0-9]{1,15}")
_CONTINUE = "100-continue"
_NOT_HERE = frozenset({"transfer-encoding", "upgrade", "trailer", "te", "proxy-connection", "http2-settings"})
_NAME = "[A-Za-z0-9_.:-]{1,200}"  # a variable of a path without escapes; the valid ones are checked behind


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

    @property
    def expects(self) -> bool:
        """The body comes when it is asked for."""
        return dict.__contains__(self.headers, "expect")


class Heads:
    """Knows plain heads. Those of a hot route without an id are remembered by their bytes, of others the headers alone: clients
    send the same ones again and again."""

    def __init__(self, place_of: Callable[[str, str], Any], of_siblings: bool = False) -> None:
        self._place_of, self._of_siblings = place_of, of_siblings
        self._heads: dict[bytes, Head] = {}
        self._headers: dict[bytes, tuple[Headers, int]] = {}

    def read(self, data: bytes) -> Head | None:
        """The head in these bytes, which end with its empty line; None if it is not plain."""
        head = self._heads.get(data)
        if head is None:
            head = plain(data, self._place_of, self._known_headers)
            if head is not None and head.place is not None and "id" not in head.place:
                _remember(self._heads, data, head)
        return head

    def _known_headers(self, lines: bytes) -> tuple[Headers, int] | None:
        known = self._headers.get(lines)
        if known is None and (known := plain_headers(lines, self._of_siblings)) is not None:
            _remember(self._headers, lines, known)
        return known


def _remember(known: dict[bytes, T], data: bytes, value: T) -> None:
    if len(data) <= _KNOWN_BYTES:
        if len(known) >= _KNOWN_MAX:
            known.clear()
        known[data] = value


def plain_headers(lines: bytes, may_expect: bool = False) -> tuple[Headers, int] | None:
    """The plain headers in these bytes, which end with an empty line, and the length of the body; None of any others.
    `may_expect`: they may ask for 100 Continue."""
    found = _LINES.fullmatch(lines)
    if found is None:
        return None
    texts = found[1].decode().split("\r\n")
    headers = Headers()
    for text in texts[:-1]:
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip(" ")
    length = headers.get("content-length", "0")
    if (
        len(headers) != len(texts) - 1  # a header stands there twice
        or len(headers) > HEADERS_MAX
        or "host" not in headers
        or not _LENGTH.fullmatch(length)
        or headers.get("connection", "keep-alive").lower() != "keep-alive"
        or not _NOT_HERE.isdisjoint(headers)
        or ("expect" in headers and not (may_expect and headers["expect"] == _CONTINUE))
    ):
        return None
    return headers, int(length)


def plain(
    data: bytes,
    place_of: Callable[[str, str], Any] = lambda method, path: None,
    headers_of: Callable[[bytes], tuple[Headers, int] | None] = plain_headers,
) -> Head | None:
    r"""A plain head; None of any other.

    >>> plain(b"POST /v1/topics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n").length
    2
    >>> plain(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    """
    if len(data) > HEAD_BYTES:
        return None
    line, _, lines = data.partition(b"\r\n")
    found, headers = _LINE.fullmatch(line), headers_of(lines)
    if found is None or headers is None or found[1] == b"CONNECT":
        return None
    method, path = found[1].decode(), found[2].decode()
    return Head(method, path, *headers, place_of(method, path))


class Place:
    """A route with the values of its variables, as handlers ask `request.match_info` for them."""

    __slots__ = ("values", "route", "handler")

    def __init__(self, values: dict[str, str], route: Route, handler: Any) -> None:
        self.values, self.route, self.handler = values, route, handler

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


class Route:
    """A route of the application; it is its own `resource`."""

    __slots__ = ("canonical", "resource")

    def __init__(self, canonical: str) -> None:
        self.canonical, self.resource = canonical, self


def hot_routes(handlers: Mapping[str, Any]) -> Callable[[str, str], Place | None]:
    """A function that finds the place of a request among these handlers by method and path; None where there is none.

    >>> find = hot_routes({"POST /v1/topics/{topic}/fetch": print})
    >>> find("POST", "/v1/topics/orders/fetch")["topic"], find("POST", "/v1/topics/a%62/fetch"), find("GET", "/v1/topics/a/fetch")
    ('orders', None, None)
    """
    routes: dict[str, list[tuple[re.Pattern[str], Route, Any]]] = {}
    for operation, handler in handlers.items():
        method, _, path = operation.partition(" ")
        pattern = re.compile(re.sub(r"\\{(\w+)\\}", rf"(?P<\1>{_NAME})", re.escape(path)))
        routes.setdefault(method, []).append((pattern, Route(path), handler))

    def find(method: str, path: str) -> Place | None:
        for pattern, route, handler in routes.get(method, ()):
            if found := pattern.fullmatch(path):
                return Place(found.groupdict(), route, handler)
        return None

    return find
