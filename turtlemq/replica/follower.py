"""A standby's side of the stream: it makes the changes that records tell of, in order, to the files of its own data folder.

A record that does not fit the files here raises `OutOfStep`: this copy has to be compared with the leader's files.
Every other error is one of the disk, and is raised as the Door raises it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from turtlemq.replica.frames import Need
from turtlemq.replica.manifest import CatchUp, Verdict
from turtlemq.replica.records import Kind, OutOfStep, Record, check
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Job, Worker

_FILES_MAX = 256  # descriptors that are kept for writing
FERRY = "ferry"  # folder in SYNC: files that came apart from the stream, until a record gives them their names


class Follower:
    """Applies records to the data folder `root`. `lsn` and `chain` are those of the last record that was applied.

    `syncer` runs syncs, and may use a thread: each is over before the record that says so is applied."""

    def __init__(self, root: Path, door: Door, lsn: int = 0, chain: int = 0, *, syncer: Worker | None = None) -> None:
        self._root, self._door, self._syncer = root, door, syncer or Inline()
        self.lsn, self.chain = lsn, chain
        self.ask: Callable[[Need], None] = _did_not_arrive  # returns when the file is in the ferry's folder
        self.catch_up: CatchUp | None = None  # which records count, in a copy whose files were linked at different moments
        self._files: OrderedDict[str, int] = OrderedDict()
        self._syncs: dict[int, Job] = {}  # by the LSN of the record that began them
        self._apply: dict[int, Callable[[Record, Path], None]] = {
            Kind.CREATE: self._create,
            Kind.WRITE: self._write,
            Kind.CUT: self._cut,
            Kind.SYNC: self._begin_sync,
            Kind.SYNC_DIR: self._begin_folder_sync,
            Kind.SYNCED: self._finish_sync,
            Kind.RENAME: self._rename,
            Kind.REMOVE: self._remove,
            Kind.MKDIR: self._make_folder,
            Kind.RMDIR: self._remove_folder,
            Kind.ADOPT: self._adopt,
        }

    def apply(self, record: Record) -> None:
        """Make the change that a record tells of."""
        head = record.head
        if head.lsn != self.lsn + 1:
            raise OutOfStep(f"record {head.lsn:,} came after {self.lsn:,}")
        check(record, self.chain)
        action = self._apply.get(head.kind)
        if action is None or not is_shared(record.path):
            raise OutOfStep(f"record {head.lsn:,} would change {record.path!r} in an unknown way ({head.kind})")
        if self.catch_up is not None:
            action = {Verdict.APPLY: action, Verdict.REMOVE: self._remove_folder}.get(self.catch_up.verdict(record), _skip)
        try:
            action(record, self._path(record.path))
        except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise OutOfStep(f"record {head.lsn:,} does not fit the files here: {error}") from error
        self.lsn, self.chain = head.lsn, record.chain

    def close(self) -> None:
        """Wait for syncs under way, and close all files."""
        for job in self._syncs.values():
            job.result()
        self._syncs.clear()
        while self._files:
            self._door.close(self._files.popitem()[1])
        self._door.shut()

    def _path(self, relative: str) -> Path:
        return self._root / relative

    # Files

    def _create(self, record: Record, path: Path) -> None:
        self._forget(record.path)
        if self._door.exists(path) and not path.name.endswith(names.TMP):
            raise OutOfStep(f"record {record.head.lsn:,} creates {record.path!r}, which exists")
        self._keep(record.path, self._door.create(path, record.head.offset & 0o777))

    def _write(self, record: Record, path: Path) -> None:
        self._door.write(self._file(record.path), path, record.head.offset, [record.data])

    def _cut(self, record: Record, path: Path) -> None:
        self._door.truncate(self._file(record.path), path, record.head.offset)

    def _rename(self, record: Record, path: Path) -> None:
        target = _other_path(record, record.data)
        self._forget_below(record.path)
        self._forget(target)
        self._door.rename(path, self._path(target))

    def _remove(self, record: Record, path: Path) -> None:
        """An unfinished file may be missing: the leader's other process wrote it, and it never got its name."""
        self._forget(record.path)
        if not self._door.exists(path) and not path.name.endswith(names.TMP):
            raise OutOfStep(f"record {record.head.lsn:,} removes {record.path!r}, which does not exist")
        self._door.remove(path)

    def _adopt(self, record: Record, path: Path) -> None:
        target = _other_path(record, record.data[8:])
        size, total = record.head.offset, int.from_bytes(record.data[:8], "little")
        ferried = self._root / names.SYNC / FERRY / ferry_name(record.path, total)
        if not self._door.exists(ferried) or self._door.size(ferried) != size:
            self.ask(Need(record.path, target, size, total))
        self._forget(target)
        self._door.remove(path)
        self._door.rename(ferried, self._path(target))

    # Folders

    def _make_folder(self, _: Record, path: Path) -> None:
        self._door.make_folder(path, durable=False)

    def _remove_folder(self, record: Record, path: Path) -> None:
        """Files of this copy alone go with it."""
        self._forget_below(record.path)
        self._door.remove_folder(path)

    # Syncs

    def _begin_sync(self, record: Record, path: Path) -> None:
        fd = os.dup(self._file(record.path))  # the file may be renamed, or closed here, before the sync is over
        self._syncs[record.head.lsn] = self._syncer.submit(_sync, self._door, fd, path)

    def _begin_folder_sync(self, record: Record, path: Path) -> None:
        self._syncs[record.head.lsn] = self._syncer.submit(self._door.sync_folder, path)

    def _finish_sync(self, record: Record, _: Path) -> None:
        """A sync that began before this copy was attached is not here: attaching has synced everything."""
        job = self._syncs.pop(record.head.offset, None)
        if job is not None:
            job.result()

    # Descriptors

    def _file(self, path: str) -> int:
        fd = self._files.get(path)
        if fd is None:
            fd = self._door.open_write(self._path(path))
            self._keep(path, fd)
        else:
            self._files.move_to_end(path)
        return fd

    def _keep(self, path: str, fd: int) -> None:
        self._files[path] = fd
        if len(self._files) > _FILES_MAX:
            self._door.close(self._files.popitem(last=False)[1])

    def _forget(self, path: str) -> None:
        fd = self._files.pop(path, None)
        if fd is not None:
            self._door.close(fd)

    def _forget_below(self, path: str) -> None:
        """Close the file, or all files of a folder, whose names are about to change."""
        for name in [name for name in self._files if name == path or name.startswith(f"{path}/")]:
            self._forget(name)


def _skip(_: Record, __: Path) -> None:
    """The files have this change already."""


def _other_path(record: Record, data: bytes) -> str:
    """The second path of a record."""
    target = data.decode(errors="replace")
    if not is_shared(target):
        raise OutOfStep(f"record {record.head.lsn:,} would change {target!r}")
    return target


def _sync(door: Door, fd: int, path: Path) -> None:
    try:
        door.sync(fd, path)
    finally:
        door.close(fd)


def _did_not_arrive(need: Need) -> None:
    raise OutOfStep(f"a record names {need.path!r}, which did not arrive")


def ferry_name(path: str, total: int) -> str:
    """The name of a file that came apart from the stream, in the ferry's folder.

    >>> ferry_name("topic/orders/delay_0000000000.bson.tmp", 255)
    'topic%orders%delay_0000000000.bson.tmp.00000000000000ff'
    """
    return f"{path.replace('/', '%')}.{total:016x}"
