"""The kind `schedules` of the Spark source shows the schedules that the engine has, from its files: with Spark, and without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.schedule_runs import HOUR, NOW, SECOND, opened, put, run
from tests.harness.spark_session import MARKS, need_packages, spark
from turtlemq.engine import Engine

need_packages()

from tests.harness.spark_data import rows  # noqa: E402

__all__ = ["spark"]


def told(engine: Engine) -> dict[str, dict[str, Any]]:
    """The schedules of an engine as it describes them itself, under the names of the columns."""
    found: dict[str, dict[str, Any]] = {}
    for topic in engine.topics.values():
        for one in topic.scheduler.page(1_000)[0]:
            schedule, timing = one.schedule, one.schedule.timing
            found[f"{topic.name}/{one.name}"] = {
                "cron": timing.cron or None,
                "zone": timing.zone if timing.cron else None,
                "every_ms": timing.every_ms or None,
                "delays_ms": list(timing.delays_ms) or None,
                "start_ms": timing.start_ms,
                "end_ms": timing.end_ms,
                "count": timing.count,
                "jitter_ms": timing.jitter_ms,
                "catch_up": schedule.catch_up,
                "overlap": schedule.overlap,
                "paused": schedule.paused,
                "next_ms": schedule.next_ms,
                "last_ms": schedule.last_ms,
                "fired": schedule.fired,
                "ended_ms": schedule.ended_ms,
                "created_ms": one.created_ms,
                "ttr_ms": one.ttr_ms,
                "body": one.body,
            }
    return found


def filled(root: Path) -> Engine:
    """Schedules of all kinds, of which some have fired, ended, were paused, replaced and deleted. An open engine."""
    engine = opened(root)
    put(engine, "hourly", every_ms=HOUR, count=9, jitter_ms=60 * SECOND)
    put(engine, "nine", cron="0 9 * * *", zone="Europe/Berlin", end_ms=NOW + 10**10)
    put(engine, "poll", delays_ms=(60 * SECOND, HOUR))
    put(engine, "held", cron="@daily", paused=True, overlap="skip", catch_up="all")
    put(engine, "gone", every_ms=HOUR)
    put(engine, "later", topic="u", every_ms=HOUR, start_ms=NOW + 5 * HOUR)
    run(engine, NOW, NOW + 4 * HOUR)
    engine.topic("t").scheduler.remove("gone", NOW + 4 * HOUR)
    engine.topic("t").scheduler.commit()
    engine.topic("none", create=True)  # never had a schedule
    return engine


def shown(found: list[dict[str, Any]], columns: list[str]) -> dict[str, dict[str, Any]]:
    return {f"{row['topic']}/{row['id']}": {name: row[name] for name in columns} for row in found}


@pytest.mark.parametrize("compacted", [False, True])
def test_rows_are_the_schedules_of_the_engine(tmp_path: Path, compacted: bool) -> None:
    engine, root = filled(tmp_path / "data"), tmp_path / "data"
    if compacted:
        engine.compact("t")
        engine.close()
        engine = opened(root)
    expected = told(engine)
    assert len(expected) == 5
    found = rows(root, kind="schedules", where="state = 'current'", body="binary")
    assert shown(found, list(expected["t/poll"])) == expected
    states = Counter(row["state"] for row in rows(root, kind="schedules", where="id = 'hourly'"))
    assert states["current"] == 1
    assert compacted or states["replaced"] > 2
    deleted = {row["id"] for row in rows(root, kind="schedules", where="state = 'deleted'")}
    assert deleted == {"gone"}
    engine.close()
    assert shown(rows(root, kind="schedules", where="state = 'current'", body="binary"), list(expected["t/poll"])) == expected


@pytest.mark.slow
class TestInSpark:
    """With a session."""

    pytestmark = MARKS

    def test_spark_reads_them_with_their_times(self, spark: Any, tmp_path: Path) -> None:
        engine = filled(tmp_path / "data")
        expected = told(engine)
        engine.close()
        found = spark.read.format("turtlemq").options(kind="schedules", body="string").load(str(tmp_path / "data"))
        current = found.where("state = 'current'")
        assert {f"{row.topic}/{row.id}": row.next_ms for row in current.collect()} == {
            name: one["next_ms"] for name, one in expected.items()
        }
        (nine,) = current.where("id = 'nine'").collect()
        assert (nine.cron, nine.zone, nine.body) == ("0 9 * * *", "Europe/Berlin", "nine")
        (poll,) = current.where("id = 'poll'").select("delays_ms", "fired").collect()
        assert (poll.delays_ms, poll.fired) == ([60_000, HOUR], 2)
        soon = current.where("not paused and next is not null").orderBy("next_ms").first()
        assert soon.next_ms == min(one["next_ms"] for one in expected.values() if one["next_ms"] and not one["paused"])
