"""Scenario: which part of its time a try should take, and how pauses should be jittered.

The client's own rules run against a simulated server, in simulated time: seven workers take 5 to 20 ms for a request, at 0.7 of
their capacity. For α, one request of a hundred is lost, and the server stands still for 0.4 s in each 5 s. For jitters, a herd of
calls comes at once each 5 s, and the server refuses those that would wait too long. The figures are equal on any machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.flow import pictures
from benchmarks.model import Figure, Goal
from benchmarks.run import Benchmark, Run
from turtlemq.client.errors import ClientError, ConnectionFailed
from turtlemq.client.retry_budget import RetryBudget
from turtlemq.client.sending import Call, Pause, RetryPolicy, Send, run_call
from turtlemq.client.wire import Answer, Request

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
JITTERS = {"none": (1.0, 0.0), "equal": (0.5, 0.5), "full": (0.0, 1.0)}  # the least part of a pause, and the random one
BUDGET_S = 1.0
CLIENTS, CALLS_PER_S, SECONDS = 20, 400, 60.0
WORKERS, SERVICE_S = 7, (0.005, 0.020)
LOST = 0.01
STILL_EVERY_S, STILL_S = 5.0, 0.4
HERD_AT_S, HERD, QUEUE_S = 2.5, 150, 0.1  # calls of a herd; those that would wait longer are refused
REFUSED = Answer(429, {}, b'{"error":{"code":"OVERLOADED","message":"try again"}}')
CALL = Call(Request("GET", "/"), lambda answer: answer)
IN_TIME, FEWER, HERDS = (
    "in time, α 0.7, full jitter",
    "late calls, α 0.7 of those with α 1",
    "p99 of herds, full jitter of that without",
)
GOALS = {IN_TIME: Goal("≥", 99.5), FEWER: Goal("≤", 0.5), HERDS: Goal("≤", 0.75)}


@dataclass(slots=True)
class Outcome:
    """Calls of one setting: milliseconds of those that succeeded, and how many did not; tries of all."""

    ms: list[float] = field(default_factory=list)
    failed: int = 0
    tries: int = 0

    @property
    def share(self) -> float:
        return 100 * len(self.ms) / max(1, len(self.ms) + self.failed)

    def quantile(self, q: float) -> float:
        return sorted(self.ms)[int(q * (len(self.ms) - 1))] if self.ms else float("nan")


class Simulation:
    """Clients and a server in simulated time."""

    def __init__(self, alpha: float, jitter: str, seconds: float, herds: bool = False) -> None:
        self.now, self.outcome, self._seconds, self._herds = 0.0, Outcome(), seconds, herds
        self._dice, self._order = random.Random(1), count()
        self._events: list[tuple[float, int, Any]] = []
        self._workers = [0.0] * WORKERS  # when each is free
        least, part = JITTERS[jitter]
        self._policies = [
            RetryPolicy(
                now=lambda: self.now,
                random=lambda: least + part * self._dice.random(),
                budget_s=BUDGET_S,
                alpha=alpha,
                retries=RetryBudget(1_000),
            )
            for _ in range(CLIENTS)
        ]

    def run(self) -> Outcome:
        """All calls, to their ends."""
        at = 0.0
        while (at := at + self._dice.expovariate(CALLS_PER_S)) < self._seconds:
            self._at(at, self._begin)
        for n in range(int(self._seconds / STILL_EVERY_S) if self._herds else 0):
            for _ in range(HERD):
                self._at(n * STILL_EVERY_S + HERD_AT_S, self._begin)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _at(self, when: float, event: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _begin(self) -> None:
        flow, begun = run_call(CALL, self._dice.choice(self._policies)), self.now
        self._step(flow, begun, lambda: next(flow))

    def _step(self, flow: Any, begun: float, go_on: Any) -> None:
        try:
            step = go_on()
        except StopIteration:
            self.outcome.ms.append(1_000 * (self.now - begun))
        except ClientError:
            self.outcome.failed += 1
        else:
            if isinstance(step, Pause):
                self._at(self.now + step.seconds, lambda: self._step(flow, begun, lambda: flow.send(None)))
            else:
                self._send(flow, begun, step)

    def _send(self, flow: Any, begun: float, step: Send) -> None:
        self.outcome.tries += 1
        if self._herds and self._workers[0] > self.now + QUEUE_S:
            self._at(self.now + 0.001, lambda: self._step(flow, begun, lambda: flow.send(REFUSED)))
            return
        answered_s = self._answered_s(step)
        if answered_s <= self.now + step.timeout_s:
            self._at(answered_s, lambda: self._step(flow, begun, lambda: flow.send(Answer(200, {}, b""))))
        else:
            failed = ConnectionFailed("no answer in time")
            self._at(self.now + step.timeout_s, lambda: self._step(flow, begun, lambda: flow.throw(failed)))

    def _answered_s(self, step: Send) -> float:
        """When the server answers; never, if the request is lost or its budget is over before its turn comes."""
        turn = max(self.now, self._workers[0])
        if self._dice.random() < LOST and not self._herds:
            return float("inf")
        if not self._herds and turn % STILL_EVERY_S > STILL_EVERY_S - STILL_S:
            turn = (turn // STILL_EVERY_S + 1) * STILL_EVERY_S
        if step.budget_ms is not None and turn > self.now + step.budget_ms / 1000:
            return float("inf")
        done = turn + self._dice.uniform(*SERVICE_S)
        heapq.heapreplace(self._workers, done)
        return done


def _run(run: Run) -> Iterator[Figure]:
    seconds = {"full": 3 * SECONDS, "quick": SECONDS}.get(run.size.name, 2 * STILL_EVERY_S)
    found: dict[tuple[float, str], Outcome] = {}
    progress = run.progress("α and jitters, simulated")
    for alpha in ALPHAS:
        for jitter in JITTERS:
            found[alpha, jitter] = Simulation(alpha, jitter, seconds).run()
            progress(len(found) / (len(ALPHAS) * len(JITTERS)))
    herds = {jitter: Simulation(0.7, jitter, seconds, herds=True).run() for jitter in JITTERS}
    for (alpha, jitter), one in found.items():
        yield Figure(f"p95, α {alpha}, jitter {jitter}", one.quantile(0.95), "ms", note=_note(one))
    for jitter, one in herds.items():
        yield Figure(f"p95 of herds, jitter {jitter}", one.quantile(0.95), "ms", note=_note(one))
    ours, whole = found[0.7, "full"], found[1.0, "full"]
    yield Figure(IN_TIME, ours.share, "%", goal=GOALS[IN_TIME])
    yield Figure(FEWER, (100 - ours.share) / max(1e-9, 100 - whole.share), "×", goal=GOALS[FEWER])
    yield Figure(HERDS, herds["full"].quantile(0.99) / herds["none"].quantile(0.99), "×", goal=GOALS[HERDS])
    pictures.draw(run.size.name, "flow-alpha", "Calls without an answer within their budget, %", lambda axes: _lines(axes, found))


def _note(one: Outcome) -> str:
    tries = one.tries / max(1, len(one.ms) + one.failed)
    return f"p99 {one.quantile(0.99):.0f} ms, in time {one.share:.2f} %, {tries:.3f} tries a call"


def _lines(axes: Any, found: dict[tuple[float, str], Outcome]) -> None:
    for colour, jitter in zip(pictures.COLOURS, JITTERS, strict=False):
        axes.plot(
            ALPHAS, [100 - found[alpha, jitter].share for alpha in ALPHAS], color=colour, marker="o", label=f"jitter {jitter}"
        )
    axes.set_xlabel("α: the part of the time left that one try takes")
    axes.grid(axis="y")
    axes.legend()


alpha = Benchmark("flow-alpha", "the part of its time that a try takes, and jitter of pauses", GOALS, _run)
