"""A replica's process in the simulated cluster: the actions of `Member` with real files, a real follower and a real engine.

The order of steps is that of the server's process. Work that takes a while is an event of its own, so that anything may happen
before it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.harness.index_world import Later
from tests.trust.cluster_copy import CopyInto
from tests.trust.cluster_doors import LeaderDoor, NodeDoor, NotedStream
from tests.trust.cluster_ferry import Quay
from tests.trust.cluster_lead import Leading
from tests.trust.cluster_nodes import Node, Wire
from tests.trust.membership_shell import Call, Shell
from tests.trust.simulation_disk import Crash
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, TurtleError
from turtlemq.replica import arrivals, replica_file, ring_file
from turtlemq.replica.follower import Follower
from turtlemq.replica.frames import File
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import (
    Beat,
    Begin,
    Copied,
    Drained,
    Event,
    Failed,
    HandoverOffered,
    Health,
    Lost,
    Marked,
    Opened,
    Refused,
    Retired,
    Seen,
    State,
    Waited,
    Welcomed,
)
from turtlemq.replica.pins import unpin_all
from turtlemq.replica.records import OutOfStep, Record
from turtlemq.replica.replica_file import ReplicaFacts
from turtlemq.replica.shared_files import is_shared
from turtlemq.replica.tenure import BEAT_MS, LEASE_MS
from turtlemq.server.fetches import Fetches

SHAKE_MS = 5_000
GRACE_MS = 30_000  # for members whose machines did not lose power
SILENT_MS = 5 * BEAT_MS
RETIRE_MS = 3_000
_UNKNOWN_SHIFT = 40  # as in the server: a stream whose beginning is not known begins far behind all earlier records


class Replica(Leading, Shell):
    """One process of a replica."""

    def __init__(self, world: Any, node: Node, number: int) -> None:
        super().__init__(world, Member("", "", False), first=node.name == "a")
        self.node, self.number = node, number
        self.alive, self.paused = True, False
        self.missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # while it was paused
        self.facts = ReplicaFacts("", 0, "", False, 0)
        self.doors: list[NodeDoor] = []
        self.door = self.new_door()
        self.syncer = Later() if world.chance.random() < 0.5 else None
        self.engine: Engine | None = None
        self.fetches: Fetches | None = None  # of the engine, once clients have come
        self.received: list[Record] = []
        self.wire: Wire | None = None  # to the leader
        self.copying: CopyInto | None = None
        self.quay = Quay(self)
        self.known = False  # which records were applied
        self.began_at = 0  # the LSN at which the process before was stopped properly
        self.trusted = True  # its disk has not failed
        self.stuck_at: int | None = None
        self.watched = len(world.etcd.history)
        self._timers: dict[type[Event], int] = {}
        self._grace = 0  # since when it waits for members that kept their power; 0: it does not
        self._marked_ms = 0  # when the last mark is written: they are written in order

    def __repr__(self) -> str:
        return f"{self.node}{self.number}:{self.member.state.value}"

    @property
    def name(self) -> str:
        return f"{self.node}{self.number}:"

    @property
    def term(self) -> int:
        return self.member.term

    @property
    def crashed(self) -> bool:
        return any(door.ended for door in self.doors)

    def new_door(self, make: Callable[..., NodeDoor] = NodeDoor) -> NodeDoor:
        """A Door that ends with this process."""
        door = make(self.node.drive, self.world.story.files)
        door.node = self.node
        self.doors.append(door)
        return door

    def die(self) -> None:
        """Everything that it held is let go."""
        for door in self.doors:
            door.ended = True
        for job in self.syncer.jobs if self.syncer is not None else ():
            try:
                job.run()  # which closes its file, and syncs nothing any more
            except Crash:
                continue
        for door in self.doors:
            door.die()

    def later(self, work: Callable[..., None], *args: Any, ms: int | None = None) -> None:
        self.world.later(self.world.latency() if ms is None else ms, self, work, *args)

    def begin(self) -> None:
        """The process has started."""
        node, root = self.node, self.node.drive.root
        if self.world.chance.random() < self.world.ends / 4:
            self.door.ends_in = self.world.chance.randint(0, 5)
        empty = not any(is_shared(name) for name in self.door.names(root))
        arrivals.clear(self.door, root)
        unpin_all(self.door, root)
        self.facts = facts = replica_file.take(self.door, root, "sim")
        node.replica = facts.replica
        self.known = facts.lsn is not None and facts.chain is not None
        lsn, chain = facts.lsn or 0, facts.chain or 0
        tail = ring_file.take(self.door, root, lsn, chain)
        self.stream = NotedStream(node.chains, facts.epoch, tail.lsn, tail.chain, self.world.ring_bytes)
        self.stream.refill(tail.records)
        self.began_at = lsn
        self.follower = Follower(root, self.door, lsn, chain, syncer=self.syncer)
        self.member = Member(
            facts.replica, f"{node}{self.number}", facts.complete, facts.epoch, fresh=self.first and empty and not facts.epoch
        )
        (self.member.epoch, self.member.revision), self.member.rebooted = facts.newest, facts.rebooted
        self.later(self._keep_lease, ms=LEASE_MS // 3)
        self.tell(Begin())

    def write_facts(self, facts: ReplicaFacts) -> None:
        replica_file.write(self.door, self.node.drive.root, facts)
        self.facts, self.node.complete = facts, facts.complete

    # Etcd

    def call(self, kind: str, *args: Any) -> None:
        self.world.call(self, kind, args)

    def watch(self) -> None:
        """Hear of all changes, in order."""
        if self.world.reaches_etcd(self.node):
            while self.alive and self.watched < len(self.world.etcd.history):
                self.watched += 1
                self.see(self.world.etcd.history[self.watched - 1], 0)

    def see(self, seen: Seen, read: int) -> None:
        """A replica whose machine lost power says so, and gives way to the others for a while."""
        waits = self.member.rebooted and seen.lead is None and self.member.me in seen.isr
        if waits and not self._grace:
            self._grace = self.world.now
            self.later(self._waited, self._grace, ms=GRACE_MS)
        elif not waits:
            self._grace = 0
        if waits and self.member.me not in seen.rebooted:
            self.call("reboot", self.member.me, seen.revision)
        super().see(seen, read)

    def _waited(self, grace: int) -> None:
        if self._grace == grace:
            self._grace = 0
            self.world.seen["waited for members that kept their power"] += 1
            self.tell(Waited())

    def on_reboot(self, _: Call) -> None:
        """The watch tells."""

    def _keep_lease(self) -> None:
        if self.lease is not None:
            self.call("keep_alive", self.lease[0])
        self.later(self._keep_lease, ms=LEASE_MS // 3)

    def alarm(self, text: str) -> None:
        self.world.alarms.append(f"{self}: {text}")

    # Timers

    def start_timer(self, timer: type[Event], wait_ms: int) -> None:
        number = self._timers[timer] = self._timers.get(timer, 0) + 1
        self.later(self._ring, timer, number, ms=wait_ms)

    def _ring(self, timer: type[Event], number: int) -> None:
        if self._timers[timer] == number:
            self.tell(timer())  # type: ignore[call-arg]

    # The connection to a leader

    def connect(self) -> None:
        self.hang_up()
        self.wire = wire = self.world.connect(self, self.member.seen.lead)
        if wire is None:
            self.later(self.tell, Refused())
            return
        self.quay = Quay(self)
        lsn, chain = (self.follower.lsn, self.follower.chain) if self.known else (None, None)
        wire.send(wire.leader, "hello", self.facts.replica, self.member.epoch, lsn, chain, self.facts.complete)
        self.later(self._look_for_silence, wire, ms=SHAKE_MS)

    def _look_for_silence(self, wire: Wire) -> None:
        if self.wire is not wire:
            return
        if self.world.now - wire.heard_ms[self] > SILENT_MS:
            wire.end(self)
            self.lost(wire)
        else:
            self.later(self._look_for_silence, wire, ms=BEAT_MS)

    def hang_up(self) -> None:
        self.received = []
        self._end_copy()
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.end(self)

    def stop_receiving(self) -> None:
        received = self.received
        self.hang_up()
        self.received = received
        self.later(self._drain)

    def _drain(self) -> None:
        try:
            self.apply_all(self.received)
        except OutOfStep:
            self.known = False
        self.received = []
        self.tell(Drained())

    def lost(self, wire: Wire) -> None:
        """The connection has ended. Records that have arrived may be applied."""
        if self.wire is not wire:
            return
        self.wire = None
        self._end_copy()
        if self.world.chance.random() < 0.5 and self.member.state in (State.FOLLOW, State.IN_SYNC):
            self.apply()
        self.received = []
        self.tell(Lost())

    def _end_copy(self) -> None:
        self.quay.drop()
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.close()

    def hear(self, wire: Wire, frame: tuple[Any, ...]) -> None:
        """A frame has come."""
        kind, *args = frame
        if wire.leader is self:
            self.listen(wire, kind, args)
        elif self.wire is wire:
            handler: Callable[..., None] = getattr(self, f"_hear_{kind}")
            handler(wire, *args)

    def _hear_end(self, wire: Wire) -> None:
        self.lost(wire)

    def _hear_refused(self, _: Wire) -> None:
        self.hang_up()
        self.tell(Refused())

    def _hear_welcome(self, _: Wire, epoch: int, resume: bool) -> None:
        if self.copying is None:
            self.tell(Welcomed(epoch, resume))
        elif resume:
            self.copying.resume()
            self.check_copied()
        else:
            self.copying.ask()

    def _hear_records(self, _: Wire, records: list[Record]) -> None:
        self.received += records
        self.later(self.apply)

    def _hear_beat(self, wire: Wire, number: int, epoch: int, promise: bool) -> None:
        self.tell(Beat(epoch, promise))
        self.acknowledge(wire, number)

    def _hear_file(self, wire: Wire, file: File, data: bytes) -> None:
        if self.files(partial(self.quay.take, file, data)):
            wire.send(wire.leader, "file_ok", file.number)

    def _hear_handover(self, _: Wire, epoch: int, lsn: int, chain: int) -> None:
        equal = not self.received and (self.follower.lsn, self.follower.chain) == (lsn, chain)
        self.tell(HandoverOffered(epoch, equal))

    def _hear_manifest(self, _: Wire, *args: Any) -> None:
        if self.copying is not None:
            self.files(partial(self.copying.compare, *args))

    def _hear_piece(self, _: Wire, *args: Any) -> None:
        if self.copying is not None:
            self.files(partial(self.copying.write, *args))

    def send_lease(self, lease: int) -> None:
        if self.wire is not None:
            self.wire.send(self.wire.leader, "lease", lease)

    def follow(self) -> None:
        self.acknowledge(self.wire, 0)

    def acknowledge(self, wire: Wire | None, beat: int) -> None:
        """Nothing of a copy that is not complete counts."""
        if wire is not None and self.wire is wire:
            follows = self.member.state in (State.FOLLOW, State.IN_SYNC)
            wire.send(wire.leader, "ack", self.follower.lsn if follows else 0, beat)

    # Records

    def apply(self) -> None:
        """Some of the records that have arrived."""
        count = self.world.chance.randint(0, len(self.received))
        if count < len(self.received):
            self.later(self.apply)
        batch, self.received = self.received[:count], self.received[count:]
        if batch and self.files(partial(self.apply_all, batch)):
            self.check_copied()
            self.acknowledge(self.wire, 0)

    def apply_all(self, records: list[Record]) -> None:
        if self.world.chance.random() < self.world.ends / 8:
            self.door.ends_in = self.world.chance.randint(0, 6)
        self.follower.ask = self.quay.ask
        for record in records:
            self.follower.apply(record)
            self.stream.repeat(record)
            self.world.seen["records"] += 1

    def files(self, work: Callable[[], None]) -> bool:
        """Work with files of a standby. Returns False if it could not be done: then the connection has ended, or the process
        is stuck."""
        try:
            work()
            return True
        except DiskFull:
            self.world.seen["standby: disk full"] += 1
            self._full()
        except OutOfStep:
            if self.stuck_at == self.follower.lsn:
                self.known = False
            self.stuck_at = self.follower.lsn
            wire, self.received = self.wire, []
            if wire is not None:
                wire.end(self)
                self.lost(wire)
        except OSError as error:
            self.fail(error)
        return False

    def fail(self, error: OSError) -> None:
        """The disk has failed: its files are not trusted any more."""
        self.world.seen["standby: sync fails"] += 1
        self.hang_up()
        self.tell(Failed(str(error), copy_lost=True))

    def _full(self) -> None:
        """FULL: the leader lets this copy go. It comes back with room."""
        wire = self.wire
        if wire is not None:
            wire.send(wire.leader, "full")
            wire.end(self)
        self.tell(Health(False))
        self.later(self._wait_for_room, wire, ms=1_000)

    def _wait_for_room(self, wire: Wire | None) -> None:
        if self.node.full:
            self.later(self._wait_for_room, wire, ms=1_000)
            return
        self.tell(Health(True))
        if wire is not None:
            self.lost(wire)

    # Copies

    def mark(self, complete: bool) -> None:
        self._marked_ms = max(self._marked_ms, self.world.now + self.world.latency())
        self.later(self._mark, complete, ms=self._marked_ms - self.world.now)

    def _mark(self, complete: bool) -> None:
        if complete:
            replica_file.sync_all(self.door, self.node.drive.root)
        rebooted = self.facts.rebooted and not complete
        facts = replace(self.facts, complete=complete, epoch=self.member.epoch, lsn=None, chain=None, rebooted=rebooted)
        self.write_facts(facts)
        if complete and self.node.holes:
            self.node.holes = self.node.cut = False
            self.known, self.follower.catch_up, self.copying = True, None, None
            self.world.seen["copies made"] += 1
        if not complete:
            self.known = False
        self.tell(Marked(complete))

    def note_epoch(self) -> None:
        self.write_facts(replace(self.facts, epoch=self.member.epoch, lsn=None, chain=None))

    def note_state(self) -> None:
        epoch, revision = self.member.epoch, self.member.revision
        self.write_facts(replace(self.facts, state_epoch=epoch, revision=revision, lsn=None, chain=None))

    def copy_files(self) -> None:
        if self.wire is not None:
            self.follower.close()
            self.node.holes, self.node.chains = True, {}
            self.copying = CopyInto(self, self.wire)
            self.copying.ask()

    def check_copied(self) -> None:
        """Are all files at one LSN by now?"""
        catch_up = self.follower.catch_up
        if self.member.state is State.SYNC and catch_up is not None and catch_up.is_complete(self.follower.lsn):
            self.tell(Copied(self.follower.lsn, catch_up.last))

    # Leading

    def open_engine(self) -> None:
        self.later(self._open, ms=self.world.chance.choice([20, 100, 400]))

    def _open(self) -> None:
        world, node, term = self.world, self.node, self.term
        node.full = node.sync_fails = False  # disks that fail while a node leads: `StoryWithFaults.send`
        self.follower.close()
        if not self.known:
            chain = world.chance.getrandbits(63) | 1
            self.stream = NotedStream(node.chains, term, term << _UNKNOWN_SHIFT, chain, world.ring_bytes)
        self.stream.epoch = term
        self.write_facts(replace(self.facts, complete=True, rebooted=False, epoch=term, lsn=None, chain=None))
        make = partial(LeaderDoor, stream=self.stream, root=node.drive.root)
        self.leader_door = self.new_door(make)
        if world.chance.random() < world.ends:
            self.leader_door.ends_in = world.chance.randint(0, 30)
        if node.cut:
            node.cut = False
            world.story.power_was_cut()
        self.worker, self.flusher = world.story.new_workers(self)
        if self.worker is not None:
            self.leader_door.worker = self.new_door()
        self.engine = Engine.open(
            node.drive.root,
            door=self.leader_door,
            settings=world.story.settings,
            worker=self.worker,
            flusher=self.flusher,
        )
        self.tell(Opened())

    def retire(self) -> None:
        """Close the engine, and offer the lead to another member."""
        assert self.engine is not None
        self._close_engine()
        self.later(self._retire_late, ms=RETIRE_MS)
        self.offer()

    def _close_engine(self) -> None:
        assert self.engine is not None
        self.world.story.engine_closes(self)
        try:
            self.engine.close()
        except (TurtleError, OSError):
            if self.trusted:
                raise
        self.closed = True

    def _retire_late(self) -> None:
        self.tell(Retired())

    def execute(self) -> None:
        """Begin anew, as another process of the same folder."""
        if not self.trusted:
            self.write_facts(replace(self.facts, complete=False, lsn=None, chain=None))
        elif self.retiring and self.closed:
            self._write_position()
        self.world.seen["deposed"] += not self.retiring
        self._restart()

    def retire_untrusted(self, to: str) -> None:
        """Files of this leader are wrong: it says so on its disk, and hands over."""
        self.trusted = False
        self.write_facts(replace(self.facts, complete=False, lsn=None, chain=None))
        self.ask_handover(to)

    def distrust(self) -> None:
        """Files of this standby are wrong: they are replaced by another process."""
        self.hang_up()
        self.tell(Failed("its files differ from those of the others", copy_lost=True))
        self.later(self._restart, ms=200)

    def stop_properly(self) -> None:
        """SIGTERM, without another member to hand over to."""
        if self.engine is not None:
            self._close_engine()
        else:
            wire, received = self.wire, self.received
            self.hang_up()
            if self.member.state in (State.FOLLOW, State.IN_SYNC):
                self.apply_all(received)
            self.follower.close()
            self.world.seen["standbys stopped properly"] += wire is not None
        if self.known or self.engine is not None:
            self._write_position()
        if self.lease is not None:
            self.world.call(self, "revoke", (self.lease[0],), told=True)
        self._restart()

    def _write_position(self) -> None:
        root = self.node.drive.root
        replica_file.sync_all(self.door, root)
        ring_file.write(self.door, root, self.stream)
        self.write_facts(replace(self.facts, lsn=self.stream.lsn, chain=self.stream.chain))

    def _restart(self) -> None:
        self.world.ended(self)
        self.world.later(50, None, self.world.start, self.node)
