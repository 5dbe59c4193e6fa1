"""A disk that keeps only synced bytes, and a process on it that may end at any call.

Files are real ones, so that they can be mapped; beside them stands the state of the disk after a power cut. A killed process
loses nothing that it has written; a power cut takes unsynced writes, in one of the ways of `tests.harness.doors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.harness.doors import CHANGES, CONTENTS
from turtlemq.storage import file_budget
from turtlemq.storage.door import Door
from turtlemq.storage.file_budget import FileBudget

T = TypeVar("T")


class Crash(BaseException):
    """The process ends here."""


@dataclass(eq=False)
class File:
    """A file's content: the durable bytes, and its bytes when its name went."""

    durable: bytes = b""
    last: bytes = b""


@dataclass(eq=False)
class Folder:
    """Names: those that are durable, the changes since, and those that processes see."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)  # None: the name went
    names: dict[str, File | Folder] = field(default_factory=dict)

    def change(self, change: dict[str, File | Folder | None]) -> None:
        """Names get another meaning, or none, all at once."""
        self.changes.append(change)
        _apply(self.names, change)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.names), []


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, what in change.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


class Drive:
    """The drive, which outlives processes: the folder `root`, and its durable state."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root, self.top = root, Folder()
        self.files: dict[int, File] = {}  # by the number of their inode

    def folder(self, path: Path) -> Folder:
        """The folder at a path."""
        found = self.top
        for part in path.relative_to(self.root).parts:
            inner = found.names[part]
            assert isinstance(inner, Folder)
            found = inner
        return found

    def created(self, path: Path, fd: int) -> None:
        """There is a new file."""
        self.files[os.fstat(fd).st_ino] = made = File()
        self.folder(path.parent).change({path.name: made})

    def vanishes(self, path: Path) -> None:
        """A name is about to go, or to mean something else: remember its file."""
        found = self.folder(path.parent).names.get(path.name)
        if isinstance(found, File):
            found.last = path.read_bytes()

    def renamed(self, source: Path, target: Path) -> None:
        before, after = self.folder(source.parent), self.folder(target.parent)
        moved = before.names[source.name]
        if before is after:
            after.change({target.name: moved, source.name: None})
        else:
            after.change({target.name: moved})
            before.change({source.name: None})

    def linked(self, source: Path, target: Path) -> None:
        self.folder(target.parent).change({target.name: self.folder(source.parent).names[source.name]})

    def cut(self, chance: Random) -> None:
        """The power fails: the folder is now the durable state of the disk."""
        content = chance.choice(list(CONTENTS.values()))
        left = self._left(self.top, self.root, content, chance)
        shutil.rmtree(self.root)
        self.files = {}
        self.top = self._write(left, self.root)

    def _left(self, folder: Folder, path: Path, content: Callable[[bytes, bytes], bytes], chance: Random) -> dict[str, Any]:
        """Names are changed on the disk in the order in which they were asked for, up to some moment."""
        names = dict(folder.durable)
        for change in folder.changes[: chance.randint(0, len(folder.changes))]:
            _apply(names, change)
        out: dict[str, Any] = {}
        seen = {id(what): name for name, what in folder.names.items()}
        for name, what in names.items():
            now = path / seen[id(what)] if id(what) in seen else None
            if isinstance(what, Folder):
                out[name] = {} if now is None else self._left(what, now, content, chance)
            else:
                out[name] = content(what.durable, what.last if now is None else now.read_bytes())
        return out

    def _write(self, left: dict[str, Any], path: Path) -> Folder:
        path.mkdir()
        made = Folder()
        for name, what in left.items():
            if isinstance(what, dict):
                made.names[name] = self._write(what, path / name)
            else:
                (path / name).write_bytes(what)
                made.names[name] = self.files[(path / name).stat().st_ino] = File(what)
        made.sync()
        return made


class Process(Door):
    """A process with its files open. It ends at the change number `ends_in` from now, in the middle of a write."""

    keeps_room = False  # ballast would only cost time here

    def __init__(self, drive: Drive, budget: FileBudget = file_budget.DEFAULT) -> None:
        super().__init__(budget)
        self.drive, self.ends_in, self.ended = drive, -1, False
        self._open_fds: set[int] = set()

    def fresh(self) -> Door:
        return self

    def random_bytes(self, count: int) -> bytes:
        return b"\x07" * count

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        changes = name in CHANGES and not (name == "open" and not args[1] & os.O_CREAT)
        if changes and not self.ended:
            self.ended = self.ends_in == 0
            self.ends_in -= 1
            if self.ended and name == "write":
                data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
                os.pwrite(args[0], data[: len(data) // 3], args[2])
        if self.ended and changes:
            raise Crash
        assert path is not None
        return self._act(name, path, action, args)

    def _act(self, name: str, path: Path, action: Callable[..., T], args: tuple[Any, ...]) -> T:
        drive = self.drive
        if name == "fdatasync":
            drive.files[os.fstat(args[0]).st_ino].durable = os.pread(args[0], os.fstat(args[0]).st_size, 0)
            return None  # type: ignore[return-value]
        if name == "fsync_dir":
            drive.folder(path).sync()
            return None  # type: ignore[return-value]
        if name == "rename":
            drive.vanishes(args[1])
            if args[0].parent != args[1].parent:
                drive.vanishes(args[0])
        elif name == "unlink":
            drive.vanishes(path)
        there = name in ("open", "mkdir") and path.exists()
        result = action(*args)
        if name == "open":
            self._opened(path, result, args[1], there)
        elif name == "mkdir" and not there:
            drive.folder(path.parent).change({path.name: Folder()})
        elif name == "rename":
            drive.renamed(args[0], args[1])
        elif name == "link":
            drive.linked(args[0], args[1])
        elif name in ("unlink", "rmdir"):
            drive.folder(path.parent).change({path.name: None})
        return result

    def _opened(self, path: Path, fd: Any, flags: int, there: bool) -> None:
        if flags & os.O_CREAT and not there:
            self.drive.created(path, fd)
        if flags & os.O_RDWR:
            self._open_fds.add(fd)

    def close(self, fd: int) -> None:
        self._open_fds.discard(fd)
        super().close(fd)

    def die(self) -> None:
        """Everything that it held is let go, its lock too."""
        self.ended = True
        self.shut()
        for fd in self._open_fds:
            os.close(fd)
        self._open_fds.clear()
