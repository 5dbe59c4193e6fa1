"""Replication in the server process: the leader's part around an engine, and the folder of a copy.

The data folder is locked here, once, for as long as the process runs: the engine gets a copy of the descriptor.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from turtlemq import backup
from turtlemq.logical_clock import LogicalClock, PeerAhead, PeerTime, number_at, time_of
from turtlemq.replica import arrivals, replica_file, ring_file
from turtlemq.replica.copy_source import CopySource
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.ferry import Ferry
from turtlemq.replica.healing import LeaderCare
from turtlemq.replica.lead import Lead
from turtlemq.replica.lead_types import LeadOptions
from turtlemq.replica.link import Identity
from turtlemq.replica.replica_file import ReplicaFacts, ReplicaFile
from turtlemq.replica.shipping import ShippingDoor
from turtlemq.replica.stream import Stream
from turtlemq.segment.format import VERSION
from turtlemq.server import logs
from turtlemq.server.clock import now_ms
from turtlemq.server.cluster_config import parse_address, read_secret, timing_hints, warn_if_readable
from turtlemq.server.config import Config
from turtlemq.server.peer_port import PeerPort
from turtlemq.server.peer_tls import peer_tls
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.file_budget import FileBudget
from turtlemq.storage.process_worker import ProcessWorker

FINISH_S = 2.0  # time for standbys to get the last records, once the server stops
LOCK_CHECK_S = 1.0
SWITCH_S = 0.001  # of the interpreter: the thread that applies records must soon get its turn
AHEAD_MS = 1_000  # added to the clock of a lost leader: its heartbeats were under way for a while, and clocks drift
_UNKNOWN_SHIFT = 40  # a stream whose beginning is not known begins far behind all records of earlier epochs


_LEVELS = dict.fromkeys(
    ("copy_not_trusted", "copy_damaged", "copied_damage", "copies_differ", "damaged_everywhere"), logs.error
) | dict.fromkeys(
    ("standby_refused", "standby_stopped", "refused_by_leader", "file_refused", "handover_failed", "scrub_failed"), logs.warning
)


def log(event: str, **fields: Any) -> None:
    """Log an event of replication."""
    _LEVELS.get(event, logs.info)(event, **fields)


def identity_of(config: Config, shard: int = 0) -> Identity:
    """The name of this node among its peers. Raises `InvalidArgument` if its secret or certificates cannot be read."""
    cluster = config.cluster
    secret = read_secret(cluster.secret_file)
    warn_if_readable(cluster.secret_file)
    for hint in timing_hints(cluster):
        logs.warning("cluster_timing", hint=hint)
    return Identity(cluster.name, shard, cluster.node, secret, peer_tls(cluster))


def door_of(config: Config) -> Door:
    return Door(folder_mode=int(config.data_mode, 8))


def address_of(config: Config, shard: int) -> tuple[str, int]:
    """Host and port on which the leader of a shard listens for standbys."""
    host, port = parse_address(config.cluster.peer)
    return host, port + shard


def take(config: Config, shard: int = 0) -> tuple[int, ReplicaFacts]:
    """Lock the data folder, and take the facts about the copy in it. Not on the event loop."""
    door, root = door_of(config), Path(config.data)
    door.make_folder(root)
    lock = door.lock(root / names.LOCK)
    try:
        arrivals.clear(door, root)
        backup.prepare_pins(door, root)
        return lock, replica_file.take(door, root, config.cluster.name, shard)
    except BaseException:
        os.close(lock)
        raise


def first_number(before: PeerTime, at_ms: int) -> int:
    """A number above all that the leader before has given, by its clock as this node has heard it: perhaps no copy has its last
    ones. Where that clock was too far ahead, this node's own counts."""
    clock = LogicalClock()
    clock.tick(at_ms)
    try:
        clock.merge(number_at(before.at(at_ms)), at_ms)
    except PeerAhead as error:
        logs.error("leader_clock_refused", error=str(error))
    return number_at(time_of(clock.now()) + AHEAD_MS)


