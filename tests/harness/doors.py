"""Doors with faults: one fails at a chosen call, one records the state that a power cut would leave after each call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from turtlemq.storage.door import Door

T = TypeVar("T")

CHANGES = ("open", "write", "truncate", "fdatasync", "fsync_dir", "rename", "unlink", "mkdir")
NEEDS_ROOM = ("create", "write", "rename", "mkdir", "fdatasync")


class Failing(Door):
    """Fails call number `at` (from 0), once. `how`: the name of an errno, or

    short     the write stores only half of its bytes and says so, which is no error
    half      the write stores half, and the next one meets a full disk
    wedged    the disk is full, and the file cannot be cut back either
    gone      nothing can be changed from then on, until `heal`
    EMFILE    no file can be opened from then on, until `heal`

    Random bytes are the same in every run: the secret of the folder decides which reads a filter of ids spares, and call `at`
    is to be the same call as in the run that it was counted in.
    """

    def __init__(self, at: int = -1, how: str = "EIO") -> None:
        super().__init__()
        self.at, self.how = at, how
        self.calls: list[str] = []
        self.failed: str | None = None  # the call that failed, and its file
        self._then: dict[str, int] = {}
        self._random = Random(0)

    def fresh(self) -> Door:
        return self

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        self.calls.append("create" if name == "open" and args[1] & os.O_CREAT else name)
        if name in self._then:
            raise OSError(self._then.pop(name), "made to fail")
        lasting = self.how in ("gone", "EMFILE")
        reached = len(self.calls) > self.at >= 0 if lasting else len(self.calls) - 1 == self.at
        if not reached or not self.can_fail(self.calls[-1]):
            return action(*args)
        self.failed = f"{name} {path and path.name}"
        if self.how in ("short", "half"):
            data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
            written: Any = os.pwrite(args[0], data[: len(data) // 2], args[2])
            if self.how == "half":
                self._then = {"write": errno.ENOSPC}
            return written  # type: ignore[no-any-return]
        if self.how == "wedged":
            self._then = {"truncate": errno.EIO}
            raise OSError(errno.ENOSPC, "made to fail")
        raise OSError(errno.EIO if self.how == "gone" else getattr(errno, self.how), "made to fail")

    def heal(self) -> None:
        """From now on nothing fails."""
        self.at = -1
        self._then = {}

    def can_fail(self, name: str) -> bool:
        """Whether a call of this name can fail in this way."""
        if self.how in ("short", "half", "wedged"):
            return name == "write"
        if self.how == "gone":
            return name in (*NEEDS_ROOM, "truncate", "fsync_dir", "unlink")
        if self.how == "EMFILE":
            return name in ("open", "create", "listdir")
        return self.how != "ENOSPC" or name in NEEDS_ROOM


@dataclass
class Inode:
    """A file's content: the durable bytes, and the bytes that processes see."""

    durable: bytes = b""
    current: bytes = b""


@dataclass
class Snapshot:
    """Everything that a power cut may leave at one moment."""

    entries: dict[str, int]  # names that are durable, and their inodes
    pending: tuple[tuple[str, ...], ...]  # changes of names since
    inodes: dict[int, tuple[bytes, bytes]]  # durable and current content
    note: Any = None


@dataclass
class Disk:
    """One folder as a disk sees it."""

    entries: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, ...]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)  # as processes see it
    inodes: dict[int, Inode] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        inodes = {number: (inode.durable, inode.current) for number, inode in self.inodes.items()}
        return Snapshot(dict(self.entries), tuple(self.pending), inodes)

    def apply(self, entries: dict[str, int], change: tuple[str, ...]) -> None:
        match change:
            case ("create", name, number):
                entries[name] = int(number)
            case ("rename", source, target):
                if source in entries:
                    entries[target] = entries.pop(source)
            case ("unlink", name):
                entries.pop(name, None)

    def change(self, *change: str) -> None:
        self.pending.append(change)
        self.apply(self.names, change)

    def sync_names(self) -> None:
        for change in self.pending:
            self.apply(self.entries, change)
        self.pending.clear()


