"""The files of a copy under way, without the connection: they are compared with a manifest, and made equal to it.

The parts of one file come in order, one file after the other. A call at a time, on any thread.

Requires: REPLICA says already, durably, that this copy is not complete.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from turtlemq.replica import replica_file
from turtlemq.replica.copy_files import FileWriter, Mend, Tails, cut, remove_caches
from turtlemq.replica.manifest import Action, FilePlan, FileState, check_paths, plan_file, plan_names
from turtlemq.replica.pins import units, walk
from turtlemq.replica.sums import Sums
from turtlemq.storage.door import Door


@dataclass(slots=True)
class Whole:
    """A whole manifest."""

    lsn: int = 0
    chain: int = 0
    files: list[FileState] = field(default_factory=list)
    units: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


class FileCopy:
    """Makes a data folder equal to a manifest: `compare`, then `write` for every part of the plans, then `finish`. `close` ends a
    file that is not whole. `tails` keeps diverging bytes, `mend` own bytes where the leader's have damage. Noted checksums of
    `suspect` files are not relied on."""

    def __init__(self, root: Path, door: Door, tails: Tails, suspect: Collection[str] = (), mend: Mend | None = None) -> None:
        self._root, self._door, self._tails, self._suspect, self._mend = root, door, tails, suspect, mend
        self._writer: FileWriter | None = None

    def compare(self, manifest: Whole, now_ns: int) -> list[FilePlan]:
        """Compare, and make all changes that need no bytes of the leader. Returns the files that need some. `now_ns`: the wall
        clock, by which checksums of files are noted that have not changed lately."""
        root, door = self._root, self._door
        check_paths([file.path for file in manifest.files])
        check_paths(manifest.folders)
        own = [path for unit in units(door, root) for path in walk(door, root, unit)]
        own_folders = {path for path in own if door.is_folder(root / path)}
        changes = plan_names((file.path for file in manifest.files), manifest.folders, set(own) - own_folders, own_folders)
        for path in changes.removed_files:
            self._tails.keep(root / path, path, 0)
            door.remove(root / path)
        for path in changes.removed_folders:
            door.remove_folder(root / path)
        for path in changes.new_folders:
            door.make_folder(root / path, durable=False)
        remove_caches(door, root)
        sums = Sums(door, root, self._suspect)
        plans = [self._compare_file(sums, number, file, now_ns) for number, file in enumerate(manifest.files)]
        sums.save()
        for plan in plans:
            self._change(plan)
        return [plan for plan in plans if plan.pulled]

    def _compare_file(self, sums: Sums, number: int, wanted: FileState, now_ns: int) -> FilePlan:
        path = self._root / wanted.path
        size = self._door.size(path) if self._door.is_file(path) else None
        own = [] if size is None else sums.of(wanted.path, path, min(size, wanted.size), now_ns)
        return plan_file(wanted, size, own, number)

    def _change(self, plan: FilePlan) -> None:
        path = self._root / plan.wanted.path
        if plan.action is Action.CUT:
            self._tails.keep(path, plan.wanted.path, plan.wanted.size)
            cut(self._door, path, plan.wanted.size)
        elif plan.action is Action.ANEW and not plan.pulled:
            self._door.close(self._door.create(path))

    def write(self, plan: FilePlan, at: int, length: int, data: bytes) -> None:
        """The next part of a file. Raises `copy_files.Changed`."""
        if self._writer is None:
            self._writer = FileWriter(self._door, self._root, plan, self._tails, self._mend)
        if self._writer.write(at, length, data):
            self._writer = None

    def close(self) -> None:
        """Close the file that is being written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self) -> None:
        """Make everything durable."""
        replica_file.sync_all(self._door, self._root)
