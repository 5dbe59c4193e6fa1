"""Growth: the append rate with many sleepers against that with few, and the cost of own ids.

Big and small states take turns with batches of server ids and of own ids, so that noise affects all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import child
from benchmarks.load import Load, SimulatedServer, append_rate
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run

_GOALS = {
    "rate against the small one, server ids": Goal("≥", 0.9),
    "rate against the small one, own ids": Goal("≥", 0.9),
    "own ids cost more than server ids by": Goal("≤", 0.7),
}
_KINDS = {"server ids": False, "own ids": True}


def _growth(run: Run) -> Iterator[Figure]:
    folders = {f"big, {kind}": run.state(own).folder for kind, own in _KINDS.items()}
    folders |= {f"small, {kind}": run.folder("small") for kind in _KINDS}
    rates_by_state = run.child("rate in, big and small in turn", rates, folders=folders, size=run.size_fields)
    for kind, own in _KINDS.items():
        small, big = rates_by_state[f"small, {kind}"], rates_by_state[f"big, {kind}"]
        state = run.state(own)
        yield of_rounds(f"at {run.size.small:,} sleepers, {kind}", small, "msg/s")
        yield of_rounds(f"at {state.sleepers:,} sleepers, {kind}", big, "msg/s")
        name = f"rate against the small one, {kind}"
        yield of_rounds(name, [a / b for a, b in zip(big, small, strict=True)], "×", goal=_GOALS[name])
        middle, last = state.checkpoints[-2:]
        while_sealing = (last.sleepers - middle.sleepers) / last.append_seconds
        yield Figure(f"while segments are sealed beside, {kind}", while_sealing, "msg/s", note="the mean of the whole build")
    name = "own ids cost more than server ids by"
    more = [1e6 / a - 1e6 / b for a, b in zip(rates_by_state["big, own ids"], rates_by_state["big, server ids"], strict=True)]
    yield Figure(
        name,
        statistics.median(more),
        "µs",
        goal=_GOALS[name],
        note=f"a message, {run.size.segments} segments: text, hashes, dedup",
    )


def rates(folders: dict[str, str], size: dict[str, Any]) -> dict[str, list[float]]:
    """In a child process: messages per second of each state, in turns."""
    shape = Size(**size)
    servers = {name: SimulatedServer(folder, shape.settings) for name, folder in folders.items()}
    loads = {name: Load(shape.batch, "own" in name, first=2 * shape.sleepers) for name in folders}
    for name, server in servers.items():
        while name.startswith("small") and server.sleepers < shape.small:
            server.append(loads[name].batch())
    measured: dict[str, list[float]] = {name: [] for name in folders}
    count = max(1, shape.round_batches // 4) * shape.batch
    rounds = 2 * shape.rounds
    for number in range(rounds):
        for name, server in servers.items():
            measured[name].append(append_rate(server.append, loads[name].next_batch, count))
            assert server.index.counters.duplicates == 0, "all of them are new"
        child.report_progress((number + 1) / rounds)
    return measured


growth = Benchmark("growth", "rate in at the full count against the rate at a fiftieth of it, batches of 1,000", _GOALS, _growth)
