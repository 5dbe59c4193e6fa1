"""The routes, and what happens around every request: errors in one shape, a count, the caller's time budget."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import admin, graveyard, metrics, work
from turtlemq.server.command import command
from turtlemq.server.config import Config
from turtlemq.server.http import CONFIG, SERVICE, answer, refusal, refuse_other_sites, set_deadline
from turtlemq.server.loop import Service

log = logging.getLogger("turtlemq")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TOPIC = "/v1/topics/{topic}"
_GROUP = _TOPIC + "/groups/{group}"
_PLAIN = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "TOO_LARGE", 400: "INVALID_ARGUMENT", 415: "UNSUPPORTED_MEDIA_TYPE"}


async def healthz(_: web.Request) -> web.Response:
    """GET /healthz: the process is alive."""
    return answer({"status": "alive"})


async def readyz(request: web.Request) -> web.Response:
    """GET /readyz: it serves."""
    _ = request.app[SERVICE].engine  # says why not
    return answer({"status": "ready"})


def routes() -> list[web.RouteDef]:
    """Every path there is."""
    found = [
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics.metrics),
        web.post("/v1/command", command),
        web.get("/v1/topics", admin.list_topics),
        web.put(_TOPIC, admin.put_topic),
        web.get(_TOPIC, admin.get_topic),
        web.delete(_TOPIC, admin.drop_topic),
        web.post(f"{_TOPIC}/compact", admin.compact),
        web.put(_GROUP, admin.put_group),
        web.get(_GROUP, admin.get_group),
        web.delete(_GROUP, admin.drop_group),
        web.post(f"{_TOPIC}/messages", work.produce),
        web.get(f"{_TOPIC}/messages", work.browse),
        web.get(f"{_TOPIC}/messages/{{id}}", work.look),
        web.delete(f"{_TOPIC}/messages/{{id}}", work.remove),
        web.patch(f"{_TOPIC}/messages/{{id}}", work.patch),
        web.post(f"{_TOPIC}/cancel", work.cancel),
        web.get(f"{_TOPIC}/forecast", work.forecast),
        web.get(f"{_TOPIC}/dead", graveyard.list_dead),
        web.get(f"{_TOPIC}/dead/summary", graveyard.summary),
        web.get(f"{_TOPIC}/dead/export", graveyard.export),
        web.post(f"{_TOPIC}/dead/requeue", graveyard.requeue),
        web.post(f"{_TOPIC}/dead/delete", graveyard.delete),
    ]
    for base in (_TOPIC, _GROUP):
        found += [
            web.post(f"{base}/fetch", work.fetch),
            web.post(f"{base}/ack", work.ack),
            web.post(f"{base}/extend", work.extend),
        ]
    return found


def make_app(service: Service, config: Config) -> web.Application:
    """The application around a service."""
    app = web.Application(middlewares=[_around], client_max_size=config.max_body_bytes)
    app[SERVICE], app[CONFIG], app[metrics.REQUESTS] = service, config, Counter()
    app.add_routes(routes())
    return app


@web.middleware
async def _around(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await _answered(request, handler)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "other"
    request.app[metrics.REQUESTS][request.method if resource else "other", route, response.status] += 1
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        refuse_other_sites(request)
        set_deadline(request)
        return await handler(request)
    except TurtleError as error:
        if error.status >= 500 and not isinstance(error, Unavailable):
            log.error("event=request_failed code=%s path=%s error=%s", error.code, request.path, error)
        return refusal(error)
    except web.HTTPException as error:
        return _plain(error)
    except ConnectionError:
        raise  # nobody is there to be answered
    except Exception as error:
        log.exception("event=request_failed path=%s", request.path)
        return refusal(TurtleError(f"{TurtleError.__doc__} ({type(error).__name__})"))


def _plain(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in our shape."""
    body: dict[str, Any] = {"code": _PLAIN.get(error.status, "INVALID_ARGUMENT"), "message": error.text or error.reason}
    if error.status == 404:
        body["message"] = "there is nothing at this path; see docs/HTTP.md"
    response = answer({"error": body}, error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
