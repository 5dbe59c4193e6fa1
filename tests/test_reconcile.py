"""Plans of a reconcile: comparison of files, records behind links that were made at different moments, cached checksums."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import xxhash

from tests.harness.replica_pair import leading
from turtlemq.errors import DiskFull
from turtlemq.replica.copy_files import FileWriter, Tails
from turtlemq.replica.copy_source import CopySource
from turtlemq.replica.frames import Pull
from turtlemq.replica.manifest import (
    PIECE_BYTES,
    Action,
    CatchUp,
    FileState,
    Verdict,
    check_paths,
    frames_of,
    piece_count,
    plan_file,
    plan_names,
)
from turtlemq.replica.pins import Pins
from turtlemq.replica.records import DATA_BYTES_MAX, Head, Kind, OutOfStep, Record
from turtlemq.replica.sums import SETTLED_NS, Sums
from turtlemq.storage.door import Door

P = PIECE_BYTES
T = TypeVar("T")


def wanted(size: int, *sums: int) -> FileState:
    assert piece_count(size) == len(sums)
    return FileState("topic/t/delay_0000000000.bson", size, list(sums))


@pytest.mark.parametrize(
    ("file", "own_size", "own_sums", "action", "pulled"),
    [
        (wanted(0), None, [], Action.ANEW, ()),
        (wanted(0), 0, [], Action.KEEP, ()),
        (wanted(0), 9, [], Action.CUT, ()),
        (wanted(P + 5, 1, 2), None, [], Action.ANEW, (0, 1)),
        (wanted(P + 5, 1, 2), P + 5, [1, 2], Action.KEEP, ()),
        (wanted(P + 5, 1, 2), P + 6, [1, 2], Action.CUT, ()),
        (wanted(P + 5, 1, 2), P + 6, [1, 3], Action.ANEW, (1,)),
        (wanted(P + 5, 1, 2), P + 4, [1, 3], Action.EXTEND, (1,)),
        (wanted(P + 5, 1, 2), P, [1], Action.EXTEND, (1,)),
        (wanted(P + 5, 1, 2), P - 1, [9], Action.EXTEND, (0, 1)),
        (wanted(2 * P, 1, 2), P + 1, [9, 7], Action.ANEW, (0, 1)),
        (wanted(3 * P, 1, 2, 3), 3 * P, [1, 9, 3], Action.ANEW, (1,)),
    ],
)
def test_a_file_is_kept_cut_extended_or_made_anew(
    file: FileState, own_size: int | None, own_sums: list[int], action: Action, pulled: tuple[int, ...]
) -> None:
    plan = plan_file(file, own_size, own_sums)
    assert (plan.action, plan.pulled) == (action, pulled)
    assert sum(length for _, length in plan.parts()) == plan.pull_bytes
    assert all(0 < length <= DATA_BYTES_MAX for _, length in plan.parts())


def test_names_that_the_leader_lacks_go_deepest_first() -> None:
    plan = plan_names(["FORMAT"], ["topic", "topic/n", "topic/n/dead"], ["FORMAT", "CLEAN"], ["topic", "topic/o", "topic/o/dead"])
    assert plan.removed_files == ["CLEAN"]
    assert plan.removed_folders == ["topic/o/dead", "topic/o"]
    assert plan.new_folders == ["topic/n", "topic/n/dead"]


@pytest.mark.parametrize("path", ["", "LOCK", "../FORMAT", "topic/../FORMAT", "/FORMAT", "topic/t/notes"])
def test_a_manifest_with_another_path_is_refused(path: str) -> None:
    check_paths(["FORMAT", "topic/t/offset"])
    with pytest.raises(OutOfStep):
        check_paths(["FORMAT", path])


def test_a_large_manifest_goes_in_several_frames() -> None:
    files = [FileState(f"topic/t/delay_{n:010}.bson", P, [1]) for n in range(20_000)]
    groups = list(frames_of(files))
    assert 1 < len(groups) < 20
    assert [file for group in groups for file in group] == files
    assert list(frames_of([])) == [[]]


def record(lsn: int, kind: Kind, path: str, data: bytes = b"", offset: int = 0) -> Record:
    return Record(Head(kind, 1, lsn, offset, len(path), len(data), 0), 0, path, data)


def test_each_unit_takes_the_records_behind_its_own_links() -> None:
    """One record too few or too many would make a file differ."""
    catch_up = CatchUp(10, {"": 10, "topic/a": 12, "topic/b": 15})
    for unit, last in (("FORMAT", 10), ("topic/a/offset", 12), ("topic/b/dead/offset", 15), ("topic/new", 10)):
        for lsn in range(11, 20):
            verdict = catch_up.verdict(record(lsn, Kind.WRITE, unit))
            assert verdict is (Verdict.APPLY if lsn > last else Verdict.SKIP), (unit, lsn)


def test_a_copy_is_complete_behind_the_last_unit() -> None:
    catch_up = CatchUp(10, {"": 10, "topic/a": 12, "topic/b": 15})
    assert [catch_up.is_complete(lsn) for lsn in (10, 12, 14, 15, 16)] == [False, False, False, True, True]
    assert CatchUp(10, {}).is_complete(10)


def test_the_end_of_a_sync_is_never_skipped() -> None:
    assert CatchUp(1, {"": 9}).verdict(record(2, Kind.SYNCED, "", offset=1)) is Verdict.APPLY


def drop(lsn: int) -> Record:
    return record(lsn, Kind.RENAME, "topic/a", b"topic/.a.deleted")


def test_a_topic_dropped_behind_its_links_is_renamed() -> None:
    assert CatchUp(10, {"": 10, "topic/a": 12}).verdict(drop(13)) is Verdict.APPLY


def test_a_topic_dropped_before_its_links_is_passed_over() -> None:
    """The folder that it became was never copied: all of its records are skipped, up to its end."""
    catch_up = CatchUp(10, {"": 10, "topic/a": 15})
    assert catch_up.verdict(drop(13)) is Verdict.SKIP
    assert catch_up.verdict(record(14, Kind.REMOVE, "topic/.a.deleted/offset")) is Verdict.SKIP
    assert catch_up.verdict(record(18, Kind.REMOVE, "topic/.a.deleted/topic.toml")) is Verdict.SKIP
    assert catch_up.verdict(record(19, Kind.RMDIR, "topic/.a.deleted/dead")) is Verdict.SKIP
    assert catch_up.verdict(record(20, Kind.RMDIR, "topic/.a.deleted")) is Verdict.SKIP
    assert catch_up.verdict(record(21, Kind.MKDIR, "topic/.a.deleted")) is Verdict.APPLY


def test_a_dropped_folder_that_was_linked_later_loses_its_old_name() -> None:
    assert CatchUp(10, {"": 10, "topic/a": 11, "topic/.a.deleted": 15}).verdict(drop(13)) is Verdict.REMOVE
    assert CatchUp(10, {"": 10, "topic/a": 14, "topic/.a.deleted": 15}).verdict(drop(13)) is Verdict.SKIP


def test_a_rename_within_a_topic_is_one_of_its_records() -> None:
    renamed = record(13, Kind.RENAME, "topic/a/offset.tmp", b"topic/a/offset")
    assert CatchUp(10, {"topic/a": 12}).verdict(renamed) is Verdict.APPLY
    assert CatchUp(10, {"topic/a": 13}).verdict(renamed) is Verdict.SKIP


def test_checksums_are_read_once_for_a_file_that_rests(tmp_path: Path) -> None:
    class Counting(Door):
        reads = 0

        def read(self, path: Path, offset: int, length: int) -> bytes:
            self.reads += path.name == "file"
            return super().read(path, offset, length)

    file, door = tmp_path / "file", Counting()
    file.write_bytes(b"x" * (P + 1))
    now_ns = file.stat().st_mtime_ns + SETTLED_NS + 1
    for turn in range(3):
        sums = Sums(door, tmp_path)
        assert sums.of("FORMAT", file, P + 1, now_ns)[1] == xxhash.xxh3_64_intdigest(b"x")
        sums.save()
        assert door.reads == 2, turn
    sums = Sums(door, tmp_path)
    assert len(sums.of("FORMAT", file, P, now_ns)) == 1  # another length
    file.write_bytes(b"y" * (P + 1))
    os.utime(file, ns=(1, 1))
    assert sums.of("FORMAT", file, P + 1, now_ns)[1] == xxhash.xxh3_64_intdigest(b"y")


def test_checksums_of_a_file_that_was_just_written_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for data in (b"one", b"two"):
        file.write_bytes(data)
        os.utime(file, ns=(10**18, 10**18))
        sums = Sums(Door(), tmp_path)
        assert sums.of("FORMAT", file, 3, 10**18 + SETTLED_NS) == [xxhash.xxh3_64_intdigest(data)]
        sums.save()


def test_a_cache_of_checksums_that_is_damaged_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "REPLICA.sums").write_bytes(b"{")
    assert Sums(Door(), tmp_path).of("FORMAT", tmp_path / "file", 1, 0) == [xxhash.xxh3_64_intdigest(b"x")]


def test_a_file_under_way_is_closed_once(tmp_path: Path) -> None:
    """There is no room for the new file, behind the close of the old one: its descriptor may be another file's by then."""
    (tmp_path / "FORMAT").write_bytes(b"wrong")
    file = FileState("FORMAT", 9, [xxhash.xxh3_64_intdigest(b"right one")])
    door = Full()
    writer = FileWriter(door, tmp_path, plan_file(file, 5, []), Tails(door, None))
    with pytest.raises(DiskFull):
        writer.write(0, 9, b"right one")
    writer.close()


