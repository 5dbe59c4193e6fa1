"""The peers of the benchmarks do the work that is asked of TurtleMQ: otherwise their figures would mean nothing.

Real servers on loopback ports. A peer that is not installed is skipped, with the command that installs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.peers import beanstalkd, bullmq, postgres, redis
from benchmarks.peers.model import Client, Put, Queue
from benchmarks.peers.redis import encode

pytestmark = pytest.mark.slow

PEERS: dict[str, Callable[[Path], Queue]] = {
    "redis always": lambda folder: redis.RedisQueue(folder, "always"),
    "beanstalkd -f50": lambda folder: beanstalkd.BeanstalkQueue(folder, 50),
    "postgres lease": lambda folder: postgres.PostgresQueue(folder, "lease"),
    "postgres transaction": lambda folder: postgres.PostgresQueue(folder, "transaction"),
    "bullmq": bullmq.BullQueue,
    # Peers from above with another setting: only the state after a kill could differ.
    "redis everysec": lambda folder: redis.RedisQueue(folder, "everysec"),
    "beanstalkd -f0": lambda folder: beanstalkd.BeanstalkQueue(folder, 0),
}
DIFFERENT = list(PEERS)[:5]
HOUR_MS = 3_600_000
COUNT = 40


@pytest.fixture(params=DIFFERENT)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Queue:
    made = PEERS[request.param](tmp_path / "peer")
    if missing := made.missing():
        pytest.skip(f"{missing} is not installed: make bench-setup")
    return made


@asynccontextmanager
async def served(queue: Queue) -> AsyncIterator[Client]:
    """A started server and one client of it."""
    await queue.start()
    try:
        client = await queue.client()
        try:
            yield client
        finally:
            await client.close()
    finally:
        queue.kill()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def puts(count: int, due_ms: int, first: int = 0) -> list[Put]:
    return [Put(f"order-{first + n}", due_ms, b'"%d \xff\r\n"' % n) for n in range(count)]


def ids(messages: list[Put]) -> set[str]:
    return {message.id for message in messages}


async def take(client: Client, count: int, *, ack: bool = True) -> list[str]:
    """So many, fetched with patience, and those that came beyond that."""
    found: list[str] = []
    end = time.monotonic() + 20
    while len(found) < count and time.monotonic() < end:
        got = [id_ for id_, _ in await client.fetch(count, 1)]
        found += got
        if ack and got:
            await client.ack(got)
    return found


def test_messages_come_once_and_never_early(queue: Queue) -> None:
    async def story() -> None:
        async with served(queue) as client:
            sent = puts(COUNT, now_ms() + 900) + puts(5, now_ms() + HOUR_MS, first=COUNT)
            await client.put(sent)
            assert await queue.sleepers() == len(sent)
            assert await client.cancel(sent[-1].id)
            assert not await client.cancel(sent[-1].id)
            assert not await client.cancel("order-unknown")
            dues = {message.id: message.due_ms for message in sent[:COUNT]}
            came: dict[str, int] = {}
            while len(came) < COUNT:
                got = await client.fetch(10, 1)
                assert len(got) <= 10
                assert [(id_, due_ms) for id_, due_ms in got if due_ms != dues[id_] or now_ms() < due_ms or id_ in came] == []
                came |= dict(got)
                if got:
                    await client.ack([id_ for id_, _ in got])
            assert came.keys() == dues.keys()
            assert await client.fetch(COUNT, 0.1) == []
            assert await queue.sleepers() == 4

    asyncio.run(story())


@pytest.mark.parametrize("queue", PEERS, indirect=True)
def test_a_killed_server_has_everything_again(queue: Queue) -> None:
    later = puts(COUNT, now_ms() + HOUR_MS, first=COUNT)

    async def before() -> None:
        async with served(queue) as client:
            await client.put(puts(COUNT, now_ms() - 1))
            await client.put(later)
            assert len(await take(client, COUNT)) == COUNT
            assert await client.cancel(later[0].id)
            assert queue.pids()
            assert queue.anonymous_bytes() > 100_000
            assert queue.disk_bytes() > COUNT * 10
            assert queue.version()[0].isdigit()

    async def after() -> None:
        async with served(queue) as client:
            assert await queue.sleepers() == COUNT - 1
            assert await client.fetch(COUNT, 0.1) == []
            assert await client.cancel(later[1].id)
            assert await queue.sleepers() == COUNT - 2

    asyncio.run(before())
    assert queue.pids() == []
    asyncio.run(after())


def test_two_consumers_share_and_nothing_comes_twice(queue: Queue) -> None:
    async def story() -> None:
        async with served(queue) as client:
            other = await queue.client()
            sent = puts(10 * COUNT, now_ms() - 1)
            await client.put(sent)
            mine = [id_ for id_, _ in await client.fetch(5, 1)]
            assert len(mine) == 5
            came: list[list[str]] = [[], []]

            async def consume(taker: Client, found: list[str]) -> None:
                while got := [id_ for id_, _ in await taker.fetch(20, 0.1)]:
                    found += got
                    await taker.ack(got)

            await asyncio.gather(*map(consume, (client, other), came))
            assert all(came)
            assert sorted([*mine, *came[0], *came[1]]) == sorted(ids(sent))
            await client.ack(mine)
            await other.close()

    asyncio.run(story())


@pytest.mark.parametrize("queue", [name for name in DIFFERENT if name != "bullmq"], indirect=True)
def test_only_what_is_not_acked_comes_again(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends, or a connection does. BullMQ leaves that to a check which its workers make twice a minute."""
    for module in (redis, postgres):
        monkeypatch.setattr(module, "LEASE_MS", 500)

    async def story() -> None:
        async with served(queue) as client:
            other = await queue.client()
            await client.put(puts(8, now_ms() - 1))
            done = await take(other, 4)
            kept = await take(other, 4, ack=False)
            monkeypatch.undo()
            await other.close()
            assert {*done, *kept} == ids(puts(8, 0))
            assert set(await take(client, 4)) == set(kept)
            assert await client.fetch(8, 1) == []

    asyncio.run(story())


@pytest.mark.parametrize("queue", ["bullmq"], indirect=True)
def test_bullmq_forgets_what_is_acked(queue: bullmq.BullQueue) -> None:
    async def story() -> None:
        async with served(queue) as client:
            await client.put(puts(5, now_ms() - 1))
            assert len(await take(client, 3)) == 3
            kept = [id_.encode() for id_, _ in await client.fetch(1, 1)]
            assert await queue.ask(encode(b"LRANGE", b"bull:bench:active", b"0", b"-1")) == [kept]
            assert await queue.sleepers() == 1

    asyncio.run(story())
