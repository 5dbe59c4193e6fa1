"""A consumer group's state, in memory only: cursors into the ready log, leases, and messages that wait to be tried again.

Everything before a cursor that is neither reserved nor waiting is settled, so memory is bounded by what is in flight, however
long the backlog and however long one message stays unacknowledged. No files, no clock: `broker` writes the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import repeat

import numpy as np

from turtlemq import small_batches
from turtlemq.histogram import GroupTally
from turtlemq.model import I64, Mask, Priority

LEVELS = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
_SLOT_BITS = 20  # a fetch hands out at most a million messages
_SLOT_MASK = (1 << _SLOT_BITS) - 1


@dataclass(slots=True)
class MessageColumns:
    """Messages as columns: what a lease, a settlement or a retry is about."""

    offsets: I64
    seqs: I64
    due_ms: I64
    ready_ms: I64
    attempts: I64
    ids: list[str]

    def pick(self, which: I64, ids: Sequence[str] | None = None) -> MessageColumns:
        """Some of them, in that order; `ids`: what they are called, where that is known."""
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
        """All of them, one behind the other."""
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


@dataclass(slots=True)
class Lease:
    """A batch in a consumer's hands. `open` tells which of its messages are still there."""

    number: int
    messages: MessageColumns
    reserved_ms: int
    until_ms: int
    consumer: str
    open: Mask
    left: int


@dataclass(slots=True)
class Waiting:
    """A failed or expired message that is to be delivered again."""

    when_ms: int
    attempt: int  # of the next delivery
    error: str


