"""Types of the benchmarks: goals, figures and sizes. Pure.

A figure carries its unit; functions that measure return seconds and bytes unless their names say otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turtlemq.model import SEGMENT_MESSAGES_MAX
from turtlemq.settings import Settings


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound that a figure must reach."""

    sign: Literal["≥", "≤"]
    value: float

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal.

        >>> Goal("≥", 10).met(10), Goal("≤", 10).met(11)
        (True, False)
        """
        return value >= self.value if self.sign == "≥" else value <= self.value


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. `value` is the median of `rounds`, if there are several."""

    name: str
    value: float
    unit: str
    goal: Goal | None = None
    rounds: tuple[float, ...] = ()
    limit: float | None = None  # of the machine, in the same unit
    limit_of: str = ""  # the name of that limit
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.value)

    @property
    def spread(self) -> float | None:
        """Half the distance between the extremes, as a share of the median."""
        if len(self.rounds) < 2 or not self.value:
            return None
        return (max(self.rounds) - min(self.rounds)) / 2 / self.value

    @property
    def share(self) -> float | None:
        """Share of the machine's limit: 1 is the limit itself, whether more or less is better."""
        if not self.limit or not self.value:
            return None
        lower_is_better = self.unit in ("s", "ms", "µs")
        return self.limit / self.value if lower_is_better else self.value / self.limit


def of_rounds(name: str, rounds: Sequence[float], unit: str, **more: Any) -> Figure:
    """A figure from several rounds of one measurement: their median.

    >>> of_rounds("x", [3, 1, 2], "s").value
    2
    """
    return Figure(name, statistics.median(rounds), unit, rounds=tuple(rounds), **more)


def format_number(value: float) -> str:
    """A number with three significant digits, or with all digits before the point.

    >>> format_number(708248.98), format_number(0.1234), format_number(12.345), format_number(0), format_number(0.000123)
    ('708,249', '0.123', '12.3', '0', '0.000123')
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.1:
        return f"{value:.3g}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Size:
    """The amounts of a run. The states of all sizes have one shape: twelve sealed segments and a tail in the active one."""

    name: str
    segment_messages: int
    batch: int = 1000
    segments: int = 12
    rounds: int = 3
    round_batches: int = 1000  # of a round of appends, in batches of `batch`
    singles: int = 60_000  # of a round of appends one by one
    durables: int = 2_000  # of a round with a sync each
    calls: int = 2_000  # lookups, cancels
    burst: int = 1_000_000  # messages that come due at once
    handed: int = 2_000_000  # messages handed off before a restart
    cancelled: int = 20_000  # messages cancelled before a restart
    seal: int = SEGMENT_MESSAGES_MAX
    compact: int = 400_000
    limit_bytes: int = 512 << 20

    @property
    def settings(self) -> Settings:
        return Settings(segment_messages=self.segment_messages)

    @property
    def segment(self) -> int:
        """Messages in a segment: a multiple of the batch."""
        return self.segment_messages // self.batch * self.batch

    def whole(self, count: int) -> int:
        """`count` or a little more, so that the memtable is full at every count and figures can be compared."""
        run = -(-min(self.settings.run_messages, self.segment) // self.batch) * self.batch
        segments, rest = divmod(count, self.segment)
        rest = min(max(1, -(-rest // run)) * run, self.segment) - self.batch
        return segments * self.segment + rest

    @property
    def sleepers(self) -> int:
        """Messages in the big states."""
        return self.whole(self.segments * self.segment)

    @property
    def small(self) -> int:
        """Messages in the small state that the big states are compared with."""
        return self.whole(self.sleepers // 50)

    @property
    def checkpoints(self) -> list[int]:
        """Counts at which the build of a state is measured."""
        return [self.small, self.whole(self.sleepers // 5), self.sleepers]

    @property
    def disk_bytes(self) -> int:
        """Disk space that a run needs at most: two states, and a seal or a ready log of the same size."""
        return 1_000_000_000 + 2 * self.sleepers * 230 + self.sleepers * 200


FULL = Size("full", SEGMENT_MESSAGES_MAX)
QUICK = Size(
    "quick",
    segment_messages=84_000,
    round_batches=250,
    singles=15_000,
    durables=500,
    calls=500,
    burst=250_000,
    handed=200_000,
    cancelled=2_000,
    seal=250_000,
    compact=50_000,
    limit_bytes=128 << 20,
)
TINY = Size(  # for the tests: takes seconds, its figures mean nothing
    "tiny",
    segment_messages=500,
    batch=50,
    rounds=2,
    round_batches=4,
    singles=50,
    durables=5,
    calls=20,
    burst=1_000,
    handed=500,
    cancelled=20,
    seal=500,
    compact=400,
    limit_bytes=1 << 20,
)
