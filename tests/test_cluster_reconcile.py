"""A standby whose files are made equal to the leader's: wiped, killed, behind the ring, or an old leader with another tail."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.harness.replica_pair import Pair, leading, until
from tests.trust.failover import compare
from turtlemq.replica import pins, replica_file
from turtlemq.replica.pins import Pins
from turtlemq.storage.door import Door


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def facts_of(folder: Path) -> replica_file.ReplicaFacts:
    facts = replica_file.read(Door(), folder)
    assert facts is not None
    return facts


async def followed(pair: Pair, name: str = "b", load: Callable[[], None] = lambda: None) -> None:
    """Follow until all records are there, and compare."""
    async with pair.following(name) as standby:
        while not standby.facts.complete or name not in pair.lead.standbys:
            load()
            await asyncio.sleep(0)
        lsn = pair.lead.stream.lsn
        await until(lambda: standby.lsn >= lsn and pair.lead.copies(lsn) == 2)
        compare(pair.root / "leader", pair.root / name)
        assert not list((pair.root / "leader" / "SYNC" / "REPLICA").glob("*/*/*"))
        assert standby.progress is None
    assert facts_of(pair.root / name).complete


def test_a_copy_without_position_is_made_equal(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair:
            pair.put(500, "a")
            pair.put(50, "o", "other")
            (tmp_path / "b" / "topic" / "gone" / "dead").mkdir(parents=True)
            (tmp_path / "b" / "topic" / "gone" / "offset").write_bytes(b"x")
            (tmp_path / "b" / "FORMAT").write_bytes(b"something else")
            await followed(pair)
            (done,) = pair.logged("reconcile_done")
            assert done["rounds"] == 1

    run(story())


def test_a_copy_behind_the_ring_pulls_only_the_rest(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, (), ring_bytes=1 << 16, copies=True) as pair:
            async with pair.following():
                pair.put(100, "a")
                await until(lambda: pair.lead.standbys and pair.lead.copies(pair.lead.stream.lsn) == 2)
            for n in range(20):
                pair.put(100, f"b{n}-")
            await followed(pair)
            compare(tmp_path / "leader", tmp_path / "b")

    run(story())


def test_files_are_copied_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit is linked at a moment of its own, while messages are put and topics come and go."""
    monkeypatch.setattr(pins, "FILES_AT_ONCE", 1)

    async def story() -> None:
        async with leading(tmp_path, (), copies=True) as pair:
            for n in range(12):
                pair.put(20, "m", f"t{n}")
            number = 0

            def load() -> None:
                nonlocal number
                number += 1
                pair.put(3, f"x{number}-", f"t{number % 12}")
                if number % 5 == 0:
                    pair.engine.drop_topic(f"t{number % 12}")

            for turn in range(4):
                if turn % 2:
                    shutil.rmtree(tmp_path / "b")
                else:
                    (tmp_path / "b").mkdir(exist_ok=True)
                    (tmp_path / "b" / "FORMAT").write_bytes(b"another")
                    (tmp_path / "b" / "REPLICA").unlink(missing_ok=True)
                await followed(pair, load=load)

    run(story())


def test_links_of_several_steps_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "FILES_AT_ONCE", 1)

    async def story() -> None:
        async with leading(tmp_path, (), copies=True) as pair:
            pair.put(1, "m", "a")
            pair.put(1, "m", "b")
            made = Pins(tmp_path / "links")
            lsns = []
            for _ in pins.pin(Door(), tmp_path / "leader", pair.lead.stream, made):
                lsns.append(pair.lead.stream.lsn)
                pair.put(1, f"n{len(lsns)}", "a")
            assert made.units == {"": lsns[0], "topic/a": lsns[1], "topic/b": lsns[2]}
            assert made.lsn == lsns[0]

    run(story())


def test_links_are_made_under_the_lock_of_the_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, (), copies=True) as pair:
            pair.put(1)

            class Watching(Door):
                def link(self, source: Path, target: Path) -> None:
                    assert pair.lead.stream.lock.locked()  # type: ignore[attr-defined]
                    super().link(source, target)

            list(pins.pin(Watching(), tmp_path / "leader", pair.lead.stream, Pins(tmp_path / "links")))

    run(story())


def test_a_member_is_not_copied_while_it_counts(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair:
            pair.put(10)
            may = False
            unfit: list[str] = []
            pair.lead.may_sync, pair.lead.unfit = (lambda _: may), unfit.append
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "FORMAT").write_bytes(b"mine")
            async with pair.following() as standby:
                await until(lambda: pair.logged("refused_by_leader"))
                assert (tmp_path / "b" / "FORMAT").read_bytes() == b"mine"
                assert unfit == ["b"]
                may = True
                standby.may_sync = lambda: False
                await until(lambda: len(pair.logged("refused_by_leader")) > 1)
                assert (tmp_path / "b" / "FORMAT").read_bytes() == b"mine"
                standby.may_sync = lambda: True
                await until(lambda: standby.facts.complete and pair.lead.standbys)
                compare(tmp_path / "leader", tmp_path / "b")

    run(story())


def test_a_copy_under_way_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "FILES_AT_ONCE", 1)

    async def story() -> None:
        async with leading(tmp_path, copies=True, min_isr=2) as pair:
            pair.put(10)
            pair.put(10, "o", "other")
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "FORMAT").write_bytes(b"mine")
            seen = 0
            async with pair.following() as standby:
                while not standby.facts.complete:
                    if facts_of(tmp_path / "b").complete:
                        await until(lambda: standby.facts.complete)  # it is written first, and known then
                        break
                    if pair.lead.copying:
                        seen += 1
                        assert not pair.lead.standbys
                        assert pair.lead.copies(1) == 1
                        assert not pair.lead.has(1)
                        pair.put(1, f"x{seen}")
                    await asyncio.sleep(0)
                assert seen
                assert facts_of(tmp_path / "b").complete
                await pair.all_covered()
                compare(tmp_path / "leader", tmp_path / "b")

    run(story())


def test_links_of_a_copy_that_ended_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "leader" / "SYNC" / "REPLICA" / "7"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"x")

    async def story() -> None:
        async with leading(tmp_path, copies=True):
            assert not left.exists()

    run(story())
