"""Appends: batches and single messages, with ids of the server and of the producer, without and with a sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import child
from benchmarks.load import Load, SimulatedServer, append_rate
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.model import Batch

_APPEND = {
    "batches, server ids": Goal("≥", 700_000),
    "one by one, server ids": Goal("≥", 60_000),
}
_KINDS = (("server ids", False), ("own ids", True))


def _append(run: Run) -> Iterator[Figure]:
    for kind, own in _KINDS:
        result = run.child(f"appending with {kind}", appends, folder=run.folder("append"), own=own, size=run.size_fields)
        by_disk = run.limits.write_bytes_s / result["document_bytes"]
        for name, limit, what in (
            ("batches", by_disk, "disk, sequential"),
            ("batches, due times as an array", by_disk, "disk, sequential"),
            ("one by one", run.limits.writes_s, "bare pwrite"),
        ):
            title = f"{name}, {kind}"
            yield of_rounds(title, result[name], "msg/s", goal=_APPEND.get(title), limit=limit, limit_of=what)


def appends(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """In a child process: rounds of batches and of single messages in turns; the singles go into another folder."""
    shape = Size(**size)
    many, one = SimulatedServer(f"{folder}/many"), SimulatedServer(f"{folder}/one")
    load, singles = Load(shape.batch, own), Load(shape.batch, own)
    kinds: dict[str, tuple[SimulatedServer, Callable[[], list[Batch]], int]] = {
        "batches": (many, load.next_batch, shape.round_batches * shape.batch),
        "batches, due times as an array": (many, lambda: [load.batch(arrays=True)], shape.round_batches * shape.batch),
        "one by one": (one, lambda: singles.singles(min(100, shape.singles)), shape.singles),
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(shape.rounds):
        for name, (server, make, count) in kinds.items():
            rates[name].append(append_rate(server.append, make, count))
        child.report_progress((number + 1) / shape.rounds)
    stats = many.index.stats()
    assert (stats.sleep, one.sleepers) == (load.next_number, singles.next_number), "every message sleeps"
    return {**rates, "document_bytes": stats.bytes / stats.sleep}


append = Benchmark(
    "append",
    "append without fsync, checksums and index included: batches of 1,000 and one by one",
    _APPEND,
    _append,
)


def _durable(run: Run) -> Iterator[Figure]:
    for kind, own in _KINDS:
        result = run.child(f"durable appends with {kind}", durables, folder=run.folder("durable"), own=own, size=run.size_fields)
        batch_s = run.limits.sync_s + run.size.batch * result["document_bytes"] / run.limits.write_bytes_s
        yield of_rounds(
            f"batches, {kind}", result["batches"], "msg/s", limit=run.size.batch / batch_s, limit_of="fdatasync and disk"
        )
        yield of_rounds(
            f"one by one, {kind}", result["one by one"], "msg/s", limit=1 / run.limits.sync_s, limit_of="fdatasync of 4 KiB"
        )


def durables(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """In a child process: rounds of batches and of single messages through `Engine.submit`, which syncs every call."""
    shape = Size(**size)
    server, load = SimulatedServer(folder), Load(shape.batch, own)
    rates: dict[str, list[float]] = {"batches": [], "one by one": []}
    for number in range(shape.rounds):
        rates["batches"].append(append_rate(server.submit, load.next_batch, shape.durables // 2 * shape.batch))
        rates["one by one"].append(append_rate(server.submit, lambda: load.singles(min(100, shape.durables)), shape.durables))
        child.report_progress((number + 1) / shape.rounds)
    stats = server.index.stats()
    assert stats.sleep == load.next_number, "every message sleeps"
    return {**rates, "document_bytes": stats.bytes / stats.sleep}


durable = Benchmark("durable", "append with fsync before the answer, one caller: batches of 1,000 and one by one", {}, _durable)
