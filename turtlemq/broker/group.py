"""The state of one consumer group, in memory: cursors into the ready log, leases, and retries.

A message before the cursor that is neither leased nor waits for a retry is settled. So memory is bounded by the messages in
flight, however long the backlog is and however long one message stays unacknowledged.

No files and no clock: `broker` and `failures` journal each change before they make it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import repeat

import numpy as np

from turtlemq import small_batches
from turtlemq.attempts import Attempt, Attempts, latest
from turtlemq.broker.priorities import LEVELS, Carry, Preemption, Weight
from turtlemq.broker.priority_waits import HighWaits
from turtlemq.broker.retry_queue import RetryQueue
from turtlemq.histogram import GroupTally
from turtlemq.model import I64, Mask

_SLOT_BITS = 20  # a fetch hands out at most a million messages
_SLOT_MASK = (1 << _SLOT_BITS) - 1
NO_EVENT = -1  # the number of an unknown event: the lease comes from a checkpoint of an older version


@dataclass(slots=True)
class MessageColumns:
    """Messages as columns, for leases, settlements and retries."""

    offsets: I64
    seqs: I64
    due_ms: I64
    ready_ms: I64
    attempts: I64
    ids: list[str]

    def pick(self, which: I64, ids: Sequence[str] | None = None) -> MessageColumns:
        """The rows `which`, in that order. `ids`: their ids, if the caller has them."""
        if len(which) == len(self.ids) and (which == np.arange(len(which))).all():
            return self
        return MessageColumns(
            self.offsets[which],
            self.seqs[which],
            self.due_ms[which],
            self.ready_ms[which],
            self.attempts[which],
            [self.ids[i] for i in which.tolist()] if ids is None else list(ids),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def join(parts: Sequence[MessageColumns]) -> MessageColumns:
        """The rows of all parts, in order."""
        parts = [part for part in parts if part.ids]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return NO_MESSAGES
        return MessageColumns(
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.seqs for part in parts]),
            np.concatenate([part.due_ms for part in parts]),
            np.concatenate([part.ready_ms for part in parts]),
            np.concatenate([part.attempts for part in parts]),
            [id_ for part in parts for id_ in part.ids],
        )


_NOTHING = np.empty(0, np.int64)
NO_MESSAGES = MessageColumns(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, [])


def names_only(leases: str | Sequence[str], token: str) -> bool:
    """Whether all these tokens, or this one, are the given token."""
    return leases == token if isinstance(leases, str) else list(leases).count(token) == len(leases)


def lease_token(event: int, reserved_ms: int) -> str:
    """The token of a fetch, see `Lease.token`.

    >>> lease_token(255, 4096), lease_token(NO_EVENT, 4096)
    ('ff-1000', '')
    """
    return "" if event == NO_EVENT else f"{event:x}-{reserved_ms:x}"


@dataclass(slots=True)
class Lease:
    """Messages that were handed out together, to one consumer and until one moment. The messages of one fetch are in several of
    these if they end at different times, and have one token all the same."""

    number: int
    messages: MessageColumns
    reserved_ms: int
    until_ms: int
    consumer: str
    open: Mask  # messages that are still in flight
    left: int  # how many these are
    event: int = NO_EVENT  # number of the event that journaled the fetch
    _first: int | None = None  # see `first`

    @property
    def first(self) -> int:
        """The lowest offset of an open message. Remembered: a group may have 100,000 leases."""
        if self._first is None:
            self._first = int(self.messages.offsets[self.open].min())
        return self._first

    def close(self, which: I64) -> None:
        """These messages are not in flight any more."""
        self.open[which] = False
        self.left -= len(which)
        self._first = None

    @property
    def token(self) -> str:
        """The name of the fetch, for its consumer; empty if it is unknown. A power cut may take the last events, and others get
        their numbers then: hence the time."""
        return lease_token(self.event, self.reserved_ms)


Leased = Sequence[tuple[Lease, I64]]  # messages in flight, as rows of leases


@dataclass(slots=True)
class Group:
    """One consumer group: where its cursors stand, which messages are leased, and which wait for a retry."""

    name: str
    epoch: int = 0  # 1 + number of the event that created or last moved it: older events say nothing of its messages now
    born: int = 0  # the epoch in which it was created: older events are of another group with the same name
    moves: list[tuple[int, int]] = field(default_factory=list)  # see `standing.add_move`
    cursors: dict[int, int] = field(default_factory=dict)  # next offset to fetch, by priority
    carry: Carry = field(default_factory=Carry)
    preemption: Preemption = field(default_factory=Preemption)
    weight: Weight = field(default_factory=Weight)  # of high priority
    high_waits: HighWaits = field(default_factory=HighWaits)
    leases: dict[int, Lease] = field(default_factory=dict)  # by number
    retries: RetryQueue = field(default_factory=RetryQueue)  # by ready offset
    attempts: dict[int, Attempts] = field(default_factory=dict)  # ended ones of messages in flight or in `retries`, by offset
    unfetched: int = 0  # messages for this group at and behind its cursors
    in_flight: int = 0  # messages under a lease
    settled: int = 0  # messages acknowledged since the group was created
    changed_ms: int = 0  # the last lease, settlement or move
    idle_ms: int = 0  # time without a request or a waiting one, counted up to `seen_ms`; see `retention`
    seen_ms: int | None = None  # the last request, also a fetch that found nothing; None: none since the topic was opened
    tally: GroupTally = field(default_factory=GroupTally)
    _deadlines: list[tuple[int, int]] = field(default_factory=list)  # heap of (end, lease number), some of them outdated
    _next_lease: int = 0
    _slots: dict[str, int] = field(default_factory=dict)  # by id: lease number << _SLOT_BITS | row in that lease
    _unentered: dict[str, int] = field(default_factory=dict)  # leases whose ids are not in `_slots` yet, by first id
    _shared: bool = False  # an id was in two leases at once: a requeued dead letter, after the group was moved back

    def start(self, offset: int) -> None:
        """Stand at an offset with no lease and no retry."""
        self.cursors = dict.fromkeys(LEVELS, offset)
        self.leases, self.retries, self._slots, self._unentered, self._shared = {}, RetryQueue(), {}, {}, False
        self.attempts, self._deadlines = {}, []
        self.in_flight = 0

    def use(self, now_ms: int) -> None:
        """Begin to count the idle time anew: a client has asked something of this group."""
        self.idle_ms, self.seen_ms = 0, now_ms

    @property
    def ready(self) -> int:
        """Messages to be delivered, retries included."""
        return self.unfetched + len(self.retries)

    def has_ready(self, now_ms: int) -> bool:
        """Whether a fetch may find a message. O(1)."""
        return self.unfetched > 0 or (bool(self.retries) and self.retries.next_time(now_ms) is None)

    @property
    def committed(self) -> int:
        """The offset before which every message is settled. O(in flight)."""
        open_ = [lease.first for lease in self.leases.values() if lease.left]
        first: int = min([*self.cursors.values(), *open_, *self.retries])
        return first

    @property
    def last_cursor(self) -> int:
        """The offset from which on the group has fetched no message."""
        return max(self.cursors.values())

    # Leases

    def lease(self, messages: MessageColumns, now_ms: int, until_ms: int, consumer: str, event: int = NO_EVENT) -> Lease:
        """Lease messages to a consumer. `event`: the number of the event that journals it. Required: at least one message, none
        of them in flight."""
        number = self._next_lease
        self._next_lease += 1
        offsets = messages.offsets
        first = min(offsets.tolist()) if len(offsets) < small_batches.DOCUMENTS else int(offsets.min())
        is_open = np.ones(len(messages), np.bool_)
        made = Lease(number, messages, now_ms, until_ms, consumer, is_open, len(messages), event, first)
        self.leases[number] = made
        if messages.ids[0] in self._unentered:
            self._enter()
        self._unentered[messages.ids[0]] = number
        self._add_deadline(made)
        self.in_flight += len(messages)
        return made

    def _add_deadline(self, lease: Lease) -> None:
        heappush(self._deadlines, (lease.until_ms, lease.number))
        if len(self._deadlines) > 2 * len(self.leases) + 64:  # most of them are of closed or extended leases
            self._deadlines = [(lease.until_ms, lease.number) for lease in self.leases.values()]
            heapify(self._deadlines)

    @property
    def reserved_ids(self) -> KeysView[str]:
        """Ids of the messages in flight."""
        self._enter()
        return self._slots.keys()

    def lease_of(self, id_: str) -> tuple[Lease, int] | None:
        """The lease that holds an id, and the row of the message in it; None: it is not in flight."""
        self._enter()
        slot = self._slots.get(id_)
        return None if slot is None else (self.leases[slot >> _SLOT_BITS], slot & _SLOT_MASK)

    def _enter(self) -> None:
        """Enter the ids of new leases into `_slots`. A lease that is acknowledged as it was handed out is closed before that,
        which saves a tenth of the work on a message."""
        for number in self._unentered.values():
            ids, first = self.leases[number].messages.ids, number << _SLOT_BITS
            expected = len(self._slots) + len(ids)
            self._slots.update(zip(ids, range(first, first + len(ids)), strict=True))
            self._shared |= len(self._slots) < expected
        self._unentered = {}

    def whole_lease(self, ids: Sequence[str]) -> tuple[Lease, I64] | None:
        """The lease that holds exactly these ids, in this order, and its rows; None if there is none."""
        number = self._unentered.get(ids[0]) if ids else None
        if number is None or self.leases[number].messages.ids != ids:
            return None
        return self.leases[number], np.arange(len(ids))

    def locate(self, ids: Sequence[str]) -> tuple[list[tuple[Lease, I64]], list[str]]:
        """The leases that hold these ids, each with its rows; and the ids that are not in flight, or listed before."""
        if not ids:
            return [], []
        if (whole := self.whole_lease(ids)) is not None:
            return [whole], []
        self._enter()
        if len(ids) < small_batches.DOCUMENTS and (rows := self._locate_small(ids)):
            return rows, []
        slots = np.fromiter(map(self._slots.get, ids, repeat(-1)), np.int64, len(ids))
        number = int(slots[0]) >> _SLOT_BITS
        if number >= 0 and (slots >> _SLOT_BITS == number).all():  # all in one lease, as they were handed out
            lease, which = self.leases[number], slots & _SLOT_MASK
            seen = np.zeros(len(lease.messages), np.bool_)
            seen[which] = True
            if np.count_nonzero(seen) == len(which):
                return [(lease, which)], []
        unknown = self._unknown(ids)
        slots = np.unique(slots[slots >= 0])
        numbers = slots >> _SLOT_BITS
        return [(self.leases[n], slots[numbers == n] & _SLOT_MASK) for n in np.unique(numbers).tolist()], unknown

    def _locate_small(self, ids: Sequence[str]) -> list[tuple[Lease, I64]]:
        """`locate` without arrays. Returns [] unless every id is in flight and listed once."""
        slots = list(map(self._slots.get, ids, repeat(-1)))
        if min(slots) < 0 or len(set(slots)) < len(slots):
            return []
        numbers = {slot >> _SLOT_BITS for slot in slots}
        if len(numbers) == 1:
            return [(self.leases[numbers.pop()], np.array([slot & _SLOT_MASK for slot in slots]))]
        by_lease: dict[int, list[int]] = {}
        for slot in sorted(slots):
            by_lease.setdefault(slot >> _SLOT_BITS, []).append(slot & _SLOT_MASK)
        return [(self.leases[number], np.array(rows)) for number, rows in by_lease.items()]

    def late(self, ids: Sequence[str], leases: str | Sequence[str]) -> list[bool]:
        """Which ids are in flight under another lease than the one that is named for them. `leases`: one token for all ids, or a
        token for each. Ids that are not in flight are not late."""
        self._enter()
        own: dict[int, str] = {}  # tokens by lease number
        out = []
        for id_, token in zip(ids, repeat(leases, len(ids)) if isinstance(leases, str) else leases, strict=True):
            number = self._slots.get(id_, -1) >> _SLOT_BITS
            if number >= 0 and number not in own:
                own[number] = self.leases[number].token
            out.append(number >= 0 and own[number] != token)
        return out

    def _unknown(self, ids: Sequence[str]) -> list[str]:
        seen: set[str] = set()
        unknown = []
        for id_ in ids:
            if id_ in seen or id_ not in self._slots:
                unknown.append(id_)
            seen.add(id_)
        return unknown

    def close(self, leased: Sequence[tuple[Lease, I64]]) -> None:
        """End the leases of these messages, given as rows of leases."""
        for lease, which in leased:
            if len(which):
                self._drop_ids(lease, which)
            lease.close(which)
            self.in_flight -= len(which)
            if not lease.left:
                self.leases.pop(lease.number, None)

    def _drop_ids(self, lease: Lease, which: I64) -> None:
        """Forget which lease holds these ids, unless another lease has one of them by now."""
        ids = lease.messages.ids
        if len(which) == len(ids) and self._unentered.get(ids[0]) == lease.number:
            del self._unentered[ids[0]]
            return
        self._enter()
        slots = self._slots
        if not self._shared:
            if len(which) == len(ids) == len(slots):  # no other message is in flight
                self._slots = {}
                return
            dropped = ids if len(which) == len(ids) else [ids[i] for i in which.tolist()]
            deque(map(slots.__delitem__, dropped), maxlen=0)
            return
        first = lease.number << _SLOT_BITS
        for i in which.tolist():
            if slots.get(ids[i]) == first + i:
                del slots[ids[i]]

    def extend(self, leased: Sequence[tuple[Lease, I64]], until_ms: int) -> None:
        """Let the leases of these messages end at another time. Of a lease with other open messages they are split off; the
        token stays."""
        for lease, which in leased:
            if len(which) == lease.left:
                lease.until_ms = until_ms
                self._add_deadline(lease)
            else:
                messages = lease.messages.pick(which)
                self.close([(lease, which)])
                self.lease(messages, lease.reserved_ms, until_ms, lease.consumer, lease.event)

    def expired(self, now_ms: int, count: int) -> list[tuple[Lease, I64]]:
        """Up to `count` messages of leases that have ended, those that ended first, as rows of leases. They stay until they are
        closed."""
        leased: dict[int, tuple[Lease, I64]] = {}
        while count > 0 and (due := self.next_deadline()) is not None and due <= now_ms:
            _, number = heappop(self._deadlines)
            if number not in leased:  # else it was extended to the same time twice
                lease = self.leases[number]
                leased[number] = lease, np.flatnonzero(lease.open)[:count]
                count -= len(leased[number][1])
        for lease, _ in leased.values():
            heappush(self._deadlines, (lease.until_ms, lease.number))
        return list(leased.values())

    def next_deadline(self) -> int | None:
        """When the next lease ends, at the earliest."""
        while self._deadlines and not self._ends_at(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _ends_at(self, until_ms: int, number: int) -> bool:
        lease = self.leases.get(number)
        return lease is not None and lease.left > 0 and lease.until_ms == until_ms

    # Ended attempts of messages that the group still has. Those from before a long back-off are in the document of the retry

    def add_attempt(self, offset: int, ended: Attempt) -> None:
        """A delivery of the message at a ready offset has ended, and the message waits for another."""
        self.attempts[offset] = latest((*self.attempts.get(offset, ()), ended))

    def attempts_of(self, offsets: I64) -> dict[int, Attempts]:
        """The ended attempts of messages, by row in `offsets`; only rows that have some."""
        if not self.attempts:
            return {}
        return {i: own for i, offset in enumerate(offsets.tolist()) if (own := self.attempts.get(offset)) is not None}

    def forget_attempts(self, offsets: I64) -> None:
        """The group is done with these messages, or another store has them."""
        for offset in offsets.tolist() if self.attempts else ():
            self.attempts.pop(offset, None)


def messages_of(leased: Sequence[tuple[Lease, I64]], ids: Sequence[str] | None = None) -> tuple[MessageColumns, I64]:
    """Messages of leases, and when each was reserved. `ids`: theirs, if they are in one lease and the caller has them."""
    if len(leased) == 1:
        lease, which = leased[0]
        return lease.messages.pick(which, ids), np.full(len(which), lease.reserved_ms)
    reserved = np.concatenate([np.full(len(which), lease.reserved_ms) for lease, which in leased])
    return MessageColumns.join([lease.messages.pick(which) for lease, which in leased]), reserved
