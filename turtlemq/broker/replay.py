"""Replay: the events that the journals hold behind a checkpoint, applied to it.

A power cut may have taken documents of the ready log that were not synced, and others may have their offsets now. Events name
seqs as well, so an event about a lost document is recognised and ignored: the message is still in the Index, and is handed off
and delivered again.

No file is written here. Finding the checkpoint and the events is in `opening`; `check` replays them without the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sortedcontainers import SortedSet

from turtlemq import attempts as a
from turtlemq.attempts import Attempts
from turtlemq.broker import checkpoint as c
from turtlemq.broker import events as e
from turtlemq.broker.failures import LEASE_EXPIRED
from turtlemq.broker.journal import Event
from turtlemq.broker.priorities import LEVELS
from turtlemq.broker.ready_columns import are_unpassed
from turtlemq.broker.results import DeadRemoval, Interrupted
from turtlemq.broker.visibility import RESTRICTED, Visibility, visible
from turtlemq.model import I64, SEQ_MAX, Damage, Mask
from turtlemq.segment import format as f
from turtlemq.standing import add_move
from turtlemq.storage import names

_STEP = 65_536  # documents that are read at once


class Replay:
    """One replay. `saved` is the checkpoint, and becomes the state after the last event; `visibility` is filled from it.
    `next_number`: of the reserve journal."""

    def __init__(self, saved: c.Checkpoint, visibility: Visibility, next_number: int) -> None:
        self.saved, self.visibility, self.ready = saved, visibility, visibility.ready
        self.interrupted = Interrupted(saved.newest_seq)
        self.torn = False  # events name documents, or other events, that are lost
        self._next_number = next_number
        self._synced_offset = saved.ready_offset  # documents before it were synced before the checkpoint: no power cut took them
        self._ended: dict[tuple[str, int], I64] = {}  # by group and epoch: settled offsets, sorted

    def run(self, leases: Sequence[Event], settlements: Sequence[Event]) -> None:
        """Apply the events of both journals. Cancellations come first, since a cancelled message is counted nowhere; then leases,
        then settlements."""
        if self.saved.ready_offset > self.ready.next_offset:
            self.torn = True
            self._forget_documents()
        self._count_arrivals()
        for event in settlements:
            if event.fields["event"] == e.CANCEL:
                self._apply_cancel(event)
        self._fill_visibility()
        self._ended = _settled_offsets(settlements)
        self._apply_leases(leases)
        for event in settlements:
            if event.fields["event"] in (e.REMOVE_DEAD, e.KEEP_DEAD):
                self._apply_removal(event)
            elif event.fields["event"] != e.CANCEL:
                self._apply_settlement(event)

    def finish(self, recount: bool) -> None:
        """Drop entries about documents that are cancelled or removed. `recount`: they may have been counted, so count anew."""
        first, saved = self.ready.first_offset, self.saved
        for name, mark in saved.groups.items():
            mark.open = {at: entry for at, entry in mark.open.items() if at not in saved.cancelled and at >= first}
            if recount:
                cursors = [max(cursor, first) for cursor in mark.cursors]
                if len(set(cursors)) == 1:
                    mark.unfetched = self.visibility.count(name, mark, cursors[0], self.ready.next_offset)
                else:
                    mark.unfetched = self.visibility.count_ahead(name, mark, cursors)
        self.visibility.forget_removed()

    # Documents

    def _forget_documents(self) -> None:
        """The ready log is shorter than when the checkpoint was written, which no crash explains. The offsets behind its end will
        be those of other documents, which every group must see."""
        ready, saved = self.ready, self.saved
        end, reason = (
            ready.next_offset,
            f"messages {ready.next_offset} to {saved.ready_offset - 1} that had become ready are gone",
        )
        last = (ready.segments[-1].path.name, ready.segments[-1].size) if ready.segments else (names.segment("ready", 0), 0)
        ready.damage.append(Damage(*last, 0, reason))
        for mark in saved.groups.values():
            mark.cursors = [min(cursor, end) for cursor in mark.cursors]
            mark.open = {offset: entry for offset, entry in mark.open.items() if offset < end}
        saved.cancelled = {offset for offset in saved.cancelled if offset < end}

    def _count_arrivals(self) -> None:
        """Count the documents that came after the checkpoint, for each group."""
        ready, saved = self.ready, self.saved
        for at in range(max(saved.ready_offset, ready.first_offset), ready.next_offset, _STEP):
            offsets = np.arange(at, min(at + _STEP, ready.next_offset))
            read, _ = ready.read(offsets)
            flags = read.heads["flags"][read.good]
            saved.has_priorities |= bool((flags & f.PRIORITY).any())
            saved.has_restricted |= bool((flags & RESTRICTED).any())
            saved.notices += int(((flags & f.NOTICE) != 0).sum())
            for name, mark in saved.groups.items():
                mark.unfetched += int(visible(ready, name, mark, read, offsets, frozenset()).sum())
        saved.ready_offset = ready.next_offset

    def _fill_visibility(self) -> None:
        saved, visibility = self.saved, self.visibility
        visibility.cancelled, visibility.cancelled_retries = SortedSet(saved.cancelled), saved.cancelled_retries
        visibility.has_priorities, visibility.has_restricted = saved.has_priorities, saved.has_restricted
        visibility.notices = saved.notices

    def _still_there(self, offsets: I64, seqs: I64) -> tuple[I64, int]:
        """Which of these offsets still hold the documents that an event was about, as positions into the arrays; and how many
        hold another or none, because a power cut took them. Documents that retention has removed are neither."""
        ready = self.ready
        order = np.argsort(offsets, kind="stable")
        order = order[offsets[order] >= ready.first_offset]
        inside = order[offsets[order] < ready.next_offset]
        unsure = inside[offsets[inside] >= self._synced_offset]
        same: I64 = inside[: len(inside) - len(unsure)]
        if len(unsure):
            read, _ = ready.read(offsets[unsure])
            same = np.append(same, unsure[~read.good | (read.heads["seq"] == seqs[unsure])])
        return same, len(order) - len(same)

    def _note_lost(self, count: int) -> None:
        self.torn |= count > 0

    # Events of the reserve journal

    def _apply_leases(self, leases: Sequence[Event]) -> None:
        expected, unsure = self.saved.numbers[0], set[str]()
        for event in leases:
            if event.number != expected:  # an event before this one is damaged: it may have been a lease of any group
                unsure, self.torn = set(self.saved.groups), True
            if event.fields["event"] == e.LEASE and event.group in unsure:
                unsure.discard(event.group)
                self._recover_lost_leases(event)
            self._apply_reserve_event(event)
            expected = event.number + 1

    def _apply_reserve_event(self, event: Event) -> None:
        kind = event.fields["event"]
        if kind == e.FORGET:
            self.saved.groups.pop(event.group, None)
        elif kind == e.GROUP:
            self._apply_group(event)
        mark = self.saved.groups.get(event.group)
        if kind in (e.FORGET, e.GROUP, e.STATE, e.STATE_PART) or mark is None or mark.epoch != event.fields["epoch"]:
            return
        offsets = event.array("offsets")
        if kind == e.EXTEND:
            for offset in offsets.tolist():
                if offset in mark.open:
                    mark.open[offset].until_ms = int(event.fields["until"])
            return
        there, lost = self._still_there(offsets, event.array("seqs"))
        self._note_lost(lost)
        if kind == e.LEASE:
            self._apply_lease(mark, event, there[~_among(offsets[there], self._ended.get((event.group, mark.epoch)))])
        elif kind == e.RETRY:
            attempts, when = event.array("attempts"), event.array("when")
            for i in there.tolist():
                offset, following = int(offsets[i]), (int(attempts[i]), int(when[i]))
                ended = ended_attempts(event.fields, event.at_ms, mark.open.get(offset), *following)
                mark.open[offset] = c.OpenMessage(0, *following, is_retry=True, error=event.fields["error"], attempts=ended)
        elif kind == e.MOVED:
            for offset in offsets[there].tolist():
                mark.open.pop(offset, None)

    def _apply_group(self, event: Event) -> None:
        epoch, offset = int(event.fields["epoch"]), min(int(event.fields["offset"]), self.ready.next_offset)
        mark = self.saved.groups.setdefault(event.group, c.GroupMark(born=epoch))
        mark.epoch, mark.moves = epoch, add_move(mark.moves, int(event.fields["since"]), offset)
        mark.cursors, mark.open = [offset] * len(LEVELS), {}
        mark.changed_ms = event.at_ms
        first = max(offset, self.ready.first_offset)
        mark.unfetched = self.visibility.count(event.group, mark, first, self.ready.next_offset)

    def _apply_lease(self, mark: c.GroupMark, event: Event, which: I64) -> None:
        """`which`: messages of the lease that are there and were not settled since. Most leases in a replay have none."""
        mark.changed_ms = max(mark.changed_ms, event.at_ms)
        mark.cursors = [min(int(cursor), self.ready.next_offset) for cursor in event.fields["cursors"]]
        mark.unfetched -= int(event.fields["passed"])
        columns = [event.array(name)[which].tolist() for name in ("offsets", "seqs", "attempts", "until")]
        consumer, at_ms, number = event.fields["consumer"], event.at_ms, event.number
        for offset, seq, attempt, end_ms in zip(*columns, strict=True):
            ended = mark.open[offset].attempts if offset in mark.open else ()
            mark.open[offset] = c.OpenMessage(seq, attempt, end_ms, at_ms, consumer, event=number, attempts=ended)

    def _recover_lost_leases(self, event: Event) -> None:
        """A damaged event stood before this lease. Messages that the cursors passed in between, and that no known event names,
        are delivered again."""
        mark = self.saved.groups.get(event.group)
        if mark is None or mark.epoch != event.fields["epoch"]:
            return
        ready = self.ready
        before, after = mark.cursors, [int(cursor) for cursor in event.fields["cursors"]]
        first, last = max(min(before), ready.first_offset), min(max(after), ready.next_offset)
        passed = np.setdiff1d(np.arange(first, last), event.array("offsets"))
        passed = passed[~_among(passed, self._ended.get((event.group, mark.epoch)))]
        for offsets in np.split(passed, range(_STEP, len(passed), _STEP)):
            read, _ = ready.read(offsets)
            lost = read.good & are_unpassed(ready, offsets, before) & ~are_unpassed(ready, offsets, after)
            lost &= visible(ready, event.group, mark, read, offsets, self.visibility.cancelled)
            for offset in offsets[lost].tolist():
                mark.open.setdefault(offset, c.OpenMessage(0, 1, event.at_ms, is_retry=True, error="a journal is damaged"))

    # Events of the history journal

    def _apply_cancel(self, event: Event) -> None:
        saved, offsets = self.saved, event.array("offsets")
        there, lost = self._still_there(offsets, event.array("seqs"))
        self._note_lost(lost)
        saved.cancelled |= set(offsets[there].tolist())
        saved.cancelled_retries |= set(event.array("again").tolist()) & saved.cancelled
        for name, count in event.fields["unfetched"].items():
            if name in saved.groups:  # older versions wrote the offsets themselves
                saved.groups[name].unfetched -= len(count) // 8 if isinstance(count, bytes) else int(count)
        newest_seq = int(event.fields.get("since", SEQ_MAX))  # older versions did not note it, and took no cancelled id again
        for name, ids in event.fields["naps"].items():
            self.interrupted.cancelled_retry_ids.setdefault(name, {}).update(dict.fromkeys(e.split_ids(ids), newest_seq))

    def _apply_settlement(self, event: Event) -> None:
        mark, offsets = self.saved.groups.get(event.group), event.array("offsets")
        epoch, acked = int(event.fields["epoch"]), event.fields["outcome"] == e.ACKED
        if not acked:
            self.saved.dead_counts[event.group] += len(offsets) - int(event.fields["replaced"])
        if epoch > (self._next_number if mark is None else mark.epoch):
            self.torn = True  # a power cut took the event that began this epoch; its number will be given to another event
            return
        if mark is None or epoch < mark.born:
            return
        there, lost = self._still_there(offsets, event.array("seqs"))
        if epoch == mark.epoch:
            for offset in offsets[there].tolist():
                mark.open.pop(offset, None)
            unpassed = are_unpassed(self.ready, np.sort(offsets[there]), mark.cursors)
            lost += int(unpassed.sum())  # their lease is lost: delivered again
        self._note_lost(lost)
        mark.changed_ms = max(mark.changed_ms, event.at_ms)
        mark.settled += len(offsets) - lost if acked else 0

    def _apply_removal(self, event: Event) -> None:
        """Dead letters were about to be removed, or stay after all. The topic finds out which of them are left."""
        ids, seqs, requeued = e.split_ids(event.fields["ids"]), event.array("letters"), event.array("became")
        unfinished, removing = self.interrupted, event.fields["event"] == e.REMOVE_DEAD
        if removing:
            rows = zip(ids, seqs.tolist(), requeued.tolist(), strict=True)
            unfinished.removals += [DeadRemoval(event.group, *row) for row in rows]
        else:
            kept = {(event.group, seq) for seq in seqs.tolist()}
            unfinished.removals = [letter for letter in unfinished.removals if (letter.group, letter.seq) not in kept]
        self.saved.dead_counts[event.group] += -len(seqs) if removing else len(seqs)


def ended_attempts(fields: Mapping[str, Any], at_ms: int, before: c.OpenMessage | None, attempt: int, when_ms: int) -> Attempts:
    """The ended attempts of a message after a RETRY event with these fields; `attempt` and `when_ms` are those of its next
    delivery. Events of older versions do not tell the outcome."""
    if before is None or before.is_retry:
        return () if before is None else before.attempts
    error = str(fields["error"])
    guess = a.EXPIRED if error == LEASE_EXPIRED else a.FAILED if attempt > before.attempt else a.GIVEN_BACK
    outcome = fields.get("outcome", guess)
    if not outcome:
        return before.attempts
    ended = a.Attempt(before.attempt, before.consumer, before.reserved_ms, at_ms, outcome, a.shorten(error), when_ms)
    return a.latest((*before.attempts, ended))


def _settled_offsets(settlements: Sequence[Event]) -> dict[tuple[str, int], I64]:
    """Offsets that were settled, sorted, by group and epoch."""
    settled: dict[tuple[str, int], list[I64]] = {}
    for event in settlements:
        if event.fields["event"] == e.SETTLE:
            settled.setdefault((event.group, int(event.fields["epoch"])), []).append(event.array("offsets"))
    return {key: np.sort(np.concatenate(arrays)) for key, arrays in settled.items()}


def _among(offsets: I64, known: I64 | None) -> Mask:
    """Which offsets are among `known` ones. Required: these are sorted."""
    if known is None or not len(known):
        return np.zeros(len(offsets), np.bool_)
    same: Mask = known[np.minimum(np.searchsorted(known, offsets), len(known) - 1)] == offsets
    return same
