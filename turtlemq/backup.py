"""Backups: exact copies of a data folder at one moment, each a complete data folder with a manifest.

A stopped folder is copied as it is. In a folder that a server uses, the engine's thread first *pins* the files: it makes a hard
link to each and notes its length. Files only grow at their end or are replaced whole, so links and lengths are the state that a
kill at that moment would leave, and recovery can open it, even if files are sealed, compacted or removed during the copy. Topics
are independent of each other, so each is pinned at a moment of its own. (Decision 0007.)

DIR/2026-11-16T06-29-22.123Z/   FORMAT, topic/…, MANIFEST.json: sizes and SHA-256 of all files
DIR/….tmp                       an unfinished backup; the next one removes it

A file that has not changed since the last backup in DIR is a hard link to it: a backup costs only new bytes, and each can be
deleted on its own. Not here: the HTTP calls that pin and unpin (`server.handlers.backup`), and the command line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turtlemq import __version__
from turtlemq.data_folder import topics_in, try_remove
from turtlemq.errors import Corrupt, InvalidArgument, Locked, NewerFormat, TurtleError
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.storage import names
from turtlemq.storage.door import Door

MANIFEST = "MANIFEST.json"
PINNED = names.PINNED
PINS = "PINS.json"
_VERSION = 1
_CHUNK = 4 << 20
_BACKUP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}Z")

Progress = Callable[[str, int], None]  # called with a file, or a step, and the bytes that are done
Files = dict[str, tuple[Path, int]]  # by path in the data folder: the file to read, and the length that counts


def _no_progress(_: str, __: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a backup. `source`: inode and time of the original, by which the next backup sees that it has not changed."""

    bytes: int
    sha256: str
    source: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Manifest:
    """The content of MANIFEST.json. `damage`: damage that the data folder already had."""

    made_ms: int
    live: bool
    format: int = f.VERSION
    turtlemq: str = __version__
    files: dict[str, Entry] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    copied: int = 0  # bytes; the rest are links to the backup before
    turtlemq_backup: int = _VERSION

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


# The files of a data folder


def files_of(door: Door, root: Path, topic: str | None = None) -> list[str]:
    """Relative paths of the files to back up, caches included, unfinished ones not: of the folder itself, or of one topic."""
    if topic is None:
        paths = [Path(name) for name in door.names(root) if name not in names.LOCAL and door.is_file(root / name)]
    else:
        base = Path(names.TOPICS) / topic
        paths = [base / path for path in _walk(door, root / base)]
    return [str(path) for path in paths if path.suffix not in (names.TMP, names.DELETED)]


def files_of_stopped(door: Door, root: Path) -> Files:
    """All files of a data folder that no server uses."""
    paths = [path for topic in (None, *topics_in(door, root)) for path in files_of(door, root, topic)]
    return {path: (root / path, door.size(root / path)) for path in paths}


# Pins: files of a data folder that a server uses


def pin(door: Door, root: Path, name: str) -> Iterator[dict[str, int]]:
    """Link all files into `PINNED/name`, one topic for each step of this generator; PINS.json, which names them, is written last.
    A step is one moment: run it on the engine's thread. Yields the lengths so far. 20 µs a file; nothing is synced."""
    target, lengths = root / PINNED / name, dict[str, int]()
    door.make_folder(target, durable=False)
    for topic in (None, *topics_in(door, root)):
        for path in files_of(door, root, topic):
            link = target / str(len(lengths))
            if path == names.CLEAN or not _link(door, root / path, link):
                continue
            lengths[path] = door.size(link)
        yield lengths
    door.replace(target / PINS, json.dumps(lengths).encode(), durable=False)


def _link(door: Door, path: Path, link: Path) -> bool:
    """Pin one file. Returns False for a cache that has disappeared: other threads write and remove caches."""
    known = names.parse(path.name)
    try:
        door.link(path, link)
    except FileNotFoundError:
        if known is None or known.what == "bson":
            raise
        return False
    return True


def prepare_pins(door: Door, root: Path) -> dict[str, str]:
    """Create the folder for pins, owned by the server's user, and remove pins that an interrupted backup left; those of a backup
    that is being made stay. On a full disk the folder is missing, and a live backup is refused. Returns the result of `unpin`."""
    if _is_in_use(door, root / PINNED):
        return {}
    leftovers = unpin(door, root)
    try:
        door.make_folder(root / PINNED)
        door.close(door.lock(root / PINNED / names.LOCK))
    except (TurtleError, OSError):  # the disk is full, or a backup of earlier pins still holds the lock
        pass
    return leftovers


