"""The auditor's judgement of dead letters, of all that can be looked at, and of the end."""

from __future__ import annotations

from collections.abc import Sequence

from tests.trust.simulation_ledger import GONE, OVER, At, Sent
from tests.trust.simulation_timers import TimersAuditor
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.stats import GroupStats, TopicStats

_AS_TOLD = {"reserve": ("leased",), "ready": ("fresh", "waits"), "sleep": ("fresh", "waits"), "dead": ("dead",)}


class Review(TimersAuditor):
    """Of one topic."""

    # Dead letters

    def letters(self, listed: Sequence[DeadLetter], groups: dict[str, GroupStats]) -> None:
        """All of them were asked for."""
        found = {(letter.group, letter.id): letter for letter in listed}
        for group, stats in groups.items():
            if (count := sum(name == group for name, _ in found)) != stats.dead:
                self.fail("figures add up: dead letters", group, stats, count)
        for (group, id_), letter in found.items():
            sent = self.sent.get(id_)
            if sent is None or (letter.due_ms, letter.body) not in sent.versions or letter.headers != sent.headers:
                self.fail("a dead letter is what was sent", letter, sent)
            if (group, id_) not in self.stray:
                fits = lambda at, n=letter.attempts: at.kind == "dead" and at.attempt in (n, -1)  # noqa: E731
                self.groups[group].at[id_] = frozenset(self.narrow(group, id_, fits, f"who is listed is dead: {letter}"))
        for group, side in self.groups.items():
            for id_ in side.at.keys() - {id_ for name, id_ in found if name == group}:
                left = self.narrow(group, id_, lambda at: at.kind != "dead", "the dead are listed")
                if len(left) < len(side.at[id_]):
                    side.at[id_] = frozenset(left)

    def surely_dead(self, listed: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Those whose messages go on in no other way."""
        mine = [letter for letter in listed if (letter.group, letter.id) not in self.stray]
        return [letter for letter in mine if self.is_(letter.group, letter.id, "dead")]

    def requeued(
        self, letters: Sequence[DeadLetter], due: int, spread: int, reset: bool, expires: int | None, count: int | None
    ) -> None:
        """They come again from `due` on, the last one `spread` later, and expire anew, or not any more."""
        for letter in letters:
            attempt = 1 if reset else letter.attempts + 1
            first = 0 if expires is None else attempt
            again = At("waits", attempt, due, due + spread, self.moment, first=first, expires=expires or 0)
            self._left(letter, again, count)
        if count is not None and count != len(letters):
            self.fail("all are requeued", letters, count)

    def deleted(self, letters: Sequence[DeadLetter], count: int | None) -> None:
        for letter in letters:
            self._left(letter, GONE, count)
        if count is not None and count != len(letters):
            self.fail("all are deleted", letters, count)

    def _left(self, letter: DeadLetter, after: At, count: int | None) -> None:
        if count is None:
            self.widen(letter.group, letter.id, lambda at: after if at.kind == "dead" else None)
        else:
            self.set(letter.group, letter.id, [after], durable=True)

    # Looking

    def looked(self, id_: str, view: MessageView | None) -> None:
        sent = self.sent[id_]
        if view is None:
            settled = all(side.exists is not True or self.may_be(group, id_, *OVER) for group, side in self.groups.items())
            if sent.accepted and sent.cancelled is False and not (self.forgetful and settled):
                self.fail("nothing accepted is lost", sent)
            return
        self.accept(sent)
        if view.state == "cancelled" or sent.cancelled:
            if sent.cancelled is False or view.state != "cancelled":
                self.fail("cancelled is what was cancelled", sent, view)
            return
        if (view.due_ms, view.body) not in sent.versions or view.optional.headers != sent.headers:
            self.fail("what is shown is what was sent", sent, view)
        if self.asleep(sent) and view.state != "sleep":
            self.fail("it sleeps", sent, view)
        for group, told in view.groups.items():
            if group in self.groups and (group, id_) not in self.stray:
                kinds = _AS_TOLD.get(str(told["state"]), ("done", "gone"))
                self.narrow(group, id_, lambda at, k=kinds: self._shown(at, k), f"a state that may be, not {told}")  # type: ignore[misc]
        self.attempts_told(id_, view)

    def _shown(self, at: At, kinds: tuple[str, ...]) -> bool:
        """May it be shown as one of these? A lease may have run out."""
        return at.kind in kinds or (at.kind == "leased" and at.lo <= self.latest(at.since))

    def figures(self, stats: TopicStats, groups: dict[str, GroupStats]) -> None:
        """Figures add up, and are right as far as the right values are known."""
        self.listed(groups)
        for name in ("ready", "reserve", "history"):
            if groups and getattr(stats, name) != sum(getattr(group, name) for group in groups.values()):
                self.fail(f"figures add up: {name}", stats, groups)
        if stats.damaged:
            self.fail("nothing is damaged", stats)
        if stats.cancelled > sum(sent.cancelled is not False for sent in self.sent.values()) + self.former_cancelled:
            self.fail("no more is cancelled than was", stats)
        for name in groups.keys() & self.groups.keys():
            self._count(name, "leased", groups[name].reserve)
            if not self.groups[name].moved:
                self._count(name, "done", groups[name].history)
        if groups and groups.keys() == self.groups.keys():
            self._count_waiting(stats)

    def _count(self, group: str, kind: str, told: int) -> None:
        ids = self.groups[group].at
        low, high = sum(self.is_(group, id_, kind) for id_ in ids), sum(self.may_be(group, id_, kind) for id_ in ids)
        if kind == "done":
            low, high = low + self.former_done[group], high + self.former_maybe_done[group]
        if not low <= told <= high:
            self.fail(f"figures are true: {kind}", group, told, (low, high))

    def _count_waiting(self, stats: TopicStats) -> None:
        """Sleepers, once, and messages to be delivered, once in each group; a retry may sleep or be ready."""
        low = high = 0
        for sent in self.sent.values():
            some, most = self._waiting(sent)
            low += some if sent.accepted and sent.cancelled is False else 0
            high += 0 if sent.cancelled else most
        told, voids = stats.sleep + stats.ready, any(side.moved for side in self.groups.values())
        if not low <= told or (told > high and not voids):
            self.fail("figures are true: asleep and ready", stats, (low, high))

    def _waiting(self, sent: Sent) -> tuple[int, int]:
        if self.asleep(sent):
            return 1, 1
        some = sum(self.is_(group, sent.id, "fresh", "waits") for group in self.groups)
        most = sum(self.may_be(group, sent.id, "fresh", "waits", "leased") for group in self.groups)
        return (some, most) if sent.ready else (min(some, 1), max(most, 1))

    def end(self) -> None:
        """Nothing comes any more: everything that was accepted is acknowledged, dead or cancelled."""
        for sent in self.sent.values():
            for group in self.groups if sent.accepted and sent.cancelled is False else ():
                self.narrow(group, sent.id, lambda at: at.kind in OVER, "nothing accepted is lost")
