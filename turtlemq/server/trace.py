"""Tracing of requests: their ids, durations and outcome, counted in the meter and logged if they are slow or fail.

A caller's `X-Request-Id` is kept if it is safe to log; otherwise the server makes one. The id is in the answer, in error bodies
and in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable
from itertools import count
from time import perf_counter, time
from typing import TypeVar

from aiohttp import web

from turtlemq.server import logs
from turtlemq.server.request import CONFIG, SERVICE
from turtlemq.server.spans import SPANS

T = TypeVar("T")

HEADER = "X-Request-Id"
CLUSTER_HEADER = "X-Turtlemq-Cluster"  # of answers in a cluster: there are other nodes to ask
OWNER_HEADER, OWNER = "X-Turtlemq-Owner", "owner"  # of an answer that came from another process: the address of that process
PLACES_HEADER, PLACES = "X-Turtlemq-Partitions", "places"  # the addresses of the processes with a topic's partitions, in order
REQUEST_ID, STARTED, _BEGUN, _WAITED = "request_id", "started", "begun", "waited"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_PREFIX, _NUMBERS = secrets.token_hex(4), count(1)
_log_limiter = logs.LogLimiter()


def is_safe(text: str | None) -> bool:
    """Whether a text may be used as a request id.

    >>> is_safe("7f3a-41"), is_safe("a b"), is_safe("x" * 129), is_safe(None)
    (True, False, False, False)
    """
    return text is not None and _SAFE.fullmatch(text) is not None


def begin(request: web.Request) -> str:
    """Give a request its id, and count it as in flight. Returns the id."""
    given = request.headers.get(HEADER)
    name = given if given is not None and is_safe(given) else new_id()
    request[REQUEST_ID], request[_BEGUN] = name, perf_counter()
    request.app[SERVICE].meter.in_flight += 1
    if (spans := request.app[SPANS]) is not None:
        spans.begin(request, route_of(request), name)
    return name


def route_of(request: web.Request) -> str:
    """The path of the route, with its variables: the number of labels stays bounded."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def finish(request: web.Request, status: int | None) -> None:
    """Count an answered request, and log it if it was slow. `status` is None if the client was gone."""
    meter = request.app[SERVICE].meter
    meter.in_flight -= 1
    trace_id = "" if (spans := request.app[SPANS]) is None else spans.end(request, status)
    if status is None:
        return
    seconds = perf_counter() - request[_BEGUN] - request.get(_WAITED, 0.0)
    route = route_of(request)
    meter.answered(request.method if route != "other" else "other", route, status, seconds)
    if trace_id:
        meter.traced(route, seconds, trace_id, time())
    limit_ms = request.app[CONFIG].slow_request_ms
    if limit_ms and seconds * 1000 >= limit_ms:
        left_out = _log_limiter.allow("slow_request", perf_counter())
        if left_out is not None:
            more = {"left_out": left_out} if left_out else {}
            where = {"method": request.method, "path": request.path, "status": status, "ms": round(seconds * 1000, 1)}
            logs.warning("slow_request", request_id=request[REQUEST_ID], **where, **more)


async def waited(request: web.Request, work: Awaitable[T]) -> T:
    """Await `work`, and leave its time out of the request's duration: the caller itself asked for the wait, as of a long poll."""
    begun = perf_counter()
    try:
        return await work
    finally:
        request[_WAITED] = request.get(_WAITED, 0.0) + perf_counter() - begun


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler of aiohttp: put the request id into the head of an answer, also of a stream, and the cluster's name."""
    request[STARTED] = True
    response.headers[HEADER] = request.get(REQUEST_ID) or new_id()
    if PLACES in request:
        response.headers[PLACES_HEADER] = request[PLACES]
    if OWNER in request:
        response.headers[OWNER_HEADER] = request[OWNER]
    if (cluster := request.app[SERVICE].cluster) is not None:
        response.headers[CLUSTER_HEADER] = cluster.options.name


def new_id() -> str:
    """A new request id: a counter behind a random prefix. It finds log lines and protects nothing, so it may be guessed."""
    return f"{_PREFIX}-{next(_NUMBERS):x}"


def failed(request: web.Request, code: str, error: BaseException, trace: bool = False) -> None:
    """Log a request that failed through a fault of the server."""
    left_out = _log_limiter.allow("request_failed", perf_counter())
    if left_out is not None:
        text = f"{type(error).__name__}: {error}"
        where = {"code": code, "method": request.method, "path": request.path, "request_id": request.get(REQUEST_ID)}
        logs.error(
            "request_failed", error if trace else None, **where, error=text, **({"left_out": left_out} if left_out else {})
        )
