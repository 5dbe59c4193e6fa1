"""A disk that remembers: beside real files it keeps their durable state. And all states that a power cut may leave.

The model is the weakest that the manuals allow. Between two syncs of a file any of its writes may have reached the disk, in any
order, whole or torn; between two syncs of a folder any change of its names may have. Synced bytes stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from turtlemq.storage.door import Door

T = TypeVar("T")
Tree = dict[str, bytes | None]  # by path; None: a folder
TEARS = (1, 512, 4096)
SECTOR = 512
ROOT = 0  # its inode


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that were written and not synced yet; `data` None: the file was cut to `at`."""

    serial: int
    at: int
    data: bytes | None

    def on(self, content: bytes, size: int | None = None) -> bytes:
        """A file's content after this, or after its first `size` bytes."""
        if self.data is None:
            return content[: self.at].ljust(self.at, b"\0")
        data = self.data[:size]
        return content[: self.at].ljust(self.at, b"\0") + data + content[self.at + len(data) :]


@dataclass(frozen=True, slots=True)
class Name:
    """A name that was given or taken and not synced yet; `gone`: the name that the file had before."""

    serial: int
    name: str | None
    inode: int
    gone: str | None = None

    def on(self, names: dict[str, int]) -> dict[str, int]:
        kept = {name: inode for name, inode in names.items() if name != self.gone}
        return kept if self.name is None else {**kept, self.name: self.inode}


@dataclass(frozen=True, slots=True)
class File:
    """The durable part of a file, and the writes to it since."""

    durable: bytes = b""
    pending: tuple[Write, ...] = ()

    def current(self) -> bytes:
        return _written(self.durable, self.pending)


@dataclass(frozen=True, slots=True)
class Folder:
    """The durable names of a folder, and the changes of names since."""

    durable: dict[str, int]
    pending: tuple[Name, ...] = ()

    def current(self) -> dict[str, int]:
        return _named(self.durable, self.pending)


Inodes = dict[int, File | Folder]


def _written(content: bytes, writes: Iterable[Write]) -> bytes:
    for write in writes:
        content = write.on(content)
    return content


def _named(names: dict[str, int], changes: Iterable[Name]) -> dict[str, int]:
    for change in changes:
        names = change.on(names)
    return names


class Disk(Door):
    """Works on real files in `root`, which it fills with `tree`; syncs cost nothing. `moments` are the disk after each change."""

    keeps_room = False  # ballast is no data, and would be most of the work

    def __init__(self, root: Path, tree: Tree) -> None:
        super().__init__()
        self.root, self._base = root, f"{root}/"
        self.inodes: Inodes = {ROOT: Folder({})}
        self.moments: list[Inodes] = []
        self._fds: dict[int, int] = {}
        self._serial = 0
        self._made = 0
        fill(root, tree)
        for path, content in tree.items():
            made = self._new(File(content) if content is not None else Folder({}))
            folder = self._folder(root / path)
            self._set(folder, Folder({**self._names(folder), Path(path).name: made}))
        self.moments = [dict(self.inodes)]

    def fresh(self) -> Door:
        return self

    def random_bytes(self, count: int) -> bytes:
        return b"\x07" * count

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        result: Any = None if name in ("fdatasync", "fsync_dir") else action(*args)
        if path is not None and f"{path}/".startswith(self._base) and self._note(name, path, result, args):
            self.moments.append(dict(self.inodes))
        return result  # type: ignore[no-any-return]

    def _note(self, name: str, path: Path, result: Any, args: tuple[Any, ...]) -> bool:
        """Whether the call has changed anything."""
        match name:
            case "open":
                return self._opened(path, int(result), args[1])
            case "write":
                data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
                return self._change(args[0], args[2], data[:result])
            case "truncate":
                return self._change(args[0], args[1], None)
            case "fdatasync":
                return self._sync(self._fds[args[0]])
            case "fsync_dir":
                return self._sync(self._find(path))
            case "mkdir":
                return self._name(path, self._new(Folder({})))
            case "rename":
                return self._name(args[1], self._find(args[0]), args[0].name)
            case "unlink" | "rmdir":
                return self._name(path, None, path.name)
        return False

    def _opened(self, path: Path, fd: int, flags: int) -> bool:
        if flags & os.O_DIRECTORY:
            return False
        fresh = path.name not in self._names(self._folder(path))
        if fresh:
            self._name(path, self._new(File()))
        self._fds[fd] = self._find(path)
        return fresh

    def _change(self, fd: int, at: int, data: bytes | None) -> bool:
        inode = self._fds[fd]
        file = self.inodes[inode]
        assert isinstance(file, File)
        self._serial += 1
        return self._set(inode, File(file.durable, (*file.pending, Write(self._serial, at, data))))

    def _name(self, path: Path, inode: int | None, gone: str | None = None) -> bool:
        number = self._folder(path)
        folder = self.inodes[number]
        assert isinstance(folder, Folder)
        self._serial += 1
        change = Name(self._serial, None, -1, gone) if inode is None else Name(self._serial, path.name, inode, gone)
        return self._set(number, Folder(folder.durable, (*folder.pending, change)))

    def _sync(self, inode: int) -> bool:
        found = self.inodes[inode]
        if isinstance(found, File):
            return bool(found.pending) and self._set(inode, File(found.current()))
        return bool(found.pending) and self._set(inode, Folder(found.current()))

    def _new(self, what: File | Folder) -> int:
        self._made += 1
        self._set(self._made, what)
        return self._made

    def _set(self, inode: int, what: File | Folder) -> bool:
        self.inodes[inode] = what
        return True

    def _names(self, inode: int) -> dict[str, int]:
        folder = self.inodes[inode]
        assert isinstance(folder, Folder)
        return folder.current()

    def _folder(self, path: Path) -> int:
        """The inode of the folder that a path is in."""
        at = ROOT
        for name in str(path).removeprefix(self._base).split("/")[:-1]:
            at = self._names(at)[name]
        return at

    def _find(self, path: Path) -> int:
        return ROOT if path == self.root else self._names(self._folder(path))[path.name]


