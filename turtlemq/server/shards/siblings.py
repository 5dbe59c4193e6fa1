"""The facts that the supervisor of several shards tells its processes, in an environment variable. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from turtlemq.shards import shard_of

SIBLINGS = "TURTLEMQ_SIBLINGS"  # the variable


class Siblings(Struct, frozen=True):
    """The processes of a server. `shard`: the one that is told; `ports`: on which each alone listens; `paths`: their Unix
    sockets; `listening`: the descriptor of the own one."""

    shard: int
    ports: tuple[int, ...]
    paths: tuple[str, ...]
    listening: int

    @property
    def count(self) -> int:
        return len(self.ports)

    def has(self, topic: str) -> bool:
        """Whether a topic lives in the shard that is told."""
        return shard_of(topic, self.count) == self.shard

    def path_of(self, topic: str) -> str:
        """The Unix socket of the process with a topic, or with its first partition.

        >>> Siblings(0, (1, 2, 3, 4), ("a", "b", "c", "d"), 7).path_of("orders")
        'd'
        """
        return self.paths[shard_of(topic, self.count)]


def to_text(told: Siblings) -> str:
    """The value of the variable.

    >>> from_text(to_text(Siblings(0, (8879, 8880), ("a", "b"), 7))).count
    2
    """
    return msgspec.json.encode(told).decode()


def from_text(text: str) -> Siblings:
    """The inverse of `to_text`."""
    return msgspec.json.decode(text, type=Siblings)
