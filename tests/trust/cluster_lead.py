"""The leading side of a simulated replica: records, heartbeats, the in-sync set, handovers, and the right to answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from tests.trust.cluster_copy import CopyFrom
from tests.trust.cluster_doors import NodeDoor, NotedStream
from tests.trust.cluster_ferry import Ferry
from tests.trust.cluster_nodes import Attached, Node, Wire
from tests.trust.membership_shell import Call, Shell
from turtlemq.replica.member_events import HandoverAsked, Met, Retired, State
from turtlemq.replica.membership import Change, Greeting, handed_over_isr
from turtlemq.replica.records import Record, parse_head
from turtlemq.replica.stream import Entry
from turtlemq.replica.tenure import BEAT_MS

LAG_MAX_MS = 3_000
ABSENT_MS = 300  # a member whose connection has ended for so long is let go
COMING_MS = 1_000  # time for members to come to a new leader


class Leading(Shell):
    """Mixed into a replica."""

    node: Node
    alive: bool
    began_at: int
    stream: NotedStream
    new_door: Callable[..., NodeDoor]
    later: Callable[..., None]
    closed = False  # the engine is closed
    worker: Any = None  # of the engine
    flusher: Any = None

    @cached_property
    def attached(self) -> dict[str, Attached]:
        """Standbys, by replica."""
        return {}

    def serve(self) -> None:
        super().serve()
        self._away_ms: dict[str, int] = {}  # by member: since when it is not attached
        self._beats: dict[int, tuple[int, bool]] = {}  # by number: when it was sent, and whether it asked for a promise
        self._woken = self._changing = False
        self._began_ms = self.world.now
        self.stream.wake = self._wake
        self._beat()

    # Answers

    def covered(self) -> int:
        assert self.book is not None
        return self.book.covered(self.stream.lsn)

    def may_answer(self) -> bool:
        """Whether a covered answer may go out now."""
        assert self.book is not None
        assert self.tenure is not None
        leads = self.member.state is State.LEAD and not self.closed
        return leads and self.tenure.may_answer(self.world.now, self.book.required())

    # Records and heartbeats

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.later(self.ship, ms=0)

    def ship(self) -> None:
        self._woken = False
        for each in list(self.attached.values()):
            self._send(each)

    def _send(self, each: Attached) -> None:
        if not 0 <= each.sent < self.stream.lsn:
            return
        entries = self.stream.after(each.sent)
        if entries is None:
            self.world.seen["behind by more than the ring"] += 1
            self._detach(each)
            return
        while entries:
            size = self.world.chance.choice([1, 3, 20, 1_000])
            each.wire.send(each.wire.standby, "records", [_record(entry) for entry in entries[:size]])
            entries = entries[size:]
        each.sent = self.stream.lsn

    def _beat(self) -> None:
        if self.tenure is None:
            return
        now, number = self.world.now, len(self._beats) + 1
        promise = self.tenure.asks_promise(now)
        self._beats[number] = now, promise
        for each in list(self.attached.values()):
            if now - each.wire.heard_ms[self] > max(LAG_MAX_MS, 5 * BEAT_MS):
                self._detach(each)
            else:
                each.wire.send(each.wire.standby, "beat", number, self.member.term, promise)
        self.consider()
        self.later(self._beat, ms=BEAT_MS)

    # Standbys

    def listen(self, wire: Wire, kind: str, args: list[Any]) -> None:
        """A frame of a standby."""
        if kind == "hello":
            self._greet(wire, *args)
            return
        each = next((each for each in self.attached.values() if each.wire is wire), None)
        if each is None:
            return
        if kind in ("end", "full"):
            self._detach(each)
            if kind == "full":
                self._away_ms[each.replica] = -ABSENT_MS
                self.consider()
        elif kind == "file_ok":
            if isinstance(self.worker, Ferry):
                self.worker.arrived(each.replica, args[0])
        elif kind == "ack":
            self._take_ack(each, *args)
        elif kind == "lease":
            if self.retiring == each.replica and self.book is not None:
                isr = handed_over_isr(self.book.me, self.book.isr, self.world.min_isr)
                self.call("hand_over", Change(self.book.revision, isr), self.member.term, self.retiring, args[0])
        elif each.copy is not None:
            each.copy.take(kind, args)

    def _greet(self, wire: Wire, replica: str, epoch: int, lsn: int | None, chain: int | None, complete: bool) -> None:
        self.tell(Met(epoch))
        if not self.alive or self.book is None or self.closed or epoch > self.member.term:
            wire.send(wire.standby, "refused")
            return
        if replica in self.attached:
            self._detach(self.attached[replica])
        fits = complete and lsn is not None and chain is not None and self.stream.resumes(lsn, chain)
        greeting = self.book.greet(replica, lsn if fits else None)
        self.world.seen[f"hello: {greeting.value}"] += 1
        self.world.seen["resumed from records before the start"] += fits and (lsn or 0) < self.began_at
        if greeting is Greeting.LATER:
            self._propose(self.book.let_go({replica}, min_isr=1))
            wire.send(wire.standby, "refused")
            return
        resume = greeting is Greeting.RESUME
        each = Attached(wire, replica, lsn or 0 if resume else -1, lsn or 0 if resume else 0, resume, self.world.now)
        self.attached[replica] = each
        if not resume:
            each.copy = CopyFrom(self, each)
        wire.send(wire.standby, "welcome", self.member.term, resume)
        self._send(each)
        self.consider()

    def _take_ack(self, each: Attached, lsn: int, beat: int) -> None:
        book, tenure = self.book, self.tenure
        if book is None or tenure is None or (not lsn and not each.complete):
            return
        each.complete, each.acked = True, lsn
        if lsn >= self.stream.lsn:
            each.caught_up_ms = self.world.now
        book.acknowledge(each.replica, lsn)
        sent_ms, promise = self._beats.get(beat, (0, False))
        if promise:
            tenure.promised(each.replica, sent_ms)
        if self.retiring:
            self.offer()
        else:
            self.consider()

    def _detach(self, each: Attached) -> None:
        if self.attached.get(each.replica) is each:
            del self.attached[each.replica]
            self._away_ms[each.replica] = self.world.now
            self.later(self.consider, ms=ABSENT_MS)
        if isinstance(self.worker, Ferry):
            self.worker.gone(each.replica)
        if each.copy is not None:
            each.copy.end()
        each.wire.end(self)
        self.world.forget(each.wire)

    # The in-sync set

    def consider(self) -> None:
        """Take in standbys that are near the end, let go members that are away or behind."""
        book = self.book
        if book is None or self._changing or self.member.state is not State.LEAD:
            return
        for replica, each in sorted(self.attached.items()):
            if each.complete and replica not in book.isr:  # also one of a transaction in doubt
                book.want(replica, self.stream.lsn)
        gone = [replica for replica in sorted(book.required() - {book.me}) if self._is_gone(replica)]
        for replica in sorted(book.required() - book.isr):
            if replica not in self.attached:
                book.withdraw(replica)
        self._propose(book.take_in() or book.let_go(gone, self.world.min_isr))

    def _is_gone(self, replica: str) -> bool:
        now: int = self.world.now
        each = self.attached.get(replica)
        if each is None:
            since = self._away_ms.get(replica)
            return now - self._began_ms >= COMING_MS if since is None else now - since >= ABSENT_MS
        return each.acked < self.stream.lsn and now - each.caught_up_ms > LAG_MAX_MS

    def _propose(self, change: Change | None) -> None:
        if change is not None:
            self._changing = True
            self.call("change", change)

    def on_change(self, call: Call) -> None:
        self._changing = False
        super().on_change(call)
        self.world.seen["in-sync set changed"] += call.result is not None

    def miss_etcd(self, call: Call) -> None:
        if call.kind == "change":
            self._changing = False
        super().miss_etcd(call)

    # Handover

    def ask_handover(self, to: str) -> None:
        """Requires: it leads."""
        self.retiring = to
        self.tell(HandoverAsked(to))
        if self.member.state is not State.RETIRE:
            self.retiring = ""

    def offer(self) -> None:
        """The other member has everything, and may lead."""
        each = self.attached.get(self.retiring)
        if each is not None and each.complete and each.acked == self.stream.lsn:
            each.wire.send(each.wire.standby, "handover", self.member.term, self.stream.lsn, self.stream.chain)

    def on_hand_over(self, call: Call) -> None:
        self.world.seen["handovers answered"] += call.result is not None
        self.tell(Retired())


def _record(entry: Entry) -> Record:
    head, chain = parse_head(entry.head)
    return Record(head, chain, entry.path.decode(), entry.data)
