"""Locks of folders: a file that a process holds with flock(2). The kernel releases it when the process ends, however it ends.

The lock belongs to the open file, not to its name. So a process that has the lock must see to it that its file is still the one
behind the name: another process would lock a new file of that name without hearing of this one.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from turtlemq.errors import Locked

_LOCKS = Path("/proc/locks")


def hold(path: Path, fd: int, how: int) -> None:
    """Lock an open file, or close it and raise `Locked`, with the process that holds it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"{path.parent} is in use by {holder(fd)}. Stop it, or give another folder."
        os.close(fd)
        raise Locked(message) from None
    except OSError:
        os.close(fd)
        raise


def is_behind(path: Path, fd: int) -> bool:
    """Is this open file still the one behind the name?"""
    try:
        named, held = os.lstat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def holder(fd: int, locks: Path = _LOCKS) -> str:
    """The process that holds the lock of an open file, as the kernel tells it. The number in the file may be of one that ended
    long ago."""
    stat = os.fstat(fd)
    file = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        lines = [line.split() for line in locks.read_text().splitlines()]
    except OSError:
        lines = []
    for words in lines:  # 1: FLOCK ADVISORY WRITE 4711 00:21:1234 0 EOF
        if words[1:2] == ["FLOCK"] and words[5:6] == [file] and int(words[4]) > 0:
            return f"process {words[4]}"
    return "another process (the system does not tell which)"
