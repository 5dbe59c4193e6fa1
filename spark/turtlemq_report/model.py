"""Options and result of a report: the types that the run fills, and that the HTML page and the summary show.

No logic lives here: `run` makes a report, `html_page` and `summary_text` show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from turtlemq_report import jobs


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of a report. Times limit events that have happened; forecasts are always complete."""

    data: Path
    out: Path
    topic: str = "*"
    since_ms: int | None = None
    until_ms: int | None = None


@dataclass(slots=True)
class Report:
    """A finished report: result tables by name, and how they were made."""

    options: ReportOptions
    now_ms: int
    topics: list[str] = field(default_factory=list)
    tables: dict[str, pa.Table] = field(default_factory=dict)
    width_ms: int = jobs.BUCKET_MS  # of a time step on charts
    range_ms: tuple[int, int] | None = None  # of past events
    read_bytes: int = 0
    first: bool = True  # no state of an earlier run was used
    pinned: bool = True  # all tables show one moment
    damage: list[str] = field(default_factory=list)
    damaged: int = 0  # documents and events that could not be read
    missed: list[str] = field(default_factory=list)  # removed by retention before a report read it
    seconds: float = 0.0
