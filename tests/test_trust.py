"""The first cases of every part of the trust suite; `make trust` runs many more of the same.

Each chunk in a process of its own: parts count memory, open thousands of sockets, and are not to meet what other tests left open.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.serving import ROOT, environment
from tests.trust.model import Part
from tests.trust.parts import all_parts

CHUNKS = [(part, first) for part in all_parts() for first in range(0, part.quick, part.chunk)]
RUN = """import sys
from tests.trust.parts import chunk
print(sum(chunk(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("part", "first"), CHUNKS, ids=[f"{part.name}-{first}" for part, first in CHUNKS])
def test_what_is_promised_holds(part: Part, first: int) -> None:
    command = [sys.executable, "-c", RUN, part.name, str(first), str(min(part.quick, first + part.chunk))]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 0, "it did something"
