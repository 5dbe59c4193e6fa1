"""Cooperative scheduling on the event loop: long work is done in pieces, so that no other work is late by more than one piece.

`FairTurns` shares rounds of the event loop among requests, `TenantTurns` among tenants in proportion to their weights; `Slices`
and `in_slices` interrupt one long loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from time import perf_counter
from typing import TypeVar

from turtlemq.fair_queue import FairQueue
from turtlemq.server.tenants import Tenants

T = TypeVar("T")

SLICE_S = 0.002  # the longest piece of one long loop
PIECE_BYTES = 128 << 10  # the cost of a piece of about a millisecond: so many bytes of messages are decoded in it
SMALL_BYTES = 8 << 10  # the least cost of a request
LARGE_PIECE_BYTES = 512 << 10  # the highest cost of a piece: what takes longer is cut into pieces


class FairTurns:
    """A fair queue for heavy work: one piece in each round of the event loop, first come, first served.

    Await `turn()` before each piece that takes a millisecond or so; do not await anything else before the piece is done.
    """

    by_tenant = False  # whether small requests take turns, too

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # the turn of this round is taken

    async def turn(self, topic: str = "", cost: int = PIECE_BYTES) -> None:
        """Return in a round that no other piece of work has taken. `topic`: for which the piece is; `cost`: of it, in bytes."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        my_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(my_turn)
        await my_turn

    def charge(self, topic: str, cost: int) -> None:
        """Charge a piece whose cost was not known when it began."""

    def waiting(self, owners: Iterable[str]) -> list[tuple[str, int]]:
        """Pieces that wait for their turn, by owner. Here, none has an owner."""
        return []

    async def finish(self, steps: Generator[None, None, T], check: Callable[[], object] = int, topic: str = "") -> T:
        """The value that `steps` returns: each step is a turn, and `check` may stop them by raising."""
        while True:
            try:
                next(steps)
            except StopIteration as done:
                value: T = done.value
                return value
            await self.turn(topic)
            check()

    def _next(self) -> None:
        """Begin a new round."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():  # else its request was cancelled
                following.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


class TenantTurns(FairTurns):
    """Fair turns for a server with tenants: each waits in a queue of its own, and a round serves pieces of PIECE_BYTES."""

    by_tenant = True

    def __init__(self, tenants: Tenants) -> None:
        super().__init__()
        self._tenants = tenants
        self._queue = FairQueue[asyncio.Future[None]](tenants.weight, wanted=_waits)
        self._left = 0  # bytes that the present round may still serve
        self._costs: dict[asyncio.Future[None], int] = {}

    async def turn(self, topic: str = "", cost: int = PIECE_BYTES) -> None:
        """Return in a round with room for this piece, when it is the turn of the topic's tenant."""
        cost = max(SMALL_BYTES, min(cost, LARGE_PIECE_BYTES))
        loop = asyncio.get_running_loop()
        if not self._queue and (self._left > 0 or not self._taken):
            if not self._taken:
                self._taken, self._left = True, PIECE_BYTES
                loop.call_soon(self._next)
            self._left -= cost
            return
        my_turn: asyncio.Future[None] = loop.create_future()
        self._costs[my_turn] = cost
        self._queue.push(self._tenants.owner(topic), my_turn, cost)
        try:
            await my_turn
        finally:
            del self._costs[my_turn]

    def charge(self, topic: str, cost: int) -> None:
        """Charge the tenant of a topic."""
        self._queue.charge(self._tenants.owner(topic), cost)

    def waiting(self, owners: Iterable[str]) -> list[tuple[str, int]]:
        """Pieces that wait for their turn, by owner."""
        return [(owner, self._queue.waiting(owner)) for owner in owners]

    def _next(self) -> None:
        """Begin a new round, and serve those whose turn it is."""
        self._left = PIECE_BYTES
        self._taken = False
        while self._left > 0 and (following := self._queue.pop()) is not None:
            self._left -= self._costs[following]
            self._taken = True
            following.set_result(None)
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)


def _waits(my_turn: asyncio.Future[None]) -> bool:
    """Whether a request still waits for its turn: its client may be gone."""
    return not my_turn.done()


class Slices:
    """Cuts one long loop into slices of SLICE_S. Await `pause()` after each step; a step itself should be shorter than that."""

    def __init__(self) -> None:
        self._end = perf_counter() + SLICE_S

    async def pause(self) -> None:
        """Let the event loop do other work, if this slice is over."""
        if perf_counter() >= self._end:
            await asyncio.sleep(0)
            self._end = perf_counter() + SLICE_S


async def in_slices(items: Iterable[T]) -> list[T]:
    """All items, made in slices of SLICE_S, between which the event loop does other work."""
    out, slices = list[T](), Slices()
    for item in items:
        out.append(item)
        await slices.pause()
    return out
