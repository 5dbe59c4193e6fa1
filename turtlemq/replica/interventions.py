"""Plans for interventions by operators, and the leader's part in them: force a leader, remove a node, drain. Pure.

A plan is one transaction with the keys whose revisions it compares. Errors say why nothing was planned, and what to do.

**A forced leader** breaks the rule that only a member of the in-sync set leads (R7), once, by a change of the set: `state` gets
the chosen replica as its only member and as its leader, and the next epoch. Then the rules go on as they are:

- The chosen replica sees itself in the ISR, and `lead` is absent, so it runs by R7 when its wait is over, and is elected in the
  epoch behind the forced one. No process leads in the forced epoch itself: it has no nonce that a process knows.
- The epoch must rise. A leader of the epoch before that is cut off from etcd, and comes back, would else see its own epoch
  without `lead`, and claim it again (CLAIM) with a set that lacks it. So it is deposed (R8), compares its files, and keeps its
  diverging bytes in DIVERGED. If replicas have seen a higher epoch than etcd, which was restored from an old copy or begun anew,
  the forced epoch is above theirs: else they would stop (R8).
- The transaction compares the revision of `state` and the absence of `lead`. So it excludes an election, a change of the ISR
  and a CLAIM under way: the first of them wins, and all others are refused.
- Members that were in sync and are alive beyond a broken network can still answer each other's clients until they see the new
  epoch (promises hold without etcd). Those answers are lost as well: the operator must know that they are switched off.

Answers are lost that only the former members have. The chosen copy must be complete: it is the shard as it was at some record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from turtlemq.errors import Conflict, NotInSync, UnknownNode
from turtlemq.replica.cluster_state import Audit, ShardState, Want, encode
from turtlemq.replica.cluster_view import ClusterView, ShardKeys

FORCED = "forced"  # of `ShardState.why`, and the beginning of its nonce


class Plan(NamedTuple):
    """A transaction: IF all these keys have these mod_revisions (0: the key does not exist) THEN put and delete."""

    unchanged: dict[str, int]
    puts: dict[str, bytes]
    deletes: tuple[str, ...] = ()


class CopyFacts(NamedTuple):
    """Facts about a copy, as its process tells them."""

    replica: str
    complete: bool
    healthy: bool
    epoch: int  # the highest that it has heard of
    lsn: int | None = None  # of the last record that it has; None: not known
    state: str = ""  # of its state machine


class Forced(NamedTuple):
    """The transaction that forces a leader, and the loss that it accepts, in sentences."""

    plan: Plan
    epoch: int
    losses: list[str]


def check_node(view: ClusterView, node: str) -> None:
    """Raise `UnknownNode` for a node of which the cluster has never heard."""
    if node not in view.known_nodes:
        known = ", ".join(sorted(view.known_nodes)) or "none"
        raise UnknownNode(f"the cluster knows no node {node!r:.100}; it knows: {known}")


# ── drain ────────────────────────────────────────────────────────────────────────────────────────────────


def plan_drain(view: ClusterView, node: str, by: Audit) -> Plan | None:
    """Let a node lead nothing. None: it is drained already."""
    check_node(view, node)
    if node in view.drains:
        return None
    return Plan({view.keys.drain(node): 0}, {view.keys.drain(node): encode(by)})


def plan_undrain(view: ClusterView, node: str) -> Plan | None:
    """Let a drained node lead again. None: it is not drained."""
    if node not in view.drains:
        check_node(view, node)
        return None
    return Plan({}, {}, (view.keys.drain(node),))


def successor(view: ClusterView, number: int, node: str, applied: Mapping[str, int]) -> str | None:
    """The replica to which the leader of a shard, on `node`, should hand over now; None: it should go on, or there is none.

    It should hand over if its node is drained, or if `want` names another leader. `applied`: the LSN of each attached replica.
    Of several, the wanted leader comes first, then the one that has most."""
    shard = view.shard(number)
    wish = shard.want.leader if shard.want is not None else None
    if node not in view.drains and wish in (None, node):
        return None
    able = {
        replica: where
        for replica, where in shard.in_sync.items()
        if where != node and where not in view.drains and where in view.nodes and replica in applied
    }
    if node not in view.drains:
        able = {replica: where for replica, where in able.items() if where == wish}
    return min(able, key=lambda replica: (able[replica] != wish, -applied[replica], able[replica]), default=None)


def target_of(view: ClusterView, number: int, node: str) -> str:
    """The replica of a node to which a shard's leader can hand over. Raises if there is none."""
    shard = view.shard(number)
    check_node(view, node)
    if shard.lead is not None and shard.lead.node == node:
        raise Conflict(f"node {node} leads shard {number} already")
    members = shard.members_on(node)
    if not members:
        nodes = ", ".join(sorted(set(shard.in_sync.values()))) or "none"
        raise NotInSync(f"node {node} has no copy of shard {number} that is in sync; in sync are: {nodes}")
    if node in view.drains:
        raise Conflict(f"node {node} is drained: it should lead nothing. 'turtlemq cluster undrain {node}' first")
    return members[0]


