"""A power cut at every call that changes a file. With any unsynced writes kept, torn or lost, opening finds everything
that was answered, nothing that was ended or durably handed off, whole batches only, and no damage to report.

    TURTLEMQ_ALL_CUTS=1 pytest tests/test_powercut.py     every state of the long stories, not every third
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.harness.doors import Recording, left_by_a_cut
from tests.harness.index_world import SMALL, TOPIC, World, abandon, documents
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.model import Batch, Progress
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

State = dict[str, tuple[int, bytes]]
SOME = 1 if os.environ.get("TURTLEMQ_ALL_CUTS") else 3


class Story:
    """A world on a recording disk. After each chapter, the state that must hold from then on."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.door = Recording()
        self.settings = settings
        self.states: list[State] = [{}]
        self.floor = 0  # the last state that is durable for sure
        self.door.note = (0, 0, Progress(), frozenset())
        self.world = World(folder, settings, self.door)

    def tell(self, *chapters: Callable[[World], object], durable: bool = True) -> None:
        """Each may be cut anywhere: then it has happened as a whole or not at all."""
        for chapter in chapters:
            receiver = self.world.receiver
            gone = frozenset(d.id for batch in receiver.durable for d in batch)
            self.door.note = (len(self.states) - 1, self.floor, receiver.synced, gone)
            chapter(self.world)
            known = {**self.world.asleep, **self.world.handed}
            self.states.append({s.id: (s.due_ms, s.body) for s in known.values()})
            if durable:
                self.floor = len(self.states) - 1

    def cuts(self) -> Iterator[tuple[str, dict[str, bytes], list[State], Progress]]:
        """Every state of the disk, the permitted sleepers in it, and the receiver's messages."""
        seen: set[tuple[object, ...]] = set()
        for number, snapshot in enumerate(self.door.snapshots):
            chapter, floor, progress, gone = snapshot.note
            allowed = [{i: v for i, v in s.items() if i not in gone} for s in self.states[floor : chapter + 2]]
            for label, files in left_by_a_cut(snapshot):
                key = (chapter, floor, progress, frozenset(files.items()))
                if key not in seen:
                    seen.add(key)
                    yield f"call {number}, chapter {chapter}: {label}", files, allowed, progress

    def check_cuts(self, scratch: Path, every: int = 1) -> int:
        """Try them all, or one of so many. Returns how many were tried."""
        tried = 0
        for label, files, allowed, progress in islice(self.cuts(), 0, None, every):
            tried += 1
            _write(scratch, files)
            try:
                self._check(scratch, allowed, progress)
            except Exception as error:
                raise AssertionError(f"{label}: {sorted(files)}") from error
        return tried

    def _check(self, folder: Path, allowed: list[State], progress: Progress) -> None:
        first = open_index(Door(), folder, TOPIC, self.settings, progress)
        found = sleepers(first)
        assert found in allowed, f"lost {[_minus(a, found) for a in allowed]}, too much {[_minus(found, a) for a in allowed]}"
        assert first.damage == []
        assert first.check() == []
        abandon(first)
        second = open_index(Door(), folder, TOPIC, self.settings, progress)
        assert fired(second) == found
        abandon(second)


def _minus(a: State, b: State) -> list[str]:
    return [id_ for id_ in a if a[id_] != b.get(id_)]


