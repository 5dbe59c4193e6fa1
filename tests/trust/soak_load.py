"""The steady mixed load of a soak: producers, consumers, cancels, moves, failures; all of them live through restarts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from tests.harness.server_process import Server
from tests.trust.kills_model import now_ms
from tests.trust.load_wire import Wire
from tests.trust.model import Broken
from tests.trust.soak_audit import GROUPS, Audit

TOPICS = ("orders", "mails", "payments", "timers")
STEP_S = 0.1  # between two batches of a topic
CANCEL, MOVE, FAIL = 0.10, 0.05, 0.03  # parts of all messages; of first deliveries
POISON = 250  # one message in so many never succeeds, and dies
ATTEMPTS = 4
BODY_BYTES = (50, 2_000)
WAIT_S = 2.0  # of a long poll
HISTORY_S = 72  # history stays for so long


class Gone(Exception):
    """The server is gone: the outcome of this request is unknown."""


class House:
    """Where the server is at the moment."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self.up = asyncio.Event()

    def open(self, server: Server) -> None:
        self.server = server
        self.up.set()

    def shut(self) -> None:
        self.up.clear()


class Caller:
    """One connection, made again after each restart."""

    def __init__(self, house: House, stack: AsyncExitStack) -> None:
        self._house, self._stack = house, stack
        self._wire: Wire | None = None
        self._server: Server | None = None

    async def call(self, path: str, value: Any, method: str = "POST", also: tuple[int, ...] = ()) -> Any:
        """The body of a good answer; None where the status is one of `also`."""
        await self._house.up.wait()
        try:
            if self._wire is None or self._server is not self._house.server:
                await self._stack.aclose()
                self._server = self._house.server
                assert self._server is not None
                self._wire = await self._stack.enter_async_context(Wire.to(self._server))
            self._wire.send(path, value, method)
            status, answer = await self._wire.answer()
        except (OSError, EOFError) as error:
            self._wire = None
            await asyncio.sleep(0.05)
            raise Gone from error
        if status in (429, 503):
            await asyncio.sleep(0.05)
            raise Gone
        if status >= 300 and status not in also:
            raise Broken(f"{method} {path}: {status} {str(answer)[:300]}")
        return None if status >= 300 else answer

    async def insist(self, path: str, value: Any, method: str = "POST", also: tuple[int, ...] = ()) -> tuple[Any, bool]:
        """The answer, however long it takes, and whether it was asked for more than once."""
        again = False
        while True:
            try:
                return await self.call(path, value, method, also), again
            except Gone:
                again = True


