"""Workloads of the comparison, through `Queue` and `Client` alone: ingest, sleep, drain, lateness.

Each is a function of a queue and an extent. It runs in a child process with its own server and returns plain figures. Messages
are made before the measurement and are equal for every queue. Lost, duplicate and early messages are counted, not asserted.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from benchmarks import child, probe
from benchmarks.load import own_id
from benchmarks.peers.model import Client, Put, Queue

Figures = dict[str, float]
CONNECTIONS = 4  # in batches, in and out
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_" * 4
DAY_MS = 86_400_000
_WARM_BATCHES = 20  # before an ingest rate is measured, for every queue alike
LEAD_MS = 200  # an ingest begins so long before lateness beside it counts
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
_PUT_INTERVAL_MS = 10  # between two puts of timed messages


@dataclass(frozen=True, slots=True)
class Extent:
    """The amounts of a run. Seconds are budgets: a queue that is too slow is stopped there."""

    rounds: int = 3
    batch: int = 1000
    messages: int = 600_000  # of a round of batches with bodies of 100 B; a fifth with bodies of 1,000 B
    seconds: float = 2.0  # for each of these
    single_seconds: float = 0.7
    connections: tuple[int, ...] = (1, 16, 64)
    sleepers: int = 500_000
    sleeper_seconds: float = 7.0  # to put them
    more: tuple[int, ...] = (1_000_000, 2_000_000)  # counts at which growth is measured, as far as the budget allows
    ours: tuple[int, ...] = (1_000_000, 10_000_000, 50_000_000)  # these counts for TurtleMQ
    window: int = 100_000  # messages of one rate measurement at a count of sleepers
    window_seconds: float = 2.0
    turns: int = 3  # rate measurements at each count
    drain: int = 200_000
    drain_seconds: float = 4.0  # to put them
    due_per_s: int = 2_000
    load_per_s: int = 20_000
    delays_ms: tuple[int, int] = (1_000, 5_000)
    late_seconds: float = 2.5  # alone, and again beside an ingest
    cancels: int = 1_000


FULL = Extent()
QUICK = Extent(
    rounds=1,
    messages=100_000,
    seconds=0.6,
    single_seconds=0.25,
    sleepers=50_000,
    sleeper_seconds=0.7,
    more=(50_000, 100_000),
    ours=(50_000, 200_000, 1_000_000),
    window=20_000,
    window_seconds=0.3,
    turns=1,
    drain=50_000,
    drain_seconds=0.8,
    delays_ms=(1_000, 1_500),
    late_seconds=0.8,
    cancels=100,
)
TINY = Extent(
    rounds=1,
    batch=50,
    messages=200,
    seconds=0.2,
    single_seconds=0.05,
    connections=(1, 3),
    sleepers=400,
    sleeper_seconds=0.3,
    more=(200, 400),
    ours=(200, 400, 800),
    window=100,
    window_seconds=0.1,
    turns=1,
    drain=300,
    drain_seconds=0.3,
    due_per_s=200,
    load_per_s=1_000,
    delays_ms=(300, 600),
    late_seconds=0.8,
    cancels=10,
)
EXTENTS = {"full": FULL, "quick": QUICK, "tiny": TINY}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def messages(count: int, body_bytes: int, first: int = 0, due_ms: int | None = None) -> list[Put]:
    """New messages, numbered from `first`, due at one instant, or at random over a day that begins a day from now.

    A body is the text of a JSON string, of random letters.
    """
    rng = np.random.default_rng(first)
    text = np.frombuffer(rng.bytes(count * body_bytes).translate(LETTERS), np.uint8).reshape(count, body_bytes).copy()
    text[:, 0] = text[:, -1] = ord('"')
    data, begin = text.tobytes(), _now_ms() + DAY_MS
    bodies = [data[at : at + body_bytes] for at in range(0, len(data), body_bytes)]
    dues = rng.integers(begin, begin + DAY_MS, count).tolist() if due_ms is None else [due_ms] * count
    return list(map(Put, map(own_id, range(first, first + count)), dues, bodies))


def batches(made: Sequence[Put], size: int) -> list[Sequence[Put]]:
    return [made[at : at + size] for at in range(0, len(made), size)]


async def connect(queue: Queue, count: int) -> list[Client]:
    return [await queue.client() for _ in range(count)]


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection, so that our collector does not disturb the measurement."""
    gc.collect()
    gc.freeze()


