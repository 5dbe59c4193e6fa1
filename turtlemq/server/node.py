"""The supervisor of a cluster's node: it starts, watches and ends the processes of replicas, and holds the node's key in etcd.

In a cluster of several shards there is one process for each shard of which the node has a copy, and for the first one: there is
always one that answers requests. All share the public port; each has a port of its own behind it. One of the supervisors is the
controller (`server.controller`).

There is no engine in a supervisor. When a replica process has ended, its lease in etcd is revoked, so that another replica need
not wait for the end of the lease. A process that is silent for five heartbeats is killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from turtlemq import __version__
from turtlemq.errors import InvalidArgument, TurtleError, describe
from turtlemq.replica.cluster_state import Node
from turtlemq.replica.etcd import Etcd, EtcdError
from turtlemq.segment.format import VERSION
from turtlemq.server import logs
from turtlemq.server.accept import LISTENING, LISTENING_GRPC, bind
from turtlemq.server.children import LAST_LINES_S, Child, Stop
from turtlemq.server.cluster_part import connect, grpc_address, public_url
from turtlemq.server.config import Config
from turtlemq.server.listen import BACKLOG
from turtlemq.server.node_folder import NodeFolder
from turtlemq.server.node_shards import Needs, check_shards, sharing
from turtlemq.server.presence import Presence
from turtlemq.server.supervision import SHARD_COUNT, Report, RestartPause

STOP_S = 10.0  # for a replica process to hand over and to end; then it is killed
REVOKE_S = 0.2  # between two tries to revoke a lease
LOCK_CHECK_S = 1.0
WRONG_USE = 2  # exit code of a process that cannot use its configuration


def run_node(config: Config, command: Callable[[int], Sequence[str]]) -> int:
    """Run the supervisor until SIGTERM or SIGINT. `command`: of the replica process of a shard. Returns the exit code."""
    logs.set_up(config.log_format, config.log_level)
    os.umask(0o777 & ~int(config.data_mode, 8))
    try:
        return asyncio.run(_supervise(config, command))
    except InvalidArgument:
        raise
    except TurtleError as error:
        print(f"Node {config.cluster.node} cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        logs.drain()


async def _supervise(config: Config, command: Callable[[int], Sequence[str]]) -> int:
    cluster, url, grpc = config.cluster, public_url(config), grpc_address(config)
    folder = NodeFolder(config)
    stop = Stop(_look_at_files)
    try:
        async with connect(cluster) as etcd:
            presence = Presence(etcd, cluster.name, cluster.node, folder, cluster.replace_after_s)

            def tell(is_drained: bool) -> Node:
                free, clock_ms = folder.free_bytes(), time.time_ns() // 1_000_000
                facts: dict[str, Any] = {"zone": cluster.zone, "version": __version__, "format": VERSION, "drain": is_drained}
                return Node(url=url, peer=cluster.peer, grpc=grpc, free_bytes=free, clock_ms=clock_ms, **facts)

            try:
                if not await stop.unless(presence.find_cluster()) or not await stop.unless(presence.claim(tell)):
                    return 0
                shards = presence.shards
                check_shards(config, shards)
                sockets = await _bound(config, shards)
                if sockets is None:
                    return 1
                logs.info("node_started", cluster=cluster.name, node=cluster.node, url=url, version=__version__, pid=os.getpid())
                supervisor = Supervisor(config, command, etcd, sockets, stop, shards)
                if shards == 1:
                    return await _with_presence(supervisor, presence, tell, folder)
                async with sharing(config, etcd, presence, supervisor.needs):
                    return await _with_presence(supervisor, presence, tell, folder)
            finally:
                await presence.leave()
    finally:
        folder.close()


@dataclass(frozen=True, slots=True)
class NodeSockets:
    """The sockets of a node, by the variable that tells a replica process of them: those that all processes share, and those of
    each shard."""

    shared: dict[str, list[socket.socket]]
    own: list[dict[str, list[socket.socket]]]

    def of(self, shard: int) -> dict[str, list[socket.socket]]:
        """The sockets of the process of a shard."""
        own = self.own[shard] if self.own else {}
        return {variable: [*self.shared.get(variable, ()), *own.get(variable, ())] for variable in {**self.shared, **own}}

    def close(self) -> None:
        for listening in chain.from_iterable(chain(*(each.values() for each in (self.shared, *self.own)))):
            listening.close()


async def _bound(config: Config, shards: int) -> NodeSockets | None:
    """The sockets of the node. None: a port is in use, as standard error says."""
    places = {LISTENING: (config.host, config.port)}
    if config.grpc_port >= 0:
        places[LISTENING_GRPC] = config.grpc_host or config.host, config.grpc_port
    sockets = NodeSockets({}, [])
    try:
        for variable, place in places.items():
            sockets.shared[variable] = await _bind(*place)
        for shard in range(shards if shards > 1 else 0):
            sockets.own.append({LISTENING: await _bind(config.host, config.port + 1 + shard)})
    except TurtleError as error:
        print(error, file=sys.stderr)
        sockets.close()
        return None
    return sockets


async def _bind(host: str, port: int) -> list[socket.socket]:
    try:
        return await bind(host, port, BACKLOG)
    except OSError as error:
        raise TurtleError(f"Cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _with_presence(supervisor: Supervisor, presence: Presence, tell: Any, folder: NodeFolder) -> int:
    beside = [asyncio.create_task(presence.run(tell)), asyncio.create_task(supervisor.end_without_lock(folder))]
    try:
        return await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


def _look_at_files() -> None:
    """SIGHUP asks for a reload. The replica process looks at its files itself, every few seconds, so there is nothing to do."""


class Supervisor:
    """Keeps the processes of replicas running, until it is asked to stop."""

    def __init__(
        self,
        config: Config,
        command: Callable[[int], Sequence[str]],
        etcd: Etcd,
        sockets: NodeSockets,
        stop: Stop,
        shards: int = 1,
    ) -> None:
        self._command, self._etcd, self._sockets, self._stop = command, etcd, sockets, stop
        self._beat_s, self._lease_s = config.cluster.heartbeat_ms / 1000, config.cluster.lease_s
        self._revoking: set[asyncio.Task[None]] = set()
        self._code = 0
        self._has_reported = False  # some replica process has
        self.needs = Needs(shards)

    async def run(self) -> int:
        """Keep the processes of all shards running that are needed here. Returns the exit code of the node."""
        try:
            codes = await asyncio.gather(*(self._keep(shard) for shard in range(self.needs.shards)))
            return max(self._code, *codes)
        finally:
            self._sockets.close()
            if self._revoking:
                await asyncio.wait(self._revoking, timeout=LAST_LINES_S)

    async def _keep(self, shard: int) -> int:
        """Keep the process of a shard running while it is needed. Returns WRONG_USE if it cannot even start."""
        pause = RestartPause()
        while await self._stop.unless(self.needs.until(shard)) and not self._stop.is_asked.is_set():
            try:
                child = await self._start(shard)
            except OSError as error:  # no memory, or too many processes
                logs.error("child_not_started", error=describe(error))
                await self._stop.unless(asyncio.sleep(pause.after(0)))
                continue
            code = await self._run(child)
            self._has_reported |= child.report != Report()
            if code == WRONG_USE and not self._has_reported:
                self._stop.is_asked.set()
                return WRONG_USE  # the process has printed the reason
            pause_s = pause.after(time.monotonic() - child.started_s)
            await self._stop.unless(asyncio.sleep(pause_s))
        return 0

    async def end_without_lock(self, folder: NodeFolder) -> None:
        """Stop the node if its folder may belong to another supervisor."""
        while await asyncio.sleep(LOCK_CHECK_S, folder.is_locked):
            pass
        logs.error("lock_lost", folder=folder.root)
        self._code = 1
        self._stop.is_asked.set()

    async def _start(self, shard: int) -> Child:
        bound = {variable: [one.fileno() for one in sockets] for variable, sockets in self._sockets.of(shard).items()}
        own = {variable: ",".join(map(str, numbers)) for variable, numbers in bound.items()}
        fields: dict[str, Any] = {}
        if self.needs.shards > 1:
            own[SHARD_COUNT], fields = str(self.needs.shards), {"shard": shard}
        return await Child.start(self._command(shard), own, list(chain.from_iterable(bound.values())), self._beat_s, **fields)

    async def _run(self, child: Child) -> int:
        """Watch a process until it has ended, and revoke its lease. Returns its exit code."""
        code, is_good = await child.until_end(self._stop, STOP_S)
        if not is_good and self._stop.is_asked.is_set():
            self._code = 1
        if child.report.lease:
            task = asyncio.create_task(self._revoke(child.report.lease))
            self._revoking.add(task)
            task.add_done_callback(self._revoking.discard)
        return code

    async def _revoke(self, lease: int) -> None:
        """Revoke the lease of a process that has ended. Not longer than it can last."""
        end_s = time.monotonic() + 2 * self._lease_s
        while time.monotonic() < end_s:
            try:
                await self._etcd.revoke(lease)
            except EtcdError:
                await asyncio.sleep(REVOKE_S)
            else:
                logs.info("lease_revoked", lease=lease)
                return
