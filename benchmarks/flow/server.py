"""What scenarios of flow control ask of a server under test: topics and their settings, figures of its metrics."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec

from benchmarks.http_client import Connection, post_request

BATCH = 5_000  # messages of a request that fills a topic


async def configure(connection: Connection, topic: str, **settings: Any) -> None:
    """Create a topic, or change its settings."""
    data = json.dumps(settings).encode()
    head = f"PUT /v1/topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    await connection.call_ok(head.encode() + data)


async def describe(connection: Connection, topic: str) -> dict[str, Any]:
    """The answer of GET /v1/topics/{topic}."""
    return dict(msgspec.json.decode(await connection.call_ok(get_request(f"/v1/topics/{topic}"))))


def get_request(path: str) -> bytes:
    """The bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def fill(connection: Connection, topic: str, count: int, priority: str) -> None:
    """Put messages that are due at once."""
    for first in range(0, count, BATCH):
        messages = [{"body": "x" * 98, "priority": priority}] * min(BATCH, count - first)
        await connection.call_ok(post_request(f"/v1/topics/{topic}/messages", msgspec.json.encode({"messages": messages})))


async def wait_until_ready(connection: Connection, topic: str, count: int) -> None:
    """Wait until so many messages of a topic are ready."""
    for _ in range(6_000):
        if (await describe(connection, topic))["stats"]["ready"] >= count:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{topic} does not get {count:,} ready messages")


async def buckets(connection: Connection, family: str, labels: str = "") -> dict[float, float]:
    """The buckets of a histogram in the metrics: counts of values up to each bound. `labels`: text that its labels have."""
    text = (await connection.call_ok(get_request("/metrics"))).decode()
    counts: dict[float, float] = {}
    for line in text.splitlines():
        if line.startswith(f"{family}_bucket") and labels in line:
            bound = line.split('le="', 1)[1].split('"', 1)[0]
            counts[math.inf if bound == "+Inf" else float(bound)] = float(line.rpartition(" ")[2])
    return counts


def percentile_between(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """An upper bound of a percentile of the values that came between two looks at a histogram.

    >>> percentile_between({1.0: 5, 2.0: 5}, {1.0: 104, 2.0: 105}, 0.99), percentile_between({1.0: 5}, {1.0: 5}, 0.99)
    (1.0, 0.0)
    """
    added = {bound: count - before.get(bound, 0) for bound, count in sorted(after.items())}
    total = max(added.values(), default=0)
    return next((bound for bound, count in added.items() if count >= share * total), math.inf) if total else 0.0
