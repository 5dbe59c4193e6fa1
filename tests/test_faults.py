"""The disk fails at every single call of a story, in every way a disk can. After the error the Index goes on rightly, or it is
stopped and says so; opened again on a good disk it holds everything that was answered, and nothing that never was.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.doors import Failing
from tests.harness.index_world import Sleeper, World, open_at
from turtlemq.errors import DiskFull, Stopped
from turtlemq.model import Batch
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

Chapter = Callable[[World], object]
TIGHT = Settings(segment_bytes=4096, run_messages=5, compact_live_ratio=0.3)


def batch(prefix: str, n: int, due: int = 100, size: int = 20) -> Batch:
    return Batch([b"%d" % i * size for i in range(n)], [due + i % 5 for i in range(n)], ids=[f"{prefix}{i}" for i in range(n)])


def append(prefix: str, n: int, due: int = 100, size: int = 20) -> Chapter:
    return lambda world: world.append(batch(prefix, n, due, size), 1)


def cancel(*ids: str) -> Chapter:
    return lambda world: world.cancel(ids)


def seal(world: World) -> None:
    if world.sealed is None and world.closed:
        world.seal(world.closed[0])


def adopt(world: World) -> None:
    if world.sealed is not None:
        world.adopt()


WRITING: list[Chapter] = [
    append("a", 3),
    append("b", 2),
    cancel("a1"),
    lambda w: w.reschedule("a0", 2, 300, b"new"),
    append("c", 6, size=300),
    cancel("b0", "c1", "gone"),
    lambda w: w.append(batch("d", 2), 3, sync=False),
    append("e", 30, size=60),
    lambda w: w.index.maintenance.flush(),
    lambda w: w.roll(),
    append("f", 1),
]
FIRING: list[Chapter] = [
    append("a", 12),
    lambda w: w.due(101, count_max=3),
    lambda w: w.due(101, bytes_max=200),
    cancel("a8"),
    lambda w: w.settle(),
    lambda w: w.drain(102, 2),
    append("b", 4, due=50),
    lambda w: w.drain(200),
    lambda w: w.compare_all(2),
    lambda w: w.forecast(90, 3, 5),
]
SEALING: list[Chapter] = [
    append("a", 12),
    lambda w: w.roll(),
    append("b", 4),
    cancel("a2", "b1"),
    lambda w: w.drain(101, 4),
    lambda w: w.settle(),
    seal,
    cancel("a3"),
    append("c", 2),
    adopt,
    cancel("a4", "b2"),
    lambda w: w.compare_all(),
]
KEEPING_HOUSE: list[Chapter] = [
    append("old", 1, due=10**6),
    append("a", 8),
    lambda w: w.roll(),
    append("b", 6),
    cancel("a1", "a2", "b1", "b2", "b3", "b4"),
    lambda w: w.drain(200),
    lambda w: w.roll(),
    lambda w: w.keep_house(),
    cancel("old0"),
    append("c", 2),
    lambda w: w.keep_house(),
]
STORIES = {"writing": WRITING, "firing": FIRING, "sealing": SEALING, "keeping house": KEEPING_HOUSE}
HOWS = ["EIO", "ENOSPC", "short", "half", "wedged", "gone"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    ram = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="turtlemq-fault-", dir=ram))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Told:
    """One telling of a story. `after` are the sleepers behind each chapter when nothing fails."""

    def __init__(self, folder: Path, door: Failing, after: Sequence[dict[str, Sleeper]] = ()) -> None:
        self.door, self.expected = door, after
        self.after: list[dict[str, Sleeper]] = []
        self.errors: list[BaseException] = []
        self.world = World(folder, TIGHT, door)

    def tell(self, story: Sequence[Chapter]) -> None:
        for number, chapter in enumerate(story):
            while True:
                try:
                    chapter(self.world)
                    break
                except (DiskFull, Stopped, OSError) as error:
                    if self._has_happened(error, number):
                        break
            self.after.append({id_: replace(s) for id_, s in (self.world.asleep | self.world.handed).items()})
        self.calls = self.door.calls.copy()
        self.door.heal()
        self.world.compare_all()
        self.world.reopen(clean=False)
        self.world.compare_all()
        self.world.index.close()
        self.world.door.shut()

    def _has_happened(self, error: BaseException, number: int) -> bool:
        """After an error nothing has changed, or the Index is stopped: then only a new opening tells how far the chapter came."""
        world = self.world
        self.errors.append(error)
        assert len(self.errors) == 1, self.errors
        self.door.heal()
        assert not isinstance(error, OSError) or error.filename is not None, "which file?"
        world.sealed = None  # if this was an adoption, the segment will be sealed once more
        if world.index.stopped is None:
            assert not isinstance(error, Stopped)
            world.compare_all()
            return False
        assert isinstance(error, Stopped), error
        assert "made to fail" in str(error)
        with pytest.raises(Stopped):
            world.index.append(batch("never", 1), 1)
        world.door = Door()
        world.reopen(clean=False)
        return self._take_over(number)

    def _take_over(self, number: int) -> bool:
        """The chapter that was not answered has happened as a whole or not at all. Whichever it is counts from now on."""
        world = self.world
        before, after = self.expected[number - 1] if number else {}, self.expected[number]
        wanted = {id_: s for id_, s in world.asleep.items() if id_ not in before or id_ in after}
        wanted |= {id_: replace(s) for id_, s in after.items() if id_ not in before or (s != before[id_] and id_ in wanted)}
        page, _ = world.index.browse(limit=1000)
        found = {got.id: (got.due_ms, got.body) for got in page}
        if found == _figures(world.asleep):
            return False
        assert found == _figures(wanted)
        world.cancelled |= world.asleep.keys() - wanted.keys()
        world.asleep = wanted
        world.arrivals = max((s.order for s in wanted.values()), default=world.arrivals)
        return True


def _figures(sleepers: dict[str, Sleeper]) -> dict[str, tuple[int, bytes]]:
    return {id_: (s.due_ms, s.body) for id_, s in sleepers.items()}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", STORIES)
def test_every_call_may_fail(name: str, how: str, scratch: Path) -> None:
    story = STORIES[name]
    door = Failing()
    whole = Told(scratch / "whole", door)
    made = len(door.calls)  # making the world is the matter of another test
    whole.tell(story)
    for k in range(made, len(whole.calls)):
        failing = Failing(k, how)
        if failing.can_fail(door.calls[k]):
            try:
                Told(scratch / str(k), failing, whole.after).tell(story)
            except Exception as error:
                raise AssertionError(f"{how} at call {k}: {failing.failed}") from error
            shutil.rmtree(scratch / str(k))


def _prepared(folder: Path) -> World:
    """A folder with everything that opening can meet: sealed and unsealed segments, runs, dead bits, an unfinished seal."""
    world = World(folder, TIGHT)
    for chapter in (*SEALING, lambda w: w.roll(), append("z", 7), seal):
        chapter(world)
    world.settle()
    world.index._writer.close()
    world.door.shut()
    return world


@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "short", "wedged"])
@pytest.mark.parametrize("bare", [False, True], ids=["with its index files", "without them"])
def test_every_call_of_opening_may_fail(how: str, bare: bool, scratch: Path) -> None:
    world = _prepared(scratch / "made")
    if bare:
        for path in world.caches():
            path.unlink()
    door = Failing()
    shutil.copytree(scratch / "made", scratch / "first")
    open_at(scratch / "first", world.receiver.synced, TIGHT, door).close()
    for k, called in enumerate(door.calls):
        failing = Failing(k, how)
        if not failing.can_fail(called):
            continue
        folder = scratch / str(k)
        shutil.copytree(scratch / "made", folder)
        try:
            open_at(folder, world.receiver.synced, TIGHT, failing).close()
        except (OSError, DiskFull, Stopped):
            assert failing.failed
        failing.shut()
        again = World.__new__(World)
        again.__dict__.update(world.__dict__, folder=folder, door=Door(), sealed=None)
        again.index = open_at(folder, world.receiver.synced, TIGHT, again.door)
        again.compare_all()
        again.index.close()
        again.door.shut()
        shutil.rmtree(folder)


def test_bytes_cut_back_stay_gone_after_a_power_cut(tmp_path: Path) -> None:
    """A write that found no room had stored a part: that is cut off, and the cut is synced before the answer."""
    door = Failing(how="half")
    index = open_at(tmp_path / "t", settings=TIGHT, door=door)
    index.append(batch("a", 1), 0)
    door.at = len(door.calls)
    with pytest.raises(DiskFull):
        index.append(batch("b", 2), 0)
    assert door.calls[-4:] == ["write", "write", "truncate", "fdatasync"]
    index.close()
