"""BullMQ on its own Redis. All clients live in one node process, bullmq/worker.js, as in an application.

That process is the client side; its processor time does not count for the server. It gets its commands as lines of JSON, whose
cost is small beside the work.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.common import DIE_WITH_PARENT, LEASE_MS, Fetched, program
from benchmarks.peers.model import Client, Put
from benchmarks.peers.redis import RedisQueue, encode

HERE = Path(__file__).parent / "bullmq"
PACKAGE = HERE / "node_modules" / "bullmq" / "package.json"


class Failed(Exception):
    """A call in the node process failed. Its error stands below."""


def spawn_beside(command: list[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process with the other end of a socket as stdin and stdout."""
    ours, theirs = socket.socketpair()
    with theirs:
        return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno()), ours


class Node:
    """The node process at the other end of a socket. Calls may overlap."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self.reader, self.writer = process, reader, writer
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.numbers = count()
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, port: int) -> Node:
        command = [*DIE_WITH_PARENT, program("node") or "node", str(HERE / "worker.js"), str(port), str(LEASE_MS)]
        process, ours = spawn_beside(command)
        return cls(process, *await asyncio.open_connection(sock=ours, limit=1 << 24))

    async def call(self, client: int, verb: str, argument: object = None) -> Any:
        number = next(self.numbers)
        answer = self.calls[number] = asyncio.get_running_loop().create_future()
        self.writer.write(msgspec.json.encode((number, client, verb, argument)) + b"\n")
        return await answer

    async def _read(self) -> None:
        async for line in self.reader:
            number, result, *wrong = msgspec.json.decode(line)
            answer = self.calls.pop(number)
            if wrong:
                answer.set_exception(Failed(wrong[0]))
            else:
                answer.set_result(result)
        for answer in self.calls.values():
            answer.set_exception(Failed("the node process ended"))

    def kill(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.wait()


class BullClient(Client):
    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number

    async def put(self, messages: Sequence[Put]) -> None:
        fields = [(message.id, message.due_ms, message.body.decode("latin-1")) for message in messages]
        await self.node.call(self.number, "put", fields)

    async def fetch(self, count: int, wait_s: float = 0) -> Fetched:
        return [(id_, due_ms) for id_, due_ms in await self.node.call(self.number, "fetch", (count, wait_s * 1000))]

    async def ack(self, ids: Sequence[str]) -> None:
        await self.node.call(self.number, "ack", ids)

    async def cancel(self, id_: str) -> bool:
        return bool(await self.node.call(self.number, "cancel", id_))

    async def close(self) -> None:
        await self.node.call(self.number, "close")


class BullQueue(RedisQueue):
    """BullMQ with default settings, on a Redis that syncs every second, as its guide recommends."""

    node: Node | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "everysec")
        self.name = "BullMQ"
        self.settings = "addBulk, getNextJob, moveToCompleted; on Redis with appendfsync everysec"
        self.numbers = count()

    @staticmethod
    def missing() -> str | None:
        if program("node") is None:
            return "nodejs"
        return RedisQueue.missing() or (None if PACKAGE.exists() else "the npm package bullmq")

    def version(self) -> str:
        return f"{json.loads(PACKAGE.read_text())['version']} on Redis {super().version()}"

    async def client(self) -> Client:
        if self.node is None:
            self.node = await Node.start(self.port)
        client = BullClient(self.node, next(self.numbers))
        await client.node.call(client.number, "open")
        return client

    async def sleepers(self) -> int:
        asleep, waiting = await self.ask(encode(b"ZCARD", b"bull:bench:delayed"), encode(b"LLEN", b"bull:bench:wait"))
        return int(asleep) + int(waiting)

    def kill(self) -> None:
        if self.node is not None:
            self.node.kill()
            self.node = None
        super().kill()
