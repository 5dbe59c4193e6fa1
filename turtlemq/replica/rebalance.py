"""The controller's decisions: the next `want` of each shard of a cluster, from its keys. Pure.

A placement (`replica.placement`) says where shards should be in the end; here are the steps there. Nothing of it decides about
safety: the leader of a shard carries a `want` out with transactions of its own (R3 and R4 of `replica.membership`), and by
handovers.

- A node that joins gets its part of the shards. One that is drained leads nothing and gets no other ones. One that is being
  removed has to give up all of its shards. One that is away keeps them until it counts as gone, and as long as there are too few
  others.
- New copies are made before old ones go, few at a time. Leaders are moved few at a time as well, and for evenness only while no
  copy is being made: each handover costs the old leader a start, and a machine with much to do must not get more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from turtlemq.replica.cluster_state import REPLICAS_MAX, Want
from turtlemq.replica.cluster_view import ClusterView, ShardKeys
from turtlemq.replica.placement import leaders, place, step

REMOVE = "remove"  # action of a drain: all copies of the node go
COPIES_MAX = 4  # shards that get a new copy at the same time
LEADERS_MAX = 2  # shards that change their leader at the same time


class _Nodes(NamedTuple):
    """Nodes that may have shards, each with its zone, and those of them that get no more."""

    zones: dict[str, str]
    closed: frozenset[str]


def removed_nodes(view: ClusterView) -> set[str]:
    """Nodes that an operator takes out of the cluster."""
    return {node for node, audit in view.drains.items() if audit.action == REMOVE}


def _nodes(view: ClusterView, gone: Collection[str]) -> _Nodes:
    assert view.config is not None
    removed = removed_nodes(view)
    alive = view.nodes.keys() - removed
    holders = {node for shard in view.shards.values() for node in shard.wanted} - removed
    open_ = alive - view.drains.keys()
    away = holders - alive
    if len(open_) >= view.config.replicas:  # else there is no other place for its copies
        away -= set(gone)
    zones = {node: view.nodes[node].zone if node in view.nodes else "" for node in sorted(alive | away)}
    return _Nodes(zones, frozenset(zones.keys() - open_))


def wants(view: ClusterView, gone: Collection[str]) -> dict[int, Want]:
    """The shards whose `want` should change now, with the next one. `gone`: nodes that were away for too long."""
    if view.config is None:
        return {}
    nodes = _nodes(view, gone)
    if not nodes.zones.keys() - nodes.closed:
        return {}
    current = {number: shard.wanted for number, shard in view.shards.items()}
    target = place(view.config.shards, nodes.zones, view.config.replicas, current, nodes.closed)
    where = _next_nodes(view, target)
    led = _next_leaders(view, where, target)
    made = {number: Want(nodes=row, leader=led.get(number)) for number, row in where.items() if row}
    return {number: want for number, want in made.items() if want != view.shards[number].want}


def _in_sync(shard: ShardKeys) -> frozenset[str]:
    return frozenset(shard.in_sync.values())


def _next_nodes(view: ClusterView, target: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    """The nodes of each shard after one step. Shards with the fewest copies in sync come first."""
    copying = sum(bool(_copying(view, shard)) for shard in view.shards.values())
    out = {}
    for number, shard in sorted(view.shards.items(), key=lambda item: (len(_in_sync(item[1])), item[0])):
        if shard.state is None:
            out[number] = target[number]
            continue
        lead = None if shard.lead is None else shard.lead.node
        may_add = bool(_copying(view, shard)) or copying < COPIES_MAX
        out[number] = step(shard.wanted, target[number], _in_sync(shard), lead, REPLICAS_MAX, may_add)
        copying += may_add and not _copying(view, shard) and not {*out[number]} <= {*shard.wanted}
    return out


def _copying(view: ClusterView, shard: ShardKeys) -> set[str]:
    """Nodes on which a copy of a shard is being made."""
    return set() if shard.state is None else ({*shard.wanted} - _in_sync(shard)) & view.nodes.keys()


def _next_leaders(view: ClusterView, where: dict[int, tuple[str, ...]], target: dict[int, tuple[str, ...]]) -> dict[int, str]:
    """The node that should lead each shard; none for a shard without a leader, which elects one."""
    current = {number: shard.lead.node for number, shard in view.shards.items() if shard.lead is not None}
    able = {number: _able(view, number, where[number], target[number]) for number in current}
    is_calm = not any(_copying(view, shard) for shard in view.shards.values())
    moves = 0
    out = {}
    for number, node in leaders(able, current).items():
        want = view.shards[number].want
        is_begun = want is not None and want.leader == node
        may_move = is_calm or current[number] not in able[number]
        moves += may_move and node != current[number]
        out[number] = node if may_move and (is_begun or moves <= LEADERS_MAX) else current[number]
    return {number: node for number, node in out.items() if node in where[number]}


def _able(view: ClusterView, number: int, nodes: tuple[str, ...], target: tuple[str, ...]) -> list[str]:
    """Nodes that may lead a shard: alive, in sync, not drained; those that keep it, if there are any."""
    in_sync = _in_sync(view.shards[number])
    able = [node for node in nodes if node in in_sync and node in view.nodes and node not in view.drains]
    return [node for node in able if node in target] or able
