"""Scenario: a flood of low priority, five times the capacity of the consumers, and a little of high priority.

The rules for priorities are switched on one after the other, each for a topic of its own; then once more with half of the low
messages failing at first. These consumers send plain requests, one fetch for as many messages as they handle at once. Then the
same with all rules for the Python client and for gRPC streams, where messages wait in the client as well. The first run of each
kind of consumer has no flood: its waits are the measure of the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.flow.clients import far_ahead, python_clients, streams
from benchmarks.flow.load import CAPACITY, HANDLE_S, Seen, consumers, percentile, produce, remove
from benchmarks.flow.server import configure
from benchmarks.http_client import ServerProcess
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run

FLOOD, TRICKLE = 5.0, 0.1  # of the consumers' capacity
FLOOR = 0.05
OFF = {"preempt": {"after_ms": 0}}
ON = {"preempt": {"after_ms": 50, "floor": FLOOR}, "priority": {"high_p95_ms": 30}}
Consume = Callable[[ServerProcess, str, Seen, float, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One run. `high`: the priority of the trickle; `low`: there is a flood; `failing`: half of the flood fails first. `alone`:
    the run whose waits are the measure; empty: this one is not judged."""

    name: str
    settings: dict[str, Any]
    high: str = "high"
    low: bool = True
    failing: bool = False
    consume: Consume = consumers
    alone: str = ""


VARIANTS = (
    Variant("alone", OFF, low=False),
    Variant("one priority", OFF, high="low"),
    Variant("quotas", OFF, alone="alone"),
    Variant("and pre-emption", {"preempt": {"after_ms": 50, "floor": FLOOR}}, alone="alone"),
    Variant("and weights", ON, alone="alone"),
    Variant("half of low failing", ON, failing=True, alone="alone"),
    Variant("client: alone", ON, low=False, consume=python_clients),
    Variant("client, 100 ahead", ON, consume=far_ahead),
    Variant("client", ON, consume=python_clients, alone="client: alone"),
    Variant("client, half of low failing", ON, failing=True, consume=python_clients, alone="client: alone"),
    Variant("streams: alone", ON, low=False, consume=streams),
    Variant("streams", ON, consume=streams, alone="streams: alone"),
    Variant("streams, half of low failing", ON, failing=True, consume=streams, alone="streams: alone"),
)
JUDGED = [one for one in VARIANTS if one.alone]
GOALS = {f"p99 of high less a handling, of alone: {one.name}": Goal("≤", 2.0) for one in JUDGED} | {
    f"low, of the capacity: {one.name}": Goal("≥", FLOOR) for one in JUDGED
}
Found = dict[str, list[float]]


def _run(run: Run) -> Iterator[Figure]:
    seconds = {"full": 20.0, "quick": 8.0}.get(run.size.name, 2.0)
    found: Found = run.child("a flood of low priority", measuring, folder=run.folder("flow"), seconds=seconds)
    for one in VARIANTS:
        p50, p99 = (percentile(found[f"{one.name} high"], share) for share in (0.5, 0.99))
        low = found[f"{one.name} low"][0]
        yield Figure(f"wait of high, p99: {one.name}", p99, "ms", note=f"p50 {p50:.0f} ms; low {low:,.0f}/s")
        if one in JUDGED:
            first, second = (name for name in GOALS if name.endswith(f": {one.name}"))
            alone = percentile(found[f"{one.alone} high"], 0.99)
            yield Figure(first, max(0.0, p99 - 1_000 * HANDLE_S) / max(alone, 1.0), "×", goal=GOALS[first])
            yield Figure(second, low / CAPACITY, "×", goal=GOALS[second])
    pictures.draw(
        run.size.name, "flow-flood", "Wait of high priority beside a flood of low, milliseconds", lambda axes: _bars(axes, found)
    )


def _bars(axes: Any, found: Found) -> None:
    names = [one.name for one in VARIANTS][::-1]
    for at, (share, label) in enumerate(((0.5, "p50"), (0.99, "p99"))):
        values = [max(1.0, percentile(found[f"{name} high"], share)) for name in names]
        places = [i - 0.2 + 0.4 * (1 - at) for i in range(len(names))]
        bars = axes.barh(places, values, height=0.38, color=pictures.COLOURS[at], label=label)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, color=pictures.GREY, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.legend(loc="lower right")


def measuring(folder: str, seconds: float) -> Found:
    """In a child process: the waits of high priority and the rate of low, by variant."""
    return uvloop.run(_measuring(ServerProcess(folder, grpc=True), seconds))


async def _measuring(server: ServerProcess, seconds: float) -> Found:
    await server.ready()
    found = Found()
    for number, one in enumerate(VARIANTS):
        seen, topic = Seen(), f"t{number}"
        control = await server.connect()
        await configure(control, topic, **one.settings)
        until = time.monotonic() + seconds
        tasks = [one.consume(server, topic, seen, until, "low" if one.failing else "")]
        tasks.append(produce(await server.connect(), topic, "high", one.high, lambda: TRICKLE * CAPACITY, until))
        if one.low:
            tasks.append(produce(await server.connect(), topic, "low", "low", lambda: FLOOD * CAPACITY, until))
        await asyncio.gather(*tasks)
        settled = until - 0.8 * seconds  # without the begin
        found[f"{one.name} high"] = seen.of("high", settled)
        found[f"{one.name} low"] = [len(seen.of("low", settled, until)) / (0.8 * seconds)]
        await remove(control, topic)
        child.report_progress((number + 1) / len(VARIANTS))
    return found


flood = Benchmark("flow-flood", "high priority beside a flood of low priority", GOALS, _run)
