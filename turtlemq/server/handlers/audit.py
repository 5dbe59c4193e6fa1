"""The handler of the audit log: its events, filtered by the rights of the token."""

from __future__ import annotations

import asyncio
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.server.audit import AUDIT, AuditEvent
from turtlemq.server.auth import AUTH, INSPECT
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import EpochMs, query


class AuditQuery(Struct, forbid_unknown_fields=True):
    """Which events: since a time, of one topic, and how many at most (the newest)."""

    from_ms: EpochMs = 0
    topic: Annotated[str, Meta(max_length=200)] = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100


class AuditAnswer(Struct):
    """Events of the audit log, the newest last."""

    events: list[AuditEvent]


async def audit(request: web.Request) -> web.Response:
    """GET /v1/audit"""
    asked, auth = query(request, AuditQuery), request.app[AUTH]
    if asked.topic:
        auth.require(request, asked.topic, INSPECT)

    def wanted(topic: str) -> bool:
        return topic == asked.topic if asked.topic else auth.may(request, topic or "*", INSPECT)

    found = request.app[AUDIT].read(asked.from_ms, asked.limit, wanted)
    return answer(AuditAnswer(await asyncio.wrap_future(found)))
