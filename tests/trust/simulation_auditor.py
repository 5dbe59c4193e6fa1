"""The auditor: hears every request to a topic and its answer, or that there was none, and judges by the contract alone.

An answer of None stands for none. Its rules for the topic: nothing accepted is lost, batches are whole or not there, nothing
is early, nothing is delivered after an answered acknowledgement or cancel, one lease at a time in each group, attempts count,
messages come in order of (due, arrival), bytes and headers are those that were sent, figures add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from tests.trust.simulation_ledger import DONE, FRESH, OVER, At, Ledger, Sent, Side, Version
from turtlemq.broker.results import Acked, Extended
from turtlemq.settings import Settings


@dataclass(frozen=True, slots=True)
class Got:
    """A message as a fetch delivers it."""

    id: str
    attempt: int
    due_ms: int
    body: bytes
    headers: dict[str, str]
    until_ms: int
    lease: str = ""


@dataclass(frozen=True, slots=True)
class Fetch:
    """The request of a consumer."""

    group: str
    count: int
    ttr_ms: int | None
    auto: bool

    @property
    def consumer(self) -> str:
        """The name of the consumer that asks so."""
        return f"{self.group}, {self.count} at once"


class Auditor(Ledger):
    """Of one topic."""

    def __init__(self, case: str, settings: Settings) -> None:
        super().__init__(case, settings.beat_ms)
        self.settings = settings
        self.forgetful = settings.history_hours < 1  # messages that every group has settled may be gone
        self.seen: Counter[str] = Counter()
        self._ticks, self._arrivals = 0, count(1)
        self._leases: set[str] = set()  # names of leases so far

    def next_arrival(self) -> int:
        """The place of a new message in the order of arrival."""
        return next(self._arrivals)

    # Producing

    def submitted(self, batch: Sequence[Sent], created: Sequence[bool] | None) -> None:
        """A batch was sent, perhaps not for the first time."""
        known = [self.sent.setdefault(sent.id, sent) for sent in batch]
        if created is None:
            for sent in known if known[0].accepted is None else ():
                again = sent.since > 0  # it may have been stored then, or now
                sent.since, sent.arrival = sent.since or self.moment, None if again else sent.arrival and next(self._arrivals)
            return
        unsure = {made for sent, made in zip(known, created, strict=True) if sent.accepted is None}
        if len(unsure) > 1:
            self.fail("a batch is stored whole or not at all", [sent.id for sent in known], created)
        for sent, made in zip(known, created, strict=True):
            if made and sent.accepted:
                self.fail("an id is stored once", sent)
            if made:
                sent.since, sent.arrival = self.moment, next(self._arrivals)
                self.seen["messages accepted"] += 1
        for sent in known:
            self.accept(sent)

    def rescheduled(self, id_: str, version: Version, done: bool | None) -> None:
        sent = self.sent[id_]
        if done is None:
            if not sent.ready:
                sent.versions.add(version)
                sent.arrival = None
        elif done:
            if sent.ready or sent.cancelled:
                self.fail("only a sleeper can be rescheduled", sent)
            sent.versions, sent.arrival, sent.since = {version}, None, self.moment
            for group in self.groups:  # it sleeps, so no group has had it
                self.narrow(group, id_, lambda at: at.kind in ("fresh", "gone"), "only a sleeper can be rescheduled")
                self.set(group, id_, [FRESH], durable=True)
            self.seen["rescheduled"] += 1
        elif self.asleep(sent) and sent.cancelled is False:
            self.fail("a sleeper can be rescheduled", sent)

    def cancelled(self, ids: Sequence[str], told: dict[str, str] | None) -> None:
        for id_ in ids:
            sent = self.sent[id_]
            if told is None:
                sent.cancelled = sent.cancelled or None
            elif told[id_] in ("cancelled", "cancelled before"):
                self._cancelled(sent, told[id_])
            else:
                self._not_cancelled(sent, told[id_])

    def _cancelled(self, sent: Sent, told: str) -> None:
        if told == "cancelled before" and sent.cancelled is False:
            self.fail("it was not cancelled", sent)
        if told == "cancelled" and sent.cancelled:
            self.fail("it was cancelled before", sent)
        for group in self.groups if sent.cancelled is False else ():
            if self.is_(group, sent.id, "leased", "done", "dead"):
                self.fail("what is reserved or settled cannot be cancelled", group, sent, self.groups[group].known(sent.id))
        sent.cancelled = True
        self.seen["cancelled"] += 1

    def _not_cancelled(self, sent: Sent, told: str) -> None:
        free = all(self.is_(group, sent.id, "fresh", "waits") for group in self.groups)
        if sent.cancelled:
            if told != "unknown":  # of a sleeper that was cancelled a crash may take every trace
                self.fail("it was cancelled", sent, told)
            return
        buried = told == "dead" and any((group, sent.id) in self.stray for group in self.groups)  # there is a letter still
        if sent.cancelled is False and (free or self.asleep(sent)) and not buried:
            self.fail("what sleeps or is ready can be cancelled, once", sent, told)
        settled = all(self.may_be(group, sent.id, *OVER) for group in self.groups)
        if told == "unknown" and sent.cancelled is False and not (self.forgetful and settled):
            self.fail("nothing accepted is lost", sent, told)
        sent.cancelled = told == "unknown" and sent.cancelled is None  # then that request, unanswered, was done

    # Time

    def ticked(self, rest: bool, saved: bool) -> None:
        """Time has come to the engine; without `rest`, it is unknown how far it got."""
        self._ticks += 1
        for sent in self.sent.values():
            if not sent.ready and all(due <= self.now for due, _ in sent.versions):
                if rest and sent.accepted and not sent.cancelled:
                    self.hand_off(sent, self._ticks)
                else:  # perhaps it has come due before others
                    sent.arrival = None
        for group, side in self.groups.items():
            for id_, known in list(side.at.items()):
                if not rest:
                    self.widen(group, id_, self._expired)
                elif any(at.kind in ("leased", "waits") and not at.there for at in known):
                    after = {self._expired(at) or self._arrived(at) for at in known}
                    if after != known:
                        self.set(group, id_, after)
        if rest and saved:
            self.durable(self.steady - self.beat_ms)

    def _expired(self, at: At) -> At | None:
        """A lease that ran out."""
        if at.kind != "leased" or at.lo > self.now:
            return None
        return self._failed(at, at.lo, self.now, there=True)

    def _arrived(self, at: At) -> At:
        if at.kind == "waits" and at.hi <= self.now:
            return replace(at, there=True)
        return at

    def _failed(self, at: At, lo: int, hi: int, there: bool = False) -> At:
        """A delivery that did not succeed: it comes again, or it is dead."""
        if at.attempt >= self.settings.max_attempts:
            return At("dead", at.attempt)
        return At("waits", at.attempt + 1, lo, hi, self.moment, there, first=at.first, expires=at.expires)

    # Consuming

    def fetched(self, asked: Fetch, got: Sequence[Got] | None, more: bool = False) -> None:
        """With `more`, an empty answer says nothing."""
        self.groups.setdefault(asked.group, Side())
        self._bury_late(asked.group)
        if got is None:
            self._maybe_fetched(asked)
            return
        if len(got) > asked.count:
            self.fail("no more than was asked for", asked, len(got))
        before = {id_ for id_, sent in self.sent.items() if self._must_come(asked.group, sent)}
        held = sum(self.may_be(asked.group, id_, "leased") for id_ in self.groups[asked.group].at)
        self._name_lease(asked, {one.lease for one in got})
        known = self.groups[asked.group].known
        late = any(self._is_late(sent, at) for id_, sent in self.sent.items() for at in known(id_))
        for one in got:
            self._delivered(asked, one)
        left = before - {one.id for one in got}
        if left and len(got) < min(asked.count, self.settings.max_in_flight - held) and not (more or late):
            self.fail("what is ready is delivered", asked, len(got), sorted(left))

    def _name_lease(self, asked: Fetch, names: set[str]) -> None:
        if len(names) > 1 or (names and asked.auto == any(names)) or names & self._leases:
            self.fail("each fetch that leases messages has a lease of its own", asked, names)
        self._leases |= names - {""}

    def cut(self) -> None:
        """A power cut may take the last leases with their names."""
        super().cut()
        self._leases = set()

    def _must_come(self, group: str, sent: Sent) -> bool:
        """Is it ready for a fetch in every possible state?"""
        if not (sent.ready and sent.accepted and sent.cancelled is False):
            return False
        known = self.groups[group].known(sent.id)
        return all(at.kind == "fresh" or (at.kind == "waits" and at.there and at.hi <= self.now) for at in known)

    def _may_come(self, at: At) -> int:
        """As which attempt a message in this state may be delivered now; 0: it may not."""
        if at.kind == "fresh":
            return 1
        reached = at.kind in ("waits", "leased") and self.latest(at.since) >= at.lo
        return at.attempt + (at.kind == "leased") if reached else 0

    def _delivered(self, asked: Fetch, one: Got) -> None:
        sent, group = self.sent.get(one.id), asked.group
        if sent is None:
            self.fail("nothing is delivered that was not sent", one)
        if sent.cancelled:
            self.fail("nothing is delivered after an answered cancel", one, sent)
        self.accept(sent)
        sent.cancelled = False
        if (one.due_ms, one.body) not in sent.versions or one.headers != sent.headers:
            self.fail("what is delivered is what was sent", one, sent)
        sent.versions = {(one.due_ms, one.body)}
        if one.due_ms > self.latest(sent.since):
            self.fail("never early", one, sent)
        until_ms = 0 if asked.auto else self.now + (asked.ttr_ms or sent.ttr_ms or self.settings.ttr_ms)
        if one.until_ms != until_ms:
            self.fail("a lease lasts as long as was asked for", asked, one, sent)
        promise = "one delivery at a time, none after an answered acknowledgement, and attempts count"
        left = self.narrow(group, one.id, lambda at: self._may_come(at) == one.attempt, f"{promise}; now {one}")
        if all(self._is_late(sent, at) for at in left):
            self.fail("nothing is delivered for the first time after it has expired", one, sent)
        self._in_turn(group, sent, left)
        if asked.auto:
            self.set(group, one.id, [DONE], durable=True)
        else:
            given = At("leased", one.attempt, one.until_ms, since=self.moment, lease=one.lease)
            self.set(group, one.id, [replace(given, first=at.first, expires=at.expires) for at in left])
        self.seen["deliveries"] += 1
        self.seen["of them again"] += one.attempt > 1

    def _in_turn(self, group: str, sent: Sent, left: Sequence[At]) -> None:
        side = self.groups[group]
        if sent.turn is None or not sent.ready or self.groups[group].known(sent.id) != {FRESH} or left != [FRESH]:
            return
        last = side.last.get(sent.level)
        if last is not None and sent.turn < last:
            self.fail("messages come in order of (due, arrival)", group, sent, last)
        side.last[sent.level] = sent.turn

    def _bury_late(self, group: str) -> None:
        """A fetch that comes to a message which has expired sends it to the dead."""
        for id_, sent in self.sent.items():
            self.widen(group, id_, lambda at, s=sent: At("dead", -1) if self._is_late(s, at) else None)  # type: ignore[misc]

    def _is_late(self, sent: Sent, at: At) -> bool:
        """Was it not delivered in time? Only a first delivery can be late."""
        attempt, end = self._may_come(at), at.expires or sent.expires_ms
        return bool(attempt) and attempt == at.first and end is not None and end <= self.now

    def _maybe_fetched(self, asked: Fetch) -> None:
        for id_, sent in self.sent.items():
            if all(due > self.latest(sent.since) for due, _ in sent.versions):
                continue
            until = self.now + (asked.ttr_ms or sent.ttr_ms or self.settings.ttr_ms)
            self.widen(asked.group, id_, lambda at, u=until: self._leased(at, u))  # type: ignore[misc]
            late = lambda at, s=sent: self._leased(at, self.now, counted=0) if self._is_late(s, at) else None  # noqa: E731
            self.widen(asked.group, id_, late)  # it was on its way to the dead, undelivered
            if asked.auto:
                self.widen(asked.group, id_, lambda at: DONE if at.kind == "leased" or self._may_come(at) else None)

    def _leased(self, at: At, until: int, counted: int = 1) -> At | None:
        attempt = self._may_come(at)
        after = At("leased", attempt - 1 + counted, until, since=self.moment, first=at.first, expires=at.expires)
        return after if attempt else None

    def acked(
        self, group: str, acks: Sequence[str], delay: int | None, told: Acked | None, leases: Sequence[str] | None = None
    ) -> None:
        """`leases`: those that the request named, one for each ack; a late ack changes nothing."""
        counted: Counter[str] = Counter()
        for ack, lease in zip(acks, leases or [""] * len(acks), strict=True):
            id_, failed = ack.removeprefix("-"), ack[0] == "-"
            if told is None:
                step = lambda at, f=failed, n=lease: self._answered(at, f, delay) if _held(at, n) else None  # noqa: E731
                self.widen(group, id_, step)
            elif id_ in told.late:
                self._late(group, id_, lease)
            elif id_ in told.unknown:
                self._unheld(group, id_)
            else:
                counted["failed" if failed else "acked"] += 1
                promise = "only what is reserved, under the named lease, can be acknowledged"
                left = self.narrow(group, id_, lambda at, n=lease: _held(at, n), promise)  # type: ignore[misc]
                after = {self._answered(at, failed, delay) for at in left}
                counted["dead"] += {at.kind for at in after if at} == {"dead"}
                self.set(group, id_, [at for at in after if at], durable=self.settings.ack_durability == "fsync")
        if told is not None:
            if (told.acked, told.failed + told.dead) != (counted["acked"], counted["failed"]) or told.dead < counted["dead"]:
                self.fail("an acknowledgement is counted once", group, acks, told, counted)
            self.seen["acknowledged"] += told.acked
            self.seen["late acks told so"] += len(told.late)
            self.seen["died"] += told.dead

    def _answered(self, at: At, failed: bool, delay: int | None) -> At | None:
        if at.kind != "leased":
            return None
        if not failed:
            return DONE
        settings = self.settings
        full = min(settings.backoff_base_ms * settings.backoff_factor ** (at.attempt - 1), settings.backoff_max_ms)
        low = {"none": full, "equal": full / 2, "full": 0}[settings.backoff_jitter]
        lo, hi = (int(low), int(full)) if delay is None else (delay, delay)
        return self._failed(at, self.now + lo, self.now + hi)

    def _unheld(self, group: str, id_: str) -> None:
        """An answer says that the group does not hold it in reserve."""
        promise = "what was leased stays leased until its time is over"
        fits = lambda at: at.kind != "leased" or self.latest(at.since) >= at.lo  # noqa: E731
        left = self.narrow(group, id_, fits, promise)
        if len(left) < len(self.groups[group].known(id_)):
            self.groups[group].at[id_] = frozenset(left)

    def _late(self, group: str, id_: str, lease: str) -> None:
        """An answer says that the group holds it under another lease than this one."""
        fits = lambda at: at.kind == "leased" and (not at.lease or at.lease != lease)  # noqa: E731
        left = self.narrow(group, id_, fits, "late is what another lease holds")
        self.groups[group].at[id_] = frozenset(left)

    def extended(
        self, group: str, ids: Sequence[str], ttr_ms: int, told: Extended | None, leases: Sequence[str] | None = None
    ) -> None:
        """`leases`: those that the request named, one for each id."""
        until, since = self.now + ttr_ms, self.moment
        named = dict(zip(ids, leases or [""] * len(ids), strict=True))
        for id_ in told.late if told is not None else ():
            self._late(group, id_, named.pop(id_))
        for id_, lease in named.items():
            step = lambda at: replace(at, lo=until, since=since)  # noqa: E731
            answer = None if told is None else (int(id_ not in told.unknown), told.unknown)
            self._moved_on(group, [id_], answer, step, lease)
        if told is not None and told.extended != len(set(named) - set(told.unknown)):
            self.fail("each is counted once", group, ids, told)

    def given_back(self, group: str, ids: Sequence[str], told: tuple[int, list[str]] | None) -> None:
        now, since = self.now, self.moment
        step = lambda at: replace(at, kind="waits", lo=now, hi=now, since=since, there=True, lease="")  # noqa: E731
        self._moved_on(group, ids, told, step)

    def _moved_on(
        self, group: str, ids: Sequence[str], told: tuple[int, list[str]] | None, step: Callable[[At], At], lease: str = ""
    ) -> None:
        for id_ in ids:
            if told is None:
                self.widen(group, id_, lambda at: step(at) if _held(at, lease) else None)
            elif id_ in told[1]:
                self._unheld(group, id_)
            else:
                promise = "only what is reserved, under the named lease, is held longer or given back"
                left = self.narrow(group, id_, lambda at: _held(at, lease), promise)
                self.set(group, id_, map(step, left))
        if told is not None and told[0] != len(set(ids) - set(told[1])):
            self.fail("each is counted once", group, ids, told)


def _held(at: At, lease: str) -> bool:
    """Is it in a consumer's hands, under the named lease if one was named? The name of some leases is unknown."""
    return at.kind == "leased" and (not lease or at.lease in (lease, ""))
