"""Spans of OpenTelemetry for requests, and the trace context of a request in the messages that it stores (`tracing = true`).

Needs the extra `turtlemq[otel]`. Spans go to the global tracer provider, which `opentelemetry-instrument turtlemq serve` sets up
from the environment. Without `tracing` nothing of OpenTelemetry is loaded, and a request costs one check more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from turtlemq.errors import InvalidArgument
from turtlemq.model import Batch

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACEPARENT = "traceparent"
_SPAN = "span"


class Spans:
    """The tracer of a server. Raises `InvalidArgument` if OpenTelemetry is not installed."""

    def __init__(self, version: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise InvalidArgument("tracing needs OpenTelemetry: pip install 'turtlemq[otel]'") from None
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("turtlemq.server", version)

    def begin(self, request: web.Request, route: str, request_id: str) -> None:
        """Start the span of a request. It continues the trace that the caller names."""
        attributes = {"http.request.method": request.method, "http.route": route, "url.path": request.path}
        attributes["turtlemq.request_id"] = request_id
        if topic := request.match_info.get("topic"):
            attributes |= {"messaging.system": "turtlemq", "messaging.destination.name": topic}
        request[_SPAN] = self._tracer.start_span(
            f"{request.method} {route}",
            self._propagator.extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        )

    def end(self, request: web.Request, status: int | None) -> str:
        """End the span of a request. `status` is None if the client was gone. Returns the trace's id, "" if it is not sampled."""
        span: Span = request[_SPAN]
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, "the client was gone" if status is None else "")
        span.end()
        context = span.get_span_context()
        return self._trace.format_trace_id(context.trace_id) if context.trace_flags.sampled else ""

    def carry(self, request: web.Request, batch: Batch) -> None:
        """Put the context of a request's span into the headers of its messages, unless they have one."""
        context: dict[str, str] = {}
        self._propagator.inject(context, self._trace.set_span_in_context(request[_SPAN]))
        if context:
            given = batch.headers if batch.headers is not None else [None] * len(batch)
            batch.headers = [headers if TRACEPARENT in (headers or {}) else {**(headers or {}), **context} for headers in given]


SPANS: web.AppKey[Spans | None] = web.AppKey("spans")  # None: `tracing` is off
