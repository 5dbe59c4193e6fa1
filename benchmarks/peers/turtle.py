"""TurtleMQ over HTTP: with JSON and with BSON, each with own ids and with ids of the server.

Like those of the peers, the clients encode their requests and decode ids, due times and bodies of fetched messages. A body is
the text of a JSON value: it is copied into a JSON request, or is a binary in BSON.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from struct import Struct as Layout

import msgspec
import numpy as np

from benchmarks import probe
from benchmarks.http_client import BSON, JSON, Connection, ServerProcess, post_request
from benchmarks.peers.model import Client, Put, Queue

_PATH = "/v1/topics/bench"


class Turtle(Queue):
    """`turtlemq serve` with default settings, over JSON."""

    name = "TurtleMQ, JSON"
    settings = "as it comes: every answer to a put is fsynced, acks are synced every 5 s"
    durable = True
    kind = JSON
    own_ids = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server: ServerProcess | None = None
        self._connections: list[Connection] = []

    @staticmethod
    def missing() -> str | None:
        return None

    def version(self) -> str:
        return version("turtlemq")

    @property
    def server(self) -> ServerProcess:
        assert self._server is not None, "start it first"
        return self._server

    async def start(self) -> None:
        self._server = ServerProcess(str(self.folder))
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
        connection = await self.server.connect()
        self._connections.append(connection)
        return TurtleClient(connection, self.kind, self.own_ids)

    def pids(self) -> list[int]:
        return list(probe.process_tree(self.server.process.pid))  # segments are sealed in a child process

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # a sealing process that has just ended
        self.server.process.communicate()  # reaps the process and closes the pipe
        for connection in self._connections:
            connection.close()
        self._connections.clear()


class TurtleBson(Turtle):
    """`turtlemq serve` with default settings, over BSON."""

    name = "TurtleMQ, BSON"
    kind = BSON


class TurtleServerIds(Turtle):
    """Over JSON, with ids of the server."""

    name = "TurtleMQ, JSON, server's ids"
    own = False


class TurtleBsonServerIds(TurtleBson):
    """Over BSON, with ids of the server."""

    name = "TurtleMQ, BSON, server's ids"
    own = False


class TurtleClient(Client):
    """One keep-alive connection."""

    def __init__(self, connection: Connection, kind: str, own: bool) -> None:
        self.connection, self._kind = connection, kind
        self._encode = (_bson if own else _bson_server_ids) if kind == BSON else (_json if own else _json_server_ids)

    async def put(self, messages: Sequence[Put]) -> None:
        data = await self.connection.call_ok(post_request(f"{_PATH}/messages", self._encode(messages), self._kind))
        created = _created(data).created
        if created != len(messages):
            raise RuntimeError(f"{len(messages)} were sent, {created} were stored")

    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        request = b'{"max":%d,"wait":%g}' % (count, wait_s)
        data = await self.connection.call_ok(post_request(f"{_PATH}/fetch", request, accept=self._kind))
        if self._kind == BSON:
            return _fetched_bson(data)
        return [(message.id, message.due_ms) for message in _fetched(data).messages]

    async def ack(self, ids: Sequence[str]) -> None:
        data = await self.connection.call_ok(post_request(f"{_PATH}/ack", msgspec.json.encode(ids)))
        if not data.startswith(b'{"acked":%d,' % len(ids)):
            raise RuntimeError(f"{len(ids)} were to be acknowledged: {data[:200]!r}")

    async def cancel(self, id_: str) -> bool:
        status, _ = await self.connection.call(f"DELETE {_PATH}/messages/{id_} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return status == 200

    async def close(self) -> None:
        self.connection.close()


# JSON


class _Put(msgspec.Struct):
    id: str
    due_ms: int
    body: msgspec.Raw


class _PutServerId(msgspec.Struct):
    due_ms: int
    body: msgspec.Raw


class _Created(msgspec.Struct):
    created: int


class _Due(msgspec.Struct, gc=False):
    id: str
    due_ms: int
    body: msgspec.Raw


class _Fetched(msgspec.Struct, gc=False):
    messages: list[_Due]


_created = msgspec.json.Decoder(_Created).decode
_fetched = msgspec.json.Decoder(_Fetched).decode
_to_json = msgspec.json.Encoder().encode


def _json(messages: Sequence[Put]) -> bytes:
    return _in_list([_Put(m.id, m.due_ms, msgspec.Raw(m.body)) for m in messages])


def _json_server_ids(messages: Sequence[Put]) -> bytes:
    return _in_list([_PutServerId(m.due_ms, msgspec.Raw(m.body)) for m in messages])


def _in_list(messages: Sequence[msgspec.Struct]) -> bytes:
    return _to_json({"messages": messages} if len(messages) > 1 else messages[0])


# BSON: documents from a template, 0.5 µs each

_int32, _int64 = Layout("<i").pack, Layout("<q").pack
_head = Layout("<i8xq").unpack_from  # of a fetched document: its length, and the due time that comes first
_text = Layout("<i").unpack_from
_ID, _BODY = b"\x02id\0", b"\x05body\0"
_DUE_AT = 4 + len(b"\x12due_ms\0")  # in a fetched document


@cache
def _template(id_bytes: int, body_bytes: int) -> bytes:
    """A document with three placeholders: id, due time, body."""
    id_ = _ID + _int32(id_bytes + 1) + b"%b\0" if id_bytes else b"%b"
    rest = id_ + b"\x12due_ms\0%b\x05body\0" + _int32(body_bytes) + b"\0%b\0"
    filled = len(rest) - 3 * len(b"%b") + id_bytes + 8 + body_bytes
    return _int32(filled + 4).replace(b"%", b"%%") + rest


def _bson(messages: Sequence[Put]) -> bytes:
    return b"".join([_template(len(m.id), len(m.body)) % (m.id.encode(), _int64(m.due_ms), m.body) for m in messages])


def _bson_server_ids(messages: Sequence[Put]) -> bytes:
    return b"".join([_template(0, len(m.body)) % (b"", _int64(m.due_ms), m.body) for m in messages])


def _fetched_bson(data: bytes) -> list[tuple[str, int]]:
    """Ids and due times of fetched documents. Those of one layout are read as columns, 0.2 µs each, others one by one, 0.9 µs."""
    size = int.from_bytes(data[:4], "little")
    if size and len(data) % size == 0:
        id_at, body_at = data.index(_ID) + len(_ID), data.index(_BODY) + len(_BODY)
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        alike = rows[:, [*range(4), *range(id_at - len(_ID), id_at + 4), *range(body_at - len(_BODY), body_at + 4)]]
        if (alike == alike[0]).all():  # lengths of the documents, positions and lengths of id and body
            ids = rows[:, id_at + 4 : id_at + 4 + _text(data, id_at)[0]].tobytes().decode()[:-1].split("\0")
            dues = np.ndarray((len(rows),), "<i8", data, _DUE_AT, (size,)).tolist()
            bodies = np.ndarray((len(rows),), f"V{_text(data, body_at)[0]}", data, body_at + 5, (size,)).tolist()
            return [(id_, due_ms) for id_, due_ms, _ in zip(ids, dues, bodies, strict=True)]
    return list(_one_by_one(data))


def _one_by_one(data: bytes) -> Iterator[tuple[str, int]]:
    at = 0
    while at < len(data):
        length, due_ms = _head(data, at)
        id_at, body_at = data.index(_ID, at) + len(_ID), data.index(_BODY, at) + len(_BODY)
        _body = data[body_at + 5 : body_at + 5 + _text(data, body_at)[0]]
        yield data[id_at + 4 : id_at + 3 + _text(data, id_at)[0]].decode(), due_ms
        at += length


def wire_bytes(name: str) -> float:
    """Bytes of a message with a body of 100 B in a request."""
    messages = [Put(f"order-{n:012d}", 1 << 41, b'"%b"' % (b"x" * 98)) for n in range(100)]
    return len({Turtle.name: _json, TurtleBson.name: _bson}[name](messages)) / len(messages)
