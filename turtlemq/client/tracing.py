"""Hooks for distributed tracing. Without `turtlemq.client.otel.instrument()` there is no tracer, and a hook costs one check.

The trace context of a producer travels in the headers of a message (`traceparent`, `tracestate`: W3C Trace Context), so that its
consumer, perhaps months later, continues the same trace.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from turtlemq.client.fetched import Message
    from turtlemq.client.outgoing import OutgoingMessage

_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Tracer(Protocol):
    """A tracing library, as producers, consumers and requests call it."""

    def sending(self, topic: str, batch: Sequence[OutgoingMessage]) -> AbstractContextManager[None]:
        """A span around the put of messages. Their headers get its context, unless they have one."""

    def handling(self, topic: str, group: str, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """A span around a handler. It continues the trace of a single message, and links those of a batch."""

    def inject(self, headers: MutableMapping[str, str]) -> None:
        """Put the current context into the headers of a request."""


active: Tracer | None = None


def sending(topic: str, batch: Sequence[OutgoingMessage]) -> AbstractContextManager[None]:
    """The span of a put; none without a tracer."""
    return _NO_SPAN if active is None else active.sending(topic, batch)


def handling(topic: str, group: str, messages: Sequence[Message]) -> AbstractContextManager[None]:
    """The span of a handler; none without a tracer."""
    return _NO_SPAN if active is None else active.handling(topic, group, messages)


def note_put(topic: str, out: OutgoingMessage) -> None:
    """A span without duration, for a message that is sent later, in a batch with others."""
    with sending(topic, [out]):
        pass
