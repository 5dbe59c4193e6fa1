"""Facts about syncs, copies and links in backups, restores and dropped topics."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.trust.simulation_disk import Drive, Process
from turtlemq import backup as b
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.storage.door import Door


class Roomy(Process):
    """On a disk that never fills."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 40


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_changed_file_of_equal_length_is_copied_again(tmp_path: Path) -> None:
    root, name = tmp_path / "data", ""
    for attempts in (3, 5):
        engine = Engine.open(root)
        engine.configure("t", max_attempts=attempts)
        engine.close()
        name, _ = b.make(Door(), b.files_of_stopped(Door(), root), tmp_path / "backups", attempts)
    b.restore(Door(), tmp_path / "backups" / name, tmp_path / "again")
    engine = Engine.open(tmp_path / "again")
    assert engine.configure("t").max_attempts == 5
    engine.close()


def test_what_is_written_after_the_pin_is_not_in_the_backup(tmp_path: Path) -> None:
    """Or its files would be of several moments, which no recovery is made for."""
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"x", 10, id="a")], 0)
    lengths: dict[str, int] = {}
    for so_far in b.pin(engine.door, engine.root, "p"):
        lengths = so_far
    engine.submit("t", [Message(b"x", 10, id="b")], 0)
    name, made = b.make(Door(), b.pinned(Door(), engine.root, "p"), tmp_path / "backups", 0, live=True)
    assert {path: entry.bytes for path, entry in made.files.items()} == lengths
    engine.close()
    b.restore(Door(), tmp_path / "backups" / name, tmp_path / "again")
    engine = Engine.open(tmp_path / "again")
    assert [engine.get("t", id_) is not None for id_ in "ab"] == [True, False]
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_backup_and_restored_folder_survive_a_power_cut(tmp_path: Path, seed: int) -> None:
    engine = Engine.open(tmp_path / "data")
    for topic in ("t", "u"):
        engine.submit(topic, [Message(b"x", 10, id="a")], 0)
    engine.close()
    drive = Drive(tmp_path / "disk")
    process = Roomy(drive)
    name, _ = b.make(process, b.files_of_stopped(process, tmp_path / "data"), drive.root / "backups", 0)
    b.restore(process, drive.root / "backups" / name, drive.root / "again")
    before = contents(drive.root)
    process.die()
    drive.cut(Random(seed))
    assert contents(drive.root) == before


@pytest.mark.parametrize("seed", range(6))
def test_a_dropped_topic_stays_gone_after_a_power_cut(tmp_path: Path, seed: int) -> None:
    drive = Drive(tmp_path / "disk")
    process = Process(drive)
    engine = Engine.open(drive.root, door=process)
    engine.submit("t", [Message(b"x", 10, id="a")], 0)
    engine.drop_topic("t")
    process.die()
    drive.cut(Random(seed))
    engine = Engine.open(drive.root)
    assert set(engine.topics) == set()
    engine.close()
