"""Schedules in the engine, on real files: each time is fired exactly once, whatever stops the process in between."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.harness.engine_disk import Disk, abandon, cut_power
from tests.harness.schedule_runs import DAY, HOUR, NOW, SECOND, Stop, Stopping, fetched, opened, put, run
from turtlemq import cron
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, DiskFull, InvalidId, InvalidSchedule, UnknownSchedule
from turtlemq.model import Message
from turtlemq.schedules import AT_ONCE, LEAD_MS, CatchUp, firing_id
from turtlemq.topic.scheduler import FIRINGS, RETRY_MS, TRIGGERS_MAX


def grid(name: str, every_ms: int, count: int, start_ms: int = NOW) -> list[str]:
    return [firing_id(name, start_ms + every_ms * k) for k in range(1, count + 1)]


def test_schedules_of_all_kinds_fire_in_order_with_their_content(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "hourly", every_ms=HOUR)
    put(engine, "nine", cron="0 9 * * *", zone="Europe/Berlin")  # NOW is 10:46 there
    put(engine, "poll", delays_ms=(60 * SECOND, HOUR))
    run(engine, NOW, NOW + DAY)
    nine = NOW - NOW % DAY + DAY + 8 * HOUR
    expected = [*grid("hourly", HOUR, 24), firing_id("nine", nine), f"poll@{NOW + 60_000}", f"poll@{NOW + 60_000 + HOUR}"]
    view = engine.message("t", "hourly@1774003600000")
    assert view is not None
    assert (view.body, view.json, view.due_ms) == (b"hourly", False, NOW + HOUR)
    assert fetched(engine, NOW + DAY) == sorted(expected, key=lambda id_: (int(id_.partition("@")[2]), id_))
    assert engine.check() == []
    engine.close()


def test_a_firing_is_never_early_and_as_punctual_as_a_message(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR)
    engine.tick(NOW + HOUR - LEAD_MS)
    assert engine.topic("t").view.messages("sleep")[0][0].id == f"s@{NOW + HOUR}", "it sleeps ahead"
    engine.tick(NOW + HOUR - 1)
    assert fetched(engine, NOW + HOUR - 1) == []
    engine.tick(NOW + HOUR)
    assert fetched(engine, NOW + HOUR) == [f"s@{NOW + HOUR}"]
    engine.close()


def test_schedules_are_in_no_listing_of_messages(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR)
    view = engine.topic("t").view
    assert [view.messages(state)[0] for state in ("sleep", "ready", "dead", "history", "cancelled")] == [[]] * 5
    stats = engine.stats("t")
    assert (stats.sleep, stats.next_due_ms, stats.schedules) == (0, None, 1)
    assert sum(engine.forecast("t", NOW).counts) == 0
    for id_ in ("s", "schedule/s"):
        assert engine.message("t", id_) is None
    assert engine.cancel("t", ["s"], NOW) == {"s": "unknown"}
    engine.close()


def test_a_schedule_ends_and_is_removed_with_the_history(tmp_path: Path) -> None:
    engine = opened(tmp_path, history_hours=24)
    put(engine, "s", every_ms=HOUR, count=2)
    run(engine, NOW, NOW + 3 * HOUR)
    ended = engine.topic("t").scheduler.get("s").schedule
    assert (ended.has_ended, ended.fired, ended.shown_next(NOW + 3 * HOUR)) == (True, 2, None)
    assert put(engine, "s", NOW + 3 * HOUR, every_ms=HOUR, count=2).schedule.has_ended, "put again, it goes on where it was"
    run(engine, NOW + 3 * HOUR, NOW + 2 * DAY)
    assert engine.topic("t").scheduler.find("s") is None
    assert fetched(engine, NOW + 2 * DAY) == grid("s", HOUR, 2)
    engine.close()


# Stops


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
def test_each_time_is_fired_once_wherever_the_process_stops(tmp_path: Path, power: bool) -> None:
    first = tmp_path / "first"
    engine = opened(first)
    for name in ("a", "b", "c"):
        put(engine, name, every_ms=10 * SECOND, catch_up="all")
    engine.close()
    counting, end = Stopping(), NOW + 35 * SECOND
    shutil.copytree(first, tmp_path / "count")
    engine = opened(tmp_path / "count", counting)
    run(engine, NOW, end)
    engine.close()
    assert counting.calls > 30
    expected = sorted(id_ for name in ("a", "b", "c") for id_ in grid(name, 10 * SECOND, 4))
    for at in range(0, counting.calls, 1 if counting.calls < 150 else 2):
        folder = tmp_path / f"at{at}"
        shutil.copytree(first, folder)
        door, stopped = Stopping(at), None
        try:
            stopped = opened(folder, door)
            run(stopped, NOW, end)
        except (Stop, AssertionError):  # the latter for a topic in trouble
            assert door.calls > at
        if stopped is not None:
            cut_power(stopped, door) if power else abandon(stopped)
        engine = opened(folder)
        run(engine, end, end + 6 * SECOND)
        assert sorted(fetched(engine, end + 6 * SECOND)) == expected, at
        assert engine.check() == []
        engine.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
@pytest.mark.parametrize("asleep", [False, True], ids=["none ahead", "one ahead"])
@pytest.mark.parametrize("clean", [False, True])
def test_an_outage_is_caught_up_as_asked(tmp_path: Path, catch_up: CatchUp, asleep: bool, clean: bool) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR, catch_up=catch_up)
    down = NOW + 2 * HOUR + (HOUR - 100 if asleep else 10)
    run(engine, NOW, down)
    assert engine.stats("t").sleep == int(asleep)
    engine.close() if clean else abandon(engine)
    engine, back = opened(tmp_path), NOW + 6 * HOUR + HOUR // 2
    run(engine, back, back + HOUR)
    missed = {"skip": [], "one": grid("s", HOUR, 3)[2:], "all": grid("s", HOUR, 6)[2:]}[catch_up]
    assert fetched(engine, back + HOUR) == [*grid("s", HOUR, 2), *missed, f"s@{NOW + 7 * HOUR}"]
    assert engine.check() == []
    engine.close()


def test_many_missed_times_are_fired_in_small_steps(tmp_path: Path) -> None:
    engine, count, outage = opened(tmp_path), 30, 250
    for n in range(count):
        put(engine, f"s{n}", every_ms=SECOND, catch_up="all")
    engine.close()
    engine, back, steps = opened(tmp_path), NOW + outage * SECOND, list[int]()
    scheduler = engine.topic("t").scheduler
    scheduler.begin(back)
    while scheduler.run_if_due(back):
        steps.append(engine.topic("t").view.totals().fired - sum(steps))
    assert max(steps) < FIRINGS + AT_ONCE
    assert len(fetched_after(engine, back)) == count * outage
    engine.close()


def fetched_after(engine: Engine, now_ms: int) -> list[str]:
    """All firings up to now."""
    run(engine, now_ms, now_ms)
    return fetched(engine, now_ms)


def test_a_full_disk_only_delays_firings(tmp_path: Path) -> None:
    door = Disk()
    engine = opened(tmp_path / "data", door)  # type: ignore[arg-type]
    put(engine, "s", every_ms=10 * SECOND, catch_up="all")
    door.full = True
    engine.tick(NOW + 10 * SECOND)
    assert isinstance(engine.trouble["t"], DiskFull)
    with pytest.raises(DiskFull):
        put(engine, "other", every_ms=HOUR)
    door.full = False
    run(engine, NOW + 21 * SECOND, NOW + 30 * SECOND)
    assert fetched(engine, NOW + 30 * SECOND) == grid("s", 10 * SECOND, 3)
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("catch_up", ["skip", "one"])
def test_a_disk_that_is_full_for_long_loses_no_time(tmp_path: Path, catch_up: CatchUp) -> None:
    door = Disk()
    engine = opened(tmp_path / "data", door)  # type: ignore[arg-type]
    put(engine, "s", every_ms=10 * SECOND, catch_up=catch_up)
    run(engine, NOW, NOW + 10 * SECOND)
    door.full = True
    for now in range(NOW + 20 * SECOND, NOW + 300 * SECOND, 20 * SECOND):
        engine.tick(now)
        assert isinstance(engine.trouble["t"], DiskFull)
    door.full = False
    run(engine, NOW + 300 * SECOND, NOW + 300 * SECOND)
    assert fetched(engine, NOW + 300 * SECOND) == grid("s", 10 * SECOND, 30)
    leapt = NOW + DAY
    run(engine, leapt, leapt)
    assert len(fetched(engine, leapt)) < 9, "a leap after that is one"
    engine.close()


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
@pytest.mark.parametrize("asleep", [False, True], ids=["none ahead", "one ahead"])
def test_a_kill_and_a_quick_start_lose_no_time(tmp_path: Path, catch_up: CatchUp, asleep: bool) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=10 * SECOND, catch_up=catch_up)
    run(engine, NOW, NOW + 20 * SECOND - (100 if asleep else 5 * SECOND))
    assert engine.stats("t").sleep == int(asleep)
    abandon(engine)
    engine, back = opened(tmp_path), NOW + 45 * SECOND
    run(engine, back, back)
    assert fetched(engine, back) == grid("s", 10 * SECOND, 4)
    engine.close()


def test_a_zone_that_has_gone_stops_that_schedule_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, ttr_ms=30 * SECOND, backoff_jitter="none", backoff_base_ms=SECOND)
    put(engine, "lost", cron="* * * * *", zone="Europe/Berlin")
    put(engine, "kept", every_ms=60 * SECOND, start_ms=NOW + SECOND)
    first = NOW - NOW % (60 * SECOND) + 60 * SECOND

    def gone(name: str) -> NoReturn:
        raise InvalidSchedule(f"{name!r} is no time zone")

    with monkeypatch.context() as patch:
        patch.setattr(cron, "zone_of", gone)
        engine.tick(first)
        assert "schedule 'lost' cannot fire: 'Europe/Berlin' is no time zone" in str(engine.trouble["t"])
        engine.tick(first + SECOND)
        assert engine.trouble == {}, "it is tried again later"
        assert engine.reserve("t", "g", 9, first + SECOND).ids == [f"kept@{NOW + SECOND}"]
        run(engine, first + SECOND, first + 40 * SECOND)
        assert engine.reserve("t", "g", 9, first + 40 * SECOND).ids == [f"kept@{NOW + SECOND}"], "leases end"
        with pytest.raises(InvalidSchedule):
            engine.topic("t").scheduler.get("lost").schedule.upcoming(first + HOUR, 1)
    later = first + RETRY_MS
    for now in range(first + 60 * SECOND, later, 60 * SECOND):
        run(engine, now, now)
    assert not [id_ for id_ in fetched(engine, later - 1) if id_.startswith("lost")]
    run(engine, later, later)
    late = [id_ for id_ in fetched(engine, later) if id_.startswith("lost")]
    assert late == [f"lost@{at}" for at in (first, later - 60 * SECOND, later)], "one for all that it missed, and the last minute"
    assert engine.check() == []
    engine.close()


def test_a_clock_that_steps_fires_no_time_twice(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=10 * SECOND)
    run(engine, NOW, NOW + 25 * SECOND)
    run(engine, NOW - HOUR, NOW - HOUR + 60 * SECOND)
    run(engine, NOW + 2 * SECOND, NOW + 40 * SECOND)
    assert fetched(engine, NOW + 40 * SECOND) == grid("s", 10 * SECOND, 4)
    leapt = NOW + DAY
    run(engine, leapt, leapt + 10 * SECOND)
    late = fetched(engine, leapt + 10 * SECOND)
    assert len(late) == len(set(late))
    assert late[-1] == f"s@{leapt + 10 * SECOND}"
    assert len(late) <= 9, "those of the last minute, and one for the rest"
    engine.close()


# Changes


@pytest.mark.parametrize("change", ["remove", "pause", "replace"])
def test_a_firing_that_sleeps_ahead_goes_with_a_change(tmp_path: Path, change: str) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR)
    at = NOW + HOUR - SECOND
    run(engine, NOW, at)
    assert engine.stats("t").sleep == 1
    scheduler = engine.topic("t").scheduler
    if change == "remove":
        scheduler.remove("s", at)
    elif change == "pause":
        scheduler.set_paused("s", True, at)
    else:
        put(engine, "s", at, every_ms=2 * HOUR)
    scheduler.commit()
    assert engine.stats("t").sleep == 0
    engine.changed(engine.topic("t"), at)
    run(engine, at, at + HOUR)
    assert fetched(engine, at + HOUR) == []
    if change == "pause":
        scheduler.set_paused("s", False, at + HOUR)
        scheduler.commit()
        engine.changed(engine.topic("t"), at + HOUR)
        run(engine, at + HOUR, at + 2 * HOUR)
        assert fetched(engine, at + 2 * HOUR) == [f"s@{NOW + 2 * HOUR}"]
    engine.close()


def test_a_body_is_replaced_and_the_times_stay(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR)
    at = NOW + HOUR - SECOND
    run(engine, NOW, at)
    old = engine.topic("t").scheduler.get("s")
    new = engine.topic("t").scheduler.put(old.changed(old.schedule), at)
    assert new.schedule.shown_next(at) == NOW + HOUR
    engine.topic("t").scheduler.commit()
    engine.changed(engine.topic("t"), at)
    run(engine, at, NOW + 2 * HOUR)
    assert fetched(engine, NOW + 2 * HOUR) == grid("s", HOUR, 2)
    engine.close()


def test_a_trigger_fires_now_and_moves_nothing(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    put(engine, "s", every_ms=HOUR, paused=True)
    scheduler = engine.topic("t").scheduler
    assert scheduler.trigger("s", NOW + 5) == (f"s@{NOW + 5}", NOW + 5)
    engine.tick(NOW + 5)
    assert fetched(engine, NOW + 5) == [f"s@{NOW + 5}"]
    assert scheduler.get("s").schedule.fired == 0
    with pytest.raises(UnknownSchedule):
        scheduler.trigger("other", NOW)
    engine.close()


def test_a_trigger_looks_back_one_second_at_most(tmp_path: Path) -> None:
    engine = opened(tmp_path, run_messages=10_000)
    put(engine, "s", every_ms=HOUR)
    taken = [Message(b"", NOW + DAY, firing_id("s", NOW - n)) for n in range(TRIGGERS_MAX - 1)]
    engine.submit("t", taken, NOW)
    scheduler = engine.topic("t").scheduler
    assert scheduler.trigger("s", NOW)[1] == NOW - TRIGGERS_MAX + 1
    with pytest.raises(Conflict, match="last 1,000 ms"):
        scheduler.trigger("s", NOW)
    engine.close()


def test_overlaps_are_skipped_until_the_last_firing_is_done(tmp_path: Path) -> None:
    engine = opened(tmp_path, ttr_ms=DAY)
    put(engine, "s", every_ms=HOUR, overlap="skip")
    run(engine, NOW, NOW + HOUR)
    assert engine.reserve("t", "g", 10, NOW + HOUR).ids == [f"s@{NOW + HOUR}"]
    run(engine, NOW + HOUR, NOW + 3 * HOUR)
    assert engine.reserve("t", "g", 10, NOW + 3 * HOUR).ids == []
    engine.ack("t", "g", [f"s@{NOW + HOUR}"], NOW + 3 * HOUR)
    run(engine, NOW + 3 * HOUR, NOW + 5 * HOUR)
    assert fetched(engine, NOW + 5 * HOUR) == [f"s@{NOW + 4 * HOUR}"]
    assert engine.topic("t").scheduler.get("s").schedule.fired == 2
    engine.close()


def test_bad_schedules_create_no_topic_and_no_file(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    engine.topic("t", create=True)
    for given in ({"every_ms": 1}, {"cron": "nonsense"}, {"every_ms": HOUR, "end_ms": NOW - 1}):
        with pytest.raises(InvalidSchedule):
            put(engine, "s", **given)
    with pytest.raises(InvalidId):
        put(engine, "a/b", every_ms=HOUR)
    assert not (tmp_path / "topic" / "t" / "schedules").exists()
    assert engine.topic("t").scheduler.page(10) == ([], None)
    engine.close()


# Many


def test_many_schedules_stay_sorted_over_seals_compaction_and_restarts(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    count = 300
    for k in range(count):
        put(engine, f"s{k}", every_ms=HOUR + k * SECOND)
    for hour in range(1, 4):
        run(engine, NOW + (hour - 1) * HOUR, NOW + hour * HOUR)
        engine.compact("t")
        assert engine.check() == []
        engine.close() if hour % 2 else abandon(engine)
        engine = opened(tmp_path)
    now = NOW + 3 * HOUR
    run(engine, now, now)
    assert len(engine.topic("t").scheduler.page(1_000)[0]) == count
    expected = {id_ for k in range(count) for id_ in grid(f"s{k}", HOUR + k * SECOND, 3) if int(id_.split("@")[1]) <= now}
    assert sorted(fetched(engine, now)) == sorted(expected)
    assert engine.check() == []
    engine.close()
