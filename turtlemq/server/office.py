"""A leader's term in office: it keeps the in-sync set with transactions, and knows whether it may answer.

Decisions are those of `replica.membership` (which members an answer needs), `replica.tenure` (the right to answer) and
`replica.attendance` (which member is let go); here they are wired to the connections of `replica.lead` and to etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turtlemq.replica.attendance import NEAR_BYTES, Attendance
from turtlemq.replica.cluster_state import ShardState, decode
from turtlemq.replica.etcd import EtcdError, Outcome
from turtlemq.replica.frames import Hello
from turtlemq.replica.interventions import successor, unwanted
from turtlemq.replica.lead import Lead
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import Event, HandoverAsked, Met, Seen, State
from turtlemq.replica.membership import Book, Change, Greeting
from turtlemq.replica.tenure import Tenure
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.metrics.meter import Meter
from turtlemq.server.replica_names import ReplicaNames, boot_ms

LOOK_S = 0.1  # between two looks at the members
SETTLED_MS = 2_000  # a new leader does not follow wishes to hand over before


class Office:
    """The term of this process as leader, from SERVE to its end. All methods run on the event loop."""

    def __init__(
        self,
        part: ClusterPart,
        names: ReplicaNames,
        member: Member,
        lead: Lead,
        won: tuple[int, frozenset[str]] | None,
        tell: Callable[[Event], None],
        read: Callable[[], None],
        meter: Meter,
    ) -> None:
        """`won`: revision and ISR of the transaction that elected this leader; None after a handover. `read`: asks etcd."""
        self._part, self._names, self._member, self._lead, self._tell, self._read = part, names, member, lead, tell, read
        self._meter = meter
        seen = member.seen
        revision, isr = won or (seen.revision, seen.isr)
        options = part.options
        self.book = Book(member.me, revision, isr)
        self.tenure = Tenure(member.me, 1000 * options.lease_s, options.heartbeat_ms)
        self._lead_lease = 0  # on which `lead` hangs, if it is one of this process
        self._began_ms = boot_ms()
        self._gone_ms: dict[str, int] = {}  # when the last connection of a member has ended
        self._unfit: set[str] = set()  # members whose files must be replaced: they have to leave first
        self._changing: asyncio.Task[None] | None = None
        self._soon: asyncio.Handle | None = None
        self._frozen = False  # a handover is under way
        self.must_leave = False  # a sync has failed: the files of this leader cannot be trusted
        if won is not None or (seen.lead, seen.lease) == (member.me, names.lease):
            self._hold(names.lease, names.lease_sent_ms)
        self._wire()

    def _wire(self) -> None:
        lead, names = self._lead, self._names
        lead.may_sync = lambda member: member not in self.book.required()
        lead.refuses, lead.unfit, lead.higher_epoch = self._refuses, self._is_unfit, lambda epoch: self._tell(Met(epoch))
        lead.attached, lead.detached, lead.acked = self._attached, self._detached, self._acked
        lead.promised = lambda member, sent_s: self.tenure.promised(member, int(1000 * sent_s))
        lead.asks_promise = lambda: self.tenure.asks_promise(boot_ms())
        lead.check_may_answer = lambda: self.tenure.check_may_answer(boot_ms(), self.book.required())
        names.kept, names.lost = self._kept, self._lost

    # The lease

    def _hold(self, lease: int, sent_ms: int) -> None:
        """`lead` hangs on a lease of this process."""
        self._lead_lease = lease
        self.tenure.kept_alive(sent_ms)

    def _kept(self, lease: int, sent_ms: int) -> None:
        if lease == self._lead_lease:
            self.tenure.kept_alive(sent_ms)

    def _lost(self, lease: int) -> None:
        if lease == self._lead_lease:
            self._lead_lease = 0
            self.tenure.lease_lost()

    async def claim(self) -> None:
        """Put `lead` again: its lease has ended, and no other replica was elected."""
        member = self._member
        try:
            lease = await self._names.claim(member.term, member.seen.revision)
        except EtcdError as error:
            logs.warning("claim_failed", error=error)
            await asyncio.sleep(LOOK_S)
            lease = 0
        if lease:
            self._hold(lease, self._names.lease_sent_ms)
            logs.info("lead_claimed", epoch=member.term)
        else:
            self._read()

    # Standbys

    def _refuses(self, hello: Hello) -> str:
        if self._frozen:
            return "this leader hands over"
        want = self._part.decoded().shard(self._part.shard).want
        if want is not None and hello.node not in want.nodes:
            return f"node {hello.node} should have no copy of this shard: 'want' in etcd does not name it"
        return ""

    def _is_unfit(self, member: str) -> None:
        """The files of a standby must be replaced. A member has to leave the in-sync set first (R6)."""
        if self.book.greet(member, None) is Greeting.LATER:
            self._unfit.add(member)
            self.look_soon()
        self._lead.changed()

    def _attached(self, member: str, lsn: int) -> None:
        self.book.greet(member, lsn)
        self._gone_ms.pop(member, None)
        self._unfit.discard(member)
        self.look_soon()

    def _detached(self, member: str) -> None:
        self._gone_ms[member] = boot_ms()
        self.book.withdraw(member)
        self._lead.changed()

    def _acked(self, member: str, lsn: int) -> None:
        self.book.acknowledge(member, lsn)
        if member not in self.book.isr:
            self.look_soon()

    # The in-sync set

    def saw(self, seen: Seen) -> None:
        """A read or a watch of etcd."""
        if seen.epoch != self._member.term:
            return
        self.book.know(seen.revision, seen.isr)
        if seen.lead == self._member.me and seen.lease and seen.lease == self._names.lease:
            self._hold(seen.lease, self._names.lease_sent_ms)
        elif self._lead_lease and seen.revision >= self.book.revision and seen.lease != self._lead_lease:
            self._lost(self._lead_lease)
        self._lead.changed()
        self.look_soon()

    def look_soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._look)

    async def watch(self) -> None:
        """Look after the members, and follow wishes to hand over, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
            self._follow_wish()

    def _look(self) -> None:
        """Send the next transaction, if the in-sync set should be another one."""
        self._soon = None
        if self._changing is not None or self._frozen or self._member.state is not State.LEAD:
            return
        change = self._let_go() or self._take_in()
        if change is not None:
            self._changing = asyncio.create_task(self._change(change))

    def _let_go(self) -> Change | None:
        book, lag_max_ms = self.book, round(1000 * self._part.options.lag_max_s)
        view = self._part.decoded()
        going = dict.fromkeys(self._unfit, 1)
        going |= unwanted(view, self._part.shard)
        least = view.config.min_isr if view.config is not None else 1
        now_ms = boot_ms()
        for member in book.required() - {book.me} - going.keys():  # also those of a transaction in doubt
            if self._attendance(member, now_ms).must_go(lag_max_ms):
                going[member] = least
        for min_isr in sorted(set(going.values())):
            change = book.let_go({member for member, most in going.items() if most == min_isr}, min_isr)
            if change is not None:
                return change
        return None

    def _attendance(self, member: str, now_ms: int) -> Attendance:
        standby = self._lead.standbys.get(member)
        if standby is None:
            gone_ms = self._gone_ms.get(member)
            return Attendance(False, gone_ms is not None, now_ms - (self._began_ms if gone_ms is None else gone_ms))
        silent_s = asyncio.get_running_loop().time() - standby.link.heard_s
        return Attendance(True, lag_ms=round(1000 * self._lead.lag_s(member)), silent_ms=round(1000 * silent_s))

    def _take_in(self) -> Change | None:
        for member in self._lead.standbys.keys() - self.book.isr:  # also those of a transaction in doubt
            if self._lead.lag_bytes(member) < NEAR_BYTES:
                self.book.want(member, self._lead.stream.lsn)
        return self.book.take_in()

    async def _change(self, change: Change) -> None:
        before = self.book.isr
        nodes = {member: standby.hello.node for member, standby in self._lead.standbys.items()}
        grows = change.isr > before
        try:
            why = "isr_extended" if grows else "isr_shrunk"
            outcome = await self._names.change(change, self._member.term, self._member.seen.nonce, nodes, why)
        except EtcdError as error:  # it may be applied later: the larger set counts until a read tells
            logs.warning("isr_change_in_doubt", error=error)
            await asyncio.sleep(LOOK_S)
            self._read()
        else:
            self._settle(change, outcome, before)
        finally:
            self._changing = None
        self.look_soon()

    def _settle(self, change: Change, outcome: Outcome, before: frozenset[str]) -> None:
        if outcome.succeeded:
            self.book.know(outcome.revision, change.isr)
            self._unfit -= before - change.isr
            self._meter.isr_changes += 1
            facts = {"epoch": self._member.term, "isr": len(change.isr), "changed": sorted(change.isr ^ before)}
            if change.isr > before:
                logs.info("isr_extended", **facts)
            else:
                logs.info("isr_shrunk", **facts)
        elif outcome.found:
            found = outcome.found[0]
            state = decode(found.key, found.value, ShardState)
            if state.epoch == self._member.term:
                self.book.know(found.mod_revision, state.isr)
            self._read()
        self._lead.changed()

    # Handover

    def _follow_wish(self) -> None:
        """Hand over if the node is drained, if another one should lead, or if a sync has failed."""
        if self._frozen or self._member.state is not State.LEAD:
            return
        if self.must_leave and (best := self.best()) is not None:
            self._tell(HandoverAsked(best))
            return
        if boot_ms() - self._began_ms < SETTLED_MS:
            return
        view = self._part.decoded()
        to = successor(view, self._part.shard, self._part.options.node, self.ready())
        if to is not None:
            self._tell(HandoverAsked(to))

    def leave(self) -> None:
        """A sync has failed. Another member leads, as soon as there is one; this copy is compared with its files then."""
        if not self.must_leave:
            self.must_leave = True
            logs.error("copy_not_trusted", error="a sync has failed; another member leads as soon as one is in sync")

    def ready(self) -> dict[str, int]:
        """Members that could take over: their LSNs."""
        book = self.book
        return {member: standby.acked for member, standby in self._lead.standbys.items() if member in book.isr}

    def best(self) -> str | None:
        """The member that has most; None: there is none to hand over to."""
        ready = self.ready()
        return max(ready, key=lambda member: (ready[member], member), default=None)

    async def freeze(self) -> None:
        """Change nothing more: a handover is under way."""
        self._frozen = True
        if self._changing is not None:
            await asyncio.wait([self._changing])
