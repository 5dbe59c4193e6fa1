"""Promises to consumers when a disk is full, when a read or a sync fails, and when bytes are damaged: nothing is lost, told
twice, taken from its consumer, forgotten or put off for ever; and the engine's own state stays small."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import SETTINGS, Disk, Quick, Syncing, abandon, cut_power, messages, start
from tests.harness.index_world import Later
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, Stopped
from turtlemq.model import Message
from turtlemq.storage.ballast import BYTES
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import DeadLetter, Filter

T = TypeVar("T")
PLENTY = 1 << 40


class Faulty(Syncing):
    """Calls of one name fail for files whose paths hold one of some words, while it is told so. `room`: free bytes on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.room = PLENTY
        self._name, self._error = "", 0
        self._files: tuple[str, ...] = ()

    def fail(self, name: str, *files: str, error: int = errno.EIO) -> None:
        self._name, self._files, self._error = name, files, error

    def fill(self, *files: str) -> None:
        """There is no room for more in these files, and not enough for the ballast to come back."""
        self.room = 2 * BYTES - 1
        self.fail("write", *files, error=errno.ENOSPC)

    def heal(self) -> None:
        self._name, self.room = "", PLENTY

    def free_bytes(self, path: Path) -> int:
        return self.room

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == self._name and any(word in str(path) for word in self._files):
            raise OSError(self._error, "made to fail")
        return super()._call(name, path, action, *args)


