"""Turns: heavy work of many requests, one piece in each round of the event loop, so that what is due between is not late by more
than one piece. First come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.002  # the longest piece of `in_slices`


class FairTurns:
    """Await `turn()` before each piece of work that takes a millisecond or so, and await nothing else before it is done."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # somebody has had the turn of this round

    async def turn(self) -> None:
        """Returns in a round in which nobody else works."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        """A new round."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():  # else its request was cancelled
                following.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


async def in_slices(items: Iterable[T]) -> list[T]:
    """All items, made in slices of SLICE_S, between which the event loop does other work."""
    out: list[T] = []
    end = perf_counter() + SLICE_S
    for item in items:
        out.append(item)
        if perf_counter() >= end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S
    return out
