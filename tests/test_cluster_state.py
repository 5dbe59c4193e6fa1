"""Values of the keys in etcd: they survive the way there and back, and wrong ones are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turtlemq.errors import InvalidArgument
from turtlemq.replica.cluster_state import (
    Audit,
    BadValue,
    Config,
    Keys,
    Lead,
    Node,
    SeenOffsets,
    ShardState,
    Want,
    decode,
    encode,
    offsets,
)

GOOD: list[Any] = [
    Config(id="c1", shards=4, replicas=3, min_isr=2),
    Node(url="http://10.0.0.1:8878", peer="10.0.0.1:8900", zone="east", version="1", format=3, free_bytes=7, drain=True),
    ShardState(
        epoch=3, leader="r2", isr=("r1", "r2"), nodes={"r1": "a", "r2": "b", "r3": "c"}, nonce="n", why="elected", at_ms=5
    ),
    Lead(epoch=3, replica="r2", node="b", url="https://b:8878/", peer="[::1]:8900"),
    Want(nodes=("a", "b"), leader="b"),
    SeenOffsets(lsn=9, topics={"orders": {"default": 17}}),
    Audit(at_ms=1, node="a", user="root", action="force-leader", details={"shard": "0"}),
]
BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (Config, {"id": "c", "shards": 0, "replicas": 1, "min_isr": 1}, "shards"),
    (Config, {"id": "c", "shards": 1, "replicas": 2, "min_isr": 3}, "min_isr is 3, with 2 replicas"),
    (Config, {"id": "c", "shards": 1, "replicas": 2, "min_isr": 1, "version": 2}, "version"),
    (Config, {"id": "c", "shards": 1, "replicas": 2, "min_isr": 1, "hash": "crc"}, "hash"),
    (Node, {"url": "10.0.0.1", "peer": "a:1"}, "url"),
    (Node, {"url": "http://a", "peer": "a"}, "peer"),
    (ShardState, {"epoch": 1, "leader": "x", "isr": ["y"], "nodes": {"y": "a"}, "nonce": ""}, "leader 'x' is not in"),
    (ShardState, {"epoch": 1, "leader": "x", "isr": ["x", "x"], "nodes": {"x": "a"}, "nonce": ""}, "twice"),
    (ShardState, {"epoch": 1, "leader": "x", "isr": ["x"], "nodes": {}, "nonce": ""}, "'x' has no node"),
    (ShardState, {"epoch": -1, "leader": "x", "isr": ["x"], "nodes": {"x": "a"}, "nonce": ""}, "epoch"),
    (Want, {"nodes": []}, "nodes"),
    (Want, {"nodes": ["a", "a"]}, "twice"),
    (Want, {"nodes": ["a"], "leader": "b"}, "'b' is not one of"),
    (Lead, {"epoch": 1}, "replica"),
]


@pytest.mark.parametrize("value", GOOD, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were_written(value: Any) -> None:
    data = encode(value)
    assert decode("k", data, type(value)) == value
    newer = {**json.loads(data), "added_later": 1}
    assert decode("k", json.dumps(newer).encode(), type(value)) == value


@pytest.mark.parametrize(("kind", "value", "why"), BAD, ids=[f"{kind.__name__} {why}" for kind, _, why in BAD])
def test_a_wrong_value_is_named_with_its_key(kind: type[Any], value: dict[str, Any], why: str) -> None:
    with pytest.raises(BadValue) as refused:
        decode("/tmq/prod/x", json.dumps(value).encode(), kind)
    assert "/tmq/prod/x" in str(refused.value)
    assert why in str(refused.value)


def test_garbage_is_no_value() -> None:
    for data in (b"", b"{", b"[]", b"\xff"):
        with pytest.raises(BadValue):
            decode("k", data, Config)


def test_keys_lie_under_their_cluster() -> None:
    keys = Keys("prod")
    assert keys.node("a") == "/tmq/prod/nodes/a"
    assert [keys.lead(0), keys.want(7), keys.seen(12)] == [
        "/tmq/prod/shards/00/lead",
        "/tmq/prod/shards/07/want",
        "/tmq/prod/shards/12/seen",
    ]
    assert keys.audit(17, 2) < keys.audit(18, 1)
    for wrong in ("", "a/b", ".hidden", "a" * 65):
        with pytest.raises(InvalidArgument):
            Keys(wrong)
        with pytest.raises(InvalidArgument):
            keys.node(wrong)


def test_offsets_that_do_not_fit_are_counted() -> None:
    data = offsets(5, {f"t{n:05}": {"g" * 50: n} for n in range(10_000)})
    seen = decode("seen", data, SeenOffsets)
    assert len(data) <= 256 << 10
    assert seen.left_out == 10_000 - len(seen.topics) > 0
