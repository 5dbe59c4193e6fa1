"""Filters over many tables: they deny nothing that is there, few are asked, and no id that sleeps is taken a second time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.harness.index_world import Later, abandon, open_at, replace_by
from turtlemq.index.filters import LOOKUPS_MAX, choose
from turtlemq.index.index import Index
from turtlemq.index.parts import TablePart
from turtlemq.index.seal import seal
from turtlemq.model import U64, Batch
from turtlemq.segment import bloom as bits
from turtlemq.segment.table import Damaged, open_table
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

T = TypeVar("T")

RUNS = Settings(run_messages=30, segment_messages=400)


def _filter(hashes: U64, span: int) -> bits.BloomFilter:
    """One over these, made in stretches of `span` words."""
    hashes, words = np.sort(hashes), bits.words_for(len(hashes))
    made = np.zeros(words, np.uint64)
    for first in range(0, words, span):
        last = min(first + span, words)
        low, high = bits.first_hash(first, words), bits.first_hash(last, words)
        mine = hashes[(hashes >= low) & (hashes <= np.uint64(high - 1))]
        bits.enter(mine, made[first:last], first, words)
    return bits.BloomFilter(memoryview(made.tobytes()))


@pytest.mark.parametrize(("count", "span"), [(1, 1), (3, 1), (50, 7), (3_000, 100), (40_000, 1 << 20)])
def test_what_was_entered_passes_and_hardly_anything_else(count: int, span: int) -> None:
    chance = np.random.default_rng(count)
    hashes = np.append(chance.integers(1, 1 << 64, count - 1, dtype=np.uint64), np.uint64((1 << 64) - 1))
    ordinals = (hashes >> np.uint64(22) << np.uint64(22)) | np.arange(count, dtype=np.uint64)  # as tables have them
    made = _filter(ordinals, span)
    assert made.may_hold(hashes).tolist() == list(range(count))
    assert all(map(made.may_hold_one, hashes[:500].tolist()))
    strangers = chance.integers(1, 1 << 64, 20_000, dtype=np.uint64)
    passed = made.may_hold(strangers)
    assert [i for i, hash_ in enumerate(strangers[:500].tolist()) if made.may_hold_one(hash_)] == passed[passed < 500].tolist()
    assert len(passed) < (400 if count > 1_000 else 4_000), "the filter is worth its room"


def _own(first: int, count: int) -> Batch:
    return Batch([b"x"] * count, [9] * count, ids=[f"own-{n}" for n in range(first, first + count)])


def _asked(index: Index) -> int:
    return len({part.filter or part for part in index._segments.parts if isinstance(part, TablePart) and part.table.id_count})


def _filled(index: Index, count: int) -> None:
    for first in range(0, count, 30):
        assert index.append(_own(first, 30), 0).duplicates == 0
    index._filters.step(index._writer.flusher)


def test_no_id_is_taken_twice_wherever_it_sleeps(tmp_path: Path) -> None:
    """In the memtable, in runs and in full segments, behind filters and not; many at once, one by one, and after a crash."""
    index = open_at(tmp_path, settings=RUNS)
    _filled(index, 1_500)
    for _ in range(2):
        assert len(index._segments.parts) > 40
        for first in range(0, 1_500, 100):
            assert index.append(_own(first, 100), 0).created == [False] * 100
        assert [index.append(_own(n, 1), 0).created for n in range(0, 1_500, 37)] == [[False]] * 41
        assert all(index.get(f"own-{n}") for n in range(0, 1_500, 37))
        assert _asked(index) <= LOOKUPS_MAX
        assert sum(part.filter is not None for part in index._segments.parts) > 40, "what was asked was a filter"
        abandon(index)
        index = open_at(tmp_path, settings=RUNS)
    assert index.append(_own(1_490, 30), 0).created == [False] * 10 + [True] * 20
    abandon(index)


def test_a_filter_has_no_name_and_is_made_while_others_work(tmp_path: Path) -> None:
    index = open_at(tmp_path, settings=RUNS)
    later = index._writer.flusher = Later()
    for first in range(0, 600, 30):
        assert index.append(_own(first, 30), 0).duplicates == 0
        if first % 90 == 0:
            later.finish()
            index._writer.finish_flush(wait=True)
        assert not [path.name for path in tmp_path.iterdir() if "filter" in path.name]
        assert index.append(_own(first // 2, 30), 0).created == [False] * 30, "also while it is being made"
    assert any(part.filter is not None for part in index._segments.parts)
    index.close()
    index._segments.door.shut()


class NoFilters(Door):
    """Has no room for a filter, or fails when it is done otherwise."""

    def __init__(self, call: str, error: int) -> None:
        super().__init__()
        self.call, self.error, self.refused = call, error, 0

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == self.call and path is not None and ".filter" in path.name:
            self.refused += 1
            raise OSError(self.error, "made to fail")
        return action(*args)


@pytest.mark.parametrize(
    ("call", "error"), [("open", errno.ENOSPC), ("unlink", errno.EIO), ("write", errno.ENOSPC), ("mmap", errno.ENOMEM)]
)
def test_where_no_filter_can_be_made_tables_are_asked(tmp_path: Path, call: str, error: int) -> None:
    door = NoFilters(call, error)
    index = open_at(tmp_path, settings=RUNS, door=door)
    _filled(index, 600)
    assert door.refused > 3, "it is tried again when other tables come"
    assert index.append(_own(0, 600), 0).created == [False] * 600
    assert not any(part.filter for part in index._segments.parts)
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    left = [os.readlink(link) for link in links if link.is_symlink()]
    assert not [name for name in left if name.startswith(str(tmp_path)) and ".filter" in name], "no descriptor is left behind"
    abandon(index)


class Slow:
    """A worker that does its one job when it is let."""

    let = False

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Slow:
        self.work = partial(work, *args)
        return self

    def done(self) -> bool:
        return self.let

    def result(self) -> Any:
        return self.work()


def _with_a_damaged_run(folder: Path) -> Index:
    """Three runs; in the first one a byte of the section with the ordinals of its ids is flipped."""
    shape = Settings(run_messages=30)
    index = open_at(folder, settings=shape)
    _filled(index, 90)
    abandon(index)
    run = next(path for path in sorted(folder.iterdir()) if path.suffix == ".run")
    table = open_table(Door(), run)
    assert table is not None
    replace_by(run, "flip", table._sections["ordinals"][0])
    return open_at(folder, settings=shape)


def test_a_damaged_table_is_repaired_before_a_filter_reads_it(tmp_path: Path) -> None:
    index = _with_a_damaged_run(tmp_path)
    for first in range(90, 300, 30):
        index.append(_own(first, 30), 0)
    assert index.append(_own(0, 300), 0).created == [False] * 300
    assert index._segments.parts[0].filter is not None
    abandon(index)


def test_damage_of_a_removed_table_is_ignored(tmp_path: Path) -> None:
    index = _with_a_damaged_run(tmp_path)
    for _ in range(3):
        index.append(Batch([b"x"] * 30, [9] * 30), 0)
    slow = Slow()
    index._filters.step(slow)
    index.maintenance.roll()
    assert index.maintenance.adopt(seal(Door(), index.maintenance.seal_job(0)))
    slow.let = True
    with pytest.raises(Damaged):
        slow.result()
    index._filters.step(slow)
    assert index.append(_own(60, 30), 0).created == [False] * 30
    abandon(index)


def test_an_id_is_read_into_few_filters_in_its_life(tmp_path: Path) -> None:
    index = open_at(tmp_path, settings=Settings(run_messages=30))
    read = 0
    for first in range(0, 6_000, 30):
        index.append(_own(first, 30), 0)
        read += sum(part.table.id_count for part in choose(index._segments.parts))
        for _ in range(2):  # it is made at once here, and put in place
            index._filters.step(index._writer.flusher)
        assert _asked(index) <= LOOKUPS_MAX
    assert 6_000 < read < 10 * 6_000, "it grows with the logarithm of their number"
    abandon(index)
