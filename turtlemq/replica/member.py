"""The state machine of a replica, as one table: events in, actions out. Pure; a shell carries the actions out.

`Member.handle(event, chance)` takes an event, changes the state along the first row of `TABLE` that fits, and returns its
actions in the order in which they are to be carried out. An event without a row changes facts only. Time appears as two timers,
each of which the shell restarts with an action and reports with an event; `chance` is a random number in [0, 1).

- **R6** A copy that is replaced is in no ISR: the leader says so (`membership.Book.greet`), etcd is read again, and `complete =
  false` is durable before a file changes. `complete = true` comes when the stream has passed the last pin.
- **R7** A replica runs for leader if it is complete, healthy and in the ISR, `lead` is absent, and it has heard no BEAT for E,
  random in [2.5 T, 5 T]; a broken connection ends the wait at once, unless a promise was given. It stops receiving and
  acknowledging, applies the records that it has, and sends one transaction: IF mod_revision(state) = m AND
  create_revision(lead) = 0 THEN put `state` and `lead`. In doubt, the nonce tells; if `state` is unchanged, the lease of the
  bid is revoked, and with it the bid can no longer be applied.
- **R8** A leader that meets a higher epoch than its own stops. A replica that reads a lower epoch, or an older revision, than
  it has seen stops: etcd was restored from an old copy. Each `state` that it sees is noted on its disk (NOTE_STATE), so that a
  process that starts later knows as much.
- **R11** A replica whose machine lost power while it followed or led may lack records that it had acknowledged, for acks are
  not always synced. It runs only if the machines of all other members have lost power as well, since `state` was last changed,
  or if it has waited long enough for them.
- **R9** At epoch 0, with an empty ISR, the first node of `want` runs, with an empty folder or the one that was named.
- A lease that ended while its holder still leads is replaced: IF mod_revision(state) is still the same THEN put `lead` (CLAIM).

A promise: a BEAT may ask for one (`tenure.Tenure.asks_promise`). The standby that acknowledges it does not run for the next 2.5
T. A process that has just started may have promised before, so it waits for as long, unless it is alone in the ISR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from turtlemq.replica.member_events import (
    WENT_BACK,
    Action,
    Beat,
    Begin,
    Bid,
    BidAnswered,
    Copied,
    Do,
    Drained,
    Event,
    Failed,
    GaveUp,
    HandoverAsked,
    HandoverOffered,
    Health,
    Lost,
    Marked,
    Met,
    Opened,
    PatienceOver,
    Refused,
    Retired,
    RetryNow,
    Seen,
    State,
    Unwatched,
    Waited,
    Welcomed,
)
from turtlemq.replica.tenure import BEAT_MS

_PATIENCE = (2.5, 5.0)  # of T: the range of E
_NOTHING = Seen(at=0)


@dataclass
class Member:
    """A replica's process: its state, and the facts that guards of the table look at."""

    me: str  # the replica: an id made with its folder
    process: str  # an id of this process, made at random
    complete: bool  # the file REPLICA says so
    epoch: int = 0  # the highest seen; at the start, the one of the file REPLICA
    fresh: bool = False  # the folder may begin a shard (R9): it is empty, or was named for that
    beat_ms: int = BEAT_MS
    state: State = State.START
    healthy: bool = True
    seen: Seen = _NOTHING
    bid: Bid | None = None
    following: int = 0  # epoch of the leader that this process is attached to
    term: int = 0  # epoch in which this process leads
    patient: bool = True  # BEATs and promises forbid to run
    promised: bool = True  # a broken connection does not end the wait: the last BEAT asked for a promise, or one may have before
    calling: bool = False  # HELLO has no answer yet
    copying: bool = False  # files are being replaced
    copied: bool = False  # and all of them are in place
    drained: bool = False  # all received records are applied
    doubt: bool | None = None  # of the bid. True: it may still be applied; False: no longer; None: it was not in doubt
    agreed: int = 0  # epoch of a leader that hands over to this replica
    reads: int = 0  # number of the last READ
    fresh_from: int = 1  # reads from this one on began when everything known here was true already
    went_back: bool = False  # the last `Seen` shows that etcd was restored
    revision: int = 0  # of `state`, the newest seen of this epoch; at the start, the one of the file REPLICA
    rebooted: bool = False  # its machine lost power: this copy may lack records that it had acknowledged, and not synced

    def handle(self, event: Event, chance: float) -> list[Action]:
        """Take an event. Returns the actions to carry out, in this order."""
        known = self.epoch, self.revision
        if not self._learn(event):
            return []
        dos = self._step(event)
        if isinstance(event, Seen) and (self.epoch, self.revision) > known:
            dos = Do.NOTE_STATE, *dos
        return [self._action(do, event, chance) for do in dos]

    def _step(self, event: Event) -> tuple[Do, ...]:
        """Change the state along the first row of the table that fits. Returns the actions of the row."""
        for row in TABLE:
            if self.state in row.states and isinstance(event, row.event) and row.when(self, event):
                self.state = row.then or self.state
                return row.do
        return ()

    def _learn(self, event: Event) -> bool:
        """Keep the facts of an event. False: it is older than those known, and is dropped."""
        match event:
            case Seen():
                return self._see(event)
            case Welcomed(epoch=epoch):
                self.calling = self.copying = self.copied = False
                self.patient, self.following, self.agreed = True, epoch, 0
                self._know_epoch(epoch)
            case Beat(epoch=epoch, promise=promise) if epoch == self.following and self.state in _FOLLOWS:
                self.patient, self.promised = True, promise
            case Refused() | Lost():
                self.calling = False
                self.patient = self.patient and self.promised if isinstance(event, Lost) else self.patient
            case PatienceOver():
                self.patient = self.promised = False
            case Marked(complete=complete):
                self.complete = complete
                self.rebooted = self.rebooted and not complete
            case Waited():
                self.rebooted = False
            case Copied():
                self.copied = all_copied(self, event)
            case Drained():
                self.drained = True
            case BidAnswered(nonce=nonce) if self.bid is None or nonce != self.bid.nonce:
                return False
            case BidAnswered(won=won):
                self.doubt = True if won is None else None
                self._know_epoch(self.bid.epoch if won and self.bid else 0)
            case GaveUp():
                self.doubt = False
            case HandoverOffered(epoch=epoch, equal=True) if epoch == self.following:
                self.agreed = epoch
            case Health(good=good):
                self.healthy = good
        return True

    def _see(self, seen: Seen) -> bool:
        old = seen.at < self.seen.at or (seen.epoch, seen.revision) < (self.epoch, self.revision)
        self.went_back = old and seen.read >= self.fresh_from
        if old:  # a watch may have overtaken the last READ: it is answered by the newer facts
            return self.went_back or (seen.at < self.seen.at and seen.read == self.reads)
        if seen.at > self.seen.at:
            self.fresh_from = self.reads + 1
        self.seen, self.epoch, self.revision = seen, seen.epoch, seen.revision
        return True

    def _know_epoch(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.revision, self.fresh_from = epoch, 0, self.reads + 1

    def _action(self, do: Do, event: Event, chance: float) -> Action:
        match do:
            case Do.READ:
                self.reads += 1
                return Action(do, read=self.reads)
            case Do.PATIENCE:
                low, high = _PATIENCE
                return Action(do, wait_ms=round(self.beat_ms * (low + (high - low) * chance)))
            case Do.RETRY:
                return Action(do, wait_ms=round(self.beat_ms * chance))
            case Do.ALARM:
                return Action(do, text=event.why if isinstance(event, Failed) else WENT_BACK)
            case Do.HELLO:
                self.calling = True
            case Do.HANG_UP:
                self.patient = self.patient and self.promised
            case Do.MARK_INCOMPLETE:
                self.copying = True
            case Do.STOP:
                self.calling, self.drained, self.bid, self.doubt = False, False, None, None
            case Do.BID:
                seen = self.seen
                isr = seen.isr - {seen.leader} | {self.me}
                self.bid = Bid(seen.revision, seen.epoch + 1, isr, f"{self.process}/{seen.revision}")
            case Do.OPEN:
                self.term = self.epoch
            case _:
                pass
        return Action(do)


# ── guards ───────────────────────────────────────────────────────────────────────────────────────────────


def always(_: Member, __: Event) -> bool:
    return True


def went_back(m: Member, _: Event) -> bool:
    """R8: etcd knows less than it did."""
    return m.went_back


def deposed(m: Member, event: Event) -> bool:
    """R8: there is a later leader."""
    return (event.epoch if isinstance(event, Met) else m.seen.epoch) > m.term


def may_run(m: Member, _: Event) -> bool:
    """R7 and R9, without the wait."""
    began = m.seen.epoch > 0
    may_lead = m.healthy and m.complete and has_most(m)
    return may_lead and m.seen.lead is None and (m.me in m.seen.isr if began else m.fresh and m.seen.first)


def has_most(m: Member) -> bool:
    """R11: has no other member records that this copy may have lost with the power of its machine?"""
    return not m.rebooted or m.seen.isr - {m.me} <= m.seen.rebooted


def may_run_now(m: Member, event: Event) -> bool:
    """R7: the wait is over."""
    return may_run(m, event) and not m.patient


def may_run_alone(m: Member, event: Event) -> bool:
    """There is no other member to which this replica can have given a promise, or which could run."""
    return may_run(m, event) and m.seen.isr <= {m.me}


def begins_shard(m: Member, _: Event) -> bool:
    """R9: an empty folder is complete if the shard has never had a leader."""
    return m.fresh and not m.complete and m.seen.first and m.seen.epoch == 0


def elected(m: Member, _: Event) -> bool:
    """`state` names this process as leader: by its bid, or by the handover to which it agreed."""
    by_bid = m.bid is not None and m.seen.nonce == m.bid.nonce
    return m.seen.leader == m.me and (by_bid or 0 < m.agreed == m.seen.epoch - 1)


def elected_and_drained(m: Member, event: Event) -> bool:
    return m.drained and elected(m, event)


def won(_: Member, event: Event) -> bool:
    return isinstance(event, BidAnswered) and event.won is True


def refused(_: Member, event: Event) -> bool:
    return isinstance(event, BidAnswered) and event.won is False


def outvoted(m: Member, event: Event) -> bool:
    """The bid can no longer be applied: `state` has changed, or the lease of the bid is gone."""
    return m.bid is not None and (m.seen.revision != m.bid.revision or (m.doubt is False and newest(m, event)))


def in_doubt(m: Member, event: Event) -> bool:
    """A read that began after the bid still shows `state` as it was."""
    return m.doubt is True and newest(m, event)


def newest(m: Member, event: Event) -> bool:
    """This answers the last READ."""
    return isinstance(event, Seen) and event.read == m.reads


def own_lead(m: Member, _: Event) -> bool:
    """An earlier process of this folder held `lead`. It has ended: this one has the lock."""
    return m.seen.lead == m.me


def lost_lead(m: Member, _: Event) -> bool:
    """The lease has ended, and no other replica was elected."""
    return m.seen.lead is None


def other_leads(m: Member, _: Event) -> bool:
    return m.seen.lead is not None and not m.calling


def other_epoch(m: Member, _: Event) -> bool:
    """The leader that this process is attached to is deposed."""
    return m.seen.epoch > m.following


def silent(m: Member, event: Event) -> bool:
    """No BEAT has come for E, and etcd was asked why."""
    return not m.patient and newest(m, event)


def in_isr(m: Member, _: Event) -> bool:
    return m.me in m.seen.isr


def not_in_isr(m: Member, _: Event) -> bool:
    return m.me not in m.seen.isr


def still_in_isr(m: Member, event: Event) -> bool:
    """R6: a read that began after WELCOME shows this replica in the ISR. Its files must not be replaced."""
    return newest(m, event) and not m.copying and m.me in m.seen.isr


def may_copy(m: Member, event: Event) -> bool:
    """R6: a read that began after WELCOME shows that this replica is no member."""
    return newest(m, event) and not m.copying


def marked_incomplete(m: Member, event: Event) -> bool:
    return m.copying and isinstance(event, Marked) and not event.complete


def marked_complete(m: Member, event: Event) -> bool:
    """Not the mark of an earlier copy, which was under way when its connection ended."""
    return m.copying and m.copied and isinstance(event, Marked) and event.complete


def all_copied(_: Member, event: Event) -> bool:
    """The stream has passed the last pin, so that all files are at one LSN."""
    return isinstance(event, Copied) and event.applied_lsn >= event.pin_lsn


def earlier_leader(m: Member, event: Event) -> bool:
    return isinstance(event, Welcomed) and event.epoch < m.epoch


def resumes(m: Member, event: Event) -> bool:
    return isinstance(event, Welcomed) and event.resume and m.complete


def replaces(_: Member, event: Event) -> bool:
    return isinstance(event, Welcomed) and not event.resume


def from_leader(m: Member, event: Event) -> bool:
    return isinstance(event, Beat) and event.epoch == m.following


def agreed(m: Member, event: Event) -> bool:
    return isinstance(event, HandoverOffered) and event.equal and event.epoch == m.following


def can_hand_over(m: Member, event: Event) -> bool:
    """The other replica is in sync."""
    return isinstance(event, HandoverAsked) and event.to in m.seen.isr - {m.me}


def copy_lost(_: Member, event: Event) -> bool:
    return isinstance(event, Failed) and event.copy_lost


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    """In one of these states, this event has these actions if the guard says so."""

    states: frozenset[State]
    event: type[Event]
    when: Callable[[Member, Event], bool]
    do: tuple[Do, ...]
    then: State | None = None  # None: the state stays


S, D = State, Do
_ANY = frozenset(State) - {S.STUCK}
_START, _ATTACH, _SYNC, _IN_SYNC, _RUN, _OPEN, _LEAD, _RETIRE = (
    frozenset({s}) for s in (S.START, S.ATTACH, S.SYNC, S.IN_SYNC, S.RUN, S.OPEN, S.LEAD, S.RETIRE)
)
_FOLLOW = frozenset({S.FOLLOW})
_FOLLOWS = _FOLLOW | _IN_SYNC
_LEADS = _OPEN | _LEAD | _RETIRE

TABLE = (
    # states, event, guard, actions, next state
    Row(_ANY, Failed, copy_lost, (D.MARK_INCOMPLETE, D.ALARM), S.STUCK),
    Row(_ANY, Failed, always, (D.ALARM,), S.STUCK),
    Row(_LEADS, Seen, went_back, (D.ALARM, D.EXEC), S.START),
    Row(_ANY, Seen, went_back, (D.ALARM,), S.STUCK),
    Row(_ANY, Unwatched, always, (D.READ,)),
    # A process begins: it waits, as it may have promised not to run
    Row(_START, Begin, always, (D.READ,)),
    Row(_START, Seen, own_lead, (D.REVOKE_LEAD, D.READ)),
    Row(_START, Seen, begins_shard, (D.MARK_COMPLETE,)),
    Row(_START, Marked, always, (D.READ,)),
    Row(_START, Seen, may_run_alone, (D.STOP,), S.RUN),
    Row(_START, Seen, always, (D.PATIENCE, D.READ), S.ATTACH),
    # It looks for the leader
    Row(_ATTACH, Seen, elected, (D.STOP,), S.RUN),
    Row(_ATTACH, Seen, own_lead, (D.REVOKE_LEAD, D.READ)),
    Row(_ATTACH, Seen, may_run_now, (D.STOP,), S.RUN),
    Row(_ATTACH, Seen, other_leads, (D.HELLO,)),
    Row(_ATTACH, Welcomed, earlier_leader, (D.HANG_UP, D.RETRY)),
    Row(_ATTACH, Welcomed, resumes, (D.PATIENCE, D.NOTE, D.FOLLOW), S.FOLLOW),
    Row(_ATTACH, Welcomed, replaces, (D.READ,), S.SYNC),
    Row(_ATTACH, Welcomed, always, (D.HANG_UP, D.RETRY)),
    Row(_ATTACH, Refused, always, (D.RETRY,)),
    Row(_ATTACH, Lost, always, (D.RETRY,)),
    Row(_ATTACH, RetryNow, always, (D.READ,)),
    Row(_ATTACH, PatienceOver, always, (D.READ,)),
    Row(_ATTACH, Health, always, (D.READ,)),
    Row(_ATTACH, Waited, always, (D.READ,)),
    # It replaces its files
    Row(_SYNC, Seen, other_epoch, (D.HANG_UP, D.READ), S.ATTACH),
    Row(_SYNC, Seen, still_in_isr, (D.HANG_UP, D.RETRY), S.ATTACH),
    Row(_SYNC, Seen, may_copy, (D.MARK_INCOMPLETE,)),
    Row(_SYNC, Marked, marked_incomplete, (D.COPY,)),
    Row(_SYNC, Copied, all_copied, (D.MARK_COMPLETE,)),
    Row(_SYNC, Marked, marked_complete, (D.PATIENCE, D.NOTE, D.FOLLOW), S.FOLLOW),
    Row(_SYNC, Lost, always, (D.READ,), S.ATTACH),
    # It follows
    Row(_FOLLOWS, Beat, from_leader, (D.PATIENCE,)),
    Row(_FOLLOWS, Lost, always, (D.READ,), S.ATTACH),
    Row(_FOLLOWS, PatienceOver, always, (D.READ,)),
    Row(_FOLLOWS, HandoverOffered, agreed, (D.LEASE,)),
    Row(_FOLLOWS, Seen, elected, (D.STOP,), S.RUN),
    Row(_FOLLOWS, Seen, may_run_now, (D.STOP,), S.RUN),
    Row(_FOLLOWS, Seen, other_epoch, (D.HANG_UP, D.READ), S.ATTACH),
    Row(_FOLLOWS, Seen, silent, (D.HANG_UP, D.READ), S.ATTACH),
    Row(_FOLLOW, Seen, in_isr, (), S.IN_SYNC),
    Row(_IN_SYNC, Seen, not_in_isr, (), S.FOLLOW),
    # It stands for election. A process that ran as soon as it had started has no election timer before it has lost
    Row(_RUN, Drained, elected, (D.NOTE, D.OPEN), S.OPEN),
    Row(_RUN, Drained, may_run, (D.BID,)),
    Row(_RUN, Drained, always, (D.PATIENCE, D.READ), S.ATTACH),
    Row(_RUN, BidAnswered, won, (D.NOTE, D.OPEN), S.OPEN),
    Row(_RUN, BidAnswered, refused, (D.PATIENCE, D.READ), S.ATTACH),
    Row(_RUN, BidAnswered, always, (D.READ,)),
    Row(_RUN, Seen, elected_and_drained, (D.NOTE, D.OPEN), S.OPEN),
    Row(_RUN, Seen, outvoted, (D.PATIENCE, D.READ), S.ATTACH),
    Row(_RUN, Seen, in_doubt, (D.GIVE_UP,)),
    Row(_RUN, GaveUp, always, (D.READ,)),
    # It leads
    Row(_LEADS, Seen, deposed, (D.EXEC,), S.START),
    Row(_LEADS, Met, deposed, (D.EXEC,), S.START),
    Row(_OPEN, Opened, always, (D.SERVE, D.READ), S.LEAD),
    Row(_LEAD, Seen, lost_lead, (D.CLAIM,)),
    Row(_LEAD, HandoverAsked, can_hand_over, (D.RETIRE,), S.RETIRE),
    Row(_RETIRE, Retired, always, (D.EXEC,), S.START),
)
