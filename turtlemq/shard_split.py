"""Split the folder of a stopped server into shards: each topic is a folder, and is renamed into the folder of its shard.

The file SHARDS is written first and says that a split is under way: until it is done, no server starts. Every step can be done
again, so after a crash, a second run goes on. Nothing is copied, and no file of a topic is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turtlemq.data_folder import check_format, read_clean_mark, topics_in
from turtlemq.errors import InvalidArgument
from turtlemq.segment import format as f
from turtlemq.shard_folders import Layout, read_layout, shard_folder, write_layout
from turtlemq.shards import shard_of
from turtlemq.storage import names
from turtlemq.storage.door import Door

_REMOVED = (names.CLEAN, names.TOPICS, names.BALLAST, names.RESERVE, names.PINNED)  # each shard has, or makes, its own


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves that a split has to do: topics by shard. `is_done`: the folder has so many shards already."""

    shards: int
    topics: dict[str, int]
    is_done: bool = False


def plan(door: Door, root: Path, shards: int) -> Plan:
    """The work of a split. Changes nothing. Raises `InvalidArgument` for a folder that cannot be split so."""
    if not 2 <= shards <= names.SHARDS_MAX:
        raise InvalidArgument(f"a folder is split into 2 to {names.SHARDS_MAX} shards, not {shards}")
    if door.exists(root / names.NODE) or door.exists(root / names.REPLICA):
        raise InvalidArgument(f"{root} belongs to a cluster: its shards were fixed when the cluster was made")
    layout = read_layout(door, root)
    if layout is not None:
        if layout.shards != shards or layout.unfinished not in ("", "split"):
            begun = "is being split" if layout.unfinished else "was split"
            raise InvalidArgument(f"{root} {begun} into {layout.shards} shards. The number cannot be changed any more.")
        if not layout.unfinished:
            return Plan(shards, {}, is_done=True)
    elif not door.exists(root / names.FORMAT):
        raise InvalidArgument(f"{root} is no data folder. A new folder needs no split: turtlemq serve --shards {shards}")
    elif door.names(root / names.SHARDS):
        raise InvalidArgument(f"{root / names.SHARDS} is there already, without a file {names.SHARD_COUNT}. Move it elsewhere.")
    if door.exists(root / names.FORMAT):
        check_format(door, root)
    topics = topics_in(door, root)
    for topic in topics:
        _check_movable(door, root, topic)
    return Plan(shards, {topic: shard_of(topic, shards) for topic in topics})


def _check_movable(door: Door, root: Path, topic: str) -> None:
    """Raise `InvalidArgument` for a topic whose folder cannot be renamed."""
    path = root / names.TOPICS / topic
    if door.is_link(path):
        if not door.is_absolute_link(path):
            raise InvalidArgument(f"{path} is a link with a relative path, which would lead elsewhere. Make it an absolute one.")
    elif not door.is_on_same_disk(path, root):
        raise InvalidArgument(f"{path} is on another file system than {root}. Put a link in its place that leads there.")


def split(door: Door, root: Path, planned: Plan, moved: Callable[[str], None] = lambda _: None) -> None:
    """Carry out a plan. Requires: the folder is locked, and is as it was when the plan was made. `moved`: called with each topic
    that is in its place."""
    if planned.is_done:
        return
    write_layout(door, root, Layout(planned.shards, unfinished="split"))
    marks = read_clean_mark(door, root)
    for shard in range(planned.shards):
        _make_shard(door, root, shard, planned, marks)
    for topic, shard in planned.topics.items():
        _move(door, root / names.TOPICS / topic, shard_folder(root, shard) / names.TOPICS / topic)
        moved(topic)
    for name in door.names(root / names.TOPICS):  # left of deleted topics: the next start removes them
        _move(door, root / names.TOPICS / name, shard_folder(root, 0) / names.TOPICS / name)
    for name in (names.AUDIT, names.AUDIT_BEFORE):
        if door.exists(root / name):
            _move(door, root / name, shard_folder(root, 0) / name)
    copied = [name for name in _copied(door, root) if name != names.FORMAT]
    with door.durable_names(root):
        for name in (*_REMOVED, *copied):
            door.remove_folder(root / name)
    with door.durable_names(root):
        door.remove(root / names.FORMAT)
    write_layout(door, root, Layout(planned.shards))


def _copied(door: Door, root: Path) -> list[str]:
    """Files of the whole folder that each shard gets a copy of: the format, the secret of hashes."""
    left = {*names.LOCAL, names.CLEAN, names.SHARD_COUNT}
    found = [name for name in door.names(root) if name not in left and door.is_file(root / name)]
    return [name for name in found if not name.endswith((names.TMP, names.DELETED))]


def _make_shard(door: Door, root: Path, shard: int, planned: Plan, marks: dict[str, object] | None) -> None:
    """The folder of a shard, without its topics. After a proper stop, it gets the clean-shutdown marks of its topics."""
    folder = shard_folder(root, shard)
    door.make_folder(folder / names.TOPICS)
    for name in _copied(door, root):
        door.replace(folder / name, door.read_all(root / name), mode=0o600 if name == names.HASH_SEED else None)
    if marks is not None:
        own = {topic: mark for topic, mark in marks.items() if shard_of(topic, planned.shards) == shard}
        door.replace(folder / names.CLEAN, f.encode_checked({"topics": own}))


def _move(door: Door, source: Path, target: Path) -> None:
    """Rename, durably."""
    with door.durable_names(target.parent), door.durable_names(source.parent):
        door.rename(source, target)
