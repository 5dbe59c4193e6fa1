"""Saving a checkpoint of a Broker: sync its logs, then replace the file `offset`. Its content is in `checkpoint`.

A checkpoint must never run ahead of its data, so the syncs come first, and a failed sync leaves the old file in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bson.int64 import Int64

from turtlemq.broker import checkpoint as c
from turtlemq.broker.logs import Logs
from turtlemq.broker.ready_recover import clean_end
from turtlemq.broker.state import BrokerState
from turtlemq.model import Progress
from turtlemq.segment import format as f
from turtlemq.storage.door import Door


def clean_mark(logs: Logs) -> dict[str, Any]:
    """The entry of the clean-shutdown mark: where the files end."""
    ends = {journal.kind: [Int64(at) for at in journal.position] for journal in logs.journals}
    return {"ready": clean_end(logs.ready).fields(), **ends}


def state_for_journal(state: BrokerState) -> dict[str, Any]:
    """A checkpoint for the reserve journal, after a sync of the logs that it speaks of."""
    state.logs.ready.sync()
    state.logs.history.sync()
    return _capture(state)()


@dataclass(slots=True)
class LogSync:
    """A sync of the logs under way: `run` may be called on any thread, while the Broker goes on."""

    syncs: list[tuple[str, int, Path]]  # kind of log, a descriptor for this sync only, file
    ready: tuple[Progress, int]  # of the ready log, when the sync began
    numbers: tuple[int, int]  # of the next events, then
    failed: dict[str, OSError] = field(default_factory=dict)  # by kind of log

    def run(self, door: Door) -> None:
        """Sync the logs. Touches nothing but files."""
        for kind, fd, path in self.syncs:
            try:
                if not self.failed:
                    door.sync(fd, path)
            except OSError as error:
                self.failed[kind] = error
            finally:
                door.close(fd)


@dataclass(slots=True)
class Save:
    """A checkpoint on its way to the disk: `run` may be called on any thread, while the Broker goes on."""

    path: Path
    encode: Callable[[], dict[str, Any]]  # the fields of the checkpoint: 100 ms and more if very many messages are in flight
    logs: LogSync

    def run(self, door: Door) -> None:
        """Sync the logs, then replace the checkpoint file. Touches nothing but files and the captured state."""
        self.logs.run(door)
        if not self.logs.failed:
            door.replace(self.path, f.encode_checked(self.encode()))


def begin_sync(state: BrokerState) -> LogSync:
    """A sync of everything so far. `LogSync.run` does it; then call `end_sync`."""
    logs = state.logs
    for log in logs.all:
        log.refuse_if_stopped()
    syncs = _sync_targets(logs)
    logs.owes_sync = False
    return LogSync(syncs, (logs.ready.progress, logs.ready.next_offset), (logs.reserve.number, logs.history.number))


def begin_save(state: BrokerState) -> Save:
    """A checkpoint of this moment. `Save.run` writes it; then call `end_sync`."""
    logs = state.logs
    encode, syncing = _capture(state), begin_sync(state)
    logs.note_saved()
    return Save(logs.ready.folder / c.FILE, lambda: {"topic": logs.ready.topic, **encode()}, syncing)


def _sync_targets(logs: Logs) -> list[tuple[str, int, Path]]:
    """A descriptor for each log with unsynced content; all of them, or none if one cannot be opened."""
    syncs: list[tuple[str, int, Path]] = []
    try:
        syncs.extend((log.kind, *unsynced) for log in logs.all if (unsynced := log.sync_target()) is not None)
    except BaseException:
        for _, fd, _ in syncs:
            logs.ready.door.close(fd)
        raise
    return syncs


def end_sync(state: BrokerState, done: LogSync) -> None:
    """Note how far the logs are durable after a sync. Raises if it failed: that log accepts no more writes."""
    logs = state.logs
    for log in logs.all:
        if log.kind in done.failed:
            raise log.stop(done.failed[log.kind])
    logs.ready.note_synced(*done.ready)
    for journal, number in zip(logs.journals, done.numbers, strict=True):
        journal.note_synced(number)


def save(state: BrokerState) -> None:
    """Write a checkpoint at once."""
    saving = begin_save(state)
    saving.run(state.logs.ready.door)
    end_sync(state, saving.logs)


def _capture(state: BrokerState) -> Callable[[], dict[str, Any]]:
    """The state of this moment, and the positions of the logs; the function encodes it, on any thread."""
    logs, visibility = state.logs, state.visibility
    checkpoint = c.Checkpoint(
        reserve=logs.reserve.position,
        history=logs.history.position,
        numbers=(logs.reserve.number, logs.history.number),
        ready_offset=logs.ready.next_offset,
        newest_seq=state.newest_seq(),
        has_priorities=visibility.has_priorities,
        has_restricted=visibility.has_restricted,
        notices=visibility.notices,
        cancelled=visibility.cancelled,
        cancelled_retries=visibility.cancelled_retries,
        dead_counts=state.dead_counts,
    )
    return c.capture(checkpoint, state.groups)
