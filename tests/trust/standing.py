"""Standing: random walks over all operations, after each step of which every source tells the same state of every message."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from tests.harness.standing_walk import Disagreement, Walk
from tests.trust.model import Broken, Figures, Part

STEPS = 100


def run(cases: range, folder: Path) -> Figures:
    """A walk for each seed. Without pyarrow, Spark is not asked."""
    seen = Figures()
    for case in cases:
        root = folder / str(case)
        walk = Walk(root, case, spark=find_spec("pyarrow") is not None)
        try:
            seen.update(walk.run(STEPS))
        except Disagreement as error:
            raise Broken(f"seed {case}, step {len(walk.steps)}, {walk.steps[-1]}: {error}") from error
        seen["walks"] += 1
        shutil.rmtree(root)
    return seen


PART = Part(
    name="standing",
    unit="seeds",
    about="All operations at random; message view, listings, figures and Spark agree after each; states change along the table.",
    run=run,
    quick=4,
    full=400,
    chunk=4,
    must=("changes of state", "deliveries", "cancelled", "requeued", "attempts", "puts under known ids"),
)
