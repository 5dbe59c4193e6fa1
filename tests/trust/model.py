"""The model of a part of the trust suite: numbered cases that either pass or name the broken promise.

A case is known by its number alone: the number seeds everything in it, so that any failure can be run again, by itself, as
`python -m tests.trust PART --only NUMBER`. `make test` runs the first few cases of each part, `make trust` many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Figures = Counter[str]  # things done and seen, by name; parts of one run are added up
NOT_RUN = "not run: "  # figures with names that begin so tell of cases for which this machine lacks something
TRIED = "tried: "  # figures with names that begin so are for `floors`: too many to be shown


class Broken(AssertionError):
    """A promise was broken. The message says which, in which case, and the expected result."""


@dataclass(frozen=True, slots=True)
class Part:
    """One way of trying to break a promise."""

    name: str
    unit: str  # of a case: "seeds", "states"
    about: str  # the experiment and the promise that must hold, in a sentence or two
    run: Callable[[range, Path], Figures]  # these cases, in an empty folder; raises Broken
    quick: int  # cases in `make test`
    full: int  # cases in `make trust`
    chunk: int = 25  # cases that one process runs in one go
    alone: bool = False  # needs the machine for itself: nothing else runs beside it
    sum_up: Callable[[Figures], str] | None = None  # the sum of all cases of a run, in words; raises Broken
    must: tuple[str, ...] = ()  # figures that are above 0 in each chunk of `make test`, else nothing was tried there
    floors: Mapping[str, int] = field(default_factory=dict)  # figures that reach so much, at least, in a whole run

    def lacks(self, cases: int, seen: Figures) -> list[str]:
        """Figures that so many cases, from the first one on, should have seen and did not, a line each."""
        least = dict.fromkeys(self.must, 1) if cases >= min(self.quick or self.full, self.chunk) else {}
        least |= self.floors if cases >= self.full else {}
        return [
            f"{name}: {seen[name]:,} in {cases:,} {self.unit}, {count:,} are the least"
            for name, count in least.items()
            if seen[name] < count
        ]


def figures(**counts: int) -> Figures:
    """Counts by name, with spaces for underscores.

    >>> figures(messages_accepted=3)
    Counter({'messages accepted': 3})
    """
    return Counter({name.replace("_", " "): count for name, count in counts.items()})
