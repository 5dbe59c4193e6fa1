"""The data folder: its lock, format, secret and clean-shutdown mark, the settings of each topic, the removal of topics, and the
names of logs.

Logs and their caches are written by `index` and `broker`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turtlemq.errors import Corrupt, InvalidArgument, LockLost, NewerFormat, TurtleError
from turtlemq.segment import format as f
from turtlemq.segment.ids import SEED_MAX
from turtlemq.settings import Settings, check_settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

LOCK_CHECK_MS = 100
_SEED = re.compile(rb"[0-9a-f]{16}\n")


def check_format(door: Door, root: Path) -> None:
    """Refuse a folder of a newer format; write the format of this version into a new folder."""
    path = root / names.FORMAT
    if not door.exists(path):
        if door.exists(root / (names.TOPICS + names.TMP)):
            raise Corrupt(f"a restore into {root} did not come to its end. Remove the folder and restore again.")
        door.replace(path, f"{f.VERSION}\n".encode())
        return
    text = door.read_all(path).decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Corrupt(f"{path} should hold a format number, not {text[:40]!r}. Put {f.VERSION} there if the data is TurtleMQ's.")
    if int(text) > f.VERSION:
        raise NewerFormat(f"{path}: format {text}, this program reads up to {f.VERSION}. {NewerFormat.__doc__}")


def topics_in(door: Door, root: Path) -> list[str]:
    """Names of the topics in a data folder. A topic's folder may be a link; other files and folders are ignored."""
    folder = root / names.TOPICS
    return [name for name in door.names(folder) if names.is_topic(name) and door.is_folder(folder / name)]


def dropped_in(door: Door, root: Path) -> list[Path]:
    """Folders of deleted topics whose removal was interrupted, or failed."""
    return [root / names.TOPICS / name for name in door.names(root / names.TOPICS) if names.is_dropped(name)]


def try_remove(door: Door, path: Path) -> dict[str, str]:
    """Remove a file or folder that nothing refers to any more. Returns its path and the reason if that fails: a leftover takes
    room, and is in the way of nothing."""
    try:
        door.remove_folder(path)
    except (TurtleError, OSError, RecursionError) as error:
        return {str(path): f"it cannot be removed: {error}"}
    return {}


def hash_seed(door: Door, root: Path) -> int:
    """The secret of a data folder: the seed of the hashes of ids, without which a client cannot choose ids that share a hash.

    It is made, durably, by the first opening that does not find it. Each table carries the seed that it was made with, so a
    secret that is lost, damaged or cannot be written costs another hash for each id that is looked up, and nothing else."""
    path = root / names.HASH_SEED
    seed = int.from_bytes(door.random_bytes(8)) & SEED_MAX or 1
    try:
        if door.exists(path) and _SEED.fullmatch(text := door.read(path, 0, 18)):
            return int(text, 16) & SEED_MAX
        door.replace(path, b"%016x\n" % seed, mode=0o600)
    except (TurtleError, OSError):  # this process uses the new one all the same
        pass
    return seed


