"""`python -m benchmarks`: the command line that runs benchmarks and shows their figures."""

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

from benchmarks import child, comparison, flow, machine, quiet, report
from benchmarks.catalogue import ALL, LONG
from benchmarks.model import FULL, QUICK, TINY, Size, format_number
from benchmarks.run import Benchmark, Run
from benchmarks.state import States

FOLDER_VARIABLE = "TURTLEMQ_BENCH_DIR"
FLOW = "flow"  # a name for all scenarios of flow control
TIMES = (
    f"The full size needs {FULL.disk_bytes / 1e9:.0f} GB and about 45 minutes, 25 for the peers, 20 for the rest; "
    f"--quick needs {QUICK.disk_bytes / 1e9:.0f} GB and less than five minutes."
)
SIZES = {size.name: size for size in (FULL, QUICK, TINY)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run. Returns the exit code."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))  # an exception, so that the data folder is removed
    try:
        with scratch(size.disk_bytes) as folder:
            results = measure(chosen, size, folder, console, versus=versus, minutes=options.minutes)
    except KeyboardInterrupt:
        print("Stopped. The data is removed.", file=sys.stderr)
        return 130
    report.show(results, Console(width=None if sys.stdout.isatty() else 180))
    path = report.save(results, options.results)
    print(f"Kept as {os.path.relpath(path)}.")
    if size is FULL and not options.names:
        report.write(results)
        print(f"Written: {os.path.relpath(report.RESULTS)}.")
    if size is FULL and options.names == [FLOW]:
        report.write_flow(results)
        print(f"Written: the section about flow control in {os.path.relpath(report.RESULTS)}.")
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
    parser.add_argument("--results", type=Path, default=report.RESULTS_FOLDER, metavar="DIR", help="where JSON is kept")
    parser.add_argument("--minutes", type=float, default=41, help="begin no benchmark of the engine after so many (default 41)")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write RESULTS.md from a run that was kept, and stop")
    return parser


def _list(console: Console) -> None:
    console.print(f"[bold]{comparison.NAME}[/]: {comparison.ABOUT}", highlight=False)
    for benchmark in ALL:
        console.print(f"[bold]{benchmark.name}[/]: {benchmark.about}", highlight=False)
        for name, goal in benchmark.goals.items():
            console.print(f"    {name}: {goal.sign} {format_number(goal.value)}", highlight=False)


def _choose(names: Sequence[str], size: Size) -> tuple[bool, list[Benchmark]]:
    """Whether to compare with the peers, and the chosen benchmarks of the engine."""
    known = [comparison.NAME, *(benchmark.name for benchmark in ALL)]
    families = {name: [name] for name in known} | {FLOW: [scenario.name for scenario in flow.SCENARIOS]}
    unknown = sorted(set(names) - set(families))
    if unknown:
        sys.exit(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(families)}.")
    chosen = [name for given in names for name in families[given]]
    wanted = chosen or [name for name in known if name not in LONG or size is not FULL]
    return comparison.NAME in wanted, [benchmark for benchmark in ALL if benchmark.name in wanted]


@contextmanager
def scratch(needed_bytes: int) -> Iterator[Path]:
    """A temporary folder on the disk under test, with enough room; always removed at the end."""
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
    chosen: Sequence[Benchmark], size: Size, folder: Path, console: Console, *, versus: bool = False, minutes: float = 41
) -> report.Report:
    """Run the comparison with the peers, then the benchmarks one by one, and print each figure at once."""
    began, begin, busy = datetime.now(UTC), time.monotonic(), list[str]()
    description = machine.describe(folder)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    with bar:
        progress = _progress(bar)
        progress("measuring the machine")
        limits = machine.measure(folder, size.limit_bytes)
        run = Run(size, limits, States(size, _folders(folder), progress), _folders(folder), progress)
        results = report.Report(began, size, description, limits, [], 0.0)
        if versus:
            say = partial(console.print, highlight=False)
            compared = comparison.compare(size.name, folder, progress, say, comparison.all_queue_infos())
            results = replace(results, comparison=compared)
        for benchmark in chosen:
            if benchmark.needs and shutil.which(benchmark.needs) is None:
                console.print(f"{benchmark.name}: not run, {benchmark.needs} is not installed", highlight=False)
                continue
            if time.monotonic() - begin > 60 * minutes:
                results.skipped.append(benchmark.name)
                continue
            before = quiet.busy_share(1.0 if size is FULL else 0.05)
            for figure in benchmark.run(run):
                results.figures.append((benchmark.name, figure))
                _, name, value, goal, met, *_ = report.cells(benchmark.name, figure)
                console.print(f"{benchmark.name}: {name}: {value}" + (f" (goal {goal}: {met})" if goal else ""), highlight=False)
            _clear(folder)
            busy.append(f"{max(before, quiet.busy_share(1.0 if size is FULL else 0.05)):.0%}")
            description[report.OTHERS] = ", ".join(busy)
    return replace(results, seconds=time.monotonic() - begin)


_STATES = ("own", "server")  # folders of the big states, which several benchmarks share


def _folders(parent: Path) -> Callable[[str], str]:
    def folder(name: str) -> str:
        return str(parent / name) if name in _STATES else tempfile.mkdtemp(prefix=f"{name}-", dir=parent)

    return folder


def _clear(folder: Path) -> None:
    """Remove the data of a benchmark before the next one begins; the big states stay."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in _STATES:
            shutil.rmtree(path, ignore_errors=True)


def _progress(bar: Progress) -> Callable[[str], child.Progress]:
    """One progress bar for all work: a title in, a function for shares from 0 to 1 out."""
    task = bar.add_task("", total=1.0)

    def title(text: str) -> child.Progress:
        bar.reset(task, description=text, total=1.0)
        return lambda share: bar.update(task, completed=share)

    return title


if __name__ == "__main__":
    sys.exit(main())
