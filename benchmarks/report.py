"""Results for people and for programs: a table on the terminal, JSON by date, and RESULTS.md after a full run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Limits
from benchmarks.model import Figure, Size

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "RESULTS.md"
_COLUMNS = ("benchmark", "figure", "value", "goal", "met", "of the limit", "note")

NOT_SHOWN = """\
- One topic, one thread, no server: HTTP, JSON and the committer's thread come on top.
- Bodies of 100 random bytes and due times at random over a day. Messages that arrive in order of their due times fire faster.
- Most figures are of a warm page cache. `cold` evicts the files first; it does not limit memory, so the kernel can still
  hold what is being written.
- Seals share the machine's cores with the process that is measured. Virtual machines have noisy neighbours: compare ratios.
- *Of the limit* is the share of what the machine did in the same run without TurtleMQ: 100 % cannot be passed in earnest, only
  by noise or by the page cache.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    began: datetime
    size: Size
    machine: dict[str, str]
    limits: Limits
    figures: list[tuple[str, Figure]]  # with the name of the benchmark
    seconds: float

    @property
    def missed(self) -> list[tuple[str, Figure]]:
        return [(name, figure) for name, figure in self.figures if figure.met is False]


def number(value: float) -> str:
    """Three digits that count, or all of a big number.

    >>> number(708248.98), number(0.1234), number(12.345), number(0)
    ('708,249', '0.123', '12.3', '0')
    """
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def cells(benchmark: str, figure: Figure) -> tuple[str, ...]:
    """A figure as the columns of a row."""
    spread = "" if figure.spread is None else f" ±{figure.spread:.0%}"
    goal = "" if figure.goal is None else f"{figure.goal.sign} {number(figure.goal.value)}"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    share = "" if figure.share is None else f"{figure.share:.0%} ({figure.limit_of})"
    return benchmark, figure.name, f"{number(figure.value)} {figure.unit}{spread}", goal, met, share, figure.note


def table(figures: Sequence[tuple[str, Figure]], title: str) -> Table:
    """For the terminal."""
    drawn = Table(*_COLUMNS, title=title, title_justify="left")
    before = ""
    for name, figure in figures:
        row = cells("" if name == before else name, figure)
        style = {None: "", True: "green", False: "bold red"}[figure.met]
        drawn.add_row(*row[:4], f"[{style}]{row[4]}[/]" if style else "", *row[5:])
        before = name
    return drawn


def show(report: Report, console: Console) -> None:
    """Everything that a run has found."""
    limits = Table("the machine's limits, in this run", "", title_justify="left")
    for row in report.limits.rows():
        limits.add_row(*row)
    console.print(limits)
    console.print(table(report.figures, f"TurtleMQ, {report.size.name} size, {report.size.sleepers:,} sleepers"))
    goals = sum(figure.goal is not None for _, figure in report.figures)
    console.print(f"{goals - len(report.missed)} of {goals} goals met in {report.seconds:,.0f} s.")


def as_json(report: Report) -> str:
    """Everything, with each round."""
    figures = [
        {"benchmark": name, **asdict(figure), "met": figure.met, "share_of_limit": figure.share}
        for name, figure in report.figures
    ]
    fields = {
        "began": report.began.isoformat(timespec="seconds"),
        "seconds": round(report.seconds, 1),
        "size": {**asdict(report.size), "sleepers": report.size.sleepers},
        "machine": report.machine,
        "limits": asdict(report.limits),
        "figures": figures,
    }
    return json.dumps(fields, indent=1, ensure_ascii=False)


def keep(report: Report, folder: Path) -> Path:
    """Write the JSON under its date. Returns where."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{report.began.astimezone(UTC):%Y-%m-%dT%H-%M-%SZ}-{report.size.name}.json"
    path.write_text(as_json(report), encoding="utf-8")
    return path


def markdown(report: Report) -> str:
    """RESULTS.md: the machine, its limits, the figures, and what they do not show."""
    run = f"The last full run of `make bench`, {report.began:%d %B %Y}, {report.seconds / 60:.0f} minutes."
    lines = [
        "# Results",
        "",
        f"{run} Medians; ± is half the distance between the extremes of the rounds.",
        "What each figure means: [docs/PERFORMANCE.md](../docs/PERFORMANCE.md).",
        "",
        *_markdown_table(("the machine", ""), report.machine.items()),
        "",
        *_markdown_table(("its limits in this run", ""), report.limits.rows()),
        "",
        *_markdown_table(_COLUMNS, [cells(name, figure) for name, figure in report.figures]),
        "",
        "## What these figures do not show",
        "",
        NOT_SHOWN.rstrip(),
        "",
    ]
    return "\n".join(lines)


def _markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "| " + " | ".join("---" for _ in head) + " |", *(f"| {' | '.join(row)} |" for row in rows)]
