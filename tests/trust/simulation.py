"""Simulation: whole stories of an engine on a simulated disk and clock, judged by an auditor that knows only the contract."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from tests.harness.short_events import short_events
from tests.harness.weak_hashes import weak_hashes
from tests.trust.model import Figures, Part
from tests.trust.simulation_reach import STORIES_MIN, counting, reached
from tests.trust.simulation_times import StoryWithTimes


def run(cases: range, folder: Path) -> Figures:
    """A story for each seed."""
    seen = Figures()
    with counting(seen):
        for case in cases:
            seen.update(tell(case, folder / str(case)))
            seen["stories"] += 1
    return seen


def tell(case: int, root: Path) -> Figures:
    """One story."""
    with short_events(case), weak_hashes(case) as variants:
        seen = StoryWithTimes(root, f"seed {case}", case).tell(steps_of(case))
    seen.update(variants)
    shutil.rmtree(root)
    return seen


def steps_of(case: int) -> int:
    """Some stories are short, a few are long."""
    return Random(case).choice([10, 20, 20, 30, 50, 100])


PART = Part(
    name="simulation",
    unit="seeds",
    about="Producers, consumers, cancels, retries and housekeeping on a simulated disk and clock, the process ending anywhere.",
    run=run,
    quick=STORIES_MIN,
    full=10_000,
    sum_up=reached,
)
