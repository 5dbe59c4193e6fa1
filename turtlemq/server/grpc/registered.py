"""Streams in the registry of clients, beside those with a URL: one entry for each topic and group that a stream registers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turtlemq.server.clients import Clients, RegisteredClient
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.deliveries import Member


@dataclass(eq=False, kw_only=True)
class StreamClient(RegisteredClient):
    """One registration of a stream. `gone`: called if its group or topic is deleted."""

    member: Member
    gone: Callable[[], object]

    def removed(self) -> None:
        """Its group or topic was deleted."""
        self.gone()

    def fields(self) -> dict[str, Any]:
        """The stream as a listing shows it, with its figures of this moment."""
        member = self.member
        self.name, self.capacity = member.name, member.window.most
        self.window, self.unacked = member.size, len(member.held)
        if member.free is not None:
            self.window = min(self.window, self.unacked + member.free)
        self.beat_ms = max(self.since_ms, now_ms() - round(1000 * member.call.silent_s))
        return super().fields() | {"at_most_once": member.is_auto}


def registered(clients: Clients, member: Member, gone: Callable[[], object]) -> StreamClient:
    """The new entry of a registration, under the name of its call, or a name like it. Raises `Conflict` if there are too many."""
    key = member.call.request_id
    if clients.has(member.topic, member.group, key):
        key = f"{key}-{secrets.token_hex(4)}"
    entry = StreamClient(
        topic=member.topic,
        group=member.group,
        client=key,
        name=member.name,
        transport="grpc",
        capacity=member.window.most,
        window=member.size,
        since_ms=now_ms(),
        member=member,
        gone=gone,
    )
    clients.add(entry)
    return entry
