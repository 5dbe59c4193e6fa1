"""The supervisor of a cluster's node: it starts, watches and ends the process of the replica, and holds the node's key in etcd.

There is no engine in it. The replica process listens on sockets that the supervisor has bound, so that clients wait in the
backlog while it restarts. It reports over a socket pair: one JSON line every heartbeat, and at every change. When it has ended,
its lease in etcd is revoked, so that another replica need not wait for the end of the lease. A process that is silent for five
heartbeats is killed. If the supervisor is killed, the replica process reads the end of the socket pair, and ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from itertools import chain
from typing import Any, TypeVar

from turtlemq import __version__
from turtlemq.errors import InvalidArgument, TurtleError, describe
from turtlemq.replica.cluster_state import Node
from turtlemq.replica.etcd import Etcd, EtcdError
from turtlemq.segment.format import VERSION
from turtlemq.server import logs
from turtlemq.server.accept import LISTENING, LISTENING_GRPC, bind
from turtlemq.server.cluster_part import connect, grpc_address, public_url
from turtlemq.server.config import Config
from turtlemq.server.listen import BACKLOG
from turtlemq.server.node_folder import NodeFolder
from turtlemq.server.presence import Presence
from turtlemq.server.supervision import SUPERVISOR, Report, RestartPause, Silence, parse_report

STOP_S = 10.0  # for a replica process to hand over and to end; then it is killed
REVOKE_S = 0.2  # between two tries to revoke a lease
LAST_LINES_S = 0.5  # time for the last reports of a process that has ended
LOCK_CHECK_S = 1.0
WRONG_USE = 2  # exit code of a process that cannot use its configuration
T = TypeVar("T")


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
    stop = Stop()
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


class Stop:
    """SIGTERM and SIGINT: the first asks the replica process to end, the second kills it."""

    def __init__(self) -> None:
        self.is_asked, self.is_urgent = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _look_at_files)

    def _signalled(self) -> None:
        (self.is_urgent if self.is_asked.is_set() else self.is_asked).set()

    async def unless(self, work: Coroutine[Any, Any, None], event: asyncio.Event | None = None) -> bool:
        """Do something, unless a signal comes first. Returns whether it is done."""
        task = asyncio.create_task(work)
        waiting = asyncio.create_task((event or self.is_asked).wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            for one in (task, waiting):
                one.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)


class Child:
    """A replica process, and the last report that came from it."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket, beat_s: float) -> None:
        self.process, self.report = process, Report()
        self.started_s = time.monotonic()
        self.silence = Silence(beat_s, self.started_s)
        self._reading = asyncio.create_task(self._read(line))

    async def _read(self, line: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=line)
        try:
            while data := await reader.readline():
                report = parse_report(data)
                if report is None:
                    logs.warning("child_report_unreadable", pid=self.process.pid, line=data[:200])
                    continue
                self.report = report
                self.silence.heard(report.state)
        except (OSError, ValueError) as error:  # a line without an end
            logs.warning("child_report_unreadable", pid=self.process.pid, error=describe(error))
        finally:
            writer.close()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def watch(self, beat_s: float) -> int:
        """Wait for the end of the process, and kill it if it is silent. Returns its exit code; minus N: ended by signal N."""
        ending = asyncio.create_task(self.process.wait())
        try:
            while not ending.done():
                await asyncio.wait([ending], timeout=beat_s / 2)
                if not ending.done() and self.silence.is_over(time.monotonic()):
                    logs.error("child_silent_killed", pid=self.process.pid, state=self.report.state, epoch=self.report.epoch)
                    self.signal(signal.SIGKILL)
                    await ending
            return ending.result()
        finally:
            ending.cancel()

    async def last_lease(self) -> int:
        """The lease that the process told last. Requires: it has ended."""
        await asyncio.wait([self._reading], timeout=LAST_LINES_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        return self.report.lease


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
        ours, theirs = socket.socketpair()
        bound = {variable: [one.fileno() for one in sockets] for variable, sockets in self._sockets.items()}
        fds = [theirs.fileno(), *chain.from_iterable(bound.values())]
        own = {SUPERVISOR: str(fds[0]), **{variable: ",".join(map(str, numbers)) for variable, numbers in bound.items()}}
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.DEVNULL, pass_fds=fds, env=os.environ | own, process_group=0
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        logs.info("child_started", pid=process.pid)
        return Child(process, ours, self._beat_s)

    async def _run(self, child: Child) -> int:
        """Watch a process until it has ended, and revoke its lease. Returns its exit code."""
        watching = asyncio.create_task(child.watch(self._beat_s))
        if not await self._stop.unless(_done(watching)):
            await self._end(child, watching)
        code = await watching
        up_s = round(time.monotonic() - child.started_s, 3)
        how = {"signal": signal.Signals(-code).name} if code < 0 else {"code": code}
        is_good = code in (0, -signal.SIGTERM) and self._stop.is_asked.is_set()  # a process that starts has no handler yet
        (logs.info if is_good else logs.warning)("child_ended", pid=child.process.pid, **how, state=child.report.state, up_s=up_s)
        if not is_good and self._stop.is_asked.is_set():
            self._code = 1
        lease = await child.last_lease()
        if lease:
            task = asyncio.create_task(self._revoke(lease))
            self._revoking.add(task)
            task.add_done_callback(self._revoking.discard)
        return code

    async def _end(self, child: Child, watching: asyncio.Task[int]) -> None:
        """Ask the process to end; kill it if it takes too long, or at the second signal."""
        logs.info("stopping", pid=child.process.pid)
        child.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._stop.unless(_done(watching), self._stop.is_urgent)
        if not watching.done():
            logs.warning("child_killed", pid=child.process.pid, state=child.report.state)
            child.signal(signal.SIGKILL)

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


async def _done(task: asyncio.Task[T]) -> None:
    """Wait for a task without ending it."""
    await asyncio.wait([task])
