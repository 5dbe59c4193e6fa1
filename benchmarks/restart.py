"""Restart: duration of `Engine.open` in a fresh process after SIGKILL of the one before. Imports are not counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import child, probe
from benchmarks.fire import hand_off
from benchmarks.load import TOPIC, SimulatedServer, own_id
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from benchmarks.state import State
from turtlemq.engine import Engine

_SECOND = Goal("≤", 1.0)
_GOALS = {
    "server ids, warm": _SECOND,
    "server ids, cold": _SECOND,
    "own ids, warm": _SECOND,
    "own ids, cold": _SECOND,
    "after a handoff": _SECOND,
    "after cancels": _SECOND,
}


def _restart(run: Run) -> Iterator[Figure]:
    for kind, own in (("server ids", False), ("own ids", True)):
        state = run.state(own)
        yield _figure(run, state, f"{kind}, warm", cold=False)
        yield _figure(run, state, f"{kind}, cold", cold=True)
    state = run.state(own=False)
    run.child("handing off before a restart", hand_off, folder=state.folder, count=run.size.handed, size=run.size_fields)
    yield _figure(run, state, "after a handoff", cold=False, note=f"{run.size.handed:,} handed off")
    state = run.state(own=True)
    run.child("cancelling before a restart", cancels, folder=state.folder, count=run.size.cancelled, size=run.size_fields)
    yield _figure(run, state, "after cancels", cold=False, note=f"{run.size.cancelled:,} cancelled")


def _figure(run: Run, state: State, name: str, *, cold: bool, note: str = "") -> Figure:
    rounds = []
    for _ in range(run.size.rounds):
        prepare = probe.evict if cold else probe.warm
        prepare(probe.files(state.topic))
        rounds.append(run.child(f"reopening, {name}", reopen, folder=state.folder, size=run.size_fields))
    last = rounds[-1]
    read = f"{last['read_bytes'] / 1e6:,.0f} MB read from the disk" if cold else f"{last['sleep']:,} sleepers"
    return of_rounds(
        name, [result["seconds"] for result in rounds], "s", goal=_GOALS[name], note="; ".join(filter(None, (note, read)))
    )


def reopen(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """In a child process, which is killed with the folder open: open the engine."""
    settings = Size(**size).settings
    before, begin = probe.disk_io()[0], time.perf_counter()
    engine = Engine.open(Path(folder), settings=settings)
    taken = time.perf_counter() - begin
    assert not engine.was_clean, "the process before was killed"
    return {"seconds": taken, "sleep": engine.topic(TOPIC).stores.index.stats().sleep, "read_bytes": probe.disk_io()[0] - before}


def cancels(folder: str, count: int, size: dict[str, Any]) -> int:
    """In a child process: cancel messages at even distances, in batches. Returns their number."""
    shape = Size(**size)
    server = SimulatedServer(folder, shape.settings)
    every = shape.sleepers // count
    done = 0
    for first in range(0, count, shape.batch):
        ids = [own_id(n * every) for n in range(first, min(first + shape.batch, count))]
        server.index.stage_cancel(ids)
        server.index.commit(sync=False)
        done += len(ids)
        child.report_progress(done / count)
    return done


restart = Benchmark(
    "restart", "open the engine after kill -9, with a tail as long as it gets that no index covers yet", _GOALS, _restart
)
