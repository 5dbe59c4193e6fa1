"""`python -m benchmarks`: run benchmarks and show what they found."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import child, contest, machine, report
from benchmarks.catalogue import ALL, LONG
from benchmarks.model import FULL, QUICK, TINY, Size, number
from benchmarks.run import Benchmark, Run
from benchmarks.state import States

FOLDER_VARIABLE = "TURTLEMQ_BENCH_DIR"
TIMES = (
    f"The full size needs {FULL.disk_bytes / 1e9:.0f} GB and about 40 minutes, 25 for the peers and 15 for the engine; "
    f"--quick needs {QUICK.disk_bytes / 1e9:.0f} GB and less than five minutes."
)
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    if options.list:
        _list(Console())
        return 0
    if options.report:
        report.write(report.load(options.report))
        print(f"Written: {os.path.relpath(report.RESULTS)} and the pictures beside it.")
        return 0
    size = QUICK if options.quick else SIZES[options.size]
    versus, chosen = _choose(options.names, size)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))  # so that the data folder is removed then as well
    try:
        with scratch(size.disk_bytes) as folder:
            found = measure(chosen, size, folder, console, versus=versus, minutes=options.minutes)
    except KeyboardInterrupt:
        print("Stopped. The data is removed.", file=sys.stderr)
        return 130
    report.show(found, Console(width=None if sys.stdout.isatty() else 180))
    path = report.keep(found, options.results)
    print(f"Kept as {os.path.relpath(path)}.")
    if size is FULL and not options.names:
        report.write(found)
        print(f"Written: {os.path.relpath(report.RESULTS)}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure TurtleMQ: side by side with its peers, then the engine alone, with goals and the share of what this "
        "machine could do.",
        epilog=f"Data goes to a temporary folder in the project, or in ${FOLDER_VARIABLE}, and is removed at the end. {TIMES}",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run, see --list (default: all but the longest)")
    parser.add_argument("--list", action="store_true", help="say what there is, with its goals, and stop")
    parser.add_argument("--quick", action="store_true", help=f"the same shape with {QUICK.sleepers:,} sleepers")
    parser.add_argument("--size", choices=SIZES, default=FULL.name, help=f"full: {FULL.sleepers:,} sleepers (default)")
    parser.add_argument("--results", type=Path, default=report.KEPT, metavar="DIR", help="where JSON is kept")
    parser.add_argument("--minutes", type=float, default=36, help="begin no benchmark of the engine after so many (default 36)")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write RESULTS.md from a run that was kept, and stop")
    return parser


def _list(console: Console) -> None:
    console.print(f"[bold]{contest.NAME}[/]: {contest.ABOUT}", highlight=False)
    for benchmark in ALL:
        console.print(f"[bold]{benchmark.name}[/]: {benchmark.about}", highlight=False)
        for name, goal in benchmark.goals.items():
            console.print(f"    {name}: {goal.sign} {number(goal.value)}", highlight=False)


def _choose(names: Sequence[str], size: Size) -> tuple[bool, list[Benchmark]]:
    """Is it side by side, and which benchmarks of the engine."""
    known = [contest.NAME, *(benchmark.name for benchmark in ALL)]
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(known)}.")
    wanted = names or [name for name in known if name not in LONG or size is not FULL]
    return contest.NAME in wanted, [benchmark for benchmark in ALL if benchmark.name in wanted]


@contextmanager
def scratch(needed_bytes: int) -> Iterator[Path]:
    """A temporary folder on the disk under test, with enough room on it; removed whatever happens."""
    given = os.environ.get(FOLDER_VARIABLE)
    parent = Path(given) if given else child.ROOT / "benchmarks" / "results"
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        sys.exit(
            f"The benchmarks need {needed_bytes / 1e9:.1f} GB in {parent}, there are {free / 1e9:.1f} GB. "
            f"Make room, take --quick, or name a folder on another disk in {FOLDER_VARIABLE}."
        )
    folder = Path(tempfile.mkdtemp(prefix="turtlemq-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(
    chosen: Sequence[Benchmark], size: Size, folder: Path, console: Console, *, versus: bool = False, minutes: float = 36
) -> report.Report:
    """Side by side first, then benchmarks one after the other, with progress; figures are shown as they come."""
    began, begin = datetime.now(UTC), time.monotonic()
    described = machine.describe(folder)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    with bar:
        progress = _progress(bar)
        progress("measuring the machine")
        limits = machine.measure(folder, size.limit_bytes)
        run = Run(size, limits, States(size, _folders(folder), progress), _folders(folder), progress)
        found = report.Report(began, size, described, limits, [], 0.0)
        if versus:
            say = partial(console.print, highlight=False)
            held = contest.hold(size.name, folder, progress, say, contest.everybody())
            found = replace(found, contest=held)
        for benchmark in chosen:
            if time.monotonic() - begin > 60 * minutes:
                found.skipped.append(benchmark.name)
                continue
            for figure in benchmark.run(run):
                found.figures.append((benchmark.name, figure))
                _, name, value, goal, met, *_ = report.cells(benchmark.name, figure)
                console.print(f"{benchmark.name}: {name}: {value}" + (f" (goal {goal}: {met})" if goal else ""), highlight=False)
            _clear(folder)
    return replace(found, seconds=time.monotonic() - begin)


_STATES = ("own", "server")


def _folders(parent: Path) -> Callable[[str], str]:
    def folder(name: str) -> str:
        return str(parent / name) if name in _STATES else tempfile.mkdtemp(prefix=f"{name}-", dir=parent)

    return folder


def _clear(folder: Path) -> None:
    """The data of one benchmark goes before the next begins; the big states stay."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in _STATES:
            shutil.rmtree(path, ignore_errors=True)


def _progress(bar: Progress) -> Callable[[str], child.Progress]:
    """One bar that changes its title."""
    task = bar.add_task("", total=1.0)

    def title(text: str) -> child.Progress:
        bar.reset(task, description=text, total=1.0)
        return lambda share: bar.update(task, completed=share)

    return title


if __name__ == "__main__":
    sys.exit(main())
