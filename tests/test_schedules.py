"""The pure rules of schedules: which times come, which are left out after an outage or a pause, and that none comes twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turtlemq.errors import InvalidId, InvalidSchedule
from turtlemq.model import DUE_MS_MAX
from turtlemq.schedules import LATE_MS, LEAD_MS, NAME_BYTES_MAX, CatchUp, Schedule, Timing, check_name, firing_id

NOW = 1_774_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
timings = st.one_of(
    st.builds(Timing, every_ms=st.integers(100, 2 * DAY), jitter_ms=st.integers(0, 2 * HOUR)),
    st.builds(Timing, cron=st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 9 * * MON-FRI"]), zone=st.just("Europe/Berlin")),
    st.builds(Timing, delays_ms=st.lists(st.integers(1, DAY), min_size=1, max_size=20).map(tuple)),
)


def made(catch_up: CatchUp = "one", /, **timing: Any) -> Schedule:
    return Schedule("s", Timing(**timing), catch_up).begun(NOW)


def run(schedule: Schedule, from_ms: int, to_ms: int, since_ms: int = 0) -> tuple[list[int], Schedule]:
    """Step at each time at which the schedule wants it, from the first moment on."""
    fired: list[int] = []
    now_ms = from_ms
    while True:
        times, schedule = schedule.step(now_ms, since_ms)
        fired += times
        now_ms = max(now_ms, schedule.wake_ms)
        if now_ms > to_ms:
            return fired, schedule


def test_intervals_are_counted_from_the_start_or_from_now() -> None:
    assert made(every_ms=HOUR).upcoming(NOW, 3) == [NOW + HOUR, NOW + 2 * HOUR, NOW + 3 * HOUR]
    assert made(every_ms=HOUR, start_ms=NOW + 5).upcoming(NOW, 2) == [NOW + 5, NOW + 5 + HOUR]
    assert made(every_ms=HOUR, start_ms=NOW - 5).upcoming(NOW, 2) == [NOW - 5 + HOUR, NOW - 5 + 2 * HOUR]


def test_delays_grow_and_end() -> None:
    polling = made(delays_ms=(60_000, 300_000, HOUR))
    fired, ended = run(polling, NOW, NOW + DAY)
    assert fired == [NOW + 60_000, NOW + 360_000, NOW + 360_000 + HOUR]
    assert ended.has_ended
    assert ended.shown_next(NOW + DAY) is None


@pytest.mark.parametrize("limit", [{"count": 3}, {"end_ms": NOW + 3 * HOUR}])
def test_a_schedule_ends_after_its_count_or_end(limit: dict[str, int]) -> None:
    fired, ended = run(made(every_ms=HOUR, **limit), NOW, NOW + DAY)
    assert fired == [NOW + HOUR, NOW + 2 * HOUR, NOW + 3 * HOUR]
    assert ended.has_ended


def test_no_firing_before_the_start() -> None:
    assert made(cron="0 * * * *", start_ms=NOW + DAY).upcoming(NOW, 1)[0] >= NOW + DAY


@given(timings, st.integers(0, 10 * DAY))
def test_steps_fire_the_upcoming_times_in_order(timing: Timing, later: int) -> None:
    schedule = Schedule("s", timing).begun(NOW)
    expected = schedule.upcoming(NOW, 50)
    fired, _ = run(schedule, NOW, expected[-1])
    assert fired[: len(expected)] == expected
    assert all(a < b for a, b in pairwise(fired))
    assert fired[0] > NOW
    assert [at for at in schedule.upcoming(NOW + later, 5) if at <= NOW + later] == []


@given(st.integers(1_000, 10 * DAY), st.integers(1, 10 * DAY), st.sampled_from(["skip", "one", "all"]))
def test_missed_times_by_catch_up(every_ms: int, outage: int, catch_up: CatchUp) -> None:
    schedule = made(catch_up, every_ms=every_ms, start_ms=NOW + 1)
    back = NOW + outage
    missed = list(range(NOW + 1, back, every_ms))[:200]
    fired: list[int] = []
    while schedule.wake_ms <= back and len(fired) < 200:
        times, schedule = schedule.step(back, back)
        fired += times
    late = [at for at in fired if at < back][:200]
    if back - LATE_MS <= NOW + 1:
        assert late == missed, "late by a minute at most, none was missed"
    else:
        assert late == {"skip": [], "one": missed[:1], "all": missed}[catch_up]


def test_a_firing_that_slept_over_the_outage_is_the_one() -> None:
    schedule = made(every_ms=HOUR)
    back = NOW + 10 * HOUR + 1
    assert schedule.step(back, back, made_up=True)[0] == []
    assert schedule.step(back, back)[0] == [NOW + HOUR]


def test_a_busy_server_is_late_and_a_leap_is_missed() -> None:
    schedule = made("skip", every_ms=10_000)
    busy = NOW + 45_000
    assert schedule.step(busy, NOW)[0] == [NOW + 10_000, NOW + 20_000, NOW + 30_000, NOW + 40_000]
    leapt = NOW + DAY
    fired, after = schedule.step(leapt, NOW)
    assert fired
    assert min(fired) >= leapt - LATE_MS
    assert after.wake_ms > leapt


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
def test_a_restart_within_a_minute_misses_nothing(catch_up: CatchUp) -> None:
    schedule = made(catch_up, every_ms=10_000)
    back = NOW + 10_000 + LATE_MS
    assert schedule.step(back, back)[0] == list(range(NOW + 10_000, back + LEAD_MS + 1, 10_000))[: 1 + LATE_MS // 10_000]


def test_times_that_were_no_outage_when_a_backlog_began_are_fired() -> None:
    schedule = made("skip", every_ms=10_000)
    later = NOW + 45_000 + 3 * LATE_MS
    assert schedule.step(later, NOW, NOW)[0][0] == NOW + 10_000
    assert schedule.step(later, NOW)[0][0] > NOW + 10_000


def test_a_clock_that_goes_back_fires_nothing_again() -> None:
    schedule = made(every_ms=HOUR)
    fired, schedule = run(schedule, NOW, NOW + 5 * HOUR)
    assert run(schedule, NOW, NOW + 4 * HOUR) == ([], schedule)
    assert run(schedule, NOW, NOW + 6 * HOUR)[0] == [fired[-1] + HOUR]


def test_a_firing_is_put_ahead_unless_overlaps_are_skipped() -> None:
    schedule = made(every_ms=HOUR)
    assert schedule.wake_ms == NOW + HOUR - LEAD_MS
    assert replace(schedule, overlap="skip").wake_ms == NOW + HOUR
    quick = made(every_ms=100)
    times, after = quick.step(NOW, NOW)
    assert times == [NOW + 100]
    assert after.wake_ms == NOW + 100


def test_times_in_a_pause_are_left_out() -> None:
    paused = made(every_ms=HOUR).with_pause(True, NOW)
    assert paused.wake_ms == DUE_MS_MAX
    assert paused.shown_next(NOW) is None
    assert paused.upcoming(NOW + 150 * 60_000, 1) == [NOW + 3 * HOUR]
    assert paused.with_pause(False, NOW + 150 * 60_000).next_ms == NOW + 3 * HOUR


def test_putting_a_schedule_again_does_not_shift_it() -> None:
    _, old = run(made(every_ms=HOUR, count=3), NOW, NOW + HOUR)
    later = NOW + 100 * 60_000
    same = Schedule("s", Timing(every_ms=HOUR, count=3), "all").replacing(old, later)
    assert (same.next_ms, same.fired, same.catch_up) == (NOW + 2 * HOUR, 1, "all")
    other = Schedule("s", Timing(every_ms=2 * HOUR, count=3)).replacing(old, later)
    assert (other.next_ms, other.fired) == (later + 2 * HOUR, 0)


@given(timings)
def test_a_firing_that_was_taken_back_comes_again(timing: Timing) -> None:
    schedule = Schedule("s", timing).begun(NOW)
    wake_ms = max(NOW, schedule.wake_ms)
    (first, *_), after = schedule.step(wake_ms, NOW)
    if wake_ms < first and after.last_ms == first:
        again = after.without_last(wake_ms)
        assert (again.next_ms, again.fired) == (first, 0)


@given(st.integers(1, DAY), st.integers(100, DAY))
def test_jitter_is_later_never_reaches_the_next_time_and_stays(jitter_ms: int, every_ms: int) -> None:
    schedule = made(every_ms=every_ms, jitter_ms=jitter_ms)
    plain = made(every_ms=every_ms).upcoming(NOW, 21)
    times = schedule.upcoming(NOW, 20)
    assert all(a <= at < b and at <= a + jitter_ms for at, (a, b) in zip(times, pairwise(plain), strict=True))
    assert times == made(every_ms=every_ms, jitter_ms=jitter_ms).upcoming(NOW, 20)


@given(st.integers(1, 2 * HOUR), st.integers(0, 3 * HOUR))
def test_jitter_never_goes_beyond_the_end(jitter_ms: int, rest: int) -> None:
    end_ms = NOW + 2 * HOUR + rest
    times = made(every_ms=HOUR, jitter_ms=jitter_ms, end_ms=end_ms).upcoming(NOW, 10)
    assert len(times) == 2 + rest // HOUR
    assert max(times) <= end_ms


@given(timings, st.booleans(), st.sampled_from(["skip", "one", "all"]))
def test_a_stored_schedule_is_read_back(timing: Timing, paused: bool, catch_up: CatchUp) -> None:
    _, schedule = Schedule("s", timing, catch_up, paused=paused).begun(NOW).step(NOW + DAY, NOW)
    assert Schedule.from_fields("s", schedule.to_fields()) == schedule


@pytest.mark.parametrize(
    "timing",
    [
        {},
        {"cron": "* * * * *", "every_ms": 1_000},
        {"cron": "nonsense"},
        {"cron": "* * * * *", "zone": "Mars/Olympus"},
        {"every_ms": 99},
        {"every_ms": -1},
        {"delays_ms": (0,)},
        {"delays_ms": (1,) * 1_001},
        {"every_ms": 1_000, "start_ms": 1_774_000_000},
        {"every_ms": 1_000, "end_ms": DUE_MS_MAX + 1},
        {"every_ms": 1_000, "count": 0},
        {"every_ms": 1_000, "jitter_ms": DAY + 1},
    ],
)
def test_bad_timings_are_refused(timing: dict[str, object]) -> None:
    with pytest.raises(InvalidSchedule):
        Timing(**timing).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a\n", "x" * (NAME_BYTES_MAX + 1)])
def test_names_whose_firings_had_no_valid_id_are_refused(name: str) -> None:
    with pytest.raises(InvalidId):
        check_name(name)
    check_name("report of the day")
    assert len(firing_id("x" * NAME_BYTES_MAX, NOW)) == 200