def fill(root: Path, tree: Tree) -> None:
    """Make a folder hold this and nothing else. Folders come before their contents."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    base = str(root)
    for path, content in tree.items():
        if content is None:
            os.mkdir(f"{base}/{path}")
        else:
            with open(f"{base}/{path}", "wb", 0) as file:
                file.write(content)


# States that a power cut leaves

KILLED, LOST, ORDERED, FREE = "nothing is lost", "all that was not synced is lost", "in order", "in any order"


def cut(inodes: Inodes, chance: Random) -> tuple[str, Tree]:
    """One of the states that a cut at this moment may leave, and its kind."""
    kind = chance.choice((KILLED, LOST, ORDERED, ORDERED, FREE, FREE, FREE, FREE, FREE, FREE))
    match kind:
        case "nothing is lost":
            return kind, _tree(inodes, File.current, Folder.current)
        case "all that was not synced is lost":
            return kind, all_lost(inodes)
        case "in order":
            return kind, _in_order(inodes, chance)
    return kind, _tree(inodes, lambda file: _some_of(file, chance), lambda folder: _some_names(folder, chance))


def all_lost(inodes: Inodes) -> Tree:
    """The state that a power cut leaves in any case."""
    return _tree(inodes, lambda file: file.durable, lambda folder: folder.durable)


def _tree(
    inodes: Inodes, content: Callable[[File], bytes], names: Callable[[Folder], dict[str, int]], at: int = ROOT, path: str = ""
) -> Tree:
    out: Tree = {}
    folder = inodes[at]
    assert isinstance(folder, Folder)
    for name, inode in sorted(names(folder).items()):
        found = inodes[inode]
        if isinstance(found, File):
            out[path + name] = content(found)
        else:
            out[path + name] = None
            out |= _tree(inodes, content, names, inode, f"{path}{name}/")
    return out


def _in_order(inodes: Inodes, chance: Random) -> Tree:
    """Everything up to a moment has reached the disk, and nothing behind it; the last write may be torn."""
    serials = [change.serial for found in inodes.values() for change in found.pending]
    last = chance.choice(sorted(serials)) if serials else 0
    tear = chance.choice((None, *TEARS))

    def content(file: File) -> bytes:
        out = file.durable
        for write in file.pending:
            if write.serial <= last:
                out = write.on(out, tear if write.serial == last else None)
        return out

    return _tree(inodes, content, lambda folder: _named(folder.durable, (c for c in folder.pending if c.serial <= last)))


def _some_of(file: File, chance: Random) -> bytes:
    """Any part of the writes to a file since its last sync."""
    if not file.pending:
        return file.durable
    match chance.randrange(7):
        case 0:
            return file.durable
        case 1 | 2:
            return file.current()
        case 3:  # the first ones, the last of them torn
            count = chance.randrange(len(file.pending))
            return file.pending[count].on(_written(file.durable, file.pending[:count]), chance.choice(TEARS))
        case 4:  # the last one without those before it
            return file.pending[-1].on(file.durable)
        case 5:  # any of them, each perhaps torn
            out = file.durable
            for write in file.pending:
                if chance.random() < 0.6:
                    out = write.on(out, chance.choice((None, None, *TEARS)))
            return out
    return _sectors(file.durable, file.current(), chance)


def _sectors(old: bytes, new: bytes, chance: Random) -> bytes:
    """The file has its new length, but only some sectors of it were written; there are zeros where nothing was."""
    old = old.ljust(len(new), b"\0")[: len(new)]
    keep = chance.choice((0.0, 0.5, 0.9))
    pieces = [(new if chance.random() < keep else old)[at : at + SECTOR] for at in range(0, len(new), SECTOR)]
    return b"".join(pieces)


def _some_names(folder: Folder, chance: Random) -> dict[str, int]:
    changes: Sequence[Name] = folder.pending
    match chance.randrange(4):
        case 0:
            changes = ()
        case 1:
            changes = changes[: chance.randint(0, len(changes))]
        case 2:
            changes = [change for change in changes if chance.random() < 0.5]
    return _named(folder.durable, changes)
