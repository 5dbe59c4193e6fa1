"""The credit of a subscription, and its part in the pool of each topic. Pure: nothing here waits or sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turtlemq.server.grpc.connection import UNSENT_MAX
from turtlemq.server.grpc.deliveries import LOW, Held, Member
from turtlemq.server.grpc.delivery_columns import size_of
from turtlemq.server.outgoing.messages import Delivered

HELD_MAX = 100_000  # deliveries of one subscription without an ack
FIRST_FETCH = 16  # messages, while their size is not known and bytes are counted


@dataclass(slots=True)
class Credit:
    """Messages and bytes that may be sent from now on (None: not counted), and figures of a subscription in all its topics."""

    messages: int = 0
    bytes: int | None = None
    low: int | None = None
    unacked: int = 0  # deliveries that are not acknowledged
    lows_unacked: int = 0  # of them, those of low priority
    lacks_room: bool = False  # a topic had no room since the last look
    lacks_low_room: bool = False
    lacks_bytes: set[Subscriber] = field(default_factory=set)  # topics whose next message was larger than the credit

    def add(self, given: Any) -> None:
        """Add the credit of a message."""
        self.messages += given.messages
        if given.bytes or self.bytes is not None:
            self.bytes = (self.bytes or 0) + given.bytes
        if given.low or self.low is not None:
            self.low = (self.low or 0) + given.low

    def spend(self, messages: Sequence[Delivered], sign: int = 1) -> None:
        """Count messages as sent; with -1, take that back."""
        self.messages -= sign * len(messages)
        if self.bytes is not None:
            self.bytes -= sign * sum(map(size_of, messages))
        if self.low is not None:
            self.low -= sign * sum(one.priority == LOW for one in messages)


@dataclass(eq=False, slots=True)
class Subscriber(Member):
    """A subscription in the pool of one topic."""

    credit: Credit = field(kw_only=True)
    mean_bytes: float = 0.0  # of its messages, exponentially smoothed
    short_bytes: int = 0  # the next message of its topic takes so many bytes, more than the credit has

    @property
    def room(self) -> int:
        """How many deliveries it may get now."""
        credit = self.credit
        room = max(0, min(credit.messages, HELD_MAX - credit.unacked))
        if self.call.ended or self.call.unsent > UNSENT_MAX // 2:
            room = 0
        elif credit.bytes is not None:  # more would be fetched, and given back
            fitting = max(1, int(credit.bytes / self.mean_bytes)) if self.mean_bytes else FIRST_FETCH
            room = 0 if credit.bytes < max(1, self.short_bytes) else min(room, fitting)
        if not room:
            self.credit.lacks_room = True
        return room

    @property
    def size(self) -> int:
        """How many deliveries the subscription may have without an ack."""
        return max(1, self.credit.messages + self.credit.unacked)

    @property
    def low_room(self) -> int:
        """How many deliveries of low priority it may get now."""
        credit = self.credit
        most = max(1, self.size * 3 // 4) - self.credit.lows_unacked if credit.low is None else credit.low
        if most <= 0:
            self.credit.lacks_low_room = True
        return max(0, most)

    def claim(self, messages: list[Delivered], count: int) -> tuple[list[Delivered], list[Delivered]]:
        """The first `count` messages that it may get, and all others. The former are paid with credit."""
        credit, low, fitting = self.credit, self.low_room, list[Delivered]()
        if credit.bytes is not None and messages:
            mean = sum(map(size_of, messages)) / len(messages)
            self.mean_bytes = (self.mean_bytes + mean) / 2 if self.mean_bytes else mean
        left, rest, self.short_bytes = credit.bytes, list[Delivered](), 0
        for i, one in enumerate(messages):
            is_low = one.priority == LOW
            if len(fitting) >= count:
                rest += messages[i:]
                break
            if left is not None and size_of(one) > left:
                self.short_bytes = size_of(one)
                rest += messages[i:]
                break
            if is_low and low <= 0:
                rest.append(one)
                continue
            fitting.append(one)
            low -= is_low
            left = None if left is None else left - size_of(one)
        credit.spend(fitting)
        if self.short_bytes:
            self.credit.lacks_bytes.add(self)
        return fitting, rest

    def unclaim(self, messages: list[Delivered]) -> None:
        """Give the credit of messages back that are not delivered."""
        self.credit.spend(messages, -1)

    def hold(self, id_: str, held: Held) -> None:
        """Hold a delivery."""
        Member.hold(self, id_, held)
        self.credit.unacked += 1
        self.credit.lows_unacked += held.is_low

    def drop(self, id_: str) -> Held | None:
        """Hold a delivery no longer. Returns it, if it was held."""
        held = Member.drop(self, id_)
        if held is not None:
            self.credit.unacked -= 1
            self.credit.lows_unacked -= held.is_low
        return held

    def _count_claims(self, messages: list[Delivered], sign: int) -> None:
        """Nothing to count: claims are paid with credit."""
