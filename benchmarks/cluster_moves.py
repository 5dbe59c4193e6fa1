"""Shards that move while messages are put: a node joins, one is drained, one dies and comes back, one leaves.

Four producers put single messages with ids of their own through the Python client, which sleep. Each put is timed from its call
to its answer, with all retries; in the end every message that was accepted is looked for.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import child
from benchmarks.cluster_pair import NAME, Trio, running_trio
from benchmarks.load import BODY_BYTES
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run
from turtlemq.cli.cluster_names import signed
from turtlemq.client import Client
from turtlemq.client.errors import ClientError
from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.intervene import intervene, read_view
from turtlemq.replica.interventions import plan_drain, plan_leave, plan_undrain
from turtlemq.shards import shard_of

SHARDS, PAUSE_S, LATE_S = 4, 0.005, 240.0
_P99, _KEPT = "a put while shards move, p99", "accepted messages that are there"
_GOALS = {_P99: Goal("≤", 3.0), _KEPT: Goal("≥", 100.0)}


def _moves(run: Run) -> Iterator[Figure]:
    found = run.child("shards move under load", moving, folder=run.folder("moves"))
    seconds = sorted(found["seconds"])
    note = f"{len(seconds):,} puts, one at a time by each of four producers; {len(found['refused'])} were refused in the end"
    yield Figure(_P99, statistics.quantiles(seconds, n=100)[98], "s", goal=_GOALS[_P99], note=note)
    yield Figure("a put while shards move, p50", statistics.median(seconds), "s")
    yield Figure("a put while shards move, longest", seconds[-1], "s")
    yield Figure(_KEPT, found["kept"][0], "%", goal=_GOALS[_KEPT])
    for what, taken in zip(found["steps"], found["taken"], strict=True):
        yield Figure(f"until all copies are in sync again: {what}", taken, "s")


def moving(folder: str) -> dict[str, list[Any]]:
    """In a child process: all moves, one after the other, while messages are put."""
    return asyncio.run(_moving(Path(folder)))


async def _moving(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"steps": [], "taken": []}
    async with running_trio(folder, SHARDS) as trio:
        trio.start("a", "b")
        await _until_whole(trio, "ab")
        load = _Load([node.url for node in trio.nodes.values()])
        try:
            for number, (what, step, names) in enumerate(_steps(trio), 1):
                begun = time.perf_counter()
                await step()
                await _until_whole(trio, names)
                found["steps"].append(what)
                found["taken"].append(time.perf_counter() - begun)
                child.report_progress(number / 7)
        finally:
            await asyncio.to_thread(load.end)
        found |= {"seconds": load.seconds, "refused": load.refused, "kept": [await asyncio.to_thread(load.kept)]}
    return found


def _steps(trio: Trio) -> list[tuple[str, Callable[[], Any], str]]:
    async def start(name: str) -> None:
        trio.start(name)

    async def kill(name: str) -> None:
        trio.kill(name)
        await asyncio.sleep(8)

    async def change(plan: Callable[[ClusterView], Any]) -> None:
        async with Etcd([trio.endpoint]) as etcd:
            await intervene(etcd, Keys(NAME), plan)

    return [
        ("a node joins", lambda: start("c"), "abc"),
        ("a node is drained", lambda: change(lambda view: plan_drain(view, "b", signed("drain", node="b"))), "abc"),
        ("it may lead again", lambda: change(lambda view: plan_undrain(view, "b")), "abc"),
        ("a node dies", lambda: kill("a"), ""),
        ("it comes back", lambda: start("a"), "abc"),
        ("a node leaves", lambda: change(lambda view: plan_leave(view, "c", signed("remove", node="c"))), "ab"),
    ]


async def _until_whole(trio: Trio, names: str) -> None:
    """Wait until these nodes have all copies in sync, and each shard has a leader; without names, only for leaders."""
    end = time.monotonic() + LATE_S
    async with Etcd([trio.endpoint]) as etcd:
        while not _is_whole(await read_view(etcd, Keys(NAME)), names):
            if time.monotonic() > end:
                raise TimeoutError(f"the copies do not get in sync on {names}")
            await asyncio.sleep(0.1)


def _is_whole(view: ClusterView, names: str) -> bool:
    shards = view.shards.values()
    if not all(shard.lead for shard in shards):
        return False
    if not names:
        return all(shard.lead is not None and shard.lead.node in view.nodes for shard in shards)
    held = {name for shard in shards for name in shard.wanted}
    led = {shard.lead.node for shard in shards if shard.lead is not None}
    is_in_sync = all(set(shard.wanted) == set(shard.in_sync.values()) and len(shard.wanted) == 2 for shard in shards)
    return is_in_sync and held == set(names) and led.isdisjoint(view.drains)


class _Load:
    """Producers, each of a topic in another shard."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._stop = urls, threading.Event()
        self.seconds: list[float] = []
        self.refused: list[str] = []
        self._accepted: dict[str, int] = {}
        topics = [next(name for n in range(1_000) if shard_of(name := f"moves-{n}", SHARDS) == shard) for shard in range(SHARDS)]
        self._threads = [threading.Thread(target=self._produce, args=(topic,)) for topic in topics]
        for thread in self._threads:
            thread.start()

    def _produce(self, topic: str) -> None:
        body, accepted = os.urandom(BODY_BYTES), 0
        with Client(self._urls, timeout=60) as client:
            while not self._stop.is_set():
                begun = time.perf_counter()
                try:
                    client.put(topic, body, id=f"m{accepted}", delay=86_400)
                except ClientError as error:
                    self.refused.append(str(error))
                else:
                    accepted += 1
                    self._accepted[topic] = accepted
                self.seconds.append(time.perf_counter() - begun)
                time.sleep(PAUSE_S)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def kept(self) -> float:
        """The share of accepted messages that are there, in percent. One whose answer was lost may be there as well."""
        with Client(self._urls, timeout=60) as client:
            there = sum(min(accepted, client.stats(topic).sleep) for topic, accepted in self._accepted.items())
        return 100 * there / sum(self._accepted.values())


moves = Benchmark(
    "cluster-moves", "shards of a cluster move under load: joins, drains, a lost node", _GOALS, _moves, needs="etcd"
)
