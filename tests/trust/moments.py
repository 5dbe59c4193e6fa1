"""Moments: snapshots for Spark beside a writing engine, and reads beside the clients of a running server."""

from __future__ import annotations

import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.harness.server_process import running
from tests.harness.standing_walk import Disagreement
from tests.trust.model import Broken, Figures, Part

SNAPSHOTS = 40  # of a walk
READS = 60  # of a server
_LIVE_EVERY = 10  # one case of so many is a server


def run(cases: range, folder: Path) -> Figures:
    """A walk, or a server, for each number. Nothing without pyarrow, which reads need."""
    if find_spec("pyarrow") is None:
        return Figures({"left out, since pyarrow is missing": len(cases)})
    seen = Figures()
    for case in cases:
        root = folder / str(case)
        try:
            seen.update(_live(root) if case % _LIVE_EVERY == _LIVE_EVERY - 1 else _beside(root, case))
        except Disagreement as error:
            raise Broken(f"case {case}: {error}") from error
        shutil.rmtree(root)
    return seen


def _beside(root: Path, seed: int) -> Counter[str]:
    from tests.harness.spark_moments import Beside

    walk = Beside(root, seed)
    walk.run_snapshots(SNAPSHOTS, rows_every=10)
    return walk.seen


def _live(root: Path) -> Counter[str]:
    from pyspark_turtlemq.table import read_table
    from tests.harness.spark_live import Clients, rows_of

    root.mkdir()
    data, seen = root / "data", Figures()
    with running(data) as server, Clients(server) as clients:
        for _ in range(READS):
            seen.update(clients.judge(lambda: rows_of(read_table(data, kind="messages", columns="id,group,state"))))
    return seen


PART = Part(
    name="moments",
    unit="seeds",
    about="Snapshots for Spark between the system calls of an engine, and reads beside clients of a server: each is one moment.",
    run=run,
    quick=10,
    full=300,
    chunk=10,
    must=("snapshots", "rows compared", "reads", "of a later moment than their beginning"),
)
