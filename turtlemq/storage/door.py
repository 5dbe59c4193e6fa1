"""The Door: every file operation of the engine goes through it, so that tests can record, tear, drop and refuse each of them.

Thread contract: one thread, except `write` and `sync` of a descriptor, which a committer thread may call.

Rules kept here and nowhere else:
- A file is replaced only by write-temp, sync, rename, sync-directory.
- A failed write leaves the file as long as it was. If the cut back fails as well, the caller gets that error.
- ENOSPC and EDQUOT become `DiskFull`, which promises that nothing has changed. Every other error names its file. A sync or a cut
  that fails for lack of space is such another error, because the state that it leaves is unknown.
- A call that finds no free descriptor closes those that are only kept to save time, and is repeated; if there are none, it raises
  `OutOfFiles`, which promises that nothing has changed. So names are changed in `durable_names`, which opens the folder first.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count, repeat
from pathlib import Path
from typing import Any, Protocol, TypeVar

from turtlemq.errors import DiskFull, Locked, OutOfFiles, TurtleError
from turtlemq.storage import file_budget, lock, names
from turtlemq.storage.file_budget import FileBudget
from turtlemq.storage.mapping import map_file

T = TypeVar("T")
_IOV_MAX = 512
_LOCK_TRIES = 100
_CLOSED_AT_ONCE = 8  # logs, when the system has no descriptor left: each may need a sync
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OPENING = ("open", "listdir", "mmap")  # calls that need a descriptor, or a mapping, and change nothing without
_UNSURE = ("fdatasync", "fsync_dir", "truncate")  # calls after whose failure the state of the file is unknown
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class KeptOpen(Protocol):
    """A log that keeps its file open between two writes."""

    def rest(self) -> bool:
        """Close the file, synced, unless a write is under way. Returns whether it is closed."""


class Door:
    """Blocking file operations. Subclasses in tests override `_call`. `budget`: how many files may stay open."""

    keeps_room = True  # whether `ballast` reserves space on this disk
    seq_floor = 0  # numbers of new documents are above it: another machine may have given those below, and lost them
    replicated = False  # whether other machines have copies: then damaged files are kept for comparison, not rewritten

    def __init__(self, budget: FileBudget = file_budget.DEFAULT, *, folder_mode: int = 0o700) -> None:
        self.budget = budget
        self.folder_mode, self.file_mode = folder_mode, folder_mode & 0o666  # of new folders and files, less the umask
        self._readers: OrderedDict[str, int] = OrderedDict()
        self._kept: dict[KeptOpen, None] = {}  # in the order in which they were opened

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        """Make a system call. `name` and `path` tell a test which one, and on which file."""
        return action(*args)

    def _do(self, name: str, path: Path, action: Callable[..., T], *args: Any) -> T:
        """Make a system call; errors name the file."""
        while True:
            try:
                return self._call(name, path, action, *args)
            except OSError as error:
                if error.errno in _NO_FILES and name in _OPENING:
                    if self.close_idle():
                        continue
                    raise OutOfFiles(f"{path.name} cannot be opened ({error.strerror}). {OutOfFiles.__doc__}") from error
                if error.errno in _FULL and name not in _UNSURE:
                    raise DiskFull(f"{path.name}: no room on the disk. {DiskFull.__doc__}") from error
                error.filename = error.filename or str(path)
                raise

    def fresh(self) -> Door:
        """A Door for another process, without the descriptors of this one."""
        return Door(folder_mode=self.folder_mode)

    def beside(self) -> Door:
        """A Door for another thread of this process."""
        return self.fresh()

    # Folders and names

    def make_folder(self, path: Path, *, durable: bool = True) -> None:
        """Create a folder and its parents, durably."""
        if path.is_dir():
            return
        self.make_folder(path.parent, durable=durable)
        if durable:
            with self.durable_names(path.parent):
                self._do("mkdir", path, lambda: path.mkdir(self.folder_mode, exist_ok=True))
        else:
            self._do("mkdir", path, lambda: path.mkdir(self.folder_mode, exist_ok=True))

    def names(self, folder: Path) -> list[str]:
        """Sorted names in a folder; empty if there is no such folder."""
        try:
            return sorted(self._do("listdir", folder, os.listdir, folder))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return self._do("stat", path, os.path.exists, path)

    def is_folder(self, path: Path) -> bool:
        return self._do("stat", path, os.path.isdir, path)

    def is_file(self, path: Path) -> bool:
        """Is this a regular file, or a link to one?"""
        return self._do("stat", path, os.path.isfile, path)

    def is_link(self, path: Path) -> bool:
        """Is this a symbolic link, wherever it leads?"""
        return self._do("stat", path, os.path.islink, path)

    def target(self, path: Path) -> str:
        """The absolute path to which a symbolic link leads."""
        return str(self._do("stat", path, os.path.realpath, path))

    def is_absolute_link(self, path: Path) -> bool:
        """Does this symbolic link lead to the same place from wherever it is?"""
        return os.path.isabs(self._do("stat", path, os.readlink, path))

    def is_on_same_disk(self, path: Path, other: Path) -> bool:
        """Can a file be renamed from one of these folders into the other?"""
        return self._do("stat", path, os.stat, path).st_dev == self._do("stat", other, os.stat, other).st_dev

    def set_mode(self, folder: Path) -> bool:
        """Give an existing folder the mode of new ones. Returns whether it has it: only its owner may change it."""
        if self._do("stat", folder, os.stat, folder).st_mode & 0o777 == self.folder_mode:
            return True
        try:
            self._do("chmod", folder, os.chmod, folder, self.folder_mode)
        except PermissionError:
            return False
        return True

    def size(self, path: Path) -> int:
        return self._do("stat", path, os.stat, path).st_size

    def identity(self, path: Path) -> tuple[int, int]:
        """Inode and time of the last change. If both are equal, it is the same file with the same content."""
        stat = self._do("stat", path, os.stat, path)
        return stat.st_ino, stat.st_mtime_ns

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file, on the same file system."""
        self._do("link", target, os.link, source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file. A file of that name is replaced. Durable only within `durable_names`."""
        self._do("rename", target, os.rename, source, target)
        self._forget(source)
        self._forget(target)

    def remove(self, path: Path) -> None:
        """Remove a file. No error if there is none."""
        self._forget(path)
        try:
            self._do("unlink", path, os.unlink, path)
        except FileNotFoundError:
            return

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and everything in it. No symbolic link is followed: a link is removed itself. Raises the first error,
        after it has removed all that can be removed. A crash may leave a part of it: see `set_aside`."""
        if self.is_link(path) or not self.is_folder(path):
            self.remove(path)
            return
        failed: OSError | None = None
        for name in self.names(path):
            try:
                self.remove_folder(path / name)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        self._do("rmdir", path, os.rmdir, path)

    def set_aside(self, path: Path) -> Path:
        """Rename a folder, durably, to a name that marks it for removal, and return that path. So it is removed as a whole or not
        at all, and a thread that still writes into it cannot write into a new folder of the same name. Of a folder behind a link
        only the link is renamed."""
        candidates = (path.with_name(names.dropped(path.name, n)) for n in count())
        gone = next(name for name in candidates if not self._do("stat", name, os.path.lexists, name))
        with self.durable_names(path.parent):
            self.rename(path, gone)
            for name in [name for name in self._readers if name.startswith(f"{path}{os.sep}")]:
                self._forget(Path(name))
        return gone

    def sync_folder(self, path: Path) -> None:
        """Make names in a folder durable."""
        with self.durable_names(path):
            pass

    @contextmanager
    def durable_names(self, folder: Path) -> Iterator[None]:
        """Create, rename or remove files of a folder in the body of a `with`; behind it these changes are durable. The folder is
        opened first: without a free descriptor nothing is changed."""
        fd = self._do("open", folder, os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield
            self._sync_names(fd, folder)
        finally:
            os.close(fd)

    def _sync_names(self, fd: int, folder: Path) -> None:
        self._do("fsync_dir", folder, os.fsync, fd)

    # Whole small files

    def read_all(self, path: Path) -> bytes:
        return self.read(path, 0, self.size(path))

    def replace(self, path: Path, data: bytes, *, durable: bool = True, mode: int | None = None) -> None:
        """Replace a whole file: a crash leaves the old or the new one. Without `durable` it may leave a torn one, too: only for
        caches, which have a checksum."""
        tmp = path.with_name(path.name + ".tmp")
        with self.durable_names(path.parent) if durable else nullcontext():
            fd = self.create(tmp, mode)
            try:
                self.write(fd, tmp, 0, [data])
                if durable:
                    self.sync(fd, tmp)
            except DiskFull:
                self.remove(tmp)  # free its space
                raise
            finally:
                self.close(fd)
            self.rename(tmp, path)

    # Files that are written

    def create(self, path: Path, mode: int | None = None) -> int:
        """Create a file for writing. A file of that name is unlinked, not cut: a reader that has it mapped would get SIGBUS."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._forget(path)
        try:
            return self._open(path, flags, mode)
        except FileExistsError:
            self.remove(path)
            return self._open(path, flags, mode)

    def open_write(self, path: Path) -> int:
        return self._open(path, os.O_RDWR | os.O_CLOEXEC)

    def _open(self, path: Path, flags: int, mode: int | None = None) -> int:
        return self._do("open", path, os.open, path, flags, self.file_mode if mode is None else mode)

    def write(self, fd: int, path: Path, offset: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Write all buffers at `offset`. Returns the number of bytes. On failure the file is cut back to `offset`."""
        at = offset
        try:
            for first in range(0, len(buffers), _IOV_MAX):
                group = buffers[first : first + _IOV_MAX]
                total = sum(map(len, group))
                done = self._do("write", path, os.pwritev, fd, group, at)
                if done < total:  # short writes are rare: finish as one buffer
                    rest = memoryview(b"".join(group))[done:]
                    while rest:
                        step = self._do("write", path, os.pwrite, fd, rest, at + done)
                        if not step:
                            raise OSError(errno.EIO, "nothing was written", str(path))
                        done += step
                        rest = rest[step:]
                at += total
        except (OSError, DiskFull):
            self.truncate(fd, path, offset)
            raise
        return at - offset

    def sync(self, fd: int, path: Path) -> None:
        """Make the content of a file durable. After an error the descriptor must not be used again: the kernel may have dropped
        the pages."""
        self._do("fdatasync", path, os.fdatasync, fd)

    def truncate(self, fd: int, path: Path, size: int) -> None:
        self._do("truncate", path, os.ftruncate, fd, size)

    def close(self, fd: int) -> None:
        os.close(fd)

    # Files that are read

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Read `length` bytes at `offset`; fewer only at the end of the file."""
        fd = self._reader(path)
        data = self._do("read", path, os.pread, fd, length, offset)
        while 0 < len(data) < length:  # one pread gives at most 2 GiB
            more = self._do("read", path, os.pread, fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def drop_cached(self, path: Path) -> None:
        """Let the kernel forget pages of a file that are cached, mapped ones excepted: the next read comes from the disk."""
        self._do("fadvise", path, os.posix_fadvise, self._reader(path), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_many(self, path: Path, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Read many short ranges of a file; a range is shorter only at the end of the file. 0.5 µs each from the page cache."""
        fd = self._reader(path)
        return self._do("read", path, lambda: list(map(os.pread, repeat(fd), lengths, offsets)))

    def map(self, path: Path) -> memoryview:
        """Map a whole file, read only. The mapping survives a rename and the removal of the file, but not a cut, and keeps no
        descriptor."""
        fd = self._do("open", path, os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self.map_open(fd, path)
        finally:
            os.close(fd)

    def map_open(self, fd: int, path: Path) -> memoryview:
        """Map a whole open file, read only. It need not have a name any more."""
        size = os.fstat(fd).st_size
        return self._do("mmap", path, map_file, fd, size) if size else memoryview(b"")

    def _reader(self, path: Path) -> int:
        """A descriptor for reading, from an LRU cache."""
        name = str(path)
        fd = self._readers.get(name)
        if fd is None:
            fd = self._do("open", path, os.open, path, os.O_RDONLY | os.O_CLOEXEC)
            self._readers[name] = fd
            if len(self._readers) > self.budget.readers:
                os.close(self._readers.popitem(last=False)[1])
        else:
            self._readers.move_to_end(name)
        return fd

    def _forget(self, path: Path) -> None:
        """Close the cached descriptor of a file whose name is about to mean another file."""
        fd = self._readers.pop(str(path), None)
        if fd is not None:
            os.close(fd)

    # Locks, space, closing

    def lock(self, path: Path) -> int:
        """Lock a file for this process. Raises `Locked`, with the process that holds it. The kernel releases the lock when the
        process ends, even if it is killed. The process must look from time to time whether it still `holds` it."""
        for _ in range(_LOCK_TRIES):
            fd = self._open_lock(path)
            lock.hold(path, fd, fcntl.LOCK_EX)
            if self.holds(path, fd):
                self._note_process(fd)
                return fd
            os.close(fd)  # it was removed, or replaced, after it was opened
        raise Locked(f"{path} is removed again and again. Find out which program does that.")

    def holds(self, path: Path, fd: int) -> bool:
        """Is the locked file still the one behind its name? If not, another process may have locked that one."""
        return self._do("stat", path, lock.is_behind, path, fd)

    def _open_lock(self, path: Path) -> int:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return self._do("open", path, os.open, path, flags | os.O_RDWR | os.O_CREAT, self.file_mode)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS) or not os.path.exists(path):
                raise
            return self._do("open", path, os.open, path, flags | os.O_RDONLY)  # enough for a lock

    def _note_process(self, fd: int) -> None:
        """Write the process id into a lock file, for people. A full disk may have no room for it."""
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            return

    def random_bytes(self, count: int) -> bytes:
        """Random bytes of the system, good enough for secrets. Tests that must repeat give others."""
        return os.urandom(count)

    def boot_id(self) -> str:
        """The id of the machine's present run; empty if the system does not tell. After another one, pages that were not synced
        are lost."""
        try:
            with open(_BOOT_ID, "rb") as opened:
                return opened.read(64).decode(errors="replace").strip()
        except OSError:
            return ""

    def free_bytes(self, path: Path) -> int:
        """Free space for this process on the file system of `path`."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    # Files that stay open

    def keep(self, log: KeptOpen) -> None:
        """Count a log whose file stays open. If there are too many, those close that were opened first."""
        self._kept[log] = None
        if len(self._kept) > self.budget.kept:
            self._close_kept(len(self._kept) - self.budget.kept, log)

    def release(self, log: KeptOpen) -> None:
        """The file of a log is closed."""
        self._kept.pop(log, None)

    def close_idle(self) -> bool:
        """Close descriptors that are kept only to save time: those of readers, else of some logs. Returns False if there were
        none."""
        if self._readers:
            self.shut()
            return True
        return self._close_kept(_CLOSED_AT_ONCE) > 0

    def _close_kept(self, count: int, but: KeptOpen | None = None) -> int:
        """Close up to `count` logs, those first that were opened first. Returns how many were closed."""
        closed = 0
        for log in [log for log in self._kept if log is not but]:
            if closed == count:
                break
            try:
                closed += log.rest()
            except (TurtleError, OSError):  # its sync has failed: it is stopped, and says so to those that use it
                continue
        return closed

    def shut(self) -> None:
        """Close all descriptors kept for reading."""
        while self._readers:
            os.close(self._readers.popitem()[1])
