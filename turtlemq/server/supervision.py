"""Decisions of a node's supervisor: signs of life of a replica process, pauses between restarts, the node's name, its place in a
shard. Pure.

>>> parse_report(b'{"state": "lead", "lease": 12, "epoch": 3, "new": 1}')
Report(state='lead', lease=12, epoch=3, lsn=0, replica='', complete=False, good=False, why='')
>>> parse_report(b"lead") is None
True
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from turtlemq.errors import InvalidArgument

if TYPE_CHECKING:  # a supervisor of local shards loads nothing of replication
    from turtlemq.replica.cluster_state import Config, ShardState, Want

SHARD_COUNT = "TURTLEMQ_SHARD_COUNT"  # variable of a replica process, in a cluster of several shards: how many there are
SUPERVISOR = "TURTLEMQ_SUPERVISOR"  # variable of a replica process: the descriptor of its line to the supervisor
RESTARTING = "exec"  # state of a replica process that is about to replace itself
QUIET_BEATS_MAX = 5  # heartbeats without a sign of life; then a replica process is killed
START_S_MAX = 30.0  # until the first sign of life of a replica process
PAUSE_S = 0.1, 5.0  # before a restart: the first, and the longest
STEADY_S = 10.0  # a replica process that ran for so long is restarted after the first pause


class Report(Struct, frozen=True):
    """A line from a replica process: its state, and the lease in etcd that must be revoked when it ends (0: none)."""

    state: str = ""
    lease: int = 0
    epoch: int = 0
    lsn: int = 0
    replica: str = ""
    complete: bool = False
    good: bool = False
    why: str = ""


def parse_report(line: bytes) -> Report | None:
    """A line of a replica process; None if it is no report."""
    try:
        return msgspec.json.decode(line, type=Report)
    except msgspec.DecodeError:
        return None


class Silence:
    """The time since the last sign of life, as far as the supervisor itself was running: a machine that was asleep has heard
    nothing, and must not kill a healthy process.

    >>> silence = Silence(beat_s=0.6, now_s=0)
    >>> silence.heard("follow"), [silence.is_over(0.3 * step) for step in range(1, 11)][-2:]
    (None, [False, True])
    >>> silence.heard("follow"), silence.is_over(1_000)  # one step counts for one heartbeat at most
    (None, False)
    """

    def __init__(self, beat_s: float, now_s: float) -> None:
        self._beat_s, self._last_s = beat_s, now_s
        self._quiet_s, self._max_s = 0.0, START_S_MAX

    def heard(self, state: str) -> None:
        """A report has come. A process that replaces itself has as much time as one that starts."""
        self._quiet_s = 0.0
        self._max_s = START_S_MAX if state == RESTARTING else QUIET_BEATS_MAX * self._beat_s

    def is_over(self, now_s: float) -> bool:
        """Has the process been silent for too long? Requires: called at least once in a heartbeat."""
        self._quiet_s += min(now_s - self._last_s, self._beat_s)
        self._last_s = now_s
        return self._quiet_s >= self._max_s - 1e-6


class RestartPause:
    """Pauses between the end of a replica process and its next start: they double while it ends soon.

    >>> pause = RestartPause()
    >>> [pause.after(up_s) for up_s in (1, 1, 1, 60, 1)]
    [0.1, 0.2, 0.4, 0.1, 0.2]
    """

    def __init__(self) -> None:
        self._next_s = PAUSE_S[0]

    def after(self, up_s: float) -> float:
        """The pause after a process that ran for so long."""
        pause_s = PAUSE_S[0] if up_s >= STEADY_S else self._next_s
        self._next_s = min(2 * pause_s, PAUSE_S[1])
        return pause_s


class NodeFacts(Struct, frozen=True):
    """The file NODE of a node's folder. `lease`: the last one on which the key of the node was put."""

    cluster: str
    id: str
    node: str
    lease: int = 0


