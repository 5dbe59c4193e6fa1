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
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import child, machine, report
from benchmarks.catalogue import ALL
from benchmarks.model import FULL, QUICK, TINY, Figure, Size
from benchmarks.run import Benchmark, Run
from benchmarks.state import States

FOLDER_VARIABLE = "TURTLEMQ_BENCH_DIR"
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    if options.list:
        _list(Console())
        return 0
    chosen = _choose(options.names)
    size = QUICK if options.quick else SIZES[options.size]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))  # so that the data folder is removed then as well
    try:
        with scratch(size.disk_bytes) as folder:
            found = measure(chosen, size, folder, console)
    except KeyboardInterrupt:
        print("Stopped. The data is removed.", file=sys.stderr)
        return 130
    report.show(found, Console(width=None if sys.stdout.isatty() else 180))
    path = report.keep(found, options.results)
    print(f"Kept as {os.path.relpath(path)}.")
    if size is FULL and chosen == list(ALL):
        report.RESULTS.write_text(report.markdown(found), encoding="utf-8")
        print(f"Written: {os.path.relpath(report.RESULTS)}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure TurtleMQ's engine: figures, goals, and the share of what this machine could do.",
        epilog=f"Data goes to a temporary folder in the project, or in ${FOLDER_VARIABLE}, and is removed at the end. The full "
        f"size needs {FULL.disk_bytes / 1e9:.0f} GB and half an hour, --quick {QUICK.disk_bytes / 1e9:.0f} GB and a minute.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run, see --list (default: all)")
    parser.add_argument("--list", action="store_true", help="say what there is, with its goals, and stop")
    parser.add_argument("--quick", action="store_true", help=f"the same shape with {QUICK.sleepers:,} sleepers")
    parser.add_argument("--size", choices=SIZES, default=FULL.name, help=f"full: {FULL.sleepers:,} sleepers (default)")
    parser.add_argument("--results", type=Path, default=report.FOLDER / "results", metavar="DIR", help="where JSON is kept")
    return parser


def _list(console: Console) -> None:
    for benchmark in ALL:
        console.print(f"[bold]{benchmark.name}[/]: {benchmark.about}", highlight=False)
        for name, goal in benchmark.goals.items():
            console.print(f"    {name}: {goal.sign} {report.number(goal.value)}", highlight=False)


def _choose(names: Sequence[str]) -> list[Benchmark]:
    unknown = sorted(set(names) - {benchmark.name for benchmark in ALL})
    if unknown:
        sys.exit(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(benchmark.name for benchmark in ALL)}.")
    return [benchmark for benchmark in ALL if not names or benchmark.name in names]


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


def measure(chosen: Sequence[Benchmark], size: Size, folder: Path, console: Console) -> report.Report:
    """Run benchmarks one after the other, with progress; figures are shown as they come."""
    began, begin = datetime.now(UTC), time.monotonic()
    described = machine.describe(folder)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    figures: list[tuple[str, Figure]] = []
    with bar:
        progress = _progress(bar)
        progress("measuring the machine")
        limits = machine.measure(folder, size.limit_bytes)
        run = Run(size, limits, States(size, _folders(folder), progress), _folders(folder), progress)
        for benchmark in chosen:
            for figure in benchmark.run(run):
                figures.append((benchmark.name, figure))
                _, name, value, goal, met, *_ = report.cells(benchmark.name, figure)
                console.print(f"{benchmark.name}: {name}: {value}" + (f" (goal {goal}: {met})" if goal else ""), highlight=False)
            _clear(folder)
    return report.Report(began, size, described, limits, figures, time.monotonic() - begin)


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
