"""gRPC streams beside long polls: they share topics fairly, and nothing is lost that a cut connection held."""

from __future__ import annotations

import asyncio
from collections import Counter

from benchmarks.grpc_client import ClientMessage, ServerMessage, Streams
from tests.harness.server_process import Server
from tests.trust.kills_model import now_ms
from tests.trust.load_book import Book, fair, put, take
from tests.trust.load_wire import Wire
from tests.trust.model import Figures
from turtlemq.server.grpc.framing import frame

TOPICS = 5
TTR_MS = 120_000  # leases do not end by themselves
SCHEDULED = 4  # at once, on each stream of a producer


class Consumers:
    """Streams of one connection, each of one topic. `acks`: they acknowledge, in the book; others only hold their messages."""

    def __init__(self, book: Book, streams: int, acks: bool = True) -> None:
        self.got, self.held = Counter[int](), set[str]()
        self._book, self._count, self._acks = book, streams, acks

    async def start(self, port: int) -> None:
        self._connection = await Streams.open(port, self._received)
        for number in range(self._count):
            terms = {"route_key": f"g{number % TOPICS}", "ttr_ms": TTR_MS, "window": 16}
            self._connection.begin({"register": terms})

    def _received(self, stream: int, messages: list[bytes]) -> None:
        told = [ServerMessage.FromString(data) for data in messages]
        found = [{"id": one.delivery.id, "due_ms": one.delivery.fire_at_epoch_ms} for one in told if one.HasField("delivery")]
        if not self._acks:
            self.held.update(str(one["id"]) for one in found)
            return
        ids = self._book.came(found)
        self.got[stream] += len(ids)
        if ids:
            self._connection.send(stream, frame([ClientMessage(ack={"id": id_}).SerializeToString() for id_ in ids]))

    def cut(self) -> None:
        """Cut the connection."""
        self._connection.close()


class Producer:
    """A stream that schedules some messages at a time, and waits for their acks."""

    def __init__(self, book: Book, number: int) -> None:
        self._book, self._number, self._left, self._sent = book, number, 0, 0
        self._stored = asyncio.Event()

    async def work(self, port: int, rounds: int) -> None:
        connection = await Streams.open(port, self._received)
        stream = connection.begin()
        for n in range(rounds):
            self._stored.clear()
            self._left = SCHEDULED
            ids = [f"s{self._number}-{n}-{i}" for i in range(SCHEDULED)]
            due_ms = now_ms() + 100 * (n % 3)
            fields = {"route_key": f"g{self._number % TOPICS}", "fire_at_epoch_ms": due_ms, "payload": b"x"}
            connection.send(stream, frame([ClientMessage(schedule={**fields, "id": id_}).SerializeToString() for id_ in ids]))
            await self._stored.wait()
            self._book.sent.update(ids)
        connection.close()

    def _received(self, _: int, messages: list[bytes]) -> None:
        self._left -= sum(ServerMessage.FromString(data).HasField("ack") for data in messages)
        if self._left == 0:
            self._stored.set()


async def streams(server: Server, full: bool) -> Figures:
    """Streams and long polls of the same topics, messages from both sides; some connections are cut with all that they hold."""
    connections, each, polls, rounds = (20, 50, 200, 40) if full else (5, 10, 20, 10)
    book, polled, port = Book(), Counter[int](), server.grpc_port
    consumers = [Consumers(book, each) for _ in range(connections)]
    holders = [Consumers(book, each, acks=False) for _ in range(max(1, connections // 5))]
    for one in (*consumers, *holders):
        await one.start(port)

    async def poll(number: int) -> None:
        async with Wire.to(server) as wire:
            while not book.all_came.is_set():
                polled[number] += await take(wire, book, f"g{number % TOPICS}", 4)

    async def produce(number: int) -> None:
        async with Wire.to(server) as wire:
            for n in range(rounds):
                await put(wire, book, f"g{number % TOPICS}", [f"h{number}-{n}-{i}" for i in range(SCHEDULED)], delay=n % 3 / 10)

    async with asyncio.TaskGroup() as tasks:
        for number in range(polls):
            tasks.create_task(poll(number))
        async with asyncio.TaskGroup() as producing:
            for number in range(polls):
                producing.create_task(produce(number))
                producing.create_task(Producer(book, number).work(port, rounds))
        for one in holders:
            one.cut()
        seen = await book.close(held_by_cut_streams=sum(len(one.held) for one in holders))
    for one in consumers:
        one.cut()
    fair("connections of streams", (one.got.total() for one in consumers), full)
    return seen
