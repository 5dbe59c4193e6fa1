"""Cluster: whole stories of three replicas, with a model of etcd and a network, judged by the auditor of the simulation.

Files, engine, stream, follower, reconcile, `Member`, `Book` and `Tenure` are the product's own. Answers go out by its rules; at
each of them the auditor judges by the contract, as if there were one server. After each step the invariants of
`turtlemq.replica.membership` hold; where a member has everything, its folder is equal to the leader's, byte for byte.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from tests.harness.short_events import short_events
from tests.harness.weak_hashes import weak_hashes
from tests.trust.cluster_faults import ROWS, StoryWithFaults
from tests.trust.cluster_story import small_pieces
from tests.trust.model import Broken, Figures, Part
from tests.trust.simulation import steps_of

STORIES_MIN = 1_000  # in fewer, a row may be missing by chance


def run(cases: range, folder: Path) -> Figures:
    """A story for each seed."""
    seen = Figures()
    for case in cases:
        root = folder / str(case)
        root.mkdir()
        seen.update(tell(case, root))
        seen["stories"] += 1
        shutil.rmtree(root)
    return seen


def tell(case: int, root: Path) -> Figures:
    """One story."""
    with short_events(case), weak_hashes(case), small_pieces(Random(case)):
        return StoryWithFaults(root, f"seed {case}", case).tell(steps_of(case))


def reached(seen: Figures) -> str:
    """How many rows of the table of failures were seen; a whole run that has missed one is a failure.

    >>> reached(Figures(stories=1, handovers=3))
    '1 of 39 kinds of failure seen'
    >>> reached(Figures(dict.fromkeys(ROWS[1:], 1), stories=STORIES_MIN))
    Traceback (most recent call last):
    tests.trust.model.Broken: 1000 stories, and none with: leader killed
    """
    missed = [row for row in ROWS if not seen[row]]
    if missed and seen["stories"] >= STORIES_MIN:
        raise Broken(f"{seen['stories']} stories, and none with: {', '.join(missed)}")
    return f"{len(ROWS) - len(missed)} of {len(ROWS)} kinds of failure seen"


PART = Part(
    name="cluster",
    unit="seeds",
    about="The stories of the simulation told by three replicas, while processes, machines, disks, network and etcd fail.",
    run=run,
    quick=50,
    full=10_000,
    sum_up=reached,
    must=("elections", "handovers", "comparisons", "copies made", "hello: resume", "unanswered"),
)
