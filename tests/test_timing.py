"""Timers: calls at their times, once or each period, cancelled or not; and rules about beats and timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument
from turtlemq.server.alarm_timer import AlarmTimer
from turtlemq.server.cluster_config import Cluster, check_cluster, timing_hints
from turtlemq.server.service import Service
from turtlemq.server.slo_watch import INTERVAL_S, SloWatch
from turtlemq.timing import EARLIEST, LATEST, WheelTimer, check_timing, next_round

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)


@steady
@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.booleans()), max_size=40),
    st.lists(st.integers(0, 700), min_size=1, max_size=30),
    st.integers(1, 300),
)
def test_a_wheel_makes_each_call_once_at_its_time(jobs: list[tuple[int, bool]], steps: list[int], tick_ms: int) -> None:
    wheel, rang, begun = WheelTimer(tick_ms), list[tuple[float, int]](), list[object]()
    for n, (delay_ms, is_cancelled) in enumerate(jobs):
        job = wheel.after_ms(delay_ms, lambda n=n: rang.append((wheel.now_ms, n)))  # type: ignore[misc]
        begun.append(job)
        if is_cancelled:
            job.cancel()
    for step in steps:
        wheel.advance(step)
    passed = sum(steps)
    assert wheel.now_ms == passed
    assert sorted(n for _, n in rang) == [n for n, (at, gone) in enumerate(jobs) if at <= passed and not gone]
    assert [at for at, _ in rang] == sorted(jobs[n][0] for _, n in rang)
    assert all(at == jobs[n][0] for at, n in rang)


@steady
@given(st.integers(1, 500), st.sampled_from([n / 8 for n in range(9)]), st.lists(st.integers(0, 2_000), min_size=1, max_size=20))
def test_rounds_come_each_period_from_a_random_first(period_ms: int, chance: float, steps: list[int]) -> None:
    wheel, rang = WheelTimer(7, lambda: chance), list[float]()
    wheel.every_ms(period_ms, lambda: rang.append(wheel.now_ms))
    for step in steps:
        wheel.advance(step)
    first = period_ms * chance
    assert len(rang) == (0 if sum(steps) < first else int((sum(steps) - first) // period_ms) + 1)
    assert all(at == pytest.approx(first + n * period_ms) for n, at in enumerate(rang))


@steady
@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(0, 20_000))
def test_missed_rounds_are_skipped(due: int, period: int, now: int) -> None:
    following = next_round(due, period, now)
    assert following > max(due, now) - (0 if following > now else 1)
    assert (following - due) % period == 0
    assert following - period <= max(due, now)


def test_a_call_may_begin_and_cancel_others() -> None:
    wheel, rang = WheelTimer(), list[str]()
    later = wheel.after_ms(30, lambda: rang.append("never"))

    def first() -> None:
        later.cancel()
        wheel.after_ms(5, lambda: rang.append("nested"))

    wheel.after_ms(10, first)
    rounds = wheel.every_ms(100, lambda: rang.append("round"))
    wheel.advance(60)
    rounds.cancel()
    wheel.advance(1_000)
    assert rang == ["nested", "round"]


def test_alarms_ring_on_the_event_loop_and_survive_errors() -> None:
    async def story() -> None:
        timer, done, rounds = AlarmTimer(), asyncio.Event(), list[int]()
        never = timer.after_ms(1, lambda: rounds.append(-1))
        never.cancel()

        def ring() -> None:
            rounds.append(len(rounds))
            if len(rounds) == 3:
                done.set()
            raise RuntimeError("a round fails")

        job = timer.every_ms(5, ring)
        await asyncio.wait_for(done.wait(), 60)
        job.cancel()
        finished = asyncio.Event()
        timer.after_ms(1, finished.set)
        await asyncio.wait_for(finished.wait(), 60)
        assert rounds[:3] == [0, 1, 2]

    asyncio.run(story())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine.open(tmp_path / "data")
    yield made
    made.close()


def test_goals_are_looked_at_each_period(engine: Engine) -> None:
    async def story() -> None:
        wheel, service = WheelTimer(), Service()
        service.start(engine)
        engine.configure("t", lateness_slo_ms=1_000)
        watch = SloWatch(service, wheel)
        life = watch(None)
        await anext(life)
        seen = []
        for _ in range(3):
            wheel.advance(1_000 * INTERVAL_S)
            await asyncio.sleep(0.01)
            goal = watch.of(engine.topics["t"])
            assert goal is not None
            seen.append(goal.looked_ms)
        assert seen[0] < seen[1] < seen[2]
        await anext(life, None)
        wheel.advance(10_000 * INTERVAL_S)
        service.drain()
        service.close()

    asyncio.run(story())


# Beats and timeouts


@steady
@given(st.floats(1, 1e5), st.floats(0.1, 10), st.floats(0, 10), st.floats(0.1, 50))
def test_timeouts_are_between_two_and_a_half_and_five_beats(beat: float, low: float, more: float, budget: float) -> None:
    fits = low >= EARLIEST and low + more <= LATEST and low + more >= 3
    timeouts = (low * beat, (low + more) * beat)
    if abs(low - EARLIEST) < 1e-6 or abs(low + more - LATEST) < 1e-6 or abs(low + more - 3) < 1e-6:
        return  # at a bound, rounding decides
    if not fits:
        with pytest.raises(InvalidArgument, match="does not fit beats"):
            check_timing(beat, timeouts)
    else:
        assert check_timing(beat, timeouts) == []
        assert bool(check_timing(beat, timeouts, budget * beat)) == (budget * beat < 2 * timeouts[1])


def test_slow_clusters_are_warned_of() -> None:
    cluster = Cluster(name="c", node="a", etcd=("http://x:1",), peer="a:1", secret_file="s", heartbeat_ms=600, lease_s=3)
    check_cluster(cluster)
    assert timing_hints(cluster) == []
    assert "callers that wait 30000 ms" in timing_hints(Cluster(heartbeat_ms=4_000, lease_s=16))[0]
    assert "lease of 20 s" in timing_hints(Cluster(heartbeat_ms=600, lease_s=20))[0]
