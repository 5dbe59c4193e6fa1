"""Clocks of nodes: the leader measures them with heartbeats, and each standby learns how wrong its own is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.replica_pair import leading, until
from turtlemq.replica import session
from turtlemq.replica.clock_skew import SAMPLES, Clocks, Skew


def test_the_sample_with_the_shortest_round_trip_counts() -> None:
    clocks = Clocks("a")
    clocks.heard("b", 1_000, 400, 1_900)
    assert clocks.skews()["b"] == Skew(700, 200)
    clocks.heard("b", 2_000, 2, 2_501)
    assert clocks.skews()["b"] == Skew(500, 1)
    for _ in range(SAMPLES):
        clocks.heard("b", 3_000, 10, 3_005)
    assert clocks.skews()["b"] == Skew(0, 5)
    clocks.forget("b")
    assert clocks.skews() == {"a": Skew(0, 0)}


def test_a_slow_network_is_no_wrong_clock() -> None:
    assert not Skew(700, 300).is_beyond(500)
    assert Skew(700, 100).is_beyond(500)
    assert Skew(-700, 100).is_beyond(500)
    assert not Skew(-500, 0).is_beyond(500)


@pytest.mark.parametrize(
    ("offsets", "wrong"), [((0, 0), ""), ((900, 900), "a"), ((0, 900), "c"), ((-900, 0), "b"), ((300, 600), "")]
)
def test_of_three_clocks_the_median_is_right(offsets: tuple[int, int], wrong: str) -> None:
    clocks = Clocks("a")
    for member, offset in zip("bc", offsets, strict=True):
        clocks.heard(member, 0, 0, offset)
    assert "".join(member for member, skew in clocks.skews().items() if skew.is_beyond(500)) == wrong


def test_of_two_clocks_that_of_the_leader_is_right() -> None:
    clocks = Clocks("a")
    clocks.heard("b", 0, 0, 900)
    assert [member for member, skew in clocks.skews().items() if skew.is_beyond(500)] == ["b"]


@pytest.mark.parametrize("ahead_ms", [0, 2_000, -2_000])
def test_a_standby_learns_how_wrong_its_clock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_ms: int) -> None:
    wrong = SimpleNamespace(time_ns=lambda: time.time_ns() + ahead_ms * 1_000_000)
    monkeypatch.setattr(session, "time", wrong)

    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following() as standby:
            await until(lambda: standby.skew is not None)
            skew = standby.skew
            assert skew is not None
            assert abs(skew.ms - ahead_ms) <= skew.error_ms + 2
            assert skew.is_beyond(500) == (ahead_ms != 0) or skew.error_ms > 400
            assert pair.lead.clocks.skews()["a"].ms == 0

    asyncio.run(asyncio.wait_for(story(), 30))
