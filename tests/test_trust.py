"""The first cases of every part of the trust suite; `make trust` runs many more of the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.server_process import ROOT
from tests.trust import machines
from tests.trust.cluster_faults import StoryWithFaults
from tests.trust.kept import Kept
from tests.trust.model import NOT_RUN, Broken, Figures, Part, figures
from tests.trust.parts import all_parts, apart
from turtlemq.replica.membership import Change

CHUNKS = [(part, first) for part in all_parts() for first in range(0, part.quick, part.chunk)]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "first"), CHUNKS, ids=[f"{part.name}-{first}" for part, first in CHUNKS])
def test_what_is_promised_holds(part: Part, first: int) -> None:
    last = min(part.quick, first + part.chunk)
    seen = apart(part.name, first, last)
    assert sum(seen.values()) > 0, "it did something"
    if missing := [name for name in seen if name.startswith(NOT_RUN)]:
        pytest.skip(missing[0])
    assert part.lacks(last - first, seen) == []


def test_a_run_that_saw_too_little_is_told() -> None:
    part = Part("p", "cases", "", lambda _, __: figures(), quick=20, full=100, chunk=10, must=("kills",), floors={"in a seal": 3})
    assert part.lacks(1, figures()) == [], "one case, by its number"
    assert part.lacks(10, figures(kills=0)) == ["kills: 0 in 10 cases, 1 are the least"]
    assert part.lacks(99, figures(kills=1)) == [], "not a whole run"
    assert part.lacks(100, figures(kills=1, in_a_seal=2)) == ["in a seal: 2 in 100 cases, 3 are the least"]
    assert part.lacks(100, figures(kills=1, in_a_seal=3)) == []


def test_cases_that_passed_count_until_the_code_changes(tmp_path: Path) -> None:
    module, folder = tmp_path / "turtlemq" / "module.py", tmp_path / "build"
    module.parent.mkdir()
    module.write_text("1")
    run = Kept("p", folder, tmp_path)
    assert run.get(0, 30) is None
    run.add(0, 30, 2.5, figures(kills=7))
    again = Kept("p", folder, tmp_path)
    assert again.get(0, 30) == (2.5, figures(kills=7))
    assert again.get(30, 60) is None
    module.write_text("2")
    again.add(30, 60, 2.5, figures(kills=8))
    assert Kept("p", folder, tmp_path).get(0, 30) is None
    module.write_text("1")
    assert Kept("p", folder, tmp_path).get(30, 60) is None, "the code changed while these cases ran"


def test_slow_failovers_fail_a_full_run_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"tried: lost: 5900": 98, "tried: lost: 6100": 1, "tried: handover: 900": 9}
    seen = Figures({"faults": machines.PART.full, **times})
    monkeypatch.delenv(machines.BUSY, raising=False)
    with pytest.raises(Broken, match=r"lost p50 5\.90 s, p99 6\.10 s of 99; at most"):
        machines.sum_up(seen)
    assert "p99 6.10 s" in machines.sum_up(Figures(times)), "not a full run"
    assert "p99 5.90 s" in machines.sum_up(Figures({**seen, "tried: lost: 5900": 99})), "one of a hundred"
    monkeypatch.setenv(machines.BUSY, "1")
    assert "p99 6.10 s" in machines.sum_up(seen)


@pytest.mark.parametrize("restored", [False, True])
def test_requests_under_way_end_with_an_etcd_that_is_restored(tmp_path: Path, restored: bool) -> None:
    world = StoryWithFaults(tmp_path, "a story", 4).world
    leader, state = world.leader(), world.etcd.state
    assert leader is not None
    world.call(leader, "change", (Change(state.revision, state.isr),))
    if restored:
        world.rewind()
    changed = world.run(lambda: world.etcd.state.revision > state.revision, 10)
    assert changed is not restored
    for node in world.nodes.values():
        world.power_off(node)


def test_every_promise_has_a_part_that_attacks_it() -> None:
    text = (ROOT / "docs" / "TRUST.md").read_text(encoding="utf-8")
    promised, tried = (text.partition(title)[2].partition("\n## ")[0] for title in ("## What is promised", "## How it is tried"))
    who = [row.split("|")[3].replace(" ", "").split(",") for row in re.findall(r"^\| \*\*.*", promised, re.MULTILINE)]
    names = {part.name for part in all_parts()}
    assert set(re.findall(r"^\| (\w+) \|", tried, re.MULTILINE)) - {"part"} == names, "each is described"
    assert len(who) > 10
    assert all(one and set(one) <= names | {"soak"} for one in who), who
