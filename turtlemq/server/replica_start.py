"""The start of a replica process: it finds its cluster in etcd, waits until its node should have a copy, and locks its folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from pathlib import Path

from msgspec import structs

from turtlemq.errors import TurtleError
from turtlemq.replica.cluster_state import BadValue, Keys
from turtlemq.replica.link import Identity
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.shard_view import config_of, want_of
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart, connect
from turtlemq.server.config import Config
from turtlemq.server.peer_port import PeerPort
from turtlemq.server.replica_names import ReplicaNames
from turtlemq.server.replica_process import Copy, ReplicaProcess
from turtlemq.server.replication import SWITCH_S, address_of, log, take
from turtlemq.server.service import Service
from turtlemq.server.supervision import Report
from turtlemq.server.supervisor_line import SupervisorLine
from turtlemq.storage import names

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
        view = NamesView(etcd, Keys(options.name).prefix, log=log)
        part = service.cluster = ClusterPart(options, me.shard, etcd, view)
        start = _Start(config, me, options.url.rstrip("/") or url, part, service, files)
        line = SupervisorLine(start.report, stop.set, options.heartbeat_ms / 1000)
        beside = [asyncio.create_task(view.run()), asyncio.create_task(line.run())]
        try:
            return await start.run(stop, line)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


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
                return 1
            self._process = process
            stopped.add_done_callback(lambda task: None if task.cancelled() else process.stop())
            return await process.run()
        finally:
            stopped.cancel()
            self._port.close()

    async def _until_wanted(self) -> None:
        """Wait until the cluster is made, and this node should have a copy."""
        part, changed = self._part, asyncio.Event()
        part.view.changed.append(changed.set)
        told = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await changed.wait()
        while (why := self._obstacle()) is not None:
            if why != told:
                told = self._service.not_serving = why
                logs.info("waiting", why=why)
            changed.clear()
            await changed.wait()
        part.view.changed.remove(changed.set)

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
        if part.shard >= shape.shards:
            return f"there is no shard {part.shard}: the cluster has {shape.shards}"
        if want is None or part.options.node not in want.nodes:
            self._state = "spare"
            return f"node {part.options.node} is a spare: it has no copy."
        return None

    async def _make(self, line: SupervisorLine) -> ReplicaProcess | None:
        """Wait until this node should have a copy, lock its folder, bind its port. None: the folder cannot be used, and standard
        error says why."""
        await self._until_wanted()
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
