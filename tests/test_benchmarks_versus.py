"""TurtleMQ and its peers side by side, at a size at which figures mean nothing: every row is there, errors are counted.

Queues that are not installed are left out. No time is asserted.
"""

from __future__ import annotations

import asyncio
import doctest
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

import benchmarks.__main__ as command
from benchmarks import child, comparison, comparison_tables, machine, plots, quiet, ranking, report, workloads
from benchmarks.comparison import Comparison, QueueInfo
from benchmarks.model import TINY as TINY_SIZE
from benchmarks.peers.all_queues import ALL_QUEUES, ONLY_PARTS, OURS
from benchmarks.peers.model import Client, Put, Queue
from benchmarks.peers.turtle import TurtleBson
from benchmarks.workloads import TINY, Figures

CONNECTIONS = TINY.connections


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALL_QUEUES)
def test_each_queue_does_all_the_work_and_loses_nothing(name: str, tmp_path: Path) -> None:
    told = comparison.queue_info(name, ALL_QUEUES[name])
    if told.missing:
        pytest.skip(f"{told.missing} is not installed: make bench-setup")
    held = comparison.compare("tiny", tmp_path, lambda title: lambda share: None, lambda text: None, [told])
    assert not held.failed
    assert told.version
    for part in ONLY_PARTS.get(name, comparison.PARTS):
        for row, figures in ranking.table(held, part, CONNECTIONS).items():
            assert name in figures, f"{part}: {row}"
            may_forget = "kill -9" in row and not told.durable  # the last answers, and no more than that
            if row.startswith(("lost", "cancelled", "delivered", "not found")) and not may_forget:
                assert figures[name].value == 0, f"{part}: {row}"
    assert list(tmp_path.iterdir()) == [], "no data is left"


# Errors are counted


class Careless(TurtleBson):
    """A real server behind clients that forget one message of a certain batch, and hand out one message twice."""

    def __init__(self, folder: Path, forgets_in: int) -> None:
        super().__init__(folder)
        self.batches_left, self.doubled = forgets_in, False

    async def client(self) -> Client:
        return CarelessClient(await super().client(), self)


class CarelessClient(Client):
    def __init__(self, inner: Client, queue: Careless) -> None:
        self._inner, self._queue = inner, queue

    async def put(self, messages: Sequence[Put]) -> None:
        self._queue.batches_left -= 1
        await self._inner.put(messages[1:] if self._queue.batches_left == 0 else messages)

    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        found = await self._inner.fetch(count, wait_s)
        if found and not self._queue.doubled:
            self._queue.doubled = True
            return [*found, found[0]]
        return found

    async def ack(self, ids: Sequence[str]) -> None:
        await self._inner.ack(list(dict.fromkeys(ids)))

    async def cancel(self, id_: str) -> bool:
        return await self._inner.cancel(id_)

    async def close(self) -> None:
        await self._inner.close()


def drained(folder: str) -> Figures:
    """Runs in a process of its own, as all work does."""
    queue = Careless(Path(folder), forgets_in=2)  # the first batch finds out how fast it is, and is not waited for
    return asyncio.run(workloads.drain(queue, replace(TINY, drain=TINY.batch), 1))


@pytest.mark.slow
def test_lost_and_doubled_messages_are_reported(tmp_path: Path) -> None:
    found = child.call(drained, folder=str(tmp_path))
    assert (found["lost"], found["twice"], found["strange"], found["early"]) == (1, 1, 0, 0)


def restarted(folder: str) -> Figures:
    return asyncio.run(workloads.sleep(Careless(Path(folder), forgets_in=1), TINY, 1, (TINY.sleepers,)))


@pytest.mark.slow
def test_a_message_that_is_gone_after_a_restart_is_reported(tmp_path: Path) -> None:
    found = child.call(restarted, folder=str(tmp_path))
    row = next(row for row in ranking.rows(CONNECTIONS) if row.name == "lost by kill -9")
    assert row.value(found) == 1


def test_early_and_strange_messages_are_counted() -> None:
    received = workloads.Received([(99.0, ["a"]), (101.0, ["b"]), (0.0, ["nobody"])], total=3)
    sent = [Put("a", 100, b""), Put("b", 100, b""), Put("c", 100, b"")]
    assert received.verdict(sent) == {"lost": 1, "twice": 0, "strange": 1, "early": 1}
    assert received.lateness([("b", 100), ("c", 100)])["max"] == 1.0


