"""beanstalkd with its binlog, over its own protocol; commands of a batch are pipelined.

It has its own job numbers only, and delays in whole seconds. So a job begins with our id and due time, and the clients share a
table from our ids to job numbers, as an application that cancels would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from benchmarks.peers.common import HOST, LEASE_MS, ServedQueue, now_ms, printed_version, program
from benchmarks.peers.model import Client, Put

WINDOW_MAX = 1024


class Refused(Exception):
    """An unexpected answer of beanstalkd."""


class BeanstalkClient(Client):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, jobs: dict[str, int]) -> None:
        self.reader, self.writer, self.jobs = reader, writer, jobs
        self.window = 1  # pipelined reserve commands: one without a job costs as much as one with a job

    async def line(self) -> bytes:
        return (await self.reader.readuntil(b"\r\n"))[:-2]

    async def lines(self, count: int) -> list[bytes]:
        """So many answers of one line each. Scans each received piece once."""
        pieces, line_count = [], 0
        while line_count < count:
            piece = await self.reader.read(1 << 20)
            if not piece:
                raise ConnectionResetError("beanstalkd closed the connection")
            pieces.append(piece)
            line_count += piece.count(b"\n")
        return b"".join(pieces).split(b"\r\n")[:-1]

    async def put(self, messages: Sequence[Put]) -> None:
        now, ttr_s = now_ms(), LEASE_MS // 1000
        commands = []
        for message in messages:
            job = b"%b %d\n%b" % (message.id.encode(), message.due_ms, message.body)
            commands.append(b"put 0 %d %d %d\r\n%b\r\n" % (max(0, ceil((message.due_ms - now) / 1000)), ttr_s, len(job), job))
        self.writer.write(b"".join(commands))
        for message, answer in zip(messages, await self.lines(len(messages)), strict=True):
            word, _, number = answer.partition(b" ")
            if word != b"INSERTED":
                raise Refused(answer)
            self.jobs[message.id] = int(number)

    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        """Wait for the first job, in whole seconds; take others that are ready."""
        messages = await self._reserve(1, ceil(wait_s))
        while messages and len(messages) < count:
            asked = min(self.window, count - len(messages))
            more = await self._reserve(asked, 0)
            messages += more
            if len(more) < asked:
                self.window = max(1, len(more))
                break
            self.window = min(2 * self.window, WINDOW_MAX)
        return messages

    async def _reserve(self, count: int, wait_s: int) -> list[tuple[str, int]]:
        self.writer.write(b"reserve-with-timeout %d\r\n" % wait_s * count)
        messages = []
        for _ in range(count):
            word, *numbers = (await self.line()).split()
            if word == b"RESERVED":
                job = await self.reader.readexactly(int(numbers[1]) + 2)
                id_, due_ms = job[: job.index(b"\n")].decode().split(" ")
                self.jobs[id_] = int(numbers[0])
                messages.append((id_, int(due_ms)))
            elif word != b"TIMED_OUT":
                raise Refused(word)
        return messages

    async def _delete(self, ids: Sequence[str]) -> list[bytes]:
        self.writer.write(b"".join([b"delete %d\r\n" % self.jobs.pop(id_) for id_ in ids]))
        return await self.lines(len(ids))

    async def ack(self, ids: Sequence[str]) -> None:
        if set(answers := await self._delete(ids)) - {b"DELETED"}:
            raise Refused(answers)

    async def cancel(self, id_: str) -> bool:
        return id_ in self.jobs and await self._delete([id_]) == [b"DELETED"]

    async def counts(self) -> dict[bytes, int]:
        """The numbers in the statistics of the server."""
        self.writer.write(b"stats\r\n")
        size = int((await self.line()).split()[1])
        fields = [line.split(b": ") for line in (await self.reader.readexactly(size + 2)).split(b"\n") if b": " in line]
        return {name: int(value) for name, value in fields if value.isdigit()}

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class BeanstalkQueue(ServedQueue):
    """beanstalkd. `fsync_ms` is the longest time between two fsyncs of its binlog; 0: one for each job."""

    whole_seconds = True

    def __init__(self, folder: Path, fsync_ms: int) -> None:
        super().__init__(folder)
        self.fsync_ms = int(fsync_ms)
        self.name = f"beanstalkd, -f{fsync_ms}"
        self.settings = f"binlog with -f{fsync_ms}; batches of commands on the way at once, whole seconds"
        self.durable = self.fsync_ms == 0
        self.jobs: dict[str, int] = {}

    @staticmethod
    def missing() -> str | None:
        return None if program("beanstalkd") else "beanstalkd"

    def version(self) -> str:
        return printed_version([*self.command()[:1], "-v"], r"beanstalkd (\S+)")

    def command(self) -> list[str]:
        server = program("beanstalkd") or "beanstalkd"
        return [server, "-l", HOST, "-p", str(self.port), "-b", str(self.folder), f"-f{self.fsync_ms}"]

    async def answers(self) -> bool:
        return await self.sleepers() >= 0

    async def client(self) -> BeanstalkClient:
        return BeanstalkClient(*await asyncio.open_connection(HOST, self.port, limit=1 << 22), self.jobs)

    async def sleepers(self) -> int:
        client = await self.client()
        try:
            counts = await client.counts()
        finally:
            await client.close()
        return counts[b"current-jobs-delayed"] + counts[b"current-jobs-ready"]
