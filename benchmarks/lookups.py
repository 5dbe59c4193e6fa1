"""Small operations beside many sleepers: a tick with nothing due, a forecast, a lookup by id, a cancel."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import child, probe
from benchmarks.load import DUE_FROM_MS, TOPIC, SimulatedServer, own_id
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.model import State as Life

_TICK = {"of the engine": Goal("≤", 5.0)}
_TICKS = ("of the engine", "of one topic, which the engine wakes when there may be something to do")
_FORECAST = {"1,440 minutes, server ids": Goal("≤", 50.0), "1,440 minutes, some cancelled": Goal("≤", 50.0)}
_CANCEL = {"one, p50": Goal("≤", 200.0), "one, durable, p50": Goal("≤", 1_000.0), "one, durable, p99": Goal("≤", 1_000.0)}
_BUCKETS = 1440


def _tick(run: Run) -> Iterator[Figure]:
    result = run.child("idle ticks", ticks, folder=run.state().folder, size=run.size_fields)
    for name in _TICKS:
        typical, slowest = 1e6 * probe.percentile(result[name], 0.5), 1e6 * max(result[name])
        note = f"the slowest thousand in a row, with housekeeping: {slowest:.1f} µs each"
        limit = 1e6 / run.limits.loops_s
        yield Figure(name, typical, "µs", goal=_TICK.get(name), limit=limit, limit_of="an empty Python loop", note=note)


def ticks(folder: str, size: dict[str, Any]) -> dict[str, list[float]]:
    """In a child process: seconds per tick, in rounds of a thousand; each tick advances the clock a millisecond."""
    server = SimulatedServer(folder, Size(**size).settings)
    times: dict[str, list[float]] = {}
    timed: tuple[Callable[[int], object], ...] = (server.engine.tick, server.topic.tick)
    for name, tick in zip(_TICKS, timed, strict=True):
        tick(server.now_ms)
        times[name] = [_thousand(server, tick) for _ in range(20)]
    assert server.index.counters.handed_off == 0, "nothing was due"
    return times


def _thousand(server: SimulatedServer, tick: Callable[[int], object]) -> float:
    first = server.now_ms
    server.now_ms += 1_000
    begin = time.perf_counter()
    for now_ms in range(first, server.now_ms):
        tick(now_ms)
    return (time.perf_counter() - begin) / 1_000


tick = Benchmark("tick", "a tick when nothing is due", _TICK, _tick)


def _forecast(run: Run) -> Iterator[Figure]:
    for name, own in (("1,440 minutes, server ids", False), ("1,440 minutes, some cancelled", True)):
        state = run.state(own)
        result = run.child("forecast", forecasts, folder=state.folder, cancel=own, size=run.size_fields)
        note = f"the first one {1e3 * result['seconds'][0]:.0f} ms; {result['counted']:,} sleepers"
        rounds = [1e3 * s for s in result["seconds"][1:]]
        yield of_rounds(name, rounds, "ms", goal=_FORECAST[name], note=note)


def forecasts(folder: str, cancel: bool, size: dict[str, Any]) -> dict[str, Any]:
    """In a child process: seconds of ten forecasts; with `cancel`, after some messages of every segment are cancelled."""
    shape = Size(**size)
    server = SimulatedServer(folder, shape.settings)
    if cancel:  # one at least in every segment
        server.index.stage_cancel([own_id(n) for n in range(1, shape.sleepers, shape.segment // 2)])
        server.index.commit(sync=False)
    times, counted = [], 0
    for _ in range(10):
        begin = time.perf_counter()
        forecast = server.engine.forecast(TOPIC, DUE_FROM_MS, 60_000, _BUCKETS)
        times.append(time.perf_counter() - begin)
        counted = sum(forecast.counts) + forecast.overdue + forecast.beyond
    assert counted == server.sleepers, "every sleeper is counted once"
    return {"seconds": times, "counted": counted}


forecast = Benchmark("forecast", "counts of what comes due in each of 1,440 minutes, over all sleepers", _FORECAST, _forecast)


def _lookup(run: Run) -> Iterator[Figure]:
    for name, own in (("own ids", True), ("server ids", False)):
        state = run.state(own)
        ids = state.sample_ids[: run.size.calls]
        result = run.child(f"lookups by {name}", lookups, folder=state.folder, ids=ids, size=run.size_fields)
        yield Figure(f"{name}, p50", 1e6 * result["p50"], "µs")
        yield Figure(f"{name}, p99", 1e6 * result["p99"], "µs")
        yield Figure(f"{name}, unknown, p50", 1e6 * result["unknown"], "µs")


def lookups(folder: str, ids: list[str], size: dict[str, Any]) -> dict[str, float]:
    """In a child process: seconds of lookups by known and by unknown ids, in random order."""
    server = SimulatedServer(folder, Size(**size).settings)
    random.Random(1).shuffle(ids)
    get = server.index.get
    times = probe.each_seconds(get, ids)
    known = sum(get(id_) is not None for id_ in ids)
    assert known >= len(ids) * 0.9, "nearly all are known; other benchmarks have cancelled some"
    unknown = probe.each_seconds(get, [f"unknown-{n}" for n in range(len(ids))])
    p50, p99 = probe.percentile(times, 0.5), probe.percentile(times, 0.99)
    return {"p50": p50, "p99": p99, "unknown": probe.percentile(unknown, 0.5)}


lookup = Benchmark("lookup", "a message by its id, at random among all sleepers", {}, _lookup)


def _cancel(run: Run) -> Iterator[Figure]:
    result = run.child("cancelling", cancels, folder=run.state(own=True).folder, size=run.size_fields)
    for name, seconds in (
        ("one, p50", "one"),
        ("one, p99", "one"),
        ("one, durable, p50", "durable"),
        ("one, durable, p99", "durable"),
    ):
        value = 1e6 * probe.percentile(result[seconds], 0.99 if name.endswith("p99") else 0.5)
        limit = run.limits.sync_s * 1e6 if seconds == "durable" else None
        yield Figure(name, value, "µs", goal=_CANCEL.get(name), limit=limit, limit_of="fdatasync of 4 KiB" if limit else "")
    yield Figure("in batches of 1,000, each", 1e6 * result["batch"], "µs")


def cancels(folder: str, size: dict[str, Any]) -> dict[str, Any]:
    """In a child process: cancels of random own ids, each id once."""
    shape = Size(**size)
    server = SimulatedServer(folder, shape.settings)
    total = 2 * shape.calls + shape.batch
    chosen = [own_id(n) for n in random.Random(2).sample(range(shape.sleepers), total)]
    one = probe.each_seconds(lambda id_: _cancel_one(server, id_), chosen[: shape.calls])
    child.report_progress(0.5)
    again = chosen[shape.calls : 2 * shape.calls]
    durable = probe.each_seconds(lambda id_: server.engine.cancel(TOPIC, [id_], server.now_ms), again)
    begin = time.perf_counter()
    ended = server.index.stage_cancel(chosen[2 * shape.calls :])
    server.index.commit(sync=False)
    batch = (time.perf_counter() - begin) / len(ended)
    assert set(server.index.cancel(chosen).values()) == {Life.UNKNOWN}, "all of them are gone"
    return {"one": one, "durable": durable, "batch": batch}


def _cancel_one(server: SimulatedServer, id_: str) -> None:
    server.index.stage_cancel([id_])
    server.index.commit(sync=False)


cancel = Benchmark("cancel", "end a sleeper by its own id, at random among all, without and with fsync", _CANCEL, _cancel)
