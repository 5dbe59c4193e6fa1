"""Deliveries that end without an ack: the message is retried soon, retried after a sleep, or becomes a dead letter.

A short back-off waits in memory (`Group.retries`). Dead letters and long back-offs are taken over by other stores: callbacks
store them durably, and only then does the journal say that the Broker is done with them. If the disk is full, or
no file can be opened, the message waits in memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turtlemq import attempts as a
from turtlemq.attempts import Attempt, Attempts
from turtlemq.broker import events
from turtlemq.broker.group import Group, Lease, Leased, MessageColumns, messages_of
from turtlemq.broker.policy import backoff_ms
from turtlemq.broker.retry_queue import Retry
from turtlemq.broker.state import BrokerState
from turtlemq.errors import Exhausted
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment.log import Documents

RAM_BACKOFF_MS = 30_000  # a longer back-off sleeps in the Index
RAM_RETRIES_MAX = 50_000  # of one group; a retry above this number sleeps in the Index, too
SLICE_MESSAGES = 1_000  # whose deliveries end in one step: 20 ms and a sync, if all die or sleep
SLICE_BYTES = 8 << 20  # of documents that another store takes over with one sync
FULL_RETRY_MS = 1_000  # delay of a message that finds no room on the disk
NO_RETRY = -1  # as the delay of a retry: there is none, the message becomes a dead letter
LEASE_EXPIRED = "lease expired"
EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class EndedDelivery:
    """A message on its way from the Broker to the Index or to the dead letters."""

    group: str
    id: str
    document: f.Document
    attempt: int  # deliveries so far
    error: str
    when_ms: int  # the time of its next delivery, or of its death
    due_ms: int  # as the producer asked
    offset: int  # the ready offset that it had
    epoch: int  # of the group at that moment
    attempts: Attempts = ()  # the last ones, that which ends included


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Messages of a group whose deliveries end, perhaps of several leases, by rising offset."""

    group: Group
    leases: Sequence[Lease]
    numbers: I64  # of each message: its lease in `leases`
    rows: I64  # and its row there
    messages: MessageColumns
    reserved_ms: I64

    @classmethod
    def of(cls, group: Group, leased: Leased) -> Deliveries:
        messages, reserved = messages_of(leased)
        numbers = np.repeat(np.arange(len(leased)), [len(rows) for _, rows in leased])
        rows = np.concatenate([rows for _, rows in leased])
        unsorted = cls(group, [lease for lease, _ in leased], numbers, rows, messages, reserved)
        return unsorted.pick(np.argsort(messages.offsets, kind="stable"))

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, which: I64) -> Deliveries:
        """Some of them, in this order."""
        numbers, rows, messages = self.numbers[which], self.rows[which], self.messages.pick(which)
        return Deliveries(self.group, self.leases, numbers, rows, messages, self.reserved_ms[which])

    @property
    def consumers(self) -> list[str]:
        """The consumer of each."""
        names = [lease.consumer for lease in self.leases]
        return [names[n] for n in self.numbers.tolist()]

    def attempts(self, outcome: str, error: str, ended_ms: int, next_ms: Sequence[int] | None) -> list[Attempt]:
        """Each as an ended attempt. `next_ms`: when each comes again; None: never."""
        text, columns = a.shorten(error), (self.messages.attempts.tolist(), self.consumers, self.reserved_ms.tolist())
        following: Sequence[int | None] = [None] * len(self) if next_ms is None else next_ms
        rows = zip(*columns, following, strict=True)
        return [Attempt(number, consumer, at_ms, ended_ms, outcome, text, next_) for number, consumer, at_ms, next_ in rows]

    def close(self) -> None:
        """End them."""
        order = np.argsort(self.numbers, kind="stable")
        numbers = self.numbers[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        firsts = numbers[np.append(0, cuts)].tolist()
        self.group.close([(self.leases[n], rows) for n, rows in zip(firsts, np.split(self.rows[order], cuts), strict=True)])


class Failures:
    """Ends unacknowledged deliveries. `store_dead` stores dead letters durably and returns how many replaced an older letter;
    `schedule_retries` puts messages to sleep in the Index durably. Both may raise `Exhausted`."""

    def __init__(
        self,
        state: BrokerState,
        store_dead: Callable[[Sequence[EndedDelivery]], int],
        schedule_retries: Callable[[Sequence[EndedDelivery]], None],
    ) -> None:
        self._state, self._logs = state, state.logs
        self._store_dead, self._schedule_retries = store_dead, schedule_retries

    def fail(self, group: Group, leased: Leased, delay_ms: int | None, error: str, now_ms: int) -> tuple[int, int]:
        """End deliveries that failed, given as rows of leases. `delay_ms`: instead of the back-off, or NO_RETRY. Returns how many
        messages are retried and how many are dead.

        Works in slices, each stored, journaled and closed before the next: an error costs one slice."""
        total = dead = 0
        for part in _slices(leased):
            deliveries = Deliveries.of(group, part)
            dead += self._fail(deliveries, delay_ms, error, now_ms)
            total += len(deliveries)
        return total - dead, dead

    def _fail(self, failed: Deliveries, delay_ms: int | None, error: str, now_ms: int) -> int:
        """End one slice. Returns how many messages are dead."""
        group, messages = failed.group, failed.messages
        when = now_ms + self._delays(messages, delay_ms)
        far = when - now_ms > RAM_BACKOFF_MS
        far[max(0, RAM_RETRIES_MAX - len(group.retries)) :] = True
        dying = (messages.attempts >= self._state.settings.max_attempts) | (delay_ms == NO_RETRY)
        if error is LEASE_EXPIRED:
            group.tally.timed_out += len(messages)
        else:
            group.tally.failed += len(messages)
        outcome = a.EXPIRED if error is LEASE_EXPIRED else a.FAILED
        last, sleepers = np.flatnonzero(dying), np.flatnonzero(~dying & far)
        dead = self._bury(failed.pick(last), events.DEAD, error, now_ms)
        asleep = self._sleep(failed.pick(sleepers), when[sleepers], outcome, error, now_ms)
        soon = np.append(np.flatnonzero(~dying & ~far), sleepers[asleep:])
        self._retry(failed.pick(soon), when[soon], outcome, error, now_ms)
        left = failed.pick(last[dead:])  # their delivery does not count, so that they die when there is room
        self._retry(left, np.full(len(left), now_ms + FULL_RETRY_MS), outcome, error, now_ms, counted=False)
        return dead

    def give_back(self, group: Group, lease: Lease, which: I64, now_ms: int) -> None:
        """End deliveries that never reached their consumer, given as rows of a lease: they are due again at once, and do not
        count."""
        ended = Deliveries.of(group, [(lease, which)])
        self._retry(ended, np.full(len(ended), now_ms), a.GIVEN_BACK, "", now_ms, counted=False)

    def _retry(self, ended: Deliveries, when_ms: I64, outcome: str, error: str, now_ms: int, *, counted: bool = True) -> None:
        """Let messages wait in memory until `when_ms`, and end their deliveries with an `outcome`; empty: they had not been
        delivered. `counted`: the delivery counts as an attempt."""
        if not len(ended):
            return
        group, messages, when = ended.group, ended.messages, when_ms.tolist()
        attempts = messages.attempts + counted
        self._logs.reserve.append(now_ms, group.name, *events.retry(group, messages, attempts, when_ms, error, outcome))
        for offset, at_ms, attempt in zip(messages.offsets.tolist(), when, attempts.tolist(), strict=True):
            group.retries.add(offset, Retry(at_ms, attempt, error))
        if outcome:
            for offset, one in zip(messages.offsets.tolist(), ended.attempts(outcome, error, now_ms, when), strict=True):
                group.add_attempt(offset, one)
        ended.close()

    def retry_now(self, group: Group, offset: int, now_ms: int) -> None:
        """End the back-off of the message at a ready offset. Required: it waits in memory."""
        waiting, at = group.retries[offset], np.array([offset])
        seqs = self._state.visibility.heads(at)["seq"].astype(np.int64)
        attempts, when_ms = np.array([waiting.attempt]), np.array([now_ms])
        message = MessageColumns(at, seqs, when_ms, when_ms, attempts, [""])
        self._logs.reserve.append(now_ms, group.name, *events.retry(group, message, attempts, when_ms, waiting.error))
        group.retries.add(offset, Retry(now_ms, waiting.attempt, waiting.error))

    def expire(self, group: Group, messages: MessageColumns, now_ms: int) -> None:
        """Messages that were not delivered before they expire become dead letters. Required: the journal has a lease of them that
        ends at once, so that a crash in between loses none."""
        lease = group.lease(messages, now_ms, now_ms, "")
        expired = Deliveries.of(group, [(lease, np.arange(len(messages)))])
        left = expired.pick(np.arange(self._bury(expired, events.EXPIRED, EXPIRED, now_ms), len(expired)))
        self._retry(left, np.full(len(left), now_ms + FULL_RETRY_MS), "", EXPIRED, now_ms)

    def _delays(self, messages: MessageColumns, delay_ms: int | None) -> I64:
        if delay_ms is not None:
            return np.full(len(messages), delay_ms, np.int64)
        numbered = zip(messages.ids, messages.attempts.tolist(), strict=True)
        return np.array([backoff_ms(self._state.settings, id_, attempt) for id_, attempt in numbered], np.int64)

    def _sleep(self, ended: Deliveries, when_ms: I64, outcome: str, error: str, now_ms: int) -> int:
        """Put messages to sleep in the Index. Returns how many of them, from the first on: fewer if there is no room."""
        group = ended.group

        def store(batch: Deliveries, read: Documents, at: slice) -> Callable[[], None]:
            when = when_ms[at].tolist()
            self._schedule_retries(_ended(batch, read, error, when, batch.attempts(outcome, error, now_ms, when)))
            return lambda: self._logs.write_or_defer(self._logs.reserve, now_ms, group.name, events.moved(group, batch.messages))

        return self._hand_over(ended, store)

    def _bury(self, ended: Deliveries, outcome: str, error: str, now_ms: int) -> int:
        """Store messages as dead letters. Returns how many of them, from the first on: fewer if there is no room."""

        def store(batch: Deliveries, read: Documents, _: slice) -> Callable[[], None]:
            last = batch.attempts(a.DEAD, error, now_ms, None) if outcome == events.DEAD else []
            letters = _ended(batch, read, error, [now_ms] * len(batch), last)
            replaced = len(batch) - len(letters) + self._store_dead(letters)
            columns = (batch.messages, batch.reserved_ms, batch.consumers)
            return lambda: self._state.bury(batch.group, *columns, outcome, error, now_ms, replaced)

        return self._hand_over(ended, store)

    def _hand_over(self, ended: Deliveries, store: Callable[[Deliveries, Documents, slice], Callable[[], None]]) -> int:
        """Let another store take over messages, a batch of bounded size at a time, and end their deliveries. `store` stores a
        batch durably and returns a function that journals it; it changes nothing if the disk is full or no file opens. Returns
        how many were taken over, from the first on."""
        done, offsets, seqs = 0, ended.messages.offsets, ended.messages.seqs
        while done < len(ended):
            self._logs.refuse_if_journals_stopped()  # before another store takes messages over
            self._logs.secure_leases()
            read, _ = self._logs.ready.read(offsets[done:], SLICE_BYTES, seqs[done:])
            at = slice(done, done + _until_repeated(ended.messages.ids[done : done + len(read.starts)]))
            batch = ended.pick(np.arange(at.start, at.stop))
            try:
                note = store(batch, read, at)
            except Exhausted:
                break
            try:
                note()
            except BaseException as error:  # nothing more is journaled: else the messages are stored again and again
                self._logs.stop_journals(error)
                raise
            batch.close()
            batch.group.forget_attempts(batch.messages.offsets)
            done = at.stop
        return done


def _slices(leased: Leased) -> Iterator[Leased]:
    """Rows of leases, SLICE_MESSAGES at a time."""
    part: list[tuple[Lease, I64]] = []
    room = SLICE_MESSAGES
    for lease, rows in leased:
        while len(rows):
            part.append((lease, rows[:room]))
            room, rows = room - len(rows[:room]), rows[room:]
            if not room:
                yield part
                part, room = [], SLICE_MESSAGES
    if part:
        yield part


def _until_repeated(ids: Sequence[str]) -> int:
    """How many of these ids, from the first on, are different: a batch of a store has each once. Two leases of a group may have
    one id after the group was moved back."""
    if len(set(ids)) == len(ids):
        return len(ids)
    seen: set[str] = set()
    return next(i for i, id_ in enumerate(ids) if id_ in seen or seen.add(id_))  # type: ignore[func-returns-value]


def _ended(
    ended: Deliveries, read: Documents, error: str, when_ms: Sequence[int], last: Sequence[Attempt]
) -> list[EndedDelivery]:
    """Messages with their documents, the first ones of a read; damaged ones are left out. `last`: the attempt of each that ends,
    or nothing if they were not delivered."""
    group, messages, good = ended.group, ended.messages, read.good[: len(ended)]
    columns = (messages.attempts.tolist(), when_ms, messages.due_ms.tolist(), messages.offsets.tolist(), good.tolist())
    out = []
    for i, (attempt, when, due_ms, offset, is_good) in enumerate(zip(*columns, strict=True)):
        if is_good:
            document = read.decode(i)
            attempts = a.latest((*a.of_notes(document.meta), *group.attempts.get(offset, ()), *last[i : i + 1]))
            out.append(
                EndedDelivery(group.name, messages.ids[i], document, attempt, error, when, due_ms, offset, group.epoch, attempts)
            )
    return out
