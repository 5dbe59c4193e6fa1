"""The rules of callbacks: the meaning of an answer, concurrency, circuit breaker, choice of an endpoint. Pure.

Times are arguments: seconds of a monotonic clock for the circuit breaker, epoch seconds for `Retry-After`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Literal

Outcome = Literal["acked", "failed", "throttled", "refused", "gone", "timeout", "unreachable", "client_gone"]
OUTCOMES: tuple[Outcome, ...] = (
    "acked",
    "failed",
    "throttled",
    "refused",
    "gone",
    "timeout",
    "unreachable",
    "client_gone",
)
REFUSED_BY_CLIENT = "REFUSED_BY_CLIENT"
RETRY_AFTER_S_MAX = 3_600
ERROR_BYTES = 1_024  # of a refusal that are kept as the error of the delivery


# Answers


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of an answer for the message and for the endpoint. `delay_ms`: of the retry, None: the back-off."""

    outcome: Outcome
    delay_ms: int | None = None
    pauses: bool = False  # the endpoint gets nothing more until it is told otherwise

    @property
    def is_healthy(self) -> bool:
        """Whether the endpoint does its work: a message that it refuses for good is no failure of the endpoint."""
        return self.outcome in ("acked", "refused")


def classify(status: int, retry_after: str | None, retry: str | None, now_s: float) -> Verdict:
    """The meaning of an answer: its status, and its headers `Retry-After` and `turtlemq-retry`.

    >>> classify(204, None, None, 0).outcome, classify(500, None, None, 0).outcome, classify(422, None, "no", 0).outcome
    ('acked', 'failed', 'refused')
    >>> classify(503, "120", None, 0)
    Verdict(outcome='throttled', delay_ms=120000, pauses=False)
    """
    if 200 <= status < 300:
        return Verdict("acked")
    if (retry or "").strip().lower() == "no":
        return Verdict("refused", pauses=status == 410)
    if status == 410:
        return Verdict("gone", pauses=True)
    if status in (429, 503):
        return Verdict("throttled", delay_of(retry_after, now_s))
    return Verdict("failed")


def delay_of(retry_after: str | None, now_s: float) -> int | None:
    """The delay that `Retry-After` asks for, in milliseconds, an hour at most; None if it says nothing that can be read.

    >>> delay_of("2", 0), delay_of("Thu, 01 Jan 1970 00:01:00 GMT", 30.5), delay_of("soon", 0), delay_of("9" * 400, 0)
    (2000, 29500, None, 3600000)
    """
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():
        seconds = float(text[:10])
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    return round(1000 * min(max(seconds, 0.0), RETRY_AFTER_S_MAX))


def error_of(verdict: Verdict, status: int, body: bytes) -> str:
    """The error that is recorded for a refusal: its status and the first KiB of its body.

    >>> error_of(Verdict("failed"), 500, b"no database"), error_of(Verdict("refused"), 422, b"")
    ('HTTP 500: no database', 'REFUSED_BY_CLIENT: HTTP 422')
    """
    text = body[:ERROR_BYTES].decode("utf-8", "replace").strip()
    told = f"HTTP {status}: {text}" if text else f"HTTP {status}"
    return f"{REFUSED_BY_CLIENT}: {told}" if verdict.outcome == "refused" else told


# Concurrency

CONCURRENCY_START = 4


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many deliveries an endpoint may have under way: one more after as many successes, half as many after a failure.

    >>> Concurrency(4, 3).succeeded(16), Concurrency(4, 3).succeeded(4), Concurrency(5, 3).failed()
    (Concurrency(limit=5, successes=0), Concurrency(limit=4, successes=0), Concurrency(limit=2, successes=0))
    """

    limit: int = CONCURRENCY_START
    successes: int = 0  # since the limit was set

    def succeeded(self, capacity: int) -> Concurrency:
        """A delivery succeeded."""
        if self.successes + 1 < self.limit:
            return replace(self, successes=self.successes + 1)
        return Concurrency(max(1, min(self.limit + 1, capacity)))

    def failed(self) -> Concurrency:
        """A delivery failed."""
        return Concurrency(max(1, self.limit // 2))


# Circuit breaker

FAILURES_MAX = 10  # in a row
PAUSE_S, PAUSE_S_MAX = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: closed; open until a time, so that nothing is reserved; then half-open: one delivery probes.

    A failure that began before the breaker opened changes nothing: only a probe can fail while it is half-open."""

    failures: int = 0  # in a row
    pause_s: float = 0.0  # of this opening
    until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Open or half-open: the endpoint has not succeeded since it opened."""
        return self.failures >= FAILURES_MAX

    def room(self, limit: int, unacked: int, now_s: float) -> int:
        """How many deliveries may begin, with this concurrency and so many under way."""
        if not self.is_open:
            return max(0, limit - unacked)
        return int(now_s >= self.until_s and unacked == 0)

    def succeeded(self) -> Breaker:
        """A delivery succeeded: closed."""
        return CLOSED

    def failed(self, now_s: float) -> Breaker:
        """A delivery failed."""
        if not self.is_open:
            opens = self.failures + 1 >= FAILURES_MAX
            return Breaker(self.failures + 1, PAUSE_S, now_s + PAUSE_S) if opens else Breaker(self.failures + 1)
        if now_s < self.until_s:
            return self
        pause_s = min(2 * self.pause_s, PAUSE_S_MAX)
        return Breaker(self.failures + 1, pause_s, now_s + pause_s)


CLOSED = Breaker()


# Choice


def choose(loads: Sequence[tuple[int, int]], first: int, second: int) -> int:
    """The better of two endpoints, given by their index: the one with fewer deliveries under way for its capacity.

    `loads`: of each endpoint, deliveries under way and capacity.

    >>> choose([(3, 16), (3, 8), (0, 1)], 0, 1), choose([(3, 16), (3, 8), (0, 1)], 0, 2)
    (0, 2)
    """
    unacked, capacity = loads[first]
    other_unacked, other_capacity = loads[second]
    return first if unacked * other_capacity <= other_unacked * capacity else second
