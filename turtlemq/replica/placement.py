"""Placement of shards on the nodes of a cluster: which nodes have a copy, which one leads, and the next step there. Pure.

Both questions are one: shards take nodes, each node costs more the more it has, and a move costs less than any imbalance. Shards
are assigned one unit after the other along the cheapest path (successive shortest paths of a minimum-cost flow), which may pass
units of earlier shards on. So the result is the most even one, and of those the one with the fewest moves. Ties are decided by
names: all callers get the same answer from the same facts.

>>> place(2, {"a": "", "b": "", "c": ""}, 2, {0: ["a", "b"], 1: ["b", "c"]})
{0: ('a', 'b'), 1: ('b', 'c')}
>>> leaders({0: ["a", "b"], 1: ["b", "c"]}, {0: "b", 1: "b"})
{0: 'a', 1: 'b'}
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

_MOVE = 1  # cost of a copy, or a leader, that has to be moved
_CROWDED = 1_000  # of the next shard on a node, for each that it has: more than all moves of a path
_SAME_ZONE = 1_000_000  # of another copy in a zone, for each that the shard has there: more than any load


class _Vertex(NamedTuple):
    """A shard, a shard in a zone, or a node."""

    shard: int = -1
    zone: str | None = None
    node: str = ""


_Edge = tuple[_Vertex, int]  # where to, at which cost


class _Assignment:
    """Nodes of shards, built one unit after the other. `choices`: the cost of each node that a shard may take, by shard.
    `closed`: nodes whose load costs nothing."""

    def __init__(self, choices: Mapping[int, Mapping[str, int]], zones: Mapping[str, str], closed: Collection[str] = ()) -> None:
        self.taken: dict[int, set[str]] = {shard: set() for shard in choices}
        self._choices, self._zones, self._closed = choices, zones, closed
        self._load: Counter[str] = Counter()
        self._in_zone: Counter[tuple[int, str]] = Counter()
        self._shards_of: dict[str, set[int]] = {}

    def give(self, shard: int) -> bool:
        """Give a shard one more node. False: there is none."""
        path = self._cheapest(_Vertex(shard))
        for here, there in pairwise(path):
            self._use(here, there)
        if path:
            self._load[path[-1].node] += 1
        return bool(path)

    def _use(self, here: _Vertex, there: _Vertex) -> None:
        """Send one unit along an edge: backwards, it is taken away."""
        if there.node:
            self._in_zone[here.shard, here.zone or ""] += 1
            self.taken[here.shard].add(there.node)
            self._shards_of.setdefault(there.node, set()).add(here.shard)
        elif here.node:
            self._in_zone[there.shard, there.zone or ""] -= 1
            self.taken[there.shard].remove(here.node)
            self._shards_of[here.node].remove(there.shard)

    def _cheapest(self, start: _Vertex) -> list[_Vertex]:
        """The cheapest path from a shard to a node that takes one unit more (Bellman-Ford with a queue); empty without any."""
        costs: dict[_Vertex, int] = {start: 0}
        before: dict[_Vertex, _Vertex] = {}
        queue, queued = deque([start]), {start}
        while queue:
            queued.discard(here := queue.popleft())
            for there, cost in self._edges(here):
                if there not in costs or costs[here] + cost < costs[there]:
                    costs[there], before[there] = costs[here] + cost, here
                    if there not in queued:
                        queue.append(there)
                        queued.add(there)
        ends = [(cost + self._crowding(vertex.node), vertex.node) for vertex, cost in costs.items() if vertex.node]
        if not ends:
            return []
        path = [_Vertex(node=min(ends)[1])]
        while path[-1] != start:
            path.append(before[path[-1]])
        return path[::-1]

    def _crowding(self, node: str) -> int:
        return 0 if node in self._closed else _CROWDED * (2 * self._load[node] + 1)

    def _edges(self, here: _Vertex) -> Iterator[_Edge]:
        if here.node:
            for shard in sorted(self._shards_of.get(here.node, ())):
                yield _Vertex(shard, self._zones[here.node]), -self._choices[shard][here.node]
        elif here.zone is None:
            for zone in sorted({self._zones[node] for node in self._choices[here.shard]}):
                yield _Vertex(here.shard, zone), _SAME_ZONE * (2 * self._in_zone[here.shard, zone] + 1)
        else:
            if count := self._in_zone[here.shard, here.zone]:
                yield _Vertex(here.shard), -_SAME_ZONE * (2 * count - 1)
            for node in sorted(self._choices[here.shard].keys() - self.taken[here.shard]):
                if self._zones[node] == here.zone:
                    yield _Vertex(node=node), self._choices[here.shard][node]


def place(
    shards: int,
    nodes: Mapping[str, str],
    replicas: int,
    current: Mapping[int, Sequence[str]],
    closed: Collection[str] = (),
) -> dict[int, tuple[str, ...]]:
    """The nodes that should have each shard. `nodes`: the zone of each; `closed`: those that keep their shards and take no more.

    Each shard has as many nodes as it can, in as many zones as there are, and the loads of nodes are as even as zones allow, by
    moves that are as few as possible. Nodes that stay come first, in their present order."""
    choices = {
        shard: {
            node: 0 if node in current.get(shard, ()) else _MOVE
            for node in nodes
            if node not in closed or node in current.get(shard, ())
        }
        for shard in range(shards)
    }
    assignment = _Assignment(choices, nodes, closed)
    for shard in range(shards):
        for _ in range(replicas):
            if not assignment.give(shard):
                break
    out = {}
    for shard, taken in assignment.taken.items():
        stay = [node for node in current.get(shard, ()) if node in taken]
        out[shard] = (*stay, *_turned(sorted(taken.difference(stay)), shard))
    return out


def _turned(names: list[str], by: int) -> list[str]:
    """Names in another order for each shard: the first node of a new shard leads it at first.

    >>> _turned(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    at = by % len(names) if names else 0
    return names[at:] + names[:at]


def leaders(able: Mapping[int, Collection[str]], current: Mapping[int, str]) -> dict[int, str]:
    """The node that should lead each shard, as evenly as possible, with the fewest changes. `able`: nodes with a copy in sync
    that may lead. A shard without any is left out."""
    choices = {
        shard: {node: 0 if node == current.get(shard) else _MOVE for node in sorted(nodes)}
        for shard, nodes in sorted(able.items())
    }
    zones = {node: "" for nodes in able.values() for node in nodes}
    assignment = _Assignment(choices, zones)
    return {shard: next(iter(assignment.taken[shard])) for shard in [shard for shard in choices if assignment.give(shard)]}


def step(
    want: Sequence[str], target: Sequence[str], in_sync: Collection[str], lead: str | None, most: int, may_add: bool = True
) -> tuple[str, ...]:
    """The nodes that a shard should have next, on the way to `target`: new ones are added before old ones go.

    A node with a copy in sync goes only when all of `target` is in sync, and when it does not lead: so the copies in sync are
    never fewer on the way. `lead`: the node that leads; `most`: nodes at once; `may_add`: begin copies on new nodes now.

    >>> step(["a", "b"], ["b", "c"], in_sync={"a", "b"}, lead="a", most=7)
    ('b', 'a', 'c')
    >>> step(["b", "a", "c"], ["b", "c"], in_sync={"a", "b", "c"}, lead="a", most=7)  # the leader has to hand over first
    ('b', 'c', 'a')
    >>> step(["b", "c", "a"], ["b", "c"], in_sync={"a", "b", "c"}, lead="b", most=7)
    ('b', 'c')
    """
    is_there = lead is not None and set(target) <= set(in_sync)
    kept = [node for node in want if node in target or (node in in_sync and (not is_there or node == lead))]
    kept.sort(key=lambda node: node not in target)
    added = [node for node in target if node not in kept] if may_add or not kept else []
    return (*kept, *added[: max(0, most - len(kept))])
