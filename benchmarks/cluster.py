"""Figures of replication: a single node against a leader with one standby in sync, in turns, and the pauses of failovers.

Leader, standby, etcd and client share the processors of one machine here, and a cluster has machines of its own. So processor
time stands beside each rate: that of the leader bounds the rate of a cluster.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import child, probe
from benchmarks.cluster_pair import Pair, running_pair
from benchmarks.http import drain, lateness_of
from benchmarks.http_client import JSON, Connection, ServerProcess, post_request, produce_request, repeat_for
from benchmarks.load import BODY_BYTES, own_id
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run

SERVER_IDS, OWN_IDS = "batches of 1,000, server ids", "batches of 1,000, own ids"
DRAIN, MANY = "fetch and acknowledge", "one by one, 64 connections"
_RATIOS = {SERVER_IDS: 0.7, OWN_IDS: 0.7, DRAIN: 0.7, MANY: 0.6}  # rate with a standby against that of a single node
_ADDED = {"one put, added, p50": 1.0, "one put, added, p99": 5.0, "lateness, added, p99": 3.0}
_GOALS = {
    **{name: Goal("≥", value) for name, value in _RATIOS.items()},
    **{name: Goal("≤", value) for name, value in _ADDED.items()},
    f"{SERVER_IDS}, standby's processor time": Goal("≤", 0.7),
    f"{SERVER_IDS}, added to the leader's": Goal("≤", 0.6),
}
_PAUSES = {
    "leader killed, p50": Goal("≤", 1.2),
    "leader killed, p99": Goal("≤", 3.0),
    "handover, p50": None,
    "handover, p99": Goal("≤", 1.0),
}
_STEADY_S = 1.5  # between two failovers
_RETRY_S = 0.01
Server = ServerProcess | Pair
Measured = dict[str, dict[str, list[float]]]  # by work, then by measure; one value a round


# Rates, latency, processor time


def _cluster(run: Run) -> Iterator[Figure]:
    full = {"full": 2.0, "quick": 0.5}.get(run.size.name, 0.1)
    count = min(300, run.size.round_batches) * run.size.batch
    title = "a single node and a leader with a standby, in turns"
    measured: Measured = run.child(
        title, measuring, folder=run.folder("cluster"), seconds=full, count=count, rounds=run.size.rounds
    )
    for work in _RATIOS:
        yield from _of_work(work, measured[work])
    for name in _ADDED:
        work, _, share = name.split(", ")
        alone, pair = (measured[work][f"{who} {share}"] for who in ("alone", "pair"))
        note = f"{statistics.median(alone):.2f} ms alone, {statistics.median(pair):.2f} ms with a standby"
        yield of_rounds(name, [b - a for a, b in zip(alone, pair, strict=True)], "ms", goal=_GOALS[name], note=note)


def _of_work(work: str, found: dict[str, list[float]]) -> Iterator[Figure]:
    rates = [statistics.median(found[f"{who} rate"]) for who in ("alone", "pair")]
    note = f"{rates[0]:,.0f}/s alone, {rates[1]:,.0f}/s with a standby; all share the processors"
    yield of_rounds(work, _ratios(found["pair rate"], found["alone rate"]), "×", goal=_GOALS[work], note=note)
    alone, leader, standby = found["alone cpu"], found["leader cpu"], found["standby cpu"]
    note = f"{statistics.median(alone):.2f} s a million alone, {statistics.median(leader):.2f} s with a standby"
    name = f"{work}, by processor time of the leader"
    yield of_rounds(name, _ratios(alone, leader), "×", note=note)
    added = [b - a for a, b in zip(alone, leader, strict=True)]
    for name, values in ((f"{work}, added to the leader's", added), (f"{work}, standby's processor time", standby)):
        yield of_rounds(name, values, "s", goal=_GOALS.get(name), note="a million")


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b if b else 1.0 for a, b in zip(above, below, strict=True)]


def measuring(folder: str, seconds: float, count: int, rounds: int) -> Measured:
    """In a child process: all work by a single node and by a pair, in turns."""
    return uvloop.run(_measuring(Path(folder), seconds, count, rounds))


async def _measuring(folder: Path, seconds: float, count: int, rounds: int) -> Measured:
    single, found = ServerProcess(str(folder / "single")), Measured()
    await single.ready()
    async with running_pair(folder) as pair:
        for number in range(rounds):
            turns: list[tuple[str, Server]] = [("alone", single), ("pair", pair)]
            for who, server in turns if number % 2 == 0 else reversed(turns):
                await _round(_Round(found, who, server, pair, number), seconds, count)
            child.report_progress((number + 1) / rounds)
    return found


class _Round:
    """One turn of one server: where its results go."""

    def __init__(self, found: Measured, who: str, server: Server, pair: Pair, number: int) -> None:
        self._found, self._who, self.server, self._pair, self.number = found, who, server, pair, number

    def note(self, work: str, what: str, value: float) -> None:
        self._found.setdefault(work, {}).setdefault(what, []).append(value)

    async def rate(self, work: str, task: Callable[[], Awaitable[int]]) -> None:
        """Note messages per second, and the processor time of a million."""
        standby, server, begin = self._pair.standby.cpu_seconds(), self.server.cpu_seconds(), time.perf_counter()
        done = await task()
        taken = time.perf_counter() - begin
        self.note(work, f"{self._who} rate", done / taken)
        is_pair = self.server is self._pair
        self.note(work, "leader cpu" if is_pair else "alone cpu", (self.server.cpu_seconds() - server) / done * 1e6)
        if is_pair:
            self.note(work, "standby cpu", (self._pair.standby.cpu_seconds() - standby) / done * 1e6)

    def latency(self, work: str, shares: dict[str, float]) -> None:
        """Note milliseconds by percentile."""
        for share, value in shares.items():
            self.note(work, f"{self._who} {share}", value)


async def _round(turn: _Round, seconds: float, count: int) -> None:
    connections = [await turn.server.connect() for _ in range(64)]
    topic = f"cluster-{turn.number}"
    request = produce_request(topic, JSON, 1_000, BODY_BYTES, delay=3_600)
    await repeat_for(connections, produce_request(topic, JSON, 1, BODY_BYTES, delay=3_600), seconds / 4)  # caches are warm then
    await turn.rate(SERVER_IDS, lambda: _batches(connections[:4], request, seconds))
    await turn.rate(OWN_IDS, lambda: _own_ids(connections[:4], f"{topic}-own", seconds))
    await _fill(connections[0], f"{topic}-due", count)
    await turn.rate(DRAIN, lambda: _drain(connections[:4], f"{topic}-due", count))
    one = produce_request(f"{topic}-one", JSON, 1, BODY_BYTES, delay=3_600)
    await turn.rate(MANY, lambda: _singles(connections, one, seconds))
    times = [1_000 * each for each in await repeat_for(connections[:1], one, seconds)]
    turn.latency("one put", {"p50": probe.percentile(times, 0.5), "p99": probe.percentile(times, 0.99)})
    turn.latency("lateness", {"p99": (await lateness_of(turn.server, 2 * seconds, 0))["p99"]})
    for connection in connections:
        connection.close()


async def _batches(connections: list[Connection], request: bytes, seconds: float) -> int:
    return 1_000 * len(await repeat_for(connections, request, seconds))


async def _singles(connections: list[Connection], request: bytes, seconds: float) -> int:
    return len(await repeat_for(connections, request, seconds))


async def _own_ids(connections: list[Connection], topic: str, seconds: float) -> int:
    """Put batches with ids of their own, until the time is over. Returns the number of messages."""
    end, count = time.perf_counter() + seconds, 0

    async def one(connection: Connection) -> None:
        nonlocal count
        while time.perf_counter() < end:
            first, count = count, count + 1_000
            messages = [{"id": own_id(n), "body": "x" * (BODY_BYTES - 2), "delay": 3_600} for n in range(first, first + 1_000)]
            await connection.call_ok(post_request(f"/v1/topics/{topic}/messages", msgspec.json.encode({"messages": messages})))

    await asyncio.gather(*map(one, connections))
    return count


async def _fill(connection: Connection, topic: str, count: int) -> None:
    batch = min(1_000, count)
    request = produce_request(topic, JSON, batch, BODY_BYTES)
    for _ in range(count // batch):
        await connection.call_ok(request)
    await asyncio.sleep(1.0)  # until they are handed off


async def _drain(connections: list[Connection], topic: str, count: int) -> int:
    done = sum(await asyncio.gather(*(drain(connection, topic, JSON) for connection in connections)))
    assert done == count, "each came once"
    return done


# Pauses


def _failover(run: Run) -> Iterator[Figure]:
    times = {"full": 20, "quick": 3}.get(run.size.name, 1)
    found = run.child("failovers and handovers", failing, folder=run.folder("cluster"), times=times)
    for name, goal in _PAUSES.items():
        work, share = name.split(", ")
        value = probe.percentile(found[work], {"p50": 0.5, "p99": 0.99}[share])
        note = f"{times} times: the longest time between two answers to a client of the other node"
        yield Figure(name, value, "s", goal=goal, note=note if share == "p50" else "")


def failing(folder: str, times: int) -> dict[str, list[float]]:
    """In a child process: seconds without an answer when the leader is killed, and when it hands over."""
    return uvloop.run(_failing(Path(folder), times))


async def _failing(folder: Path, times: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"leader killed": [], "handover": []}
    async with running_pair(folder) as pair:
        for number in range(times):
            found["leader killed"].append(await _pause(pair, _kill))
            found["handover"].append(await _pause(pair, Pair.hand_over))
            child.report_progress((number + 1) / times)
    return found


async def _kill(pair: Pair) -> None:
    pair.leader.kill_replica()


async def _pause(pair: Pair, change: Callable[[Pair], Awaitable[Any]]) -> float:
    """The longest time between two answers to a client that puts through the standby's node, while another node takes over."""
    answered: list[float] = []
    putting = asyncio.create_task(_put_on(pair.standby.port, answered))
    await asyncio.sleep(_STEADY_S)
    before, epoch, begin = pair.leader, pair.epoch, time.perf_counter()
    await change(pair)
    await pair.ready(epoch)
    assert pair.leader is not before, "the other node leads"
    await asyncio.sleep(0.2)
    putting.cancel()
    with suppress(asyncio.CancelledError):
        await putting
    times = [begin, *(at for at in answered if at > begin)]
    return max(b - a for a, b in pairwise(times))


async def _put_on(port: int, answered: list[float]) -> None:
    """Put one message after the other, and note when each is answered. Refused ones are sent again."""
    connection = await Connection.open(port)
    request = produce_request("pause", JSON, 1, BODY_BYTES, delay=3_600)
    try:
        while True:
            status, _ = await connection.call(request)
            if status < 300:
                answered.append(time.perf_counter())
            else:
                await asyncio.sleep(_RETRY_S)
    finally:
        connection.close()


cluster = Benchmark(
    "cluster", "a leader with one standby in sync against a single node, in turns", _GOALS, _cluster, needs="etcd"
)
failover = Benchmark(
    "failover",
    "pauses when a leader is killed or hands over",
    {name: goal for name, goal in _PAUSES.items() if goal},
    _failover,
    needs="etcd",
)
