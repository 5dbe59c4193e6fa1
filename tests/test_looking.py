"""Pages of sleepers and forecasts, against brute force: ties, cancelled and handed-off messages, cursors, damage, bad input."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness.index_world import World, abandon, open_at
from turtlemq.errors import InvalidArgument
from turtlemq.index.index import Index
from turtlemq.index.lookup import find
from turtlemq.index.seal import seal
from turtlemq.model import DUE_MS_MAX, Batch
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

MEDIUM = Settings(segment_bytes=1 << 17, run_messages=300)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", MEDIUM)
    yield made
    made.compare_all(limit=700)
    abandon(made.index)


def fill(world: World, count: int, dues: range, seed: int = 1) -> None:
    """Messages in batches of all sizes, over memtable, runs and several segments; some cancelled, some changed."""
    chance = random.Random(seed)
    while count > 0:
        n = min(count, chance.choice([1, 5, 40, 200]))
        world.append(Batch([b"x" * 40] * n, [chance.choice(dues) for _ in range(n)]), 0)
        count -= n
    for id_ in chance.sample(sorted(world.asleep), len(world.asleep) // 10):
        world.reschedule(id_, 0, chance.choice(dues), None)
    world.cancel(chance.sample(sorted(world.asleep), len(world.asleep) // 4))


def seal_all(world: World) -> None:
    for base in list(world.closed):
        world.seal(base)
        world.adopt()


def test_pages_join_up_to_everything_whatever_their_size(world: World) -> None:
    fill(world, 2_000, range(500))
    for sealed in (False, True):
        if sealed:
            seal_all(world)
            world.drain(100, 17)
        wanted = sorted(world.asleep.values(), key=lambda s: (s.due_ms, s.order))
        for limit in (7, 100, 10_000):
            assert listed(world, limit) == [s.id for s in wanted]
            assert listed(world, limit, newest=True) == [s.id for s in reversed(wanted)]


def listed(world: World, limit: int, low: int = 0, high: int = DUE_MS_MAX, newest: bool = False) -> list[str]:
    """The ids on all pages of a listing; every page but the last is full."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page, cursor = world.index.browse_documents(low, high, limit, cursor, newest)
        ids += [found.id for found in page]
        if cursor is None:
            return ids
        assert len(page) == limit


def test_thousands_of_equal_due_times_make_pages_of_equal_cost(world: World) -> None:
    """A page behind a cursor must not read all the ties before it."""
    reads = 0

    class Counting(Door):
        def read(self, path: Path, offset: int, length: int) -> bytes:
            nonlocal reads
            reads += length
            return super().read(path, offset, length)

    for _ in range(20):
        world.append(Batch([b"x" * 40] * 200, [7] * 200), 0)
    seal_all(world)
    world.reopen()
    world.index._segments.door = Counting()
    seen: list[int] = []
    cursor: str | None = None
    for _ in range(40):
        reads = 0
        page, cursor = world.index.browse(limit=100, cursor=cursor)
        seen += [found.seq for found in page]
        assert reads < 100 * 150 * (len(world.index._segments.parts) + 2), "pages far behind cost as much as the first"
    assert cursor is None
    assert seen == sorted(set(seen))
    assert len(seen) == 4_000


def test_a_page_lies_within_its_range(world: World) -> None:
    fill(world, 600, range(300))
    for low, high in ((0, 0), (50, 50), (100, 199), (299, 10_000), (400, DUE_MS_MAX), (DUE_MS_MAX, DUE_MS_MAX)):
        page, cursor = world.index.browse(low, high, limit=10_000)
        assert listed(world, 70, low, high, newest=True) == [found.id for found in reversed(page)]
        assert cursor is None
        wanted = sorted((s.due_ms, s.order, s.id) for s in world.asleep.values() if low <= s.due_ms <= high)
        assert [found.id for found in page] == [id_ for _, _, id_ in wanted]


def test_messages_that_leave_between_pages_are_the_only_ones_missed(world: World) -> None:
    world.append(Batch([b""] * 30, [5] * 30, ids=[f"{i:02}" for i in range(30)]), 0)
    first, cursor = world.index.browse(limit=10)
    world.cancel(["03", "09", "10", "11"])
    world.reschedule("12", 0, 4, None)
    world.append(Batch([b""], [5], ids=["30"]), 0)
    rest, none = world.index.browse(limit=100, cursor=cursor)
    assert [found.id for found in (*first, *rest)] == [f"{i:02}" for i in (*range(10), *range(13, 31))]
    assert none is None


def test_a_long_stretch_of_cancelled_messages_is_stepped_over(world: World) -> None:
    world.append(Batch([b""] * 3_000, [5] * 3_000, ids=[f"{i:04}" for i in range(3_000)]), 0)
    world.cancel([f"{i:04}" for i in range(1, 2_999)])
    page, cursor = world.index.browse(limit=1)
    assert ([found.id for found in page], cursor is None) == (["0000"], False)
    page, cursor = world.index.browse(limit=1, cursor=cursor)
    assert ([found.id for found in page], cursor) == (["2999"], None)


