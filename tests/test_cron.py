"""Cron expressions in zones: the clocks change, months end, and impossible ones are refused.

`golden/cron_times.json` has [expression, zone, second, the next seconds] of the library cronsim 2.8, around changes of the clocks
in 17 zones. Times that are wrong there are in `CHANGES`: after a change of half an hour, it misses some.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest

from turtlemq import cron as module
from turtlemq.cron import parse, zone_of
from turtlemq.errors import InvalidSchedule

GOLDEN = json.loads((Path(__file__).parent / "golden" / "cron_times.json").read_text("utf-8"))

CHANGES = [  # expression, zone, a local time before a change of the clocks, and the next times with their offsets
    # a skipped hour: a job at a fixed time is due at the end of the gap, once, and one that follows the clock is not
    ("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00+0200", "30 02:30+0200"]),
    ("0 2,3 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00+0200", "30 02:00+0200"]),
    ("30 30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00+0200", "30 02:30+0200"]),
    ("*/30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["30 02:00+0200", "30 02:30+0200"]),
    ("30 * * * *", "America/New_York", "2026-03-08 01:00", ["08 01:30-0500", "08 03:30-0400"]),
    ("0 0 * * *", "America/Asuncion", "2023-09-30 12:00", ["01 01:00-0300", "02 00:00-0300"]),
    # a doubled hour: the first time for a fixed job, both for one that follows the clock
    ("30 2 * * *", "Europe/Berlin", "2026-10-24 12:00", ["25 02:30+0200", "26 02:30+0100"]),
    ("30 * * * *", "Europe/Berlin", "2026-10-25 02:00", ["25 02:30+0200", "25 02:30+0100", "25 03:30+0100"]),
    ("0 */2 * * *", "Antarctica/Troll", "2026-10-25 00:30", ["25 02:00+0200", "25 02:00+0000", "25 04:00+0000"]),
    # changes of half an hour, and one that begins in the middle of an hour
    ("*/20 * * * *", "Australia/Lord_Howe", "2026-04-05 01:30", ["05 01:40+1100", "05 01:40+1030", "05 02:00+1030"]),
    ("*/13 2 * * *", "Australia/Lord_Howe", "2026-04-05 00:49", ["05 02:00+1030", "05 02:13+1030"]),
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-04 00:00", ["04 02:30+1100", "05 02:15+1100"]),
    ("*/13 2 * * *", "Pacific/Chatham", "2027-04-04 02:45", ["04 02:52+1345", "04 02:52+1245"]),
    # a day that a country left out
    ("0 9 30 12 *", "Pacific/Apia", "2011-12-01 00:00", ["31 00:00+1400", "30 09:00+1400"]),
]


@pytest.mark.parametrize(("expression", "zone", "start", "times"), CHANGES)
def test_jobs_when_the_clocks_change(expression: str, zone: str, start: str, times: list[str]) -> None:
    cron, place = parse(expression), ZoneInfo(zone)
    at_ms: int | None = int(datetime.fromisoformat(start).replace(tzinfo=place).timestamp() * 1000)
    found = []
    for _ in times:
        assert at_ms is not None
        at_ms = cron.after(at_ms, place)
        assert at_ms is not None
        found.append(f"{datetime.fromtimestamp(at_ms / 1000, place):%d %H:%M%z}")
    assert found == times


def test_times_agree_with_those_of_cronsim() -> None:
    assert len(GOLDEN) > 400
    assert len({zone for _, zone, _, _ in GOLDEN}) == 17
    for expression, zone, second, times in GOLDEN:
        at_ms: int | None = second * 1000 + 999
        for want in times:
            assert at_ms is not None
            at_ms = parse(expression).after(at_ms, ZoneInfo(zone))
            assert at_ms == want * 1000, (expression, zone, second)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe", "America/Havana", "Africa/Casablanca"])
@pytest.mark.parametrize("expression", ["*/17 * * * *", "30 2 * * *", "0 0 * * *", "7 1-3 * * SUN"])
def test_the_same_times_come_from_every_moment_before_them(expression: str, zone: str) -> None:
    cron, place = parse(expression), ZoneInfo(zone)
    at = 1_774_000_000_000  # March 2026
    for _ in range(60):
        following = cron.after(at, place)
        assert following is not None
        assert following > at
        for before in (at + 1, (at + following) // 2, following - 1):
            assert cron.after(before, place) == following
        at = following


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        ("@daily", "0 0 * * *"),
        ("@hourly", "0 * * * *"),
        ("0 9 * * mon-fri", "0 9 * * 1-5"),
        ("0 9 * * FRI-SUN", "0 9 * * 5,6,0"),
        ("0 9 * * 7", "0 9 * * 0"),
        ("0 9 ? * 1", "0 9 * * 1"),
        ("5/20 3 1 jan *", "5,25,45 3 1 1 *"),
        ("0 5 9 * * *", "5 9 * * *"),
        (" 0  9 * * * ", "0 9 * * *"),
    ],
)
def test_expressions_with_the_same_times(expression: str, same: str) -> None:
    at = other = 1_774_000_000_000
    for _ in range(10):
        first, second = parse(expression).after(at, zone_of("UTC")), parse(same).after(other, zone_of("UTC"))
        assert first is not None
        assert first == second
        at = other = first


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "0 0 30 2 *",
        "*/0 * * * *",
        "*/x * * * *",
        "5-1 * * * *",
        "1,,2 * * * *",
        "a * * * *",
        "-5 * * * *",
        "* * * * MON#6",
        "* * * * L",
        "* * * * MON#0",
        "٣ * * * *",
        "@reboot",
        "? * * * *",
        "0 " * 200,
    ],
)
def test_bad_expressions_are_refused(expression: str) -> None:
    with pytest.raises(InvalidSchedule):
        parse(expression)


@pytest.mark.parametrize(
    "zone", ["", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "localtime", "Europe", "europe/berlin\0", "x" * 300]
)
def test_bad_zones_are_refused(zone: str) -> None:
    with pytest.raises(InvalidSchedule, match="no time zone"):
        zone_of(zone)


def test_a_machine_without_zones_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(module, "ZoneInfo", nothing)
    zone_of.cache_clear()
    with pytest.raises(InvalidSchedule, match="'UTC': the server finds no time zones at all; install tzdata"):
        zone_of("UTC")


def test_no_time_after_the_last_due_time() -> None:
    assert parse("0 0 1 1 *").after((1 << 42) - 10, zone_of("UTC")) is None
