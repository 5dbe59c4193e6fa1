"""Closing an engine with many topics: the number of syncs one after the other does not grow with them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.doors import Failing
from turtlemq.engine import Engine
from turtlemq.errors import Stopped
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

T = TypeVar("T")


class Counting(Door):
    """Counts syncs by thread."""

    keeps_room = False

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name in ("fdatasync", "fsync_dir"):
            self.syncs["here" if threading.current_thread() is threading.main_thread() else "elsewhere"] += 1
        return action(*args)


def filled(folder: Path, topics: int) -> tuple[Engine, Counting]:
    """Topics with a delivery and an ack that no checkpoint has."""
    door = Counting()
    engine = Engine.open(folder, door=door, settings=Settings(beat_ms=60_000))
    for now in (1, 3):
        for i in range(topics):
            engine.submit(f"t{i}", [Message(b"x", 0, f"m{now}")], now)
        engine.tick(now)
        for i in range(topics):
            engine.ack(f"t{i}", "g", engine.reserve(f"t{i}", "g", 10, now).ids, now)
    return engine, door


@pytest.mark.parametrize("topics", [3, 60])
def test_a_stop_waits_for_two_syncs_however_many_topics(tmp_path: Path, topics: int) -> None:
    engine, door = filled(tmp_path, topics)
    door.syncs.clear()
    with ThreadPoolExecutor(4) as stopper:
        engine.close(stopper)
    assert door.syncs["here"] == 2, "those of the clean-shutdown mark"
    assert door.syncs["elsewhere"] == 5 * topics, "ready log, two journals, the checkpoint and its name"
    reopened = Engine.open(tmp_path)
    assert reopened.was_clean
    assert all(reopened.stats(name).history == 2 for name in reopened.topics)
    assert reopened.check() == []
    reopened.close()


def test_topics_that_nothing_was_written_to_need_no_sync(tmp_path: Path) -> None:
    filled(tmp_path, 20)[0].close()
    for _ in range(2):
        door = Counting()
        engine = Engine.open(tmp_path, door=door)
        engine.tick(10)
        door.syncs.clear()
        engine.close()
        assert door.syncs == {"here": 2}, "those of the clean-shutdown mark"
    reopened = Engine.open(tmp_path)
    assert reopened.was_clean
    assert all(reopened.stats(name).history == 2 for name in reopened.topics)
    reopened.close()


def test_what_was_synced_before_is_not_synced_again(tmp_path: Path) -> None:
    engine, door = filled(tmp_path, 4)
    engine.topic("t1").checkpoint()
    engine.submit("t1", [Message(b"x", 10**12, "later")], 5)
    door.syncs.clear()
    engine.close()
    assert door.syncs == {"here": 2 + 3 * 5}


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_failed_sync_at_the_end_leaves_no_clean_mark(tmp_path: Path, in_thread: bool) -> None:
    door = Failing()
    engine = Engine.open(tmp_path, door=door, settings=Settings(beat_ms=60_000))
    for name in ("a", "b", "c"):
        engine.submit(name, [Message(b"x", 0, "m")], 1)
    engine.tick(1)
    for name in ("a", "b", "c"):
        engine.reserve(name, "g", 10, 2)
    door.at = len(door.calls) + 1  # behind the opening of the first log: its sync
    with ThreadPoolExecutor(1) as stopper, pytest.raises(Stopped):
        engine.close(stopper if in_thread else None)
    assert str(door.failed).startswith("fdatasync")
    assert not (tmp_path / "CLEAN").exists()
    door.heal()
    reopened = Engine.open(tmp_path)
    assert not reopened.was_clean
    assert all(reopened.stats(name).reserve == 1 for name in "abc")
    reopened.close()