def _is_in_use(door: Door, folder: Path) -> bool:
    """Is another process making a backup of these pins? A standby that becomes leader opens its folder meanwhile."""
    if door.is_link(folder) or not door.is_file(folder / names.LOCK):
        return False
    try:
        door.close(door.lock(folder / names.LOCK))
    except Locked:
        return True
    except (TurtleError, OSError):
        return False
    return False


def unpin(door: Door, root: Path) -> dict[str, str]:
    """Remove all pins, so that the disk space of removed files is freed. Returns those that cannot be removed, with the reason: a
    live backup is possible all the same."""
    folder = root / PINNED
    if door.is_link(folder) or not door.is_folder(folder):
        return try_remove(door, folder)
    leftovers: dict[str, str] = {}
    for name in door.names(folder):
        if name != names.LOCK:
            leftovers |= try_remove(door, folder / name)
    return leftovers


def pinned(door: Door, root: Path, name: str) -> Files:
    """The files that `pin` has linked."""
    folder = root / PINNED / name
    try:
        lengths = {_check_inside(path): int(length) for path, length in json.loads(door.read_all(folder / PINS)).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, FileNotFoundError) as error:
        raise Corrupt(f"{folder / PINS} cannot be read ({error}). Make the backup again.") from error
    return {path: (folder / str(number), length) for number, (path, length) in enumerate(lengths.items())}


