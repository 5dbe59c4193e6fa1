"""The leader's part of a replica process: it opens the engine, serves, hands over, and closes.

`Office` keeps the in-sync set; `replication.Leader` the stream of records; `EngineLife` the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from turtlemq.errors import Conflict, TurtleError, Unavailable
from turtlemq.replica.frames import Handover, Ready
from turtlemq.replica.interventions import target_of
from turtlemq.replica.link import Identity
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import Event, HandoverAsked, Seen, State
from turtlemq.replica.membership import Change, handed_over_isr
from turtlemq.replica.replica_file import ReplicaFile
from turtlemq.replica.shard_view import config_of
from turtlemq.replica.stream import Stream
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.config import Config
from turtlemq.server.engine_life import EngineLife
from turtlemq.server.errors import NoLeader, NotLeader
from turtlemq.server.following import Following
from turtlemq.server.office import Office
from turtlemq.server.offset_notes import OffsetNotes
from turtlemq.server.peer_port import PeerPort
from turtlemq.server.replica_names import ReplicaNames
from turtlemq.server.replication import FINISH_S, Leader
from turtlemq.server.service import Service

DRAIN_S = 0.3  # time for requests under way, before the engine is closed for a handover
READY_S = 1.0  # time for the other member to say that it takes over
HANDOVER_S = 10.0  # the longest handover that a caller waits for


class Process(Protocol):
    """The process around it (`replica_process.ReplicaProcess`)."""

    config: Config
    part: ClusterPart
    service: Service
    names: ReplicaNames
    following: Following
    port: PeerPort
    member: Member
    lock: int
    files: int

    def tell(self, event: Event) -> None: ...
    def read(self) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class HandoverFailed(Unavailable):
    """The handover did not come about. One of the members in sync leads in a moment."""


class Leadership:
    """The terms of one process as leader: there is at most one, for it replaces itself afterwards."""

    def __init__(self, process: Process, me: Identity) -> None:
        self.won: tuple[int, frozenset[str]] | None = None  # revision and ISR of the transaction that elected this process
        self.handed_over = False
        self.office: Office | None = None
        self._process, self._me = process, me
        self._leader: Leader | None = None
        self._life: EngineLife | None = None
        self._watching: asyncio.Task[None] | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._to = ""
        self._is_closed = False  # the engine, in good order
        self._is_ready: asyncio.Future[Ready] | None = None
        self._over: asyncio.Future[None] | None = None  # of a handover that a caller waits for

    # Actions of the state machine

    async def open(self, file: ReplicaFile, epoch: int, stream: Stream | None) -> None:
        """Open the engine: its changes are records from now on. Raises `TurtleError` or `OSError`."""
        process = self._process
        config, part = process.config, process.part
        shape = config_of(part.view.keys, part.keys)
        min_isr = 1 if shape is None else shape.min_isr
        copy = file, epoch, stream
        leader = self._leader = Leader(
            config,
            self._me,
            process.lock,
            *copy,
            required=self._required,
            min_isr=min_isr,
            before=process.following.leader_time,
        )
        self._life = EngineLife(config, process.files, worker=leader.worker, door=leader.door, lock=leader.lock())
        await leader.note()
        await self._life.open()

    def _required(self) -> frozenset[str]:
        return frozenset({self._process.member.me}) if self.office is None else self.office.book.required()

    def serve(self) -> None:
        """Begin the term: accept standbys and requests."""
        assert self._leader is not None
        process, lead = self._process, self._leader.lead
        self.office = Office(
            process.part, process.names, process.member, lead, self.won, process.tell, process.read, process.service.meter
        )
        lead.caught_up, lead.ready = process.service.tick_soon, self._got_ready
        process.service.on_topic_stopped = self.office.leave
        self._serve(self._leader)

    def _serve(self, leader: Leader) -> None:
        process, life = self._process, self._life
        assert life is not None
        assert self.office is not None
        leader.listen(process.port)
        part, service = process.part, process.service
        part.lead = service.lead = leader.lead
        service.care = leader.care
        leader.care.handover = self.hand_over
        part.standby = service.standby = None
        life.serve(service)
        self._watching = process.spawn(self.office.watch())
        process.spawn(OffsetNotes(part, leader.lead, service).run())
        member = process.member
        service.meter.elections += 1
        logs.info("elected", epoch=member.term, replica=member.me, isr=len(self.office.book.isr), lsn=leader.stream.lsn)

    def saw(self, seen: Seen) -> None:
        """Etcd's keys were read, or have changed."""
        if self.office is not None:
            self.office.saw(seen)

    def claim(self) -> None:
        """Put `lead` again, if that is not under way."""
        if self.office is not None and (self._claiming is None or self._claiming.done()):
            self._claiming = self._process.spawn(self.office.claim())

    def best(self) -> str | None:
        """The member to hand over to; None: there is none."""
        return None if self.office is None else self.office.best()

    # Handover

    async def hand_over(self, node: str) -> None:
        """Let another node lead. Returns when etcd says so; this process has answered its callers by then. Raises `TurtleError`
        if it cannot begin."""
        process, part = self._process, self._process.part
        if process.member.state is not State.LEAD or self.office is None:
            raise NotLeader(leader_url=part.leader_url(), revision=part.view.revision)
        to = target_of(part.decoded(), part.shard, node)
        if to not in self.office.ready():
            raise Conflict(f"node {node} is not connected to this leader: it could not take over now")
        self._over = asyncio.get_running_loop().create_future()
        process.tell(HandoverAsked(to))
        if not _retires(process.member):
            raise Conflict(f"node {node} is not in sync any more")
        async with asyncio.timeout(HANDOVER_S):
            await asyncio.shield(self._over)

    def _got_ready(self, member: str, ready: Ready) -> None:
        waits = self._is_ready is not None and not self._is_ready.done()
        if waits and member == self._to and ready.epoch == self._process.member.term:
            assert self._is_ready is not None
            self._is_ready.set_result(ready)

    async def retire(self, to: str) -> None:
        """Close the engine, and let the other member lead that has everything. Raises `TurtleError`, `OSError` or `TimeoutError`:
        then there is no leader for a moment."""
        self._to = to
        try:
            await self._retire()
        except BaseException as error:
            if self._over is not None and not self._over.done():
                self._over.set_exception(error if isinstance(error, TurtleError) else HandoverFailed())
            raise
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _retire(self) -> None:
        leader, office, life, service = self._leader, self.office, self._life, self._process.service
        assert leader is not None
        assert office is not None
        assert life is not None
        lead, stream = leader.lead, leader.stream
        begun = asyncio.get_running_loop().time()
        await office.freeze()
        await service.end_streams()
        service.retire(NoLeader("this server hands over to another one: nothing was done. Try again in a moment."))
        await service.until_idle(DRAIN_S)
        service.close()
        leader.worker.stop()
        await life.close()
        self._is_closed = True
        await lead.finish(FINISH_S)
        standby = lead.standbys.get(self._to)
        if standby is None or standby.acked < stream.lsn:
            raise HandoverFailed(f"member {self._to} has not got everything in time")
        self._is_ready = asyncio.get_running_loop().create_future()
        standby.link.send(Handover(stream.epoch, stream.lsn, stream.chain))
        async with asyncio.timeout(READY_S):
            ready = await self._is_ready
        me, isr = office.book.me, office.book.isr
        isr = isr - {me} if office.must_leave else handed_over_isr(me, isr, lead.options.min_isr)
        change = Change(office.book.revision, isr)
        nonce = f"handover/{self._process.member.process}/{stream.epoch}"
        if not await self._process.names.hand_over(change, self._to, standby.hello.node, ready, nonce):
            raise HandoverFailed("the in-sync set has changed meanwhile")
        self.handed_over = True
        self._process.service.meter.handovers += 1
        pause_ms = round(1000 * (asyncio.get_running_loop().time() - begun))
        logs.info("handed_over", to=standby.hello.node, epoch=stream.epoch + 1, lsn=stream.lsn, pause_ms=pause_ms)

    # The end

    async def close(self) -> None:
        """Close the engine, in good order. There is no other member to hand over to."""
        process = self._process
        if self._leader is None or self._life is None or self.office is None:
            return
        await self.office.freeze()
        await process.service.end_streams()
        process.service.retire(Unavailable("the server is stopping."))
        await process.service.until_idle(FINISH_S)
        process.service.close()
        self._leader.worker.stop()
        await self._life.close()
        await self._leader.end(process.service.failed is None)

    async def abandon(self) -> None:
        """Answer nothing more, and end the worker process. After a handover the folder is closed: its position is noted."""
        leader, service = self._leader, self._process.service
        if leader is None:
            return
        sound = self.office is None or not self.office.must_leave or len(self.office.book.isr) == 1
        if self._is_closed:
            await leader.end(service.failed is None, complete=sound)
            return
        service.retire(NoLeader())
        leader.lead.close("this leader is deposed")
        await asyncio.get_running_loop().run_in_executor(None, leader.kill)
        if not sound:
            await leader.end(clean=False, complete=False)


def _retires(member: Member) -> bool:
    return member.state is State.RETIRE
