"""Promises of the Index when two things meet: housekeeping and a table that is still being written, a request and a group
that no thread was given, a put and a reschedule under way, two ids with one hash, and good bytes that stand in the wrong place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness.committer import Server, Slow
from tests.harness.committer import batch as messages
from tests.harness.doors import Failing
from tests.harness.index_world import SMALL, Later, World, abandon, documents, open_at
from turtlemq.errors import Stopped
from turtlemq.index import maintenance
from turtlemq.index.index import Index
from turtlemq.index.seal import seal
from turtlemq.index.writer import CommitGroup
from turtlemq.model import Batch, State
from turtlemq.segment.ids import hash_id
from turtlemq.server.commit import THREADS
from turtlemq.settings import Settings

YEAR = 31_536_000_000
ROOMY = Settings(segment_bytes=1 << 20, run_messages=10_000)  # all in one memtable
TWINS = ("invoice-960778", "dO\u0384\u06b6<0")  # the hash of an id of eight bytes can be undone: one more for any other


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", ROOMY)
    yield made
    made.compare_all()
    made.reopen(clean=False)
    made.compare_all()
    abandon(made.index)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[World]:
    """Small segments, whose tables are written when the flusher is told to."""
    made = World(tmp_path / "t", replace(SMALL, run_messages=1_000), flusher=Later())
    yield made
    made.compare_all()
    made.reopen(clean=False)
    made.compare_all()
    abandon(made.index)


def batch(prefix: str, n: int, due: int = 100, size: int = 30) -> Batch:
    return Batch([b"x" * size] * n, [due] * n, ids=[f"{prefix}{i:03}" for i in range(n)])


def hand_off(index: Index, now: int, count_max: int = 10_000) -> list[str]:
    """Everything that is due, a handoff after the other."""
    found: list[str] = []
    while (due := index.due(now, count_max=count_max)) is not None:
        found += [document.id for document in documents(due)]
        index.advance(due)
    return found


# Tables that are still being written


def fill(world: World, prefix: str) -> None:
    """Long sleepers, until the active segment has no room for another document."""
    active, before, count = world.index._segments.active, world.index._segments.active.size, 1
    world.append(batch(f"{prefix}0", 1, YEAR), 0)
    each = active.size - before
    while (room := world.settings.segment_bytes - active.size) >= 2 * each:
        world.append(batch(f"{prefix}{count}", 1, YEAR), 0)
        count += 1
    world.append(batch(f"{prefix}_", 1, YEAR, 30 + room - each), 0)


def test_a_segment_is_not_sealed_before_its_table_is_written(late: World) -> None:
    late.append(batch("z", 20, YEAR), 0)
    late.roll()
    late.keep_house()
    late.append(batch("a", 20), 0)
    late.cancel(["z000"])  # a compaction that drops this segment writes the tombstone again, into the active one
    late.roll()
    fill(late, "b")
    full = late.index._segments.active
    late.drain(100)
    late.keep_house()
    assert late.index.counters.segments_dropped == 1
    assert late.index._segments.active is not full
    assert (full.live, late.index._segments.by_base[full.base].live) == (full.documents, full.documents)


def test_documents_without_a_table_cannot_be_sealed(late: World) -> None:
    late.append(batch("a", 20), 0)
    late.roll()
    with pytest.raises(AssertionError):
        late.index.maintenance.seal_job(0)


# Groups that no thread was given


@pytest.mark.timeout(30)  # or it would never end
def test_an_urgent_write_runs_a_group_that_waits_for_a_thread(tmp_path: Path) -> None:
    door, topics = Slow(), [f"t{n}" for n in range(THREADS + 1)]

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        tasks = [asyncio.create_task(server.put("a", topic=topic)) for topic in topics]
        await asyncio.sleep(0.05)
        ((topic, _, _),) = server.committer._jobs.items()
        assert server.engine.submit(topic.name, messages("b"), 0).created == [True]
        assert server.engine.get(topic.name, "a") is not None
        assert server.engine.cancel(topic.name, ["a"], 0) == {"a": "cancelled"}
        assert not server.committer._jobs, "it is not run again"
        door.gate.set()
        assert await asyncio.gather(*tasks) == [[True]] * len(topics)
        assert await server.put("c", topic=topic.name) == [True], "and what comes next is written as ever"
        await asyncio.sleep(0)
        server.close()
        assert len(server.commits) == len(topics) + 1, "each was observed"

    asyncio.run(story())


# A put of an id whose reschedule is under way


@pytest.mark.parametrize("taken", [False, True], ids=["staged", "being synced"])
def test_a_put_during_the_ids_reschedule_is_a_duplicate(tmp_path: Path, taken: bool) -> None:
    index = open_at(tmp_path / "t")
    index.append(Batch([b"first"], [10], ids=["x"]), 0)
    index.stage_reschedule("x", 1, due_ms=20)
    if taken:
        run(index)
    assert index.stage(Batch([b"second"], [30], ids=["x"]), 2).created == [False]
    assert index.stage(Batch([b"third"] * 30, [30] * 30, ids=[f"{i}" for i in range(29)] + ["x"]), 2).duplicates == 1
    index.commit()
    assert index.cancel(["x"]) == {"x": State.CANCELLED}
    assert index.stats().sleep == 29
    assert index.append(Batch([b"again"], [30], ids=["x"]), 3).created == [True]
    assert index.check() == []
    abandon(index)


def run(index: Index) -> CommitGroup:
    """Do the work of a committer's thread. Returns the group, which is not landed yet."""
    group = index.take()
    assert group is not None
    group.run()
    return group


