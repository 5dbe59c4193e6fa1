"""Deliveries as the columns of a `Deliveries` message. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UnsetType

from turtlemq.segment import format as f
from turtlemq.server.grpc.messages import message
from turtlemq.server.outgoing.messages import PRIORITY_NAMES, Delivered

PART_BYTES = 1 << 20  # of bodies in one message: gRPC's libraries refuse more than 4 MiB unless they are told otherwise
_PRIORITIES = {name: number for number, name in reversed(PRIORITY_NAMES.items())}
_Deliveries = message("turtlemq.v1.Deliveries")


def size_of(one: Delivered) -> int:
    """The bytes of credit that a message takes: those of its body."""
    return len(one.body_base64 if isinstance(one.body, UnsetType) else memoryview(one.body))  # type: ignore[arg-type]


def parts_of(messages: list[Delivered]) -> Iterator[list[Delivered]]:
    """Messages in parts of about PART_BYTES."""
    part, size = list[Delivered](), 0
    for one in messages:
        if part and size + size_of(one) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += size_of(one)
    if part:
        yield part


def deliveries(topic: str, messages: list[Delivered]) -> Any:
    """Messages as columns."""
    flags = [_PRIORITIES[one.priority] | (0 if isinstance(one.body, UnsetType) else f.JSON) for one in messages]
    headers = [one.headers for one in messages]
    expires = [getattr(one, "expires_ms", None) or 0 for one in messages]
    batch = {
        "bodies": [one.body_base64 if isinstance(one.body, UnsetType) else bytes(one.body) for one in messages],
        "ids": [one.id for one in messages],
        "due_ms": _packed([one.due_ms for one in messages]),
        "flags": _packed(flags),
        "expires_ms": _packed([0 if isinstance(at, UnsetType) else at for at in expires]),
        "headers": [{"fields": fields} for fields in headers] if any(headers) else [],
    }
    return _Deliveries(
        topic=topic,
        batch=batch,
        attempts=_packed([one.attempt for one in messages]),
        lease_until_ms=_packed([one.lease_until_ms for one in messages]),
        ready_ms=_packed([one.ready_ms for one in messages]),
    )


def _packed(values: list[int]) -> list[int]:
    """A column: one value if all are equal, none if all are 0."""
    if values.count(values[0]) < len(values):
        return values
    return values[:1] if values[0] else []