def test_a_damaged_document_is_on_no_page_and_ends_no_list(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t", settings=MEDIUM)
    index.append(Batch([b"x" * 50] * 30, [5] * 30, ids=[f"{i:02}" for i in range(30)]), 0)
    hits = [find(index._segments, id_) for id_ in ("04", "05", "06")]
    with (tmp_path / "t" / "delay_0000000000.bson").open("r+b") as file:
        for hit in hits:
            assert hit is not None
            file.seek(int(hit[0].spans_of(np.array([hit[1]]))[0][0]) + 100)
            file.write(b"!")
    listed: list[str] = []
    cursor: str | None = None
    while True:
        page, cursor = index.browse(limit=4, cursor=cursor)
        listed += [found.id for found in page]
        if cursor is None:
            break
        assert len(page) == 4
    assert listed == [f"{i:02}" for i in range(30) if i not in (4, 5, 6)]
    assert index.stats().damaged == 3
    abandon(index)


def test_a_forecast_counts_what_sleeps(world: World) -> None:
    fill(world, 1_500, range(1_000))
    for sealed in (False, True):
        if sealed:
            seal_all(world)
            world.cancel(sorted(world.asleep)[::7])
            world.reopen(clean=False)
        for now, bucket, buckets in ((0, 1, 1_000), (0, 10, 5), (300, 60, 20), (999, 7, 1), (5_000, 1, 3), (0, DUE_MS_MAX, 3)):
            world.forecast(now, bucket, buckets)
        world.drain(150 + 100 * sealed, 13)  # a part of a page of ties, too
        for now, bucket, buckets in ((0, 10, 100), (200, 3, 40), (DUE_MS_MAX, 1, 1)):
            world.forecast(now, bucket, buckets)


def test_a_forecast_reads_no_document(world: World) -> None:
    fill(world, 800, range(1_000))
    seal_all(world)

    class Blind(Door):
        def read(self, path: Path, offset: int, length: int) -> bytes:
            raise AssertionError("a document was read")

    door, world.index._segments.door = world.index._segments.door, Blind()
    world.forecast(0, 100, 10)
    world.index._segments.door = door


@pytest.mark.parametrize(
    "asked",
    [
        {"limit": 0},
        {"limit": 10_001},
        {"from_ms": -1},
        {"from_ms": 5, "to_ms": 4},
        {"to_ms": DUE_MS_MAX + 1},
        {"cursor": "what"},
        {"cursor": "1-2-3"},
        {"cursor": f"{DUE_MS_MAX + 1}-1"},
        {"cursor": f"1-{1 << 63}"},
        {"cursor": "-1-5"},
        {"cursor": "²-5"},
    ],
)
def test_a_page_that_cannot_be_is_refused(world: World, asked: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        world.index.browse(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "bucket", "buckets"), [(0, 0, 5), (0, 5, 0), (0, 1, 100_001), (-1, 1, 1), (DUE_MS_MAX + 1, 1, 1)]
)
def test_a_forecast_that_cannot_be_is_refused(world: World, now: int, bucket: int, buckets: int) -> None:
    with pytest.raises(InvalidArgument):
        world.index.forecast(now, bucket_ms=bucket, buckets=buckets)
    with pytest.raises(InvalidArgument):
        world.index.forecast(0, bucket_ms=1 << 62, buckets=100_000)


def test_figures_follow_every_step(tmp_path: Path) -> None:
    index: Index = open_at(tmp_path / "t", settings=Settings(segment_bytes=4096))
    assert (index.stats().sleep, index.stats().segments, index.stats().live_ratio) == (0, 1, 1.0)
    index.append(Batch([b"x" * 100] * 60, list(range(60)), ids=[f"{i}" for i in range(60)]), 0)
    index.cancel(["1", "2"])
    due = index.due(9)
    assert due is not None
    index.advance(due)
    stats = index.stats()
    assert (stats.sleep, stats.handed_off, stats.cancelled, stats.next_due_ms) == (50, 8, 2, 10)
    assert stats.live_ratio == 50 / 62
    assert stats.bytes == sum(path.stat().st_size for path in (tmp_path / "t").glob("*.bson"))
    base = min(index._segments.by_base)
    index.maintenance.roll()
    index.release(due.progress)
    index.maintenance.adopt(seal(Door(), index.maintenance.seal_job(base)))
    assert (index.stats().sleep, index.stats().segments) == (50, len(index._segments.by_base))
    assert index.stats().live_ratio == pytest.approx(50 / sum(s.documents for s in index._segments.by_base.values()))
    abandon(index)
