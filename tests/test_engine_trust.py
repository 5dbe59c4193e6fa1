"""Facts about the engine that only chance would meet: ids that collide, state kept by a restart, clocks that go back,
checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import xxhash

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import Quick, Syncing, abandon, cut_power, messages
from tests.harness.index_world import Later
from tests.trust.powercuts_disk import Disk as Remembering
from tests.trust.powercuts_disk import all_lost, fill
from turtlemq.engine import Engine
from turtlemq.errors import InvalidFireAt
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter

T = TypeVar("T")

HOUR = 3_600_000
SETTINGS = Settings(ttr_ms=60_000, backoff_jitter="none", max_attempts=3)


def start(tmp_path: Path, settings: Settings = SETTINGS) -> Engine:
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=settings)
    engine.move_group("t", "g", "earliest", 0)
    return engine


def again(engine: Engine, settings: Settings = SETTINGS) -> Engine:
    """A proper stop, and a start."""
    engine.close()
    return Engine.open(engine.root, door=Quick(), settings=settings)


# Expiry


def errors_of_the_dead(engine: Engine) -> list[tuple[str, int]]:
    return [(letter.error, letter.attempts) for letter in engine.topic("t").view.dead_letters.all(Filter())]


@pytest.mark.parametrize("how", ["rescheduled", "compacted", "given back"])
def test_a_message_expires_also_when_it_is_another_version_of_itself(tmp_path: Path, how: str) -> None:
    engine = start(tmp_path)
    engine.submit("t", [Message(b"", 10, id="a", expires_ms=50_000)], 0)
    index = engine.topic("t").stores.index
    if how == "rescheduled":
        engine.reschedule("t", "a", 1, due_ms=20)
    elif how == "compacted":
        index.maintenance.roll()
        assert index.maintenance.compact(0, 10) == 1
    else:
        engine.tick(10)
        assert engine.give_back("t", "g", engine.reserve("t", "g", 1, 10).ids, 11)[0] == 1
    engine.tick(70_000)
    assert engine.reserve("t", "g", 1, 70_000).ids == []
    assert errors_of_the_dead(engine) == [("expired", 0)]
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("delay", [0, 60_000])
def test_a_retry_does_not_expire(tmp_path: Path, delay: int) -> None:
    """It waits in memory, or sleeps in the Index; a restart changes nothing."""
    engine = start(tmp_path)
    engine.configure("t", max_attempts=2)
    engine.submit("t", [Message(b"", 10, id="a", expires_ms=50_000)], 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10).ids == ["a"]
    assert engine.ack("t", "g", ["-a"], 20, retry_delay_ms=delay, error="one").failed == 1
    engine = again(engine)
    engine.tick(70_000)
    assert engine.reserve("t", "g", 1, 70_000).ids == ["a"]
    assert engine.give_back("t", "g", ["a"], 70_001) == (1, []), "that is another attempt, and not the first one"
    assert engine.reserve("t", "g", 1, 70_002).ids == ["a"]
    assert engine.ack("t", "g", ["-a"], 70_003, error="two").dead == 1
    assert errors_of_the_dead(engine) == [("two", 2)]
    engine.close()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("expires_ms", [None, 90_000])
def test_a_requeued_letter_has_its_new_expiry_or_none(tmp_path: Path, reset: bool, expires_ms: int | None) -> None:
    engine = start(tmp_path)
    engine.configure("t", max_attempts=1)
    engine.submit("t", [Message(b"", 10, id=id_, expires_ms=50_000) for id_ in ("tried", "late")], 0)
    engine.tick(10)
    assert engine.ack("t", "g", [f"-{id_}" for id_ in engine.reserve("t", "g", 1, 10).ids], 11).dead == 1
    assert engine.reserve("t", "g", 9, 60_000).ids == []
    letters = list(engine.topic("t").view.dead_letters.all(Filter()))
    with pytest.raises(InvalidFireAt, match="expires_ms"):
        engine.requeue("t", letters, 60_001, per_s=1, expires_ms=61_001)
    assert engine.requeue("t", letters, 60_001, reset_attempts=reset, expires_ms=expires_ms) == 2
    engine.tick(60_001)
    given = engine.reserve("t", "g", 1, 60_002)
    assert engine.give_back("t", "g", given.ids, 60_003) == (1, [])
    engine.tick(95_000)
    out = engine.reserve("t", "g", 9, 95_000)
    if expires_ms is None:
        assert sorted(out.ids) == ["late", "tried"]
    else:
        assert (out.ids, {error for error, _ in errors_of_the_dead(engine)}) == ([], {"expired"})
    assert engine.check() == []
    engine.close()


def test_a_message_expires_at_its_millisecond_without_an_attempt(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", [Message(b"", 10, id="early", expires_ms=51), Message(b"", 10, id="late", expires_ms=50)], 0)
    engine.tick(50)
    assert engine.reserve("t", "g", 9, 50).ids == ["early"]
    (letter,) = engine.topic("t").view.dead_letters.all(Filter())
    assert (letter.id, letter.attempts) == ("late", 0)
    engine.close()


# State that a restart keeps


@pytest.mark.parametrize("clean", [True, False])
def test_a_longer_lease_is_as_long_after_a_restart(tmp_path: Path, clean: bool) -> None:
    engine = start(tmp_path)
    engine.submit("t", [Message(b"", 10, id="a")], 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10, ttr_ms=1_000)
    engine.extend("t", "g", ["a"], 9_000, 500)
    if clean:
        engine = again(engine)
    else:
        abandon(engine)
        engine = Engine.open(engine.root, door=Quick(), settings=SETTINGS)
    engine.tick(9_499)
    assert engine.reserve("t", "g", 1, 9_499).ids == []
    engine.tick(9_500)
    assert engine.reserve("t", "g", 1, 9_500).ids == ["a"]
    engine.close()


def test_a_restart_keeps_who_has_a_message_and_why_others_wait(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", [Message(b"", 10, id=id_) for id_ in "abc"], 0)
    engine.tick(10)
    engine.reserve("t", "g", 9, 10, consumer="worker-7")
    engine.ack("t", "g", ["-a"], 20, error="no room", retry_delay_ms=5_000)
    engine.ack("t", "g", ["-b"], 20, error="no time", retry_delay_ms=6_000)

    def told(engine: Engine) -> list[dict[str, object]]:
        return [view.groups["g"] for id_ in "abc" if (view := engine.message("t", id_)) is not None]

    before = told(engine)
    assert [(entry.get("error"), entry.get("due_ms"), entry.get("consumer")) for entry in before] == [
        ("no room", 5_020, None),
        ("no time", 6_020, None),
        (None, None, "worker-7"),
    ]
    engine = again(engine)
    assert told(engine) == before
    engine.close()


# Messages that may go, and those that may not


def test_a_dead_letter_that_is_younger_than_its_time_stays(tmp_path: Path) -> None:
    settings = Settings(max_attempts=1, dead_ttl_hours=2)
    engine = start(tmp_path, settings)
    for at, id_ in ((10, "old"), (2 * HOUR, "young")):
        engine.submit("t", [Message(b"", at, id=id_)], at)
        engine.tick(at)
        engine.reserve("t", "g", 1, at)
        assert engine.ack("t", "g", [f"-{id_}"], at).dead == 1
    engine.tick(3 * HOUR)
    assert [letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())] == ["young"]
    engine.close()


def test_messages_without_a_group_are_kept_however_old(tmp_path: Path) -> None:
    settings = Settings(segment_bytes=4096, run_messages=8, history_hours=0, history_bytes=0)
    engine = Engine.open(tmp_path, door=Quick(), settings=settings)
    for n in range(20):
        engine.submit("t", [Message(b"x" * 500, n, id=f"m{n}")], n)
        engine.tick(n)
    assert len(logs_of(engine).ready.segments) > 2
    for now in range(HOUR, 2 * HOUR, 60_001):
        engine.tick(now)
    assert engine.reserve("t", "g", 99, 2 * HOUR).ids == [f"m{n}" for n in range(20)]
    engine.close()


def test_a_group_whose_consumer_holds_messages_is_not_forgotten(tmp_path: Path) -> None:
    settings = Settings(group_expire_hours=1)
    engine = start(tmp_path, settings)
    engine.submit("t", [Message(b"", 10, id="a")], 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10, ttr_ms=5 * HOUR).ids == ["a"]
    for now in range(HOUR, 4 * HOUR, 60_000):
        engine.tick(now)
    assert engine.ack("t", "g", ["a"], 4 * HOUR).acked == 1
    engine.close()


def test_a_retry_keeps_the_producers_time_to_run(tmp_path: Path) -> None:
    engine = start(tmp_path, Settings(max_attempts=1, ttr_ms=60_000))
    engine.submit("t", [Message(b"", 10, id="a", ttr_ms=5_000)], 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    assert engine.ack("t", "g", ["-a"], 20).dead == 1
    engine.requeue("t", list(engine.topic("t").view.dead_letters.all(Filter())), 30)
    engine.tick(30)
    (until,) = engine.reserve("t", "g", 1, 30).until_ms
    assert until.tolist() == [5_030]
    engine.close()


# Time that goes back


def test_due_syncs_happen_though_the_clock_went_back(tmp_path: Path) -> None:
    engine = start(tmp_path, Settings(beat_ms=1_000))
    engine.submit("t", [Message(b"", 10, id="a")], 0)
    for now in range(0, 60_000, 2_000):
        engine.tick(now)
    engine.reserve("t", "g", 1, 58_000)
    journal = logs_of(engine).reserve
    assert journal.durable < journal.number
    for now in (30_000, 32_000):
        engine.submit("t", [Message(b"", 90_000, id=f"m{now}")], now)
        engine.tick(now)
    assert journal.durable == journal.number
    engine.close()


def test_there_is_housekeeping_though_the_clock_went_back(tmp_path: Path) -> None:
    now = 100 * 24 * HOUR
    engine = start(tmp_path, Settings(segment_bytes=4096, run_messages=8))
    engine.tick(now)
    engine.submit("t", [Message(b"x" * 500, 2 * now, id=f"m{n}") for n in range(20)], now)
    now -= 50 * 24 * HOUR
    engine.cancel("t", [f"m{n}" for n in range(20)], now)
    for _ in range(60):
        now += 1_000
        engine.tick(now)
    assert engine.topic("t").stores.index.stats().bytes < 5_000, "what was cancelled has gone from the disk"
    engine.close()


def test_what_is_too_old_goes_though_the_clock_went_back(tmp_path: Path) -> None:
    engine = start(tmp_path, Settings(max_attempts=1, dead_max_count=1))
    now = 100 * 24 * HOUR
    engine.tick(now)
    now -= 50 * 24 * HOUR
    for id_ in "ab":
        engine.submit("t", [Message(b"", now, id=id_)], now)
        engine.tick(now)
        engine.reserve("t", "g", 1, now)
        assert engine.ack("t", "g", [f"-{id_}"], now).dead == 1
    for _ in range(130):
        now += 1_000
        engine.tick(now)
    assert [letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())] == ["b"]
    engine.close()


# Beats


def test_writes_during_a_checkpoint_do_not_count_as_synced(tmp_path: Path) -> None:
    door, flusher = Syncing(), Later()
    settings = Settings(beat_ms=1_000, ttr_ms=600_000, ack_durability="beat")
    engine = Engine.open(tmp_path / "data", door=door, flusher=flusher, settings=settings)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(4), 0)
    engine.tick(10)
    engine.reserve("t", "g", 2, 10)
    engine.tick(2_000)  # a checkpoint begins
    assert len(flusher.jobs) == 1
    engine.ack("t", "g", ["m0"], 2_001)
    engine.submit("t", [Message(b"", 2_002, id="late")], 2_001)
    engine.tick(2_002)
    flusher.finish()  # and ends
    engine.tick(2_010)
    topic = engine.topic("t")
    logs = logs_of(engine)
    assert logs.history.durable < logs.history.number
    assert logs.ready.durable_offset < logs.ready.next_offset
    assert topic.stores.index._segments.durable != topic.stores.index.progress, (
        "what was handed off since may be gone with the power"
    )
    engine.tick(4_000)
    flusher.finish()
    engine.tick(4_010)
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=settings)
    assert engine.stats("t").history == 1, "that beat was there for it"
    assert engine.reserve("t", "g", 9, 5_000).ids == ["m2", "m3", "late"]
    engine.close()


# Ids whose hashes are alike

ALIKE = ("order-366517", "order-396737")  # 42 bits of their hashes are the same, and tables know no more


def without_secret(tmp_path: Path) -> None:
    """Hashes as of versions before the secret of the folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "HASH_SEED").write_text("0" * 16 + "\n")