async def put_batches(clients: Sequence[Client], work: Iterable[Sequence[Put]], seconds: float) -> tuple[int, float]:
    """Put batches over several connections until all are stored or the time is over. Returns messages and seconds."""
    freeze_gc()
    waiting, done = iter(work), 0
    begin = time.perf_counter()

    async def one(client: Client) -> None:
        nonlocal done
        for batch in waiting:
            await client.put(batch)
            done += len(batch)
            if time.perf_counter() - begin > seconds:
                return

    await asyncio.gather(*map(one, clients))
    return done, time.perf_counter() - begin


def cpu_seconds(queue: Queue) -> float:
    """Processor time of all processes of a queue and their ended children."""
    return sum(map(probe.cpu_seconds, queue.pids()))


# In


async def ingest(queue: Queue, extent: Extent, seed: int) -> Figures:
    """Ingest rates: batches with small and with big bodies, and single messages over few and many connections."""
    await queue.start()
    clients = await connect(queue, CONNECTIONS)
    figures: Figures = {}
    first = seed << 32
    await put_batches(
        clients, batches(messages(_WARM_BATCHES * extent.batch, 100, first + (1 << 31)), extent.batch), extent.seconds
    )
    for body_bytes, count in ((100, extent.messages), (1_000, extent.messages // 5)):
        made = messages(count, body_bytes, first)
        first += count
        before = cpu_seconds(queue)
        done, taken = await put_batches(clients, batches(made, extent.batch), extent.seconds)
        figures[f"in, {body_bytes} B"] = done / taken
        figures[f"cpu, {body_bytes} B"] = (cpu_seconds(queue) - before) / done * 1e6
        child.report_progress(body_bytes / 2_000)
    for some in extent.connections:
        clients += await connect(queue, some - len(clients))
        made = messages(int(12_000 * extent.single_seconds), 100, first)
        first += len(made)
        done, taken = await put_batches(clients[:some], batches(made, 1), extent.single_seconds)
        figures[f"one by one, {some}"] = done / taken
    return figures


# Asleep


async def sleep(queue: Queue, extent: Extent, seed: int, counts: Sequence[int], fresh: Sequence[Queue] = ()) -> Figures:
    """Measure at counts of sleepers: memory, disk, cancels, the ingest rate against a fresh queue; then restart after SIGKILL.

    fresh: empty queues, one for each count, or none. A queue that is too slow for a count stops there.
    """
    await queue.start()
    clients = await connect(queue, CONNECTIONS)
    await wait_until_idle(queue)
    first, filled, beside = seed << 32, 0, 0
    figures: Figures = {"empty": queue.anonymous_bytes(), "cancelled": 0, "not cancelled": 0}
    for number, count in enumerate(counts):
        budget = extent.sleeper_seconds * max(1.0, (count - filled) / extent.sleepers)
        made = (messages(extent.batch, 100, first + at) for at in range(filled, count - beside, extent.batch))
        filled += (await put_batches(clients, made, budget))[0]
        await wait_until_idle(queue)
        now = {"sleepers": filled + beside - figures["cancelled"], "ram": queue.anonymous_bytes(), "disk": queue.disk_bytes()}
        now |= await cancel(clients[0], range(first + number, first + filled, len(counts)), extent.cancels)
        for name in ("cancelled", "not cancelled"):
            figures[name] += now.pop(name)
        enough = filled + beside >= count
        if number < len(fresh):
            rates, more = await compare_with_fresh(clients, fresh[number], extent, first + (number + 1 << 29))
            now |= rates
            beside += more
        figures |= {f"{name} {number}": value for name, value in now.items()}
        child.report_progress((number + 1) / (len(counts) + 1))
        if not enough:
            break
    return figures | await restart(queue, filled + beside, extent.rounds if fresh else 1)


async def wait_until_idle(queue: Queue, seconds: float = 120.0) -> None:
    """Wait until the server is idle, so that its background work does not count in the next measurement."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = cpu_seconds(queue)
        await asyncio.sleep(0.3)
        if cpu_seconds(queue) - before < 0.03:
            return


async def compare_with_fresh(clients: Sequence[Client], fresh: Queue, extent: Extent, first: int) -> tuple[Figures, int]:
    """The ingest rate now and that of a fresh queue, in turns. Returns the figures and the number of messages put."""
    await fresh.start()
    others = await connect(fresh, CONNECTIONS)
    rates: dict[str, list[float]] = {"rate": [], "fresh": []}
    stored = 0
    for turn in range(extent.turns):
        made = batches(messages(extent.window, 100, first + turn * extent.window), extent.batch)
        for name, some in (("rate", clients), ("fresh", others)):
            done, taken = await put_batches(some, made, extent.window_seconds)
            rates[name].append(done / taken)
            stored += done if name == "rate" else 0
    fresh.kill()
    figures = {name: float(np.median(values)) for name, values in rates.items()}
    return {**figures, "ratio": float(np.median([a / b for a, b in zip(rates["rate"], rates["fresh"], strict=True)]))}, stored


async def cancel(client: Client, numbers: range, count: int) -> Figures:
    """Cancel random messages one by one, by id."""
    chosen = random.Random(1).sample(numbers, min(count, len(numbers)))
    times, there = [], 0
    for n in chosen:
        begin = time.perf_counter()
        there += await client.cancel(own_id(n))
        times.append(1e3 * (time.perf_counter() - begin))
    return {
        "cancel p50": probe.percentile(times, 0.5),
        "cancel p99": probe.percentile(times, 0.99),
        "not cancelled": len(chosen) - there,
        "cancelled": there,
    }


async def restart(queue: Queue, stored: int, times: int) -> Figures:
    """Kill and start the server so many times. Returns the seconds of a start and the number of messages left."""
    taken, left = [], 0
    for _ in range(times):
        queue.kill()
        begin = time.perf_counter()
        await queue.start()
        taken.append(time.perf_counter() - begin)
        left = await queue.sleepers()
    return {"restart": float(np.median(taken)), "stored": stored, "left": left}


# Out


@dataclass(slots=True)
class Received:
    """Received messages with their times. Ids are counted after the measurement, since that is not work of the queue."""

    batches: list[tuple[float, list[str]]] = field(default_factory=list)  # time of the answer to a fetch, and its ids
    total: int = 0
    last: float = 0.0  # time of the answer to the last ack

    def counts(self) -> Counter[str]:
        """Deliveries by id."""
        return Counter(chain.from_iterable(ids for _, ids in self.batches))

    def at_ms(self) -> dict[str, float]:
        """Time of the first delivery by id."""
        return {id_: at for at, ids in reversed(self.batches) for id_ in ids}

    def note(self, ids: list[str]) -> None:
        """Note ids that were received now."""
        if ids:
            self.batches.append((time.time_ns() / 1e6, ids))
            self.total += len(ids)

    async def consume(self, client: Client, enough: asyncio.Event, total: int) -> None:
        """Fetch and ack until `total` messages were received."""
        while not enough.is_set():
            messages = await client.fetch(1000, 0.5)
            if not messages:
                continue
            ids = [id_ for id_, _ in messages]
            self.note(ids)
            await client.ack(ids)
            self.last = time.time_ns() / 1e6
            if self.total >= total:
                enough.set()

    async def consume_all(self, clients: Sequence[Client], expected: int, still_s: float) -> None:
        """Fetch and ack until all expected ids were received, even if some come twice, or until no more come."""
        while missing := expected - len(self.counts()):
            before, enough = self.total, asyncio.Event()
            takers = [asyncio.create_task(self.consume(client, enough, before + missing)) for client in clients]
            await wait_for_all(enough, self, still_s)
            await asyncio.gather(*takers)
            if self.total == before:
                return

    def verdict(self, sent: Sequence[Put]) -> Figures:
        """Numbers of lost, duplicate, unknown and early messages."""
        dues, at_ms = {put.id: put.due_ms for put in sent}, self.at_ms()
        return {
            "lost": len(dues.keys() - at_ms.keys()),
            "twice": self.total - len(at_ms),
            "strange": len(at_ms.keys() - dues.keys()),
            "early": sum(at_ms[id_] < due for id_, due in dues.items() if id_ in at_ms),
        }

    def lateness(self, due_ms: Sequence[tuple[str, int]]) -> Figures:
        """Quantiles of the milliseconds from due to received."""
        at_ms = self.at_ms()
        times = [at_ms[id_] - due for id_, due in due_ms if id_ in at_ms]
        return {name: probe.percentile(times, share) for name, share in SHARES.items() if times}


async def wait_for_all(enough: asyncio.Event, received: Received, still_s: float) -> None:
    """Wait until `enough` is set, or until no message came for so many seconds."""
    while not enough.is_set():
        before = received.total
        try:
            await asyncio.wait_for(enough.wait(), still_s)
        except TimeoutError:
            if received.total == before:
                enough.set()


async def drain(queue: Queue, extent: Extent, seed: int) -> Figures:
    """Drain rate: many messages due at one instant, from then until the last ack."""
    await queue.start()
    clients = await connect(queue, CONNECTIONS)
    trial = messages(min(5_000, extent.drain), 100, (seed << 32) + extent.drain)
    done, taken = await put_batches(clients, batches(trial, extent.batch), extent.drain_seconds / 4)
    count = int(min(extent.drain, max(extent.batch, done / taken * extent.drain_seconds)) // extent.batch * extent.batch)
    instant = _now_ms() + int(1_000 + 1_500 * count * taken / done + 3e-3 * count)
    made = messages(count, 100, seed << 32, instant)
    await put_batches(clients, batches(made, extent.batch), 60)
    late = max(0, _now_ms() - instant)  # the puts took longer than the trial, past the instant
    begin = instant + late + (1_000 if queue.whole_seconds else 0)
    await asyncio.sleep(begin / 1e3 - time.time() - 0.05)
    received = Received()
    await received.consume_all(clients, count, 5)
    received_count = len(received.counts())
    received.note([id_ for id_, _ in await clients[0].fetch(1000, 0.2)])
    return {"rate": received_count / ((received.last - begin) / 1e3), "count": count, **received.verdict(made)}


# On time


async def lateness(queue: Queue, extent: Extent, seed: int) -> Figures:
    """Lateness at a steady rate with delays of one to five seconds: alone, then beside an ingest."""
    await queue.start()
    begin_ms = _now_ms() + 1_500
    half_ms = int(1_000 * extent.late_seconds)
    loaded_ms = begin_ms + extent.delays_ms[1] + half_ms
    plan = timetable(begin_ms, 2 * half_ms, extent, seed << 32)
    asked = {put.id: put.due_ms for _, group in plan for put in group}
    load = batches(messages(int(extent.load_per_s * (extent.late_seconds + 1)), 100, (seed << 32) + len(asked)), extent.batch)
    received, enough = Received(), asyncio.Event()
    freeze_gc()
    clients = await connect(queue, 2)
    takers = [asyncio.create_task(received.consume(client, enough, len(asked))) for client in clients]
    pace_ms = 1_000 * extent.batch / extent.load_per_s
    beats = [(loaded_ms - LEAD_MS + pace_ms * n, batch) for n, batch in enumerate(load)]
    loader = asyncio.create_task(put_on_time(await queue.client(), beats, end_ms=loaded_ms + half_ms))
    sent = await put_on_time(await queue.client(), plan, whole_seconds=queue.whole_seconds)
    loaded = await loader
    await wait_for_all(enough, received, 3)
    await asyncio.gather(*takers)
    await received.consume_all(clients, len(asked), 3)
    figures = {"load": len(loaded) / (half_ms + LEAD_MS) * 1e3, **received.verdict(sent)}
    for phase, puts in (
        ("alone", [put for put in sent if put.due_ms < loaded_ms - LEAD_MS]),
        ("beside", [put for put in sent if loaded_ms <= put.due_ms < loaded_ms + half_ms]),
    ):
        late = received.lateness([(put.id, put.due_ms) for put in puts])
        late_asked = received.lateness([(put.id, asked[put.id]) for put in puts])
        figures |= {f"{phase} {share}": value for share, value in late.items()}
        figures |= {f"{phase} asked {share}": value for share, value in late_asked.items()}
    return figures


def timetable(begin_ms: int, length_ms: int, extent: Extent, first: int) -> list[tuple[float, list[Put]]]:
    """Times and messages to put, so that messages come due evenly as soon as the longest delay has passed."""
    rng = random.Random(first)
    slots: dict[int, list[Put]] = {}
    for n, put in enumerate(messages(extent.due_per_s * length_ms // 1000, 100, first)):
        due_ms = begin_ms + extent.delays_ms[1] + n * 1000 // extent.due_per_s
        at = due_ms - rng.randint(*extent.delays_ms)
        slots.setdefault(at - at % _PUT_INTERVAL_MS, []).append(Put(put.id, due_ms, put.body))
    return sorted(slots.items(), key=lambda slot: slot[0])


async def put_on_time(
    client: Client, plan: Iterable[tuple[float, Sequence[Put]]], *, whole_seconds: bool = False, end_ms: float = float("inf")
) -> list[Put]:
    """Put each group at its time, or at once if that has passed. Returns the messages that were put until the end.

    whole_seconds: delays are rounded up to whole seconds at the put, and the due times of the returned messages with them.
    """
    done: list[Put] = []
    for at_ms, group in plan:
        await asyncio.sleep(max(0.0, at_ms / 1e3 - time.time()))
        now = _now_ms()
        if now > end_ms:
            break
        if whole_seconds:
            group = [Put(put.id, now - (now - put.due_ms) // 1000 * 1000, put.body) for put in group]
        await client.put(group)
        done += group
    return done
