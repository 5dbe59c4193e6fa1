"""The registry of consumers that the server delivers to by itself: gRPC streams and HTTP callbacks, by topic and group.

One registry for both transports, so that one listing shows every consumer of a group. It only keeps the list: a transport adds
its clients, changes their figures as they work, and takes them out again. Deleting a group or a topic removes its clients, and
tells each of them through `removed`.

No clock and no event loop: times are arguments, in epoch milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from turtlemq.errors import Conflict
from turtlemq.server.errors import UnknownClient

Transport = Literal["grpc", "http"]
# pending: its address has not answered the challenge yet; failing: its circuit breaker is open
ClientState = Literal["pending", "active", "paused", "failing", "leaving"]
CLIENTS_MAX = 10_000  # of one group
_NAMED, _NAME_CHARS = 3, 60  # clients that the consumer of a shared fetch names, and how much of each


def shared_name(names: Iterable[str]) -> str:
    """The consumer of a fetch whose messages several clients share: the attempts of a message say with it where to look.

    >>> shared_name(["shop"]), shared_name(["b", "", "a", "b"]), shared_name("edcba"), shared_name([""])
    ('shop', 'a, b', 'a, b, c and 2 more', '')
    """
    known = sorted(set(names) - {""})
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return ", ".join(name[:_NAME_CHARS] for name in known[:_NAMED]) + more


@dataclass(eq=False, kw_only=True)
class RegisteredClient:
    """One consumer of a group. `client` is its key in the group; `name` is for people, and two streams may share one."""

    topic: str
    group: str
    client: str
    name: str
    transport: Transport
    capacity: int  # the most deliveries without an ack that it asked for
    window: int  # deliveries without an ack that it may have now
    unacked: int = 0  # deliveries without an ack that it has
    state: ClientState = "active"
    since_ms: int = 0  # the time of its registration
    beat_ms: int = 0  # the time of its last sign of life

    def removed(self) -> None:
        """Its group or topic was deleted, and it is no longer in the registry."""

    def fields(self) -> dict[str, Any]:
        """The client as a listing shows it. A transport adds its own fields."""
        return {
            "client": self.client,
            "name": self.name,
            "group": self.group,
            "transport": self.transport,
            "state": self.state,
            "capacity": self.capacity,
            "window": self.window,
            "unacked": self.unacked,
            "since_ms": self.since_ms,
            "beat_ms": self.beat_ms,
        }


class Clients:
    """All registered clients of a server. Adding, removing and looking up one are O(1)."""

    def __init__(self) -> None:
        self.beats_missed = 0  # clients that were removed because they gave no sign of life, since the start
        self._topics: dict[str, dict[str, dict[str, RegisteredClient]]] = {}  # by topic, group and key
        self._counts: Counter[str] = Counter()  # by transport

    def add(self, client: RegisteredClient) -> None:
        """Register a client. Raises `Conflict` if the group has one with this key, or too many."""
        group = self._topics.setdefault(client.topic, {}).setdefault(client.group, {})
        if client.client in group:
            raise Conflict(f"group {client.group!r} has a client {client.client!r} already; delete it first")
        if len(group) >= CLIENTS_MAX:
            raise Conflict(f"group {client.group!r} has {len(group):,} clients already")
        group[client.client] = client
        self._counts[client.transport] += 1

    def remove(self, client: RegisteredClient) -> bool:
        """Take a client out. Returns whether it was registered."""
        groups = self._topics.get(client.topic, {})
        group = groups.get(client.group, {})
        if group.get(client.client) is not client:
            return False
        del group[client.client]
        self._counts[client.transport] -= 1
        if not group:
            del groups[client.group]
        if not groups:
            del self._topics[client.topic]
        return True

    def get(self, topic: str, group: str, client: str) -> RegisteredClient:
        """A client by its key. Raises `UnknownClient`."""
        found = self._topics.get(topic, {}).get(group, {}).get(client)
        if found is None:
            raise UnknownClient(f"group {group!r} of topic {topic!r} has no client {client!r:.220}: register again")
        return found

    def has(self, topic: str, group: str, client: str) -> bool:
        """Whether a group has a client with this key."""
        return client in self._topics.get(topic, {}).get(group, {})

    def of_group(self, topic: str, group: str) -> list[RegisteredClient]:
        """The clients of a group, in the order of their registration."""
        return list(self._topics.get(topic, {}).get(group, {}).values())

    def of_topic(self, topic: str) -> list[RegisteredClient]:
        """The clients of all groups of a topic."""
        return [client for group in self._topics.get(topic, {}).values() for client in group.values()]

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[RegisteredClient]:
        return (client for topic in list(self._topics) for client in self.of_topic(topic))

    def drop(self, topic: str, group: str | None = None) -> None:
        """A group, or all groups of a topic, were deleted: remove their clients, and tell them."""
        gone = self.of_topic(topic) if group is None else self.of_group(topic, group)
        for client in gone:
            self.remove(client)
            client.removed()

    def counts(self) -> dict[str, int]:
        """The number of clients by transport."""
        return {transport: self._counts[transport] for transport in ("grpc", "http")}
