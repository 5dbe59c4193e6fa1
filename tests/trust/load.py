"""A real server with more to do than is comfortable: crowds, slow readers, everything due at once, many topics, many groups.

Each case is a scenario, first all in their small forms, then all in full. Beside each one, messages come one after another
through a quiet topic of their own, and every long poll there must bring one: another topic's load stalls no client, and no
wake-up is lost. Nothing is lost or repeated or early, shares are fair, and the server's own memory has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.probe import anonymous_bytes
from tests.harness.grpc_process import grpc_running
from tests.harness.server_process import Server
from tests.trust.kills import calm
from tests.trust.kills_model import now_ms
from tests.trust.load_book import TTR_S, Book, fair, put, take
from tests.trust.load_streams import streams
from tests.trust.load_wire import Wire, all_wait, run_loop
from tests.trust.model import Broken, Figures, Part, figures

MEMORY_BYTES = 500 << 20  # more than any scenario needs by half
MEMORY = "MiB at most in"  # a figure, followed by a case's name
PATIENCE_S = 600  # for a scenario; a stalled one never ends
STALL_S = 30.0  # a message of a quiet topic comes within this time, however busy the machine
FILES_MAX = 500  # that are open for topics that rest, however many there are
ROUNDS = 5  # that each of a crowd has at least: a share of less than that says nothing

Scenario = Callable[[Server, bool], Awaitable[Figures]]


async def quiet(server: Server, topic: str = "quiet") -> int:
    """A message after the other through a topic of its own, until cancelled. How many came; each poll must bring its one."""
    count = 0
    async with Wire.to(server) as producer, Wire.to(server) as consumer:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                consumer.send(f"{topic}/fetch", {"wait": STALL_S, "ttr": TTR_S})
                (id_,) = (await producer.call(f"{topic}/messages", {"body": count, "delay": 0.05}))["ids"]
                found = [message["id"] for message in (await consumer.receive())["messages"]]
                if found != [id_]:
                    raise Broken(f"a quiet topic waited {STALL_S:.0f} s for its message: {found} for {id_}")
                await consumer.call(f"{topic}/ack", found)
                count += 1
    return count


async def crowd(server: Server, full: bool) -> Figures:
    """A thousand producers and a thousand consumers at once, on ten topics."""
    people, topics, seconds = 1_000, 10, 60 if full else 5
    book, put_by, got_by, by_topic = Book(), Counter[int](), Counter[int](), Counter[int]()
    all_here = asyncio.Barrier(2 * people)  # shares are of the time in which all clients were there

    async def produce(number: int) -> None:
        dice = random.Random(number)
        async with Wire.to(server) as wire:
            await all_here.wait()
            end = time.monotonic() + seconds
            while time.monotonic() < end or put_by[number] < ROUNDS:
                ids = [f"{number}-{put_by[number]}-{i}" for i in range(4)]
                await put(wire, book, f"c{number % topics}", ids, delay=dice.choice([0, dice.random()]))
                put_by[number] += 1

    async def consume(number: int) -> None:
        async with Wire.to(server) as wire:
            await all_here.wait()
            while not book.all_came.is_set():
                count = await take(wire, book, f"c{number % topics}", 4)
                got_by[number] += count
                by_topic[number % topics] += count

    async with asyncio.TaskGroup() as tasks:
        for number in range(people):
            tasks.create_task(consume(number))
        async with asyncio.TaskGroup() as producing:
            for number in range(people):
                producing.create_task(produce(number))
        seen = await book.close()
    fair("producers", put_by.values(), full)
    fair("consumers", (got_by[number] for number in range(people)), full)
    fair("topics", by_topic.values(), full)
    return seen


async def slow(server: Server, full: bool) -> Figures:
    """Consumers that take four megabytes and hardly read them, and others that hold their messages until the lease ends."""
    people, size, ttr = 40 if full else 10, 1_000, 4
    book, slept = Book(), Counter[str]()
    async with Wire.to(server) as wire:
        await wire.call("slow", {"backoff": {"base": 0, "max": 0}, "max_attempts": 1_000}, "PUT")
        for batch in range(people):
            await put(wire, book, "slow", [f"{batch}-{i}" for i in range(size)], headers={"long": "x" * 4_000})

    async def dawdle(number: int) -> None:
        async with Wire.to(server, receive_bytes=4_096) as wire:
            wire.send("slow/fetch", {"max": size, "wait": STALL_S, "ttr": ttr})
            if number % 2:
                for _ in range(20 if full else 5):
                    some = await wire.reader.read(1_024)
                    slept["bytes"] += len(some)
                    await asyncio.sleep(0.5)
            else:
                found = await wire.receive()
                slept["held"] += len(found["messages"])
                await asyncio.sleep(ttr)

    async with asyncio.TaskGroup() as tasks:
        for number in range(people):
            tasks.create_task(dawdle(number))
    if not slept["held"] or not slept["bytes"]:
        raise Broken(f"the slow ones got nothing: {slept}")
    async with Wire.to(server) as wire:
        book.sending = False
        while not book.all_came.is_set():
            await take(wire, book, "slow", 2_000)
    return await book.close(leases_end=True, held_too_long=slept["held"])


async def instant(server: Server, full: bool) -> Figures:
    """A million messages of one topic that are due in the same millisecond."""
    count, batch, book = 1_000_000 if full else 100_000, 5_000, Book()
    due_ms = now_ms() + (30_000 if full else 4_000)
    async with Wire.to(server) as wire:
        for first in range(0, count, batch):
            await put(wire, book, "instant", [str(number) for number in range(first, first + batch)], due_ms=due_ms)
    shares: Counter[int] = Counter()

    async def consume(number: int) -> None:
        async with Wire.to(server) as wire:
            while not book.all_came.is_set():
                shares[number] += await take(wire, book, "instant", batch // 2)

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(consume(number))
        seen = await book.close()
    fair("consumers", (shares[number] for number in range(8)), full)
    return seen


async def topics(server: Server, full: bool) -> Figures:
    """Ten thousand topics, each with something due in a moment; one waits for each."""
    count, hands, book = 10_000 if full else 1_000, 100, Book()

    async def look_after(hand: int) -> None:
        async with Wire.to(server) as wire:
            for number in range(hand, count, hands):
                await put(wire, book, f"many{number}", [f"{number}-{i}" for i in range(3)], delay=random.Random(number).random())
            for number in range(hand, count, hands):
                left = 3
                while left:
                    left -= await take(wire, book, f"many{number}", 10, STALL_S)

    async with asyncio.TaskGroup() as tasks:
        for hand in range(hands):
            tasks.create_task(look_after(hand))
    await rested(server)
    return await book.close(topics=count)


async def groups(server: Server, full: bool) -> Figures:
    """A hundred groups that each get everything."""
    count, messages, batch = 100, 20_000 if full else 1_000, 250
    books, sender = [Book() for _ in range(count)], Book()
    first: list[int] = []  # the count of each when the quickest had it all

    async def consume(number: int) -> None:
        path, book = f"shared/groups/g{number}", books[number]
        async with Wire.to(server) as wire:
            await wire.call(path, {"start": "earliest"}, "PUT")
            while len(book.got) < messages:
                await take(wire, book, path, 100, STALL_S)
        first.extend([] if first else [len(other.got) for other in books])

    async def produce() -> None:
        async with Wire.to(server) as wire:
            for at in range(0, messages, batch):
                await put(wire, sender, "shared", [str(number) for number in range(at, at + batch)], delay=at % 3 / 4)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        for number in range(count):
            tasks.create_task(consume(number))
    if full:  # else the last ones may come when the quickest have it all
        fair("groups", first, full)
    seen = figures(groups=count)
    for book in books:
        book.sent = sender.sent
        seen.update(await book.close())
    return seen


async def rested(server: Server) -> None:
    """Topics that rest hold no files open."""
    end = time.monotonic() + STALL_S
    while (count := len(os.listdir(f"/proc/{server.process.pid}/fd"))) > FILES_MAX:
        if time.monotonic() > end:
            raise Broken(f"{count} files are open, and nothing happens")
        await asyncio.sleep(0.5)


async def wake_ups(server: Server, full: bool) -> Figures:
    """As many long polls as messages, all of them waiting: each gets its one, and none has to ask again for that."""
    polls, rounds, book = 500, 20 if full else 4, Book()

    async def wake(wire: Wire, number: int) -> None:
        ids = [f"{number}-{i}" for i in range(polls)]
        size, delay = [(polls, 0.0), (polls, 0.3), (7, 0.05), (1, 0.0)][number % 4]
        for at in range(0, polls, size):
            await put(wire, book, "wake", ids[at : at + size], delay=delay)

    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire.to(server)) for _ in range(polls + 1)]
        producer, *consumers = wires
        for number in range(rounds):
            for wire in consumers:
                wire.send("wake/fetch", {"max": 1, "wait": 60, "ttr": TTR_S})
            await asyncio.to_thread(all_wait, server, polls)
            await wake(producer, number)
            got = [book.came((await wire.receive())["messages"]) for wire in consumers]
            if any(len(ids) != 1 for ids in got):
                raise Broken(f"round {number}: {sum(not ids for ids in got)} long polls came back with nothing")
            await producer.call("wake/ack", [id_ for (id_,) in got])
    return await book.close(long_polls=polls * rounds)


SCENARIOS: tuple[Scenario, ...] = (crowd, slow, instant, topics, groups, wake_ups, streams)


async def beside_a_quiet_topic(scenario: Scenario, server: Server, full: bool, name: str) -> Figures:
    """The scenario, with a look at memory and at a topic that has nothing to do with it."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, anonymous_bytes(server.process.pid))
            await asyncio.sleep(0.1)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        watching, calm_one = tasks.create_task(watch()), tasks.create_task(quiet(server))
        seen = await scenario(server, full)
        watching.cancel()
        calm_one.cancel()
        count = await calm_one
    if most > MEMORY_BYTES:
        raise Broken(f"the server took {most >> 20} MiB; {MEMORY_BYTES >> 20} are the most")
    if not count:
        raise Broken("nothing came through the quiet topic")
    seen["through the quiet topic"] = count
    seen[f"{MEMORY} {name}"] = round(most / (1 << 20))
    print(f"{name}: {dict(seen)}")
    return seen


