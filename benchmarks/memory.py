"""Memory and disk of sleeping messages, read while the big states are built."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.load import BODY_BYTES
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run
from benchmarks.state import State

_KINDS = (("server ids", False), ("own ids", True))
_MEMORY = {
    "growth a message, server ids": Goal("≤", 1.0),
    "growth a message, own ids": Goal("≤", 1.0),
    "all of it, server ids": Goal("≤", 200.0),
    "all of it, own ids": Goal("≤", 200.0),
}
_DISK = {"beyond the body, server ids": Goal("≤", 110.0), "beyond the body, own ids": Goal("≤", 110.0)}


def _memory(run: Run) -> Iterator[Figure]:
    for kind, own in _KINDS:
        state = run.state(own)
        for point in state.checkpoints[:-1]:
            yield Figure(f"at {point.sleepers:,} sleepers, {kind}", point.anonymous_bytes / 1e6, "MB")
        yield _figure(state, f"all of it, {kind}")
        middle, last = state.checkpoints[-2:]
        growth = (last.anonymous_bytes - middle.anonymous_bytes) / (last.sleepers - middle.sleepers)
        name = f"growth a message, {kind}"
        yield Figure(name, growth, "B", goal=_MEMORY[name], note=f"from {middle.sleepers:,} to {last.sleepers:,} sleepers")
        yield Figure(f"the sealing process, at most, {kind}", last.worker_peak_bytes / 1e6, "MB")


def _figure(state: State, name: str) -> Figure:
    last = state.checkpoints[-1]
    note = f"at {last.sleepers:,} sleepers; {state.idle_bytes / 1e6:.0f} MB of it before the engine is opened"
    return Figure(name, last.anonymous_bytes / 1e6, "MB", goal=_MEMORY[name], note=note)


memory = Benchmark(
    "memory", "anonymous memory of the process while messages sleep, the memtable as full as it gets", _MEMORY, _memory
)


def _disk(run: Run) -> Iterator[Figure]:
    for kind, own in _KINDS:
        last = run.state(own).checkpoints[-1]
        each = last.disk_bytes / last.sleepers
        name = f"beyond the body, {kind}"
        yield Figure(name, each - BODY_BYTES, "B", goal=_DISK[name], note=f"{each:.1f} B in all, index included")


disk = Benchmark("disk", "bytes on disk for each sleeping message with a body of 100 B, its index included", _DISK, _disk)
