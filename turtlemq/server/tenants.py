"""Tenants: users of one server that do not disturb each other, each with its topics, weight and limits. Pure.

A tenant is a set of topics, named by patterns; a token belongs to a tenant through the topics that it may use. The first tenant
with a fitting pattern has a topic. A topic of no tenant is a tenant of its own, with a weight of 1 and no limits.

`Tenants` decides on rates, messages in flight and held bytes, and counts. The order of work is in `turtlemq.fair_queue`. A server
without tenants makes none of this. Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Annotated

from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.rate_limit import Bucket, burst_of
from turtlemq.server.topic_patterns import is_pattern, pattern_of
from turtlemq.settings import RATE_MAX, RATE_MIN

TENANTS_MAX = 1_000
PATTERNS_MAX = 100
KNOWN_MAX = 100_000  # topics whose tenant is remembered
OWN = "/"  # begins the owner of a topic without a tenant; no name of a tenant holds it
COUNT_S = 5e-6  # rest after counting messages in flight, for each topic that was counted: a tenth of the time at most
WOKEN_MAX = 16  # topics of one tenant whose long polls are looked at when messages have ended
_NO_LIMIT = "0: no limit"


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant of the configuration. In `topics`, `*` stands for any characters."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._@ -]+$")]
    topics: Annotated[tuple[str, ...], Meta(min_length=1, max_length=PATTERNS_MAX)]
    weight: Annotated[float, Meta(ge=0.1, le=1_000, description="its share of the server while others want more, too")] = 1
    produce_per_s: Annotated[float, Meta(ge=0, le=RATE_MAX, description=f"messages, {RATE_MIN} or more; {_NO_LIMIT}")] = 0
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e12, description=f"bytes of requests with messages; {_NO_LIMIT}")] = 0
    max_in_flight: Annotated[int, Meta(ge=0, le=1 << 40, description=f"messages under a lease; {_NO_LIMIT}")] = 0
    max_bytes: Annotated[int, Meta(ge=0, le=1 << 40, description=f"bytes of requests under way; {_NO_LIMIT}")] = 0


def check_tenants(tenants: Iterable[Tenant]) -> None:
    """Raise `InvalidArgument` for a malformed pattern, a name or pattern that occurs twice, and a rate that is too small."""
    names, patterns = set[str](), dict[str, str]()
    for tenant in tenants:
        who = f"tenant {tenant.name!r}"
        if tenant.name in names:
            raise InvalidArgument(f"{who}: another tenant has the same name")
        names.add(tenant.name)
        for pattern in tenant.topics:
            if not is_pattern(pattern):
                raise InvalidArgument(f"{who}: topics are names in which * stands for any characters: ['shop.*']")
            if pattern in patterns:
                raise InvalidArgument(f"{who}: {pattern!r} belongs to tenant {patterns[pattern]!r} already")
            patterns[pattern] = tenant.name
        if 0 < tenant.produce_per_s < RATE_MIN:
            raise InvalidArgument(f"{who}: produce_per_s is at least {RATE_MIN}, or 0 for no limit")
        if 0 < tenant.bytes_per_s < 1:
            raise InvalidArgument(f"{who}: bytes_per_s is at least 1, or 0 for no limit")


class Account:
    """The figures of one tenant since the start, and the state of its limits."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.held = 0  # bytes of its requests under way
        self.produced = self.produced_bytes = self.delivered = 0
        self.refused: Counter[str] = Counter()  # requests, by the limit that refused them
        self.messages: Bucket | None = None
        self.bytes: Bucket | None = None
        self.in_flight = 0  # at most so many messages are under a lease: exact when they were counted, and more since
        self.count_at = 0.0  # when they may be counted again
        self.busy: set[str] = set()  # topics that may have messages in flight
        self.blocked: dict[str, None] = {}  # topics whose long polls wait until messages in flight have ended


