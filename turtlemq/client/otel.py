"""Spans of OpenTelemetry for producers and consumers. Needs the extra `turtlemq[otel]`; the application chooses SDK and exporter.

    from turtlemq.client import otel

    otel.instrument()

Names and attributes follow OpenTelemetry's conventions for messaging: `send orders` (producer) and `process orders` (consumer).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from opentelemetry.trace import Link, SpanKind, TracerProvider, get_current_span, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from turtlemq import __version__
from turtlemq.client import tracing
from turtlemq.client.fetched import Message
from turtlemq.client.outgoing import OutgoingMessage

TRACEPARENT = "traceparent"
_propagator = TraceContextTextMapPropagator()


def instrument(provider: TracerProvider | None = None) -> None:
    """Trace all producers, consumers and clients of this process. `provider`: of the spans; None: the global one."""
    tracing.active = _OpenTelemetry(provider)


def uninstrument() -> None:
    """Trace no longer."""
    tracing.active = None


class _OpenTelemetry:
    """The `Tracer` of OpenTelemetry."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = get_tracer("turtlemq.client", __version__, provider)

    @contextmanager
    def sending(self, topic: str, batch: Sequence[OutgoingMessage]) -> Iterator[None]:
        attributes = _attributes("send", topic, [out.id for out in batch])
        with self._tracer.start_as_current_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes):
            context: dict[str, str] = {}
            self.inject(context)
            for out in batch if context else ():
                if TRACEPARENT not in (out.headers or {}):
                    out.headers = {**(out.headers or {}), **context}
            yield

    @contextmanager
    def handling(self, topic: str, group: str, messages: Sequence[Message]) -> Iterator[None]:
        contexts = [_propagator.extract(message.headers) for message in messages]
        attributes = _attributes("process", topic, [message.id for message in messages])
        attributes["messaging.consumer.group.name"] = group
        parent, links = None, None
        if len(messages) == 1:
            parent, attributes["turtlemq.attempt"] = contexts[0], messages[0].attempt
        else:
            links = [Link(get_current_span(context).get_span_context()) for context in contexts]
        with self._tracer.start_as_current_span(
            f"process {topic}", parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ):
            yield

    def inject(self, headers: MutableMapping[str, str]) -> None:
        _propagator.inject(headers)


def _attributes(operation: str, topic: str, ids: Sequence[str]) -> dict[str, str | int]:
    out: dict[str, str | int] = {
        "messaging.system": "turtlemq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    return out | ({"messaging.message.id": ids[0]} if len(ids) == 1 else {"messaging.batch.message_count": len(ids)})
