"""Promises: a ledger of everything that the engine has answered, kept from the contract alone, and the audit by it.

For each message and group it says which fates are permitted when the power goes: it `comes` to the group (again), it is among
the group's `dead`, or it is `gone`, settled or cancelled. Accepted messages come; cancelled ones are gone; so are acknowledged
ones, but acknowledgements since the last checkpoint may be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tests.trust.model import Broken

COMES, DEAD, GONE = "comes", "dead", "gone"
ANY = frozenset((COMES, DEAD, GONE))
Key = tuple[str, str]  # topic, id


@dataclass(frozen=True, slots=True)
class Fate:
    """The permitted fates of a message in a group. `sure` is the part that remains once the checkpoint at `by_ms` is over."""

    may: frozenset[str] = frozenset((COMES,))
    sure: frozenset[str] | None = None
    by_ms: int = 0

    def settled(self) -> Fate:
        """After that checkpoint, or if nothing that was written is lost."""
        return self if self.sure is None else Fate(self.sure)


FRESH = Fate()


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as its producer knows it."""

    due_ms: int
    body: bytes
    expires: bool = False
    cancelled: bool = False
    deliveries: int = 0  # the most that any group has seen


@dataclass(slots=True)
class Ledger:
    """Everything answered so far. Copies of it are cheap, and are never changed again."""

    sent: dict[Key, Sent] = field(default_factory=dict)
    fates: dict[tuple[str, str, str], Fate] = field(default_factory=dict)  # by topic, group and id, where it is not FRESH
    settings: dict[str, int] = field(default_factory=dict)  # topics that were made with max_attempts of their own
    groups: set[Key] = field(default_factory=set)

    def copy(self) -> Ledger:
        return Ledger(dict(self.sent), dict(self.fates), dict(self.settings), set(self.groups))

    def fate(self, topic: str, group: str, id_: str) -> Fate:
        return self.fates.get((topic, group, id_), FRESH)

    def change(self, topic: str, id_: str, **changes: object) -> None:
        self.sent[topic, id_] = replace(self.sent[topic, id_], **changes)  # type: ignore[arg-type]

    def answered(self, topic: str, group: str, id_: str, sure: Iterable[str], now_ms: int, beat_ms: int) -> None:
        """Something is answered that the next checkpoint makes sure; `beat_ms` 0: it is sure at once. Before, all is as it was,
        or it comes again."""
        wanted = frozenset(sure)
        fate = (
            Fate(wanted) if not beat_ms else Fate(self.fate(topic, group, id_).may | wanted | {COMES}, wanted, now_ms + beat_ms)
        )
        self.fates[topic, group, id_] = fate

    def beat(self, now_ms: int) -> None:
        """All topics have ticked at this time, and nothing has failed."""
        for key, fate in self.fates.items():
            if fate.sure is not None and fate.by_ms <= now_ms:
                self.fates[key] = fate.settled()

    def drop(self, topic: str) -> None:
        """A topic is gone with everything in it."""
        self.sent = {key: sent for key, sent in self.sent.items() if key[0] != topic}
        self.fates = {key: fate for key, fate in self.fates.items() if key[0] != topic}
        self.groups = {key for key in self.groups if key[0] != topic}
        self.settings.pop(topic, None)

    def settle(self) -> Ledger:
        """As if a checkpoint had just been written."""
        out = self.copy()
        out.fates = {key: fate.settled() for key, fate in out.fates.items()}
        return out


@dataclass(frozen=True, slots=True)
class Seen:
    """The messages of a recovered engine that was left to deliver everything."""

    delivered: Mapping[tuple[str, str, str], tuple[tuple[int, bytes], ...]]  # by topic, group and id: due and body, each time
    dead: Mapping[tuple[str, str, str], bytes]
    settings: Mapping[str, int]
    taken: frozenset[Key]  # ids that the engine would take a second time