class Recording(Door):
    """Works on real files, keeps their durable state beside them, and takes a snapshot at each call that changes a file."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.snapshots: list[Snapshot] = []
        self.note: Any = None  # goes into each snapshot
        self._fds: dict[int, int] = {}

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        result = action(*args)
        if name in CHANGES and path is not None and self._record(name, path, result, args):
            snapshot = self.disk.snapshot()
            snapshot.note = self.note
            self.snapshots.append(snapshot)
        return result

    def _record(self, name: str, path: Path, result: Any, args: tuple[Any, ...]) -> bool:
        disk = self.disk
        match name:
            case "open":
                return self._opened(path, int(result), args)
            case "write":
                inode = disk.inodes[self._fds[args[0]]]
                data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
                at, data = args[2], data[:result]
                inode.current = inode.current[:at].ljust(at, b"\0") + data + inode.current[at + len(data) :]
            case "truncate":
                inode = disk.inodes[self._fds[args[0]]]
                inode.current = inode.current[: args[1]].ljust(args[1], b"\0")
            case "fdatasync":
                inode = disk.inodes[self._fds[args[0]]]
                inode.durable = inode.current
            case "rename":
                disk.change("rename", args[0].name, args[1].name)
            case "unlink":
                disk.change("unlink", path.name)
            case "fsync_dir":
                disk.sync_names()
            case _:
                return False
        return True

    def _opened(self, path: Path, fd: int, args: tuple[Any, ...]) -> bool:
        flags = args[1]
        if flags & os.O_DIRECTORY:
            return False
        fresh = path.name not in self.disk.names
        if fresh:
            assert flags & os.O_CREAT
            number = len(self.disk.inodes)
            self.disk.inodes[number] = Inode()
            self.disk.change("create", path.name, str(number))
        self._fds[fd] = self.disk.names[path.name]
        if flags & os.O_TRUNC:
            self.disk.inodes[self._fds[fd]].current = b""
        return bool(fresh or flags & os.O_TRUNC)


# States that a power cut leaves


def names_left(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, int]]]:
    """Which names there are: none, all or some of the changes since the last sync of the folder have reached the disk."""
    disk, changes = Disk(), snapshot.pending
    chosen: list[tuple[str, tuple[tuple[str, ...], ...]]] = [("no names", ())]
    chosen += [(f"{i} names", changes[:i]) for i in range(1, len(changes) + 1)]
    if len(changes) > 1:
        chosen += [("only the last name", changes[-1:]), ("all names but the first", changes[1:])]
    for label, some in chosen:
        entries = dict(snapshot.entries)
        for change in some:
            disk.apply(entries, change)
        yield label, entries


def _lost(durable: bytes, current: bytes) -> bytes:
    return durable


def _kept(durable: bytes, current: bytes) -> bytes:
    return current


def torn(size: int) -> Callable[[bytes, bytes], bytes]:
    """Of the bytes written since the last sync, the first `size` are there. A file that was written anew begins anew."""

    def left(durable: bytes, current: bytes) -> bytes:
        same = len(durable) if current.startswith(durable) else 0
        return current[: same + size] + durable[same + size :]

    return left


def sectors(keep: Callable[[int, int], bool], size: int = 512) -> Callable[[bytes, bytes], bytes]:
    """The file has its new length, but only some sectors of it have been written; the others are zeros where nothing was."""

    def left(durable: bytes, current: bytes) -> bytes:
        old = durable.ljust(len(current), b"\0")[: len(current)]
        count = (len(current) + size - 1) // size
        first = next((i for i in range(count) if old[i * size :][:size] != current[i * size :][:size]), count)
        return b"".join(
            (current if i < first or keep(i - first, count - first) else old)[i * size : (i + 1) * size] for i in range(count)
        )

    return left


CONTENTS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "lost": _lost,
    "kept": _kept,
    "torn at 1": torn(1),
    "torn at 512": torn(512),
    "torn at 4096": torn(4096),
    "later sectors only": sectors(lambda i, n: i >= (n + 1) // 2),
    "the last sector only": sectors(lambda i, n: i == n - 1),
    "every other sector": sectors(lambda i, n: i % 2 == 1),
    "only its length": sectors(lambda i, n: False),
}


def left_by_a_cut(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Every state of the folder to be tried, by name, each once. All files are in the same state, or index files are whole."""
    seen: set[frozenset[tuple[str, bytes]]] = set()
    for names_label, entries in names_left(snapshot):
        for label, content in CONTENTS.items():
            for caches in (content, _kept):
                files = {
                    name: (content if name.endswith(".bson") else caches)(*snapshot.inodes[number])
                    for name, number in entries.items()
                }
                state = frozenset(files.items())
                if state not in seen:
                    seen.add(state)
                    yield f"{names_label}, contents {label}", files
