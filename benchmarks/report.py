"""Output of a run: tables on the terminal, JSON files by date, and RESULTS.md after a full run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import comparison_tables as tables
from benchmarks import plots, quiet
from benchmarks.comparison import Comparison, QueueInfo
from benchmarks.machine import Limits
from benchmarks.model import Figure, Goal, Size, format_number
from benchmarks.ranking import PARTS
from benchmarks.workloads import CONNECTIONS

FOLDER = Path(__file__).resolve().parent
RESULTS_FOLDER = FOLDER / "results"
RESULTS = FOLDER / "RESULTS.md"
CLUSTER, PUSHED, FLOW = ("cluster", "failover"), ("grpc", "push"), "flow-"  # benchmarks with sections of their own
FLOW_TITLE = "Flow control"
OTHERS = "used by others before or after each benchmark"
_COLUMNS = ("benchmark", "figure", "value", "goal", "met", "of the limit", "note")

CAVEATS = """\
- Two processes on one machine: no network lies between client and server, and both share the processors. A queue in C that leaves
  more of them to the client gains from that, one whose client has little to do as well.
- One client process, written in Python for every queue (Node.js for BullMQ), on {connections} connections in batches.
  Clients of other languages may get more out of a peer.
- *Durable* is what each setting promises when a put is answered. TurtleMQ, Redis with `always`, PostgreSQL and beanstalkd with
  `-f0` have synced by then; the others may lose what came last when the power goes. TurtleMQ syncs acknowledgements every few
  seconds, not before it answers them: after a power cut, messages of that time may come again.
- Own ids are looked up by TurtleMQ, so that none is stored twice; beanstalkd has no ids but its own. *Server's ids* are
  the same work without that lookup.
- beanstalkd delays by whole seconds: delays are rounded up when they are put, and its lateness counts from there. The row
  *against the due time asked for* does not allow for that. All of its messages are due within the second after
  the common instant, and its clock starts at the end of that second.
- A queue that was too slow for its seconds is stopped where it is; the counts say where. The restart of such a queue is
  told for a million by proportion.
- Memory is that of a server at rest, all its processes together. While TurtleMQ seals a segment of four million messages,
  a process of its own takes up to 0.5 GB for some seconds: see `memory` below.
- Restarts are of a warm page cache, and of the whole process, its interpreter included.
- The engine's figures are of one topic, one thread, no server; bodies of 100 random bytes, due times at random over a day.
  Most are of a warm page cache. `cold` evicts the files first; it does not limit memory, so the kernel can still
  hold what is being written.