def _check_inside(path: str) -> str:
    """Return a path that was read from a file, or raise `ValueError` if it leads out of the folder."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{path!r} leads out of the backup")
    return path


# Making a backup


def backups_in(door: Door, into: Path) -> list[str]:
    """Names of the finished backups in a folder, the oldest first."""
    return [name for name in door.names(into) if _BACKUP.fullmatch(name) and door.exists(into / name / MANIFEST)]


def name_at(now_ms: int) -> str:
    """The name of a backup made at that time.

    >>> name_at(1_794_810_562_123)
    '2026-11-16T06-29-22.123Z'
    """
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z").replace(":", "-")


def check_backups_folder(door: Door, into: Path) -> None:
    """Refuse a folder that holds anything but backups."""
    for name in door.names(into):
        if name != names.LOCK and not _BACKUP.fullmatch(name.removesuffix(names.TMP)):
            raise InvalidArgument(
                f"{into} holds {name!r}, which is no backup. Give a folder that is new, empty, or for backups only."
            )


def make(
    door: Door, files: Files, into: Path, now_ms: int, *, live: bool = False, progress: Progress = _no_progress
) -> tuple[str, Manifest]:
    """Copy files into a new backup and check their documents. Returns its name and manifest. Requires: no file is removed
    meanwhile, so they are pinned, or no server runs."""
    check_backups_folder(door, into)
    for name in door.names(into):
        if name.endswith(names.TMP):
            door.remove_folder(into / name)
    before, old = None, dict[str, Entry]()
    if earlier := backups_in(door, into):
        before = into / earlier[-1]
        last = load(door, before)
        old, now_ms = last.files, max(now_ms, last.made_ms + 1)  # names rise, even if the clock went back
    name, manifest = name_at(now_ms), Manifest(now_ms, live)
    tmp = into / (name + names.TMP)
    door.make_folder(tmp)
    new = [file for path, file in files.items() if not _is_unchanged(door, file, old.get(path))]
    missing = sum(length for _, length in new) - door.free_bytes(tmp)
    if missing > 0:
        door.remove_folder(tmp)
        raise InvalidArgument(f"there is no room for the backup in {into}: {missing:,} bytes are missing")
    try:
        for path, source in files.items():
            _add_file(door, source, tmp, path, (before, old.get(path)), manifest)
            progress(path, source[1])
        _check_documents(door, tmp, manifest, old, progress)
        _finish(door, tmp, into / name, manifest)
    except (OSError, TurtleError):
        door.remove_folder(tmp)  # it would take the room that others wait for
        raise
    return name, manifest


def _is_unchanged(door: Door, file: tuple[Path, int], entry: Entry | None) -> bool:
    """Is this the file of an earlier backup, by length, inode and time? Its content is not read."""
    return entry is not None and (entry.bytes, entry.source) == (file[1], door.identity(file[0]))


def _add_file(
    door: Door, file: tuple[Path, int], tmp: Path, path: str, old: tuple[Path | None, Entry | None], manifest: Manifest
) -> None:
    """Add one file to a backup: a link to that of the last backup if it has not changed, else a copy."""
    (source, length), (before, entry) = file, old
    door.make_folder((tmp / path).parent, durable=False)
    identity = door.identity(source)
    if (
        before is not None
        and entry is not None
        and _is_unchanged(door, file, entry)
        and _mismatch(door, before, path, entry) is None
    ):
        try:  # a file that has rotted in the last backup is copied again, while the source is whole
            door.link(before / path, tmp / path)
            manifest.files[path] = entry
            return
        except OSError:  # it is gone, or this file system has no links: a copy is as good
            door.remove(tmp / path)
    digest, length = copy_file(door, source, tmp / path, length)
    manifest.files[path] = Entry(length, digest, identity)
    manifest.copied += length


def copy_file(door: Door, source: Path, target: Path, length: int) -> tuple[str, int]:
    """Copy the first `length` bytes, and sync them. Returns their SHA-256 and number. There may be fewer: a commit that failed on
    a full disk is cut off again. `_check_documents` finds out if that is damage."""
    digest, at = hashlib.sha256(), 0
    fd = door.create(target)
    try:
        while at < length:
            data = door.read(source, at, min(_CHUNK, length - at))
            if not data:
                break
            digest.update(data)
            at += door.write(fd, target, at, [data])
        door.sync(fd, target)
    finally:
        door.close(fd)
    return digest.hexdigest(), at


def _check_documents(door: Door, tmp: Path, manifest: Manifest, old: dict[str, Entry], progress: Progress) -> None:
    """Check every copied document by its own checksum. Damage was in the source already; the manifest names it."""
    last: dict[tuple[str, str], int] = {}
    segments = {path: known for path in manifest.files if (known := names.parse(Path(path).name)) and known.what == "bson"}
    for path, known in segments.items():
        key = (str(Path(path).parent), known.kind)
        last[key] = max(last.get(key, 0), known.base)
    for path, known in segments.items():
        if manifest.files[path] == old.get(path):
            continue
        progress(f"check {path}", 0)
        whole = known.base < last[str(Path(path).parent), known.kind]
        try:
            _, found = log.scan_file(door, tmp / path, whole=whole)
            manifest.damage += [f"{Path(path).parent}/{hole}" for hole in log.damage_of(Path(path), found)]
        except TurtleError as error:
            manifest.damage.append(f"{path}: {error}")


def _finish(door: Door, tmp: Path, target: Path, manifest: Manifest) -> None:
    """Make all names durable, write the manifest, then give the backup its final name."""
    folders = {tmp / parent for path in manifest.files for parent in Path(path).parents}
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        door.sync_folder(folder)
    door.replace(tmp / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    door.rename(tmp, target)
    door.sync_folder(target.parent)


def prune(door: Door, into: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` backups. Returns the names of the removed ones."""
    removed = backups_in(door, into)[:-keep]
    for name in removed:
        door.remove_folder(into / name)
    return removed


# Reading a backup


def choose(door: Door, folder: Path) -> Path:
    """The backup that a folder is, or the newest backup in it."""
    if door.exists(folder / MANIFEST):
        return folder
    backups = backups_in(door, folder)
    if not backups:
        raise InvalidArgument(f"there is no backup in {folder}")
    return folder / backups[-1]


def load(door: Door, folder: Path) -> Manifest:
    """The manifest of a backup."""
    try:
        fields: dict[str, Any] = json.loads(door.read_all(folder / MANIFEST))
        if fields["turtlemq_backup"] > _VERSION:
            raise NewerFormat(f"{folder} was made by a newer TurtleMQ ({fields['turtlemq']}). Restore it with that version.")
        files = {path: Entry(e["bytes"], e["sha256"], tuple(e["source"])) for path, e in fields.pop("files").items()}
        for path in files:
            _check_inside(path)
        return Manifest(**fields, files=files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FileNotFoundError) as error:
        raise Corrupt(f"{folder / MANIFEST} cannot be read ({error}). Take another backup.") from error


