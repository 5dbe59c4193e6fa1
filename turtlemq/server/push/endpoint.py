"""A registered URL: its terms, its secrets, and the state that follows from its answers. No sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from turtlemq.server.clients import RegisteredClient
from turtlemq.server.push.policy import CLOSED, Breaker, Concurrency, Verdict

ERROR_CHARS = 300  # of the last error that a listing shows


class Terms(Struct, frozen=True):
    """The terms of a registration, also in the file of endpoints. `ttl`: seconds without a heartbeat until it is removed; 0: it
    stays until it is deleted. `timeout`: seconds for an answer."""

    name: str
    url: str
    capacity: int
    ttl: int
    timeout: float
    at_most_once: bool


class Stored(Struct, forbid_unknown_fields=False):
    """An endpoint in the file of a topic."""

    group: str
    client: str
    terms: Terms
    secret: str
    since_ms: int
    old_secret: str = ""
    old_until_ms: int = 0
    paused: bool = False
    verified: bool = False


@dataclass(eq=False, kw_only=True)
class Endpoint(RegisteredClient):
    """A client with a URL. The figures of the registry follow from its terms and from the answers so far."""

    terms: Terms
    secret: str = field(repr=False)
    old_secret: str = field(default="", repr=False)
    old_until_ms: int = 0  # the old secret signs, too, until then
    paused: bool = False
    verified: bool = False  # it has answered the challenge
    breaker: Breaker = CLOSED
    concurrency: Concurrency = field(default_factory=Concurrency)
    room_told: int | None = None  # by the last heartbeat: the most deliveries under way that the client can take
    last_error: str = ""
    is_removed: bool = False

    @property
    def is_durable(self) -> bool:
        return self.terms.ttl == 0

    def secrets(self, now_ms: int) -> list[str]:
        """The secrets that sign a request."""
        return [self.secret, self.old_secret] if self.old_secret and now_ms < self.old_until_ms else [self.secret]

    def rotate(self, secret: str, until_ms: int) -> None:
        """Sign with another secret; with the old one, too, until a time."""
        self.old_secret, self.old_until_ms, self.secret = self.secret, until_ms, secret

    def room(self, now_s: float) -> int:
        """How many deliveries may begin now."""
        if self.paused or not self.verified or self.is_removed:
            return 0
        return self.breaker.room(self.window, self.unacked, now_s)

    def share(self, now_s: float) -> float:
        """The free share of its window."""
        return self.room(now_s) / max(1, self.window)

    def beat(self, now_ms: int, free: int | None) -> None:
        """A sign of life. `free`: how many more deliveries the client could begin."""
        self.beat_ms = now_ms
        self.room_told = None if free is None else self.unacked + free
        self.refresh()

    def learn(self, verdict: Verdict, error: str, now_s: float) -> None:
        """An answer came, or none in time."""
        if verdict.is_healthy:
            self.breaker, self.concurrency = self.breaker.succeeded(), self.concurrency.succeeded(self.capacity)
        else:
            self.breaker, self.concurrency = self.breaker.failed(now_s), self.concurrency.failed()
        self.paused = self.paused or verdict.pauses
        self.last_error = error[:ERROR_CHARS] if error else self.last_error
        self.refresh()

    def refresh(self) -> None:
        """Set state and window as everything else says."""
        self.state = self._state()
        window = min(self.concurrency.limit, self.capacity)
        self.window = window if self.room_told is None else min(window, self.room_told)

    def _state(self) -> Literal["paused", "pending", "failing", "active"]:
        if self.paused:
            return "paused"
        if not self.verified:
            return "pending"
        return "failing" if self.breaker.is_open else "active"

    def fields(self) -> dict[str, Any]:
        """The endpoint as a listing shows it: everything but its secrets."""
        more = {
            "url": self.terms.url,
            "ttl": self.terms.ttl,
            "timeout": self.terms.timeout,
            "at_most_once": self.terms.at_most_once,
            "failures": self.breaker.failures,
            "last_error": self.last_error,
        }
        return super().fields() | more

    def stored(self) -> Stored:
        """The endpoint for the file of its topic."""
        return Stored(
            group=self.group,
            client=self.client,
            terms=self.terms,
            secret=self.secret,
            since_ms=self.since_ms,
            old_secret=self.old_secret,
            old_until_ms=self.old_until_ms,
            paused=self.paused,
            verified=self.verified,
        )


def made(topic: str, stored: Stored) -> Endpoint:
    """The endpoint of an entry of the file."""
    out = Endpoint(
        topic=topic,
        group=stored.group,
        client=stored.client,
        name=stored.terms.name,
        transport="http",
        capacity=stored.terms.capacity,
        window=0,
        since_ms=stored.since_ms,
        terms=stored.terms,
        secret=stored.secret,
        old_secret=stored.old_secret,
        old_until_ms=stored.old_until_ms,
        paused=stored.paused,
        verified=stored.verified,
    )
    out.refresh()
    return out


class _File(Struct):
    endpoints: list[Stored]


_decode = msgspec.json.Decoder(_File).decode


def read_file(data: bytes) -> list[Stored]:
    """The endpoints of a topic's file. Raises `msgspec.MsgspecError` if it is damaged."""
    return _decode(data).endpoints


def file_of(endpoints: list[Endpoint]) -> bytes:
    """The file of a topic's durable endpoints."""
    stored = _File([endpoint.stored() for endpoint in endpoints])
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"
