"""Opening a Broker: open its logs, read the last checkpoint, and replay the events behind it.

If the checkpoint or events behind it are damaged, opening begins at the last checkpoint that a file of the reserve journal holds,
or with the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turtlemq.broker import checkpoint as c
from turtlemq.broker import events
from turtlemq.broker.broker import Broker
from turtlemq.broker.failures import EndedDelivery, Failures
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.journal import Event, Journal
from turtlemq.broker.logs import Logs
from turtlemq.broker.message_columns import columns
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.ready_readonly import CleanEnd
from turtlemq.broker.ready_recover import open_ready
from turtlemq.broker.replay import Replay
from turtlemq.broker.results import Interrupted
from turtlemq.broker.retry_queue import Retry
from turtlemq.broker.save import state_for_journal
from turtlemq.broker.state import BrokerState
from turtlemq.broker.visibility import Visibility, restricted_for_others
from turtlemq.model import I64, Damage
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door


@dataclass(frozen=True, slots=True)
class Opened:
    """A Broker that was opened, and the work that is left to its topic."""

    broker: Broker
    behind: bool  # the last checkpoint is out of date: save one
    torn: bool  # the journals name documents or events that are lost: write a checkpoint into the journal as well
    interrupted: Interrupted


def open_broker(
    door: Door,
    folder: Path,
    topic: str,
    settings: Settings,
    store_dead: Callable[[Sequence[EndedDelivery]], int],
    schedule_retries: Callable[[Sequence[EndedDelivery]], None],
    newest_seq: Callable[[], int],
    clean: dict[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Opened:
    """Open the Broker of a topic, or create it. `store_dead`, `schedule_retries`: see `Failures`. `newest_seq`: of the Index.
    `clean`: what `Broker.close` returned at the last proper stop. `seed`: for the hashes of ids, the same as in the Index."""
    door.make_folder(folder)
    ready = ReadyLog(door, folder, topic, settings, seed)
    open_ready(ready, None if clean is None else CleanEnd.read(clean["ready"]))
    reserve, history = (Journal(door, folder, topic, kind, settings) for kind in ("reserve", "history"))
    logs = Logs(ready, reserve, history)
    ends = {kind: (int(clean[kind][0]), int(clean[kind][1])) for kind in ("reserve", "history")} if clean else {}
    saved, leases, derived = _begin(logs, c.read(door, folder), ends.get("reserve"))
    settlements = _from(history.open(saved.history, ends.get("history")), saved.numbers[1])
    reserve.number, history.number = max(reserve.number, saved.numbers[0]), max(history.number, saved.numbers[1])

    state = BrokerState(logs, Visibility(ready), settings, newest_seq)
    replay = Replay(saved, state.visibility, reserve.number)
    replay.run(leases, settlements)
    cancels = any(
        event.fields["event"] == events.CANCEL for event in settlements
    )  # they count fetches and moves that may be lost
    damaged = bool(ready.damage)  # for which groups a damaged document was is unknown
    replay.finish(recount=replay.torn or derived or damaged or cancels)
    state.dead_counts = saved.dead_counts
    state.groups |= {name: _group(ready, name, mark) for name, mark in saved.groups.items()}
    reserve.make_checkpoint = lambda: state_for_journal(state)
    logs.note_saved()  # nearly: the topic saves the replayed events, if there are any, see `Opened.behind`
    broker = Broker(state, Failures(state, store_dead, schedule_retries))
    return Opened(broker, bool(leases or settlements), replay.torn, replay.interrupted)


def _begin(logs: Logs, saved: c.Checkpoint | None, clean: tuple[int, int] | None) -> tuple[c.Checkpoint, list[Event], bool]:
    """The checkpoint at which replay begins, the events of the reserve journal from there on, and whether the checkpoint was
    derived from the journal: then it may count documents that retention has removed since."""
    reserve, history, ready = logs.reserve, logs.history, logs.ready
    for journal in logs.journals:
        journal.find_files()
    if saved is not None and reserve.holds(saved.reserve) and history.holds(saved.history):
        leases = _from(reserve.open(saved.reserve, clean), saved.numbers[0])
        complete = [event.number for event in leases] == list(range(saved.numbers[0], saved.numbers[0] + len(leases)))
        return (None if complete else _last_state(leases, history)) or (saved, leases, False)
    for journal, at in ((reserve, saved.reserve), (history, saved.history)) if saved is not None else ():
        if not journal.holds(at):
            reason = "events are gone: the checkpoint knew them"
            journal.damage.append(Damage(names.segment(journal.kind, at[0]), at[1], 0, reason))
    leases = reserve.open((0, 0), clean)
    empty = c.Checkpoint(has_restricted=ready.next_offset > 0, has_priorities=ready.next_offset > 0)
    return _last_state(leases, history) or (empty, leases, True)


def _last_state(leases: list[Event], history: Journal) -> tuple[c.Checkpoint, list[Event], bool] | None:
    """The last checkpoint among these events, and the events behind it, as `_begin` returns them."""
    for found in reversed(events.find_states([(event.number, event.fields) for event in leases])):
        state = c.decode(events.join_state([leases[i].fields for i in found]))
        state.numbers = (leases[found[-1]].number + 1, state.numbers[1])
        if history.holds(state.history):
            return state, leases[found.stop :], True
    return None


def _from(journal: list[Event], number: int) -> list[Event]:
    """Events from a number on. An older one among them is a copy, written where it does not belong."""
    return [event for event in journal if event.number >= number]


def _group(ready: ReadyLog, name: str, mark: c.GroupMark) -> Group:
    """A group with its leases and retries, from a checkpoint and the documents that it names."""
    group = Group(name, mark.epoch, mark.born, mark.moves)
    first = ready.first_offset
    group.start(first)
    group.cursors = {level: max(cursor, first) for level, cursor in zip(sorted(group.cursors), mark.cursors, strict=True)}
    group.unfetched, group.settled, group.changed_ms = mark.unfetched, mark.settled, mark.changed_ms
    by_lease: dict[tuple[int, int, str, int], list[int]] = {}
    for offset, entry in mark.open.items():
        if entry.attempts:
            group.attempts[offset] = entry.attempts
        if entry.is_retry:
            group.retries.add(offset, Retry(entry.until_ms, entry.attempt, entry.error))
        else:
            by_lease.setdefault((entry.until_ms, entry.reserved_ms, entry.consumer, entry.event), []).append(offset)
    for (until_ms, reserved_ms, consumer, event), offsets in sorted(by_lease.items()):
        messages = _messages(ready, name, np.array(sorted(offsets)), mark)
        if len(messages):
            group.lease(messages, reserved_ms, until_ms, consumer, event)
    return group


def _messages(ready: ReadyLog, name: str, offsets: I64, mark: c.GroupMark) -> MessageColumns:
    """The undamaged messages at these offsets. Where the log is damaged, one may hold another document by now: no notice, and no
    retry of another group, was leased."""
    read, times = ready.read(offsets)
    which = np.flatnonzero(read.good & ~restricted_for_others(name, mark, read))
    attempts = np.array([mark.open[offset].attempt for offset in offsets[which].tolist()], np.int64)
    return columns(name, read, offsets, times, which, attempts)
