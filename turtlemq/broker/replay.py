"""Opening a Broker: the ready log, the last checkpoint, and the events of the journals behind it.

Documents of the ready log that were not synced may be gone after a power cut, and others may have their offsets. Events name
seqs as well, so what is said of a document that is not there any more is passed over: it will be delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turtlemq.broker import checkpoint as c
from turtlemq.broker import delivery
from turtlemq.broker.broker import Broker, Leaving
from turtlemq.broker.ends import Ended
from turtlemq.broker.group import LEVELS, Group, Held, Waiting, moved
from turtlemq.broker.journal import Event, Journal
from turtlemq.broker.ready import ReadyLog
from turtlemq.door import Door
from turtlemq.model import I64, Settings
from turtlemq.segment import format as f


def open_broker(
    door: Door,
    folder: Path,
    topic: str,
    settings: Settings,
    bury: Callable[[Sequence[Ended]], int],
    resleep: Callable[[Sequence[Ended]], None],
    newest_seq: Callable[[], int],
) -> tuple[Broker, bool, bool]:
    """The Broker of a topic, made if there is none; whether it knows more than the last checkpoint says; and whether the journals
    speak of documents that a power cut took."""
    door.make_folder(folder)
    ready = ReadyLog(door, folder, topic, settings)
    ready.open()
    reserve, history = (Journal(door, folder, topic, kind, settings) for kind in ("reserve", "history"))
    broker = Broker(ready, reserve, history, settings, bury, resleep, newest_seq)
    broker.recount()
    reserve.state = lambda: _state(broker)
    saved, leases, derived = _begin(broker, c.read(door, folder))
    settlements = history.open(saved.history)
    reserve.number, history.number = max(reserve.number, saved.numbers[0]), max(history.number, saved.numbers[1])
    torn = _replay(broker, saved, leases, settlements)
    _tidy(broker, saved, recount=torn or derived)
    broker.dead = saved.dead
    for name, mark in saved.groups.items():
        broker.groups[name] = _group(broker, name, mark)
    return broker, bool(leases or settlements), torn


def _begin(broker: Broker, saved: c.Checkpoint | None) -> tuple[c.Checkpoint, list[Event], bool]:
    """Where replay begins, and the events of the reserve journal from there on: at the checkpoint, or where a file begins, which
    may speak of documents that retention has removed since."""
    reserve, history, ready = broker.reserve_log, broker.history, broker.ready
    for journal in (reserve, history):
        journal.find_files()
    if saved is not None and reserve.holds(saved.reserve) and history.holds(saved.history):
        return saved, reserve.open(saved.reserve), False
    events = reserve.open((0, 0))
    for i in range(len(events) - 1, -1, -1):
        if events[i].fields["event"] == "state":
            state = c.decode(events[i].fields["state"])
            if history.holds(state.history):
                return state, events[i + 1 :], True
    return c.Checkpoint(specials=ready.next_offset > 0, levels=ready.next_offset > 0), events, True


def _replay(broker: Broker, saved: c.Checkpoint, leases: list[Event], settlements: list[Event]) -> bool:
    """Cancellations first: what is cancelled is counted nowhere. Then what was fetched, then what was settled. Returns whether
    documents are gone that events speak of."""
    torn = saved.ready_offset > broker.ready.next_offset
    _count_arrivals(broker, saved)
    for event in settlements:
        if event.fields["event"] == "cancel":
            torn |= _apply_cancel(broker, saved, event)
    broker.cancelled, broker.levels, broker.specials, broker.notices = (
        saved.cancelled,
        saved.levels,
        saved.specials,
        saved.notices,
    )
    for event in leases:
        torn |= _apply_lease(broker, saved, event)
    for event in settlements:
        if event.fields["event"] != "cancel":
            torn |= _apply_settlement(broker, saved, event)
    return torn


def _tidy(broker: Broker, saved: c.Checkpoint, recount: bool) -> None:
    """Drop what is said of documents that are cancelled or no longer there. `recount`: such were counted, too."""
    first = broker.ready.first_offset
    gone = {offset for offset in saved.cancelled if offset < first}
    for name, mark in saved.groups.items():
        for offset in [offset for offset in mark.open if offset in saved.cancelled or offset < first]:
            del mark.open[offset]
            mark.unfetched += 1
        if recount:
            cursors = [max(cursor, first) for cursor in mark.cursors]
            mark.unfetched = count_unfetched(broker, name, mark, dict(zip(sorted(map(int, LEVELS)), cursors, strict=True)))
    broker.cancelled -= gone
    broker.notices += len(gone)


def count_unfetched(broker: Broker, name: str, place: delivery.Place, cursors: dict[int, int]) -> int:
    """Messages for a group at and behind its cursors, counted one by one."""
    total = 0
    ready = broker.ready
    behind = np.array([cursors[level] for level in sorted(cursors)])
    for at in range(max(min(cursors.values()), ready.first_offset), ready.next_offset, 65_536):
        offsets = np.arange(at, min(at + 65_536, ready.next_offset))
        read, _ = ready.read(offsets)
        levels = np.minimum(read.heads["flags"] & f.PRIORITY, len(behind) - 1)
        fresh = offsets >= np.where(read.good, behind[levels], behind[0])
        total += int((fresh & delivery.visible(name, place, read, offsets, broker.cancelled)).sum())
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
            mark.unfetched += int(delivery.visible(name, mark, read, offsets, frozenset()).sum())
    saved.ready_offset = broker.ready.next_offset


def _real(broker: Broker, offsets: I64, seqs: I64) -> tuple[I64, int]:
    """Which of these offsets still hold the documents that an event was about (positions into the arrays), and how many hold
    another or none, because a power cut took them. Those that retention has removed are neither."""
    ready = broker.ready
    order = np.argsort(offsets, kind="stable")
    order = order[offsets[order] >= ready.first_offset]
    inside = order[offsets[order] < ready.next_offset]
    if not len(inside):
        return inside, len(order)
    read, _ = ready.read(offsets[inside])
    same: I64 = inside[~read.good | (read.heads["seq"] == seqs[inside])]
    return same, len(order) - len(same)


def _apply_cancel(broker: Broker, saved: c.Checkpoint, event: Event) -> bool:
    """Also tells, like the others, whether the event speaks of documents that are not there any more."""
    offsets = event.array("offsets")
    real, lost = _real(broker, offsets, event.array("seqs"))
    for offset in offsets[real].tolist():
        if offset not in saved.cancelled:
            saved.cancelled.add(offset)
            for mark in saved.groups.values():
                mark.unfetched -= 1
    return lost > 0


def _apply_lease(broker: Broker, saved: c.Checkpoint, event: Event) -> bool:
    kind = event.fields["event"]
    if kind == "forget":
        saved.groups.pop(event.group, None)
    elif kind == "group":
        _start(broker, saved, event)
    mark = saved.groups.get(event.group)
    if kind in ("forget", "group", "state") or mark is None or mark.epoch != event.fields["epoch"]:
        return False
    mark.changed_ms = event.at_ms
    offsets = event.array("offsets")
    if kind == "extend":
        for offset in offsets.tolist():
            if offset in mark.open:
                mark.open[offset].until_ms = int(event.fields["until"])
        return False
    real, lost = _real(broker, offsets, event.array("seqs"))
    if kind == "lease":
        _take_lease(broker, mark, event, real)
    elif kind == "retry":
        attempts, when = event.array("attempts"), event.array("when")
        for i in real.tolist():
            entry = c.Open(0, int(attempts[i]), int(when[i]), waits=True, error=event.fields["error"])
            mark.open[int(offsets[i])] = entry
    elif kind == "moved":
        for offset in offsets[real].tolist():
            mark.open.pop(offset, None)
    return lost > 0


def _start(broker: Broker, saved: c.Checkpoint, event: Event) -> None:
    epoch, offset = int(event.fields["epoch"]), min(int(event.fields["offset"]), broker.ready.next_offset)
    mark = saved.groups.setdefault(event.group, c.GroupMark(born=epoch))
    mark.epoch, mark.moves = epoch, moved(mark.moves, int(event.fields["since"]), offset)
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
    for i in real.tolist():
        entry = c.Open(int(seqs[i]), int(attempts[i]), int(until[i]), event.at_ms, consumer)
        mark.open[int(offsets[i])] = entry


def _apply_settlement(broker: Broker, saved: c.Checkpoint, event: Event) -> bool:
    mark = saved.groups.get(event.group)
    if event.fields["event"] in ("undead", "redead"):
        _apply_leaving(broker, saved, event)
        return False
    offsets, epoch, acked = event.array("offsets"), int(event.fields["epoch"]), event.fields["outcome"] == "acked"
    if not acked:
        saved.dead[event.group] += len(offsets) - int(event.fields["replaced"])
    if mark is None or epoch < mark.born:
        return False
    real, lost = _real(broker, offsets, event.array("seqs"))
    if epoch == mark.epoch:
        for offset in offsets[real].tolist():
            mark.open.pop(offset, None)
    mark.changed_ms = max(mark.changed_ms, event.at_ms)
    mark.settled += len(offsets) - lost if acked else 0
    return lost > 0


def _apply_leaving(broker: Broker, saved: c.Checkpoint, event: Event) -> None:
    """Dead letters were about to go, or stay after all. Which of them are still there is for the topic to see."""
    ids, letters, became = event.fields["ids"].decode().split("\0"), event.array("letters"), event.array("became")
    rows = zip(ids, letters.tolist(), became.tolist(), strict=True)
    if event.fields["event"] == "undead":
        broker.leaving += [Leaving(event.group, *row) for row in rows]
    else:
        stay = {(event.group, seq) for seq in letters.tolist()}
        broker.leaving = [letter for letter in broker.leaving if (letter.group, letter.seq) not in stay]
    saved.dead[event.group] += -len(letters) if event.fields["event"] == "undead" else len(letters)


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


def _held(broker: Broker, group: Group, offsets: I64, mark: c.GroupMark) -> Held:
    read, times = broker.ready.read(offsets)
    which = np.flatnonzero(read.good)
    attempts = np.array([mark.open[offset].attempt for offset in offsets[which].tolist()], np.int64)
    return delivery.columns(group.name, read, offsets, times, which, attempts)


def _state(broker: Broker) -> dict[str, Any]:
    """What a file of the reserve journal begins with: a checkpoint. Like any, it must not run ahead of its data."""
    broker.ready.sync()
    broker.history.sync()
    return c.encode(_checkpoint(broker))


def save(broker: Broker, folder: Path) -> None:
    """Sync everything, then write the checkpoint: it must never run ahead of its data."""
    broker.sync()
    c.write(broker.ready.door, folder, _checkpoint(broker))


def _checkpoint(broker: Broker) -> c.Checkpoint:
    marks = {name: c.mark_of(group) for name, group in broker.groups.items()}
    return c.Checkpoint(
        reserve=broker.reserve_log.position,
        history=broker.history.position,
        numbers=(broker.reserve_log.number, broker.history.number),
        ready_offset=broker.ready.next_offset,
        levels=broker.levels,
        specials=broker.specials,
        notices=broker.notices,
        cancelled={offset for offset in broker.cancelled if offset >= broker.ready.first_offset},
        dead=broker.dead,
        groups=marks,
    )