def verify(door: Door, folder: Path, progress: Progress = _no_progress) -> list[str]:
    """Read every byte of a backup and compare it with the manifest. Returns a line for each file that differs."""
    manifest, problems = load(door, folder), []
    for path, entry in manifest.files.items():
        mismatch = _mismatch(door, folder, path, entry)
        if mismatch is not None:
            problems.append(f"{path}: {mismatch}")
        progress(path, entry.bytes)
    there = {str(path) for path in _walk(door, folder)} - {MANIFEST}
    return problems + [f"{path}: the manifest does not know it" for path in sorted(there - manifest.files.keys())]


def _walk(door: Door, folder: Path, base: Path = Path()) -> Iterator[Path]:
    """All regular files below a folder, as paths relative to it. Links to files are files; links to folders are not entered."""
    for name in door.names(folder):
        if door.is_file(folder / name):
            yield base / name
        elif not door.is_link(folder / name) and door.is_folder(folder / name):
            yield from _walk(door, folder / name, base / name)


def is_plain(door: Door, folder: Path, path: str) -> bool:
    """Is this a regular file of a backup, and no link on the way to it? Anything else is not read: it may lead out of there."""
    way = [folder.joinpath(*Path(path).parts[: n + 1]) for n in range(len(Path(path).parts))]
    return door.is_file(folder / path) and not any(door.is_link(each) for each in way)


def _mismatch(door: Door, folder: Path, name: str, entry: Entry) -> str | None:
    """How a file of a backup differs from its entry; None if it does not. Reads all of it."""
    path = folder / name
    if not door.exists(path):
        return "is missing"
    if not is_plain(door, folder, name):
        return "is no regular file, or lies behind a link"
    size, digest, at = door.size(path), hashlib.sha256(), 0
    if size != entry.bytes:
        return f"has {size:,} bytes instead of {entry.bytes:,}"
    while at < size:
        data = door.read(path, at, _CHUNK)
        digest.update(data)
        at += len(data)
    return None if digest.hexdigest() == entry.sha256 else "its SHA-256 does not match"


def restore(door: Door, folder: Path, target: Path, *, progress: Progress = _no_progress) -> Manifest:
    """Copy a backup into a new data folder. Requires: it was verified. Files that are missing, or links, are left out. `topic`
    gets its name last: an unfinished restore shows as `topic.tmp`."""
    check_format(door, folder)
    manifest = begin_restore(door, folder, target)
    unnamed = target / (names.TOPICS + names.TMP)
    door.make_folder(unnamed)
    folders = {unnamed}
    for path, entry in manifest.files.items():
        if path == names.FORMAT or not is_plain(door, folder, path):
            continue
        parts = Path(path).parts
        place = unnamed.joinpath(*parts[1:]) if parts[0] == names.TOPICS else target / path
        door.make_folder(place.parent, durable=False)
        folders |= {parent for parent in place.parents if unnamed in (parent, *parent.parents)}
        copy_file(door, folder / path, place, door.size(folder / path))
        progress(path, entry.bytes)
    for made in folders:
        door.sync_folder(made)
    door.rename(unnamed, target / names.TOPICS)
    door.replace(target / names.FORMAT, f"{manifest.format}\n".encode())
    return manifest


def begin_restore(door: Door, folder: Path, target: Path) -> Manifest:
    """Make the folder for a restore. Returns the manifest of the backup. A folder with content, or without room, is refused."""
    if door.names(target):
        raise InvalidArgument(f"{target} is not empty. Restore into a new folder, then let the server use that.")
    manifest = load(door, folder)
    door.make_folder(target)
    door.set_mode(target)
    if (missing := manifest.bytes - door.free_bytes(target)) > 0:
        raise InvalidArgument(f"there is no room for the backup in {target}: {missing:,} bytes are missing")
    return manifest


def check_format(door: Door, root: Path) -> None:
    """Refuse a folder that is no data folder, or was written by a newer version."""
    path = root / names.FORMAT
    if not door.exists(path):
        raise InvalidArgument(f"{root} is no data folder of TurtleMQ")
    text = door.read_all(path).decode(errors="replace").strip()
    if text.isascii() and text.isdigit() and int(text[:9]) > f.VERSION:  # nine digits are enough to compare
        raise NewerFormat(f"{root}: format {text}, this program reads up to {f.VERSION}. {NewerFormat.__doc__}")
