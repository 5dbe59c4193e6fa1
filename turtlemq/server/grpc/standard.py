"""The services that every gRPC tool knows: health (`grpc.health.v1`) and reflection (`grpc.reflection.v1` and `v1alpha`).

Both need no token, as /healthz and /openapi.json over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from turtlemq.errors import UnknownMessage
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.messages import DESCRIPTORS, POOL, message, services
from turtlemq.server.grpc.statuses import NOT_FOUND, UNIMPLEMENTED
from turtlemq.server.grpc.unary import Handler, decoded, streamed, unary

WATCH_S = 0.5
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
HealthRequest, HealthResponse = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")


def methods(context: Context) -> dict[str, Handler]:
    """All methods of these services, by path."""
    health = {
        "/grpc.health.v1.Health/Check": unary(HealthRequest, partial(_check, context)),
        "/grpc.health.v1.Health/Watch": streamed(HealthRequest, partial(_watch, context)),
    }
    reflection = {
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": partial(_reflect, version)
        for version in ("v1", "v1alpha")
    }
    return {**health, **reflection}


def _health(context: Context, service: str) -> int:
    if service and service not in services():
        return SERVICE_UNKNOWN
    return SERVING if context.service.serving and not context.has_other_leader else NOT_SERVING


async def _check(context: Context, call: Call, asked: Any) -> Any:
    status = _health(context, asked.service)
    if status == SERVICE_UNKNOWN:
        raise UnknownMessage(f"there is no service {asked.service!r:.200} here")
    return HealthResponse(status=status)


async def _watch(context: Context, call: Call, asked: Any) -> AsyncIterator[list[Any]]:
    told = None
    while not call.ended:
        status = _health(context, asked.service)
        yield [HealthResponse(status=status)] if status != told else []
        told = status
        await asyncio.sleep(WATCH_S)


async def _reflect(version: str, call: Call) -> None:
    request = message(f"grpc.reflection.{version}.ServerReflectionRequest")
    response = message(f"grpc.reflection.{version}.ServerReflectionResponse")
    while messages := await call.receive():
        asked = [decoded(request, data) for data in messages]
        call.send([response(valid_host=one.host, original_request=one, **_answer(one)).SerializeToString() for one in asked])


def _answer(asked: Any) -> dict[str, Any]:
    """The answer to one question of a tool, by the name of its field."""
    kind = asked.WhichOneof("message_request")
    if kind == "list_services":
        return {"list_services_response": {"service": [{"name": name} for name in services()]}}
    if kind == "file_by_filename":
        return _files(asked.file_by_filename)
    if kind == "file_containing_symbol":
        return _files(_file_of(asked.file_containing_symbol))
    return {"error_response": {"error_code": UNIMPLEMENTED, "error_message": "there are no extensions here"}}


def _file_of(symbol: str) -> str:
    """The name of the file with a symbol; "": no file has it."""
    try:
        return str(POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        return ""


def _files(name: str) -> dict[str, Any]:
    found = [file.SerializeToString() for file in DESCRIPTORS.file if file.name == name]
    if not found:
        return {"error_response": {"error_code": NOT_FOUND, "error_message": "no file here has that"}}
    return {"file_descriptor_response": {"file_descriptor_proto": found}}
