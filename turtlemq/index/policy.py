"""Policy of maintenance, as pure functions: which segment to compact or seal next. `maintenance` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from turtlemq.model import SegmentLoad
from turtlemq.settings import Settings

_ROLL_SHARE = 16  # an active segment with hardly any sleepers is closed early once it has 1/16 of its full size


class Task(StrEnum):
    """A task of maintenance."""

    COMPACT = "compact"
    SEAL = "seal"


@dataclass(frozen=True, slots=True)
class Plan:
    """A task, and the segment that it is for."""

    task: Task
    base: int


def plan(closed: Sequence[SegmentLoad], settings: Settings) -> Plan | None:
    """The most useful task for closed segments: compact the one with the smallest share of sleepers, or seal the oldest.

    >>> plan([SegmentLoad(0, 100, 100, 5, True), SegmentLoad(100, 100, 100, 90, False)], Settings())
    Plan(task=<Task.COMPACT: 'compact'>, base=0)
    >>> plan([SegmentLoad(0, 100, 100, 6, True), SegmentLoad(100, 100, 100, 90, False)], Settings())
    Plan(task=<Task.SEAL: 'seal'>, base=100)
    """
    sparse = [load for load in closed if load.live <= settings.compact_live_ratio * load.documents]
    if sparse:
        return Plan(Task.COMPACT, min(sparse, key=lambda load: (load.live / max(load.documents, 1), load.base)).base)
    unsealed = [load for load in closed if not load.sealed]
    return Plan(Task.SEAL, min(unsealed, key=lambda load: load.base).base) if unsealed else None


def should_roll(active: SegmentLoad, settings: Settings) -> bool:
    """Should the active segment be closed early, so that its bytes can be reclaimed?

    >>> should_roll(SegmentLoad(0, 1 << 20, 1000, 1, False), Settings(segment_bytes=1 << 20))
    True
    """
    sparse = active.live <= settings.compact_live_ratio * active.documents
    return sparse and active.documents > 0 and active.bytes * _ROLL_SHARE >= settings.segment_bytes
