"""Codecs: decoding produce requests and encoding fetch answers, on one core, without HTTP and files. Each has an upper bound."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import msgspec
import numpy as np

from benchmarks import child
from benchmarks.load import BODY_BYTES, START_MS, TOPIC
from benchmarks.model import Figure, Goal, Size, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.model import BATCH_MESSAGES_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.segment.buffers import Buffer
from turtlemq.server.incoming.batches import DueRules, decode_slices
from turtlemq.server.incoming.json_messages import JsonMessage
from turtlemq.server.media_types import BSON, JSON, NDJSON
from turtlemq.server.outgoing.fetch import fetched_bson, fetched_json

_GOALS = {
    "BSON in": Goal("≥", 2_500_000),
    "JSON in": Goal("≥", 770_000),
    "BSON out": Goal("≥", 2_500_000),
    "JSON out": Goal("≥", 830_000),
    "longest step of a batch of 100,000 as BSON": Goal("≤", 5.0),
    "longest step of a batch of 100,000 as JSON": Goal("≤", 5.0),
}
_GROUP = "workers"
_STEPS = "longest step of a batch of 100,000 as "


def _run(run: Run) -> Iterator[Figure]:
    for title, work in (("reading batches", reads), ("writing batches", writes)):
        result = run.child(title, work, folder=run.folder("codec"), size=run.size_fields)
        for name, (rounds, size, bare) in result.items():
            limit, limit_of = bare or (run.limits.copy_bytes_s / size, "memcpy")
            note = f"{size:.0f} B each"
            yield of_rounds(name, rounds, "msg/s", goal=_GOALS.get(name), limit=limit, limit_of=limit_of, note=note)
    for kind, seconds in run.child("reading in steps", steps, size=run.size_fields).items():
        name = _STEPS + kind
        yield Figure(name, 1e3 * seconds, "ms", goal=_GOALS[name], note="the loop of the server waits that long at most")


# Functions that run in child processes


def _rates(works: dict[str, Callable[[], object]], shape: Size) -> dict[str, list[float]]:
    """Messages per second of each function, measured in turns."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    calls = max(1, shape.round_batches // 4)
    for number in range(shape.rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            rates[name].append(calls * shape.batch / (time.perf_counter() - begin))
        child.report_progress((number + 1) / shape.rounds)
    return rates


def _bodies(count: int, spread: int = 0) -> list[bytes]:
    """Random bodies, which favour no codec, of one length or with lengths `spread` around it."""
    random = np.random.default_rng(1)
    return [random.bytes(BODY_BYTES - spread + int(random.integers(2 * spread + 1))) for _ in range(count)]


def _value(body: bytes) -> dict[str, str]:
    """A JSON value with as many bytes as the body."""
    return {"order": body.hex()[: len(body) - 12]}


def request_body(count: int, kind: str, spread: int = 0) -> bytes:
    """The body of a usual produce request: each message has its own id, a delay and a body."""
    fields = [{"id": f"order-{i:08d}", "delay": 1800.5} for i in range(count)]
    bodies = _bodies(count, spread)
    if kind == BSON:
        return b"".join([bson.encode({**head, "body": body}) for head, body in zip(fields, bodies, strict=True)])
    batch = [{**head, "body": _value(body)} for head, body in zip(fields, bodies, strict=True)]
    return b"\n".join(map(msgspec.json.encode, batch)) if kind == NDJSON else msgspec.json.encode({"messages": batch})


def _decoded(data: bytes, kind: str) -> Batch:
    """A request body as a batch, read in slices without a pause."""
    steps = decode_slices(data, kind, START_MS, DueRules())
    try:
        while True:
            next(steps)
    except StopIteration as done:
        batch: Batch = done.value
        return batch


def reads(folder: str, size: dict[str, Any]) -> dict[str, Any]:
    """For each format of requests: rates, bytes of a message, and the upper bound of a rate in Python."""
    shape = Size(**size)
    shapes = {
        "BSON in": (BSON, 0),
        "BSON in, bodies of any length": (BSON, BODY_BYTES // 2),
        "JSON in": (JSON, 0),
        "NDJSON in": (NDJSON, 0),
    }
    data = {name: request_body(shape.batch, *what) for name, what in shapes.items()}
    works: dict[str, Callable[[], object]] = {
        name: lambda data=data[name], kind=kind: _decoded(data, kind)  # type: ignore[misc]
        for name, (kind, _) in shapes.items()
    }
    for name, (kind, _) in shapes.items():
        assert len(_decoded(data[name], kind)) == shape.batch, "every message is read"
    lines, spots = msgspec.json.Decoder(JsonMessage), [54 * i for i in range(shape.batch)]
    bson_data, json_data = data["BSON in"], data["NDJSON in"]
    works["slices"] = lambda: [bson_data[at : at + BODY_BYTES] for at in spots]
    works["typed"] = lambda: lines.decode_lines(json_data)
    rates = _rates(works, shape)
    slices, typed = float(np.median(rates.pop("slices"))), float(np.median(rates.pop("typed")))
    bounds = {
        name: (slices, "a slice of Python's each") if kind == BSON else (typed, "msgspec alone")
        for name, (kind, _) in shapes.items()
    }
    return {name: (rates[name], len(data[name]) / shape.batch, bounds[name]) for name in shapes}


def writes(folder: str, size: dict[str, Any]) -> dict[str, Any]:
    """For each format of fetch answers: rates and bytes of a message."""
    shape = Size(**size)
    held = {
        "bytes": _reserved(Path(folder) / "bytes", shape.batch),
        "any": _reserved(Path(folder) / "any", shape.batch, spread=BODY_BYTES // 2),
        "values": _reserved(Path(folder) / "values", shape.batch, values=True),
    }
    works: dict[str, Callable[[], list[Buffer]]] = {
        "BSON out": lambda: fetched_bson(held["bytes"]),
        "BSON out, bodies of any length": lambda: fetched_bson(held["any"]),
        "BSON out, JSON bodies": lambda: fetched_bson(held["values"]),
        "JSON out": lambda: fetched_json(held["values"]),
        "JSON out, bytes": lambda: fetched_json(held["bytes"]),
        "JSON out, bytes of any length": lambda: fetched_json(held["any"]),
    }
    assert len(bson.decode_all(b"".join(works["BSON out"]()))) == shape.batch, "every message is written"
    assert len(json.loads(b"".join(works["JSON out"]()))["messages"]) == shape.batch, "every message is written"
    rates = _rates(dict(works), shape)
    return {name: (rates[name], sum(map(len, work())) / shape.batch, None) for name, work in works.items()}


def _reserved(folder: Path, count: int, spread: int = 0, values: bool = False) -> Reserved:
    """Reserved messages, as a fetch answers them."""
    engine = Engine.open(folder)
    engine.move_group(TOPIC, _GROUP, "earliest", START_MS)
    bodies = _bodies(count, spread)
    batch = Batch([msgspec.json.encode(_value(body)) for body in bodies] if values else bodies, [START_MS] * count)
    batch.flags = [f.JSON] * count if values else None
    engine.submit(TOPIC, batch, START_MS)
    engine.tick(START_MS)
    messages = engine.reserve(TOPIC, _GROUP, count, START_MS)
    assert len(messages) == count, "all are reserved"
    return messages


def steps(size: dict[str, Any]) -> dict[str, float]:
    """Seconds of the longest decoding step of the largest batch: the median of the rounds."""
    shape = Size(**size)
    count = min(BATCH_MESSAGES_MAX, 100 * shape.batch)
    return {
        name: float(np.median([_longest(request_body(count, kind), kind) for _ in range(shape.rounds)])) for name, kind in _KINDS
    }


_KINDS = (("BSON", BSON), ("JSON", JSON))


def _longest(data: bytes, kind: str) -> float:
    reading, longest, batch = decode_slices(data, kind, START_MS, DueRules()), 0.0, None
    while batch is None:
        begin = time.perf_counter()
        try:
            next(reading)
        except StopIteration as done:
            batch = done.value
        longest = max(longest, time.perf_counter() - begin)
    return longest


codec = Benchmark("codec", "reading what producers send and writing what consumers get, batches of 1,000", _GOALS, _run)
