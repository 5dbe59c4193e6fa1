"""What a part of the trust suite is: numbered cases that either pass or name what broke.

A case is known by its number alone: the number seeds everything in it, so that any failure can be run again, by itself, as
`python -m tests.trust PART --only NUMBER`. `make test` runs the first few cases of each part, `make trust` many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Figures = Counter[str]  # what was done and seen, by name; parts of one run are added up


class Broken(AssertionError):
    """A promise was broken. The message says which, in which case, and what was expected."""


@dataclass(frozen=True, slots=True)
class Part:
    """One way of trying to break a promise."""

    name: str
    unit: str  # of a case: "seeds", "states"
    about: str  # what is tried and what must hold, in a sentence or two
    run: Callable[[range, Path], Figures]  # these cases, in an empty folder; raises Broken
    quick: int  # cases in `make test`
    full: int  # cases in `make trust`
    chunk: int = 25  # cases that one process runs in one go
    alone: bool = False  # needs the machine for itself: nothing else runs beside it
    sum_up: Callable[[Figures], str] | None = None  # what all cases of a run tell together; raises Broken


def figures(**counts: int) -> Figures:
    """Counts by name, with spaces for underscores.

    >>> figures(messages_accepted=3)
    Counter({'messages accepted': 3})
    """
    return Counter({name.replace("_", " "): count for name, count in counts.items()})
