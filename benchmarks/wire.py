"""A server process, and a client that speaks HTTP to it over a bare connection, with requests that were encoded before: what is
measured is the server, not the client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bson
import msgspec
import numpy as np

from benchmarks.child import ROOT, environment
from benchmarks.inbox import Inbox
from benchmarks.probe import anonymous_bytes

JSON, BSON = "application/json", "application/bson"
_ID = b"\x02id\0"  # the type and name of an id, which nothing before it holds: there are no headers here
TICKS_S = os.sysconf("SC_CLK_TCK")


class Server:
    """`turtlemq serve` on a free port. It ends with the process group of the measuring process."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "turtlemq", "serve", "--data", folder, "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.split(",")[0].rpartition(":")[2])

    async def ready(self) -> None:
        """Wait until it serves."""
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
        return await Connection.to(self.port)

    def cpu_seconds(self) -> float:
        """Processor time so far, of its threads together."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_S

    def anonymous_bytes(self) -> int:
        return anonymous_bytes(self.process.pid)


class Connection:
    """One connection, kept open."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    @classmethod
    async def to(cls, port: int) -> Connection:
        return cls(await Inbox.connect("127.0.0.1", port))

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        inbox = self._inbox
        inbox.send(request)
        while (end := inbox.data.find(b"\r\n\r\n", 0, inbox.filled) + 4) < 4:
            await inbox.upto(inbox.filled + 1)
        head = bytes(inbox.data[:end]).lower()
        whole = end + int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        await inbox.upto(whole)
        body = bytes(memoryview(inbox.data)[end:whole])
        inbox.clear()
        return int(head[9:12]), body

    def close(self) -> None:
        self._inbox.close()

    async def good(self, request: bytes) -> bytes:
        """The body of an answer that must be a good one."""
        status, data = await self.call(request)
        if status >= 300:
            raise RuntimeError(f"{status}: {data[:300]!r}")
        return data


def post(path: str, data: bytes, kind: str = JSON, accept: str = JSON) -> bytes:
    """A request's bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nAccept: {accept}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def produce(topic: str, kind: str, count: int, body_bytes: int, **fields: Any) -> bytes:
    """The request that puts so many messages with bodies of so many bytes: JSON text, or binaries."""
    path = f"/v1/topics/{topic}/messages"
    if kind == BSON:
        return post(path, bson.encode({**fields, "body": b"x" * body_bytes}) * count, BSON)
    messages = [{"body": "x" * (body_bytes - 2), **fields}] * count
    return post(path, json.dumps({"messages": messages} if count > 1 else messages[0]).encode())


class _Id(msgspec.Struct):
    id: str


class _Fetched(msgspec.Struct):
    messages: list[_Id]


_fetched = msgspec.json.Decoder(_Fetched)


def ids_of(data: bytes, kind: str) -> list[str]:
    """The ids in the answer to a fetch."""
    return _bson_ids(data) if kind == BSON else [message.id for message in _fetched.decode(data).messages]


def _bson_ids(data: bytes) -> list[str]:
    """Where all documents are alike, as columns: 0.06 µs each. Otherwise one by one: 0.6 µs."""
    size = int.from_bytes(data[:4], "little")
    if size and len(data) % size == 0:
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        at = data.index(_ID) + len(_ID)
        alike = rows[:, [0, 1, 2, 3, *range(at - len(_ID), at + 4)]]  # their lengths, where the id is, and its length
        if (alike == alike[0]).all():
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            return rows[:, at + 4 : end].tobytes().decode()[:-1].split("\0")
    ids, at = [], 0
    while at < len(data):
        found = data.index(_ID, at) + len(_ID)
        ids.append(data[found + 4 : found + 3 + int.from_bytes(data[found : found + 4], "little")].decode())
        at += int.from_bytes(data[at : at + 4], "little")
    return ids


async def for_seconds(connections: list[Connection], request: bytes, seconds: float) -> list[float]:
    """The same request again and again on each connection. How long each took."""
    end, times = time.perf_counter() + seconds, []

    async def one(connection: Connection) -> None:
        begin = time.perf_counter()
        while begin < end:
            await connection.good(request)
            now = time.perf_counter()
            times.append(now - begin)
            begin = now

    await asyncio.gather(*map(one, connections))
    return times
