"""Pins: hard links that keep the files of one snapshot, so that no query loses a file while it runs.

A pin is a hard link in `READERS/{name}/` beside the data, and the length of the file when the link was made. A segment only
grows at its end or is replaced as a whole, so link and length keep their content under seals, compaction and retention. Where
links cannot be made (a read-only mount, another file system), files are read in place, and a read fails if one was replaced.

Order: the log that a message leaves is pinned before the log that takes it over. The taking log has the message durably before
the other one lets it go, so a message that moves meanwhile is in one of the two pinned logs, never in none. The delay log comes
before the ready log, an older segment before a newer one. Dead letters can be requeued into the delay log: if they changed
meanwhile, the topic is pinned again.

Pins are removed by `release`, by the next snapshot after the session that made them has ended, or after `PIN_SECONDS`.
Not here: reading logs (`parts`), and the public function `turtlemq_snapshot` (`snapshot`).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turtlemq.segment import format as f
from turtlemq.storage import names

FOLDER = "READERS"
OWNER = "OWNER"
MANIFEST = "MANIFEST.json"  # names and lengths of the pinned files; written last
PIN_SECONDS = 6 * 3600
_ROUNDS = 5  # attempts to pin a topic while its dead letters change
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSPC)
PIN_ORDER = ("dead", "delay", "ready", "reserve", "history")  # dead letters are checked once more at the end
DEAD = "dead"  # the folder of dead letters in a topic's folder


class Vanished(Exception):
    """A file that this query needs was replaced or removed, and could not be pinned. Run the query again; to have files pinned,
    let Spark write to the data folder, or read a backup."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a snapshot. Only the first `size` bytes belong to it. `inode` is 0 if the file is pinned."""

    path: str
    size: int
    inode: int = 0

    @property
    def name(self) -> str:
        return Path(self.path).name

    def map(self) -> memoryview:
        """The bytes, mapped. Raises `Vanished` if the file was replaced, which can only happen to one that is not pinned."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Vanished(f"{self.path}: {Vanished.__doc__}") from None
        try:
            stat = os.fstat(fd)
            if (self.inode and stat.st_ino != self.inode) or stat.st_size < self.size:
                raise Vanished(f"{self.path}: {Vanished.__doc__}")
            if not self.size:
                return memoryview(b"")
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))[: self.size]
        finally:
            os.close(fd)

    def sync(self) -> bool:
        """Make the content durable, also that of another process. Returns False if the file system refuses it here."""
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
    """Files of one topic in a snapshot, by log (`delay`, `ready`, …, `dead`) and name."""

    topic: str
    source: Path  # the topic's folder in the data folder
    folder: Path | None  # of the pins; None if the files are read in place
    files: dict[str, dict[str, File]]
    offset: File | None = None  # the checkpoint
    clean_mark: dict[str, Any] | None = None  # ends of the logs at a clean shutdown, if no server has started since

    def segments(self, log: str) -> list[tuple[int, File]]:
        """Segments of a log with their bases, in order of the base."""
        parsed = [(names.parse(name), file) for name, file in self.files.get(log, {}).items()]
        return sorted(((at.base, file) for at, file in parsed if at is not None and at.what == "bson"), key=lambda pair: pair[0])


class Snapshot:
    """The files of a data folder at one moment, made by `take_snapshot`. As a context manager it releases its pins."""

    def __init__(self, root: Path, name: str, folder: Path | None) -> None:
        self.root, self.name, self.folder = root, name, folder
        self.topics: dict[str, TopicFiles] = {}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the pins, so that the server can free the space of removed files. The snapshot cannot be read afterwards."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            _remove_if_empty(self.root / FOLDER)


def take_snapshot(root: Path, topics: list[str], logs: tuple[str, ...], *, pin: bool = True) -> Snapshot:
    """Pin these logs of these topics; with `pin=False` only note the files. 20 µs a file.

    A server removes the clean-shutdown mark before it writes, so a mark that is there before and after belongs to these files."""
    remove_stale(root)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"
    snapshot = Snapshot(root, name, _make_folder(root, name) if pin else None)
    mark = _read_clean_mark(root)
    for topic in topics:
        snapshot.topics[topic] = _pin_topic(snapshot, topic, logs)
    if mark and mark == _read_clean_mark(root):
        for topic, clean_mark in _decode_clean_mark(mark).items():
            if topic in snapshot.topics:
                snapshot.topics[topic].clean_mark = clean_mark
    if snapshot.folder is not None:
        sizes = {
            topic: {log: {name: file.size for name, file in files.items()} for log, files in pinned.files.items()}
            for topic, pinned in snapshot.topics.items()
        }
        offsets = [topic for topic, pinned in snapshot.topics.items() if pinned.offset is not None]
        clean = {topic: pinned.clean_mark for topic, pinned in snapshot.topics.items() if pinned.clean_mark}
        (snapshot.folder / MANIFEST).write_text(json.dumps({"topics": sizes, "offsets": offsets, "clean": clean}))
    return snapshot


def load_snapshot(root: Path, name: str) -> Snapshot:
    """An existing snapshot, from its manifest. Raises `Vanished` if it was released."""
    folder = root / FOLDER / name
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise Vanished(
            f"there is no snapshot {name!r} in {root / FOLDER}. It was released, or is too old: take another."
        ) from None
    snapshot = Snapshot(root, name, folder)
    for topic, logs in manifest["topics"].items():
        pins = folder / names.TOPICS / topic
        pinned = TopicFiles(topic, root / names.TOPICS / topic, pins, {}, clean_mark=manifest.get("clean", {}).get(topic))
        for log, sizes in logs.items():
            inside = pins / DEAD if log == DEAD else pins
            pinned.files[log] = {name: File(str(inside / name), size) for name, size in sizes.items()}
        if topic in manifest["offsets"]:
            pinned.offset = File(str(pins / "offset"), (pins / "offset").stat().st_size)
        snapshot.topics[topic] = pinned
    return snapshot


def _read_clean_mark(root: Path) -> bytes:
    """The clean-shutdown mark; empty if the server runs or was killed."""
    try:
        return (root / names.CLEAN).read_bytes()
    except OSError:
        return b""


def _decode_clean_mark(mark: bytes) -> dict[str, Any]:
    """Ends of logs by topic; empty if the mark is damaged."""
    try:
        return dict(f.decode_checked(mark)[0]["topics"])
    except (ValueError, KeyError, TypeError):
        return {}


def _make_folder(root: Path, name: str) -> Path | None:
    """A folder for the pins of a snapshot; None if none can be made."""
    folder = root / FOLDER / name
    for attempt in range(_ROUNDS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / OWNER).write_text(session_label())
            _note_root(root)
            return folder
        except OSError as error:
            if error.errno in _NO_LINKS:
                return None
            if error.errno != errno.ENOENT or attempt == _ROUNDS - 1:  # another reader has just removed the empty folder
                raise
    return None


def _pin_topic(snapshot: Snapshot, topic: str, logs: tuple[str, ...]) -> TopicFiles:
    source = snapshot.root / names.TOPICS / topic
    folder = None if snapshot.folder is None else snapshot.folder / names.TOPICS / topic
    pinned = TopicFiles(topic, source, folder, {})
    for _ in range(_ROUNDS):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / DEAD).mkdir(parents=True)
        pinned = TopicFiles(topic, source, folder, {})
        for log in PIN_ORDER:
            if log in logs:
                pinned.files[log] = _pin_log(source, folder, log)
        if "reserve" in logs:
            pinned.offset = _link(source, folder, "offset")
        dead = pinned.files.get(DEAD)
        if dead is None or len(logs) == 1 or all(_same_size(source / DEAD / name, file) for name, file in dead.items()):
            break
    return pinned


def _pin_log(source: Path, folder: Path | None, log: str) -> dict[str, File]:
    """All files of a log, the oldest first. Lists again until no file is new, so a roll or a flush meanwhile is included."""
    if log == DEAD:
        source, folder, log = source / DEAD, None if folder is None else folder / DEAD, "delay"
    files: dict[str, File] = {}
    seen: set[str] = set()
    while fresh := [name for name in _list_log(source, log) if name not in seen]:
        for name in fresh:
            seen.add(name)
            file = _link(source, folder, name)
            if file is not None:
                files[name] = file
    return files


def _list_log(source: Path, log: str) -> list[str]:
    """Names of segments and tables in order of the base, a segment before its tables."""
    try:
        parsed = [(names.parse(name), name) for name in os.listdir(source)]
    except FileNotFoundError:
        return []
    files = [(at, name) for at, name in parsed if at is not None and at.kind == log and not at.suffix and at.what != "dead"]
    return [name for _, name in sorted(files, key=lambda pair: (pair[0].base, pair[0].what != "bson", pair[0].first or 0))]


def _link(source: Path, folder: Path | None, name: str) -> File | None:
    """A file, linked if possible; None if it no longer exists."""
    path = source / name
    try:
        if folder is not None:
            try:
                os.link(path, folder / name)
                return File(str(folder / name), (folder / name).stat().st_size)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        stat = path.stat()
        return File(str(path), stat.st_size, stat.st_ino)
    except FileNotFoundError:
        return None


def _same_size(path: Path, file: File) -> bool:
    try:
        return path.stat().st_size == file.size
    except FileNotFoundError:
        return False


# Owners: the session that made a snapshot, and removal of the pins of sessions that have ended


def session_label() -> str:
    """The session of this process, as `process_label` writes it: the Java process above this one, or else this one."""
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
    """A process by host, pid and start time, since pids are reused."""
    stat = _stat(pid)
    return f"{os.uname().nodename} {pid} {stat[2] if stat else 0}"


def _roots_file(label: str) -> Path:
    """A temporary file that lists the data folders in which a session has pins."""
    return Path(tempfile.gettempdir()) / f"turtlemq-readers-{os.getuid()}-{'-'.join(label.split()[1:])}"


def _note_root(root: Path) -> None:
    path, line = _roots_file(session_label()), f"{root}\n"
    try:
        if line not in (path.read_text() if path.exists() else ""):
            with path.open("a") as file:
                file.write(line)
    except OSError:
        return  # the next snapshot of that data folder removes the pins


def release_session(label: str) -> None:
    """Remove all pins of a session, in every data folder."""
    try:
        for root in _roots_file(label).read_text().splitlines():
            remove_stale(Path(root), owner=label)
        _roots_file(label).unlink()
    except OSError:
        return


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Name, parent and start time of a process; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return name, int(rest[1]), int(rest[19])


def _has_ended(label: str) -> bool:
    """True if a session has surely ended. One on another host counts as running: it cannot be checked from here."""
    host, _, rest = label.partition(" ")
    if host != os.uname().nodename or _stat(os.getpid()) is None:
        return False
    pid, _, began = rest.partition(" ")
    stat = _stat(int(pid)) if pid.isdigit() else None
    return stat is None or str(stat[2]) != began


def remove_stale(root: Path, *, owner: str = "") -> int:
    """Remove snapshots whose session has ended, that are too old, or that belong to `owner`. Returns how many."""
    removed = 0
    try:
        folders = sorted((root / FOLDER).iterdir())
    except OSError:
        return 0
    for folder in folders:
        try:
            old = time.time() - folder.stat().st_mtime > PIN_SECONDS
            label = (folder / OWNER).read_text() if not old else ""
        except OSError:
            continue  # another reader is making or removing it
        if old or _has_ended(label) or label == owner:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    _remove_if_empty(root / FOLDER)
    return removed


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
