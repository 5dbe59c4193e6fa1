"""The handler that lists tenants, with their limits and figures."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import Struct

from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of
from turtlemq.server.tenants import Account


class TenantFigures(Struct):
    """A tenant: its part of the configuration, and its figures since the start."""

    name: str
    topics: list[str]
    weight: float
    produce_per_s: float
    bytes_per_s: float
    max_in_flight: int
    max_bytes: int
    in_flight: int
    held_bytes: int
    produced: int
    produced_bytes: int
    delivered: int
    refused: dict[str, int]


class TenantsAnswer(Struct):
    """All tenants."""

    tenants: list[TenantFigures]


async def tenants(request: web.Request) -> web.Response:
    """GET /v1/tenants"""
    engine_of(request)
    found = request.app[SERVICE].tenants
    return answer(TenantsAnswer([] if found is None else [_figures(account) for account in found.counted()]))


def _figures(account: Account) -> TenantFigures:
    return TenantFigures(
        **msgspec.to_builtins(account.tenant),
        in_flight=account.in_flight,
        held_bytes=account.held,
        produced=account.produced,
        produced_bytes=account.produced_bytes,
        delivered=account.delivered,
        refused=dict(account.refused),
    )
