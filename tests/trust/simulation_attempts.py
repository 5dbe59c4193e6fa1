"""The auditor's judgement of attempts: those that a look at a message tells agree with the deliveries that its clients saw.

Every delivery that a client was given is in the list, in order, with its time, number, consumer and outcome, until a power cut
may have taken it or its group began anew. An attempt that no client saw can only come from a request without an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.trust.simulation_auditor import Fetch, Got
from tests.trust.simulation_groups import GroupsAuditor
from tests.trust.simulation_ledger import OVER, At
from turtlemq.attempts import ACKED, DEAD, EXPIRED, FAILED, GIVEN_BACK, KEPT, Attempt
from turtlemq.broker.results import Acked
from turtlemq.settings import Settings
from turtlemq.topic.message_view import MessageView

_OPEN = frozenset({None, EXPIRED, DEAD})  # outcomes of a delivery that no client has answered
_ANY = frozenset({None, ACKED, FAILED, EXPIRED, GIVEN_BACK, DEAD})


@dataclass(slots=True)
class Seen:
    """A delivery that a client was given."""

    attempt: int
    reserved_ms: int
    consumer: str
    outcomes: frozenset[str | None] = _OPEN
    ended_ms: int | None = None  # if a client has ended it

    def fits(self, told: Attempt) -> bool:
        same = (told.attempt, told.reserved_ms, told.consumer) == (self.attempt, self.reserved_ms, self.consumer)
        return same and told.outcome in self.outcomes and (self.ended_ms is None or told.ended_ms == self.ended_ms)


@dataclass(slots=True)
class Trails:
    """Of one group."""

    by_id: dict[str, list[Seen]] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)  # times of fetches that were not answered, or that are forgotten


class AttemptsAuditor(GroupsAuditor):
    """Of one topic."""

    has_one_clock = True  # of all leaders; else the times of attempts are not known

    def __init__(self, case: str, settings: Settings) -> None:
        super().__init__(case, settings)
        self._trails: dict[str, Trails] = {}

    def _trail(self, group: str, id_: str) -> list[Seen]:
        return self._of(group).by_id.setdefault(id_, [])

    def _of(self, group: str) -> Trails:
        return self._trails.setdefault(group, Trails())

    def _forget(self, group: str) -> None:
        """From now on it is unknown which of the attempts so far are told."""
        trails = self._of(group)
        trails.unheard |= {seen.reserved_ms for trail in trails.by_id.values() for seen in trail}
        trails.by_id = {}

    # Deliveries that clients see

    def fetched(self, asked: Fetch, got: Sequence[Got] | None, more: bool = False) -> None:
        super().fetched(asked, got, more)
        if got is None:
            self._of(asked.group).unheard.add(self.now)
        for one in got or ():
            seen = Seen(one.attempt, self.now, asked.consumer)
            if asked.auto:
                seen.outcomes, seen.ended_ms = frozenset({ACKED}), self.now
            self._trail(asked.group, one.id).append(seen)

    def acked(
        self, group: str, acks: Sequence[str], delay: int | None, told: Acked | None, leases: Sequence[str] | None = None
    ) -> None:
        super().acked(group, acks, delay, told, leases)
        untouched = {*told.unknown, *told.late} if told is not None else set()
        for ack in acks:
            id_ = ack.removeprefix("-")
            if id_ not in untouched:
                self._ended(group, id_, frozenset({FAILED, DEAD}) if ack != id_ else frozenset({ACKED}), told is not None)

    def given_back(self, group: str, ids: Sequence[str], told: tuple[int, list[str]] | None) -> None:
        super().given_back(group, ids, told)
        for id_ in ids:
            if told is None or id_ not in told[1]:
                self._ended(group, id_, frozenset({GIVEN_BACK}), told is not None)

    def _ended(self, group: str, id_: str, outcomes: frozenset[str | None], sure: bool) -> None:
        """A client has ended the last delivery; without `sure`, perhaps. If it saw another one last, it ended an unseen one."""
        trail = self._trail(group, id_)
        if trail and trail[-1].outcomes is _OPEN and sure:
            trail[-1].outcomes, trail[-1].ended_ms = outcomes, self.now
            if self._of(group).unheard and max(self._of(group).unheard) >= trail[-1].reserved_ms:
                trail[-1].outcomes, trail[-1].ended_ms = _ANY, None
        elif trail and not sure:
            trail[-1].outcomes, trail[-1].ended_ms = _ANY, None

    def cut(self) -> None:
        super().cut()
        for group in [*self._trails]:
            self._forget(group)

    def _may_be_buried(self, group: str) -> None:  # when a group is moved, deleted or forgotten
        super()._may_be_buried(group)
        self._forget(group)

    # Attempts that are told

    def attempts_told(self, id_: str, view: MessageView) -> None:
        """Requires: the message is not cancelled."""
        if not self.has_one_clock:
            return
        for group in {*self.groups} & {*view.groups}:
            told = [one for name, one in view.attempts if name == group]
            self._complete(group, id_, told)
            self._sound(group, id_, told)
            self.seen["attempts told"] += len(told)

    def _complete(self, group: str, id_: str, told: list[Attempt]) -> None:
        if len(told) > KEPT:
            self.fail("no more attempts are kept", group, id_, told)
        if self.forgetful and self.may_be(group, id_, *OVER):
            return  # the events that tell how it ended may be gone
        left = [*told]
        for seen in reversed(self._trail(group, id_)):
            while left and not seen.fits(left[-1]):
                left.pop()
            if not left and len(told) < KEPT:
                self.fail("every attempt is told", group, id_, seen, told)
            if not left:
                return
            left.pop()

    def _sound(self, group: str, id_: str, told: list[Attempt]) -> None:
        trails = self._of(group)
        times = {seen.reserved_ms for seen in self._trail(group, id_)} | trails.unheard
        for one in told:
            if one.reserved_ms not in times:
                self.fail("an attempt that is told took place", group, id_, one, sorted(times))
            if (one.outcome is None) != (one.ended_ms is None):  # by a clock that steps back, it may end before it began
                self.fail("an attempt that has ended has an outcome", group, id_, one)
        if any(one.outcome is None for one in told[:-1]):
            self.fail("one attempt at a time", group, id_, told)

    # Retried by an operator

    def retried(self, id_: str, group: str, told: str | None) -> None:
        """A message was to be ready now. `told`: `ready`, or the state that forbids it."""
        after = {at: self._at_once(at) for at in self.groups[group].known(id_)}
        if told is None:
            self.widen(group, id_, self._at_once)
        elif told == "done":
            left = self.narrow(group, id_, lambda at: after[at] is not None, "only what waits or is dead is retried")
            self.set(group, id_, [at for key in left if (at := after[key]) is not None])
            self.seen["retried now"] += 1
        elif self.sent[id_].cancelled is False and all(at.kind == "dead" or self._surely_waits(at) for at in after):
            self.fail("what waits for its next attempt, or is dead, can be retried now", group, id_, told)

    def _surely_waits(self, at: At) -> bool:
        return at.kind == "waits" and at.lo > self.latest(at.since)

    def _at_once(self, at: At) -> At | None:
        if at.kind == "dead":
            return At("waits", 1, self.now, self.now, self.moment, first=0)
        if at.kind == "waits":
            return At("waits", at.attempt, self.now, self.now, self.moment, first=at.first, expires=at.expires)
        expired = self._expired(at) if at.kind == "leased" else None
        return None if expired is None else self._at_once(expired)
