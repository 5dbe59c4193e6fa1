"""Figures of streams and callbacks: rates with the processor time of both sides, lateness beside the long poll, idle streams.

The client shares the processors with the server. One on h2 shows the limit of the server, grpcio that of an ordinary client.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import child, grpc_java, probe
from benchmarks.grpc_client import ClientMessage, ServerMessage, Streams, schedule, with_grpcio
from benchmarks.http import lateness_of, send_timed
from benchmarks.http_client import JSON, ServerProcess, post_request, produce_request
from benchmarks.load import BODY_BYTES
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.run import Benchmark, Run

PUT, PUT_GRPCIO, OUT = "schedule and ack", "schedule and ack, grpcio", "deliver and ack"
PUT_JAVA, OUT_JAVA = f"{PUT}, Java", f"{OUT}, Java"
ON_ONE = ", by processor time of both"
LATE, IDLE, MOVED, SENT = "lateness p99, of the long poll's", "idle streams", "share of a killed client moves", "callbacks"
GOALS = {
    PUT: Goal("≥", 20_000),
    PUT + ON_ONE: Goal("≥", 20_000),
    OUT: Goal("≥", 15_000),
    OUT + ON_ONE: Goal("≥", 15_000),
    LATE: Goal("≤", 1.0),
    IDLE: Goal("≤", 400),
    MOVED: Goal("≤", 1.0),
}
if not grpc_java.missing():
    GOALS |= {PUT_JAVA: Goal("≥", 20_000), OUT_JAVA: Goal("≥", 15_000)}
JAVA_WARM = 2  # rounds before those that count
STREAMS = 100  # of a connection
CALLBACK_CAPACITY = 256
Found = dict[str, list[float]]


def _grpc(run: Run) -> Iterator[Figure]:
    count = {"full": 100_000, "quick": 20_000}.get(run.size.name, 500)
    idle = {"full": 10_000, "quick": 10_000}.get(run.size.name, 200)
    pairs, seconds = {"full": (12, 4.0), "quick": (12, 2.0)}.get(run.size.name, (1, 0.5))
    sizes = {"count": count, "idle": idle, "rounds": run.size.rounds, "pairs": pairs, "seconds": seconds}
    found: Found = run.child("streams", measuring, folder=run.folder("grpc"), **sizes)
    for name in (name for name in (PUT, PUT_GRPCIO, PUT_JAVA, OUT, OUT_JAVA) if name in found):
        yield of_rounds(name, found[name], "msg/s", goal=GOALS.get(name), note=_both(found, name))
        spent = [a + b for a, b in zip(found[f"{name} server"], found[f"{name} client"], strict=True)]
        rates = [1e6 / max(each, 0.1) for each in spent]
        yield of_rounds(name + ON_ONE, rates, "msg/s", goal=GOALS.get(name + ON_ONE), note="on one processor")
    note = " and ".join(f"{statistics.median(found[f'lateness {who}']):.2f} ms {who}" for who in ("stream", "long poll"))
    ratios = [a / b for a, b in zip(found["lateness stream"], found["lateness long poll"], strict=True)]
    yield of_rounds(LATE, ratios, "×", goal=GOALS[LATE], note=f"{note}; {len(ratios)} pairs in turns")
    yield Figure(IDLE, found[IDLE][0] / 1e6, "MB", goal=GOALS[IDLE], note=f"{idle:,} streams on {idle // STREAMS} connections")
    yield of_rounds(MOVED, found[MOVED], "s", goal=GOALS[MOVED], note="one of three under load; nothing was lost")


def _both(found: Found, name: str) -> str:
    server, client = (statistics.median(found[f"{name} {side}"]) for side in ("server", "client"))
    return f"processor time a message: server {server:.1f} µs, client {client:.1f} µs"


def measuring(folder: str, count: int, idle: int, rounds: int, pairs: int, seconds: float) -> Found:
    """In a child process: all figures of streams. `pairs`: of measurements of lateness, each of so many seconds."""
    return uvloop.run(_measuring(folder, count, idle, rounds, pairs, seconds))


async def _measuring(folder: str, count: int, idle: int, rounds: int, pairs: int, seconds: float) -> Found:
    server, found = ServerProcess(str(Path(folder) / "data"), grpc=True), Found()
    await server.ready()
    await _put(server, min(count, 5_000), "warm")  # caches are warm then
    if not grpc_java.missing():
        await _java(server, found, Path(folder) / "java", count, rounds)
    for number in range(rounds):
        await _rate(server, found, PUT, count, partial(_put, server, count, f"in-{number}"))
        few = max(1, count // 4)
        await _rate(server, found, PUT_GRPCIO, few, partial(_put_grpcio, server, few, f"grpcio-{number}"))
        await _fill(server, f"out-{number}", count)
        await _rate(server, found, OUT, count, partial(_out, server, f"out-{number}", count))
        found.setdefault(MOVED, []).append(await _killed(server, f"killed-{number}", max(300, count // 10)))
        child.report_progress((number + 1) / (rounds + 1))
    await _late_pairs(server, found, pairs, seconds)
    found[IDLE] = [await _idle(server, idle)]
    return found


async def _late_pairs(server: ServerProcess, found: Found, pairs: int, seconds: float) -> None:
    """Lateness over a stream, and over two long polls of which one waits while the other acknowledges. Measured in turns, each
    first in every second pair: a disk or a neighbour that is busy for a while meets both."""

    async def poll() -> float:
        return (await lateness_of(server, seconds, 0))["p99"]

    async def stream() -> float:
        return await _lateness(server, seconds)

    for number in range(pairs):
        turns = [("lateness long poll", poll), ("lateness stream", stream)]
        for name, measured in turns if number % 2 else reversed(turns):
            found.setdefault(name, []).append(await measured())


async def _java(server: ServerProcess, found: Found, folder: Path, count: int, rounds: int) -> None:
    """A client in Java: streams in and out, some of them first, until its code is compiled."""
    client = await asyncio.to_thread(grpc_java.JavaClient, folder, server.grpc_port)
    for number in range(-JAVA_WARM, rounds):
        noted, topic = found if number >= 0 else Found(), f"java-{number}"
        put = partial(asyncio.to_thread, client.run, "put", f"{topic}-in", count, BODY_BYTES)
        await _rate(server, noted, PUT_JAVA, count, put, client.cpu_seconds)
        await _fill(server, topic, count)
        take = partial(asyncio.to_thread, client.run, "take", topic, count)
        await _rate(server, noted, OUT_JAVA, count, take, client.cpu_seconds)
    client.close()


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _rate(
    server: ServerProcess,
    found: Found,
    name: str,
    count: int,
    work: Callable[[], Awaitable[float]],
    client_seconds: Callable[[], float] = _own_seconds,
) -> None:
    """Note messages per second, and the processor time of a message on both sides."""
    before, own = server.cpu_seconds(), client_seconds()
    taken = await work()
    found.setdefault(name, []).append(count / taken)
    found.setdefault(f"{name} client", []).append(1e6 * (client_seconds() - own) / count)
    found.setdefault(f"{name} server", []).append(1e6 * (server.cpu_seconds() - before) / count)


async def _put(server: ServerProcess, count: int, topic: str) -> float:
    from turtlemq.server.grpc.framing import frame

    done, left = asyncio.get_running_loop().create_future(), count

    def received(_: int, messages: list[bytes]) -> None:
        nonlocal left
        left -= len(messages)
        if left == 0:
            done.set_result(None)

    streams, data = await Streams.open(server.grpc_port, received), frame(schedule(count, b"x" * BODY_BYTES, topic))
    begin = time.perf_counter()
    streams.send(streams.begin(), data)
    await done
    streams.close()
    return time.perf_counter() - begin


async def _put_grpcio(server: ServerProcess, count: int, topic: str) -> float:
    return await asyncio.to_thread(with_grpcio, server.grpc_port, schedule(count, b"x" * BODY_BYTES, topic))


async def _fill(server: ServerProcess, topic: str, count: int) -> None:
    connection = await server.connect()
    for at in range(0, count, 1_000):
        await connection.call_ok(produce_request(topic, JSON, min(1_000, count - at), BODY_BYTES))
    connection.close()
    await asyncio.sleep(0.5)  # until they are handed off


class _Consumer:
    """A stream that acknowledges each delivery, unless it only holds them. `seen`: is called with the messages."""

    def __init__(self, topic: str, seen: Callable[[list[Any]], object], acks: bool = True) -> None:
        self._topic, self._seen, self._acks = topic, seen, acks

    async def start(self, port: int) -> None:
        self.streams = await Streams.open(port, self._received)
        self.streams.begin({"register": {"route_key": self._topic}})

    def _received(self, stream: int, messages: list[bytes]) -> None:
        from turtlemq.server.grpc.framing import frame

        told = [ServerMessage.FromString(data) for data in messages]
        deliveries = [one.delivery for one in told if one.HasField("delivery")]
        if deliveries and self._acks:
            acks = [ClientMessage(ack={"id": one.id}).SerializeToString() for one in deliveries]
            self.streams.send(stream, frame(acks))
        self._seen(deliveries)


async def _out(server: ServerProcess, topic: str, count: int) -> float:
    left, done = count, asyncio.get_running_loop().create_future()

    def seen(deliveries: list[Any]) -> None:
        nonlocal left
        left -= len(deliveries)
        if left == 0:
            done.set_result(None)

    begin, consumer = time.perf_counter(), _Consumer(topic, seen)
    await consumer.start(server.grpc_port)
    await done
    taken = time.perf_counter() - begin
    consumer.streams.close()
    return taken


async def _lateness(server: ServerProcess, seconds: float) -> float:
    """Milliseconds from due to received over a stream: the 99th percentile. Messages as those for the long polls."""
    late = list[float]()

    def seen(deliveries: list[Any]) -> None:
        late.extend(consumer.streams.came_ms - one.fire_at_epoch_ms for one in deliveries)

    consumer = _Consumer("late", seen)
    await consumer.start(server.grpc_port)
    sent = await send_timed(server, time.monotonic() + seconds, "late")
    while len(late) < sent:  # noqa: ASYNC110 - a look costs nothing here, nor below
        await asyncio.sleep(0.02)
    assert min(late) >= 0, "never early"
    consumer.streams.close()
    return probe.percentile(late, 0.99)


async def _killed(server: ServerProcess, topic: str, count: int) -> float:
    """Seconds until others have what one of three clients held when its connection was cut, under load."""
    held, others = dict[str, None](), dict[str, float]()
    clients = [_Consumer(topic, lambda got: held.update((one.id, None) for one in got), acks=False)]
    clients += [_Consumer(topic, lambda got: others.update((one.id, time.perf_counter()) for one in got)) for _ in range(2)]
    for one in clients:
        await one.start(server.grpc_port)
    filling = asyncio.create_task(_fill(server, topic, count))
    while not held:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    begin = time.perf_counter()
    clients[0].streams.close()
    lost = set(held)
    await filling
    async with asyncio.timeout(60):
        while len(others) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert lost <= set(others), "nothing was lost"
    for one in clients[1:]:
        one.streams.close()
    return max(others[id_] for id_ in lost) - begin


async def _idle(server: ServerProcess, count: int) -> float:
    """Bytes that so many idle streams of consumers add to the server."""
    registered, done = 0, asyncio.get_running_loop().create_future()

    def received(_: int, messages: list[bytes]) -> None:
        nonlocal registered
        registered += len(messages)
        if registered == count:
            done.set_result(None)

    await asyncio.sleep(1)
    before, opened = server.anonymous_bytes(), list[Streams]()
    for n in range(count // STREAMS):
        opened.append(await Streams.open(server.grpc_port, received))
        for k in range(STREAMS):
            opened[-1].begin({"register": {"route_key": f"idle-{(n * STREAMS + k) % 10}"}})
    await done
    await asyncio.sleep(2)
    added = server.anonymous_bytes() - before
    for one in opened:
        one.close()
    return added


# Callbacks


def _push(run: Run) -> Iterator[Figure]:
    count = {"full": 20_000, "quick": 5_000}.get(run.size.name, 200)
    found: Found = run.child("callbacks", calling, folder=run.folder("push"), count=count, rounds=run.size.rounds)
    yield of_rounds(SENT, found[SENT], "msg/s", note=f"one endpoint, {CALLBACK_CAPACITY} at once; {_both(found, SENT)}")


def calling(folder: str, count: int, rounds: int) -> Found:
    """In a child process: callbacks a second."""
    return uvloop.run(_calling(folder, count, rounds))


async def _calling(folder: str, count: int, rounds: int) -> Found:
    server, found = ServerProcess(str(Path(folder) / "data"), TURTLEMQ_PUSH_HOSTS="127.0.0.0/8:*"), Found()
    await server.ready()
    receiver = await asyncio.get_running_loop().create_server(_Receiver, "127.0.0.1", 0)
    asked = {
        "ttl": 0,
        "url": f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/",
        "capacity": CALLBACK_CAPACITY,
        "name": "one",
    }
    control = await server.connect()
    for number in range(rounds):
        topic = f"push-{number}"
        await _fill(server, topic, count)
        _Receiver.count = 0
        path = f"/v1/topics/{topic}/groups/default/clients"
        await control.call_ok(post_request(path, msgspec.json.encode(asked)))
        await _rate(server, found, SENT, count, partial(_until_called, count))
        child.report_progress((number + 1) / rounds)
    receiver.close()
    control.close()
    return found


async def _until_called(count: int) -> float:
    begin = time.perf_counter()
    while _Receiver.count < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return time.perf_counter() - begin


class _Receiver(asyncio.Protocol):
    """Answers each request of a connection with 200, and a challenge with its text."""

    count = 0  # callbacks of all connections

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n") + 4) >= 4:
            head = self._data[:end].lower()
            whole = end + int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
            if len(self._data) < whole:
                return
            is_challenge = b"turtlemq-challenge: " in head
            body = self._data[end:whole] if is_challenge else b""
            self._data = self._data[whole:]
            type(self).count += not is_challenge
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


grpc = Benchmark("grpc", "streams: rates, lateness beside the long poll, idle ones, one of three killed", GOALS, _grpc)
push = Benchmark("push", "callbacks a second, with the processor time of both sides", {}, _push)
