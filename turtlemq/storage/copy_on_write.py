"""Copy on write: a Door to a temporary copy of a data folder that consists of symbolic links until a file is changed.

`check` opens such a copy as a server would, with all cuts and repairs of recovery, while the folder itself stays as it is, byte
for byte, and may be read only. The lock is shared, so several checks may run, but no server can start meanwhile. Nothing is
synced: the copy is thrown away.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from turtlemq.storage import lock, names
from turtlemq.storage.door import Door

_COPY = ".own"
_INNER = "|".join(names.INNER)
_ENTERED = re.compile(rf"topic|topic/[^/.][^/]*|topic/[^/]+/({_INNER})")  # folders that may be links to other disks


class CopyOnWriteDoor(Door):
    """The Door to a copy of `source` in `root`, which must be an empty folder."""

    keeps_room = False

    def __init__(self, source: Path, root: Path) -> None:
        super().__init__()
        self.source, self.root = source.absolute(), root
        self._linked: dict[int, Path] = {}  # open descriptors of files that are links
        self._files = list(self._link_all(""))

    def _link_all(self, folder: str) -> Iterator[str]:
        """Make a link to each file. Yields their paths within the data folder. Links to folders are entered only where the engine
        enters them."""
        for entry in sorted(os.scandir(self.source / folder), key=lambda entry: entry.name):
            name = f"{folder}{entry.name}"
            if name in names.LOCAL:
                continue
            if entry.is_dir() and entry.is_symlink() and not _ENTERED.fullmatch(name):
                continue
            if entry.is_dir():
                (self.root / name).mkdir()
                yield from self._link_all(f"{name}/")
            else:
                os.symlink(entry.path, self.root / name)
                yield name

    def changed(self) -> list[str]:
        """Files that were changed or removed, as paths within the data folder."""
        return [name for name in self._files if not (self.root / name).is_symlink()]

    def cut(self) -> dict[str, int]:
        """Logs that recovery has cut, and by how many bytes."""
        logs = [name for name in self.changed() if name.endswith(".bson") and (self.root / name).exists()]
        lost = {name: (self.source / name).stat().st_size - (self.root / name).stat().st_size for name in logs}
        return {name: bytes_ for name, bytes_ in lost.items() if bytes_ > 0}

    def fresh(self) -> Door:
        return self

    def lock(self, path: Path) -> int:
        """Lock the original folder, shared with other readers but not with a server."""
        own = self.source / names.LOCK
        if not own.exists():
            return super().lock(path)
        fd = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
        lock.hold(own, fd, fcntl.LOCK_SH)
        return fd

    def holds(self, path: Path, fd: int) -> bool:
        """True: a copy belongs to this process alone."""
        return True

    def open_write(self, path: Path) -> int:
        if not path.is_symlink():
            return super().open_write(path)
        fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._linked[fd] = path
        return fd

    def write(self, fd: int, path: Path, offset: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        self._copy(fd)
        return super().write(fd, path, offset, buffers)

    def truncate(self, fd: int, path: Path, size: int) -> None:
        self._copy(fd)
        super().truncate(fd, path, size)

    def _copy(self, fd: int) -> None:
        """Replace a link by a copy of its file, and let the descriptor refer to the copy."""
        path = self._linked.pop(fd, None)
        if path is not None:
            copy = path.with_name(path.name + _COPY)
            shutil.copyfile(path, copy)
            os.replace(copy, path)
            self._forget(path)
            writable = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(writable, fd, inheritable=False)
            os.close(writable)

    def sync(self, fd: int, path: Path) -> None:
        """Does nothing: the copy is temporary."""

    def _sync_names(self, fd: int, folder: Path) -> None:
        """Does nothing: the copy is temporary."""

    def close(self, fd: int) -> None:
        self._linked.pop(fd, None)
        super().close(fd)
