"""A client's flows without any wire: a clock, a server that is a function, promises for puts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turtlemq.client import errors, wire
from turtlemq.client.batching import PendingPut
from turtlemq.client.outgoing import OutgoingMessage
from turtlemq.client.results import Outcome
from turtlemq.client.sending import Pause, RetryPolicy, Send
from turtlemq.client.wire import Answer, Request


class World:
    """A clock that goes on only with pauses, dice that say one thing, and a server that is a function."""

    def __init__(self, server: Callable[[Send], Answer | Exception], *, roll: float = 1.0, latency_s: float = 0.0) -> None:
        self.server, self.now, self.latency_s = server, 1000.0, latency_s
        self.rules = RetryPolicy(now=lambda: self.now, random=lambda: roll, budget_s=10.0, try_timeout_s=3.0)
        self.sent: list[Send] = []
        self.pauses: list[float] = []

    def play(self, steps: Any) -> Any:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                    self.now += step.seconds
                    step = steps.send(None)
                    continue
                self.sent.append(step)
                self.now += self.latency_s
                got = self.server(step)
                step = steps.throw(got) if isinstance(got, Exception) else steps.send(got)
        except StopIteration as end:
            return end.value


def refusal(status: int, code: str, **details: Any) -> Answer:
    return Answer(status, {}, wire.to_json({"error": {"code": code, "message": "no", **details}}))


GOOD = Answer(200, {}, b"{}")
ASK = Request("GET", "/")
CUT = errors.ConnectionFailed("cut")


class Promise:
    created: bool | None = None
    outcome: Outcome | None = None

    def __init__(self) -> None:
        self.said: Any = None

    def done(self) -> bool:
        return self.said is not None

    def set_result(self, result: str, /) -> None:
        self.said = result

    def set_exception(self, exception: BaseException, /) -> None:
        self.said = exception


def entries(world: World, count: int) -> list[PendingPut]:
    return [PendingPut(OutgoingMessage(str(i), b"x", put_s=world.now), Promise(), world.now + 10) for i in range(count)]


def said(batch: list[PendingPut]) -> list[Any]:
    return [entry.promise.said for entry in batch]  # type: ignore[attr-defined]
