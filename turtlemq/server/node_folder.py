"""The folder of a cluster's node: one supervisor at a time has it, and the file NODE tells to which node of which cluster it
belongs. The folder of shard N is `shard/NN/`; it belongs to a replica process.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from turtlemq.errors import Corrupt, InvalidArgument
from turtlemq.server.config import Config
from turtlemq.server.supervision import NodeFacts
from turtlemq.storage import names
from turtlemq.storage.door import Door


def shard_folder(data: Path, shard: int) -> Path:
    """The data folder of a shard's replica on this node.

    >>> shard_folder(Path("data"), 3).as_posix()
    'data/shard/03'
    """
    return data / names.SHARDS / f"{shard:02}"


def has_copy(folder: Path) -> bool:
    """Whether there is a copy of a shard in a folder, or the rest of one that was being removed."""
    door = Door()
    return door.exists(folder) or bool(_leftovers(door, folder))


def _leftovers(door: Door, folder: Path) -> list[Path]:
    """Folders of copies whose removal was interrupted."""
    found = door.names(folder.parent) if door.exists(folder.parent) else []
    return [folder.parent / name for name in found if names.is_dropped(name) and name.startswith(f".{folder.name}.")]


def remove_copy(folder: Path) -> None:
    """Remove the copy of a shard, as a whole or not at all: a crash leaves a folder with a name of its own, which the next call
    removes. Raises `Locked` if a process uses it, or `OSError`."""
    door = Door()
    if door.exists(folder):
        lock = door.lock(folder / names.LOCK)
        try:
            door.set_aside(folder)
        finally:
            os.close(lock)
    for leftover in _leftovers(door, folder):
        door.remove_folder(leftover)


def refuse_cluster_folder(data: Path) -> None:
    """Raise `InvalidArgument` for the folder of a cluster's node, in which a single server would not find the messages, and for a
    copy of a shard: changes that the cluster does not know of would make it differ from the others without a sign."""
    door = Door()
    facts = read_facts(door, data)
    if facts is not None:
        raise InvalidArgument(
            f"{data} belongs to node {facts.node!r} of cluster {facts.cluster!r}, and this configuration has no [cluster]. "
            "Give the configuration of that node, or another data folder."
        )
    if door.exists(data / names.REPLICA):
        raise InvalidArgument(
            f"{data} is a copy that belongs to a cluster, and must not be changed outside of it. Start its node. To use it "
            f"without the cluster, copy the folder elsewhere, and remove the file {names.REPLICA} from the new one."
        )


def read_facts(door: Door, root: Path) -> NodeFacts | None:
    """The file NODE; None if there is none."""
    path = root / names.NODE
    if not door.exists(path):
        return None
    try:
        return msgspec.json.decode(door.read_all(path), type=NodeFacts)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} cannot be read ({error}). Remove it, if the folder belongs to this node.") from None


class NodeFolder:
    """The folder of a node, locked by this process until `close`. Raises `Locked`, or `InvalidArgument` if a single server has
    left its messages there."""

    def __init__(self, config: Config) -> None:
        self.root, self._door = Path(config.data), Door(folder_mode=int(config.data_mode, 8))
        self._door.make_folder(self.root)
        self._lock = self._door.lock(self.root / names.LOCK)
        try:
            self.facts = read_facts(self._door, self.root)
            if self._door.exists(self.root / names.FORMAT):
                raise InvalidArgument(
                    f"{self.root} holds the messages of a single server. Give the node another data folder. To bring these "
                    f"messages into a new cluster, make it with `turtlemq cluster init --from {self.root}`."
                )
        except BaseException:
            self.close()
            raise

    @property
    def is_locked(self) -> bool:
        """Is the folder still this process's own?"""
        return self._door.holds(self.root / names.LOCK, self._lock)

    def free_bytes(self) -> int:
        """Free space on its disk."""
        return self._door.free_bytes(self.root)

    def note(self, facts: NodeFacts) -> None:
        """Write the file NODE, durably."""
        if facts != self.facts:
            self._door.replace(self.root / names.NODE, msgspec.json.encode(facts) + b"\n")
            self.facts = facts

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)
