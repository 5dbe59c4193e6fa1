"""Pins: the files of a data folder as they are at one moment, so that nothing is pulled from under a query.

A pin is a hard link in `READERS/{name}/` beside the data, and the file's length when it was made. Segments only grow at their end
or are replaced whole, so link and length are that moment for ever, whatever is sealed, compacted or removed meanwhile. Where
links cannot be made (a read-only mount, another file system) files are read where they lie; a read says so if one has changed.

Files of a topic are pinned givers first: whoever takes a message over has it durably before the one that gave it lets go, so a
message that moves meanwhile is seen at its old place or at the new one, never at none. Sleepers come before the ready log, an
older segment before a newer one. Dead letters can be requeued: if they changed in between, the topic is pinned again.

Pins are removed by `release`, by the next one who pins once the session that made them is gone, or after `PIN_SECONDS`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from turtlemq.storage import names

FOLDER = "READERS"
OWNER = "OWNER"
MANIFEST = "MANIFEST.json"  # what is pinned, with lengths; written last
PIN_SECONDS = 6 * 3600
_ROUNDS = 5
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSPC)
ORDER = ("dead", "delay", "ready", "reserve", "history")  # givers first; dead letters once more at the end
NEEDED = {"delay": ("delay", "ready"), "ready": ("ready",), "reserve": ("reserve",), "history": ("history",), "dead": ("dead",)}
NEEDED |= {"forecast": NEEDED["delay"], "messages": ORDER}
DEAD = "dead"  # the folder of dead letters in a topic's


class Vanished(Exception):
    """A file that this query needs was replaced or removed, and could not be pinned. Run the query again; to have files pinned,
    let Spark write to the data folder, or read a backup."""


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was: `path` is where to read it, `size` how much of it counts. `inode` is 0 where it is pinned."""

    path: str
    size: int
    inode: int = 0

    @property
    def name(self) -> str:
        return Path(self.path).name

    def map(self) -> memoryview:
        """Its bytes, mapped. Checks that it is still the same file, where it could not be pinned."""
        import mmap

        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Vanished(f"{self.path}: {Vanished.__doc__}") from None
        try:
            found = os.fstat(fd)
            if (self.inode and found.st_ino != self.inode) or found.st_size < self.size:
                raise Vanished(f"{self.path}: {Vanished.__doc__}")
            if not self.size:
                return memoryview(b"")
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))[: self.size]
        finally:
            os.close(fd)

    def sync(self) -> bool:
        """Make what is in it durable, whoever wrote it. False where that cannot be done from here."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            return True
        except OSError:
            return False


@dataclass(slots=True)
class TopicFiles:
    """Files of one topic by log (`delay`, `ready`, …, `dead`) and name, and the folder of the pins, None where there is none."""

    topic: str
    source: Path  # the topic's folder in the data folder
    folder: Path | None
    files: dict[str, dict[str, File]]
    offset: File | None = None  # the checkpoint

    def segments(self, log: str) -> list[tuple[int, File]]:
        """Segments of a log with their bases, in order."""
        known = [(names.parse(name), file) for name, file in self.files.get(log, {}).items()]
        return sorted(((at.base, file) for at, file in known if at is not None and at.what == "bson"), key=lambda one: one[0])


class Snapshot:
    """One moment of a data folder. Made by `take`; also a context manager that lets go at the end."""

    def __init__(self, root: Path, name: str, folder: Path | None) -> None:
        self.root, self.name, self.folder = root, name, folder
        self.topics: dict[str, TopicFiles] = {}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go, so that room can be freed."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            _remove_if_empty(self.root / FOLDER)


def take_snapshot(root: Path, topics: list[str], logs: tuple[str, ...], *, pin: bool = True) -> Snapshot:
    """Pin the logs of these topics. 20 µs a file."""
    remove_stale(root)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"
    pins = Snapshot(root, name, _make(root, name) if pin else None)
    for topic in topics:
        pins.topics[topic] = _topic(pins, topic, logs)
    if pins.folder is not None:
        told = {
            topic: {log: {name: file.size for name, file in files.items()} for log, files in pinned.files.items()}
            for topic, pinned in pins.topics.items()
        }
        offsets = [topic for topic, pinned in pins.topics.items() if pinned.offset is not None]
        (pins.folder / MANIFEST).write_text(json.dumps({"topics": told, "offsets": offsets}))
    return pins


def load_snapshot(root: Path, name: str) -> Snapshot:
    """A moment that somebody has pinned before, under its name."""
    folder = root / FOLDER / name
    try:
        told = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise Vanished(
            f"there is no snapshot {name!r} in {root / FOLDER}. It was released, or is too old: take another."
        ) from None
    pins = Snapshot(root, name, folder)
    for topic, logs in told["topics"].items():
        place = folder / names.TOPICS / topic
        found = TopicFiles(topic, root / names.TOPICS / topic, place, {})
        for log, files in logs.items():
            inside = place / DEAD if log == DEAD else place
            found.files[log] = {name: File(str(inside / name), size) for name, size in files.items()}
        if topic in told["offsets"]:
            found.offset = File(str(place / "offset"), (place / "offset").stat().st_size)
        pins.topics[topic] = found
    return pins


def _make(root: Path, name: str) -> Path | None:
    folder = root / FOLDER / name
    for attempt in range(_ROUNDS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / OWNER).write_text(session_label())
            _note(root)
            return folder
        except OSError as error:
            if error.errno in _NO_LINKS:
                return None
            if error.errno != errno.ENOENT or attempt == _ROUNDS - 1:  # another one has just removed the empty folder
                raise
    return None


def _topic(pins: Snapshot, topic: str, logs: tuple[str, ...]) -> TopicFiles:
    source = pins.root / names.TOPICS / topic
    folder = None if pins.folder is None else pins.folder / names.TOPICS / topic
    found = TopicFiles(topic, source, folder, {})
    for _ in range(_ROUNDS):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / DEAD).mkdir(parents=True)
        found = TopicFiles(topic, source, folder, {})
        for log in ORDER:
            if log in logs:
                found.files[log] = _log(source, folder, log)
        if "reserve" in logs:
            found.offset = _link(source, folder, "offset")
        dead = found.files.get(DEAD)
        if dead is None or len(logs) == 1 or all(_same(source / DEAD / name, file) for name, file in dead.items()):
            break
    return found


def _log(source: Path, folder: Path | None, log: str) -> dict[str, File]:
    """All files of a log, the oldest first; those that come while we are at it, too."""
    if log == DEAD:
        source, folder, log = source / DEAD, None if folder is None else folder / DEAD, "delay"
    found: dict[str, File] = {}
    seen: set[str] = set()
    while fresh := [name for name in _listed(source, log) if name not in seen]:
        for name in fresh:
            seen.add(name)
            file = _link(source, folder, name)
            if file is not None:
                found[name] = file
    return found


def _listed(source: Path, log: str) -> list[str]:
    """Segments and tables, those of one segment together, the segment first."""
    try:
        known = [(names.parse(name), name) for name in os.listdir(source)]
    except FileNotFoundError:
        return []
    mine = [(at, name) for at, name in known if at is not None and at.kind == log and not at.suffix and at.what != "dead"]
    return [name for _, name in sorted(mine, key=lambda one: (one[0].base, one[0].what != "bson", one[0].first or 0))]


def _link(source: Path, folder: Path | None, name: str) -> File | None:
    """None: it is gone."""
    path = source / name
    try:
        if folder is not None:
            try:
                os.link(path, folder / name)
                return File(str(folder / name), (folder / name).stat().st_size)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        found = path.stat()
        return File(str(path), found.st_size, found.st_ino)
    except FileNotFoundError:
        return None


def _same(path: Path, file: File) -> bool:
    try:
        return path.stat().st_size == file.size
    except FileNotFoundError:
        return False


# Who pinned, and letting go for those who are gone


def session_label() -> str:
    """The session that pins: the Java process above this one, or this one; with the time it began, for numbers come again."""
    pid = os.getpid()
    above = pid
    for _ in range(8):
        stat = _stat(above)
        if stat is None or above <= 1:
            break
        if stat[0] == "java":
            pid = above
            break
        above = stat[1]
    return process_label(pid)


def process_label(pid: int) -> str:
    """A process by machine, number and begin."""
    stat = _stat(pid)
    return f"{os.uname().nodename} {pid} {stat[2] if stat else 0}"


def _roots(told: str) -> Path:
    """Where it is noted which data folders a session has pinned files of."""
    return Path(tempfile.gettempdir()) / f"turtlemq-readers-{os.getuid()}-{'-'.join(told.split()[1:])}"


def _note(root: Path) -> None:
    path, line = _roots(session_label()), f"{root}\n"
    try:
        if line not in (path.read_text() if path.exists() else ""):
            with path.open("a") as file:
                file.write(line)
    except OSError:
        return  # the next one who pins there cleans up


def release_session(told: str) -> None:
    """Let go of everything that a session has pinned."""
    try:
        for root in _roots(told).read_text().splitlines():
            remove_stale(Path(root), whose=told)
        _roots(told).unlink()
    except OSError:
        return


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Name, parent and begin of a process; None where that cannot be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return name, int(rest[1]), int(rest[19])


def _gone(told: str) -> bool:
    """Is the session that wrote this surely over? Of one on another machine nobody knows."""
    host, _, rest = told.partition(" ")
    if host != os.uname().nodename or _stat(os.getpid()) is None:
        return False
    pid, _, began = rest.partition(" ")
    stat = _stat(int(pid)) if pid.isdigit() else None
    return stat is None or str(stat[2]) != began


def remove_stale(root: Path, *, whose: str = "") -> int:
    """Remove pins whose session is over, or that are too old, and those of the session `whose`. Returns how many."""
    removed = 0
    try:
        folders = sorted((root / FOLDER).iterdir())
    except OSError:
        return 0
    for folder in folders:
        try:
            old = time.time() - folder.stat().st_mtime > PIN_SECONDS
            told = (folder / OWNER).read_text() if not old else ""
        except OSError:
            continue  # another one is being made, or removed
        if old or _gone(told) or told == whose:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    _remove_if_empty(root / FOLDER)
    return removed


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
