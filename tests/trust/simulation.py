"""Simulation: whole stories of an engine on a disk and a clock that are not real, judged by one who knows the contract only."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from tests.trust.model import Figures, Part
from tests.trust.simulation_story import Story


def run(cases: range, folder: Path) -> Figures:
    """A story for each seed."""
    seen = Figures()
    for case in cases:
        seen += tell(case, folder / str(case))
    return seen


def tell(case: int, root: Path) -> Figures:
    """One story: some are short, a few are long."""
    steps = Random(case).choice([15, 30, 30, 60, 60, 120])
    seen = Story(root, f"seed {case}", case).tell(steps)
    shutil.rmtree(root)
    return seen


PART = Part(
    name="simulation",
    unit="seeds",
    about="Producers, consumers, cancels, retries and housekeeping on a simulated disk and clock, the process ending anywhere.",
    run=run,
    quick=200,
    full=10_000,
)
