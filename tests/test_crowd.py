"""A crowd at one topic: a thousand consumers that ack, fail, hang up, fall asleep or want more time; thousands that only wait.
And many topics that rest: they hold no files open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.server_process import Server, running
from tests.trust.kills_model import now_ms
from tests.trust.load_wire import Wire, all_wait, run_loop
from turtlemq.engine import Engine
from turtlemq.model import Message

CONSUMERS, MESSAGES, BATCH, PRODUCERS = 1_000, 20_000, 100, 8
GROUPS = ("red", "green", "blue")
WAITING = 2_000
LONG_S = 30  # a lease that does not end during the test, or not for consumers that do not sleep


@dataclass
class Holding:
    """A message in flight, by the server's clock, which is ours too."""

    attempt: int
    from_ms: int
    until_ms: int  # its lease
    let_go_ms: int | None = None  # when the holder began to say that it is done with it


@dataclass
class Book:
    """Everything that any client saw."""

    sent: set[str] = field(default_factory=set)
    held: dict[tuple[str, str], list[Holding]] = field(default_factory=lambda: defaultdict(list))
    acked: dict[str, Counter[str]] = field(default_factory=lambda: {group: Counter() for group in GROUPS})
    deeds: Counter[str] = field(default_factory=Counter)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, group: str, found: list[dict[str, Any]], ttr_ms: int) -> dict[str, Holding]:
        got, out = now_ms(), {}
        for message in found:
            holding = Holding(message["attempt"], message["lease_until_ms"] - ttr_ms, message["lease_until_ms"])
            assert holding.from_ms >= message["due_ms"], f"early: {message}"
            assert got >= message["due_ms"], f"early: {message}"
            self.held[group, message["id"]].append(holding)
            out[message["id"]] = holding
        return out

    def settle(self, group: str, acks: list[str], answer: dict[str, Any]) -> None:
        good = [id_ for id_ in acks if not id_.startswith("-") and id_ not in answer["unknown"]]
        assert answer["acked"] == len(good)
        assert answer["dead"] == 0
        self.acked[group].update(good)
        if len(self.sent) == MESSAGES and all(len(acked) == MESSAGES for acked in self.acked.values()):
            self.done.set()

    def check(self) -> None:
        for group, acked in self.acked.items():
            assert set(acked) == self.sent, f"{group} lacks {len(self.sent - set(acked))} messages"
            assert set(acked.values()) == {1}, f"{group}: acknowledged more than once"
        for (group, id_), holdings in self.held.items():
            holdings.sort(key=lambda holding: holding.attempt)
            for one, other in pairwise(holdings):
                assert one.attempt < other.attempt, f"{id_} was given twice to {group} as attempt {one.attempt}"
                free_ms = one.until_ms if one.let_go_ms is None else min(one.until_ms, one.let_go_ms)
                assert other.from_ms >= free_ms, f"{id_} was held by two of {group}: {one} {other}"


