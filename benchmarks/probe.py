"""Measurements of processes and files through /proc: memory, processor time, disk I/O; and control of the page cache.

Linux only. Needs no privileges and does not disturb other processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous resident memory, which cannot be dropped, unlike pages of mapped files."""
    return _field(f"/proc/{pid}/status", "RssAnon:") * 1024


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its ended children; 0 if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_S


def process_tree(pid: int) -> Iterator[int]:
    """A process and all its descendants that still run."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            child_pids = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in child_pids:
            yield from process_tree(int(child))


def shared_bytes(pid: int | str = "self") -> int:
    """Resident memory that is shared between processes and belongs to no file on disk."""
    return _field(f"/proc/{pid}/status", "RssShmem:") * 1024


def disk_io() -> tuple[int, int]:
    """Bytes that this process has read from and written to the disk, past the page cache."""
    return _field("/proc/self/io", "read_bytes:"), _field("/proc/self/io", "write_bytes:")


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise LookupError(f"{path} has no {name}")


def files(folder: Path, pattern: str = "*") -> list[Path]:
    """Every file below a folder."""
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def file_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that the next read goes to the disk. Requires that no process maps them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def seconds(work: Callable[[], object]) -> float:
    """Duration of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def each_seconds(work: Callable[[str], object], items: Iterable[str]) -> list[float]:
    """Duration of each of many calls."""
    times = []
    for item in items:
        begin = time.perf_counter()
        work(item)
        times.append(time.perf_counter() - begin)
    return times


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that a `share` of all values does not exceed.

    >>> percentile([4, 1, 3, 2], 0.5), percentile([4, 1, 3, 2], 0.99)
    (2, 4)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