def test_ids_whose_hashes_are_alike_are_two_messages(tmp_path: Path) -> None:
    one, other = ALIKE
    assert xxhash.xxh3_64_intdigest(one.encode()) >> 22 == xxhash.xxh3_64_intdigest(other.encode()) >> 22
    without_secret(tmp_path)
    engine = start(tmp_path, Settings(run_messages=4))
    engine.submit("t", [Message(b"1", 10, id=one), *messages(8)], 0)
    engine.topic("t").stores.index.maintenance.flush()
    assert engine.get("t", other) is None
    assert engine.cancel("t", [other], 0) == {other: "unknown"}
    for id_ in (other, one):
        assert engine.submit("t", [Message(b"2", 10, id=id_)], 0).created == [id_ == other]
    assert [found.body for id_ in ALIKE if (found := engine.get("t", id_)) is not None] == [b"1", b"2"]
    engine.close()


def test_ready_ids_with_equal_hashes_are_two_messages(tmp_path: Path) -> None:
    one, other = ALIKE
    without_secret(tmp_path)
    engine = start(tmp_path, Settings(run_messages=4))
    engine.submit("t", [Message(b"1", 10, id=one), *messages(8)], 0)
    for now in (10, 11, 12):
        engine.submit("t", [Message(b"", now, id=f"n{now}")], now)
        engine.tick(now)
    assert logs_of(engine).ready.segments[0].tables, "it is in a table"
    assert engine.message("t", other) is None
    assert engine.cancel("t", [other], 20) == {other: "unknown"}
    assert engine.submit("t", [Message(b"2", 30, id=other)], 20).created == [True]
    engine.tick(30)
    assert engine.cancel("t", [one], 40) == {one: "cancelled"}
    assert {one, other} & set(engine.reserve("t", "g", 99, 50).ids) == {other}
    engine.close()


