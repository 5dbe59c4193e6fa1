"""The application: routes of all operations, and the middleware around every request.

The middleware names and counts the request, checks access, origin and time budget, and gives all errors one shape. The table of
operations is in `operations`, the process around the application in `run`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from turtlemq import __version__
from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import audit, openapi, output_commit, trace
from turtlemq.server.audit import AUDIT, COUNT, AuditLog
from turtlemq.server.auth import AUTH, Auth
from turtlemq.server.config import Config
from turtlemq.server.errors import DeadlineExceeded
from turtlemq.server.event_log import EventLog
from turtlemq.server.forward import Forwarder
from turtlemq.server.handlers import history, metrics, pages, replays
from turtlemq.server.history_ring import HistoryRing
from turtlemq.server.incoming.body import release
from turtlemq.server.metrics.labels import TopicLabels
from turtlemq.server.operation import Handler
from turtlemq.server.operations import ACCESS, AUDITED, OPERATIONS
from turtlemq.server.outgoing.reply import Answered, Reply, answer, refusal
from turtlemq.server.proxy import INTERNAL
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.replays import Replays
from turtlemq.server.request import CONFIG, SERVICE, check_origin, set_deadline
from turtlemq.server.service import Service
from turtlemq.server.slo_watch import SLO, SloWatch
from turtlemq.server.spans import SPANS, Spans
from turtlemq.server.tenants import Tenants
from turtlemq.server.topology_watch import WATCH, TopologyWatch

if TYPE_CHECKING:
    from turtlemq.replica.lead import Lead

FORWARDER = web.AppKey("forwarder", Forwarder)
PASSED_ON = "passed_on"  # of a request that another process has answered: copies of its shard have confirmed that
_CODES = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "TOO_LARGE", 400: "INVALID_ARGUMENT", 415: "UNSUPPORTED_MEDIA_TYPE"}


def routes() -> list[web.RouteDef]:
    """The routes of all operations. An id may contain braces, which aiohttp's own pattern for a part of a path excludes."""
    return [  # aiohttp does not know that some answer with a Reply
        web.route(operation.method, operation.path.replace("{id}", "{id:[^/]+}"), cast(Any, operation.handler))
        for operation in OPERATIONS
    ]


def make_app(service: Service, config: Config, audit_folder: Path | None = None) -> web.Application:
    """The application around a service, with the limits of a configuration. `audit_folder`: by default the data folder."""
    app = web.Application(middlewares=[cast(Any, _middleware)], client_max_size=config.max_body_bytes)
    app[SERVICE], app[CONFIG], app[metrics.TOPIC_LABELS] = service, config, TopicLabels()
    app[SPANS] = Spans(__version__) if config.tracing else None
    app[pages.DOCUMENT] = cast(pages.MakeDocument, openapi.encoded)
    app.on_response_prepare.append(trace.stamp)
    app.cleanup_ctx.append(EventLog(service))
    app[history.HISTORY] = HistoryRing(service)
    app.cleanup_ctx.append(app[history.HISTORY])
    app[SLO] = SloWatch(service)
    app.cleanup_ctx.append(app[SLO])
    app[FORWARDER] = Forwarder(service, config.cluster.tls_ca)
    app.on_cleanup.append(_end_forwarding)
    app[WATCH] = TopologyWatch()
    app.on_shutdown.append(_end_polls)
    app[AUDIT] = AuditLog(audit_folder or Path(config.data))
    app.on_cleanup.append(_end_audit)
    names = (*config.host_names, config.cluster.url.partition("://")[2].rstrip("/"))
    app[AUTH] = Auth(config.allowed_hosts, config.tokens, ACCESS, names, bool(config.tls_cert))
    service.flow = FlowControl(config.client_produce_per_s, config.client_burst, config.max_held_bytes)
    service.polls_max = config.max_waiting
    app[replays.REPLAYS] = Replays(service)
    if config.tenants:
        service.use_tenants(Tenants(config.tenants, config.max_held_bytes))
    app.add_routes(routes())
    if config.push_hosts:  # a server without callbacks loads nothing of them
        from turtlemq.server.push.push import Push

        push = service.push = Push(service, config)
        app.on_cleanup.append(push.end)
    return app


async def _end_forwarding(app: web.Application) -> None:
    await app[FORWARDER].close()


