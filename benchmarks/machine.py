"""The machine: its description, and its limits, measured in the same run: disk, memory copies, checksums, loopback, Python."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from benchmarks import loopback, probe

_MIB = 1 << 20
_DOCUMENT_BYTES = 187  # of a body of 100 B


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the machine, in bytes per second, calls per second and seconds."""

    write_bytes_s: float  # sequential, synced at the end
    read_bytes_s: float  # sequential, from the disk
    sync_s: float  # write 4 KiB at the end of a file and fdatasync
    copy_bytes_s: float  # memcpy
    crc_bytes_s: float  # CRC-32 of 1 MiB at a time
    crc_calls_s: float  # CRC-32 of one document at a time, called from Python
    writes_s: float  # pwrite of one document at a time, without a sync
    loops_s: float  # turns of an empty Python loop
    loopback_bytes_s: float  # from one process to another
    posts_s: float  # empty POSTs to an aiohttp server that does nothing, one bare connection

    def rows(self) -> list[tuple[str, str]]:
        """The rows of a table: name and value."""
        return [
            ("sequential write with fsync", f"{self.write_bytes_s / 1e6:,.0f} MB/s"),
            ("sequential read, cold", f"{self.read_bytes_s / 1e6:,.0f} MB/s"),
            ("write 4 KiB and fdatasync", f"{self.sync_s * 1e6:,.0f} µs"),
            ("memcpy", f"{self.copy_bytes_s / 1e9:,.1f} GB/s"),
            ("CRC-32 of 1 MiB", f"{self.crc_bytes_s / 1e9:,.1f} GB/s"),
            (f"CRC-32 of {_DOCUMENT_BYTES} B, from Python", f"{self.crc_calls_s / 1e6:,.1f} M/s"),
            (f"pwrite of {_DOCUMENT_BYTES} B, from Python", f"{self.writes_s / 1e6:,.2f} M/s"),
            ("empty Python loop", f"{self.loops_s / 1e6:,.0f} M/s"),
            ("loopback, one connection", f"{self.loopback_bytes_s / 1e9:,.1f} GB/s"),
            ("empty POST to aiohttp, one connection", f"{self.posts_s:,.0f}/s"),
        ]


def measure(folder: Path, size: int) -> Limits:
    """Measure all limits, with files of `size` bytes in `folder`. Medians of three; ten seconds at 512 MiB."""
    path = folder / "limit"
    writes, reads = [], []
    for _ in range(3):
        writes.append(size / probe.seconds(lambda: _write(path, size)))
        probe.evict([path])
        reads.append(size / probe.seconds(lambda: probe.warm([path])))
    source, target = memoryview(os.urandom(64 * _MIB)), memoryview(bytearray(64 * _MIB))
    loopback_bytes_s, posts_s = loopback.measure(size)
    mebibyte, document = os.urandom(_MIB), os.urandom(_DOCUMENT_BYTES)
    return Limits(
        write_bytes_s=statistics.median(writes),
        read_bytes_s=statistics.median(reads),
        sync_s=_sync_seconds(path),
        copy_bytes_s=_rate(64 * _MIB, lambda: _copy(source, target)),
        crc_bytes_s=_rate(64 * _MIB, lambda: [crc32(mebibyte) for _ in range(64)]),
        crc_calls_s=_rate(100_000, lambda: [crc32(document) for _ in range(100_000)]),
        writes_s=_rate(20_000, lambda: _pwrites(path, document, 20_000)),
        loops_s=_rate(1_000_000, _loop),
        loopback_bytes_s=loopback_bytes_s,
        posts_s=posts_s,
    )


def _rate(amount: int, work: Callable[[], object]) -> float:
    return amount / statistics.median(probe.seconds(work) for _ in range(5))


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _loop() -> None:
    for _ in range(1_000_000):
        pass


def _write(path: Path, size: int) -> None:
    block = os.urandom(_MIB)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(size // _MIB):
            os.write(fd, block)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_seconds(path: Path, count: int = 200) -> float:
    block, times = bytes(4096), []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(count):
            begin = time.perf_counter()
            os.write(fd, block)
            os.fdatasync(fd)
            times.append(time.perf_counter() - begin)
    finally:
        os.close(fd)
    return statistics.median(times)


def _pwrites(path: Path, data: bytes, count: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for i in range(count):
            os.pwrite(fd, data, i * len(data))
    finally:
        os.close(fd)


def describe(folder: Path) -> dict[str, str]:
    """Facts about the machine that matter when figures are compared."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.0f} GiB",
        "disk": _file_system(folder),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": version("numpy"),
        "load when it began": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder."""
    target = str(folder.resolve())
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > len(best[0]):
            best = (mount, kind)
    return best[1]
