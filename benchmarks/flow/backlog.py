"""Scenario: a few messages of high priority stand behind a million of low priority. A fetch must not search through those.

Costs are those of one connection, call by call, with a plain topic of the same length in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.flow.server import buckets, fill, percentile_between, wait_until_ready
from benchmarks.http_client import JSON, Connection, ServerProcess, ids_of, post_request
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run

FETCH, FIRST, LAG = "fetch of 10, of a plain topic's", "first fetch of a group, of a plain topic's", "loop lag, p99"
GOALS = {FETCH: Goal("≤", 1.5), FIRST: Goal("≤", 1.5), LAG: Goal("≤", 20.0)}
_GROUPS = 7  # in each topic: an odd number, whose median is one of them
_LAG = "turtlemq_loop_lag_seconds"
Found = dict[str, list[float]]


def _run(run: Run) -> Iterator[Figure]:
    low = {"full": 1_000_000, "quick": 300_000}.get(run.size.name, 2_000)
    found: Found = run.child("a backlog of low priority", measuring, folder=run.folder("flow"), low=low)
    for name, key in ((FETCH, "fetch"), (FIRST, "first")):
        ratios = [a / b for a, b in zip(found[f"{key} priorities"], found[f"{key} plain"], strict=True)]
        costs = " and ".join(f"{statistics.median(found[f'{key} {kind}']):.2f} ms {kind}" for kind in ("priorities", "plain"))
        yield of_rounds(name, ratios, "×", goal=GOALS[name], note=f"{low:,} low ready before; {costs}")
    yield Figure(LAG, found["lag"][0], "ms", goal=GOALS[LAG])
    pictures.draw(
        run.size.name, "flow-backlog", f"A fetch behind {low:,} ready messages, milliseconds", lambda axes: _bars(axes, found)
    )


def _bars(axes: Any, found: Found) -> None:
    names = [f"{key} {kind}" for key in ("first", "fetch") for kind in ("plain", "priorities")]
    values = [statistics.median(found[name]) for name in names]
    bars = axes.barh(names[::-1], values[::-1], color=[pictures.COLOURS[i % 2] for i in range(len(names))][::-1])
    axes.bar_label(bars, [f"{value:.2f}" for value in values[::-1]], padding=4, color=pictures.GREY, fontsize=9)
    axes.set_xscale("log")


def measuring(folder: str, low: int) -> Found:
    """In a child process: milliseconds of fetches, and the lag of the server's event loop meanwhile."""
    return uvloop.run(_measuring(ServerProcess(folder), low))


async def _measuring(server: ServerProcess, low: int) -> Found:
    await server.ready()
    connection, high, found = await server.connect(), min(low, 20_000), Found()
    for topic, priority in (("plain", "normal"), ("priorities", "low")):
        await fill(connection, topic, low, priority)
    for topic, priority in (("plain", "normal"), ("priorities", "high")):
        await fill(connection, topic, high, priority)
        await wait_until_ready(connection, topic, low + high)
        child.report_progress(0.5)
    before = await buckets(connection, _LAG)
    for number in range(_GROUPS):
        for topic in ("plain", "priorities"):
            await _fetch_as(connection, topic, f"g{number}", found)
    after = await buckets(connection, _LAG)
    return found | {"lag": [1_000 * percentile_between(before, after, 0.99)]}


async def _fetch_as(connection: Connection, topic: str, group: str, found: Found) -> None:
    """A new group's first fetch, then the median of many."""
    request = post_request(f"/v1/topics/{topic}/groups/{group}/fetch", b'{"max":10}')
    times = []
    for _ in range(101):
        begin = time.perf_counter()
        answer = await connection.call_ok(request)
        times.append(1_000 * (time.perf_counter() - begin))
        assert len(ids_of(answer, JSON)) == 10, "there are enough"
    found.setdefault(f"first {topic}", []).append(times[0])
    found.setdefault(f"fetch {topic}", []).append(statistics.median(times[1:]))


backlog = Benchmark("flow-backlog", "a fetch of high priority behind a backlog of low priority", GOALS, _run)
