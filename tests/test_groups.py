"""Groups: where they start, how they are moved and forgotten, and that they do not know of each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.results import Extended
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument, UnknownGroup
from turtlemq.model import Message, Priority
from turtlemq.settings import Settings

SETTINGS = Settings(segment_bytes=4096, run_messages=4, backoff_base_ms=0, max_attempts=3, ttr_ms=100, max_in_flight=1_000)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.open(tmp_path, settings=SETTINGS)


def put(engine: Engine, *ids: str, at: int = 10, **more: object) -> None:
    engine.submit("t", [Message(b"b", at, id=i, **more) for i in ids], at)  # type: ignore[arg-type]
    engine.tick(at)


def test_each_group_sees_everything_and_consumers_of_one_share_it(engine: Engine) -> None:
    put(engine, "a", "b", "c")
    one = engine.reserve("t", "g", 2, 11, consumer="one").ids
    two = engine.reserve("t", "g", 2, 11, consumer="two").ids
    assert (one, two) == (["a", "b"], ["c"])
    assert engine.reserve("t", "h", 5, 11).ids == ["a", "b", "c"]


def test_a_group_starts_at_the_beginning_the_end_or_a_time(engine: Engine) -> None:
    for n, at in enumerate((10, 20, 30)):
        put(engine, f"m{n}", at=at)
    engine.move_group("t", "first", "earliest", 40)
    engine.move_group("t", "last", "latest", 40)
    engine.move_group("t", "timed", 20, 40)
    put(engine, "m3", at=50)
    assert [engine.reserve("t", g, 9, 50).ids for g in ("first", "last", "timed")] == [
        ["m0", "m1", "m2", "m3"],
        ["m3"],
        ["m1", "m2", "m3"],
    ]
    with pytest.raises(InvalidArgument):
        engine.move_group("t", "g", "yesterday", 50)


def test_moving_back_replays_and_what_was_in_hands_before_is_void(engine: Engine) -> None:
    put(engine, "a", "b", "c")
    ids = engine.reserve("t", "g", 3, 11).ids
    engine.ack("t", "g", ["a", "-b"], 12, retry_delay_ms=100_000)  # b sleeps through the Index
    engine.move_group("t", "g", "earliest", 13)
    assert engine.ack("t", "g", ["c"], 14).unknown == ["c"]
    assert engine.reserve("t", "g", 9, 15).ids == ids
    engine.ack("t", "g", ids, 16)
    engine.tick(200_000)
    assert engine.reserve("t", "g", 9, 200_000).ids == [], "b came with the replay"
    assert engine.check() == []


def test_a_recreated_group_remembers_nothing(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    put(engine, "a", "b")
    engine.ack("t", "g", engine.reserve("t", "g", 9, 11).ids, 11)
    engine.drop_group("t", "g", 12)
    with pytest.raises(UnknownGroup):
        engine.drop_group("t", "g", 12)
    assert engine.reserve("t", "g", 1, 13, ttr_ms=10**6).ids == ["a"]
    engine.close()
    (tmp_path / "topic" / "t" / "offset").unlink()
    engine = Engine.open(tmp_path, settings=SETTINGS)
    stats = engine.groups("t")["g"]
    assert (stats.ready, stats.reserve, stats.history) == (1, 1, 0)
    assert engine.check() == []
    engine.close()


def test_an_unused_group_is_forgotten_if_so_set(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(group_expire_hours=1))
    put(engine, "a")
    engine.move_group("t", "old", "earliest", 10)
    for now in range(10, 3_600_000 + 200_000, 60_000):
        engine.tick(now)
    assert engine.groups("t") == {}
    assert engine.stats("t").ready == 1, "it waits for the first group"


def test_no_more_are_in_flight_than_may_be(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(max_in_flight=3))
    put(engine, *"abcde")
    assert len(engine.reserve("t", "g", 9, 11)) == 3
    assert len(engine.reserve("t", "g", 9, 11)) == 0
    engine.ack("t", "g", ["b"], 12)
    assert engine.reserve("t", "g", 9, 13).ids == ["d"]


def test_priorities_share_a_fetch_and_low_is_never_starved(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=replace(SETTINGS, preempt_after_ms=0))
    for name, level in (("n", Priority.NORMAL), ("h", Priority.HIGH), ("l", Priority.LOW)):
        put(engine, *(f"{name}{i}" for i in range(30)), priority=level)
    got = engine.reserve("t", "g", 10, 11).ids
    assert sorted(got) == sorted([*(f"h{i}" for i in range(6)), *(f"n{i}" for i in range(3)), "l0"])
    rest = [id_ for _ in range(20) for id_ in engine.reserve("t", "g", 5, 11).ids]
    for name in "hnl":
        mine = [i for i in got + rest if i[0] == name]
        assert mine == [f"{name}{i}" for i in range(30)], "in order within a level"
    assert engine.check() == []


def test_an_expired_lease_returns_the_message(engine: Engine) -> None:
    put(engine, "a", "b")
    engine.reserve("t", "g", 2, 10)
    assert engine.extend("t", "g", ["b", "zz"], 1_000, 50) == Extended(1, ["zz"])
    assert engine.tick(60) == 110
    engine.tick(110)
    again = engine.reserve("t", "g", 9, 111)
    assert again.ids == ["a"]
    assert again.pieces[0].messages.attempts.tolist() == [2]
    assert engine.ack("t", "g", ["a", "b"], 112).acked == 2


def test_a_lease_is_over_in_its_last_millisecond_and_not_before(engine: Engine) -> None:
    put(engine, "a")
    engine.reserve("t", "g", 1, 11)
    engine.tick(110)
    assert engine.reserve("t", "g", 1, 110).ids == []
    engine.tick(111)
    assert engine.reserve("t", "g", 1, 111).ids == ["a"], "ttr_ms is 100"


def test_an_id_in_two_leases_stays_with_the_younger() -> None:
    """A dead letter that was requeued while its group was moved back comes twice."""
    group, two = Group("g"), np.arange(2)
    group.start(0)
    older = group.lease(MessageColumns(two, two, two, two, two, ["a", "b"]), 0, 10, "one")
    younger = group.lease(MessageColumns(two + 5, two, two, two, two, ["b", "c"]), 0, 20, "two")
    assert group.locate(["b"])[0][0][0] is younger
    group.close([(older, two)])
    ((lease, which),), unknown = group.locate(["b"])
    assert (lease is younger, which.tolist(), unknown) == (True, [0], [])


def test_acks_are_idempotent_in_any_order_and_mix(engine: Engine) -> None:
    put(engine, *"abcd")
    engine.reserve("t", "g", 4, 11)
    out = engine.ack("t", "g", ["d", "-b", "zz", "a", "a", "-a"], 12)
    assert (out.acked, out.failed, out.unknown) == (2, 1, ["zz", "a", "a"])
    assert engine.ack("t", "g", ["d"], 13).unknown == ["d"]
    assert engine.ack("t", "nobody", ["c", "-c"], 13).unknown == ["c", "c"]


def test_cancelling_what_is_ready_reaches_every_group(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=SETTINGS)
    put(engine, "a", "b", "c")
    engine.move_group("t", "g", "earliest", 11)
    assert engine.cancel("t", ["b", "c", "zz"], 12) == {"b": "cancelled", "c": "cancelled", "zz": "unknown"}
    assert engine.cancel("t", ["b"], 12) == {"b": "cancelled before"}
    engine.move_group("t", "late", "latest", 12)
    assert engine.reserve("t", "g", 9, 13).ids == ["a"]
    assert engine.cancel("t", ["a"], 14) == {"a": "reserve"}
    assert engine.reserve("t", "new", 9, 13).ids == ["a"]
    os_stats = engine.stats("t")
    engine.close()
    (tmp_path / "topic" / "t" / "offset").unlink()
    engine = Engine.open(tmp_path, settings=SETTINGS)
    assert engine.stats("t") == os_stats
    assert engine.check() == []
    engine.close()


def test_retries_wake_the_tick_in_time(engine: Engine) -> None:
    put(engine, "a")
    engine.reserve("t", "g", 1, 10)
    engine.ack("t", "g", ["-a"], 20, retry_delay_ms=300)
    wake, now = engine.tick(20), 20
    while wake is not None and wake < 320:
        now = max(wake, now + 1)
        wake = engine.tick(now)
    assert wake == 320


def test_groups_are_in_use_while_they_ask_or_could_not(tmp_path: Path) -> None:
    hour = 3_600_000
    engine = Engine.open(tmp_path, settings=Settings(group_expire_hours=1))
    for group in ("asks", "silent"):
        engine.move_group("t", group, "earliest", 0)
    for now in range(0, 2 * hour, 60_000):
        assert engine.reserve("t", "asks", 1, now).ids == []
        engine.tick(now)
    assert set(engine.groups("t")) == {"asks"}, "or its history would come to it again"
    engine.close()
    engine = Engine.open(tmp_path, settings=Settings(group_expire_hours=1))
    engine.tick(9 * hour)
    assert set(engine.groups("t")) == {"asks"}
    for now in range(9 * hour, 11 * hour, 60_000):
        engine.tick(now)
    assert set(engine.groups("t")) == set()
    engine.close()


@pytest.mark.parametrize("hours", [1 / 3600, 1])
def test_a_clock_that_jumps_makes_no_group_old(tmp_path: Path, hours: float) -> None:
    year = 365 * 24 * 3_600_000
    engine = Engine.open(tmp_path, settings=Settings(group_expire_hours=hours))
    engine.move_group("t", "g", "earliest", 0)
    for now in (0, year, 1, 2):
        engine.tick(now)
    assert set(engine.groups("t")) == {"g"}
    engine.close()


def test_a_group_for_which_a_fetch_waits_is_in_use(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(group_expire_hours=0.1))
    for group in ("waits", "silent"):
        engine.move_group("t", group, "earliest", 0)
    for now in range(0, 3_600_000, 60_000):
        engine.tick(now, {"t": {"waits"}})
    assert set(engine.groups("t")) == {"waits"}
    engine.close()
