"""Pictures of the scenarios of flow control, for docs/FLOW.md: a full run replaces them, a smaller one leaves its own aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import plots, report

GREY = plots.GREY
COLOURS = ("#2e9e5b", "#d9822b", "#5b8dd9", "#9a7fd1", "#c26a6a", "#8c8c8c")  # for lines and bars, in this order


def draw(size: str, name: str, title: str, paint: Callable[[Any], None]) -> Path | None:
    """Draw one picture with matplotlib: `paint` gets its axes. Returns the file; None if matplotlib is not installed."""
    if size == "tiny":
        return None  # a run of the tests
    folder = plots.FOLDER if size == "full" else report.RESULTS_FOLDER
    return plots.save(folder / f"{name}.svg", title, paint)