- Virtual machines have noisy neighbours: compare ratios. *Of the limit* is the share of what the machine did in the same run
  without TurtleMQ: 100 % cannot be passed in earnest, only by noise or by the page cache.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run."""

    began: datetime
    size: Size
    machine: dict[str, str]
    limits: Limits
    figures: list[tuple[str, Figure]]  # with the name of the benchmark
    seconds: float
    comparison: Comparison | None = None
    skipped: list[str] = field(default_factory=list)  # benchmarks that were left out for lack of time

    @property
    def missed(self) -> list[tuple[str, Figure]]:
        return [(name, figure) for name, figure in self.figures if figure.met is False]


def cells(benchmark: str, figure: Figure) -> tuple[str, ...]:
    """A figure as the cells of a row."""
    spread = "" if figure.spread is None else f" ±{figure.spread:.0%}"
    goal = "" if figure.goal is None else f"{figure.goal.sign} {format_number(figure.goal.value)}"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    share = "" if figure.share is None else f"{figure.share:.0%} ({figure.limit_of})"
    return benchmark, figure.name, f"{format_number(figure.value)} {figure.unit}{spread}", goal, met, share, figure.note


def table(figures: Sequence[tuple[str, Figure]], title: str) -> Table:
    """Figures as a table for the terminal."""
    table = Table(*_COLUMNS, title=title, title_justify="left")
    before = ""
    for name, figure in figures:
        row = cells("" if name == before else name, figure)
        style = {None: "", True: "green", False: "bold red"}[figure.met]
        table.add_row(*row[:4], f"[{style}]{row[4]}[/]" if style else "", *row[5:])
        before = name
    return table


def show(report: Report, console: Console) -> None:
    """Print the results of a run."""
    if report.figures:
        _show_engine(report, console)
    if report.comparison is not None:
        tables.show(report.comparison, report.limits, report.size.name, RESULTS_FOLDER, console)
    if report.skipped:
        console.print(f"[bold red]No time was left for: {', '.join(report.skipped)}.[/] `--minutes` gives more.")


def _show_engine(report: Report, console: Console) -> None:
    limits = Table("the machine's limits, in this run", "", title_justify="left")
    for row in report.limits.rows():
        limits.add_row(*row)
    console.print(limits)
    console.print(table(report.figures, f"TurtleMQ, {report.size.name} size, {report.size.sleepers:,} sleepers"))
    goals = sum(figure.goal is not None for _, figure in report.figures)
    console.print(f"{goals - len(report.missed)} of {goals} goals met in {report.seconds:,.0f} s.")


def as_json(report: Report) -> str:
    """The results as JSON, with each round."""
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
        "contest": None if report.comparison is None else asdict(report.comparison),
        "skipped": report.skipped,
    }
    return json.dumps(fields, indent=1, ensure_ascii=False)


def save(report: Report, folder: Path) -> Path:
    """Write the JSON file, named by the date. Returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{report.began.astimezone(UTC):%Y-%m-%dT%H-%M-%SZ}-{report.size.name}.json"
    path.write_text(as_json(report), encoding="utf-8")
    return path


