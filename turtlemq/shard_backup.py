"""Backups of a folder with several shards: one backup with all of them, which is a complete data folder of the same layout.

Each shard is pinned at a moment of its own, as topics of one folder are. A folder without shards is left to `turtlemq.backup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turtlemq import backup
from turtlemq.backup import Files, Manifest, Progress
from turtlemq.errors import Corrupt
from turtlemq.shard_folders import Layout, data_folders, read_layout, write_layout
from turtlemq.storage import names
from turtlemq.storage.door import Door


def check_format(door: Door, root: Path) -> None:
    """Refuse a folder that is no data folder, is half made, or was written by a newer version."""
    for folder in data_folders(door, root):
        backup.check_format(door, folder)


def files_of_stopped(door: Door, root: Path) -> Files:
    """All files of a data folder that no server uses."""
    return _together(door, root, [backup.files_of_stopped(door, folder) for folder in data_folders(door, root)])


def pinned(door: Door, root: Path, pins: Sequence[str]) -> Files:
    """The files that a server has pinned. `pins`: their names, by shard."""
    folders = data_folders(door, root)
    return _together(door, root, [backup.pinned(door, *pair) for pair in zip(folders, pins, strict=True)])


def _together(door: Door, root: Path, found: Sequence[Files]) -> Files:
    """The files of all shards, by their path in `root`."""
    if read_layout(door, root) is None:
        return found[0]
    path = root / names.SHARD_COUNT
    out: Files = {names.SHARD_COUNT: (path, door.size(path))}
    for folder, files in zip(data_folders(door, root), found, strict=True):
        out |= {str(folder.relative_to(root) / name): file for name, file in files.items()}
    return out


def restore(door: Door, folder: Path, target: Path, *, progress: Progress) -> Manifest:
    """Copy a backup into a new data folder. Requires: it was verified. Until the end, SHARDS tells of a restore under way."""
    layout = read_layout(door, folder)
    if layout is None:
        return backup.restore(door, folder, target, progress=progress)
    check_format(door, folder)
    manifest = backup.begin_restore(door, folder, target)
    write_layout(door, target, Layout(layout.shards, unfinished="restore"))
    made = {target}
    for path, entry in manifest.files.items():
        if path == names.SHARD_COUNT or not backup.is_plain(door, folder, path):
            continue
        place = target / path
        door.make_folder(place.parent, durable=False)
        made |= {parent for parent in place.parents if target in (parent, *parent.parents)}
        backup.copy_file(door, folder / path, place, door.size(folder / path))
        progress(path, entry.bytes)
    for each in made:
        door.sync_folder(each)
    missing = [each for each in data_folders(door, folder) if not door.exists(target / each.relative_to(folder) / names.FORMAT)]
    if missing:
        raise Corrupt(f"{missing[0] / names.FORMAT} cannot be read: that shard is missing. Take an older backup.")
    write_layout(door, target, layout)
    return manifest
