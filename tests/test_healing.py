"""Bytes that rot: found by scrub, by comparison or by the engine, healed from a copy that has them, and never spread."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import pytest

from tests.harness.replica_pair import Pair, leading, until
from tests.harness.rotten_bytes import FAST, rot, segment_of
from tests.trust.failover import compare
from turtlemq.engine import Engine
from turtlemq.errors import Conflict
from turtlemq.model import Message
from turtlemq.replica import replica_file
from turtlemq.replica.examine_process import Answer, Request, examine
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.frames import Examine
from turtlemq.replica.healing import LeaderCare
from turtlemq.replica.inspector import examined
from turtlemq.replica.scrub import Scrub
from turtlemq.replica.standby import Standby
from turtlemq.replica.standby_care import StandbyCare
from turtlemq.segment.file_check import damage_in
from turtlemq.storage.door import Door


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 90))


@dataclass
class Cared:
    """A pair whose leader cares for its copies."""

    pair: Pair
    care: LeaderCare
    examiner: Examiner
    standby: Standby
    handed: list[str] = field(default_factory=list)
    distrusted: list[str] = field(default_factory=list)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return self.pair.logged(event)

    async def settle(self) -> None:
        await self.pair.all_covered()

    async def again(self) -> None:
        """The standby compares its files."""
        before = len(self.logged("reconcile_done"))
        self.standby.distrust(["FORMAT"])
        await until(lambda: len(self.logged("reconcile_done")) > before and self.pair.lead.standbys)

    async def scrub_standby(self) -> None:
        await StandbyCare(self.standby, self.pair.root / "b", FAST, log=self.pair.log).scrub.examine_all()

    async def scrub_leader(self) -> None:
        await Scrub(self.pair.root / "leader", self.examiner, FAST, self.care.scrubbed).examine_all()


@asynccontextmanager
async def cared(root: Path, batches: int = 5) -> AsyncIterator[Cared]:
    async with leading(root, copies=True) as pair:
        examiner = Examiner(root / "leader")
        care = LeaderCare(pair.lead, root / "leader", examiner, FAST, log=pair.log)
        try:
            async with pair.following() as standby:
                for n in range(batches):
                    pair.put(20, f"m{n}-")
                await pair.all_covered()
                made = Cared(pair, care, examiner, standby)

                async def handover(node: str) -> None:
                    made.handed.append(node)

                care.handover, care.distrust = handover, made.distrusted.extend
                yield made
        finally:
            await examiner.rest_now()


def damaged(file: Path) -> list[Any]:
    return damage_in(Door(), file, whole=False)


def test_a_rotten_byte_of_a_standby_is_healed(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            file = segment_of(tmp_path / "b")
            os.utime(file, ns=(1, time.time_ns() - 10**10))  # its checksums are noted from now on
            rot(file, 3_000)
            assert damaged(file)
            await world.scrub_standby()
            await until(lambda: world.logged("healed"))
            await until(lambda: world.pair.lead.standbys)
            await world.settle()
            compare(tmp_path / "leader", tmp_path / "b")
            assert damaged(file) == []
            assert world.standby.healed == 1
            assert world.standby.facts.suspect == ()
            (found,) = world.logged("copy_damaged")
            assert found["file"] == f"topic/t/{file.name}"
            assert world.handed == []

    run(story())


def test_a_standby_heals_though_its_checksums_are_noted(tmp_path: Path) -> None:
    """A rotten byte changes neither the time nor the length of a file."""

    async def story() -> None:
        async with cared(tmp_path) as world:
            file = segment_of(tmp_path / "b")
            before = file.stat().st_mtime_ns - 10**10
            os.utime(file, ns=(before, before))
            world.standby.distrust(["FORMAT"])  # a comparison, which notes all checksums
            await until(lambda: world.standby.healed == 1 and world.pair.lead.standbys)
            inode = file.stat().st_ino
            rot(file, 3_000)
            await world.scrub_standby()
            await until(lambda: world.standby.healed == 2 and world.pair.lead.standbys)
            assert damaged(file) == []
            assert file.stat().st_ino != inode

    run(story())


def test_a_suspect_file_is_remembered_over_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair:
            async with pair.following():
                for n in range(5):
                    pair.put(20, f"m{n}-")
                await pair.all_covered()
            file = segment_of(tmp_path / "b")
            rot(file, 3_000)
            facts = replica_file.read(Door(), tmp_path / "b")
            assert facts is not None
            replica_file.write(Door(), tmp_path / "b", replace(facts, suspect=(f"topic/t/{file.name}",)))
            async with pair.following() as standby:
                await until(lambda: standby.healed)
                await pair.all_covered()
            assert damaged(file) == []
            healed = replica_file.read(Door(), tmp_path / "b")
            assert healed is not None
            assert healed.suspect == ()

    run(story())


@pytest.mark.parametrize("by", ["scrub", "engine", "verify"])
def test_a_leader_with_a_rotten_byte_hands_over(tmp_path: Path, by: str) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            file = segment_of(tmp_path / "leader")
            path = f"topic/t/{file.name}"
            rot(file, 3_000)
            if by == "scrub":
                await world.scrub_leader()
            elif by == "engine":
                holes = damaged(file)
                await world.care.engine_found({"t": holes})
                await world.care.engine_found({"t": holes})
            else:
                assert (await world.care.verifier.verify()).differing == 1
            await until(lambda: world.handed)
            assert world.handed == ["b"]
            assert world.distrusted == [path]
            assert damaged(segment_of(tmp_path / "b")) == []
            assert world.logged("copy_damaged")[0]["file"] == path

    run(story())


def test_damage_that_all_copies_have_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            files = [segment_of(tmp_path / name) for name in ("leader", "b")]
            for file in files:
                rot(file, 3_000)
            before = [file.read_bytes() for file in files]
            await world.scrub_standby()
            await world.scrub_leader()
            await world.scrub_leader()
            assert len(world.logged("damaged_everywhere")) >= 2
            assert world.handed == world.distrusted == []
            assert not world.logged("healed")
            assert [file.read_bytes() for file in files] == before

    run(story())


def test_a_handover_that_fails_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:

            async def refuse(_: str) -> None:
                raise Conflict("not now")

            rot(segment_of(tmp_path / "leader"), 3_000)
            handover, world.care.handover = world.care.handover, refuse
            await world.scrub_leader()
            assert world.logged("handover_failed")
            world.care.handover = handover
            await world.scrub_leader()
            assert world.handed == ["b"]

    run(story())


def test_a_comparison_heals_a_copy_that_differs(tmp_path: Path) -> None:
    """Also where no checksum of the file itself tells it: the leader's bytes count."""

    async def story() -> None:
        async with cared(tmp_path) as world:
            world.pair.engine.configure("t", max_attempts=7)
            await world.settle()
            (tmp_path / "b" / "topic" / "t" / "topic.toml").write_text("another")
            rot(segment_of(tmp_path / "b"), 3_000)
            report = await world.care.verifier.verify()
            assert len(report.copies["b"].files) == 2
            assert world.care.differing == 1
            await until(lambda: world.standby.healed == 2 and world.pair.lead.standbys)
            await world.settle()
            compare(tmp_path / "leader", tmp_path / "b")
            assert (await world.care.verifier.verify()).differing == 0
            assert world.care.differing == 0
            assert world.handed == []

    run(story())


