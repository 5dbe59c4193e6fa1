"""Picking messages for a group: which documents of the ready log it sees, in which order, and what is passed over.

Passed over: other groups' retries, notices of cancelled sleepers, messages cancelled while ready, expired and damaged ones.
Nothing here changes the group: what was picked counts once the journal has it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.group import LEVELS, Group, MessageColumns, Waiting
from turtlemq.broker.policy import shares
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.model import I64, Mask, Priority
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.standing import is_void

FETCH_BYTES_MAX = 32 << 20
EXPIRED_MAX = 1_000  # messages that one fetch buries: each costs 30 µs
_LEVELS = tuple(int(level) for level in LEVELS)
_NORMAL = int(Priority.NORMAL)
_ODD = f.META | f.NOTICE | f.EXPIRES  # documents that must be looked into
_SCAN = 4096  # offsets looked at in one step when priorities are in use
_SCAN_STEPS = 16  # steps after which a level waits for the next fetch, if there is something to deliver already


class Position(Protocol):
    """What decides which documents a group sees: a `Group`, or what a checkpoint says of one."""

    @property
    def born(self) -> int: ...
    @property
    def moves(self) -> list[tuple[int, int]]: ...


@dataclass(slots=True)
class Piece:
    """Documents of one read that are to be delivered: `which` of them, and their columns."""

    read: log.Documents
    which: I64
    messages: MessageColumns


@dataclass(slots=True)
class Picked:
    """What a group gets, and where it stands then."""

    cursors: dict[int, int]
    credits: dict[int, float]
    retries: list[tuple[int, Waiting]]  # taken from those that waited
    pieces: list[Piece] = field(default_factory=list)
    expired: list[MessageColumns] = field(default_factory=list)  # not delivered in time; `attempts` are the deliveries so far
    passed: int = 0  # unfetched messages of the group that its cursors went by
    bytes: int = 0

    def __len__(self) -> int:
        return sum(len(piece.which) for piece in self.pieces)

    @property
    def nothing(self) -> bool:
        """Nothing was found, and nothing was passed over that counts."""
        return not (self.pieces or self.expired or self.retries or self.passed)

    @property
    def full(self) -> bool:
        """Enough for one fetch, whatever was asked for."""
        return self.bytes >= FETCH_BYTES_MAX or sum(map(len, self.expired)) >= EXPIRED_MAX


def pick(ready: ReadyLog, group: Group, cancelled: Set[int], levels: bool, count: int, now_ms: int) -> Picked:
    """The next messages of a group: those whose back-off is over, then new ones, by priority if the topic uses any."""
    if not levels and (few := _pick_few(ready, group, cancelled, count, now_ms)) is not None:
        return few
    picked = Picked(dict(group.cursors), dict(group.credits), group.due_retries(now_ms, count))
    try:
        return _fill(ready, group, cancelled, levels, count, picked, now_ms)
    except BaseException:
        group.put_back(picked.retries)  # a read failed: they wait on
        raise


def _fill(ready: ReadyLog, group: Group, cancelled: Set[int], levels: bool, count: int, picked: Picked, now_ms: int) -> Picked:
    """See `pick`."""
    if picked.retries:
        _pick_retries(ready, group, picked, now_ms)
    missing = count - len(picked)
    if missing <= 0:
        return picked
    if not levels:
        end = _pick_fresh(ready, group, cancelled, None, missing, picked, now_ms)
        picked.cursors = dict.fromkeys((int(level) for level in LEVELS), end)
        return picked
    wanted = shares(missing, picked.credits)
    for quota in (wanted, dict.fromkeys(wanted, count)):  # what one level does not use goes to the others
        for level in LEVELS:
            room = min(quota[int(level)], count - len(picked))
            if room > 0:
                picked.cursors[int(level)] = _pick_fresh(ready, group, cancelled, level, room, picked, now_ms)
    return picked


def _pick_few(ready: ReadyLog, group: Group, cancelled: Set[int], count: int, now_ms: int) -> Picked | None:
    """`pick` where little is there or asked for, and nothing of it is special: 25 µs, where arrays take 150 whatever their size.
    None: it is not so."""
    cursor = max(group.cursors[_NORMAL], ready.first_offset)
    end = min(cursor + count, ready.next_offset)
    if end - cursor >= small_batches.DOCUMENTS or group.has_due_retries(now_ms):
        return None
    picked = Picked(dict.fromkeys(_LEVELS, end), dict(group.credits), [])
    if end == cursor:
        return picked
    offsets = list(range(cursor, end))
    found = ready.few(cursor, end)
    if found is None or (cancelled and not cancelled.isdisjoint(offsets)):
        return None
    buffer = b"".join([document for document, _ in found])
    sizes = [len(document) for document, _ in found]
    starts = np.array([0, *accumulate(sizes[:-1])])
    heads = f.prefixes(buffer, starts)
    _, _, due_ms, seqs, _, flags, id_bytes = zip(*heads.tolist(), strict=True)
    if any(flag & _ODD for flag in flags):
        return None
    ids = [
        str(document[f.PREFIX_BYTES : f.PREFIX_BYTES + n - 1], "utf-8") for (document, _), n in zip(found, id_bytes, strict=True)
    ]
    times = [ready_ms for _, ready_ms in found]
    at, seq, due, since, attempts = np.array([offsets, seqs, due_ms, times, [1] * len(found)])  # one array costs less than five
    read = log.Documents(buffer, starts, heads, np.ones(len(found), np.bool_))
    picked.pieces.append(Piece(read, np.arange(len(found)), MessageColumns(at, seq, due, since, attempts, ids)))
    picked.passed, picked.bytes = len(found), len(buffer)
    return picked


def _pick_retries(ready: ReadyLog, group: Group, picked: Picked, now_ms: int) -> None:
    offsets = np.array([offset for offset, _ in picked.retries])
    attempts = np.array([waiting.attempt for _, waiting in picked.retries])
    read, times = ready.read(offsets, FETCH_BYTES_MAX)
    group.put_back(picked.retries[len(read.starts) :])
    del picked.retries[len(read.starts) :]
    offsets = offsets[: len(read.starts)]
    mine = read.good & ~_foreign(group.name, group, read)  # where the log is damaged, something else may stand there by now
    _take(group, read, offsets, times, mine, picked, attempts, now_ms)


def _pick_fresh(
    ready: ReadyLog, group: Group, cancelled: Set[int], level: Priority | None, count: int, picked: Picked, now_ms: int
) -> int:
    """Up to `count` new messages (of one level, or of all). Returns where the cursor stands then."""
    cursor = picked.cursors[int(Priority.NORMAL if level is None else level)]
    cursor = max(cursor, ready.first_offset)
    found = steps = 0
    while found < count and cursor < ready.next_offset and not picked.full:
        if level is not None and steps >= _SCAN_STEPS and len(picked):
            break
        step = _SCAN if level is not None or steps else count
        offsets = np.arange(cursor, min(cursor + step, ready.next_offset))
        read, times = ready.read(offsets, FETCH_BYTES_MAX - picked.bytes)
        offsets = offsets[: len(read.starts)]
        plain = level is None and not cancelled and len(offsets) <= count - found
        if plain and not int(np.bitwise_or.reduce(read.heads["flags"])) & _ODD and read.good.all():
            _take_all(group, read, offsets, times, picked)  # as it nearly always is
            found, cursor, steps = found + len(offsets), cursor + len(offsets), steps + 1
            continue
        mine = visible(ready, group.name, group, read, offsets, cancelled)
        if level is not None:
            mine &= (read.heads["flags"] & f.PRIORITY) == int(level)
        chosen = np.flatnonzero(mine)
        stop = int(chosen[count - found]) if len(chosen) > count - found else len(offsets)
        mine[stop:] = False
        picked.passed += int(mine.sum())
        found += _take(group, read, offsets, times, mine & read.good, picked, None, now_ms)
        cursor += stop
        steps += 1
    return cursor


def _take_all(group: Group, read: log.Documents, offsets: I64, times: I64, picked: Picked) -> None:
    """Documents without anything special go to the consumer."""
    which = np.arange(len(offsets))
    picked.pieces.append(Piece(read, which, columns(group.name, read, offsets, times, which, None)))
    picked.bytes += int(read.heads["len"].sum())
    picked.passed += len(offsets)


def visible(ready: ReadyLog, name: str, place: Position, read: log.Documents, offsets: I64, cancelled: Set[int]) -> Mask:
    """Which documents are messages for this group. A damaged one counts, and is passed when the cursor gets there, unless it is
    known to have been a notice or another group's: that was never counted."""
    mine: Mask = ~_foreign(name, place, read)
    if not read.good.all():
        mine &= read.good | ~np.isin(offsets, ready.foreign(int(offsets[0]), int(offsets[-1]) + 1, name))
    if not cancelled:
        return mine
    if len(cancelled) < len(offsets):
        mine &= ~np.isin(offsets, list(cancelled))
    else:
        mine &= np.array([offset not in cancelled for offset in offsets.tolist()], np.bool_)
    return mine


