"""Deliveries that end without an ack: the message is retried soon, retried after a sleep, or becomes a dead letter.

A short back-off waits in memory (`Group.retries`). Dead letters and long back-offs are taken over by other stores: callbacks
store them durably, and only then does the journal say that the Broker is done with them. If the disk is full, or
no file can be opened, the message waits in memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turtlemq.broker import events
from turtlemq.broker.group import Group, Lease, Leased, MessageColumns, Retry, messages_of
from turtlemq.broker.policy import backoff_ms
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
        """End deliveries that failed, given as rows of leases. `delay_ms`: instead of the back-off. Returns how many messages are
        retried and how many are dead.

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
        dying = messages.attempts >= self._state.settings.max_attempts
        if error is LEASE_EXPIRED:
            group.tally.timed_out += len(messages)
        else:
            group.tally.failed += len(messages)
        last, sleepers = np.flatnonzero(dying), np.flatnonzero(~dying & far)
        dead = self._bury(failed.pick(last), events.DEAD, error, now_ms)
        asleep = self._sleep(failed.pick(sleepers), when[sleepers], error, now_ms)
        soon = np.append(np.flatnonzero(~dying & ~far), sleepers[asleep:])
        self._retry(failed.pick(soon), when[soon], error, now_ms)
        left = failed.pick(last[dead:])  # their delivery does not count, so that they die when there is room
        self._retry(left, np.full(len(left), now_ms + FULL_RETRY_MS), error, now_ms, counted=False)
        return dead

    def _retry(self, ended: Deliveries, when_ms: I64, error: str, now_ms: int, *, counted: bool = True) -> None:
        """Let messages wait in memory, and end their deliveries."""
        if len(ended):
            self.retry(ended.group, ended.messages, when_ms, error, now_ms, counted=counted)
            ended.close()

    def retry(
        self, group: Group, messages: MessageColumns, when_ms: I64, error: str, now_ms: int, *, counted: bool = True
    ) -> None:
        """Let messages wait in memory until `when_ms`. `counted`: the delivery that ends counts as an attempt."""
        attempts = messages.attempts + counted
        self._logs.reserve.append(now_ms, group.name, *events.retry(group, messages, attempts, when_ms, error))
        for offset, at_ms, attempt in zip(messages.offsets.tolist(), when_ms.tolist(), attempts.tolist(), strict=True):
            group.add_retry(offset, Retry(at_ms, attempt, error))

    def expire(self, group: Group, messages: MessageColumns, now_ms: int) -> None:
        """Messages that were not delivered before they expire become dead letters. Required: the journal has a lease of them that
        ends at once, so that a crash in between loses none."""
        lease = group.lease(messages, now_ms, now_ms, "")
        expired = Deliveries.of(group, [(lease, np.arange(len(messages)))])
        left = expired.pick(np.arange(self._bury(expired, events.EXPIRED, EXPIRED, now_ms), len(expired)))
        self._retry(left, np.full(len(left), now_ms + FULL_RETRY_MS), EXPIRED, now_ms)

    def _delays(self, messages: MessageColumns, delay_ms: int | None) -> I64:
        if delay_ms is not None:
            return np.full(len(messages), delay_ms, np.int64)
        numbered = zip(messages.ids, messages.attempts.tolist(), strict=True)
        return np.array([backoff_ms(self._state.settings, id_, attempt) for id_, attempt in numbered], np.int64)

    def _sleep(self, ended: Deliveries, when_ms: I64, error: str, now_ms: int) -> int:
        """Put messages to sleep in the Index. Returns how many of them, from the first on: fewer if there is no room."""
        group = ended.group

        def store(batch: Deliveries, read: Documents, at: slice) -> Callable[[], None]:
            self._schedule_retries(_ended(batch, read, error, when_ms[at].tolist()))
            return lambda: self._logs.write_or_defer(self._logs.reserve, now_ms, group.name, events.moved(group, batch.messages))

        return self._hand_over(ended, store)

    def _bury(self, ended: Deliveries, outcome: str, error: str, now_ms: int) -> int:
        """Store messages as dead letters. Returns how many of them, from the first on: fewer if there is no room."""

        def store(batch: Deliveries, read: Documents, _: slice) -> Callable[[], None]:
            letters = _ended(batch, read, error, [now_ms] * len(batch))
            replaced = len(batch) - len(letters) + self._store_dead(letters)
            return lambda: self._state.bury(batch.group, batch.messages, batch.reserved_ms, outcome, error, now_ms, replaced)

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


def _ended(ended: Deliveries, read: Documents, error: str, when_ms: Sequence[int]) -> list[EndedDelivery]:
    """Messages with their documents, the first ones of a read; damaged ones are left out."""
    group, messages, good = ended.group, ended.messages, read.good[: len(ended)]
    columns = (messages.attempts.tolist(), when_ms, messages.due_ms.tolist(), messages.offsets.tolist(), good.tolist())
    return [
        EndedDelivery(group.name, messages.ids[i], read.decode(i), attempt, error, when, due_ms, offset, group.epoch)
        for i, (attempt, when, due_ms, offset, is_good) in enumerate(zip(*columns, strict=True))
        if is_good
    ]