class DataFolder:
    """A data folder that this process has locked, from `acquire` to `close`."""

    def __init__(self, root: Path, door: Door) -> None:
        self._root, self._door = root, door
        self.was_clean = False  # the last stop was a proper one
        self.marks: dict[str, Any] = {}  # clean-shutdown marks of topics that were not opened since
        self.leftovers: dict[str, str] = {}  # files of deleted topics that are still there, by path, with the reason
        self.seed = 0  # of the hashes of ids, a secret
        self.lost: LockLost | None = None  # once another process may have the folder
        self._lock, self._checked_ms = -1, 0

    def acquire(self, lock: int | None = None) -> list[str]:
        """Lock the folder, or create it; remove leftovers, and take the clean-shutdown mark. Returns the names of its topics.
        After an error, as after success, `close` must follow. `lock`: a descriptor that holds the lock already."""
        self._door.make_folder(self._root)
        self._lock = self._door.lock(self._root / names.LOCK) if lock is None else lock
        check_format(self._door, self._root)
        for path in dropped_in(self._door, self._root):
            self.leftovers |= try_remove(self._door, path)
        topics = topics_in(self._door, self._root)
        self._take_clean_mark()
        if topics and not self.was_clean:  # the last process may have died before it synced the name of a new topic
            self._door.sync_folder(self._root / names.TOPICS)
        self.seed = hash_seed(self._door, self._root)
        return topics

    def is_lost(self, now_ms: int) -> bool:
        """May another process have the folder? Looks at the disk every LOCK_CHECK_MS: to start takes longer."""
        if self.lost is None and abs(now_ms - self._checked_ms) >= LOCK_CHECK_MS:
            self._checked_ms = now_ms
            if not self._door.holds(self._root / names.LOCK, self._lock):
                self.lost = LockLost()
        return self.lost is not None

    def refuse_if_lost(self) -> None:
        """Raise `LockLost` if `is_lost` has found out so."""
        if self.lost is not None:
            raise self.lost

    def _take_clean_mark(self) -> None:
        """Read the mark and remove it, durably, before anything is written to a topic."""
        marks = read_clean_mark(self._door, self._root)
        self.marks, self.was_clean = marks or {}, marks is not None
        with self._door.durable_names(self._root):  # also without a mark: the last process may have died before this sync
            self._door.remove(self._root / names.CLEAN)

    def remove_topic(self, name: str) -> None:
        """Remove the folder of a topic, as a whole or not at all. Of a link, the folder behind it stays, as a leftover."""
        self.marks.pop(name, None)
        folder = self._root / names.TOPICS / name
        is_link = self._door.is_link(folder)
        if is_link:
            reason = f"topic {name!r}, which was deleted, was a link to it. Remove it if nothing needs it."
            self.leftovers[self._door.target(folder)] = reason
        if is_link or self._door.is_folder(folder):
            self.leftovers |= try_remove(self._door, self._door.set_aside(folder))

    def close(self, marks: dict[str, Any] | None) -> None:
        """Unlock the folder. `marks`: of the topics, which were closed properly; None: write no clean-shutdown mark."""
        try:
            if marks is not None and self.lost is None:
                self._door.replace(self._root / names.CLEAN, f.encode_checked({"topics": self.marks | marks}))
        finally:
            self._door.shut()
            self.unlock()

    def unlock(self) -> None:
        """Release the lock, so that another process may open the folder."""
        if self._lock >= 0:
            self._door.close(self._lock)
            self._lock = -1


def read_clean_mark(door: Door, root: Path) -> dict[str, Any] | None:
    """The clean-shutdown mark: the marks of all topics by name, or None after a crash."""
    path = root / names.CLEAN
    if not door.exists(path):
        return None
    try:
        return dict(f.decode_checked(door.read_all(path))[0]["topics"])
    except (ValueError, KeyError, TypeError):  # unreadable: as after a crash
        return None


def read_settings(door: Door, folder: Path, default: Settings) -> Settings:
    """The settings of a topic; `default` if it has none of its own."""
    path = folder / names.SETTINGS
    if not door.exists(path):
        return default
    try:
        return check_settings(replace(default, **tomllib.loads(door.read_all(path).decode())))
    except (ValueError, TypeError, RecursionError, InvalidArgument) as error:
        raise Corrupt(f"{names.SETTINGS} of topic {folder.name!r} cannot be read ({error}). Mend or remove that file.") from error


def changed_settings(door: Door, folder: Path, default: Settings, changes: dict[str, Any]) -> Settings:
    """The settings of a topic with these changes. Raises `InvalidArgument` for an unknown name or a wrong value."""
    unknown = sorted(set(changes) - set(Settings.__dataclass_fields__))
    if unknown:
        raise InvalidArgument(f"unknown setting {unknown[0]!r}; there are: {', '.join(Settings.__dataclass_fields__)}")
    return check_settings(replace(read_settings(door, folder, default), **changes))


def write_settings(door: Door, folder: Path, settings: Settings) -> None:
    """Write the settings of a topic, durably."""
    door.make_folder(folder)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(settings).items())
    door.replace(folder / names.SETTINGS, text.encode())


def logs(door: Door, folder: Path) -> list[str]:
    """Names of the files of a topic that are no caches: its logs, those of dead letters and schedules, its settings and its
    pauses."""
    files = [*door.names(folder), *(f"{inner}/{name}" for inner in names.INNER for name in door.names(folder / inner))]
    return sorted(name for name in files if name.endswith(".bson") or name in (names.SETTINGS, names.PAUSED))
