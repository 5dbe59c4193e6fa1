"""A replica's process in walks over the membership rules: it carries out the actions of `Member`, and leads with a `Book`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.trust.membership_shell import Call, Shell
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import (
    Beat,
    Begin,
    Copied,
    Drained,
    Event,
    HandoverAsked,
    HandoverOffered,
    Lost,
    Marked,
    Met,
    Opened,
    Refused,
    Seen,
    State,
    Welcomed,
)
from turtlemq.replica.membership import Change, Greeting, handed_over_isr


@dataclass
class Disk:
    """The part of a replica that outlives its process."""

    name: str
    log: list[int] = field(default_factory=list)  # records that were applied; their number is the LSN
    holes: bool = False  # files are being replaced: they are at no LSN
    complete: bool = False
    epoch: int = 0
    state: tuple[int, int] = 0, 0  # epoch and revision of the newest `state` that it has seen
    known: bool = False  # a clean stop has written LSN and chain
    began: bool = False
    synced: int = 0  # records that a power cut leaves
    rebooted: bool = False  # the machine has lost power since the last start, or since the copy was whole


@dataclass
class Connection:
    """From a standby to a leader; frames are tuples."""

    standby: Process
    leader: Process
    down: list[tuple[Any, ...]] = field(default_factory=list)
    up: list[tuple[Any, ...]] = field(default_factory=list)
    broken: bool = False
    sent: int = -1  # LSN up to which records were sent; -1: none are sent yet
    complete: bool = False  # the leader knows that this standby is complete


class Process(Shell):
    """One process of a replica. `world` has the clock, etcd's calls and the connections."""

    def __init__(self, world: Any, disk: Disk, number: int) -> None:
        first = disk.name == "a"
        member = Member(disk.name, f"{disk.name}{number}", disk.complete, disk.epoch, fresh=first and not disk.began)
        (member.epoch, member.revision), member.rebooted = max((disk.epoch, 0), disk.state), disk.rebooted
        super().__init__(world, member, first)
        self.disk, self.alive, self.number = disk, True, number
        disk.began = True
        self.lsn_known, disk.known = disk.known, False
        self.timers: dict[type[Event], int] = {}
        self.jobs: list[tuple[str, Any]] = []
        self.received: list[int] = []
        self.watched = 0
        self.connection: Connection | None = None
        self.answered = -1
        self.beats: dict[int, tuple[int, bool]] = {}  # by number: when it was sent, and whether it asked for a promise
        self.tell(Begin())

    def __repr__(self) -> str:
        return f"{self.member.me}{self.number}:{self.member.state.value}"

    def see(self, seen: Seen, read: int) -> None:
        super().see(seen, read)
        me, waiting = self.member.me, any(call.process is self and call.kind == "reboot" for call in self.world.calls)
        if self.member.rebooted and seen.lead is None and me in seen.isr - seen.rebooted and not waiting:
            self.call("reboot", me, seen.revision)

    def on_reboot(self, _: Call) -> None:
        self.world.seen["said that power was lost"] += 1

    # Hooks of the shell

    def call(self, kind: str, *args: Any) -> None:
        slow = kind in ("bid", "change") and self.world.chance.random() < 0.3
        self.world.calls.append(Call(self, kind, args, self.world.now, slow=slow))

    def connect(self) -> None:
        self.world.connect(self)

    def stop_receiving(self) -> None:
        received = self.received
        self.hang_up()
        self.received = received
        self.jobs.append(("drain", None))

    def start_timer(self, timer: type[Event], wait_ms: int) -> None:
        self.timers[timer] = self.world.now + wait_ms

    def mark(self, complete: bool) -> None:
        self.jobs.append(("mark", complete))

    def note_epoch(self) -> None:
        self.disk.epoch = self.member.epoch

    def note_state(self) -> None:
        self.disk.state = self.member.epoch, self.member.revision

    def copy_files(self) -> None:
        self.jobs.append(("copy", self.connection))

    def send_lease(self, lease: int) -> None:
        if self.connection is not None:
            self.connection.up.append(("lease", lease))

    def open_engine(self) -> None:
        self.jobs.append(("open", None))

    def retire(self) -> None:
        """`World.offer` goes on."""

    def execute(self) -> None:
        self.world.replace(self, clean=bool(self.retiring))

    def follow(self) -> None:
        self.acknowledge()

    def hang_up(self) -> None:
        self.received = []
        if self.connection is not None:
            self.connection.broken = True
            self.connection = None

    # Work that takes a while, in order

    def work(self) -> None:
        name, value = self.jobs.pop(0)
        if name == "mark":
            self.disk.complete = value
            self.note_epoch()
            if value:
                self.disk.rebooted, self.disk.synced = False, len(self.disk.log)
            self.tell(Marked(value))
        elif name == "drain":
            self.disk.log += self.received
            self.received.clear()
            self.tell(Drained())
        elif name == "open":
            self.disk.rebooted = False
            self.disk.log.append(self.world.new_record())
            self.tell(Opened())
        else:
            self.copy(value)

    def copy(self, connection: Connection) -> None:
        """Files come from several moments: records up to the last pin must follow before they are at one LSN."""
        if connection is not self.connection or connection.sent >= 0 or connection.leader.book is None:
            return
        log = connection.leader.disk.log
        pin = len(log)
        first = self.world.chance.randint(max(0, pin - 2), pin)
        self.disk.log, self.disk.holes, self.received = log[:first], True, []
        self.disk.synced = 0
        self.pin, connection.sent = pin, first
        self.lsn_known = False
        self.copied()

    pin = 0

    def copied(self) -> None:
        if len(self.disk.log) >= self.pin:
            self.disk.holes, self.lsn_known = False, True
        self.tell(Copied(len(self.disk.log), self.pin))

    # A standby's frames

    def hear(self, connection: Connection) -> None:
        """The next frame of the leader."""
        kind, *args = connection.down.pop(0)
        if kind == "welcome":
            self.tell(Welcomed(*args))
        elif kind == "refused":
            self.hang_up()
            self.tell(Refused())
        elif kind == "record":
            self.received.append(args[0])
        elif kind == "beat":
            number, epoch, promise = args
            self.tell(Beat(epoch, promise))
            if self.connection is connection and self.member.state in (State.FOLLOW, State.IN_SYNC):
                connection.up.append(("ack", len(self.disk.log), number))
        elif kind == "handover":
            self.tell(HandoverOffered(args[0], equal=not self.received and len(self.disk.log) == args[1]))

    def apply(self) -> None:
        self.disk.log.append(self.received.pop(0))
        if self.member.state is State.SYNC:
            self.copied()
        self.acknowledge()

    def acknowledge(self) -> None:
        if self.connection is not None and self.member.state in (State.FOLLOW, State.IN_SYNC):
            self.connection.up.append(("ack", len(self.disk.log), -1))

    # A leader's frames

    def listen(self, connection: Connection) -> None:
        """The next frame of a standby."""
        kind, *args = connection.up.pop(0)
        book, tenure = self.book, self.tenure
        if kind == "hello":
            self.greet(connection, *args)
        elif book is None or tenure is None:
            return
        elif kind == "ack":
            lsn, number = args
            connection.complete = True
            book.acknowledge(connection.standby.member.me, lsn)
            sent, promise = self.beats.get(number, (0, False))
            if promise:
                tenure.promised(connection.standby.member.me, sent)
        elif kind == "lease" and self.retiring == connection.standby.member.me:
            change = Change(book.revision, handed_over_isr(book.me, book.isr, min_isr=1))
            self.call("hand_over", change, self.member.term, self.retiring, args[0])

    def greet(self, connection: Connection, epoch: int, lsn: int | None, log: list[int]) -> None:
        standby = connection.standby.member.me
        self.tell(Met(epoch))
        if not self.alive or self.book is None or self.retiring:
            connection.down.append(("refused",))
            return
        for other in self.world.connections:
            if other is not connection and other.leader is self and other.standby.member.me == standby:
                other.broken = True  # its frames do not count any more
                other.up.clear()
        in_ring = lsn is not None and self.disk.log[:lsn] == log and self.world.chance.random() < 0.9
        greeting = self.book.greet(standby, lsn if in_ring else None)
        self.world.seen[f"hello: {greeting.value}"] += 1
        if greeting is Greeting.LATER:
            self.propose(self.book.let_go({standby}, min_isr=1))
            connection.down.append(("refused",))
            return
        resume = greeting is Greeting.RESUME
        connection.sent, connection.complete = (lsn or 0) if resume else -1, resume
        connection.down.append(("welcome", self.member.term, resume))

    def propose(self, change: Change | None) -> None:
        if change is not None:
            self.call("change", change)

    def ask_handover(self, to: str) -> None:
        self.tell(HandoverAsked(to))
        if self.member.state is State.RETIRE:
            self.retiring = to

    def lose(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection, self.received = None, []
            self.tell(Lost())
