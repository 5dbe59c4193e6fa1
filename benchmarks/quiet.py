"""Noise of the machine: the share of its processors that others use, measured while no benchmark runs."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import probe

NOISE_MAX = 0.05  # of all processors; with more, figures are uncertain


def busy_share(seconds: float = 1.0) -> float:
    """The share of all processors that others used in this time: other processes, and other guests of the host."""
    before, own = _times(), time.process_time()
    time.sleep(seconds)
    after = _times()
    idle, total = after[0] - before[0], after[1] - before[1]
    used = total - idle - (time.process_time() - own) * probe.TICKS_S
    return max(0.0, used / total) if total else 0.0


def _times() -> tuple[int, int]:
    """Ticks of all processors so far: idle (or waiting for a disk), and in all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def warning(shares: list[float]) -> str:
    """The warning about some samples; empty if the machine was quiet.

    >>> warning([0.01, 0.3])
    'THE MACHINE WAS NOT QUIET: others used up to 30 % of it, more than 5 % in 1 of 2 looks. Compare ratios only, with care.'
    >>> warning([0.01])
    ''
    """
    loud = [share for share in shares if share > NOISE_MAX]
    if not loud:
        return ""
    return (
        f"THE MACHINE WAS NOT QUIET: others used up to {100 * max(loud):.0f} % of it, more than {100 * NOISE_MAX:.0f} % "
        f"in {len(loud)} of {len(shares)} looks. Compare ratios only, with care."
    )
