"""The measure of the event loop: lag and stalls."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import pytest

from turtlemq.server.metrics.loop_lag import BUDGET_S, LoopLag


def lag_of(work: Callable[[], None]) -> LoopLag:
    """The measurements while a callback of the event loop does some work."""
    lag = LoopLag()

    async def main() -> None:
        context = lag.measure(None)
        await anext(context)
        await asyncio.sleep(0.1)
        work()
        await asyncio.sleep(0.1)
        with pytest.raises(StopAsyncIteration):
            await anext(context)

    asyncio.run(main())
    return lag


def test_work_above_the_budget_is_counted_as_a_stall() -> None:
    lag = lag_of(lambda: time.sleep(5 * BUDGET_S))
    assert lag.stalls == 1
    assert lag.take_longest() > 4 * BUDGET_S - 0.02
    assert lag.take_longest() == 0


def test_a_wait_for_a_processor_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says that the thread was ready to run for all of the time: the machine was busy, not the loop."""
    begun = time.monotonic_ns()
    monkeypatch.setattr(os, "pread", lambda *_: b"0 %d 0" % (time.monotonic_ns() - begun))
    lag = lag_of(lambda: time.sleep(5 * BUDGET_S))
    assert lag.stalls == 0
    assert (lag.lag.quantile(1.0) or 0) > BUDGET_S
