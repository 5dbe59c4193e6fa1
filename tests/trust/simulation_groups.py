"""The auditor's judgement of groups: made, moved, deleted, and forgotten after a time without use.

A group is used by every request about it, and while a fetch waits for its messages; a start of the process counts as use, and a
clock that is set ahead makes a group older by no more than the longest step. So long as it may not be forgotten, nothing that it
has acknowledged comes again. A deleted group stays deleted until a request that began later makes it anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.trust.simulation_auditor import Auditor, Fetch, Got
from tests.trust.simulation_ledger import FRESH, GONE, Side
from turtlemq.broker.results import Acked, Extended
from turtlemq.settings import Settings
from turtlemq.topic.stats import GroupStats

_STEP_MS = 120_000  # docs/HTTP.md: a gap between two counts counts as two minutes at most


class GroupsAuditor(Auditor):
    """Of the groups of one topic."""

    def __init__(self, case: str, settings: Settings) -> None:
        super().__init__(case, settings)
        self.waiting: set[str] = set()  # groups for which a fetch waits
        self._limit_ms = settings.group_expire_hours * 3_600_000
        self._jumps = 0  # times that the clock was set ahead

    # Use

    def clock(self, now: int, steady: int) -> None:
        self._jumps += now - self.now > steady - self.steady
        super().clock(now, steady)

    def used(self, group: str, made: bool = False) -> None:
        """A request about a group. `made`: it is there now, for sure."""
        side = self.groups.setdefault(group, Side())
        side.used, side.jumps = self.steady, self._jumps
        side.exists = True if made else side.exists

    def started(self) -> None:
        """The process starts: no request was possible before."""
        self.waiting.clear()
        for group in self.groups:
            self.used(group)

    def cut(self) -> None:
        super().cut()
        for side in self.groups.values():
            side.exists = None

    def ticked(self, rest: bool, saved: bool) -> None:
        super().ticked(rest, saved)
        for group, side in self.groups.items():
            if side.exists is not False and self._may_be_forgotten(group, side):
                self._begins_anew(group, done=False)
                side.exists = None
                self.seen["perhaps forgotten"] += 1

    def _may_be_forgotten(self, group: str, side: Side) -> bool:
        if not self._limit_ms or group in self.waiting or any(self.is_(group, id_, "leased") for id_ in side.at):
            return False
        step = min(_STEP_MS, math.ceil(self._limit_ms / 2))
        return self.steady - side.used + (self._jumps - side.jumps) * step >= self._limit_ms

    def fetched(self, asked: Fetch, got: Sequence[Got] | None, more: bool = False) -> None:
        self._may_be_made(asked.group)
        if got is None:
            self.used(asked.group)
            side = self.groups[asked.group]
            side.exists = side.exists or None
        else:
            self.used(asked.group, made=True)
        super().fetched(asked, got, more)

    def _may_be_made(self, group: str) -> None:
        """A fetch makes a group that is not there. Messages that came and went meanwhile are not for it."""
        side = self.groups.setdefault(group, Side())
        if side.exists is not True and self.forgetful:
            for id_ in self.sent:
                self.set(group, id_, {GONE, *side.known(id_)})

    def acked(
        self, group: str, acks: Sequence[str], delay: int | None, told: Acked | None, leases: Sequence[str] | None = None
    ) -> None:
        self.used(group)
        super().acked(group, acks, delay, told, leases)

    def extended(
        self, group: str, ids: Sequence[str], ttr_ms: int, told: Extended | None, leases: Sequence[str] | None = None
    ) -> None:
        self.used(group)
        super().extended(group, ids, ttr_ms, told, leases)

    # Made, moved, deleted

    def placed(self, group: str, start: str, done: bool) -> None:
        """A group was made, or moved, to the earliest or the latest message; without `done` that is unknown."""
        self.used(group, made=done)
        self.groups[group].exists = self.groups[group].exists or None
        if start == "earliest":
            self._begins_anew(group, done)
            return
        self._may_be_buried(group)
        for id_, sent in self.sent.items():
            if not self.asleep(sent):
                self.set(group, id_, {GONE, *self.groups[group].known(id_)})

    def dropped(self, group: str, done: bool) -> None:
        """A group was deleted; without `done` that is unknown. The next fetch makes it anew, at the oldest message."""
        self.used(group)
        side = self.groups[group]
        side.exists = False if done else None
        self._begins_anew(group, done)
        self.seen["groups deleted"] += done

    def _begins_anew(self, group: str, done: bool) -> None:
        """Every message comes again, or for the first time, unless retention has removed it; without `done`, perhaps."""
        self._may_be_buried(group)
        again = {FRESH, GONE} if self.forgetful else {FRESH}
        for id_ in self.sent:
            known = self.groups[group].known(id_)
            after = frozenset(again if done else known | again)
            if after != known:
                self.set(group, id_, after)

    def _may_be_buried(self, group: str) -> None:
        """Dead letters of a group stay when it is moved or deleted, beside messages that go on."""
        side = self.groups[group]
        for id_ in self.sent:
            if any(at.kind == "dead" for at in side.known(id_)):
                self.stray.add((group, id_))
        side.last, side.moved = {}, True

    def listed(self, groups: dict[str, GroupStats]) -> None:
        """All groups were asked for."""
        for name, side in self.groups.items():
            if side.exists is True and name not in groups:
                self.fail("a group in use is not forgotten", name, side.used, self.steady)
            if side.exists is False and name in groups:
                self.fail("a deleted group stays deleted", name)
            side.exists = name in groups
