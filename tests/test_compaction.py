"""Housekeeping, told by examples: sealing, compaction, dropping, and tombstones that must outlive the segments they stand in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.compaction_batches import batch, forget_caches
from tests.harness.doors import Failing
from tests.harness.index_world import SMALL, World, abandon, documents, open_at
from turtlemq.errors import DiskFull, Stopped
from turtlemq.index import writer
from turtlemq.index.columns import Columns
from turtlemq.index.index import Index
from turtlemq.index.lookup import find
from turtlemq.index.policy import Plan, Task, plan, should_roll
from turtlemq.index.seal import seal
from turtlemq.model import I64, Batch, SegmentLoad, State
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.ids import hash_id
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

YEAR = 31_536_000_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", SMALL)
    yield made
    made.compare_all()
    made.reopen(clean=False, meanwhile=lambda: forget_caches(made))
    made.compare_all()
    abandon(made.index)


def bytes_of(world: World) -> int:
    return sum(path.stat().st_size for path in world.folder.glob("*.bson"))


# Sealing


def test_a_sealed_segment_is_in_due_order_without_what_is_gone(world: World) -> None:
    world.append(Batch([b"x"] * 8, [7, 3, 9, 1, 5, 3, 8, 2], ids=list("abcdefgh")), 0)
    world.cancel(["e"])
    world.drain(2)
    world.settle()
    world.roll()
    world.seal(0)
    world.adopt()
    segment = world.index._segments.by_base[0]
    assert (segment.sealed, segment.documents, segment.live) == (True, 5, 5)
    (part,) = segment.parts
    read = [world.index._segments.read_one(part, i) for i in range(5)]
    assert [d and d.id for d in read] == ["b", "f", "a", "g", "c"]
    assert [p.name for p in world.caches()] == ["delay_0000000000.index"]


def test_what_the_receiver_has_not_made_durable_is_sealed_too(world: World) -> None:
    world.append(batch("a", 5), 0)
    world.roll()
    world.drain(100)  # handed off, but a crash of the receiver would take it back
    world.seal(0)
    world.adopt()
    assert world.index._segments.by_base[0].documents == 5
    world.reopen(clean=False)
    assert len(world.asleep) == 5


def test_a_seal_adopted_late_knows_what_happened_meanwhile(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    world.seal(0)
    world.cancel(["a1", "a2"])
    world.reschedule("a3", 0, 50, None)
    world.append(batch("b", 30, 90), 0)
    world.drain(95, 4)
    world.due(100, count_max=3)
    world.adopt()
    world.compare_all()
    world.drain(100, 2)


def test_a_crash_between_the_renames_of_an_adoption_is_repaired(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    world.seal(0)
    world.cancel(["a1"])
    world.cut_adoption()
    assert world.index._segments.by_base[0].sealed
    assert not list(world.folder.glob("*.tmp"))


def test_sealing_what_is_sealed_leaves_out_what_has_gone_since(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    for generation in (1, 2, 3):
        world.cancel([f"a{generation}"])
        world.seal(0)
        world.adopt()
        segment = world.index._segments.by_base[0]
        assert (segment.generation, segment.documents) == (generation, 20 - generation)
        world.reopen(clean=False)


def test_a_failed_adoption_changes_nothing(tmp_path: Path) -> None:
    """Positions of the old file mean nothing in the new one: memory and disk must change together."""
    door = Failing()
    world = World(tmp_path / "t", SMALL, door)
    world.append(batch("a", 30), 0)
    world.roll()
    failed: list[str | None] = []
    while not failed or failed[-1] is not None:
        world.seal(0)
        world.cancel([f"a{len(failed)}"])
        door.at, door.failed = len(door.calls) + len(failed), None
        try:
            world.adopt()
        except Stopped:
            world.reopen(clean=False)
        except OSError:
            world.sealed = None
        failed.append(door.failed)
        door.at = -1
        world.compare_all()
    assert "rename delay_0000000000.bson" in failed
    assert "rename delay_0000000000.index" in failed
    assert "fsync_dir t" in failed
    abandon(world.index)


# Compaction


def test_one_old_sleeper_never_pins_a_segment(world: World) -> None:
    world.append(batch("old", 1, YEAR), 0)
    for day in range(30):
        world.append(batch(f"{day}-", 30, day), day)
        world.drain(day)
        world.keep_house()
        assert bytes_of(world) < 4 * 4096
    assert list(world.asleep) == ["old0"]
    world.drain(YEAR)


def test_compaction_moves_no_more_than_its_budget(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    assert [world.index.maintenance.compact(0, 6) for _ in range(5)] == [6, 6, 6, 2, 0]
    assert world.index._segments.by_base[0].live == 0
    assert world.index.maintenance.drop(0)


def test_compaction_may_be_cut_by_a_crash_at_any_step(tmp_path: Path) -> None:
    """Every survivor is in exactly one place, whichever step was the last."""
    settings = Settings(segment_bytes=4096, run_messages=8, compact_live_ratio=0.5)
    origin = World(tmp_path / "origin", settings)
    origin.append(batch("a", 24), 0)
    origin.roll()
    origin.cancel([f"a{i}" for i in range(14)])
    abandon(origin.index)
    for steps in range(12):
        folder = tmp_path / str(steps)
        shutil.copytree(tmp_path / "origin", folder)
        world = World(folder, settings)
        world.asleep, world.cancelled = dict(origin.asleep), set(origin.cancelled)
        for _ in range(steps):
            world.step(3)
        world.reopen(clean=False)
        world.compare_all()
        world.keep_house(3)
        world.compare_all()
        assert 0 not in world.index._segments.by_base
        world.drain(100, 4)
        abandon(world.index)


def test_equal_due_times_keep_their_order_through_seal_and_compaction(world: World) -> None:
    world.append(batch("a", 6), 0)
    world.roll()
    world.append(batch("b", 6), 0)
    world.roll()
    world.append(batch("c", 6), 0)
    first, second = world.closed
    world.index.maintenance.compact(first, 4)  # copies stand behind all others in the file
    world.seal(second)
    world.adopt()
    world.index.maintenance.compact(second, 3)
    world.roll()
    world.index.maintenance.compact(world.closed[-1], 5)  # copies of copies
    due = world.index.due(100)
    assert due is not None
    assert [d.id for d in documents(due)] == [f"{p}{i}" for p in "abc" for i in range(6)]


def test_a_copy_is_the_message_it_was(world: World) -> None:
    full = Batch([b"b"], [9], ["a"], [5], [f.JSON | 1], expires_ms=[77], headers=[{"h": "v"}])
    world.append(full, 3)
    world.append(Batch([b"server"], [9]), 4)
    for _ in range(2):
        world.roll()
        base = world.closed[-1]
        world.index.maintenance.compact(base, 10)
        assert world.index.maintenance.drop(base)
        world.compare_all()
    world.cancel(list(world.asleep))


def test_what_the_broker_noted_with_a_message_survives_compaction(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t")
    extra = f.extra_elements(meta={"attempt": 3})
    columns = Columns([b"g/a"], [b"x"], [9], [0], [f.META], [extra], [hash_id("g/a", 0)])
    index._writer.stage(columns, index.next_seq(1))
    index.commit()
    index.maintenance.roll()
    index.maintenance.compact(0, 5)
    due = index.due(9)
    assert due is not None
    (document,) = documents(due)
    assert document.meta == {"attempt": 3}
    assert document.flags & f.META
    abandon(index)


def test_a_message_whose_cancel_is_on_its_way_is_not_moved(tmp_path: Path) -> None:
    """The copy would stand behind the tombstone in the log, and live."""
    index = open_at(tmp_path / "t")
    index.append(batch("a", 3), 0)
    index.maintenance.roll()
    index.stage_cancel(["a1"])
    assert index.maintenance.compact(0, 10) == 2
    assert index.get("a1") is None
    abandon(index)
    again = open_at(tmp_path / "t")
    assert sorted(found.id for found in again.browse()[0]) == ["a0", "a2"]
    abandon(again)


# Dropping


def test_a_segment_in_which_everything_is_cancelled_goes(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    world.cancel(list(world.asleep))
    world.keep_house()
    assert 0 not in world.index._segments.by_base
    assert not list(world.folder.glob("delay_0000000000*"))


def test_a_segment_waits_until_its_handoffs_are_durable_elsewhere(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    world.drain(100)
    assert not world.index.maintenance.drop(0)
    assert world.index.maintenance.step(10, None) == (None, True)
    world.settle()
    assert world.index.maintenance.drop(0)
    world.reopen(clean=False)
    assert not world.asleep


def test_a_tombstone_outlives_the_segment_it_stands_in(world: World) -> None:
    """A message in A, cancelled in C. C is sealed, B goes, C goes: it stays cancelled, also without any index file."""
    world.append(batch("a", 20, YEAR), 0)
    world.roll()
    world.append(batch("b", 20), 0)
    world.roll()
    a, b = world.closed
    world.append(batch("c", 3), 0)
    world.cancel(["a3", "b4"])
    world.roll()
    c = world.closed[-1]
    world.cancel(["a5"])
    world.seal(c)
    world.adopt()
    world.reopen(clean=False, meanwhile=lambda: forget_caches(world))
    world.compare_all()
    world.drain(100)
    world.settle()
    assert world.index.maintenance.drop(b)
    world.reopen(clean=False, meanwhile=lambda: forget_caches(world))
    world.compare_all()
    assert world.index.maintenance.drop(c), "its tombstone for A is written again"
    world.reopen(clean=False, meanwhile=lambda: forget_caches(world))
    world.compare_all()
    world.seal(a)
    world.adopt()
    world.keep_house()
    assert world.index._segments.by_base[a].documents == 18


def test_a_cancel_right_after_a_seal_still_counts(world: World) -> None:
    world.append(batch("a", 20, YEAR), 0)
    world.roll()
    world.seal(0)
    world.adopt()
    world.cancel(["a5"])
    world.roll()
    second = world.closed[1]
    world.seal(0)
    world.cancel(["a6"])
    world.adopt()
    assert world.index.maintenance.drop(second)
    world.roll()
    assert world.index.maintenance.drop(world.closed[1])
    world.reopen(clean=False, meanwhile=lambda: forget_caches(world))
    world.compare_all()


def test_a_rescheduled_message_that_has_gone_still_ends_its_old_version(world: World) -> None:
    world.append(batch("a", 20, YEAR), 0)
    world.roll()
    world.reschedule("a7", 1, 50, None)
    world.roll()
    world.drain(60)
    world.settle()
    second = world.closed[1]
    world.append(batch("z", 1), 0)
    world.seal(second)
    world.adopt()
    world.reopen(clean=False, meanwhile=lambda: forget_caches(world))
    assert "a7" not in world.asleep
    world.compare_all()


def test_tombstones_that_are_needed_do_not_circle(world: World) -> None:
    """Many cancelled in a segment that lives on: their tombstones must neither be lost nor be moved from segment to segment."""
    world.append(batch("a", 33, YEAR, size=10), 0)
    world.append(batch("b", 33, YEAR, size=10), 0)
    world.roll()
    for prefix in "ab":
        world.cancel([f"{prefix}{i}" for i in range(20)])
        world.keep_house()
    written = world.index._segments.active.base + world.index._segments.active.size
    for _ in range(20):
        world.keep_house()
    assert world.index._segments.active.base + world.index._segments.active.size == written, "housekeeping at rest writes nothing"


def test_tombstones_go_when_what_they_ended_has_gone(world: World) -> None:
    world.append(batch("old", 30, YEAR), 0)
    world.roll()
    for round_ in range(25):
        world.append(batch(f"{round_}-", 25, YEAR), 0)
        world.cancel([f"{round_}-{i}" for i in range(25)])
        world.keep_house()
    assert bytes_of(world) < 6 * 4096
    assert len(world.asleep) == 30


def test_an_old_segment_keeps_no_tombstones_that_were_for_others(world: World) -> None:
    """Tombstones are sifted again when the messages they ended have gone, though something still sleeps before them."""
    world.append(batch("old", 20, YEAR), 0)
    world.roll()
    world.append(batch("a", 24, YEAR), 0)
    world.roll()
    world.keep_house()
    world.cancel([f"a{i}" for i in range(20)])
    world.append(batch("c", 2, YEAR), 0)
    world.roll()
    world.keep_house()
    third = world.closed[2]
    assert world.index._segments.by_base[third].ending_count == 20, "needed as long as the second lives on"
    world.seal(world.closed[1])
    world.adopt()
    world.keep_house()
    assert world.index._segments.by_base[third].ending_count == 0
    assert world.index._segments.by_base[third].documents == 2


def test_an_unsealable_segment_is_compacted(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.roll()
    world.append(batch("b", 20), 0)
    world.roll()
    skip = set(world.closed)
    assert world.index.maintenance.step(10, None, skip) == (None, False)
    world.cancel([f"a{i}" for i in range(1, 20)])
    for _ in range(3):
        world.index.maintenance.step(10, None, skip)
    assert 0 not in world.index._segments.by_base


def test_a_name_that_cannot_be_removed_keeps_its_segment(tmp_path: Path) -> None:
    door = Failing()
    world = World(tmp_path / "t", SMALL, door)
    world.append(batch("a", 20), 0)
    world.roll()
    world.cancel(list(world.asleep))
    door.at = len(door.calls) + 1  # behind the opening of the folder
    with pytest.raises(OSError, match="made to fail"):
        world.index.maintenance.drop(0)
    assert "rename" in str(door.failed)
    assert 0 in world.index._segments.by_base, "else its tombstones would go before it"
    assert world.index.maintenance.drop(0)
    world.compare_all()
    abandon(world.index)


def test_housekeeping_on_a_full_disk_resumes_when_there_is_room(tmp_path: Path) -> None:
    door = Failing(how="ENOSPC")
    settings = Settings(segment_bytes=4096, run_messages=8, compact_live_ratio=0.5)
    world = World(tmp_path / "t", settings, door)
    world.append(batch("a", 24), 0)
    world.roll()
    world.cancel([f"a{i}" for i in range(18)])
    for _ in range(8):
        door.at = len(door.calls) + 1
        try:
            world.step(2)
        except DiskFull:
            world.compare_all()
    world.keep_house()
    world.compare_all()
    assert 0 not in world.index._segments.by_base
    abandon(world.index)


# Numbers


def test_no_seq_is_given_twice_even_when_nothing_is_left(world: World) -> None:
    """Everything was cancelled and dropped, and a restart finds no message: an id given before must not come again."""
    given = set(world.append(Batch([b"x"] * 3, [5] * 3), 1_000).ids)
    world.cancel(sorted(given))
    world.roll()
    world.keep_house()
    assert len(world.index._segments.by_base) == 1
    world.reopen(clean=False)
    assert not given & set(world.append(Batch([b"x"] * 3, [5] * 3), 1_000).ids)


def test_a_tombstone_is_never_taken_for_one_worked_in_before(world: World, tmp_path: Path) -> None:
    """Dead bits say up to which seq they know all. When a power cut takes unsynced bytes, tombstones must be newer still."""
    world.append(batch("a", 4), 0)
    world.index.maintenance.flush()
    world.cancel(["a1"])
    world.append(batch("lost", 5), 900, sync=False)
    world.reopen()  # writes the dead bits
    path = world.index._segments.active.path
    whole, kept = path.read_bytes(), find(world.index._segments, "lost0")
    assert kept is not None
    start = int(kept[0].spans_of(kept[0].ending_ordinals() * 0 + kept[1])[0][0]) if len(kept[0].ending_ordinals()) else len(whole)

    def power_cut() -> None:
        path.write_bytes(whole[:start])
        for id_ in [id_ for id_ in world.asleep if id_.startswith("lost")]:
            del world.asleep[id_]

    world.reopen(clean=False, meanwhile=power_cut)
    world.cancel(["a2"])
    world.reopen(clean=False)
    assert sorted(world.asleep) == ["a0", "a3"]
    world.compare_all()


# Policy


def test_the_policy_takes_the_emptiest_then_the_oldest() -> None:
    loads = [SegmentLoad(0, 9, 100, 50, True), SegmentLoad(1, 9, 100, 4, False), SegmentLoad(2, 9, 100, 1, True)]
    assert plan(loads, Settings()) == Plan(Task.COMPACT, 2)
    assert plan(loads[:1], Settings()) is None
    assert plan([SegmentLoad(7, 9, 100, 99, False), SegmentLoad(3, 9, 9, 9, False)], Settings()) == Plan(Task.SEAL, 3)
    assert not should_roll(SegmentLoad(0, 0, 0, 0, False), Settings())


def test_check_finds_what_is_wrong(tmp_path: Path) -> None:
    index: Index = open_at(tmp_path / "t")
    index.append(batch("a", 3), 0)
    index._segments.memtable.live += 1
    assert "are said to sleep" in index.check()[0]
    index._segments.memtable.live -= 1
    index._segments.memtable.mark_ended(1)
    assert "disagree on who sleeps" in index.check()[0]
    assert index.cancel(["a0"]) == {"a0": State.CANCELLED}
    abandon(index)


def test_a_seal_runs_on_a_door_of_its_own(world: World) -> None:
    world.append(batch("a", 5), 0)
    world.roll()
    sealed = seal(Door(), world.index.maintenance.seal_job(0))
    assert world.index.maintenance.adopt(sealed)


@pytest.mark.parametrize("behind", [False, True])
def test_no_document_is_read_to_know_that_its_segment_may_go(world: World, monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    """The mark of the receiver covers all of them, or not even the first: the due times in the table tell it."""
    world.append(Batch([b"x"] * 40, [*range(40)], ids=[f"a{n}" for n in range(40)]), 0)
    world.roll()
    world.append(batch("b", 3, 100), 0)
    world.drain(20)
    if behind:
        world.settle()
    world.drain(100)
    if not behind:
        world.settle()
        world.append(batch("c", 3, 2_000), 0)
        world.drain(1_000)  # the mark that is durable is not the newest
    world.index.maintenance.flush()
    asked, read = list[int](), log.read_prefixes

    def read_prefixes(door: Door, path: Path, starts: I64) -> Any:
        asked.append(len(starts))
        return read(door, path, starts)

    monkeypatch.setattr(log, "read_prefixes", read_prefixes)
    assert world.index.maintenance.drop(0) is not behind
    assert not any(asked)
    world.settle()


def test_maintenance_does_not_wait_for_the_commit_of_a_large_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LARGE", 8)
    world.index.configure(replace(world.index.settings, segment_bytes=8_000))
    world.append(batch("a", 40, 5), 0)
    world.drain(10)
    world.settle()
    index = world.index
    assert should_roll(index.maintenance._load(index._segments.active), world.index.settings), "the segment is sparse"
    first = index.active_base
    index.stage(batch("b", 8, 90), 0)
    group = index.take()
    assert group is not None
    waited = list[int]()

    def wait() -> None:
        waited.append(1)
        group.run()

    group.wait = wait
    for _ in range(30):
        assert index.maintenance.step(100, None) == (None, True)
    assert (waited, index.active_base) == ([], first)
    index.maintenance.step(100, None)  # but not for ever
    assert waited == [1]
    assert index.active_base > first
    for id_ in [f"b{n}" for n in range(8)]:
        assert index.get(id_) is not None
        index.cancel([id_])
