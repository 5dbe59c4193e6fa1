"""Opening a Broker: the ready log, the last checkpoint, and the events of the journals behind it.

Documents of the ready log that were not synced may be gone after a power cut, and others may have their offsets. Events name
seqs as well, so what is said of a document that is not there any more is passed over: it will be delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sortedcontainers import SortedSet

from turtlemq.broker import checkpoint as c
from turtlemq.broker import delivery
from turtlemq.broker.broker import Broker
from turtlemq.broker.failures import EndedDelivery
from turtlemq.broker.group import LEVELS, Group, MessageColumns, Waiting
from turtlemq.broker.journal import Event, Journal
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.ready_recover import Clean, open_ready
from turtlemq.broker.results import DeadRemoval, Interrupted
from turtlemq.broker.save import state
from turtlemq.model import I64, Damage, Mask
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.standing import add_move
from turtlemq.storage import names
from turtlemq.storage.door import Door


@dataclass(frozen=True, slots=True)
class Opened:
    """A Broker that was opened, and what its topic has to do next."""

    broker: Broker
    behind: bool  # it knows more than the last checkpoint: save it
    torn: bool  # the journals speak of documents that a power cut took: note the state in the journal, too
    interrupted: Interrupted


def open_broker(
    door: Door,
    folder: Path,
    topic: str,
    settings: Settings,
    bury: Callable[[Sequence[EndedDelivery]], int],
    resleep: Callable[[Sequence[EndedDelivery]], None],
    newest_seq: Callable[[], int],
    clean: dict[str, Any] | None = None,
) -> Opened:
    """Open the Broker of a topic, or create it. `clean`: the result of `save.clean_mark` at the last proper stop."""
    door.make_folder(folder)
    ready = ReadyLog(door, folder, topic, settings)
    open_ready(ready, None if clean is None else Clean.read(clean["ready"]))
    reserve, history = (Journal(door, folder, topic, kind, settings) for kind in ("reserve", "history"))
    broker = Broker(ready, reserve, history, settings, bury, resleep, newest_seq)
    broker.recount()
    reserve.state = lambda: state(broker)
    ends = {kind: (int(clean[kind][0]), int(clean[kind][1])) for kind in ("reserve", "history")} if clean else {}
    saved, leases, derived = _begin(broker, c.read(door, folder), ends.get("reserve"))
    settlements = _from(history.open(saved.history, ends.get("history")), saved.numbers[1])
    reserve.number, history.number = max(reserve.number, saved.numbers[0]), max(history.number, saved.numbers[1])
    interrupted = Interrupted(saved.newest_seq)
    torn = apply_events(broker, saved, leases, settlements, interrupted)
    odd = bool(ready.damage)  # nobody knows any more for whom what is damaged was
    cancels = any(event.fields["event"] == "cancel" for event in settlements)  # these knew of fetches and moves that may be lost
    tidy(broker, saved, recount=torn or derived or odd or cancels)
    broker.dead_counts = saved.dead_counts
    broker.note_saved()  # nearly: what was replayed now is noted by whoever opened this
    for name, mark in saved.groups.items():
        broker.groups[name] = _group(broker, name, mark)
    return Opened(broker, bool(leases or settlements), torn, interrupted)


def _begin(broker: Broker, saved: c.Checkpoint | None, clean: tuple[int, int] | None) -> tuple[c.Checkpoint, list[Event], bool]:
    """Where replay begins, and the events of the reserve journal from there on: at the checkpoint, or where a file begins, which
    may speak of documents that retention has removed since."""
    reserve, history, ready = broker.reserve_log, broker.history, broker.ready
    for journal in (reserve, history):
        journal.find_files()
    if saved is not None and reserve.holds(saved.reserve) and history.holds(saved.history):
        events = _from(reserve.open(saved.reserve, clean), saved.numbers[0])
        whole = [event.number for event in events] == list(range(saved.numbers[0], saved.numbers[0] + len(events)))
        return (None if whole else _last_state(events, history)) or (saved, events, False)
    for journal, at in ((reserve, saved.reserve), (history, saved.history)) if saved is not None else ():
        if not journal.holds(at):
            journal.damage.append(
                Damage(names.segment(journal.kind, at[0]), at[1], 0, "events are gone: the checkpoint knew them")
            )
    events = reserve.open((0, 0), clean)
    nothing = c.Checkpoint(specials=ready.next_offset > 0, levels=ready.next_offset > 0)
    return _last_state(events, history) or (nothing, events, True)


def _last_state(events: list[Event], history: Journal) -> tuple[c.Checkpoint, list[Event], bool] | None:
    """The checkpoint that the last of these files begins with: for when there is no other, or events behind it are damaged."""
    for i in range(len(events) - 1, -1, -1):
        if events[i].fields["event"] == "state":
            state = c.decode(events[i].fields["state"])
            state.numbers = (events[i].number + 1, state.numbers[1])
            if history.holds(state.history):
                return state, events[i + 1 :], True
    return None


def _from(events: list[Event], number: int) -> list[Event]:
    """Events as they follow each other; an older one among them is a copy, written where it does not belong."""
    return [event for event in events if event.number >= number]


def apply_events(
    broker: Broker, saved: c.Checkpoint, leases: list[Event], settlements: list[Event], interrupted: Interrupted
) -> bool:
    """Apply the events behind a checkpoint to it: cancellations first, since a cancelled message is counted nowhere; then leases,
    then settlements. Steps that may be half done are added to `interrupted`. Returns whether events name lost documents."""
    torn = saved.ready_offset > broker.ready.next_offset
    if torn:
        _shorten(broker.ready, saved)
    _count_arrivals(broker, saved)
    for event in settlements:
        if event.fields["event"] == "cancel":
            torn |= _apply_cancel(broker, saved, event, interrupted)
    broker.cancelled, broker.cancelled_retries, broker.levels = SortedSet(saved.cancelled), saved.cancelled_retries, saved.levels
    broker.specials, broker.notices = saved.specials, saved.notices
    ended, expected, unsure = _ended(settlements), saved.numbers[0], set[str]()
    for event in leases:
        if event.number != expected:  # an event before this one is damaged: any group may have got messages with it
            unsure, torn = set(saved.groups), True
        if event.fields["event"] == "lease" and event.group in unsure:
            unsure.discard(event.group)
            _recover_lease(broker, saved.groups.get(event.group), event, ended)
        torn |= _apply_lease(broker, saved, event, ended)
        expected = event.number + 1
    for event in settlements:
        if event.fields["event"] != "cancel":
            torn |= _apply_settlement(broker, saved, event, interrupted)
    return torn


def _shorten(ready: ReadyLog, saved: c.Checkpoint) -> None:
    """The log is shorter than when the checkpoint was written, which it never is after a crash. Offsets behind its end will be
    those of other documents, which every group must see."""
    end, reason = ready.next_offset, f"messages {ready.next_offset} to {saved.ready_offset - 1} that had become ready are gone"
    file, size = (ready.segments[-1].path.name, ready.segments[-1].size) if ready.segments else (names.segment("ready", 0), 0)
    ready.damage.append(Damage(file, size, 0, reason))
    for mark in saved.groups.values():
        mark.cursors = [min(cursor, end) for cursor in mark.cursors]
        mark.open = {offset: entry for offset, entry in mark.open.items() if offset < end}
    saved.cancelled = {offset for offset in saved.cancelled if offset < end}


def _ended(settlements: list[Event]) -> dict[tuple[str, int], I64]:
    """Offsets that were settled, sorted, by group and epoch: most leases that are replayed have ended, and need not be made."""
    found: dict[tuple[str, int], list[I64]] = {}
    for event in settlements:
        if event.fields["event"] == "settle":
            found.setdefault((event.group, int(event.fields["epoch"])), []).append(event.array("offsets"))
    return {key: np.sort(np.concatenate(arrays)) for key, arrays in found.items()}


def tidy(broker: Broker, saved: c.Checkpoint, recount: bool) -> None:
    """Drop what is said of documents that are cancelled or no longer there. `recount`: such were counted, too."""
    first = broker.ready.first_offset
    for name, mark in saved.groups.items():
        mark.open = {offset: e for offset, e in mark.open.items() if offset not in saved.cancelled and offset >= first}
        if recount:
            cursors = [max(cursor, first) for cursor in mark.cursors]
            levels = dict(zip(sorted(map(int, LEVELS)), cursors, strict=True))
            if len(set(cursors)) == 1:
                mark.unfetched = broker.count_visible(name, mark, cursors[0], broker.ready.next_offset)
            else:
                mark.unfetched = count_unfetched(broker, name, mark, levels)
    broker.forget_cancelled()


def count_unfetched(broker: Broker, name: str, place: delivery.Position, cursors: dict[int, int]) -> int:
    """Messages for a group at and behind its cursors, counted one by one."""
    total = 0
    ready = broker.ready
    behind = np.array([cursors[level] for level in sorted(cursors)])
    for at in range(max(min(cursors.values()), ready.first_offset), ready.next_offset, 65_536):
        offsets = np.arange(at, min(at + 65_536, ready.next_offset))
        read, _ = ready.read(offsets)
        levels = np.minimum(read.heads["flags"] & f.PRIORITY, len(behind) - 1)
        fresh = offsets >= np.where(read.good, behind[levels], behind[0])
        total += int((fresh & delivery.visible(broker.ready, name, place, read, offsets, broker.cancelled)).sum())
    return total


def _count_arrivals(broker: Broker, saved: c.Checkpoint) -> None:
    """Documents that came after the checkpoint: what they mean for each group."""
    first = max(saved.ready_offset, broker.ready.first_offset)
    for at in range(first, broker.ready.next_offset, 65_536):
        offsets = np.arange(at, min(at + 65_536, broker.ready.next_offset))
        read, _ = broker.ready.read(offsets)
        flags = read.heads["flags"][read.good]
        saved.levels |= bool((flags & f.PRIORITY).any())
        saved.specials |= bool((flags & (f.META | f.NOTICE)).any())
        saved.notices += int(((flags & f.NOTICE) != 0).sum())
        for name, mark in saved.groups.items():
            mark.unfetched += int(delivery.visible(broker.ready, name, mark, read, offsets, frozenset()).sum())
    saved.sure_offset, saved.ready_offset = saved.ready_offset, broker.ready.next_offset


def _real(broker: Broker, saved: c.Checkpoint, offsets: I64, seqs: I64) -> tuple[I64, int]:
    """Which of these offsets still hold the documents that an event was about (positions into the arrays), and how many hold
    another or none, because a power cut took them. Those that retention has removed are neither."""
    ready = broker.ready
    order = np.argsort(offsets, kind="stable")
    order = order[offsets[order] >= ready.first_offset]
    inside = order[offsets[order] < ready.next_offset]
    fresh = inside[offsets[inside] >= saved.sure_offset]  # what is before was synced before the checkpoint: nothing took it
    same: I64 = inside[: len(inside) - len(fresh)]
    if len(fresh):
        read, _ = ready.read(offsets[fresh])
        same = np.append(same, fresh[~read.good | (read.heads["seq"] == seqs[fresh])])
    return same, len(order) - len(same)


def _apply_cancel(broker: Broker, saved: c.Checkpoint, event: Event, interrupted: Interrupted) -> bool:
    """Also tells, like the others, whether the event speaks of documents that are not there any more."""
    offsets = event.array("offsets")
    real, lost = _real(broker, saved, offsets, event.array("seqs"))
    saved.cancelled |= set(offsets[real].tolist())
    saved.cancelled_retries |= set(event.array("again").tolist()) & saved.cancelled
    for name, packed in event.fields["unfetched"].items():
        if name in saved.groups:
            saved.groups[name].unfetched -= len(packed) // 8
    for name, ids in event.fields["naps"].items():
        interrupted.cancelled_retry_ids.setdefault(name, []).extend(ids.decode().split("\0"))
    return lost > 0


def _apply_lease(broker: Broker, saved: c.Checkpoint, event: Event, ended: dict[tuple[str, int], I64]) -> bool:
    kind = event.fields["event"]
    if kind == "forget":
        saved.groups.pop(event.group, None)
    elif kind == "group":
        _start(broker, saved, event)
    mark = saved.groups.get(event.group)
    if kind in ("forget", "group", "state") or mark is None or mark.epoch != event.fields["epoch"]:
        return False
    if kind == "lease":
        mark.changed_ms = max(mark.changed_ms, event.at_ms)
    offsets = event.array("offsets")
    if kind == "extend":
        for offset in offsets.tolist():
            if offset in mark.open:
                mark.open[offset].until_ms = int(event.fields["until"])
        return False
    real, lost = _real(broker, saved, offsets, event.array("seqs"))
    if kind == "lease":
        _take_lease(broker, mark, event, real[~_among(offsets[real], ended.get((event.group, mark.epoch)))])
    elif kind == "retry":
        attempts, when = event.array("attempts"), event.array("when")
        for i in real.tolist():
            entry = c.Open(0, int(attempts[i]), int(when[i]), waits=True, error=event.fields["error"])
            mark.open[int(offsets[i])] = entry
    elif kind == "moved":
        for offset in offsets[real].tolist():
            mark.open.pop(offset, None)
    return lost > 0


def _recover_lease(broker: Broker, mark: c.GroupMark | None, event: Event, ended: dict[tuple[str, int], I64]) -> None:
    """A damaged event stood before this one. What the cursors passed in between, and nobody is known to have had, comes again."""
    if mark is None or mark.epoch != event.fields["epoch"]:
        return
    before, after = np.array(mark.cursors), np.array([int(cursor) for cursor in event.fields["cursors"]])
    first, last = max(int(before.min()), broker.ready.first_offset), min(int(after.max()), broker.ready.next_offset)
    passed = np.setdiff1d(np.arange(first, last), event.array("offsets"))
    passed = passed[~_among(passed, ended.get((event.group, mark.epoch)))]
    for some in np.split(passed, range(65_536, len(passed), 65_536)):
        read, _ = broker.ready.read(some)
        levels = np.minimum(read.heads["flags"] & f.PRIORITY, len(before) - 1)
        lost = read.good & (some >= before[levels]) & (some < after[levels])
        lost &= delivery.visible(broker.ready, event.group, mark, read, some, broker.cancelled)
        for offset in some[lost].tolist():
            mark.open.setdefault(offset, c.Open(0, 1, event.at_ms, waits=True, error="a journal is damaged"))


def _start(broker: Broker, saved: c.Checkpoint, event: Event) -> None:
    epoch, offset = int(event.fields["epoch"]), min(int(event.fields["offset"]), broker.ready.next_offset)
    mark = saved.groups.setdefault(event.group, c.GroupMark(born=epoch))
    mark.epoch, mark.moves = epoch, add_move(mark.moves, int(event.fields["since"]), offset)
    mark.cursors, mark.open = [offset] * len(LEVELS), {}
    mark.changed_ms = event.at_ms
    first = max(offset, broker.ready.first_offset)
    mark.unfetched = broker.count_visible(event.group, mark, first, broker.ready.next_offset)


def _take_lease(broker: Broker, mark: c.GroupMark, event: Event, real: I64) -> None:
    end = broker.ready.next_offset
    mark.cursors = [min(int(cursor), end) for cursor in event.fields["cursors"]]
    mark.unfetched -= int(event.fields["passed"])
    offsets, seqs, attempts, until = (event.array(name) for name in ("offsets", "seqs", "attempts", "until"))
    consumer = event.fields["consumer"]
    columns = [column[real].tolist() for column in (offsets, seqs, attempts, until)]
    for offset, seq, attempt, end_ms in zip(*columns, strict=True):
        mark.open[offset] = c.Open(seq, attempt, end_ms, event.at_ms, consumer)


def _among(offsets: I64, known: I64 | None) -> Mask:
    """Which of these are among sorted ones."""
    if known is None or not len(known):
        return np.zeros(len(offsets), np.bool_)
    same: Mask = known[np.minimum(np.searchsorted(known, offsets), len(known) - 1)] == offsets
    return same


def _apply_settlement(broker: Broker, saved: c.Checkpoint, event: Event, interrupted: Interrupted) -> bool:
    mark = saved.groups.get(event.group)
    if event.fields["event"] in ("undead", "redead"):
        _apply_removal(saved, event, interrupted)
        return False
    offsets, epoch, acked = event.array("offsets"), int(event.fields["epoch"]), event.fields["outcome"] == "acked"
    if not acked:
        saved.dead_counts[event.group] += len(offsets) - int(event.fields["replaced"])
    if epoch > (broker.reserve_log.number if mark is None else mark.epoch):
        return True  # a power cut took the note of that beginning or move; whoever opens this gives its number to another note
    if mark is None or epoch < mark.born:
        return False
    real, lost = _real(broker, saved, offsets, event.array("seqs"))
    if epoch == mark.epoch:
        for offset in offsets[real].tolist():
            mark.open.pop(offset, None)
        lost += broker.ready.unpassed(np.sort(offsets[real]), mark.cursors)  # their lease is lost: they come again
    mark.changed_ms = max(mark.changed_ms, event.at_ms)
    mark.settled += len(offsets) - lost if acked else 0
    return lost > 0


def _apply_removal(saved: c.Checkpoint, event: Event, interrupted: Interrupted) -> None:
    """Dead letters were about to go, or stay after all. Which of them are still there is for the topic to see."""
    ids, letters, became = event.fields["ids"].decode().split("\0"), event.array("letters"), event.array("became")
    rows = zip(ids, letters.tolist(), became.tolist(), strict=True)
    if event.fields["event"] == "undead":
        interrupted.removals += [DeadRemoval(event.group, *row) for row in rows]
    else:
        stay = {(event.group, seq) for seq in letters.tolist()}
        interrupted.removals = [letter for letter in interrupted.removals if (letter.group, letter.seq) not in stay]
    saved.dead_counts[event.group] += -len(letters) if event.fields["event"] == "undead" else len(letters)


def _group(broker: Broker, name: str, mark: c.GroupMark) -> Group:
    """A group with its leases and retries, from numbers and the documents they name."""
    group = Group(name, mark.epoch, mark.born, mark.moves)
    first = broker.ready.first_offset
    group.start(first)
    group.cursors = {level: max(cursor, first) for level, cursor in zip(sorted(group.cursors), mark.cursors, strict=True)}
    group.unfetched, group.settled, group.changed_ms = mark.unfetched, mark.settled, mark.changed_ms
    by_lease: dict[tuple[int, int, str], list[int]] = {}
    for offset, entry in mark.open.items():
        if entry.waits:
            group.wait(offset, Waiting(entry.until_ms, entry.attempt, entry.error))
        else:
            by_lease.setdefault((entry.until_ms, entry.reserved_ms, entry.consumer), []).append(offset)
    for (until_ms, reserved_ms, consumer), offsets in sorted(by_lease.items()):
        held = _held(broker, group, np.array(sorted(offsets)), mark)
        if len(held):
            group.lease(held, reserved_ms, until_ms, consumer)
    return group


def _held(broker: Broker, group: Group, offsets: I64, mark: c.GroupMark) -> MessageColumns:
    read, times = broker.ready.read(offsets)
    which = np.flatnonzero(read.good)
    attempts = np.array([mark.open[offset].attempt for offset in offsets[which].tolist()], np.int64)
    return delivery.columns(group.name, read, offsets, times, which, attempts)
