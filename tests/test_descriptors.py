"""Running out of file descriptors is back-pressure: a step is refused and changes nothing, no topic stops, and all goes on once
there are descriptors again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from turtlemq.engine import Engine
from turtlemq.errors import OutOfFiles
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.storage.file_budget import FileBudget
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


def test_dead_letters_wait_for_descriptors(tmp_path: Path) -> None:
    engine, door = open_engine(tmp_path)
    engine.submit("t", messages(30), 0)
    engine.tick(1)
    held = engine.reserve("t", "g", 30, 2).ids
    assert len(held) == 30
    door.out = True
    with pytest.raises(OutOfFiles):
        engine.ack("t", "g", [f"-{id_}" for id_ in held], 3)
    assert engine.topic("t").stopped is None
    assert (engine.stats("t").dead, engine.stats("t").reserve) == (0, 30)
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


def open_logs(folder: Path) -> list[str]:
    """Files of topics that this process has open for writing."""
    links = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    writable = [str(link.readlink()) for link in links if link.is_symlink() and link.lstat().st_mode & stat.S_IWUSR]
    return [path for path in writable if path.startswith(str(folder)) and path.endswith(".bson")]


def test_logs_of_many_topics_keep_few_descriptors(tmp_path: Path) -> None:
    door = Door(FileBudget(kept=10, readers=4, saves=2))
    engine = Engine.open(tmp_path, door=door, settings=Settings(beat_ms=60_000))
    most = 0
    for now in range(1, 4):
        for name in (f"t{i}" for i in range(30)):
            engine.submit(name, [Message(b"x", 0, f"{name}-{now}")], now)
            engine.tick(now)
            held = engine.reserve(name, "g", 10, now)
            engine.ack(name, "g", held.ids, now)
            assert len(held) == 1
            most = max(most, len(open_logs(tmp_path)))
    assert most == 10
    assert engine.check() == []
    assert all(engine.stats(name).history == 3 for name in engine.topics)
    engine.close()
    reopened = Engine.open(tmp_path)
    assert all(reopened.stats(name).history == 3 for name in reopened.topics)
    reopened.close()


def test_a_log_that_gives_way_is_synced_first(tmp_path: Path) -> None:
    synced: list[str] = []

    class Noting(Door):
        def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
            if name == "fdatasync" and path is not None:
                synced.append(path.name.partition("_")[0])
            return action(*args)

    engine = Engine.open(tmp_path, door=Noting(FileBudget(kept=1, readers=4, saves=1)), settings=Settings(beat_ms=60_000))
    engine.submit("t", messages(1), 0)
    engine.tick(1)
    engine.submit("t", messages(1, 1), 2)
    engine.tick(3)
    assert engine.topic("t").view.unsynced_handoffs == 1
    synced.clear()
    engine.reserve("t", "g", 10, 4)
    assert "ready" in synced
    assert engine.topic("t").view.unsynced_handoffs == 0
    engine.close()


class Held:
    """A worker whose jobs are run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, work, args))
        return future

    def run(self) -> int:
        jobs, self.jobs = self.jobs, []
        for future, work, args in jobs:
            future.set_result(work(*args))
        return len(jobs)


def begin(engine: Engine, names: list[str]) -> None:
    """Topics with a message that was handed off, and is not synced yet."""
    for now in (0, 2):  # the first tick of a topic writes a checkpoint at once
        for name in names:
            engine.submit(name, [Message(b"x", 0, f"m{now}")], now)
        engine.tick(now + 1)


def test_few_checkpoints_are_under_way_at_once(tmp_path: Path) -> None:
    door, flusher = Door(FileBudget(kept=500, readers=4, saves=2)), Held()
    engine = Engine.open(tmp_path, door=door, flusher=flusher, settings=Settings(beat_ms=100))
    begin(engine, [f"t{i}" for i in range(20)])
    logs = len(open_logs(tmp_path))
    rounds = []
    for now in range(1_000, 1_200, 10):
        engine.tick(now)
        assert len(open_logs(tmp_path)) <= logs + 3 * 2
        rounds.append(flusher.run())
    assert max(rounds) == 2
    assert sum(rounds) == 20, "each topic got its turn"
    assert not open_logs(tmp_path)
    engine.close()


def test_a_dropped_topic_leaves_the_queue_of_checkpoints(tmp_path: Path) -> None:
    door, flusher = Door(FileBudget(kept=500, readers=4, saves=1)), Held()
    engine = Engine.open(tmp_path, door=door, flusher=flusher, settings=Settings(beat_ms=100))
    begin(engine, ["a", "b", "c"])
    engine.tick(1_000)
    assert flusher.run() == 1
    engine.drop_topic("b")
    for now in range(1_010, 1_100, 10):
        engine.tick(now)
        flusher.run()
    assert engine.trouble == {}
    assert not open_logs(tmp_path)
    engine.close()