# Input


def test_messages_are_distinct_and_the_same_for_everybody() -> None:
    some, same = workloads.messages(500, 100, 7), workloads.messages(500, 100, 7)
    assert [(put.id, put.body) for put in some] == [(put.id, put.body) for put in same]
    assert len({put.id for put in some}) == len({put.body for put in some}) == 500
    assert {len(put.body) for put in some} == {100}
    assert all(isinstance(json.loads(put.body), str) for put in some)


def test_a_timetable_is_even_and_keeps_the_delays() -> None:
    plan = workloads.timetable(1_000_000, 2_000, TINY, 0)
    shortest, longest = TINY.delays_ms
    dues = sorted(put.due_ms for _, group in plan for put in group)
    assert dues == [1_000_000 + longest + 5 * n for n in range(400)]
    assert all(shortest <= put.due_ms - at <= longest + 10 for at, group in plan for put in group)
    assert [at for at, _ in plan] == sorted(at for at, _ in plan)


def there_and_back(folder: str, name: str) -> dict[str, Any]:
    return asyncio.run(_there_and_back(ALL_QUEUES[name](Path(folder))))


async def _there_and_back(queue: Queue) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    some = workloads.messages(60, 100, due_ms=now_ms)
    await queue.start()
    client = await queue.client()
    await client.put(some)
    with pytest.raises(RuntimeError, match="60 were sent, 0 were stored"):
        await client.put(some)
    found = await client.fetch(100, 5)
    await client.ack([id_ for id_, _ in found])
    return {"same": sorted(found) == [(put.id, now_ms) for put in some], "left": await queue.sleepers()}


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_what_turtlemq_was_given_comes_out_once(name: str, tmp_path: Path) -> None:
    assert child.call(there_and_back, folder=str(tmp_path), name=name) == {"same": True, "left": 0}


def test_others_on_the_machine_are_noticed() -> None:
    burn = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert quiet.busy_share(0.5) > 0.2 / (os.cpu_count() or 1)
    finally:
        burn.kill()
        burn.wait()


