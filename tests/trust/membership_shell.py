"""The shell of a replica's state machine in models: it carries out actions of `Member`, and hears etcd's answers.

Work with files and connections is left to subclasses: the walks over the membership rules (`membership_process`) have numbers for
records, the simulated cluster (`cluster_replica`) has files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.trust.model import Broken
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import (
    Action,
    BidAnswered,
    Do,
    Event,
    GaveUp,
    PatienceOver,
    Retired,
    RetryNow,
    Seen,
    State,
)
from turtlemq.replica.membership import Book
from turtlemq.replica.tenure import Tenure


@dataclass
class Call:
    """A request to etcd. It may be carried out after the process has ceased to wait for it."""

    process: Any
    kind: str
    args: tuple[Any, ...]
    sent_ms: int
    done: bool = False
    told: bool = False
    result: Any = None
    slow: bool = False  # on its way for long


class Shell(ABC):
    """Around one `Member`. `world` has the clock and the figures."""

    def __init__(self, world: Any, member: Member, first: bool) -> None:
        self.world, self.member, self.first = world, member, first
        self.lease: tuple[int, int] | None = None  # id, and when its last confirmed keepalive was sent
        self.won: tuple[int, frozenset[str]] | None = None
        self.held = 0  # the lease on which `lead` hangs, if it is one of this process
        self.book: Book | None = None
        self.tenure: Tenure | None = None
        self.retiring = ""
        self.claiming = self.deleting = False
        self.held_read = 0
        self.claim = (0, 0)  # the lease of a CLAIM, and when it was asked for

    def tell(self, event: Event) -> None:
        for action in self.member.handle(event, self.world.chance.random()):
            self.carry_out(action)

    # Left to subclasses

    @abstractmethod
    def call(self, kind: str, *args: Any) -> None:
        """Send a request to etcd."""

    @abstractmethod
    def connect(self) -> None:
        """HELLO to the holder of `lead`."""

    @abstractmethod
    def hang_up(self) -> None: ...

    @abstractmethod
    def stop_receiving(self) -> None: ...

    @abstractmethod
    def start_timer(self, timer: type[Event], wait_ms: int) -> None: ...

    @abstractmethod
    def mark(self, complete: bool) -> None: ...

    @abstractmethod
    def note_epoch(self) -> None: ...

    @abstractmethod
    def note_state(self) -> None: ...

    @abstractmethod
    def copy_files(self) -> None: ...

    @abstractmethod
    def send_lease(self, lease: int) -> None:
        """Answer HANDOVER, if the connection is still there."""

    @abstractmethod
    def open_engine(self) -> None: ...

    @abstractmethod
    def retire(self) -> None: ...

    @abstractmethod
    def execute(self) -> None: ...

    @abstractmethod
    def follow(self) -> None: ...

    def alarm(self, text: str) -> None:
        raise Broken(f"{self}: {text}")

    # Actions

    def carry_out(self, action: Action) -> None:
        match action.do:
            case Do.READ if self.deleting:
                self.held_read = action.read
            case Do.READ:
                self.call("read", action.read)
            case Do.PATIENCE | Do.RETRY:
                self.start_timer(PatienceOver if action.do is Do.PATIENCE else RetryNow, action.wait_ms)
            case Do.MARK_INCOMPLETE | Do.MARK_COMPLETE:
                self.mark(action.do is Do.MARK_COMPLETE)
            case Do.LEASE if self.lease is not None:
                self.send_lease(self.lease[0])
            case Do.BID | Do.LEASE:
                self.call("grant", action.do)
            case Do.GIVE_UP:
                self.call("revoke", self.lease[0] if self.lease else 0)
            case Do.REVOKE_LEAD:
                self.deleting = True
                self.call("delete_lead", self.member.seen.at)
            case Do.CLAIM:
                if not self.claiming:
                    self.claiming = True
                    self.call("grant", action.do)
            case Do.ALARM:
                self.alarm(action.text)
            case do:
                self._simple(do)

    def _simple(self, do: Do) -> None:
        actions: dict[Do, Callable[[], None]] = {
            Do.HELLO: self.connect,
            Do.HANG_UP: self.hang_up,
            Do.STOP: self.stop_receiving,
            Do.NOTE: self.note_epoch,
            Do.NOTE_STATE: self.note_state,
            Do.COPY: self.copy_files,
            Do.OPEN: self.open_engine,
            Do.SERVE: self.serve,
            Do.RETIRE: self.retire,
            Do.EXEC: self.execute,
            Do.FOLLOW: self.follow,
        }
        actions[do]()

    def serve(self) -> None:
        seen = self.member.seen
        revision, isr = self.won or (seen.revision, seen.isr)
        self.book, self.tenure = Book(self.member.me, revision, isr), Tenure(self.member.me)
        if not self.won:
            self.held = seen.lease if seen.lead == self.member.me else 0
        if self.lease is not None and self.lease[0] == self.held:
            self.tenure.kept_alive(self.lease[1])
        self.world.seen["leaders that served"] += 1

    # Etcd's answers

    def hear_etcd(self, call: Call) -> None:
        answer: Callable[[Call], None] = getattr(self, f"on_{call.kind}")
        answer(call)

    def on_read(self, call: Call) -> None:
        if call.args[0] < self.member.reads and self.world.chance.random() < 0.5:
            return  # a newer READ replaces it
        self.see(call.result, call.args[0])

    def see(self, seen: Seen, read: int) -> None:
        if self.book is not None and seen.epoch == self.member.term:
            self.book.know(seen.revision, seen.isr)
        self.tell(seen._replace(read=read, first=self.first))

    def on_grant(self, call: Call) -> None:
        wish, member = call.args[0], self.member
        if wish is Do.CLAIM:
            self.call("claim", member.me, member.seen.revision, call.result)
            self.claim = (call.result, call.sent_ms)
            return
        self.lease = (call.result, call.sent_ms)
        if wish is Do.LEASE:
            self.send_lease(call.result)
        elif wish is Do.BID and member.state is State.RUN and member.bid is not None:
            self.call("bid", member.me, member.bid, call.result)

    def on_claim(self, call: Call) -> None:
        self.claiming = False
        if call.result is None:
            self.tell_read()
        elif self.tenure is not None:
            self.lease, self.held = self.claim, self.claim[0]
            self.tenure.kept_alive(self.lease[1])
            self.world.seen["leads claimed again"] += 1

    def tell_read(self) -> None:
        self.call("read", self.member.reads)

    def on_bid(self, call: Call) -> None:
        bid = call.args[1]
        if call.result is not None and bid == self.member.bid:
            self.won, self.held = (call.result, bid.isr), call.args[2]
        self.tell(BidAnswered(call.result is not None, bid.nonce))

    def on_change(self, call: Call) -> None:
        if self.book is None:
            return
        if call.result is None:
            self.tell_read()
        else:
            self.book.know(call.result, call.args[0].isr)
            self.world.seen["changes of the ISR"] += 1

    def on_hand_over(self, call: Call) -> None:
        self.world.seen["handovers"] += call.result is not None
        self.tell(Retired())

    def on_keep_alive(self, call: Call) -> None:
        if self.lease is None or call.args[0] != self.lease[0]:
            return
        if call.result:
            self.lease = (self.lease[0], max(self.lease[1], call.sent_ms))
            if self.tenure is not None and self.lease[0] == self.held:
                self.tenure.kept_alive(call.sent_ms)
            return
        if self.tenure is not None and self.lease[0] == self.held:
            self.tenure.lease_lost()
        self.lease = None

    def on_revoke(self, call: Call) -> None:
        if self.lease is not None and self.lease[0] == call.args[0]:
            self.lease = None
        self.tell(GaveUp())

    def on_delete_lead(self, _: Call) -> None:
        """Actions are carried out in order: the read that follows waits for this."""
        self.deleting = False
        self.call("read", self.held_read)

    def miss_etcd(self, call: Call) -> None:
        """No answer came."""
        if call.kind in ("read", "revoke", "delete_lead"):
            self.call(call.kind, *call.args)
        elif call.kind == "bid":
            self.world.seen["bids in doubt"] += 1
            self.tell(BidAnswered(None, call.args[1].nonce))
        elif call.kind == "grant" and call.args[0] is Do.BID:
            self.tell(BidAnswered(False, self.member.bid.nonce if self.member.bid else ""))
        elif call.kind in ("claim", "grant"):
            self.claiming = False
            self.tell_read()
        elif call.kind == "change":
            self.world.seen["changes in doubt"] += 1
            self.tell_read()
        elif call.kind == "hand_over":
            self.tell(Retired())
