"""The folders of a server with several shards: the file SHARDS tells how many there are, and shard N lives in `shard/NN/`.

SHARDS is written before any folder of a shard, and never changes: a topic is found by the number of shards. While a folder of a
server without shards is split, or a backup is restored, SHARDS says so, and no server starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from turtlemq.data_folder import read_settings
from turtlemq.errors import Corrupt, InvalidArgument
from turtlemq.settings import Settings
from turtlemq.shards import shard_of, shards_of
from turtlemq.storage import names
from turtlemq.storage.door import Door


class Layout(Struct, frozen=True, omit_defaults=True):
    """The content of SHARDS. `unfinished`: the work that makes this layout, until it is done: "split" or "restore"."""

    shards: Annotated[int, Meta(ge=2, le=names.SHARDS_MAX)]
    unfinished: str = ""


def shard_folder(root: Path, shard: int) -> Path:
    """The data folder of a shard.

    >>> shard_folder(Path("data"), 3).as_posix()
    'data/shard/03'
    """
    return root / names.SHARDS / f"{shard:02}"


def read_layout(door: Door, root: Path) -> Layout | None:
    """The layout of a folder; None for a folder without shards."""
    path = root / names.SHARD_COUNT
    if not door.exists(path):
        return None
    try:
        return msgspec.json.decode(door.read_all(path), type=Layout)
    except msgspec.DecodeError as error:
        text = f"{path} cannot be read ({error}). Count the folders in {root / names.SHARDS}, and write the number: "
        raise Corrupt(text + '{"shards":N}') from None


def write_layout(door: Door, root: Path, layout: Layout) -> None:
    """Write SHARDS, durably."""
    door.replace(root / names.SHARD_COUNT, msgspec.json.encode(layout) + b"\n")


def prepare(door: Door, root: Path, shards: int) -> None:
    """Make the folder of a server with so many shards, or see that it is one. Requires: it is locked."""
    layout = read_layout(door, root)
    if layout is not None:
        check_finished(layout, root)
        if layout.shards != shards:
            raise InvalidArgument(
                f"{root} holds {layout.shards} shards, not {shards}: topics are found by this number, so it stays as it is. "
                f"Start with --shards {layout.shards}, or give another data folder."
            )
        return
    if door.exists(root / names.NODE) or door.exists(root / names.REPLICA):
        raise InvalidArgument(f"{root} belongs to a cluster, and shards = {shards} is for a server alone. Give another folder.")
    if door.exists(root / names.FORMAT) or door.names(root / names.TOPICS):
        raise InvalidArgument(
            f"{root} holds the messages of a server without shards. Split it first, while it is stopped: "
            f"turtlemq shards split --data {root} --shards {shards}"
        )
    if door.names(root / names.SHARDS):
        raise InvalidArgument(f"{root} has folders of shards, and no file {names.SHARD_COUNT}. Restore that file from a backup.")
    write_layout(door, root, Layout(shards))


def check_finished(layout: Layout, root: Path) -> None:
    """Raise `InvalidArgument` if the folder is only half made."""
    if layout.unfinished == "split":
        raise InvalidArgument(
            f"{root} is being split into {layout.shards} shards, and that was interrupted. Go on with it: "
            f"turtlemq shards split --data {root} --shards {layout.shards}"
        )
    if layout.unfinished:
        raise InvalidArgument(f"a {layout.unfinished} into {root} did not come to its end. Remove the folder and begin anew.")


def refuse_shards(root: Path) -> None:
    """Raise `InvalidArgument` for a folder of several shards, in which a server without shards would not find the messages."""
    layout = read_layout(Door(), root)
    if layout is not None:
        check_finished(layout, root)
        raise InvalidArgument(
            f"{root} holds {layout.shards} shards. Start with --shards {layout.shards}, or set shards = {layout.shards} in the "
            "configuration."
        )


def data_folders(door: Door, root: Path) -> list[Path]:
    """The data folders in `root`: those of its shards in order, or `root` itself. A half-made one is refused."""
    layout = read_layout(door, root)
    if layout is None:
        return [root]
    check_finished(layout, root)
    return [shard_folder(root, number) for number in range(layout.shards)]


def partition_problems(door: Door, folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Topics that lie in a shard where they should not, or whose partitions differ in their number: each with its data folder. A
    partition that is missing is none: the server makes it, as it would have done if it had not been interrupted."""
    found = []
    for shard, folder in enumerate(folders):
        for topic in filter(names.is_topic, door.names(folder / names.TOPICS)):
            home, own = (_partitions_in(door, folders[at], topic) for at in (shard_of(topic, len(folders)), shard))
            if own is None or (home == own and shard in shards_of(topic, own, len(folders))):
                continue
            why = "has no partition 0" if home is None else f"has {own} partitions here and {home} where partition 0 is"
            if home == own:
                why = f"has {own} partitions, and none of them is in this shard"
            found.append((folder, f"{names.TOPICS}/{topic}: {why}. Restore the topic, or delete it."))
    return found


def _partitions_in(door: Door, folder: Path, topic: str) -> int | None:
    """The partitions of a topic as its settings in a data folder say; None if it is not there, or its settings are damaged."""
    inside = folder / names.TOPICS / topic
    try:
        return read_settings(door, inside, Settings()).partitions if door.is_folder(inside) else None
    except Corrupt:
        return None
