"""The topology of a cluster: its nodes, and the leader of each shard, read from the keys of the name server. Pure.

Requests about a topic belong to one shard, whose number is a pure function of the topic's name. A key that this version cannot
read counts as missing and is listed in `problems`: a damaged value of one node must not hide the others.

>>> from types import SimpleNamespace
>>> keys = {"/tmq/prod/config": SimpleNamespace(value=b'{"id": "x", "shards": 1, "replicas": 2, "min_isr": 1}')}
>>> topology = Topology.of(keys, 7)
>>> topology.cluster, topology.shards, topology.leaders[0].url, topology.shard_of("orders")
('prod', 1, None, 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct, structs

from turtlemq.replica.cluster_state import BadValue, Config, Keys, Lead, Node, ShardState, Want, decode
from turtlemq.shards import HASH, shard_of

_PREFIX = "/tmq/"
_Kind = TypeVar("_Kind", Config, Lead, Node, ShardState, Want)


class HasValue(Protocol):
    """A key of the name server, of which only the value counts here."""

    @property
    def value(self) -> bytes: ...


def shard_url(url: str, shard: int) -> str:
    """The URL of the process that has a shard on the node at `url`, in a cluster with several: each has a port of its own.

    >>> shard_url("http://node-a:8878", 3), shard_url("https://[::1]:9000/", 0)
    ('http://node-a:8882', 'https://[::1]:9001')
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.netloc.removesuffix(f":{parts.port}")
    return f"{parts.scheme}://{host}:{port + 1 + shard}"


class NodePlace(Struct, frozen=True, kw_only=True):
    """A node at work: its addresses, and the state that its supervisor tells. `drain`: it should lead nothing."""

    url: str
    peer: str = ""
    grpc: str = ""
    zone: str = ""
    version: str = ""
    drain: bool = False
    format: int = 0
    free_bytes: int = 0
    clock_ms: int = 0


class ShardPlace(Struct, frozen=True, kw_only=True):
    """A shard: its leader at work, None if there is none, and the nodes with a copy in sync and with a copy wanted."""

    shard: int
    epoch: int = 0
    node: str | None = None
    url: str | None = None
    isr: tuple[str, ...] = ()
    want: tuple[str, ...] = ()


class Topology(Struct, frozen=True, kw_only=True):
    """A cluster at one revision of the name server. Before `cluster init` it has no shards."""

    cluster: str
    revision: int
    shards: int = 0
    replicas: int = 0
    min_isr: int = 0
    hash: str = HASH
    nodes: dict[str, NodePlace] = {}
    leaders: tuple[ShardPlace, ...] = ()  # by number of the shard
    topics: dict[str, int] = {}  # topics of several partitions: how many
    problems: tuple[str, ...] = ()  # keys that cannot be read

    @classmethod
    def of(cls, keys: Mapping[str, HasValue], revision: int) -> Topology:
        """The topology that all keys of one cluster describe. Costs a few microseconds a key."""
        cluster = next(iter(keys), _PREFIX).removeprefix(_PREFIX).partition("/")[0]
        if not cluster:
            return cls(cluster="", revision=revision)
        read = _Reader(Keys(cluster), keys)
        config = read.value(read.names.config, Config)
        shards = 0 if config is None else config.shards
        return cls(
            cluster=cluster,
            revision=revision,
            shards=shards,
            replicas=0 if config is None else config.replicas,
            min_isr=0 if config is None else config.min_isr,
            nodes=read.nodes(),
            leaders=tuple(read.shard(number) for number in range(shards)),
            problems=tuple(read.problems),
        )

    def shard_of(self, topic: str) -> int:
        """The shard of a topic. Requires: there is one."""
        return shard_of(topic, self.shards)

    def on(self, node: str) -> list[int]:
        """The shards that have a process on a node, of several: those of which it has or should have a copy, and the first."""
        return [place.shard for place in self.leaders if not place.shard or node in place.want or node in place.isr]

    def leader(self, shard: int) -> ShardPlace | None:
        """The place of a shard that has a leader at work; None without one."""
        place = self.leaders[shard] if 0 <= shard < len(self.leaders) else None
        return None if place is None or place.url is None else place


class _Reader:
    """Decodes keys, and notes those that it cannot."""

    def __init__(self, names: Keys, keys: Mapping[str, HasValue]) -> None:
        self.names, self.problems = names, list[str]()
        self._keys = keys

    def value(self, key: str, kind: type[_Kind]) -> _Kind | None:
        if (found := self._keys.get(key)) is None:
            return None
        try:
            return decode(key, found.value, kind)
        except BadValue as error:
            self.problems.append(str(error))
            return None

    def nodes(self) -> dict[str, NodePlace]:
        found = {key.removeprefix(self.names.nodes): self.value(key, Node) for key in sorted(self._keys) if self._is_node(key)}
        return {name: self._node(name, node) for name, node in found.items() if node is not None}

    def _is_node(self, key: str) -> bool:
        return key.startswith(self.names.nodes)

    def _node(self, name: str, node: Node) -> NodePlace:
        return NodePlace(
            url=node.url.rstrip("/"),
            peer=node.peer,
            grpc=node.grpc,
            zone=node.zone,
            version=node.version,
            drain=node.drain or f"{self.names.prefix}drains/{name}" in self._keys,
            format=node.format,
            free_bytes=node.free_bytes,
            clock_ms=node.clock_ms,
        )

    def shard(self, number: int) -> ShardPlace:
        state = self.value(self.names.state(number), ShardState)
        want = self.value(self.names.want(number), Want)
        wanted = () if want is None else want.nodes
        if state is None:
            return ShardPlace(shard=number, want=wanted)
        lead = self.value(self.names.lead(number), Lead)
        place = ShardPlace(shard=number, epoch=state.epoch, isr=tuple(state.nodes[one] for one in state.isr), want=wanted)
        if lead is None or lead.epoch != state.epoch:  # a leader of an earlier epoch is deposed
            return place
        return structs.replace(place, node=lead.node, url=lead.url.rstrip("/"))
