"""Maintenance: sealing a full segment, and compacting one with few sleepers left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import child, probe
from benchmarks.load import DUE_FROM_MS, DUE_TO_MS, Load, SimulatedServer
from benchmarks.model import Figure, Size
from benchmarks.run import Benchmark, Run
from turtlemq.index import seal as seals
from turtlemq.settings import Settings
from turtlemq.topic.maintenance import STEP_SLEEPERS


def _seal(run: Run) -> Iterator[Figure]:
    for kind, own in (("server ids", False), ("own ids", True)):
        result = run.child(f"sealing a segment with {kind}", seal_one, folder=run.folder("seal"), own=own, size=run.size_fields)
        limit = run.limits.write_bytes_s / result["bytes"] * result["count"]
        note = f"{result['count']:,} messages in {result['seconds']:.1f} s, {result['bytes'] / result['seconds'] / 1e6:,.0f} MB/s"
        rate = result["count"] / result["seconds"]
        yield Figure(f"one segment, {kind}", rate, "msg/s", limit=limit, limit_of="disk, sequential write", note=note)


def seal_one(folder: str, own: bool, size: dict[str, Any]) -> dict[str, float]:
    """In a child process: fill a segment and seal it."""
    shape = Size(**size)
    server, load = SimulatedServer(folder, Settings(segment_messages=shape.seal)), Load(shape.batch, own)
    while load.next_number + shape.batch <= shape.seal:
        server.append(load.batch())
        child.report_progress(load.next_number / shape.seal / 2)
    server.index.maintenance.roll()
    order = server.index.maintenance.seal_job(0)
    begin = time.perf_counter()
    done = seals.seal(server.engine.door.fresh(), order)
    taken = time.perf_counter() - begin
    server.index.maintenance.adopt(done)
    assert done.documents == server.sleepers == load.next_number, "everything sleeps on"
    return {"count": load.next_number, "seconds": taken, "bytes": done.size}


seal = Benchmark("seal", "rewrite a full segment in due order with its index, in one process", {}, _seal)


def _compact(run: Run) -> Iterator[Figure]:
    result = run.child("compacting", compact_one, folder=run.folder("compact"), size=run.size_fields)
    note = f"{result['moved']:,} of {run.size.compact:,}; in the background {STEP_SLEEPERS} a step"
    yield Figure("sleepers moved", result["moved"] / result["seconds"], "msg/s", note=note)
    yield Figure("a step, p99", 1e3 * result["p99"], "ms", limit=run.limits.sync_s * 1e3, limit_of="fdatasync of 4 KiB")


def compact_one(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """In a child process: 96 % of a sealed segment are handed off, then compaction moves the rest."""
    shape = Size(**size)
    server, load = SimulatedServer(folder, Settings(segment_messages=shape.compact)), Load(shape.batch)
    while load.next_number < shape.compact:
        server.append(load.batch())
    server.index.maintenance.roll()
    server.wait_until_sealed()
    server.now_ms = DUE_FROM_MS + (DUE_TO_MS - DUE_FROM_MS) * 96 // 100
    while server.fire():
        pass
    server.topic.checkpoint()
    left = server.sleepers
    assert 0 < left <= shape.compact * 0.05, "nearly everything was handed off"
    times, moved = [], 0
    while moved < left:
        begin = time.perf_counter()
        moved += server.index.maintenance.compact(0, STEP_SLEEPERS)
        times.append(time.perf_counter() - begin)
    assert (moved, server.sleepers) == (left, left), "each was moved once"
    return {"moved": moved, "seconds": sum(times), "p99": probe.percentile(times, 0.99)}


compact = Benchmark(
    "compact", "move the last sleepers of a segment into the active one, durably, so that it can go", {}, _compact
)
