"""Appending: batches and singles, with server-given and own ids, with and without a sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import child
from benchmarks.load import Load, Server, rate
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
        found = run.child(f"appending with {kind}", appends, folder=run.folder("append"), own=own, size=run.shape)
        by_disk = run.limits.write_bytes_s / found["document_bytes"]
        for name, limit, what in (
            ("batches", by_disk, "disk, sequential"),
            ("batches, due times as an array", by_disk, "disk, sequential"),
            ("one by one", run.limits.writes_s, "bare pwrite"),
        ):
            title = f"{name}, {kind}"
            yield of_rounds(title, found[name], "msg/s", goal=_APPEND.get(title), limit=limit, limit_of=what)


def appends(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """Runs in a process of its own: rounds of batches and of singles, interleaved; singles into a topic of their own."""
    shape = Size(**size)
    many, one = Server(f"{folder}/many"), Server(f"{folder}/one")
    load, singles = Load(shape.batch, own), Load(shape.batch, own)
    kinds: dict[str, tuple[Server, Callable[[], list[Batch]], int]] = {
        "batches": (many, load.one, shape.round_batches * shape.batch),
        "batches, due times as an array": (many, lambda: [load.batch(arrays=True)], shape.round_batches * shape.batch),
        "one by one": (one, lambda: singles.singles(min(100, shape.singles)), shape.singles),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(shape.rounds):
        for name, (server, make, count) in kinds.items():
            found[name].append(rate(server.append, make, count))
        child.say((number + 1) / shape.rounds)
    stats = many.index.stats()
    assert (stats.sleep, one.sleepers) == (load.next, singles.next), "every message sleeps"
    return {**found, "document_bytes": stats.bytes / stats.sleep}


append = Benchmark(
    "append",
    "append without fsync, checksums and index included: batches of 1,000 and one by one",
    _APPEND,
    _append,
)


def _durable(run: Run) -> Iterator[Figure]:
    for kind, own in _KINDS:
        found = run.child(f"durable appends with {kind}", durables, folder=run.folder("durable"), own=own, size=run.shape)
        batch_s = run.limits.sync_s + run.size.batch * found["document_bytes"] / run.limits.write_bytes_s
        yield of_rounds(
            f"batches, {kind}", found["batches"], "msg/s", limit=run.size.batch / batch_s, limit_of="fdatasync and disk"
        )
        yield of_rounds(
            f"one by one, {kind}", found["one by one"], "msg/s", limit=1 / run.limits.sync_s, limit_of="fdatasync of 4 KiB"
        )


def durables(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """Runs in a process of its own: the same through `Engine.submit`, which syncs every call."""
    shape = Size(**size)
    server, load = Server(folder), Load(shape.batch, own)
    found: dict[str, list[float]] = {"batches": [], "one by one": []}
    for number in range(shape.rounds):
        found["batches"].append(rate(server.submit, load.one, shape.durables // 2 * shape.batch))
        found["one by one"].append(rate(server.submit, lambda: load.singles(min(100, shape.durables)), shape.durables))
        child.say((number + 1) / shape.rounds)
    stats = server.index.stats()
    assert stats.sleep == load.next, "every message sleeps"
    return {**found, "document_bytes": stats.bytes / stats.sleep}


durable = Benchmark("durable", "append with fsync before the answer, one caller: batches of 1,000 and one by one", {}, _durable)
