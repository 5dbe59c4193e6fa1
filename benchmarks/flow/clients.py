"""Consumers of whole clients, for scenarios of flow control: the Python client, and gRPC streams.

They have as many handlers as the plain consumers of `load`, so the capacity is the same; but messages wait in the client, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial

from benchmarks.flow.load import CONSUMERS, HANDLE_S, HANDLERS, Seen
from benchmarks.grpc_client import ClientMessage, ServerMessage, Streams
from benchmarks.http_client import ServerProcess
from turtlemq.client import AsyncClient, AsyncConsumer, Message
from turtlemq.server.grpc.framing import frame

RANKS = {1: 0, 0: 1, 2: 2}  # of the priorities of a delivery, in order of handling
TTR_MS = 60_000


class _ByChance(Exception):
    """A handler fails, as the scenario wants."""


async def python_clients(
    server: ServerProcess, topic: str, seen: Seen, until: float, failing: str = "", prefetch: int | None = None
) -> None:
    """Consumers of the Python client. `failing`: the first delivery of every second message with this body fails."""
    logging.getLogger("turtlemq.client").setLevel(logging.CRITICAL)  # they log each failure of a handler

    async def handle(message: Message) -> None:
        seen.waits.setdefault(message.body, []).append((time.monotonic(), 1_000 * time.time() - message.due_ms))
        await asyncio.sleep(HANDLE_S)
        if message.body == failing and message.attempt == 1 and hash(message.id) % 2:
            raise _ByChance

    async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
        consumers = [AsyncConsumer(topic, handle, client, concurrency=HANDLERS, prefetch=prefetch) for _ in range(CONSUMERS)]
        for one in consumers:
            await one.start()
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        await asyncio.gather(*(one.stop(timeout=1) for one in consumers))


@dataclass
class _StreamConsumer:
    """One stream on a connection of its own, and its handlers. The client hands out high priority first."""

    topic: str
    seen: Seen
    failing: str
    waiting: asyncio.PriorityQueue[tuple[int, int, ServerMessage]] = field(default_factory=asyncio.PriorityQueue)
    count: int = 0

    async def run(self, port: int, until: float) -> None:
        connection = await Streams.open(port, self._received)
        stream = connection.begin({"register": {"route_key": self.topic, "ttr_ms": TTR_MS}})
        handlers = [asyncio.create_task(self._handle(connection, stream)) for _ in range(HANDLERS)]
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        for one in handlers:
            one.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        connection.close()

    def _received(self, _: int, messages: list[bytes]) -> None:
        for told in map(ServerMessage.FromString, messages):
            if told.HasField("delivery"):
                self.count += 1
                self.waiting.put_nowait((RANKS[told.delivery.priority], self.count, told.delivery))

    async def _handle(self, connection: Streams, stream: int) -> None:
        while True:
            *_, one = await self.waiting.get()
            kind = one.payload.decode().strip('"')
            self.seen.waits.setdefault(kind, []).append((time.monotonic(), 1_000 * time.time() - one.fire_at_epoch_ms))
            await asyncio.sleep(HANDLE_S)
            fails = kind == self.failing and one.attempt == 1 and hash(one.id) % 2
            ack = ClientMessage(ack={"id": one.id, "route_key": self.topic, "failed": bool(fails)})
            connection.send(stream, frame([ack.SerializeToString()]))


async def streams(server: ServerProcess, topic: str, seen: Seen, until: float, failing: str = "") -> None:
    """Consumers on gRPC streams, whose windows the server finds."""
    await asyncio.gather(*(_StreamConsumer(topic, seen, failing).run(server.grpc_port, until) for _ in range(CONSUMERS)))


far_ahead = partial(python_clients, prefetch=100)