def load(path: Path) -> Report:
    """The results in a JSON file."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    figures = [(figure.pop("benchmark"), _figure(figure)) for figure in fields["figures"]]
    fields["size"].pop("sleepers")
    comparison = fields["contest"]
    if comparison is not None:
        comparison = Comparison(**{**comparison, "queues": [QueueInfo(**queue) for queue in comparison["queues"]]})
    began = datetime.fromisoformat(fields["began"])
    limits = Limits(**fields["limits"])
    return Report(
        began, Size(**fields["size"]), fields["machine"], limits, figures, fields["seconds"], comparison, fields["skipped"]
    )


def _figure(fields: dict[str, Any]) -> Figure:
    del fields["met"], fields["share_of_limit"]
    goal = fields["goal"] and Goal(**fields["goal"])
    return Figure(**{**fields, "goal": goal, "rounds": tuple(fields["rounds"])})


def write(report: Report, path: Path | None = None) -> None:
    """Write RESULTS.md and its plots. A run without flow control keeps the section of an earlier one."""
    path = path or RESULTS
    pictures = {} if report.comparison is None else plots.draw(report.comparison, report.size.name, path.parent / "plots")
    text = markdown(report, pictures)
    if not any(name.startswith(FLOW) for name, _ in report.figures) and path.exists():
        text = with_section(text, section_of(path.read_text(encoding="utf-8"), FLOW_TITLE))
    path.write_text(text, encoding="utf-8")


def write_flow(report: Report, path: Path | None = None) -> None:
    """Write the section about flow control of RESULTS.md, from a run of its own."""
    path = path or RESULTS
    lines = figure_lines(FLOW_TITLE, [each for each in report.figures if each[0].startswith(FLOW)])
    run = f"A run of `python -m benchmarks flow`, {report.began:%d %B %Y}, {report.seconds / 60:.0f} minutes."
    if others := report.machine.get(OTHERS):
        loud = quiet.warning([float(share.rstrip("%")) / 100 for share in others.split(", ")])
        run += f" Share of the machine {OTHERS}: {others}." + (f" **{loud}**" if loud else "")
    section = "\n".join([*lines[:2], run, "", *lines[2:]])
    path.write_text(with_section(path.read_text(encoding="utf-8"), section), encoding="utf-8")


def section_of(text: str, title: str) -> str:
    """A section of a Markdown text, up to the next one; empty: it has none.

    >>> section_of("# T\\n\\n## A\\n\\na\\n\\n## B\\n\\nb\\n", "A")
    '## A\\n\\na\\n\\n'
    """
    begin, end = text.find(f"## {title}\n"), text.find("\n## ", text.find(f"## {title}\n") + 1)
    return "" if begin < 0 else text[begin : end + 1 if end >= 0 else len(text)]


def with_section(text: str, section: str) -> str:
    """A text with this section in place of the one with the same title, or as its last but one."""
    if not section:
        return text
    section = section.rstrip("\n") + "\n\n"
    if old := section_of(text, section.partition("\n")[0].removeprefix("## ")):
        return text.replace(old, section)
    begin = text.rfind("\n## ") + 1
    return text[:begin] + section + text[begin:]


def markdown(report: Report, pictures: Mapping[str, Path] | None = None) -> str:
    """The text of RESULTS.md: goals first, then all figures, the machine, and the limits of these figures."""
    run = f"A {report.size.name} run of `make bench`, {report.began:%d %B %Y}, {report.seconds / 60:.0f} minutes."
    lines = ["# Results", "", f"{run} Medians; ± is half the distance between the extremes of the rounds.", ""]
    if report.comparison is not None:
        lines += _comparison_lines(report, report.comparison, pictures or {})
    lines += ["## The machine", "", *_markdown_table(("the machine", ""), report.machine.items()), ""]
    lines += [*_markdown_table(("its limits in this run", ""), report.limits.rows()), ""]
    if report.comparison is not None:
        shares = tables.shares(report.comparison, report.limits, report.size.name)
        lines += [*_markdown_table(("TurtleMQ as a share of them", ""), shares), ""]
    for title, figures in (
        (
            f"The engine alone, {report.size.sleepers:,} sleepers",
            [each for each in report.figures if each[0] not in CLUSTER + PUSHED and not each[0].startswith(FLOW)],
        ),
        ("A cluster", [each for each in report.figures if each[0] in CLUSTER]),
        ("Streams and callbacks", [each for each in report.figures if each[0] in PUSHED]),
        (FLOW_TITLE, [each for each in report.figures if each[0].startswith(FLOW)]),
    ):
        lines += figure_lines(title, figures) if figures else []
    if report.skipped:
        lines += [f"No time was left for: {', '.join(report.skipped)}.", ""]
    return "\n".join([*lines, "## What these figures do not show", "", CAVEATS.format(connections=CONNECTIONS).rstrip(), ""])


def figure_lines(title: str, figures: Sequence[tuple[str, Figure]]) -> list[str]:
    """A section of RESULTS.md with a table of figures."""
    page = "FLOW.md" if title == FLOW_TITLE else "PERFORMANCE.md"
    about = f"What each figure means: [docs/{page}](../docs/{page})."
    return [f"## {title}", "", about, "", *_markdown_table(_COLUMNS, [cells(name, figure) for name, figure in figures]), ""]


def _comparison_lines(report: Report, comparison: Comparison, pictures: Mapping[str, Path]) -> list[str]:
    size = report.size.name
    lines = [f"**{warning}**", ""] if (warning := quiet.warning(comparison.busy)) else []
    lines += [
        "## Goals",
        "",
        *_markdown_table(tables.GOAL_COLUMNS, tables.goals(comparison, size, RESULTS_FOLDER)),
        "",
    ]
    lines += ["*Against it* is how many times better TurtleMQ is: below 1 the peer is ahead.", ""]
    for title, picture in pictures.items():
        lines += [f"![{title}]({picture.parent.name}/{picture.name})", ""]
    lines += [
        "## Side by side",
        "",
        *_markdown_table(tables.VERSION_COLUMNS, tables.versions(comparison)),
        "",
    ]
    for part in PARTS:
        lines += [*_markdown_table(*tables.part_rows(comparison, part, size)), ""]
    lines += [*_markdown_table(tables.GROWTH_COLUMNS, tables.growth_rows(comparison)), ""]
    return lines + [f"**Failed:** {failure}\n" for failure in comparison.failed]


def _markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "| " + " | ".join("---" for _ in head) + " |", *(f"| {' | '.join(row)} |" for row in rows)]
