"""Digests of a story: two processes that tell the same story have the same digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

from tests.trust import powercuts, powercuts_story
from tests.trust.cluster_faults import StoryWithFaults
from tests.trust.parts import scratch
from tests.trust.simulation import steps_of
from tests.trust.simulation_scenes import StoryWithScenes
from tests.trust.simulation_story import got
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.topic.topic import Topic

STATES = 40


class Noted:
    """An engine whose requests and answers are noted."""

    def __init__(self, engine: Engine, note: Callable[..., None]) -> None:
        self._engine, self._note = engine, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._noting(name, found) if callable(found) else found

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            self._note(name, [arg.name if isinstance(arg, Topic) else arg for arg in args], options)
            answer = call(*args, **options)
            if not isinstance(answer, Topic):
                self._note(got(answer) if isinstance(answer, Reserved) else answer)
            return answer

        return noting


class Traced(StoryWithScenes):
    """A story that notes each request, its time and its answer."""

    def begin(self) -> None:
        if not hasattr(self, "trace"):
            self.trace, self.notes = hashlib.blake2b(digest_size=16), 0
        super().begin()
        self.engine = cast(Engine, Noted(self.engine, self._note))

    def _note(self, *what: object) -> None:
        self.trace.update(repr((self.now, *what)).encode())
        self.notes += 1


def simulated(seed: int) -> str:
    """A digest of all that was asked and answered in a story of the simulation."""
    with scratch() as folder:
        story = Traced(folder / "story", f"seed {seed}", seed)
        story.tell(steps_of(seed))
    return f"{story.notes} {story.trace.hexdigest()}"


def clustered(seed: int) -> str:
    """A digest of a story of a cluster: its time, its figures, and the chain of the last record that was answered, which tells of
    every byte that was written."""
    with scratch() as folder:
        story = StoryWithFaults(folder, f"seed {seed}", seed)
        figures = story.tell(steps_of(seed))
    return f"{story.world.now} {story.world.answered} {sorted(figures.items())}"


def cut(seed: int) -> str:
    """A digest of the states that power cuts leave in a story."""
    with scratch() as folder:
        story = powercuts_story.Story(seed, folder / "story")
        story.run()
    found = hashlib.blake2b(digest_size=16)
    for state in islice(powercuts.states(story, seed), STATES):
        found.update(repr((state.cut.step, state.kind, powercuts.digest(state.tree), state.again)).encode())
    return f"{len(story.cuts)} {found.hexdigest()}"
