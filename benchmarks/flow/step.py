"""Scenario: high priority rises from a tenth to nine tenths of the capacity, and falls again.

Beside it is a flood of low priority. Pre-emption has its defaults, dynamic weights are on. The weight may rise, must hold then,
and be back at its setting within a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.flow.load import Seen, consumers, measured_capacity, percentile, produce
from benchmarks.flow.server import configure, describe
from benchmarks.http_client import Connection, ServerProcess
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run

LOW_LOAD, HIGH_LOAD, FLOOD = 0.1, 0.9, 1.5  # of the consumers' capacity
GOAL_MS, BASE = 150, 6.0
RECOVERED, CHANGES, BACK = (
    "p95 of high is back at its goal after",
    "raises and ways back of the weight",
    "weight is back at its setting after",
)
GOALS = {RECOVERED: Goal("≤", 10.0), CHANGES: Goal("≤", 12.0), BACK: Goal("≤", 60.0)}
Found = dict[str, list[float]]


def _run(run: Run) -> Iterator[Figure]:
    before, high, after = {"full": (10, 40, 70), "quick": (5, 25, 40)}.get(run.size.name, (1, 1, 1))
    found: Found = run.child(
        "a step of high priority", measuring, folder=run.folder("flow"), before=before, high=high, after=after
    )
    p95, weights = found["p95"], found["weight"]
    late = [at for at in range(before, before + high) if p95[at] > GOAL_MS]
    note = f"highest p95 {max(p95):,.0f} ms, goal {GOAL_MS} ms; highest weight {max(weights):.1f}"
    note += f"; capacity {found['capacity'][0]:,.0f}/s"
    yield Figure(RECOVERED, max(late, default=before - 1) + 1 - before, "s", goal=GOALS[RECOVERED], note=note)
    yield Figure(CHANGES, _changes(weights), "", goal=GOALS[CHANGES])
    raised = [at for at in range(before + high, len(weights)) if weights[at] > BASE]
    yield Figure(BACK, max(raised, default=before + high - 1) + 1 - before - high, "s", goal=GOALS[BACK])
    pictures.draw(
        run.size.name,
        "flow-step",
        "A step of high priority: its p95 and its weight, by second",
        lambda axes: _lines(axes, found, before, high),
    )


def _changes(weights: list[float]) -> int:
    """Raises, and ways back: a way back of several steps counts once.

    >>> _changes([6, 6, 9, 9, 13.5, 12, 11, 11, 10, 12, 12, 11])
    5
    """
    changes = [b - a for a, b in pairwise(weights) if b != a]
    return sum(change > 0 or i == 0 or changes[i - 1] > 0 for i, change in enumerate(changes))


def _lines(axes: Any, found: Found, before: int, high: int) -> None:
    axes.axvspan(before, before + high, color=pictures.GREY, alpha=0.12, label=f"high at {HIGH_LOAD} × capacity")
    axes.plot(found["p95"], color=pictures.COLOURS[1], label="p95 of high, ms")
    axes.axhline(GOAL_MS, color=pictures.COLOURS[1], linestyle=":", label="its goal")
    axes.set_xlabel("seconds")
    other = axes.twinx()
    other.step(range(len(found["weight"])), found["weight"], color=pictures.COLOURS[2], where="post", label="weight of high")
    other.set_ylim(0)
    lines = [axes.get_legend_handles_labels(), other.get_legend_handles_labels()]
    axes.legend(lines[0][0] + lines[1][0], lines[0][1] + lines[1][1], loc="upper right")


def measuring(folder: str, before: int, high: int, after: int) -> Found:
    """In a child process: the p95 of the waits of high priority and the weight, second by second."""
    return uvloop.run(_measuring(ServerProcess(folder), before, high, after))


async def _measuring(server: ServerProcess, before: int, high: int, after: int) -> Found:
    await server.ready()
    control, seen, total = await server.connect(), Seen(), before + high + after
    capacity = await measured_capacity(server, min(5.0, before))
    await configure(control, "t", priority={"high_p95_ms": GOAL_MS})
    begin = time.monotonic()

    def load() -> float:
        return capacity * (HIGH_LOAD if before <= time.monotonic() - begin < before + high else LOW_LOAD)

    until = begin + total
    weights, *_ = await asyncio.gather(
        _watch(control, begin, total),
        consumers(server, "t", seen, until),
        produce(await server.connect(), "t", "high", "high", load, until),
        produce(await server.connect(), "t", "low", "low", lambda: FLOOD * capacity, until),
    )
    p95 = [percentile(seen.of("high", begin + at, begin + at + 1), 0.95) for at in range(total)]
    return {"p95": p95, "weight": weights, "capacity": [capacity]}


async def _watch(control: Connection, begin: float, total: int) -> list[float]:
    """The weight of high priority at the end of each second."""
    weights = []
    for at in range(total):
        await asyncio.sleep(max(0.0, begin + at + 1 - time.monotonic()))
        groups = (await describe(control, "t"))["groups"]
        weights.append(float(groups["default"]["high_weight"]) if groups else BASE)
        child.report_progress((at + 1) / total)
    return weights


step = Benchmark("flow-step", "dynamic weights while high priority rises and falls", GOALS, _run)
