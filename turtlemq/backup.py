"""Backups: exact copies of a data folder as it was at one moment, each a plain data folder of its own with a manifest.

A stopped folder is copied as it lies. Of one that is served, the engine's thread *pins* the files first: a hard link to each and
its length at that moment. Files only grow at their end or are replaced whole, so links and lengths are what a kill at that moment
would have left, whatever is sealed, compacted or removed meanwhile; and that is what recovery is made for. Topics do not know
each other, so each has a moment of its own. (Decision 0007.)

    DIR/2026-11-16T06-29-22.123Z/   FORMAT, topic/…, MANIFEST.json: sizes and SHA-256 of all files
    DIR/….tmp                       a backup that was not finished; the next one removes it

A file that has not changed since the last backup in DIR is a hard link to it: a backup costs what is new, and any can be deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turtlemq import __version__
from turtlemq.errors import Corrupt, InvalidArgument, NewerFormat, TurtleError
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.storage import ballast, names
from turtlemq.storage.door import Door

MANIFEST = "MANIFEST.json"
PINNED = "PINNED"  # in a data folder: links that a backup is being made from
PINS = "PINS.json"
_VERSION = 1
_CHUNK = 4 << 20
_NOT_OURS = (names.LOCK, ballast.FILE, PINNED)
_BACKUP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}Z")

Shown = Callable[[str, int], None]  # what is worked on, and how many bytes of it are done
Files = dict[str, tuple[Path, int]]  # by the path in the data folder: where it is read, and how much of it counts


def _silent(_: str, __: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a backup. `source`: inode and time of the file it was copied from, to know it again."""

    bytes: int
    sha256: str
    source: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Manifest:
    """What a backup holds. `damage`: what was broken in the data folder already."""

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


# What belongs to a backup


def files_of(door: Door, root: Path, topic: str | None = None) -> list[str]:
    """Relative paths of everything worth keeping, caches too: of the folder itself, or of one topic. Unfinished work is not."""
    if topic is None:
        found = [Path(name) for name in door.names(root) if name not in _NOT_OURS and not door.is_folder(root / name)]
    else:
        base = Path(names.TOPICS) / topic
        found = [base / path for path in _walk(door, root / base)]
    return [str(path) for path in found if path.suffix not in (names.TMP, names.DELETED)]


def topics_of(door: Door, root: Path) -> list[str]:
    """Names of the topics in a data folder."""
    return [name for name in door.names(root / names.TOPICS) if names.is_topic(name)]


def lying(door: Door, root: Path) -> Files:
    """All files of a stopped data folder."""
    paths = [path for topic in (None, *topics_of(door, root)) for path in files_of(door, root, topic)]
    return {path: (root / path, door.size(root / path)) for path in paths}


# Pins of a folder that is served


def pin(door: Door, root: Path, name: str) -> Iterator[dict[str, int]]:
    """Link all files, a topic at a step, into `PINNED/name` under their numbers in PINS.json, which comes last. A step is one
    moment: call it on the engine's thread. Yields the lengths so far. 20 µs a file: no pin is worth a sync."""
    target, lengths = root / PINNED / name, dict[str, int]()
    door.make_folder(target, durable=False)
    for topic in (None, *topics_of(door, root)):
        for path in files_of(door, root, topic):
            link = target / str(len(lengths))
            if path == names.CLEAN or not _linked(door, root / path, link):
                continue
            lengths[path] = door.size(link)
        yield lengths
    door.replace(target / PINS, json.dumps(lengths).encode(), durable=False)


def _linked(door: Door, path: Path, link: Path) -> bool:
    """Pin one file. A cache may be gone meanwhile: others than the engine's thread write them."""
    known = names.parse(path.name)
    try:
        door.link(path, link)
    except FileNotFoundError:
        if known is None or known.what == "bson":
            raise
        return False
    return True


def make_room(door: Door, root: Path) -> None:
    """A place for pins that is the server's own, whoever makes backups; and what one left that was cut off goes. On a full disk
    there is no such place, and no live backup either."""
    unpin(door, root)
    try:
        door.make_folder(root / PINNED)
        door.close(door.lock(root / PINNED / names.LOCK))
    except (TurtleError, OSError):  # or a backup is still being made of what was pinned before
        return


def unpin(door: Door, root: Path) -> None:
    """Let go of all pins, so that their room can be freed."""
    for name in door.names(root / PINNED):
        if name != names.LOCK:
            door.remove_folder(root / PINNED / name)


def pinned(door: Door, root: Path, name: str) -> Files:
    """All files that were pinned."""
    folder = root / PINNED / name
    try:
        lengths = {_inside(path): int(length) for path, length in json.loads(door.read_all(folder / PINS)).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, FileNotFoundError) as error:
        raise Corrupt(f"{folder / PINS} cannot be read ({error}). Make the backup again.") from error
    return {path: (folder / str(number), length) for number, (path, length) in enumerate(lengths.items())}


