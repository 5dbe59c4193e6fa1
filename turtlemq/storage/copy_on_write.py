"""A shadow of a data folder: links to its files in a place of their own, and a door that copies a file before it changes it.

Whoever opens the shadow may cut, mend and write as a start does; the folder itself stays as it is, byte for byte, and may be on a
disk that cannot be written to. No server can start in it meanwhile. Nothing is synced: the shadow is thrown away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from turtlemq.storage import names
from turtlemq.storage.door import Door

_OWN = ".own"
_LEFT_OUT = (names.LOCK, "BALLAST", "PINNED", "READERS")  # of no meaning for what is stored


class Shadow(Door):
    """The door to a shadow of `source` in `root`, an empty folder."""

    keeps_room = False

    def __init__(self, source: Path, root: Path) -> None:
        super().__init__()
        self.source, self.root = source.absolute(), root
        self._linked: dict[int, Path] = {}  # descriptors of files that are still the folder's own
        self._files = list(self._cast(""))

    def _cast(self, place: str) -> Iterator[str]:
        for entry in sorted(os.scandir(self.source / place), key=lambda entry: entry.name):
            name = f"{place}{entry.name}"
            if name in _LEFT_OUT:
                continue
            if entry.is_dir():
                (self.root / name).mkdir()
                yield from self._cast(f"{name}/")
            else:
                os.symlink(entry.path, self.root / name)
                yield name

    def changed(self) -> list[str]:
        """Files, as paths within the folder, that are gone or not the folder's own any more."""
        return [name for name in self._files if not (self.root / name).is_symlink()]

    def cut(self) -> dict[str, int]:
        """Logs that opening has made shorter, and by how many bytes."""
        logs = [name for name in self.changed() if name.endswith(".bson") and (self.root / name).exists()]
        lost = {name: (self.source / name).stat().st_size - (self.root / name).stat().st_size for name in logs}
        return {name: bytes_ for name, bytes_ in lost.items() if bytes_ > 0}

    def fresh(self) -> Door:
        return self

    def lock(self, path: Path) -> int:
        """The folder's own, shared with others who only look: a server's is not."""
        own = self.source / names.LOCK
        return self._hold(own, os.open(own, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH) if own.exists() else super().lock(path)

    def open_write(self, path: Path) -> int:
        if not path.is_symlink():
            return super().open_write(path)
        fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._linked[fd] = path
        return fd

    def write(self, fd: int, path: Path, offset: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        self._take_over(fd)
        return super().write(fd, path, offset, buffers)

    def truncate(self, fd: int, path: Path, size: int) -> None:
        self._take_over(fd)
        super().truncate(fd, path, size)

    def _take_over(self, fd: int) -> None:
        """The descriptor is one of a copy from now on."""
        path = self._linked.pop(fd, None)
        if path is not None:
            copy = path.with_name(path.name + _OWN)
            shutil.copyfile(path, copy)
            os.replace(copy, path)
            self._forget(path)
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(own, fd, inheritable=False)
            os.close(own)

    def sync(self, fd: int, path: Path) -> None:
        """Nothing."""

    def sync_folder(self, path: Path) -> None:
        """Nothing."""

    def close(self, fd: int) -> None:
        self._linked.pop(fd, None)
        super().close(fd)
