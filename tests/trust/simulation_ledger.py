"""The auditor's memory: all that requests and answers alone tell about messages.

A request that was not answered may have been done or not, and a power cut may take back changes that are not durable. So of each
message in each group a *set* of states is known, one of which is the true one. An answer leaves those that agree with it; if none
is left, a promise was broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tests.trust.model import Broken

Version = tuple[int, bytes]  # due time and body
Turn = tuple[int, int, int]  # when it became ready, its due time, its arrival


@dataclass(frozen=True, slots=True)
class At:
    """Where a message may be in a group.

    fresh    never delivered
    leased   in a consumer's hands until `lo`, as this `attempt`
    waits    comes again as this `attempt`, not before `lo`, and by `hi`
    done     acknowledged
        dead     among the dead after so many attempts (-1: unknown)
    gone     not for this group, or deleted
    """

    kind: str
    attempt: int = 0
    lo: int = 0
    hi: int = 0
    since: int = 0  # the clock's reading when this began: a place in `Ledger.clocks`
    there: bool = False  # a tick has seen that `hi` is over
    lease: str = ""  # its name, if the answer to the fetch has told it
    first: int = 1  # the attempt that must come before the message expires; 0: it does not expire any more
    expires: int = 0  # when it does so, if a requeue has said so; 0: as its producer said


Known = frozenset[At]
FRESH = At("fresh", 1)
DONE, GONE = At("done"), At("gone")
ONLY_FRESH: Known = frozenset({FRESH})
OVER = ("done", "dead", "gone")


@dataclass(slots=True)
class Sent:
    """A message as its producer sent it, and the auditor's knowledge of it."""

    id: str
    body: bytes
    due_ms: int
    batch: int
    arrival: int | None  # None: its place in the order is not known
    level: int = 0
    ttr_ms: int = 0
    expires_ms: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    versions: set[Version] = field(default_factory=set)
    accepted: bool | None = None  # None: unknown
    cancelled: bool | None = False
    ready: bool = False  # it has come due for sure
    turn: Turn | None = None
    since: int = 0  # as in `At`

    def __post_init__(self) -> None:
        self.versions = {(self.due_ms, self.body)}


@dataclass(slots=True)
class Side:
    """A group."""

    at: dict[str, Known] = field(default_factory=dict)  # messages not listed here are fresh
    last: dict[int, Turn] = field(default_factory=dict)  # of each priority: the turn of the last fresh one that was delivered
    moved: bool = False
    exists: bool | None = None  # None: unknown
    used: int = 0  # the (steady) time of the last request about it
    jumps: int = 0  # as often the clock had been set ahead by then

    def known(self, id_: str) -> Known:
        return self.at.get(id_, ONLY_FRESH)