def test_a_copy_keeps_bytes_that_have_rotted_with_the_leader(tmp_path: Path) -> None:
    """It compares all files, as after a restart, and the leader does not know of its damage yet."""

    async def story() -> None:
        async with cared(tmp_path) as world:
            theirs, own = segment_of(tmp_path / "leader"), segment_of(tmp_path / "b")
            good = own.read_bytes()
            rot(theirs, 3_000)
            world.standby.distrust(["FORMAT"])
            await until(lambda: world.standby.healed and world.pair.lead.standbys)
            await world.settle()
            assert own.read_bytes() == good
            await world.scrub_leader()
            assert world.handed == ["b"]

    run(story())


@pytest.mark.parametrize("places", [(3_000, 4_000), (2_000, 3_000, 9_000)])
def test_a_copy_keeps_all_bytes_that_have_rotted_with_the_leader(tmp_path: Path, places: tuple[int, ...]) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            theirs, own = segment_of(tmp_path / "leader"), segment_of(tmp_path / "b")
            good = own.read_bytes()
            for place in places:
                rot(theirs, place)
            world.standby.distrust(["FORMAT"])
            await until(lambda: world.standby.healed and world.pair.lead.standbys)
            assert own.read_bytes() == good

    run(story())


@pytest.mark.parametrize("noted", [False, True])
def test_damage_that_a_new_copy_gets_is_named_and_healed(tmp_path: Path, noted: bool) -> None:
    """The leader's byte has rotted before it was copied, perhaps after the checksum of its file was noted."""

    async def story() -> None:
        async with cared(tmp_path) as world:
            pair, file = world.pair, segment_of(tmp_path / "leader")
            path, good = f"topic/t/{file.name}", file.read_bytes()
            if noted:
                os.utime(file, ns=(1, time.time_ns() - 10**10))
                await world.again()
                assert path in (tmp_path / "leader" / "REPLICA.sums").read_text()
            rot(file, 3_000)
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "FORMAT").write_bytes(b"mine")
            async with pair.following("c") as standby:
                await until(lambda: "c" in pair.lead.standbys)
                (damage,) = pair.logged("copied_damage")
                assert damage["file"] == path
                assert damage["position"] <= 3_000 < damage["position"] + damage["length"]
                assert list(standby.facts.suspect) == [path]
                await StandbyCare(standby, tmp_path / "c", FAST, log=pair.log).look()
                await until(lambda: world.handed)
                assert world.handed == ["b"], "the leader looks at its own file, and lets a healthy copy lead"
                file.write_bytes(good)  # as with the next leader
                healed = len(pair.logged("healed"))
                standby.distrust(["FORMAT"])
                await until(lambda: len(pair.logged("healed")) > healed)
                assert not standby.facts.suspect
            assert segment_of(tmp_path / "c").read_bytes() == good

    run(story())


