"""The Broker: fetch and ack, ticks over many topics, memory of a backlog, opening with a backlog, lateness of bursts."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import child, probe
from benchmarks.load import BODY_BYTES, START_MS, TOPIC
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.engine import Engine
from turtlemq.model import Batch
from turtlemq.storage.process_worker import ProcessWorker

_GROUP = "workers"
_GOALS = {
    "fetch and acknowledge, batches of 1,000": Goal("≥", 1_000_000),
    "a tick with nothing due, 1,000 topics": Goal("≤", 20.0),
    "memory of a ready backlog": Goal("≤", 50.0),
    "memory of a backlog in long back-off": Goal("≤", 50.0),
    "open with a ready backlog and 100,000 reserved": Goal("≤", 1.0),
    "lateness that handoff adds to a burst of 1,000": Goal("≤", 2.0),
    "first messages of a burst fetchable after": Goal("≤", 50.0),
}


def _run(run: Run) -> Iterator[Figure]:
    name = "fetch and acknowledge, batches of 1,000"
    rounds = [
        run.child(f"{name}, round {i + 1}", consume, folder=run.folder("consume"), size=run.size_fields)
        for i in range(run.size.rounds)
    ]
    yield of_rounds(
        name, [result["rate"] for result in rounds], "msg/s", goal=_GOALS[name], note="of CPU time; nothing here waits"
    )
    name = "the same, acknowledged in another order"
    yield of_rounds(name, [result["shuffled"] for result in rounds], "msg/s")
    name = "a tick with nothing due, 1,000 topics"
    yield Figure(name, 1e6 * run.child(name, idle, folder=run.folder("idle"), size=run.size_fields), "µs", goal=_GOALS[name])
    for name, work in (("memory of a ready backlog", ready), ("memory of a backlog in long back-off", long_backoff)):
        result = run.child(name, work, folder=run.folder("backlog"), size=run.size_fields)
        yield Figure(
            name, result["bytes"] / 1e6, "MB", goal=_GOALS[name], note=f"{result['count']:,} messages, beyond an empty engine"
        )
    yield from _opening(run)
    yield from _bursts(run)


def _opening(run: Run) -> Iterator[Figure]:
    name = "open with a ready backlog and 100,000 reserved"
    folder = run.folder("opening")
    count = run.child("a ready backlog, partly reserved", reserve_many, folder=folder, size=run.size_fields)
    rounds = [run.child(name, opening, folder=folder) for _ in range(run.size.rounds)]
    yield of_rounds(name, rounds, "s", goal=_GOALS[name], note=f"{count:,} ready, after kill -9")


def _bursts(run: Run) -> Iterator[Figure]:
    name = "lateness that handoff adds to a burst of 1,000"
    times = run.child(name, small_burst, folder=run.folder("burst"), size=run.size_fields)
    note = f"p99 {1e3 * times['p99']:.2f} ms; all fetched after {1e3 * times['fetched']:.2f} ms"
    yield Figure(name, 1e3 * times["p50"], "ms", goal=_GOALS[name], note=note)
    name = "first messages of a burst fetchable after"
    result = run.child(name, big_burst, folder=run.folder("burst"), size=run.size_fields)
    yield Figure(name, 1e3 * result["seconds"], "ms", goal=_GOALS[name], note=f"{result['count']:,} due at one instant")


# Functions that run in child processes


def _engine(folder: str) -> Engine:
    engine = Engine.open(Path(folder), worker=ProcessWorker())  # seals use the memory of another process
    engine.move_group(TOPIC, _GROUP, "earliest", START_MS)
    return engine


def _put(engine: Engine, count: int, batch: int, due_ms: int) -> None:
    bodies = [np.random.default_rng(1).bytes(BODY_BYTES)] * batch
    index = engine.topic(TOPIC).stores.index
    for first in range(0, count, batch):
        index.append(Batch(bodies, [due_ms] * batch), START_MS, sync=False)
        child.report_progress(first / count / 2)


def _fire(engine: Engine, now_ms: int) -> None:
    while engine.stats(TOPIC).sleep:
        engine.topic(TOPIC).tick(now_ms)


def consume(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Messages per second of CPU time through fetch and ack: acked in order, and shuffled."""
    shape = Size(**size)
    engine = _engine(folder)
    count = shape.round_batches * shape.batch
    _put(engine, 2 * count, shape.batch, START_MS)
    _fire(engine, START_MS)
    gc.collect()
    gc.freeze()  # as the server does
    order = np.random.default_rng(1).permutation(shape.batch).tolist()
    spent = []
    for shuffled in (False, True):
        begin, done = time.process_time(), 0
        while done < count:
            ids = engine.reserve(TOPIC, _GROUP, shape.batch, START_MS).ids
            done += engine.ack(TOPIC, _GROUP, [ids[i] for i in order] if shuffled else ids, START_MS).acked
        spent.append(time.process_time() - begin)
    return {"rate": count / spent[0], "shuffled": count / spent[1]}


