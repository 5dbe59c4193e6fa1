"""Saving a checkpoint of a Broker: sync its files, then replace the file `offset`. What the file holds is in `checkpoint`.

A checkpoint must never run ahead of its data, so the syncs come first, and a failed sync leaves the old file in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bson.int64 import Int64

from turtlemq.broker import checkpoint as c
from turtlemq.broker.broker import Broker
from turtlemq.broker.ready_recover import Clean
from turtlemq.model import Progress
from turtlemq.segment import format as f
from turtlemq.storage.door import Door


def clean_mark(broker: Broker) -> dict[str, Any]:
    """Where the files end, for the clean-shutdown mark."""
    ends = {journal.kind: [Int64(at) for at in journal.position] for journal in (broker.reserve_log, broker.history)}
    return {"ready": Clean.of(broker.ready), **ends}


def state(broker: Broker) -> dict[str, Any]:
    """What a file of the reserve journal begins with: a checkpoint. Like any, it must not run ahead of its data."""
    broker.ready.sync()
    broker.history.sync()
    return c.encode(_checkpoint(broker), broker.groups)


@dataclass(slots=True)
class Save:
    """A checkpoint on its way to the disk, by whatever thread: files to sync, then the checkpoint of the moment when it was made.
    It must never run ahead of its data."""

    path: Path
    data: bytes
    syncs: list[tuple[str, int, Path]]  # kind, a descriptor of its own, file
    ready: tuple[Progress, int]
    numbers: tuple[int, int]
    failed: dict[str, OSError] = field(default_factory=dict)

    def run(self, door: Door) -> None:
        """Touches nothing but files."""
        for kind, fd, path in self.syncs:
            try:
                if not self.failed:
                    door.sync(fd, path)
            except OSError as error:
                self.failed[kind] = error
            finally:
                door.close(fd)
        if not self.failed:
            door.replace(self.path, self.data)


def begin_save(broker: Broker, folder: Path) -> Save:
    """Where everything stands now. `Save.run` may take its time; then `end_save`."""
    logs = (broker.ready, broker.reserve_log, broker.history)
    for log in logs:
        log.refuse_if_stopped()
    data = f.encode_checked({"topic": broker.ready.topic, **c.encode(_checkpoint(broker), broker.groups)})
    syncs = [(log.kind, *unsynced) for log in logs if (unsynced := log.unsynced()) is not None]
    numbers = (broker.reserve_log.number, broker.history.number)
    broker.note_saved()
    return Save(folder / c.FILE, data, syncs, (broker.ready.progress, broker.ready.next_offset), numbers)


def end_save(broker: Broker, done: Save) -> None:
    """What was unsynced then is durable now. Raises if a sync failed: then that log is not written any more."""
    for log in (broker.ready, broker.reserve_log, broker.history):
        if log.kind in done.failed:
            raise log.stop(done.failed[log.kind])
    broker.ready.synced(*done.ready)
    for journal, number in zip((broker.reserve_log, broker.history), done.numbers, strict=True):
        journal.synced(number)


def save(broker: Broker, folder: Path) -> None:
    """All of it at once."""
    saving = begin_save(broker, folder)
    saving.run(broker.ready.door)
    end_save(broker, saving)


def _checkpoint(broker: Broker) -> c.Checkpoint:
    return c.Checkpoint(
        reserve=broker.reserve_log.position,
        history=broker.history.position,
        numbers=(broker.reserve_log.number, broker.history.number),
        ready_offset=broker.ready.next_offset,
        newest_seq=broker.newest_seq(),
        levels=broker.levels,
        specials=broker.specials,
        notices=broker.notices,
        cancelled=broker.cancelled,
        cancelled_retries=broker.cancelled_retries,
        dead_counts=broker.dead_counts,
    )
