"""All keys of a cluster at one moment, decoded: configuration, nodes, drains, and the keys of each shard. Pure.

`Topology` is the part of it that clients need; this is for interventions, which compare revisions.

>>> view = ClusterView.of(Keys("prod"), {})
>>> view.config, view.shard(0).state
(None, None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from turtlemq.errors import UnknownShard
from turtlemq.replica.cluster_state import (
    Audit,
    BadValue,
    Config,
    Keys,
    Lead,
    Node,
    SeenOffsets,
    ShardState,
    Value,
    Want,
    decode,
)


class Stored(Protocol):
    """A key as etcd has it."""

    @property
    def value(self) -> bytes: ...
    @property
    def mod_revision(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of a shard, with the revisions of those that interventions change. Revision 0: the key does not exist."""

    state: ShardState | None = None
    lead: Lead | None = None
    want: Want | None = None
    seen: SeenOffsets | None = None
    state_revision: int = 0
    want_revision: int = 0

    @property
    def wanted(self) -> tuple[str, ...]:
        """The nodes that should have a copy."""
        return () if self.want is None else self.want.nodes

    @property
    def in_sync(self) -> dict[str, str]:
        """The node of each replica in the ISR."""
        return {} if self.state is None else {replica: self.state.nodes[replica] for replica in self.state.isr}

    def members_on(self, node: str) -> list[str]:
        """The replicas of a node that are in the ISR."""
        return sorted(replica for replica, where in self.in_sync.items() if where == node)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster, as its keys tell."""

    keys: Keys
    config: Config | None = None
    config_revision: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)  # whose supervisors are alive
    drains: dict[str, Audit] = field(default_factory=dict)  # nodes that should lead nothing
    shards: dict[int, ShardKeys] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Keys, stored: Mapping[str, Stored]) -> ClusterView:
        """Requires: all keys with the prefix of the cluster, read at one moment. Raises `BadValue` for the configuration and keys
        of shards; a node whose value cannot be read counts as gone."""

        def one(key: str, kind: type[Value]) -> tuple[Value | None, int]:
            found = stored.get(key)
            return (None, 0) if found is None else (decode(key, found.value, kind), found.mod_revision)

        def below(prefix: str, kind: type[Value]) -> dict[str, Value]:
            named = {key.removeprefix(prefix): each for key, each in sorted(stored.items()) if key.startswith(prefix)}
            return {name: value for name, each in named.items() if (value := _readable(prefix + name, each, kind)) is not None}

        config, revision = one(keys.config, Config)
        shards = {}
        for number in range(config.shards if config is not None else 1):
            state, state_revision = one(keys.state(number), ShardState)
            want, want_revision = one(keys.want(number), Want)
            lead = one(keys.lead(number), Lead)[0]
            seen = below(keys.seen(number), SeenOffsets).get("")
            shards[number] = ShardKeys(state, lead, want, seen, state_revision, want_revision)
        return cls(keys, config, revision, below(keys.nodes, Node), below(keys.drains, Audit), shards)

    def shard(self, number: int) -> ShardKeys:
        """The keys of a shard. Raises `UnknownShard`."""
        if number not in self.shards:
            raise UnknownShard(f"there is no shard {number}: the cluster has {len(self.shards)}, counted from 0")
        return self.shards[number]

    @property
    def known_nodes(self) -> set[str]:
        """Nodes that are alive, should have a copy, or have one."""
        known = {*self.nodes}
        for shard in self.shards.values():
            known |= {*shard.wanted, *(shard.state.nodes.values() if shard.state else ())}
        return known


def _readable(key: str, stored: Stored, kind: type[Value]) -> Value | None:
    try:
        return decode(key, stored.value, kind)
    except BadValue:
        return None
