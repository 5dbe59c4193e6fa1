"""A failure is run again by its number: so the same number has to tell the same story, in any process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import pytest

from tests.harness.server_process import ROOT, environment
from tests.trust import powercuts, powercuts_story
from tests.trust.parts import apart, scratch
from tests.trust.simulation import PART, steps_of
from tests.trust.simulation_reach import PLACES
from tests.trust.simulation_story import Story, got
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.topic.topic import Topic

SEEDS = range(4, 8)  # of them, some are long, and some have ends of the process
STORIES = range(2)
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
            self._note(name, args, options)
            answer = call(*args, **options)
            if not isinstance(answer, Topic):
                self._note(got(answer) if isinstance(answer, Reserved) else answer)
            return answer

        return noting


class Traced(Story):
    """A story that notes what is asked when, and what is answered."""

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


def cut(seed: int) -> str:
    """A digest of what power cuts leave in a story."""
    with scratch() as folder:
        story = powercuts_story.Story(seed, folder / "story")
        story.run()
    found = hashlib.blake2b(digest_size=16)
    for state in islice(powercuts.states(story, seed), STATES):
        found.update(repr((state.cut.step, state.kind, powercuts.digest(state.tree), state.again)).encode())
    return f"{len(story.cuts)} {found.hexdigest()}"


def told(name: str, seeds: range, hashing: int) -> subprocess.Popen[str]:
    """A process that tells the digests; in each, sets of texts have another order."""
    code = f"from tests.test_trust_replay import {name}\nfor seed in {seeds!r}: print({name}(seed))"
    command, env = [sys.executable, "-c", code], environment(PYTHONHASHSEED=str(hashing))
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), [("simulated", SEEDS), ("cut", STORIES)])
def test_a_number_tells_the_same_story_in_every_process(name: str, seeds: range) -> None:
    processes = [told(name, seeds, hashing) for hashing in (1, 2)]
    first, second = (process.communicate()[0].splitlines() for process in processes)
    assert len(set(first)) == len(seeds), "each is another one"
    assert first == second


@pytest.mark.slow
def test_stories_come_to_all_that_the_simulation_speaks_of() -> None:
    """`make trust` counts over a whole run; a few seeds are enough to see that there is a way."""
    seen = apart("simulation", 0, PART.chunk)
    assert [place for place in PLACES if not seen[place]] == []
