"""Redis as a delay queue: bodies in a hash, due times in a sorted set, leases in another; one script moves due messages.

Puts and acks are plain commands with a thousand members each, in one transaction: that is faster than a script, and the
append-only file holds each command once. hiredis reads the replies; commands are encoded here, faster than redis-py does.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.peers.common import HOST, LEASE_MS, Fetched, ServedQueue, poll_until_found, printed_version, program
from benchmarks.peers.model import Client, Put
from benchmarks.receive_buffer import ReceiveBuffer

SLEEPING, RESERVED, BODIES = b"sleeping", b"reserved", b"bodies"
FETCH_MAX = 3000  # Lua's stack holds fewer than 8000 arguments of one call

# KEYS: sleeping, reserved, bodies. ARGV: now, count, end of the lease.
# Answers ids with due times, and bodies; or, if nothing is due, the next due time.
FETCH = b"""
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZADD', KEYS[1], ARGV[1], id)
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #due == 0 then
  return redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
end
local ids, leases = {}, {}
for i = 1, #due, 2 do
  ids[#ids + 1] = due[i]
  leases[i], leases[i + 1] = ARGV[3], due[i]
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #ids - 1)
redis.call('ZADD', KEYS[2], unpack(leases))
return {due, redis.call('HMGET', KEYS[3], unpack(ids))}
"""
CANCEL = b"""
return redis.call('ZREM', KEYS[1], ARGV[1]) == 1 and redis.call('HDEL', KEYS[3], ARGV[1]) or 0
"""


def encode(*words: bytes) -> bytes:
    """One command in the protocol of Redis."""
    return encode_many(words, len(words))


def encode_many(words: Iterable[bytes], count: int) -> bytes:
    return b"*%d\r\n" % count + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class RedisClient(Client):
    def __init__(self, inbox: ReceiveBuffer) -> None:
        import hiredis

        self.received = inbox
        self.replies = hiredis.Reader()

    async def call(self, data: bytes, replies: int = 1) -> Any:
        """Send commands and wait for all replies. Returns the last one."""
        self.received.send(data)
        reply = None
        for _ in range(replies):
            while (reply := self.replies.gets()) is False:
                await self.received.wait_for(1)
                self.replies.feed(self.received.data, 0, self.received.filled)
                self.received.clear()
            if isinstance(reply, Exception):
                raise reply
        return reply

    async def transaction(self, *commands: bytes) -> Any:
        """Send commands as one transaction. Returns the list of their replies."""
        return await self.call(b"".join([encode(b"MULTI"), *commands, encode(b"EXEC")]), len(commands) + 2)

    async def script(self, source: bytes, *words: bytes) -> Any:
        sha = hashlib.sha1(source).hexdigest().encode()
        return await self.call(encode(b"EVALSHA", sha, b"3", SLEEPING, RESERVED, BODIES, *words))

    async def put(self, messages: Sequence[Put]) -> None:
        ids = [message.id.encode() for message in messages]
        bodies = chain.from_iterable(zip(ids, [message.body for message in messages], strict=True))
        dues = chain.from_iterable(zip([b"%d" % message.due_ms for message in messages], ids, strict=True))
        count = 2 + 2 * len(messages)
        await self.transaction(
            encode_many(chain((b"HSET", BODIES), bodies), count), encode_many(chain((b"ZADD", SLEEPING), dues), count)
        )

    async def fetch(self, count: int, wait_s: float = 0) -> Fetched:
        async def look(now: int) -> Fetched | int | None:
            words = (now, min(count, FETCH_MAX), now + LEASE_MS)
            answer = await self.script(FETCH, *[b"%d" % word for word in words])
            if not isinstance(answer, list):
                return None if answer is None else int(answer)
            due = answer[0]
            return [(id_.decode(), int(score)) for id_, score in zip(due[::2], due[1::2], strict=True)]

        return await poll_until_found(look, wait_s)

    async def ack(self, ids: Sequence[str]) -> None:
        words = [id_.encode() for id_ in ids]
        await self.transaction(encode(b"ZREM", RESERVED, *words), encode(b"HDEL", BODIES, *words))

    async def cancel(self, id_: str) -> bool:
        return bool(await self.script(CANCEL, id_.encode()))

    async def close(self) -> None:
        self.received.close()


class RedisQueue(ServedQueue):
    """Redis with an append-only file. `fsync` is its setting appendfsync."""

    def __init__(self, folder: Path, fsync: str) -> None:
        super().__init__(folder)
        self.fsync = fsync
        self.name = f"Redis, {fsync}"
        self.settings = f"appendonly yes, appendfsync {fsync}, no snapshots; hash + sorted sets, Lua, hiredis"
        self.durable = fsync == "always"

    @staticmethod
    def missing() -> str | None:
        if program("redis-server") is None:
            return "redis-server"
        return None if importlib.util.find_spec("hiredis") else "the Python package hiredis"

    def version(self) -> str:
        return printed_version([*self.command()[:1], "--version"], r"v=(\S+)")

    def command(self) -> list[str]:
        options = {
            "port": self.port,
            "bind": HOST,
            "dir": self.folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": self.fsync,
        }
        server = program("redis-server") or "redis-server"
        return [server, *chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())]

    async def answers(self) -> bool:
        import hiredis

        try:
            return await self.ask(encode(b"PING")) == [b"PONG"]
        except hiredis.ReplyError as wrong:
            if str(wrong).startswith("LOADING"):
                return False
            raise

    async def ask(self, *commands: bytes) -> list[Any]:
        """The replies to some commands, on a new connection."""
        client = await self._connect()
        try:
            return [await client.call(command) for command in commands]
        finally:
            await client.close()

    async def _connect(self) -> RedisClient:
        return RedisClient(await ReceiveBuffer.connect(HOST, self.port))

    async def client(self) -> Client:
        client = await self._connect()
        for script in (FETCH, CANCEL):
            await client.call(encode(b"SCRIPT", b"LOAD", script))
        return client

    async def sleepers(self) -> int:
        (count,) = await self.ask(encode(b"ZCARD", SLEEPING))
        return int(count)
