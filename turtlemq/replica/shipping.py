"""The leader's Door: it makes each change, and puts a record of it into the stream. The engine does not know.

A change and its record are made under the lock of the stream, so that records have the order of changes. A sync has two records,
one before it and one after it: a standby begins its own sync with the first and is behind it at the second, so both disks work
at the same time, and changes behind a sync of the leader are behind the standby's own sync.

Seals run in another process, with a plain Door: their files go to the standbys apart from the stream (`replica.ferry`), and here
they get their names.

A thread beside the engine may still write into an open file of a topic that was dropped. The file has another name by then, or
none, so such changes are not shipped: the folder is about to be removed everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from turtlemq.errors import Corrupt
from turtlemq.replica.records import Kind, sum_of
from turtlemq.replica.shared_files import must_ship
from turtlemq.replica.stream import Stream, pieces
from turtlemq.storage.door import Door
from turtlemq.storage.lock import is_behind

T = TypeVar("T")
_SYNCS = {"fdatasync": Kind.SYNC, "fsync_dir": Kind.SYNC_DIR}
_CHANGES = {"write", "truncate", "rename", "unlink", "mkdir", "rmdir", *_SYNCS}


class ShippingDoor(Door):
    """A Door whose changes are shipped. `root`: the data folder. Other arguments are those of `Door`."""

    replicated = True

    def __init__(self, *args: Any, stream: Stream, root: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stream, self._root = stream, root
        self._cut = len(str(root)) + 1
        self._is_beside = False

    def beside(self) -> Door:
        door = ShippingDoor(stream=self._stream, root=self._root, folder_mode=self.folder_mode)
        door._is_beside = True
        return door

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        creates = name == "open" and args[1] & os.O_CREAT
        if path is None or not (creates or name in _CHANGES) or (relative := self._shipped(path)) is None:
            return super()._call(name, path, action, *args)
        stream = self._stream
        if name in _SYNCS:
            with stream.lock:
                begun = None if self._is_dropped(args[0], path) else stream.add(_SYNCS[name], relative)
            result = super()._call(name, path, action, *args)
            if begun is not None:
                with stream.lock:
                    stream.add(Kind.SYNCED, "", begun)
            return result
        if name == "write":
            return self._ship_write(relative, path, action, args)
        before = self._shipped(args[0]) if name == "rename" else ""
        if before is None:
            raise Corrupt(f"{args[0]} is not replicated, and is to become {relative}, which is")
        with stream.lock:
            result = super()._call(name, path, action, *args)
            match name:
                case "open":
                    stream.ferried.pop(relative, None)  # it is another file now
                    stream.add(Kind.CREATE, relative, args[2])
                case "truncate" if not self._is_dropped(args[0], path):
                    stream.add(Kind.CUT, relative, args[1])
                case "rename":
                    self._ship_rename(before, relative)
                case "unlink":
                    stream.add(Kind.REMOVE, relative)
                case "mkdir":
                    stream.add(Kind.MKDIR, relative)
                case "rmdir":
                    stream.add(Kind.RMDIR, relative)
        return result

    def _shipped(self, path: Path) -> str | None:
        """The path in the data folder of a file that all copies have; None for any other."""
        relative = self._relative(path)
        return relative if relative is not None and must_ship(relative) else None

    def _relative(self, path: Path) -> str | None:
        text = str(path)
        if not text.startswith(str(self._root)) or text[self._cut - 1 : self._cut] not in ("", os.sep):
            return None
        return text[self._cut :]

    def _ship_write(self, relative: str, path: Path, action: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Checksums are made before the lock is taken. The buffers may change after the write, so the records have copies."""
        fd, buffers, offset = args
        data = _as_bytes(buffers)
        records = [(at, piece, sum_of(relative, piece)) for at, piece in pieces(data)]
        with self._stream.lock:
            many = isinstance(buffers, list | tuple)
            done: Any = super()._call("write", path, action, fd, [data] if many else data, offset)
            if self._is_dropped(fd, path):
                return done  # type: ignore[no-any-return]
            for at, piece, total in records:
                if at + len(piece) <= done:
                    self._stream.add(Kind.WRITE, relative, offset + at, piece, total)
                elif at < done:
                    self._stream.add(Kind.WRITE, relative, offset + at, piece[: done - at])
        return done  # type: ignore[no-any-return]

    def _is_dropped(self, fd: int, path: Path) -> bool:
        """Does the path of an open file lead to another one by now? Requires: the stream's lock is held."""
        return self._is_beside and not is_behind(path, fd)

    def _ship_rename(self, before: str, after: str) -> None:
        """A file that another process wrote went to the standbys apart from the stream: its record has size and checksum."""
        ferried = self._stream.ferried.pop(before, None)
        if ferried is None:
            self._stream.add(Kind.RENAME, before, 0, after.encode())
        else:
            self._stream.add(Kind.ADOPT, before, ferried.size, ferried.sum.to_bytes(8, "little") + after.encode())


def _as_bytes(buffers: bytes | memoryview | Sequence[bytes | bytearray | memoryview]) -> bytes:
    if isinstance(buffers, bytes | memoryview):
        return bytes(buffers)
    only = buffers[0] if len(buffers) == 1 else None
    return only if isinstance(only, bytes) else b"".join(buffers)