class Tenants:
    """All tenants of a server. Work for no topic (an empty name) has no tenant."""

    def __init__(self, tenants: Sequence[Tenant], held_bytes_max: int) -> None:
        """`held_bytes_max`: bytes of all requests under way."""
        self.accounts = [Account(tenant) for tenant in tenants]
        self._fits = [pattern_of(tenant.topics) for tenant in tenants]
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._known: dict[str, Account | None] = {}
        self._held_max, self._held = held_bytes_max, dict[str, int]()  # by owner, of those that hold any
        self._ended: dict[Account, None] = {}  # in which messages in flight have ended since they were counted
        self._in_flight: Callable[[str], int] = lambda _: 0

    def of(self, topic: str) -> Account | None:
        """The tenant of a topic; None: it has none. O(1) for topics that were asked for before."""
        if topic in self._known:
            return self._known[topic]
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        found = next((account for account, fits in zip(self.accounts, self._fits, strict=True) if topic and fits(topic)), None)
        self._known[topic] = found
        return found

    def owner(self, topic: str) -> str:
        """The name under which work for a topic waits for its turn."""
        account = self.of(topic)
        return OWN + topic if account is None else account.tenant.name

    def weight(self, owner: str) -> float:
        """The weight of an owner."""
        return self._weights.get(owner, 1)

    # Producing

    def refuse_bytes(self, topic: str, size: int, now: float) -> None:
        """Raise `RateLimited` if a request of `size` bytes is too early: before it is decoded."""
        account = self.of(topic)
        if account is not None:
            self._check(account, 0, size, now)

    def admit(self, topic: str, count: int, size: int, now: float) -> None:
        """Admit a request with `count` messages of `size` bytes, or raise `RateLimited` and admit nothing."""
        account = self.of(topic)
        if account is None:
            return
        self._check(account, count, size, now)
        for bucket, amount in ((account.messages, count), (account.bytes, size)):
            if bucket is not None:
                bucket.spend(amount, now)

    def _check(self, account: Account, count: int, size: int, now: float) -> None:
        tenant = account.tenant
        if tenant.produce_per_s and account.messages is None:
            account.messages = Bucket(tenant.produce_per_s, burst_of(tenant.produce_per_s, 0), now)
        if tenant.bytes_per_s and account.bytes is None:
            account.bytes = Bucket(tenant.bytes_per_s, burst_of(tenant.bytes_per_s, 0), now)
        for bucket, amount, what in ((account.messages, count, "messages"), (account.bytes, size, "bytes")):
            if bucket is not None and (wait := bucket.wait(amount, now)):
                account.refused[what] += 1
                raise RateLimited(
                    f"tenant {tenant.name!r} may send {bucket.rate:g} {what} a second; nothing was stored",
                    retry_after_ms=math.ceil(wait * 1000),
                )

    def stored(self, topic: str, count: int, size: int) -> None:
        """Count a request whose messages were stored."""
        account = self.of(topic)
        if account is not None:
            account.produced += count
            account.produced_bytes += size

    # Bytes of requests under way

    def hold(self, topic: str, count: int, own: int, total: int) -> None:
        """Count `count` more bytes of a request that has `own` already, or raise `Overloaded`. `total`: of all requests."""
        owner, account = self.owner(topic), self.of(topic)
        held, most = self._held.get(owner, 0), account.tenant.max_bytes if account is not None else 0
        if not may_hold(held, count, own, most, self._share(owner, total + count), total, self._held_max):
            if account is not None:
                account.refused["held"] += 1
            name = f"topic {topic!r}" if account is None else f"tenant {owner!r}"
            raise Overloaded(f"requests of {name} hold {held:,} bytes already; nothing was done", retry_after_ms=1_000)
        self._held[owner] = held + count
        if account is not None:
            account.held += count

    def _share(self, owner: str, total: int) -> float:
        """The part of all bytes that belongs to an owner, by weight, among those that hold any. It matters once half is taken."""
        if total <= self._held_max / 2:
            return self._held_max
        weights = sum(self.weight(other) for other in self._held if other != owner) + self.weight(owner)
        return self._held_max * self.weight(owner) / weights

    def release(self, topic: str, count: int) -> None:
        """Count the bytes of a request that was answered no longer."""
        owner, account = self.owner(topic), self.of(topic)
        left = self._held.get(owner, 0) - count
        if left > 0:
            self._held[owner] = left
        else:
            self._held.pop(owner, None)
        if account is not None:
            account.held -= count

    # Messages in flight

    def count_with(self, in_flight: Callable[[str], int], topics: Iterable[str]) -> None:
        """Count messages in flight with this function, which takes a topic; `topics`: all that there are."""
        self._in_flight = in_flight
        for account in self.accounts:
            account.busy.clear()
            account.in_flight, account.count_at = 0, 0.0
        for topic in topics:
            if (found := self.of(topic)) is not None:
                found.busy.add(topic)
        for account in self.accounts:
            self._count(account, 0.0)

    def room(self, topic: str, count: int, now: float) -> int:
        """How many of `count` messages a topic may give to consumers now."""
        account = self.of(topic)
        if account is None or not (most := account.tenant.max_in_flight):
            return count
        if account.in_flight + count > most:
            self._count(account, now)
        return max(0, min(count, most - account.in_flight))

    def block(self, topic: str, now: float) -> None:
        """Long polls of a topic wait for room. `unblocked` names it when there is some."""
        account = self.of(topic)
        if account is not None:
            account.blocked[topic] = None
            if now < account.count_at:  # messages may have ended since the last count
                self._ended[account] = None

    def delivered(self, topic: str, count: int, leased: bool) -> None:
        """Count messages that were given to consumers. `leased`: they are in flight now."""
        account = self.of(topic)
        if account is None or not count:
            return
        account.delivered += count
        if leased:
            account.in_flight += count
            account.busy.add(topic)

    def ended(self, topics: Iterable[str]) -> None:
        """Messages of these topics may be in flight no longer."""
        for topic in topics:
            account = self.of(topic)
            if account is not None and account.blocked:
                self._ended[account] = None

    def unblocked(self, now: float) -> list[str]:
        """Topics whose long polls may get messages again, WOKEN_MAX of a tenant."""
        out = list[str]()
        for account in list(self._ended):
            if not self._count(account, now):
                continue
            if account.in_flight < account.tenant.max_in_flight:
                woken = list(islice(account.blocked, WOKEN_MAX))
                for topic in woken:
                    del account.blocked[topic]
                out += woken
            if not account.blocked or account.in_flight >= account.tenant.max_in_flight:
                del self._ended[account]
        return out

    def next_count(self) -> float | None:
        """When `unblocked` is to be asked again; None: when messages have ended."""
        return min((account.count_at for account in self._ended), default=None)

    def counted(self) -> list[Account]:
        """All tenants, with the exact number of their messages in flight."""
        for account in self.accounts:
            self._count(account, account.count_at)
        return self.accounts

    def _count(self, account: Account, now: float) -> bool:
        """Count the messages in flight, unless that was done just now. O(topics that have any)."""
        if now < account.count_at:
            return False
        counts = {topic: self._in_flight(topic) for topic in account.busy}
        account.busy = {topic for topic, count in counts.items() if count}
        account.in_flight = sum(counts.values())
        account.count_at = now + COUNT_S * len(counts)
        return True


def may_hold(held: int, count: int, own: int, most: int, share: float, total: int, total_max: int) -> bool:
    """Whether a tenant may hold `count` more bytes for a request that has `own` of its `held` bytes. Its only request always
    may. `most`: its own limit, 0 for none. Once half of `total_max` is taken, it may hold no more than its `share`.

    >>> may_hold(90, 20, 0, 100, 1e9, 90, 1000), may_hold(90, 20, 90, 100, 1e9, 90, 1000)
    (False, True)
    >>> may_hold(300, 100, 0, 0, 250, 400, 1000), may_hold(300, 101, 0, 0, 250, 400, 1000)
    (True, False)
    """
    if held <= own:
        return True
    if most and held + count > most:
        return False
    return total + count <= total_max / 2 or held + count <= share
