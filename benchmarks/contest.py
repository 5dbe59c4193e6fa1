"""TurtleMQ and its peers on the same work in the same run: part by part, round by round, queue by queue in each round.

Every measurement is a process of its own with a server of its own in an empty folder. What is kept is what each round found;
tables, ratios and goals are made from that in benchmarks/ranking.py.
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

from benchmarks import child, quiet, works
from benchmarks.model import number
from benchmarks.peers.every import EVERY, ONLY, OURS, Maker
from benchmarks.works import EXTENTS, Extent, Figures

NAME = "versus"
ABOUT = "TurtleMQ and its peers side by side, on the same work: in, asleep, out, on time"
PARTS = ("in", "sleep", "drain", "late", "grow")
_TOLD = {  # as they come
    "in": ("in, 100 B", "in, 1000 B", "cpu, 100 B", "one by one, 1", "one by one, 64"),
    "sleep": ("sleepers 0", "restart", "cancel p50 0"),
    "drain": ("count", "rate", "lost", "twice"),
    "late": ("alone p50", "alone p99", "beside p50", "beside p99", "lost", "twice", "early"),
    "grow": ("stored", "restart", "left"),
}
_LIMIT_S = 300.0  # for one measurement: a server that hangs is given up
Progress = Callable[[str], child.Progress]


@dataclass(frozen=True, slots=True)
class Told:
    """What a queue says of itself."""

    name: str
    version: str
    settings: str
    durable: bool
    missing: str  # what is not installed; empty where all is there


@dataclass(slots=True)
class Contest:
    """Everything that was found side by side."""

    queues: list[Told]
    found: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)  # part, queue, round
    failed: list[str] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # the share of the machine that others used, before each round
    seconds: float = 0.0

    @property
    def present(self) -> list[str]:
        return [queue.name for queue in self.queues if not queue.missing]


def told(name: str, maker: Maker) -> Told:
    queue = maker(Path())
    missing = queue.missing() or ""
    return Told(name, "" if missing else queue.version(), queue.settings, queue.durable, missing)


def everybody() -> list[Told]:
    """All queues, and whether they are there."""
    return [told(name, maker) for name, maker in EVERY.items()]


def hold(size: str, folder: Path, progress: Progress, say: Callable[[str], None], queues: Sequence[Told]) -> Contest:
    """The whole contest; `say` hears of each result."""
    begin = time.monotonic()
    contest = Contest(list(queues))
    for queue in contest.queues:
        if queue.missing:
            say(f"{queue.name} is not installed ({queue.missing}): `make bench-setup` brings it. Its columns stay empty.")
    for part in PARTS:
        rounds = 1 if part == "grow" else EXTENTS[size].rounds  # it takes turns inside, and restarts several times
        for turn in range(rounds):
            progress("is the machine quiet?")
            contest.busy.append(quiet.busy(1.0 if size == "full" else 0.3))
            if warning := quiet.warning(contest.busy[-1:]):
                say(warning)
            for name in contest.present:
                if part not in ONLY.get(name, PARTS):
                    continue
                title = f"{part}, round {turn + 1} of {rounds}: {name}"
                _one(contest, part, name, turn, size, folder, progress(title))
                say(f"{title}: {_short(contest, part, name)}")
    contest.seconds = time.monotonic() - begin
    return contest


def _one(contest: Contest, part: str, name: str, turn: int, size: str, parent: Path, progress: child.Progress) -> None:
    folder = Path(tempfile.mkdtemp(prefix="versus-", dir=parent))
    try:
        found = child.call(measure, progress=progress, part=part, name=name, turn=turn, size=size, folder=str(folder))
    except child.ChildFailed as wrong:
        contest.failed.append(f"{part}: {name}: {wrong}")
    else:
        contest.found.setdefault(part, {}).setdefault(name, []).append(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # what one has left to be written is not to slow the next one down


def _short(contest: Contest, part: str, name: str) -> str:
    rounds = contest.found.get(part, {}).get(name)
    return " · ".join(f"{key} {number(rounds[-1][key])}" for key in _TOLD[part] if key in rounds[-1]) if rounds else "FAILED"


def measure(part: str, name: str, turn: int, size: str, folder: str) -> Figures:
    """Runs in a process of its own."""
    extent = EXTENTS[size]
    return uvloop.run(asyncio.wait_for(_work(part, name, turn, extent, Path(folder)), _limit(part, extent)))


def _limit(part: str, extent: Extent) -> float:
    return _LIMIT_S + (max(extent.ours) / 100_000 if part == "grow" else 0)


def _work(part: str, name: str, turn: int, extent: Extent, folder: Path) -> Coroutine[Any, Any, Figures]:
    make = _folders(EVERY[name], folder)
    queue, seed = next(make), turn + 1
    if part == "in":
        return works.ingest(queue, extent, seed)
    if part == "drain":
        return works.drain(queue, extent, seed)
    if part == "late":
        return works.lateness(queue, extent, seed)
    if part == "sleep":
        return works.sleep(queue, extent, seed, (extent.sleepers,))
    counts = extent.ours if name == OURS[1] else extent.more
    return works.sleep(queue, extent, seed, counts, [next(make) for _ in counts])


def _folders(maker: Maker, parent: Path) -> Iterator[Any]:
    """Queues in empty folders, as many as are asked for."""
    for copy in range(100):
        folder = parent / str(copy)
        folder.mkdir()
        yield maker(folder)
