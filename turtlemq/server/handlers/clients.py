"""Handlers of registered clients: the server delivers to their URLs, or to their streams, by itself."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.server.auth import ADMIN, AUTH, OPERATE, Access
from turtlemq.server.clock import now_ms
from turtlemq.server.incoming.body import read_as
from turtlemq.server.outgoing.answers import Registered, Rotated
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of, group_of, topic_and_group, topic_of
from turtlemq.storage import names

if TYPE_CHECKING:  # loaded only if callbacks are on
    from turtlemq.server.push.endpoint import Endpoint
    from turtlemq.server.push.push import Push

TIMEOUT_S_MAX = 600
OFF = "callbacks are off: push_hosts in the configuration of the server names the hosts that they may go to"
Secret = Annotated[str, Meta(max_length=200)]


class Register(Struct, forbid_unknown_fields=True):
    """A client that asks for callbacks. `ttl` 0: it stays until it is deleted."""

    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    capacity: Annotated[int, Meta(ge=1, le=1_000)] = 16
    ttl: Annotated[int, Meta(ge=0, le=86_400)] = 30
    timeout: Annotated[float, Meta(ge=0.1, le=TIMEOUT_S_MAX)] | None = None
    at_most_once: bool = False
    secret: Secret | None = None


class Beat(Struct, forbid_unknown_fields=True):
    """A heartbeat. `free`: how many more deliveries the client could begin. `paused`: whether it wants none for now."""

    free: Annotated[int, Meta(ge=0, le=1_000)] | None = None
    paused: bool | None = None


class Rotate(Struct, forbid_unknown_fields=True):
    """Another secret, or a new random one. The old one signs as well for `overlap` seconds."""

    secret: Secret | None = None
    overlap: Annotated[int, Meta(ge=0, le=604_800)] = 86_400


async def register(request: web.Request) -> web.Response:
    """POST …/clients"""
    topic_and_group(request)
    asked = await read_as(request, Register)
    topic, group = topic_and_group(request)  # again: topics and groups may have been created or deleted meanwhile
    push = _push_of(request)
    if asked.ttl == 0:
        request.app[AUTH].require(request, topic, ADMIN)
    name = names.check_group(asked.name or f"client-{secrets.token_hex(6)}")
    from turtlemq.server.push.endpoint import Terms  # it is loaded already

    timeout = push.timeout_s if asked.timeout is None else asked.timeout
    terms = Terms(name, asked.url, asked.capacity, asked.ttl, timeout, asked.at_most_once)
    engine = engine_of(request)
    if not engine.topic(topic, create=True).view.has_group(group):
        engine.move_group(topic, group, "earliest", now_ms())
    endpoint = await push.register(topic, group, terms, asked.secret)
    return answer(Registered(name, endpoint.secret, asked.ttl / 3 if asked.ttl else None, endpoint.state), 201)


async def list_group(request: web.Request) -> web.Response:
    """GET …/groups/{group}/clients"""
    topic, group = topic_of(request), group_of(request)
    return answer({"clients": [client.fields() for client in request.app[SERVICE].clients.of_group(topic, group)]})


async def list_topic(request: web.Request) -> web.Response:
    """GET /v1/topics/{topic}/clients"""
    return answer({"clients": [client.fields() for client in request.app[SERVICE].clients.of_topic(topic_of(request))]})


async def get(request: web.Request) -> web.Response:
    """GET …/clients/{client}"""
    client = request.app[SERVICE].clients.get(topic_of(request), group_of(request), request.match_info["client"])
    return answer(client.fields())


async def beat(request: web.Request) -> web.Response:
    """PUT …/clients/{client}"""
    _endpoint_of(request)
    asked = await read_as(request, Beat)
    endpoint = _endpoint_of(request)
    if asked.paused is not None:
        _check_owner(request, endpoint, OPERATE)
    _push_of(request).beat(endpoint, asked.free, asked.paused)
    return answer(endpoint.fields())


async def remove(request: web.Request) -> web.Response:
    """DELETE …/clients/{client}"""
    endpoint = _endpoint_of(request)
    _check_owner(request, endpoint)
    _push_of(request).remove(endpoint)
    return answer({"outcome": "deleted"})


async def rotate(request: web.Request) -> web.Response:
    """PUT …/clients/{client}/secret"""
    _endpoint_of(request)
    asked = await read_as(request, Rotate)
    endpoint = _endpoint_of(request)
    _check_owner(request, endpoint)
    secret = _push_of(request).rotate(endpoint, asked.secret, asked.overlap)
    return answer(Rotated(endpoint.client, secret, endpoint.old_until_ms))


def _push_of(request: web.Request) -> Push:
    push: Push | None = request.app[SERVICE].push  # type: ignore[assignment]
    if push is None:
        raise InvalidArgument(OFF)
    return push


def _endpoint_of(request: web.Request) -> Endpoint:
    topic, group, client = topic_of(request), group_of(request), request.match_info["client"]
    request.app[SERVICE].clients.get(topic, group, client)
    return _push_of(request).endpoint(topic, group, client)


def _check_owner(request: web.Request, endpoint: Endpoint, rights: Access = ADMIN) -> None:
    """An endpoint that stays belongs to the topic: to change it needs `rights` on the topic."""
    if endpoint.is_durable:
        request.app[AUTH].require(request, endpoint.topic, rights)
