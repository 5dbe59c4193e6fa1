"""Scenario: twice the load that a server can take, from callers that wait for 200 ms. With early refusal, the server answers
nearly as many in time as at its best; without, it works for callers that have gone.

Open loop: a request is begun when it is due, whatever became of those before, and its time counts from then. Callers follow the
rules of the Python client (`turtlemq.client.sending`): budgets that are sent along, a part of the time for each try, and a budget
of retries. Without these rules, a call is tried again as long as its time lasts, and the server is told of no budget.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvloop

from benchmarks import child
from benchmarks.flow import pictures
from benchmarks.http_client import Connection, ServerProcess, produce_request, repeat_for
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run
from turtlemq.client.errors import ClientError, ConnectionFailed
from turtlemq.client.retry_budget import RetryBudget
from turtlemq.client.sending import Flow, Pause, RetryPolicy, Send, send_with_retries
from turtlemq.client.wire import Answer, Request

IN_TIME, TRIES, RECOVERED = "answered in time, of the peak", "tries a call", "back to normal after"
GOALS = {IN_TIME: Goal("≥", 0.9), TRIES: Goal("≤", 1.25), RECOVERED: Goal("≤", 5.0)}
BUDGET_S, BATCH, CLIENTS = 0.2, 2_000, 32  # large requests, so that the callers cost little
CONNECTIONS_MAX = 600  # of the callers; those without one give up, as a client with a limit does
REQUEST = Request("POST", "/")  # in place of the encoded one
CALM_S = 0.05  # a call that takes no longer is normal again
Found = dict[str, dict[str, float]]


@dataclass(slots=True)
class Load:
    """Calls at a constant rate. `policy`: the rules of the callers; without a budget of retries they tell the server nothing."""

    server: ServerProcess
    request: bytes
    policy: RetryPolicy
    free: deque[Connection] = field(default_factory=deque)
    opened: int = 0
    calls: int = 0
    tries: int = 0
    in_time: int = 0

    async def run(self, per_s: float, seconds: float) -> None:
        begun, tasks = time.perf_counter(), set[asyncio.Task[None]]()
        for n in range(int(per_s * seconds)):
            due = begun + n / per_s
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._call(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        while self.free:
            self.free.popleft().close()

    async def _call(self, due: float) -> None:
        self.calls += 1
        flow = send_with_retries(lambda _: REQUEST, self.policy, due + BUDGET_S)
        try:
            step = next(flow)
            while True:
                step = (await self._carried_out(step, flow))()
        except StopIteration:
            self.in_time += time.perf_counter() <= due + BUDGET_S
        except ClientError:
            pass  # it was given up

    async def _carried_out(self, step: Send | Pause, flow: Flow[Answer]) -> Callable[[], Send | Pause]:
        """Carry out a step. Returns how the flow goes on: its end cannot pass through a coroutine."""
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return partial(flow.send, None)
        self.tries += 1
        try:
            return partial(flow.send, await self._try(step))
        except ConnectionFailed as failed:
            return partial(flow.throw, failed)

    async def _try(self, step: Send) -> Answer:
        """Send it once. A caller that gives up closes its connection."""
        if not self.free and self.opened >= CONNECTIONS_MAX:
            raise ConnectionFailed("no connection is free")
        connection = self.free.popleft() if self.free else await self._open()
        try:
            status, body = await asyncio.wait_for(connection.call(self._timed(step)), step.timeout_s)
        except (TimeoutError, OSError, EOFError) as error:
            connection.close()
            self.opened -= 1
            raise ConnectionFailed("no answer in time") from error
        self.free.append(connection)
        return Answer(status, {}, body)

    async def _open(self) -> Connection:
        self.opened += 1
        return await self.server.connect()

    def _timed(self, step: Send) -> bytes:
        """The request with its budget, where budgets are sent."""
        if self.policy.retries is None:
            return self.request
        return self.request.replace(b"\r\n", b"\r\nX-Turtlemq-Budget-Ms: %d\r\n" % (step.budget_ms or 1), 1)


def _run(run: Run) -> Iterator[Figure]:
    seconds = {"full": 15.0, "quick": 5.0}.get(run.size.name, 0.3)
    found: Found = run.child("twice the load", measuring, folder=run.folder("flow"), seconds=seconds)
    for kind in ("with", "without"):
        one, peak = found[kind], found["peak"]["per_s"]
        goals = GOALS if kind == "with" else {}
        name = "" if kind == "with" else ", without"
        note = f"{one['in_time']:.0f} of {one['offered']:.0f} requests of {BATCH} messages a second; peak {peak:.0f}"
        yield Figure(IN_TIME + name, one["in_time"] / peak, "×", goal=goals.get(IN_TIME), note=note)
        yield Figure(TRIES + name, one["tries"], "", goal=goals.get(TRIES))
        yield Figure(RECOVERED + name, one["recovered_s"], "s", goal=goals.get(RECOVERED))
    pictures.draw(
        run.size.name, "flow-overload", "Answered in time at twice the load, of the peak", lambda axes: _bars(axes, found)
    )


def _bars(axes: Any, found: Found) -> None:
    peak = found["peak"]["per_s"]
    shares = [found[kind]["in_time"] / peak for kind in ("without", "with")]
    bars = axes.barh(
        ["no budgets, retries without limit", "budgets, early refusal, retry budget"], shares, color=pictures.COLOURS[1::-1]
    )
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=4, color=pictures.GREY, fontsize=9)


def measuring(folder: str, seconds: float) -> Found:
    """In a child process: the peak, and both kinds of callers at twice of it."""
    return uvloop.run(_measuring(ServerProcess(folder), seconds))


async def _measuring(server: ServerProcess, seconds: float) -> Found:
    await server.ready()
    request = produce_request("t", "application/json", BATCH, 10, delay=86_400)
    connections = [await server.connect() for _ in range(CLIENTS)]
    peak = len(await repeat_for(connections, request, seconds)) / seconds
    child.report_progress(0.3)
    found = {"peak": {"per_s": peak}}
    rules = RetryPolicy(time.perf_counter, random.random, budget_s=BUDGET_S, retries=RetryBudget())
    for kind, policy in (("with", rules), ("without", replace(rules, alpha=1.0, retries=None))):
        load = Load(server, request, policy)
        await load.run(2 * peak, seconds)
        recovered_s = await _recovered(connections[0], request)
        figures = {"in_time": load.in_time / seconds, "offered": 2 * peak, "tries": load.tries / max(1, load.calls)}
        found[kind] = figures | {"recovered_s": recovered_s}
        child.report_progress(0.65)
    return found


async def _recovered(connection: Connection, request: bytes) -> float:
    """Seconds until calls take as long as usual: the first of ten in a row."""
    begun, calm = time.perf_counter(), 0
    while calm < 10 and time.perf_counter() < begun + 60:
        at = time.perf_counter()
        await connection.call(request)
        calm = calm + 1 if time.perf_counter() - at <= CALM_S else 0
    return time.perf_counter() - begun


overload = Benchmark("flow-overload", "twice the load that a server can take, with and without early refusal", GOALS, _run)
