"""Files of a snapshot: paths and lengths, by log and name. A file is mapped up to its length in the snapshot, no further.

Not here: making links and lengths of one moment (`moments`), and the snapshot of several topics (`pins`).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turtlemq.storage import names

LOGS = ("dead", "delay", "ready", "reserve", "history")  # that tell of messages
INNER = names.INNER  # logs that have the format of the delay log, each in a folder of its name in a topic's folder
ALL_LOGS = (*LOGS, "schedules")
CHECKPOINT = "offset"  # the file that tells where every group is


class Vanished(Exception):
    """A file that this query needs was replaced or removed, and could not be pinned. Run the query again; to have files pinned,
    let Spark write to the data folder, or read a backup."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a snapshot. Only the first `size` bytes belong to it. `inode` is 0 if the file is pinned."""

    path: str
    size: int
    inode: int = 0

    @property
    def name(self) -> str:
        return Path(self.path).name

    def map(self) -> memoryview:
        """The bytes, mapped. Raises `Vanished` if the file was replaced, which can only happen to one that is not pinned."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Vanished(f"{self.path}: {Vanished.__doc__}") from None
        try:
            stat = os.fstat(fd)
            if (self.inode and stat.st_ino != self.inode) or stat.st_size < self.size:
                raise Vanished(f"{self.path}: {Vanished.__doc__}")
            if not self.size:
                return memoryview(b"")
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))[: self.size]
        finally:
            os.close(fd)

    def sync(self) -> bool:
        """Make the content durable, also that of another process. Returns False if the file system refuses it here."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            return True
        except OSError:
            return False


@dataclass(slots=True)
class TopicFiles:
    """Files of one topic in a snapshot, by log (`delay`, `ready`, …, `dead`, `schedules`) and name."""

    topic: str
    source: Path  # the topic's folder in the data folder
    folder: Path | None  # of the pins; None if the files are read in place
    files: dict[str, dict[str, File]]
    offset: File | None = None  # the checkpoint
    clean_mark: dict[str, Any] | None = None  # ends of the logs at a clean shutdown, if no server has started since

    def segments(self, log: str) -> list[tuple[int, File]]:
        """Segments of a log with their bases, in order of the base."""
        parsed = [(names.parse(name), file) for name, file in self.files.get(log, {}).items()]
        return sorted(((at.base, file) for at, file in parsed if at is not None and at.what == "bson"), key=lambda pair: pair[0])
