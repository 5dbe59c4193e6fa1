"""Figures of the process and of its disk, under the names that Prometheus' own clients use."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator

from turtlemq.server.metrics import exposition

_STARTED = time.time()


def _or_none(take_it: Callable[[], float]) -> float | None:
    try:
        return take_it()
    except (OSError, ValueError, IndexError):  # not this operating system
        return None


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int | None:
    """The memory that this process has."""
    found = _or_none(_resident)
    return None if found is None else int(found)


def process_families(root: str | None) -> Iterator[str]:
    """The process and its disk, named as Prometheus' own clients do."""
    times = os.times()
    cpu = times.user + times.system
    free = None if root is None else _or_none(lambda: shutil.disk_usage(root).free)
    fds = _or_none(lambda: len(os.listdir("/proc/self/fd")))
    for name, kind, text, value in (
        ("process_cpu_seconds_total", "counter", "Processor time.", cpu),
        ("process_resident_memory_bytes", "gauge", "Memory.", resident_bytes()),
        ("process_open_fds", "gauge", "Open file descriptors.", fds),
        ("process_max_fds", "gauge", "How many may be open.", _or_none(lambda: os.sysconf("SC_OPEN_MAX"))),
        ("process_start_time_seconds", "gauge", "When the process started.", round(_STARTED, 3)),
        ("turtlemq_disk_free_bytes", "gauge", "Room on the disk of the data folder.", free),
    ):
        yield from exposition.family(name, kind, text, [({}, value)])
