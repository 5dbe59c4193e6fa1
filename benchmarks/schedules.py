"""Recurring schedules: memory, disk and restart of many, and the lateness of many that fire at one moment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import child, probe
from benchmarks.http import watch
from benchmarks.http_client import Connection, ServerProcess, post_request
from benchmarks.load import BODY_BYTES, TOPIC
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.engine import Engine
from turtlemq.schedules import Schedule, Timing
from turtlemq.topic.schedule_store import StoredSchedule

_GOALS = {
    "memory while they are put": Goal("≤", 50.0),
    "memory after a restart": Goal("≤", 50.0),
    "restart, added to that of an empty topic": Goal("≤", 0.5),
    "lateness p99 against plain messages": Goal("≤", 2.0),
}
_DAY_MS = 86_400_000
_BATCH = 1_000
_CONNECTIONS, _CONSUMERS = 16, 2
_AHEAD_S, _PUT_S = 6, 0.003  # from the put of the last one to the moment at which all fire; and for each put


def _schedules(run: Run) -> Iterator[Figure]:
    count = {"full": 1_000_000, "quick": 100_000}.get(run.size.name, 2_000)
    filled, empty = run.folder("schedules"), run.folder("schedules")
    put = run.child("putting schedules", fill, folder=filled, count=count, size=run.size_fields)
    run.child("an empty topic", fill, folder=empty, count=0, size=run.size_fields)
    yield Figure(
        "memory while they are put",
        put["growth_bytes"] / 1e6,
        "MB",
        goal=_GOALS["memory while they are put"],
        note=f"{count:,} schedules",
    )
    yield Figure("disk for each", put["disk_bytes"] / count, "B", note=f"with a body of {BODY_BYTES} B, index included")
    pairs = [
        [run.child("opening the engine", reopen, folder=folder, size=run.size_fields) for folder in (filled, empty)]
        for _ in range(run.size.rounds)
    ]
    growth = [(one["bytes"] - other["bytes"]) / 1e6 for one, other in pairs]
    yield of_rounds("memory after a restart", growth, "MB", goal=_GOALS["memory after a restart"])
    longer = [one["seconds"] - other["seconds"] for one, other in pairs]
    name = "restart, added to that of an empty topic"
    yield of_rounds(name, longer, "s", goal=_GOALS[name], note=f"after kill -9, {count:,} schedules")
    at_once = {"full": 10_000, "quick": 5_000}.get(run.size.name, 50)
    yield from _lateness(run, at_once)


def _lateness(run: Run, count: int) -> Iterator[Figure]:
    rounds = run.child("firing at one moment", firing, folder=run.folder("http"), count=count, rounds=run.size.rounds)
    for kind in ("plain", "timed"):
        what = "plain messages" if kind == "plain" else "schedules"
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            values = [probe.percentile(late, share) for late in rounds[kind]]
            yield of_rounds(f"lateness of {what}, {name}", values, "ms", note=f"{count:,} due at one moment, over HTTP")
    ratios = [
        probe.percentile(timed, 0.99) / probe.percentile(plain, 0.99)
        for plain, timed in zip(rounds["plain"], rounds["timed"], strict=True)
    ]
    name = "lateness p99 against plain messages"
    yield of_rounds(name, ratios, "×", goal=_GOALS[name], note="in turns, round by round")


# In child processes


def fill(folder: str, count: int, size: dict[str, Any]) -> dict[str, float]:
    """Put so many schedules, in batches. Returns the growth of memory, and bytes on disk."""
    engine = Engine.open(Path(folder), settings=Size(**size).settings)
    topic = engine.topic(TOPIC, create=True)
    topic.commit()
    now_ms, before = time.time_ns() // 1_000_000, probe.anonymous_bytes()
    one = StoredSchedule(Schedule("", Timing(every_ms=_DAY_MS)), b"x" * BODY_BYTES, flags=0)
    for first in range(0, count, _BATCH):
        names = [f"customer-{n:07}" for n in range(first, min(first + _BATCH, count))]
        begun = [replace(one.schedule, name=name).begun(now_ms + n) for n, name in enumerate(names, first)]
        store = topic.stores.make_schedules()
        store.stage([one.changed(schedule) for schedule in begun], now_ms)
        store.commit()
        engine.changed(topic, now_ms)
        engine.tick(now_ms)
        child.report_progress(first / count)
    growth = probe.anonymous_bytes() - before
    return {"growth_bytes": growth, "disk_bytes": probe.file_bytes(probe.files(Path(folder), "**/*"))}


def reopen(folder: str, size: dict[str, Any]) -> dict[str, float]:
    """Open the engine after a kill. Returns the seconds, and the memory then."""
    begin = time.perf_counter()
    engine = Engine.open(Path(folder), settings=Size(**size).settings)
    seconds = time.perf_counter() - begin
    assert not engine.was_clean, "the process before was killed"
    engine.tick(time.time_ns() // 1_000_000)
    return {"seconds": seconds, "bytes": probe.anonymous_bytes()}


def firing(folder: str, count: int, rounds: int) -> dict[str, list[list[float]]]:
    """Milliseconds from due to received, of plain messages and of schedules, a list for each round, in turns."""
    return uvloop.run(_firing(ServerProcess(folder), count, rounds))


async def _firing(server: ServerProcess, count: int, rounds: int) -> dict[str, list[list[float]]]:
    await server.ready()
    out: dict[str, list[list[float]]] = {"plain": [], "timed": []}
    connections = [await server.connect() for _ in range(_CONNECTIONS)]
    for number in range(rounds):
        for topic, put in (("plain", _put_plain), ("timed", _put_schedules)):
            await put(connections, count, number)
            out[topic].append(await _received(server, topic, count))
    return out


async def _received(server: ServerProcess, topic: str, count: int) -> list[float]:
    """Take so many messages as they come. Returns the milliseconds from due to received."""
    stop, late = asyncio.Event(), list[float]()
    consumers = [asyncio.create_task(watch(await server.connect(), topic, late, stop)) for _ in range(_CONSUMERS)]
    for _ in range(1_200):
        if len(late) >= count:
            break
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*consumers)
    assert len(late) == count, f"{count} were to come, {len(late)} came"
    assert min(late) >= 0, "never early"
    return late


async def _put_plain(connections: list[Connection], count: int, _: int) -> None:
    due_ms = time.time_ns() // 1_000_000 + 1_000 * _AHEAD_S
    for first in range(0, count, _BATCH):
        messages = [{"body": "x" * (BODY_BYTES - 2), "due_ms": due_ms}] * min(_BATCH, count - first)
        await connections[0].call_ok(post_request("/v1/topics/plain/messages", msgspec.json.encode({"messages": messages})))


async def _put_schedules(connections: list[Connection], count: int, number: int) -> None:
    """Their start is the moment at which all fire: so late that the slowest machine has put them by then."""
    start_ms = int((time.time() + _AHEAD_S + count * _PUT_S) * 1000)
    shares = [range(n, count, len(connections)) for n in range(len(connections))]
    await asyncio.gather(*(_put_some(one, share, number, start_ms) for one, share in zip(connections, shares, strict=True)))
    assert time.time() * 1000 < start_ms - 1_000 * (_AHEAD_S - 2), "they were put in time"


async def _put_some(connection: Connection, names: range, number: int, start_ms: int) -> None:
    data = json.dumps({"every": 86_400, "start_ms": start_ms, "body": "x" * (BODY_BYTES - 2)}).encode()
    for n in names:
        head = f"PUT /v1/topics/timed/schedules/{number}-{n} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await connection.call_ok(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)


schedules = Benchmark(
    "schedules",
    "recurring schedules: memory, disk and restart of a million, lateness of 10,000 at one moment",
    _GOALS,
    _schedules,
)
