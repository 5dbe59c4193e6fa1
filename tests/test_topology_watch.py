"""Long polls for the topology of a cluster: a change answers them, free space and clocks do not, and a stop ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from msgspec import structs

from tests.harness.forwarding import Process, process
from turtlemq.server.topology_watch import WATCH

LONG_S = 60


async def told(client: aiohttp.ClientSession, url: str, **asked: float) -> Any:
    async with client.get(url + "/v1/cluster", params=asked) as response:
        return response.status, msgspec.json.decode(await response.read())


def run(story: Callable[[aiohttp.ClientSession, Process], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with process("b") as node, aiohttp.ClientSession() as client:
            node.cluster.set_leader("a", "http://127.0.0.1:9")
            await story(client, node)

    asyncio.run(whole())


async def until_waiting(node: Process) -> None:
    """Return when a poll has had every chance to be answered."""
    while not node.service.meter.in_flight:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)


def tell_clocks(node: Process) -> None:
    """The supervisors refresh their keys."""
    old = node.cluster.topology()
    nodes = {name: structs.replace(one, clock_ms=one.clock_ms + 2_000, free_bytes=5) for name, one in old.nodes.items()}
    node.cluster._topology = structs.replace(old, revision=old.revision + 1, nodes=nodes)
    for function in node.cluster.view.changed:
        function()


def test_a_change_answers_a_poll() -> None:
    async def story(client: aiohttp.ClientSession, node: Process) -> None:
        _, before = await told(client, node.url)
        polling = asyncio.create_task(told(client, node.url, revision=before["revision"], wait=LONG_S))
        await until_waiting(node)
        tell_clocks(node)
        await until_waiting(node)
        assert not polling.done()
        node.cluster.set_leader("c", "http://127.0.0.1:10", epoch=2)
        _, after = await polling
        assert (after["revision"], after["leaders"][0]["node"]) == (before["revision"] + 2, "c")

    run(story)


def test_a_caller_that_knows_less_is_answered_at_once() -> None:
    async def story(client: aiohttp.ClientSession, node: Process) -> None:
        _, before = await told(client, node.url)
        node.cluster.set_leader("c", "http://127.0.0.1:10", epoch=2)
        _, after = await told(client, node.url, revision=before["revision"], wait=LONG_S)
        assert after["leaders"][0]["node"] == "c"
        _, same = await told(client, node.url, revision=after["revision"])
        assert same == after

    run(story)


def test_a_poll_ends_with_its_time_or_with_the_server() -> None:
    async def story(client: aiohttp.ClientSession, node: Process) -> None:
        _, before = await told(client, node.url)
        assert (await told(client, node.url, revision=before["revision"], wait=0.01))[1] == before
        polling = asyncio.create_task(told(client, node.url, revision=before["revision"], wait=LONG_S))
        await until_waiting(node)
        await node.app.shutdown()
        assert (await polling)[1] == before

    run(story)


def test_a_single_node_never_changes() -> None:
    async def story() -> None:
        async with process("b") as node, aiohttp.ClientSession() as client:
            node.service.cluster = None
            polling = asyncio.create_task(told(client, node.url, revision=0, wait=LONG_S))
            await until_waiting(node)
            assert not polling.done()
            node.app[WATCH].end()
            assert (await polling)[1]["shards"] == 1

    asyncio.run(story())


def test_bad_questions_are_refused() -> None:
    async def story(client: aiohttp.ClientSession, node: Process) -> None:
        for wrong in ({"revision": -1}, {"wait": 61}, {"since": 1}):
            assert (await told(client, node.url, **wrong))[0] == 400, wrong

    run(story)
