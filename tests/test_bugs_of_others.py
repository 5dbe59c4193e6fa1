"""Bugs that other delay queues had, each as a fact about this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.doors import Failing, Recording
from tests.harness.index_world import SMALL, World, abandon, documents, open_at
from turtlemq.errors import Stopped
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.model import SEQ_COUNTER_BITS, Batch, Mark, Progress, State
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

DAY = 86_400_000
NOW = 1_700_000_000_000


def batch(prefix: str, n: int, due: int, step: int = 0) -> Batch:
    return Batch([b"x" * 40] * n, [due + i * step for i in range(n)], ids=[f"{prefix}{i}" for i in range(n)])


def fired(index: Index, now: int) -> list[str]:
    out: list[str] = []
    while (due := index.due(now, count_max=7)) is not None:
        out += [document.id for document in documents(due)]
        index.advance(due)
    return out


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1, 0.0])
def test_an_index_that_points_past_a_truncated_log_hangs_nothing(tmp_path: Path, keep: float) -> None:
    """RocketMQ 10668: the dequeue waited for ever for a document behind the end of the log."""
    index = open_at(tmp_path / "t", settings=Settings(run_messages=10))
    index.append(batch("a", 35, 100, 1), 0)
    start, size = index._segments.active.data_start, index._segments.active.size
    index.close()
    path = tmp_path / "t" / "delay_0000000000.bson"
    path.write_bytes(path.read_bytes()[: start + int((size - start) * keep)])
    again = open_at(tmp_path / "t", settings=Settings(run_messages=10))
    found = fired(again, 1_000)
    assert found == [f"a{i}" for i in range(len(found))]
    assert len(found) in (0, 35) or keep > 0
    assert again.next_due() is None
    assert again.check() == []
    again.append(batch("b", 15, 5), 0)
    assert len(fired(again, 1_000)) == 15
    abandon(again)


def test_everything_can_be_rebuilt_from_the_log_alone(tmp_path: Path) -> None:
    """RocketMQ 9735: the timer wheel could not."""
    world = World(tmp_path / "t", SMALL)
    world.append(batch("a", 40, 100, 3), 0)
    world.cancel(["a3", "a30"])
    world.reschedule("a7", 0, 777, b"new")
    world.drain(130, 4)
    world.settle()
    world.keep_house()
    world.cancel(["a33"])

    def meanwhile() -> None:
        for path in world.folder.iterdir():
            if path.suffix != ".bson":
                path.unlink()

    world.reopen(clean=False, meanwhile=meanwhile)
    world.compare_all()
    world.drain(10**6)
    abandon(world.index)


@pytest.mark.parametrize("due", [0, 1, 999, 1_000, NOW, NOW + 1, (1 << 32) - 1, 1 << 32, (1 << 41), (1 << 42) - 2])
def test_nothing_fires_a_millisecond_early(tmp_path: Path, due: int) -> None:
    index = open_at(tmp_path / "t")
    index.append(batch("a", 1, due), 0)
    assert index.due(due - 1) is None
    assert fired(index, due) == ["a0"]
    abandon(index)


@pytest.mark.parametrize("days", [24, 25, 49, 50, 200, 365 * 80])
def test_a_delay_of_months_does_not_fire_months_early(tmp_path: Path, days: int) -> None:
    """RabbitMQ's delayed message plugin 225: a delay over 2^32 milliseconds, 49.7 days, wrapped around."""
    world = World(tmp_path / "t", SMALL)
    world.append(batch("a", 30, NOW + days * DAY, DAY // 7), NOW)
    world.keep_house()
    for day in range(0, days, max(1, days // 9)):
        assert world.index.due(NOW + day * DAY) is None
    world.reopen()
    assert world.index.due(NOW + days * DAY - 1) is None
    world.drain(NOW + (days + 40) * DAY)
    assert not world.asleep
    abandon(world.index)


def test_a_delay_is_not_measured_from_the_start_of_the_process(tmp_path: Path) -> None:
    """beanstalkd 62: after a restart every delay began anew."""
    world = World(tmp_path / "t", SMALL)
    world.append(batch("a", 1, NOW + 60_000), NOW)
    for restart in range(5):
        world.reopen(clean=restart % 2 == 0)
        assert world.index.next_due() == NOW + 60_000
    world.drain(NOW + 60_000)
    assert list(world.handed) == ["a0"]
    abandon(world.index)


def test_a_receiver_ahead_of_the_log_loses_no_later_message(tmp_path: Path) -> None:
    """A checkpoint ahead of its data: its messages are gone after a power cut, and newer ones take those places."""
    ahead = Progress((Mark(seq_max=1_000 << SEQ_COUNTER_BITS, due_ms=5_000, seq=(1 << 63) - 1),))
    index = open_index(Door(), tmp_path / "t", "t", SMALL, ahead)
    index.append(batch("a", 5, 4_000), 10)
    assert fired(index, 4_000) == [f"a{i}" for i in range(5)], "they came after that checkpoint"
    abandon(index)


def test_dead_bits_and_tables_are_never_ahead_of_the_log(tmp_path: Path) -> None:
    """At every moment, documents that index files on the disk point to are durable in the segment."""
    door = Recording()
    world = World(tmp_path / "t", SMALL, door)
    for i in range(12):
        world.append(batch(f"{i}-", 3, 100), 0, sync=False)
        if i % 3 == 2:
            world.cancel([f"{i}-0"])
    for snapshot in door.snapshots:
        durable = {name: snapshot.inodes[number][0] for name, number in snapshot.entries.items() if name.endswith(".bson")}
        for change in snapshot.pending:
            if change[0] == "rename" and change[2].endswith((".run", ".dead")):
                base = next(name for name in durable if name.startswith(change[2][:16]))
                inode = snapshot.inodes[snapshot.entries[base]]
                assert inode[0], "the segment was synced before its index was named"
    abandon(world.index)


@pytest.mark.parametrize("distance", ["same group", "same segment", "another run", "another segment", "after a restart"])
def test_a_tombstone_works_wherever_it_stands(tmp_path: Path, distance: str) -> None:
    """A tombstone outside of the batch of its message was missed."""
    world = World(tmp_path / "t", SMALL)
    if distance == "same group":
        world.index.stage(batch("z", 1, 5), 0)
    world.append(batch("a", 6, 100), 0)
    if distance == "another run":
        world.index.maintenance.flush()
    elif distance == "another segment":
        world.roll()
    elif distance == "after a restart":
        world.reopen(clean=False)
    if distance == "same group":
        world.asleep["z0"] = type(world.asleep["a0"])("z0", b"x" * 40, 5, 0, 0)
    world.cancel(["a1", "a4"])
    world.compare_all()
    world.reopen(clean=False)
    world.compare_all()
    world.drain(100)
    abandon(world.index)


def test_a_cancel_and_the_timer_agree_who_was_first(tmp_path: Path) -> None:
    """Either it is cancelled and does not fire, or it fired and the answer says so. Never both, never neither."""
    index = open_at(tmp_path / "t")
    index.append(batch("a", 3, 100), 0)
    index.stage_cancel(["a0"])
    assert index.due(100) is None, "an answer is on its way that nothing has fired"
    index.commit()
    due = index.due(100)
    assert due is not None
    index.advance(due)
    assert [d.id for d in documents(due)] == ["a1", "a2"]
    assert index.cancel(["a0", "a1"]) == {"a0": State.UNKNOWN, "a1": State.READY}
    abandon(index)


def test_a_cancel_that_could_not_be_written_cancels_nothing(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(batch("a", 2, 100), 0)
    index.get("a0")
    door.at = len(door.calls) + 1
    with pytest.raises((OSError, Stopped)):
        index.cancel(["a0"])
    assert fired(index, 100) == ["a0", "a1"]
    abandon(index)


def test_one_old_sleeper_pins_no_gigabytes(tmp_path: Path) -> None:
    """beanstalkd 43 and 570, Pulsar: one message that sleeps for a year kept every file behind it."""
    world = World(tmp_path / "t", SMALL)
    world.append(batch("old", 1, 10**12), 0)
    written = 0
    for day in range(60):
        world.append(batch(f"{day}-", 40, day), day)
        world.drain(day)
        world.keep_house()
        written = world.index._segments.active.base
    assert written > 200_000
    assert sum(path.stat().st_size for path in world.folder.iterdir()) < 40_000
    world.drain(10**12)
    abandon(world.index)


def test_a_count_reads_nothing(tmp_path: Path) -> None:
    """RabbitMQ's delayed message plugin 228: asking how many messages sleep loaded them all, 17 GB."""
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(batch("a", 200, 100), 0)
    before = len(door.calls)
    assert index.stats().sleep == 200
    assert index.next_due() == 100
    assert sum(index.forecast(0, bucket_ms=50, buckets=4).counts) == 200
    assert len(door.calls) == before
    abandon(index)


def test_an_answer_comes_after_the_sync(tmp_path: Path) -> None:
    """Jepsen on NATS 2.12.1: answers before fsync lost 131,418 of 930,005 messages."""
    door = Recording()
    world = World(tmp_path / "t", SMALL, door)
    for i in range(12):  # into new segments, too
        world.append(batch(f"{i}-", 9, 100), 0)
        world.cancel([f"{i}-3"])
        world.reschedule(f"{i}-4", 0, 200, None)
        last = door.snapshots[-1]
        for name, number in last.entries.items():
            durable, current = last.inodes[number]
            assert durable == current or not name.endswith(".bson"), name
        assert not [change for change in last.pending if change[1].endswith(".bson")], "the name of a segment is durable, too"
    abandon(world.index)


def test_one_flipped_bit_loses_one_message_and_no_more(tmp_path: Path) -> None:
    """Jepsen on NATS 2.12.1: one flipped bit lost half a stream."""
    index = open_at(tmp_path / "t", settings=Settings())
    index.append(batch("a", 50, 100, 1), 0)
    index.append(batch("b", 1, 500), 0)
    index.close()
    path = tmp_path / "t" / "delay_0000000000.bson"
    whole = path.read_bytes()
    start = index._segments.active.data_start
    for at in range(start, len(whole) - 200, 211):
        spoiled = bytearray(whole)
        spoiled[at] ^= 0x08
        shutil.rmtree(tmp_path / "t")  # tables of the last try know its damage
        (tmp_path / "t").mkdir()
        path.write_bytes(spoiled)
        again = open_at(tmp_path / "t", settings=Settings())
        found = fired(again, 1_000)
        assert len(found) == 50, at
        assert again.stats().damaged == 1
        abandon(again)