async def produce(server: Server, book: Book, number: int) -> None:
    dice = random.Random(number)
    async with Wire.to(server) as wire:
        for batch in range(MESSAGES // PRODUCERS // BATCH):
            ids = [f"{number}-{batch}-{i}" for i in range(BATCH)]
            messages = [{"id": id_, "body": id_, "delay": dice.choice([0, dice.random()])} for id_ in ids]
            assert (await wire.call("crowd/messages", {"messages": messages}))["created"] == BATCH
            book.sent.update(ids)


async def consume(server: Server, book: Book, number: int) -> None:
    """Consume until all is done. The kind of consumer depends on the number."""
    dice, group = random.Random(number), GROUPS[number % len(GROUPS)]
    path = f"crowd/groups/{group}"
    kind = "good good good good good good fails hangs_up falls_asleep extends".split()[number // 3 % 10]
    ttr = 0.6 if kind in ("hangs_up", "falls_asleep", "extends") else LONG_S
    while not book.done.is_set():
        async with Wire.to(server) as wire:
            while not book.done.is_set():
                wire.send(f"{path}/fetch", {"max": dice.randint(1, 40), "wait": dice.choice([1, 4]), "ttr": ttr})
                if kind == "hangs_up" and dice.random() < 0.5:
                    await asyncio.sleep(dice.choice([0, dice.random() / 10]))
                    book.deeds[kind] += 1
                    break
                held = book.receive(group, (await wire.receive())["messages"], round(ttr * 1000))
                if kind == "falls_asleep" and held and dice.random() < 0.3:
                    book.deeds[kind] += 1
                    await asyncio.sleep(2 * ttr)
                    continue
                if held:
                    await _finish(wire, path, book, dice, group, kind, held)


async def _finish(
    wire: Wire, path: str, book: Book, dice: random.Random, group: str, kind: str, held: dict[str, Holding]
) -> None:
    if kind == "extends":
        asked_ms = now_ms()
        answer = await wire.call(f"{path}/extend", {"ids": list(held), "ttr": LONG_S})
        for id_ in held.keys() - set(answer["unknown"]):
            if now_ms() < held[id_].until_ms:  # else it may be another consumer's by now
                held[id_].until_ms = asked_ms + LONG_S * 1000
                book.deeds[kind] += 1
        await asyncio.sleep(0.8)  # the first lease is over by now
    acks = [f"-{id_}" if kind == "fails" and dice.random() < 0.3 else id_ for id_ in held]
    book.deeds["fails"] += sum(id_.startswith("-") for id_ in acks)
    for holding in held.values():
        holding.let_go_ms = now_ms()
    book.settle(group, acks, await wire.call(f"{path}/ack", {"acks": acks, "retry_delay": dice.choice([0, 0.05])}))


@pytest.mark.slow
def test_a_thousand_consumers_share_a_topic(tmp_path: Path) -> None:
    """No message is lost, early, held by two of a group at once, or settled twice."""

    async def crowd(server: Server, book: Book) -> None:
        async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
            for number in range(CONSUMERS):
                tasks.create_task(consume(server, book, number))
            for number in range(PRODUCERS):
                tasks.create_task(produce(server, book, number))

    with running(tmp_path / "data") as server:
        backoff = {"base": 0.05, "factor": 1, "max": 0.05}
        server.ok("PUT", "/v1/topics/crowd", {"max_attempts": 1_000, "max_in_flight": 1_000_000, "backoff": backoff})
        for group in GROUPS:
            server.ok("PUT", f"/v1/topics/crowd/groups/{group}", {"start": "earliest"})
        book = Book()
        run_loop(crowd(server, book))
        book.check()
        assert min(book.deeds[kind] for kind in ("fails", "hangs_up", "falls_asleep", "extends")) > 0, book.deeds
        stats = server.ok("GET", "/v1/topics/crowd")["stats"]
        assert [stats[state] for state in ("sleep", "ready", "reserve", "dead")] == [0, 0, 0, 0], stats
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_thousands_of_long_polls_are_answered_by_a_stop(tmp_path: Path) -> None:
    async def wait(server: Server) -> None:
        async with contextlib.AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(Wire.to(server)) for _ in range(WAITING)]
            for number, wire in enumerate(wires):
                wire.send(f"crowd/groups/{GROUPS[number % 3]}/fetch", {"wait": 60})
            await asyncio.get_running_loop().run_in_executor(None, all_wait, server, WAITING)
            server.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*(wire.receive() for wire in wires))
            assert answers == [{"messages": []}] * WAITING
        assert server.process.wait(5) == 0

    with running(tmp_path / "data") as server:
        run_loop(wait(server))
        assert "Traceback" not in server.log
    assert (tmp_path / "data" / "CLEAN").exists()


def test_a_crowd_is_let_in_while_the_server_is_busy(tmp_path: Path) -> None:
    """The system takes their connections for it. A client that found no place would try again seconds later, and get less."""
    many = min(2_000, int(Path("/proc/sys/net/core/somaxconn").read_text()))

    async def come(server: Server) -> list[Any]:
        async with contextlib.AsyncExitStack() as stack:
            server.process.send_signal(signal.SIGSTOP)  # it is as busy as can be
            try:
                async with asyncio.timeout(60):
                    wires = [await stack.enter_async_context(Wire.to(server)) for _ in range(many)]
            finally:
                server.process.send_signal(signal.SIGCONT)
            return [await wire.call("crowd/fetch", {}) for wire in wires]

    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/crowd", {})
        assert run_loop(come(server)) == [{"messages": []}] * many


def open_for_writing(folder: Path) -> int:
    """How many files below it this process could write to."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            flags = re.findall(r"flags:\s+(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())[0]
            count += int(flags, 8) & os.O_ACCMODE != os.O_RDONLY and os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    return count


def test_topics_that_rest_hold_no_files_open(tmp_path: Path) -> None:
    """But for some that are kept for reading, of all topics together."""
    topics = [f"t{number}" for number in range(20)]
    engine = Engine.open(tmp_path)
    for at in (1_000, 100_000):  # and again, after they have rested
        for topic in topics:
            engine.submit(topic, [Message(b"x", at)], at)
            engine.tick(at)
            engine.ack(topic, "g", engine.reserve(topic, "g", 10, at).ids, at)
        assert open_for_writing(tmp_path / "topic") >= 2 * len(topics)
        engine.tick(at + 60_000)  # the checkpoint
        assert open_for_writing(tmp_path / "topic") == 0
    assert [engine.stats(topic).history for topic in topics] == [2] * len(topics)
    assert engine.check() == []
    engine.close()