def _foreign(name: str, place: Position, read: log.Documents) -> Mask:
    """Which good documents are notices, or retries of another group, or void."""
    flags, prefix = read.heads["flags"], name.encode() + b"/"
    out: Mask = read.good & ((flags & (f.META | f.NOTICE)) != 0)
    for i in np.flatnonzero(out).tolist():
        at = int(read.starts[i]) + f.PREFIX_BYTES
        own = not flags[i] & f.NOTICE and bytes(read.buffer[at : at + len(prefix)]) == prefix
        out[i] = not own or _void(place, read, i)
    return out


def void(place: Position, retry: f.Document) -> bool:
    """Is a retry void for the group that it names? `standing.is_void` has the rule."""
    return is_void(place.born, place.moves, int(retry.meta["epoch"]), retry.order, int(retry.meta["offset"]))


def _void(place: Position, read: log.Documents, i: int) -> bool:
    """`void`, without decoding what came after the last move."""
    newest = place.moves[-1][0] if place.moves else 0
    if read.heads["seq"][i] > newest and not read.heads["flags"][i] & f.MOVED:
        return False
    return void(place, document(read, i))


def document(read: log.Documents, i: int) -> f.Document:
    """One document of a read."""
    at = int(read.starts[i])
    return f.decode(memoryview(read.buffer)[at : at + int(read.heads["len"][i])])