@pytest.mark.parametrize("module", [quiet, comparison_tables, ranking], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


# Reports


def _told(name: str, *, durable: bool = True, missing: str = "") -> QueueInfo:
    return QueueInfo(name, "" if missing else "1.0", "as it comes", durable, missing)


def _in(rate: float) -> Figures:
    one_by_one = {f"one by one, {some}": rate / 100 for some in CONNECTIONS}
    return {"in, 100 B": rate, "in, 1000 B": rate / 2, "cpu, 100 B": 2.0, "cpu, 1000 B": 4.0, **one_by_one}


def _grow(rate: float) -> Figures:
    found: Figures = {"empty": 1e6, "cancelled": 4, "not cancelled": 0, "restart": 0.5, "stored": 2_000, "left": 1_996}
    for at, count in enumerate((1_000, 2_000)):
        named = {"sleepers": count, "ram": 1e6 + count, "disk": 200 * count, "rate": rate, "fresh": rate, "ratio": 1.0}
        found |= {f"{name} {at}": value for name, value in {**named, "cancel p50": 0.5, "cancel p99": 0.9}.items()}
    return found


@pytest.fixture
def held() -> Comparison:
    """A contest with figures made up: a durable peer, a faster one that is not, and one that is not installed."""
    wrong = {"lost": 0.0, "twice": 0.0, "strange": 0.0, "early": 0.0}
    late = {f"{phase} {share}": 4.0 for phase in ("alone", "alone asked", "beside") for share in workloads.SHARES}
    rates = {OURS[0]: 290.0, OURS[1]: 600.0, "safe": 100.0, "fast": 200.0}
    return Comparison(
        queues=[_told(OURS[0]), _told(OURS[1]), _told("safe"), _told("fast", durable=False), _told("absent", missing="absentd")],
        found={
            "in": {name: [_in(rate), _in(1.1 * rate), _in(0.9 * rate)] for name, rate in rates.items()},
            "sleep": {name: [_grow(rate)] for name, rate in rates.items()},
            "drain": {name: [{"count": 10.0, "rate": rate, **wrong}] for name, rate in rates.items()},
            "late": {name: [{"load": 10.0, **wrong, **late}] for name in rates},
            "grow": {name: [_grow(rate)] for name, rate in rates.items() if name != OURS[0]},
        },
        busy=[0.0, 0.4],
        seconds=5.0,
    )


def test_goals_are_ratios_against_the_right_peer(held: Comparison) -> None:
    found = {verdict.work: verdict for verdict in ranking.verdicts(held, CONNECTIONS)}
    json_in, bson_in = (found[f"in batches of 1,000, bodies of 100 B, {kind}"] for kind in ("JSON", "BSON"))
    assert (json_in.best, json_in.durable) == (("fast", 200.0), ("safe", 100.0))
    assert (json_in.ratio(json_in.best), json_in.ratio(json_in.durable)) == (1.45, 2.9)
    assert (json_in.met, bson_in.met) == (True, True), "twice and 2.5 times the durable one"
    assert found["drain: fetched and acknowledged, JSON"].met is False, "1.45 times the best of all is not twice"
    assert found["drain: fetched and acknowledged, BSON"].met is True
    assert [found[f"late: alone, {share}, JSON"].met for share in ("p50", "p99", "p99.9")] == [False, True, True]


def test_less_is_better_where_it_is(held: Comparison) -> None:
    for rounds in held.found["in"]["safe"]:
        rounds["cpu, 100 B"] = 8.0
    found = {verdict.work: verdict for verdict in ranking.verdicts(held, CONNECTIONS)}
    verdict = found["server CPU for a million, bodies of 100 B, JSON"]
    assert (verdict.best, verdict.ratio(verdict.durable), verdict.met) == (("fast", 2.0), 4.0, True)


def test_an_unmeasured_goal_is_neither_met_nor_missed(held: Comparison) -> None:
    del held.found["drain"][OURS[0]], held.found["in"]["safe"]
    found = {verdict.work: verdict for verdict in ranking.verdicts(held, CONNECTIONS)}
    assert found["drain: fetched and acknowledged, JSON"].met is None
    assert found["in batches of 1,000, bodies of 100 B, JSON"].met is None


@pytest.fixture
def some_report(held: Comparison) -> report.Report:
    limits = machine.Limits(*[1e9] * 10)
    return report.Report(datetime(2026, 1, 2, tzinfo=UTC), TINY_SIZE, {"python": "CPython"}, limits, [], 90.0, held)


def test_what_was_kept_can_be_told_again(some_report: report.Report, tmp_path: Path) -> None:
    assert report.load(report.save(some_report, tmp_path)) == some_report


def test_the_report_has_every_row_the_warning_and_who_is_missing(some_report: report.Report, tmp_path: Path) -> None:
    report.write(some_report, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    for row in ranking.rows(CONNECTIONS):
        assert any(line.startswith(f"| {row.name}") for line in lines), row.name
    for aim in ranking.aims(CONNECTIONS):
        work = aim.row.replace("at the most", "at 2,000 sleepers")
        assert any(work in line and aim.text in line for line in lines), aim
    assert "THE MACHINE WAS NOT QUIET: others used up to 40 % of it" in text
    assert "| absent | not installed (absentd): `make bench-setup` |" in text
    assert "## What these figures do not show" in text
    assert text.index("## Goals") < text.index("## Side by side") < text.index("## The machine")


def test_the_terminal_shows_the_same(some_report: report.Report) -> None:
    console = Console(width=300, file=io.StringIO())
    with console.capture() as shown:
        report.show(some_report, console)
    text = shown.get()
    assert "2.90 ×" in text
    assert "THE MACHINE WAS NOT QUIET" in text


def test_pictures_are_small_have_no_background_and_text_as_text(held: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: make bench-setup")
    found = plots.draw(held, "tiny", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in found.values()}
    assert len(found) == 5
    for title, path in found.items():
        text = path.read_text(encoding="utf-8")
        words = "".join(ElementTree.fromstring(text).itertext())
        assert title in words
        assert "TurtleMQ, BSON" in words
        assert path.stat().st_size < 60_000
        assert "fill: #ffffff" not in text
        assert "rgb" not in text


def test_a_report_can_be_made_from_what_was_kept(
    some_report: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = report.save(some_report, tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "RESULTS.md")
    assert command.main(["--report", str(kept)]) == 0
    assert "## Goals" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "Written: " in capsys.readouterr().out
