"""Comparison of TurtleMQ with its peers, on equal work in one run: part by part, round by round, queue by queue.

Every measurement is a process with its own server in an empty folder. The figures of each round are kept; `ranking` makes rows,
ratios and goals of them. The work itself is in `workloads`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import child, quiet, workloads
from benchmarks.model import format_number
from benchmarks.peers.all_queues import ALL_QUEUES, ONLY_PARTS, OURS, Maker
from benchmarks.workloads import EXTENTS, Extent, Figures

NAME = "versus"
ABOUT = "TurtleMQ and its peers side by side, on the same work: in, asleep, out, on time"
PARTS = ("in", "sleep", "drain", "late", "grow")
_SUMMARY_KEYS = {  # figures that are printed after each measurement
    "in": ("in, 100 B", "in, 1000 B", "cpu, 100 B", "one by one, 1", "one by one, 64"),
    "sleep": ("sleepers 0", "restart", "cancel p50 0"),
    "drain": ("count", "rate", "lost", "twice"),
    "late": ("alone p50", "alone p99", "beside p50", "beside p99", "lost", "twice", "early"),
    "grow": ("stored", "restart", "left"),
}
_LIMIT_S = 300.0  # for one measurement, after which a server that hangs is given up
Progress = Callable[[str], child.Progress]


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Version and settings of a queue. The field names are those of the JSON results."""

    name: str
    version: str
    settings: str
    durable: bool
    missing: str  # the missing program or package; empty if all are installed


@dataclass(slots=True)
class Comparison:
    """The figures of all queues. The field names are those of the JSON results."""

    queues: list[QueueInfo]
    found: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)  # part, queue, round
    failed: list[str] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # share of the machine that others used, before each round
    seconds: float = 0.0

    @property
    def present(self) -> list[str]:
        return [queue.name for queue in self.queues if not queue.missing]


def queue_info(name: str, maker: Maker) -> QueueInfo:
    queue = maker(Path())
    missing = queue.missing() or ""
    return QueueInfo(name, "" if missing else queue.version(), queue.settings, queue.durable, missing)


def all_queue_infos() -> list[QueueInfo]:
    """All queues, installed or not."""
    return [queue_info(name, maker) for name, maker in ALL_QUEUES.items()]


def compare(size: str, folder: Path, progress: Progress, say: Callable[[str], None], queues: Sequence[QueueInfo]) -> Comparison:
    """Run the whole comparison; `say` prints a line for each result."""
    begin = time.monotonic()
    comparison = Comparison(list(queues))
    for queue in comparison.queues:
        if queue.missing:
            say(f"{queue.name} is not installed ({queue.missing}): `make bench-setup` brings it. Its columns stay empty.")
    for part in PARTS:
        rounds = 1 if part == "grow" else EXTENTS[size].rounds  # has its own turns and restarts inside
        for turn in range(rounds):
            progress("is the machine quiet?")
            comparison.busy.append(quiet.busy_share(1.0 if size == "full" else 0.3))
            if warning := quiet.warning(comparison.busy[-1:]):
                say(warning)
            for name in comparison.present:
                if part not in ONLY_PARTS.get(name, PARTS):
                    continue
                title = f"{part}, round {turn + 1} of {rounds}: {name}"
                _measure_once(comparison, part, name, turn, size, folder, progress(title))
                say(f"{title}: {_summary(comparison, part, name)}")
    comparison.seconds = time.monotonic() - begin
    return comparison


def _measure_once(
    comparison: Comparison, part: str, name: str, turn: int, size: str, parent: Path, progress: child.Progress
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="versus-", dir=parent))
    try:
        found = child.call(measure, progress=progress, part=part, name=name, turn=turn, size=size, folder=str(folder))
    except child.ChildFailed as wrong:
        comparison.failed.append(f"{part}: {name}: {wrong}")
    else:
        comparison.found.setdefault(part, {}).setdefault(name, []).append(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # unwritten pages of one measurement must not slow the next one down


def _summary(comparison: Comparison, part: str, name: str) -> str:
    rounds = comparison.found.get(part, {}).get(name)
    return (
        " · ".join(f"{key} {format_number(rounds[-1][key])}" for key in _SUMMARY_KEYS[part] if key in rounds[-1])
        if rounds
        else "FAILED"
    )


def measure(part: str, name: str, turn: int, size: str, folder: str) -> Figures:
    """In a child process: one workload on one queue."""
    extent = EXTENTS[size]
    return uvloop.run(asyncio.wait_for(_workload(part, name, turn, extent, Path(folder)), _limit_s(part, extent)))


def _limit_s(part: str, extent: Extent) -> float:
    return _LIMIT_S + (max(extent.ours) / 100_000 if part == "grow" else 0)


def _workload(part: str, name: str, turn: int, extent: Extent, folder: Path) -> Coroutine[Any, Any, Figures]:
    make = _new_queues(ALL_QUEUES[name], folder)
    queue, seed = next(make), turn + 1
    if part == "in":
        return workloads.ingest(queue, extent, seed)
    if part == "drain":
        return workloads.drain(queue, extent, seed)
    if part == "late":
        return workloads.lateness(queue, extent, seed)
    if part == "sleep":
        return workloads.sleep(queue, extent, seed, (extent.sleepers,))
    counts = extent.ours if name == OURS[1] else extent.more
    return workloads.sleep(queue, extent, seed, counts, [next(make) for _ in counts])


def _new_queues(maker: Maker, parent: Path) -> Iterator[Any]:
    """New queues, each in an empty folder."""
    for copy in range(100):
        folder = parent / str(copy)
        folder.mkdir()
        yield maker(folder)
