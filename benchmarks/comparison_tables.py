"""Tables of a comparison, for the terminal and for Markdown: goals, figures of all queues, shares of the machine's limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import quiet, ranking
from benchmarks.comparison import Comparison
from benchmarks.machine import Limits
from benchmarks.model import Figure, format_number
from benchmarks.peers.all_queues import ONLY_PARTS, OURS
from benchmarks.peers.turtle import wire_bytes
from benchmarks.ranking import PARTS, Verdict
from benchmarks.workloads import EXTENTS

GOAL_COLUMNS = ("work", "TurtleMQ", "goal", "met", "best peer", "against it", "best durable peer", "against it")
Cells = list[str]


def cell(figure: Figure | None) -> str:
    """A median with its spread, as text."""
    if figure is None:
        return "–"
    spread = "" if figure.spread is None else f" ±{figure.spread:.0%}"
    return f"{format_number(figure.value)}{spread}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{format_number(ratio)} ×"


def goal_cells(verdict: Verdict) -> Cells:
    """One row of the goals."""
    unit = verdict.ours.unit if verdict.ours else ""

    def peer(best: tuple[str, float] | None) -> str:
        return "–" if best is None else f"{format_number(best[1])} {best[0]}"

    met = {None: "not measured", True: "yes", False: "NO"}[verdict.met]
    return [
        verdict.work,
        f"{cell(verdict.ours)} {unit}".strip(),
        verdict.goal,
        met,
        peer(verdict.best),
        _times(verdict.ratio(verdict.best)),
        peer(verdict.durable),
        _times(verdict.ratio(verdict.durable)),
    ]


def goals(comparison: Comparison, size: str, results: Path) -> list[Cells]:
    """All goals, those of the Spark source from its last run included."""
    cells = [goal_cells(verdict) for verdict in ranking.verdicts(comparison, EXTENTS[size].connections)]
    return cells + spark_goals(results)


def spark_goals(results: Path) -> list[Cells]:
    """The goals of the last `make bench-spark`, if there was one."""
    files = sorted(results.glob("*-spark.json"))
    if not files:
        return [["Spark scan", "–", "see `make bench-spark`", "not measured", "–", "", "–", ""]]
    last_run = json.loads(files[-1].read_text(encoding="utf-8"))
    return [
        [
            f"Spark, {last_run['rows']:,} rows: {figure['benchmark']}, {figure['figure']}",
            f"{format_number(figure['value'])} {figure['unit']}",
            f"of {files[-1].name[:10]}",
            {None: "", True: "yes", False: "NO"}[figure["met"]],
            "",
            "",
            "",
            "",
        ]
        for figure in last_run["figures"]
        if figure["met"] is not None
    ]


def part_rows(comparison: Comparison, part: str, size: str) -> tuple[Cells, list[Cells]]:
    """Head and rows of the table of a part: a column for each queue, missing ones included."""
    names = [queue.name for queue in comparison.queues if part in ONLY_PARTS.get(queue.name, PARTS)]
    table = ranking.table(comparison, part, EXTENTS[size].connections)
    units = {row.name: row.unit for row in ranking.rows(EXTENTS[size].connections)}
    head = [PARTS[part], *names]
    rows = [
        [f"{row}, {units[row]}" if units[row] else row, *(cell(figures.get(name)) for name in names)]
        for row, figures in table.items()
    ]
    return head, rows


def growth_rows(comparison: Comparison) -> list[Cells]:
    """A row for each queue at each count of sleepers that it reached."""
    rows = []
    for name, rounds in comparison.found.get("grow", {}).items():
        for at in range(ranking.last_count(rounds[0]) + 1):
            keys = ("sleepers", "rate", "ratio", "ram", "disk", "cancel p50")
            count, rate, ratio, ram, disk, cancel = (rounds[0][f"{key} {at}"] for key in keys)
            cells = (rate, ratio, ram / 1e6, disk / count, cancel)
            rows.append([name, f"{count:,.0f}", *map(format_number, cells)])
    return rows


GROWTH_COLUMNS = (
    "queue",
    "sleepers",
    "rate in, msg/s",
    "against a fresh queue's, ×",
    "memory, MB",
    "disk for each, B",
    "cancel one by id, p50, ms",
)


def shares(comparison: Comparison, limits: Limits, size: str) -> list[Cells]:
    """TurtleMQ's rates as shares of the limits of the machine."""
    connections = EXTENTS[size].connections
    tables = {part: ranking.table(comparison, part, connections) for part in PARTS}
    disk = tables["sleep"]["disk for each"].get(OURS[0])
    rows = []
    for name in OURS:
        into = tables["in"]["in batches of 1,000, bodies of 100 B"].get(name)
        one = tables["in"][ranking.one_by_one(connections[0])].get(name)
        if into is None or one is None or disk is None:
            continue
        sent = into.value * wire_bytes(name)
        written = into.value * disk.value
        single = 1 / (1 / limits.posts_s + limits.sync_s)
        rows += [
            [f"{name}, batches: bytes through loopback", _share(sent, limits.loopback_bytes_s)],
            [f"{name}, batches: bytes on disk, of the sequential write", _share(written, limits.write_bytes_s)],
            [f"{name}, batches: the same, of memcpy", _share(written, limits.copy_bytes_s)],
            [f"{name}, batches: the same, of CRC-32", _share(written, limits.crc_bytes_s)],
            [f"{name}, one by one: of an empty POST and an fdatasync", _share(one.value, single)],
        ]
    return rows


def _share(value: float, limit: float) -> str:
    return f"{value / limit:.1%}"


def versions(comparison: Comparison) -> list[Cells]:
    """The queues with their versions and settings."""
    return [
        [
            queue.name,
            queue.version or f"not installed ({queue.missing}): `make bench-setup`",
            "yes" if queue.durable else "no",
            queue.settings,
        ]
        for queue in comparison.queues
    ]


VERSION_COLUMNS = ("queue", "version", "an answer means fsynced", "settings")


def show(comparison: Comparison, limits: Limits, size: str, results: Path, console: Console) -> None:
    """Print all tables on the terminal; the goals come last, where they stay in sight."""
    for part in PARTS:
        head, rows = part_rows(comparison, part, size)
        console.print(_table(head, rows))
    console.print(_table(GROWTH_COLUMNS, growth_rows(comparison)))
    console.print(_table(("TurtleMQ as a share of what the machine can do", ""), shares(comparison, limits, size)))
    console.print(_table(VERSION_COLUMNS, versions(comparison)))
    console.print(_table(GOAL_COLUMNS, goals(comparison, size, results)))
    for failure in comparison.failed:
        console.print(f"[bold red]FAILED[/] {failure}", highlight=False)
    if warning := quiet.warning(comparison.busy):
        console.print(f"[bold red]{warning}[/]", highlight=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*head)
    for row in rows:
        table.add_row(
            *(f"[bold red]{text}[/]" if text == "NO" else f"[green]{text}[/]" if text == "yes" else text for text in row)
        )
    return table
