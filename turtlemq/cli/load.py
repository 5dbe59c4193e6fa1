"""The load behind `turtlemq bench`: producers and consumers on one event loop, and the counts of their messages.

Bodies are encoded once and sent again and again, answers are decoded only as far as counting needs it, so that the server is
measured and not this client. Lateness is the time from a message's due time to its arrival here. It compares the clocks of two
machines unless this runs on the machine of the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import bson
import msgspec
import numpy as np

from turtlemq.cli.credentials import tls_context

GROUP = "bench"
FETCH_MAX = 1_000
WAIT_S = 1.0
DRAIN_S = 30  # the last messages may arrive so long after their delay
_STEP_MS = 0.1
_BUCKETS = 200_000  # up to 20 s; longer latencies count as 20 s
_BSON = "application/bson"


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run."""

    url: str
    topic: str
    batch: int = 1000
    body_bytes: int = 100
    bson: bool = False
    connections: int = 4
    consumers: int = 2
    rate: float = 0  # messages a second; 0: no limit
    duration_s: float = 10
    delay_s: float = 1


class LatencyHistogram:
    """A histogram of latencies in steps of 0.1 ms, in constant memory.

    >>> histogram = LatencyHistogram()
    >>> histogram.add(np.array([1.0, 2.0, 30.0]))
    >>> histogram.quantile(0.5), histogram.quantile(1.0)
    (2.0, 30.0)
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS, np.int64)

    def add(self, latencies_ms: np.ndarray[Any, np.dtype[Any]]) -> None:
        steps = np.clip(latencies_ms / _STEP_MS, 0, _BUCKETS - 1).astype(np.int64)
        at, counts = np.unique(steps, return_counts=True)
        self.counts[at] += counts

    def quantile(self, q: float) -> float | None:
        total = int(self.counts.sum())
        if not total:
            return None
        return round(float(np.searchsorted(np.cumsum(self.counts), max(q * total, 1))) * _STEP_MS, 1)


@dataclass(slots=True)
class Counts:
    """The counts of a run so far."""

    sent: int = 0
    received: int = 0
    again: int = 0  # redeliveries
    acked: int = 0
    early: int = 0
    refused: int = 0  # requests answered with 429
    errors: Counter[str] = field(default_factory=Counter)
    lateness: LatencyHistogram = field(default_factory=LatencyHistogram)
    put_ms: LatencyHistogram = field(default_factory=LatencyHistogram)  # duration of the put requests


class _FetchedMessage(msgspec.Struct):
    id: str
    due_ms: int
    attempt: int


class _Page(msgspec.Struct):
    messages: list[_FetchedMessage]


_page = msgspec.json.Decoder(_Page).decode


def request_body(plan: Plan) -> tuple[bytes, str]:
    """The body of every put request, and its content type."""
    if plan.bson:
        return bson.encode({"body": bytes(plan.body_bytes), "delay": plan.delay_s}) * plan.batch, _BSON
    message = {"body": "x" * max(plan.body_bytes - 2, 0), "delay": plan.delay_s}
    return json.dumps(message if plan.batch == 1 else {"messages": [message] * plan.batch}).encode(), "application/json"


class Load:
    """One run of a plan. `counts` may be read at any time."""

    def __init__(self, plan: Plan, headers: dict[str, str]) -> None:
        self.plan, self.counts = plan, Counts()
        self._headers = headers
        self._base = f"{plan.url.rstrip('/')}/v1/topics/{plan.topic}"
        self._stop_consuming, self._drained_event = asyncio.Event(), asyncio.Event()
        self._sending = True
        self._stopped = False
        self._next_send_at = 0.0
        self.started = self.sending_s = self.first_ms = self.last_ms = 0.0

    async def run(self) -> None:
        """Send for the duration of the plan, then receive until all messages came or the drain time is over."""
        plan = self.plan
        connector = aiohttp.TCPConnector(limit=0, ssl=tls_context() if plan.url.startswith("https:") else True)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as session:
            async with session.put(f"{self._base}/groups/{GROUP}", json={}) as response:
                response.raise_for_status()
            self.started = self._next_send_at = time.perf_counter()
            consuming = [asyncio.create_task(self._consume(session)) for _ in range(plan.consumers)]
            body, kind = request_body(plan)
            await asyncio.gather(*(self._produce(session, body, kind) for _ in range(plan.connections)))
            self.sending_s = time.perf_counter() - self.started
            await self._wait_until_drained()
            self._stop_consuming.set()
            await asyncio.gather(*consuming)

    def stop(self) -> None:
        """Send no more; messages that were sent are still received."""
        self._stopped = True

    async def _wait_until_drained(self) -> None:
        self._sending = False
        if self.plan.consumers and self.counts.received < self.counts.sent:
            try:
                async with asyncio.timeout(self.plan.delay_s + DRAIN_S):
                    await self._drained_event.wait()
            except TimeoutError:
                return  # missing messages show in the counts

    async def _produce(self, session: aiohttp.ClientSession, body: bytes, kind: str) -> None:
        plan, counts = self.plan, self.counts
        end = self.started + plan.duration_s
        while (start := time.perf_counter()) < end and not self._stopped:
            if plan.rate:
                at = max(self._next_send_at, start)
                self._next_send_at = at + plan.batch / plan.rate
                await asyncio.sleep(at - start)
                if at >= end or self._stopped:
                    return
                start = at
            try:
                async with session.post(f"{self._base}/messages", data=body, headers={"Content-Type": kind}) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._count_error(type(error).__name__)
                continue
            if response.status == 201:
                counts.sent += plan.batch
                counts.put_ms.add(np.array([(time.perf_counter() - start) * 1000]))
            elif response.status == 429:
                counts.refused += 1
                await asyncio.sleep(json.loads(answer)["error"].get("retry_after_ms", 100) / 1000)
            else:
                await self._count_error(_error_code(response.status, answer))

    async def _count_error(self, code: str) -> None:
        self.counts.errors[code] += 1
        await asyncio.sleep(0.1)  # a server that is down is not asked a thousand times a second

    async def _consume(self, session: aiohttp.ClientSession) -> None:
        fetch = {"max": FETCH_MAX, "wait": WAIT_S, "ttr": 60}
        accept = {"Accept": _BSON} if self.plan.bson else {}
        while not self._stop_consuming.is_set():
            try:
                async with session.post(f"{self._base}/groups/{GROUP}/fetch", json=fetch, headers=accept) as response:
                    data = await response.read()
                    now_ms = time.time_ns() / 1e6
                if response.status != 200:
                    await self._count_error(_error_code(response.status, data))
                    continue
                ids = self._count_messages(data, now_ms)
                if ids:
                    async with session.post(
                        f"{self._base}/groups/{GROUP}/ack", data=msgspec.json.encode(ids), headers=_JSON
                    ) as response:
                        answer = await response.read()
                    if response.status == 200:
                        self.counts.acked += json.loads(answer)["acked"]
                    else:
                        await self._count_error(_error_code(response.status, answer))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._count_error(type(error).__name__)

    def _count_messages(self, data: bytes, now_ms: float) -> list[str]:
        """Count the messages of a fetch. Returns their ids."""
        if self.plan.bson:
            messages = [_FetchedMessage(m["id"], int(m["due_ms"]), m["attempt"]) for m in bson.decode_all(data)]
        else:
            messages = _page(data).messages
        if not messages:
            return []
        first_due_ms = [m.due_ms for m in messages if m.attempt == 1]
        late = now_ms - np.array(first_due_ms, np.float64)
        self.counts.received += len(first_due_ms)
        self.first_ms, self.last_ms = self.first_ms or now_ms, now_ms
        self.counts.again += len(messages) - len(first_due_ms)
        self.counts.early += int((late < 0).sum())
        self.counts.lateness.add(late)
        if not self._sending and self.counts.received >= self.counts.sent:
            self._drained_event.set()
        return [m.id for m in messages]


_JSON = {"Content-Type": "application/json"}


def _error_code(status: int, data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