def _inside(path: str) -> str:
    """A path that a file tells, if it leads to nowhere else."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{path!r} leads out of the backup")
    return path


# Making one


def backups_in(door: Door, into: Path) -> list[str]:
    """Names of the finished backups in a folder, the oldest first."""
    return [name for name in door.names(into) if _BACKUP.fullmatch(name) and door.exists(into / name / MANIFEST)]


def name_at(now_ms: int) -> str:
    """What a backup of that time is called.

    >>> name_at(1_794_810_562_123)
    '2026-11-16T06-29-22.123Z'
    """
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z").replace(":", "-")


def check_room(door: Door, into: Path) -> None:
    """A folder for backups holds nothing else."""
    for name in door.names(into):
        if name != names.LOCK and not _BACKUP.fullmatch(name.removesuffix(names.TMP)):
            raise InvalidArgument(
                f"{into} holds {name!r}, which is no backup. Give a folder that is new, empty, or for backups only."
            )


def make(
    door: Door, files: Files, into: Path, now_ms: int, *, live: bool = False, shown: Shown = _silent
) -> tuple[str, Manifest]:
    """Copy files that nobody removes meanwhile. Returns the new backup's name."""
    check_room(door, into)
    for name in door.names(into):
        if name.endswith(names.TMP):
            door.remove_folder(into / name)
    earlier = backups_in(door, into)
    before = into / earlier[-1] if earlier else None
    old = load(door, before).files if before is not None else {}
    now_ms = max(now_ms, load(door, before).made_ms + 1) if before is not None else now_ms  # names rise, whatever the clock says
    name, manifest = name_at(now_ms), Manifest(now_ms, live)
    tmp = into / (name + names.TMP)
    door.make_folder(tmp)
    new = [file for path, file in files.items() if not _same(door, file, old.get(path))]
    missing = sum(length for _, length in new) - door.free_bytes(tmp)
    if missing > 0:
        door.remove_folder(tmp)
        raise InvalidArgument(f"there is no room for the backup in {into}: {missing:,} bytes are missing")
    try:
        for path, source in files.items():
            _take(door, source, tmp, path, (before, old.get(path)), manifest)
            shown(path, source[1])
        _check_documents(door, tmp, manifest, old, shown)
        _finish(door, tmp, into / name, manifest)
    except (OSError, TurtleError):
        door.remove_folder(tmp)  # it would take the room that others wait for
        raise
    return name, manifest


def _same(door: Door, file: tuple[Path, int], entry: Entry | None) -> bool:
    """Is this the file of an earlier backup, by what the file system says?"""
    return entry is not None and (entry.bytes, entry.source) == (file[1], door.identity(file[0]))


def _take(
    door: Door, file: tuple[Path, int], tmp: Path, path: str, old: tuple[Path | None, Entry | None], manifest: Manifest
) -> None:
    """One file: a link to the one in the last backup, or a copy."""
    (source, length), (before, entry) = file, old
    door.make_folder((tmp / path).parent, durable=False)
    identity = door.identity(source)
    if before is not None and entry is not None and _same(door, file, entry) and _wrong(door, before / path, entry) is None:
        try:  # (what has rotted there is copied again while the source is whole)
            door.link(before / path, tmp / path)
            manifest.files[path] = entry
            return
        except OSError:  # it is gone, or this file system has no links: a copy is as good
            door.remove(tmp / path)
    digest, length = _copy(door, source, tmp / path, length)
    manifest.files[path] = Entry(length, digest, identity)
    manifest.copied += length


def _copy(door: Door, source: Path, target: Path, length: int) -> tuple[str, int]:
    """Copy the first `length` bytes, synced. Returns their SHA-256 and how many there were: a commit that failed for want of room
    may have been cut off again. The check of the documents has the last word."""
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


def _check_documents(door: Door, tmp: Path, manifest: Manifest, old: dict[str, Entry], shown: Shown) -> None:
    """Every document of what was copied, by its own checksum. What is broken was broken in the source, and is named."""
    last: dict[tuple[str, str], int] = {}
    segments = {path: known for path in manifest.files if (known := names.parse(Path(path).name)) and known.what == "bson"}
    for path, known in segments.items():
        key = (str(Path(path).parent), known.kind)
        last[key] = max(last.get(key, 0), known.base)
    for path, known in segments.items():
        if manifest.files[path] == old.get(path):
            continue
        shown(f"check {path}", 0)
        whole = known.base < last[str(Path(path).parent), known.kind]
        try:
            _, found = log.scan_file(door, tmp / path, whole=whole)
            manifest.damage += [f"{Path(path).parent}/{hole}" for hole in log.damage_of(Path(path), found)]
        except TurtleError as error:
            manifest.damage.append(f"{path}: {error}")


