"""`python -m tests.trust`: run parts of the trust suite at length, and write down the figures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.trust.kept import Kept
from tests.trust.model import TRIED, Broken, Figures, Part
from tests.trust.parts import all_parts, apart, chunk

ROOT = Path(__file__).resolve().parent.parent.parent
DOC = ROOT / "docs" / "TRUST.md"
_BEGIN, _END = "<!-- figures of the last full run -->", "<!-- end of figures -->"


@dataclass
class Outcome:
    """The findings of a part."""

    part: Part
    cases: int = 0
    seconds: float = 0.0  # of this run, and of earlier ones that it goes on with
    figures: Figures = field(default_factory=Figures)
    failures: list[str] = field(default_factory=list)

    @property
    def seen(self) -> str:
        """The figures in words."""
        words = [f"{count:,} {name}" for name, count in self.figures.items() if not name.startswith(TRIED)]
        return ", ".join(words if self.part.sum_up is None else [self.part.sum_up(self.figures), *words])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parts = {part.name: part for part in all_parts()}
    options = _parser(parts).parse_args(arguments)
    unknown = sorted(set(options.parts) - set(parts))
    if unknown:
        sys.exit(f"There is no part {unknown[0]!r}; there are: {', '.join(parts)}.")
    if options.list:
        for part in parts.values():
            print(f"{part.name}: {part.about} {part.quick:,} {part.unit} in `make test`, {part.full:,} in `make trust`.")
        return 0
    outcomes = [_run(parts[name], options) for name in options.parts or parts]
    failed = [outcome for outcome in outcomes if outcome.failures]
    if options.write:
        _write_whole(outcomes)
    for outcome in failed:
        print(f"{outcome.part.name}: {len(outcome.failures)} failures.", file=sys.stderr)
    return 1 if failed else 0


def _write_whole(outcomes: Sequence[Outcome]) -> None:
    """Only a run that came to its end, and passed, is worth writing down."""
    whole = [outcome for outcome in outcomes if outcome.cases >= outcome.part.full and not outcome.failures]
    if whole:
        write(whole)
        print(f"Written: {os.path.relpath(DOC)}: {', '.join(outcome.part.name for outcome in whole)}.")


def _parser(parts: dict[str, Part]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust",
        description="Try to break what TurtleMQ promises. What each part does: --list.",
        epilog="A case is its number: a failure names it, and --only runs it again. Data is in temporary folders, in memory "
        "if there is room.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--cases", type=int, metavar="N", help="how many (default: as many as `make trust`)")
    parser.add_argument("--quick", action="store_true", help="as many as `make test`")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first one")
    parser.add_argument("--only", type=int, metavar="N", help="this case alone, with what it prints")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at once (default: cores)")
    parser.add_argument("--resume", action="store_true", help="count cases that passed with this code before; run the others")
    parser.add_argument("--keep-going", action="store_true", help="do not stop a part at its first failure")
    parser.add_argument("--write", action="store_true", help="put the figures of full runs without a failure into docs/TRUST.md")
    return parser


def _run(part: Part, options: argparse.Namespace) -> Outcome:
    outcome, begin = Outcome(part), time.monotonic()
    if options.only is not None:
        outcome.figures.update(chunk(part.name, options.only, options.only + 1))  # += would drop those that are 0
        outcome.cases = 1
    else:
        _spread(outcome, options)
    outcome.seconds += time.monotonic() - begin
    try:
        seen = outcome.seen
    except Broken as error:
        seen = str(error)
        outcome.failures.append(seen)
    if options.only is None and not options.first and not outcome.failures:
        outcome.failures += part.lacks(outcome.cases, outcome.figures)
        seen = "; ".join([*outcome.failures, seen])
    verdict = "FAILED" if outcome.failures else "passed"
    print(f"{part.name}: {outcome.cases:,} {part.unit} {verdict} in {outcome.seconds:,.0f} s: {seen}", flush=True)
    return outcome


def _spread(outcome: Outcome, options: argparse.Namespace) -> None:
    """All chunks of a part over a few processes, with a bar."""
    part, count = outcome.part, options.cases or (outcome.part.quick if options.quick else outcome.part.full)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    jobs = 1 if part.alone else options.jobs
    with Progress(*columns, console=Console(stderr=True)) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task(part.name, total=count)
        first, last = options.first, options.first + count
        step = part.chunk * min(8, max(1, count // (part.chunk * jobs * 16)))  # of many, more in one process
        kept, work = Kept(part.name), {}
        for at in range(first, last, step):
            passed = kept.get(at, min(last, at + step)) if options.resume else None
            if passed is None:
                work[pool.submit(_timed, part.name, at, min(last, at + step))] = at
            else:
                outcome.seconds += passed[0] / jobs
                _count(outcome, bar, min(last, at + step) - at, passed[1])
        for done in as_completed(work):
            at, end = work[done], min(last, work[done] + step)
            error = done.exception()
            if error is None:
                kept.add(at, end, *done.result())
                _count(outcome, bar, end - at, done.result()[1])
            else:
                bar.advance(task, end - at)
                outcome.failures.append(str(error))
                print(f"{part.name}, cases from {at}: {error}", file=sys.stderr, flush=True)
                if not options.keep_going:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break  # those that were cancelled never end


def _timed(name: str, first: int, last: int) -> tuple[float, Figures]:
    begin = time.monotonic()
    figures = apart(name, first, last)
    return time.monotonic() - begin, figures


def _count(outcome: Outcome, bar: Progress, size: int, figures: Figures) -> None:
    """Cases that have passed. Without a terminal there is no bar: a line for each tenth, or fiftieth with figures to reach."""
    outcome.figures.update(figures)
    outcome.cases += size
    (task,) = bar.tasks
    bar.advance(task.id, size)
    lines = 50 if outcome.part.floors else 10
    shares = [int(lines * done / (task.total or 1)) for done in (task.completed - size, task.completed)]
    if not bar.console.is_terminal and shares[0] < shares[1]:
        reached = "".join(f", {outcome.figures[name]:,} {name}" for name in outcome.part.floors)
        print(f"{outcome.part.name}: {task.completed:,.0f} of {task.total:,.0f}{reached}", file=sys.stderr, flush=True)


def write(outcomes: Sequence[Outcome]) -> None:
    """The table of figures in docs/TRUST.md: rows of parts that ran are replaced, the others stay."""
    text = DOC.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    table, _, after = rest.partition(_END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ") and "---" not in line}
    rows.pop("part", None)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for outcome in outcomes:
        cases = f"{outcome.cases:,} {outcome.part.unit}"
        rows[outcome.part.name] = f"| {outcome.part.name} | {cases} | {outcome.seen} | {outcome.seconds:,.0f} s, {today} |"
    ordered = [rows[part.name] for part in all_parts() if part.name in rows]
    head = ["| part | tried | seen | took, on |", "| --- | --- | --- | --- |"]
    DOC.write_text("\n".join([before + _BEGIN, *head, *ordered, _END + after]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
