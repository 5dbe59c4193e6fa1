"""Around every request: its id, how long it took, whether it was slow; and what is counted of it.

A caller's `X-Request-Id` is kept if it is sane, else one is made. It is in the answer, in error bodies and in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable
from itertools import count
from time import perf_counter
from typing import TypeVar

from aiohttp import web

from turtlemq.server import logs
from turtlemq.server.request import CONFIG, SERVICE

T = TypeVar("T")

HEADER = "X-Request-Id"
REQUEST_ID, STARTED, _BEGUN, _WAITED = "request_id", "started", "begun", "waited"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_PREFIX, _NUMBERS = secrets.token_hex(4), count(1)
_often = logs.LogLimiter()


def sane(text: str | None) -> bool:
    """May this be an id in our log?

    >>> sane("7f3a-41"), sane("a b"), sane("x" * 129), sane(None)
    (True, False, False, False)
    """
    return text is not None and _SANE.fullmatch(text) is not None


def begin(request: web.Request) -> str:
    """A request has come: name it."""
    given = request.headers.get(HEADER)
    name = given if given is not None and sane(given) else made()
    request[REQUEST_ID], request[_BEGUN] = name, perf_counter()
    request.app[SERVICE].meter.in_flight += 1
    return name


def route_of(request: web.Request) -> str:
    """The path as it stands in the table of routes, so that labels are few."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def finish(request: web.Request, status: int | None) -> None:
    """It is over; None: nobody was there any more to be answered."""
    meter = request.app[SERVICE].meter
    meter.in_flight -= 1
    if status is None:
        return
    seconds = perf_counter() - request[_BEGUN] - request.get(_WAITED, 0.0)
    route = route_of(request)
    meter.answered(request.method if route != "other" else "other", route, status, seconds)
    limit_ms = request.app[CONFIG].slow_request_ms
    if limit_ms and seconds * 1000 >= limit_ms:
        left_out = _often.allow("slow_request", perf_counter())
        if left_out is not None:
            more = {"left_out": left_out} if left_out else {}
            where = {"method": request.method, "path": request.path, "status": status, "ms": round(seconds * 1000, 1)}
            logs.warning("slow_request", request_id=request[REQUEST_ID], **where, **more)


async def waited(request: web.Request, work: Awaitable[T]) -> T:
    """Await something whose time is the caller's own wish, as a long poll's: it makes no request slow."""
    begun = perf_counter()
    try:
        return await work
    finally:
        request[_WAITED] = request.get(_WAITED, 0.0) + perf_counter() - begun


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer names its request, streams too."""
    request[STARTED] = True
    response.headers[HEADER] = request.get(REQUEST_ID) or made()


def made() -> str:
    """An id of our own. It is for finding lines, and guards nothing, so a running number will do."""
    return f"{_PREFIX}-{next(_NUMBERS):x}"


def failed(request: web.Request, code: str, error: BaseException, trace: bool = False) -> None:
    """Log that a request failed through no fault of its sender."""
    left_out = _often.allow("request_failed", perf_counter())
    if left_out is not None:
        said = f"{type(error).__name__}: {error}"
        where = {"code": code, "method": request.method, "path": request.path, "request_id": request.get(REQUEST_ID)}
        logs.error(
            "request_failed", error if trace else None, **where, error=said, **({"left_out": left_out} if left_out else {})
        )
