"""A node in etcd: it claims its name with a lease, tells its address and health under `nodes/ID`, and joins the shard.

The name is held by one supervisor at a time. A supervisor that was killed leaves the key until its lease ends; the next one on
the same folder knows that lease from the file NODE, and revokes it. While etcd is away, nothing here stops the replica process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from turtlemq.errors import InvalidArgument, TurtleError, describe
from turtlemq.replica.cluster_state import Config, Keys, KeyValue, Node, ShardState, Want, decode, encode
from turtlemq.replica.etcd import Etcd, EtcdError, LeaseGone, create_revision_is, mod_revision_is, put, read
from turtlemq.server import logs
from turtlemq.server.node_folder import NodeFolder
from turtlemq.server.supervision import Absences, NodeFacts, check_facts, joined, replaced

LEASE_S = 10  # of the node's key
REFRESH_S = 2.0  # between two puts of it: free space and clock change
TRY_S = 0.5  # between two tries, while etcd is away or the cluster is not made
REMIND_S = 30.0  # between two lines of the log about the same trouble
LEAVE_S = 2.0  # time to revoke the lease, once the node stops
Tell = Callable[[bool], Node]  # the value of the node's key; takes whether the node is being drained


class Presence:
    """The key of a node, and its place among the nodes of a shard."""

    def __init__(self, etcd: Etcd, cluster: str, node: str, folder: NodeFolder, replace_after_s: float, shard: int = 0) -> None:
        self._etcd, self._keys = etcd, Keys(cluster)
        self._absences = Absences(replace_after_s)
        self._cluster, self._node, self._shard, self.folder = cluster, node, shard, folder
        self._key = self._keys.node(node)
        self._lease = self._created = 0  # the lease of the key, and the revision that made it; 0: the key is not ours
        self._was_wanted = False  # once wanted, a node that is wanted no more was removed: it does not join again by itself
        self._is_away = False
        self.shards = 0  # of the cluster, once it is found
        self._reminded_s: dict[str, float] = {}  # by event

    @property
    def lease(self) -> int:
        """The lease of the node's key; 0: it has none now."""
        return self._lease

    # Start

    async def find_cluster(self) -> None:
        """Wait for etcd, and until the cluster is made. Raises `InvalidArgument` if the folder belongs to another one."""
        while True:
            try:
                values = await self._read()
                self._note_back()
                if self._config(values) is not None:
                    return
            except EtcdError as error:
                self._note_away(error)
            await asyncio.sleep(TRY_S)

    async def claim(self, tell: Tell) -> None:
        """Put the node's key for the first time. Raises `InvalidArgument` if another supervisor keeps a key of this name."""
        patience_s = LEASE_S + 2 * REFRESH_S
        end_s, seen = time.monotonic() + patience_s, 0
        while True:
            try:
                holder = await self._put(tell(False))
                self._note_back()
                if holder is None:
                    return
                if self.folder.facts is not None and holder.lease == self.folder.facts.lease:
                    await self._etcd.revoke(holder.lease)  # of the last supervisor on this folder, which has ended
                    continue
                if seen not in (0, holder.mod_revision) or time.monotonic() > end_s:
                    raise InvalidArgument(self._taken(holder))
                seen = holder.mod_revision
                self._remind("node_name_in_use", node=self._node, hint="waits for the lease of its last holder to end")
            except EtcdError as error:
                self._note_away(error)
                end_s, seen = time.monotonic() + patience_s, 0
            await asyncio.sleep(TRY_S)

    # Life

    async def run(self, tell: Tell) -> None:
        """Refresh the key until cancelled, put it again if its lease was lost, and join the shard when a place is free."""
        while True:
            try:
                await self._refresh(tell)
                self._note_back()
            except EtcdError as error:
                self._note_away(error)
            except (TurtleError, OSError) as error:
                self._remind("node_not_shown", error=describe(error))
            except Exception as error:  # noqa: BLE001 - a node that is not shown must not stop for that
                logs.error("node_not_shown", trace=error)
            await asyncio.sleep(REFRESH_S)

    async def leave(self) -> None:
        """Revoke the lease: the key of the node is gone."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._etcd.revoke(lease)
            except (EtcdError, TimeoutError):
                return  # it ends by itself

    async def _refresh(self, tell: Tell) -> None:
        values = await self._read()
        config = self._config(values)
        if config is None:
            return
        is_drained = self._keys.drain(self._node) in values
        if (holder := await self._put(tell(is_drained))) is not None:
            raise InvalidArgument(self._taken(holder))
        if not is_drained and config.shards == 1:  # the controller places several
            await self._join(config, values.get(self._keys.want(self._shard)))

    # Keys

    async def _read(self) -> dict[str, KeyValue]:
        """The keys that matter here, all at one revision."""
        wanted = self._keys.config, self._keys.drain(self._node), self._keys.want(self._shard)
        return {found.key: found for found in (await self._etcd.transact([], [read(key) for key in wanted])).found}

    def _config(self, values: dict[str, KeyValue]) -> Config | None:
        """The shape of the cluster, which is noted in the folder; None if there is none yet. Raises `InvalidArgument` if the
        folder belongs to another one."""
        found, facts = values.get(self._keys.config), self.folder.facts
        if found is None:
            hint = (
                f"etcd has no {self._keys.config}. Run `turtlemq cluster init` once, with the configuration of any node"
                if facts is None
                else f"etcd has lost {self._keys.config}, of which this node was a part: restore the data of etcd from a backup"
            )
            self._remind("cluster_not_found", cluster=self._cluster, hint=hint)
            return None
        config = decode(found.key, found.value, Config)
        self.shards = config.shards
        if facts is None:
            self.folder.note(NodeFacts(self._cluster, config.id, self._node))
        else:
            check_facts(facts, self._cluster, self._node, config, str(self.folder.root))
        return config

    async def _put(self, value: Node) -> KeyValue | None:
        """Put the node's key on its lease. Returns the key if it is another supervisor's. Raises `EtcdError`."""
        if self._lease and not await self._etcd.keep_alive(self._lease):
            self._lease = self._created = 0
        if not self._lease:
            self._lease = await self._etcd.grant(LEASE_S)
        for _ in range(3):
            try:
                outcome = await self._etcd.transact(
                    [create_revision_is(self._key, self._created)],
                    [put(self._key, encode(value), self._lease)],
                    [read(self._key)],
                )
            except LeaseGone:
                self._lease = self._created = 0
                raise
            if outcome.succeeded:
                self._note_put(self._created or outcome.revision)
                return None
            holder = next(iter(outcome.found), None)
            if holder is not None and holder.lease != self._lease:
                return holder
            self._created = holder.create_revision if holder else 0  # deleted, or put by a transaction without an answer
        return None  # deleted again and again: the next refresh puts it

    def _note_put(self, created: int) -> None:
        self._created = created
        facts = self.folder.facts
        if facts is None:
            return
        try:
            self.folder.note(NodeFacts(facts.cluster, facts.id, facts.node, self._lease))
        except (TurtleError, OSError) as error:  # a full disk: after a kill, the next start has to wait for the end of the lease
            self._remind("node_file_not_written", error=describe(error))

    def _taken(self, holder: KeyValue) -> str:
        other = decode(holder.key, holder.value, Node)
        return (
            f"another supervisor runs as node {self._node!r} of cluster {self._cluster!r}, at {other.url}. "
            "Stop it, or give this node another name (cluster.node) and a data folder of its own."
        )

    async def _join(self, config: Config, found: KeyValue | None) -> None:
        """Take a place among the nodes of the shard, if one is free and this node was not removed."""
        key = self._keys.want(self._shard)
        want = None if found is None else decode(key, found.value, Want)
        if want is not None and self._node in want.nodes:
            self._was_wanted = True
        if self._was_wanted:
            return
        more = joined(want, self._node, config.replicas)
        if more is None and want is not None:
            more = await self._replacement(want)
        if more is None:
            return
        outcome = await self._etcd.transact([mod_revision_is(key, found.mod_revision if found else 0)], [put(key, encode(more))])
        if outcome.succeeded:
            self._was_wanted = True
            logs.info("node_joined", shard=self._shard, nodes=",".join(more.nodes))

    async def _replacement(self, want: Want) -> Want | None:
        """The nodes of the shard with this spare in place of one that was away for too long; None if there is none."""
        nodes = {found.key.removeprefix(self._keys.nodes) for found in (await self._etcd.get(self._keys.nodes, prefix=True)).keys}
        gone = self._absences.gone(want.nodes, nodes, time.monotonic())
        if not gone:
            return None
        shard = {found.key: found for found in (await self._etcd.get(self._keys.shard(self._shard), prefix=True)).keys}
        state = shard.get(self._keys.state(self._shard))
        if state is None or self._keys.lead(self._shard) not in shard:
            return None
        more = replaced(want, decode(state.key, state.value, ShardState), gone, self._node)
        if more is not None:
            logs.warning("node_replaced", shard=self._shard, node=",".join(set(want.nodes) - set(more.nodes)), by=self._node)
        return more

    # Log

    def _note_away(self, error: EtcdError) -> None:
        self._is_away = True
        self._absences.forget()
        self._remind("name_server_away", error=describe(error))

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._reminded_s.pop("name_server_away", None)
            logs.info("name_server_back")

    def _remind(self, event: str, **fields: object) -> None:
        """Warn, and not more often than every REMIND_S."""
        now_s = time.monotonic()
        if now_s - self._reminded_s.get(event, -REMIND_S) >= REMIND_S:
            self._reminded_s[event] = now_s
            logs.warning(event, **fields)
