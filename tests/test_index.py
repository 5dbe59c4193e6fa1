"""The Index, told by examples: producing, firing, one message, looking. Each test is a fact about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.harness.doors import Failing
from tests.harness.index_world import SMALL, World, abandon, documents, open_at
from turtlemq.errors import (
    Conflict,
    DiskFull,
    InvalidArgument,
    InvalidFireAt,
    InvalidId,
    InvalidMessage,
    Stopped,
    TooLarge,
    UnknownMessage,
)
from turtlemq.index.columns import as_batch
from turtlemq.index.index import Index
from turtlemq.model import BODY_BYTES_MAX, DUE_MS_MAX, Batch, Due, Mark, Message, Priority, Progress, State
from turtlemq.segment import format as f
from turtlemq.segment.ids import server_ids
from turtlemq.settings import Settings

DAY = 86_400_000


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = open_at(tmp_path / "t", settings=Settings())
    yield opened
    assert opened.check() == []
    abandon(opened)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Small segments, so that a few dozen messages are many of them."""
    made = World(tmp_path / "t", SMALL)
    yield made
    made.compare_all()
    abandon(made.index)


def one(id_: str | None, due: int, body: bytes = b"x", **more: Any) -> Batch:
    return as_batch([Message(body, due, id_, **more)])


def ids_of(due: Due | None) -> list[str]:
    return [] if due is None else [document.id for document in documents(due)]


def hand_off(index: Index, now: int, **limits: int) -> list[str]:
    due = index.due(now, **limits)
    if due is not None:
        index.advance(due)
    return ids_of(due)


# Producing


def test_a_message_comes_back_as_it_was_given(index: Index) -> None:
    message = Message(
        b'{"a":1}', 5_000, "order 7", 30, Priority.HIGH, json=True, expires_ms=9_000, headers={"trace": "ä", "empty": ""}
    )
    receipt = index.append(as_batch([message]), 1_234)
    assert (receipt.ids, receipt.created, receipt.duplicates) == (["order 7"], [True], 0)
    found = index.get("order 7")
    assert found is not None
    assert (found.body, found.due_ms, found.ttr_ms, found.expires_ms) == (b'{"a":1}', 5_000, 30, 9_000)
    assert (found.headers, found.created_ms, found.state) == ({"trace": "ä", "empty": ""}, 1_234, State.SLEEP)
    assert found.flags == Priority.HIGH | f.JSON


def test_ids_that_the_server_gives_are_unique_and_sort_by_arrival(index: Index) -> None:
    first = index.append(Batch([b"x"] * 30, [9] * 30), 5).ids
    second = index.append(Batch([b"x"] * 3, [9] * 3), 5).ids
    earlier = index.append(Batch([b"x"], [9]), 2).ids  # the clock went back
    everything = first + second + earlier
    assert sorted(set(everything)) == everything


def test_a_known_id_is_a_duplicate_within_a_batch_too(index: Index) -> None:
    assert index.append(Batch([b"1", b"2", b"3"], [5, 6, 7], ids=["a", "b", "a"]), 0).created == [True, True, False]
    assert index.append(Batch([b"4", b"5"], [5, 6], ids=["c", "a"]), 0).created == [True, False]
    kept = index.get("a")
    assert kept is not None
    assert (kept.body, kept.due_ms) == (b"1", 5)
    assert index.append(Batch([b""] * 40, [5] * 40, ids=[f"{i % 20}" for i in range(40)]), 0).duplicates == 20
    assert index.stats().sleep == 23


def test_a_handed_off_id_is_a_duplicate_until_its_file_goes(index: Index) -> None:
    index.append(one("a", 5), 0)
    assert hand_off(index, 5) == ["a"]
    assert index.append(one("a", 9), 6).created == [False]
    found = index.get("a")
    assert found is not None
    assert found.state is State.READY


def test_a_cancelled_id_may_come_again(index: Index) -> None:
    index.append(one("a", 5), 0)
    index.cancel(["a"])
    assert index.append(one("a", 9, b"again"), 1).created == [True]
    found = index.get("a")
    assert found is not None
    assert (found.due_ms, found.body) == (9, b"again")


