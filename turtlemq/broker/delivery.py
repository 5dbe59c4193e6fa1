"""Picking the next messages for a group from the ready log: due retries and new messages, by priority if there are any.

Skipped on the way: documents that the group does not see (`visibility`), expired and damaged ones. Nothing here changes the
group, except that due retries are taken from it: a pick counts once the Broker has journaled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.message_columns import columns
from turtlemq.broker.priorities import (
    HIGH,
    LEVELS,
    LOW,
    NORMAL,
    Carry,
    Levels,
    Preemption,
    allot,
    preempt,
    preempted,
    shares,
    weights_of,
)
from turtlemq.broker.ready_columns import find_level, levels_at, ready_time, sizes_at
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.ready_tail import levels_of
from turtlemq.broker.retry_queue import Retries
from turtlemq.broker.visibility import RESTRICTED, Visibility, restricted_for_others, visible
from turtlemq.model import I64, Mask
from turtlemq.segment import fields, log
from turtlemq.segment import format as f
from turtlemq.settings import Settings

FETCH_BYTES_MAX = 16 << 20  # reading and verifying them takes the event loop 20 ms
EXPIRED_MAX = 500  # expired messages that one fetch makes dead letters: each costs 30 µs
_RANKS = np.array([1, 0, 2])  # of priorities, in order of delivery
_NOT_PLAIN = RESTRICTED | f.EXPIRES  # flags of documents that must be looked into
_SCAN = 4096  # offsets read in one step when documents are skipped
SKIPPED_MAX = 16_384  # documents that one fetch skips, nearly: of other groups, cancelled or damaged. 1 µs each
SEARCHED_MAX = 4 << 20  # documents among which one fetch searches for a priority: 2 ms


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
    carry: Carry
    retries: Retries = field(default_factory=list)  # taken from the group
    pieces: list[Piece] = field(default_factory=list)
    expired: list[MessageColumns] = field(default_factory=list)  # not delivered in time; `attempts` are the deliveries so far
    passed: int = 0  # unfetched messages of the group that its cursors pass
    bytes: int = 0
    skipped: int = 0  # documents on the way that are not for this fetch
    is_cut: bool = False  # the last read left out documents for their bytes
    is_search_cut: bool = False  # the search for a priority ended before the log did
    low: int | None = None  # how many of low priority it may still take; None: any number
    delivered: Levels = field(default_factory=dict)  # with priorities: how many of each are in `pieces`
    preemption: Preemption = field(default_factory=Preemption)

    def __len__(self) -> int:
        return sum(len(piece.which) for piece in self.pieces)

    def count(self, levels: I64) -> None:
        """Messages with these priorities are delivered."""
        for level, n in enumerate(np.bincount(levels).tolist()):
            self.delivered[level] = self.delivered.get(level, 0) + n

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
        return self.is_full or self.is_search_cut or self.skipped >= SKIPPED_MAX


def pick(visibility: Visibility, group: Group, count: int, now_ms: int, settings: Settings, low: int | None = None) -> Picked:
    """The next messages of a group, at most `count`, and at most `low` of low priority (None: any number)."""
    picked = _pick_small(visibility, group, count, now_ms, low)
    if picked is None:
        picked = _pick_any(visibility, group, count, now_ms, settings, low)
    if settings.priority_high_p95_ms and visibility.has_priorities:
        _note_waits(group, picked, now_ms)
    return picked


def _note_waits(group: Group, picked: Picked, now_ms: int) -> None:
    """Note how long messages of high priority have waited for their first delivery."""
    for piece in picked.pieces:
        messages = piece.messages
        rows = ((piece.read.heads["flags"][piece.which] & f.PRIORITY) == HIGH) & (messages.attempts == 1)
        if rows.any():
            group.high_waits.note((now_ms - messages.ready_ms[rows]).tolist(), now_ms)


def _pick_any(visibility: Visibility, group: Group, count: int, now_ms: int, settings: Settings, low: int | None) -> Picked:
    """`pick` for any messages."""
    picked = Picked(dict(group.cursors), group.carry.copy(), low=low, preemption=group.preemption)
    levels = partial(levels_at, visibility.ready) if visibility.has_priorities else None
    try:
        group.retries.sort_due(now_ms, levels)
        if visibility.has_priorities:
            _pick_levels(visibility, group, count, picked, now_ms, settings)
        else:
            _pick_plain(visibility, group, count, picked, now_ms)
    except BaseException:
        group.retries.put_back(picked.retries)  # a read failed: they stay due
        raise
    return picked


def _pick_small(visibility: Visibility, group: Group, count: int, now_ms: int, low: int | None) -> Picked | None:
    """Fast path of `pick` for a few plain messages: 25 µs, while arrays take 150 µs whatever their size. Returns None if there
    may be more, or retries, or a document that must be looked into. With priorities it takes all that there is, high first."""
    ready, cancelled = visibility.ready, visibility.cancelled
    cursor = max(group.cursors[NORMAL], ready.first_offset)
    end = min(cursor + count, ready.next_offset)
    if end - cursor >= small_batches.DOCUMENTS or group.retries.has_due(now_ms):
        return None
    if visibility.has_priorities and (end < ready.next_offset or len({*group.cursors.values()}) > 1):
        return None
    picked = Picked(dict.fromkeys(LEVELS, end), group.carry, preemption=group.preemption)
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
    if visibility.has_priorities:
        levels = levels_of(heads)
        if low is not None and int((levels == LOW).sum()) > low:
            return None
        order = np.argsort(_RANKS[levels], kind="stable")
        starts, heads = starts[order], heads[order]
        offsets, documents = [offsets[i] for i in order.tolist()], [documents[i] for i in order.tolist()]
    _, _, due_ms, seqs, _, flags, id_bytes = zip(*heads.tolist(), strict=True)
    if any(flag & _NOT_PLAIN for flag in flags):
        return None
    ids = [str(raw[f.PREFIX_BYTES : f.PREFIX_BYTES + n - 1], "utf-8") for (raw, _), n in zip(documents, id_bytes, strict=True)]
    times = [ready_ms for _, ready_ms in documents]
    at, seq, due, since, attempt = np.array([offsets, seqs, due_ms, times, [1] * len(documents)])  # cheaper than five
    read = log.Documents(buffer, starts, heads, np.ones(len(documents), np.bool_))
    picked.pieces.append(Piece(read, np.arange(len(documents)), MessageColumns(at, seq, due, since, attempt, ids)))
    picked.passed, picked.bytes = len(documents), len(buffer)
    return picked


def _pick_plain(visibility: Visibility, group: Group, count: int, picked: Picked, now_ms: int) -> None:
    """Fill up with due retries and with messages from the cursor on. Required: all have normal priority."""
    ready, retries = visibility.ready, group.retries
    while (room := count - len(picked)) > 0 and not picked.is_cut_short:
        fresh = min(room, ready.next_offset - max(picked.cursors[NORMAL], ready.first_offset))
        if due := retries.due(NORMAL):
            due, fresh = allot(room, {NORMAL: room}, {NORMAL: fresh}, {NORMAL: due}, picked.carry.retries)[NORMAL]
        if not (due or fresh):
            return
        _pick_retries(visibility, group, {NORMAL: due}, picked, now_ms, FETCH_BYTES_MAX // 2 if fresh else FETCH_BYTES_MAX)
        if fresh and not picked.is_full:
            picked.cursors = dict.fromkeys(LEVELS, _pick_from_cursor(visibility, group, None, fresh, picked, now_ms))


def _pick_retries(
    visibility: Visibility, group: Group, due: Mapping[int, int], picked: Picked, now_ms: int, bytes_max: int
) -> None:
    """Take and read due retries, so many of each priority. Those that do not fit in one fetch go back."""
    if not any(due.values()):
        return
    taken = sorted(entry for level in LEVELS for entry in group.retries.take(level, due.get(level, 0)))
    picked.retries += taken
    if not taken:
        return
    offsets = np.array([offset for offset, _ in taken])
    attempts = np.array([retry.attempt for _, retry in taken])
    read, times = visibility.ready.read(offsets, bytes_max)
    offsets = offsets[: len(read.starts)]
    chosen = read.good & ~restricted_for_others(group.name, group, read)  # a damaged log may have another document there by now
    late = _expired(read, chosen, attempts, now_ms)
    stop = _end_of(late, picked.room_for_expired)
    chosen[stop:] = False
    group.retries.put_back(taken[stop:])
    del picked.retries[len(picked.retries) - len(taken) + stop :]
    if visibility.has_priorities:
        picked.count(levels_at(visibility.ready, offsets[chosen & ~late]))
    _take(group, read, offsets, times, chosen, late, picked, attempts)


def _pick_from_cursor(visibility: Visibility, group: Group, level: int | None, count: int, picked: Picked, now_ms: int) -> int:
    """Up to `count` messages from the cursor of one priority on; None: of any. Returns where the cursor stands then."""
    ready, cancelled = visibility.ready, visibility.cancelled
    cursor = max(picked.cursors[NORMAL if level is None else level], ready.first_offset)
    taken = steps = 0
    while cursor < ready.next_offset and taken < count and not picked.is_full:
        if steps and picked.skipped >= SKIPPED_MAX:
            break  # the cursor stands behind them: the next fetch goes on there
        step = _SCAN if steps else count
        if level is None:
            offsets = np.arange(cursor, min(cursor + step, ready.next_offset))
        elif not len(offsets := find_level(ready, level, cursor, min(cursor + SEARCHED_MAX, ready.next_offset), step)):
            break
        read, times = ready.read(offsets, FETCH_BYTES_MAX - picked.bytes)
        picked.is_cut = len(read.starts) < len(offsets)
        offsets = offsets[: len(read.starts)]
        if len(offsets) <= count - taken and _are_plain(read, cancelled):
            _take_all(group, read, offsets, times, picked)  # the usual case
            taken, cursor, steps = taken + len(offsets), int(offsets[-1]) + 1, steps + 1
            continue
        seen = visible(ready, group.name, group, read, offsets, cancelled)
        late = _expired(read, seen & read.good, None, now_ms)
        stop = min(_end_of(seen & ~late, count - taken), _end_of(late, picked.room_for_expired))
        seen[stop:] = False
        picked.passed += int(seen.sum())
        taken += _take(group, read, offsets, times, seen & read.good, late, picked, None)
        picked.skipped += stop - int(seen[:stop].sum())
        cursor = int(offsets[stop - 1]) + 1 if stop else cursor
        steps += 1
    return cursor


def _are_plain(read: log.Documents, cancelled: Set[int]) -> bool:
    """Whether all documents of a read are undamaged messages for every group, and none can be late."""
    return not cancelled and not int(np.bitwise_or.reduce(read.heads["flags"])) & _NOT_PLAIN and bool(read.good.all())


def _pick_levels(visibility: Visibility, group: Group, count: int, picked: Picked, now_ms: int, settings: Settings) -> None:
    """Fill up with due retries and new messages: each priority gets its quota, and leftovers of one go to the others. One round
    is enough unless documents had to be skipped."""
    quotas: Levels | None = None
    while (room := count - len(picked)) > 0 and not picked.is_cut_short:
        fresh = {level: _search(visibility.ready, level, room + 1, picked) for level in LEVELS}
        due = {level: group.retries.due(level) for level in LEVELS}
        first = quotas is None
        if quotas is None:
            quotas = _quotas(visibility.ready, group, room, fresh[HIGH], picked, now_ms, settings)
        waiting = {level: min(room, len(offsets)) for level, offsets in fresh.items()}
        if picked.low is not None:
            due[LOW] = min(due[LOW], picked.low)
            waiting[LOW] = min(waiting[LOW], picked.low - due[LOW])
        chosen = allot(room, quotas, waiting, due, picked.carry.retries)
        if not any(map(sum, chosen.values())):
            return
        before = dict(picked.delivered)
        half = FETCH_BYTES_MAX // 2 if any(new for _, new in chosen.values()) else FETCH_BYTES_MAX
        _pick_retries(visibility, group, {level: old for level, (old, _) in chosen.items()}, picked, now_ms, half)
        if not picked.is_full:
            pick_fresh = _pick_together if first else _pick_one_by_one
            pick_fresh(visibility, group, {level: fresh[level][:new] for level, (_, new) in chosen.items()}, picked, now_ms)
        got = {level: picked.delivered.get(level, 0) - before.get(level, 0) for level in LEVELS}
        quotas = {level: max(0, quota - got[level]) for level, quota in quotas.items()}
        if picked.low is not None:
            picked.low -= got[LOW]


def _search(ready: ReadyLog, level: int, count: int, picked: Picked) -> I64:
    """The next `count` offsets of a priority behind its cursor. The cursor moves past documents of other priorities."""
    cursor = max(picked.cursors[level], ready.first_offset)
    end = min(cursor + SEARCHED_MAX, ready.next_offset)
    if cursor >= end:
        return np.empty(0, np.int64)
    offsets = find_level(ready, level, cursor, end, count)
    picked.is_search_cut |= len(offsets) < count and end < ready.next_offset
    picked.cursors[level] = int(offsets[0]) if len(offsets) else end
    return offsets


def _quotas(ready: ReadyLog, group: Group, room: int, highs: I64, picked: Picked, now_ms: int, settings: Settings) -> Levels:
    """The quotas of a fetch, by the settings of the topic and the state of the group. `highs`: where the next messages of high
    priority are."""
    if settings.priority_high_p95_ms:
        group.weight = group.high_waits.look(group.weight, settings.priority_high_p95_ms, now_ms)
    quotas = shares(room, picked.carry.shares, weights_of(settings, group.weight))
    if not settings.preempt_after_ms:
        picked.preemption = Preemption()
        return quotas
    waiting = len(highs) + group.retries.due(HIGH)
    since = [ready_time(ready, int(highs[0]))] if len(highs) else []
    oldest = group.retries.oldest_due(HIGH)
    since += [] if oldest is None else [oldest]
    wait_ms = now_ms - min(since, default=now_ms)
    picked.preemption = preempt(picked.preemption, waiting, wait_ms, room, settings.preempt_after_ms, now_ms)
    if picked.preemption.active:
        return preempted(room, quotas, waiting, settings.preempt_floor, picked.carry.floors)
    return quotas


def _pick_one_by_one(visibility: Visibility, group: Group, chosen: Mapping[int, I64], picked: Picked, now_ms: int) -> None:
    """So many new messages as are chosen of each priority, past all documents that must be skipped."""
    for level in LEVELS:
        if len(chosen[level]):
            before = len(picked)
            picked.cursors[level] = _pick_from_cursor(visibility, group, level, len(chosen[level]), picked, now_ms)
            picked.delivered[level] = picked.delivered.get(level, 0) + len(picked) - before


def _pick_together(visibility: Visibility, group: Group, chosen: Mapping[int, I64], picked: Picked, now_ms: int) -> None:
    """The new messages at these offsets, by priority, with one read. The cursors stand behind them then."""
    ready, cancelled = visibility.ready, visibility.cancelled
    offsets, levels = _joined(chosen)
    if not len(offsets):
        return
    room = max(FETCH_BYTES_MAX - picked.bytes, 1)
    read, times = ready.read(offsets, room)
    if (fits := len(read.starts)) < len(offsets):
        picked.is_cut = True
        if (levels == levels[0]).all():
            offsets, levels = offsets[:fits], levels[:fits]
        else:
            offsets, levels = _fitting(ready, chosen, room, picked.carry.shares)
            read, times = ready.read(offsets)
    seen = late = np.zeros(len(offsets), np.bool_)
    stop, plain = len(offsets), _are_plain(read, cancelled)
    if not plain:
        seen = visible(ready, group.name, group, read, offsets, cancelled)
        late = _expired(read, seen & read.good, None, now_ms)
        stop = _end_of(late, picked.room_for_expired)
        seen[stop:] = False
        picked.passed += int(seen.sum())
        picked.skipped += stop - int(seen.sum())
    for level in LEVELS:
        if len(own := offsets[:stop][levels[:stop] == level]):
            picked.cursors[level] = int(own[-1]) + 1
    if levels[0] != levels[-1] or (levels != levels[0]).any():
        rows = np.argsort(_RANKS[levels], kind="stable")  # high first
        read = log.Documents(read.buffer, read.starts[rows], read.heads[rows], read.good[rows])
        offsets, times, levels, seen, late = offsets[rows], times[rows], levels[rows], seen[rows], late[rows]
    if plain:
        picked.count(levels)
        _take_all(group, read, offsets, times, picked)
        return
    picked.count(levels[seen & read.good & ~late])
    _take(group, read, offsets, times, seen & read.good, late, picked, None)


def _joined(chosen: Mapping[int, I64]) -> tuple[I64, I64]:
    """The offsets of all priorities, rising, and the priority of each."""
    offsets = np.concatenate([chosen[level] for level in LEVELS])
    levels = np.repeat(LEVELS, [len(chosen[level]) for level in LEVELS])
    order = np.argsort(offsets, kind="stable")
    return offsets[order], levels[order]


def _fitting(ready: ReadyLog, chosen: Mapping[int, I64], room: int, owed: dict[int, float]) -> tuple[I64, I64]:
    """As many of the chosen offsets as have room with their bytes, rising, and their priorities. Of each priority the same part
    fits, and at least one message: so large messages of one priority leave room for the others."""
    while True:
        offsets, levels = _joined(chosen)
        if len(offsets) <= 1 or (total := int(sizes_at(ready, offsets).sum())) <= room:
            return offsets, levels
        most = max(map(len, chosen.values()))
        if most > 1:
            chosen = {level: own[: max(1, min(len(own) * room // total, most - 1))] for level, own in chosen.items()}
            continue
        # one large message of each: the priority that is owed most
        first = max((level for level in LEVELS if len(chosen[level])), key=lambda level: owed.get(level, 0.0))
        owed[first] = owed.get(first, 0.0) - 1
        chosen = {level: own if level == first else own[:0] for level, own in chosen.items()}


def _take_all(group: Group, read: log.Documents, offsets: I64, times: I64, picked: Picked) -> None:
    """Deliver every document of a read. Required: all are plain, undamaged messages."""
    which = np.arange(len(offsets))
    picked.pieces.append(Piece(read, which, columns(group.name, read, offsets, times, which, None)))
    picked.bytes += int(read.heads["len"].sum())
    picked.passed += len(offsets)


def _end_of(wanted: Mask, count: int) -> int:
    """The end of the shortest beginning that has `count` rows of a mask, and those behind them that are not wanted; its length
    if there are not so many."""
    rows = np.flatnonzero(wanted)
    return int(rows[count]) if len(rows) > count else len(wanted)


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
