"""A failure is run again by its number: so the same number has to tell the same story, in any process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.server_process import ROOT, environment
from tests.trust.parts import apart
from tests.trust.simulation import PART
from tests.trust.simulation_reach import PLACES

SEEDS = range(4, 8)  # of them, some are long, and some have ends of the process
STORIES = range(2)


def told(name: str, seeds: range, hashing: int) -> subprocess.Popen[str]:
    """A process that tells the digests; in each, sets of texts have another order."""
    code = f"from tests.trust.digests import {name}\nfor seed in {seeds!r}: print({name}(seed))"
    command, env = [sys.executable, "-c", code], environment(PYTHONHASHSEED=str(hashing))
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), [("simulated", SEEDS), ("clustered", SEEDS), ("cut", STORIES)])
def test_a_number_tells_the_same_story_in_every_process(name: str, seeds: range) -> None:
    processes = [told(name, seeds, hashing) for hashing in (1, 2)]
    first, second = (process.communicate()[0].splitlines() for process in processes)
    assert len(set(first)) == len(seeds), "each is another one"
    assert first == second


@pytest.mark.slow
def test_stories_come_to_all_that_the_simulation_speaks_of() -> None:
    """`make trust` counts over a whole run; a few seeds are enough to see that there is a way."""
    seen = apart("simulation", 0, 3 * PART.chunk)
    assert [place for place in PLACES if not seen[place]] == []