class Full(Door):
    """A disk without room for new files. A descriptor that is closed twice is an error."""

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "open" and args[1] & os.O_CREAT:
            raise OSError(errno.ENOSPC, "full")
        return super()._call(name, path, action, *args)


def test_the_leader_hears_how_far_a_copy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several topics, each of which the leader is slow to read."""
    read = CopySource.read

    async def slow(source: CopySource, links: Pins, pull: Pull) -> bytes:
        await asyncio.sleep(0.1)
        return await read(source, links, pull)

    monkeypatch.setattr(CopySource, "read", slow)

    async def story() -> set[tuple[int, int]]:
        heard = set[tuple[int, int]]()
        async with leading(tmp_path, copies=True) as pair:
            for n in range(3):
                pair.put(50, f"m{n}-", f"topic-{n}")
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "FORMAT").write_bytes(b"mine")
            async with pair.following() as standby:
                while not standby.facts.complete:
                    heard |= {(each.copied, each.to_copy) for each in pair.lead.copying.values()}
                    await asyncio.sleep(0.005)
                await pair.all_covered()
                assert not pair.lead.copying
        return heard

    heard = asyncio.run(story())
    totals = {total for _, total in heard if total}
    assert len(totals) == 1, "one round"
    assert any(0 < done < total for done, total in heard)
    assert all(done <= total for done, total in heard)
