"""A standby at work: backups of its folder, reads of it and checks, while it follows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import Producers, eventually, everything, put
from tests.harness.replica_nodes import running_pair
from tests.harness.replica_pair import leading, until
from turtlemq import backup
from turtlemq.engine import Engine
from turtlemq.errors import Unavailable
from turtlemq.replica import replica_file
from turtlemq.storage.door import Door


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def turtlemq(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "turtlemq", *map(str, words)], capture_output=True, text=True, check=False)


def test_pins_are_made_between_two_records(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following() as standby:
            pair.put(20)
            await pair.all_covered()
            seen: list[bool] = []

            def look() -> None:
                before = standby.lsn
                pair.put(50, "more")  # records that wait until this is over
                seen.extend(standby.lsn == before for _ in range(20))

            await standby.between_records(look)
            await pair.all_covered()
            assert all(seen)

    run(story())


def test_a_copy_that_is_not_complete_is_no_backup(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ()) as pair:
            standby = pair.standby()
            standby.mark(False, 0)
            with pytest.raises(Unavailable, match="made equal"):
                await standby.between_records(lambda: None)
            await standby.stop()

    run(story())


def test_a_backup_of_a_standby_that_follows(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (_, first, second):
        leader, standby, data = first.server, second.server, second.data
        everything(leader)
        producers = Producers(leader, 2)
        eventually(lambda: len(producers.answered) > 10)
        before = list(producers.answered)
        made = turtlemq("backup", tmp_path / "backups", "--data", data, "--url", standby.url, "--json")
        producers.end()
        assert made.returncode == 0, made.stderr
        found = json.loads(made.stdout)
        assert found["live"]
        assert found["damage"] == []
        assert list((data / "PINNED").iterdir()) == [data / "PINNED" / "LOCK"]
        names = {path.name for path in Path(found["backup"]).iterdir()}
        assert not names & {"REPLICA", "REPLICA.sums", "LOCK", "SYNC", "DIVERGED"}
        restored = turtlemq("restore", tmp_path / "backups", "--data", tmp_path / "restored")
        assert restored.returncode == 0, restored.stderr
    engine = Engine.open(tmp_path / "restored")
    assert engine.check() == []
    for id_ in before:
        assert engine.message("t", id_) is not None
    engine.close()


def test_pins_in_use_outlive_the_opening_of_the_folder(tmp_path: Path) -> None:
    """A standby that becomes leader opens its folder while a backup copies its pins."""
    data = tmp_path / "data"
    engine = Engine.open(data)
    engine.topic("t", create=True)
    engine.close()
    door = Door()
    backup.prepare_pins(door, data)
    lock = door.lock(data / "PINNED" / "LOCK")
    list(backup.pin(door, data, "1"))
    assert backup.prepare_pins(door, data) == {}
    assert (data / "PINNED" / "1" / "PINS.json").exists()
    door.close(lock)
    backup.prepare_pins(door, data)
    assert not (data / "PINNED" / "1").exists()


def test_check_and_backup_find_the_shard_of_a_node(tmp_path: Path) -> None:
    shard = tmp_path / "node" / "shard" / "00"
    engine = Engine.open(shard)
    engine.topic("t", create=True)
    engine.close()
    facts = replica_file.ReplicaFacts("prod", 0, "r", False, 3, suspect=("topic/t/offset",))
    replica_file.write(Door(), shard, facts)
    checked = turtlemq("check", "--data", tmp_path / "node", "--json")
    assert checked.returncode == 0, checked.stderr
    notes = json.loads(checked.stdout)["notes"]
    assert any("topic/t/offset has damage" in note for note in notes)
    assert any("not complete" in note for note in notes)
    assert turtlemq("backup", tmp_path / "backups", "--data", tmp_path / "node").returncode == 0
    other = tmp_path / "node" / "shard" / "01"
    Engine.open(other).close()
    (other / "FORMAT").write_bytes(b"99\n")
    both = turtlemq("check", "--data", tmp_path / "node")
    assert both.returncode != 0, "a folder with several shards is checked as a whole"
    assert "shard/01/FORMAT" in both.stdout + both.stderr
    assert "no data folder" in turtlemq("check", "--data", tmp_path).stderr


def test_a_stopped_standby_can_be_checked(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, copies=True) as pair, pair.following():
            for n in range(5):
                pair.put(20, f"m{n}-")
            await until(lambda: pair.lead.standbys and pair.lead.copies(pair.lead.stream.lsn) == 2)

    run(story())
    checked = turtlemq("check", "--data", tmp_path / "b", "--json")
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout)["problems"] == []
    (file,) = (tmp_path / "b" / "topic" / "t").glob("delay_*.bson")
    shown = turtlemq("inspect", file, "--limit", 3, "--json")
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) == 3


def test_single_messages_are_put_meanwhile(tmp_path: Path) -> None:
    """A pin that is made again and again delays no answer for long."""
    with running_pair(tmp_path) as (_, first, second):
        leader, standby = first.server, second.server
        put(leader, 10, "a")
        for n in range(5):
            pinned = standby.call("POST", "/v1/backup")
            assert pinned.status == 201, pinned.data
            put(leader, 1, f"b{n}-")
            assert standby.call("DELETE", "/v1/backup").status == 200
