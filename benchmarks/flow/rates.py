"""Scenario: a topic with rates. Producers offer more than it takes, mostly of low priority; the messages in it drip out to its
group.

High priority offers half of the rate, and must never be refused; low priority gets the rest of it. Deliveries come evenly,
however the messages came in.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.flow.server import configure
from benchmarks.http_client import JSON, Connection, ServerProcess, ids_of, post_request
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run

IN_PER_S, OUT_PER_S = 400, 300
OFFERED = {"high": 0.5, "low": 2.0}  # of the rate
TURN_S, SLOT_S = 0.05, 0.2  # between two requests of a producer; of the picture and of the busiest moment
KEPT, TAKEN, EVEN = "high that was taken, of all of it", "taken, of the rate", "delivered in the busiest 0.2 s, of the rate"
GOALS = {KEPT: Goal("≥", 1.0), TAKEN: Goal("≤", 1.05), EVEN: Goal("≤", 1.5)}
Found = dict[str, list[float]]  # messages in each slot


def _run(run: Run) -> Iterator[Figure]:
    seconds = {"full": 15.0, "quick": 6.0}.get(run.size.name, 1.0)
    found: Found = run.child("rates", measuring, folder=run.folder("flow"), seconds=seconds)
    settled = len(found["high"]) // 3  # at first a full bucket is taken at once
    per_s = {name: sum(slots[settled:]) / (SLOT_S * max(1, len(slots[settled:]))) for name, slots in found.items()}
    taken, refused = sum(found["high"]), sum(found["high refused"])
    yield Figure(KEPT, taken / max(1.0, taken + refused), "×", goal=GOALS[KEPT])
    note = f"{per_s['high']:,.0f}/s of high and {per_s['low']:,.0f}/s of low; {IN_PER_S}/s is the rate"
    yield Figure(TAKEN, (per_s["high"] + per_s["low"]) / IN_PER_S, "×", goal=GOALS[TAKEN], note=note)
    busiest = max(found["delivered"][1:], default=0.0) / SLOT_S / OUT_PER_S
    note = f"{per_s['delivered']:,.0f}/s delivered, {OUT_PER_S}/s is the rate"
    yield Figure(EVEN, busiest, "×", goal=GOALS[EVEN], note=note)
    pictures.draw(run.size.name, "flow-rates", "A topic with rates: messages a second", lambda axes: _lines(axes, found))


def _lines(axes: Any, found: Found) -> None:
    labels = {"high": "high, taken", "low": "low, taken", "low refused": "low, refused", "delivered": "delivered"}
    for colour, (name, label) in zip(pictures.COLOURS, labels.items(), strict=False):
        at = [n * SLOT_S for n in range(len(found[name]))]
        axes.step(at, [count / SLOT_S for count in found[name]], where="post", color=colour, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylim(0)
    axes.legend(loc="upper right")


def measuring(folder: str, seconds: float) -> Found:
    """In a child process: messages that were taken, refused and delivered, by slots of time."""
    return uvloop.run(_measuring(ServerProcess(folder), seconds))


async def _measuring(server: ServerProcess, seconds: float) -> Found:
    await server.ready()
    control = await server.connect()
    await configure(control, "t", rate={"produce_per_s": IN_PER_S, "deliver_per_s": OUT_PER_S}, priority={"high": 6, "low": 1})
    begin, counts = (
        time.monotonic(),
        {name: Counter[int]() for name in ("high", "low", "high refused", "low refused", "delivered")},
    )

    def count(name: str, messages: int) -> None:
        counts[name][int((time.monotonic() - begin) / SLOT_S)] += messages

    async def produce(connection: Connection, priority: str) -> None:
        size = round(OFFERED[priority] * IN_PER_S * TURN_S)
        body = json.dumps({"messages": [{"body": "x", "priority": priority}] * size}).encode()
        request = post_request("/v1/topics/t/messages", body)
        for n in range(int(seconds / TURN_S)):
            await asyncio.sleep(max(0.0, begin + n * TURN_S - time.monotonic()))
            status, _ = await connection.call(request)
            count(priority if status < 300 else f"{priority} refused", size)

    async def consume(connection: Connection) -> None:
        request = post_request("/v1/topics/t/fetch", json.dumps({"max": 100, "wait": 0.2, "ack": "auto"}).encode())
        while time.monotonic() < begin + seconds:
            count("delivered", len(ids_of(await connection.call_ok(request), JSON)))

    connections = [await server.connect() for _ in range(3)]
    await asyncio.gather(produce(connections[0], "high"), produce(connections[1], "low"), consume(connections[2]))
    child.report_progress(1.0)
    return {name: [float(slots[n]) for n in range(int(seconds / SLOT_S))] for name, slots in counts.items()}


rates = Benchmark("flow-rates", "a topic with rates, of which high priority keeps its part", GOALS, _run)