@dataclass(slots=True)
class Group:
    """See the module."""

    name: str
    epoch: int = 0  # rises when the group is made or moved: older events say nothing of what it holds now
    born: int = 0  # the epoch in which it was made: older events are of another group with the same name
    moves: list[tuple[int, int]] = field(default_factory=list)  # see `standing.add_move`
    cursors: dict[int, int] = field(default_factory=dict)  # next offset of each priority
    credits: dict[int, float] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by offset
    unfetched: int = 0  # messages for this group at and behind its cursors
    in_flight: int = 0
    settled: int = 0
    changed_ms: int = 0
    seen_ms: int | None = None  # when somebody last asked for messages, in vain or not; None: not since the topic was opened
    tally: GroupTally = field(default_factory=GroupTally)
    _deadlines: list[tuple[int, int]] = field(default_factory=list)
    _retries: list[tuple[int, int]] = field(default_factory=list)
    _next_lease: int = 0
    _ids: dict[str, int] = field(default_factory=dict)  # see `ids`
    _whole: dict[str, int] = field(default_factory=dict)  # leases whose ids are not entered there yet, by their first
    _shared: bool = False  # an id was in two leases at once: requeued from the dead while the group was moved back

    def start(self, offset: int) -> None:
        """Stand at an offset with nothing in flight."""
        self.cursors = dict.fromkeys((int(level) for level in LEVELS), offset)
        self.leases, self.waiting, self._ids, self._whole, self._shared = {}, {}, {}, {}, False
        self._deadlines, self._retries = [], []
        self.in_flight = 0

    @property
    def ready(self) -> int:
        """Messages to be delivered, those that wait to be tried again included."""
        return self.unfetched + len(self.waiting)

    @property
    def committed(self) -> int:
        """Everything before this offset is settled. O(in flight)."""
        open_ = [int(lease.messages.offsets[lease.open].min()) for lease in self.leases.values() if lease.left]
        return min([*self.cursors.values(), *open_, *self.waiting])

    # Leases

    def lease(self, held: MessageColumns, now_ms: int, until_ms: int, consumer: str) -> Lease:
        """Put messages into a consumer's hands."""
        number = self._next_lease
        self._next_lease += 1
        made = Lease(number, held, now_ms, until_ms, consumer, np.ones(len(held), np.bool_), len(held))
        self.leases[number] = made
        if held.ids[0] in self._whole:
            self._enter()
        self._whole[held.ids[0]] = number
        heappush(self._deadlines, (until_ms, number))
        if len(self._deadlines) > 2 * len(self.leases) + 64:  # most of them have ended
            self._deadlines = [(lease.until_ms, lease.number) for lease in self.leases.values()]
            heapify(self._deadlines)
        self.in_flight += len(held)
        return made

    @property
    def ids(self) -> dict[str, int]:
        """Reserved ids: lease number << 20 | slot."""
        self._enter()
        return self._ids

    def _enter(self) -> None:
        """Leases that are acknowledged as they were handed out never come here: that saves a tenth of the work on a message."""
        for number in self._whole.values():
            ids, first = self.leases[number].messages.ids, number << _SLOT_BITS
            expected = len(self._ids) + len(ids)
            self._ids.update(zip(ids, range(first, first + len(ids)), strict=True))
            self._shared |= len(self._ids) < expected
        self._whole = {}

    def whole(self, ids: Sequence[str]) -> tuple[Lease, I64] | None:
        """The lease that holds just these ids, in this order, if there is one."""
        number = self._whole.get(ids[0]) if ids else None
        if number is None or self.leases[number].messages.ids != ids:
            return None
        return self.leases[number], np.arange(len(ids))

    def seek(self, ids: Sequence[str]) -> tuple[list[tuple[Lease, I64]], list[str]]:
        """Which leases hold these ids, and in which slots; and the ids that the group does not hold in reserve."""
        if not ids:
            return [], []
        if (whole := self.whole(ids)) is not None:
            return [whole], []
        if len(ids) < small_batches.DOCUMENTS and (few := self._seek_few(ids)):
            return few, []
        found = np.fromiter(map(self.ids.get, ids, repeat(-1)), np.int64, len(ids))
        number = int(found[0]) >> _SLOT_BITS
        if number >= 0 and (found >> _SLOT_BITS == number).all():  # all in one lease, as they were handed out
            lease, which = self.leases[number], found & _SLOT_MASK
            seen = np.zeros(len(lease.messages), np.bool_)
            seen[which] = True
            if np.count_nonzero(seen) == len(which):
                return [(lease, which)], []
        unknown = self._unknown(ids)
        found = np.unique(found[found >= 0])
        numbers = found >> _SLOT_BITS
        return [(self.leases[n], found[numbers == n] & _SLOT_MASK) for n in np.unique(numbers).tolist()], unknown

    def _seek_few(self, ids: Sequence[str]) -> list[tuple[Lease, I64]]:
        """The same without arrays, where each id is held, and named once; nothing where it is not so."""
        found = list(map(self.ids.get, ids, repeat(-1)))
        if min(found) < 0 or len(set(found)) < len(found):
            return []
        numbers = {number >> _SLOT_BITS for number in found}
        if len(numbers) == 1:
            return [(self.leases[numbers.pop()], np.array([number & _SLOT_MASK for number in found]))]
        by_lease: dict[int, list[int]] = {}
        for number in sorted(found):
            by_lease.setdefault(number >> _SLOT_BITS, []).append(number & _SLOT_MASK)
        return [(self.leases[number], np.array(slots)) for number, slots in by_lease.items()]

    def slot(self, number: int) -> tuple[Lease, int]:
        """The lease and the place in it that an entry of `ids` stands for."""
        return self.leases[number >> _SLOT_BITS], number & _SLOT_MASK

    def _unknown(self, ids: Sequence[str]) -> list[str]:
        seen: set[str] = set()
        unknown = []
        for id_ in ids:
            if id_ in seen or id_ not in self.ids:
                unknown.append(id_)
            seen.add(id_)
        return unknown

    def close(self, taken: Sequence[tuple[Lease, I64]]) -> None:
        """These are no longer in a consumer's hands."""
        for lease, which in taken:
            if len(which):
                self._drop_ids(lease, which)
            lease.open[which] = False
            lease.left -= len(which)
            self.in_flight -= len(which)
            if not lease.left:
                self.leases.pop(lease.number, None)

    def _drop_ids(self, lease: Lease, which: I64) -> None:
        """Forget who holds these ids, unless somebody else has taken one over."""
        held = lease.messages.ids
        if len(which) == len(held) and self._whole.get(held[0]) == lease.number:
            del self._whole[held[0]]
            return
        ids = self.ids
        slot = lease.number << _SLOT_BITS
        if not self._shared:
            if len(which) == len(held) == len(ids):  # nothing else is in anybody's hands, or it is not entered
                self._ids = {}
                return
            mine = held if len(which) == len(held) else [held[i] for i in which.tolist()]
            deque(map(ids.__delitem__, mine), maxlen=0)
            return
        for i in which.tolist():
            if ids.get(held[i]) == slot + i:
                del ids[held[i]]

    def extend(self, taken: Sequence[tuple[Lease, I64]], until_ms: int) -> None:
        """Longer leases for these: they move to a lease of their own."""
        held = MessageColumns.join([lease.messages.pick(which) for lease, which in taken])
        self.close(taken)
        self.lease(held, taken[0][0].reserved_ms, until_ms, taken[0][0].consumer)

    def expired(self, now_ms: int) -> list[Lease]:
        """Leases that have run out, oldest first. They stay until they are closed."""
        due = self.next_deadline()
        if due is None or due > now_ms:
            return []
        out = [lease for lease in self.leases.values() if lease.left and lease.until_ms <= now_ms]
        return sorted(out, key=lambda lease: (lease.until_ms, lease.number))

    def next_deadline(self) -> int | None:
        """When the next lease may run out."""
        while self._deadlines and not self._is_open(self._deadlines[0][1]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_open(self, number: int) -> bool:
        lease = self.leases.get(number)
        return lease is not None and lease.left > 0

    # Retries

    def wait(self, offset: int, waiting: Waiting) -> None:
        """A message is to come again."""
        self.waiting[offset] = waiting
        heappush(self._retries, (waiting.when_ms, offset))

    def has_due_retries(self, now_ms: int) -> bool:
        """Is a back-off over? Perhaps of a message that waits no more."""
        return bool(self._retries) and self._retries[0][0] <= now_ms

    def due_retries(self, now_ms: int, count: int) -> list[tuple[int, Waiting]]:
        """Messages whose back-off is over, oldest first. They wait on until `wait_no_more`."""
        found: dict[int, Waiting] = {}
        while self._retries and self._retries[0][0] <= now_ms and len(found) < count:
            when, offset = heappop(self._retries)
            waiting = self.waiting.get(offset)
            if waiting is not None and waiting.when_ms == when:
                found[offset] = waiting
        return sorted(found.items())

    def put_back(self, retries: Sequence[tuple[int, Waiting]]) -> None:
        """What `due_retries` gave was not delivered after all."""
        for offset, waiting in retries:
            heappush(self._retries, (waiting.when_ms, offset))

    def wait_no_more(self, retries: Sequence[tuple[int, Waiting]]) -> None:
        """These were delivered."""
        for offset, _ in retries:
            del self.waiting[offset]

    def next_retry(self, now_ms: int) -> int | None:
        """When the next back-off is over, if the first one is not over yet."""
        while self._retries and not self._still_waits(*self._retries[0]):
            heappop(self._retries)
        return self._retries[0][0] if self._retries and self._retries[0][0] > now_ms else None

    def _still_waits(self, when_ms: int, offset: int) -> bool:
        waiting = self.waiting.get(offset)
        return waiting is not None and waiting.when_ms == when_ms
