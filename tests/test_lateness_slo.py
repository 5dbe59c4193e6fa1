"""Goals for lateness: burn rates, capacity and forecasts with any figures; late deliveries counted; and over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.command_line import Line
from tests.harness.server_process import Server, running
from turtlemq.engine import Engine
from turtlemq.lateness_slo import LATE_MS_MAX, WINDOWS_MS, BurnWindows, Deliveries, burn_rate, forecast_lateness, learned_rate
from turtlemq.model import Message
from turtlemq.server import slo_watch
from turtlemq.server.metrics.slo_families import slo_families
from turtlemq.server.service import Service
from turtlemq.server.slo_watch import Goal, SloWatch

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
T = 1_790_000_000_000
Steps = st.lists(st.tuples(st.integers(0, 4_000_000), st.integers(0, 50), st.integers(0, 50)), max_size=60)
Rates = st.floats(0.01, 1_000)


# Burn rates


@steady
@given(Steps, st.floats(0.5, 0.999))
def test_burn_rates_are_those_of_all_samples_in_the_window(steps: list[tuple[int, int, int]], share: float) -> None:
    windows, samples, at, counted = BurnWindows(), [(0, Deliveries())], 0, Deliveries()
    windows.add(0, counted)
    for passed, on_time, late in steps:
        at, counted = at + passed, Deliveries(counted.on_time + on_time, counted.late + late)
        if at - samples[-1][0] >= 29_000:
            samples.append((at, counted))
        windows.add(at, counted)
    for name, rate in windows.rates(at, counted, share).items():
        old = [sample for when, sample in samples if when <= at - WINDOWS_MS[name]]
        was = old[-1] if old else Deliveries()
        assert rate == burn_rate(counted.on_time - was.on_time, counted.late - was.late, share)


@steady
@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0.5, 0.999))
def test_burn_rate_is_one_when_the_budget_is_met_exactly(on_time: int, late: int, share: float) -> None:
    rate = burn_rate(on_time, late, share)
    assert 0 <= rate <= 1 / (1 - share) + 1e-6
    assert burn_rate(on_time, late + 1, share) >= rate
    assert burn_rate(99, 1, 0.99) == 1


# Capacity


@steady
@given(st.lists(st.tuples(Rates, st.booleans()), min_size=1))
def test_capacity_lies_between_the_least_and_the_most_measured(measured: list[tuple[float, bool]]) -> None:
    known: float | None = None
    for rate, busy in measured:
        before, known = known, learned_rate(known, rate, busy)
        assert known >= rate or (before is not None and known <= before)
    assert known is not None
    assert min(rate for rate, _ in measured) - 1e-9 <= known <= max(rate for rate, _ in measured) + 1e-9


def test_messages_that_wait_and_are_late_burn_the_budget() -> None:
    windows = BurnWindows()
    windows.add(0, Deliveries())
    now = Deliveries(on_time=90)
    assert windows.rates(60_000, now, 0.9)["5m"] == 0
    assert windows.rates(60_000, now, 0.9, overdue=10)["5m"] == 1.0


@steady
@given(Rates, Rates)
def test_capacity_follows_busy_consumers_and_not_idle_ones(before: float, now: float) -> None:
    known = before
    for _ in range(60):
        known = learned_rate(known, now, is_busy=True)
    assert known == pytest.approx(now, rel=1e-3, abs=0.01)
    assert learned_rate(before, now, is_busy=False) == max(before, now)


# Forecasts

Counts = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@steady
@given(Counts, st.integers(0, 1000), Rates, st.integers(0, 600_000), st.integers(0, 120_000))
def test_the_queue_of_a_forecast_loses_no_message(counts: list[int], waiting: int, rate: float, goal: int, passed: int) -> None:
    found = forecast_lateness(counts, T, 60_000, T + passed, waiting, rate, goal)
    queue = float(waiting)
    for i, (count, late) in enumerate(zip(counts, found.late_ms, strict=True)):
        busy_s = min(60_000, max(0, (i + 1) * 60_000 - passed)) / 1000
        queue = max(0.0, queue + count - rate * busy_s)
        assert late == 0 if queue < 1 else late == min(LATE_MS_MAX, round(queue / rate * 1000))
    assert found.worst_ms == max(found.late_ms)
    assert (found.late_from_ms is None) == (found.worst_at_ms is None) == (found.worst_ms <= goal)


@steady
@given(Counts, st.integers(0, 1000), Rates, st.floats(1, 10))
def test_more_consumers_are_never_later(counts: list[int], waiting: int, rate: float, more: float) -> None:
    slow, fast = (forecast_lateness(counts, T, 60_000, T, waiting, r, 0) for r in (rate, rate * more))
    assert all(a >= b for a, b in zip(slow.late_ms, fast.late_ms, strict=True))
    assert slow.late_from_ms is not None or fast.late_from_ms is None


def test_a_queue_without_consumers_is_late_for_a_day() -> None:
    assert forecast_lateness([0, 1], T, 1000, T, 0, 0, 5) == forecast_lateness([0, 7], T, 1000, T, 0, 0, 5)
    assert forecast_lateness([0, 1], T, 1000, T, 0, 0, 5).late_ms == [0, LATE_MS_MAX]


# The watch


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine.open(tmp_path / "data")
    yield made
    made.close()


def test_deliveries_count_from_due_and_once(engine: Engine) -> None:
    engine.configure("t", lateness_slo_ms=1_000, max_attempts=9, backoff_base_ms=0)
    put(engine, 5, T + 500, T)
    engine.tick(T + 500)
    view = engine.topics["t"].view
    assert view.overdue(1_000, T + 1_400) == 0
    engine.reserve("t", "a", 2, now_ms=T + 1_500)
    assert (view.deliveries, view.overdue(1_000, T + 1_600)) == (Deliveries(2, 0), 3)
    late = engine.reserve("t", "a", 9, now_ms=T + 1_501)
    assert (view.deliveries, view.overdue(1_000, T + 1_600)) == (Deliveries(2, 3), 0)
    engine.ack("t", "a", [f"-{id_}" for id_ in late.ids], now_ms=T + 1_600)
    engine.tick(T + 3_000)
    assert len(engine.reserve("t", "a", 9, now_ms=T + 9_000)) == 3
    assert view.deliveries == Deliveries(2, 3), "a second attempt is no first delivery"


def test_a_message_put_late_is_late_from_its_put(engine: Engine) -> None:
    engine.configure("t", lateness_slo_ms=1_000)
    put(engine, 1, T - 3_600_000, T)
    engine.tick(T)
    engine.reserve("t", "a", 1, now_ms=T + 900)
    assert engine.topics["t"].view.deliveries == Deliveries(1, 0)


def test_a_topic_without_a_goal_counts_nothing(engine: Engine) -> None:
    put(engine, 1, T, T)
    engine.tick(T)
    engine.reserve("t", "a", 1, now_ms=T + 90_000)
    assert engine.topics["t"].view.deliveries == Deliveries()
    assert SloWatch(Service()).of(engine.topics["t"]) is None


def put(engine: Engine, count: int, due: int, now: int) -> None:
    engine.submit("t", [Message(b"x", due_ms=due) for _ in range(count)], now_ms=now)


def work(engine: Engine, count: int, now: int) -> None:
    engine.tick(now)
    engine.ack("t", "a", engine.reserve("t", "a", count, now_ms=now).ids, now_ms=now)


def test_the_watch_measures_consumers_and_foresees_lateness(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo_watch, "now_ms", lambda: T)
    watch = SloWatch(Service())
    engine.configure("t", lateness_slo_ms=60_000)
    engine.move_group("t", "a", "earliest", T)

    def look(at: int) -> Goal:
        asyncio.run(watch.look(engine, at))
        goal = watch.of(engine.topics["t"])
        assert goal is not None
        return goal

    look(T)
    put(engine, 100, T, T)
    work(engine, 40, T + 1)
    assert look(T + 30_000).rates == {"a": 40 / 30}, "at least so many"
    work(engine, 10, T + 30_001)
    goal = look(T + 60_000)
    assert goal.rates["a"] == pytest.approx(40 / 30 - 0.2), "messages waited: the consumers are slower than they were"
    put(engine, 600, T + 3_600_000, T + 60_001)
    goal = look(T + 90_000)
    assert goal.forecast is not None
    assert goal.forecast.late_from_ms is not None
    assert abs(goal.forecast.late_from_ms - (T + 3_600_000)) <= 60_000
    assert goal.forecast.worst_ms == pytest.approx((600 - 60 * goal.rates["a"]) / goal.rates["a"] * 1000, rel=0.2)
    lines = [line for line in slo_families({"t": goal.answer(T + 90_000)}) if not line.startswith("#")]
    assert f'turtlemq_forecast_late_seconds{{topic="t",group="a"}} {goal.forecast.worst_ms / 1000:g}' in lines
    assert 'turtlemq_slo_overdue{topic="t"} 50' in lines
    engine.topics["t"].set_paused("a", True)
    before = goal.rates["a"]
    assert look(T + 120_000).rates["a"] == before, "a paused group is not slow"


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("data")) as made:
        yield made


def test_burn_rates_and_forecasts_over_http(server: Server) -> None:
    assert "slo" not in server.ok("PUT", "/v1/topics/slo", {"lateness_slo": {"share": 0.9}})
    topic = server.ok("PUT", "/v1/topics/slo", {"lateness_slo": {"ms": 60_000}})
    assert topic["slo"] == {
        "ms": 60_000,
        "share": 0.9,
        "on_time": 0,
        "late": 0,
        "overdue": 0,
        "burn": dict.fromkeys(WINDOWS_MS, 0.0),
        "forecast": None,
    }
    server.put("slo", *({"body": n, "delay": 1800} for n in range(50)), {"body": "now"})
    assert len(server.fetch("slo", wait=5)) == 1
    topic = server.ok("GET", "/v1/topics/slo")
    assert (topic["slo"]["on_time"], topic["slo"]["late"]) == (1, 0)
    text = server.call("GET", "/metrics").data.decode()
    assert 'turtlemq_slo_deliveries_total{topic="slo",outcome="on_time"} 1' in text
    found = server.ok("GET", "/v1/topics/slo/forecast?bucket=60&hours=1&capacity_per_s=0.1")
    assert found["capacity"]["worst_ms"] > 400_000
    assert found["capacity"]["late_from_ms"] is not None
    refused = server.call("GET", "/v1/topics/slo/forecast?capacity=true")
    assert (refused.status, refused.code) == (400, "INVALID_ARGUMENT")
    refused = server.call("PUT", "/v1/topics/slo", {"lateness_slo": {"share": 1}})
    assert refused.status == 400
    assert "0.5 to 0.99999" in refused.json["error"]["message"]


def test_the_command_line_says_when_it_will_be_late(server: Server) -> None:
    server.put("cli", *({"body": n, "delay": 1800} for n in range(50)))
    line = Line(server.url)
    assert "will be late from" in line("forecast", "cli", "--hours", "1", "--per-s", "0.05", code=1)
    assert json.loads(line("forecast", "cli", "--hours", "1", "--per-s", "50", "--json"))["capacity"]["worst_at_ms"] is None
