"""The small files of a data folder: its format, the clean-shutdown mark and the settings of each topic; and the names of its
logs.

Logs and their caches are written by `index` and `broker`.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turtlemq.errors import Corrupt, InvalidArgument, NewerFormat
from turtlemq.segment import format as f
from turtlemq.settings import Settings, check_settings
from turtlemq.storage import names
from turtlemq.storage.door import Door


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


def take_clean_mark(door: Door, root: Path) -> dict[str, Any] | None:
    """Read and remove the clean-shutdown mark: the marks of all topics by name, or None after a crash. It is removed, durably,
    before anything else is written."""
    path, marks = root / names.CLEAN, None
    with door.durable_names(root):  # also without a mark: the last process may have removed it and died before this sync
        if door.exists(path):
            try:
                marks = dict(f.decode_checked(door.read_all(path))[0]["topics"])
            except (ValueError, KeyError, TypeError):  # unreadable: as after a crash
                pass
            door.remove(path)
    return marks


def read_settings(door: Door, folder: Path, default: Settings) -> Settings:
    """The settings of a topic; `default` if it has none of its own."""
    path = folder / names.SETTINGS
    if not door.exists(path):
        return default
    try:
        return check_settings(replace(default, **tomllib.loads(door.read_all(path).decode())))
    except (ValueError, TypeError, RecursionError, InvalidArgument) as error:
        raise Corrupt(f"{names.SETTINGS} of topic {folder.name!r} cannot be read ({error}). Mend or remove that file.") from error


def write_settings(door: Door, folder: Path, settings: Settings) -> None:
    """Write the settings of a topic, durably."""
    door.make_folder(folder)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(settings).items())
    door.replace(folder / names.SETTINGS, text.encode())


def logs(door: Door, folder: Path) -> list[str]:
    """Names of the files of a topic that are no caches: its logs, those of dead letters, and its settings."""
    files = [*door.names(folder), *(f"dead/{name}" for name in door.names(folder / "dead"))]
    return sorted(name for name in files if name.endswith(".bson") or name == names.SETTINGS)