def audit(before: Ledger, after: Ledger, together: Iterable[Key], seen: Seen, attempts_max: int) -> None:
    """Compare findings with promises. `after`: equal to `before`, or the ledger if the operation interrupted by the cut had been
    answered; `together`: messages of which that operation must have changed all or none."""
    _no_phantoms(before, after, seen)
    for key in before.sent.keys() | after.sent.keys():
        for topic, group in before.groups | after.groups:
            if topic == key[0]:
                _one(before, after, seen, (topic, group, key[1]), attempts_max)
    replaced = {key for key in together if key in before.sent and key in after.sent}
    found = {
        key: any(place[0] == key[0] and place[2] == key[1] for place in (*seen.delivered, *seen.dead))
        for key in {*together} - replaced
    }
    if len(set(found.values())) > 1:
        raise Broken(f"half of a batch: {sorted(key for key, there in found.items() if there)} of {sorted(found)}")
    _all_replaced_or_none(before, after, replaced, seen)
    _all_done_or_none(before, after, together, seen)
    for topic in before.settings.keys() | after.settings.keys():
        allowed = {ledger.settings.get(topic) for ledger in (before, after)}
        if topic not in before.settings:
            allowed.add(attempts_max)  # it was being made: the folder may be there already, and its contents not yet
        if seen.settings.get(topic) not in allowed:
            raise Broken(f"settings of {topic}: {seen.settings.get(topic)}, not {allowed}")
    for key in before.sent.keys() & after.sent.keys() & seen.taken:
        if not (before.sent[key].cancelled or after.sent[key].cancelled):
            raise Broken(f"{key} was accepted, and its id is taken a second time")


def _all_replaced_or_none(before: Ledger, after: Ledger, replaced: Iterable[Key], seen: Seen) -> None:
    """Messages of one batch that were to take the place of others have done so, or none has."""
    shown: dict[bool, list[Key]] = {}
    for key in replaced:
        told = [bodies for place, bodies in seen.delivered.items() if (place[0], place[2]) == key]
        for body in {body for bodies in told for _, body in bodies}:
            shown.setdefault(body == after.sent[key].body, []).append(key)
    if len(shown) > 1 and any(before.sent[key].body != after.sent[key].body for key in replaced):
        raise Broken(f"half of a batch was replaced: {shown}")


def _all_done_or_none(before: Ledger, after: Ledger, together: Iterable[Key], seen: Seen) -> None:
    """Of the operations of a transaction, all have been done or none has: puts are there, cancelled sleepers are not, and moved
    ones come at their new time. Nothing is known of a topic without groups."""
    listening = {topic for topic, _ in before.groups}
    done: dict[Key, bool] = {}
    for key in together:
        if key[0] not in listening or key not in after.sent:
            continue
        told = [time for place, times in seen.delivered.items() if (place[0], place[2]) == key for time in times]
        there = bool(told) or any((place[0], place[2]) == key for place in seen.dead)
        old, new = before.sent.get(key), after.sent[key]
        if old is None:
            done[key] = there
        elif new.cancelled and not old.cancelled:
            done[key] = not there
        elif old.body == new.body and old.due_ms != new.due_ms and told:
            done[key] = {due_ms for due_ms, _ in told} == {new.due_ms}
    if len(set(done.values())) > 1:
        raise Broken(f"half of a transaction: {done}")


def _no_phantoms(before: Ledger, after: Ledger, seen: Seen) -> None:
    for place in (*seen.delivered, *seen.dead):
        key = (place[0], place[2])
        known = [ledger.sent[key] for ledger in (before, after) if key in ledger.sent]
        if not known:
            raise Broken(f"{place} was never accepted")
        if place in seen.dead and seen.dead[place] not in {sent.body for sent in known}:
            raise Broken(f"{place} is dead with wrong bytes")
        for told in seen.delivered.get(place, ()):
            if told not in {(sent.due_ms, sent.body) for sent in known}:
                raise Broken(f"{place} came as {told}, not as {known}")


def _one(before: Ledger, after: Ledger, seen: Seen, place: tuple[str, str, str], attempts_max: int) -> None:
    times, dead = len(seen.delivered.get(place, ())), place in seen.dead
    if times > 1:
        raise Broken(f"{place} was delivered {times} times under one lease")
    outcome = COMES if times else DEAD if dead else GONE
    may: set[str] = set()
    for ledger in (before, after):
        sent = ledger.sent.get((place[0], place[2]))
        if sent is None or sent.cancelled:
            may.add(GONE)
            continue
        may |= ledger.fate(*place).may
        if COMES in may and (sent.expires or sent.deliveries >= ledger.settings.get(place[0], attempts_max)):
            may.add(DEAD)
    if outcome not in may:
        raise Broken(f"{place}: {outcome}, but only {' or '.join(sorted(may))} was promised; {before.fate(*place)}")
    if times and dead and not may >= ANY:
        raise Broken(f"{place} came and is dead, too")