def test_a_producer_may_give_a_mix_of_own_and_no_ids(index: Index) -> None:
    receipt = index.append(Batch([b"1", b"2", b"3"], [5, 5, 5], ids=["a", None, None]), 0)
    assert receipt.ids[0] == "a"
    assert [index.get(id_) is not None for id_ in receipt.ids] == [True, True, True]
    assert ids_of(index.due(5)) == receipt.ids


def test_an_id_that_the_server_is_going_to_give_is_refused(index: Index) -> None:
    given = index.append(Batch([b""], [5]), 100).ids[0]
    with pytest.raises(InvalidId, match="going to give"):
        index.append(one(server_ids(1 << 60, 1)[0], 5), 100)
    assert index.append(one(given, 5), 100).created == [False]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (Batch([], []), InvalidArgument),
        (Batch([b"1"], [1, 2]), InvalidArgument),
        (Batch([b"1"], [-1]), InvalidFireAt),
        (Batch([b"1"] * 30, [1] * 29 + [DUE_MS_MAX + 1]), InvalidFireAt),
        (Batch([b"1"], [1.5]), InvalidFireAt),  # type: ignore[list-item]
        (Batch([b"1", b"2"], [1, 2], ids=["good", "-bad"]), InvalidId),
        (Batch([b"1", b"2"], [1, 2], ids=["good", "a/b"]), InvalidId),
        (Batch([b"1", b"x" * (BODY_BYTES_MAX + 1)], [1, 2], ids=["good", "huge"]), TooLarge),
        (Batch([b"1"], [1], headers=[{"h": "x" * 40_000}]), TooLarge),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(index: Index, batch: Batch, error: type[Exception]) -> None:
    size = index._segments.active.size
    with pytest.raises(error):
        index.append(batch, 0)
    assert (index.stats().sleep, index._segments.active.size) == (0, size)
    assert index.append(one("good", 1), 0).created == [True]


def test_a_body_that_is_no_bytes_changes_nothing(index: Index) -> None:
    for n in (1, 30):
        with pytest.raises(InvalidMessage):
            index.append(Batch(["text"] * n, [1] * n, ids=[f"a{i}" for i in range(n)]), 0)  # type: ignore[list-item]
    assert index.append(Batch([b""] * 30, [1] * 30, ids=[f"a{i}" for i in range(30)]), 0).duplicates == 0


def test_the_largest_message_with_the_most_headers_is_still_a_document(index: Index, tmp_path: Path) -> None:
    """Thousands of tiny headers weigh more in BSON than their text: within the limits they must not outgrow a document."""
    many = {f"{i:04x}": "" for i in range(8_000)}
    with pytest.raises(TooLarge, match="headers"):
        index.append(one("a", 1, b"x" * BODY_BYTES_MAX, headers=many), 0)
    fitting = dict(list(many.items())[:2_900])
    index.append(one("x" * 200, 1, b"x" * BODY_BYTES_MAX, headers=fitting), 0)
    abandon(index)
    again = open_at(tmp_path / "t", settings=Settings())
    assert [len(found.headers) for found in again.browse()[0]] == [2_900]
    assert again.damage == []
    abandon(again)


