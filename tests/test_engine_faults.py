"""The engine on disks that fail: full ones, ones whose sync fails, power cuts, and damaged bytes in logs and tables."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import SETTINGS, Disk, Quick, Syncing, abandon, cut_power, messages, start
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, Stopped
from turtlemq.model import Message, Priority
from turtlemq.storage import names

# Full disks


def test_on_a_full_disk_producers_are_refused_and_consumers_go_on(tmp_path: Path) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    engine.submit("t", messages(30), 0)
    engine.tick(10)
    door.full = True
    with pytest.raises(DiskFull):
        engine.submit("t", messages(1, 100), 10)
    assert (tmp_path / "data" / names.BALLAST).exists()
    first = engine.reserve("t", "g", 10, 10).ids
    assert len(first) == 10
    assert engine.ack("t", "g", [*first[:8], "-" + first[8], "-" + first[9]], 11).failed == 2
    assert not (tmp_path / "data" / names.BALLAST).exists(), "its room went to the journals"
    assert len(engine.reserve("t", "g", 100, 30).ids) == 22
    door.full = False
    engine.submit("t", messages(1, 100), 40)
    engine.tick(6_000)
    assert (tmp_path / "data" / names.BALLAST).exists(), "it is back"
    assert engine.check() == []
    engine.close()


def test_the_room_that_the_ballast_held_is_for_consumers_alone(tmp_path: Path) -> None:
    class Small(Disk):
        room = 1 << 30

        def free_bytes(self, path: Path) -> int:
            return self.room

    door = Small()
    engine = start(tmp_path, door)
    engine.submit("t", messages(30), 0)
    engine.tick(10)
    door.full, door.room = True, 0
    assert len(engine.reserve("t", "g", 10, 10).ids) == 10
    assert not (tmp_path / "data" / names.BALLAST).exists()
    door.full = False  # the few megabytes that were thrown overboard
    with pytest.raises(DiskFull):
        engine.submit("t", messages(1, 100), 10)
    assert len(engine.reserve("t", "g", 10, 10).ids) == 10
    door.room = 1 << 30
    engine.submit("t", messages(1, 100), 10)
    assert (tmp_path / "data" / names.BALLAST).exists()
    engine.close()


def test_deaths_and_retries_on_a_full_disk_wait_in_memory(tmp_path: Path) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    engine.submit("t", messages(2), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 2, 10).ids == ["m0", "m1"]
    door.full = True
    assert engine.ack("t", "g", ["-m0"], 11, retry_delay_ms=100_000).failed == 1  # would sleep through the Index
    engine.tick(1_010)  # m1: its lease ends
    assert engine.reserve("t", "g", 2, 1_010).ids == ["m1"]
    assert engine.ack("t", "g", ["-m1"], 1_011).dead == 0, "no room among the dead"
    assert engine.reserve("t", "g", 2, 1_012).ids == []
    assert engine.reserve("t", "g", 2, 3_000).ids == ["m1"]
    door.full = False
    assert engine.ack("t", "g", ["-m1"], 3_001).dead == 1
    engine.tick(101_000)
    assert engine.reserve("t", "g", 2, 101_000).ids == ["m0"]
    assert engine.check() == []
    engine.close()


def test_leases_end_while_what_is_due_finds_no_room(tmp_path: Path) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    engine.submit("t", messages(1, 1, due=500), 20)
    door.full = True
    engine.tick(2_000)
    assert isinstance(engine.trouble["t"], DiskFull)
    assert engine.reserve("t", "g", 5, 2_001).ids == ["m0"]
    door.full = False
    engine.tick(4_000)
    assert engine.trouble == {}
    assert engine.reserve("t", "g", 5, 4_001).ids == ["m1"], "it has come due; the second lease of m0, its last, has ended"
    stats = engine.stats("t")
    assert (stats.ready, stats.reserve, stats.dead) == (0, 1, 1)
    assert engine.check() == []
    engine.close()


# Syncs that fail


@pytest.mark.parametrize("file", ["ready_", "reserve_", "history_"])
def test_a_failed_sync_stops_one_topic_for_good_and_no_other(tmp_path: Path, file: str) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    for topic in ("t", "u"):
        engine.submit(topic, messages(3), 0)
    engine.tick(10)
    for topic in ("t", "u"):
        ids = engine.reserve(topic, "g", 2, 10).ids
        engine.ack(topic, "g", ids[:1], 10)
        engine.submit(topic, messages(1, 3, due=20), 10)
    engine.tick(20)
    door.rotten = f"t/{file}"
    engine.tick(6_000)
    assert isinstance(engine.trouble["t"], Stopped)
    assert "u" not in engine.trouble
    door.rotten = ""
    engine.tick(12_000)
    assert isinstance(engine.trouble["t"], Stopped), "the same descriptor is never trusted again"
    assert engine.topics["t"].stopped is not None
    assert len(engine.reserve("u", "g", 5, 12_000)) == 3
    engine.close()
    again = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert not again.was_clean
    assert again.stats("t").reserve + again.stats("t").ready + again.stats("t").history == 4
    assert again.check() == []
    again.close()


# Power cuts


def _story(folder: Path, **changes: Any) -> dict[str, int]:
    """Work up to a sync, then more of it. Returns how long each file was at the sync."""
    engine = start(folder, None, **changes)
    engine.submit("t", messages(6), 0)
    engine.tick(10)
    engine.ack("t", "g", engine.reserve("t", "g", 2, 10).ids, 11)
    assert engine.cancel("t", ["m5"], 11) == {"m5": "cancelled"}
    engine.topics["t"].checkpoint()
    sizes = {path.name: path.stat().st_size for path in (folder / "data" / "topic" / "t").glob("*.bson")}
    engine.submit("t", messages(4, 6, due=20), 12)
    engine.tick(20)
    ids = engine.reserve("t", "g", 5, 21).ids
    assert ids == ["m2", "m3", "m4", "m6", "m7"]
    engine.ack("t", "g", ["m2", "-m3", "m6"], 22)
    engine.submit("t", messages(1, 10, due=24), 23)
    engine.tick(24)
    assert engine.reserve("t", "g", 1, 25).ids == ["m8"]
    engine.ack("t", "g", ["m8"], 26)
    abandon(engine)
    return sizes


def _finish(folder: Path) -> list[str]:
    """Open the state that a cut has left, and consume all that is there."""
    engine = Engine.open(folder / "data", door=Quick(), settings=SETTINGS)
    assert engine.check() == []
    seen: list[str] = []
    for now in range(10_000, 80_000, 10_000):
        engine.tick(now)
        out = engine.reserve("t", "g", 100, now)
        engine.ack("t", "g", out.ids, now)
        seen += out.ids
    assert engine.check() == []
    stats = engine.stats("t")
    assert (stats.sleep, stats.ready, stats.reserve, stats.dead) == (0, 0, 0, 0)
    engine.close()
    return seen


@pytest.mark.parametrize("kind", ["ready", "reserve", "history"])
def test_a_power_cut_at_any_byte_keeps_puts_and_cancels(tmp_path: Path, kind: str) -> None:
    sizes = _story(tmp_path / "story")
    whole = tmp_path / "story" / "data" / "topic" / "t" / f"{kind}_0000000000.bson"
    length = whole.stat().st_size
    step = 1 if kind != "ready" else 7
    for cut in [*range(sizes[whole.name], length, step * 13), length]:
        folder = tmp_path / "cut"
        shutil.copytree(tmp_path / "story", folder)
        path = folder / "data" / "topic" / "t" / whole.name
        os.truncate(path, cut)
        seen = _finish(folder)
        assert len(seen) == len(set(seen)), (kind, cut, seen)
        assert not {"m0", "m1", "m5"} & set(seen), "acknowledged or cancelled, and synced before the cut"
        assert {"m3", "m4", "m7", "m9", "m10"} <= set(seen), (kind, cut, seen)
        if cut == length:
            assert sorted(seen) == ["m10", "m3", "m4", "m7", "m9"], "nothing acknowledged comes again"
        shutil.rmtree(folder)


def test_a_synced_batch_survives_a_gap_behind_it(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    assert engine.cancel("t", ["m0"], 11) == {"m0": "cancelled"}
    engine.topics["t"].checkpoint()
    path = tmp_path / "data" / "topic" / "t" / "ready_0000000000.bson"
    sizes = [path.stat().st_size]
    for n in (1, 2):
        engine.submit("t", messages(1, n, due=10 * n), 10 * n)
        engine.tick(10 * n)
        sizes.append(path.stat().st_size)
    abandon(engine)
    with path.open("r+b") as file:
        file.seek(sizes[0])
        file.write(bytes(sizes[1] - sizes[0]))
    assert sizes[0] < sizes[1] < sizes[2]
    assert sorted(_finish(tmp_path)) == ["m1", "m2"], "neither lost nor cancelled in vain"


def test_with_ack_durability_fsync_an_answered_ack_survives_a_power_cut(tmp_path: Path) -> None:
    door = Syncing()
    engine = start(tmp_path, door, ack_durability="fsync")
    engine.submit("t", messages(5), 0)
    engine.tick(10)
    engine.ack("t", "g", engine.reserve("t", "g", 3, 10).ids, 11)
    engine.reserve("t", "g", 2, 12)
    cut_power(engine, door)
    assert sorted(_finish(tmp_path)) == ["m3", "m4"]


def test_at_most_once_is_settled_durably_before_it_is_handed_out(tmp_path: Path) -> None:
    door = Syncing()
    engine = start(tmp_path, door, delivery="at-most-once")
    engine.submit("t", messages(5), 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 3, 10).ids == ["m0", "m1", "m2"]
    cut_power(engine, door)
    assert sorted(_finish(tmp_path)) == ["m3", "m4"]


def test_a_sleeping_retry_comes_once_after_a_power_cut(tmp_path: Path) -> None:
    door = Syncing()
    engine = start(tmp_path, door)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    engine.reserve("t", "g", 3, 10)
    assert engine.ack("t", "g", ["-m0"], 11, retry_delay_ms=60_000).failed == 1
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.reserve("t", "g", 9, 2_000).ids == []
    engine.tick(2_000)
    assert sorted(engine.reserve("t", "g", 9, 2_000).ids) == ["m1", "m2"], "m0 sleeps"
    assert engine.stats("t").sleep == 1
    abandon(engine)


def test_a_woken_retry_comes_once_after_a_power_cut(tmp_path: Path) -> None:
    """The clock stood still, or jumped: no checkpoint has come since the message went to sleep."""
    door = Syncing()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.topic("t").checkpoint()
    engine.reserve("t", "g", 1, 10)
    assert engine.ack("t", "g", ["-m0"], 11, retry_delay_ms=60_000).failed == 1
    topic = engine.topic("t")
    assert topic._hand_off(70_000) is None
    logs_of(engine).ready.sync()  # it reaches the disk before the journal's events, which have not been synced yet
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    engine.tick(200_000)
    assert engine.reserve("t", "g", 9, 200_000).ids == ["m0"]
    engine.tick(200_010)
    assert engine.reserve("t", "g", 9, 200_010).ids == [], "it is in one consumer's hands"
    abandon(engine)


def test_dead_letters_are_counted_after_a_power_cut(tmp_path: Path) -> None:
    door = Syncing()
    engine = start(tmp_path, door, max_attempts=1)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    engine.reserve("t", "g", 3, 10)
    assert engine.ack("t", "g", ["-m0"], 11).dead == 1
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.check() == []
    assert engine.groups("t")["g"].dead == 1
    engine.tick(2_000)
    assert sorted(engine.reserve("t", "g", 9, 2_000).ids) == ["m1", "m2"]
    abandon(engine)


@pytest.mark.parametrize("after", ["the group is moved", "the group is gone"])
def test_a_dead_letter_counts_though_its_event_is_lost(tmp_path: Path, after: str) -> None:
    door = Syncing()
    engine = start(tmp_path, door, max_attempts=1)
    engine.submit("t", messages(3), 0)
    engine.tick(10)
    engine.topic("t").checkpoint()
    engine.reserve("t", "g", 3, 10)
    assert engine.ack("t", "g", ["-m0"], 11).dead == 1
    if after == "the group is moved":
        engine.move_group("t", "g", "earliest", 12)
    else:
        engine.drop_group("t", "g", 12)
    logs_of(engine).reserve.sync()
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.check() == []
    assert engine.stats("t").dead == 1
    abandon(engine)


def test_a_group_revived_by_a_power_cut_does_not_count_cancels(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(4), 0)
    engine.tick(10)
    engine.topic("t").checkpoint()
    path = tmp_path / "data" / "topic" / "t" / "reserve_0000000000.bson"
    size = path.stat().st_size
    engine.drop_group("t", "g", 11)
    assert engine.cancel("t", ["m0", "m1"], 12) == {"m0": "cancelled", "m1": "cancelled"}
    abandon(engine)
    os.truncate(path, size)  # the journals are synced one after the other
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.check() == []
    assert engine.groups("t")["g"].ready == 2
    abandon(engine)


@pytest.mark.parametrize("levels", [False, True])
def test_an_ack_whose_lease_is_lost_counts_at_redelivery(tmp_path: Path, levels: bool) -> None:
    engine = start(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    high = [Message(b"", 10, id=f"h{n}", priority=Priority.HIGH) for n in range(2)] if levels else []
    engine.submit("t", [*messages(4), *high], 0)
    engine.tick(10)
    engine.topic("t").checkpoint()
    path = tmp_path / "data" / "topic" / "t" / "reserve_0000000000.bson"
    size = path.stat().st_size
    ids = engine.reserve("t", "g", 3, 11).ids
    assert engine.ack("t", "g", ids, 12).acked == 3
    abandon(engine)
    os.truncate(path, size)  # the journals are written one after the other
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.groups("t")["g"].history == 0
    again = engine.reserve("t", "g", 9, 13).ids
    assert set(ids) <= set(again)
    engine.ack("t", "g", again, 14)
    assert engine.groups("t")["g"].history == len(again)
    assert engine.check() == []
    abandon(engine)


def test_a_batch_written_before_its_predecessor_hands_nothing_off(tmp_path: Path) -> None:
    """Sectors of a log are written in any order. The second batch says that everything so far was handed off."""
    engine = start(tmp_path)
    engine.submit("t", [*messages(2), Message(b"later", 1_000, id="later")], 0)
    engine.tick(1)  # with the first checkpoint, so that none comes soon
    engine.tick(10)
    (ready,) = _ready_files(tmp_path, ".bson")
    first = logs_of(engine).ready.segments[0].data_start
    second = ready.stat().st_size
    assert engine.cancel("t", ["later"], 11) == {"later": "cancelled"}
    assert ready.stat().st_size > second
    abandon(engine)
    with ready.open("r+b") as file:
        file.seek(first)
        file.write(bytes(second - first))
    assert _finish(tmp_path) == ["m0", "m1"]


def test_a_log_left_empty_by_a_crash_is_no_damage(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    (ready,) = _ready_files(tmp_path, ".bson")
    start_of_data = logs_of(engine).ready.segments[0].data_start
    abandon(engine)
    (tmp_path / "data" / "topic" / "t" / "offset").unlink()
    os.truncate(ready, start_of_data + 9)  # the process ended in the middle of the first batch
    Engine.open(tmp_path / "data", settings=SETTINGS).close()
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.damage() == {}
    engine.close()


# Damage


def _ready_files(tmp_path: Path, suffix: str) -> list[Path]:
    return sorted((tmp_path / "data" / "topic" / "t").glob(f"ready_*{suffix}"))


def _fill(tmp_path: Path, count: int = 60) -> Engine:
    engine = start(tmp_path, None, segment_bytes=4096)
    for n in range(0, count, 4):
        engine.submit("t", messages(4, n, due=10 + n), n)
        engine.tick(10 + n)
    return engine


def test_damaged_tables_are_rebuilt_while_serving(tmp_path: Path) -> None:
    engine = _fill(tmp_path)
    expected = [f"m{n}" for n in range(60)]
    engine.close()
    tables = _ready_files(tmp_path, ".run")
    assert len(tables) > 3
    for path in tables:
        data = bytearray(path.read_bytes())
        for at in range(4096 + 8, len(data), 512):
            data[at] ^= 0x55
        path.write_bytes(data)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.message("t", "m7") is not None
    assert engine.move_group("t", "h", 30, 100) > 0
    assert engine.reserve("t", "g", 100, 100).ids == expected
    assert not any(engine.submit("t", messages(60), 100).created)
    assert engine.check() == []
    engine.close()


def test_tables_may_be_deleted(tmp_path: Path) -> None:
    engine = _fill(tmp_path)
    engine.close()
    for path in _ready_files(tmp_path, ".run"):
        path.unlink()
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.reserve("t", "g", 100, 100).ids == [f"m{n}" for n in range(60)]
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("tables", [False, True])
def test_a_damaged_document_is_reported_and_the_rest_delivered(tmp_path: Path, reopen: bool, tables: bool) -> None:
    engine = _fill(tmp_path)
    broken = f"m{21}".encode()
    if reopen:
        engine.close()
    path = next(p for p in _ready_files(tmp_path, ".bson") if broken + b"\0" in p.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(broken + b"\0") + 15] ^= 0xFF
    path.write_bytes(data)
    if not tables:
        for table in _ready_files(tmp_path, ".run") if reopen else []:
            table.unlink()
    if reopen:
        engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    got = engine.reserve("t", "g", 100, 100).ids
    assert got == [f"m{n}" for n in range(60) if n != 21]
    engine.ack("t", "g", got, 101)
    assert engine.groups("t")["g"].ready == 0
    assert any(damage.file == path.name for damage in engine.damage()["t"])
    engine.close()


@pytest.mark.parametrize("how", ["deleted", "damaged", "torn", "empty"])
def test_the_checkpoint_is_only_a_cache(tmp_path: Path, how: str) -> None:
    engine = start(tmp_path)
    engine.submit("t", messages(10), 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 6, 10, ttr_ms=90_000).ids
    engine.ack("t", "g", [*ids[:2], "-" + ids[2]], 11, retry_delay_ms=5_000, error="no")
    before, groups = engine.stats("t"), engine.groups("t")
    engine.close()
    path = tmp_path / "data" / "topic" / "t" / "offset"
    data = path.read_bytes()
    match how:
        case "deleted":
            path.unlink()
        case "damaged":
            path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
        case "torn":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert (engine.stats("t").ready, engine.stats("t").reserve) == (before.ready, before.reserve)
    assert engine.groups("t") == groups
    assert engine.reserve("t", "g", 10, 20).ids == ["m6", "m7", "m8", "m9"]
    assert engine.reserve("t", "g", 10, 6_000).ids == ["m2"]
    assert engine.check() == []
    engine.close()