def test_files_of_an_unfinished_copy_are_checked_by_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            pair, file = world.pair, segment_of(tmp_path / "leader")
            rot(file, 3_000)
            shutil.copytree(tmp_path / "leader" / "topic", tmp_path / "c" / "topic")  # all files are there
            async with pair.following("c") as standby:
                await until(lambda: "c" in pair.lead.standbys)
                assert standby.facts.suspect == (f"topic/t/{file.name}",)

    run(story())


def test_another_tail_is_not_kept_for_damage_of_the_leader(tmp_path: Path) -> None:
    """Bytes around the damage differ: this is another history, not the same one without damage."""

    async def story() -> None:
        async with cared(tmp_path) as world:
            theirs, own = segment_of(tmp_path / "leader"), segment_of(tmp_path / "b")
            rot(theirs, 3_000)
            rot(own, 5_000)
            world.standby.distrust(["FORMAT"])
            await until(lambda: world.standby.healed and world.pair.lead.standbys)
            await world.settle()
            assert own.read_bytes() == theirs.read_bytes()

    run(story())


def test_questions_about_other_paths_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            for path, why in (
                ("../secret", "this is no replicated file"),
                ("topic/t/delay_9999999999.bson", "it does not exist"),
            ):
                answer = await examined(world.examiner, Examine(1, path, 0, 1), FAST)
                assert (answer.good, answer.why) == (False, why)
            answer = await examined(world.examiner, Examine(1, "FORMAT", 0, 1), FAST)
            assert answer.good

    run(story())


def test_the_process_that_examines_may_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with cared(tmp_path) as world:
            path = f"topic/t/{segment_of(tmp_path / 'leader').name}"
            assert (await world.examiner.examine(path, FAST)).bytes > 1_000
            process = world.examiner._process
            assert process is not None
            process.kill()
            await process.wait()
            assert (await world.examiner.examine(path, FAST)).error
            assert (await world.examiner.examine(path, FAST)) == examine(Request(str(tmp_path / "leader" / path), False, FAST))
            await world.examiner.rest()
            assert (await world.examiner.examine("FORMAT", FAST)) == Answer()

    run(story())


def test_every_kind_of_file_is_checked(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"x", due_ms=10**12, id=f"i{n}") for n in range(50)], now_ms=0)
    engine.submit("t", [Message(b"y", due_ms=0, id=f"d{n}") for n in range(50)], now_ms=0)
    engine.tick(10)
    engine.close()
    checked = set()
    for file in sorted((tmp_path / "data").rglob("*")):
        if not file.is_file() or (
            file.suffix not in (".bson", ".run", ".index", ".dead") and file.name not in ("offset", "CLEAN")
        ):
            continue
        request = Request(str(file), False, FAST)
        assert examine(request).damage == [], file
        rot(file, 30)
        assert examine(request).damage, file
        checked.add(file.name if file.name in ("offset", "CLEAN") else file.suffix)
    assert {".bson", "offset", "CLEAN"} <= checked
    assert examine(Request(str(tmp_path / "none.bson"), False, FAST)).gone


def test_passes_of_scrub_go_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turtlemq.replica.scrub.PAUSE_S", 0.01)

    async def story() -> None:
        async with cared(tmp_path) as world:
            passed: list[int] = []

            async def compare_all() -> None:
                passed.append(scrub.files)
                if len(passed) == 1:
                    raise OSError("the disk is busy")

            scrub = Scrub(tmp_path / "leader", world.examiner, FAST, world.care.scrubbed, compare_all, log=world.pair.log)
            running = asyncio.create_task(scrub.run(first_s=0, cycle_s=0))
            await until(lambda: len(passed) > 1, 30)
            running.cancel()
            assert 0 < passed[0] < passed[1]
            assert scrub.bytes > 1_000
            assert world.logged("scrub_failed")
            assert world.logged("scrubbed")[0]["files"] == passed[0]

    run(story())


def test_examining_process_ends_quietly_without_reader(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    command = (sys.executable, "-m", "turtlemq.replica.examine_process")
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # the replica process was killed
        process.stdin.write(msgspec.json.encode(Request(str(path), True, 1e9)) + b"\n")
        process.stdin.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"")
