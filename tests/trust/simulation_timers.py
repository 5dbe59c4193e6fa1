"""Ids as timers: the auditor's judgement of puts under ids that may be known, in every mode of `if_exists`.

A message that gave way is forgotten, and the new one under its id begins a life of its own; only the figures remember. A put that
was not answered is looked at after the next start: all of its messages are there, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.trust.simulation_attempts import AttemptsAuditor
from tests.trust.simulation_ledger import OVER, Sent
from turtlemq.if_exists import IfExists
from turtlemq.model import Receipt
from turtlemq.settings import Settings
from turtlemq.topic.message_view import MessageView


@dataclass(frozen=True, slots=True)
class Refusal:
    """A put was refused because of one message."""

    index: int
    state: str


@dataclass(frozen=True, slots=True)
class Timer:
    """A message to be put under an id that may be known."""

    sent: Sent
    mode: IfExists


class TimersAuditor(AttemptsAuditor):
    """Of one topic."""

    def __init__(self, case: str, settings: Settings) -> None:
        super().__init__(case, settings)
        self.former_done: Counter[str] = Counter()  # by group: messages that were surely settled when they gave way
        self.former_maybe_done: Counter[str] = Counter()  # and those that may have been
        self.former_cancelled = 0  # messages that were cancelled before a new one got their id

    def timers(self, batch: Sequence[Timer], told: Receipt | Refusal) -> None:
        """A batch was answered. Requires: distinct ids."""
        if isinstance(told, Refusal):
            self._refused(batch[told.index], told.state)
            return
        for i, timer in enumerate(batch):
            if i in told.replaced:
                self._replaced(timer)
            elif i in told.rescheduled:
                self.rescheduled(timer.sent.id, (timer.sent.due_ms, self._body(timer.sent.id)), True)
            elif told.created[i]:
                self._created(timer)
            elif self._is_free(timer.sent.id):
                self.fail("a cancelled id counts as unknown", timer)
        self.seen["timers put"] += len(batch)

    def timers_found(self, batch: Sequence[Timer], views: Sequence[MessageView | None]) -> None:
        """A batch was not answered; `views`: its ids as a look after the next start has shown them."""
        is_new = [view is not None and view.body == timer.sent.body for timer, view in zip(batch, views, strict=True)]
        surely = {
            new
            for timer, new in zip(batch, is_new, strict=True)
            if timer.mode == IfExists.REPLACE or self._is_free(timer.sent.id)
        }
        if len(surely) > 1 or (surely == {False} and any(is_new)):
            self.fail("a batch is stored whole or not at all", batch, is_new)
        for timer, view, new in zip(batch, views, is_new, strict=True) if surely == {True} else ():
            if new:
                self._restart(timer.sent)
            elif view is not None and timer.mode == IfExists.RESCHEDULE and view.due_ms == timer.sent.due_ms:
                self.rescheduled(timer.sent.id, (view.due_ms, view.body or b""), True)

    def _body(self, id_: str) -> bytes:
        ((_, body), *_) = self.sent[id_].versions
        return body

    def _is_free(self, id_: str) -> bool:
        """Must a put create it?"""
        return id_ not in self.sent or bool(self.sent[id_].cancelled)

    def _may_be_free(self, id_: str) -> bool:
        forgotten = self.forgetful and all(self.may_be(group, id_, *OVER) for group in self.groups)
        return self._is_free(id_) or forgotten

    def _held(self, id_: str) -> bool:
        """Is it in a consumer's hands, in some group, for sure?"""
        known = [side.known(id_) for side in self.groups.values()]
        return any(all(at.kind == "leased" and self.latest(at.since) < at.lo for at in states) for states in known)

    def _refused(self, timer: Timer, state: str) -> None:
        id_ = timer.sent.id
        if self._is_free(id_):
            self.fail("an unknown id is no conflict", timer, state)
        if timer.mode == IfExists.KEEP:
            self.fail("a known id is a duplicate", timer)
        held = any(self.may_be(group, id_, "leased") for group in self.groups)
        if timer.mode != IfExists.ERROR and (state != "reserve" or not held):
            self.fail("only a reserved message does not give way", timer, state, self.sent[id_])
        self.seen["timers refused"] += 1

    def _replaced(self, timer: Timer) -> None:
        if timer.mode != IfExists.REPLACE or self._is_free(timer.sent.id):
            self.fail("what is replaced was known, and asked for", timer)
        self._gives_way(timer)
        self.seen["timers replaced"] += 1

    def _created(self, timer: Timer) -> None:
        id_, awake = timer.sent.id, timer.mode == IfExists.RESCHEDULE
        if not self._may_be_free(id_) and (not awake or self.asleep(self.sent[id_])):
            self.fail("a known id is not created", timer, self.sent[id_])
        if id_ in self.sent and not self._may_be_free(id_):
            self._gives_way(timer)
        else:
            self._restart(timer.sent)

    def _gives_way(self, timer: Timer) -> None:
        if self._held(timer.sent.id):
            self.fail("a reserved message does not give way", timer, self.sent[timer.sent.id])
        self._restart(timer.sent)

    def _restart(self, sent: Sent) -> None:
        """A message begins; another one of its id is forgotten."""
        id_, old = sent.id, self.sent.get(sent.id)
        self.former_cancelled += old is not None and old.cancelled is not False
        for group, side in self.groups.items() if old is not None else ():
            self.former_done[group] += self.is_(group, id_, "done")
            self.former_maybe_done[group] += self.may_be(group, id_, "done")
            side.at.pop(id_, None)
            self.stray.discard((group, id_))
            self._of(group).by_id.pop(id_, None)
        self.forget_undo(id_)
        self.sent[id_] = sent
        sent.accepted, sent.since, sent.arrival = True, self.moment, self.next_arrival()
        self.seen["messages accepted"] += 1
