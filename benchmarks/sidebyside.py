"""The contest for people: goals with ratios against the best peers, all rows queue by queue, and TurtleMQ as a share of what the
machine can do. Tables for the terminal and the same ones in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Drawn

from benchmarks import quiet, ranking
from benchmarks.contest import Contest
from benchmarks.machine import Limits
from benchmarks.model import Figure, number
from benchmarks.peers.every import ONLY, OURS
from benchmarks.peers.turtle import wire_bytes
from benchmarks.ranking import PARTS, Verdict
from benchmarks.works import EXTENTS

GOAL_COLUMNS = ("work", "TurtleMQ", "goal", "met", "best peer", "against it", "best durable peer", "against it")
Cells = list[str]


def cell(figure: Figure | None) -> str:
    """A median with its spread."""
    if figure is None:
        return "–"
    spread = "" if figure.spread is None else f" ±{figure.spread:.0%}"
    return f"{number(figure.value)}{spread}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{number(ratio)} ×"


def goal_cells(verdict: Verdict) -> Cells:
    """One row of the goals."""
    unit = verdict.ours.unit if verdict.ours else ""

    def peer(found: tuple[str, float] | None) -> str:
        return "–" if found is None else f"{number(found[1])} {found[0]}"

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


def goals(contest: Contest, size: str, results: Path) -> list[Cells]:
    """All goals, those of the Spark source from its last run included."""
    found = [goal_cells(verdict) for verdict in ranking.verdicts(contest, EXTENTS[size].connections)]
    return found + spark_goals(results)


def spark_goals(results: Path) -> list[Cells]:
    """What `make bench-spark` found last, if it was run."""
    kept = sorted(results.glob("*-spark.json"))
    if not kept:
        return [["Spark scan", "–", "see `make bench-spark`", "not measured", "–", "", "–", ""]]
    told = json.loads(kept[-1].read_text(encoding="utf-8"))
    return [
        [
            f"Spark, {told['rows']:,} rows: {figure['benchmark']}, {figure['figure']}",
            f"{number(figure['value'])} {figure['unit']}",
            f"of {kept[-1].name[:10]}",
            {None: "", True: "yes", False: "NO"}[figure["met"]],
            "",
            "",
            "",
            "",
        ]
        for figure in told["figures"]
        if figure["met"] is not None
    ]


def part_rows(contest: Contest, part: str, size: str) -> tuple[Cells, list[Cells]]:
    """Columns and rows of one part: a column for each queue, those that are missing included."""
    names = [queue.name for queue in contest.queues if part in ONLY.get(queue.name, PARTS)]
    table = ranking.table(contest, part, EXTENTS[size].connections)
    units = {row.name: row.unit for row in ranking.rows(EXTENTS[size].connections)}
    head = [PARTS[part], *names]
    rows = [
        [f"{row}, {units[row]}" if units[row] else row, *(cell(figures.get(name)) for name in names)]
        for row, figures in table.items()
    ]
    return head, rows


def growth_rows(contest: Contest) -> list[Cells]:
    """Every queue at every count that it got to."""
    found = []
    for name, rounds in contest.found.get("grow", {}).items():
        for at in range(ranking.last(rounds[0]) + 1):
            keys = ("sleepers", "rate", "ratio", "ram", "disk", "cancel p50")
            count, rate, ratio, ram, disk, cancel = (rounds[0][f"{key} {at}"] for key in keys)
            cells = (rate, ratio, ram / 1e6, disk / count, cancel)
            found.append([name, f"{count:,.0f}", *map(number, cells)])
    return found


GROWTH_COLUMNS = (
    "queue",
    "sleepers",
    "rate in, msg/s",
    "against a fresh queue's, ×",
    "memory, MB",
    "disk for each, B",
    "cancel one by id, p50, ms",
)


def shares(contest: Contest, limits: Limits, size: str) -> list[Cells]:
    """TurtleMQ's rates as a share of what the machine does without it."""
    connections = EXTENTS[size].connections
    tables = {part: ranking.table(contest, part, connections) for part in PARTS}
    disk = tables["sleep"]["disk for each"].get(OURS[0])
    found = []
    for name in OURS:
        into = tables["in"]["in batches of 1,000, bodies of 100 B"].get(name)
        one = tables["in"][ranking.one_by_one(connections[0])].get(name)
        if into is None or one is None or disk is None:
            continue
        sent = into.value * wire_bytes(name)
        written = into.value * disk.value
        single = 1 / (1 / limits.posts_s + limits.sync_s)
        found += [
            [f"{name}, batches: bytes through loopback", _share(sent, limits.loopback_bytes_s)],
            [f"{name}, batches: bytes on disk, of the sequential write", _share(written, limits.write_bytes_s)],
            [f"{name}, batches: the same, of memcpy", _share(written, limits.copy_bytes_s)],
            [f"{name}, batches: the same, of CRC-32", _share(written, limits.crc_bytes_s)],
            [f"{name}, one by one: of an empty POST and an fdatasync", _share(one.value, single)],
        ]
    return found


def _share(value: float, limit: float) -> str:
    return f"{value / limit:.1%}"


def versions(contest: Contest) -> list[Cells]:
    """What was measured, and with which settings."""
    return [
        [
            queue.name,
            queue.version or f"not installed ({queue.missing}): `make bench-setup`",
            "yes" if queue.durable else "no",
            queue.settings,
        ]
        for queue in contest.queues
    ]


VERSION_COLUMNS = ("queue", "version", "an answer means fsynced", "settings")


def show(contest: Contest, limits: Limits, size: str, results: Path, console: Console) -> None:
    """Everything, on the terminal; the goals last, where they are seen."""
    for part in PARTS:
        head, rows = part_rows(contest, part, size)
        console.print(_drawn(head, rows))
    console.print(_drawn(GROWTH_COLUMNS, growth_rows(contest)))
    console.print(_drawn(("TurtleMQ as a share of what the machine can do", ""), shares(contest, limits, size)))
    console.print(_drawn(VERSION_COLUMNS, versions(contest)))
    console.print(_drawn(GOAL_COLUMNS, goals(contest, size, results)))
    for failure in contest.failed:
        console.print(f"[bold red]FAILED[/] {failure}", highlight=False)
    if warning := quiet.warning(contest.busy):
        console.print(f"[bold red]{warning}[/]", highlight=False)


def _drawn(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Drawn:
    drawn = Drawn(*head)
    for row in rows:
        drawn.add_row(
            *(f"[bold red]{text}[/]" if text == "NO" else f"[green]{text}[/]" if text == "yes" else text for text in row)
        )
    return drawn
