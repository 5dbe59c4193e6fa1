"""One moment of a topic's files: links to all of them, and the length of every log, as they all were at one instant.

The engine may write meanwhile, and is not asked. So the moment is found by looking twice (a double collect, as in atomic
snapshots of shared memory):

1. List the names, and link the files: tables, too, before the lengths are known, so that none covers more than these.
2. Measure the last segment of every log; no other one grows.
3. Measure again, then list again. If nothing differs, every file was as noted at the instant between the two measurements.
   Otherwise link the new files, and look again.

This holds because a name or a length that has changed never changes back: segments grow at their end or are replaced as a whole,
and a link keeps the inode of a replaced one from being used again. The two measurements take some 50 µs, and a busy engine has
gaps of milliseconds, so one or two looks are enough. A write that is under way leaves a batch without its end, which readers
leave out.

Not here: reading logs (`parts`), and snapshots of several topics (`pins`).
"""

from __future__ import annotations

import errno
import os
import random
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pyspark_turtlemq.snapshot_files import CHECKPOINT, INNER, File, TopicFiles
from turtlemq.errors import TurtleError
from turtlemq.storage import names

NO_LINKS = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSPC)
_SECONDS_MAX = 30.0  # of looking for a moment
_LOOKS_AT_ONCE = 20  # without a pause between them
_PAUSE_S = 0.002
Key = tuple[str, str]  # log and name of a file


class Unsettled(TurtleError):
    """This topic was written to without a pause, and no moment of it could be found. Run the query again, or read a backup."""


def pin_topic(source: Path, folder: Path | None, topic: str, logs: tuple[str, ...]) -> TopicFiles:
    """The files of a topic's logs at one moment, linked into `folder` (None: noted, and read in place). 20 µs a file."""
    links, until, looks = _Links(source, folder, logs), time.monotonic() + _SECONDS_MAX, 0
    while not links.look():
        looks += 1
        if time.monotonic() > until:
            raise Unsettled(f"topic {topic!r}: {Unsettled.__doc__}")
        if looks > _LOOKS_AT_ONCE:
            time.sleep(random.uniform(0, _PAUSE_S))
    pinned = TopicFiles(topic, source, folder, {log: {} for log in logs}, links.files.get((CHECKPOINT, CHECKPOINT)))
    for (log, name), file in links.files.items():
        if log != CHECKPOINT:
            pinned.files[log][name] = file
    return pinned


@lru_cache(1 << 16)
def _role(name: str) -> tuple[str, int] | None:
    """The log that a file belongs to, and the base if it is a segment, 0 for the checkpoint, -1 for a table. Tables are caches:
    they come and go, and readers check them. None for files that no reader needs."""
    if name == CHECKPOINT:
        return CHECKPOINT, 0
    parsed = names.parse(name)
    if parsed is None or parsed.suffix or parsed.what == "dead":
        return None
    return parsed.kind, parsed.base if parsed.what == "bson" else -1


class _Links:
    """Links to the files of a topic, brought up to date by each look."""

    def __init__(self, source: Path, folder: Path | None, logs: tuple[str, ...]) -> None:
        self._source, self._folder = source, folder
        self._logs = {*logs, *([CHECKPOINT] if "reserve" in logs else [])}
        self._inodes: dict[Key, int] = {}  # of the linked files, as they were listed
        self._growing: set[Key] = set()  # the last segment of each log
        self.files: dict[Key, File] = {}
        if folder is not None:
            for inner in INNER:
                (folder / inner).mkdir(parents=True)

    def look(self) -> bool:
        """Link the files that are new, forget those that are gone, measure. Returns whether this was one moment."""
        listed = self._list()
        self._unlink([key for key, inode in self._inodes.items() if listed.get(key) != inode])
        self._measure_closed(listed)
        for key in sorted(listed.keys() - self._inodes.keys(), key=_base, reverse=True):
            self._link(key, listed[key])
        lengths = self._measure()
        if lengths != self._measure() or _truths(listed) != _truths(self._list()):
            return False
        for key, length in lengths.items():
            self.files[key] = replace(self.files[key], size=length)
        return True

    def _list(self) -> dict[Key, int]:
        """The inodes of all files that the logs consist of."""
        found = {}
        for folder in ("", *self._logs.intersection(INNER)):
            try:
                with os.scandir(self._source / folder) as entries:
                    for entry in entries:
                        role = _role(entry.name)
                        if role is not None and (folder or role[0]) in self._logs and not (folder and role[0] != "delay"):
                            found[folder or role[0], entry.name] = entry.inode()
            except FileNotFoundError:
                continue
        return found

    def _measure_closed(self, listed: dict[Key, int]) -> None:
        """Set which segments grow. The last one of the look before may have grown until another one was begun."""
        before, last = self._growing, dict[str, Key]()
        for key in sorted(_truths(listed), key=_base):
            last[key[0]] = key
        self._growing = {*last.values()} - {(CHECKPOINT, CHECKPOINT)}
        for key in (before & self.files.keys()) - self._growing:
            self.files[key] = replace(self.files[key], size=_length(self.files[key]))

    def _link(self, key: Key, inode: int) -> None:
        """Link a file, or note it where that is not possible. One that is gone by now is left out."""
        inside, name = key[0] if key[0] in INNER else "", key[1]
        path = self._source / inside / name
        try:
            self.files[key] = _linked(path, None if self._folder is None else self._folder / inside / name)
            self._inodes[key] = inode
        except FileNotFoundError:
            return

    def _unlink(self, keys: list[Key]) -> None:
        for key in keys:
            del self._inodes[key]
            file = self.files.pop(key)
            if not file.inode:
                os.unlink(file.path)

    def _measure(self) -> dict[Key, int]:
        return {key: _length(self.files[key]) for key in self._growing if key in self.files}


def _linked(path: Path, link: Path | None) -> File:
    if link is not None:
        try:
            os.link(path, link)
            return File(str(link), os.stat(link).st_size)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
    stat = os.stat(path)
    return File(str(path), stat.st_size, stat.st_ino)


def _length(file: File) -> int:
    """The length of a file now; -1 if it is gone. Opened for it, since NFS asks its server then."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _base(key: Key) -> int:
    """The base of a segment, 0 for the checkpoint, -1 for a table."""
    role = _role(key[1])
    return -1 if role is None else role[1]


def _truths(listed: dict[Key, int]) -> dict[Key, int]:
    """Without tables."""
    return {key: inode for key, inode in listed.items() if _base(key) >= 0}
