"""Figures of the process and of its disk, under the names that Prometheus' own clients use."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from turtlemq.server.metrics import exposition

_STARTED = time.time()


def _or_none(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except (OSError, ValueError, IndexError):  # this system does not tell
        return None


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int | None:
    """The resident memory of this process; None where the system does not tell."""
    size = _or_none(_resident)
    return None if size is None else int(size)


class DiskUsage(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


def disk_usage(root: str) -> DiskUsage | None:
    """The file system of a folder; None where the system does not tell."""
    try:
        used = shutil.disk_usage(root)
    except OSError:
        return None
    return DiskUsage(used.total, used.free)


def process_families(root: str | None) -> Iterator[str]:
    """Metric families of the process, and the free space on the disk of `root`."""
    times = os.times()
    cpu = times.user + times.system
    disk = None if root is None else disk_usage(root)
    free = None if disk is None else disk.free
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
