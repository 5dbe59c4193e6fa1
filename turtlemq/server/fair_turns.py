"""Cooperative scheduling on the event loop: long work is done in pieces, so that no other work is late by more than one piece.

`FairTurns` shares rounds of the event loop among requests, `Slices` and `in_slices` interrupt one long loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.002  # the longest piece of one long loop


class FairTurns:
    """A fair queue for heavy work: one piece in each round of the event loop, first come, first served.

    Await `turn()` before each piece that takes a millisecond or so; do not await anything else before the piece is done.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # the turn of this round is taken

    async def turn(self) -> None:
        """Return in a round that no other piece of work has taken."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        my_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(my_turn)
        await my_turn

    async def finish(self, steps: Generator[None, None, T], check: Callable[[], object] = int) -> T:
        """The value that `steps` returns: each step is a turn, and `check` may stop them by raising."""
        while True:
            try:
                next(steps)
            except StopIteration as done:
                value: T = done.value
                return value
            await self.turn()
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