class Leader:
    """The leader's part of a server process, from `begin` to `end`.

    `file`: the facts of the copy. `epoch`: in which it leads. `stream`: that of a standby that has ceased to follow, and leads
    from now on: its ring serves other standbys. None: it is not known which records the copy has."""

    def __init__(
        self,
        config: Config,
        me: Identity,
        lock: int,
        file: ReplicaFile,
        epoch: int,
        stream: Stream | None,
        *,
        required: Callable[[], Collection[str]],
        min_isr: int,
        before: PeerTime,
    ) -> None:
        """`required`: replicas whose copies an answer needs. `before`: the clock of the leader before this one."""
        self._config, self._lock, self._root = config, lock, Path(config.data)
        self._file, self._before = file, before
        cluster = config.cluster
        self.stream = stream or _unknown_stream(epoch, cluster.ring_bytes)
        self.stream.epoch = epoch
        options = LeadOptions(
            acks=cluster.acks,
            min_isr=min_isr,
            heartbeat_s=cluster.heartbeat_ms / 1000,
            lag_max_s=cluster.lag_max_s,
            format=VERSION,
        )
        self.lead = Lead(self.stream, me, options, required, own=file.facts.replica, log=log)
        self.examiner = Examiner(self._root)
        self.worker = Ferry(self.lead, self._root, ProcessWorker(), cluster.bulk_mb_per_s * 1e6, log=log)

    async def note(self) -> None:
        """Note durably that this copy leads: from now on its files are those that count."""
        facts = {"complete": True, "rebooted": False, "epoch": self.stream.epoch, "lsn": None, "chain": None}
        await asyncio.get_running_loop().run_in_executor(None, partial(self._file.write, **facts))

    def listen(self, port: PeerPort) -> None:
        """Accept standbys from now on."""
        self.lead.source = CopySource(self._root, self.stream, lambda: door_of(self._config))
        bulk = self._config.cluster.bulk_mb_per_s * 1e6
        self.care = LeaderCare(self.lead, self._root, self.examiner, bulk, log=log)
        self.care.distrust = self._distrust
        port.accepts = self.lead.accept
        self.lead.begin()

    def _distrust(self, paths: list[str]) -> None:
        """Note files of this copy that have damage: it compares them with those of the next leader."""
        self._file.write(suspect=tuple(sorted({*self._file.facts.suspect, *paths})), lsn=None, chain=None)

    def door(self, budget: FileBudget) -> Door:
        """The engine's Door."""
        mode = int(self._config.data_mode, 8)
        door = ShippingDoor(budget, stream=self.stream, root=self._root, folder_mode=mode)
        if self._config.cluster.acks == "local":
            door.seq_floor = first_number(self._before, now_ms())
        return door

    def lock(self) -> int:
        """The folder's lock, for the engine."""
        return os.dup(self._lock)

    def kill(self) -> None:
        """End the worker process, and wait until it has ended: it writes into the folder. Not on the event loop."""
        self.worker.kill()

    async def end(self, clean: bool, *, complete: bool = True) -> None:
        """Give the standbys the last records, and write down the position. `complete`: the files can be trusted. Requires: the
        engine is closed."""
        await self.lead.finish(FINISH_S)
        self.lead.close()
        await asyncio.get_running_loop().run_in_executor(None, self._release, clean, complete)

    def _release(self, clean: bool, complete: bool) -> None:
        try:
            if not complete:
                self._file.write(complete=False, lsn=None, chain=None)
            elif clean:
                door = door_of(self._config)
                replica_file.sync_all(door, self._root)
                ring_file.write(door, self._root, self.stream)
                self._file.write(lsn=self.stream.lsn, chain=self.stream.chain)
        finally:
            os.close(self._lock)


def _unknown_stream(epoch: int, ring_bytes: int) -> Stream:
    """The stream of a new leader whose position is not known, as after a crash: no standby can resume without a comparison."""
    chain = int.from_bytes(os.urandom(8), "little") | 1
    return Stream(epoch, epoch << _UNKNOWN_SHIFT, chain, ring_bytes=ring_bytes, lock=threading.Lock())
