"""The first cases of every part of the trust suite; `make trust` runs many more of the same."""

from __future__ import annotations

import re

import pytest

from tests.serving import ROOT
from tests.trust.model import Part
from tests.trust.parts import all_parts, apart

CHUNKS = [(part, first) for part in all_parts() for first in range(0, part.quick, part.chunk)]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "first"), CHUNKS, ids=[f"{part.name}-{first}" for part, first in CHUNKS])
def test_what_is_promised_holds(part: Part, first: int) -> None:
    assert sum(apart(part.name, first, min(part.quick, first + part.chunk)).values()) > 0, "it did something"


def test_every_promise_has_somebody_who_tries_to_break_it() -> None:
    text = (ROOT / "docs" / "TRUST.md").read_text(encoding="utf-8")
    promised, tried = (text.partition(title)[2].partition("\n## ")[0] for title in ("## What is promised", "## How it is tried"))
    who = [row.split("|")[3].replace(" ", "").split(",") for row in re.findall(r"^\| \*\*.*", promised, re.MULTILINE)]
    names = {part.name for part in all_parts()}
    assert set(re.findall(r"^\| (\w+) \|", tried, re.MULTILINE)) - {"part"} == names, "each is described"
    assert len(who) > 10
    assert all(one and set(one) <= names | {"soak"} for one in who), who