class Load:
    """All clients. `stop` ends the producers, `end` all clients."""

    def __init__(self, house: House, rate: int, longest_s: float, ttr_s: float) -> None:
        self.house, self.longest_s, self.ttr_s = house, longest_s, ttr_s
        self.batch = max(1, round(rate * STEP_S / len(TOPICS)))
        self.audits = {topic: Audit(topic) for topic in TOPICS}
        self.sending = self.receiving = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._stacks = AsyncExitStack()

    async def caller(self) -> Caller:
        return Caller(self.house, await self._stacks.enter_async_context(AsyncExitStack()))

    async def prepare(self) -> None:
        """The topics, set so that history does not stay for long."""
        caller = await self.caller()
        settings = {
            "max_attempts": ATTEMPTS,
            "backoff": {"base": 0.5, "factor": 2, "max": 4},
            "segment_bytes": 2 << 20,
            "compact_live_ratio": 0.3,
            "retention": {"history_hours": HISTORY_S / 3600},
            "dead": {"max_count": 5_000},
        }
        for topic in TOPICS:
            await caller.insist(topic, settings, "PUT")
            for group in GROUPS:
                await caller.insist(f"{topic}/groups/{group}", {"start": "earliest"}, "PUT")

    def start(self) -> None:
        """Start all clients."""
        for number, audit in enumerate(self.audits.values()):
            self._run(self._produce(audit, random.Random(number)))
            for at, group in enumerate(GROUPS):
                for hand in range(2):
                    self._run(self._consume(audit, group, 1 << at, random.Random(100 * number + 10 * at + hand)))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)  # one that failed is kept for `check`

    def check(self) -> None:
        """Raise the error of any of them."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def close(self) -> None:
        """End all clients."""
        self.receiving = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stacks.aclose()

    async def _produce(self, audit: Audit, dice: random.Random) -> None:
        caller, next_s = await self.caller(), time.monotonic()
        while self.sending:
            delay = dice.choice([0.0, dice.uniform(0, self.longest_s / 10), dice.uniform(0, self.longest_s)])
            messages = []
            for _ in range(self.batch):
                size = round(BODY_BYTES[0] * (BODY_BYTES[1] / BODY_BYTES[0]) ** dice.random())
                id_ = audit.new(now_ms() + round(delay * 1000), size)
                messages.append({"id": id_, "body": f"{id_}:".ljust(size, "x"), "delay": delay})
            answer, again = await caller.insist(f"{audit.topic}/messages", {"messages": messages})
            if answer["created"] != self.batch and not (again and answer["duplicates"] == self.batch):
                raise Broken(f"a batch of {self.batch} was stored by half: {answer['created']} and {answer['duplicates']} before")
            audit.accepted(answer["ids"])
            if delay > 0:
                self._run(self._change_minds(audit, answer["ids"], delay, random.Random(dice.random())))
            next_s = max(next_s + STEP_S, time.monotonic() - 1)
            await asyncio.sleep(next_s - time.monotonic())

    async def _change_minds(self, audit: Audit, ids: list[str], delay: float, dice: random.Random) -> None:
        """Cancel some of a batch and move others, while they sleep or a little too late. Of those that sleep at all: more."""
        share = 1.5
        chosen = dice.sample(ids, min(len(ids), int(len(ids) * share * (CANCEL + MOVE) + dice.random())))
        cut = int(len(chosen) * CANCEL / (CANCEL + MOVE) + dice.random())
        await asyncio.sleep(dice.uniform(0, delay * 1.05))
        async with AsyncExitStack() as stack:
            caller = Caller(self.house, await stack.enter_async_context(AsyncExitStack()))
            if chosen[:cut]:
                await self._cancel(audit, caller, chosen[:cut])
            for id_ in chosen[cut:]:
                await self._move(audit, caller, id_, dice.uniform(0, self.longest_s))

    async def _cancel(self, audit: Audit, caller: Caller, ids: list[str]) -> None:
        """A first try without an answer may have done it, and then the server need not know the message any more."""
        answer, again = await caller.insist(f"{audit.topic}/cancel", {"ids": ids})
        forgotten = [id_ for id_ in ids if again and answer["missed"].get(id_) == "unknown"]
        audit.cancelled([id_ for id_ in ids if answer["missed"].get(id_, "cancelled") == "cancelled"] + forgotten)
        audit.counts["cancelled unheard"] += len(forgotten)

    async def _move(self, audit: Audit, caller: Caller, id_: str, delay: float) -> None:
        entry = audit.open.get(id_)
        if entry is None:
            return
        entry.earliest_ms = min(entry.earliest_ms, now_ms() + round(delay * 1000))
        answer, _ = await caller.insist(f"{audit.topic}/messages/{id_}", {"delay": delay}, "PATCH", also=(404, 409))
        if answer is not None:
            entry.earliest_ms = answer["due_ms"]
            audit.counts["moved"] += 1

    async def _consume(self, audit: Audit, group: str, bit: int, dice: random.Random) -> None:
        caller, path = await self.caller(), f"{audit.topic}/groups/{group}"
        while self.receiving:
            with contextlib.suppress(Gone):
                asked_s = time.monotonic()
                found = await caller.call(f"{path}/fetch", {"max": 200, "wait": WAIT_S, "ttr": self.ttr_s})
                for message in found["messages"]:
                    audit.delivered(bit, message, asked_s)
                if found["messages"]:
                    await self._settle(audit, caller, path, bit, found["messages"], dice)

    async def _settle(
        self, audit: Audit, caller: Caller, path: str, bit: int, messages: list[dict[str, Any]], dice: random.Random
    ) -> None:
        failed = {m["id"] for m in messages if not int(m["id"]) % POISON or (m["attempt"] == 1 and dice.random() < FAIL)}
        dying = {m["id"] for m in messages if m["id"] in failed and m["attempt"] >= ATTEMPTS}
        ended = [m["id"] for m in messages if m["id"] not in failed or m["id"] in dying]
        audit.settling(bit, ended)
        answer = await caller.call(f"{path}/ack", [f"-{m['id']}" if m["id"] in failed else m["id"] for m in messages])
        unknown = set(answer["unknown"])
        audit.settled(bit, [id_ for id_ in ended if id_ not in unknown])
        audit.unsettled(bit, [id_ for id_ in ended if id_ in unknown])
        audit.counts["failed"] += len(failed)
        audit.counts["died"] += len(dying)

    async def ask(self, for_s: float) -> int:
        """Ask the server about messages that should have been settled so long ago. How many there are."""
        overdue = [(audit, id_) for audit in self.audits.values() for id_ in audit.overdue(round(for_s * 1000))]
        async with AsyncExitStack() as stack:
            caller = Caller(self.house, await stack.enter_async_context(AsyncExitStack()))
            for audit, id_ in overdue[:2_000]:
                found, _ = await caller.insist(f"{audit.topic}/messages/{id_}", None, "GET", also=(404,))
                audit.told(id_, found)
        return len(overdue)