def _finish(door: Door, tmp: Path, target: Path, manifest: Manifest) -> None:
    """Names become durable, the manifest last; then the folder gets its name."""
    folders = {tmp / parent for path in manifest.files for parent in Path(path).parents}
    for folder in sorted(folders, key=lambda one: -len(one.parts)):
        door.sync_folder(folder)
    door.replace(tmp / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    door.rename(tmp, target)
    door.sync_folder(target.parent)


def prune(door: Door, into: Path, keep: int) -> list[str]:
    """Remove all but the newest backups. Returns which."""
    gone = backups_in(door, into)[:-keep]
    for name in gone:
        door.remove_folder(into / name)
    return gone


# Reading one again


def choose(door: Door, folder: Path) -> Path:
    """A backup: the folder itself, or the newest one in it."""
    if door.exists(folder / MANIFEST):
        return folder
    found = backups_in(door, folder)
    if not found:
        raise InvalidArgument(f"there is no backup in {folder}")
    return folder / found[-1]


def load(door: Door, folder: Path) -> Manifest:
    """The manifest of a backup."""
    try:
        told: dict[str, Any] = json.loads(door.read_all(folder / MANIFEST))
        if told["turtlemq_backup"] > _VERSION:
            raise NewerFormat(f"{folder} was made by a newer TurtleMQ ({told['turtlemq']}). Restore it with that version.")
        files = {path: Entry(e["bytes"], e["sha256"], tuple(e["source"])) for path, e in told.pop("files").items()}
        for path in files:
            _inside(path)
        return Manifest(**told, files=files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FileNotFoundError) as error:
        raise Corrupt(f"{folder / MANIFEST} cannot be read ({error}). Take another backup.") from error


def verify(door: Door, folder: Path, shown: Shown = _silent) -> list[str]:
    """Read every byte of a backup again. A line for each file that is not as it was."""
    manifest, problems = load(door, folder), []
    for path, entry in manifest.files.items():
        wrong = _wrong(door, folder / path, entry)
        if wrong is not None:
            problems.append(f"{path}: {wrong}")
        shown(path, entry.bytes)
    there = {str(path) for path in _walk(door, folder)} - {MANIFEST}
    return problems + [f"{path}: the manifest does not know it" for path in sorted(there - manifest.files.keys())]


def _walk(door: Door, folder: Path, base: Path = Path()) -> Iterator[Path]:
    for name in door.names(folder):
        if door.is_folder(folder / name):
            yield from _walk(door, folder / name, base / name)
        else:
            yield base / name


def _wrong(door: Door, path: Path, entry: Entry) -> str | None:
    if not door.exists(path):
        return "is missing"
    size, digest, at = door.size(path), hashlib.sha256(), 0
    if size != entry.bytes:
        return f"has {size:,} bytes instead of {entry.bytes:,}"
    while at < size:
        data = door.read(path, at, _CHUNK)
        digest.update(data)
        at += len(data)
    return None if digest.hexdigest() == entry.sha256 else "its SHA-256 does not match"


def restore(door: Door, folder: Path, target: Path, *, leave_out: Sequence[str] = (), shown: Shown = _silent) -> Manifest:
    """Write a verified backup to a new data folder. `topic` gets its name last: one that was cut off shows as `topic.tmp`."""
    if door.names(target):
        raise InvalidArgument(f"{target} is not empty. Restore into a new folder, then let the server use that.")
    manifest = load(door, folder)
    check_format(door, folder)
    door.make_folder(target)
    if (missing := manifest.bytes - door.free_bytes(target)) > 0:
        raise InvalidArgument(f"there is no room for the backup in {target}: {missing:,} bytes are missing")
    unnamed = target / (names.TOPICS + names.TMP)
    door.make_folder(unnamed)
    folders = {unnamed}
    for path, entry in manifest.files.items():
        if path in leave_out or path == names.FORMAT:
            continue
        parts = Path(path).parts
        place = unnamed.joinpath(*parts[1:]) if parts[0] == names.TOPICS else target / path
        door.make_folder(place.parent, durable=False)
        folders |= {one for one in (place.parent, *place.parent.parents) if unnamed in (one, *one.parents)}
        _copy(door, folder / path, place, door.size(folder / path))
        shown(path, entry.bytes)
    for made in folders:
        door.sync_folder(made)
    door.rename(unnamed, target / names.TOPICS)
    door.replace(target / names.FORMAT, f"{manifest.format}\n".encode())
    return manifest


def check_format(door: Door, root: Path) -> None:
    """Refuse what is no data folder, or a newer program's."""
    path = root / names.FORMAT
    if not door.exists(path):
        raise InvalidArgument(f"{root} is no data folder of TurtleMQ")
    text = door.read_all(path).decode(errors="replace").strip()
    if text.isascii() and text.isdigit() and int(text[:9]) > f.VERSION:  # of a longer one, too
        raise NewerFormat(f"{root}: format {text}, this program reads up to {f.VERSION}. {NewerFormat.__doc__}")
