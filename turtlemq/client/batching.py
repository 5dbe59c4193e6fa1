"""Batching of single puts: a buffer with linger, and the delivery of its batches. No clock, no threads. Pure.

A put waits in the `BatchBuffer` until its batch is full or has lingered long enough. `deliver_batch` stores a batch and resolves
the promise of each put: a message that the server refuses fails alone, the others of its batch are sent again. Threads and tasks
are in `producer` and `aio_producer`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from turtlemq.client.errors import ClientError, TimedOut
from turtlemq.client.outgoing import MODES_COUNT, OutgoingMessage
from turtlemq.client.results import Outcome
from turtlemq.client.sending import Choose, Flow, RetryPolicy, rows_by_place, store_batch

log = logging.getLogger("turtlemq.client")
WHOLE_REQUEST_CODES = ("INVALID_TOPIC", "UNSUPPORTED_MEDIA_TYPE")  # refusals of the request, not of one message in it
DEADLINE_GRID_S = 0.1  # deadlines are rounded up to this, so that those of a batch end together


class Promise(Protocol):
    """The handle that a put gave to its caller: a future of either shell. `created`, `outcome`: as of `StoredId`."""

    created: bool | None
    outcome: Outcome | None

    def done(self) -> bool:
        """Whether it is resolved or cancelled."""

    def set_result(self, result: str, /) -> None:
        """The message is durable."""

    def set_exception(self, exception: BaseException, /) -> None:
        """The message is not stored, or not known to be."""


class PendingPut:
    """A message in a producer that is not confirmed yet."""

    __slots__ = ("out", "promise", "deadline_s", "seq", "size", "error", "is_first_try")

    def __init__(self, out: OutgoingMessage, promise: Promise, deadline_s: float) -> None:
        self.out, self.promise = out, promise
        self.deadline_s = -(-deadline_s // DEADLINE_GRID_S) * DEADLINE_GRID_S
        self.seq, self.size = 0, out.size
        self.error: ClientError | None = None
        self.is_first_try = True  # else an earlier request, whose answer is not known, may have created it

    def succeed(self, created: bool | None, outcome: Outcome | None) -> None:
        """Resolve the promise: the message is durable. `created`, `outcome`: as of `StoredId`."""
        if not self.promise.done():
            known = created or self.is_first_try
            self.promise.created, self.promise.outcome = (created, outcome) if known else (None, None)
            self.promise.set_result(self.out.id)

    def fail(self, error: ClientError) -> None:
        """Resolve the promise with an error. Its index becomes 0: the caller put one message and does not know the batch."""
        if not self.promise.done():
            self.error = error
            self.promise.set_exception(error.at(None if error.index is None else 0))


def deliver_batch(topic: str, batch: list[PendingPut], policy: RetryPolicy, choose: Choose | None = None) -> Flow[None]:
    """Store a batch and resolve all its promises, in one request for each partition that `choose` names. A refused message does
    not fail the others of its batch."""
    parts = [[batch[row] for row in rows] for rows in rows_by_place([put.out.id for put in batch], choose)] if choose else [batch]
    while parts:
        part = parts.pop()
        deadline_s = min(put.deadline_s for put in part)
        try:
            stored = yield from store_batch(topic, [put.out for put in part], policy, deadline_s, of_one_place=choose is not None)
        except TimedOut as error:
            rest = _sent_before([put for put in part if put.deadline_s > deadline_s])
            parts += [rest] if rest else []
            for put in part:
                if put.deadline_s <= deadline_s:
                    put.fail(error)
        except ClientError as error:
            parts += _split_refused(part, error)
        else:
            for put, created, outcome in zip(part, stored.created, stored.outcomes, strict=True):
                put.succeed(created, outcome)


def _sent_before(puts: list[PendingPut]) -> list[PendingPut]:
    """Puts that were sent, and whose answer is not known."""
    for put in puts:
        put.is_first_try = False
    return puts


def _split_refused(part: list[PendingPut], error: ClientError) -> list[list[PendingPut]]:
    """The parts to send again after a refusal: all but the bad message, or two halves if the error does not name it."""
    bad = error.index
    if len(part) > 1 and error.status in (400, 409, 413) and error.code not in WHOLE_REQUEST_CODES:
        if bad is not None and 0 <= bad < len(part):
            part[bad].fail(error)
            return [part[:bad] + part[bad + 1 :]]
        half = len(part) // 2
        return [part[half:], part[:half]]
    for put in part:
        put.fail(error)
    return []


def fail_batch(batch: list[PendingPut], error: Exception) -> None:
    """Fail all puts after an error that is not foreseen: no caller may wait for ever."""
    for put in batch:
        put.fail(error if isinstance(error, ClientError) else ClientError(f"not sent: {error!r}"))


def log_failed_puts(topic: str, batch: list[PendingPut]) -> None:
    """One log line for all failed puts of a batch."""
    errors = [put.error for put in batch if put.error is not None]
    if errors:
        log.warning("event=puts_failed topic=%s count=%d first=%s", topic, len(errors), errors[0])


class BatchBuffer:
    """The unconfirmed puts of a producer: those that wait for a batch, and those in flight. Not thread-safe.

    count, size, linger_s: a batch is due at so many messages or bytes, or so long after its first put.
    Holds at most `unconfirmed_count_max` messages and `unconfirmed_bytes_max` bytes.
    """

    def __init__(self, count: int, size: int, linger_s: float, unconfirmed_count_max: int, unconfirmed_bytes_max: int) -> None:
        if count < 1 or size < 1 or linger_s < 0 or unconfirmed_count_max < 1 or unconfirmed_bytes_max < 1:
            raise ValueError("counts and bytes are 1 or more, linger is 0 or more")
        self.count, self.size, self.linger_s = count, size, linger_s
        self.unconfirmed_count_max, self.unconfirmed_bytes_max = unconfirmed_count_max, unconfirmed_bytes_max
        self.waiting: deque[PendingPut] = deque()
        self.unconfirmed: dict[int, PendingPut] = {}  # by seq, in the order of the puts
        self.unconfirmed_bytes = self.waiting_bytes = 0
        self._last_seq = self._flush_seq = 0

    def fits(self, size: int) -> bool:
        """Whether there is room for one more put. An empty buffer takes one of any size."""
        return not self.unconfirmed or (
            len(self.unconfirmed) < self.unconfirmed_count_max and self.unconfirmed_bytes + size <= self.unconfirmed_bytes_max
        )

    def add(self, put: PendingPut) -> None:
        """Take a put in. O(1)."""
        self._last_seq += 1
        put.seq = self._last_seq
        self.unconfirmed[put.seq] = put
        self.waiting.append(put)
        self.waiting_bytes += put.size
        self.unconfirmed_bytes += put.size

    def flush_now(self) -> int:
        """End the linger of all waiting puts. Returns the seq of the last one, for `flushed`."""
        self._flush_seq = self._last_seq
        return self._last_seq

    def flushed(self, seq: int) -> bool:
        """Whether all puts up to this seq are released. O(1): the oldest is first in the dict."""
        return not self.unconfirmed or next(iter(self.unconfirmed)) > seq

    def send_at_s(self) -> float | None:
        """When the next batch is due: 0 if it is full or flushed, None if no put waits."""
        if not self.waiting:
            return None
        first = self.waiting[0]
        if first.seq <= self._flush_seq or len(self.waiting) >= self.count or self.waiting_bytes >= self.size:
            return 0.0
        return first.out.put_s + self.linger_s

    def take_batch(self) -> list[PendingPut]:
        """Take the next batch out of the waiting puts. At least one message, of any size."""
        batch: list[PendingPut] = []
        size = 0
        count = self.count
        while self.waiting and (not batch or size + self.waiting[0].size <= self.size):
            if self.waiting[0].out.if_exists is not None:
                count = min(count, MODES_COUNT)
            if len(batch) >= count:
                break
            batch.append(self.waiting.popleft())
            size += batch[-1].size
        self.waiting_bytes -= size
        return batch

    def put_back(self, batch: list[PendingPut]) -> None:
        """Make a taken batch the next one again: it was not sent, or its answer is not known."""
        self.waiting.extendleft(reversed(_sent_before(batch)))
        self.waiting_bytes += sum(put.size for put in batch)

    def release(self, batch: list[PendingPut]) -> None:
        """Free the room of puts that are resolved, successfully or not."""
        for put in batch:
            if self.unconfirmed.pop(put.seq, None) is not None:
                self.unconfirmed_bytes -= put.size
