"""Random walks of a schedule in the engine: pauses, changes, triggers, short outages, against times that are worked out here."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.harness.engine_disk import abandon
from tests.harness.schedule_runs import NOW, SECOND, fetched, opened, put, run
from turtlemq.engine import Engine
from turtlemq.schedules import LATE_MS, firing_id

STEPS = 60


class Walk:
    """One schedule, and the times at which it must have fired."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._chance = folder, Random(seed)
        self._every_ms = self._chance.choice([700, 3_000, 10_000])
        self._catch_up = self._chance.choice(["skip", "one", "all"])
        self._now, self._paused = NOW, False
        self._engine = opened(folder)
        self.expected: set[str] = set()
        self.seen: list[str] = []
        self._put()

    def step(self) -> None:
        """Something happens, and then a tick."""
        pick = self._chance.choice
        change = pick([self._put, self._pause, self._resume, self._trigger, self._restart, None, None, None])
        if change is not None:
            change()
        self._pass(pick([0, 1, 300, 2_900, 3_100, 20_000]))
        if self._chance.random() < 0.5:
            self.take()

    def take(self) -> None:
        """Fetch and settle everything."""
        got = fetched(self._engine, self._now)
        assert all(int(id_.partition("@")[2]) <= self._now for id_ in got), "never early"
        self.seen += got

    def end(self) -> Engine:
        self._pass(0)
        self.take()
        return self._engine

    def _pass(self, step_ms: int) -> None:
        before, self._now = self._now, self._now + step_ms
        self._expect(before)
        run(self._engine, before, self._now)

    def _expect(self, before_ms: int) -> None:
        first = NOW + ((before_ms - NOW) // self._every_ms + 1) * self._every_ms
        if not self._paused:
            self.expected.update(firing_id("s", at) for at in range(first, self._now + 1, self._every_ms))

    # Changes

    def _put(self) -> None:
        put(self._engine, "s", self._now, every_ms=self._every_ms, catch_up=self._catch_up, paused=self._paused)

    def _pause(self) -> None:
        self._set_paused(True)

    def _resume(self) -> None:
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        topic = self._engine.topic("t")
        topic.scheduler.set_paused("s", paused, self._now)
        topic.scheduler.commit()
        self._engine.changed(topic, self._now)
        self._paused = paused

    def _trigger(self) -> None:
        topic = self._engine.topic("t")
        id_, _ = topic.scheduler.trigger("s", self._now)
        self._engine.changed(topic, self._now)
        assert id_ not in self.expected
        self.expected.add(id_)

    def _restart(self) -> None:
        """An outage that is too short to miss anything."""
        self._engine.close() if self._chance.random() < 0.3 else abandon(self._engine)
        before, self._now = self._now, self._now + self._chance.randint(0, LATE_MS - SECOND)
        self._expect(before)
        self._engine = opened(self._folder)
        run(self._engine, self._now, self._now)


@pytest.mark.parametrize("seed", range(12))
def test_every_time_is_fired_once_whatever_is_changed(tmp_path: Path, seed: int) -> None:
    walk = Walk(tmp_path, seed)
    for _ in range(STEPS):
        walk.step()
    engine = walk.end()
    assert len(walk.seen) == len(set(walk.seen)), "each once"
    assert set(walk.seen) == walk.expected
    assert len(walk.seen) > STEPS // 10
    assert engine.check() == []
    engine.close()
