"""The first cases of every part of the trust suite; `make trust` runs many more of the same."""

from __future__ import annotations

import pytest

from tests.trust.model import Part
from tests.trust.parts import all_parts, chunk

CHUNKS = [(part, first) for part in all_parts() for first in range(0, part.quick, part.chunk)]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "first"), CHUNKS, ids=[f"{part.name}-{first}" for part, first in CHUNKS])
def test_what_is_promised_holds(part: Part, first: int) -> None:
    seen = chunk(part.name, first, min(part.quick, first + part.chunk))
    assert sum(seen.values()) > 0, "it did something"