# A reschedule that cannot be published


def test_a_reschedule_is_published_without_a_read_that_could_fail(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(batch("x", 5, 10), 0)
    index.maintenance.flush()
    index.stage_reschedule("x000", 1, due_ms=20)
    group = run(index)
    door.at = len(door.calls)
    index.land(group)
    door.heal()
    assert (hand_off(index, 10), hand_off(index, 20)) == ([f"x{i:03}" for i in range(1, 5)], ["x000"])
    assert index.check() == []
    abandon(index)


@pytest.fixture
def unpublished(tmp_path: Path) -> Iterator[tuple[Index, CommitGroup, CommitGroup]]:
    """A reschedule of x000 was written, but the version it ends has moved from a memtable to a run meanwhile, and reading that
    fails. A group was staged behind it."""
    door, flusher = Failing(), Later()
    index = open_at(tmp_path / "t", settings=Settings(), door=door)
    index._writer.flusher = flusher
    index.append(Batch([b"x", b"y"], [10, 15], ids=["x000", "y000"]), 0)
    index.maintenance.roll()
    index.stage_reschedule("x000", 1, due_ms=20)
    group = run(index)
    index.stage(batch("b", 1, 15), 2)
    behind = index.pending
    assert behind is not None
    flusher.finish()
    index._writer.finish_flush()
    door.at = len(door.calls)
    with pytest.raises(Stopped):
        index.land(group)
    assert door.failed == "read delay_0000000000.bson"
    door.heal()
    yield index, group, behind
    abandon(index)
    opened = open_at(tmp_path / "t", settings=Settings())
    found = opened.get("x000")
    assert found is not None
    assert (found.due_ms, opened.stats().sleep) == (20, 2), "it was written: opening works it in"
    assert opened.check() == []
    abandon(opened)


def test_a_reschedule_that_could_not_be_published_holds_nothing_back(unpublished: tuple[Index, CommitGroup, CommitGroup]) -> None:
    index, _, _ = unpublished
    assert "y000" in hand_off(index, 15)
    following = index.next_due()
    assert following is not None
    assert following > 15


def test_messages_staged_behind_a_failed_publish_are_not_stored(
    unpublished: tuple[Index, CommitGroup, CommitGroup],
) -> None:
    index, group, behind = unpublished
    assert isinstance(group.error, Stopped)
    assert isinstance(behind.error, Stopped)
    index.commit()  # there is nothing left to commit
    assert index.get("b000") is None
    with pytest.raises(Stopped):
        index.append(batch("c", 1), 3)


# Two ids with one hash


@pytest.mark.parametrize("others", [0, 40], ids=["a few", "many"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_two_ids_with_one_hash_are_two_messages(world: World, others: int, together: bool) -> None:
    assert hash_id(TWINS[0], 0) == hash_id(TWINS[1], 0)
    some = [f"o{i}" for i in range(others)]
    for ids in [[*TWINS, *some]] if together else [[TWINS[0], *some], [TWINS[1]]]:
        world.append(Batch([id_.encode() for id_ in ids], [100] * len(ids), ids=ids), 0)
    world.compare_all()
    again = [*some, *TWINS]
    assert world.append(Batch([b"again"] * len(again), [50] * len(again), ids=again), 0).duplicates == len(again)
    world.cancel([TWINS[0]])
    world.compare_all()
    assert world.append(Batch([b"again"], [50], ids=[TWINS[0]]), 0).created == [True]
    world.cancel([TWINS[1]])
    world.compare_all()
    world.index.maintenance.flush()
    world.compare_all()
    world.drain(100)


def test_looking_up_an_id_that_was_rescheduled_many_times_stays_cheap(world: World) -> None:
    hash_ = hash_id(TWINS[0], 0)
    world.append(Batch([b"x", b"y"], [YEAR, YEAR], ids=list(TWINS)), 0)
    for due in range(100):
        world.reschedule(TWINS[0], 0, YEAR + due, None)
        assert len(world.index._segments.memtable.find(hash_)) == 2, "the newest of each, and no older version"
        assert len(world.index._segments.memtable.ids.older[hash_]) <= 4


# Compaction in small steps


def test_one_step_of_compaction_moves_no_more_bytes_than_it_may(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_MOVED_BYTES", 900, raising=False)
    world.append(batch("a", 20, YEAR, 400), 0)
    world.append(batch("huge", 3, YEAR, 5_000), 0)
    world.roll()
    steps = []
    while moved := world.index.maintenance.compact(0, 500):
        world.compare()
        steps.append(moved)
    assert steps == [2] * 10 + [1] * 3, "one at least"


# A sealed segment that lost its end


def test_a_truncated_sealed_segment_is_named_at_every_opening(tmp_path: Path) -> None:
    world = World(tmp_path / "t", ROOMY)
    world.append(batch("a", 50, YEAR), 0)
    world.roll()
    world.keep_house()
    path, (part,) = world.index._segments.by_base[0].path, world.index._segments.by_base[0].parts
    place = part.span_of(40)[0]
    size = path.stat().st_size
    world.index.close()
    with path.open("r+b") as file:
        file.truncate(place)
    for _ in range(3):
        index = open_at(tmp_path / "t", settings=ROOMY)
        (damage,) = index.damage
        assert (damage.file, damage.position, damage.length) == (path.name, place, size - place)
        (problem,) = index.check()
        assert "shorter than its header says" in problem
        assert index.stats().sleep == 40, "the rest is served"
        index.close()


# Good bytes in the wrong place


def copy_over(index: Index, source: int, target: int) -> tuple[str, int]:
    """A misplaced write: a document over another of the same length. Returns where."""
    part = index._segments.parts[0]
    (start, end), (at, _) = part.span_of(source), part.span_of(target)
    with part.path.open("r+b") as file:
        file.seek(start)
        data = file.read(end - start)
        file.seek(at)
        file.write(data)
    return part.path.name, at


@pytest.mark.parametrize("count", [20, 100], ids=["a few", "many"])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("where", ["memtable", "run", "sealed"])
def test_a_document_copied_over_another_is_handed_off_once(tmp_path: Path, where: str, forward: bool, count: int) -> None:
    world = World(tmp_path / "t", ROOMY)
    world.append(batch("a", count), 0)
    if where == "run":
        world.index.maintenance.flush()
    if where == "sealed":
        world.roll()
        world.keep_house()
    source, target = (5, 15) if forward else (15, 5)
    place = copy_over(world.index, source, target)
    assert sorted(hand_off(world.index, 100)) == [f"a{i:03}" for i in range(count) if i != target]
    assert [(damage.file, damage.position) for damage in world.index.damage] == [place]
    assert world.index.stats().sleep == 0
    abandon(world.index)


def test_compaction_does_not_double_a_copied_document(tmp_path: Path) -> None:
    world = World(tmp_path / "t", ROOMY)
    world.append(batch("a", 20, YEAR), 0)
    world.roll()
    world.keep_house()
    place = copy_over(world.index, 5, 15)
    world.index.maintenance.compact(0, 500)
    assert sorted(hand_off(world.index, YEAR)) == [f"a{i:03}" for i in range(20) if i != 15]
    assert [(damage.file, damage.position) for damage in world.index.damage] == [place]
    abandon(world.index)


def test_a_seal_that_lacks_sleepers_is_not_adopted(world: World) -> None:
    world.append(batch("a", 20), 0)
    world.append(batch("b", 20, 200), 0)
    world.roll()
    order = world.index.maintenance.seal_job(0)
    lost = replace(order, ended=np.array([order.first_seq + 30], np.int64))
    assert not world.index.maintenance.adopt(seal(world.door, lost))
    assert not world.index._segments.by_base[0].sealed
    world.sealed = seal(world.door, order)
    world.cancel(["a001", "b001"])
    world.reschedule("b002", 0, 300, None)
    world.drain(100)
    world.adopt()
    assert world.index._segments.by_base[0].sealed, "what was ended or handed off since it was ordered is not missing"
