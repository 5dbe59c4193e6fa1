"""Interventions by operators as plans: a forced leader runs by the ordinary rules, nodes go only when they are not needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from turtlemq.errors import Conflict, InvalidArgument, NotInSync, TurtleError, UnknownNode, UnknownShard
from turtlemq.replica.cluster_state import Audit, Config, Keys, Lead, Node, SeenOffsets, ShardState, Want, decode, encode
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.interventions import (
    CopyFacts,
    Plan,
    nodes_of,
    plan_drain,
    plan_force,
    plan_remove,
    plan_undrain,
    successor,
    target_of,
    unwanted,
)
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import Begin, BidAnswered, Do, Drained, Opened, PatienceOver, Seen, State

KEYS = Keys("prod")
BY = Audit(at_ms=1_000, node="here", user="me", action="test")
NODES = {"ra": "a", "rb": "b", "rc": "c"}


class Stored(NamedTuple):
    value: bytes
    mod_revision: int


def view(
    *,
    isr: tuple[str, ...] = ("ra", "rb"),
    leader: str = "ra",
    lead: str | None = "ra",
    alive: str = "abc",
    drained: str = "",
    want: tuple[str, ...] | None = ("a", "b", "c"),
    wish: str | None = None,
    min_isr: int = 1,
    epoch: int = 4,
    seen: int | None = None,
) -> ClusterView:
    values: dict[str, Any] = {KEYS.config: Config(id="x", shards=1, replicas=3, min_isr=min_isr)}
    values |= {KEYS.node(name): Node(url=f"http://{name}", peer=f"{name}:1") for name in alive}
    values |= {KEYS.drain(name): BY for name in drained}
    if epoch:
        values[KEYS.state(0)] = ShardState(epoch=epoch, leader=leader, isr=isr, nodes=NODES, nonce="n")
    if lead is not None:
        values[KEYS.lead(0)] = Lead(epoch=epoch, replica=lead, node=NODES[lead], url="http://x", peer="x:1")
    if want is not None:
        values[KEYS.want(0)] = Want(nodes=want, leader=wish)
    if seen is not None:
        values[KEYS.seen(0)] = SeenOffsets(lsn=seen, topics={})
    return ClusterView.of(KEYS, {key: Stored(encode(value), n) for n, (key, value) in enumerate(values.items(), 7)})


def state_of(plan: Plan) -> ShardState:
    return decode("state", plan.puts[KEYS.state(0)], ShardState)


# Drain and handover


def test_drain_is_noted_once_and_taken_back() -> None:
    plan = plan_drain(view(), "b", BY)
    assert plan == Plan({KEYS.drain("b"): 0}, {KEYS.drain("b"): encode(BY)})
    assert plan_drain(view(drained="b"), "b", BY) is None
    assert plan_undrain(view(), "b") is None
    assert plan_undrain(view(drained="b"), "b") == Plan({}, {}, (KEYS.drain("b"),))
    for node in ("z", "", "../x"):
        with pytest.raises(UnknownNode, match="it knows: a, b, c"):
            plan_drain(view(), node, BY)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),  # no reason
        ({"drained": "a"}, "rb"),
        ({"drained": "ab"}, None),  # no node that may lead
        ({"drained": "a", "alive": "ac"}, None),  # the supervisor of b is gone
        ({"drained": "a", "isr": ("ra", "rb", "rc")}, "rc"),  # which has most
        ({"drained": "a", "isr": ("ra", "rb", "rc"), "wish": "b"}, "rb"),
        ({"wish": "b"}, "rb"),
        ({"wish": "c"}, None),  # not in sync
        ({"wish": "a"}, None),
        ({"wish": "b", "drained": "b"}, None),
        ({"drained": "a", "isr": ("ra",)}, None),
    ],
)
def test_leader_hands_over_to_a_member_that_may_lead(given: dict[str, Any], wanted: str | None) -> None:
    assert successor(view(**given), 0, "a", {"rb": 5, "rc": 9}) == wanted
    assert successor(view(**given), 0, "a", {}) is None


def test_handover_goes_only_to_a_node_in_sync() -> None:
    assert target_of(view(), 0, "b") == "rb"
    with pytest.raises(Conflict, match="leads shard 0 already"):
        target_of(view(), 0, "a")
    with pytest.raises(NotInSync, match="in sync are: a, b"):
        target_of(view(), 0, "c")
    with pytest.raises(Conflict, match="undrain b"):
        target_of(view(drained="b"), 0, "b")
    with pytest.raises(UnknownNode):
        target_of(view(), 0, "z")
    with pytest.raises(UnknownShard, match="no shard 1: the cluster has 1"):
        target_of(view(), 1, "b")


# Remove


def test_a_node_that_is_gone_leaves_and_its_copy_follows() -> None:
    before = view(alive="ac", min_isr=2)
    plan = plan_remove(before, 0, "b", BY)
    assert plan is not None
    assert decode("want", plan.puts[KEYS.want(0)], Want) == Want(nodes=("a", "c"))
    assert plan.unchanged == {KEYS.want(0): before.shard(0).want_revision, KEYS.state(0): before.shard(0).state_revision}
    assert KEYS.drain("b") not in plan.puts
    assert KEYS.audit(1_000, 0) in plan.puts
    after = view(alive="ac", min_isr=2, want=("a", "c"))
    assert unwanted(after, 0) == {"rb": 1}
    assert nodes_of(after.shard(0), {"ra"}, NODES) == {"ra": "a", "rc": "c"}
    assert plan_remove(view(alive="ac", isr=("ra",), want=("a", "c")), 0, "b", BY) is None


def test_a_node_that_is_alive_is_drained_as_well() -> None:
    plan = plan_remove(view(wish="b"), 0, "b", BY)
    assert plan is not None
    assert KEYS.drain("b") in plan.puts
    assert unwanted(view(want=("a", "c"), min_isr=2), 0) == {"rb": 2}
    assert unwanted(view(), 0) == {}


@pytest.mark.parametrize(
    ("given", "node", "why"),
    [
        ({}, "a", "leads shard 0: 'turtlemq cluster drain a'"),
        ({"min_isr": 2}, "b", "1 copies in sync without node b, and min_isr is 2"),
        ({"want": ("b",)}, "b", "the only one"),
        ({"lead": None}, "b", "has no leader"),
        ({"lead": None, "alive": "bc"}, "a", "force-leader"),
        ({}, "z", "knows no node 'z'"),
    ],
)
def test_a_node_that_is_needed_stays(given: dict[str, Any], node: str, why: str) -> None:
    with pytest.raises(TurtleError, match=why):
        plan_remove(view(**given), 0, node, BY)


# Force a leader

LOST: dict[str, Any] = {"isr": ("ra",), "lead": None, "alive": "bc", "seen": 120}
COMPLETE = {"b": CopyFacts("rb", True, True, 4, 100), "c": CopyFacts("rc", False, True, 4)}


def test_force_makes_the_copy_the_only_one_in_sync() -> None:
    before = view(**LOST)
    forced = plan_force(before, 0, "b", COMPLETE, BY)
    state = state_of(forced.plan)
    assert (state.epoch, state.leader, state.isr, state.why) == (5, "rb", ("rb",), "forced")
    assert state.nodes == NODES
    assert forced.plan.unchanged == {KEYS.state(0): before.shard(0).state_revision, KEYS.lead(0): 0}
    audit = decode("audit", forced.plan.puts[KEYS.audit(1_000, 0)], Audit)
    assert audit.details["epoch"] == "5"
    told = " ".join(forced.losses)
    assert audit.details["loss"] == told
    for part in (
        "In sync were the copies of a:",
        "epoch 4",
        "last record is 100",
        "record 120",
        "At least 20 records are missing",
    ):
        assert part in told


def test_force_lifts_the_epoch_above_all_that_copies_have_seen() -> None:
    """Etcd was restored from an old copy, or begun anew: all replicas have stopped, the members of the old set, too."""
    newer = {"a": CopyFacts("ra", True, True, 9, None), "b": CopyFacts("rb", True, True, 8, 7)}
    old = plan_force(view(isr=("ra", "rb"), lead=None), 0, "a", newer, BY)
    assert state_of(old.plan).epoch == 10
    assert "its last record is not known" in " ".join(old.losses)
    anew = plan_force(view(epoch=0, lead=None), 0, "b", newer, BY)
    assert state_of(anew.plan).epoch == 10
    assert anew.plan.unchanged[KEYS.state(0)] == 0
    assert "No other copy was in sync" in " ".join(anew.losses)


@pytest.mark.parametrize(
    ("given", "node", "copies", "why"),
    [
        ({}, "b", COMPLETE, "has a leader, node a: use 'turtlemq cluster handover 0 b'"),
        (LOST, "a", COMPLETE, "does not answer"),
        (LOST, "b", {"b": CopyFacts("", False, True, 0)}, "does not answer"),
        (LOST, "c", COMPLETE, "not complete"),
        (LOST, "b", COMPLETE | {"a": CopyFacts("ra", True, True, 4, 1)}, "node a answers, and its copy is complete and in sync"),
        ({**LOST, "isr": ("ra", "rb")}, "b", COMPLETE, "node b answers"),
        (LOST, "z", COMPLETE, "knows no node"),
    ],
)
def test_force_is_refused(given: dict[str, Any], node: str, copies: dict[str, CopyFacts], why: str) -> None:
    with pytest.raises(TurtleError, match=why):
        plan_force(view(**given), 0, node, copies, BY)
    with pytest.raises(UnknownShard):
        plan_force(view(**given), 3, node, copies, BY)


def test_force_is_allowed_past_a_member_whose_disk_failed() -> None:
    broken = COMPLETE | {"a": CopyFacts("ra", False, True, 4)}
    assert plan_force(view(**LOST), 0, "b", broken, BY).epoch == 5
    sick = COMPLETE | {"a": CopyFacts("ra", True, False, 4)}
    assert plan_force(view(**LOST), 0, "b", sick, BY).epoch == 5


def seen(at: int, epoch: int, leader: str, isr: set[str], read: int = 0, lead: str | None = None, nonce: str = "n") -> Seen:
    return Seen(at, at, epoch, leader, frozenset(isr), nonce, lead, read=read)


def dos(actions: list[Any]) -> list[Do]:
    return [action.do for action in actions]


def test_the_forced_copy_runs_and_leads_by_the_rules() -> None:
    member = Member(me="rb", process="p", complete=True, epoch=4)
    assert dos(member.handle(Begin(), 0.5)) == [Do.READ]
    member.handle(seen(10, 4, "ra", {"ra"}, read=1), 0.5)
    assert dos(member.handle(PatienceOver(), 0.5)) == [Do.READ]
    assert member.handle(seen(10, 4, "ra", {"ra"}, read=member.reads), 0.5) == []  # it waits, as it is no member
    assert member.state.name == "ATTACH"
    forced = state_of(plan_force(view(**LOST), 0, "b", COMPLETE, BY).plan)
    change = seen(11, forced.epoch, forced.leader, set(forced.isr), nonce=forced.nonce)
    assert dos(member.handle(change, 0.5)) == [Do.NOTE_STATE, Do.STOP]
    assert dos(member.handle(Drained(), 0.5)) == [Do.BID]
    assert member.bid is not None
    assert (member.bid.epoch, member.bid.isr) == (6, frozenset({"rb"}))
    assert dos(member.handle(BidAnswered(True, member.bid.nonce), 0.5)) == [Do.NOTE, Do.OPEN]
    assert Do.SERVE in dos(member.handle(Opened(), 0.5))
    assert member.state.name == "LEAD"


def test_the_leader_of_before_is_deposed_by_the_forced_epoch() -> None:
    """It must not claim the key `lead` again, as it would if the epoch were the same."""
    old = Member(me="ra", process="q", complete=True, epoch=4, state=State.LEAD, term=4)
    assert dos(old.handle(seen(10, 4, "ra", {"ra"}), 0.5)) == [Do.NOTE_STATE, Do.CLAIM]
    forced = state_of(plan_force(view(**LOST), 0, "b", COMPLETE, BY).plan)
    assert dos(old.handle(seen(11, forced.epoch, forced.leader, set(forced.isr)), 0.5)) == [Do.NOTE_STATE, Do.EXEC]


def test_names_of_nodes_are_checked() -> None:
    for name in ("", "a/b", "-", "x" * 65):
        with pytest.raises(InvalidArgument):
            KEYS.drain(name)


def test_a_node_with_an_unreadable_value_counts_as_gone() -> None:
    broken = {KEYS.node("a"): Stored(b"{}", 1), KEYS.drain("b"): Stored(b"no", 2), KEYS.node("c"): Stored(b"", 3)}
    found = ClusterView.of(KEYS, {**broken, KEYS.seen(0): Stored(b"[]", 4)})
    assert (found.nodes, found.drains, found.shard(0).seen) == ({}, {}, None)
    with pytest.raises(TurtleError, match="state"):
        ClusterView.of(KEYS, {KEYS.state(0): Stored(b"{}", 1)})
