"""Figures over HTTP, with one server and one client process.

Durable put rates, fetch and ack, lateness under load, memory of waiting connections and of a steady run.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import uvloop

from benchmarks import child, probe
from benchmarks.http_client import BSON, JSON, Connection, ServerProcess, ids_of, post_request, produce_request, repeat_for
from benchmarks.load import BODY_BYTES, TOPIC
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run
from turtlemq.server.metrics.delivery_steps import STEPS

_KINDS = {"JSON": JSON, "BSON": BSON}
_IN = {
    "batches of 1,000, JSON": Goal("≥", 300_000),
    "batches of 1,000, BSON": Goal("≥", 500_000),
    "server CPU for a million, JSON": Goal("≤", 1.8),
    "one by one, 64 connections": Goal("≥", 12_000),
}
_OUT = {"fetch and acknowledge, JSON": Goal("≥", 200_000), "fetch and acknowledge, BSON": Goal("≥", 400_000)}
_LOADS = {"alone": 0, "beside 20k msg/s": 20_000, "beside 100k msg/s": 100_000}
_SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_LATE_MS = {"alone": (1.0, 4.0, 8.0), "beside 20k msg/s": (1.2, 6.0, 12.0), "beside 100k msg/s": (1.5, 5.0, 15.0)}
_LATE = {
    f"{load}, {name}": Goal("≤", limit) for load, limits in _LATE_MS.items() for name, limit in zip(_SHARES, limits, strict=True)
}
_HOLD = {"10,000 long polls that wait": Goal("≤", 500.0), "growth over the second half of a steady run": Goal("≤", 20.0)}
_DUE_S = 2_000
_LOADERS, _CONSUMERS = 4, 2


def _in(run: Run) -> Iterator[Figure]:
    result = run.child("putting over HTTP", putting, folder=run.folder("http"), seconds=_seconds(run, 10), rounds=run.size.rounds)
    for kind in _KINDS:
        name = f"batches of 1,000, {kind}"
        yield of_rounds(name, result[name], "msg/s", goal=_IN[name], note="durable, 4 connections")
        name = f"server CPU for a million, {kind}"
        yield of_rounds(name, result[name], "s", goal=_IN.get(name))
        name = f"batches of 1,000, {kind}, bodies of 1,000 B"
        yield of_rounds(name, result[name], "msg/s")
    for count in (1, 64):
        name = f"one by one, {count} connections"
        yield of_rounds(name, result[name], "msg/s", goal=_IN.get(name), note="durable, JSON")


def _seconds(run: Run, full: float) -> float:
    """Seconds of a measurement: fewer in small sizes."""
    return {"full": full, "quick": full / 4}.get(run.size.name, 0.2)


def putting(folder: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """In a child process: put rates, formats in turns."""
    return uvloop.run(_putting(ServerProcess(folder), seconds / 5, rounds))


async def _putting(server: ServerProcess, seconds: float, rounds: int) -> dict[str, list[float]]:
    await server.ready()
    connections = [await server.connect() for _ in range(64)]
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        for kind, type_ in _KINDS.items():
            for size, more in ((BODY_BYTES, ""), (1_000, ", bodies of 1,000 B")):
                request = produce_request(f"{TOPIC}-{kind}-{size}", type_, 1_000, size, delay=3600)
                before, begin = server.cpu_seconds(), time.perf_counter()
                count = 1_000 * len(await repeat_for(connections[:4], request, seconds))
                rate = count / (time.perf_counter() - begin)
                rates.setdefault(f"batches of 1,000, {kind}{more}", []).append(rate)
                cpu = (server.cpu_seconds() - before) / count * 1e6
                rates.setdefault(f"server CPU for a million, {kind}{more}", []).append(cpu)
        for some in (1, 64):
            request, begin = produce_request(TOPIC, JSON, 1, BODY_BYTES, delay=3600), time.perf_counter()
            count = len(await repeat_for(connections[:some], request, seconds))
            rates.setdefault(f"one by one, {some} connections", []).append(count / (time.perf_counter() - begin))
        child.report_progress((number + 1) / rounds)
    return rates


# Out


def _out(run: Run) -> Iterator[Figure]:
    count = run.size.round_batches * run.size.batch
    result = run.child("fetching over HTTP", draining, folder=run.folder("http"), count=count, rounds=run.size.rounds)
    for name, rates in result.items():
        yield of_rounds(name, rates, "msg/s", goal=_OUT[name], note="4 connections, batches of 1,000")


def draining(folder: str, count: int, rounds: int) -> dict[str, list[float]]:
    """In a child process: due messages are fetched and acked."""
    return uvloop.run(_draining(ServerProcess(folder), count, rounds))


async def _draining(server: ServerProcess, count: int, rounds: int) -> dict[str, list[float]]:
    await server.ready()
    connections = [await server.connect() for _ in range(4)]
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        for kind, type_ in _KINDS.items():
            topic = f"{TOPIC}-{kind}-{number}"
            batch = min(1_000, count)
            request = produce_request(topic, type_, batch, BODY_BYTES)
            for _ in range(count // batch):
                await connections[0].call_ok(request)
            await asyncio.sleep(0.5)  # until they are handed off
            begin = time.perf_counter()
            done = sum(await asyncio.gather(*(drain(connection, topic, type_) for connection in connections)))
            rates.setdefault(f"fetch and acknowledge, {kind}", []).append(done / (time.perf_counter() - begin))
            assert done == count // batch * batch, "each came once"
        child.report_progress((number + 1) / rounds)
    return rates


async def drain(connection: Connection, topic: str, kind: str) -> int:
    """Fetch and acknowledge batches until nothing is ready. Returns the number of messages."""
    done = 0
    request = post_request(f"/v1/topics/{topic}/fetch", b'{"max":1000}', accept=kind)
    while ids := ids_of(await connection.call_ok(request), kind):
        await connection.call_ok(post_request(f"/v1/topics/{topic}/ack", msgspec.json.encode(ids)))
        done += len(ids)
    return done


# Lateness


def _late(run: Run) -> Iterator[Figure]:
    for beside, load in _LOADS.items():
        result = run.child(f"lateness, {beside}", lateness, folder=run.folder("http"), seconds=_seconds(run, 20), load=load)
        note = (
            f"{result['count']:,.0f} due at {_DUE_S:,}/s while {result['load']:,.0f}/s come in; the latest {result['max']:.1f} ms"
        )
        steps = "on average, ms: " + ", ".join(f"{step} {result[step]:.2f}" for step in STEPS if step in result)
        for name, more in zip(_SHARES, (note, steps, ""), strict=True):
            named = f"{beside}, {name}"
            yield Figure(named, result[name], "ms", goal=_LATE[named], note=more)


def lateness(folder: str, seconds: float, load: int) -> dict[str, float]:
    """In a child process: milliseconds from due to received, beside `load` messages per second that stay asleep."""
    return uvloop.run(lateness_of(ServerProcess(folder), seconds, load))


class Server(Protocol):
    """A server that is measured: a single node or the leader of a cluster."""

    async def ready(self) -> None: ...
    async def connect(self) -> Connection: ...


async def lateness_of(server: Server, seconds: float, load_s: int) -> dict[str, float]:
    """Milliseconds from due to received by percentile, the latest, and the counts of due messages and of those of the load."""
    await server.ready()
    stop = asyncio.Event()
    late: list[float] = []
    consumers = [asyncio.create_task(watch(await server.connect(), "timed", late, stop)) for _ in range(_CONSUMERS)]
    begin = time.monotonic()
    end = begin + seconds
    timed = asyncio.create_task(send_timed(server, end, "timed"))
    load = produce_request("load", JSON, 1_000, BODY_BYTES, delay=86_400)
    loads = []
    for n in range(_LOADERS if load_s else 0):
        interval = 1_000 * _LOADERS / load_s
        loads.append(asyncio.create_task(_every(interval, end, await server.connect(), lambda: load, interval * n / _LOADERS)))
    sent = await timed
    batches = sum([await task for task in loads])
    taken = time.monotonic() - begin
    for _ in range(200):
        if len(late) < sent:
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*consumers)
    assert len(late) == sent, f"{sent} were sent, {len(late)} came"
    assert min(late) >= 0, "never early"
    shares = {name: probe.percentile(late, share) for name, share in _SHARES.items()}
    steps = _steps((await (await server.connect()).call_ok(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode())
    return {**shares, **steps, "max": max(late), "count": len(late), "load": 1_000 * batches / taken}


def _steps(metrics: str) -> dict[str, float]:
    """Milliseconds of each step of a delivery, on average.

    >>> _steps('turtlemq_delivery_step_seconds_sum{step="wake"} 2\\nturtlemq_delivery_step_seconds_count{step="wake"} 8')
    {'wake': 250.0}
    """
    found = re.findall(r'turtlemq_delivery_step_seconds_(sum|count){step="(\w+)"} (\S+)', metrics)
    sums, counts = ({step: float(value) for kind, step, value in found if kind == wanted} for wanted in ("sum", "count"))
    return {step: 1_000 * seconds / counts[step] for step, seconds in sums.items() if counts[step]}


async def send_timed(server: Server, end: float, topic: str) -> int:
    """Put messages that are due one after the other, _DUE_S a second, each a second later. Returns how many."""
    each = _DUE_S // 100
    return each * await _every(0.01, end, await server.connect(), lambda: _soon(each, topic))


def _soon(count: int, topic: str) -> bytes:
    """A request with messages that are due one after the other, a second from now."""
    now = time.time_ns() // 1_000_000
    messages = [{"body": "x" * (BODY_BYTES - 2), "due_ms": now + 1_000 + 10 * n // count} for n in range(count)]
    return post_request(f"/v1/topics/{topic}/messages", msgspec.json.encode({"messages": messages}))


async def _every(interval: float, end: float, connection: Connection, request: Any, offset: float = 0) -> int:
    """Send a request every `interval` seconds, a late one at once. Returns their number."""
    at, count = time.monotonic() + offset, 0
    while at < end:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        await connection.call_ok(request())
        at, count = at + interval, count + 1
    return count


class _Due(msgspec.Struct):
    id: str
    due_ms: int


class _Dues(msgspec.Struct):
    messages: list[_Due]


async def watch(connection: Connection, topic: str, late: list[float], stop: asyncio.Event) -> None:
    """Fetch and acknowledge until the end, and note the milliseconds from due to received."""
    fetch = post_request(f"/v1/topics/{topic}/fetch", b'{"max":1000,"wait":0.5}')
    decoder = msgspec.json.Decoder(_Dues)
    while not stop.is_set():
        data = await connection.call_ok(fetch)
        now = time.time_ns() / 1e6
        messages = decoder.decode(data).messages
        late += [now - message.due_ms for message in messages]
        if messages:
            await connection.call_ok(
                post_request(f"/v1/topics/{topic}/ack", msgspec.json.encode([message.id for message in messages]))
            )


# Memory


def _hold(run: Run) -> Iterator[Figure]:
    count = {"full": 10_000, "quick": 10_000}.get(run.size.name, 20)
    name = "10,000 long polls that wait"
    result = run.child(name, holding, folder=run.folder("http"), count=count)
    yield Figure(name, result["bytes"] / 1e6, "MB", goal=_HOLD[name], note=f"{count:,} polls, the whole process")
    name = "growth over the second half of a steady run"
    seconds = {"full": 600.0, "quick": 20.0}.get(run.size.name, 0.5)
    result = run.child(name, steady, folder=run.folder("http"), seconds=seconds)
    note = f"{result['count']:,.0f} messages in and out in {seconds:,.0f} s; at the end {result['end'] / 1e6:,.0f} MB"
    yield Figure(name, (result["end"] - result["half"]) / 1e6, "MB", goal=_HOLD[name], note=note)


def holding(folder: str, count: int) -> dict[str, float]:
    """In a child process: anonymous memory of a server with `count` long polls."""
    return uvloop.run(_holding(ServerProcess(folder), count))


async def _holding(server: ServerProcess, count: int) -> dict[str, float]:
    await server.ready()
    poll = post_request("/v1/topics/quiet/fetch", b'{"max":1,"wait":60}')
    polls = []
    for n in range(count):
        polls.append(asyncio.create_task((await server.connect()).call_ok(poll)))
        if n % 500 == 0:
            await asyncio.sleep(0.05)
            child.report_progress(n / count)
    await asyncio.sleep(1)
    assert not any(task.done() for task in polls), "all of them wait"
    taken = server.anonymous_bytes()
    await (await server.connect()).call_ok(produce_request("quiet", JSON, min(count, 5_000), 10))
    done, _ = await asyncio.wait(polls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert done, "they are woken"
    return {"bytes": taken}


def steady(folder: str, seconds: float) -> dict[str, float]:
    """In a child process: messages are put, come due and are acked at a steady rate."""
    return uvloop.run(_steady(ServerProcess(folder), seconds))


async def _steady(server: ServerProcess, seconds: float) -> dict[str, float]:
    await server.ready()
    end = time.monotonic() + seconds
    request = produce_request("steady", JSON, 500, BODY_BYTES, delay=1)
    sending = asyncio.create_task(_every(0.02, end, await server.connect(), lambda: request))
    connection, half, count = await server.connect(), 0, 0
    fetch = post_request("/v1/topics/steady/fetch", b'{"max":1000,"wait":0.2}')
    while not sending.done():
        ids = ids_of(await connection.call_ok(fetch), JSON)
        if ids:
            await connection.call_ok(post_request("/v1/topics/steady/ack", msgspec.json.encode(ids)))
        count += len(ids)
        if not half and time.monotonic() > end - seconds / 2:
            half = server.anonymous_bytes()
        child.report_progress(1 - max(0.0, end - time.monotonic()) / seconds)
    await sending
    return {"half": half, "end": server.anonymous_bytes(), "count": count}


http_in = Benchmark("http-in", "producers over HTTP, durable: batches, single messages", _IN, _in)
http_out = Benchmark("http-out", "consumers over HTTP: fetch and acknowledge what is due", _OUT, _out)
http_late = Benchmark("http-late", "lateness from due to received, over HTTP, while others produce", _LATE, _late)
http_hold = Benchmark("http-hold", "memory of the server: waiting consumers, a steady run", _HOLD, _hold)
