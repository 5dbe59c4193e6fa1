"""The file REPLICA: facts of a copy about itself, and the sync of a whole copy that makes them true.

It belongs to one machine: it is written by a plain Door, never shipped, and in no backup. LSN and chain are there only after a
proper stop. They are removed, durably, before anything changes, so that after a crash a copy does not claim a position.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from turtlemq.errors import Corrupt, DiskFull, InvalidArgument
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage import names
from turtlemq.storage.door import Door


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts of a copy about itself. A folder that was wiped or restored is another replica."""

    cluster: str
    shard: int
    replica: str  # made at random with the folder
    complete: bool  # its files are those of a leader after some record
    epoch: int  # the highest that it has heard of
    lsn: int | None = None  # of the last record that was applied, with its chain; None: not known
    chain: int | None = None
    boot: str = ""  # of the machine, when its process began; empty: not known
    rebooted: bool = False  # the machine lost power since: records that were acknowledged may be missing
    suspect: tuple[str, ...] = ()  # files with damage: they are compared with the leader's, and replaced
    state_epoch: int = 0  # of the newest `state` that it has seen in etcd: its files may be of an earlier epoch
    revision: int = 0  # of that `state`

    @property
    def newest(self) -> tuple[int, int]:
        """The highest epoch that this copy knows, and the newest revision of `state` in it; 0: none is known."""
        return max((self.epoch, 0), (self.state_epoch, self.revision))


class ReplicaFile:
    """The file REPLICA of a running process. `facts` are those on the disk. Any thread may change them, but not the event loop:
    each change is durable when the call returns."""

    def __init__(self, door: Door, root: Path, facts: ReplicaFacts, lock: AbstractContextManager[object] | None = None) -> None:
        """Requires: the facts that `take` has returned. `lock` is held while they change."""
        self.facts = replace(facts, lsn=None, chain=None)
        self._door, self._root, self._writing = door, root, lock or nullcontext()

    def write(self, **changes: Any) -> None:
        """Change some of the facts."""
        with self._writing:
            facts = replace(self.facts, **changes)
            write(self._door, self._root, facts)
            self.facts = facts

    def note(self, epoch: int) -> None:
        """Note the epoch of the leader whose records the files get from now on."""
        if epoch > self.facts.epoch:
            self.write(epoch=epoch, lsn=None, chain=None)

    def note_state(self, epoch: int, revision: int) -> None:
        """Note the newest `state` of etcd, unless a newer one is known. On a full disk the file stays as it is, and the next
        `state` is noted: a copy that only follows must not end for it."""
        if (epoch, revision) > (self.facts.state_epoch, self.facts.revision):
            with suppress(DiskFull):
                self.write(state_epoch=epoch, revision=revision, lsn=None, chain=None)


def take(door: Door, root: Path, cluster: str, shard: int = 0) -> ReplicaFacts:
    """The facts about a copy, which claims no position on the disk any more. A folder without any shared file is a complete copy
    of nothing. Requires: the folder is locked. Raises `InvalidArgument` if it belongs to another cluster or shard."""
    facts = read(door, root)
    if facts is None:
        empty = not any(is_shared(name) for name in door.names(root))
        facts = ReplicaFacts(cluster, shard, door.random_bytes(16).hex(), empty, 0, *((0, 0) if empty else (None, None)))
    if (facts.cluster, facts.shard) != (cluster, shard):
        raise InvalidArgument(
            f"{root} holds shard {facts.shard} of cluster {facts.cluster!r}, not shard {shard} of {cluster!r}. "
            "Give another data folder, or correct the name of the cluster."
        )
    boot = door.boot_id()
    lost = facts.lsn is None and facts.boot not in ("", boot)
    facts = replace(facts, boot=boot, rebooted=facts.rebooted or (lost and bool(boot)))
    write(door, root, replace(facts, lsn=None, chain=None))
    return facts


def read(door: Door, root: Path) -> ReplicaFacts | None:
    """The facts about a copy; None if the folder was never replicated."""
    path = root / names.REPLICA
    if not door.exists(path):
        return None
    try:
        return msgspec.json.decode(door.read_all(path), type=ReplicaFacts)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} cannot be read ({error}). Remove it: the copy will be compared with the leader's files.") from None


def write(door: Door, root: Path, facts: ReplicaFacts) -> None:
    """Write the facts about a copy, durably."""
    door.replace(root / names.REPLICA, msgspec.json.encode(facts) + b"\n")


def sync_all(door: Door, root: Path) -> None:
    """Make all shared files of a folder durable, with their names. 20 µs a file that is durable already."""
    _sync_folder(door, root, "")


def _sync_folder(door: Door, folder: Path, relative: str) -> None:
    for name in door.names(folder):
        path, inside = folder / name, f"{relative}/{name}".lstrip("/")
        if not is_shared(inside):
            continue
        if door.is_folder(path):
            _sync_folder(door, path, inside)
        else:
            fd = door.open_write(path)
            try:
                door.sync(fd, path)
            finally:
                door.close(fd)
    door.sync_folder(folder)
