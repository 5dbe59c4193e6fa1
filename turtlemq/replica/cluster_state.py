"""The values of a cluster's keys in etcd, as JSON with checks: configuration, nodes, and the state of each shard. Pure.

Every key begins with `/tmq/CLUSTER/`. A value that does not fit is an error that names the key; unknown fields are kept out of
the way, so that a newer version may add some.

| key | lease | written by | value |
| --- | --- | --- | --- |
| `config` | | `cluster init` | `Config` |
| `nodes/ID` | supervisor | supervisor | `Node` |
| `shards/NN/state` | | the leader, or the replica that is elected | `ShardState` |
| `shards/NN/lead` | leader | leader | `Lead` |
| `shards/NN/want` | | controller | `Want` |
| `shards/NN/seen` | | leader, every 10 s if changed | `SeenOffsets`: for people and tools, the truth is in the shard |
| `drains/ID` | | `cluster drain` | `Audit`: the node should lead nothing, and takes no new copies while the key is there |
| `audit/MS-N` | | `force-leader` and the like | `Audit` |

>>> keys = Keys("prod")
>>> keys.state(3)
'/tmq/prod/shards/03/state'
>>> state = ShardState(epoch=2, leader="r1", isr=("r1",), nodes={"r1": "a"}, nonce="n", why="elected", at_ms=5)
>>> decode(keys.state(3), encode(state), ShardState) == state
True
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument, TurtleError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of clusters and nodes
SHARDS_MAX = 100
REPLICAS_MAX = 7
SEEN_BYTES_MAX = 256 << 10

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]
Id = Annotated[str, Meta(min_length=1, max_length=64)]  # of a replica
Url = Annotated[str, Meta(pattern="^https?://[^/ ]+/?$", max_length=300)]
Peer = Annotated[str, Meta(pattern=r"^[^/ ]+:[0-9]{1,5}$", max_length=300)]  # host:port
Text = Annotated[str, Meta(max_length=1_000)]


class KeyValue(NamedTuple):
    """A key as etcd has it."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class BadValue(TurtleError):
    """A key of the name server does not hold a value that this version understands."""


class Config(Struct, frozen=True, kw_only=True):
    """The shape of a cluster. It never changes."""

    id: Id
    shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)]
    replicas: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
    min_isr: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
    hash: Literal["xxh3_64"] = "xxh3_64"  # topic → shard
    version: Literal[1] = 1  # of these values

    def __post_init__(self) -> None:
        if self.min_isr > self.replicas:
            raise ValueError(f"min_isr is {self.min_isr}, with {self.replicas} replicas: answers would never have enough copies")


class Node(Struct, frozen=True, kw_only=True):
    """A machine, as its supervisor tells it. The key is gone when the supervisor is."""

    url: Url
    peer: Peer
    grpc: Text = ""  # host:port; empty: it serves no gRPC
    zone: Text = ""
    version: Text = ""
    format: Count = 0
    free_bytes: Count = 0
    clock_ms: Count = 0
    drain: bool = False


class ShardState(Struct, frozen=True, kw_only=True):
    """Leader and in-sync set of a shard: the value that decides. Changed only with a comparison of its mod_revision."""

    epoch: Count
    leader: Id
    isr: tuple[Id, ...]
    nodes: dict[Id, Name]  # of every replica that is known
    nonce: Text
    why: Text = ""
    at_ms: Count = 0

    def __post_init__(self) -> None:
        if self.leader not in self.isr:
            raise ValueError(f"leader {self.leader!r} is not in the in-sync set")
        if len(set(self.isr)) != len(self.isr):
            raise ValueError("a replica is twice in the in-sync set")
        if missing := set(self.isr) - set(self.nodes):
            raise ValueError(f"replica {min(missing)!r} has no node")


class Lead(Struct, frozen=True, kw_only=True):
    """The leader at work. The key hangs on its lease."""

    epoch: Count
    replica: Id
    node: Name
    url: Url
    peer: Peer


class Want(Struct, frozen=True, kw_only=True):
    """The nodes that should have the shard, the first of which begins it, and the node that should lead."""

    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=REPLICAS_MAX)]
    leader: Name | None = None

    def __post_init__(self) -> None:
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError("a node is wanted twice")
        if self.leader is not None and self.leader not in self.nodes:
            raise ValueError(f"leader {self.leader!r} is not one of the wanted nodes")


class SeenOffsets(Struct, frozen=True, kw_only=True):
    """Committed offsets of all groups, by topic and group, when the leader had this LSN."""

    lsn: Count
    topics: dict[str, dict[str, Count]]
    left_out: Count = 0  # topics that did not fit
    at_ms: Count = 0


class Audit(Struct, frozen=True, kw_only=True):
    """An intervention by hand."""

    at_ms: Count
    node: Text
    user: Text
    action: Text
    details: dict[str, Text] = {}


Value = TypeVar("Value", Config, Node, ShardState, Lead, Want, SeenOffsets, Audit)


def encode(value: Config | Node | ShardState | Lead | Want | SeenOffsets | Audit) -> bytes:
    """The bytes of a value."""
    return msgspec.json.encode(value)


def decode(key: str, data: bytes, kind: type[Value]) -> Value:
    """The value of a key. Raises `BadValue`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadValue(f"{key} in etcd holds no {kind.__name__} that this version understands: {error}") from error


def offsets(lsn: int, topics: dict[str, dict[str, int]], at_ms: int = 0) -> bytes:
    """The value of `seen`, with as many topics as fit, in order of their names.

    >>> len(offsets(1, {f"topic-{n}": {"g" * 100: n} for n in range(5_000)})) <= SEEN_BYTES_MAX
    True
    """
    kept: dict[str, dict[str, int]] = {}
    room = SEEN_BYTES_MAX - 200
    for name in sorted(topics):
        room -= len(msgspec.json.encode({name: topics[name]}))
        if room < 0:
            break
        kept[name] = topics[name]
    return encode(SeenOffsets(lsn=lsn, topics=kept, left_out=len(topics) - len(kept), at_ms=at_ms))


class Keys:
    """The names of the keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        if not NAME.fullmatch(cluster):
            raise InvalidArgument(f"a cluster is named with 1 to 64 of A-Z a-z 0-9 . _ -, not {cluster!r}")
        self.prefix = f"/tmq/{cluster}/"
        self.config, self.controller, self.shards = f"{self.prefix}config", f"{self.prefix}controller", f"{self.prefix}shards/"
        self.nodes, self.drains, self.audits = f"{self.prefix}nodes/", f"{self.prefix}drains/", f"{self.prefix}audit/"

    def node(self, name: str) -> str:
        return f"{self.nodes}{_checked_node(name)}"

    def drain(self, node: str) -> str:
        return f"{self.drains}{_checked_node(node)}"

    def shard(self, number: int) -> str:
        """The prefix of all keys of a shard."""
        return f"{self.shards}{number:02}/"

    def state(self, number: int) -> str:
        return f"{self.shard(number)}state"

    def lead(self, number: int) -> str:
        return f"{self.shard(number)}lead"

    def want(self, number: int) -> str:
        return f"{self.shard(number)}want"

    def seen(self, number: int) -> str:
        return f"{self.shard(number)}seen"

    def rebooted(self, number: int, replica: str) -> str:
        """A replica whose machine has lost power. It counts while it is newer than `state`."""
        return f"{self.shard(number)}rebooted/{replica}"

    def audit(self, at_ms: int, number: int) -> str:
        return f"{self.audits}{at_ms:013}-{number}"


def _checked_node(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidArgument(f"a node is named with 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r:.100}")
    return name
