"""Figures of a cluster with several shards: four against one on the same node, requests that are passed on, and idle processes.

All processes and the client share the processors of this machine, so the rate of four shards cannot be four times that of one.
Processor time stands beside it: the time that a message takes in the process of its shard bounds the rate where each has a core.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks import child, probe
from benchmarks.cluster_pair import ShardedNode, running_node
from benchmarks.http_client import JSON, Connection, produce_request, repeat_for
from benchmarks.load import BODY_BYTES
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.shards import shard_of

SHARDS = 4
_SHARDS = {"one": 1, "four": SHARDS}  # of the two nodes
_GOALS = {
    "four shards against one": Goal("≥", 1.5),
    "passed on, by processor time of a direct batch": Goal("≤", 0.3),
    "memory of an idle process": Goal("≤", 40.0),
}
Measured = dict[str, list[float]]  # by measure; one value a round


def _sharded(run: Run) -> Iterator[Figure]:
    seconds = {"full": 3.0, "quick": 0.5}.get(run.size.name, 0.1)
    found: Measured = run.child(
        "four shards and one, in turns", measuring, folder=run.folder("shards"), seconds=seconds, rounds=run.size.rounds
    )
    rates = [statistics.median(found[f"{who} rate"]) for who in ("one", "four")]
    note = f"{rates[0]:,.0f}/s with one, {rates[1]:,.0f}/s with four; client and processes share the processors"
    ratios = [four / one for four, one in zip(found["four rate"], found["one rate"], strict=True)]
    name = "four shards against one"
    yield of_rounds(name, ratios, "×", goal=_GOALS[name], note=note)
    for who in ("one", "four"):
        yield of_rounds(f"{who}, processor time", found[f"{who} cpu"], "s", note="a million messages, of all its processes")
    name = "passed on, by processor time of a direct batch"
    added = [extra / direct for extra, direct in zip(found["passed on"], found["direct"], strict=True)]
    note = "in the process that passes a batch of 1,000 on; without the copies of a cluster"
    yield of_rounds(name, added, "×", goal=_GOALS[name], note=note)
    name = "memory of an idle process"
    yield of_rounds(name, found["idle bytes"], "MB", goal=_GOALS[name], note="anonymous, of a leader without topics")
    yield of_rounds("processor time of an idle process", found["idle cpu"], "%", note="of one core, of each of four")


def measuring(folder: str, seconds: float, rounds: int) -> Measured:
    """In a child process: all work by a node with one shard, and by one with four, in turns."""
    for who in _SHARDS:
        (Path(folder) / who).mkdir()
    return uvloop.run(_measuring(Path(folder), seconds, rounds))


async def _measuring(folder: Path, seconds: float, rounds: int) -> Measured:
    found = Measured()
    async with AsyncExitStack() as stack:
        nodes = {who: await stack.enter_async_context(running_node(folder / who, shards)) for who, shards in _SHARDS.items()}
        await _idle(found, nodes["four"], seconds)
        for number in range(rounds):
            turns = list(nodes.items())
            for who, node in turns if number % 2 == 0 else reversed(turns):
                await _rate(found, who, node, number, seconds)
            await _passed_on(found, nodes["four"], number, seconds)
            child.report_progress((number + 1) / rounds)
    return found


def _note(found: Measured, what: str, value: float) -> None:
    found.setdefault(what, []).append(value)


def _topic(shard: int, number: int) -> str:
    """A topic of a shard, of four; of the only one as well."""
    return next(name for n in range(1_000) if shard_of(name := f"shard-{number}-{n}", SHARDS) == shard)


def _request(shard: int, number: int) -> bytes:
    return produce_request(_topic(shard, number), JSON, 1_000, BODY_BYTES, delay=3_600)


async def _idle(found: Measured, node: ShardedNode, seconds: float) -> None:
    pids = node.replicas()
    before, begin = sum(map(probe.cpu_seconds, pids)), time.perf_counter()
    await asyncio.sleep(4 * seconds)
    taken = sum(map(probe.cpu_seconds, pids)) - before
    _note(found, "idle cpu", 100 * taken / len(pids) / (time.perf_counter() - begin))
    for pid in pids:
        _note(found, "idle bytes", probe.anonymous_bytes(pid) / 1e6)


async def _rate(found: Measured, who: str, node: ShardedNode, number: int, seconds: float) -> None:
    """Four connections, each of which puts batches into a topic of its own, at the process of its shard."""
    ports = [node.port_of(shard % node.shards) for shard in range(SHARDS)]
    connections = [await Connection.open(port) for port in ports]
    work = [([connection], _request(shard, number)) for shard, connection in enumerate(connections)]
    await asyncio.gather(*(repeat_for(own, request, seconds / 4) for own, request in work))  # caches are warm then
    before, begin = node.cpu_seconds(), time.perf_counter()
    times = await asyncio.gather(*(repeat_for(own, request, seconds) for own, request in work))
    done, taken = 1_000 * sum(map(len, times)), time.perf_counter() - begin
    _note(found, f"{who} rate", done / taken)
    _note(found, f"{who} cpu", (node.cpu_seconds() - before) / done * 1e6)
    for connection in connections:
        connection.close()


async def _passed_on(found: Measured, node: ShardedNode, number: int, seconds: float) -> None:
    """Batches for the first shard, sent to its process, and then to that of the second one."""
    for what, through in (("direct", 0), ("passed on", 1)):
        connection, request = await Connection.open(node.port_of(through)), _request(0, number)
        await repeat_for([connection], request, seconds / 4)
        pid = node.replica(through)
        before = probe.cpu_seconds(pid)
        times = await repeat_for([connection], request, seconds)
        _note(found, what, max(1e-6, probe.cpu_seconds(pid) - before) / len(times))
        connection.close()


sharded = Benchmark(
    "cluster-shards", "a cluster of four shards against one of one, on one node, in turns", _GOALS, _sharded, needs="etcd"
)