def name_of(case: int) -> str:
    """No two cases have the same, so that figures under it are never added up.

    >>> name_of(1), name_of(8), name_of(15)
    ('slow, small', 'slow', 'slow, case 15')
    """
    again, which = divmod(case, len(SCENARIOS))
    return SCENARIOS[which].__name__.replace("_", " ") + ((", small", "")[again] if again < 2 else f", case {case}")


def first_of(error: BaseException) -> BaseException:
    """The first of several errors that happened together."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def run(cases: range, folder: Path) -> Figures:
    """Cases from 0 on are the small forms, those after them the full ones."""
    seen = Figures()
    for case in cases:
        scenario, full = SCENARIOS[case % len(SCENARIOS)], case >= len(SCENARIOS)
        place = folder / str(case)
        place.mkdir()
        try:
            with grpc_running(place / "data") as (server, _):
                seen.update(run_loop(beside_a_quiet_topic(scenario, server, full, name_of(case))))
                server.process.terminate()
                if server.process.wait(PATIENCE_S) != 0:  # ten thousand topics need their time
                    raise Broken("it did not end well")
        except (Broken, TimeoutError, ExceptionGroup) as error:
            raise Broken(f"case {case} ({scenario.__name__}): {first_of(error)!r}") from error
        calm(place, f"case {case} ({scenario.__name__})")
    return seen


def sum_up(seen: Figures) -> str:
    """The most memory that any of them took: a maximum, which figures are not."""
    return f"the server's own memory at most {max(count for name, count in seen.items() if name.startswith(MEMORY))} MiB"


PART = Part(
    name="load",
    unit="scenarios",
    about=(
        "A thousand producers and consumers, slow consumers, a million messages due at one instant, ten thousand topics, "
        "a hundred groups, gRPC streams beside long polls: bounded memory, fair shares, no stall of other topics, no lost "
        "wake-up."
    ),
    run=run,
    quick=len(SCENARIOS),
    full=2 * len(SCENARIOS),
    chunk=1,
    alone=True,
    sum_up=sum_up,
)