async def _end_polls(app: web.Application) -> None:
    app[WATCH].end()


async def _end_audit(app: web.Application) -> None:
    await asyncio.to_thread(app[AUDIT].close)


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> Answered:
    trace.begin(request)
    status = None
    try:
        response = await _answer(request, handler)
        if request.app[SERVICE].lead is not None and PASSED_ON not in request:
            response = await _confirmed(request, response)
        status = response.status
        return response
    finally:
        release(request)
        trace.finish(request, status)


async def _answer(request: web.Request, handler: Handler) -> Answered:
    try:
        router = request.app[SERVICE].router
        if router is None or not router.receive(request):
            request.app[AUTH].admit(request)
        check_origin(request)
        set_deadline(request)
        if router is not None and (passed_on := await router.elsewhere(request)) is not None:
            request[PASSED_ON] = True
            return cast(Answered, passed_on)
        if router is None and (cluster := request.app[SERVICE].cluster) is not None:
            forwarded = await request.app[FORWARDER].elsewhere(request, cluster)
            if forwarded is not None:
                return forwarded
        if (lead := request.app[SERVICE].lead) is not None:
            return await _lead(request, handler, lead)
        return await _handled(request, handler)
    except TurtleError as error:
        if error.status >= 500 and not isinstance(error, Unavailable | DeadlineExceeded):
            trace.failed(request, error.code, error)
        return _refused(request, error)
    except web.HTTPException as error:
        return _refused_by_aiohttp(request, error)
    except ConnectionError:
        raise  # the client is gone
    except OSError as error:  # from the disk
        trace.failed(request, Unavailable.code, error)
        return _refused(request, Unavailable(f"the disk has failed: {error.strerror or error}. The log says more."))
    except Exception as error:  # noqa: BLE001 - it is logged and answered
        trace.failed(request, TurtleError.code, error, trace=True)
        return _refused(request, TurtleError(f"{TurtleError.__doc__} ({type(error).__name__})"))


async def _handled(request: web.Request, handler: Handler) -> Answered:
    """The answer of a handler. Its changes are noted in the audit log, also if it failed after a part."""
    if (action := AUDITED.get(handler)) is None or INTERNAL in request:
        return await handler(request)
    try:
        answered = await handler(request)
    except BaseException:
        if COUNT in request:
            audit.note(request, action)
        raise
    audit.note(request, action)
    return answered


async def _lead(request: web.Request, handler: Handler, lead: Lead) -> Answered:
    """An answer of a leader, before copies have confirmed it."""
    output_commit.check_writable(request, lead)
    if not output_commit.applies(request):  # a handover must not wait for the request that asks for it
        return await _handled(request, handler)
    service = request.app[SERVICE]
    service.under_way += 1
    try:
        return await _handled(request, handler)
    finally:
        service.under_way -= 1


async def _confirmed(request: web.Request, answered: Answered) -> Answered:
    """An answer, once the required copies have everything that it tells of; else a refusal."""
    service = request.app[SERVICE]
    assert service.lead is not None, "there is a cluster"
    if isinstance(answered, Reply) and service.cluster is not None:
        answered.cluster = service.cluster.options.name
    service.under_way += 1
    try:
        await output_commit.confirm(request, service.lead, answered)
    except TurtleError as error:
        return _refused(request, error)
    finally:
        service.under_way -= 1
    return answered


def _refused(request: web.Request, error: TurtleError) -> web.Response:
    request.app[SERVICE].meter.rejected[error.code] += 1
    if trace.STARTED in request:  # a stream is half sent: cutting the connection tells the client that it is not complete
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    error.details["request_id"] = request[trace.REQUEST_ID]  # the error object is shared by all requests of a failed commit
    return refusal(error)


def _refused_by_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    """A refusal of aiohttp itself (no such path, method not allowed, …) in the shape of every error."""
    body: dict[str, Any] = {"code": _CODES.get(error.status, "INVALID_ARGUMENT"), "message": error.text or error.reason}
    if error.status == 404:
        body["message"] = "there is nothing at this path; see /docs"
    body["request_id"] = request[trace.REQUEST_ID]
    request.app[SERVICE].meter.rejected[body["code"]] += 1
    response = answer({"error": body}, error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
