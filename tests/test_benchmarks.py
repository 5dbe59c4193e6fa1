"""The benchmarks run, at a size at which their figures mean nothing, and their statements about themselves are true.

No time is asserted. Each benchmark asserts its own counts while it measures: appended messages sleep, fired ones are in the
ready log, cancelled ones are gone.
"""

from __future__ import annotations

import doctest
import io
import json
import math
import os
import shutil
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks.__main__ as command
from benchmarks import child, flow, machine, model, probe, report, restart, state
from benchmarks.catalogue import ALL, LONG
from benchmarks.flow import server as flow_server
from benchmarks.model import FULL, QUICK, TINY, Figure, Goal, Size
from benchmarks.run import Benchmark

QUIET = Console(quiet=True)
UNITS = {"msg/s", "MB/s", "MB", "B", "s", "ms", "µs", "×", "%", ""}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ALL, ids=lambda benchmark: benchmark.name)
def test_each_benchmark_gives_sane_figures(benchmark: Benchmark, tmp_path: Path) -> None:
    if benchmark.needs and shutil.which(benchmark.needs) is None:
        pytest.skip(f"no {benchmark.needs} here")
    found = command.measure([benchmark], TINY, tmp_path, QUIET)
    figures = [figure for _, figure in found.figures]
    assert figures
    assert {figure.unit for figure in figures} <= UNITS
    assert all(math.isfinite(figure.value) for figure in figures)
    assert all(figure.value > 0 for figure in figures if figure.unit in ("msg/s", "s", "ms", "µs") and not _may_be_zero(figure))
    assert {figure.name: figure.goal for figure in figures if figure.goal} == benchmark.goals
    assert len({figure.name for figure in figures}) == len(figures)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"own", "server", "limit"}, "a benchmark leaves nothing but the big states"


def _may_be_zero(figure: Figure) -> bool:
    """Differences may be negative, the processor time of little work is below a tick, and what never left is back at once."""
    return any(text in figure.name for text in ("cost more", "added", "processor time", "back at"))


