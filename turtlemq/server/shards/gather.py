"""Requests about all topics: every process is asked, and the answers become one.

The table says how, for each such operation. All other operations without a topic are answered by the process that gets them: they
are about that process, or the same in all of them (`OWN`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from turtlemq.errors import Unavailable
from turtlemq.server.handlers.audit import AuditQuery
from turtlemq.server.handlers.status import DAMAGE_MAX, StatusQuery
from turtlemq.server.media_types import JSON
from turtlemq.server.request import query
from turtlemq.server.shards import merge
from turtlemq.server.shards.calls import READ_S, Part

OWN = frozenset(  # operations without a topic that the process answers which gets them
    [
        *(
            f"GET {path}"
            for path in "/healthz /openapi.json /docs /cluster / /pages/{file} /v1/cluster /v1/cluster/replica".split()
        ),
        *("GET /v1/clock", "POST /v1/clock"),  # refused: a virtual clock is for one process
    ]
)


GLANCE_S = 4.0  # for a part of an answer that programs ask for every few seconds, and do not wait for long


@dataclass(frozen=True, slots=True)
class Gathered:
    """The way to one answer. `is_partial`: a process that does not answer in `wait_s` is left out, and the answer says so."""

    merge: Callable[[web.Request, Sequence[bytes | None]], bytes]
    is_partial: bool = False
    wait_s: float = READ_S


def _whole(merged: Callable[[Sequence[bytes]], bytes], wait_s: float = READ_S) -> Gathered:
    """All parts are needed."""
    return Gathered(lambda _, parts: merged([part for part in parts if part is not None]), wait_s=wait_s)


def _events(request: web.Request, parts: Sequence[bytes | None]) -> bytes:
    return merge.events([part for part in parts if part is not None], query(request, AuditQuery).limit)


def _status(request: web.Request, parts: Sequence[bytes | None]) -> bytes:
    return merge.status(parts, query(request, StatusQuery).limit, DAMAGE_MAX)


def _metrics(_: web.Request, parts: Sequence[bytes | None]) -> bytes:
    return merge.metrics([None if part is None else part.decode() for part in parts]).encode()


GATHERED = {
    "GET /metrics": Gathered(_metrics, is_partial=True, wait_s=GLANCE_S),
    "GET /readyz": _whole(merge.ready, GLANCE_S),
    "GET /v1/topics": _whole(merge.topics),
    "GET /v1/find": _whole(merge.found),
    "GET /v1/audit": Gathered(_events),
    "GET /v1/status": Gathered(_status, is_partial=True, wait_s=GLANCE_S),
    "GET /v1/tenants": _whole(merge.tenants),
    "GET /v1/status/history": _whole(merge.history),
    "POST /v1/backup": _whole(merge.pins),
    "DELETE /v1/backup": _whole(lambda parts: parts[0]),
}


async def gathered(found: Gathered, request: web.Request, parts: Sequence[Part | None]) -> web.StreamResponse:
    """One answer from those of all processes. If one has refused the request, its refusal is the answer."""
    answered = [part for part in parts if part is not None]
    if not answered:
        raise Unavailable("no shard answers. Try again in a moment.")
    refused = next((part for part in answered if part.status >= 300), None)
    if refused is not None and not found.is_partial:
        return web.Response(status=refused.status, body=refused.body, content_type=JSON)
    good = next((part for part in answered if part.status < 300), None)
    if good is None:
        return web.Response(status=answered[0].status, body=answered[0].body, content_type=JSON)
    bodies = [part.body if part is not None and part.status < 300 else None for part in parts]
    return web.Response(status=good.status, body=found.merge(request, bodies), headers={"Content-Type": good.kind})