class Ledger:
    """The memory, and how it changes: answers narrow it, crashes widen it."""

    def __init__(self, case: str, beat_ms: int) -> None:
        self.case, self.beat_ms = case, beat_ms
        self.sent: dict[str, Sent] = {}
        self.groups: dict[str, Side] = {}
        self.now = self.steady = 0  # the wall clock's reading; how much time has really passed
        self.clocks: list[int] = [0]  # everything that the clock has shown
        self.stray: set[tuple[str, str]] = set()  # dead letters that may be there beside a message that goes on
        self._undo: list[tuple[int, str, str, Known]] = []  # for a power cut to bring back: when it was replaced, group, id
        self._handed: list[tuple[int, str]] = []  # messages that came due, and when

    def fail(self, promise: str, *about: object) -> NoReturn:
        raise Broken(f"{self.case}, at {self.now}: {promise}: {', '.join(map(repr, about))}")

    def clock(self, now: int, steady: int) -> None:
        """The wall clock shows `now`."""
        self.now, self.steady = now, steady
        if self.clocks[-1] != now:
            self.clocks.append(now)

    @property
    def moment(self) -> int:
        """The place in `clocks` that stands for now."""
        return len(self.clocks) - 1

    def latest(self, since: int) -> int:
        """The latest time that the clock has shown since then."""
        return max(self.clocks[since:])

    def set(self, group: str, id_: str, known: Iterable[At], durable: bool = False) -> None:
        """A message is in one of these states now; with `durable`, no power cut brings back the earlier ones."""
        side, states = self.groups[group], frozenset(known)
        if durable:
            self._undo = [entry for entry in self._undo if entry[1:3] != (group, id_)]
        else:
            self._undo.append((self.steady, group, id_, side.known(id_)))
        side.at[id_] = states

    def widen(self, group: str, id_: str, step: Callable[[At], At | None]) -> None:
        """It is unknown whether this step was taken."""
        known = self.groups[group].known(id_)
        taken = {after for at in known if (after := step(at)) is not None}
        if not taken <= known:
            self.set(group, id_, known | taken)

    def narrow(self, group: str, id_: str, fits: Callable[[At], bool], promise: str) -> list[At]:
        """An answer says that the message is in a state that `fits`."""
        known = self.groups[group].known(id_)
        left = [at for at in known if fits(at)]
        if not left:
            self.fail(promise, group, id_, sorted(known, key=str), self.sent.get(id_))
        return left

    def is_(self, group: str, id_: str, *kinds: str) -> bool:
        """Is it in one of these states for sure?"""
        return all(at.kind in kinds for at in self.groups[group].known(id_))

    def may_be(self, group: str, id_: str, *kinds: str) -> bool:
        return any(at.kind in kinds for at in self.groups[group].known(id_))

    def accept(self, sent: Sent) -> None:
        """It was stored, so all of its batch was."""
        for other in self.sent.values() if sent.accepted is None else ():
            if other.batch == sent.batch:
                other.accepted = True

    def asleep(self, sent: Sent) -> bool:
        """For sure."""
        return not sent.ready and all(due > self.latest(sent.since) for due, _ in sent.versions)

    def moments(self, now: int) -> Iterator[int]:
        """When something may come due: a millisecond before is the time to catch early deliveries."""
        for sent in self.sent.values():
            yield from (due for due, _ in sent.versions if due > now)
        for side in self.groups.values():
            yield from (at.lo for known in side.at.values() for at in known if at.lo > now)

    def hand_off(self, sent: Sent, tick: int) -> None:
        """It has come due."""
        ((due, _), *others) = sent.versions
        sent.ready = True
        sent.turn = None if others or sent.arrival is None else (tick, due, sent.arrival)
        self._handed.append((self.steady, sent.id))

    def forget_undo(self, id_: str) -> None:
        """Everything known about this message is durable."""
        self._undo = [entry for entry in self._undo if entry[2] != id_]
        self._handed = [entry for entry in self._handed if entry[1] != id_]

    # Power cuts

    def durable(self, until: int | None = None) -> None:
        """Changes up to this (steady) time are durable; None: everything."""
        end = self.steady if until is None else until
        self._undo = [entry for entry in self._undo if entry[0] > end]
        self._handed = [entry for entry in self._handed if entry[0] > end]

    def cut(self) -> None:
        """Changes that were not durable may be undone."""
        for _, group, id_, known in self._undo:
            side = self.groups[group]
            side.at[id_] = side.known(id_) | known
            if any(at.kind == "dead" for at in side.at[id_]):
                self.stray.add((group, id_))
        for side in self.groups.values():  # the end of a lease is only noted with the next consumer's request, and seen again
            for id_, known in side.at.items():
                waited = [at for at in known if at.kind == "waits" and at.there]
                side.at[id_] = known | {replace(at, kind="leased", attempt=at.attempt - 1, hi=0, there=False) for at in waited}
        for _, id_ in self._handed:
            sent = self.sent[id_]
            sent.ready, sent.turn, sent.arrival = False, None, None
        for side in self.groups.values():
            side.last = {}
        self._undo, self._handed = [], []
