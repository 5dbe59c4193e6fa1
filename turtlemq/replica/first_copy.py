"""The data folder of a single node becomes the first copy of a shard: its files are moved, and REPLICA is written.

The copy is complete, of epoch 0: a replica that may begin its shard (R9 of `replica.member`). Files are moved into a folder
beside their place, which gets its name last. So an interrupted move is no copy, and is finished by the next call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turtlemq.errors import InvalidArgument
from turtlemq.replica import replica_file
from turtlemq.replica.replica_file import ReplicaFacts
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage import names
from turtlemq.storage.door import Door

_SHARDS = "shard"  # in the folder of a node: the folders of its copies
_MOVING = ".from"  # added to the name of the copy while files are moved


def adopt(door: Door, data: Path, node: Path, cluster: str, shard: int = 0) -> Path:
    """Move the shared files of `data` into the folder of a node, on the same disk; `data` may be that folder. Returns the folder
    of the copy. Raises `Locked` if a server runs in one of them, or `InvalidArgument`."""
    copy = node / _SHARDS / f"{shard:02}"
    check(door, data, copy)
    door.make_folder(node)
    with _locked(door, {data.resolve(), node.resolve()}):
        check(door, data, copy)
        moving = _moving(copy)
        door.make_folder(moving)
        for name in sorted(filter(is_shared, door.names(data)), key=lambda name: name == names.FORMAT):
            _move(door, data / name, moving / name)
        for name in (names.BALLAST, names.RESERVE):
            door.remove(data / name)
        door.sync_folder(data)
        replica_file.write(door, moving, ReplicaFacts(cluster, shard, door.random_bytes(16).hex(), complete=True, epoch=0))
        if door.exists(copy):
            door.remove_folder(copy)
        with door.durable_names(copy.parent):
            door.rename(moving, copy)
    return copy


def check(door: Door, data: Path, copy: Path) -> None:
    """Raise `InvalidArgument` unless `data` is the folder of a single node, and there is no other copy at `copy`."""
    if not door.exists(data / names.FORMAT) and not door.exists(_moving(copy) / names.FORMAT):
        raise InvalidArgument(f"{data} is no data folder of a single node: it has no file {names.FORMAT}")
    if door.exists(copy) and any(is_shared(name) for name in door.names(copy)):
        raise InvalidArgument(f"{copy} holds a copy already. Nothing was done.")


@contextmanager
def _locked(door: Door, folders: set[Path]) -> Iterator[None]:
    locks: list[int] = []
    try:
        locks.extend(door.lock(folder / names.LOCK) for folder in sorted(folders))
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _moving(copy: Path) -> Path:
    return copy.with_name(copy.name + _MOVING)


def _move(door: Door, source: Path, target: Path) -> None:
    if door.exists(target):
        raise InvalidArgument(f"{source} and {target} both exist: files have come since an earlier try. Move one of them away.")
    try:
        door.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise InvalidArgument(
            f"{source} is on another disk than {target.parent}. Nothing was moved: copy the folder to that disk first."
        ) from None
