"""The standby's side of replication: it follows a leader over one connection, and a thread applies the records to its folder.

The event loop receives, and acknowledges records that the thread has applied. Syncs run on threads of their own. The copy keeps a
ring of its last records, so that it can serve other standbys if it leads later.

Requires: the folder is locked by the caller. Nothing here decides to lead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from turtlemq.errors import DiskFull, Unavailable
from turtlemq.replica import replica_file, ring_file
from turtlemq.replica.arrivals import Arrivals
from turtlemq.replica.clock_skew import Skew
from turtlemq.replica.copy_files import Tails
from turtlemq.replica.copy_target import CopyTarget, Progress, catch_up_of
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.follow_figures import FollowFigures, TimedSyncs
from turtlemq.replica.follower import Follower
from turtlemq.replica.frames import BadPeer, Beat, Distrust, Frame, Handover, Hello, Refused, Welcome
from turtlemq.replica.inspector import Distrusted, Inspector
from turtlemq.replica.link import SHAKE_S, Identity, Link, Turned, prove_to_leader
from turtlemq.replica.records import NotArrived, OutOfStep
from turtlemq.replica.replica_file import ReplicaFacts, ReplicaFile
from turtlemq.replica.session import Session, report
from turtlemq.replica.stream import RING_BYTES, Stream
from turtlemq.storage import names
from turtlemq.storage.door import Door

SYNC_THREADS = 8  # the leader syncs so many files at a time
SILENT_BEATS = 5  # a leader that is silent for so many heartbeats is given up
ROOM_BYTES = 32 << 20  # free disk space that a standby with a full disk waits for
Log = Callable[..., None]
T = TypeVar("T")


class NotTrusted(OSError):
    """The disk has failed while records were applied: its files may be wrong, and it must not lead."""


@dataclass(frozen=True, slots=True)
class StandbyOptions:
    """Settings of a standby."""

    ring_bytes: int = RING_BYTES
    format: int = 0  # the newest file format that this program can read
    version: str = ""
    bulk_bytes_per_s: float = 50e6  # at which files are read beside the records


def _nothing(*_: object, **__: object) -> None:
    return


async def _go_on(_: Welcome) -> bool:
    return True


class Standby:
    """A copy that follows. `facts` are those that `replica_file.take` returned. All methods run on the event loop."""

    def __init__(
        self, root: Path, door: Door, me: Identity, facts: ReplicaFacts, options: StandbyOptions, *, log: Log = _nothing
    ) -> None:
        self.file = ReplicaFile(door, root, facts, threading.Lock())
        lsn, chain = (0, 0) if facts.lsn is None or facts.chain is None else (facts.lsn, facts.chain)
        tail = ring_file.take(door, root, lsn, chain)
        self.stream = Stream(facts.epoch, tail.lsn, tail.chain, ring_bytes=options.ring_bytes, lock=threading.Lock())
        self.stream.refill(tail.records)
        self.link: Link | None = None  # to the leader, once it has welcomed this copy
        self.heartbeat_s = 0.6
        self.decide: Callable[[Welcome], Awaitable[bool]] = _go_on  # after WELCOME: False ends the connection
        self.saw_beat: Callable[[Beat], None] = _nothing  # it is acknowledged after this has returned
        self.completed: Callable[[], None] = _nothing  # the files are at one LSN, and the file REPLICA says so
        self.offered: Callable[[int, bool], None] = _nothing  # the leader's epoch; is this copy equal to its closed files?
        self.may_sync: Callable[[], bool] = lambda: True  # whether this copy is no member: only then may its files be replaced
        self.ceased = False  # it follows no leader any more
        self.progress: Progress | None = None  # of a copy of the leader's files that is under way
        self.examiner = Examiner(root)
        self.inspector: Inspector | None = None  # of the connection to the leader
        self.healed = 0  # files with damage that were replaced
        self.skew: Skew | None = None  # of this node's clock, as the leader has measured it last
        self._root, self._door, self._me, self._options, self._log = root, door, me, options, log
        self.figures = FollowFigures()
        self._syncer = TimedSyncs(ThreadPoolExecutor(SYNC_THREADS, "sync"), self.figures.syncs)
        self._follower = Follower(root, door, lsn, chain, syncer=self._syncer)
        self._known = facts.lsn is not None  # which records were applied
        self._stuck_at: int | None = None  # the record behind which the next one did not fit
        self._own_epoch: int | None = None  # of a complete copy that is about to be replaced
        self._damaged: tuple[str, ...] = ()  # files that came from the leader with damage
        self._full = False  # there was no room for a record
        self._applying = threading.Lock()  # held while records are applied
        self._shaking: asyncio.Task[object] | None = None  # a connection that the leader has not welcomed yet
        self._session: Session | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()  # no connection is under way
        self._idle.set()

    @property
    def facts(self) -> ReplicaFacts:
        """The facts in the file REPLICA."""
        return self.file.facts

    @property
    def root(self) -> Path:
        """The data folder."""
        return self._root

    @property
    def lsn(self) -> int:
        """The last record that was applied."""
        return self._follower.lsn

    @property
    def is_known(self) -> bool:
        """Is it known which records were applied? Only then does `stream` continue them."""
        return self._known

    @property
    def is_full(self) -> bool:
        """Is there too little room on the disk to follow?"""
        self._full = self._full and self._door.free_bytes(self._root) < ROOM_BYTES
        return self._full

    # Life

    async def stop(self) -> None:
        """End the connection, apply the records that have arrived, and write down the position, after a sync of everything."""
        await self.cease()
        if self._known and self.facts.complete:
            await self._loop.run_in_executor(None, self._write_position)
        self._syncer.shutdown()

    async def cease(self) -> None:
        """Receive and acknowledge no more. Returns when everything that has arrived is applied: `stream` may be led then."""
        self.ceased = True
        await self.settle()

    async def settle(self) -> None:
        """End the connection. Returns when everything that has arrived is applied, and syncs are over. Raises `OSError` if one
        has failed."""
        await self.hang_up(drop=False)
        await self.examiner.rest_now()
        await self._loop.run_in_executor(None, self._follower.close)

    async def hang_up(self, *, drop: bool) -> None:
        """End the connection. Returns when everything that has arrived is applied, or with `drop` when nothing more will be."""
        if self._shaking is not None:
            self._shaking.cancel()
        if self._session is not None and drop:
            self._session.drop()
        if self.link is not None:
            self.link.close("this standby stops", at_once=True)
        await self._idle.wait()

    def distrust(self, paths: list[str]) -> None:
        """Compare the files with the leader's, and replace these where they differ: they have damage here. Nothing happens
        while this copy is not attached."""
        if self._session is not None:
            self._session.received([Distrust(paths)])

    async def between_records(self, work: Callable[[], T]) -> T:
        """Call a function on a thread while no record is applied: the files are those of the leader at one LSN. Raises
        `Unavailable` if this copy is not complete."""

        def locked() -> T:
            with self._applying:
                if not self.facts.complete:
                    raise Unavailable("this copy is being made equal to its leader's. Try again when it is complete.")
                return work()

        return await self._loop.run_in_executor(None, locked)

    def mark(self, complete: bool, epoch: int) -> None:
        """Note durably whether the files are at one LSN, and the highest epoch. Not on the event loop."""
        with self._applying:
            if not complete and self.facts.complete:
                self._own_epoch = self.facts.epoch
            self.file.write(complete=complete, epoch=max(epoch, self.facts.epoch), lsn=None, chain=None)

    def _write_position(self) -> None:
        replica_file.sync_all(self._door, self._root)
        ring_file.write(self._door, self._root, self.stream)
        self.file.write(lsn=self.lsn, chain=self._follower.chain)

    # One connection

    async def follow(self, host: str, port: int) -> str:
        """Follow a leader until the connection ends. Returns the reason. Raises `Turned` if it refuses, `NotTrusted` if the disk
        fails, `BadPeer` and `TimeoutError`."""
        self._idle.clear()
        try:
            return await self._follow(host, port)
        finally:
            self._idle.set()

    async def _follow(self, host: str, port: int) -> str:
        link, welcome = await self._call(host, port)
        if not await self._is_allowed(link, welcome):
            link.close("this standby hangs up", at_once=True)
            return await link.closed
        target = None
        if welcome.mode == "sync":
            try:
                target = await self._copy(link, welcome.epoch)
            except (OSError, DiskFull, OutOfStep) as error:
                report(link, error)
                return await self._failed(error)
            finally:
                self.link = None
                if target is None:
                    link.close("the copy was not made", at_once=True)
        else:
            await self._loop.run_in_executor(None, self.file.note, welcome.epoch)
        if self.ceased:
            link.close("this standby stops", at_once=True)
            return "this standby stops"
        return await self._apply(host, port, link, welcome, target)

    async def _call(self, host: str, port: int) -> tuple[Link, Welcome]:
        """A connection that the leader has welcomed."""
        if self.is_full:
            raise BadPeer("the disk is full")
        self._shaking = asyncio.current_task()
        try:
            async with asyncio.timeout(SHAKE_S):
                _, link = await self._loop.create_connection(Link, host, port, ssl=self._me.tls.calls)
                try:
                    return link, await self._shake(link)
                except BaseException:
                    link.close("it did not come about", at_once=True)
                    raise
        finally:
            self._shaking = None

    async def _is_allowed(self, link: Link, welcome: Welcome) -> bool:
        """Wait for the decision whether to go on, or for the end of the connection."""
        self.link = link
        deciding = asyncio.ensure_future(self.decide(welcome))
        waiting: list[asyncio.Future[Any]] = [deciding, link.closed]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return deciding.done() and deciding.result()
        finally:
            deciding.cancel()
            self.link = None

    async def _apply(self, host: str, port: int, link: Link, welcome: Welcome, target: CopyTarget | None) -> str:
        """Apply records until the connection ends. Returns the reason."""
        self.heartbeat_s = welcome.heartbeat_ms / 1000
        arrivals = Arrivals(self._root, self._door, partial(self._connect_bulk, host, port), self._log)
        self._follower.ask = arrivals.ask
        inspector = self.inspector = Inspector(self._root, link, self._options.bulk_bytes_per_s, self.examiner)
        between = partial(self._between, inspector)
        session = self._session = Session(
            self._follower, self.stream, link, self._saw, self._is_complete, between, self._applying, self.figures
        )
        self.link = link
        self._log("attached", leader=link.peer, epoch=welcome.epoch, lsn=self.lsn)
        if target is not None:
            session.received(target.rest())
            session.acknowledge()
        link.receive(session.received)
        try:
            await self._until_silent(link)
        finally:
            link.close("this standby stops", at_once=True)
            await arrivals.end()
            failed = await self._loop.run_in_executor(None, session.finish)
            await inspector.end()
            self.link = self._session = self.inspector = None
        if failed is not None:
            return await self._failed(failed)
        return await link.closed

    async def _copy(self, link: Link, epoch: int) -> CopyTarget:
        """Make the files equal to the leader's. Records follow that they may have already in part: until those are applied, this
        copy is not complete. Raises `BadPeer`."""
        if not self.may_sync():
            raise Turned(Refused("this copy is a member of the in-sync set: its files must not be replaced", epoch))
        loop = self._loop
        await loop.run_in_executor(None, self.mark, False, epoch)
        before, self._own_epoch = self._own_epoch, None
        tails = Tails(self._door, None if before is None or before >= epoch else self._root / names.DIVERGED / str(before))
        self._known, self.link, self.progress = False, link, Progress()
        await loop.run_in_executor(None, self._follower.close)
        self._log("reconcile_begun", leader=link.peer, epoch=epoch)
        suspect, unchecked = self.facts.suspect, before is None
        target = CopyTarget(self._root, self._door, link, self.progress, tails, suspect, unchecked=unchecked)
        watch = asyncio.create_task(self._until_silent(link))
        try:
            _, manifest = await target.run()
        finally:
            watch.cancel()
        self._damaged = tuple(sorted(target.damaged))
        for path, hole in target.damaged.items():
            self._log("copied_damage", file=path, position=hole.position, length=hole.length, reason=hole.reason)
        if tails.bytes:
            self._log("diverged", bytes=tails.bytes, folder=str(tails.folder))
        self._follower = Follower(self._root, self._door, manifest.lsn, manifest.chain, syncer=self._syncer)
        self._follower.catch_up = catch_up_of(manifest)
        ring = self._options.ring_bytes
        self.stream = Stream(epoch, manifest.lsn, manifest.chain, ring_bytes=ring, lock=threading.Lock())
        await loop.run_in_executor(None, self._is_complete)
        return target

    def _is_complete(self) -> bool:
        """Is this copy at one LSN? If it has become so, this is noted, after a sync of everything. Not on the event loop."""
        if self.facts.complete:
            return True
        catch_up = self._follower.catch_up
        if catch_up is None or not catch_up.is_complete(self.lsn):
            return False
        replica_file.sync_all(self._door, self._root)
        healed = sorted({*self.facts.suspect} - {*self._damaged})
        self.file.write(complete=True, suspect=self._damaged, rebooted=False)
        self._known, self._follower.catch_up = True, None
        if healed:
            self.healed += len(healed)
            self._log("healed", files=len(healed), first=healed[0])
        copied = self.progress or Progress()
        self._log("reconcile_done", lsn=self.lsn, rounds=copied.round, files=copied.files, bytes=copied.bytes_done)
        self.progress = None
        self._loop.call_soon_threadsafe(self._tell_completed)  # before any acknowledgement that counts
        return True

    def _tell_completed(self) -> None:
        self.completed()

    async def _shake(self, link: Link) -> Welcome:
        await prove_to_leader(link, self._me)
        link.send(self._hello())
        facts = self.facts
        welcome = await link.frame(Welcome)
        if welcome.epoch < facts.epoch:
            raise Turned(Refused(f"the leader is of epoch {welcome.epoch}, and there was one of {facts.epoch}", welcome.epoch))
        return welcome

    def _hello(self, *, bulk: bool = False) -> Hello:
        facts, options, me = self.facts, self._options, self._me
        lsn, chain = (self.lsn, self._follower.chain) if self._known and not facts.suspect else (None, None)
        about = facts.complete, options.format, options.version
        return Hello(me.shard, me.node, facts.replica, facts.epoch, lsn, chain, *about, bulk)

    async def _connect_bulk(self, host: str, port: int) -> Link:
        """A second connection to the leader, for files."""
        async with asyncio.timeout(SHAKE_S):
            _, link = await asyncio.get_running_loop().create_connection(Link, host, port, ssl=self._me.tls.calls)
            try:
                await prove_to_leader(link, self._me)
            except BaseException:
                link.close("it did not come about", at_once=True)
                raise
        link.send(self._hello(bulk=True))
        return link

    async def _until_silent(self, link: Link) -> None:
        """Return when the connection has ended, or nothing came for SILENT_BEATS heartbeats."""
        loop = asyncio.get_running_loop()
        while not link.closed.done():
            await asyncio.wait([link.closed], timeout=self.heartbeat_s)
            if link.is_open and link.is_reading and loop.time() - link.heard_s > SILENT_BEATS * self.heartbeat_s:
                link.close("the leader is silent", at_once=True)

    def _between(self, inspector: Inspector, frame: Frame) -> None:
        """A frame whose turn has come, between two records. On the thread that applies them."""
        inspector.take(frame, self.lsn)
        if isinstance(frame, Handover):
            equal = (self.lsn, self._follower.chain) == (frame.lsn, frame.chain)
            self._loop.call_soon_threadsafe(lambda: self.offered(frame.epoch, equal))

    def _saw(self, beat: Beat) -> None:
        self.skew = None if beat.skew_ms is None else Skew(beat.skew_ms, beat.skew_error_ms)
        self.saw_beat(beat)  # which may be set at any time

    async def _failed(self, error: BaseException) -> str:
        """Records could not be applied. Returns why, if this may get better."""
        if isinstance(error, DiskFull):
            self._full = True
            return str(error)
        if isinstance(error, NotArrived):
            return str(error)
        if isinstance(error, Distrusted):
            suspect = tuple(sorted({*self.facts.suspect, *error.paths}))
            await self._loop.run_in_executor(None, partial(self.file.write, suspect=suspect))
            return str(error)
        if isinstance(error, OutOfStep):
            if self._stuck_at == self.lsn:
                self._known = False  # twice at the same record: only a comparison of all files helps
            self._stuck_at = self.lsn
            return str(error)
        await self._loop.run_in_executor(None, self.mark, False, self.facts.epoch)
        self._log("copy_not_trusted", error=str(error))
        raise NotTrusted(f"{NotTrusted.__doc__} ({error})") from error
