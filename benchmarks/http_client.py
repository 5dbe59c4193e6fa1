"""A TurtleMQ server process, and a minimal HTTP client for it.

Requests are encoded in advance and answers decoded only as far as needed, so that the server is measured and not the client.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bson
import msgspec
import numpy as np

from benchmarks.child import ROOT, environment
from benchmarks.probe import TICKS_S, anonymous_bytes
from benchmarks.receive_buffer import ReceiveBuffer

JSON, BSON = "application/json", "application/bson"
_ID = b"\x02id\0"  # the BSON element head of an id; unique before it, since these messages have no headers


class ServerProcess:
    """`turtlemq serve` on a free port. It is killed with the process group of the measuring process."""

    def __init__(self, folder: str, grpc: bool = False, **settings: str) -> None:
        """`settings`: environment variables. `grpc`: it listens for gRPC, too, on `grpc_port`."""
        command = [sys.executable, "-m", "turtlemq", "serve", "--data", folder, "--port", "0", *(["--grpc-port", "0"] * grpc)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment() | settings
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.split(",")[0].rpartition(":")[2])
        self.grpc_port = int(self.process.stdout.readline().rpartition(":")[2]) if grpc else 0

    async def ready(self) -> None:
        """Wait until the server is ready."""
        request = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(3_000):
            connection = await self.connect()
            status, _ = await connection.call(request)
            connection.close()
            if status == 200:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError("the server does not get ready")

    async def connect(self) -> Connection:
        return await Connection.open(self.port)

    def cpu_seconds(self) -> float:
        """Processor time of all threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_S

    def anonymous_bytes(self) -> int:
        return anonymous_bytes(self.process.pid)


class Connection:
    """One keep-alive connection."""

    def __init__(self, inbox: ReceiveBuffer) -> None:
        self._received = inbox

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(await ReceiveBuffer.connect("127.0.0.1", port))

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        inbox = self._received
        inbox.send(request)
        while (end := inbox.data.find(b"\r\n\r\n", 0, inbox.filled) + 4) < 4:
            await inbox.wait_for(inbox.filled + 1)
        head = bytes(inbox.data[:end]).lower()
        whole = end + int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        await inbox.wait_for(whole)
        body = bytes(memoryview(inbox.data)[end:whole])
        inbox.clear()
        return int(head[9:12]), body

    def close(self) -> None:
        self._received.close()

    async def call_ok(self, request: bytes) -> bytes:
        """The body of an answer, which must be a success."""
        status, data = await self.call(request)
        if status >= 300:
            raise RuntimeError(f"{status}: {data[:300]!r}")
        return data


def post_request(path: str, data: bytes, kind: str = JSON, accept: str = JSON) -> bytes:
    """The bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nAccept: {accept}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def produce_request(topic: str, kind: str, count: int, body_bytes: int, **fields: Any) -> bytes:
    """A request with `count` messages whose bodies have so many bytes: JSON strings, or binaries in BSON."""
    path = f"/v1/topics/{topic}/messages"
    if kind == BSON:
        return post_request(path, bson.encode({**fields, "body": b"x" * body_bytes}) * count, BSON)
    messages = [{"body": "x" * (body_bytes - 2), **fields}] * count
    return post_request(path, json.dumps({"messages": messages} if count > 1 else messages[0]).encode())


class _Id(msgspec.Struct):
    id: str


class _Fetched(msgspec.Struct):
    messages: list[_Id]


_fetched = msgspec.json.Decoder(_Fetched)


def ids_of(data: bytes, kind: str) -> list[str]:
    """The ids in the answer to a fetch."""
    return _bson_ids(data) if kind == BSON else [message.id for message in _fetched.decode(data).messages]


def _bson_ids(data: bytes) -> list[str]:
    """Ids of BSON documents. Documents of one layout are read as columns, 0.06 µs each, others one by one, 0.6 µs."""
    size = int.from_bytes(data[:4], "little")
    if size and len(data) % size == 0:
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        at = data.index(_ID) + len(_ID)
        alike = rows[:, [0, 1, 2, 3, *range(at - len(_ID), at + 4)]]  # length of the document, position and length of its id
        if (alike == alike[0]).all():
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            return rows[:, at + 4 : end].tobytes().decode()[:-1].split("\0")
    ids, at = [], 0
    while at < len(data):
        start = data.index(_ID, at) + len(_ID)
        ids.append(data[start + 4 : start + 3 + int.from_bytes(data[start : start + 4], "little")].decode())
        at += int.from_bytes(data[at : at + 4], "little")
    return ids


async def repeat_for(connections: list[Connection], request: bytes, seconds: float) -> list[float]:
    """Repeat a request on each connection for so many seconds. Returns the duration of each."""
    end, times = time.perf_counter() + seconds, []

    async def one(connection: Connection) -> None:
        begin = time.perf_counter()
        while begin < end:
            await connection.call_ok(request)
            now = time.perf_counter()
            times.append(now - begin)
            begin = now

    await asyncio.gather(*map(one, connections))
    return times
