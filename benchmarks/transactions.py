"""Transactions of 100 operations against batches of 100 puts, over one connection, in turns.

All ids are the producer's own. Messages that are cancelled or rescheduled are put just before, in requests that are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import msgspec
import uvloop

from benchmarks import child
from benchmarks.http_client import Connection, ServerProcess, post_request
from benchmarks.load import BODY_BYTES, TOPIC
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run

_BATCH = "batch of 100 puts"
# Puts, cancels and reschedules of each kind of transaction
_KINDS = {
    "transaction of 100 puts": (100, 0, 0),
    "transaction of 100 cancels": (0, 100, 0),
    "mixed transaction: 50 puts, 25 cancels, 25 reschedules": (50, 25, 25),
    "mixed transaction: 34 puts, 33 cancels, 33 reschedules": (34, 33, 33),
}
_PARTS = ("processor time", "wall time")
_GOALS = {f"rate against batches, {name}, by {part}": Goal("≥", 0.5) for name in _KINDS for part in _PARTS}


def _run(run: Run) -> Iterator[Figure]:
    requests = {"full": 300, "quick": 100}.get(run.size.name, 3)
    found = run.child("transactions", comparing, folder=run.folder("http"), requests=requests, rounds=run.size.rounds)
    for name in (_BATCH, *_KINDS):
        for part in _PARTS:
            micros = [seconds * 1e6 for seconds in found[f"{name}, {part}"]]
            yield of_rounds(f"{name}, {part} of an operation", micros, "µs", note="durable, JSON, own ids, one connection")
    for name in _KINDS:
        for part in _PARTS:
            pairs = zip(found[f"{_BATCH}, {part}"], found[f"{name}, {part}"], strict=True)
            ratio = median((batch + 1e-9) / (other + 1e-9) for batch, other in pairs)
            figure = f"rate against batches, {name}, by {part}"
            yield Figure(figure, ratio, "×", goal=_GOALS[figure], note="the same run, in turns")


def comparing(folder: str, requests: int, rounds: int) -> dict[str, list[float]]:
    """In a child process: seconds for each operation of each kind, of the server's processor time and of the wall clock."""
    return uvloop.run(_comparing(ServerProcess(folder), requests, rounds))


async def _comparing(server: ServerProcess, requests: int, rounds: int) -> dict[str, list[float]]:
    await server.ready()
    connection, found = await server.connect(), dict[str, list[float]]()
    clock = ~server.process.pid << 3 | 2  # of its processor time: as clock_getcpuclockid(3) makes it
    for number in range(-1, rounds):  # the first round warms up
        for name in (_BATCH, *_KINDS):
            made = [await _request(connection, name, f"{number}-{n}") for n in range(requests)]
            begin, before = time.perf_counter(), time.clock_gettime(clock)
            for request in made:
                await connection.call_ok(request)
            taken = time.clock_gettime(clock) - before, time.perf_counter() - begin
            for part, seconds in zip(_PARTS, taken, strict=True):
                if number >= 0:
                    found.setdefault(f"{name}, {part}", []).append(seconds / requests / 100)
        child.report_progress((number + 2) / (rounds + 1))
    return found


async def _request(connection: Connection, name: str, number: str) -> bytes:
    """A request of this kind. The messages that it needs are put."""
    if name == _BATCH:
        return _batch(_ids("b", number, 100))
    (puts, cancels, moves), kind = _KINDS[name], list(_KINDS).index(name)
    new, ended, moved = _ids(f"p{kind}", number, puts), _ids(f"c{kind}", number, cancels), _ids(f"m{kind}", number, moves)
    if ended or moved:
        await connection.call_ok(_batch(ended + moved))
    body = {"put": _messages(new), "cancel": ended, "reschedule": [{"id": id_, "delay": 7_200} for id_ in moved]}
    return post_request(f"/v1/topics/{TOPIC}/transaction", msgspec.json.encode(body))


def _ids(kind: str, number: str, count: int) -> list[str]:
    return [f"{kind}-{number}-{n:03d}" for n in range(count)]


def _messages(ids: list[str]) -> list[dict[str, Any]]:
    return [{"id": id_, "delay": 3_600, "body": "x" * (BODY_BYTES - 2)} for id_ in ids]


def _batch(ids: list[str]) -> bytes:
    return post_request(f"/v1/topics/{TOPIC}/messages", msgspec.json.encode({"messages": _messages(ids)}))


transactions = Benchmark("transactions", "transactions of 100 operations against batches of 100 puts", _GOALS, _run)