class Small(Quick):
    """A disk for `limit` bytes in the files below a folder, once that is set."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.limit = root, PLENTY

    def fresh(self) -> Door:
        return self

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def free_bytes(self, path: Path) -> int:
        return self.limit - self.used()

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "write" and self.limit < PLENTY:
            size = sum(map(len, args[1])) if isinstance(args[1], list | tuple) else len(args[1])
            if args[2] + size - os.fstat(args[0]).st_size > self.free_bytes(self.root):
                raise OSError(errno.ENOSPC, "made to fail")
        return super()._call(name, path, action, *args)


def dead(engine: Engine) -> list[DeadLetter]:
    return list(engine.topic("t").view.dead_letters.all(Filter()))


def reopen(tmp_path: Path) -> Engine:
    return Engine.open(tmp_path / "data", settings=SETTINGS)


def places(engine: Engine) -> tuple[int, int, int, int]:
    """How many sleep, are ready, in reserve, and dead."""
    stats = engine.stats("t")
    return stats.sleep, stats.ready, stats.reserve, stats.dead


# Full disks


def fill_up(engine: Engine, door: Small, due: int) -> None:
    """One more message, and then there is no room to hand it off."""
    engine.submit("t", [Message(bytes(8_000), due, id="next")], due - 1_000)
    door.limit = door.used() + 200


def deliver(engine: Engine, now: int) -> list[str]:
    """The first messages that a consumer gets, in ten seconds."""
    found: list[str] = []
    for at in range(now, now + 10_000, 1_000):
        engine.tick(at)
        found = found or engine.reserve("t", "g", 9, at).ids
    return found


def test_old_history_makes_room_for_due_messages_on_a_full_disk(tmp_path: Path) -> None:
    door = Small(tmp_path)
    engine = start(tmp_path, door, history_hours=0.01)
    for now in range(0, 200, 10):
        engine.submit("t", [Message(bytes(1_000), now) for _ in range(10)], now)
        engine.tick(now)
        assert engine.ack("t", "g", engine.reserve("t", "g", 10, now).ids, now).acked == 10
    fill_up(engine, door, 3_600_000)
    before = len(logs_of(engine).ready.segments)
    assert deliver(engine, 3_600_000) == ["next"]
    assert len(logs_of(engine).ready.segments) < before
    assert engine.check() == []
    abandon(engine)


def test_files_of_cancelled_sleepers_make_room_on_a_full_disk(tmp_path: Path) -> None:
    door = Small(tmp_path)
    engine = start(tmp_path, door)
    ids = [f"s{n}" for n in range(100)]
    for n in range(0, 100, 10):
        engine.submit("t", [Message(bytes(1_000), 10**9, id=id_) for id_ in ids[n : n + 10]], 0)
    assert set(engine.cancel("t", ids, 1).values()) == {"cancelled"}
    fill_up(engine, door, 2_000)
    before = len(engine.topic("t").stores.index._segments.by_base)
    assert deliver(engine, 2_000) == ["next"]
    assert len(engine.topic("t").stores.index._segments.by_base) < before
    assert engine.ballast.aboard
    assert engine.check() == []
    abandon(engine)


def test_due_messages_do_not_use_the_room_of_the_ballast(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", messages(4), 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 4, 10, ttr_ms=10**6).ids
    engine.submit("t", messages(1, 4, due=20), 11)
    door.room = BYTES - 1
    assert engine.ballast.throw()
    engine.tick(20)
    assert isinstance(engine.trouble["t"], DiskFull)
    assert engine.reserve("t", "g", 9, 21).ids == []
    assert engine.ack("t", "g", ids, 22).acked == 4, "there is room for that"
    door.room = 2 * BYTES - 1
    engine.tick(2_000)
    assert engine.reserve("t", "g", 9, 2_000).ids == ["m4"], "it may take any other room"
    abandon(engine)


@pytest.mark.parametrize("crash", [False, True])
def test_room_of_the_ballast_is_for_consumers_after_a_restart_too(tmp_path: Path, crash: bool) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    door.room = BYTES
    assert engine.ballast.throw()
    if crash:
        abandon(engine)
    else:
        engine.close()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    with pytest.raises(DiskFull):
        engine.submit("t", messages(1, 1), 20)
    assert engine.ack("t", "g", engine.reserve("t", "g", 9, 20).ids, 21).acked == 1
    door.room = PLENTY
    assert engine.submit("t", messages(1, 1), 30).created == [True]
    assert engine.ballast.aboard
    engine.close()


def test_an_expired_message_on_a_full_disk_waits_a_second(tmp_path: Path) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    engine.submit("t", [Message(b"body", 10, id="late", expires_ms=15)], 0)
    engine.tick(10)
    door.full = True
    journal = logs_of(engine).reserve
    before = journal.number
    for now in range(20, 1_020):
        engine.tick(now)
        assert engine.reserve("t", "g", 9, now).ids == []
    assert journal.number - before <= 3
    assert dead(engine) == []
    door.full = False
    assert engine.reserve("t", "g", 9, 1_020).ids == []
    assert [(letter.id, letter.error) for letter in dead(engine)] == [("late", "expired")]
    assert engine.check() == []
    engine.close()


def test_an_expired_message_without_room_blocks_no_other(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", [*messages(1), Message(b"body", 10, id="late", expires_ms=15)], 0)
    engine.tick(10)
    engine.ballast.throw()
    door.fill("/history_")
    assert engine.reserve("t", "g", 9, 20).ids == ["m0"]
    door.heal()
    engine.tick(1_020)
    assert engine.reserve("t", "g", 9, 1_020).ids == ["m0"], "its lease has ended"
    assert [letter.id for letter in dead(engine)] == ["late"]
    assert engine.check() == []
    engine.close()


def test_a_lease_whose_settlement_found_no_room_ends(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.tick(6_000)
    engine.ballast.throw()
    door.fill("/history_")
    with pytest.raises(DiskFull):
        engine.reserve("t", "g", 9, 6_010, auto=True)
    door.heal()
    wake = engine.next_wake()
    assert wake is not None
    assert wake <= 7_010
    engine.tick(7_010)
    assert engine.reserve("t", "g", 9, 7_010).ids == ["m0"]
    assert engine.check() == []
    engine.close()


# Notes for which there is no room


@pytest.mark.parametrize("crash", [False, True])
def test_a_retry_whose_event_found_no_room_sleeps_once(tmp_path: Path, crash: bool) -> None:
    door = Faulty()
    engine = start(tmp_path, door, ttr_ms=10**6)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    engine.ballast.throw()
    door.fill("/reserve_")
    assert engine.ack("t", "g", ["-m0"], 11, retry_delay_ms=60_000).failed == 1
    assert engine.ack("t", "g", ["-m0"], 12, retry_delay_ms=60_000).unknown == ["m0"]
    assert places(engine) == (1, 0, 0, 0)
    door.heal()
    if crash:
        abandon(engine)
        engine = reopen(tmp_path)
    assert places(engine) == (1, 0, 0, 0)
    engine.tick(60_011)
    assert engine.reserve("t", "g", 9, 60_011).ids == ["m0"]
    assert engine.ack("t", "g", ["m0"], 60_012).acked == 1
    engine.close()
    engine = reopen(tmp_path)
    engine.tick(10**7)
    assert engine.reserve("t", "g", 9, 10**7).ids == []
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("crash", [False, True])
def test_a_dead_letter_whose_event_found_no_room_counts_once(tmp_path: Path, crash: bool) -> None:
    door = Faulty()
    engine = start(tmp_path, door, max_attempts=1)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    engine.ballast.throw()
    door.fill("/history_")
    engine.tick(1_010)  # its lease ends
    assert engine.groups("t")["g"].dead == len(dead(engine)) == 1
    door.heal()
    if crash:
        abandon(engine)
        engine = reopen(tmp_path)
    engine.tick(10_000)
    assert engine.reserve("t", "g", 9, 10_000).ids == []
    assert places(engine) == (0, 0, 0, 1)
    assert engine.groups("t")["g"].dead == 1
    assert engine.check() == []
    engine.close()


def test_recovered_state_is_saved_before_the_next_handoff(tmp_path: Path) -> None:
    """A power cut takes a batch of which the journal speaks; there is no room to say so, and then the process ends."""
    engine = start(tmp_path)
    engine.tick(1)
    engine.topic("t").checkpoint()
    engine.submit("t", messages(3), 2)
    engine.tick(10)
    assert len(engine.reserve("t", "g", 9, 11)) == 3
    (segment,) = logs_of(engine).ready.segments
    abandon(engine)
    os.truncate(segment.path, segment.data_start)
    door = Faulty()
    door.fill("/reserve_", "/offset.tmp")
    door.room = PLENTY
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    engine.submit("t", messages(1, 3, due=5), 12)  # it comes first now
    engine.tick(20)
    assert isinstance(engine.trouble["t"], DiskFull)
    assert places(engine) == (4, 0, 0, 0)
    abandon(engine)
    engine = reopen(tmp_path)
    engine.tick(2_000)
    assert sorted(engine.reserve("t", "g", 9, 2_000).ids) == ["m0", "m1", "m2", "m3"]
    assert engine.check() == []
    engine.close()


# Syncs that fail when a consumer takes a message over


def refuses(engine: Engine, *ids: str) -> None:
    """Nothing is said of any message of the topic."""
    for acks in (list(ids), [f"-{id_}" for id_ in ids]):
        with pytest.raises(Stopped):
            engine.ack("t", "g", acks, 3_000)
    with pytest.raises(Stopped):
        engine.extend("t", "g", ids, 1_000, 3_000)
    with pytest.raises(Stopped):
        engine.reserve("t", "g", 9, 3_000)
    engine.tick(4_000)
    assert isinstance(engine.trouble["t"], Stopped)


@pytest.mark.parametrize("kept", [False, True])
def test_a_failed_sync_of_a_sleeping_retry_leaves_one_copy(tmp_path: Path, kept: bool) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", messages(2), 0)
    engine.tick(10)
    engine.topic("t").checkpoint()
    assert engine.reserve("t", "g", 1, 10).ids == ["m0"]
    door.fail("fdatasync", "/t/delay_")
    with pytest.raises(Stopped):
        engine.ack("t", "g", ["-m0"], 11, retry_delay_ms=60_000)
    door.heal()
    refuses(engine, "m0")
    if kept:
        engine.close()
    else:
        cut_power(engine, door)
    engine = reopen(tmp_path)
    assert sum(places(engine)) == 2
    assert engine.check() == []
    seen = []
    for now in (10_000, 100_000):
        engine.tick(now)
        seen += (got := engine.reserve("t", "g", 9, now).ids)
        engine.ack("t", "g", got, now)
    assert sorted(seen) == ["m0", "m1"]
    engine.close()


def test_a_failed_sync_of_a_requeue_leaves_one_copy(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door, max_attempts=1)
    engine.submit("t", messages(2), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10).ids == ["m0"]
    assert engine.ack("t", "g", ["-m0"], 11).dead == 1
    door.fail("fdatasync", "/t/delay_")
    with pytest.raises(Stopped):
        engine.requeue("t", dead(engine), 20, due_ms=30)
    door.heal()
    with pytest.raises(Stopped):
        engine.delete_dead("t", dead(engine), 21)
    engine.tick(10_000)
    assert isinstance(engine.trouble["t"], Stopped)
    engine.close()
    engine = reopen(tmp_path)
    assert engine.check() == []
    assert engine.stats("t").sleep + engine.stats("t").dead == 1
    assert engine.stats("t").dead == len(dead(engine))
    engine.tick(10_000)
    assert len(engine.reserve("t", "g", 9, 10_000).ids) + len(dead(engine)) == 2
    engine.close()


def test_a_failed_sync_of_a_dead_letter_leaves_one_copy(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door, max_attempts=1)
    engine.submit("t", messages(2), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10).ids == ["m0"]
    door.fail("fdatasync", "/dead/delay_")
    engine.tick(1_010)  # its lease ends
    assert isinstance(engine.trouble["t"], Stopped)
    door.heal()
    refuses(engine, "m0")
    engine.close()
    engine = reopen(tmp_path)
    assert engine.check() == []
    assert engine.groups("t")["g"].dead == len(dead(engine))
    assert sum(places(engine)) == 2
    assert engine.groups("t")["g"].history == 0, "its settlement was not answered"
    engine.close()


class TellsOnce(Door):
    """Writes of files in `rotten` were lost. The system says so once for each time that a file was opened: where a descriptor is
    a copy of another, to one of them. No other file position is used, so that it can mark those that know."""

    rotten = ""

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "fdatasync" and self.rotten and self.rotten in str(path) and os.lseek(args[0], 0, os.SEEK_CUR) == 0:
            os.lseek(args[0], 1, os.SEEK_SET)
            raise OSError(errno.EIO, "made to fail")
        return action(*args)


def test_an_ack_meets_the_error_of_a_checkpoint_too(tmp_path: Path) -> None:
    door, flusher = TellsOnce(), Later()
    engine = Engine.open(tmp_path / "data", door=door, flusher=flusher, settings=SETTINGS)
    engine.configure("t", ack_durability="fsync", ttr_ms=10**6)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    assert engine.ack("t", "g", engine.reserve("t", "g", 1, 10).ids, 10).acked == 1
    assert engine.reserve("t", "g", 1, 11).ids == ["m1"]
    engine.tick(10_000)
    assert engine.topic("t")._checkpoints._saving is not None, "a checkpoint is under way"
    door.rotten = "/reserve_"
    flusher.finish()
    with pytest.raises(Stopped):
        engine.ack("t", "g", ["m1"], 10_001)
    abandon(engine)


@pytest.mark.parametrize("part", ["ready", "reserve", "history"])
def test_a_checkpoint_syncs_through_descriptors_of_its_own(tmp_path: Path, part: str) -> None:
    engine = start(tmp_path)
    engine.tick(1)  # with the first checkpoint, so that none comes soon
    engine.submit("t", messages(2), 2)
    engine.tick(10)
    engine.ack("t", "g", engine.reserve("t", "g", 1, 10).ids, 10)
    found = getattr(logs_of(engine), part)
    fd, path = found.sync_target()
    os.lseek(fd, 1, os.SEEK_SET)
    assert os.path.samestat(os.fstat(fd), path.stat())
    assert os.lseek(found._fd, 0, os.SEEK_CUR) == 0, "no copy of the one that is written through"
    os.close(fd)
    abandon(engine)


# Reads that fail, and damage


def test_a_read_that_fails_leaves_due_retries_waiting(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door)
    engine.submit("t", messages(2), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 9, 10).ids == ["m0", "m1"]
    assert engine.ack("t", "g", ["-m0", "-m1"], 11).failed == 2
    engine.tick(25)
    door.fail("read", "/ready_")
    with pytest.raises(OSError, match="made to fail"):
        engine.reserve("t", "g", 9, 30)
    door.heal()
    assert engine.reserve("t", "g", 9, 31).ids == ["m0", "m1"]
    assert engine.check() == []
    engine.close()


def with_a_special(root: Path, what: str) -> Engine:
    """The last document of the ready log is one that group g does not see."""
    engine = start(root, ttr_ms=10**6)
    engine.submit("t", messages(1, due=60_000 if what == "a notice" else 10), 0)
    engine.tick(10)
    if what == "a notice":
        assert engine.cancel("t", ["m0"], 11) == {"m0": "cancelled"}
    else:
        engine.ack("t", "g", engine.reserve("t", "g", 1, 10).ids, 10)
        engine.reserve("t", "h", 1, 10)
        assert engine.ack("t", "h", ["-m0"], 11, retry_delay_ms=40_000).failed == 1
    engine.tick(50_000)
    return engine


@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.parametrize("what", ["a notice", "another group's retry"])
def test_damage_before_a_group_hides_no_message_from_it(tmp_path: Path, what: str, tabled: bool) -> None:
    engine = with_a_special(tmp_path, what)
    for n in range(1, 20 if tabled else 1):
        engine.submit("t", messages(1, n, due=50_000), 50_000)
        engine.tick(50_000)
    ready = logs_of(engine).ready
    assert bool(ready.segments[0].tables) == tabled
    engine.topic("t").checkpoint()
    data = bytearray(ready.segments[0].path.read_bytes())
    at = data.rindex(b"m0\0")
    data[at] ^= 1
    ready.segments[0].path.write_bytes(data)
    engine.submit("t", messages(1, 20, due=50_001), 50_001)
    engine.tick(50_001)
    got = engine.reserve("t", "g", 100, 50_001).ids
    assert got[-1] == "m20"
    assert engine.ack("t", "g", got, 50_002).acked == (20 if tabled else 1)
    assert engine.groups("t")["g"].ready == 0
    engine.submit("t", messages(1, 21, due=50_003), 50_003)
    engine.tick(50_003)
    assert engine.topic("t").stores.broker.groups["g"].unfetched == 1
    assert engine.reserve("t", "g", 9, 50_003).ids == ["m21"]
    (damage,) = engine.damage()["t"]
    assert damage.position <= at < damage.position + damage.length
    assert all(damage.file in line for line in engine.check())
    abandon(engine)


# One message, twice


def requeued_and_replayed(engine: Engine, due: int) -> None:
    """m0 has died; it is to come again as a dead letter, and with everything else since its group is moved back."""
    engine.submit("t", [*messages(1), Message(b"body", 10, id="m1", ttr_ms=7)], 0)  # of which each has a lease of its own
    engine.tick(10)
    engine.reserve("t", "g", 9, 10)
    assert engine.ack("t", "g", ["-m0", "m1"], 11).dead == 1
    engine.move_group("t", "g", "earliest", 12)
    assert engine.requeue("t", dead(engine), 13, due_ms=due) == 1


def test_a_cancel_ends_every_sleep_of_a_message(tmp_path: Path) -> None:
    engine = start(tmp_path, max_attempts=1)
    requeued_and_replayed(engine, due=100_000)
    engine.configure("t", max_attempts=2)
    assert engine.reserve("t", "g", 1, 14).ids == ["m0"]
    assert engine.ack("t", "g", ["-m0"], 15, retry_delay_ms=90_000).failed == 1
    assert engine.stats("t").sleep == 1
    assert engine.cancel("t", ["m0"], 16) == {"m0": "cancelled"}
    assert engine.stats("t").sleep == 0
    engine.tick(200_000)
    assert engine.reserve("t", "g", 9, 200_000).ids == ["m1"]
    assert engine.check() == []
    engine.close()


def test_a_letter_requeued_during_a_replay_comes_once(tmp_path: Path) -> None:
    engine = start(tmp_path, max_attempts=1)
    requeued_and_replayed(engine, due=13)
    assert engine.stats("t").sleep == engine.stats("t").dead == 0
    engine.tick(16)
    assert engine.reserve("t", "g", 9, 17, auto=True).ids == ["m0", "m1"]
    assert places(engine) == (0, 0, 0, 0)
    engine.tick(5_000)
    assert dead(engine) == []
    assert engine.reserve("t", "g", 9, 5_000).ids == []
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("how", ["its lease has ended", "its group was moved back"])
def test_a_late_give_back_leaves_the_message_with_its_new_holder(tmp_path: Path, how: str) -> None:
    engine = start(tmp_path)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    first = engine.reserve("t", "g", 1, 10, consumer="first")
    if how == "its lease has ended":
        engine.tick(1_100)
    else:
        engine.move_group("t", "g", "earliest", 1_000)
    assert engine.reserve("t", "g", 1, 1_101, consumer="second").ids == ["m0"]
    assert engine.give_back("t", "g", first.ids, 1_200, first.lease)[0] == 0
    assert engine.reserve("t", "g", 1, 1_201, consumer="third").ids == []
    assert engine.ack("t", "g", ["m0"], 1_202).acked == 1
    engine.close()


def test_a_timely_give_back_returns_the_message_at_once(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", [*messages(1), Message(b"body", 10, id="m1", ttr_ms=5_000)], 0)
    engine.tick(10)
    first = engine.reserve("t", "g", 2, 10, consumer="first")
    engine.tick(1_100)
    assert engine.reserve("t", "g", 1, 1_101, consumer="second").ids == ["m0"]
    assert engine.give_back("t", "g", first.ids, 1_200, first.lease)[0] == 1, "m1 alone"
    assert engine.reserve("t", "g", 9, 1_201, consumer="third").ids == ["m1"]
    assert engine.check() == []
    engine.close()


# Memory


def test_wake_times_stay_few_over_a_long_run(tmp_path: Path) -> None:
    engine = start(tmp_path, Quick())
    for now in range(0, 600_000, 2_000):
        engine.submit("t", [Message(b"body", 10**11)], now)
        for at in (now, now + 1_000):
            engine.tick(at)
    assert engine.next_wake() is not None
    assert len(engine._wake_queue) < 100
    abandon(engine)


def test_memory_of_leases_is_bounded_by_open_ones(tmp_path: Path) -> None:
    engine = start(tmp_path, Quick(), ttr_ms=10**7)
    engine.submit("t", messages(300), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10, ttr_ms=10**6).ids == ["m0"], "it is held all the time"
    for now in range(11, 310):
        assert engine.ack("t", "g", engine.reserve("t", "g", 1, now).ids, now).acked == 1
    assert len(engine.topic("t").stores.broker.groups["g"]._deadlines) < 100
    engine.tick(10**6 + 10)
    assert engine.reserve("t", "g", 9, 10**6 + 10).ids == ["m0"]
    abandon(engine)


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("what", ["a notice", "another group's retry"])
def test_damage_before_a_group_hides_no_message_after_a_restart(tmp_path: Path, what: str, crash: bool, more: bool) -> None:
    engine = with_a_special(tmp_path, what)
    if more:
        engine.submit("t", messages(1, 1, due=50_000), 50_000)
        engine.tick(50_000)
    path = logs_of(engine).ready.segments[0].path
    engine.topic("t").checkpoint()
    abandon(engine) if crash else engine.close()
    data = bytearray(path.read_bytes())
    data[data.rindex(b"m0\0")] ^= 1
    path.write_bytes(data)
    engine = reopen(tmp_path)
    engine.submit("t", messages(1, 2, due=50_001), 50_001)
    engine.tick(50_001)
    engine.ack("t", "g", engine.reserve("t", "g", 9, 50_001).ids, 50_002)
    assert engine.groups("t")["g"].ready == 0
    assert engine.check() == []
    engine.close()


def test_due_messages_use_free_room_and_none_of_the_ballast(tmp_path: Path) -> None:
    door = Faulty()
    engine = start(tmp_path, door, segment_bytes=1 << 20)
    engine.submit("t", [Message(bytes(5_000), 10) for _ in range(100)], 0)
    door.room = BYTES + 100_000
    assert engine.ballast.throw()
    engine.tick(10)
    assert 0 < engine.stats("t").ready < 20
    door.room = BYTES + 1_000
    engine.tick(20)
    assert isinstance(engine.trouble["t"], DiskFull)
    abandon(engine)


def test_acks_of_a_lost_group_do_not_count_later(tmp_path: Path) -> None:
    """Both would be of the same epoch: the number of the event that was lost is given again."""
    engine = start(tmp_path)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    topic = engine.topic("t")
    topic.checkpoint()
    reserve = topic.stores.folder / "reserve_0000000000.bson"
    synced = reserve.stat().st_size
    assert engine.reserve("t", "late", 1, 10).ids == ["m0"]
    assert engine.ack("t", "late", ["m0"], 11).acked == 1
    abandon(engine)
    os.truncate(reserve, synced)
    for now in (100_000, 200_000):
        engine = reopen(tmp_path)
        assert engine.check() == []
        engine.tick(now)
        assert sorted(engine.reserve("t", "late", 9, now).ids) == ["m0", "m1", "m2"]
        assert engine.check() == []
        if now == 100_000:
            abandon(engine)  # nothing was acknowledged
    assert engine.ack("t", "late", ["m0", "m1", "m2"], 200_000).acked == 3
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("then", ["acks", "cancels"])
def test_events_after_a_lost_move_do_not_count(tmp_path: Path, then: str) -> None:
    engine = start(tmp_path)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 1, 10).ids == ["m0"]
    if then == "acks":
        engine.ack("t", "g", ["m0"], 10)
    topic = engine.topic("t")
    topic.checkpoint()
    reserve = topic.stores.folder / "reserve_0000000000.bson"
    synced = reserve.stat().st_size
    engine.move_group("t", "g", "earliest", 11)
    if then == "acks":
        assert engine.ack("t", "g", engine.reserve("t", "g", 2, 12).ids, 13).acked == 2
    else:
        assert engine.cancel("t", ["m0", "m2"], 13) == dict.fromkeys(["m0", "m2"], "cancelled")
    abandon(engine)
    os.truncate(reserve, synced)
    for now in (100_000, 200_000):
        engine = reopen(tmp_path)
        assert engine.check() == []
        assert engine.stats("t").history == (then == "acks")
        engine.tick(now)
        assert sorted(engine.reserve("t", "g", 9, now).ids) == (["m1", "m2"] if then == "acks" else ["m1"])
        abandon(engine)