@pytest.mark.parametrize("acks", [False, True])
def test_acks_are_synced_in_time_though_the_clock_went_back(tmp_path: Path, acks: bool) -> None:
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(beat_ms=5_000))
    now = 100 * 24 * HOUR
    engine.submit("t", [Message(b"", now, id=f"m{n}") for n in range(60)], now)
    engine.tick(now)
    engine.reserve("t", "g", 60, now)
    now -= HOUR
    for n in range(60):  # a minute
        now += 1_000
        if acks:
            engine.ack("t", "g", [f"m{n}"], now)
        engine.tick(now)
    reserve, history = logs_of(engine).journals
    late = reserve.number - reserve.durable, history.number - history.durable
    assert late[0] == 0, late
    assert late[1] <= 6, late
    engine.close()


def test_acks_are_synced_though_the_clock_came_back(tmp_path: Path) -> None:
    """An hour has passed, and the clock shows a moment in which the checkpoint would not be due."""
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(beat_ms=5_000))
    now = 100 * 24 * HOUR
    engine.submit("t", [Message(b"", now, id="m")], now - 10)
    for at in (now - 10, now, now + 2_000):
        engine.tick(at)
    assert logs_of(engine).ready.durable_offset == 0
    engine.tick(now + 1_000)
    assert logs_of(engine).ready.durable_offset == 1
    engine.close()


