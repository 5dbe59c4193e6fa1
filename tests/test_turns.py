"""The wall clock timer that says when to tick, and fair turns for heavy work."""

from __future__ import annotations

import asyncio
import time

import pytest

from turtlemq.server.fair_turns import FairTurns
from turtlemq.server.timerfd import WallClockTimer


@pytest.mark.parametrize("exact", [True, False], ids=["timerfd", "the loop's timers"])
def test_an_alarm_never_rings_early(exact: bool) -> None:
    async def story() -> None:
        rung: asyncio.Queue[float] = asyncio.Queue()
        alarm = WallClockTimer(lambda: rung.put_nowait(time.time_ns() / 1e6))
        if not exact:
            alarm.close()  # the rest is available on other systems, too
        for wait_ms in (0.3, 1, 2.5, 20):
            at = time.time_ns() / 1e6 + wait_ms
            alarm.at(at)
            assert await asyncio.wait_for(rung.get(), 10) >= at
        alarm.at(0)  # long over: at once
        await asyncio.wait_for(rung.get(), 10)
        alarm.at(time.time_ns() / 1e6 + 10**7)
        alarm.at(time.time_ns() / 1e6 + 1)
        await asyncio.wait_for(rung.get(), 10)
        assert rung.empty(), "the one that was set before is forgotten"
        alarm.close()

    asyncio.run(story())


def test_one_piece_of_heavy_work_in_each_round() -> None:
    async def story() -> list[str]:
        turns, seen = FairTurns(), []

        async def work(name: str) -> None:
            for piece in range(3):
                await turns.turn()
                seen.append(f"{name}{piece}")

        async def rounds() -> None:
            for _ in range(20):
                seen.append("|")
                await asyncio.sleep(0)

        gone = asyncio.create_task(work("gone"))
        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        watch = asyncio.create_task(rounds())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(watch, *tasks)
        return seen

    seen = asyncio.run(story())
    pieces = [one for one in seen if one != "|" and not one.startswith("gone")]
    assert sorted(pieces) == sorted(f"{name}{piece}" for name in "abc" for piece in range(3))
    for name in "abc":
        assert [one for one in pieces if one[0] == name] == [f"{name}{piece}" for piece in range(3)]
    between = "".join("|" if one == "|" else "x" for one in seen)
    assert "xxx" not in between, "others come between"
