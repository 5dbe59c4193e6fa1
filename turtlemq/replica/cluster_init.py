"""The start of a cluster: its key `config` in etcd is written once, by one transaction, and never changes.

>>> shape = Shape(replicas=3)
>>> shape.min_isr, shape.config("0f").shards
(2, 1)
>>> Shape(shards=400).config("0f")
Traceback (most recent call last):
turtlemq.errors.InvalidArgument: a cluster has 1 to 100 shards, not 400
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import msgspec

from turtlemq.errors import Conflict, InvalidArgument
from turtlemq.replica.cluster_state import REPLICAS_MAX, SHARDS_MAX, Config, Keys, Want, decode, encode
from turtlemq.replica.etcd import Etcd, InDoubt, mod_revision_is, put, read


class Shape(NamedTuple):
    """The size of a cluster, which an operator decides once. `least`: copies without which nothing is written; 0: half of all,
    rounded up, which is one of two, and two of three."""

    shards: int = 1
    replicas: int = 3
    least: int = 0

    @property
    def min_isr(self) -> int:
        """Copies in sync without which nothing is written."""
        return self.least or (self.replicas + 1) // 2

    def config(self, id_: str) -> Config:
        """The value of `config`. Raises `InvalidArgument`."""
        if not 1 <= self.shards <= SHARDS_MAX:
            raise InvalidArgument(f"a cluster has 1 to {SHARDS_MAX} shards, not {self.shards}")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise InvalidArgument(f"a cluster has 1 to {REPLICAS_MAX} replicas of each shard, not {self.replicas}")
        if not 1 <= self.min_isr <= self.replicas:
            raise InvalidArgument(f"min_isr is 1 to {self.replicas}, the number of replicas, not {self.least}")
        return Config(id=id_, shards=self.shards, replicas=self.replicas, min_isr=self.min_isr)


class Made(NamedTuple):
    """The configuration of a cluster. `is_new`: it was made just now."""

    config: Config
    is_new: bool


async def init_cluster(etcd: Etcd, cluster: str, shape: Shape, first: str = "") -> Made:
    """Make a cluster, or find one of this shape. `first`: the node that begins it; by default the first one that starts. Raises
    `Conflict` if there is one of another shape, `InvalidArgument`, or `EtcdError`."""
    keys = Keys(cluster)
    wanted = shape.config(secrets.token_hex(16))
    puts = [put(keys.config, encode(wanted))]
    if first:
        puts.append(put(keys.want(0), encode(Want(nodes=(first,)))))
    try:
        outcome = await etcd.transact([mod_revision_is(keys.config, 0)], puts, [read(keys.config)])
        found = outcome.found
    except InDoubt:  # the id in the key tells
        found = (await etcd.get(keys.config)).keys
        if not found:
            raise
    present = decode(keys.config, found[0].value, Config) if found else wanted
    if msgspec.structs.replace(present, id=wanted.id) != wanted:
        raise Conflict(
            f"cluster {cluster!r} exists already, with {present.shards} shards, {present.replicas} replicas "
            f"and min_isr {present.min_isr}; these never change. Nothing was done."
        )
    return Made(present, present.id == wanted.id)
