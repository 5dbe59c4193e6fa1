"""Picking the next messages for a group from the ready log: due retries first, then new messages, by priority if there are any.

Skipped on the way: documents that the group does not see (`visibility`), expired and damaged ones. Nothing here changes the
group, except that due retries are taken from it: a pick counts once the Broker has journaled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.group import LEVELS, Group, MessageColumns, Retry
from turtlemq.broker.policy import shares
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.visibility import RESTRICTED, Visibility, restricted_for_others, visible
from turtlemq.model import I64, Mask, Priority
from turtlemq.segment import fields, log
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather

FETCH_BYTES_MAX = 16 << 20  # reading and verifying them takes the event loop 20 ms
EXPIRED_MAX = 500  # expired messages that one fetch makes dead letters: each costs 30 µs
_LEVELS = tuple(int(level) for level in LEVELS)
_NORMAL = int(Priority.NORMAL)
_NOT_PLAIN = RESTRICTED | f.EXPIRES  # flags of documents that must be looked into
_SCAN = 4096  # offsets read in one step when priorities are in use, or documents are skipped
SKIPPED_MAX = 16_384  # documents that one fetch skips, nearly: of other groups or priorities, cancelled or damaged. 1 µs each


@dataclass(slots=True)
class Piece:
    """Documents of one read that are to be delivered: `which` of them, and their columns."""

    read: log.Documents
    which: I64
    messages: MessageColumns


@dataclass(slots=True)
class Picked:
    """The messages of one fetch, and the state of the group once they count."""

    cursors: dict[int, int]
    credits: dict[int, float]
    retries: list[tuple[int, Retry]]  # taken from the group
    pieces: list[Piece] = field(default_factory=list)
    expired: list[MessageColumns] = field(default_factory=list)  # not delivered in time; `attempts` are the deliveries so far
    passed: int = 0  # unfetched messages of the group that its cursors pass
    bytes: int = 0
    skipped: int = 0  # documents on the way that are not for this fetch
    is_cut: bool = False  # the last read left out documents for their bytes
    low: int | None = None  # how many of low priority it may still take; None: any number

    def __len__(self) -> int:
        return sum(len(piece.which) for piece in self.pieces)

    @property
    def is_empty(self) -> bool:
        """No message was found, and none was skipped that the group counts."""
        return not (self.pieces or self.expired or self.retries or self.passed)

    @property
    def is_full(self) -> bool:
        """Enough for one fetch, even if the consumer asked for more."""
        return self.bytes >= FETCH_BYTES_MAX or (self.is_cut and self.bytes > 0) or self.room_for_expired <= 0

    @property
    def room_for_expired(self) -> int:
        """How many expired messages it may still take."""
        return EXPIRED_MAX - sum(map(len, self.expired))

    @property
    def is_cut_short(self) -> bool:
        """Whether the next fetch may find messages that this one did not come to."""
        return self.is_full or self.skipped >= SKIPPED_MAX


def pick(visibility: Visibility, group: Group, count: int, now_ms: int, low: int | None = None) -> Picked:
    """The next messages of a group, at most `count`, and at most `low` of low priority (None: any number)."""
    ready, cancelled = visibility.ready, visibility.cancelled
    if not visibility.has_priorities and (small := _pick_small(ready, group, cancelled, count, now_ms)) is not None:
        return small
    picked = Picked(dict(group.cursors), dict(group.credits), group.take_due_retries(now_ms, count), low=low)
    try:
        if picked.retries:
            _pick_retries(ready, group, picked, now_ms)
        _pick_new(visibility, group, count, picked, now_ms)
    except BaseException:
        group.return_retries(picked.retries)  # a read failed: they stay due
        raise
    return picked


def _pick_small(ready: ReadyLog, group: Group, cancelled: Set[int], count: int, now_ms: int) -> Picked | None:
    """Fast path of `pick` for a few plain messages: 25 µs, while arrays take 150 µs whatever their size. Returns None if there
    may be more, or retries, or a document that must be looked into."""
    cursor = max(group.cursors[_NORMAL], ready.first_offset)
    end = min(cursor + count, ready.next_offset)
    if end - cursor >= small_batches.DOCUMENTS or group.has_due_retries(now_ms):
        return None
    picked = Picked(dict.fromkeys(_LEVELS, end), dict(group.credits), [])
    if end == cursor:
        return picked
    offsets = list(range(cursor, end))
    documents = ready.read_small(cursor, end)
    if documents is None or (cancelled and not cancelled.isdisjoint(offsets)):
        return None
    buffer = b"".join([raw for raw, _ in documents])
    sizes = [len(raw) for raw, _ in documents]
    starts = np.array([0, *accumulate(sizes[:-1])])
    heads = f.prefixes(buffer, starts)
    _, _, due_ms, seqs, _, flags, id_bytes = zip(*heads.tolist(), strict=True)
    if any(flag & _NOT_PLAIN for flag in flags):
        return None
    ids = [str(raw[f.PREFIX_BYTES : f.PREFIX_BYTES + n - 1], "utf-8") for (raw, _), n in zip(documents, id_bytes, strict=True)]
    times = [ready_ms for _, ready_ms in documents]
    attempts = [1] * len(documents)
    at, seq, due, since, attempt = np.array([offsets, seqs, due_ms, times, attempts])  # one array costs less than five
    read = log.Documents(buffer, starts, heads, np.ones(len(documents), np.bool_))
    picked.pieces.append(Piece(read, np.arange(len(documents)), MessageColumns(at, seq, due, since, attempt, ids)))
    picked.passed, picked.bytes = len(documents), len(buffer)
    return picked


def _pick_retries(ready: ReadyLog, group: Group, picked: Picked, now_ms: int) -> None:
    """Read the retries that were taken from the group. Those that do not fit in one fetch go back."""
    offsets = np.array([offset for offset, _ in picked.retries])
    attempts = np.array([retry.attempt for _, retry in picked.retries])
    read, times = ready.read(offsets, FETCH_BYTES_MAX)
    offsets = offsets[: len(read.starts)]
    chosen = read.good & ~restricted_for_others(group.name, group, read)  # a damaged log may have another document there by now
    late = _expired(read, chosen, attempts, now_ms)
    stop = _end_of(late, picked.room_for_expired)
    chosen[stop:] = False
    group.return_retries(picked.retries[stop:])
    del picked.retries[stop:]
    if picked.low is not None:
        _leave_low(group, read, chosen & ~late, picked, chosen)
    _take(group, read, offsets, times, chosen, late, picked, attempts)


def _leave_low(group: Group, read: log.Documents, wanted: Mask, picked: Picked, chosen: Mask) -> None:
    """Return the retries of low priority that are too many, and choose them no longer. Requires that `picked.low` is a number."""
    assert picked.low is not None
    rows = np.flatnonzero(wanted & ((read.heads["flags"] & f.PRIORITY) == int(Priority.LOW)))
    left = set(rows[picked.low :].tolist())
    picked.low -= len(rows) - len(left)
    chosen[list(left)] = False
    group.return_retries([retry for i, retry in enumerate(picked.retries) if i in left])
    picked.retries[:] = [retry for i, retry in enumerate(picked.retries) if i not in left]


def _pick_new(visibility: Visibility, group: Group, count: int, picked: Picked, now_ms: int) -> None:
    """Fill up with messages at and behind the cursors. Each priority gets its share; the rest goes to the others."""
    missing = count - len(picked)
    if missing <= 0:
        return
    if not visibility.has_priorities:
        picked.cursors = dict.fromkeys(_LEVELS, _pick_from_cursor(visibility, group, None, missing, picked, now_ms))
        return
    quotas = shares(missing, picked.credits)
    for quota in (quotas, dict.fromkeys(quotas, count)):
        for level in LEVELS:
            room = min(quota[int(level)], count - len(picked))
            if level is Priority.LOW and picked.low is not None:
                room = min(room, picked.low)
            if room > 0:
                before = len(picked)
                picked.cursors[int(level)] = _pick_from_cursor(visibility, group, level, room, picked, now_ms)
                if level is Priority.LOW and picked.low is not None:
                    picked.low -= len(picked) - before


def _pick_from_cursor(
    visibility: Visibility, group: Group, level: Priority | None, count: int, picked: Picked, now_ms: int
) -> int:
    """Up to `count` messages from the cursor of one priority on; None: of any. Returns where the cursor stands then."""
    ready, cancelled = visibility.ready, visibility.cancelled
    cursor = max(picked.cursors[_NORMAL if level is None else int(level)], ready.first_offset)
    taken = steps = 0
    while cursor < ready.next_offset and taken < count and not picked.is_full:
        if steps and picked.skipped >= SKIPPED_MAX:
            break  # the cursor stands behind them: the next fetch goes on there
        step = _SCAN if level is not None or steps else count
        offsets = np.arange(cursor, min(cursor + step, ready.next_offset))
        read, times = ready.read(offsets, FETCH_BYTES_MAX - picked.bytes)
        picked.is_cut = len(read.starts) < len(offsets)
        offsets = offsets[: len(read.starts)]
        all_fit = level is None and not cancelled and len(offsets) <= count - taken
        if all_fit and not int(np.bitwise_or.reduce(read.heads["flags"])) & _NOT_PLAIN and read.good.all():
            _take_all(group, read, offsets, times, picked)  # the usual case
            taken, cursor, steps = taken + len(offsets), cursor + len(offsets), steps + 1
            continue
        seen = visible(ready, group.name, group, read, offsets, cancelled)
        if level is not None:
            seen &= (read.heads["flags"] & f.PRIORITY) == int(level)
        late = _expired(read, seen & read.good, None, now_ms)
        stop = min(_end_of(seen & ~late, count - taken), _end_of(late, picked.room_for_expired))
        seen[stop:] = False
        picked.passed += int(seen.sum())
        taken += _take(group, read, offsets, times, seen & read.good, late, picked, None)
        picked.skipped += stop - int(seen[:stop].sum())
        cursor += stop
        steps += 1
    return cursor


def _take_all(group: Group, read: log.Documents, offsets: I64, times: I64, picked: Picked) -> None:
    """Deliver every document of a read. Required: all are plain, undamaged messages."""
    which = np.arange(len(offsets))
    picked.pieces.append(Piece(read, which, columns(group.name, read, offsets, times, which, None)))
    picked.bytes += int(read.heads["len"].sum())
    picked.passed += len(offsets)


def _ids(read: log.Documents, starts: I64, lengths: I64) -> list[str]:
    """Ids as texts. On disk each ends with a NUL, and has none in it: 50 ns each if few lengths differ, else 300 ns."""
    return gather(read.buffer, starts, lengths)[:-1].decode().split("\0") if len(starts) else []


def columns(name: str, read: log.Documents, offsets: I64, times: I64, which: I64, attempts: I64 | None) -> MessageColumns:
    """The documents `which` of a read as messages of group `name`. `attempts`: the number of each delivery, if the caller knows
    it."""
    heads, starts = read.heads, read.starts
    if len(which) < len(starts):
        heads, starts, offsets, times = heads[which], starts[which], offsets[which], times[which]
    ids = _ids(read, starts + f.PREFIX_BYTES, heads["idlen"])
    counted = np.ones(len(which), np.int64) if attempts is None else attempts
    due_ms = heads["due"].astype(np.int64)
    if len(slept := np.flatnonzero(heads["flags"] & f.META)):
        noted, due_ms[slept] = _notes(read, which[slept])
        if attempts is None:
            counted[slept] = noted
        for k in slept.tolist():
            ids[k] = ids[k][len(name) + 1 :]  # on disk they are group/id
    return MessageColumns(offsets, heads["seq"].astype(np.int64), due_ms, times, counted, ids)


def _end_of(wanted: Mask, count: int) -> int:
    """The end of the shortest beginning that has `count` rows of a mask, and those behind them that are not wanted; its length
    if there are not so many."""
    rows = np.flatnonzero(wanted)
    return int(rows[count]) if len(rows) > count else len(wanted)


def _notes(read: log.Documents, which: I64) -> tuple[I64, I64]:
    """Attempts and due times of retries that slept."""
    if len(which) < small_batches.DOCUMENTS:
        notes = [read.decode(i).meta for i in which.tolist()]
        return np.array([int(meta["attempt"]) for meta in notes]), np.array([int(meta["due"]) for meta in notes])
    view = memoryview(read.buffer)
    return fields.retry_notes(view, fields.locate(view, read.starts[which], read.heads[which]).meta)


def _expired(read: log.Documents, chosen: Mask, attempts: I64 | None, now_ms: int) -> Mask:
    """Which of the documents `chosen` were not delivered in time. `attempts`: the number of each one's next delivery; None: they
    come from a cursor. Only documents whose time is over are decoded, and of these only retries that slept."""
    late = np.zeros(len(chosen), np.bool_)
    rows = np.flatnonzero(chosen & ((read.heads["flags"] & f.EXPIRES) != 0))
    if not len(rows):
        return late
    found = fields.locate(memoryview(read.buffer), read.starts[rows], read.heads[rows])
    expires_ms = found.optional["expires"]
    over = np.flatnonzero((expires_ms != fields.ABSENT) & (expires_ms <= now_ms))
    for i, meta in zip(rows[over].tolist(), found.meta[over].tolist(), strict=True):
        first = first_attempt({} if meta == fields.ABSENT else fields.subdocument(memoryview(read.buffer), meta))
        late[i] = first is not None and (attempts is None or attempts[i] == first)
    return late


def first_attempt(meta: Mapping[str, Any]) -> int | None:
    """The number of the delivery that must be in time, from the `meta` of a document. None: there was one already, as of a
    sleeping retry; a dead letter that was requeued with a new expiry has another first one."""
    if not meta:
        return 1
    return int(meta["attempt"]) if meta.get("renewed") else None


def _take(
    group: Group, read: log.Documents, offsets: I64, times: I64, chosen: Mask, late: Mask, picked: Picked, attempts: I64 | None
) -> int:
    """Deliver the documents `chosen` of a read, except those that are `late`. Returns how many are delivered."""
    for expired, which in ((True, np.flatnonzero(chosen & late)), (False, np.flatnonzero(chosen & ~late))):
        if not len(which):
            continue
        messages = columns(group.name, read, offsets, times, which, None if attempts is None else attempts[which])
        if expired:
            messages.attempts -= 1
            picked.expired.append(messages)
        else:
            picked.pieces.append(Piece(read, which, messages))
            picked.bytes += int(read.heads["len"][which].sum())
    return int((chosen & ~late).sum())