def test_a_benchmark_without_its_program_is_left_out(tmp_path: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    lacking = replace(ALL[0], needs="turtlemq-no-such-program")
    assert command.measure([lacking], TINY, tmp_path, console).figures == []
    assert "append: not run, turtlemq-no-such-program is not installed" in console.export_text()


@pytest.mark.slow
def test_a_killed_state_holds_every_message_at_each_reopening(tmp_path: Path) -> None:
    built = state.States(TINY, lambda name: str(tmp_path / name), lambda title: lambda share: None).get(own=True)
    assert [point.sleepers for point in built.checkpoints] == TINY.checkpoints
    found = [child.call(restart.reopen, folder=built.folder, size=asdict(TINY))["sleep"] for _ in range(2)]
    assert found == [TINY.sleepers, TINY.sleepers]
    assert not list(built.topic.glob("*.tmp"))


def test_the_sizes_are_those_of_the_goals() -> None:
    assert FULL.sleepers >= 50_000_000
    assert FULL.small >= 1_000_000
    assert FULL.checkpoints[1] >= 10_000_000
    assert QUICK.sleepers >= 1_000_000
    for size in (FULL, QUICK, TINY):
        assert size.checkpoints == sorted(set(size.checkpoints))
        assert size.sleepers // size.segment == size.segments
        assert all(count % size.batch == 0 for count in size.checkpoints)


def test_names_are_unique_and_no_goal_is_nothing() -> None:
    assert len({benchmark.name for benchmark in ALL}) == len(ALL)
    assert all(goal.value > 0 for benchmark in ALL for goal in benchmark.goals.values())


# A child


def pid() -> int:
    return os.getpid()


def fails() -> None:
    raise RuntimeError("on purpose")


def half_way() -> str:
    child.report_progress(0.5)
    return "done"


def test_a_child_is_killed_when_it_has_answered() -> None:
    answer = child.call(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(answer, 0)


def test_a_child_that_fails_is_an_error_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(child.ChildFailed, match="test_benchmarks:fails ended with status 1"):
        child.call(fails)
    assert "on purpose" in capfd.readouterr().err


def test_a_child_tells_how_far_it_is() -> None:
    heard: list[float] = []
    assert child.call(half_way, progress=heard.append) == "done"
    assert heard == [0.5]


# The command


def test_the_data_folder_is_removed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.FOLDER_VARIABLE, str(tmp_path / "disk"))
    with pytest.raises(RuntimeError, match="on purpose"):
        _fail_inside_scratch()
    assert list((tmp_path / "disk").iterdir()) == []


def _fail_inside_scratch() -> None:
    with command.scratch(1) as folder:
        (folder / "file").write_text("x")
        fails()


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="Make room, take --quick"), command.scratch(1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{benchmark.name}: " in listed for benchmark in ALL)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SystemExit, match="no benchmark 'apend'; there are: versus, append, durable"):
        command.main(["apend"])


def test_the_longest_runs_in_full_size_only_when_it_is_named() -> None:
    versus, chosen = command._choose([], FULL)
    assert versus
    assert {benchmark.name for benchmark in ALL} - {benchmark.name for benchmark in chosen} == set(LONG)
    assert command._choose([], QUICK)[1] == list(ALL)
    assert [benchmark.name for benchmark in command._choose(LONG, FULL)[1]] == list(LONG)


def test_one_name_runs_all_scenarios_of_flow_control() -> None:
    assert command._choose(["flow"], FULL) == (False, list(flow.SCENARIOS))


def test_what_no_time_was_left_for_is_named(tmp_path: Path) -> None:
    found = command.measure(ALL[:2], TINY, tmp_path, QUIET, minutes=0)
    assert (found.figures, found.skipped) == ([], ["append", "durable"])
    assert "No time was left for: append, durable." in report.markdown(found)


# Results


@pytest.fixture
def some_report() -> report.Report:
    limits = machine.Limits(1e9, 2e9, 1e-4, 1e10, 1e10, 1e7, 1e6, 6e7, 2e9, 4e3)
    figures = [
        ("append", Figure("fast", 900_000.0, "msg/s", Goal("≥", 700_000), (800_000.0, 900_000.0, 1_000_000.0), 9e6, "disk")),
        ("append", Figure("slow", 2.0, "s", Goal("≤", 1.0), limit=1.0, limit_of="sync")),
        ("disk", Figure("plain", 0.5, "×", note="no goal")),
    ]
    return report.Report(datetime(2026, 1, 2, tzinfo=UTC), TINY, {"python": "CPython"}, limits, figures, 90.0)


def test_a_figure_tells_spread_and_share_of_the_limit(some_report: report.Report) -> None:
    fast, slow, plain = (figure for _, figure in some_report.figures)
    assert (fast.met, fast.share, round(fast.spread or 0, 3)) == (True, 0.1, 0.111)
    assert (slow.met, slow.share, slow.spread) == (False, 0.5, None)
    assert (plain.met, plain.share, plain.spread) == (None, None, None)
    assert [figure.name for _, figure in some_report.missed] == ["slow"]


def test_the_markdown_has_every_figure_and_what_is_not_shown(some_report: report.Report) -> None:
    text = report.markdown(some_report)
    assert "| append | fast | 900,000 msg/s ±11% | ≥ 700,000 | yes | 10% (disk) |  |" in text
    assert "| append | slow | 2.00 s | ≤ 1.00 | NO | 50% (sync) |  |" in text
    assert "## What these figures do not show" in text


def test_figures_of_a_cluster_have_their_own_section(some_report: report.Report) -> None:
    figures = [("cluster", Figure("rate", 0.8, "×", Goal("≥", 0.7))), ("failover", Figure("leader killed, p50", 0.1, "s"))]
    some_report.figures.extend(figures)
    engine, _, cluster = report.markdown(some_report).partition("## A cluster\n")
    assert "| append | fast |" in engine
    assert "| rate |" not in engine
    assert "| cluster | rate | 0.800 × | ≥ 0.700 | yes |  |" in cluster
    assert "| failover | leader killed, p50 | 0.100 s |" in cluster


def test_flow_control_has_a_section_of_its_own_run(some_report: report.Report, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    report.write(some_report, path)
    before = path.read_text("utf-8")
    machine_ = {report.OTHERS: "3%, 40%"}
    flowed = replace(some_report, machine=machine_, figures=[("flow-flood", Figure("low", 0.9, "×", Goal("≥", 0.05)))])
    report.write_flow(flowed, path)
    first = path.read_text("utf-8")
    report.write_flow(flowed, path)  # replaces the section of the first run
    assert path.read_text("utf-8") == first
    section = report.section_of(first, report.FLOW_TITLE)
    assert first.replace(section, "") == before
    assert section.count("| flow-flood | low | 0.900 × | ≥ 0.05 | yes |") == 1
    assert "used by others before or after each benchmark: 3%, 40%" in section
    assert "THE MACHINE WAS NOT QUIET: others used up to 40 %" in section
    report.write(some_report, path)
    assert report.section_of(path.read_text("utf-8"), report.FLOW_TITLE) == section


def test_the_json_is_kept_by_date(some_report: report.Report, tmp_path: Path) -> None:
    path = report.save(some_report, tmp_path)
    assert path.name == "2026-01-02T00-00-00Z-tiny.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [figure["met"] for figure in kept["figures"]] == [True, False, None]
    assert kept["size"]["sleepers"] == TINY.sleepers


@pytest.mark.parametrize("module", [model, probe, report, flow_server], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [FULL, QUICK, TINY], ids=lambda size: size.name)
def test_a_count_is_short_by_one_batch_at_most(size: Size) -> None:
    for count in (1, size.segment // 2, size.segment - 1, size.segment, 3 * size.segment + 1):
        assert count - size.batch <= size.whole(count) <= count + size.segment
        assert size.whole(size.whole(count)) == size.whole(count)
