"""Firing: due messages are found, read, checked and written to the ready log, from a warm and from a cold page cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import child, probe
from benchmarks.load import DUE_FROM_MS, DUE_TO_MS, Load, SimulatedServer
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.settings import Settings

_FIRE = {
    "one sealed segment": Goal("≥", 1_000_000),
    "twelve sealed segments": Goal("≥", 1_000_000),
    "the active segment": Goal("≥", 1_000_000),
}
_TRICKLE_MS = 10
_SHAPES = {"one sealed segment": 1, "twelve sealed segments": 12, "the active segment": 0}


def _fire(run: Run) -> Iterator[Figure]:
    for name, segments in _SHAPES.items():
        rounds = []
        for number in range(run.size.rounds):
            title = f"firing from {name}, round {number + 1}"
            rounds.append(run.child(title, burst, folder=run.folder("fire"), segments=segments, size=run.size_fields))
        limit = run.limits.write_bytes_s / rounds[0]["document_bytes"]
        rates = [result["rate"] for result in rounds]
        yield of_rounds(name, rates, "msg/s", goal=_FIRE[name], limit=limit, limit_of="disk, sequential write")
    steady = run.child("firing 1,000 at a time", trickle, folder=run.folder("fire"), size=run.size_fields)
    yield Figure("a tick with 1,000 due, twelve segments, p50", 1e3 * steady["p50"], "ms", note=f"{steady['ticks']} ticks")
    note = f"the longest {1e3 * steady['max']:.1f} ms: it syncs, or keeps house"
    yield Figure("a tick with 1,000 due, twelve segments, p99", 1e3 * steady["p99"], "ms", note=note)


def _server_with_sleepers(folder: str, count: int, segments: int, batch: int, due_to_ms: int = DUE_TO_MS) -> SimulatedServer:
    """A server with `count` sleepers in so many sealed segments; 0: in the active segment."""
    each = -(-count // max(1, segments) // batch) * batch
    server = SimulatedServer(folder, Settings(segment_messages=each) if segments else None)
    load = Load(batch, due_to_ms=due_to_ms)
    while load.next_number < each * max(1, segments):
        server.append(load.batch())
    if segments:
        server.index.maintenance.roll()
        server.wait_until_sealed()
    return server


def burst(folder: str, segments: int, size: dict[str, Any]) -> dict[str, float]:
    """In a child process: all messages come due at once."""
    shape = Size(**size)
    server = _server_with_sleepers(folder, shape.burst, segments, shape.batch)
    stats = server.index.stats()
    begin = time.perf_counter()
    _fire_all(server)
    taken = time.perf_counter() - begin
    assert server.sleepers == 0, "everything was handed off"
    assert server.topic.stores.broker.ready.next_offset == stats.sleep, "and accepted"
    return {"rate": stats.sleep / taken, "document_bytes": stats.bytes / stats.sleep, "count": stats.sleep}


def _fire_all(server: SimulatedServer, count: int | None = None) -> int:
    """Tick until all messages, or `count` of them, are handed off. The simulated clock runs at the speed of the real one."""
    total = server.sleepers if count is None else count
    begin, done, start = time.perf_counter(), 0, max(server.now_ms, DUE_TO_MS)
    while done < total:
        server.now_ms = start + int((time.perf_counter() - begin) * 1000)
        fired = server.fire()
        if not fired and server.sleepers == 0:
            break
        done += fired
        child.report_progress(done / total)
    return done


def trickle(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """In a child process: a tick every ten milliseconds of simulated time, each with about one batch due."""
    shape = Size(**size)
    until = DUE_FROM_MS + _TRICKLE_MS * shape.burst // shape.batch
    server = _server_with_sleepers(folder, shape.burst, 12, shape.batch, until)
    server.now_ms = DUE_FROM_MS
    times = []
    while server.now_ms < until:
        server.now_ms += _TRICKLE_MS
        times.append(probe.seconds(server.fire))
    assert server.sleepers == 0, "everything was handed off"
    return {"p50": probe.percentile(times, 0.5), "p99": probe.percentile(times, 0.99), "max": max(times), "ticks": len(times)}


fire = Benchmark("fire", "find due documents and hand them off to the ready log, warm, all due at one instant", _FIRE, _fire)


def hand_off(folder: str, count: int, size: dict[str, Any]) -> int:
    """In a child process: hand off so many sleepers of a state."""
    return _fire_all(SimulatedServer(folder, Size(**size).settings), count)


# Cold page cache


def _cold(run: Run) -> Iterator[Figure]:
    state = run.state()
    backlog = probe.files(state.topic)
    probe.evict(backlog)
    result = run.child("firing the whole backlog, cold", drain, folder=state.folder, size=run.size_fields)
    both = 1 / (1 / run.limits.read_bytes_s + 1 / run.limits.write_bytes_s)
    each = result["raw_bytes"] / result["count"]
    yield Figure(
        "rate",
        result["count"] / result["seconds"],
        "msg/s",
        limit=both / each,
        limit_of="disk, reading and writing in turn",
        note=f"{result['count']:,} messages",
    )
    limit, name = run.limits.read_bytes_s / 1e6, "disk, sequential read"
    read_rate = result["read_bytes"] / result["seconds"] / 1e6
    yield Figure("read from the disk", read_rate, "MB/s", limit=limit, limit_of=name)
    yield Figure(
        "bytes read for each byte handed off",
        result["read_bytes"] / result["raw_bytes"],
        "×",
        note="1.0 to 1.1 is sequential, keys and positions included; random reads of 4 KiB would be 20",
    )
    yield Figure("the longest tick, with the sync of the ready log", 1e3 * result["longest"], "ms")


def drain(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """In a child process: fire all sleepers of a state."""
    server = SimulatedServer(folder, Size(**size).settings, worker=True)
    count = server.sleepers
    raw_bytes = server.index.stats().bytes
    before, began, longest, done = probe.disk_io()[0], time.perf_counter(), 0.0, 0
    while done < count:
        server.now_ms = DUE_TO_MS + int((time.perf_counter() - began) * 1000)
        begin = time.perf_counter()
        done += server.fire()
        longest = max(longest, time.perf_counter() - begin)
        child.report_progress(done / count)
    taken, read = time.perf_counter() - began, probe.disk_io()[0] - before
    assert server.sleepers == 0, "everything was handed off"
    ready_log = probe.files(Path(folder), "ready_*.bson")
    assert probe.file_bytes(ready_log) > count, "and is in the ready log"
    return {"count": count, "seconds": taken, "read_bytes": read, "raw_bytes": raw_bytes, "longest": longest}


cold = Benchmark("cold", "fire a backlog of which nothing is in the page cache; the files are evicted first", {}, _cold)
