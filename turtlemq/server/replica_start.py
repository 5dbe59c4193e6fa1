"""The start of a replica process: it finds its cluster in etcd, waits until its node should have a copy, and locks its folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import structs

from turtlemq.errors import TurtleError, describe
from turtlemq.replica.cluster_state import BadValue, Keys
from turtlemq.replica.link import Identity
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.shard_view import config_of, state_of, want_of
from turtlemq.replica.topology import shard_url
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart, connect
from turtlemq.server.config import Config
from turtlemq.server.node_folder import has_copy, remove_copy
from turtlemq.server.peer_port import PeerPort
from turtlemq.server.replica_names import ReplicaNames
from turtlemq.server.replica_process import Copy, ReplicaProcess
from turtlemq.server.replication import SWITCH_S, address_of, log, take
from turtlemq.server.service import Service
from turtlemq.server.supervision import Report
from turtlemq.server.supervisor_line import SupervisorLine, shard_count
from turtlemq.storage import names

SPARE = "spare"
FIRST_READ_S = 1.0  # time for etcd to answer, before a process says that it waits


def folder_of(config: Config, shard: int) -> Path:
    """The data folder of a shard's replica."""
    return Path(config.data) / names.SHARDS / f"{shard:02}"


async def run_replica(config: Config, me: Identity, url: str, service: Service, stop: asyncio.Event, files: int) -> int:
    """Be a replica until `stop` is set. `url`: where this process listens. Returns the exit code of the process."""
    gc.collect()
    gc.freeze()  # modules live as long as the process: the collection before an engine is opened leaves them out
    options = config.cluster
    async with connect(options) as etcd:
        view, shards = NamesView(etcd, Keys(options.name).prefix, log=log), shard_count()
        part = service.cluster = ClusterPart(options, me.shard, etcd, view, shards)
        url = options.url.rstrip("/") or url
        start = _Start(config, me, url if shards == 1 else shard_url(url, me.shard), part, service, files)
        line = SupervisorLine(start.report, stop.set, options.heartbeat_ms / 1000)
        beside = [asyncio.create_task(view.run()), asyncio.create_task(line.run())]
        try:
            async with routing(service, part):
                return await start.run(stop, line)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


@asynccontextmanager
async def routing(service: Service, part: ClusterPart) -> AsyncIterator[None]:
    """Pass requests on to other shards, if there are several."""
    if part.shards == 1:
        yield
        return
    from turtlemq.server.cluster_router import ClusterRouter

    router = service.router = ClusterRouter(service, part)
    try:
        yield
    finally:
        await service.stop_listening()
        await router.close()


class _Start:
    """A process that has no copy yet, and then its replica."""

    def __init__(self, config: Config, me: Identity, url: str, part: ClusterPart, service: Service, files: int) -> None:
        self._config, self._me, self._url, self._part, self._service, self._files = config, me, url, part, service, files
        self._port = PeerPort(*address_of(config, me.shard), me.tls.accepts)
        self._process: ReplicaProcess | None = None
        self._state = "start"

    def report(self) -> Report:
        if self._process is not None:
            return self._process.report()
        return Report(self._state, good=not self._port.why, why=self._port.why)

    async def run(self, stop: asyncio.Event, line: SupervisorLine) -> int:
        stopped = asyncio.create_task(stop.wait())
        try:
            making = asyncio.create_task(self._make(line))
            await asyncio.wait([making, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                making.cancel()
                return 0
            process = making.result()
            if process is None:
                return 0 if self._state == SPARE else 1
            self._process = process
            stopped.add_done_callback(lambda task: None if task.cancelled() else process.stop())
            return await process.run()
        finally:
            stopped.cancel()
            self._port.close()

    async def _until_wanted(self) -> bool:
        """Wait until the cluster is made, and this node should have a copy. False: this process is not needed any more."""
        part, changed = self._part, asyncio.Event()
        part.view.changed.append(changed.set)
        told = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await changed.wait()
        while True:
            changed.clear()
            if (why := self._obstacle()) is None:
                break
            if why != told:
                told = self._service.not_serving = why
                logs.info("waiting", why=why)
            if self._state == SPARE and part.shards > 1 and await self._has_no_copy() and part.shard:
                return False
            await changed.wait()
        part.view.changed.remove(changed.set)
        return True

    async def _has_no_copy(self) -> bool:
        """Remove the copy that this node should not have any more, if the shard does without it. True: there is none."""
        part, folder = self._part, folder_of(self._config, self._part.shard)
        if not await asyncio.to_thread(has_copy, folder):
            return True
        try:
            await part.view.read()  # the watch may be behind
            if self._obstacle() is None or self._state != SPARE or part.leader_url() is None:
                return False
            await asyncio.to_thread(remove_copy, folder)
        except (TurtleError, OSError) as error:
            logs.warning("copy_not_removed", folder=folder, error=describe(error))
            return False
        logs.info("copy_removed", folder=folder)
        return True

    def _obstacle(self) -> str | None:
        part = self._part
        try:
            shape, want = config_of(part.view.keys, part.keys), want_of(part.view.keys, part.keys, part.shard)
        except BadValue as error:
            return str(error)
        if not part.view.revision:
            return "the name server (etcd) does not answer. Try again in a moment."
        if shape is None:
            return f"cluster {part.options.name!r} does not exist in etcd: make it with 'turtlemq cluster init'."
        if part.shard >= shape.shards or part.shards != shape.shards:
            return f"there is no shard {part.shard} of {part.shards}: the cluster has {shape.shards}"
        if (want is None or part.options.node not in want.nodes) and not self._is_member():
            self._state = SPARE
            return f"node {part.options.node} is a spare: it has no copy."
        self._state = "start"
        return None

    def _is_member(self) -> bool:
        """Whether this node has a copy in sync, of one of several shards: then it may be needed, even if it is wanted no more."""
        part = self._part
        state = state_of(part.view.keys, part.keys, part.shard) if part.shards > 1 else None
        return state is not None and part.options.node in {state.nodes[replica] for replica in state.isr}

    async def _make(self, line: SupervisorLine) -> ReplicaProcess | None:
        """Wait until this node should have a copy, lock its folder, bind its port. None: it is a spare, or the folder cannot be
        used, and standard error says why."""
        if not await self._until_wanted():
            return None
        config, part, shard = self._config, self._part, self._me.shard
        own = structs.replace(config, data=str(folder_of(config, shard)))
        try:
            lock, facts = await asyncio.get_running_loop().run_in_executor(None, take, own, shard)
        except (TurtleError, OSError) as error:
            print(f"Cannot use the data folder {own.data}: {error}", file=sys.stderr)
            return None
        sys.setswitchinterval(SWITCH_S)
        await self._port.open(lambda why: self._hold_up(why, line))
        part.refusal = ""
        requests = ReplicaNames(part, facts.replica, self._url, self._port.address, self._service.meter.etcd)
        copy = Copy(lock, facts, self._files)
        process = ReplicaProcess(own, self._me, part, self._service, requests, self._port, copy, line)
        logs.info("replica", replica=facts.replica, complete=facts.complete, epoch=facts.epoch, lsn=facts.lsn, pid=os.getpid())
        self._service.not_serving = "this server does not lead. Try again in a moment."
        return process

    def _hold_up(self, why: str, line: SupervisorLine) -> None:
        """Tell clients and the supervisor why this node has no copy yet."""
        self._service.not_serving = self._part.refusal = why
        line.tell()
