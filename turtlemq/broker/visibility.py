"""Which documents of the ready log are messages, and for which consumer groups.

Most documents are messages for every group. Restricted ones are not: a retry that slept in the Index belongs to one group, and a
notice (it keeps the id of a cancelled sleeper known) to none. A retry is void, and seen by no group, if its group was moved back
to where the message comes again by itself, or is another group that has the same name. A message that was cancelled while ready
is seen by no group, either; the log is not rewritten for that, `Visibility.cancelled` holds its offset.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any, Protocol

import numpy as np
from sortedcontainers import SortedSet

from turtlemq import standing
from turtlemq.broker.group import Group
from turtlemq.broker.priorities import LEVELS
from turtlemq.broker.ready_columns import are_unpassed, levels_at
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.model import I64, Mask
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.buffers import windows

RESTRICTED = f.META | f.NOTICE  # flags of documents that not every group sees
_STEP = 65_536  # documents that are read at once to count them
_READ_BYTES = 16 << 20  # of documents that are read at once to look at their flags


class Position(Protocol):
    """The facts of a group that make its retries void: of a `Group`, or of a `GroupMark` in a checkpoint."""

    @property
    def born(self) -> int: ...
    @property
    def moves(self) -> list[tuple[int, int]]: ...


class Retry(Protocol):
    """The facts of a retry that make it void."""

    @property
    def order(self) -> int: ...
    @property
    def meta(self) -> dict[str, Any]: ...


def is_void(position: Position, retry: Retry) -> bool:
    """Whether a retry of a group is void, by the rule of `standing.is_void`."""
    meta = retry.meta
    return standing.is_void(position.born, position.moves, int(meta["epoch"]), retry.order, int(meta["offset"]))


def visible(ready: ReadyLog, name: str, position: Position, read: log.Documents, offsets: I64, cancelled: Set[int]) -> Mask:
    """Which documents of a read are messages for a group. A damaged document counts as one, and is skipped when the cursor gets
    there, unless its table says that it was restricted: then it was never counted for this group."""
    seen: Mask = ~restricted_for_others(name, position, read)
    if not read.good.all():
        seen &= read.good | ~np.isin(offsets, ready.restricted_for_others(int(offsets[0]), int(offsets[-1]) + 1, name))
    if not cancelled:
        return seen
    if len(cancelled) < len(offsets):
        seen &= ~np.isin(offsets, list(cancelled))
    else:
        seen &= np.array([offset not in cancelled for offset in offsets.tolist()], np.bool_)
    return seen


def restricted_for_others(name: str, position: Position, read: log.Documents) -> Mask:
    """Which undamaged documents of a read are notices, retries of other groups, or void retries."""
    flags, prefix = read.heads["flags"], name.encode() + b"/"
    out: Mask = read.good & ((flags & RESTRICTED) != 0)
    retries = np.flatnonzero(out & ((flags & f.NOTICE) == 0) & (read.heads["idlen"] > len(prefix)))
    if len(retries):
        beginnings = windows(read.buffer, len(prefix))[read.starts[retries] + f.PREFIX_BYTES]
        for i in retries[beginnings == np.void(prefix)].tolist():
            out[i] = _is_void(position, read, i)
    return out


def retries_by_group(read: log.Documents) -> dict[str, I64]:
    """The undamaged retries of a read: by group, their positions in it."""
    rows: dict[str, list[int]] = {}
    for i in np.flatnonzero(read.good & ((read.heads["flags"] & f.META) != 0)).tolist():
        at = int(read.starts[i]) + f.PREFIX_BYTES
        id_ = bytes(read.buffer[at : at + int(read.heads["idlen"][i]) - 1])
        rows.setdefault(id_.partition(b"/")[0].decode(), []).append(i)
    return {name: np.array(own) for name, own in rows.items()}


def _is_void(position: Position, read: log.Documents, i: int) -> bool:
    """`is_void` for a document of a read. Decodes it only if it came before the last move."""
    last_move = position.moves[-1][0] if position.moves else 0
    if read.heads["seq"][i] > last_move and not read.heads["flags"][i] & f.MOVED:
        return False
    return is_void(position, read.decode(i))


class Visibility:
    """Facts about the documents of one ready log that decide which of them are messages, and counts that follow from them."""

    def __init__(self, ready: ReadyLog) -> None:
        self.ready = ready
        self.cancelled: SortedSet[int] = SortedSet()  # offsets of messages, and of groups' retries, cancelled while ready
        self.cancelled_retries: set[int] = set()  # those that are not counted: a group's retry, or replaced by a newer message
        self.notices = 0  # cancelled messages that are not in `cancelled`: they slept, or retention removed them
        self.has_priorities = False  # at least one message has another priority than normal
        self.has_restricted = False  # at least one document is restricted
        self._unclaimed: int | None = None  # see `unclaimed`; None: to be counted

    @property
    def unclaimed(self) -> int:
        """Messages in the log, for a topic that has no group yet."""
        if self._unclaimed is None:
            self._unclaimed = self.count("", Group(""), self.ready.first_offset, self.ready.next_offset)
        return self._unclaimed

    @property
    def cancelled_messages(self) -> int:
        """How many messages were cancelled, asleep or ready."""
        return self.notices + len(self.cancelled) - len(self.cancelled_retries)

    def cancelled_among(self, offsets: Collection[int]) -> set[int]:
        """Those of the offsets whose message was cancelled, here or while it slept: then a notice lies there. Documents are read
        only if the log has restricted ones."""
        cancelled = {offset for offset in offsets if offset in self.cancelled}
        rest = np.array(sorted({*offsets} - cancelled), np.int64) if self.has_restricted else np.empty(0, np.int64)
        cancelled.update(rest[(self.heads(rest)["flags"] & f.NOTICE) != 0].tolist())
        return cancelled

    def heads(self, offsets: I64) -> np.ndarray[Any, np.dtype[Any]]:
        """The fixed fields of documents at rising offsets. Reads few documents at once, whatever their size."""
        parts = [f.prefixes(b"", np.empty(0, np.int64))]
        while len(offsets):
            read, _ = self.ready.read(offsets, _READ_BYTES)
            parts.append(read.heads)
            offsets = offsets[len(read.heads) :]
        return np.concatenate(parts)

    def is_unfetched(self, group: Group, offset: int) -> bool:
        """Whether the cursor of a group has still to pass this document. A retry that waits in memory is not unfetched."""
        cursors = group.cursors
        if offset in group.retries or offset < min(cursors.values()):
            return False
        if offset >= max(cursors.values()):
            return True
        return offset >= cursors[int(levels_at(self.ready, np.array([offset]))[0])]

    def is_counted(self, group: Group, offset: int) -> bool:
        """Whether a retry of a group counts as unfetched. A void one, of before the group was moved or made anew, never did."""
        if not self.is_unfetched(group, offset):
            return False
        offsets = np.array([offset])
        read, _ = self.ready.read(offsets)
        return bool(visible(self.ready, group.name, group, read, offsets, frozenset())[0])

    def are_unfetched(self, groups: Sequence[Group], offsets: I64) -> Mask:
        """Whether the cursors of groups, a column each, have still to pass documents, a row each."""
        cursors = np.array([[group.cursors[level] for level in sorted(group.cursors)] for group in groups], np.int64)
        cursors = cursors.reshape(len(groups), len(LEVELS))
        levels = np.zeros(len(offsets), np.int64)
        if self.has_priorities and len(groups) and len(offsets):
            unsure = np.unique(offsets[(offsets >= cursors.min()) & (offsets < cursors.max())])
            known, found = levels_at(self.ready, unsure), np.isin(offsets, unsure)
            levels[found] = known[np.searchsorted(unsure, offsets[found])]
        ahead: Mask = offsets[:, None] >= (cursors.T[levels] if levels.any() else cursors[:, 0])
        return ahead

    def count(self, name: str, position: Position, first: int, last: int) -> int:
        """How many documents in [first, last) are messages for a group. Only the group's own retries are read."""
        total: int = last - first - (self.cancelled.bisect_left(last) - self.cancelled.bisect_left(first))
        if not self.has_restricted:
            return total
        restricted, own = self.ready.restricted(first, last, name, self.cancelled)
        for offsets in np.split(own, range(_STEP, len(own), _STEP)):
            read, _ = self.ready.read(offsets)
            total += int(visible(self.ready, name, position, read, offsets, self.cancelled).sum())
        return total - restricted

    def count_ahead(self, name: str, position: Position, cursors: Sequence[int]) -> int:
        """How many documents at or behind its cursors, one for each priority, are messages for a group. Reads each of them."""
        total, ready = 0, self.ready
        for at in range(max(min(cursors), ready.first_offset), ready.next_offset, _STEP):
            offsets = np.arange(at, min(at + _STEP, ready.next_offset))
            read, _ = ready.read(offsets)
            unpassed = are_unpassed(ready, offsets, cursors)
            total += int((unpassed & visible(ready, name, position, read, offsets, self.cancelled)).sum())
        return total

    # Changes

    def note_arrivals(self, raw: bytes, starts: I64, flags: int) -> tuple[log.Documents, I64] | None:
        """Note the facts of the batch that was appended last; `flags`: the flags that any of its documents has. Returns its
        restricted documents and their offsets, None if it has none."""
        self.has_priorities |= bool(flags & f.PRIORITY)
        if not flags & RESTRICTED:
            if self._unclaimed is not None:
                self._unclaimed += len(starts)
            return None
        heads = f.prefixes(raw, starts)
        which = np.flatnonzero(heads["flags"] & RESTRICTED)
        self.has_restricted = True
        self.notices += int(((heads["flags"] & f.NOTICE) != 0).sum())
        if self._unclaimed is not None:
            self._unclaimed += len(starts) - len(which)
        restricted = log.Documents(raw, starts[which], heads[which], np.ones(len(which), np.bool_))
        return restricted, which + (self.ready.next_offset - len(starts))

    def note_notices(self, count: int) -> None:
        """Note a batch of notices that was appended."""
        self.has_restricted = True
        self.notices += count

    def cancel(self, offsets: Set[int], retries: Set[int]) -> None:
        """Messages at these offsets were cancelled; `retries`: those that are a group's retry, or were replaced."""
        self.cancelled |= offsets
        self.cancelled_retries |= retries
        self._unclaimed = None

    def forget_removed(self) -> None:
        """Files of the ready log were removed, or it was opened: cancelled messages that are gone are only counted."""
        gone = set(self.cancelled[: self.cancelled.bisect_left(self.ready.first_offset)])
        self.notices += len(gone) - len(gone & self.cancelled_retries)
        self.cancelled -= gone
        self.cancelled_retries -= gone
        self._unclaimed = None
