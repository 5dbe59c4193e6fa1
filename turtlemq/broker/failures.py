"""Deliveries that end without an ack: the message is retried soon, retried after a sleep, or becomes a dead letter.

A short back-off waits in memory (`Group.retries`). Dead letters and long back-offs are taken over by other stores: callbacks
store them durably, and only then does the journal say that the Broker is done with them. If the disk is full, or
no file can be opened, the message waits in memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from turtlemq.broker import events
from turtlemq.broker.group import Group, Lease, MessageColumns, Retry
from turtlemq.broker.policy import backoff_ms
from turtlemq.broker.state import BrokerState
from turtlemq.errors import Exhausted
from turtlemq.model import I64
from turtlemq.segment import format as f

RAM_BACKOFF_MS = 30_000  # a longer back-off sleeps in the Index
RAM_RETRIES_MAX = 50_000  # of one group; a retry above this number sleeps in the Index, too
_SLEEP_BATCH = 2_000  # messages put to sleep with one sync: each is decoded, and takes 2 kB until then
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

    def fail(self, group: Group, lease: Lease, which: I64, delay_ms: int | None, error: str, now_ms: int) -> tuple[int, int]:
        """End deliveries of one lease that failed. `delay_ms`: instead of the back-off. Returns how many messages are retried and
        how many are dead."""
        messages = lease.messages.pick(which)
        if error is LEASE_EXPIRED:
            group.tally.timed_out += len(messages)
        else:
            group.tally.failed += len(messages)
        dying = messages.attempts >= self._state.settings.max_attempts
        when = now_ms + self._delays(messages, delay_ms)
        far = when - now_ms > RAM_BACKOFF_MS
        far[max(0, RAM_RETRIES_MAX - len(group.retries)) :] = True
        dead = np.flatnonzero(dying)
        if len(dead) and not self._bury(group, messages.pick(dead), lease.reserved_ms, events.DEAD, error, now_ms):
            messages.attempts[dead] -= 1  # the delivery does not count, so that the message dies when there is room
            when[dead], dying = now_ms + FULL_RETRY_MS, np.zeros(len(messages), np.bool_)
            far[dead] = False
        group.close([(lease, which[dying])])
        sleeping = np.flatnonzero(~dying & far)
        for batch in np.split(sleeping, range(_SLEEP_BATCH, len(sleeping), _SLEEP_BATCH)):
            if len(batch) and not self._sleep(group, messages.pick(batch), when[batch], error, now_ms):
                far[batch] = False
        group.close([(lease, which[~dying & far])])
        soon = np.flatnonzero(~dying & ~far)
        if len(soon):
            self.retry(group, messages.pick(soon), when[soon], error, now_ms)
            group.close([(lease, which[soon])])
        return len(messages) - int(dying.sum()), int(dying.sum())

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
        if not self._bury(group, messages, now_ms, events.EXPIRED, EXPIRED, now_ms):
            self.retry(group, messages, np.full(len(messages), now_ms + FULL_RETRY_MS), EXPIRED, now_ms)
        group.close([(lease, np.arange(len(messages)))])

    def _delays(self, messages: MessageColumns, delay_ms: int | None) -> I64:
        if delay_ms is not None:
            return np.full(len(messages), delay_ms, np.int64)
        numbered = zip(messages.ids, messages.attempts.tolist(), strict=True)
        return np.array([backoff_ms(self._state.settings, id_, attempt) for id_, attempt in numbered], np.int64)

    def _sleep(self, group: Group, messages: MessageColumns, when_ms: I64, error: str, now_ms: int) -> bool:
        """Put messages to sleep in the Index. Returns False, and changes nothing, if the disk is full or no file opens."""
        self._logs.secure_leases()
        try:
            self._schedule_retries(self._ended(group, messages, error, when_ms.tolist()))
        except Exhausted:
            return False
        self._logs.write_or_defer(self._logs.reserve, now_ms, group.name, events.moved(group, messages))
        return True

    def _bury(self, group: Group, messages: MessageColumns, reserved_ms: int, outcome: str, error: str, now_ms: int) -> bool:
        """Store messages as dead letters. Returns False, and changes nothing, if the disk is full or no file opens."""
        self._logs.secure_leases()
        try:
            letters = self._ended(group, messages, error, [now_ms] * len(messages))
            new = len(letters) - self._store_dead(letters)
        except Exhausted:
            return False
        reserved = np.full(len(messages), reserved_ms)
        self._state.bury(group, messages, reserved, outcome, error, now_ms, replaced=len(messages) - new)
        return True

    def _ended(self, group: Group, messages: MessageColumns, error: str, when_ms: Sequence[int]) -> list[EndedDelivery]:
        """Messages with their documents; damaged ones are left out."""
        order = np.argsort(messages.offsets, kind="stable")
        read, _ = self._logs.ready.read(messages.offsets[order])
        out = []
        for k, i in enumerate(order.tolist()):
            if read.good[k]:
                attempt, due_ms, offset = (int(c[i]) for c in (messages.attempts, messages.due_ms, messages.offsets))
                original = read.decode(k)
                out.append(
                    EndedDelivery(group.name, messages.ids[i], original, attempt, error, when_ms[i], due_ms, offset, group.epoch)
                )
        return out
