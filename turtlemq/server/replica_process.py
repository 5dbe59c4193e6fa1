"""The process of a shard's replica: it carries out the actions of its state machine (`replica.member`), and tells it the events.

The state machine decides; here are the name server, the connection to the leader, the files, the engine. Actions on the disk are
carried out one after the other, in order. A leader that is deposed or has handed over replaces itself by a new process (exec): no
thread of it lives on, and its worker process has ended before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from turtlemq import __version__
from turtlemq.errors import LockLost, TurtleError, Unavailable, describe
from turtlemq.replica.cluster_state import BadValue
from turtlemq.replica.link import Identity
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import (
    Action,
    Begin,
    BidAnswered,
    Copied,
    Do,
    Event,
    Failed,
    GaveUp,
    HandoverAsked,
    Health,
    Marked,
    Opened,
    PatienceOver,
    Retired,
    RetryNow,
    State,
    Unwatched,
)
from turtlemq.replica.replica_file import ReplicaFacts
from turtlemq.replica.shard_view import seen_of, want_of
from turtlemq.replica.standby import Standby, StandbyOptions
from turtlemq.segment.format import VERSION
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.config import Config
from turtlemq.server.copy_care import CopyCare
from turtlemq.server.following import Following
from turtlemq.server.leadership import Leadership
from turtlemq.server.peer_port import PeerPort
from turtlemq.server.reboot import Reboot
from turtlemq.server.replica_names import ReplicaNames
from turtlemq.server.replication import door_of, log
from turtlemq.server.service import Service
from turtlemq.server.supervision import RESTARTING, Report
from turtlemq.server.supervisor_line import SupervisorLine
from turtlemq.storage import names as file_names

LOCK_CHECK_S = 1.0
RETIRE_S = 5.0  # time for a handover under way, once another leader is known
FORWARD_S = 1.5  # time for requests that are being forwarded to the next leader, before the process replaces itself
REVOKE_S = 1.0  # time for etcd to end the lease, once the process stops


class Copy(NamedTuple):
    """The folder of a replica: its lock, the facts about it, and how many descriptors are for files."""

    lock: int
    facts: ReplicaFacts
    files: int


class ReplicaProcess:
    """The shell around one `Member`. All methods run on the event loop."""

    def __init__(
        self,
        config: Config,
        me: Identity,
        part: ClusterPart,
        service: Service,
        names: ReplicaNames,
        port: PeerPort,
        copy: Copy,
        line: SupervisorLine,
    ) -> None:
        self.config, self.part, self.service, self.names, self.line = config, part, service, names, line
        self.port = port
        self.lock, facts, self.files = copy
        self.root, self.door = Path(config.data), door_of(config)
        fresh = facts.complete and facts.epoch == 0
        beat_ms = config.cluster.heartbeat_ms
        self.member = Member(facts.replica, secrets.token_hex(8), facts.complete, 0, fresh, beat_ms)
        (self.member.epoch, self.member.revision), self.member.rebooted = facts.newest, facts.rebooted
        self._reboot = Reboot(part, self.member, self.tell)
        options = StandbyOptions(config.cluster.ring_bytes, VERSION, __version__, config.cluster.bulk_mb_per_s * 1e6)
        self.standby = Standby(self.root, self.door, me, facts, options, log=log)
        self.following = Following(part, names, self.standby, self.tell)
        self.leadership = Leadership(self, me)
        self.care = CopyCare(self)
        self.stopping = False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # the exit code of the process
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Do, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._last_job: asyncio.Task[None] | None = None  # on the disk
        self._retiring: asyncio.Task[None] | None = None
        self._replacing = False  # EXEC: the folder belongs to the next process, and the engine of this one may still write to it
        self._why = self._to = ""
        self._wire()

    def _wire(self) -> None:
        standby, view = self.standby, self.part.view
        standby.completed = self._completed
        standby.may_sync = lambda: self.member.me not in self.member.seen.isr
        view.changed.append(self._saw)
        view.unwatched.append(lambda: self.tell(Unwatched()))
        self.part.member, self.part.standby = self.member, standby
        self.part.hand_over = self.leadership.hand_over
        self.service.standby = standby

    # Events

    def tell(self, event: Event) -> None:
        """Tell the state machine of an event, and carry out its actions."""
        if self.ended.done() or self._replacing:
            return
        before = self.member.state
        if isinstance(event, HandoverAsked) and before is State.LEAD:
            self._to = event.to
        for action in self.member.handle(event, random.random()):
            self._carry_out(action)
        if self.member.state is not before:
            logs.info("replica_state", state=self.member.state.value, why=type(event).__name__)
            self.line.tell()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside; an error that was not foreseen ends the process."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.error("replica_failed", error, state=self.member.state.value)
            self.end(1)

    def end(self, code: int) -> None:
        """End the process."""
        if not self.ended.done():
            self.ended.set_result(code)

    async def run(self) -> int:
        """Be a replica. Returns the exit code of the process."""
        beside = [
            self._loop.create_task(work)
            for work in (self.names.keep_alive(), self._check_lock(), self._check_health(), self.care.run())
        ]
        self.tell(Begin())
        try:
            return await self.ended
        finally:
            for task in [*beside, *self._tasks]:
                task.cancel()
            await asyncio.gather(*beside, *self._tasks, return_exceptions=True)
            for timer in self._timers.values():
                timer.cancel()

    async def _check_lock(self) -> None:
        while self.door.holds(self.root / file_names.LOCK, self.lock):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(LOCK_CHECK_S)
        logs.error("lock_lost", error=LockLost())
        self.end(1)

    async def _check_health(self) -> None:
        """A copy without room on its disk, or with a wrong clock, does not lead."""
        while True:
            good = not self.standby.is_full and self.care.clock_is_right()
            if good != self.member.healthy and self.member.state not in _LEADS:
                self.tell(Health(good))
            await asyncio.sleep(LOCK_CHECK_S)

    # The end

    def stop(self) -> None:
        """End in good order: SIGTERM came, or the supervisor has ended. A leader hands over first, if it can."""
        if not self.stopping:
            self.stopping = True
            logs.info("stopping", state=self.member.state.value)
            self.spawn(self._stop())

    def _is(self, *states: State) -> bool:
        return self.member.state in states

    async def _stop(self) -> None:
        if self._is(State.LEAD) and (to := self.leadership.best()) is not None:
            self.tell(HandoverAsked(to))
        if self._is(State.RETIRE) or self._replacing:
            return  # EXEC ends the process
        if self._is(*_LEADS):
            await self.leadership.close()
            await self._revoke()
        else:
            try:
                await self.following.stop()
            except OSError as error:
                logs.error("copy_not_trusted", error=error)
                self.end(1)
        logs.info("stopped", lsn=self.standby.stream.lsn)
        self.end(0)

    async def _revoke(self) -> None:
        """End the lease, so that no other replica waits for its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REVOKE_S):
                await self.names.revoke()

    async def _exec(self) -> None:
        """Replace this process. Threads end with it; the worker process has ended before, for it writes into the folder."""
        self.line.tell(always=True, state=RESTARTING)
        await self.leadership.abandon()
        if not self.stopping:
            logs.info("restarting")
            with contextlib.suppress(TimeoutError):  # requests that wait here go to the next leader
                async with asyncio.timeout(FORWARD_S):
                    await self.service.stop_listening()
        if self.stopping:  # perhaps since a moment ago: the next process would not hear of it
            await self._revoke()
            logs.info("stopped", lsn=self.standby.stream.lsn)
            self.end(0)
            return
        logs.drain()
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    # Actions

    def _carry_out(self, action: Action) -> None:
        match action.do:
            case Do.READ:
                self.read(action.read)
            case Do.HELLO:
                self.spawn(self.following.call())
            case Do.FOLLOW | Do.COPY:
                self.following.go_on()
            case Do.HANG_UP:
                self.spawn(self.following.hang_up())
            case Do.STOP:
                self.spawn(self.following.settle())
            case Do.PATIENCE | Do.RETRY:
                self._set_timer(action.do, action.wait_ms)
            case Do.MARK_INCOMPLETE | Do.MARK_COMPLETE:
                self._queue(self._mark(action.do is Do.MARK_COMPLETE))
            case Do.NOTE:
                self._queue(self._on_thread(self.standby.file.note, self.member.epoch))
            case Do.NOTE_STATE:
                self._queue(self._on_thread(self.standby.file.note_state, self.member.epoch, self.member.revision))
            case Do.BID:
                self.spawn(self._bid())
            case Do.GIVE_UP:
                self.spawn(self._give_up())
            case Do.REVOKE_LEAD:
                self._deleting = self.spawn(self.names.delete_lead(self.member.seen.lease))
            case Do.LEASE:
                self.spawn(self.following.take_over(self.member.following))
            case Do.OPEN:
                self._queue(self._open())
            case Do.SERVE:
                self.leadership.serve()
            case Do.CLAIM:
                self.leadership.claim()
            case Do.RETIRE:
                self._retiring = self.spawn(self._retire())
            case Do.EXEC:
                self._replacing = True
                self.spawn(self._end_term())
            case Do.ALARM:
                self._alarm(action.text)

    def _queue(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something on the disk, when everything before it is done."""
        self._last_job = self.spawn(_after(self._last_job, work))

    async def _on_thread(self, work: Any, *args: Any) -> None:
        try:
            await self._loop.run_in_executor(None, work, *args)
        except OSError as error:
            self.tell(Failed(f"the disk has failed: {describe(error)}", copy_lost=False))

    # Etcd

    def read(self, number: int = 0) -> None:
        """Read the keys, until etcd answers. A newer read replaces an older one."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.spawn(self._read(number or self.member.reads))

    async def _read(self, number: int) -> None:
        if self._deleting is not None:
            await asyncio.wait([self._deleting])
        await self.names.until_answered(self.part.view.read)
        self._saw(number)

    def _saw(self, read: int = 0) -> None:
        """The keys, as a watch or a read shows them."""
        part = self.part
        try:
            seen = seen_of(part.view.keys, part.view.revision, part.keys, part.shard, part.options.node, read)
        except BadValue as error:
            logs.error("name_server_unreadable", error=error)
            return
        self.leadership.saw(seen)
        self.tell(seen)
        self._reboot.saw(seen)
        if self._is_spare and not self._is(*_LEADS) and not self.stopping:
            self.stopping = True
            self.spawn(self._become_spare())

    @property
    def _is_spare(self) -> bool:
        """Should this node have no copy?"""
        want = want_of(self.part.view.keys, self.part.keys, self.part.shard)
        return want is not None and self.part.options.node not in want.nodes and self.member.me not in self.member.seen.isr

    async def _become_spare(self) -> None:
        logs.info("not_wanted", replica=self.member.me)
        await self.following.stop()
        self.stopping = False
        await self._exec()

    async def _bid(self) -> None:
        bid = self.member.bid
        assert bid is not None
        won, revision = await self.names.bid(bid)
        if won:
            self.leadership.won = revision, bid.isr
        self.tell(BidAnswered(won, bid.nonce))

    async def _give_up(self) -> None:
        await self.names.revoke()
        self.tell(GaveUp())

    # Files

    def _completed(self) -> None:
        """The files are those of the leader, and the file REPLICA says so."""
        self.tell(Copied(self.standby.lsn, self.standby.lsn))
        if not self.member.complete:
            self._queue(self._mark(True))

    async def _mark(self, complete: bool) -> None:
        if complete != self.standby.facts.complete or not complete:
            await self._on_thread(self.standby.mark, complete, self.member.epoch)
        self.tell(Marked(complete))

    def _set_timer(self, do: Do, wait_ms: int) -> None:
        if do in self._timers:
            self._timers[do].cancel()
        event = PatienceOver() if do is Do.PATIENCE else RetryNow()
        self._timers[do] = self._loop.call_later(wait_ms / 1000, self.tell, event)

    # Leadership

    async def _open(self) -> None:
        standby = self.standby
        stream = standby.stream if standby.is_known else None
        try:
            await self.leadership.open(standby.file, self.member.term, stream)
        except (TurtleError, OSError) as error:
            self.tell(Failed(f"the data folder {self.config.data} cannot be opened: {describe(error)}", copy_lost=False))
            return
        self.tell(Opened())

    async def _retire(self) -> None:
        """Hand over. The state machine may hear of the next leader before etcd has answered."""
        try:
            await self.leadership.retire(self._to)
        except (TurtleError, OSError, TimeoutError) as error:
            logs.warning("handover_failed", error=describe(error) or "it took too long")
        self.tell(Retired())

    async def _end_term(self) -> None:
        """This process has handed over, or is deposed."""
        if self._retiring is not None:
            await asyncio.wait([self._retiring], timeout=RETIRE_S)
        if not self.leadership.handed_over:
            logs.warning("deposed", term=self.member.term, epoch=self.member.epoch)
        await self._exec()

    def _alarm(self, text: str) -> None:
        if self.member.went_back:
            logs.error("name_server_went_back", error=text, epoch=self.member.epoch, seen_epoch=self.member.seen.epoch)
        else:
            logs.error("replica_stuck", error=text, epoch=self.member.epoch)
        self._why = self.service.not_serving = text
        if self._is(State.STUCK):
            self.service.retire(Unavailable(text))
            self.spawn(self.names.revoke())  # another replica may lead
        self.line.tell()

    def report(self) -> Report:
        """The line for the supervisor."""
        member, facts = self.member, self.standby.facts
        lsn = self.standby.stream.lsn
        good = member.healthy and member.state is not State.STUCK
        return Report(member.state.value, self.names.lease, member.epoch, lsn, facts.replica, facts.complete, good, self._why)


_LEADS = (State.OPEN, State.LEAD, State.RETIRE)


async def _after(before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await work
