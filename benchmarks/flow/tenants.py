"""Scenario: one tenant sends batches of 1 MB on 64 connections, nine others put single messages. The nine must hardly notice; and
where all flood, each gets its share by weight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.http_client import Connection, ServerProcess, produce_request
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run

SLOWER, SHARES = "p99 of single puts beside a flood, of that alone", "shares when all flood, worst against its weight"
GOALS = {SLOWER: Goal("≤", 2.0), SHARES: Goal("≤", 0.1)}
NINE, FLOODS = 9, 64
FLOOD_MESSAGES, FLOOD_BYTES = 2_000, 500  # a batch of 1 MB
START_S = 1.0  # until a flood is under way
PER_S = 20  # puts of each of the nine
WEIGHTS = {"a": 1, "b": 2, "c": 4}
SHARED = {name: 12 * weight for name, weight in WEIGHTS.items()}  # connections: a tenant must always have requests that wait
Found = dict[str, Any]


def _run(run: Run) -> Iterator[Figure]:
    seconds = {"full": 20.0, "quick": 6.0}.get(run.size.name, 0.3)
    found: Found = run.child("tenants", measuring, folder=run.folder("flow"), seconds=seconds)
    alone, beside = (_p99(found[kind]) for kind in ("alone", "beside"))
    note = f"{1_000 * beside:.1f} instead of {1_000 * alone:.1f} ms; the flood stored {found['flooded_mb_per_s']:.0f} MB/s"
    yield Figure(SLOWER, beside / alone, "×", goal=GOALS[SLOWER], note=note)
    shares, total = found["shares"], sum(found["shares"].values())
    weights = sum(WEIGHTS.values())
    worst = max(abs(shares[name] / total * weights / weight - 1) for name, weight in WEIGHTS.items())
    text = ", ".join(f"{name} {100 * shares[name] / total:.0f} %" for name in WEIGHTS)
    yield Figure(SHARES, worst, "", goal=GOALS[SHARES], note=f"weights 1, 2 and 4: {text}")
    pictures.draw(run.size.name, "flow-tenants", "Single puts of nine tenants, milliseconds", lambda axes: _lines(axes, found))


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def _lines(axes: Any, found: Found) -> None:
    for colour, kind in zip(pictures.COLOURS, ("alone", "beside"), strict=False):
        times = sorted(1_000 * one for one in found[kind])
        label = "alone" if kind == "alone" else "beside a flood of 1 MB batches"
        axes.plot(times, [100 * n / len(times) for n in range(len(times))], color=colour, label=label)
    axes.set_xscale("log")
    axes.set_ylabel("% of the puts")
    axes.legend()


def measuring(folder: str, seconds: float) -> Found:
    """In a child process: times of single puts without and beside a flood, and the shares of three floods."""
    config = Path(folder) / "tenants.toml"
    names = {**WEIGHTS, **{f"n{n}": 1 for n in range(NINE)}, "flood": 1}
    config.write_text("".join(f'[[tenants]]\nname = "{name}"\ntopics = ["{name}"]\nweight = {w}\n' for name, w in names.items()))
    return uvloop.run(_measuring(ServerProcess(f"{folder}/data", TURTLEMQ_CONFIG=str(config)), seconds))


async def _measuring(server: ServerProcess, seconds: float) -> Found:
    await server.ready()
    nine = [(await server.connect(), f"n{n}") for n in range(NINE)]
    found: Found = {"alone": await _singles(nine, seconds)}
    child.report_progress(0.3)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # so that the nine wait for the server alone
        flood = other.submit(flooding, server.port, {"flood": FLOODS}, seconds + START_S)
        await asyncio.sleep(START_S)
        found["beside"] = await _singles(nine, seconds)
        stored = await asyncio.wrap_future(flood)
        found["flooded_mb_per_s"] = stored["flood"] * FLOOD_MESSAGES * FLOOD_BYTES / 1e6 / (seconds + START_S)
        child.report_progress(0.6)
        found["shares"] = await asyncio.wrap_future(other.submit(flooding, server.port, SHARED, seconds))
    return found


def flooding(port: int, connections: dict[str, int], seconds: float) -> dict[str, int]:
    """In a process of its own: put batches for so long, on so many connections for each topic. Returns how many were stored."""
    return uvloop.run(_flooding(port, connections, seconds))


async def _flooding(port: int, connections: dict[str, int], seconds: float) -> dict[str, int]:
    stop = asyncio.Event()
    tasks = {
        topic: [asyncio.create_task(_flood(await Connection.open(port), topic, stop)) for _ in range(count)]
        for topic, count in connections.items()
    }
    await asyncio.sleep(seconds)
    stop.set()
    return {topic: sum(await asyncio.gather(*found)) for topic, found in tasks.items()}


async def _singles(nine: list[tuple[Connection, str]], seconds: float) -> list[float]:
    """Times of puts at a constant rate, each from the time at which it was due."""
    times: list[float] = []

    async def one(connection: Connection, topic: str, offset: float) -> None:
        request, begun = produce_request(topic, "application/json", 1, 100, delay=86_400), time.perf_counter() + offset
        for n in range(int(PER_S * seconds)):
            due = begun + n / PER_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await connection.call_ok(request)
            times.append(time.perf_counter() - due)

    await asyncio.gather(*(one(connection, topic, n / NINE / PER_S) for n, (connection, topic) in enumerate(nine)))
    return times


async def _flood(connection: Connection, topic: str, stop: asyncio.Event) -> int:
    """Put batches until told to stop. Returns how many were stored."""
    request, count = produce_request(topic, "application/json", FLOOD_MESSAGES, FLOOD_BYTES, delay=86_400), 0
    while not stop.is_set():
        status, _ = await connection.call(request)
        count += status < 300
    return count


tenants = Benchmark("flow-tenants", "single puts of nine tenants beside a flood of another", GOALS, _run)