class Killed(BaseException):
    """The process ends here."""


class Ending(Remembering):
    """Ends the process when it is about to sync a segment of dead letters that it has just begun."""

    armed = False

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        begun = name in ("fdatasync", "unlink") and path is not None and path.match("dead/delay_*[1-9]*.bson")
        if self.armed and begun:  # a dead process tidies nothing up
            raise Killed
        return super()._call(name, path, action, *args)


def test_a_new_segments_name_is_durable_before_its_documents(tmp_path: Path) -> None:
    disk, settings = Ending(tmp_path / "disk", {}), Settings(segment_bytes=4096, max_attempts=1, ttr_ms=10)
    engine = Engine.open(disk.root, door=disk, settings=settings)
    engine.submit("t", [Message(bytes(2_960), 10, id=id_) for id_ in ("a", "b")], 0)
    engine.tick(10)
    engine.reserve("t", "g", 2, 10)
    assert engine.ack("t", "g", ["-a"], 11).dead == 1
    disk.armed = True
    with pytest.raises(Killed):
        engine.ack("t", "g", ["-b"], 12)
    abandon(engine)
    disk.armed = False
    engine = Engine.open(disk.root, door=disk, settings=settings)
    engine.tick(100)
    engine.topic("t").checkpoint()
    assert engine.stats("t").dead == 2
    abandon(engine)
    fill(tmp_path / "left", all_lost(disk.inodes))
    engine = Engine.open(tmp_path / "left", settings=settings)
    assert sorted(letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())) == ["a", "b"]
    assert engine.damage() == {}
    engine.close()
