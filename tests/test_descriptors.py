"""Running out of file descriptors is back-pressure: a step is refused and changes nothing, no topic stops, and all goes on once
there are descriptors again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from turtlemq.engine import Engine
from turtlemq.errors import OutOfFiles
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter

T = TypeVar("T")

SETTINGS = Settings(segment_bytes=4_096, beat_ms=1_000, max_attempts=1, run_messages=1_000)


class Crowded(Door):
    """While `out` is set, the process has no free descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.out = False

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if self.out and name in ("open", "listdir"):
            raise OSError(errno.EMFILE, "Too many open files")
        return super()._call(name, path, action, *args)


def messages(count: int, first: int = 0, due_ms: int = 0) -> list[Message]:
    return [Message(b"x" * 400, due_ms, f"m{first + i}") for i in range(count)]


def open_engine(folder: Path) -> tuple[Engine, Crowded]:
    door = Crowded()
    return Engine.open(folder, door=door, settings=SETTINGS), door


def logs(root: Path) -> list[Path]:
    return list((root / "topic" / "t").glob("*.bson"))


def drain(engine: Engine, now_ms: int) -> list[str]:
    """Deliver and acknowledge everything that is due."""
    ids: list[str] = []
    while True:
        while (wake := engine.tick(now_ms)) is not None and wake <= now_ms:
            pass
        if not (got := engine.reserve("t", "g", 1_000, now_ms).ids):
            return ids
        assert engine.ack("t", "g", got, now_ms).acked == len(got)
        ids += got


def test_a_roll_without_descriptors_refuses_the_put_and_no_more(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    engine.submit("t", messages(9), 0)
    door.out = True
    with pytest.raises(OutOfFiles) as refused:
        engine.submit("t", messages(9, 9), 1)
    assert (refused.value.status, refused.value.code, refused.value.details) == (503, "UNAVAILABLE", {"retry_after_ms": 1_000})
    assert engine.topic("t").stopped is None
    door.out = False
    assert engine.submit("t", messages(9, 9), 2).created == [True] * 9
    assert sorted(drain(engine, 10)) == sorted(f"m{i}" for i in range(18))
    assert engine.check() == []
    engine.close()


def test_handoffs_fetches_and_acks_wait_for_descriptors(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    engine.submit("t", messages(40), 0)
    door.out = True
    engine.tick(1)
    assert isinstance(engine.trouble["t"], OutOfFiles)
    assert engine.topic("t").stopped is None
    door.out = False
    engine.tick(2_000)
    assert engine.trouble == {}
    refused = 0
    for now in range(2_001, 2_401):
        door.out = now % 2 == 1
        try:
            held = engine.reserve("t", "g", 1, now).ids
            engine.ack("t", "g", held if now % 3 else [f"-{id_}" for id_ in held], now)
        except OutOfFiles:
            assert door.out
            refused += 1
        assert engine.topic("t").stopped is None
    door.out = False
    assert refused, "journals were rolled while there were no descriptors"
    engine.tick(4_000)
    assert engine.check() == []
    stats = engine.stats("t")
    assert stats.ready + stats.reserve + stats.history + stats.dead == 40
    engine.close()


def test_retention_without_descriptors_removes_nothing(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    engine.configure("t", history_hours=0)
    for first in range(0, 60, 6):
        engine.submit("t", messages(6, first), first)
        drain(engine, first + 1)
    topic = engine.topic("t")
    topic.checkpoint()
    assert len(logs(tmp_path)) > 10
    for now in range(100_000, 400_000, 61_000):
        door.out = True
        engine.tick(now)
        assert topic.stopped is None
    assert len(logs(tmp_path)) > 10
    door.out = False
    for now in range(500_000, 900_000, 61_000):
        engine.tick(now)
    assert engine.trouble == {}
    assert len(logs(tmp_path)) < 6
    assert engine.check() == []
    engine.close()


def test_dead_letters_wait_in_memory_until_there_are_descriptors(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    engine.submit("t", messages(30), 0)
    engine.tick(1)
    held = engine.reserve("t", "g", 30, 2).ids
    assert len(held) == 30
    door.out = True
    assert engine.ack("t", "g", [f"-{id_}" for id_ in held], 3).failed == 30, "none is dead yet"
    assert engine.topic("t").stopped is None
    door.out = False
    for now in range(2_000, 200_000, 1_000):
        engine.tick(now)
        if got := engine.reserve("t", "g", 30, now).ids:
            engine.ack("t", "g", [f"-{id_}" for id_ in got], now)
    assert engine.stats("t").dead == 30
    letters = list(engine.topic("t").view.dead_letters.all(Filter()))
    door.out = True
    try:
        engine.requeue("t", letters, 300_000)
    except OutOfFiles:
        assert engine.stats("t").dead == 30
    door.out = False
    assert engine.topic("t").stopped is None
    assert engine.check() == []
    engine.close()


def test_a_topic_is_opened_once_there_are_descriptors(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    door.out = True
    with pytest.raises(OutOfFiles):
        engine.submit("t", messages(1), 0)
    door.out = False
    assert engine.submit("t", messages(1), 0).created == [True]
    engine.close()


def test_cached_readers_give_way_to_files_that_are_needed(tmp_path: Path) -> None:
    door = Crowded()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    assert door.read_all(tmp_path / "a") == b"1"
    used: list[str] = []

    def opens(name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        used.append(name)
        if name == "open" and used.count("open") == 1:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return action(*args)

    door._call = opens  # type: ignore[method-assign]
    assert door.read_all(tmp_path / "b") == b"1"
    assert used == ["stat", "open", "open", "read"]
    door.shut()
