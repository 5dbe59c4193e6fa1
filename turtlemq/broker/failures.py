"""How a delivery ends when nobody acknowledged it: again soon, again after a sleep, or among the dead.

Dead letters and long back-offs are somebody else's: `bury` and `resleep` of the Broker store them durably, and only then does
the journal say that the Broker is done with them. Where the disk has no room for that, the message waits in memory instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from bson.int64 import Int64

from turtlemq.broker import delivery
from turtlemq.broker.group import Group, Lease, MessageColumns, Waiting
from turtlemq.broker.journal import pack
from turtlemq.broker.policy import backoff_ms
from turtlemq.errors import DiskFull
from turtlemq.model import I64
from turtlemq.segment import format as f

if TYPE_CHECKING:
    from turtlemq.broker.broker import Broker

RAM_BACKOFF_MS = 30_000  # a retry that is further away sleeps through the Index
RAM_RETRIES_MAX = 50_000  # so do all above this many
_AT_ONCE = 2_000  # messages that are put to sleep with one sync: each is decoded, and takes 2 kB until then
FULL_RETRY_MS = 1_000  # what finds no room on the disk comes again so much later
LEASE_EXPIRED = "lease expired"
EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class EndedDelivery:
    """A message that goes back to sleep or to the dead: the document it was, and how far it got."""

    group: str
    id: str
    document: f.Document
    attempt: int  # deliveries so far
    error: str
    when_ms: int  # when it is to come again, or when it died
    due_ms: int  # as the producer asked
    offset: int  # where in the ready log it was when it left
    epoch: int  # of the group, then


def fail(
    broker: Broker, group: Group, lease: Lease, which: I64, delay_ms: int | None, error: str, now_ms: int
) -> tuple[int, int]:
    """Deliveries of one lease have failed. Returns how many come again and how many died."""
    held = lease.messages.pick(which)
    if error is LEASE_EXPIRED:
        group.tally.timed_out += len(held)
    else:
        group.tally.failed += len(held)
    dying = held.attempts >= broker.settings.max_attempts
    when = now_ms + _delays(broker, held, delay_ms)
    far = when - now_ms > RAM_BACKOFF_MS
    far[max(0, RAM_RETRIES_MAX - len(group.waiting)) :] = True
    dead = np.flatnonzero(dying)
    if len(dead) and not die(broker, group, held.pick(dead), lease.reserved_ms, "dead", error, now_ms):
        held.attempts[dead] -= 1  # no room for it there: this delivery does not count, so that it dies when there is
        when[dead], dying = now_ms + FULL_RETRY_MS, np.zeros(len(held), np.bool_)
        far[dead] = False
    group.close([(lease, which[dying])])
    asleep = np.flatnonzero(~dying & far)
    for some in np.split(asleep, range(_AT_ONCE, len(asleep), _AT_ONCE)):
        if len(some) and not _sleep(broker, group, held.pick(some), when[some], error, now_ms):
            far[some] = False
    group.close([(lease, which[~dying & far])])
    soon = np.flatnonzero(~dying & ~far)
    if len(soon):
        wait(broker, group, held.pick(soon), when[soon], error, now_ms)
        group.close([(lease, which[soon])])
    return len(held) - int(dying.sum()), int(dying.sum())


def _delays(broker: Broker, held: MessageColumns, delay_ms: int | None) -> I64:
    if delay_ms is not None:
        return np.full(len(held), delay_ms, np.int64)
    numbered = zip(held.ids, held.attempts.tolist(), strict=True)
    return np.array([backoff_ms(broker.settings, id_, attempt) for id_, attempt in numbered], np.int64)


def _sleep(broker: Broker, group: Group, held: MessageColumns, when: I64, error: str, now_ms: int) -> bool:
    """A long back-off sleeps through the Index. False: there is no room for it."""
    broker.secure_leases()
    try:
        broker.schedule_retries(ended_deliveries(broker, group, held, error, when.tolist()))
    except DiskFull:
        return False
    fields = {"event": "moved", "epoch": Int64(group.epoch), "offsets": pack(held.offsets), "seqs": pack(held.seqs)}
    broker.write_or_defer(broker.reserve_log, now_ms, group.name, fields)
    return True


def wait(broker: Broker, group: Group, some: MessageColumns, when: I64, error: str, now_ms: int, *, counted: int = 1) -> None:
    """A short back-off waits in memory. The delivery that ends has `counted`, or has not."""
    broker.reserve_log.append(
        now_ms,
        group.name,
        {
            "event": "retry",
            "epoch": Int64(group.epoch),
            "offsets": pack(some.offsets),
            "seqs": pack(some.seqs),
            "attempts": pack(some.attempts + counted),
            "when": pack(when),
            "error": error,
        },
    )
    for offset, at_ms, attempt in zip(some.offsets.tolist(), when.tolist(), some.attempts.tolist(), strict=True):
        group.wait(offset, Waiting(at_ms, attempt + counted, error))


def die(broker: Broker, group: Group, held: MessageColumns, reserved_ms: int, outcome: str, error: str, now_ms: int) -> bool:
    """They go to the dead letters. False: there is no room for them."""
    broker.secure_leases()
    try:
        letters = ended_deliveries(broker, group, held, error, [now_ms] * len(held))
        fresh = len(letters) - broker.store_dead(letters)
    except DiskFull:
        return False
    broker.journal_settlement(group, held, np.full(len(held), reserved_ms), outcome, now_ms, error, len(held) - fresh)
    return True


def expire(broker: Broker, group: Group, held: MessageColumns, now_ms: int) -> None:
    """Messages that were not delivered in time are dead. They stand in a lease that ends at once, so none is lost between."""
    lease = group.lease(held, now_ms, now_ms, "")
    if not die(broker, group, held, now_ms, EXPIRED, EXPIRED, now_ms):
        wait(broker, group, held, np.full(len(held), now_ms + FULL_RETRY_MS), EXPIRED, now_ms)
    group.close([(lease, np.arange(len(held)))])


def ended_deliveries(broker: Broker, group: Group, held: MessageColumns, error: str, when: Sequence[int]) -> list[EndedDelivery]:
    """Messages with their documents; damaged ones are left out."""
    order = np.argsort(held.offsets, kind="stable")
    read, _ = broker.ready.read(held.offsets[order])
    out = []
    for k, i in enumerate(order.tolist()):
        if read.good[k]:
            found = delivery.document(read, k)
            attempt, due_ms = int(held.attempts[i]), int(held.due_ms[i])
            offset = int(held.offsets[i])
            out.append(EndedDelivery(group.name, held.ids[i], found, attempt, error, when[i], due_ms, offset, group.epoch))
    return out
