"""The controller of a cluster with several shards: one of the supervisors places shards, and moves them when nodes come and go.

The key `controller` tells which one; it hangs on the lease of that node. The controller only writes the `want` of shards, each
with a transaction that compares the keys from which it was decided (`replica.rebalance`). While there is none, nothing moves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from turtlemq.errors import TurtleError, describe
from turtlemq.replica.cluster_state import Keys, Want, encode
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import Etcd, create_revision_is, mod_revision_is, put
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.rebalance import wants
from turtlemq.server import logs
from turtlemq.server.supervision import Absences

LOOK_S = 0.5  # between two looks at the keys
RETRY_S = 2.0  # after a failure


class Controller:
    """Places the shards while this node holds the key `controller`. `lease`: of the node's key; 0: it has none now."""

    def __init__(
        self, etcd: Etcd, view: NamesView, keys: Keys, node: str, lease: Callable[[], int], replace_after_s: float
    ) -> None:
        self._etcd, self._view, self._keys, self._node, self._lease = etcd, view, keys, node, lease
        self._absences = Absences(replace_after_s)
        self._seen: object = None  # keys and absent nodes at the last decision
        self._failed = ""

    async def run(self) -> None:
        """Place shards until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._view.is_fresh and await self._holds():
                    await self._place()
                self._failed = ""
            except TurtleError as error:
                self._absences.forget()
                if self._failed != (why := describe(error)):
                    self._failed = why
                    logs.warning("controller_failed", error=why)
                await asyncio.sleep(RETRY_S)

    async def _holds(self) -> bool:
        """Whether this node is the controller. It becomes the controller if there is none. Raises `EtcdError`."""
        lease, held = self._lease(), self._view.keys.get(self._keys.controller)
        if held is not None or not lease:
            if held is None or held.lease != lease:
                self._absences.forget()
            return held is not None and held.lease == lease
        value = msgspec.json.encode({"node": self._node})
        key = self._keys.controller
        outcome = await self._etcd.transact([create_revision_is(key, 0)], [put(key, value, lease)])
        if outcome.succeeded:
            logs.info("controller", node=self._node)
        return False  # the watch tells

    async def _place(self) -> None:
        """Write each `want` that should be another one. Raises `EtcdError`, or `BadValue`."""
        view = ClusterView.of(self._keys, self._view.keys)
        wanted = {node for shard in view.shards.values() for node in shard.wanted}
        gone = frozenset(self._absences.gone(wanted, view.nodes.keys(), time.monotonic()))
        facts = _facts(view), gone
        if facts == self._seen:
            return
        for number, want in (await asyncio.to_thread(wants, view, gone)).items():
            if not await self._write(view, number, want):
                return  # the keys have changed: they are looked at again
        self._seen = facts

    async def _write(self, view: ClusterView, number: int, want: Want) -> bool:
        """Write the `want` of a shard. False: a key has changed meanwhile, and nothing was written."""
        shard, held = view.shards[number], self._view.keys.get(self._keys.controller)
        if held is None:
            return False
        compares = [
            create_revision_is(self._keys.controller, held.create_revision),
            mod_revision_is(self._keys.want(number), shard.want_revision),
            mod_revision_is(self._keys.state(number), shard.state_revision),
        ]
        outcome = await self._etcd.transact(compares, [put(self._keys.want(number), encode(want))])
        if outcome.succeeded:
            logs.info("placed", shard=number, nodes=",".join(want.nodes), leader=want.leader or "")
        return outcome.succeeded


def _facts(view: ClusterView) -> object:
    """The facts on which a placement depends."""
    nodes = {name: node.zone for name, node in view.nodes.items()}
    return nodes, view.drains, view.shards
