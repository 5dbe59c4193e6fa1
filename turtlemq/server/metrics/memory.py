"""The memory that is left for this process: of the machine, or of its control group (a container, a unit of systemd).

Caches that the system can drop count as free.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    """Bytes of memory."""

    total: int
    free: int


def memory_usage(proc: Path = PROC, groups: Path = GROUPS) -> Memory | None:
    """The memory of the machine, or of a control group in which less is free. None where the system does not tell."""
    try:
        known = _numbers(proc / "meminfo")
        machine = Memory(known["MemTotal:"] << 10, known["MemAvailable:"] << 10)
    except (OSError, ValueError, KeyError):
        return None
    limited = [memory for group in _own_groups(proc, groups) if (memory := _limited(group)) is not None]
    return min([machine, *limited], key=lambda memory: memory.free)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    words = (line.split() for line in file.read_text("utf-8").splitlines())
    return {name: int(number) for name, number, *_ in words}


def _own_groups(proc: Path, groups: Path) -> list[Path]:
    """The control group of this process and all above it; none without control groups of version 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    own = [groups / line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    return [group for one in own for group in (one, *one.parents) if group.is_relative_to(groups)]


def _limited(group: Path) -> Memory | None:
    """The memory of a control group that has a limit."""
    try:
        limit = int((group / "memory.max").read_text("utf-8"))  # "max": no limit
        used = int((group / "memory.current").read_text("utf-8")) - _numbers(group / "memory.stat")["inactive_file"]
    except (OSError, ValueError, KeyError):
        return None
    return Memory(limit, max(0, limit - used))
