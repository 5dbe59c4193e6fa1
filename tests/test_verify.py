"""Comparison of all copies at one LSN: equal under load, a rotten byte found with its place, copies that are not reached."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import everything
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import pair_of
from tests.harness.replica_pair import Pair, leading, until
from tests.harness.rotten_bytes import FAST, rot, segment_of
from tests.harness.server_process import running
from turtlemq.replica import pictures, pins, verify
from turtlemq.replica.differences import differences
from turtlemq.replica.frames import Verified, Verify
from turtlemq.replica.lead_types import Attached
from turtlemq.replica.manifest import PIECE_BYTES, FileState
from turtlemq.replica.stream import Entry
from turtlemq.replica.verify import Verifier
from turtlemq.storage.door import Door


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def verifier(pair: Pair, bytes_per_s: float = FAST) -> Verifier:
    made = Verifier(pair.lead, pair.root / "leader", bytes_per_s)
    pair.lead.heard = lambda member, frame: None if made.heard(member, frame) else pytest.fail("not for it")
    return made


def test_equal_copies_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "FILES_AT_ONCE", 1)

    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            for n in range(10):
                pair.put(20, "m", f"t{n}")
            await pair.all_covered()
            comparing = verifier(pair).begin()
            number = 0
            while not comparing.done():
                number += 1
                pair.put(3, f"x{number}-", f"t{number % 12}")
                if number % 7 == 0:
                    pair.engine.drop_topic(f"t{number % 12}")
                await asyncio.sleep(0)
            report = comparing.result()
            assert (report.state, report.why) == ("done", "")
            assert report.copies["b"].state == "equal", report.copies
            assert report.files > 10
            assert report.bytes == report.bytes_total > 10_000
            assert report.last_lsn > report.lsn
            for name in ("leader", "b"):
                assert not list((tmp_path / name / "SYNC" / "VERIFY").glob("*"))

    run(story())


def test_a_changed_byte_is_found_with_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            pair.put(100)
            pair.put(100, "o", "other")
            await pair.all_covered()
            file = segment_of(pair.root / "b")
            rot(file, 5_000)
            checking = verifier(pair)
            report = await checking.verify()
            assert report.differing == 1
            (found,) = report.copies["b"].files
            path = f"topic/t/{file.name}"
            assert (found.path, found.ranges, found.why) == (path, [(0, file.stat().st_size)], "its bytes differ")
            rot(file, 5_000)
            assert (await checking.verify()).differing == 0
            (tmp_path / "b" / "FORMAT").unlink()
            (found,) = (await checking.verify()).copies["b"].files
            assert (found.path, found.why) == ("FORMAT", "it is missing")

    run(story())


def test_copies_that_are_away_are_not_reached(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ("b", "c"), copies=True) as pair, pair.following():
            pair.put(10)
            await until(lambda: pair.lead.standbys)
            report = await verifier(pair).verify()
            states = {member: (copy.state, copy.why) for member, copy in report.copies.items()}
            assert states == {"b": ("equal", ""), "c": ("not reached", "it is away")}

    run(story())


def test_a_standby_that_leaves_meanwhile_is_not_reached(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair:
            async with pair.following(bulk_bytes_per_s=1.0) as standby:
                pair.put(10)
                await pair.all_covered()
                comparing = verifier(pair).begin()
                await asyncio.sleep(0.1)
                assert standby.link is not None
                standby.link.close("gone", at_once=True)
                report = await comparing
            assert (report.copies["b"].state, report.copies["b"].why) == ("not reached", "its connection has ended")

    run(story())


def test_a_silent_standby_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "GRACE_S", 0.2)

    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            pair.put(10)
            await pair.all_covered()
            made = verifier(pair)
            pair.lead.heard = lambda *_: None
            assert (await made.verify()).copies["b"].why == "it did not answer in time"

    run(story())


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ()) as pair:
            pair.put(10)
            checking = verifier(pair)
            assert checking.begin() is (first := checking.begin())
            report = await checking.verify()
            assert first.result() is report is checking.report
            assert await checking.begin() is not report

    run(story())


def test_a_file_that_differs_for_a_moment_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            pair.put(10)
            await pair.all_covered()
            real, turns = pictures.sums_of, 0

            def changed(*args: Any) -> list[FileState]:
                nonlocal turns
                turns += 1
                first = turns == 1
                found = real(*args)
                return found[:-1] if first else found

            monkeypatch.setattr(pictures, "sums_of", changed)
            report = await verifier(pair).verify()
            assert report.copies["b"].state == "equal"
            assert turns > 2

    run(story())


def test_questions_stand_between_two_records() -> None:
    class Wire:
        def __init__(self) -> None:
            self.sent: list[object] = []

        def send(self, frame: object) -> None:
            self.sent.append(frame)

        def send_records(self, entries: list[Entry]) -> None:
            self.sent += [entry.chain for entry in entries]

    wire = Wire()
    standby = Attached("b", None, wire, sent=5, acked=0, caught_up_s=0)  # type: ignore[arg-type]
    standby.send_behind(7, first := Verify(1, [""], 7))
    standby.send_behind(7, second := Verify(2, [""], 7))
    records = [Entry(number, b"", b"", b"", 0) for number in range(6, 10)]
    standby.send(records)
    assert (wire.sent, standby.sent) == ([6, 7, first, second], 7)
    standby.send(records[2:])
    standby.send_behind(9, first)
    assert wire.sent[4:] == [8, 9, first]


def test_a_standby_at_another_record_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            pair.put(10)
            await pair.all_covered()
            answers: list[Verified] = []
            pair.lead.heard = lambda _, frame: answers.append(frame)  # type: ignore[arg-type]
            lsn = pair.lead.stream.lsn
            pair.lead.standbys["b"].link.send(Verify(1, [""], lsn + 1))
            await until(lambda: answers)
            assert answers[0].why == f"it is at record {lsn:,}, not at {lsn + 1:,}"

    run(story())


def test_differences_are_told_by_pieces() -> None:
    size = 3 * PIECE_BYTES + 5
    own = [FileState("a", size, [1, 2, 3, 4]), FileState("x.tmp", 1, [1])]
    assert differences(own, own[:1]) == []
    (found,) = differences(own, [FileState("a", size, [9, 9, 3, 9])])
    assert found.ranges == [(0, 2 * PIECE_BYTES), (3 * PIECE_BYTES, size)]
    (found,) = differences(own, [FileState("a", size - 5, [1, 2, 3])])
    assert (found.ranges, found.why) == ([(3 * PIECE_BYTES, size)], f"it has {size - 5:,} bytes, not {size:,}")
    (found,) = differences([], own[:1])
    assert found.why == "only this copy has it"


def test_pictures_are_read_at_a_pace(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_bytes(b"x" * 1_000)
    (tmp_path / "HASH_SEED").write_bytes(b"y" * 1_000)
    counted: list[int] = []
    door = Door()
    picture = pictures.take(door, tmp_path, [""], 1)
    (tmp_path / "FORMAT").unlink()
    files = pictures.sums_of(picture, 1e4, counted.append)
    assert [(file.path, file.size) for file in files] == [("FORMAT", 1_000), ("HASH_SEED", 1_000)]
    assert counted == [1_000, 1_000]
    assert not picture.folder.exists()


# Real processes


@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_a_server_compares_its_copies(tmp_path: Path) -> None:
    path = "/v1/cluster/shards/0/verify"
    with running_etcd(tmp_path) as endpoint, pair_of(tmp_path, endpoint) as (_, first, standby):
        leader = first.server
        assert leader.ok("GET", path)["state"] == "none"
        everything(leader)
        done = leader.ok("POST", path)
        assert done["state"] == "done"
        assert done["files"] > 5
        assert [(copy["node"], copy["state"]) for copy in done["copies"]] == [(standby.name, "equal")]
        assert leader.ok("GET", path) == done
        (file,) = (standby.data / "topic" / "other").glob("delay_*.bson")
        rot(file, 100)
        (copy,) = leader.ok("POST", path)["copies"]
        assert copy["state"] == "differs"
        assert copy["files"][0]["path"] == f"topic/other/{file.name}"
        assert leader.call("POST", "/v1/cluster/shards/1/verify").code == "UNKNOWN_SHARD"
        assert leader.call("POST", path, headers={"X-Turtlemq-Budget-Ms": "1"}).status in (200, 504)


def test_a_single_node_has_no_copies(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        assert server.call("POST", "/v1/cluster/shards/0/verify").code == "NO_CLUSTER"
