"""Damaged bytes: in index files, which are built again, and in segments, where damaged documents are left out,
reported and kept aside, and everything else is served.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import bson
import numpy as np
import pytest

from tests.harness.doors import Failing
from tests.harness.index_world import SMALL, World, abandon, documents, open_at
from turtlemq.errors import NewerFormat, NotOurs
from turtlemq.index.build import tabulate
from turtlemq.index.index import Index
from turtlemq.index.lookup import find
from turtlemq.index.recover import open_index
from turtlemq.index.seal import seal
from turtlemq.model import Batch, State
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_id
from turtlemq.segment.table import BLOCK, open_table
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

WIDE = Settings(segment_bytes=1 << 20, run_messages=1_500)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "t", WIDE)
    yield made
    made.compare_all(limit=1_000)
    abandon(made.index)


def messages(prefix: str, n: int, due: int = 100, step: int = 1) -> Batch:
    return Batch(
        [b"body of %d" % i for i in range(n)], [due + i * step for i in range(n)], ids=[f"{prefix}{i}" for i in range(n)]
    )


def spoil_section(path: Path, section: str, last: bool = False) -> None:
    """Damage the first or the last block of a section of a table."""
    data = path.read_bytes()
    at, count = bson.decode(data[: int.from_bytes(data[:4], "little")])["sections"][section]
    width = 4 if section in ("positions", "buckets", "kills") else 8
    with path.open("r+b") as file:
        file.seek(at + (count * width - 1) // BLOCK * BLOCK * last)
        file.write(b"\xee" * 32)


def spoil_document(index: Index, id_: str, at: int = -5) -> None:
    """Flip a byte of a document, counted from its begin or its end."""
    hit = find(index._segments, id_)
    assert hit is not None
    start, end = (int(place[0]) for place in hit[0].spans_of(np.array([hit[1]])))
    with hit[0].path.open("r+b") as file:
        file.seek((start if at >= 0 else end) + at)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x55]))


# Index files

SECTIONS = ["keys", "inner0", "positions", "buckets", "prints", "ordinals", "kills"]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("sealed", [False, True], ids=["a run", "a sealed segment"])
def test_a_damaged_block_is_noticed_and_the_table_built_again(world: World, section: str, sealed: bool) -> None:
    world.append(messages("a", 1_400), 0)
    world.cancel(["a5", "a700"])
    world.reschedule("a9", 0, 5_000, None)
    world.append(messages("z", 10), 0)
    world.roll()
    world.cancel(["a6", "a701"])
    if sealed:
        world.seal(0)
        world.adopt()
    world.reopen()
    path = next(p for p in world.caches() if p.suffix in (".run", ".index"))
    spoil_section(path, section, last=True)  # a block is verified when it is first used: opening uses the first keys
    world.cancel(["a7", "a1300", "nobody"])
    world.append(messages("a", 3), 0)
    world.reschedule("a10", 0, 101, b"new")
    world.forecast(0, 100, 20)
    world.drain(300, 50)
    world.compare_all(limit=900)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_block_damaged_while_closed_does_not_prevent_opening(world: World, section: str) -> None:
    world.append(messages("a", 1_600), 0)
    world.cancel(["a5", "a700"])
    world.drain(120)
    world.reopen(meanwhile=lambda: spoil_section(next(p for p in world.caches() if p.suffix == ".run"), section))
    world.compare_all(limit=900)


def test_several_damaged_tables_bring_nothing_back(world: World) -> None:
    """To repair one table, tombstones are read with the help of others, which may be damaged too."""
    for prefix in "abc":
        world.append(messages(prefix, 600), 0)
        world.roll()
        world.cancel([f"{prefix}{i}" for i in range(0, 600, 7)])
    world.roll()
    world.reopen()
    for path in world.caches():
        if path.suffix == ".run":
            spoil_section(path, "kills")
            spoil_section(path, "positions")
        if path.suffix == ".dead":
            path.unlink()
    world.drain(150, 40)
    world.compare_all(limit=900)


def test_dead_bits_that_outlive_their_table_bring_nothing_back(tmp_path: Path) -> None:
    """Messages cancelled before a run was written are not in its table at all, so the bits made for it do not tell of them."""
    world = World(tmp_path / "t", Settings(segment_bytes=1 << 16, run_messages=8))
    world.append(messages("a", 7), 0)
    world.cancel(["a1"])  # the eighth document: a run is written
    world.cancel(["a2"])
    world.roll()
    assert {p.suffix for p in world.caches()} == {".run", ".dead"}

    def meanwhile() -> None:
        for path in world.folder.glob("*.run"):
            path.unlink()

    world.reopen(meanwhile=meanwhile)
    world.compare_all()
    abandon(world.index)


def test_dead_bits_are_for_the_very_documents_they_were_made_for(tmp_path: Path) -> None:
    """A damaged document moves the numbers of all behind it: bits for run number 8 are then bits for others than these."""
    world = World(tmp_path / "t", Settings(segment_bytes=1 << 16, run_messages=8))

    def forget_runs() -> None:
        for path in world.folder.glob("*.run"):
            path.unlink()

    for prefix in "abcd":
        world.append(messages(prefix, 8), 0)
    world.roll()
    world.reopen(meanwhile=forget_runs)
    world.cancel(["b1", "c1"])
    spoil_document(world.index, "a3")
    world.roll()
    world.reopen(meanwhile=forget_runs)
    found = {found.id for found in world.index.browse()[0]}
    assert found == world.asleep.keys() - {"a3"}
    abandon(world.index)


def test_files_of_an_abandoned_seal_do_no_harm(world: World) -> None:
    world.append(messages("a", 50), 0)
    world.roll()
    world.seal(0)
    world.reopen(clean=False)
    assert not list(world.folder.glob("*.bson.tmp"))
    world.cancel(["a3"])
    world.seal(0)
    world.cut_adoption()
    world.compare_all()
    assert world.index._segments.by_base[0].sealed


def test_a_table_of_other_documents_is_not_taken(tmp_path: Path) -> None:
    """A file that was put in the place of another is whole, but speaks of something else."""
    world = World(tmp_path / "t", Settings(segment_bytes=1 << 16, run_messages=8))
    for prefix in "abc":
        world.append(messages(prefix, 8), 0)
    world.roll()
    for prefix in "def":
        world.append(messages(prefix, 8), 0)
    runs = sorted(world.folder.glob("*.run"))
    assert len(runs) == 6

    def swap(first: int, second: int) -> None:
        one, other = runs[first].read_bytes(), runs[second].read_bytes()
        runs[first].write_bytes(other)
        runs[second].write_bytes(one)

    for pair in ((0, 1), (2, 5), (1, 4), (0, 3)):
        world.reopen(clean=False, meanwhile=partial(swap, *pair))
        world.compare_all()
    world.drain(200)
    abandon(world.index)


@pytest.mark.parametrize("count", [5, 200], ids=["few", "many"])
def test_a_table_with_wrong_due_times_fires_nothing_early(world: World, count: int) -> None:
    """Its checksums are right and so is its cover: only the documents can tell."""
    world.append(messages("a", count, due=1_000), 0)
    world.index.maintenance.flush()
    path = next(iter(world.folder.glob("*.run")))
    table = open_table(Door(), path)
    assert table is not None
    starts, _ = table.spans_of(np.arange(count))
    hashes = np.array([hash_id(f"a{i}", 0) for i in range(count)], np.uint64)
    alive = np.ones(count, np.bool_)
    wrong = tabulate(table.cover, np.arange(count) + 100, starts, np.zeros(count, np.uint32), hashes, alive, 0)

    def exchange() -> None:
        path.write_bytes(b"".join(wrong))

    world.reopen(meanwhile=exchange)
    assert world.due(999) is None, "and the table is built again from its segment"
    world.drain(1_000 + count)


def test_a_seal_with_a_damaged_table_is_not_adopted(world: World) -> None:
    world.append(messages("a", 50), 0)
    world.roll()
    for spoiled in ("keys", "positions", None):
        sealed = seal(Door(), world.index.maintenance.seal_job(0))
        path = next(world.folder.glob("*.index.tmp"))
        if spoiled is None:
            path.unlink()
        else:
            spoil_section(path, spoiled)
        world.cancel([f"a{spoiled and len(spoiled)}"])
        if spoiled != "positions":  # positions are read when something is looked up
            assert not world.index.maintenance.adopt(sealed)
        world.compare_all()
    world.seal(0)
    world.adopt()


# Documents


def test_a_damaged_document_is_reported_and_the_rest_served(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t", settings=WIDE)
    index.append(messages("a", 10), 0)
    spoil_document(index, "a4")
    assert index.get("a4") is None
    assert index.cancel(["a4", "a5"]) == {"a4": State.UNKNOWN, "a5": State.CANCELLED}
    due = index.due(1_000)
    assert due is not None
    assert [d.id for d in documents(due)] == [f"a{i}" for i in range(10) if i not in (4, 5)]
    (damage,) = index.damage
    assert damage.file == "delay_0000000000.bson"
    assert "Restore the file from a backup" in str(damage)
    assert any("checksum does not match" in line for line in index.check())
    (copy,) = (tmp_path / "t").glob("*.damaged")
    assert copy.stat().st_size == damage.length
    abandon(index)


@pytest.mark.parametrize("at", [0, 5, 12, 25, 40, 60, -5, -1])
@pytest.mark.parametrize("where", ["memtable", "run", "sealed"])
def test_wherever_a_document_is_damaged_the_others_fire(tmp_path: Path, where: str, at: int) -> None:
    index = open_at(tmp_path / "t", settings=WIDE)
    index.append(messages("a", 40), 0)
    if where != "memtable":
        index.maintenance.roll()
    if where == "sealed":
        index.maintenance.adopt(seal(Door(), index.maintenance.seal_job(0)))
    spoil_document(index, "a20", at)
    index.append(messages("b", 1), 0)
    abandon(index)
    for _ in range(2):  # with its tables, and without
        again = open_at(tmp_path / "t", settings=WIDE)
        due = again.due(1_000)
        assert due is not None
        assert [d.id for d in documents(due)] == sorted((f"a{i}" for i in range(40) if i != 20), key=lambda i: int(i[1:]))[:1] + [
            "b0"
        ] + [f"a{i}" for i in range(1, 40) if i != 20]
        assert again.stats().damaged == 1
        abandon(again)
        for path in (tmp_path / "t").glob("*.[ri]*"):
            if path.suffix in (".run", ".index"):
                path.unlink()


def test_damaged_bytes_are_kept_when_their_segment_goes(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t", settings=WIDE)
    index.append(messages("a", 30), 0)
    index.append(messages("b", 30), 0)
    spoil_document(index, "a4")
    index.maintenance.roll()
    index.maintenance.adopt(seal(Door(), index.maintenance.seal_job(0)))
    assert len(list((tmp_path / "t").glob("*.damaged"))) == 1
    assert [found.id for found in index.browse(limit=100)[0]].count("a4") == 0
    spoil_document(index, "b7")
    due = index.due(1_000)
    assert due is not None
    index.advance(due)
    abandon(index)
    again = open_index(Door(), tmp_path / "t", "t", WIDE, due.progress)
    again.maintenance.step(10, None)
    assert list(again._segments.by_base) == [max(again._segments.by_base)]
    kept = [path.read_bytes() for path in (tmp_path / "t").glob("*.damaged")]
    assert len(kept) == 2
    assert any(b"b7\0" in data for data in kept), "found before, by another process"
    assert again.check() == []
    abandon(again)


def test_compaction_leaves_a_damaged_document_behind(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t", settings=Settings(segment_bytes=1 << 16, compact_live_ratio=0.5))
    index.append(messages("a", 30), 0)
    index.maintenance.roll()
    index.cancel([f"a{i}" for i in range(24)])
    spoil_document(index, "a25")
    for _ in range(10):
        index.maintenance.step(2, None)
    assert 0 not in index._segments.by_base
    assert [found.id for found in index.browse()[0]] == ["a24", "a26", "a27", "a28", "a29"]
    assert index.stats().damaged == 1
    assert index.check() == []
    abandon(index)


def test_a_damaged_document_among_many_equals_misleads_no_search(tmp_path: Path) -> None:
    """Where a handoff stopped among equal due times is found by bisecting their seqs. Damaged ones must not be believed."""
    index = open_at(tmp_path / "t", settings=Settings(run_messages=500))
    index.append(Batch([b"x"] * 512, [7] * 512, ids=[f"{i:03}" for i in range(512)]), 0)
    due = index.due(9, count_max=300)
    assert due is not None
    index.advance(due)
    for i in (256, 128, 384, 320, 300, 299):
        spoil_document(index, f"{i:03}", f.AT_SEQ + 2)  # makes the seq a very large one
    abandon(index)
    again = open_index(Door(), tmp_path / "t", "t", Settings(run_messages=500), due.progress)
    again.cancel(["310", "499"])
    rest = again.due(9)
    assert rest is not None
    assert [d.id for d in documents(rest)] == [f"{i:03}" for i in range(300, 512) if i not in (300, 310, 320, 384, 499)]
    abandon(again)


def test_a_stretch_without_one_good_document_blocks_nothing(tmp_path: Path) -> None:
    settings = Settings(segment_bytes=1 << 16, run_messages=20)
    index = open_at(tmp_path / "t", settings=settings)
    for prefix in "abc":
        index.append(messages(prefix, 20), 0)
    runs = index._segments.by_base[0].parts
    start, end = int(runs[1].spans_of(np.array([0]))[0][0]), int(runs[1].spans_of(np.array([19]))[1][0])
    index.close()
    with (tmp_path / "t" / "delay_0000000000.bson").open("r+b") as file:
        file.seek(start)
        file.write(b"\x7f" * (end - start))
    again = open_at(tmp_path / "t", settings=settings)
    spoil_section(sorted((tmp_path / "t").glob("*.run"))[1], "positions")
    fired: list[str] = []
    while (due := again.due(1_000, count_max=7)) is not None:
        again.advance(due)
        fired += [d.id for d in documents(due)]
    assert sorted(fired) == sorted(f"{p}{i}" for p in "ac" for i in range(20))
    assert again.stats().damaged > 0
    abandon(again)


# Headers


@pytest.mark.parametrize("last", [False, True], ids=["a closed segment", "the last segment"])
@pytest.mark.parametrize("sealed", [False, True])
def test_behind_a_damaged_header_all_documents_are_served(tmp_path: Path, last: bool, sealed: bool) -> None:
    index = open_at(tmp_path / "t")
    index.append(messages("a", 12), 0)
    index.append(messages("c", 12, due=50), 0)
    if sealed:
        index.maintenance.roll()
        index.maintenance.adopt(seal(Door(), index.maintenance.seal_job(0)))
    elif not last:
        index.maintenance.roll()
    if not last:
        index.append(messages("b", 3), 0)
    elif sealed:  # as if the last one had never been made
        (tmp_path / "t" / names.segment("delay", index._segments.active.base)).unlink()
    abandon(index)
    path = tmp_path / "t" / "delay_0000000000.bson"
    data = bytearray(path.read_bytes())
    data[60] ^= 0x10
    path.write_bytes(data)
    for _ in range(2):
        again = open_at(tmp_path / "t")
        assert [d.reason for d in again.damage] == ["its header is damaged"]
        found = {found.id for found in again.browse(limit=100)[0]}
        assert found >= {f"{p}{i}" for p in "ac" for i in range(12)}
        again.append(messages("more", 1), 0)
        abandon(again)
    assert path.stat().st_size == len(data), "nothing more is written behind a header that cannot be read"


def test_a_segment_of_another_topic_is_refused_and_not_served(tmp_path: Path) -> None:
    other = open_index(Door(), tmp_path / "u", "u", SMALL, open_at(tmp_path / "t").progress)
    other.append(messages("foreign", 5), 0)
    abandon(other)
    shutil.copy(tmp_path / "u" / "delay_0000000000.bson", tmp_path / "t" / "delay_0000000000.bson")
    with pytest.raises(NotOurs, match="of topic 'u'"):
        open_at(tmp_path / "t")


@pytest.mark.parametrize("content", [b"hello, these are my notes", b"PK\x03\x04" * 100, b"\x89PNG" + b"\0" * 500])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").mkdir()
    path = tmp_path / "t" / "delay_0000000000.bson"
    path.write_bytes(content)
    with pytest.raises(NotOurs, match=r"delay_0000000000\.bson"):
        open_at(tmp_path / "t")
    assert path.read_bytes() == content


@pytest.mark.parametrize("left", ["nothing", "a part", "zeros", "all but the checksum"])
def test_a_segment_that_was_just_being_made_is_made_again(tmp_path: Path, left: str) -> None:
    index = open_at(tmp_path / "t")
    index.append(messages("a", 5), 0)
    index.maintenance.roll()
    path = index._segments.active.path
    whole = path.read_bytes()
    abandon(index)
    path.write_bytes(
        {"nothing": b"", "a part": whole[:40], "zeros": bytes(len(whole)), "all but the checksum": whole[:-9] + bytes(9)}[left]
    )
    again = open_at(tmp_path / "t")
    assert again.damage == []
    assert again.stats().sleep == 5
    again.append(messages("b", 5), 0)
    assert again.check() == []
    abandon(again)


def test_a_segment_of_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f, "VERSION", f.VERSION + 1)
        abandon(open_at(tmp_path / "t"))
    with pytest.raises(NewerFormat, match=r"delay_0000000000\.bson"):
        open_at(tmp_path / "t")


def test_damage_that_cannot_be_kept_aside_is_told_all_the_same(tmp_path: Path) -> None:
    door = Failing(how="ENOSPC")
    index = open_at(tmp_path / "t", settings=WIDE, door=door)
    index.append(messages("a", 5), 0)
    spoil_document(index, "a2")
    door.at = next(k for k in range(len(door.calls), len(door.calls) + 20) if k > len(door.calls) + 2)
    assert index.get("a2") is None
    assert index.stats().damaged == 1
    abandon(index)


def test_blocks_are_of_the_size_that_these_tests_think(tmp_path: Path) -> None:
    index = open_at(tmp_path / "t", settings=WIDE)
    index.append(messages("a", 1_500), 0)
    (path,) = (tmp_path / "t").glob("*.run")
    assert path.stat().st_size > 10 * BLOCK
    abandon(index)