def _ids(read: log.Documents, starts: I64, lengths: I64) -> list[str]:
    """Ids as text. Each ends with a NUL, and holds none: 50 ns each where few lengths differ, 300 ns otherwise."""
    return f.gather(read.buffer, starts, lengths)[:-1].decode().split("\0") if len(starts) else []


def columns(name: str, read: log.Documents, offsets: I64, times: I64, which: I64, attempts: I64 | None) -> MessageColumns:
    """What is known of some documents of a read, without decoding them; only retries that slept are decoded."""
    heads, starts = read.heads, read.starts
    if len(which) < len(starts):
        heads, starts, offsets, times = heads[which], starts[which], offsets[which], times[which]
    ids = _ids(read, starts + f.PREFIX_BYTES, heads["idlen"])
    counted = np.ones(len(which), np.int64) if attempts is None else attempts
    due_ms = heads["due"].astype(np.int64)
    for k in np.flatnonzero(heads["flags"] & f.META).tolist():  # a retry that slept: its id is group/id
        meta = document(read, int(which[k])).meta
        ids[k] = ids[k][len(name) + 1 :]
        due_ms[k] = int(meta["due"])
        if attempts is None:
            counted[k] = int(meta["attempt"])
    return MessageColumns(offsets, heads["seq"].astype(np.int64), due_ms, times, counted, ids)


def _expired(read: log.Documents, asked: Mask, now_ms: int) -> Mask:
    """Which messages were not delivered in time."""
    gone = np.zeros(len(asked), np.bool_)
    for i in np.flatnonzero(asked & ((read.heads["flags"] & f.EXPIRES) != 0)).tolist():
        expires_ms = document(read, i).expires_ms
        gone[i] = expires_ms is not None and expires_ms <= now_ms
    return gone


def _take(
    group: Group, read: log.Documents, offsets: I64, times: I64, mine: Mask, picked: Picked, attempts: I64 | None, now_ms: int
) -> int:
    """Documents go to the consumer, or to the dead where they are too late. Returns how many are delivered."""
    late = _expired(read, mine, now_ms)
    for gone, which in ((True, np.flatnonzero(late)), (False, np.flatnonzero(mine & ~late))):
        if not len(which):
            continue
        held = columns(group.name, read, offsets, times, which, None if attempts is None else attempts[which])
        if gone:
            held.attempts -= 1
            picked.expired.append(held)
        else:
            picked.pieces.append(Piece(read, which, held))
            picked.bytes += int(read.heads["len"][which].sum())
    return int((mine & ~late).sum())