def idle(folder: str, size: dict[str, Any]) -> float:
    """Seconds of a tick with nothing due, over 1,000 topics; fewer in small sizes."""
    engine = Engine.open(Path(folder))
    for n in range(min(1_000, 2 * Size(**size).calls)):
        engine.topic(f"topic-{n}", create=True).stores.index.append(Batch([b"x"], [START_MS + 10**9]), START_MS, sync=False)
        child.report_progress(n / 1_000)
    for _ in range(5):
        engine.tick(START_MS)
    return probe.percentile([probe.seconds(lambda: engine.tick(START_MS)) for _ in range(1_000)], 0.5)


def ready(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Anonymous memory of ready messages that are not fetched."""
    shape = Size(**size)
    engine = _engine(folder)
    before = probe.anonymous_bytes()
    count = 10 * shape.burst
    _put(engine, count, shape.batch, START_MS)
    _fire(engine, START_MS)
    engine.topic(TOPIC).checkpoint()
    return {"bytes": probe.anonymous_bytes() - before, "count": count}


def long_backoff(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Anonymous memory of failed messages that wait for hours."""
    shape = Size(**size)
    engine = _engine(folder)
    before = probe.anonymous_bytes()
    count = shape.burst
    _put(engine, count, shape.batch, START_MS)
    _fire(engine, START_MS)
    done = 0
    while done < count:
        ids = engine.reserve(TOPIC, _GROUP, 10_000, START_MS).ids
        done += engine.ack(TOPIC, _GROUP, [f"-{id_}" for id_ in ids], START_MS, retry_delay_ms=10**8).failed
        child.report_progress(done / count)
    engine.topic(TOPIC).checkpoint()
    return {"bytes": probe.anonymous_bytes() - before, "count": count}


def reserve_many(folder: str, size: dict[str, Any]) -> int:
    """Make a ready backlog with 100,000 reserved messages, for `opening`. Returns its size."""
    shape = Size(**size)
    engine = _engine(folder)
    count = 10 * shape.burst
    _put(engine, count, shape.batch, START_MS)
    _fire(engine, START_MS)
    for _ in range(min(100_000, count // 2) // shape.batch):
        engine.reserve(TOPIC, _GROUP, shape.batch, START_MS, ttr_ms=10**9)
    engine.topic(TOPIC).stores.index.sync()  # a server has synced all messages that it has answered
    engine.topic(TOPIC).checkpoint()
    return count


def opening(folder: str) -> float:
    """Seconds to open the folder of `reserve_many` after SIGKILL."""
    begin = time.perf_counter()
    engine = Engine.open(Path(folder))
    taken = time.perf_counter() - begin
    assert engine.stats(TOPIC).reserve > 0, "they are still reserved"
    return taken


def small_burst(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Seconds from the due time of 1,000 messages until they are ready, and until they are fetched."""
    shape = Size(**size)
    engine = _engine(folder)
    bursts = 100
    for n in range(bursts):
        _put(engine, shape.batch, shape.batch, START_MS + 10 * n)
    ready, fetched = [], []
    for n in range(bursts):
        begin = time.perf_counter()
        engine.tick(START_MS + 10 * n)
        ready.append(time.perf_counter() - begin)
        count = len(engine.reserve(TOPIC, _GROUP, shape.batch, START_MS + 10 * n, ttr_ms=10**9))
        fetched.append(time.perf_counter() - begin)
        assert count == shape.batch, "the whole burst is ready"
    return {"p50": probe.percentile(ready, 0.5), "p99": probe.percentile(ready, 0.99), "fetched": probe.percentile(fetched, 0.5)}


def big_burst(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Seconds until a consumer has the first 1,000 of many messages that are due at one instant."""
    shape = Size(**size)
    engine = _engine(folder)
    _put(engine, shape.burst, shape.batch, START_MS)
    begin = time.perf_counter()
    engine.tick(START_MS)
    count = len(engine.reserve(TOPIC, _GROUP, shape.batch, START_MS))
    taken = time.perf_counter() - begin
    assert count == shape.batch, "the first slice is ready"
    return {"seconds": taken, "count": shape.burst}


broker = Benchmark("broker", "fetch, acknowledge, retry: rates, memory of backlogs, opening, lateness", _GOALS, _run)
