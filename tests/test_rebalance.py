"""The controller's decisions, played on a model of a cluster: nodes join, leave and die, and no copy that is needed ever goes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turtlemq.replica.cluster_state import Audit, Config, Keys, Lead, Node, ShardState, Want
from turtlemq.replica.cluster_view import ClusterView, ShardKeys
from turtlemq.replica.placement import place
from turtlemq.replica.rebalance import COPIES_MAX, LEADERS_MAX, REMOVE, wants

URL, PEER = "http://h:1", "h:2"


def node(zone: str = "") -> Node:
    return Node(url=URL, peer=PEER, zone=zone)


def audit(action: str) -> Audit:
    return Audit(at_ms=1, node="n", user="u", action=action)


@dataclass
class Model:
    """A cluster: leaders carry `want` out one change at a time, as `server.office` does."""

    shards: int
    replicas: int
    nodes: dict[str, Node] = field(default_factory=dict)
    drains: dict[str, Audit] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    keys: dict[int, ShardKeys] = field(default_factory=dict)
    moves: int = 0  # copies made

    def __post_init__(self) -> None:
        self.keys = {number: ShardKeys() for number in range(self.shards)}

    @property
    def view(self) -> ClusterView:
        config = Config(id="x", shards=self.shards, replicas=self.replicas, min_isr=1)
        return ClusterView(Keys("prod"), config, 1, dict(self.nodes), dict(self.drains), dict(self.keys))

    def control(self) -> bool:
        """The controller writes each `want` that should change. Returns whether there was any."""
        changes = wants(self.view, self.gone)
        for number, want in changes.items():
            before = self.keys[number]
            if before.state is not None:
                missing = set(before.in_sync.values()) - set(want.nodes)
                assert not missing or before.lead is not None
                assert before.lead is None or before.lead.node in want.nodes
            self.keys[number] = replace(before, want=want)
        return bool(changes)

    def act(self, chance: random.Random) -> None:
        """Each shard makes one change, if it has to."""
        for number in self.keys:
            self._act(number, chance)

    def _act(self, number: int, chance: random.Random) -> None:
        shard = self.keys[number]
        if shard.want is None:
            return
        in_sync = set(shard.in_sync.values())
        if shard.state is None:
            first = shard.want.nodes[0]
            if first in self.nodes:
                self._set(number, {first}, first)
            return
        lead = None if shard.lead is None or shard.lead.node not in self.nodes else shard.lead.node
        if lead is None:
            able = sorted(in_sync & self.nodes.keys())
            if able:
                self._set(number, in_sync, chance.choice(able))
            else:
                self.keys[number] = replace(shard, lead=None)
            return
        if away := sorted(in_sync - self.nodes.keys()):
            self._set(number, in_sync - {away[0]}, lead)
        elif (wish := shard.want.leader) in in_sync and wish != lead and wish is not None:
            self._set(number, in_sync, wish)
        elif unwanted := sorted(in_sync - set(shard.want.nodes) - {lead}):
            self._set(number, in_sync - {unwanted[0]}, lead)
        elif lead in self.drains and (others := sorted(in_sync & self.nodes.keys() - self.drains.keys())):
            self._set(number, in_sync, chance.choice(others))
        elif arrived := sorted((set(shard.want.nodes) - in_sync) & self.nodes.keys()):
            self.moves += 1
            self._set(number, in_sync | {arrived[0]}, lead)

    def _set(self, number: int, in_sync: set[str], lead: str) -> None:
        assert in_sync, "the last copy is gone"
        isr = tuple(sorted(in_sync))
        state = ShardState(epoch=1, leader=lead, isr=isr, nodes={name: name for name in isr}, nonce="")
        leads = Lead(epoch=1, replica=lead, node=lead, url=URL, peer=PEER) if lead in self.nodes else None
        self.keys[number] = replace(self.keys[number], state=state, lead=leads)

    def settle(self, seed: int = 0) -> None:
        """Go on until nothing changes any more."""
        chance = random.Random(seed)
        for _ in range(60 * self.shards):
            before = dict(self.keys)
            changed = self.control()
            copying = [
                n for n, s in self.keys.items() if s.state and (set(s.wanted) - set(s.in_sync.values())) & self.nodes.keys()
            ]
            assert len(copying) <= max(COPIES_MAX, sum(len(s.in_sync) < self.replicas for s in before.values()))
            self.act(chance)
            if not changed and self.keys == before:
                return
        raise AssertionError(f"it does not come to rest: {self.keys}")

    def copies(self) -> Counter[str]:
        return Counter(name for shard in self.keys.values() for name in shard.in_sync.values())

    def leads(self) -> Counter[str]:
        return Counter(shard.lead.node for shard in self.keys.values() if shard.lead is not None)

    def is_whole(self) -> bool:
        return all(set(s.in_sync.values()) == set(s.wanted) and len(s.in_sync) == self.replicas for s in self.keys.values())


def running(names: str, shards: int = 6, replicas: int = 2) -> Model:
    model = Model(shards, replicas, {name: node() for name in names})
    model.settle()
    return model


def spread(counts: Counter[str], names: str) -> int:
    return max(counts[name] for name in names) - min(counts[name] for name in names)


def test_a_new_cluster_is_even() -> None:
    model = running("abc")
    assert model.is_whole()
    assert spread(model.copies(), "abc") == spread(model.leads(), "abc") == 0
    assert not wants(model.view, set())


def test_nodes_that_come_one_by_one_share_as_well() -> None:
    model = Model(8, 2)
    for name in "abcd":
        model.nodes[name] = node()
        model.settle()
    assert model.is_whole()
    assert spread(model.copies(), "abcd") == spread(model.leads(), "abcd") == 0


def test_a_drained_node_leads_nothing_and_keeps_its_copies() -> None:
    model = running("abc")
    before = model.copies()["a"]
    model.drains["a"] = audit("drain")
    model.nodes["d"] = node()
    model.settle()
    assert model.leads()["a"] == 0
    assert model.copies()["a"] == before
    del model.drains["a"]
    model.settle()
    assert spread(model.leads(), "abcd") <= 1


def test_a_removed_node_gives_up_everything() -> None:
    model = running("abc")
    model.drains["a"] = audit(REMOVE)
    model.settle()
    assert model.is_whole()
    assert model.copies()["a"] == 0
    assert all("a" not in shard.wanted for shard in model.keys.values())


def test_a_lost_node_is_replaced_when_it_is_gone_for_long() -> None:
    model = running("abcd")
    del model.nodes["a"]
    model.settle()
    assert model.leads()["a"] == 0
    assert any("a" in shard.wanted for shard in model.keys.values())
    moves, before = model.moves, {number: shard.wanted for number, shard in model.keys.items()}
    model.gone = {"a"}
    model.settle()
    assert model.is_whole()
    assert model.copies()["a"] == 0
    least = place(6, dict.fromkeys("bcd", ""), 2, before)
    assert model.moves - moves == sum(len(set(least[number]) - set(row)) for number, row in before.items())


def test_a_lost_node_keeps_its_place_where_no_other_has_room() -> None:
    model = running("ab")
    del model.nodes["a"]
    model.gone = {"a"}
    model.settle()
    assert all(set(shard.wanted) == {"a", "b"} for shard in model.keys.values())


def test_copies_of_a_shard_are_in_different_zones() -> None:
    model = Model(6, 2, {"a": node("x"), "b": node("x"), "c": node("y"), "d": node("y")})
    model.settle()
    for shard in model.keys.values():
        assert {model.nodes[name].zone for name in shard.wanted} == {"x", "y"}


def test_few_leaders_move_at_the_same_time() -> None:
    model = running("ab", shards=12)
    model.drains["a"] = audit("drain")
    model.settle()
    del model.drains["a"]
    changes = wants(model.view, set())
    assert sum(want.leader == "a" for want in changes.values()) == LEADERS_MAX
    model.settle()
    assert spread(model.leads(), "ab") == 0


def test_a_shard_without_a_leader_is_left_to_its_election() -> None:
    model = running("abc")
    model.keys[0] = replace(model.keys[0], lead=None)
    changes = wants(model.view, set())
    assert changes[0] == Want(nodes=model.keys[0].wanted)
    assert set(model.keys[0].in_sync.values()) <= set(changes[0].nodes)


@pytest.mark.parametrize("seed", range(3))
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["join", "die", "drain", "undrain", "remove", "gone", "back"]), st.sampled_from("abcde")))
)
def test_any_history_comes_to_rest_and_keeps_all_copies(seed: int, history: list[tuple[str, str]]) -> None:
    model = running("abc", shards=4)
    chance = random.Random(seed)
    for what, name in history:
        alive = len(model.nodes.keys() - model.drains.keys())
        if what in ("join", "back"):
            model.nodes[name] = node()
            model.gone.discard(name)
        elif what in ("drain", "remove") and alive > 2 and name in model.nodes:
            model.drains[name] = audit(REMOVE if what == "remove" else "drain")
        elif what == "undrain":
            model.drains.pop(name, None)
        elif what == "die" and all(set(s.in_sync.values()) & model.nodes.keys() - {name} for s in model.keys.values()):
            model.nodes.pop(name, None)
        elif what == "gone" and name not in model.nodes:
            model.gone.add(name)
        for _ in range(chance.randrange(4)):  # the next thing happens in the middle
            model.control()
            model.act(chance)
    for name in "abc":  # all is well again, but for nodes that are gone for good
        model.nodes[name] = node()
    model.gone = set("de") - model.nodes.keys()
    model.drains.clear()
    model.settle(seed)
    assert model.is_whole()
    names = "".join(sorted(model.nodes))
    assert spread(model.copies(), names) <= 1
    assert spread(model.leads(), names) <= 1
