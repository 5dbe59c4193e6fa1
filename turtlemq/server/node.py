"""The supervisor of a cluster's node: it starts, watches and ends the process of the replica, and holds the node's key in etcd.

There is no engine in it. When the replica process has ended, its lease in etcd is revoked, so that another replica need not wait
for the end of the lease. A process that is silent for five heartbeats is killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
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
from turtlemq.server.presence import Presence
from turtlemq.server.supervision import Report, RestartPause

STOP_S = 10.0  # for a replica process to hand over and to end; then it is killed
REVOKE_S = 0.2  # between two tries to revoke a lease
LOCK_CHECK_S = 1.0
WRONG_USE = 2  # exit code of a process that cannot use its configuration


def run_node(config: Config, command: Sequence[str], shard: int = 0) -> int:
    """Run the supervisor until SIGTERM or SIGINT. `command`: of the replica process. Returns the exit code."""
    logs.set_up(config.log_format, config.log_level)
    os.umask(0o777 & ~int(config.data_mode, 8))
    try:
        return asyncio.run(_supervise(config, command, shard))
    except InvalidArgument:
        raise
    except TurtleError as error:
        print(f"Node {config.cluster.node} cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        logs.drain()


async def _supervise(config: Config, command: Sequence[str], shard: int) -> int:
    cluster, url, grpc = config.cluster, public_url(config), grpc_address(config)
    folder = NodeFolder(config)
    stop = Stop(_look_at_files)
    try:
        async with connect(cluster) as etcd:
            presence = Presence(etcd, cluster.name, cluster.node, shard, folder, cluster.replace_after_s)

            def tell(is_drained: bool) -> Node:
                free, clock_ms = folder.free_bytes(), time.time_ns() // 1_000_000
                facts: dict[str, Any] = {"zone": cluster.zone, "version": __version__, "format": VERSION, "drain": is_drained}
                return Node(url=url, peer=cluster.peer, grpc=grpc, free_bytes=free, clock_ms=clock_ms, **facts)

            try:
                if not await stop.unless(presence.find_cluster()) or not await stop.unless(presence.claim(tell)):
                    return 0
                sockets = await _bound(config)
                if sockets is None:
                    return 1
                logs.info("node_started", cluster=cluster.name, node=cluster.node, url=url, version=__version__, pid=os.getpid())
                supervisor = Supervisor(config, command, etcd, sockets, stop)
                return await _with_presence(supervisor, presence, tell, folder)
            finally:
                await presence.leave()
    finally:
        folder.close()


async def _bound(config: Config) -> dict[str, list[socket.socket]] | None:
    """The sockets of the node, by the variable that tells the replica process of them. None: a port is in use, as standard error
    says."""
    places = {LISTENING: (config.host, config.port)}
    if config.grpc_port >= 0:
        places[LISTENING_GRPC] = config.grpc_host or config.host, config.grpc_port
    out = dict[str, list[socket.socket]]()
    for variable, (host, port) in places.items():
        try:
            out[variable] = await bind(host, port, BACKLOG)
        except OSError as error:
            print(f"Cannot listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)
            return None
    return out


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
    """Starts replica processes one after the other, until it is asked to stop."""

    def __init__(
        self, config: Config, command: Sequence[str], etcd: Etcd, sockets: dict[str, list[socket.socket]], stop: Stop
    ) -> None:
        self._command, self._etcd, self._sockets, self._stop = command, etcd, sockets, stop
        self._beat_s, self._lease_s = config.cluster.heartbeat_ms / 1000, config.cluster.lease_s
        self._revoking: set[asyncio.Task[None]] = set()
        self._code = 0
        self._has_reported = False  # some replica process has

    async def run(self) -> int:
        """Keep a replica process running. Returns the exit code of the node."""
        pause = RestartPause()
        try:
            while not self._stop.is_asked.is_set():
                try:
                    child = await self._start()
                except OSError as error:  # no memory, or too many processes
                    logs.error("child_not_started", error=describe(error))
                    await self._stop.unless(asyncio.sleep(pause.after(0)))
                    continue
                code = await self._run(child)
                self._has_reported |= child.report != Report()
                if code == WRONG_USE and not self._has_reported:
                    return WRONG_USE  # the process has printed the reason
                pause_s = pause.after(time.monotonic() - child.started_s)
                await self._stop.unless(asyncio.sleep(pause_s))
            return self._code
        finally:
            for listening in chain.from_iterable(self._sockets.values()):
                listening.close()
            if self._revoking:
                await asyncio.wait(self._revoking, timeout=LAST_LINES_S)

    async def end_without_lock(self, folder: NodeFolder) -> None:
        """Stop the node if its folder may belong to another supervisor."""
        while await asyncio.sleep(LOCK_CHECK_S, folder.is_locked):
            pass
        logs.error("lock_lost", folder=folder.root)
        self._code = 1
        self._stop.is_asked.set()

    async def _start(self) -> Child:
        bound = {variable: [one.fileno() for one in sockets] for variable, sockets in self._sockets.items()}
        own = {variable: ",".join(map(str, numbers)) for variable, numbers in bound.items()}
        return await Child.start(self._command, own, list(chain.from_iterable(bound.values())), self._beat_s)

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