# ── remove ───────────────────────────────────────────────────────────────────────────────────────────────


def plan_leave(view: ClusterView, node: str, by: Audit) -> Plan | None:
    """Let a node give up its copies of all shards, in a cluster with several: the controller makes them elsewhere first, and the
    node stays away until it is undrained. None: it does so already. Requires: the action of `by` is "remove"."""
    check_node(view, node)
    if (noted := view.drains.get(node)) is not None and noted.action == by.action:
        return None
    others, least = view.nodes.keys() - view.drains.keys() - {node}, view.config.min_isr if view.config is not None else 1
    if len(others) < least:
        raise Conflict(f"{len(others)} other nodes can have its copies, and min_isr is {least}: start another node first")
    return Plan({}, {view.keys.drain(node): encode(by), view.keys.audit(by.at_ms, 0): encode(by)})


def plan_remove(view: ClusterView, number: int, node: str, by: Audit) -> Plan | None:
    """Take a node out of the wanted ones of a shard; its leader then lets its replicas go (`unwanted`). A node that is alive is
    drained as well, so that it does not come back by itself. None: it has no part in the shard."""
    check_node(view, node)
    shard, config = view.shard(number), view.config
    alive, members = node in view.nodes, shard.members_on(node)
    if shard.want is None or (node not in shard.wanted and not members):
        return None
    rest = tuple(other for other in shard.wanted if other != node)
    if not rest:
        raise Conflict(f"node {node} is the only one that should have shard {number}: start another node first")
    _check_may_go(shard, number, node)
    left = len(shard.in_sync) - len(members)
    if alive and members and config is not None and left < config.min_isr:
        raise Conflict(
            f"shard {number} would have {left} copies in sync without node {node}, and min_isr is {config.min_isr}: wait until "
            "another node is in sync. A node that is gone for good can be removed when its process has ended."
        )
    wish = shard.want.leader if shard.want.leader in rest else None
    puts = {view.keys.want(number): encode(Want(nodes=rest, leader=wish))}
    if alive:
        puts[view.keys.drain(node)] = encode(by)
    puts[view.keys.audit(by.at_ms, 0)] = encode(by)
    return Plan({view.keys.want(number): shard.want_revision, view.keys.state(number): shard.state_revision}, puts)


def _check_may_go(shard: ShardKeys, number: int, node: str) -> None:
    if shard.lead is not None and shard.lead.node == node:
        raise Conflict(f"node {node} leads shard {number}: 'turtlemq cluster drain {node}' first")
    if shard.members_on(node) and shard.lead is None:
        raise Conflict(
            f"shard {number} has no leader, and node {node} has a copy that is in sync: start that node. If it is lost for good, "
            f"see 'turtlemq cluster force-leader --help'."
        )


