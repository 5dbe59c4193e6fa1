"""Firing a few with lists and firing with arrays are one thing: the same segments give the same handoff either way, to the last
byte, the last mark and the last cursor, in any state of their files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.harness.index_world import SMALL, World, abandon, documents
from turtlemq import small_batches
from turtlemq.index import firing
from turtlemq.index.firing_small import SmallBatch
from turtlemq.index.index import Index
from turtlemq.index.parts import KeyList, KeyListCursor
from turtlemq.model import ORDINAL_BITS, Batch, Damage, Due
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.settings import Settings

NEVER = -1


@contextmanager
def up_to(count: int) -> Iterator[None]:
    """So many are a few."""
    before, small_batches.HANDOFF = small_batches.HANDOFF, count
    try:
        yield
    finally:
        small_batches.HANDOFF = before


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", SMALL)
    yield made
    abandon(made.index)


def told(due: Due | None) -> Any:
    """Everything that a handoff says, as plain values."""
    if due is None:
        return None
    assert type(due.raw) is bytes
    assert {column.dtype for column in (due.starts, due.due_ms, due.seq)} == {np.dtype(np.int64)}
    moves = [(c.part.path.name, c.part.first, type(c), c.order, c.late, c.pos, pos, passed) for c, pos, passed in due.moves]
    return due.raw, due.starts.tolist(), due.due_ms.tolist(), due.seq.tolist(), due.progress, due.more, moves


def both(index: Index, now: int, **limits: int) -> tuple[Due | None, list[Damage]]:
    """Due messages, found in both ways and compared, and the damage that was met."""
    found, segments = [], index._segments
    for count in (NEVER, small_batches.HANDOFF, NEVER):  # the first may repair a table
        segments._damaged.clear()
        segments.counters.damage.clear()
        with up_to(count):
            found.append((index.due(now, **limits), list(segments.counters.damage)))
    assert told(found[1][0]) == told(found[2][0])
    assert found[1][1] == found[2][1]
    return found[1]


def drained(index: Index, now: int, **limits: int) -> list[str]:
    """Hand off everything, comparing every step. Ids in order."""
    out: list[str] = []
    while (due := both(index, now, **limits)[0]) is not None:
        out += [document.id for document in documents(due)]
        before = index.progress, [(c, c.pos) for c, _, _ in due.moves]
        index.advance(due)
        assert (index.progress, [(c, c.pos) for c, _, _ in due.moves]) != before or not due.moves
    return out


def taken_as(index: Index, now: int) -> type:
    """The kind of containers that the next firing works with."""
    return type(firing._take(index._segments.due_cursors(now), now, 10_000)[0])


# Stories


def test_single_keys_fire_from_the_list_that_gathers_them(world: World) -> None:
    world.append(Batch([b"x"] * 3, [5, 4, 9], ids=list("abc")), 0)
    memtable = world.index._segments.memtable
    (cursor,) = world.index._segments.due_cursors(5)
    assert isinstance(cursor, KeyListCursor)
    assert taken_as(world.index, 5) is SmallBatch
    assert drained(world.index, 5) == ["b", "a"]
    assert (len(memtable.single_keys), memtable.cursors, memtable.live, world.index.next_due()) == (1, [], 1, 9)


def test_what_is_appended_between_due_and_advance_is_not_lost(world: World) -> None:
    """An earlier key moves all others in the list."""
    world.append(Batch([b"x"] * 2, [5, 6], ids=list("bc")), 0)
    due = world.due(9, count_max=1, store=False)
    assert due is not None
    world.append(Batch([b"x"], [1], ids=["a"]), 0)
    world.receiver.store(due)
    world.index.advance(due)
    world.handed["b"] = world.asleep.pop("b")
    world.compare()
    assert drained(world.index, 9) == ["a", "c"]


def test_later_cursors_start_where_the_first_stopped(world: World) -> None:
    world.append(Batch([b"x"] * 3, [1, 2, 3], ids=list("abc")), 0)
    world.drain(1)
    world.append(Batch([b"x"], [2], ids=["d"]), 0)
    world.drain(2)
    assert drained(world.index, 3) == ["c"]


def test_equal_due_times_of_all_cursors_come_in_order_of_arrival(world: World) -> None:
    """From sealed and unsealed segments, runs on disk, runs in memory and single keys."""
    wanted: list[str] = []
    for step in (world.roll, world.index.maintenance.flush, None, None):
        some = [f"{len(wanted) + i:03}" for i in range(7)]
        world.append(Batch([b"x"] * 7, [5] * 7, ids=some), 0)
        wanted += some
        if step is not None:
            step()
    world.seal(world.closed[0])
    world.adopt()
    assert len(world.index._segments.due_cursors(5)) == 3
    assert taken_as(world.index, 5) is SmallBatch
    assert drained(world.index, 5, count_max=5) == wanted


def test_copies_that_compaction_made_keep_their_places(world: World) -> None:
    world.append(Batch([b"x"] * 3, [5] * 3, ids=["a", "b", "later"]), 0)
    world.roll()
    world.append(Batch([b"x"] * 2, [5, 5], ids=["c", "d"]), 0)
    world.index.maintenance.compact(world.closed[0], 2)
    due, _ = both(world.index, 5)
    assert due is not None
    assert [bool(document.flags & f.MOVED) for document in documents(due)].count(True) == 2
    assert taken_as(world.index, 5) is SmallBatch
    assert [document.id for document in documents(due)] == ["a", "b", "later", "c", "d"]


def test_late_keys_fire_from_a_cursor_of_their_own(world: World) -> None:
    world.append(Batch([b"x"] * 3, [5, 6, 50], ids=list("abz")), 0)
    world.drain(10)
    world.append(Batch([b"x"] * 2, [5, 7], ids=list("cd")), 0)
    world.index.maintenance.flush()
    world.settle()
    world.reopen(clean=False)
    assert [cursor.late for cursor in world.index._segments.due_cursors(10)] == [True]
    assert drained(world.index, 60) == ["c", "d", "z"]


def test_a_cancel_on_its_way_holds_back_the_same(world: World) -> None:
    world.append(Batch([b"x"] * 6, [1, 2, 3, 3, 4, 5], ids=list("abcdef")), 0)
    world.cancel(["b"])
    world.cancel(["d"], commit=False)
    assert drained(world.index, 9) == ["a", "c"]
    assert both(world.index, 9)[0] is None
    world.index.commit()
    assert drained(world.index, 9) == ["e", "f"]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_limits_are_met_exactly(world: World, extra: int) -> None:
    world.append(Batch([b"x" * 50] * 4, [1] * 4, ids=list("abcd")), 0)
    world.cancel(["b"])
    size = len(both(world.index, 1, count_max=1)[0].raw)  # type: ignore[union-attr]
    for count in range(1, 5):
        due, _ = both(world.index, 1, bytes_max=count * size + extra)
        assert due is not None
        assert len(due) == min(3, max(1, count if extra >= 0 else count - 1))
        assert due.more == (len(due) < 3)
        due, _ = both(world.index, 1, count_max=max(1, count + extra))
        assert due is not None


@pytest.mark.parametrize("cut", [1, 2, 60, 10_000])
def test_a_file_that_was_cut_gives_what_is_left(world: World, cut: int) -> None:
    """The last byte of a document is a NUL, and so are the bytes behind the end of a file: without it nothing is lost."""
    world.append(Batch([b"x" * 50] * 3, [1] * 3, ids=list("abc")), 0)
    path = world.index._segments.active.path
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - cut))
    due, damage = both(world.index, 1)
    assert due is not None
    assert len(due) == {1: 3, 2: 2, 60: 2, 10_000: 0}[cut]
    assert len(damage) == 3 - len(due)
    last = log.read_document(world.door, path, *world.index._segments.memtable.span_of(2))
    assert last == (due.raw[int(due.starts[2]) :] if cut == 1 else None)


def test_no_byte_of_a_document_may_change(world: World) -> None:
    world.append(Batch([b"x" * 9] * 3, [1] * 3, ids=list("abc")), 0)
    path = world.index._segments.active.path
    start, end = world.index._segments.memtable.span_of(1)
    good = path.read_bytes()
    for at in range(start, end):
        path.write_bytes(good[:at] + bytes((good[at] ^ 0x80,)) + good[at + 1 :])
        due, damage = both(world.index, 1)
        assert due is not None
        assert ([document.id for document in documents(due)], len(damage)) == (["a", "c"], 1)


def test_more_than_a_few_go_as_arrays(world: World) -> None:
    world.append(Batch([b"x"] * (small_batches.HANDOFF + 1), [1] * small_batches.HANDOFF + [2]), 0)
    assert taken_as(world.index, 1) is SmallBatch
    assert taken_as(world.index, 2) is not SmallBatch
    assert small_batches.HANDOFF < 64, "a slice of `firing._merge` holds at least so many"
    assert len(drained(world.index, 2)) == small_batches.HANDOFF + 1


@given(st.lists(st.integers(0, 99)), st.lists(st.integers(0, 99)))
def test_a_list_of_keys_answers_like_an_array(some: list[int], asked: list[int]) -> None:
    some.sort()
    keys, array = KeyList(some), np.array(some, np.uint64)
    assert len(keys) == len(array)
    assert keys.ranks(np.array(asked, np.uint64)).tolist() == [keys.rank(key) for key in asked]
    assert [keys.rank(key) for key in asked] == np.searchsorted(array, np.array(asked, np.uint64)).tolist()
    assert keys.slice(1, 3).tolist() == some[1:3]
    assert max(some, default=0) < 1 << ORDINAL_BITS


# Any segments

ids = [f"{i:02}" for i in range(40)]
picks = st.integers(0, 1 << 16)
sizes = st.sampled_from([0, 1, 30, 200, 3000])
dues = st.one_of(st.integers(0, 30), st.sampled_from([5, 5, 5, 12]))
steps = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(dues, sizes), min_size=1, max_size=6)),
    st.tuples(st.just("append"), st.lists(st.tuples(dues, sizes), min_size=1, max_size=6)),
    st.tuples(st.just("append"), st.lists(st.tuples(dues, st.just(3)), min_size=24, max_size=30)),
    st.tuples(st.just("own"), st.lists(st.tuples(st.sampled_from(ids), dues), min_size=1, max_size=6)),
    st.tuples(st.just("cancel"), st.lists(picks, min_size=1, max_size=5)),
    st.tuples(st.just("reschedule"), st.tuples(picks, dues)),
    st.tuples(st.just("fire"), st.tuples(st.integers(0, 30), st.sampled_from([1, 3, 10_000]))),
    st.tuples(st.sampled_from(["flush", "roll", "seal", "settle", "crash"]), picks),
    st.tuples(st.just("compact"), st.tuples(picks, st.integers(1, 9))),
)
spoils = st.lists(st.tuples(picks, picks, st.sampled_from(["flip", "zero", "cut"])), max_size=4)
rounds = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 5, 24, 10_000]), st.sampled_from([1, 130, 260, 5000, 1 << 24])),
    min_size=1,
    max_size=6,
)


def do(world: World, step: tuple[str, Any]) -> None:
    """One thing that happens to an Index."""
    name, what = step
    if name == "append":
        world.append(Batch([b"b" * size for _, size in what], [due for due, _ in what]), 0)
    elif name == "own":
        world.append(Batch([b""] * len(what), [due for _, due in what], ids=[id_ for id_, _ in what]), 0)
    elif name == "cancel" and world.asleep:
        world.cancel([list(world.asleep)[pick % len(world.asleep)] for pick in what])
    elif name == "reschedule" and world.asleep:
        world.reschedule(list(world.asleep)[what[0] % len(world.asleep)], 0, what[1], None)
    elif name == "fire":
        world.due(what[0], count_max=what[1])
    elif name == "flush":
        world.index.maintenance.flush()
    elif name == "roll":
        world.roll()
    elif name == "settle":
        world.settle()
    elif name == "crash":
        world.reopen(clean=False)
    elif name == "seal":
        live = [base for base in world.closed if world.index._segments.by_base[base].live]
        if live:
            world.seal(live[what % len(live)])
            world.adopt()
    elif name == "compact" and world.closed:
        world.index.maintenance.compact(world.closed[what[0] % len(world.closed)], what[1])


def spoil(path: Path, at: int, how: str) -> None:
    """Damage the documents of a segment."""
    data = bytearray(path.read_bytes())
    at = 1 + at % max(1, len(data) - 1)
    if how == "cut":
        at = max(1, len(data) - at % 300)
        path.write_bytes(data[:at])
    elif at < len(data):
        data[at : at + 1] = b"\0" if how == "zero" else bytes((data[at] ^ 0x55,))
        path.write_bytes(data)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(steps, min_size=2, max_size=14),
    spoils,
    st.lists(picks, max_size=2),
    rounds,
    st.sampled_from([1, 4, 1000]),
    st.sampled_from([4096, 1 << 20]),
)
def test_lists_and_arrays_agree_on_any_shelf(
    happened: list[tuple[str, Any]],
    damage: list[tuple[int, int, str]],
    held_back: list[int],
    asked: list[tuple[int, int, int]],
    run: int,
    size: int,
) -> None:
    root = Path(tempfile.mkdtemp(prefix="turtlemq-"))
    world = World(root / "t", Settings(run_messages=run, segment_bytes=size, compact_live_ratio=0.5))
    try:
        for step in happened:
            do(world, step)
        if world.asleep and held_back:
            world.cancel([list(world.asleep)[pick % len(world.asleep)] for pick in held_back], commit=False)
        segments = sorted(world.folder.glob("delay_*.bson"))
        for pick, at, how in damage:
            spoil(segments[pick % len(segments)], at, how)
        for now, count, limit in asked:
            due, _ = both(world.index, now, count_max=count, bytes_max=limit)
            if due is not None:
                world.index.advance(due)
        drained(world.index, 60)
    finally:
        abandon(world.index)
        shutil.rmtree(root)
