"""Growth: does the rate in fall as sleepers gather? A big state and a small one take turns, so that noise hits both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import child
from benchmarks.load import Load, Server, rate
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run

_GOALS = {
    "rate against the small one, server ids": Goal("≥", 0.9),
    "rate against the small one, own ids": Goal("≥", 0.9),
    "own ids cost more than server ids by": Goal("≤", 0.7),
}


def _growth(run: Run) -> Iterator[Figure]:
    each: dict[bool, float] = {}
    for kind, own in (("server ids", False), ("own ids", True)):
        state = run.state(own)
        arguments = {"big": state.folder, "small": run.folder("small"), "own": own, "size": run.shape}
        found = run.child(f"rate in with {kind}", rates, **arguments)
        yield of_rounds(f"at {run.size.small:,} sleepers, {kind}", found["small"], "msg/s")
        big = of_rounds(f"at {state.sleepers:,} sleepers, {kind}", found["big"], "msg/s")
        each[own] = 1e6 / big.value
        yield big
        name = f"rate against the small one, {kind}"
        shares = [a / b for a, b in zip(found["big"], found["small"], strict=True)]
        yield of_rounds(name, shares, "×", goal=_GOALS[name])
        middle, last = state.checkpoints[-2:]
        while_sealing = (last.sleepers - middle.sleepers) / last.append_seconds
        yield Figure(f"while segments are sealed beside, {kind}", while_sealing, "msg/s", note="the mean of the whole build")
    name = "own ids cost more than server ids by"
    yield Figure(name, each[True] - each[False], "µs", goal=_GOALS[name], note=f"a message, {run.size.segments} segments")


def rates(big: str, small: str, own: bool, size: dict[str, Any]) -> dict[str, list[float]]:
    """Runs in a process of its own: messages a second of both, turn by turn."""
    shape = Size(**size)
    small_load, big_load = Load(shape.batch, own), Load(shape.batch, own, first=2 * shape.sleepers)
    servers = {"small": (Server(small, shape.settings), small_load), "big": (Server(big, shape.settings), big_load)}
    while small_load.next < shape.small:
        servers["small"][0].append(small_load.batch())
    found: dict[str, list[float]] = {"small": [], "big": []}
    count = max(1, shape.round_batches // 4) * shape.batch
    rounds = 2 * shape.rounds
    for number in range(rounds):
        for name, (server, load) in servers.items():
            found[name].append(rate(server.append, load.one, count))
            assert server.index.shelf.counters.duplicates == 0, "all of them are new"
        child.say((number + 1) / rounds)
    return found


growth = Benchmark("growth", "rate in at the full count against the rate at a fiftieth of it, batches of 1,000", _GOALS, _growth)