def test_bodies_of_16_mib_sleep_fire_and_are_looked_at(index: Index, tmp_path: Path) -> None:
    body = bytes(range(256)) * (BODY_BYTES_MAX // 256)
    index.append(Batch([body, body], [5, 6], ids=["a", "b"]), 0)
    page, cursor = index.browse(limit=10)
    assert ([found.id for found in page], cursor is None) == (["a"], False), "a page has a limit in bytes, too"
    assert [found.id for found in index.browse(limit=10, cursor=cursor)[0]] == ["b"]
    due = index.due(9)
    assert due is not None
    assert (ids_of(due), due.more) == (["a"], True)
    assert documents(due)[0].body == body


def test_a_due_time_in_the_past_is_due_at_once(index: Index) -> None:
    hand_off(index, 10 * DAY)
    index.append(Batch([b"", b"", b""], [0, 5, 10 * DAY], ids=["old", "older", "now"]), 10 * DAY)
    assert index.next_due() == 0
    assert hand_off(index, 10 * DAY) == ["old", "older", "now"]


# Firing


def test_nothing_is_early_and_everything_is_on_time(index: Index) -> None:
    index.append(one("a", 1_000), 0)
    assert index.due(999) is None
    assert index.next_due() == 1_000
    assert hand_off(index, 1_000) == ["a"]
    assert index.next_due() is None
    assert index.due(DAY) is None


def test_equal_due_times_fire_in_order_of_arrival(index: Index) -> None:
    for i in range(100):
        index.append(one(f"{i:03}", 7), 0)
    index.append(Batch([b""] * 100, [7] * 100, ids=[f"{i:03}" for i in range(100, 200)]), 0)
    index.append(one("first", 6), 0)
    fired: list[str] = []
    while some := hand_off(index, 9, count_max=17):
        fired += some
    assert fired == ["first", *(f"{i:03}" for i in range(200))]


def test_a_firing_takes_no_more_than_asked_but_one_at_least(index: Index) -> None:
    index.append(Batch([b"x" * 1000] * 5, [1] * 5, ids=list("abcde")), 0)
    assert hand_off(index, 1, bytes_max=10) == ["a"]
    assert hand_off(index, 1, bytes_max=2500) == ["b", "c"]
    assert hand_off(index, 1, count_max=1) == ["d"]
    due = index.due(1)
    assert due is not None
    assert (ids_of(due), due.more) == (["e"], False)


def test_what_is_not_advanced_is_given_again(index: Index) -> None:
    index.append(one("a", 1), 0)
    assert ids_of(index.due(1)) == ids_of(index.due(1)) == hand_off(index, 1) == ["a"]
    assert index.due(1) is None


def test_appends_flushes_and_seals_may_come_between_due_and_advance(world: World) -> None:
    """The runs that a handoff was taken from may be gone by the time it is stored."""
    world.append(Batch([b"x"] * 6, [5] * 6), 0)
    due = world.index.due(9, count_max=4)
    assert due is not None
    world.append(Batch([b"x"] * 40, [5] * 40), 0)
    world.index.maintenance.flush()
    world.roll()
    for document in documents(due):
        world.handed[document.id] = world.asleep.pop(document.id)
    world.receiver.store(due)
    world.index.advance(due)
    world.compare()
    world.drain(9, 7)


def test_a_clock_that_goes_back_takes_nothing_back(world: World) -> None:
    world.append(one("a", 100), 50)
    world.drain(1_000)
    world.append(Batch([b""] * 3, [30, 60, 90], ids=["b", "c", "d"]), 20)
    world.drain(40)
    assert sorted(world.asleep) == ["c", "d"]
    world.reopen(clean=False)  # nothing was durable with the receiver
    assert sorted(world.asleep) == ["a", "b", "c", "d"]
    world.drain(1_000)
    world.settle()
    world.append(Batch([b""] * 2, [700, 5], ids=["e", "f"]), 10)
    world.drain(10)
    world.settle()
    world.reopen(clean=False)
    assert sorted(world.asleep) == ["e"]
    world.drain(700)


def test_time_may_run_past_the_last_due_time(index: Index) -> None:
    index.append(one("a", DUE_MS_MAX), 0)
    assert index.due(DUE_MS_MAX - 1) is None
    assert hand_off(index, DUE_MS_MAX * 4) == ["a"]
    index.append(one("b", DUE_MS_MAX), 0)
    assert hand_off(index, DUE_MS_MAX * 4) == ["b"]
    assert index.due(-5) is None


def test_only_what_is_durable_can_be_found(index: Index) -> None:
    index.stage(one("a", 1), 0)
    assert (index.get("a"), index.due(1), index.next_due(), index.stats().sleep) == (None, None, None, 0)
    assert index.stage(one("a", 2), 0).created == [False], "a duplicate of what is on its way"
    index.commit()
    assert ids_of(index.due(1)) == ["a"]


def test_a_staged_cancel_holds_back_its_message_and_later_ones(index: Index) -> None:
    index.append(Batch([b""] * 4, [1, 2, 3, 4], ids=list("abcd")), 0)
    index.stage_cancel(["c"])
    assert hand_off(index, 9) == ["a", "b"]
    assert index.due(9) is None
    index.commit()
    assert hand_off(index, 9) == ["d"]


# Group commit


def test_groups_overlap(index: Index) -> None:
    """While one group is being written, the next gathers; each is published in turn."""
    index.stage(one("a", 1), 0)
    first = index.take()
    assert first is not None
    index.stage(one("b", 2), 0)
    assert index.stage(one("a", 3), 0).created == [False]
    first.run()
    index.land(first)
    assert index.get("a") is not None
    assert index.get("b") is None
    index.cancel(["a"])  # commits the second group, too
    assert index.get("b") is not None
    assert index.append(one("a", 5), 0).created == [True], "an id of a group long published is no duplicate"


def test_a_group_that_fails_tells_all_who_are_in_it(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(Batch([b"x" * 100] * 20, [1] * 20), 0)
    index.stage(one("a", 1), 0)
    group = index._writer._group
    assert group is not None
    door.at, door.how = len(door.calls), "ENOSPC"
    with pytest.raises(DiskFull):  # the segment is full: staged batches are committed first, and that fails
        index.stage(Batch([b"x" * 3000], [1]), 0)
    assert isinstance(group.error, DiskFull)
    assert index.append(one("a", 1), 0).created == [True]
    assert index.check() == []
    abandon(index)


# One message


def test_cancel_says_exactly_what_became_of_each(index: Index) -> None:
    index.append(Batch([b""] * 3, [1, 2, 300], ids=["a", "b", "c"]), 0)
    hand_off(index, 1)
    outcome = index.cancel(["a", "b", "c", "nobody", "b"])
    assert outcome == {"a": State.READY, "b": State.CANCELLED, "c": State.CANCELLED, "nobody": State.UNKNOWN}
    assert index.cancel(["b"]) == {"b": State.UNKNOWN}
    assert hand_off(index, DAY) == []
    assert index.next_due() is None
    assert index.stats().cancelled == 2


def test_cancelling_nothing_writes_nothing(index: Index) -> None:
    size = index._segments.active.size
    assert index.cancel([]) == {}
    assert index.cancel(["x"]) == {"x": State.UNKNOWN}
    assert index._segments.active.size == size


def test_text_that_can_be_no_id_is_unknown(index: Index) -> None:
    for odd in ("", "\ud800", "a\0b", "x" * 5_000, "line\nbreak"):
        assert index.get(odd) is None
        assert index.cancel([odd]) == {odd: State.UNKNOWN}
        with pytest.raises(UnknownMessage):
            index.reschedule(odd, 0, due_ms=5)


def test_reschedule_moves_a_sleeper_and_keeps_the_rest(index: Index) -> None:
    index.append(one("a", 100, b"body", ttr_ms=7, priority=Priority.LOW, expires_ms=900, headers={"h": "1"}), 3)
    for due in (50, 800, 0):
        moved = index.reschedule("a", 4, due_ms=due)
        assert moved == index.get("a")
        assert (moved.due_ms, moved.body, moved.ttr_ms, moved.expires_ms) == (due, b"body", 7, 900)
        assert (moved.headers, moved.created_ms, moved.flags) == ({"h": "1"}, 3, Priority.LOW)
    edited = index.reschedule("a", 5, body=b"new", json=True, headers={})
    assert (edited.body, edited.headers, edited.flags) == (b"new", {}, Priority.LOW | f.JSON)
    assert edited == index.get("a")
    assert index.stats().sleep == 1
    assert hand_off(index, 5) == ["a"]
    with pytest.raises(Conflict):
        index.reschedule("a", 6, due_ms=10)


def test_reschedule_refuses_what_append_refuses(index: Index) -> None:
    index.append(one("a", 100), 0)
    with pytest.raises(InvalidFireAt):
        index.reschedule("a", 0, due_ms=-1)
    with pytest.raises(TooLarge):
        index.reschedule("a", 0, body=b"x" * (BODY_BYTES_MAX + 1))
    found = index.get("a")
    assert found is not None
    assert found.due_ms == 100


def test_a_rescheduled_message_queues_behind_its_equals(index: Index) -> None:
    index.append(Batch([b""] * 3, [5, 5, 5], ids=list("abc")), 0)
    index.reschedule("a", 1, due_ms=5)
    assert hand_off(index, 5) == ["b", "c", "a"]


# A disk that is full, or fails


def test_a_full_disk_changes_nothing_and_service_resumes(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(Batch([b"x" * 100] * 30, [1] * 30), 0)
    for call in range(12):  # also while the segment is closed and the next one begun
        door.at, door.how = len(door.calls) + call, "ENOSPC"
        ids = [f"{call}-{i}" for i in range(20)]
        try:
            created = index.append(Batch([b"x" * 150] * 20, [1] * 20, ids=ids), 0).created
        except DiskFull:
            created = index.append(Batch([b"x" * 150] * 20, [1] * 20, ids=ids), 0).created
        except Stopped:  # the sync was told that there is no room: the state of the disk is unknown
            assert "fdatasync" in str(door.failed)
            abandon(index)
            index = open_at(tmp_path / "t", door=door)
            continue
        assert all(created), "a batch that was refused is no duplicate of itself"
        assert index.check() == []
    abandon(index)


def test_a_failed_sync_stops_the_topic_until_it_is_opened_again(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(one("a", 1), 0, sync=False)
    door.at = len(door.calls)
    with pytest.raises(Stopped, match="made to fail"):
        index.maintenance.flush()
    for refused in (lambda: index.append(one("b", 1), 0), lambda: index.cancel(["a"]), index.maintenance.roll):
        with pytest.raises(Stopped):
            refused()
    assert ids_of(index.due(1)) == ["a"], "what sleeps still fires"
    abandon(index)
    again = open_at(tmp_path / "t")
    again.append(one("b", 1), 0)
    abandon(again)


def test_closing_makes_everything_durable(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(one("a", 1), 0, sync=False)
    before = door.calls.count("fdatasync")
    index.close()
    assert door.calls.count("fdatasync") == before + 1


def test_errors_name_their_file(tmp_path: Path) -> None:
    door = Failing()
    index = open_at(tmp_path / "t", door=door)
    index.append(one("a", 1), 0)
    door.at = len(door.calls)
    with pytest.raises(OSError, match=r"delay_0000000000\.bson") as caught:
        index.get("a")
    assert caught.value.errno == errno.EIO
    abandon(index)


def test_progress_and_dues_travel_as_numpy_integers(index: Index) -> None:
    index.append(Batch([b""] * 2, np.array([3, 1], np.int64)), 0)
    due = index.due(5)
    assert due is not None
    assert due.due_ms.tolist() == [1, 3]
    assert all(type(part) is int for mark in due.progress.marks for part in (mark.seq_max, mark.due_ms, mark.seq))
    assert Progress().covers_one(1, 1) is False


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_marks_join_to_what_they_say_together(marks: list[tuple[int, int, int]]) -> None:
    """In any order of arrival, nothing is forgotten, nothing invented, and none is kept in vain."""
    progress = Progress()
    for mark in marks:
        progress = progress.add(Mark(*mark))
    for due in range(10):
        for seq in range(10):
            wanted = any(seq <= seq_max and (due, seq) <= (m_due, m_seq) for seq_max, m_due, m_seq in marks)
            assert progress.covers_one(due, seq) == wanted
            assert progress.covers(np.array([due]), np.array([seq])).tolist() == [wanted]
    kept = sorted(progress.marks, key=lambda mark: mark.seq_max)
    assert all(a.seq_max < b.seq_max and (a.due_ms, a.seq) > (b.due_ms, b.seq) for a, b in pairwise(kept))
