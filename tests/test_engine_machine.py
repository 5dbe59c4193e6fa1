"""The whole engine against a model, over many seeds, by the simulation in `tests.harness.engine_simulation`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.engine_simulation import Sim


@pytest.mark.parametrize("seed", range(24))
def test_the_engine_does_what_the_model_says(tmp_path: Path, seed: int) -> None:
    sim = Sim(tmp_path, seed)
    try:
        sim.run(150)
    except BaseException:
        print(f"seed {seed}: failed in step {sim.done}")
        raise
