"""Load for scenarios of flow control: producers at a fixed rate (an open loop), and consumers that take a
fixed time for each message. Waits count from the due time of a message to the begin of its handling.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from benchmarks.flow.server import get_request
from benchmarks.http_client import Connection, ServerProcess, post_request

CONSUMERS, HANDLERS, HANDLE_S = 4, 4, 0.02
CAPACITY = CONSUMERS * HANDLERS / HANDLE_S  # messages a second
_TURN_S = 0.05  # producers send so often


class _Message(msgspec.Struct):
    id: str
    due_ms: int
    priority: str
    body: str


class _Fetched(msgspec.Struct):
    messages: list[_Message]


_fetched = msgspec.json.Decoder(_Fetched)


@dataclass(slots=True)
class Seen:
    """Handled messages by the text of their bodies: when (seconds of the monotonic clock), and after which wait in ms."""

    waits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def of(self, kind: str, first: float = 0.0, last: float = float("inf")) -> list[float]:
        """The waits of messages that were handled in [first, last)."""
        return [wait for at, wait in self.waits.get(kind, ()) if first <= at < last]


async def produce(connection: Connection, topic: str, kind: str, priority: str, rate: Callable[[], float], until: float) -> None:
    """Put messages at a rate, each due at once, until a time of the monotonic clock."""
    owed, last = 0.0, time.monotonic()
    while last < until:
        await asyncio.sleep(_TURN_S)
        now = time.monotonic()
        owed, last = owed + rate() * (now - last), now
        if count := int(owed):
            owed -= count
            messages = [{"body": kind, "priority": priority}] * count
            await connection.call_ok(post_request(f"/v1/topics/{topic}/messages", json.dumps({"messages": messages}).encode()))


async def consume(connection: Connection, topic: str, seen: Seen, until: float, failing: str = "") -> None:
    """Fetch, handle and acknowledge, in turns, until a time of the monotonic clock. `failing`: the first delivery of every second
    message with this body fails."""
    fetch = post_request(f"/v1/topics/{topic}/fetch", json.dumps({"max": HANDLERS, "wait": 0.5}).encode())
    failed = set[str]()
    while time.monotonic() < until:
        messages = _fetched.decode(await connection.call_ok(fetch)).messages
        if not messages:
            continue
        at, now_ms = time.monotonic(), 1_000 * time.time()
        for one in messages:
            seen.waits.setdefault(one.body, []).append((at, now_ms - one.due_ms))
        await asyncio.sleep(HANDLE_S)
        acks = list(_acks(messages, failing, failed))
        await connection.call_ok(post_request(f"/v1/topics/{topic}/ack", json.dumps(acks).encode()))


def _acks(messages: list[_Message], failing: str, failed: set[str]) -> Iterator[str]:
    for one in messages:
        fails = one.body == failing and one.id not in failed and hash(one.id) % 2
        if fails:
            failed.add(one.id)
        yield f"-{one.id}" if fails else one.id


async def consumers(server: ServerProcess, topic: str, seen: Seen, until: float, failing: str = "") -> None:
    """All consumers of a topic, each with a connection of its own."""
    connections = [await server.connect() for _ in range(CONSUMERS)]
    await asyncio.gather(*(consume(one, topic, seen, until, failing) for one in connections))
    for one in connections:
        one.close()


async def measured_capacity(server: ServerProcess, seconds: float) -> float:
    """Messages a second that the consumers handle when there are always enough: at most `CAPACITY`, less on a busy machine."""
    topic, seen, begin = "capacity", Seen(), time.monotonic()
    connection = await server.connect()
    until = begin + seconds
    more = produce(connection, topic, "x", "normal", lambda: 2 * CAPACITY, until)
    await asyncio.gather(consumers(server, topic, seen, until), more)
    await remove(connection, topic)
    return len(seen.of("x", begin + seconds / 2, until)) / (seconds / 2)


async def remove(connection: Connection, topic: str) -> None:
    """Delete a topic with all its messages."""
    await connection.call_ok(get_request(f"/v1/topics/{topic}").replace(b"GET", b"DELETE", 1))


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies; 0 without any.

    >>> percentile([5, 1, 9, 7], 0.5), percentile([], 0.5)
    (7, 0.0)
    """
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
