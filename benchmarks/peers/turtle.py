"""TurtleMQ itself, over HTTP on bare streams: as JSON, as BSON, and both without ids of the producer's own.

The clients encode what they send and read the ids and due times of what they get, as those of the peers do; a body is the text
of a JSON value, which goes into a JSON request as it is, and as a binary into a BSON document.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from struct import Struct as Layout

import msgspec

from benchmarks.peers.model import Client, Put, Queue
from benchmarks.wire import BSON, JSON, Connection, Server, post

_PATH = "/v1/topics/bench"


class Turtle(Queue):
    """`turtlemq serve` as it comes, without any setting."""

    name = "TurtleMQ, JSON"
    settings = "as it comes: every answer to a put is fsynced, acks are synced every 5 s"
    durable = True
    kind = JSON
    own = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server: Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    @staticmethod
    def missing() -> str | None:
        return None

    def version(self) -> str:
        return version("turtlemq")

    @property
    def server(self) -> Server:
        assert self._server is not None, "start it first"
        return self._server

    async def start(self) -> None:
        self._server = Server(str(self.folder))
        await self._server.ready()

    async def client(self) -> Client:
        return await self._connect()

    async def sleepers(self) -> int:
        client = await self._connect()
        status, data = await client.connection.call(f"GET {_PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await client.close()
        if status == 404:
            return 0
        stats = msgspec.json.decode(data)["stats"]
        return int(stats["sleep"] + stats["ready"])

    async def _connect(self) -> TurtleClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 24)
        self._writers.append(writer)
        return TurtleClient(Connection(reader, writer), writer, self.kind, self.own)

    def pids(self) -> list[int]:
        return list(_family(self.server.process.pid))

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # one that sealed has just ended
        self.server.process.communicate()  # it is gone: waits, and closes the pipe
        for writer in self._writers:
            writer.close()
        self._writers.clear()


class TurtleBson(Turtle):
    """The same, spoken to in BSON."""

    name = "TurtleMQ, BSON"
    kind = BSON


class TurtleGiven(Turtle):
    """JSON, the server gives the ids."""

    name = "TurtleMQ, JSON, server's ids"
    own = False


class TurtleBsonGiven(TurtleBson):
    """BSON, the server gives the ids."""

    name = "TurtleMQ, BSON, server's ids"
    own = False


QUEUES = (Turtle, TurtleBson, TurtleGiven, TurtleBsonGiven)


def _family(pid: int) -> Iterator[int]:
    """A process and all below it: segments are sealed in one of their own."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


class TurtleClient(Client):
    """One connection, kept open."""

    def __init__(self, connection: Connection, writer: asyncio.StreamWriter, kind: str, own: bool) -> None:
        self.connection, self._writer, self._kind = connection, writer, kind
        self._encode = (_bson if own else _bson_given) if kind == BSON else (_json if own else _json_given)

    async def put(self, messages: Sequence[Put]) -> None:
        data = await self.connection.good(post(f"{_PATH}/messages", self._encode(messages), self._kind))
        created = _created(data).created
        if created != len(messages):
            raise RuntimeError(f"{len(messages)} were sent, {created} were stored")

    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        request = b'{"max":%d,"wait":%g}' % (count, wait_s)
        data = await self.connection.good(post(f"{_PATH}/fetch", request, accept=self._kind))
        if self._kind == BSON:
            return list(_of_bson(data))
        return [(message.id, message.due_ms) for message in _fetched(data).messages]

    async def ack(self, ids: Sequence[str]) -> None:
        data = await self.connection.good(post(f"{_PATH}/ack", msgspec.json.encode(ids)))
        if not data.startswith(b'{"acked":%d,' % len(ids)):
            raise RuntimeError(f"{len(ids)} were to be acknowledged: {data[:200]!r}")

    async def cancel(self, id_: str) -> bool:
        status, _ = await self.connection.call(f"DELETE {_PATH}/messages/{id_} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return status == 200

    async def close(self) -> None:
        self._writer.close()


# JSON


class _Put(msgspec.Struct):
    id: str
    due_ms: int
    body: msgspec.Raw


class _Given(msgspec.Struct):
    due_ms: int
    body: msgspec.Raw


class _Created(msgspec.Struct):
    created: int


class _Due(msgspec.Struct):
    id: str
    due_ms: int


class _Fetched(msgspec.Struct):
    messages: list[_Due]


_created = msgspec.json.Decoder(_Created).decode
_fetched = msgspec.json.Decoder(_Fetched).decode
_to_json = msgspec.json.Encoder().encode


def _json(messages: Sequence[Put]) -> bytes:
    return _in_list([_Put(m.id, m.due_ms, msgspec.Raw(m.body)) for m in messages])


def _json_given(messages: Sequence[Put]) -> bytes:
    return _in_list([_Given(m.due_ms, msgspec.Raw(m.body)) for m in messages])


def _in_list(messages: Sequence[msgspec.Struct]) -> bytes:
    return _to_json({"messages": messages} if len(messages) > 1 else messages[0])


# BSON: documents from a pattern, 0.5 µs each

_int32, _int64 = Layout("<i").pack, Layout("<q").pack
_head = Layout("<i8xq").unpack_from  # of a fetched document: its length, and the due time that comes first
_text = Layout("<i").unpack_from
_ID = b"\x02id\0"


@cache
def _pattern(id_bytes: int, body_bytes: int) -> bytes:
    """A document with three places left open: the id, the due time, the body."""
    id_ = _ID + _int32(id_bytes + 1) + b"%b\0" if id_bytes else b"%b"
    rest = id_ + b"\x12due_ms\0%b\x05body\0" + _int32(body_bytes) + b"\0%b\0"
    filled = len(rest) - 3 * len(b"%b") + id_bytes + 8 + body_bytes
    return _int32(filled + 4).replace(b"%", b"%%") + rest


def _bson(messages: Sequence[Put]) -> bytes:
    return b"".join([_pattern(len(m.id), len(m.body)) % (m.id.encode(), _int64(m.due_ms), m.body) for m in messages])


def _bson_given(messages: Sequence[Put]) -> bytes:
    return b"".join([_pattern(0, len(m.body)) % (b"", _int64(m.due_ms), m.body) for m in messages])


def _of_bson(data: bytes) -> Iterator[tuple[str, int]]:
    at = 0
    while at < len(data):
        length, due_ms = _head(data, at)
        found = data.index(_ID, at) + len(_ID)
        (size,) = _text(data, found)
        yield data[found + 4 : found + 3 + size].decode(), due_ms
        at += length


def wire_bytes(name: str) -> float:
    """Of a message with a body of 100 B in a batch, on its way to the server."""
    some = [Put(f"order-{n:012d}", 1 << 41, b'"%b"' % (b"x" * 98)) for n in range(100)]
    return len({Turtle.name: _json, TurtleBson.name: _bson}[name](some)) / len(some)