def _write(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def sleepers(index: Index) -> State:
    """Everything that sleeps."""
    page, cursor = index.browse(limit=1000)
    assert cursor is None
    return {found.id: (found.due_ms, found.body) for found in page}


def fired(index: Index) -> State:
    """All sleepers, by letting them come due."""
    out: State = {}
    while (due := index.due(10**13, count_max=7)) is not None:
        for document in documents(due):
            assert document.id not in out, "twice"
            out[document.id] = (document.due_ms, document.body)
        index.advance(due)
    return out


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where each state is written. In memory if there is such a place: no state needs a disk."""
    ram = Path("/dev/shm")
    folder = (ram if ram.is_dir() and os.access(ram, os.W_OK) else tmp_path) / f"turtlemq-cut-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def batch(prefix: str, n: int, due: int = 100, size: int = 20) -> Batch:
    return Batch([b"%d" % i * size for i in range(n)], [due + i % 5 for i in range(n)], ids=[f"{prefix}{i}" for i in range(n)])


def append(prefix: str, n: int, due: int = 100, size: int = 20) -> Callable[[World], object]:
    return lambda world: world.append(batch(prefix, n, due, size), 1)


def cancel(*ids: str) -> Callable[[World], object]:
    return lambda world: world.cancel(ids)


def fire(now: int, count: int = 10_000) -> Callable[[World], object]:
    return lambda world: world.due(now, count_max=count)


def settle(world: World) -> None:
    world.settle()


def roll(world: World) -> None:
    world.roll()


def seal_oldest(world: World) -> None:
    world.seal(world.closed[0])


def adopt(world: World) -> None:
    world.adopt()


def keep_house(world: World) -> None:
    world.keep_house()


def test_appends_cancels_and_reschedules(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", Settings(segment_bytes=4096, run_messages=6))
    story.tell(append("a", 1), append("b", 3), cancel("b1"), append("c", 5, size=150))
    story.tell(lambda w: w.reschedule("a0", 2, 500, b"new"), cancel("c0", "c1", "a0"), append("d", 4, size=300))
    story.tell(lambda w: w.reopen(), append("e", 30), cancel("e1", "d1"))
    assert story.check_cuts(scratch) > 200


def test_commits_without_a_sync_lose_their_tail_and_nothing_else(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", Settings(segment_bytes=1 << 16, run_messages=20))
    story.tell(append("a", 2))
    for prefix in "bcde":
        story.tell(lambda w, p=prefix: w.append(batch(p, 7, size=90), 1, sync=False), durable=False)  # type: ignore[misc]
    story.tell(append("f", 1), cancel("b0"))
    assert story.check_cuts(scratch) > 50


def test_what_opening_has_found_is_durable_from_then_on(tmp_path: Path, scratch: Path) -> None:
    """A process that was killed may have written without a sync. Once that is found it may be fired, or called a duplicate."""
    story = Story(tmp_path / "t", Settings(segment_bytes=1 << 16, run_messages=100))
    story.tell(append("a", 2))
    story.tell(lambda w: w.append(batch("b", 12, size=90), 1, sync=False), durable=False)
    story.tell(lambda w: w.reopen(clean=False), cancel("a1"), append("c", 3))
    assert story.check_cuts(scratch) > 20


def test_a_segment_has_gone_for_good_before_its_tombstones_go(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", Settings(segment_bytes=1 << 14, run_messages=50))
    story.tell(append("a", 6), roll, append("b", 6), cancel(*(f"a{i}" for i in range(6))), roll)
    story.tell(lambda w: w.index.maintenance.drop(0), seal_oldest, adopt, cancel("b2"))
    assert story.check_cuts(scratch) > 30


@pytest.mark.slow
def test_firing_rolling_and_sealing(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", Settings(segment_bytes=4096, run_messages=8))
    story.tell(append("a", 20), append("b", 8, due=103), roll, cancel("a3", "b2"), fire(101, count=5), settle)
    story.tell(append("c", 6), seal_oldest, cancel("a7"), append("d", 2), fire(101), adopt, cancel("b3"), settle)
    story.tell(roll, lambda w: w.reschedule("c1", 3, 104, None), fire(103, 3), append("e", 9), cancel("d0", "b5"))
    assert story.check_cuts(scratch, SOME) > 300


@pytest.mark.slow
def test_compaction_and_dropping(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", Settings(segment_bytes=4096, run_messages=8, compact_live_ratio=0.3))
    story.tell(append("old", 2, due=10**6), append("a", 24), roll, append("b", 20), cancel(*(f"b{i}" for i in range(18))))
    story.tell(cancel("a1", "a2"), roll, fire(200), settle, keep_house, append("c", 3), cancel("old1"))
    story.tell(lambda w: w.reopen(clean=False), roll, keep_house, cancel("b19"), fire(10**7), settle, keep_house)
    assert story.check_cuts(scratch, SOME) > 300


def test_a_handoff_that_is_not_durable_comes_again(tmp_path: Path, scratch: Path) -> None:
    story = Story(tmp_path / "t", SMALL)
    story.tell(
        append("a", 10), fire(102, 4), settle, fire(103), append("b", 2), roll, seal_oldest, adopt, fire(200), append("c", 1)
    )
    assert story.check_cuts(scratch) > 50


def test_the_simulated_disk_forgets_what_was_not_synced(tmp_path: Path) -> None:
    door = Recording()
    path = tmp_path / "f"
    fd = door.create(path)
    door.write(fd, path, 0, [b"one"])
    states = [files for _, files in left_by_a_cut(door.snapshots[-1])]
    assert {} in states, "a name that was not synced may be gone"
    assert {"f": b""} in states
    assert {"f": b"o"} in states
    door.sync(fd, path)
    door.sync_folder(tmp_path)
    door.write(fd, path, 3, [b"two"])
    states = [files for _, files in left_by_a_cut(door.snapshots[-1])]
    assert [s["f"] for s in states] == [b"one", b"onetwo", b"onet", b"one\0\0\0"]
    door.close(fd)
    door.rename(path, tmp_path / "g")
    left = [set(files) for _, files in left_by_a_cut(door.snapshots[-1])]
    assert {"f"} in left
    assert {"g"} in left