def check_facts(facts: NodeFacts, cluster: str, node: str, config: Config, folder: str) -> None:
    """Raise `InvalidArgument` if a folder belongs to another node or cluster."""
    if (facts.cluster, facts.node) != (cluster, node):
        raise InvalidArgument(
            f"{folder} belongs to node {facts.node!r} of cluster {facts.cluster!r}, not to {node!r} of {cluster!r}. "
            "Correct cluster.name and cluster.node, or give this node a data folder of its own."
        )
    if facts.id != config.id:
        raise InvalidArgument(
            f"{folder} belongs to the cluster {cluster!r} with the id {facts.id}, but the one in etcd has the id {config.id}: "
            "cluster.etcd names another etcd, or its data was lost and `turtlemq cluster init` was run again. Correct "
            "cluster.etcd, or restore the data of etcd. To let this node join as a new one, give it an empty data folder; "
            "to go on with its copy in a cluster that was made anew, remove the file NODE from the folder."
        )


def joined(want: Want | None, node: str, replicas: int) -> Want | None:
    """The nodes of a shard with one more; None if it is among them already, or there are enough.

    >>> from turtlemq.replica.cluster_state import Want
    >>> joined(None, "a", 2)
    Want(nodes=('a',), leader=None)
    >>> joined(Want(nodes=("a",), leader="a"), "b", 2)
    Want(nodes=('a', 'b'), leader='a')
    >>> joined(Want(nodes=("a", "b")), "b", 3), joined(Want(nodes=("a", "b")), "c", 2)
    (None, None)
    """
    from turtlemq.replica.cluster_state import Want

    if want is None:
        return Want(nodes=(node,))
    if node in want.nodes or len(want.nodes) >= replicas:
        return None
    return Want(nodes=(*want.nodes, node), leader=want.leader)


class Absences:
    """Wanted nodes that are away, and since when, as a spare sees it.

    >>> absences = Absences(limit_s=600)
    >>> absences.gone({"a", "b"}, alive={"a"}, now_s=0), absences.gone({"a", "b"}, alive={"a"}, now_s=600)
    (set(), {'b'})
    >>> absences.gone({"a", "b"}, alive={"a", "b"}, now_s=601), absences.gone({"a", "b"}, alive={"a"}, now_s=602)
    (set(), set())
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: dict[str, float] = {}

    def gone(self, wanted: Collection[str], alive: Collection[str], now_s: float) -> set[str]:
        """Nodes that have been away for longer than the limit."""
        self._since_s = {name: self._since_s.get(name, now_s) for name in wanted if name not in alive}
        return {name for name, since_s in self._since_s.items() if now_s - since_s >= self._limit_s}

    def forget(self) -> None:
        """Begin anew: nodes may have been there meanwhile."""
        self._since_s.clear()


def replaced(want: Want, state: ShardState | None, gone: Collection[str], node: str) -> Want | None:
    """The nodes of a shard with a spare in place of one that is gone; None if there is none to be replaced. The node of a copy in
    sync is never replaced: it may be the only one with all answers. Requires: the shard has a leader.

    >>> from turtlemq.replica.cluster_state import ShardState, Want
    >>> state = ShardState(epoch=1, leader="r1", isr=("r1",), nodes={"r1": "a", "r2": "b"}, nonce="")
    >>> replaced(Want(nodes=("a", "b")), state, {"b"}, "c")
    Want(nodes=('a', 'c'), leader=None)
    >>> replaced(Want(nodes=("a", "b")), state, {"a"}, "c") is None
    True
    """
    from turtlemq.replica.cluster_state import Want

    if state is None or node in want.nodes:
        return None
    in_sync = {state.nodes[replica] for replica in state.isr}
    old = next((name for name in want.nodes if name in gone and name not in in_sync), None)
    if old is None:
        return None
    return Want(
        nodes=tuple(node if name == old else name for name in want.nodes), leader=None if want.leader == old else want.leader
    )