def unwanted(view: ClusterView, number: int) -> dict[str, int]:
    """Replicas in the ISR whose nodes were removed, each with the number of members that must be left when it goes: `min_isr`,
    or 1 if its node is gone, since no answer can come from there."""
    shard, config = view.shard(number), view.config
    if shard.want is None or config is None:
        return {}
    return {
        replica: config.min_isr if node in view.nodes else 1
        for replica, node in shard.in_sync.items()
        if node not in shard.wanted
    }


def nodes_of(shard: ShardKeys, isr: frozenset[str] | set[str], known: Mapping[str, str]) -> dict[str, str]:
    """The field `nodes` of the next `state`: members, and other replicas on nodes that should have a copy."""
    return {replica: node for replica, node in known.items() if replica in isr or node in shard.wanted}


# ── force a leader ───────────────────────────────────────────────────────────────────────────────────────


def plan_force(view: ClusterView, number: int, node: str, copies: Mapping[str, CopyFacts], by: Audit) -> Forced:
    """Make the copy of a node the only one in sync. `copies`: those whose processes answer, by node."""
    shard = view.shard(number)
    check_node(view, node)
    copy = copies.get(node)
    _check_may_force(shard, number, node, copies)
    assert copy is not None
    epoch = 1 + max([shard.state.epoch if shard.state else 0, *(each.epoch for each in copies.values())])
    known = dict(shard.state.nodes) if shard.state else {}
    state = ShardState(
        epoch=epoch,
        leader=copy.replica,
        isr=(copy.replica,),
        nodes={**known, copy.replica: node},
        nonce=f"{FORCED}/{by.at_ms}",
        why=FORCED,
        at_ms=by.at_ms,
    )
    keys, losses = view.keys, _losses(shard, node, copy)
    audit = Audit(
        at_ms=by.at_ms,
        node=by.node,
        user=by.user,
        action=by.action,
        details={**by.details, "epoch": str(epoch), "replica": copy.replica, "loss": " ".join(losses)[:1_000]},
    )
    unchanged = {keys.state(number): shard.state_revision, keys.lead(number): 0}
    return Forced(Plan(unchanged, {keys.state(number): encode(state), keys.audit(by.at_ms, 0): encode(audit)}), epoch, losses)


def _check_may_force(shard: ShardKeys, number: int, node: str, copies: Mapping[str, CopyFacts]) -> None:
    copy, state = copies.get(node), shard.state
    if shard.lead is not None:
        raise Conflict(f"shard {number} has a leader, node {shard.lead.node}: use 'turtlemq cluster handover {number} {node}'")
    if copy is None or not copy.replica:
        raise Conflict(f"node {node} does not answer: start it first, so that it can lead")
    if not copy.complete:
        raise Conflict(
            f"the copy of node {node} is not complete: its files were being replaced, or its disk has failed. Choose another."
        )
    went_back = any(each.epoch > (state.epoch if state else 0) for each in copies.values())
    able = [
        other
        for other, each in copies.items()
        if state is not None and each.replica in state.isr and each.complete and each.healthy
    ]
    if able and not went_back:
        raise Conflict(
            f"node {min(able)} answers, and its copy is complete and in sync: it is elected by itself within seconds, and "
            "nothing is lost. If it must not lead, stop it first."
        )


def _losses(shard: ShardKeys, node: str, copy: CopyFacts) -> list[str]:
    """Sentences about the records that may be lost."""
    others = sorted({where for replica, where in shard.in_sync.items() if replica != copy.replica})
    said = []
    if others:
        said.append(f"In sync were the copies of {', '.join(others)}: answers that only they have are lost.")
    else:
        said.append("No other copy was in sync, as far as the name server knows.")
    has = "its last record is not known" if copy.lsn is None else f"its last record is {copy.lsn:,}"
    said.append(f"The copy of {node} has heard of epoch {copy.epoch}, and {has}.")
    if shard.seen is not None:
        said.append(f"The last that a leader wrote down about itself was record {shard.seen.lsn:,}; there may have been more.")
        if copy.lsn is not None and copy.lsn < shard.seen.lsn:
            said.append(f"At least {shard.seen.lsn - copy.lsn:,} records are missing in this copy.")
    return said
