"""The first cases of every part of the trust suite; `make trust` runs many more of the same."""

from __future__ import annotations

import re

import pytest

from tests.harness.server_process import ROOT
from tests.trust.model import NOT_RUN, Part, figures
from tests.trust.parts import all_parts, apart

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


def test_every_promise_has_a_part_that_attacks_it() -> None:
    text = (ROOT / "docs" / "TRUST.md").read_text(encoding="utf-8")
    promised, tried = (text.partition(title)[2].partition("\n## ")[0] for title in ("## What is promised", "## How it is tried"))
    who = [row.split("|")[3].replace(" ", "").split(",") for row in re.findall(r"^\| \*\*.*", promised, re.MULTILINE)]
    names = {part.name for part in all_parts()}
    assert set(re.findall(r"^\| (\w+) \|", tried, re.MULTILINE)) - {"part"} == names, "each is described"
    assert len(who) > 10
    assert all(one and set(one) <= names | {"soak"} for one in who), who
