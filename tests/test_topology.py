"""The topology that the keys of the name server describe: leaders at work, deposed ones, damaged values, shards of topics."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from turtlemq.replica.cluster_state import Config, Keys, Lead, Node, ShardState, Want, encode
from turtlemq.replica.topology import Topology
from turtlemq.shards import shard_of

NAMES = Keys("prod")
CONFIG = Config(id="c1", shards=1, replicas=2, min_isr=1)
STATE = ShardState(epoch=3, leader="r1", isr=("r1", "r2"), nodes={"r1": "a", "r2": "b", "r3": "c"}, nonce="n")
LEAD = Lead(epoch=3, replica="r1", node="a", url="http://a:8878/", peer="a:8900")


def node(name: str, **more: Any) -> Node:
    return Node(url=f"http://{name}:8878/", peer=f"{name}:8900", **more)


def seen(**changed: Any) -> dict[str, SimpleNamespace]:
    """The keys of a cluster with nodes `a` and `b`. A value of None is left out."""
    values: dict[str, Any] = {
        NAMES.config: CONFIG,
        NAMES.node("a"): node("a", zone="z1", version="1"),
        NAMES.node("b"): node("b"),
        NAMES.state(0): STATE,
        NAMES.lead(0): LEAD,
        NAMES.want(0): Want(nodes=("a", "b")),
    }
    values |= {f"{NAMES.prefix}{key}": value for key, value in changed.items()}
    found = {key: value for key, value in values.items() if value is not None}
    return {key: SimpleNamespace(value=v if isinstance(v, bytes) else encode(v)) for key, v in found.items()}


def test_a_cluster_at_work() -> None:
    topology = Topology.of(seen(), 42)
    assert (topology.cluster, topology.revision, topology.shards, topology.replicas, topology.min_isr) == ("prod", 42, 1, 2, 1)
    assert {name: (place.url, place.zone, place.drain) for name, place in topology.nodes.items()} == {
        "a": ("http://a:8878", "z1", False),
        "b": ("http://b:8878", "", False),
    }
    place = topology.leader(0)
    assert place is not None
    assert (place.epoch, place.node, place.url, place.isr, place.want) == (3, "a", "http://a:8878", ("a", "b"), ("a", "b"))
    assert topology.leader(1) is None
    assert topology.problems == ()


def test_a_leader_that_is_gone_or_deposed_does_not_lead() -> None:
    for lead in (None, Lead(epoch=2, replica="r2", node="b", url="http://b:8878", peer="b:8900")):
        topology = Topology.of(seen(**{"shards/00/lead": lead}), 1)
        assert topology.leader(0) is None
        assert (topology.leaders[0].epoch, topology.leaders[0].isr) == (3, ("a", "b"))


def test_a_drain_is_a_key_or_a_field_of_the_node() -> None:
    changed = {"drains/a": b"{}", "nodes/b": node("b", drain=True), "nodes/c": node("c")}
    assert {name: place.drain for name, place in Topology.of(seen(**changed), 1).nodes.items()} == {
        "a": True,
        "b": True,
        "c": False,
    }


def test_a_damaged_value_hides_nothing_else() -> None:
    topology = Topology.of(seen(**{"nodes/b": b"{", "shards/00/want": b"[]"}), 1)
    assert list(topology.nodes) == ["a"]
    assert topology.leader(0) is not None
    assert [problem.partition(" ")[0] for problem in topology.problems] == ["/tmq/prod/nodes/b", "/tmq/prod/shards/00/want"]


def test_before_init_there_are_no_shards() -> None:
    assert Topology.of({}, 5) == Topology(cluster="", revision=5)
    topology = Topology.of(seen(config=None), 5)
    assert (topology.shards, topology.leaders, topology.leader(0)) == (0, (), None)
    assert set(topology.nodes) == {"a", "b"}


def test_topics_spread_over_all_shards_and_stay_there() -> None:
    assert {shard_of(f"topic-{n}", 1) for n in range(100)} == {0}
    counts = Counter(shard_of(f"topic-{n}", 8) for n in range(8_000))
    assert len(counts) == 8
    assert min(counts.values()) > 850
    assert [shard_of(name, 64) for name in ("orders", "mail.de", "a")] == [59, 22, 31]  # never to be changed
